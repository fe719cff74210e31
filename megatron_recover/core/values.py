"""The words of the protocol: frozen values that machines take in, keep and give out.

Nothing here knows torch, a clock, a socket or a thread. Every value is immutable and hashable, so a state of the protocol
can be compared, stored in a set by the explorer, and sent over a wire as it is.

Words (docs/architecture.md has all of them):

step
    One unit that is committed as a whole: a training step or one evaluation step. Steps are numbered 0, 1, 2, ... from the
    start of the run by every replica alike; `Work.label` ties a number to Megatron's iteration.
bucket
    A fixed slice of one stage's gradient buffer, numbered 0..B-1 over all stages of the replica; the last one is the
    *ledger* (tokens, losses and seconds per microbatch id, held by the last stage).
version
    The generation that produced a bucket's result. Within one step and generation a bucket is reduced at most once, so
    (step, bucket, version) names one result for all time.
"""

from __future__ import annotations

import enum

import msgspec

from megatron_recover.core import label as labels

ReplicaId = int
"""Names a replica for the whole run; never used again after the replica is lost."""
Generation = int
"""The agreed membership number, from 1; strictly increasing."""
BucketId = int
Version = int
MicrobatchId = int


class Value(msgspec.Struct, frozen=True, tag=True):
    """Base of every protocol value: immutable, hashable, and told apart by its class name on the wire."""


class Pipeline(Value, frozen=True):
    """The stages through which a replica's microbatches go: what a pass takes depends on them (`core/quota.py`)."""

    num_stages: int = 1
    """PP."""
    num_chunks: int = 1
    """Model chunks of a stage: more than 1 with virtual stages (VPP)."""


class Shape(Value, frozen=True):
    """What the protocol knows of a replica: its ranks and who holds which bucket; equal in all, or the run does not start."""

    num_ranks: int
    """Ranks of one replica (TP x PP x CP x lanes)."""
    bucket_ranks: tuple[tuple[int, ...], ...]
    """For each bucket the ranks (0..num_ranks-1) that hold it: those of its stage."""
    pipeline: Pipeline = Pipeline()


class Work(Value, frozen=True):
    """What one step consists of; the same on every replica."""

    label: str
    """The text of a `label.Label`: ``train 17``, ``evaluate 20/3``, ``save 20`` or ``end 0``."""
    num_microbatches: int
    """M: the ids are 0..M-1."""
    buckets: tuple[BucketId, ...]
    """Buckets that this step reduces (all for training, only the ledger for evaluation)."""
    digests: bool = False
    """Whether the step's record carries the state digest (`Record.state_digest`)."""

    def given_up(self) -> Work:
        """Return what is left of this step when it is given up (`Void.gives_up`): a record without results."""
        return Work(labels.given_up(self.label), 0, (), self.digests)


class Compute(Value, frozen=True):
    """Microbatches to compute, for the same buckets; a part of a pass (`core/rank.py`, Note [Passes])."""

    microbatches: tuple[MicrobatchId, ...]
    into: tuple[BucketId, ...]
    """Buckets that take the gradient; that of the others goes to a dump, since they are decided or hold it already."""


class Transfer(Value, frozen=True):
    """A decided bucket goes from a replica that holds it to those that lack it."""

    bucket: BucketId
    version: Version
    source: ReplicaId
    targets: tuple[ReplicaId, ...]


class Held(Value, frozen=True):
    """A rank holds the complete result of a bucket."""

    bucket: BucketId
    version: Version
    checksum: int
    """Of the result's bytes on this rank, and of the parameters that the step starts from."""


class BucketVersion(Value, frozen=True):
    """A bucket that is complete on all ranks of its stage in one replica."""

    bucket: BucketId
    version: Version
    checksums: tuple[int, ...]
    """One per rank of the bucket, in the order of `Shape.bucket_ranks`."""


class Record(Value, frozen=True):
    """What a step commits. Two replicas that commit a step commit equal records."""

    step: int
    label: str
    versions: tuple[BucketVersion, ...]
    requests: tuple[str, ...] = ()
    """What voters ask of all: in a vote the voter's own, in what is committed their sorted union. To exit, and what is said of
    the last checkpoint (`core/request.py`). Nothing to do with `Requested`, which asks the coordinator for a generation."""
    paces: tuple[tuple[ReplicaId, int], ...] = ()
    """(voter, nanoseconds that one of its microbatches took; 0: it computed none), in a vote the voter's own, in what is
    committed those of all voters, by replica. Empty unless the step trains (`core/speed.py`)."""
    state_digest: int | None = None
    """Of the state that the step began with, over all ranks of a replica in rank order (`core/digest.py`); None unless
    `Work.digests`."""

    @property
    def gives_up(self) -> bool:
        """Whether the step is over without having changed anything (`Void.gives_up`)."""
        return labels.label_of(self.label).is_given_up


