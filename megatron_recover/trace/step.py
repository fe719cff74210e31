"""The events of a step's protocol, from what the members hold to the optimizer."""

from __future__ import annotations

from typing import Literal

from megatron_recover.trace.event import Event, Part


class Result(Part, frozen=True, kw_only=True):
    """The version of a bucket that a step commits."""

    bucket: int
    version: int
    checksums: tuple[int, ...]
    """One per rank of the bucket, in the order of `Joined.bucket_ranks`."""


class Decided(Part, frozen=True, kw_only=True):
    """A bucket that needs no reduction any more because `source` holds it complete."""

    bucket: int
    version: int
    source: int


class Transfer(Part, frozen=True, kw_only=True):
    """A decided bucket goes from `source` to `targets` (replicas)."""

    bucket: int
    version: int
    source: int
    targets: tuple[int, ...]


class Compute(Part, frozen=True, kw_only=True):
    """Microbatches to compute, their gradient kept for these buckets only."""

    microbatches: tuple[int, ...]
    into: tuple[int, ...]


class Contribution(Part, frozen=True, kw_only=True):
    """Microbatches that are, or will be, in the local gradient of these buckets. A bucket is in one contribution at most."""

    buckets: tuple[int, ...]
    microbatches: tuple[int, ...]


class Status(Event, frozen=True, kw_only=True):
    """Leader: what its replica told all members on entering a generation."""

    replica: int
    generation: int
    step: int
    """The step that it has not committed yet."""
    work: bool
    """Whether it has begun that step."""
    contributions: tuple[Contribution, ...]
    """The microbatches that its local gradient holds or will hold, buckets that hold the same ones together."""
    complete: tuple[tuple[int, int], ...]
    """(bucket, version) that it holds complete."""
    committed: int | None
    """The last step that it has committed."""
    finished: tuple[int, ...] = ()
    """Microbatches of the step that its first stage has finished, in that order: its journal."""
    computing: tuple[int, ...] = ()
    """Those that it has begun and not finished."""


class Plan(Event, frozen=True, kw_only=True):
    """Leader: what its replica does next for a step."""

    replica: int
    generation: int
    step: int
    label: str
    """Megatron's name for the step, e.g. ``train 17`` or ``evaluate 20/3``."""
    num_microbatches: int
    """M: the step's microbatches are 0..M-1."""
    roster: tuple[int, ...]
    quotas: tuple[int, ...]
    """Microbatches held by or dealt to each member, in the order of `roster`."""
    transfers: tuple[Transfer, ...] = ()
    computes: tuple[Compute, ...] = ()
    """Of this replica."""
    reduces: tuple[int, ...] = ()
    """Buckets to reduce in this generation."""
    decided: tuple[Decided, ...] = ()


class MicrobatchStarted(Event, frozen=True, kw_only=True):
    """Rank: a forward begins."""

    replica: int
    rank: int
    generation: int
    """Of the plan that dealt the microbatch."""
    step: int
    microbatch: int
    chunk: int = 0
    """Model chunk of this stage (0 without virtual pipelining)."""


class MicrobatchFinished(Event, frozen=True, kw_only=True):
    """Rank: a backward is done (in evaluation the forward), its gradient is in the local gradient of the buckets `into`."""

    replica: int
    rank: int
    generation: int
    step: int
    microbatch: int
    chunk: int = 0
    seconds: float
    """Forward and backward together, on this rank."""
    backward_s: float = 0.0
    """The backward alone, which has just ended."""
    into: tuple[int, ...]
    """Buckets of this rank and chunk that took the gradient, the ledger included; that of the others went to a dump."""


class BucketPassed(Event, frozen=True, kw_only=True):
    """Rank: the last backward of a pass still goes on, but all its gradient is in the local gradient of this bucket.

    Written before anyone gets a part of the bucket: a rank that dies before `MicrobatchFinished` may have contributed.
    """

    replica: int
    rank: int
    generation: int
    step: int
    microbatch: int
    chunk: int = 0
    bucket: int


