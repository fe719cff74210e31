"""What the machine of membership (`core/coordinator.py`) knows, takes in and gives out."""

from __future__ import annotations

from typing import Literal

from megatron_recover.core.blame import Evidence
from megatron_recover.core.values import (
    Failing,
    Finished,
    Generation,
    Hello,
    LeaderMessage,
    Loss,
    NewGeneration,
    ReplicaId,
    Value,
    Void,
)


class Policy(Value, frozen=True):
    """Settings of membership."""

    num_replicas: int
    min_replicas: int = 1
    samples: tuple[int, int] | None = None
    """Of every training step, and of every microbatch, for messages; None where they are unknown or change."""


class Save(Value, frozen=True):
    """A replica that saves a checkpoint, and may take its time. See Note [Waiting for a save]."""

    replica: ReplicaId
    number: int
    """Of this save in the run, from 1: names its timer."""
    generation: Generation
    """In which it began."""


class CoordinatorState(Value, frozen=True):
    """What the coordinator knows. Start with `CoordinatorState(policy)`."""

    policy: Policy
    generation: Generation = 0
    roster: tuple[ReplicaId, ...] = ()
    hellos: tuple[Hello, ...] = ()
    losses: tuple[Loss, ...] = ()
    """All losses of the run."""
    entered: tuple[ReplicaId, ...] = ()
    """Members that entered the current generation."""
    follow: str = ""
    """The timer that counts for members that have not entered the current generation; others of its kind are stale."""
    all_late: bool = False
    """The timer ran out before any member had entered the current generation. See Note [Timers]."""
    reason: str = ""
    """Why a newer generation is due (a grace runs), or empty."""
    reason_excused_by: tuple[ReplicaId, ...] = ()
    """Members that were at work when it was asked for: their work may be over before the grace is."""
    evidence: Evidence = Evidence()
    """Who could not reach whom since a step was committed or a replica was lost (`core/blame.py`)."""
    evidence_from: Generation = 0
    """Reports of older generations are about what is over, and no evidence."""
    waits: tuple[tuple[ReplicaId, tuple[ReplicaId, ...]], ...] = ()
    """Which members waited for whom when they left the previous generation, by member."""
    excused: bool = False
    """In the previous generation a save was under way or a member at work, or a loss ended it, which explains all waits: they
    are no evidence."""
    trouble: str = ""
    """The timer that runs while generations are made without a loss or a committed step, or empty. See Note [Timers]."""
    patience: int = 0
    """How often `trouble` has run out."""
    undecided: str = ""
    """The timer of the time in which no step was committed and the evidence named nobody, or empty."""
    fruitless: int = 0
    """Generations in a row without a loss or a committed step: how soon the next is tried, and what people are told."""
    at_work: tuple[ReplicaId, ...] = ()
    """As of the newest `AtWork`."""
    excuse: str = ""
    """The timer of the time in which waits for who is at work are held against nobody, or empty."""
    excused_for: tuple[ReplicaId, ...] = ()
    """Members of which was said that they are waited for in that time."""
    is_excuse_over: bool = False
    """That time is over, and no step was committed and no replica lost since."""
    step: int = 0
    """Highest uncommitted step reported."""
    requests: tuple[str, ...] = ()
    trusted_from: Generation = 0
    """The generation that was made because a replica was outvoted; of several the newest."""
    void: Void | None = None
    """The newest step that was made void because a sum did not count every microbatch once."""
    miscount: str = ""
    """Why that step was given up, or empty."""
    failing: tuple[Failing, ...] = ()
    """Computations that raised."""
    saves: tuple[Save, ...] = ()
    """Under way and within their time."""
    num_saves: int = 0
    """All that ever began."""
    finished: tuple[Finished, ...] = ()
    over: bool = False


# --- Inputs: LeaderMessage messages of leaders, and: -------------------------------------------------------------------


class Launched(Value, frozen=True):
    """The processes of all replicas were started."""


class Lost(Value, frozen=True):
    """A replica is gone or must be treated as gone."""

    loss: Loss


class TimerFired(Value, frozen=True):
    """A timer armed with `Arm` ran out."""

    timer: str


class ExitAsked(Value, frozen=True):
    """The whole job is asked to end at a common step with a checkpoint (signal to the launcher, time limit)."""

    reason: str


class Progressed(Value, frozen=True):
    """A member says in a beat which step it has not committed yet: all before that are committed."""

    replica: ReplicaId
    step: int


class AtWork(Value, frozen=True):
    """The agents see by progress pages which replicas have a rank at work of its own, alive and not hung: all of them."""

    replicas: tuple[ReplicaId, ...]
    """Sorted."""


Input = LeaderMessage | Launched | Lost | TimerFired | ExitAsked | Progressed | AtWork


# --- Effects -------------------------------------------------------------------------------------------------------------


class Announce(Value, frozen=True):
    """Tell every member of the roster."""

    generation: NewGeneration


class Fence(Value, frozen=True):
    """Kill what is left of a replica."""

    replica: ReplicaId


Setting = Literal["deadline_s", "start_s", "follow_s", "finish_s", "save_s", "blame_s", "grace_s"]
"""How long a timer runs, by its name in `deadlines.Deadlines`: the driver knows the seconds."""


class Arm(Value, frozen=True):
    """Start a timer."""

    timer: str
    setting: Setting


class Waits(Value, frozen=True):
    """The job waits for these replicas, and cannot go on before one of them answers or ends."""

    replicas: tuple[ReplicaId, ...]
    reason: str
    limit: Setting | None = None
    """For how long at most the wait is excused, all such waits together, before anybody is judged (Note [Timers], `excuse`).

    None: until one of them answers or ends.
    """


class EndJob(Value, frozen=True):
    """The run is over."""

    exit_code: int
    reason: str


Effect = Announce | Fence | Arm | Waits | EndJob