class Vote(Value, frozen=True):
    """One replica is ready to commit a record in `generation`. The record is not in the vote: all who agree hold it."""

    replica: ReplicaId
    generation: Generation
    step: int
    digest: bytes
    """Of the record without requests and paces (`core/digest.py`)."""
    outline: bytes
    """Describes a difference, and decides nothing (Note [Outline] in `core/digest.py`)."""
    requests: tuple[str, ...] = ()
    """The voter's own, as in `Record`."""
    paces: tuple[tuple[ReplicaId, int], ...] = ()
    """The voter's own, as in `Record`."""


class Commitment(Value, frozen=True):
    """A committed record as it travels to a member that has not committed it. That member voted for the same record."""

    record: Record
    """Without its `versions`: the member takes them from its own results."""
    digest: bytes
    """Of the whole record, as in `Vote`: the member compares it with what it has put together."""


class Journal(Value, frozen=True):
    """How far a replica is with its microbatches of a step: what it has started and not finished is being computed."""

    started: tuple[MicrobatchId, ...] = ()
    """In the order in which its first stage began their forwards."""
    finished: tuple[MicrobatchId, ...] = ()
    """In the order in which their backwards (in evaluation forwards) ended there: all stages have their gradient."""

    @property
    def computing(self) -> tuple[MicrobatchId, ...]:
        """Begun and not finished."""
        return tuple(microbatch for microbatch in self.started if microbatch not in self.finished)


class Contribution(Value, frozen=True):
    """Buckets whose local gradients hold, or will hold, the same microbatches."""

    buckets: tuple[BucketId, ...]
    """Ascending; not empty."""
    microbatches: tuple[MicrobatchId, ...]
    """Ascending; not empty."""


class HeldVersion(Value, frozen=True):
    """Buckets that a replica holds complete in the same version."""

    version: Version
    buckets: tuple[BucketId, ...]
    """Ascending; not empty."""


class Status(Value, frozen=True):
    """What a replica tells all members on entering a generation, after all its ranks promised."""

    replica: ReplicaId
    generation: Generation
    step: int
    """The step that it has not committed yet."""
    work: Work | None
    """The step's work, or None if this replica has not begun it."""
    contributions: tuple[Contribution, ...]
    """The ids that its local gradients hold or will hold (dealt to it, being computed); see `core/contribution.py`."""
    complete: tuple[HeldVersion, ...]
    """Buckets of this step that it holds complete, by version."""
    committed: Commitment | None
    """The record of `step - 1`, for members that have not committed it."""
    journal: Journal = Journal()
    """Of this step, when rank 0 promised."""


class Statuses(Value, frozen=True):
    """What several members say on entering a generation, handed on by a neighbour in the tree (`core/tree.py`)."""

    replica: ReplicaId
    """Who hands it on."""
    generation: Generation
    statuses: tuple[Status, ...]
    """Of the subtree below `replica` on the way up, of all members on the way down; by replica."""


class Ballot(Value, frozen=True):
    """Votes for the same."""

    digest: bytes
    outline: bytes
    """As in `Vote`."""
    voters: tuple[ReplicaId, ...]
    """Ascending."""
    requests: tuple[str, ...] = ()
    """The sorted union of the voters'."""
    paces: tuple[tuple[ReplicaId, int], ...] = ()
    """Those of all voters, by replica."""


class Votes(Value, frozen=True):
    """Votes of several members of `generation` for `step`, handed on by a neighbour in the tree."""

    replica: ReplicaId
    """Who hands them on."""
    generation: Generation
    step: int
    ballots: tuple[Ballot, ...]
    """Of the subtree below `replica` on the way up, of all members on the way down."""


# --- Orders: from a replica's leader to its ranks, obeyed in the order in which they were given ---------------------------


class Promise(Value, frozen=True):
    """Enter a generation: retire every older transport, register no result of an older generation, then acknowledge."""

    generation: Generation
    roster: tuple[ReplicaId, ...]


class Plan(Value, frozen=True):
    """What a replica does next for a step: it computes, then transfers, then reduces.

    Transfers and reductions cross replicas and end early when a newer generation comes. What is computed (and reductions over
    lanes) stays inside the replica and is always carried out in full, because all ranks of a replica must run the same
    collectives in the same order.
    """

    step: int
    generation: Generation
    roster: tuple[ReplicaId, ...]
    work: Work
    quotas: tuple[int, ...]
    """How many of this step's microbatches each member holds in some bucket or is dealt, in the order of `roster`: at most M
    each. Where members hold the same one for different buckets, the sum exceeds M."""
    transfers: tuple[Transfer, ...]
    computes: tuple[Compute, ...]
    reduces: tuple[BucketId, ...]
    """Buckets to reduce in this generation. All replicas do so in one order, that in which backward passes them."""
    voids: bool = False
    """All that this replica has of the step is void (`NewGeneration.void`): its ranks empty their local gradients before they
    carry out this plan."""


