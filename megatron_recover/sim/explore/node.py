"""A small world around the core's machines: ranks with data, reductions whose outcome differs from member to member, faults.

A `Node` is one replica: its leader's machine, its ranks' machines, and what their memory holds. Data is a multiset of
microbatch ids per bucket (`counts[i]` is how often microbatch i is in it), so that exactly-once is checked in the data.
Everything is a pure function of frozen values, so outcomes can be remembered by (node, stimulus).

What is simulated, and why it is enough
---------------------------------------
* Nodes interact by messages only. A rank that arrives at a reduction publishes its local gradient (`Part`); a rank whose
  members have all published may complete, at any later time or never, independently of the others: that is all that a
  transport promises (data_plane/transport.py). Fetching a decided bucket is the same with `Copy`.
* Inside a node only one thing is left to chance: when a rank other than the leader's carries out a `Promise`, since until
  then it may still complete a reduction. Every other internal step (orders, reports, passes, publishing) follows at once.
  Each of them is invisible outside its node until the next message, commutes with everything elsewhere, and is undone by
  nothing but the loss of the whole node; and being early only adds behaviours: a published `Part` need not be used.
* That holds for reductions beside the last backward as well: a bucket is published when the pass is closed, which is earlier
  than backward can have passed it, and the rest of the pass, which is always computed, is in the node's gradient already.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from megatron_recover.core import invariants, rank, replica
from megatron_recover.core.plan import Operation, operations
from megatron_recover.core.quota import ticks
from megatron_recover.core.values import (
    Apply,
    BucketId,
    Close,
    Compute,
    Entered,
    Generation,
    Held,
    LeaderMessage,
    NewGeneration,
    Order,
    Plan,
    Promise,
    ReplicaId,
    Shape,
    Status,
    Statuses,
    Value,
    Version,
    Vote,
    Votes,
    Work,
)
from megatron_recover.sim.multiset import Multiset, checksum, digest, state_digest, voted


class Part(Value, frozen=True):
    """A rank's local gradient of a bucket, handed to the reduction of a generation."""

    replica: ReplicaId
    rank: int
    generation: Generation
    step: int
    bucket: BucketId
    counts: Multiset


class Copy(Value, frozen=True):
    """A decided result on its way from a rank to the same-position ranks of other members."""

    replica: ReplicaId
    rank: int
    generation: Generation
    step: int
    bucket: BucketId
    version: Version
    counts: Multiset


Message = NewGeneration | Status | Statuses | Vote | Votes | Part | Copy


class Rank(Value, frozen=True):
    """A rank: its machine, its memory, and what its threads have yet to do."""

    machine: rank.RankState
    gradient: tuple[Multiset, ...]
    """Per bucket of the rank its local gradient."""
    results: tuple[Multiset, ...]
    """Per bucket of the rank the memory of its result, () where unspecified."""
    operations: tuple[Operation, ...] = ()
    """What its training thread has to do next across replicas."""
    orders: tuple[Order, ...] = ()
    """On their way from the leader."""
    begun: int = -1
    """Of a follower: the newest step of which it has told its leader that it begins it, or that it ends there."""

    def may_end(self) -> bool:
        """Whether it runs a pass whose end it has not asked for."""
        return self.machine.in_pass and not self.machine.has_asked

    def can_take(self) -> bool:
        """Whether the training thread is free and has an order to take."""
        return bool(self.machine.queue) and not self.operations


