"""A small job that transcripts of the protocol command (`tests/core/transcript.py`).

The job is the core's machines in the replicas of `sim/explore/node.py`, without processes or time:

- Nothing happens but by a command. Messages of leaders and of the coordinator wait on FIFO links
  until `deliver`, sums until `reduce`, timers until `timer`.
- A pass ends only by `compute`, so a plan that arrives before that joins the pass.
- A replica obeys its own orders at once.

INV-1 to INV-7 are checked at every fact (`core/invariants.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from megatron_recover.core import coordinator, invariants
from megatron_recover.core.label import label_of
from megatron_recover.core.membership_messages import Entered, Hello, Loss, LossKind
from megatron_recover.core.plan import Operation
from megatron_recover.core.rank_messages import RankSaving, Stop
from megatron_recover.core.replica import LinkLost, WaitExpired, waiting_for
from megatron_recover.core.tree import TREE_ABOVE
from megatron_recover.core.values import ReplicaId, Shape, Work
from megatron_recover.sim.explore import node as nodes
from megatron_recover.sim.explore.network import address
from megatron_recover.sim.explore.threads import Threads
from megatron_recover.sim.multiset import Multiset, add
from tests.core.transcript_printer import Printer

Ids = tuple[ReplicaId, ...]
COORDINATOR = -1

OF_COORDINATOR = ("generation", "roster", "step", "entered", "reason", "evidence", "saves", "losses", "finished", "over")
OF_REPLICA = ("phase", "generation", "step", "contributions", "held", "blocked", "trusted_from", "void", "ended")


class Mistake(Exception):
    """A transcript has a command that does not exist, or that cannot be carried out."""


class Sent(NamedTuple):
    """A message on a link."""

    source: ReplicaId
    to: ReplicaId
    message: Any

    def __str__(self) -> str:
        return f"{_name(self.source)} -> {_name(self.to)}"


class Job:
    """A job, and its network. The methods `do_...` are the commands of transcripts."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        """Output of the command that is being carried out."""
        self.printer = Printer()
        self.threads = Threads(passes_last=True, miscounts=True)
        self.nodes: dict[ReplicaId, nodes.Node] = {}
        """Replicas whose processes live, also those that are fenced."""
        self.num_replicas = 0
        self.coordinator = coordinator.CoordinatorState(coordinator.MembershipSettings(0))
        self.sent: list[Sent] = []
        """Messages on their way, in the order in which they were sent."""
        self.data: dict[tuple[object, ...], Multiset] = {}
        """What ranks have handed to sums and copies."""
        self.timers: list[str] = []
        """Timers that run, in the order in which they were armed."""
        self.history = invariants.History(Shape(0, ()))

    # --- commands ---

    def do_job(
        self, *, replicas: int, microbatches: int, ranks: int = 1, buckets: int = 1, min: int = 1, tree_above: int = TREE_ABOVE
    ) -> None:
        """Make a job whose buckets are spread over the ranks of each replica."""
        holders = [_find_holders(bucket, buckets, ranks) for bucket in range(buckets)]
        shape, work = Shape(ranks, tuple(holders)), Work("train 1", microbatches, tuple(range(buckets)))
        self.nodes = {number: nodes.new_node(number, shape, (work,), tree_above) for number in range(replicas)}
        self.num_replicas = replicas
        self.coordinator = coordinator.CoordinatorState(coordinator.MembershipSettings(replicas, min))
        self.history = invariants.History(shape)
        self.print(self.printer.tell(shape))

    def do_hello(self, replicas: Ids = ()) -> None:
        """Send `Hello` from replicas that are ready."""
        for number in self.find(replicas):
            self.send(number, COORDINATOR, Hello(number, "same"))

    def do_start(self) -> None:
        """Let all replicas enter generation 1: `hello` and `deliver`, without their output."""
        self.do_hello()
        self.do_deliver()
        self.lines = [f"{number}  {self.list_state(node)}" for number, node in sorted(self.nodes.items())]

    def do_deliver(self, *, from_: Ids = (), to: Ids = ()) -> None:
        """Deliver messages, and those that follow from them, until none is left on these links."""
        while found := next((s for s in self.sent if s.source in (from_ or (s.source,)) and s.to in (to or (s.to,))), None):
            self.sent.remove(found)
            self.print(f"{found}  {self.printer.tell(found.message, of=found.source)}")
            if found.to == COORDINATOR:
                self.coordinate(found.message)
            elif not self.stimulate(found.to, found.message):
                self.print("  (ignored)")

    def do_begin(self, replicas: Ids = (), *, work: str = "train") -> None:
        """Let training threads arrive at a step; `work=save` compares all state before a save."""
        if work not in ("train", "save"):
            raise Mistake(f"the work of a step is 'train' or 'save', not {work!r}")
        for number in self.find(replicas, nodes.Node.may_begin, "begin a step"):
            leader, first = self.nodes[number].leader, self.nodes[number].work[0]
            before = self.nodes[number].work[: leader.step]
            trained = sum(label_of(one.label).is_training for one in before)
            trained -= leader.void is not None and leader.void.gives_up and leader.void.step < leader.step
            if work == "train":
                new = Work(f"train {trained + 1}", first.num_microbatches, tuple(range(len(leader.shape.bucket_ranks))))
            else:
                new = Work(f"{work} {trained}", first.num_microbatches, first.buckets[-1:], digests=True)
            self.arrive(number, (*before, new))

    def do_end(self, replicas: Ids = ()) -> None:
        """Let training threads arrive at the end of training."""
        for number in self.find(replicas, nodes.Node.may_begin, "end"):
            self.arrive(number, self.nodes[number].work[: self.nodes[number].leader.step])

    def do_compute(self, replicas: Ids = ()) -> None:
        """End the pass: rank 0 begins the last forward that it knows of."""
        for number in self.find(replicas, lambda one: one.ranks[0].may_end(), "end a pass"):
            self.stimulate(number, nodes.AskClose())

    def do_reduce(self, replicas: Ids = (), *, bucket: int = -1) -> None:
        """Complete sums and copies that all their members have reached, at these replicas."""
        is_done = False
        while not is_done:
            completed = [self.complete(*pending, bucket) for pending in self.list_pending(replicas)]
            is_done = not any(completed)

    def do_stall(self, replica: ReplicaId, *, for_: Ids) -> None:
        """Give up a sum in which a replica has waited in vain for others."""
        pending = self.list_pending((replica,))
        if not pending:
            raise Mistake(f"replica {replica} waits in no sum")
        for number, position, _ in pending:
            self.stimulate(number, nodes.Stall(position, for_))

    def do_expire(self, replica: ReplicaId) -> None:
        """Let a replica's wait for a status or vote run out."""
        for number in self.find((replica,), lambda one: bool(waiting_for(one.leader)), "wait for a status or vote"):
            leader = self.nodes[number].leader
            self.stimulate(number, WaitExpired(leader.generation, leader.step))

    def do_kill(self, replica: ReplicaId) -> None:
        """Let a replica die with all that is on its links; its agent sees it before its peers."""
        self.find((replica,))
        del self.nodes[replica]
        self.lose(lambda sent: replica in (sent.source, sent.to))
        lost = coordinator.ReplicaLost(Loss(replica, LossKind.PROCESS_ENDED))
        self.print(self.printer.tell(lost))
        self.coordinate(lost)
        for peer in sorted(self.nodes):
            self.stimulate(peer, LinkLost(replica))

    def do_break_link(self, one: ReplicaId, other: ReplicaId) -> None:
        """Break the link between two leaders, which loses what is on it."""
        self.find((one, other))
        self.lose(lambda sent: {sent.source, sent.to} == {one, other})
        self.stimulate(one, LinkLost(other))
        self.stimulate(other, LinkLost(one))

    def do_timer(self, kind: str) -> None:
        """Let the newest timer of a kind run out: follow, grace, trouble, save, finish, ..."""
        timer = next((timer for timer in reversed(self.timers) if timer.split()[0] == kind), None)
        if timer is None:
            raise Mistake(f"no timer {kind!r} runs; these do: {', '.join(self.timers) or 'none'}")
        self.timers.remove(timer)
        fired = coordinator.TimerFired(timer)
        self.print(self.printer.tell(fired))
        self.coordinate(fired)

    def do_save(self, replica: ReplicaId) -> None:
        """Begin to save a checkpoint."""
        self.stimulate(*self.find((replica,)), RankSaving(0, False))

    def do_saved(self, replica: ReplicaId) -> None:
        """End the save of a checkpoint."""
        self.stimulate(*self.find((replica,)), RankSaving(0, True))

    def do_miscount(self, replica: ReplicaId) -> None:
        """Count a microbatch of a step twice, until the step is applied or void."""
        self.stimulate(*self.find((replica,), nodes.Node.may_miscount, "miscount now"), nodes.Miscount())

    def do_drift(self, replica: ReplicaId) -> None:
        """Change the parameters of a replica silently, between two steps."""
        self.stimulate(*self.find((replica,), nodes.Node.between_steps, "drift within a step"), nodes.Drift())

    def do_state(self) -> None:
        """Print the machines, and the messages on their way."""
        self.print(f"coordinator  {self.printer.list_fields(self.coordinator, only=OF_COORDINATOR)}")
        for number, node in sorted(self.nodes.items()):
            self.print(f"{number}  {self.list_state(node)}")
        for sent in self.sent:
            self.print(f"on its way: {sent}  {type(sent.message).__name__}")

    # --- how they are carried out ---

    def find(self, replicas: Ids, can: Callable[[nodes.Node], bool] = lambda _: True, deed: str = "") -> list[ReplicaId]:
        """Return these replicas, or all living ones that `can`.

        Raise Mistake if one of these is dead or cannot do the `deed`.
        """
        for number in replicas:
            if not 0 <= number < self.num_replicas:
                raise Mistake(f"there is no replica {_name(number)}")
            if number not in self.nodes:
                raise Mistake(f"replica {number} is dead")
            if not can(self.nodes[number]):
                raise Mistake(f"replica {number} cannot {deed}")
        return list(replicas) or [number for number in sorted(self.nodes) if can(self.nodes[number])]

    def list_state(self, node: nodes.Node) -> str:
        """Return what a reader wants to know of a replica's leader."""
        return self.printer.list_fields(node.leader, only=OF_REPLICA)

    def print(self, line: str) -> None:
        self.lines.append(line)

    def send(self, source: ReplicaId, to: ReplicaId, message: Any) -> None:
        """Put a message on its link. What is sent to a dead replica is lost."""
        self.sent.append(Sent(source, to, message))
        self.lose(lambda sent: sent.to != COORDINATOR and sent.to not in self.nodes)

    def lose(self, is_lost: Callable[[Sent], bool]) -> None:
        """Lose messages that are on their way."""
        for sent in self.sent:
            if is_lost(sent):
                self.print(f"lost: {sent}  {type(sent.message).__name__}")
        self.sent = [sent for sent in self.sent if not is_lost(sent)]

    def observe(self, who: ReplicaId, fact: invariants.Fact) -> None:
        """Check the invariants, and print a fact unless its message says the same."""
        if not isinstance(fact, Entered | invariants.Read | invariants.Digested):
            shown = fact.plan if isinstance(fact, invariants.Planned) else fact
            if isinstance(fact, invariants.Applied):
                shown = replace(fact, digest=None)
            self.print(f"  {_name(who)}: {self.printer.tell(shown, of=who)}")
        self.history = invariants.observe(self.history, fact)

    def coordinate(self, message: coordinator.Input) -> None:
        """Feed the coordinator."""
        before = self.coordinator
        self.coordinator, effects = coordinator.step(before, message)
        for effect in effects:
            if isinstance(effect, coordinator.Announce):
                self.observe(COORDINATOR, invariants.formed(effect.generation))
                for number in effect.generation.roster:
                    self.send(COORDINATOR, number, effect.generation)
                continue
            self.print(f"  coordinator: {self.printer.tell(effect)}")
            if isinstance(effect, coordinator.Arm):
                self.timers.append(effect.timer)
            elif isinstance(effect, coordinator.EndJob):
                for number in sorted(self.nodes):
                    self.send(COORDINATOR, number, Stop(effect.exit_code, effect.reason))
        if not effects and self.coordinator == before:
            self.print("  (ignored)")

    def stimulate(self, number: ReplicaId, stimulus: Any) -> bool:
        """Feed a replica, and let all its ranks obey. Return whether anything changes."""
        before = self.nodes[number]
        outcome = self.threads.stimulate(before, stimulus)
        after = self.nodes[number] = outcome.node
        for fact in outcome.facts:
            self.observe(number, fact)
        was_in_pass, in_pass = before.ranks[0].machine.in_pass, after.ranks[0].machine.in_pass
        if was_in_pass != in_pass:
            self.print(f"  {number}: {'opens' if in_pass else 'closes'} a pass")
        elif in_pass and any(isinstance(fact, invariants.Planned) and fact.plan.computes for fact in outcome.facts):
            self.print(f"  {number}: computes this in the pass that runs")
        for report in outcome.reports:
            self.send(number, COORDINATOR, report)
        for message, to in outcome.messages:
            if isinstance(message, nodes.Addend | nodes.Copy):
                self.data[address(message)] = message.counts
                continue
            for peer in to:
                self.send(number, peer, message)
        for position, one in enumerate(after.ranks):
            if one.orders:
                self.stimulate(number, nodes.CarryOut(position))
                break
        return bool(outcome.facts or outcome.reports or outcome.messages) or after != before

    def arrive(self, number: ReplicaId, work: tuple[Work, ...]) -> None:
        """Let all ranks arrive at the next step of `work`, or at the end after it."""
        self.nodes[number] = replace(self.nodes[number], work=work)
        self.stimulate(number, nodes.BeginStep())
        for position in self.nodes[number].to_arrive():
            self.stimulate(number, nodes.Arrive(position))

    def list_pending(self, replicas: Ids) -> list[tuple[ReplicaId, int, Operation]]:
        """Return (replica, rank, operation) of the operations that these replicas have reached."""
        return [(number, *pending) for number in self.find(replicas) for pending in nodes.pending(self.nodes[number])]

    def complete(self, number: ReplicaId, position: int, operation: Operation, bucket: int) -> bool:
        """Complete an operation if it is one of `bucket` (-1: any) and all data are there."""
        version = operation.version if operation.source is not None else 0
        sources = operation.members if operation.source is None else (operation.source,)
        where = position, operation.generation, operation.step, operation.bucket, version
        parts = [self.data[source, *where] for source in sources if (source, *where) in self.data]
        if len(parts) < len(sources) or bucket not in (-1, operation.bucket):
            return False
        return self.stimulate(number, nodes.Complete(position, add(parts)))


def _name(number: ReplicaId) -> str:
    return "coordinator" if number == COORDINATOR else str(number)


def _find_holders(bucket: int, buckets: int, ranks: int) -> tuple[int, ...]:
    """Return the ranks that hold a bucket: an even split of what there is more of."""
    if buckets >= ranks:
        return (bucket * ranks // buckets,)
    return tuple(rank for rank in range(ranks) if rank * buckets // ranks == bucket)