class Close(Value, frozen=True):
    """The pass that runs ends with the plans before this order: what comes behind it is computed in a pass of its own."""

    step: int


class Apply(Value, frozen=True):
    """The step is committed: make the results the gradient and run the optimizer."""

    record: Record
    generation: Generation
    roster: tuple[ReplicaId, ...] = ()
    """Members of `generation`."""


class Stop(Value, frozen=True):
    """End this replica: the run cannot go on."""

    exit_code: int
    reason: str


Order = Promise | Plan | Close | Apply | Stop


# --- Reports: from a rank to its leader, in order ------------------------------------------------------------------------


class Begun(Value, frozen=True):
    """The rank's training loop has arrived at a step. The leader's own (rank 0) begins it; that of another rank brings requests
    and its digest, and is not sent where it has neither."""

    rank: int
    step: int
    work: Work
    requests: tuple[str, ...] = ()
    digest: int | None = None
    """Of all state of this rank as the step begins; None unless `work.digests`."""


class Closing(Value, frozen=True):
    """Rank 0 begins the last forward that it knows of: it asks for `Close`. Plans that are on their way still count."""

    rank: int
    step: int


class Promised(Value, frozen=True):
    """The rank retired everything older than `generation`. Results that it holds were reported before."""

    rank: int
    generation: Generation
    journal: Journal = Journal()
    """Of rank 0, which has the first stage: a microbatch begins and ends there."""


class Computed(Value, frozen=True):
    """Rank 0 knows how long the first pass of a training step took; on a GPU it does only later, when its kernels are done."""

    rank: int
    num_microbatches: int
    """In the pass, with all that it took in; more than 0."""
    elapsed_ns: int


class Holds(Value, frozen=True):
    """The rank holds these results complete (reduced or fetched)."""

    rank: int
    step: int
    held: tuple[Held, ...]


class Blocked(Value, frozen=True):
    """A reduction or transfer of `generation` failed or waited too long on this rank."""

    rank: int
    generation: Generation
    reason: str
    suspects: tuple[ReplicaId, ...] = ()
    """Members that this rank lost or waited for in vain, as far as it knows: one end of each pair (`core/blame.py`)."""
    stalled: bool = False
    """It waited, which is evidence also when the generation is over. A connection that breaks then is a consequence of that."""
    miscounted: int | None = None
    """The step in which the sum of a bucket does not count every microbatch once, so that no replica holds it; else None."""


class Raised(Value, frozen=True):
    """Computing a microbatch raised (NaN check, out of memory, ...); the process is about to end."""

    rank: int
    step: int
    label: str
    microbatches: tuple[MicrobatchId, ...]
    """One of these: the one being computed, or all of a pass; empty if it was something else."""
    error: str


class Ended(Value, frozen=True):
    """The rank's training loop is over; its control thread goes on obeying orders until `Stop`."""

    rank: int


class Saving(Value, frozen=True):
    """The rank's training thread begins, or has ended (`over`), a checkpoint save; only rank 0 says so."""

    rank: int
    over: bool


Report = Begun | Closing | Computed | Promised | Holds | Blocked | Raised | Ended | Saving


# --- Membership ----------------------------------------------------------------------------------------------------------


class LossKind(enum.Enum):
    """Why a replica left the roster."""

    PROCESS_ENDED = "process ended"
    """By a signal from outside (SIGKILL, SIGTERM), or with exit code 0 while the run went on."""
    CRASHED = "crashed"
    """By a signal that the computation raises (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT), or killed for want of memory."""
    HUNG = "hung"
    """A rank was stopped, or showed no progress for too long (`core/detector.py`)."""
    ENDED_EARLY = "ended early"
    """A rank ended with exit code 0 before the first generation."""
    EXCEPTION = "exception"
    """With any other exit code."""
    SUSPECTED = "suspected"
    """Too late for a generation, the start or the end; blamed for generations without a step; or it sent what it must not."""
    DIVERGED = "diverged"
    INVARIANT_VIOLATED = "invariant violated"
    """A check inside one of its ranks failed, and the rank ended itself rather than go on (exit code 14)."""


class Loss(Value, frozen=True):
    """One lost replica and why."""

    replica: ReplicaId
    kind: LossKind
    detail: str = ""


class Void(Value, frozen=True):
    """What members have of a step is void, since a sum did not count every microbatch once: they compute it anew, once.

    This is the one exception to INV-3, INV-4 and INV-7 (docs/guarantees.md).
    """

    step: int
    since: Generation
    """Contributions and results of older generations are void."""
    gives_up: bool = False
    """The step was miscounted again when it was computed anew. It is committed without a result (`Work.given_up`), so that
    nothing changes, and the job ends after it with its state saved."""


