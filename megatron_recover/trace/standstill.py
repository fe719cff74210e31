"""The events of ranks, leaders and the coordinator that have not ended and make no progress."""

from __future__ import annotations

from typing import Literal

from megatron_recover.trace.event import Event, Part


class WaitingRank(Part, frozen=True, kw_only=True):
    """A rank whose progress depends on others."""

    replica: int
    rank: int
    phase: str
    seconds: float
    """Seconds since its progress page showed something new."""


class RankSilent(Event, frozen=True, kw_only=True):
    """Agent: a rank is slow, hangs, is stopped or is held by a tracer.

    Only the next `Generation` shows whether the replica is lost by that.
    """

    replica: int
    rank: int
    verdict: Literal["slow", "hung", "stopped", "traced"]
    phase: str
    """Activity of its training thread (`core/progress.py`)."""
    seconds: float
    """Seconds that the rank has shown no progress, or has been stopped or traced, as the agent's
    looks count them."""
    idle_s: float | None = None
    """Seconds since the newest operation on its progress page began; None if that is not known."""
    step: int
    label: str
    microbatches: tuple[int, ...] = ()
    """Microbatches that the rank computes, has enqueued on its device, or reads ahead."""
    state: str = ""
    """State letter of the process in /proc/PID/stat."""
    waiting: tuple[WaitingRank, ...] = ()
    """Other ranks that have shown nothing new for at least half of `seconds` and are not named
    themselves, at most 64, the longest wait first. Each is in a phase whose length others decide,
    or beside a rank of its replica that is at work."""


class RankMoved(Event, frozen=True, kw_only=True):
    """Agent: a rank for which `rank_silent` was recorded shows progress again."""

    replica: int
    rank: int
    step: int
    """The step that its progress page shows now."""


class LeaderSilent(Event, frozen=True, kw_only=True):
    """Coordinator: a leader does not answer the coordinator's beats, or answers again.

    The silence has no consequence for the leader.
    """

    member: int
    """The leader's replica."""
    generation: int
    """The leader's generation at its last answer; 0 if it has not answered yet."""
    phase: Literal["began", "over"]
    seconds: float
    """Seconds that the silence has lasted."""
    waiting_for: tuple[int, ...]
    """Members that the leader waited for at its last answer."""


class CoordinatorSilent(Event, frozen=True, kw_only=True):
    """Leader: its coordinator sends nothing, not even beats, or sends again.

    Between its start and its end a replica needs the coordinator only after a failure. The event
    comes again with the phase `began` when `waits` changes during the silence.
    """

    replica: int
    generation: int
    phase: Literal["began", "over"]
    seconds: float
    """Seconds that the silence has lasted."""
    waits: str
    """Need of this replica for the coordinator, in words; empty: none yet."""
    waiting_for: tuple[int, ...]
    """Members whose message this replica waits for."""
    pid: int
    """Process id of the coordinator; 0 if no beat has come yet."""
    state: str
    """State letter of that process in /proc (`T`: stopped); empty if it cannot be read."""


class CoordinatorLost(Event, frozen=True, kw_only=True):
    """Leader: it takes the coordinator for lost.

    Training goes on to its next save point and ends there, unless a failure ends it before.
    """

    replica: int
    generation: int
    step: int
    """The first step that this replica has not committed."""
    reason: str


class Strangers(Event, frozen=True, kw_only=True):
    """Coordinator, leader or rank: connections to it that had not proven themselves were closed.

    A few closed connections are not reported.
    """

    replica: int
    """Replica of the listener; -1: the coordinator."""
    rank: int
    """Rank of the listener; -1: the coordinator."""
    listener: str
    """Name of the listener: `coordinator`, `leader`, `store`, `data` or `echo`."""
    num_connections: int
    """Number of connections closed since the last such event of this listener."""


class Waiting(Event, frozen=True, kw_only=True):
    """Coordinator: the run waits for these replicas.

    Without `limit_s` the run waits until one of them answers or ends, or the run ends. With it they
    are at work, and no wait is held against anybody until they no longer are, a step is committed,
    a replica is lost, or the time is over.
    """

    replicas: tuple[int, ...]
    reason: str
    limit_s: float | None = None
    """Seconds for which the wait is excused at most, all such waits together.

    After that the members that keep others waiting are judged, unless a step is committed or a
    replica is lost before. Judging takes more time.
    """
