"""The facts that the invariants are judged by, and what a history of facts has to remember.

`core/invariants.py` has the rules. Each fact is something that one replica, rank or the coordinator
made true.
"""

from __future__ import annotations

from megatron_recover.core.membership_messages import Entered, LossKind, NewGeneration, Void
from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.values import BucketId, Generation, MicrobatchId, Record, ReplicaId, Shape, Value, Version

# --- Facts; `Entered` is one too ------------------------------------------------------------------


class Formed(Value, frozen=True):
    """The coordinator made a generation."""

    generation: Generation
    roster: tuple[ReplicaId, ...]
    outvoted: tuple[ReplicaId, ...] = ()
    """Replicas that the roster leaves out because a majority disagreed with them."""
    void: Void | None = None
    """`NewGeneration.void`: each member drops what it has of the step on entering `since` or later,
    once."""
    left: tuple[ReplicaId, ...] = ()
    """`NewGeneration.left`."""
    newcomers: tuple[ReplicaId, ...] = ()
    """Replicas of `NewGeneration.joins`: those of the roster that are unproven."""


class Planned(Value, frozen=True):
    """A leader gave a plan to its ranks."""

    replica: ReplicaId
    plan: Plan


class Read(Value, frozen=True):
    """A rank gave its local gradient of a bucket to a reduction.

    `counts[i]` is the number of times that microbatch i is in the gradient.
    """

    replica: ReplicaId
    rank: int
    step: int
    bucket: BucketId
    counts: tuple[int, ...]


class Held(Value, frozen=True):
    """A rank holds a result (reduced or fetched) that its plan of `generation` asked for."""

    replica: ReplicaId
    rank: int
    generation: Generation
    step: int
    bucket: BucketId
    version: Version
    checksum: int
    counts: tuple[int, ...] | None
    """Number of times that each microbatch is in the result; None if the step has none."""


class Digested(Value, frozen=True):
    """The digest of a rank's state as it began a step with `Work.digests`."""

    replica: ReplicaId
    rank: int
    step: int
    digest: int


class StateKnown(Value, frozen=True):
    """The true digest of the state with which a rank is to begin a step.

    It is a fact of each rank of a newcomer that has read it, and of each rank of a member that has
    digested it for newcomers. A later one replaces it, except what an unproven newcomer has read.
    """

    replica: ReplicaId
    rank: int
    step: int
    digest: int


class StateGiven(Value, frozen=True):
    """The status of a member gave its state digest, for the newcomers of the generation."""

    replica: ReplicaId
    generation: Generation
    step: int
    digest: int


class Voted(Value, frozen=True):
    """A leader voted."""

    replica: ReplicaId
    generation: Generation
    record: Record


class Committed(Value, frozen=True):
    """A leader committed a step in `generation`, by votes or by adopting a member's record."""

    replica: ReplicaId
    generation: Generation
    record: Record
    adopted: bool


class Applied(Value, frozen=True):
    """A rank made the results of a step its gradient."""

    replica: ReplicaId
    rank: int
    step: int
    counts: tuple[tuple[BucketId, tuple[int, ...]], ...] | None
    """(bucket, number of times that each microbatch is in the gradient). None or empty if there is
    none to judge."""
    digest: str | None
    """Digest of the rank's parameters after the step; None if it is not to be compared."""


def formed(new: NewGeneration) -> Formed:
    """Return the fact that an announcement makes."""
    outvoted = tuple(loss.replica for loss in new.losses if loss.kind is LossKind.DIVERGED)
    newcomers = tuple(claim.replica for claim in new.joins)
    return Formed(new.generation, new.roster, outvoted, new.void, new.left, newcomers)


Fact = (
    Formed | Entered | Planned | Read | Held | Digested | StateKnown | StateGiven | Voted | Committed | Applied
)  # fmt: skip


# --- What has to be remembered --------------------------------------------------------------------


class StepHistory(Value, frozen=True):
    """The facts of one step, without what lost replicas hold, voted, learned or were dealt.

    Once all members have committed the step, only `record` and `digests` are kept.
    """

    record: Record | None = None
    """The committed record without requests and paces; None before the first commit."""
    paces: frozenset[tuple[ReplicaId, tuple[tuple[ReplicaId, int], ...]]] = frozenset()
    """(replica, paces of the record that the replica committed)."""
    dealt: frozenset[tuple[ReplicaId, BucketId, MicrobatchId]] = frozenset()
    held: frozenset[tuple[ReplicaId, int, BucketId, Version]] = frozenset()
    """(replica, rank, bucket, version)."""
    checksums: frozenset[tuple[BucketId, Version, int, int]] = frozenset()
    """(bucket, version, rank, checksum)."""
    votes: frozenset[tuple[ReplicaId, Generation, Record]] = frozenset()
    """(voter, generation, record without requests and paces)."""
    digests: frozenset[tuple[int, str]] = frozenset()
    """(rank, parameter digest)."""
    states: frozenset[tuple[ReplicaId, int, int]] = frozenset()
    """(replica, rank, digest of all its state as the step began)."""
    known: frozenset[tuple[ReplicaId, int, int]] = frozenset()
    """The same of newcomers and of members that serve their state (`StateKnown`)."""
    given: frozenset[tuple[ReplicaId, int]] = frozenset()
    """(replica, digest of its state) of `StateGiven` in the newest generation."""


class History(Value, frozen=True):
    """All that the rules need to remember; the first one is `History(shape)`."""

    shape: Shape
    rosters: tuple[tuple[ReplicaId, ...], ...] = ()
    """The roster of generation g is `rosters[g - 1]`."""
    announced: tuple[tuple[ReplicaId, ...], ...] = ()
    """The newcomers of generation g are `announced[g - 1]`."""
    newcomers: tuple[ReplicaId, ...] = ()
    """The unproven replicas of the newest roster, if it has others."""
    working: tuple[tuple[Generation, tuple[ReplicaId, ...]], ...] = ()
    """(generation, its working roster) of each generation with newcomers that was planned in."""
    outvoted: tuple[tuple[ReplicaId, Generation], ...] = ()
    """(outvoted replica, first generation without it)."""
    void: Void | None = None
    """The newest step that was made void."""
    entered: tuple[tuple[ReplicaId, Generation], ...] = ()
    """(replica, newest generation that the replica entered)."""
    committed: tuple[tuple[ReplicaId, int], ...] = ()
    """(replica, number of steps that the replica has committed)."""
    steps: tuple[tuple[int, StepHistory], ...] = ()
    leaving: tuple[tuple[ReplicaId, int], ...] = ()
    """(replica, first step whose committed record asks the replica to leave)."""
    min_replicas: int = 1
    """Least number of members that stay where others leave."""
