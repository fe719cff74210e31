"""The events of a step's protocol, from the statuses of the members to the optimizer."""

from __future__ import annotations

from typing import Literal

from megatron_recover.trace.event import Event, Part


class Result(Part, frozen=True, kw_only=True):
    """The version of a bucket that a step commits."""

    bucket: int
    version: int
    checksums: tuple[int, ...]
    """One checksum per rank of the bucket, in the order of `Joined.bucket_ranks`."""


class Decided(Part, frozen=True, kw_only=True):
    """A bucket that needs no further reduction, because `source` holds it complete."""

    bucket: int
    version: int
    source: int


class Transfer(Part, frozen=True, kw_only=True):
    """A transfer of a decided bucket from replica `source` to the replicas `targets`."""

    bucket: int
    version: int
    source: int
    targets: tuple[int, ...]


class Compute(Part, frozen=True, kw_only=True):
    """Microbatches to compute, whose gradient is kept only for the buckets `into`."""

    microbatches: tuple[int, ...]
    into: tuple[int, ...]


class Contribution(Part, frozen=True, kw_only=True):
    """Microbatches that are, or will be, in the local gradient of these buckets.

    In a status, a bucket is in one contribution at most.
    """

    buckets: tuple[int, ...]
    microbatches: tuple[int, ...]


class Status(Event, frozen=True, kw_only=True):
    """Leader: the status that its replica sent to all members on entering a generation."""

    replica: int
    generation: int
    step: int
    """The step that the replica has not committed yet."""
    work: bool
    """True if the replica has begun that step."""
    contributions: tuple[Contribution, ...]
    """Microbatches that the local gradient holds or will hold, grouped by buckets that hold the
    same."""
    complete: tuple[tuple[int, int], ...]
    """(bucket, version) of the results that the replica holds complete."""
    committed: int | None
    """The last step that the replica has committed; None before the first."""
    finished: tuple[int, ...] = ()
    """Microbatches of the step that rank 0 had finished when it promised, in the order in which
    they ended."""
    computing: tuple[int, ...] = ()
    """Microbatches that rank 0 had then begun and not finished."""
    state_digest: str | None = None
    """Digest of the state that the step began with, as in `Committed`. Given for newcomers, if the
    generation has any and the digest is known."""


class Plan(Event, frozen=True, kw_only=True):
    """Leader: the plan of its replica for a step."""

    replica: int
    generation: int
    step: int
    label: str
    """Label of the step, e.g. ``train 17`` or ``evaluate 20/3``."""
    num_microbatches: int
    """M; the step's microbatches are 0..M-1."""
    roster: tuple[int, ...]
    quotas: tuple[int, ...]
    """Number of microbatches held by or dealt to each member, in the order of `roster`."""
    transfers: tuple[Transfer, ...] = ()
    computes: tuple[Compute, ...] = ()
    """Microbatches that this replica computes."""
    reduces: tuple[int, ...] = ()
    """Buckets to reduce in this generation."""
    decided: tuple[Decided, ...] = ()


class MicrobatchStarted(Event, frozen=True, kw_only=True):
    """Rank: the forward of a microbatch begins."""

    replica: int
    rank: int
    generation: int
    """Generation of the plan that dealt the microbatch."""
    step: int
    microbatch: int
    chunk: int = 0
    """Model chunk of this stage (0 without virtual pipelining)."""


class MicrobatchFinished(Event, frozen=True, kw_only=True):
    """Rank: the backward of a microbatch (in evaluation the forward) is done.

    The gradient is in the local gradient of the buckets `into`.
    """

    replica: int
    rank: int
    generation: int
    step: int
    microbatch: int
    chunk: int = 0
    seconds: float
    """Seconds of forward and backward together, on this rank."""
    backward_s: float = 0.0
    """Seconds of the backward alone, which has just ended; 0 in evaluation."""
    into: tuple[int, ...]
    """Buckets of this rank and chunk that received the gradient, the ledger included. The gradient
    of the other buckets went to a dump."""


class BucketPassed(Event, frozen=True, kw_only=True):
    """Rank: the last backward of a pass adds nothing more to a bucket. The backward may still run.

    The event is recorded before any other rank gets a part of the bucket. So a rank that dies
    before `MicrobatchFinished` may have contributed to the bucket.
    """

    replica: int
    rank: int
    generation: int
    step: int
    microbatch: int
    chunk: int = 0
    bucket: int


class Extended(Event, frozen=True, kw_only=True):
    """Rank 0: the running pass also computes the microbatches that a newer plan has dealt.

    Other such microbatches are in the plan that opens their pass.
    """

    replica: int
    rank: int
    generation: int
    """Generation of that plan."""
    step: int
    microbatches: tuple[int, ...]