class Extended(Event, frozen=True, kw_only=True):
    """Rank 0: the pass that runs takes in what a newer plan has dealt to its replica; otherwise it gets a pass of its own."""

    replica: int
    rank: int
    generation: int
    """Of that plan."""
    step: int
    microbatches: tuple[int, ...]


class Reduced(Event, frozen=True, kw_only=True):
    """Rank: the sum over the replicas of a bucket is complete here, and is about to be held."""

    replica: int
    rank: int
    generation: int
    step: int
    bucket: int
    version: int
    """The generation that produced it."""
    checksum: int
    """Of the result's bytes on this rank."""
    provenance: Literal["ones"] | tuple[int, ...]
    """How often each microbatch 0..M-1 is in the sum: "ones", or the counts where they are not all one."""
    seconds: float = 0.0
    """Since the sum began on this rank."""


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


class Miscounted(Event, frozen=True, kw_only=True):
    """Rank: a sum does not count every microbatch once. The step is computed anew, and the second time given up."""

    replica: int
    rank: int
    generation: int
    step: int
    bucket: int
    microbatches: tuple[int, ...]
    """Those that it does not count exactly once."""
    own_counts: tuple[int, ...]
    """How often this rank has each microbatch in its local gradient of the bucket."""


class ReductionFailed(Event, frozen=True, kw_only=True):
    """Rank: a sum or transfer over the replicas did not complete; no gradient changed."""

    replica: int
    rank: int
    generation: int
    step: int
    reason: str
    bucket: int | None = None


class StateDigested(Event, frozen=True, kw_only=True):
    """Rank: a step begins whose record carries the state digest, and this is the rank's part of it."""

    replica: int
    rank: int
    step: int
    label: str
    digest: str
    """Of all state of this rank."""


class Voted(Event, frozen=True, kw_only=True):
    """Leader: its replica is ready to commit a record."""

    replica: int
    generation: int
    step: int
    digest: str
    """Of the record without what voters say of themselves (requests, paces): all in which equal votes differ."""


class Disagreed(Event, frozen=True, kw_only=True):
    """Leader: members voted for different records; this is that of its own replica, so that they can be compared."""

    replica: int
    generation: int
    step: int
    label: str
    digest: str
    """As in `voted`."""
    versions: tuple[Result, ...]
    state_digest: str | None = None
    """As in `committed`."""
    reason: str
    """Who voted for what, and in which fields and buckets the records differ from this one."""


class Committed(Event, frozen=True, kw_only=True):
    """Leader: the step is committed."""

    replica: int
    generation: int
    """In which this replica committed it."""
    step: int
    label: str
    digest: str
    """Of the record without what voters said of themselves: equal to that of the votes."""
    adopted: bool
    """True: taken over from a member that had committed it in an older generation; False: by a full set of votes."""
    versions: tuple[Result, ...]
    requests: tuple[str, ...] = ()
    paces: tuple[tuple[int, int], ...] = ()
    """(voter, nanoseconds that one of its microbatches took; 0: it computed none): what quotas follow."""
    state_digest: str | None = None
    """Of the state that the step began with, over all ranks in rank order; None where no digest was due."""


class Applied(Event, frozen=True, kw_only=True):
    """Rank: the optimizer has run on the committed gradient."""

    replica: int
    rank: int
    generation: int
    step: int
    label: str
    parameter_digest: str | None = None
    """Of all parameters of this rank; None where not due (`--recover-digest-interval`) or nothing was trained."""
    lane_digest: str | None = None
    """Of those parameters that every lane must hold alike, where that is not all of them: experts are spread over lanes."""
    replicated_digest: str | None = None
    """Of those parameters that every tensor-parallel rank of the stage must hold alike; None where `parameter_digest` is."""
    loss: float | None = None
    """Mean over the step's microbatches, on the last stage; None elsewhere."""