class Node(Value, frozen=True):
    """One replica."""

    leader: replica.ReplicaState
    ranks: tuple[Rank, ...]
    work: tuple[Work, ...]
    """The steps of the job. One that is given up is followed by nothing but a save."""
    drifted: bool = False
    """Its parameters are not those of the others."""
    flawed: bool = False
    """It counts microbatch 0 once too often in all that it hands in, until the step is applied or it enters a generation in
    which the step is void."""
    state_drifted: bool = False
    """State that no sum depends on yet is not that of the others: a moment of the optimizer, a buffer."""

    def may_miscount(self) -> bool:
        """Whether the attempt at a step that it is in, or its next one, is one that counts right so far."""
        work = self.leader.work
        return not self.flawed and (self.between_steps() if work is None else bool(work.buckets))

    def may_begin(self) -> bool:
        """Whether rank 0 has applied the last step and has yet to begin the next, or to end."""
        leader = self.leader
        free = leader.phase is not replica.Phase.JOINING and leader.work is None and not leader.ended
        return free and self.has_applied(0)

    def has_applied(self, rank: int) -> bool:
        """Whether a rank has applied all that is committed: its training thread is not between steps before."""
        return self.ranks[rank].machine.step == self.leader.step

    def to_arrive(self) -> list[int]:
        """Return the followers that have yet to tell their leader that they begin the next step, which they do where their
        digest is due, before rank 0 or after it; or that have yet to end, as rank 0 has."""
        leader, at_end = self.leader, self.leader.step == len(self.work)
        if leader.phase is replica.Phase.JOINING or not (leader.ended if at_end else self.work[leader.step].digests):
            return []
        followers = range(1, len(self.ranks))
        return [rank for rank in followers if self.has_applied(rank) and self.ranks[rank].begun < leader.step]

    def between_steps(self) -> bool:
        """Whether all ranks have applied the last step and none has begun the next."""
        leader = self.leader
        begun = leader.work is not None or leader.ended or leader.digests
        return not begun and all(self.has_applied(rank) for rank in range(len(self.ranks)))


# --- Stimuli: what can happen to a node ----------------------------------------------------------------------------------


class Miscount(Value, frozen=True):
    """Something goes wrong in the counting of an attempt at a step."""


class Begin(Value, frozen=True):
    """The training loop arrives at its next step, or at its end."""


class Arrive(Value, frozen=True):
    """A follower begins the next step where its digest is due, or ends later than rank 0."""

    rank: int


class CarryOut(Value, frozen=True):
    """A rank carries out the next order on its way to it."""

    rank: int


class TakeUp(Value, frozen=True):
    """The training thread of a rank takes its next order; left to chance only where `Threads.slow`."""

    rank: int


class EndPass(Value, frozen=True):
    """Rank 0 begins the last forward that it knows of; left to chance only where `Threads.passes_last`."""


class Complete(Value, frozen=True):
    """The operation at which a rank is completes with this result."""

    rank: int
    counts: Multiset


class Fail(Value, frozen=True):
    """The operation at which a rank is fails there, whatever it does elsewhere."""

    rank: int


class Stall(Value, frozen=True):
    """The operation at which a rank is has waited in vain for these replicas, as far as it knows."""

    rank: int
    accused: tuple[ReplicaId, ...]


class Drift(Value, frozen=True):
    """The parameters change. Only between two steps: a step knows them by the checksum that it takes of them at its begin."""


class DriftState(Value, frozen=True):
    """State changes that no sum depends on. Only between two steps."""


Stimulus = (
    NewGeneration | Status | Statuses | Vote | Votes | replica.LinkLost
    | Begin | Arrive | CarryOut | TakeUp | EndPass | Complete | Fail | Stall | Drift | DriftState | Miscount
)  # fmt: skip


class Outcome(Value, frozen=True):
    """What a stimulus does."""

    node: Node
    messages: tuple[tuple[Message, tuple[ReplicaId, ...]], ...]
    """Each with those to whom it goes."""
    reports: tuple[LeaderMessage, ...]
    facts: tuple[invariants.Fact, ...]


def new_node(number: ReplicaId, shape: Shape, work: Sequence[Work], tree_above: int) -> Node:
    """A replica that has joined and knows no generation."""
    zeros = (0,) * work[0].num_microbatches
    ranks = []
    for position in range(shape.num_ranks):
        buckets = tuple(bucket for bucket, holders in enumerate(shape.bucket_ranks) if position in holders)
        machine = rank.RankState(number, position, buckets)
        ranks.append(Rank(machine, (zeros,) * len(buckets), ((),) * len(buckets)))
    return Node(replica.ReplicaState(number, shape, tree_above), tuple(ranks), tuple(work))


