"""States of a small job around the core's own machines, and the state after each input.

`sim/explore/moves.py` has what can happen in a state.

The network keeps every message that can still matter. It may deliver any of them to anyone at any
time, repeatedly or never. So messages may be lost, late, repeated or reordered, which is more than
TCP allows. A message that is forwarded in a tree arrives only at the replicas to which it goes.

Scenarios with `links` have FIFO links instead, for all messages but data (`Addend`, `Copy`). A link
delivers each message once, and may break and lose what is on it. There, a message that the machine
ignores is really gone.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from msgspec.structs import replace

from megatron_recover.core import coordinator, generations, invariants, replica
from megatron_recover.core.blame import Evidence, with_report
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import (
    AddRequests,
    Entered,
    Hello,
    LeaderMessage,
    NewcomersProven,
    ReplicaLeaving,
    TurnedAway,
    Void,
)
from megatron_recover.core.plan import Operation
from megatron_recover.core.replica_state import ReplicaPhase
from megatron_recover.core.values import Generation, ReplicaId, Shape, Work
from megatron_recover.sim.explore import network
from megatron_recover.sim.explore.judging import held_rightly, judged
from megatron_recover.sim.explore.network import Faults, JobState, Numbering
from megatron_recover.sim.explore.node import (
    Addend,
    Arrive,
    AskClose,
    BeginStep,
    CarryOut,
    Copy,
    Message,
    Node,
    Stimulus,
    TakeUp,
    new_node,
    pending,
)
from megatron_recover.sim.explore.scenario import Scenario
from megatron_recover.sim.explore.threads import Threads
from megatron_recover.sim.multiset import Multiset, add

_LATE = ReplicaLeaving | TurnedAway | NewcomersProven
"""Reports that reach the coordinator at any later time. They have no effect in a newer
generation."""

Links = tuple[tuple[int, int, tuple[int, ...]], ...]
"""Links as in `JobState.links`."""


class Own(NamedTuple):
    """Steps that a node can take by itself."""

    generation: Generation
    busy: bool
    """True while orders are on their way to a rank."""
    stimuli: tuple[Stimulus, ...]
    pending: tuple[tuple[int, Operation], ...]
    """(rank, operation) of every operation at which a rank has arrived."""


class Effect(NamedTuple):
    """An `Outcome` with numbers for its node and messages."""

    node: int
    messages: tuple[tuple[int, tuple[ReplicaId, ...]], ...]
    reports: tuple[LeaderMessage, ...]
    facts: tuple[invariants.Fact, ...]


Attempt = str | tuple[ReplicaId, Stimulus | int]
"""Text of a fault or of what happens at the coordinator or a reader; or a replica, and the stimulus
or the number of the message that reached it."""


class Space:
    """States of one scenario. The tables only remember results of pure functions of their keys."""

    def __init__(self, scenario: Scenario, threads: Threads | None = None, *, reduced: bool = True) -> None:
        """Prepare the exploration of a scenario.

        `reduced`: also leave out the moves that `moves.py` says are tried without it.
        """
        self.scenario = scenario
        self.threads = threads or Threads(
            slow=scenario.slow, passes_last=scenario.passes_last, paces=scenario.paces, miscounts=scenario.miscounts > 0
        )  # fmt: skip
        self.shape = Shape(scenario.num_ranks, scenario.bucket_ranks)
        self.nodes: Numbering[Node] = Numbering()
        self.messages: Numbering[Message] = Numbering()
        self.coordinators: Numbering[coordinator.CoordinatorState] = Numbering()
        self.inputs: Numbering[coordinator.Input] = Numbering()
        """Inputs that wait for a stopped coordinator, and reports of replicas that leave."""
        self.histories: Numbering[invariants.History] = Numbering()
        self.effects: dict[tuple[int, Stimulus | int], Effect] = {}
        self.needs: dict[tuple[int, bool], tuple[int, int]] = {}
        """Messages judged so far, and those that can still affect a node; by (node, is a
        member)."""
        self.observed: dict[tuple[int, tuple[invariants.Fact, ...]], int] = {}
        self.data: dict[tuple[object, ...], list[int]] = {}
        """Numbers of the `Addend`s and `Copy`s, by all fields but their counts."""
        self.transitions = 0
        self.stored: dict[int, tuple[int, int]] = {}
        """Messages judged so far, and messages that a node would only store; by node."""
        self.decisions: dict[tuple[int, coordinator.Input], tuple[int, tuple[coordinator.Effect, ...]]] = {}
        """State and effects of the coordinator after an input, by its state and the input."""
        self.own: dict[int, Own] = {}
        self.data_bits = 0
        """Bit set of the numbers of all `Addend`s and `Copy`s."""
        self.void: dict[int, int] = {}
        """Messages that are known to change nothing at a node; by node."""
        self.newest: dict[tuple[Generation, tuple[ReplicaId, ...], Generation, Void | None], list[int]] = {}
        """Numbers of the announcements, by the fields that matter here. Those of one entry differ
        only in requests to leave."""
        self.formed: dict[ReplicaId, int] = {}
        """Numbers of the nodes of newcomers, as they are formed."""
        self.reduced = reduced
        self.layered = reduced and not scenario.links and not (scenario.newcomers and scenario.alarms)
        self.attempt: Attempt = "the job starts"
        """Newest stimulus or timer that was tried, for the report of a violation."""

    # --- one step ---

    def initial(self) -> JobState:
        """Return the world in which generation 1 is announced and no member has entered it."""
        scenario = self.scenario
        buckets = tuple(range(len(scenario.bucket_ranks)))
        work = [
            Work(
                f"train {step}", scenario.microbatches, buckets[-1:] if step in scenario.of_last_bucket else buckets,
                step in scenario.digested,
            )
            for step in range(scenario.steps)
        ]  # fmt: skip
        least = scenario.min_replicas
        nodes = tuple(
            self.nodes.number(new_node(number, self.shape, work, scenario.tree_above, least))
            for number in range(scenario.replicas)
        )
        self.formed = {
            number: self.nodes.number(new_node(number, self.shape, work, scenario.tree_above, least, is_newcomer=True))
            for number in range(scenario.replicas, scenario.replicas + scenario.newcomers)
        }
        state = coordinator.CoordinatorState(
            coordinator.MembershipSettings(scenario.replicas, least, waits_for_newcomers=scenario.waits_for_newcomers)
        )
        world = JobState(
            self.coordinators.number(state),
            (*nodes, *(0 for _ in self.formed)),
            0,
            self.histories.number(invariants.History(self.shape, min_replicas=least)),
            Faults(
                scenario.crashes,
                scenario.suspicions,
                scenario.alarms,
                scenario.drifts,
                scenario.state_drifts,
                scenario.saves,
                scenario.late,
                scenario.stops,
                scenario.miscounts,
                scenario.readers,
                scenario.waits,
                scenario.leaves,
                scenario.newcomers,
                scenario.asks,
                scenario.newcomer_crashes,
                scenario.exits,
            ),
        )
        for number in range(scenario.replicas):
            world = self.coordinate(world, Hello(number, "same"))
        return world

    def coordinate(self, world: JobState, message: coordinator.Input) -> JobState:
        """Return the state after an input to the coordinator, or to its inbox while it is stopped.

        Of the effects, only announcements reach the network, and requests where it has links. A
        grace ends at once, unless operations take time to fail. `Moves` fires some of the other
        timers. Raises InvariantViolation as `judged` does, and for an announcement that breaks an
        invariant.
        """
        if world.is_dead:
            return world
        if world.stopped:
            return world._replace(inbox=(*world.inbox, self.inputs.number(message)))
        key = (world.coordinator, message)
        decision = self.decisions.get(key)
        if decision is None:
            state, effects = coordinator.step(self.coordinators[world.coordinator], message)
            decision = self.decisions[key] = self.coordinators.number(self.undated(state)), effects
        if decision[0] != world.coordinator:
            before, after = self.coordinators[world.coordinator], self.coordinators[decision[0]]
            world = judged(self.scenario, world._replace(coordinator=decision[0]), before, after, message)
        for effect in decision[1]:
            if isinstance(effect, coordinator.Announce):
                new = effect.generation
                numbers = self.newest.setdefault((new.generation, new.roster, new.trusted_from, new.void), [])
                if (number := self.messages.number(new)) not in numbers:
                    numbers.append(number)
                formed = (invariants.formed(new),)
                messages, links = self.post(world, -1, ((self.messages.number(new), new.roster),))
                history = self.observe(world.history, formed)
                # A report of an older generation has no effect.
                world = world._replace(history=history, messages=messages, links=links, leaving=())
            elif isinstance(effect, coordinator.Ask):
                if self.scenario.links:
                    asked = self.messages.number(AddRequests(effect.requests))
                    messages, links = self.post(world, -1, ((asked, (effect.replica,)),))
                    world = world._replace(messages=messages, links=links)
                elif world.nodes[effect.replica]:
                    world = self.stimulate(world, effect.replica, AddRequests(effect.requests))
            elif isinstance(effect, coordinator.Form):
                nodes = (*world.nodes[: effect.replica], self.formed[effect.replica], *world.nodes[effect.replica + 1 :])
                world = self.coordinate(world._replace(nodes=nodes), Hello(effect.replica, "same"))
            elif isinstance(effect, coordinator.Refuse):
                to = (effect.refused.newcomer, *((effect.member,) if effect.member is not None else ()))
                messages, links = self.post(world, -1, ((self.messages.number(effect.refused), to),))
                world = world._replace(messages=messages, links=links)
            elif isinstance(effect, coordinator.Arm) and effect.timer.startswith("grace"):
                if self.takes_time:
                    world = world._replace(grace=effect.timer)
                    continue
                world = self.coordinate(world, coordinator.TimerFired(effect.timer))
        return world

    def observe(self, before: int, facts: tuple[invariants.Fact, ...]) -> int:
        """Return the history after `facts`."""
        if not facts:
            return before
        key = (before, facts)
        number = self.observed.get(key)
        if number is None:
            history = self.histories[before]
            for fact in facts:
                history = invariants.observe(history, fact)
            number = self.observed[key] = self.histories.number(history)
        return number

    def post(self, world: JobState, source: int, messages: tuple[tuple[int, tuple[ReplicaId, ...]], ...]) -> tuple[int, Links]:
        """Return the network with more messages: `JobState.messages` and `JobState.links`."""
        bits = world.messages
        if not self.scenario.links:
            for number, _ in messages:
                bits |= 1 << number
            return bits, world.links
        links = {(a, b): queue for a, b, queue in world.links}
        for number, to in messages:
            if isinstance(self.messages[number], Addend | Copy):
                bits |= 1 << number
            else:
                for destination in to:
                    links[source, destination] = (*links.get((source, destination), ()), number)
        return bits, tuple((a, b, queue) for (a, b), queue in sorted(links.items()) if queue)

    def stimulate(self, world: JobState, number: ReplicaId, stimulus: Stimulus | int) -> JobState:
        """Return the world after a stimulus (or the message of that number) has reached a node."""
        key = (world.nodes[number], stimulus)
        effect = self.effects.get(key)
        if effect is None:
            what = self.messages[stimulus] if isinstance(stimulus, int) else stimulus
            outcome = self.threads.stimulate(self.nodes[world.nodes[number]], what)  # type: ignore[arg-type]
            held_rightly(outcome.node.leader)
            effect = self.effects[key] = Effect(
                self.nodes.number(outcome.node),
                tuple((self.message(message), to) for message, to in outcome.messages),
                outcome.reports,
                outcome.facts,
            )
        messages, links = self.post(world, number, effect.messages) if effect.messages else (world.messages, world.links)
        start = world
        same = effect.node == world.nodes[number] and (messages, links) == (world.messages, world.links)
        if same and not effect.reports:
            return world
        self.transitions += 1
        nodes = (*world.nodes[:number], effect.node, *world.nodes[number + 1 :])
        history = self.observe(world.history, effect.facts)
        world = world._replace(nodes=nodes, messages=messages, history=history, links=links)
        for report in effect.reports:
            if isinstance(report, _LATE):  # what comes with it may have an effect before it leads to a generation
                world = world._replace(leaving=tuple(sorted({*world.leaving, self.inputs.number(report)})))
                continue
            for before in world.leaving:  # a link keeps the order
                sent = self.inputs[before]
                if isinstance(sent, _LATE) and sent.replica == number:
                    world = self.reported(world, before)
            world = self.coordinate(world, self.blameless(report))
        return start if same and world == start else world  # a repeated report may change nothing

    def reported(self, world: JobState, leaving: int) -> JobState:
        """Return the world after a report `ReplicaLeaving` has reached the coordinator."""
        left = tuple(number for number in world.leaving if number != leaving)
        return self.coordinate(world._replace(leaving=left), self.inputs[leaving])

    def blameless(self, report: LeaderMessage) -> LeaderMessage:
        """Return a report without `waited_for` if operations take no time to fail.

        The coordinator then decides nothing by these waits, because the time for that never passes.
        """
        is_void = isinstance(report, Entered) and not self.takes_time
        return replace(report, waited_for=(), for_votes=False) if is_void else report

    def undated(self, state: coordinator.CoordinatorState) -> coordinator.CoordinatorState:
        """Return the state with all evidence as of one generation, if nothing depends on it.

        That is so where operations take no time to fail: see `blameless`.
        """
        evidence = Evidence(overdue=state.evidence.overdue)
        for report in () if self.takes_time else state.evidence.reports:
            evidence = with_report(evidence, report.accuser, report.accused, 0)
        return state if self.takes_time else replace(state, evidence=evidence)

    @property
    def takes_time(self) -> bool:
        """True if operations take time to fail, so that members accuse each other."""
        return bool(self.scenario.broken or self.scenario.readers)

    def deliverable(self, bits: int, name: int) -> int:
        """Return the messages that may change a node."""
        bits &= ~self.data_bits & ~self.void.get(name, 0)
        if len(self.nodes[name].leader.roster) > self.scenario.tree_above:
            for number in network.numbers(bits):
                if not network.reaches(self.messages[number], self.nodes[name].leader):
                    self.void[name] = self.void.get(name, 0) | 1 << number
                    bits &= ~(1 << number)
        return bits

    def own_steps(self, name: int) -> Own:
        """Return the steps that a node can take by itself."""
        own = self.own.get(name)
        if own is None:
            node = self.nodes[name]
            leader, stimuli = node.leader, list[Stimulus]()
            if node.may_begin():
                stimuli.append(BeginStep())
            stimuli += [Arrive(position) for position in node.to_arrive()]
            stimuli += [CarryOut(position) for position, one in enumerate(node.ranks) if one.orders]
            if node.ranks[0].may_end():
                stimuli.append(AskClose())
            if leader.close_waits and leader.hold is not None:
                stimuli.append(replica.HoldExpired(leader.hold.label))
            if self.threads.slow:
                stimuli += [TakeUp(position) for position, one in enumerate(node.ranks) if one.can_take()]
            busy = any(one.orders for one in node.ranks)
            own = self.own[name] = Own(leader.generation, busy, tuple(stimuli), tuple(pending(node)))
        return own

    def take(self, world: JobState, number: ReplicaId, stimulus: Stimulus | int) -> JobState | None:
        """Return the world after a stimulus, or None if it changes nothing."""
        self.attempt = number, stimulus
        if self.scenario.links and isinstance(stimulus, int):
            return self.stimulate(network.received(world, number, stimulus), number, stimulus)
        after = self.stimulate(world, number, stimulus)
        if after is not world:
            return after
        name = world.nodes[number]
        if isinstance(stimulus, int) and not self.effects[name, stimulus].reports:  # a later report may have an effect
            self.void[name] = self.void.get(name, 0) | 1 << stimulus
        return None

    def message(self, message: Message) -> int:
        """Return the number of a message, and note it if it carries data."""
        number = self.messages.number(message)
        if isinstance(message, Addend | Copy):
            self.data_bits |= 1 << number
            numbers = self.data.setdefault(network.address(message), [])
            if number not in numbers:
                numbers.append(number)
        return number

    def delivered(self, world: JobState, position: int, operation: Operation) -> Multiset | None:
        """Return what an operation would deliver; None while a sender reads or has sent no data."""
        version = operation.version if operation.source is not None else 0
        parts = []
        for member in operation.members if operation.source is None else (operation.source,):
            if member in world.reading:
                return None
            address = (member, position, operation.generation, operation.step, operation.bucket, version)
            numbers = self.data.get(address, ())
            here = [number for number in numbers if world.messages >> number & 1]
            if not here:
                return None
            part = self.messages[here[0]]
            parts.append(part.counts if isinstance(part, Addend | Copy) else ())
        return add(parts)

    # --- how it ends ---

    def over(self, world: JobState) -> bool:
        """Return whether the job has ended. Raise InvariantViolation if it ended as it should not.

        It may end in one of these ways:

        - all members have finished, or the coordinator has died and all replicas have ended;
        - no member is left, or all members hang;
        - members have drifted, and no majority shows whose state is right.
        """
        if world.is_dead:
            return all(not name or self.nodes[name].leader.phase is ReplicaPhase.STOPPED for name in world.nodes)
        state = self.coordinators[world.coordinator]
        if self.scenario.hangs and set(state.roster) <= set(world.reading):
            return True  # all members hang: only the detector ends that
        if not state.over:
            return False
        has_given_up = bool(state.miscount)  # later steps, such as the save, may be void, too
        if {item.exit_code == ExitCode.INVARIANT_VIOLATED for item in state.finished} - {has_given_up}:
            why = state.miscount or "no step was given up"
            raise invariants.InvariantViolation(9, f"{why}, and the job ends with {state.finished}")
        if not self.tied(world) and not set(state.roster) <= {item.replica for item in state.finished}:
            raise invariants.InvariantViolation(9, "the job was stopped although members could go on")
        return True

    def tied(self, world: JobState) -> bool:
        """Return whether members have drifted and no strict majority has equal state.

        Then nobody can tell whose state is right. Unproven newcomers are part of no majority.
        """
        members = generations.members(self.coordinators[world.coordinator])
        alike = Counter(
            (node.drifted, node.drifted or node.state_drifted) for number, node in self.living(world) if number in members
        )
        return bool(self.drifted(world)) and 2 * max(alike.values(), default=0) <= len(members)

    def differs(self, world: JobState) -> bool:
        """Return whether a member has drifted or a replica that lives is flawed.

        A new generation may then follow.
        """
        flawed = self.scenario.miscounts and any(name and self.nodes[name].flawed for name in world.nodes)
        return bool(flawed or self.drifted(world))

    def drifted(self, world: JobState) -> list[ReplicaId]:
        """Return the living members whose state is not what it should be."""
        if not self.scenario.drifts and not self.scenario.state_drifts:
            return []
        return [number for number, node in self.living(world) if node.drifted or node.state_drifted]

    def living(self, world: JobState) -> list[tuple[ReplicaId, Node]]:
        """Return the members that have not died, each with its node."""
        roster = self.coordinators[world.coordinator].roster
        return [(number, self.nodes[world.nodes[number]]) for number in roster if world.nodes[number]]
