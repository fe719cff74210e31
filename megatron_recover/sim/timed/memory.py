"""Memory of simulated ranks: empty where only time matters, or multisets of microbatch ids.

`Memory` is the former, for jobs of any size. `Counts` is the latter: the local gradient of a
bucket, and the results, hold how often each microbatch is in them. So exactly-once is checked in
the data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from megatron_recover.core import invariants
from megatron_recover.core.label import label_of
from megatron_recover.core.plan import Operation
from megatron_recover.core.rank_messages import Apply, Plan
from megatron_recover.core.values import BucketId, Compute, ReplicaId
from megatron_recover.sim.multiset import Multiset, add, checksum, digest, state_digest, voted
from megatron_recover.sim.timed.world import RankView


class Memory:
    """Memory that holds nothing: all results are equal."""

    def compute(self, rank: RankView, plan: Plan) -> None:
        """Compute all of a plan at a rank."""

    def read(self, rank: RankView, operation: Operation) -> object:
        """Return the data that a rank brings to an operation."""
        return None

    def add(self, parts: list[object]) -> object:
        """Return the sum over all members."""
        return None

    def miscounted(self, result: object) -> bool:
        """Return whether a sum shows that a member counts what is not there.

        Any other wrong sum is observed as a fact.
        """
        return False

    def result(self, rank: RankView, operation: Operation, result: object) -> int:
        """Store the result of an operation at a rank, and return its checksum."""
        return operation.version

    def state_digest(self, rank: RankView) -> int:
        """Return the digest of the state that a rank begins its step with."""
        return 0

    def known_state(self, rank: RankView, step: int) -> int:
        """Return the digest of the state of a step that a rank serves to newcomers, or has read."""
        return 0

    def copy_state(self, replica: ReplicaId, sources: Collection[ReplicaId], step: int) -> None:
        """Let a newcomer have read the state with which `sources` have begun a step."""

    def apply(self, rank: RankView, order: Apply) -> None:
        """Make the results the gradient."""


class Counts(Memory):
    """Memory that holds multisets and observes every fact of a rank.

    Tests plant bugs by overriding the methods that say what the threads of a rank do.
    """

    def __init__(self, num_microbatches: int, observe: Callable[[invariants.Fact], None]) -> None:
        self.zeros: Multiset = (0,) * num_microbatches
        self.observe = observe
        self.gradients: dict[RankView, dict[BucketId, Multiset]] = {}
        self.results: dict[RankView, dict[BucketId, Multiset]] = {}
        self.flawed: set[tuple[ReplicaId, int]] = set()
        """(replica, step) with microbatch 0 counted once too often, until the step is made void."""
        self.drifted: dict[ReplicaId, int] = {}
        """First step that a replica begins with other parameters than the rest."""
        self.state_drifted: dict[ReplicaId, int] = {}
        """First step that a replica begins with other state than the rest; no sum depends on it."""
        self.misread: set[ReplicaId] = set()
        """Newcomers whose next reading brings other state than that of their sources."""

    def computes(self, rank: RankView, plan: Plan) -> tuple[Compute, ...]:
        """Return what a rank computes: all of a plan, even after a newer promise."""
        return plan.computes

    def local_gradient_after(self, before: Multiset, result: Multiset) -> Multiset:
        """Return the local gradient after a reduction brought `result`: unchanged (INV-3)."""
        return before

    def _has_drifted(self, rank: RankView, step: int) -> bool:
        return step >= self.drifted.get(rank.replica.number, step + 1)

    def has_other_state(self, replica: ReplicaId, step: int) -> bool:
        """Return whether a replica begins a step with other parameters or state than the rest."""
        return any(step >= drifted.get(replica, step + 1) for drifted in (self.drifted, self.state_drifted))

    def state_digest(self, rank: RankView) -> int:
        step = rank.machine.step
        drifted = self.has_other_state(rank.replica.number, step)
        digest = state_digest(step, rank.position, drifted=drifted)
        self.observe(invariants.Digested(rank.replica.number, rank.position, step, digest))
        return digest

    def known_state(self, rank: RankView, step: int) -> int:
        drifted = self.has_other_state(rank.replica.number, step)
        digest = state_digest(step, rank.position, drifted=drifted)
        self.observe(invariants.StateKnown(rank.replica.number, rank.position, step, digest))
        return digest

    def copy_state(self, replica: ReplicaId, sources: Collection[ReplicaId], step: int) -> None:
        for drifted in (self.drifted, self.state_drifted):
            drifted.pop(replica, None)
            if any(step >= drifted.get(source, step + 1) for source in sources):
                drifted[replica] = step
        if replica in self.misread:
            self.misread.discard(replica)
            self.drifted[replica] = step

    def compute(self, rank: RankView, plan: Plan) -> None:
        if plan.voids:
            self.gradients.pop(rank, None)
            self.flawed.discard((rank.replica.number, plan.step))
        mine = self.gradients.setdefault(rank, {})
        for one in self.computes(rank, plan):
            for bucket in one.into:
                if bucket in rank.machine.buckets:
                    before = mine.get(bucket, self.zeros)
                    mine[bucket] = tuple(count + (i in one.microbatches) for i, count in enumerate(before))

    def read(self, rank: RankView, operation: Operation) -> object:
        if operation.source is not None:
            return self.results[rank][operation.bucket]
        counts = self.gradients.get(rank, {}).get(operation.bucket, self.zeros)
        self.observe(
            invariants.Read(rank.replica.number, rank.position, operation.step, operation.bucket, counts)
        )  # fmt: skip
        flaw = (rank.replica.number, operation.step) in self.flawed and _has_microbatches(rank)
        return (counts[0] + flaw, *counts[1:])

    def miscounted(self, result: object) -> bool:
        return bool(result) and result[0] > 1 and set(result[1:]) <= {1}  # type: ignore[index]

    def add(self, parts: list[object]) -> object:
        return add(parts)  # type: ignore[arg-type]

    def result(self, rank: RankView, operation: Operation, result: object) -> int:
        counts: Multiset = result  # type: ignore[assignment]
        self.results.setdefault(rank, {})[operation.bucket] = counts
        if operation.source is None:
            mine = self.gradients.setdefault(rank, {})
            mine[operation.bucket] = self.local_gradient_after(mine.get(operation.bucket, self.zeros), counts)
        where = (rank.replica.number, rank.position, operation.generation, operation.step)
        known = counts if _has_microbatches(rank) else None
        self.observe(invariants.Held(*where, operation.bucket, operation.version, checksum(counts), known))
        return voted(counts, drifted=self._has_drifted(rank, operation.step))

    def apply(self, rank: RankView, order: Apply) -> None:
        """Observe `Applied`; forget the results and the local gradient of the rank."""
        results = self.results.pop(rank, {})
        self.gradients.pop(rank, None)
        mine = [item for item in order.record.versions if item.bucket in rank.machine.buckets]
        trains = label_of(order.record.label).is_training
        counts = tuple((item.bucket, results.get(item.bucket, ())) for item in mine) if trains else None
        drifted = self._has_drifted(rank, order.record.step)
        made = None if not trains else digest(order.record, drifted=drifted)
        self.observe(invariants.Applied(rank.replica.number, rank.position, order.record.step, counts, made))


def _has_microbatches(rank: RankView) -> bool:
    """Return whether the step of a rank has microbatches; a comparison of state has none."""
    return isinstance(rank.machine.taken, Plan) and rank.machine.taken.work.num_microbatches > 0
