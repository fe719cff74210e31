"""The messages between the coordinator and the leaders of replicas: who forms the job, and why.

The end of a process is a `ProcessEnd` of the agent, a `Loss` once it cost a replica, and
`ReplicaLost` as the coordinator's input; the trace records the first as `failure`.
"""

from __future__ import annotations

import enum

from megatron_recover.core.values import Claim, Generation, MicrobatchId, ReplicaId, Value


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


# --- From the coordinator to the leaders ----------------------------------------------------------


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
    joins: tuple[Claim, ...] = ()
    """Claims of the newcomers in `roster`, by replica. Their common plan admits them or turns them
    away (`core/joining.py`)."""


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


class JoinRefused(Value, frozen=True):
    """The answer to a newcomer that it cannot join with its claim for the step `label`.

    It comes from the member that was asked or from the coordinator. The newcomer may read the state
    of a later step.
    """

    newcomer: ReplicaId
    label: str
    reason: str
    generation: Generation = 0
    """The generation that the coordinator announced with the claim; 0: there is none."""
    is_fault: bool = False
    """True if the newcomer was too slow, or its state was not equal. Such a refusal uses up one of
    its tries; any other is about the job."""


# --- From a leader to the coordinator -------------------------------------------------------------


class Hello(Value, frozen=True):
    """A replica is ready to join."""

    replica: ReplicaId
    fingerprint: str
    """Digest of the configuration, which all replicas share, newcomers too. If two replicas of the
    start differ, the run ends; a newcomer that differs is removed."""
    parts: tuple[tuple[str, str], ...] = ()
    """(name, value) of that configuration, to describe a difference (`core/alike.py`)."""
    beginning: tuple[tuple[str, str], ...] = ()
    """(name, value) of what must be alike at the start only, such as the digest of all state."""


class Entered(Value, frozen=True):
    """All ranks of a replica promised `generation`; its first uncommitted step is `step`."""

    replica: ReplicaId
    generation: Generation
    step: int
    waited_for: tuple[ReplicaId, ...] = ()
    """Members whose message the replica still needed when it left an older generation."""
    for_votes: bool = False
    """True if the messages were votes of the generation before this one; False: statuses."""


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


class NewcomerReady(Value, frozen=True):
    """A member vouches for a newcomer: it has begun the step of `claim`, with an equal digest."""

    replica: ReplicaId
    generation: Generation
    step: int
    """The step that `claim.label` names."""
    claim: Claim


class TurnedAway(Value, frozen=True):
    """The common plan of `generation` does not admit these newcomers. No generation is needed."""

    replica: ReplicaId
    generation: Generation
    newcomers: tuple[ReplicaId, ...]
    """Ascending; `replica` itself if it is a newcomer that cannot enter the generation."""
    reason: str


class NewcomersProven(Value, frozen=True):
    """The first step with these newcomers is committed: they are members like any other."""

    replica: ReplicaId
    generation: Generation
    newcomers: tuple[ReplicaId, ...]


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
    | ReplicaFinished | Named | NewcomerReady | TurnedAway | NewcomersProven
)  # fmt: skip
