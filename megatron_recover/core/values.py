"""The values that the messages of the protocol consist of, and those that members exchange.

Every value of this module is immutable and hashable. So a state of the protocol can be compared,
kept in a set by the explorer, and sent over a wire as it is. This module knows no torch, clock,
socket or thread. The messages between a leader and its ranks are in `rank_messages.py`, those
between the coordinator and the leaders in `membership_messages.py`.

Words (docs/design/glossary.md has all of them):

replica
    One complete copy of the model on its own ranks. Rank 0 is also its *leader*: it exchanges
    messages with the coordinator and with the leaders of the other replicas.
roster, member, generation
    The replicas that form the job now; one of them; the number of the agreement on them.
step
    The unit that is committed as a whole: training, evaluation, or a comparison of all state.
    Numbered 0, 1, 2, ... by all replicas alike; `Work.label` names Megatron's iteration.
bucket
    A fixed slice of one stage's gradient buffer, numbered 0..B-1 over all stages of a replica.
    Bucket B-1 is the *ledger*: tokens, losses and seconds per microbatch, on the last stage.
local gradient, result
    The gradient that a replica's own backwards added up; the sum of all replicas' local gradients,
    kept in separate memory.
version
    The generation that reduced a result. A generation reduces a bucket of a step at most once, so
    (step, bucket, version) names one result for all time.
"""

from __future__ import annotations

import msgspec

from megatron_recover.core import label as labels

ReplicaId = int
"""The number of a replica, from 0. The number of a lost replica is never used again in the run."""
Generation = int
"""The number of an agreed roster, from 1, strictly increasing. 0: no generation yet."""
BucketId = int
Version = int
MicrobatchId = int


class Value(msgspec.Struct, frozen=True, tag=True):
    """Base class of the values of `core/`: immutable, tagged with its class name on the wire.

    A value is hashable if all of its fields are.
    """


class Pipeline(Value, frozen=True):
    """The pipeline of a replica, on which the time of a pass depends (`core/quota.py`)."""

    num_stages: int = 1
    """Pipeline stages (PP)."""
    num_chunks: int = 1
    """Model chunks per stage: more than 1 with virtual stages (VPP)."""


class Shape(Value, frozen=True):
    """The layout of a replica. The run starts only if all replicas have equal shapes."""

    num_ranks: int
    """Ranks of one replica (TP x PP x CP x lanes)."""
    bucket_ranks: tuple[tuple[int, ...], ...]
    """The ranks (0..num_ranks-1) that hold each bucket: those of its stage."""
    pipeline: Pipeline = Pipeline()


class Work(Value, frozen=True):
    """The content of one step, equal on all replicas."""

    label: str
    """Text of a `label.Label`: ``train 17``, ``evaluate 20/3``, ``save 20`` or ``end 0``."""
    num_microbatches: int
    """M: the ids of the step's microbatches are 0..M-1."""
    buckets: tuple[BucketId, ...]
    """Buckets that the step reduces: all in training, else only the ledger; none if given up."""
    digests: bool = False
    """True if the step's record carries the state digest (`Record.state_digest`)."""

    def given_up(self) -> Work:
        """Return the work that replaces a step that is given up (`Void.gives_up`)."""
        return Work(labels.given_up(self.label), 0, (), self.digests)


class Compute(Value, frozen=True):
    """Microbatches to compute into the same buckets, in a pass (`core/rank.py`, Note [Passes])."""

    microbatches: tuple[MicrobatchId, ...]
    into: tuple[BucketId, ...]
    """Buckets that receive the gradient. For all others the gradient is discarded: these buckets
    are decided, or a member's local gradient of them contains the microbatches."""


class Transfer(Value, frozen=True):
    """The copy of a decided bucket's result from one member to all members that lack the result."""

    bucket: BucketId
    version: Version
    source: ReplicaId
    targets: tuple[ReplicaId, ...]


class Held(Value, frozen=True):
    """The complete result of a bucket on one rank."""

    bucket: BucketId
    version: Version
    checksum: int
    """Checksum of the result on this rank, combined with the newest checksum of the parameters."""


class BucketVersion(Value, frozen=True):
    """A bucket whose result is complete, in one version, on all ranks of its stage in a replica."""

    bucket: BucketId
    version: Version
    checksums: tuple[int, ...]
    """`Held.checksum` of each rank of the bucket, in the order of `Shape.bucket_ranks`."""


