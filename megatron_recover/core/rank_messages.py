"""The messages between a leader and the ranks of its replica.

*Orders* go from the leader to all ranks of its replica, as one stream in one order. *Reports* go
from a rank to its leader, in order.

Names of one fact on its way (one stem each; a verb is an input, `Rank...` and `Replica...` are
messages; empty where the fact goes no further):

================  ==================  ================  ================  ====================
fact              call of a trainer   input of the      report of a rank  message of a leader
                  (`RankDriver`)      rank's machine    to its leader     to the coordinator
================  ==================  ================  ================  ====================
step begins       `begin`             `Begin`           `Begun`
end of the pass   `ask_close`         `AskClose`        `CloseAsked`
time of a pass    `pass_timed`        `TimePass`        `PassTimed`
result            `hold`              `Hold`            `Holds`
failed sum        `blocked`           `Block`           `RankBlocked`     `ReplicaBlocked`
exception         `failing`           `Fail`            `RankFailing`     `ReplicaFailing`
leave                                                                     `ReplicaLeaving`
save              `saving`            `Save`            `RankSaving`      `ReplicaSaving`
end of training   `close`             `Finish`          `RankFinished`    `ReplicaFinished`
promise                               `Promise`         `Promised`        `Entered`
digest of state                       `Digest`          `StateDigested`   `NewcomerReady`
================  ==================  ================  ================  ====================
"""

from __future__ import annotations

from megatron_recover.core.values import (
    BucketId,
    Compute,
    Generation,
    Held,
    Journal,
    MicrobatchId,
    Record,
    ReplicaId,
    Transfer,
    Value,
    Work,
)

# --- Orders ---------------------------------------------------------------------------------------


class Promise(Value, frozen=True):
    """Order to enter a generation: revoke older transports, count no older result, acknowledge."""

    generation: Generation
    roster: tuple[ReplicaId, ...]


class Plan(Value, frozen=True):
    """Order to work on a step: compute, transfer and reduce.

    Transfers and reductions cross replicas, and end early when a newer generation comes. Computing
    and sums over lanes stay inside the replica and always run in full: all ranks of a replica
    must run the same collectives in the same order.
    """

    step: int
    generation: Generation
    roster: tuple[ReplicaId, ...]
    work: Work
    quotas: tuple[int, ...]
    """Microbatches of the step that each member has in some bucket or is dealt, at most M each, in
    the order of `roster`. The sum exceeds M where two members have one in different buckets."""
    transfers: tuple[Transfer, ...]
    """All transfers between members; `computes` are those of this replica alone."""
    computes: tuple[Compute, ...]
    reduces: tuple[BucketId, ...]
    """Buckets to reduce in `generation`. Each rank reduces its own in the order of backward."""
    voids: bool = False
    """True if the ranks must first empty their local gradients (`NewGeneration.void`)."""


class Close(Value, frozen=True):
    """Order to end the running pass with the plans before this order. Later ones get a new pass."""

    step: int


class Apply(Value, frozen=True):
    """Order to apply a committed step. In training the results become the optimizer's gradient."""

    record: Record
    generation: Generation
    roster: tuple[ReplicaId, ...] = ()
    """Members of `generation`."""


class Stop(Value, frozen=True):
    """Order to end this replica: the job is over, or cannot continue here."""

    exit_code: int
    reason: str


class EnterTraining(Value, frozen=True):
    """Order to a newcomer to begin training at `step`: the plan of its generation admits it."""

    step: int


Order = Promise | Plan | Close | Apply | Stop | EnterTraining


# --- Reports --------------------------------------------------------------------------------------


class Begun(Value, frozen=True):
    """The rank arrives at a step. Rank 0 always reports it, others with requests or a digest."""

    rank: int
    step: int
    work: Work
    requests: tuple[str, ...] = ()
    digest: int | None = None
    """Digest of all state of this rank as the step begins; None unless `work.digests`."""
    stays: bool = False
    """True if the replica must not leave in this step: it writes a checkpoint in the background."""


class CloseAsked(Value, frozen=True):
    """Rank 0 requests `Close` as it begins its last known forward. Plans before `Close` join."""

    rank: int
    step: int


class Promised(Value, frozen=True):
    """The rank has revoked everything older than `generation`, and has reported all it holds."""

    rank: int
    generation: Generation
    journal: Journal = Journal()
    """Journal of rank 0. Empty from other ranks."""


class PassTimed(Value, frozen=True):
    """Rank 0 knows the time of a training step's first pass; on a GPU after its kernels ended."""

    rank: int
    num_microbatches: int
    """Microbatches of the pass, with all that joined it; more than 0."""
    elapsed_ns: int


class Holds(Value, frozen=True):
    """The rank holds these results complete, from reductions or transfers."""

    rank: int
    step: int
    held: tuple[Held, ...]


class RankBlocked(Value, frozen=True):
    """A reduction or transfer of `generation` failed or waited too long on this rank."""

    rank: int
    generation: Generation
    reason: str
    suspects: tuple[ReplicaId, ...] = ()
    """Members that this rank lost or waited for in vain, as far as it knows (`core/blame.py`)."""
    stalled: bool = False
    """True if the rank had waited long: then the suspects count even if the generation is over."""
    miscounted: int | None = None
    """Step of a sum that does not count every microbatch once (nobody holds the sum), or None."""


class RankFailing(Value, frozen=True):
    """An exception ends the rank (NaN check, out of memory, ...)."""

    rank: int
    step: int
    label: str
    microbatches: tuple[MicrobatchId, ...]
    """The microbatch that was being computed, or all of its pass; empty if none is to blame."""
    error: str


class RankFinished(Value, frozen=True):
    """The rank's training loop is over. Its control thread still obeys orders until `Stop`."""

    rank: int


class StateDigested(Value, frozen=True):
    """The rank has digested the state with which the training step `label` begins.

    Ranks of a newcomer report this of what they have read, ranks of a member of what they serve.
    """

    rank: int
    label: str
    digest: int


class RankSaving(Value, frozen=True):
    """The training thread of rank 0 begins a checkpoint save, or has ended it (`over`)."""

    rank: int
    over: bool


Report = (
    Begun | CloseAsked | PassTimed | Promised | Holds | RankBlocked | RankFailing | RankFinished | RankSaving | StateDigested
)
