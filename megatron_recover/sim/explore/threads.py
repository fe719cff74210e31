"""The threads of a simulated replica: they carry out one stimulus, and what follows at once.

`sim/explore/node.py` has the replica, the stimuli, and the reason why these steps suffice.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from megatron_recover.core import invariants, rank, replica
from megatron_recover.core.membership_messages import Entered, LeaderMessage
from megatron_recover.core.plan import Operation, operations
from megatron_recover.core.quota import ticks
from megatron_recover.core.rank_messages import Apply, Close, Plan, Promise
from megatron_recover.core.request import exit_for
from megatron_recover.core.values import BucketId, Compute, Held, Record, ReplicaId, Status, Version, Work
from megatron_recover.sim.explore.node import (
    EXIT_REASON,
    Addend,
    Arrive,
    AskClose,
    BeginStep,
    CarryOut,
    Complete,
    Copy,
    Drift,
    DriftState,
    Fail,
    Message,
    Miscount,
    Node,
    Outcome,
    Rank,
    ReadState,
    Serve,
    Stall,
    Stimulus,
    TakeUp,
)
from megatron_recover.sim.multiset import Multiset, checksum, digest, state_digest, voted


class Threads:
    """Threads of a replica's ranks: carry out stimuli. Tests override methods to plant bugs."""

    def __init__(
        self, *, slow: bool = False, passes_last: bool = False, paces: Sequence[int] = (), miscounts: bool = False
    ) -> None:
        self.slow = slow
        """True if training threads take an order at any later time, not as soon as they can."""
        self.passes_last = passes_last
        """True if a pass runs for any time, and computes what plans add meanwhile."""
        self.paces = paces
        """Nanoseconds a microbatch that each replica measures of itself; empty: none."""
        self.miscounts = miscounts
        """True if replicas may be `flawed`."""

    def stimulate(self, node: Node, stimulus: Stimulus) -> Outcome:
        """Return the result of `stimulus`. Raise InvariantViolation or ValueError for a defect."""
        run = _Run(self, node)
        if isinstance(stimulus, Drift):
            run.drifted = True
        elif isinstance(stimulus, Miscount):
            run.flawed = True
        elif isinstance(stimulus, DriftState):
            run.state_drifted = True
        elif isinstance(stimulus, Serve):
            run.digest(run.leader.step)
        elif isinstance(stimulus, ReadState):
            run.drifted, run.state_drifted, run.read = stimulus.drifted, stimulus.state_drifted, stimulus.step
            run.digest(stimulus.step)
        elif isinstance(stimulus, BeginStep):
            run.begin()
        elif isinstance(stimulus, Arrive):
            run.arrive(stimulus.rank)
        elif isinstance(stimulus, CarryOut):
            run.carry_out(stimulus.rank)
        elif isinstance(stimulus, TakeUp):
            run.take(stimulus.rank)
        elif isinstance(stimulus, AskClose):
            run.feed(0, rank.AskClose())
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
            flawed=run.flawed, work=run.work, read=run.read,
        )  # fmt: skip
        return Outcome(after, tuple(run.out), tuple(run.up), tuple(run.facts))

    def digest(self, step: int, position: int, *, drifted: bool) -> int:
        """Return what a rank takes for the digest of the state with which a step begins."""
        return state_digest(step, position, drifted=drifted)

    def local_gradient_after(self, before: Multiset, result: Multiset) -> Multiset:
        """Return the local gradient after a reduction brought `result`: unchanged (INV-3)."""
        return before

    def miscounted(self, counts: Multiset) -> bool:
        """Return whether a sum shows a `flawed` replica. Other wrong sums are observed as facts."""
        return self.miscounts and counts[0] > 1 and set(counts[1:]) <= {1}

    def emptied(self, gradient: tuple[Multiset, ...]) -> tuple[Multiset, ...]:
        """Return the local gradient of a rank when its step is made void."""
        return tuple((0,) * len(counts) for counts in gradient)

    def applied(self, node: Rank, order: Apply, bucket: BucketId) -> Multiset:
        """Return the result that becomes the gradient of a bucket."""
        return node.results[node.machine.buckets.index(bucket)]

    def is_asked_to_end(self, number: ReplicaId, record: Record) -> bool:
        """Return whether a replica ends its training loop after the step of a record."""
        return exit_for(EXIT_REASON) in record.requests

    def computes(self, plan: Plan, machine: rank.RankState) -> tuple[Compute, ...]:
        """Return what a rank computes: all of a plan, even after a newer promise."""
        return plan.computes

    def retired(self, operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
        """Return the operations of a rank that remain after `Retire`: none, they fail at once."""
        return ()


class _Run:
    """A stimulus being carried out; the only mutable object here."""

    def __init__(self, threads: Threads, node: Node) -> None:
        self.threads = threads
        self.work = node.work
        self.leader = node.leader
        self.ranks = list(node.ranks)
        self.drifted, self.state_drifted = node.drifted, node.state_drifted
        self.flawed, self.read = node.flawed, node.read
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
        self.flawed = self.flawed and self.leader.void == void  # a void starts a new attempt
        for effect in effects:
            if isinstance(effect, replica.ToRanks):
                if isinstance(effect.order, Plan):
                    self.facts.append(invariants.Planned(self.number, effect.order))
                self.ranks = [replace(one, orders=(*one.orders, effect.order)) for one in self.ranks]
            elif isinstance(effect, replica.Voted):
                self.facts.append(invariants.Voted(self.number, effect.generation, effect.record))
            elif isinstance(effect, replica.ToPeers):
                said = effect.message
                if isinstance(said, Status) and said.replica == self.number and said.state_digest is not None:
                    self.facts.append(invariants.StateGiven(self.number, said.generation, said.step, said.state_digest))
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
                # Operations across replicas fail at once; the training thread leaves its plan.
                left = self.threads.retired(self.ranks[position].operations)
                self.ranks[position] = replace(self.ranks[position], operations=left)
            else:
                self.lead(effect.report)

    def begin(self) -> None:
        """Let rank 0, and followers at its step unless a digest is due, begin that step or end."""
        step = self.leader.step
        is_alone = step < len(self.work) and self.work[step].digests
        for position in range(len(self.ranks)):
            if position == 0 or not is_alone and self.ranks[position].machine.step == step:
                self.arrive(position)

    def arrive(self, position: int) -> None:
        """Let a rank begin the next step, with its state digest where that is due, or end."""
        step = self.leader.step
        if position and (step == len(self.work) or self.work[step].digests):
            self.ranks[position] = replace(self.ranks[position], begun=step)
        if step == len(self.work):
            self.feed(position, rank.Finish())
            return
        work, digest = self.work[step], None
        if work.digests:
            digest = state_digest(step, position, drifted=self.drifted or self.state_drifted)
            self.facts.append(invariants.Digested(self.number, position, step, digest))
        self.feed(position, rank.Begin(work, (), digest))

    def digest(self, step: int) -> None:
        """Let every rank digest the state with which `step` begins."""
        for position in range(len(self.ranks)):
            drifted = self.drifted or self.state_drifted
            known = state_digest(step, position, drifted=drifted)
            self.facts.append(invariants.StateKnown(self.number, position, step, known))
            said = self.threads.digest(step, position, drifted=drifted)
            self.feed(position, rank.Digest(self.work[step].label, said))

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
            self.feed(position, rank.Hold(Held(*_what(operation), voted(counts, drifted=self.drifted))))
            self.advance(position)

    def fail(
        self, position: int, accused: tuple[ReplicaId, ...] = (), *, stalled: bool = False, miscounted: bool = False
    ) -> None:
        one = self.ranks[position]
        if isinstance(one.machine.taken, Plan):
            self.ranks[position] = replace(one, operations=())
            self.feed(position, rank.Block(one.machine.taken.generation, "it failed", accused, stalled, miscounted))

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
            if order.record.gives_up or self.threads.is_asked_to_end(self.number, order.record):
                self.work = _saved_after(self.work, order.record.step)

    def compute(self, position: int, plan: Plan) -> None:
        """Compute all of a plan, in the pass that runs or in a new one that begins with it."""
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
                self.feed(position, rank.AskClose())
        if not self.ranks[position].machine.in_pass:
            self.operate(position)

    def journal(self, plan: Plan) -> None:
        """Record what rank 0 computes; with `paces` report the duration of a step's first pass."""
        first = not self.ranks[0].machine.journal.started
        ids = [microbatch for done in plan.computes for microbatch in done.microbatches]
        for microbatch in ids:
            self.feed(0, rank.MicrobatchStarted(microbatch))
            self.feed(0, rank.MicrobatchFinished(microbatch))
        if ids and first and self.threads.paces:
            elapsed = ticks(len(ids), self.leader.shape.pipeline) * self.threads.paces[self.number]
            self.feed(0, rank.TimePass(len(ids), elapsed))

    def operate(self, position: int) -> None:
        """Begin the operations across replicas of the newest plan, after the pass.

        There are none after a newer promise, or if the next order is `Stop`.
        """
        one = self.ranks[position]
        plan = one.machine.taken
        if isinstance(plan, Plan):
            runs = rank.may_run(one.machine, plan.generation)
            self.ranks[position] = replace(one, operations=operations(plan, self.number, one.machine.buckets) if runs else ())
            self.advance(position)

    def advance(self, position: int) -> None:
        """Arrive at the next operation. After sending a copy continue; else drop the old result."""
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
                part = Addend(self.number, position, plan.generation, plan.step, operation.bucket, counts)
                self.out.append((part, plan.roster))
            one = replace(one, results=_put(one.results, index, ()))
            break
        self.ranks[position] = one


def _saved_after(work: tuple[Work, ...], step: int) -> tuple[Work, ...]:
    """Return the steps of a job that trains no more after `step`: a save of agreed state follows.

    A save is not followed by another one.
    """
    if work[step].label == f"save after {step - 1}":
        return work
    save = Work(f"save after {step}", work[0].num_microbatches, work[0].buckets[-1:], digests=True)
    return (*work[: step + 1], save)


def _what(operation: Operation) -> tuple[BucketId, Version]:
    return operation.bucket, operation.version


def _put[T](items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])