class Reduced(Event, frozen=True, kw_only=True):
    """Rank: the sum of a bucket over the replicas is complete here.

    The rank is about to hold the sum, unless `provenance` is not "ones" or a newer generation was
    promised.
    """

    replica: int
    rank: int
    generation: int
    step: int
    bucket: int
    version: int
    """The generation of the reduction."""
    checksum: int
    """Checksum of the result on this rank, combined with the newest checksum of the parameters."""
    provenance: Literal["ones"] | tuple[int, ...]
    """The word "ones" if each microbatch 0..M-1 is in the sum exactly once (with lanes: once for
    each lane of the bucket). Otherwise the count of each microbatch, over all lanes; -1 if it is
    not finite."""
    seconds: float = 0.0
    """Seconds that `Transport.sum_into` took on this rank. The event may be recorded later."""


class Transferred(Event, frozen=True, kw_only=True):
    """Rank: a decided bucket has arrived from the same-position rank of `source`."""

    replica: int
    rank: int
    generation: int
    step: int
    bucket: int
    version: int
    source: int
    checksum: int
    """Checksum of the result on this rank, combined with the newest checksum of the parameters."""


class Miscounted(Event, frozen=True, kw_only=True):
    """Rank: a sum does not count every microbatch once.

    The step is then computed anew. If a sum miscounts again, the step is given up.
    """

    replica: int
    rank: int
    generation: int
    step: int
    bucket: int
    microbatches: tuple[int, ...]
    """Microbatches that the sum does not count exactly once."""
    own_counts: tuple[int, ...]
    """Number of times that each microbatch is in this rank's local gradient of the bucket."""


class ReductionFailed(Event, frozen=True, kw_only=True):
    """Rank: a sum or transfer over the replicas failed, or its result was refused.

    A result is refused if it counts microbatches wrongly, if another rank's gradient in it is not
    finite, or if a newer generation was promised. No local gradient changed.
    """

    replica: int
    rank: int
    generation: int
    step: int
    reason: str
    bucket: int | None = None
    """Bucket of the sum; None for a transfer, or if there was no transport."""


class StateDigested(Event, frozen=True, kw_only=True):
    """Rank: the digest of the state with which it began a step.

    It is recorded if the record of the step carries the state digest, and for each newcomer's
    reading of that state. Both are the same digest.
    """

    replica: int
    rank: int
    step: int
    label: str
    digest: str
    """Digest of all state of this rank."""


class Voted(Event, frozen=True, kw_only=True):
    """Leader: its replica is about to vote for a record."""

    replica: int
    generation: int
    step: int
    digest: str
    """Digest of the record without the fields that may differ between equal votes (requests,
    paces)."""


class Disagreed(Event, frozen=True, kw_only=True):
    """Leader: members voted for different records, and this is the record of its own replica.

    The event allows a comparison of the records. Members may also disagree on what the step is, or
    on the record of the step before. Then there is no vote, and `digest` is empty.
    """

    replica: int
    generation: int
    step: int
    label: str
    digest: str
    """Same digest as in `voted`."""
    versions: tuple[Result, ...]
    state_digest: str | None = None
    """Same digest as in `committed`."""
    reason: str
    """The votes of the members, and the fields and buckets in which their records differ from this
    one."""


class Committed(Event, frozen=True, kw_only=True):
    """Leader: the step is committed in its replica."""

    replica: int
    generation: int
    """Generation in which this replica committed the step."""
    step: int
    label: str
    digest: str
    """Digest of the record without the voters' own fields (requests, paces); equal to that of the
    votes."""
    adopted: bool
    """True: the record is from a member that had committed the step in an older generation. False:
    a full set of votes committed the step."""
    versions: tuple[Result, ...]
    requests: tuple[str, ...] = ()
    paces: tuple[tuple[int, int], ...] = ()
    """(voter, nanoseconds a microbatch took the voter; 0: it computed none). Quotas follow from
    these."""
    state_digest: str | None = None
    """Digest of the state that the step began with, over all ranks in rank order; None if none was
    due."""


class Applied(Event, frozen=True, kw_only=True):
    """Rank: the optimizer has run on the committed gradient, or the step has nothing for it."""

    replica: int
    rank: int
    generation: int
    step: int
    label: str
    parameter_digest: str | None = None
    """Digest of all parameters of this rank; None if not due (`--recover-digest-interval`) or if
    nothing was trained. With `--overlap-param-gather` and lanes, of this lane's shard."""
    lane_digest: str | None = None
    """Digest of the parameters that must be equal on every lane; None if these are all parameters,
    or if `parameter_digest` is None. Experts are spread over lanes. Empty if `parameter_digest`
    covers a shard, which no other lane has."""
    replicated_digest: str | None = None
    """Digest of the parameters that must be equal on every tensor-parallel rank of the stage; None
    if `parameter_digest` is, or covers a shard."""
    loss: float | None = None
    """Mean loss over the step's microbatches, on the last stage; None on other stages, and in a
    step without a loss."""
