"""The state, inputs and effects of the machine of membership (`core/coordinator.py`).

The notes that are cited here are in `core/lateness.py`.
"""

from __future__ import annotations

from typing import Literal

from megatron_recover.core.blame import Evidence, Report
from megatron_recover.core.grants import Ledger
from megatron_recover.core.membership_messages import (
    Grant,
    Hello,
    JoinRefused,
    LeaderMessage,
    Loss,
    NewcomerReady,
    NewGeneration,
    ReplicaFailing,
    ReplicaFinished,
    Void,
)
from megatron_recover.core.values import Claim, Generation, ReplicaId, Value


class MembershipSettings(Value, frozen=True):
    """The settings of membership, fixed for the run."""

    num_replicas: int
    min_replicas: int = 1
    samples: tuple[int, int] | None = None
    """Samples per training step and per microbatch, for messages. None: unknown, or they change."""
    least_microbatches: int | None = None
    """Number of microbatches of the smallest training step, which limits the number of replicas for
    which `scale` can ask. None: unknown."""
    nodes: tuple[tuple[ReplicaId, ...], ...] = ()
    """The replicas with ranks on each node of a job of several nodes; empty: all are on one."""
    waits_for_newcomers: bool = False
    """True if a job with fewer members than `min_replicas` continues while a newcomer forms."""
    not_healed_by: tuple[str, ...] = ()
    """Flags because of which no newcomer is formed, for messages."""


class OpenSave(Value, frozen=True):
    """A checkpoint save of one replica that has begun. See Note [Waiting for a save]."""

    replica: ReplicaId
    number: int
    """Number of the save in the run, from 1. It is part of the name of the save's timer."""
    generation: Generation
    """The generation in which the save began."""


class CoordinatorState(Value, frozen=True):
    """Everything that the coordinator knows. Start with `CoordinatorState(policy)`."""

    policy: MembershipSettings
    generation: Generation = 0
    """The newest generation; 0 before the first."""
    roster: tuple[ReplicaId, ...] = ()
    hellos: tuple[Hello, ...] = ()
    """Greetings of the replicas that are ready and not lost, by replica."""
    losses: tuple[Loss, ...] = ()
    """All losses of the run, in order; also those of replicas that had finished."""
    leaving: tuple[ReplicaId, ...] = ()
    """Members that may leave as of the current generation (`ReplicaLeaving`), ascending."""
    left: tuple[ReplicaId, ...] = ()
    """Replicas that have left as requested, in order. They are no losses."""
    entered: tuple[ReplicaId, ...] = ()
    """Members that entered the current generation, ascending."""
    follow: str = ""
    """Name of the `follow` timer of the current generation. Timers of that kind with another name
    are stale."""
    all_late: bool = False
    """True after `follow` ran out before any member had entered the generation, until one enters or
    a newer generation is made. See Note [Timers]."""
    start: str = ""
    """Name of the newest timer `start` or `load`; the one before has no effect any more."""
    reason: str = ""
    """Reason of the first request for a newer generation, while that waits for its grace or for a
    save; else empty."""
    reason_by: ReplicaId = -1
    """The replica that has reported `reason`, if there is one."""
    reason_excused_by: tuple[ReplicaId, ...] = ()
    """Members that were at work when `reason` was reported. They may have ended their work before
    the grace ends."""
    evidence: Evidence = Evidence()
    """All evidence that has not been dropped since (`core/blame.py`)."""
    evidence_from: Generation = 0
    """The first generation whose late reports still count as evidence."""
    waits: tuple[Report, ...] = ()
    """Reports of the members that waited at the end of the previous generation, by member."""
    excused: bool = False
    """True if a save, work or a loss explains all waits of the previous generation. Such waits are
    no evidence."""
    trouble: str = ""
    """Name of the newest `trouble` timer. Empty until a generation is requested that no save or
    work excuses, and again when the evidence is dropped. See Note [Timers]."""
    patience: int = 0
    """Number of times that `trouble` ran out since the evidence was dropped, 0 to 2."""
    undecided: str = ""
    """Name of the `undecided` timer. Empty until `trouble` ran out and the evidence names nobody,
    and again when the evidence is dropped."""
    fruitless: int = 0
    """Generations made on request since the last committed step or loss; those that a save excuses
    are not counted. Decides the length of the grace, and is part of messages."""
    at_work: tuple[ReplicaId, ...] = ()
    """Replicas of the newest `AtWork`."""
    excuse: str = ""
    """Name of the `excuse` timer, or empty. Until it runs out, waits are no evidence while a member
    is at work."""
    excused_for: tuple[ReplicaId, ...] = ()
    """Members at work that `Waits` announced since the last committed step or loss, so that each is
    announced once."""
    is_excuse_over: bool = False
    """True if `excuse` ran out, until a step is committed or a replica is lost."""
    step: int = 0
    """The highest step that a member reported as its first uncommitted one."""
    requests: tuple[str, ...] = ()
    """Job-wide requests that all further generations carry (`NewGeneration.requests`)."""
    trusted_from: Generation = 0
    """The newest generation that was made because a replica was outvoted; 0: none was."""
    void: Void | None = None
    """The newest step that was made void because a sum did not count every microbatch once."""
    miscount: str = ""
    """The reason why that step was given up, or empty."""
    failing: tuple[ReplicaFailing, ...] = ()
    """All failures of ranks that were reported, in order; also those that no microbatch caused."""
    saves: tuple[OpenSave, ...] = ()
    """Saves that are in progress and have not exceeded `save_s`."""
    num_saves: int = 0
    """Number of saves that have begun in the run."""
    finished: tuple[ReplicaFinished, ...] = ()
    """Replicas whose training loop is over, by replica, lost ones included."""
    num_newcomers: int = 0
    """Number of ids that were given to newcomers, from `policy.num_replicas` on."""
    forming: tuple[ReplicaId, ...] = ()
    """Newcomers that are not lost and not in the roster, ascending."""
    joins: tuple[Claim, ...] = ()
    """Claims of the unproven newcomers in `roster`, by replica."""
    ready: tuple[NewcomerReady, ...] = ()
    """Claims that wait for the timer `gather`, each as a member has vouched for it; by newcomer."""
    joins_from: int = 0
    """The first step in which the next join may begin."""
    has_room: bool = False
    """True if newcomers can be formed where replicas are missing, now or later (`RoomKnown`)."""
    num_setbacks: int = 0
    """Number of times in a row that unproven newcomers were removed."""
    grants: Ledger = Ledger()
    """The grants to name checkpoints (`core/grants.py`)."""
    over: bool = False
    """True after `EndJob`: no input has an effect any more."""


