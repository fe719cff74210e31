"""Values that the detector of hangs takes and returns; `core/detector.py` has it, and the Notes."""

from __future__ import annotations

import enum

from megatron_recover.core.membership_messages import ReplicaFailing
from megatron_recover.core.progress import Phase, Progress
from megatron_recover.core.values import Generation, MicrobatchId, ReplicaId, Value

STOPPED, TRACED, UNINTERRUPTIBLE = "T", "t", "D"
"""States of a process, as in /proc/PID/stat."""
CANNOT_RUN = frozenset({STOPPED, "Z", "X", ""})
"""States of a process that is stopped or gone."""


class Sight(Value, frozen=True):
    """The page and process state of one rank at one look."""

    replica: ReplicaId
    rank: int
    progress: Progress | None
    """Content of the page; None if the page is torn or was never written."""
    state: str
    """One letter of /proc/PID/stat; empty if the process is gone."""


class Part(Value, frozen=True):
    """The observations of an agent about its own ranks of a replica that has ranks on other nodes.

    Times are in seconds before the agent's newest look.
    """

    places: tuple[tuple[tuple[int, bool], float], ...] = ()
    """The newest places in which a rank was in a phase of unknown length, as (step, whether that
    step is over), and the time since it was last seen there. Of one look only the place furthest
    back counts (Note [Ranks that wait inside their replica])."""
    traced_ago_s: float | None = None
    """Time since a tracer was last seen to hold a rank; None: never."""


class Known(Value, frozen=True):
    """The knowledge of the coordinator about a replica that this agent accuses."""

    replica: ReplicaId
    parts: tuple[Part, ...]
    """Its parts on other nodes."""
    may_condemn: bool
    """True if another replica lives."""


class Others(Value, frozen=True):
    """Facts that an agent learns from other nodes between two looks; each counts for one look."""

    num_members: int
    """Members of the job, on all nodes."""
    known: tuple[Known, ...] = ()
    """Answers to accusations (`core/condemning.py`)."""
    asked: tuple[ReplicaId, ...] = ()
    """Replicas whose part on this node is asked for."""
    spanning: frozenset[ReplicaId] = frozenset()
    """Replicas that have ranks here and on other nodes."""


class Look(Value, frozen=True):
    """The ranks of the replicas that are in the job, at one instant."""

    now_s: float
    generation: Generation
    sights: tuple[Sight, ...]
    """All ranks of the job, or those of one node."""
    others: Others | None = None
    """None if the job has one node, whose agent sees all ranks."""
    are_newcomers: bool = False
    """True for replicas outside the roster, without which the job goes on (Note [Newcomers])."""


class Verdict(enum.Enum):
    """The judgement on a rank."""

    WORKING = "working"
    WAITING = "waiting"
    """Kept waiting by another rank of its replica (Note [Ranks that wait inside their replica])."""
    SLOW = "slow"
    """Silent for more than half the time after which it hangs."""
    HUNG = "hung"
    STOPPED = "stopped"
    """Stopped by a signal for more than `stop_limit_s`."""
    TRACED = "traced"
    """Held by a tracer for more than `stop_limit_s` (Note [Ranks that a tracer holds])."""


class Named(Value, frozen=True):
    """Effect: record the silence. Unless the rank is slow, tell users and have stacks written."""

    replica: ReplicaId
    rank: int
    verdict: Verdict
    phase: Phase
    seconds: float
    limit_s: float
    state: str
    step: int
    label: str
    microbatches: tuple[MicrobatchId, ...]
    is_kept: bool = False
    """True if another rank of its replica is at work, for which the rank may wait."""

    def __str__(self) -> str:
        """Return one line that describes the silence, without the replica."""
        what = self.phase.name.lower().replace("_", " ")
        if self.microbatches:
            noun = "microbatch" if len(self.microbatches) == 1 else "microbatches"
            what += f" ({noun} {', '.join(map(str, self.microbatches))})"
        where = f"{what} of {self.label}" if self.label else what
        text = f"rank {self.rank}: {self.verdict.value} for {self.seconds:.1f} s in {where}"
        if self.state == UNINTERRUPTIBLE:
            text += "; its process is in state D (it waits for a disk or driver, and SIGKILL waits as well)"
        if self.verdict is Verdict.TRACED:
            text += "; a tracer holds its process (a debugger, gcore or strace)"
        if self.is_kept:
            text += "; another rank of its replica is at work, and it may wait for that one"
        return text


class Condemned(Value, frozen=True):
    """Effect, once: fence the replica after its ranks had a moment to write their stacks."""

    named: Named
    """The rank that was silent the longest; a stopped one comes first."""
    failing: ReplicaFailing | None
    """The microbatches that the hang is charged to, or None."""


class SeenAtWork(Value, frozen=True):
    """Effect: report all replicas at work to the coordinator, when they change (Note [At work])."""

    replicas: tuple[ReplicaId, ...]
    """Ascending."""


class Suspects(Value, frozen=True):
    """Effect, on several nodes: report suspicions to the coordinator, when they change."""

    silent: frozenset[ReplicaId] = frozenset()
    """Replicas of which a rank hangs, is stopped, traced or slow: not a sign that others live."""
    accused: frozenset[ReplicaId] = frozenset()
    """Those of them that this agent would condemn, if another replica lives."""


class PartSeen(Value, frozen=True):
    """Effect, on several nodes: report the part of a replica that was asked for."""

    replica: ReplicaId
    part: Part


Effect = Named | Condemned | SeenAtWork | Suspects | PartSeen