class Record(Value, frozen=True):
    """The outcome of a step. All replicas that commit a step commit equal records."""

    step: int
    label: str
    versions: tuple[BucketVersion, ...]
    """The committed results, one per bucket of `Work.buckets`."""
    requests: tuple[str, ...] = ()
    """Job-wide requests, such as exit (`core/request.py`). In a vote: the voter's own. In a
    committed record: the sorted union of all voters'. Not related to `ReplicaBlocked`."""
    paces: tuple[tuple[ReplicaId, int], ...] = ()
    """(voter, nanoseconds per microbatch; 0: it computed none); empty unless the step trains. In a
    vote: the voter's own. In a committed record: all voters', by replica (`core/speed.py`)."""
    state_digest: int | None = None
    """Digest of all state of a replica as the step begins; None unless `Work.digests`."""

    @property
    def gives_up(self) -> bool:
        """Return whether the step ends without having changed anything (`Void.gives_up`)."""
        return labels.label_of(self.label).is_given_up


class Vote(Value, frozen=True):
    """A vote to commit a record in `generation`: a digest, since every voter has the record."""

    replica: ReplicaId
    generation: Generation
    step: int
    digest: bytes
    """Digest of the record without requests and paces (`core/digest.py`)."""
    outline: bytes
    """Short digests of the record's parts, to describe a disagreement (Note [Outline] there)."""
    requests: tuple[str, ...] = ()
    paces: tuple[tuple[ReplicaId, int], ...] = ()
    """Both the voter's own, as in `Record`."""


class Commitment(Value, frozen=True):
    """A committed record on its way to a member that voted for the record and has not committed."""

    record: Record
    """The record with empty `versions`: the receiver inserts the versions of its own results."""
    digest: bytes
    """`Vote.digest` of the record with its versions. The receiver compares its own record to it."""


class Journal(Value, frozen=True):
    """A replica's progress in a step, as seen by rank 0, on whose stage each backward ends last."""

    started: tuple[MicrobatchId, ...] = ()
    """Microbatches in the order in which rank 0 began their forwards."""
    finished: tuple[MicrobatchId, ...] = ()
    """Microbatches in the order in which rank 0 ended their backwards (in evaluation: forwards)."""

    @property
    def computing(self) -> tuple[MicrobatchId, ...]:
        """Return the microbatches that are started and not finished."""
        return tuple(microbatch for microbatch in self.started if microbatch not in self.finished)


class Contribution(Value, frozen=True):
    """Buckets whose local gradients contain, or will contain, the same microbatches."""

    buckets: tuple[BucketId, ...]
    microbatches: tuple[MicrobatchId, ...]
    """Both ascending and not empty."""


class HeldVersion(Value, frozen=True):
    """Buckets, ascending, of which a replica holds complete results of the same version."""

    version: Version
    buckets: tuple[BucketId, ...]


class Status(Value, frozen=True):
    """A member's position, sent to all members once all its ranks have promised a generation."""

    replica: ReplicaId
    generation: Generation
    step: int
    """The first step that the member has not committed."""
    work: Work | None
    """Work of `step`; None if the member has not begun the step."""
    contributions: tuple[Contribution, ...]
    """Microbatches in the member's local gradients, also those only dealt to the member so far."""
    complete: tuple[HeldVersion, ...]
    """Buckets of `step` whose results the member holds complete, by version."""
    committed: Commitment | None
    """The record of `step - 1`, for members that have not committed it; None if `step` is 0."""
    journal: Journal = Journal()
    """Journal of `step`, as of the promise of rank 0."""
    state_digest: int | None = None
    """Digest of all state of the member as `step` begins, for newcomers of the generation; None if
    there are none, or if the digest is not known."""


class Claim(Value, frozen=True):
    """A newcomer's statement that it has read the state with which a training step begins.

    A newcomer is a replica that is formed and not yet in a roster (`core/joining.py`).
    """

    replica: ReplicaId
    label: str
    """Label of the step: state is named by iteration, since a newcomer knows no protocol step."""
    digest: int
    """State digest (as `Record.state_digest`) that the newcomer computed from what it has read."""


class Statuses(Value, frozen=True):
    """Statuses of several members, forwarded by `replica` to its neighbour in the tree."""

    replica: ReplicaId
    generation: Generation
    statuses: tuple[Status, ...]
    """Sorted. Towards the root: from `replica` and all below. From the root: from all members."""


class Ballot(Value, frozen=True):
    """Votes for the same digest, united."""

    digest: bytes
    outline: bytes
    """Both as in `Vote`."""
    voters: tuple[ReplicaId, ...]
    """Ascending."""
    requests: tuple[str, ...] = ()
    """Sorted union of the voters' requests."""
    paces: tuple[tuple[ReplicaId, int], ...] = ()
    """Paces of all voters, by replica (`Record.paces`)."""


class Votes(Value, frozen=True):
    """Votes of several members, forwarded by `replica` to its neighbour in the tree."""

    replica: ReplicaId
    generation: Generation
    step: int
    ballots: tuple[Ballot, ...]
    """Towards the root: from `replica` and all below. From the root: from all (`core/tree.py`)."""