# --- Inputs: the LeaderMessage messages of leaders, and: ------------------------------------------


class Launched(Value, frozen=True):
    """The agents of all nodes that live have started the processes of their ranks."""


class ReplicaLost(Value, frozen=True):
    """A replica is gone or must be treated as gone."""

    loss: Loss


class NodeLost(Value, frozen=True):
    """A node is gone or out of reach. All replicas that have a rank there are lost together."""

    replicas: tuple[ReplicaId, ...]
    detail: str
    """Text that names the node, and what shows that it is lost."""


class TimerFired(Value, frozen=True):
    """A timer that an `Arm` effect started has run out."""

    timer: str


class ExitAsked(Value, frozen=True):
    """A request (signal) to end the whole job after a common step; with `--save` it is saved."""

    reason: str


class LeaveAsked(Value, frozen=True):
    """A request that these replicas, such as all of a node, leave the job, while it goes on."""

    replicas: tuple[ReplicaId, ...]
    reason: str


class FormAsked(Value, frozen=True):
    """There is room for further replicas, which are to be formed as newcomers."""

    num_newcomers: int


class RoomKnown(Value, frozen=True):
    """Newcomers can or cannot be formed where replicas are missing, now or later."""

    has_room: bool


class Progressed(Value, frozen=True):
    """A member's beat reports its first uncommitted step: all steps before it are committed."""

    replica: ReplicaId
    step: int


class AtWork(Value, frozen=True):
    """All replicas that are at work now, as the agents see from the ranks' progress pages.

    Note [At work] in `core/detector.py` defines at work.
    """

    replicas: tuple[ReplicaId, ...]
    """Ascending; the complete list, which replaces the list of the `AtWork` before."""


class FenceConfirmed(Value, frozen=True):
    """The agents have seen the end of every process of a replica that was fenced or has left."""

    replica: ReplicaId


Input = (
    LeaderMessage | Launched | ReplicaLost | NodeLost | TimerFired | ExitAsked | LeaveAsked | Progressed | AtWork
    | FenceConfirmed | FormAsked | RoomKnown
)  # fmt: skip


# --- Effects --------------------------------------------------------------------------------------


class Announce(Value, frozen=True):
    """Send the new generation to every leader of its roster."""

    generation: NewGeneration


class Fence(Value, frozen=True):
    """Kill all ranks of a replica that are left, without waiting for their end."""

    replica: ReplicaId


class Form(Value, frozen=True):
    """Start the ranks of a newcomer with this id, which was never used."""

    replica: ReplicaId


class Refuse(Value, frozen=True):
    """Send `JoinRefused` to the leader of the newcomer that it names, and to that of a member."""

    refused: JoinRefused
    member: ReplicaId | None = None
    """The member that has vouched for the claim, which holds its pass for it; None if none does."""


class Ask(Value, frozen=True):
    """Send `AddRequests(requests)` to the leader of a replica."""

    replica: ReplicaId
    requests: tuple[str, ...]


class Refusal(Value, frozen=True):
    """A replica that does not leave although that was requested."""

    replica: ReplicaId
    why: str


class LeaveJudged(Value, frozen=True):
    """Report which replicas will leave, for `reason`, and which will not."""

    replicas: tuple[ReplicaId, ...]
    refused: tuple[Refusal, ...]
    reason: str


class Dismiss(Value, frozen=True):
    """Send `Stop` with exit code 0 to the leader of a replica that leaves.

    Ends of its ranks are no losses from now on. Kill those that do not end.
    """

    replica: ReplicaId


class Give(Value, frozen=True):
    """Send a grant to the leader of the grant's writer."""

    grant: Grant


Setting = Literal["deadline_s", "start_s", "follow_s", "finish_s", "save_s", "blame_s", "grace_s", "lapse_s", "gather_s"]
"""The name of a timer's length in `deadlines.Deadlines`. The driver knows the seconds."""


class Arm(Value, frozen=True):
    """Start a timer: feed `TimerFired(timer)` when it runs out."""

    timer: str
    setting: Setting


class Waits(Value, frozen=True):
    """Report to the user that the job waits for these replicas, and why."""

    replicas: tuple[ReplicaId, ...]
    reason: str
    limit: Setting | None = None
    """Longest time for which all such waits together are excused (Note [Timers], `excuse`).

    None: the job waits until one of the replicas answers or ends, or the job ends.
    """


class EndJob(Value, frozen=True):
    """End the run: send `Stop` to all leaders. No effect follows."""

    exit_code: int
    reason: str


Effect = Announce | Fence | Form | Refuse | Ask | LeaveJudged | Dismiss | Arm | Give | Waits | EndJob
