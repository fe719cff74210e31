"""The values that the machines of the protocol send each other, and what these consist of.

Every value of this module is immutable and hashable. So a state of the protocol can be compared,
kept in a set by the explorer, and sent over a wire as it is. This module knows no torch, clock,
socket or thread.

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
================  ==================  ================  ================  ====================

The end of a process is a `ProcessEnd` of the agent, a `Loss` once it cost a replica, and
`ReplicaLost` as the coordinator's input; the trace records the first as `failure`.
"""

from __future__ import annotations

import enum

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


# --- Orders: from a leader to all ranks of its replica, one stream in one order -------------------


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


Order = Promise | Plan | Close | Apply | Stop


# --- Reports: from a rank to its leader, in order -------------------------------------------------


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


class RankSaving(Value, frozen=True):
    """The training thread of rank 0 begins a checkpoint save, or has ended it (`over`)."""

    rank: int
    over: bool


Report = Begun | CloseAsked | PassTimed | Promised | Holds | RankBlocked | RankFailing | RankFinished | RankSaving


# --- Membership -----------------------------------------------------------------------------------


class LossKind(enum.Enum):
    """The reason why a replica left the roster (`policy.loss_of` classifies the end of a rank)."""

    PROCESS_ENDED = "process ended"
    """A rank ended by a signal from outside, with exit code 13, or with 0 after generation 1."""
    CRASHED = "crashed"
    """A rank ended by a signal of the computation (SIGSEGV, ...), or for want of memory."""
    HUNG = "hung"
    """A rank was stopped, or showed no progress for too long (`core/detector.py`)."""
    ENDED_EARLY = "ended early"
    """A rank ended with exit code 0 before generation 1."""
    EXCEPTION = "exception"
    """A rank ended with any other exit code."""
    SUSPECTED = "suspected"
    """The replica was late, named at fault or set aside, or its leader sent an invalid message."""
    DIVERGED = "diverged"
    """A strict majority of the members outvoted the replica (`Diverged`)."""
    INVARIANT_VIOLATED = "invariant violated"
    """A check inside a rank failed, and the rank ended itself (exit code 14)."""
    NODE_LOST = "node lost"
    """The node of one of its ranks is gone or out of reach, whatever the rank computed."""


class Loss(Value, frozen=True):
    """A replica that was lost, and the reason."""

    replica: ReplicaId
    kind: LossKind
    detail: str = ""


class Void(Value, frozen=True):
    """A step to compute anew: the only exception to INV-3, 4 and 7 (docs/design/guarantees.md)."""

    step: int
    """The step in which a sum does not count every microbatch once (`Miscounted`)."""
    since: Generation
    """Contributions and results of older generations are void."""
    gives_up: bool = False
    """True if the step was miscounted again when it was computed anew. Then it is committed without
    a result (`Work.given_up`): nothing changes, and the job ends."""


class NewGeneration(Value, frozen=True):
    """The coordinator's decision: from now on these replicas, and no others, are the job."""

    generation: Generation
    roster: tuple[ReplicaId, ...]
    losses: tuple[Loss, ...] = ()
    """Replicas lost since the previous generation, without those that had finished."""
    reason: str = ""
    requests: tuple[str, ...] = ()
    """Job-wide requests that each member adds to all its votes from now on (`core/request.py`)."""
    trusted_from: Generation = 0
    """Older versions do not count in an uncommitted step: a replica outvoted since may have taken
    part in them. 0: all count."""
    void: Void | None = None
    """The newest void step. All later generations repeat it: two may reach a member at once."""
    left: tuple[ReplicaId, ...] = ()
    """Members of the previous generation that have left as requested, ascending. They are no losses
    (`core/leaving.py`)."""


class AddRequests(Value, frozen=True):
    """The coordinator's message to one leader: add job-wide requests to all votes from now on.

    The next record carries them, and no generation is made. Every later `NewGeneration` repeats
    them, so they are not lost with that leader.
    """

    requests: tuple[str, ...]


class Grant(Value, frozen=True):
    """The coordinator's permission for one attempt to name a checkpoint (`core/grants.py`)."""

    number: int
    """Number of the grant in the run, from 1. No number is given twice."""
    generation: Generation
    """The generation in which the grant was given."""
    writer: ReplicaId
    """The only replica that may use the grant."""


# --- From a replica's leader to the coordinator ---------------------------------------------------