class Threads:
    """Carries out stimuli. The methods that tests override to plant a bug are the ones that model a rank's threads."""

    def __init__(
        self, *, slow: bool = False, passes_last: bool = False, paces: Sequence[int] = (), miscounts: bool = False
    ) -> None:
        self.slow = slow
        """Training threads take an order at any later time instead of as soon as they can."""
        self.passes_last = passes_last
        """A pass runs for any time, and takes in what is dealt meanwhile, instead of ending as soon as it can."""
        self.paces = paces
        """What each replica measures of itself, in nanoseconds a microbatch; empty: nobody measures."""
        self.miscounts = miscounts
        """Replicas may be `flawed`."""

    def stimulate(self, node: Node, stimulus: Stimulus) -> Outcome:
        """What `stimulus` does to `node`. Raises InvariantViolation or ValueError where the machines see a defect."""
        run = _Run(self, node)
        if isinstance(stimulus, Drift):
            run.drifted = True
        elif isinstance(stimulus, Miscount):
            run.flawed = True
        elif isinstance(stimulus, DriftState):
            run.state_drifted = True
        elif isinstance(stimulus, Begin):
            run.begin()
        elif isinstance(stimulus, Arrive):
            run.arrive(stimulus.rank)
        elif isinstance(stimulus, CarryOut):
            run.carry_out(stimulus.rank)
        elif isinstance(stimulus, TakeUp):
            run.take(stimulus.rank)
        elif isinstance(stimulus, EndPass):
            run.feed(0, rank.EndPass())
        elif isinstance(stimulus, Fail):
            run.fail(stimulus.rank)
        elif isinstance(stimulus, Stall):
            run.fail(stimulus.rank, stimulus.accused, stalled=True)
        elif isinstance(stimulus, Complete):
            run.complete(stimulus.rank, stimulus.counts)
        else:
            run.lead(stimulus)
        run.settle()
        after = replace(
            node, leader=run.leader, ranks=tuple(run.ranks), drifted=run.drifted, state_drifted=run.state_drifted,
            flawed=run.flawed, work=run.work,
        )  # fmt: skip
        return Outcome(after, tuple(run.out), tuple(run.up), tuple(run.facts))

    def local_gradient_after(self, before: Multiset, result: Multiset) -> Multiset:
        """The local gradient after a reduction that delivered `result`: untouched (INV-3)."""
        return before

    def miscounted(self, counts: Multiset) -> bool:
        """Whether a sum shows that a replica is `flawed`. All else that is wrong with it is a defect, and told as a fact."""
        return self.miscounts and counts[0] > 1 and set(counts[1:]) <= {1}

    def emptied(self, gradient: tuple[Multiset, ...]) -> tuple[Multiset, ...]:
        """The local gradient of a rank when its step is made void."""
        return tuple((0,) * len(counts) for counts in gradient)

    def applied(self, node: Rank, order: Apply, bucket: BucketId) -> Multiset:
        """What becomes the gradient of a bucket."""
        return node.results[node.machine.buckets.index(bucket)]

    def computes(self, plan: Plan, machine: rank.RankState) -> tuple[Compute, ...]:
        """What a rank computes: all of a plan, whether or not it has been overtaken."""
        return plan.computes

    def retired(self, operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
        """What is left of a rank's operations after `Retire`: they fail at once."""
        return ()


class _Run:
    """One stimulus being carried out; the only mutable thing here."""

    def __init__(self, threads: Threads, node: Node) -> None:
        self.threads = threads
        self.work = node.work
        self.leader = node.leader
        self.ranks = list(node.ranks)
        self.drifted, self.state_drifted = node.drifted, node.state_drifted
        self.flawed = node.flawed
        self.out: list[tuple[Message, tuple[ReplicaId, ...]]] = []
        self.up: list[LeaderMessage] = []
        self.facts: list[invariants.Fact] = []

    @property
    def number(self) -> ReplicaId:
        return self.leader.replica

    # --- the leader ---

    def lead(self, message: replica.Input) -> None:
        void = self.leader.void
        self.leader, effects = replica.step(self.leader, message)
        self.flawed = self.flawed and self.leader.void == void  # what goes wrong from here on is in the new attempt
        for effect in effects:
            if isinstance(effect, replica.ToRanks):
                if isinstance(effect.order, Plan):
                    self.facts.append(invariants.Planned(self.number, effect.order))
                self.ranks = [replace(one, orders=(*one.orders, effect.order)) for one in self.ranks]
            elif isinstance(effect, replica.Voted):
                self.facts.append(invariants.Voted(self.number, effect.generation, effect.record))
            elif isinstance(effect, replica.ToPeers):
                if effect.peers:
                    self.out.append((effect.message, effect.peers))
            elif isinstance(effect, replica.ToCoordinator):
                if isinstance(effect.message, Entered):
                    self.facts.append(effect.message)
                self.up.append(effect.message)
            elif isinstance(effect, replica.Committed):
                fact = invariants.Committed(self.number, effect.generation, effect.record, effect.adopted)
                self.facts.append(fact)

    # --- ranks ---

    def feed(self, position: int, message: rank.Input) -> None:
        machine, effects = rank.step(self.ranks[position].machine, message)
        self.ranks[position] = replace(self.ranks[position], machine=machine)
        for effect in effects:
            if isinstance(effect, rank.Retire):
                # What runs across replicas fails at once; the training thread leaves the rest of its plan.
                left = self.threads.retired(self.ranks[position].operations)
                self.ranks[position] = replace(self.ranks[position], operations=left)
            else:
                self.lead(effect.report)

    def begin(self) -> None:
        """Rank 0 begins the next step, or ends; with it the followers that are as far, unless their digest is due."""
        step = self.leader.step
        is_alone = step < len(self.work) and self.work[step].digests
        for position in range(len(self.ranks)):
            if position == 0 or not is_alone and self.ranks[position].machine.step == step:
                self.arrive(position)

    def arrive(self, position: int) -> None:
        """A rank begins the next step, with the digest of its state where that is due, or ends."""
        step = self.leader.step
        if position and (step == len(self.work) or self.work[step].digests):
            self.ranks[position] = replace(self.ranks[position], begun=step)
        if step == len(self.work):
            self.feed(position, rank.End())
            return
        work, digest = self.work[step], None
        if work.digests:
            digest = state_digest(step, position, drifted=self.drifted or self.state_drifted)
            self.facts.append(invariants.Digested(self.number, position, step, digest))
        self.feed(position, rank.Begin(work, (), digest))

    def carry_out(self, position: int) -> None:
        order, *rest = self.ranks[position].orders
        self.ranks[position] = replace(self.ranks[position], orders=tuple(rest))
        self.feed(position, order)

    def complete(self, position: int, counts: Multiset) -> None:
        one = self.ranks[position]
        if self.threads.miscounted(counts):
            self.fail(position, miscounted=True)
            return
        operation, *rest = one.operations
        index = one.machine.buckets.index(operation.bucket)
        gradient = self.threads.local_gradient_after(one.gradient[index], counts)
        self.ranks[position] = replace(
            one,
            operations=tuple(rest),
            results=_put(one.results, index, counts),
            gradient=_put(one.gradient, index, gradient),
        )
        plan = one.machine.taken
        if isinstance(plan, Plan):
            where = (self.number, position, plan.generation, plan.step)
            self.facts.append(invariants.Held(*where, *_what(operation), checksum(counts), counts))
            self.feed(position, rank.Completed(Held(*_what(operation), voted(counts, drifted=self.drifted))))
            self.advance(position)

    def fail(
        self, position: int, accused: tuple[ReplicaId, ...] = (), *, stalled: bool = False, miscounted: bool = False
    ) -> None:
        one = self.ranks[position]
        if isinstance(one.machine.taken, Plan):
            self.ranks[position] = replace(one, operations=())
            self.feed(position, rank.Failed(one.machine.taken.generation, "it failed", accused, stalled, miscounted))

    def settle(self) -> None:
        """Carry out everything inside the node that is not left to chance."""
        busy = True
        while busy:
            busy = False
            for position, one in enumerate(self.ranks):
                if one.orders and (position == 0 or not isinstance(one.orders[0], Promise)):
                    self.carry_out(position)
                    busy = True
                elif one.can_take() and not self.threads.slow:
                    self.take(position)
                    busy = True

    def take(self, position: int) -> None:
        order = self.ranks[position].machine.queue[0]
        self.feed(position, rank.Take())
        one = self.ranks[position]
        if isinstance(order, Plan):
            self.compute(position, order)
        elif isinstance(order, Close):
            self.operate(position)
        elif isinstance(order, Apply):
            zeros = (0,) * len(one.gradient[0]) if one.gradient else ()
            counts = tuple(
                (item.bucket, self.threads.applied(one, order, item.bucket))
                for item in order.record.versions
                if item.bucket in one.machine.buckets
            )
            made = None if order.record.gives_up else digest(order.record, drifted=self.drifted)
            self.facts.append(invariants.Applied(self.number, position, order.record.step, counts, made))
            empty: tuple[Multiset, ...] = ((),) * len(one.results)
            self.ranks[position] = replace(one, gradient=(zeros,) * len(one.gradient), results=empty)
            self.flawed = False
            if order.record.gives_up:
                self.work = _saved_after(self.work, order.record.step)

    def compute(self, position: int, plan: Plan) -> None:
        """Compute all of a plan, whatever happens: in the pass that runs, or in one that begins with it."""
        one = self.ranks[position]
        gradient = one.gradient
        if plan.voids:
            gradient = self.threads.emptied(gradient)
        for done in self.threads.computes(plan, one.machine):
            for index, bucket in enumerate(one.machine.buckets):
                if bucket in done.into:
                    counts = tuple(n + (i in done.microbatches) for i, n in enumerate(gradient[index]))
                    gradient = _put(gradient, index, counts)
        self.ranks[position] = replace(one, gradient=gradient)
        if position == 0:
            self.journal(plan)
            if not self.threads.passes_last:
                self.feed(position, rank.EndPass())
        if not self.ranks[position].machine.in_pass:
            self.operate(position)

    def journal(self, plan: Plan) -> None:
        """Rank 0 notes what it computes, and of the first pass of a step how long that took."""
        first = not self.ranks[0].machine.journal.started
        ids = [microbatch for done in plan.computes for microbatch in done.microbatches]
        for microbatch in ids:
            self.feed(0, rank.MicrobatchStarted(microbatch))
            self.feed(0, rank.MicrobatchFinished(microbatch))
        if ids and first and self.threads.paces:
            elapsed = ticks(len(ids), self.leader.shape.pipeline) * self.threads.paces[self.number]
            self.feed(0, rank.Measured(len(ids), elapsed))

    def operate(self, position: int) -> None:
        """The pass is over: begin what crosses replicas, as the newest plan has it."""
        one = self.ranks[position]
        plan = one.machine.taken
        if isinstance(plan, Plan):
            runs = rank.may_run(one.machine, plan.generation)
            self.ranks[position] = replace(one, operations=operations(plan, self.number, one.machine.buckets) if runs else ())
            self.advance(position)

    def advance(self, position: int) -> None:
        """Arrive at the next operation: send a copy and go on, or give up the old result and wait for the new one."""
        one = self.ranks[position]
        plan = one.machine.taken
        while one.operations and isinstance(plan, Plan):
            operation = one.operations[0]
            index = one.machine.buckets.index(operation.bucket)
            if operation.source == self.number:
                copy = Copy(self.number, position, plan.generation, plan.step, *_what(operation), one.results[index])
                self.out.append((copy, operation.members[1:]))
                one = replace(one, operations=one.operations[1:])
                continue
            if operation.source is None:
                counts = one.gradient[index]
                self.facts.append(invariants.Read(self.number, position, plan.step, operation.bucket, counts))
                counts = (counts[0] + self.flawed, *counts[1:])
                part = Part(self.number, position, plan.generation, plan.step, operation.bucket, counts)
                self.out.append((part, plan.roster))
            one = replace(one, results=_put(one.results, index, ()))
            break
        self.ranks[position] = one


def pending(node: Node) -> list[tuple[int, Operation]]:
    """(rank, operation) of every operation that could complete."""
    return [(position, one.operations[0]) for position, one in enumerate(node.ranks) if one.operations]


def _saved_after(work: tuple[Work, ...], step: int) -> tuple[Work, ...]:
    """The steps of a job that has given `step` up: it agrees on the state that it saves, and ends."""
    save = Work(f"save after {step}", work[0].num_microbatches, work[0].buckets[-1:], digests=True)
    return (*work[: step + 1], save)


def _what(operation: Operation) -> tuple[BucketId, Version]:
    return operation.bucket, operation.version


def _put[T](items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])
