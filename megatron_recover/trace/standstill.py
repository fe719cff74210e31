"""The events of processes that do not end and do not go on: ranks, leaders, the coordinator."""

from __future__ import annotations

from typing import Literal

from megatron_recover.trace.event import Event, Part


class WaitingRank(Part, frozen=True, kw_only=True):
    """A rank whose progress depends on others."""

    replica: int
    rank: int
    phase: str
    seconds: float
    """Since its page showed something new."""


class RankSilent(Event, frozen=True, kw_only=True):
    """Agent: a rank is slow, hangs, is stopped or is held by a tracer.

    Whether its replica is lost by that is said by the next `Generation`.
    """

    replica: int
    rank: int
    verdict: Literal["slow", "hung", "stopped", "traced"]
    phase: str
    """What its training thread does (`core/detector.py`)."""
    seconds: float
    """For so long, as the agent's looks count it."""
    idle_s: float | None = None
    """Since the last progress: since the newest operation that its page shows began. None where that is not known."""
    step: int
    label: str
    microbatches: tuple[int, ...] = ()
    """In work."""
    state: str = ""
    """Of the process, as in /proc/PID/stat."""
    waiting: tuple[WaitingRank, ...] = ()
    """Ranks of the job that have shown nothing new either, in a phase whose length others decide or beside a rank of their
    replica that is at work; the longest waits first."""


class RankMoved(Event, frozen=True, kw_only=True):
    """Agent: a rank of which `rank_silent` was recorded shows progress again."""

    replica: int
    rank: int
    step: int
    """The step that its page shows now."""


class LeaderSilent(Event, frozen=True, kw_only=True):
    """Coordinator: a leader does not answer its beats; or it does again. Nobody is judged by that."""

    member: int
    """The leader's replica."""
    generation: int
    phase: Literal["began", "over"]
    seconds: float
    """How long the silence has lasted."""
    waiting_for: tuple[int, ...]
    """Members that the leader waited for when it answered last."""


class CoordinatorSilent(Event, frozen=True, kw_only=True):
    """Leader: its coordinator sends nothing, not even beats; or it does again. Training needs it only where something fails."""

    replica: int
    generation: int
    phase: Literal["began", "over"]
    seconds: float
    """How long the silence has lasted."""
    waits: str
    """What this replica needs the coordinator for, in words; empty: nothing yet."""
    waiting_for: tuple[int, ...]
    """Members whose message this replica waits for."""
    pid: int
    """Of the coordinator's process; 0 where it was never heard."""
    state: str
    """Of that process, as /proc has it (`T`: stopped); empty where it cannot be read."""


class Strangers(Event, frozen=True, kw_only=True):
    """Coordinator, leader or rank: connections to it were let go that had not proven themselves. Few are not told."""

    replica: int
    """-1: the coordinator."""
    rank: int
    """-1: the coordinator."""
    listener: str
    """Whose port it is: `coordinator`, `leader`, `data` or `echo`."""
    num_connections: int
    """Since the last such event of this listener."""


class Waiting(Event, frozen=True, kw_only=True):
    """Coordinator: the run waits until one of these replicas answers or ends."""

    replicas: tuple[int, ...]
    reason: str
    limit_s: float | None = None
    """For how long at most the wait is excused, all such waits together; None: until one of them answers or ends.

    Then whoever keeps the others waiting is judged, which takes longer, unless a step is committed or a replica is lost.
    """