class Hello(Value, frozen=True):
    """A replica is ready to join."""

    replica: ReplicaId
    fingerprint: str
    """Digest of all that must be alike. The run ends if two replicas differ."""
    parts: tuple[tuple[str, str], ...] = ()
    """(name, value) of what must be alike, to describe a difference (`core/alike.py`)."""


class Entered(Value, frozen=True):
    """All ranks of a replica promised `generation`; its first uncommitted step is `step`."""

    replica: ReplicaId
    generation: Generation
    step: int
    waited_for: tuple[ReplicaId, ...] = ()
    """Members whose message the replica still needed when it left an older generation."""


class ReplicaBlocked(Value, frozen=True):
    """A replica cannot continue in `generation` and requests a newer one.

    If `generation` is over already, the request is only evidence, and only if `stalled`.
    """

    replica: ReplicaId
    generation: Generation
    reason: str
    suspects: tuple[ReplicaId, ...] = ()
    stalled: bool = False
    """Both as in `RankBlocked`."""


class ReplicaSaving(Value, frozen=True):
    """A replica saves a checkpoint until `over`. It takes part in no step, but still promises."""

    replica: ReplicaId
    over: bool


class ReplicaLeaving(Value, frozen=True):
    """A replica has begun a step of `generation` without a microbatch, and may leave.

    A committed record asks it to leave, so no member deals it a microbatch in this generation.
    """

    replica: ReplicaId
    generation: Generation


class Named(Value, frozen=True):
    """A replica has ended its attempt to name a checkpoint under the grant `number`."""

    replica: ReplicaId
    number: int


class ReplicaFailing(Value, frozen=True):
    """A rank of a replica ends or has ended, by an exception or in a computation."""

    replica: ReplicaId
    label: str
    microbatches: tuple[MicrobatchId, ...]
    """The microbatches that may be to blame, as in `RankFailing`; empty if none is."""
    error: str
    witnessed: bool = False
    """True if an agent read them from the progress page of a rank that crashed or hung."""


class Diverged(Value, frozen=True):
    """Members disagree on the work or the outcome of `step`, or on the record before it."""

    replica: ReplicaId
    generation: Generation
    step: int
    minority: tuple[ReplicaId, ...]
    """Members that a strict majority outvotes; empty if there is no such majority."""
    reason: str


class Miscounted(Value, frozen=True):
    """A sum of `step` in `generation` does not count every microbatch once."""

    replica: ReplicaId
    generation: Generation
    step: int
    reason: str


class ReplicaFinished(Value, frozen=True):
    """The training loop of a replica is over. The replica answers other members until `Stop`."""

    replica: ReplicaId
    exit_code: int
    is_saved: bool = False
    """True if the last record carries `request.SAVED`: the last checkpoint exists."""
    untrained: str = ""
    """Description of the last state if nothing was trained (`RequestKind.UNTRAINED`)."""


LeaderMessage = (
    Hello | Entered | ReplicaBlocked | ReplicaSaving | ReplicaLeaving | ReplicaFailing | Diverged | Miscounted
    | ReplicaFinished | Named
)  # fmt: skip


class ExitCode(enum.IntEnum):
    """The ends of a run (docs/reference/exit_codes.md)."""

    OK = 0
    FAILED = 1
    """The run failed for a reason that no other code names. Examples: a defect, an exception on
    every replica, replicas that do not start alike, no committed step and nobody proven at
    fault."""
    BAD_INPUT = 2
    UNFINISHED = 3
    """`check` only: all that was judged holds, but the trace has no end or lacks events."""
    TOO_FEW_REPLICAS = 10
    """Fewer than `--recover-min-replicas` are left, and a survivor saves if `--save` is set. Or
    fewer have started, and nothing was trained."""
    POISONED_MICROBATCH = 11
    """Computing one microbatch has ended two replicas. The message names the microbatch."""
    DIVERGED = 12
    """Replicas disagree on results, and no majority decides."""
    NO_REPLICA_LEFT = 13
    INVARIANT_VIOLATED = 14
    """The checker or a rank found a broken invariant, or a step was miscounted twice."""
    INTERRUPTED = 15
    """A signal or time limit ended all replicas at a common step, which is saved with `--save`, or
    a signal ended the run before training began."""
    UNSAVED = 16
    """Training ended, but its last checkpoint could not be written."""

    @classmethod
    def words(cls, code: int) -> str:
        """Return a name for the exit code of a run; codes that are not listed are of signals."""
        return cls(code).name.lower().replace("_", " ") if code in list(cls) else "killed"