class NewGeneration(Value, frozen=True):
    """The coordinator's decision: from now on these replicas, and no others, are the job."""

    generation: Generation
    roster: tuple[ReplicaId, ...]
    losses: tuple[Loss, ...] = ()
    """Replicas lost since the previous generation."""
    reason: str = ""
    requests: tuple[str, ...] = ()
    """Requests that every member adds to its votes from now on (e.g. exit because too few replicas are left)."""
    trusted_from: Generation = 0
    """Results of older versions count no more in a step that nobody has committed: an outvoted replica took part in them."""
    void: Void | None = None
    """The newest step that was made void; told by all later generations, since a member may hear of two at once."""


# --- From a replica's leader to the coordinator --------------------------------------------------------------------------


class Hello(Value, frozen=True):
    """A replica is ready to join. `fingerprint` is equal in all, or the run ends."""

    replica: ReplicaId
    fingerprint: str
    """Of all that has to be alike."""
    parts: tuple[tuple[str, str], ...] = ()
    """That by name, with values, to say what differs (`core/alike.py`)."""


class Entered(Value, frozen=True):
    """All ranks of a replica promised `generation`; the replica has not committed `step` yet."""

    replica: ReplicaId
    generation: Generation
    step: int
    waited_for: tuple[ReplicaId, ...] = ()
    """Whose message it lacked when it left the generation that it had entered before."""


class Requested(Value, frozen=True):
    """A replica cannot go on in `generation`: a broken link, a lost message, an expired wait.

    Of an older generation it is evidence only, if it was `stalled`.
    """

    replica: ReplicaId
    generation: Generation
    reason: str
    suspects: tuple[ReplicaId, ...] = ()
    stalled: bool = False
    """Both as in `Blocked`."""


class Busy(Value, frozen=True):
    """A replica takes no part in any step until it says that this is `over`: it saves. It goes on promising and answering."""

    replica: ReplicaId
    over: bool


class Failing(Value, frozen=True):
    """Computing a microbatch raised in a replica, which is about to end."""

    replica: ReplicaId
    label: str
    microbatches: tuple[MicrobatchId, ...]
    """As in `Raised`."""
    error: str
    witnessed: bool = False
    """True: nobody reported an exception, the agent read the microbatches from the progress page of a rank that a signal of the
    computation ended or that hung in it. False: a rank reported the exception before it ended."""


class Diverged(Value, frozen=True):
    """Members disagree on what `step` is; `minority` are those that a strict majority outvotes, empty on a tie."""

    replica: ReplicaId
    generation: Generation
    step: int
    minority: tuple[ReplicaId, ...]
    reason: str


class Miscounted(Value, frozen=True):
    """A sum of `step` in `generation` does not count every microbatch once on a rank of this replica."""

    replica: ReplicaId
    generation: Generation
    step: int
    reason: str


class Finished(Value, frozen=True):
    """The training loop of a replica is over. It goes on answering until it is told to stop: others may need its status."""

    replica: ReplicaId
    exit_code: int
    is_saved: bool = False
    """Whether its last record says that the checkpoint of its last state is there."""
    untrained: str = ""
    """What its last state is, in words, if its last record says that nothing was trained."""


LeaderMessage = Hello | Entered | Requested | Busy | Failing | Diverged | Miscounted | Finished


class ExitCode(enum.IntEnum):
    """How a run ends (docs/guarantees.md)."""

    OK = 0
    FAILED = 1
    """A defect, an error in the training script on every replica, or no step is committed and nobody known to be at fault."""
    BAD_INPUT = 2
    UNFINISHED = 3
    """Of `check`: all that was judged holds, and the trace has no end, or lacks events of some steps."""
    TOO_FEW_REPLICAS = 10
    """Fewer than `--recover-min-replicas` are left; a durable checkpoint was saved if any replica lives."""
    POISONED_MICROBATCH = 11
    """Computing one microbatch has ended two replicas; it is named."""
    DIVERGED = 12
    """Replicas disagree on results and no majority can say who is right."""
    NO_REPLICA_LEFT = 13
    """All replicas died."""
    INVARIANT_VIOLATED = 14
    """A broken invariant was found, by the checker or inside the run; or a step was miscounted twice (the state before it is
    saved if `--save` is set and a replica lives)."""
    INTERRUPTED = 15
    """A signal or time limit ended the run at a common step, with a checkpoint."""
    UNSAVED = 16
    """Training ended, but its last checkpoint could not be written; the newest one that could is older."""

    @classmethod
    def words(cls, code: int) -> str:
        """What to call the exit code of a run; one that is none of these is that of a signal."""
        return cls(code).name.lower().replace("_", " ") if code in list(cls) else "killed"
