"""The state of the detector of hangs, and its limits (`core/detector.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron_recover.core.progress import Phase, Progress
from megatron_recover.core.values import Generation, ReplicaId, Value
from megatron_recover.core.verdict import Suspects, Verdict


class Figures(Value, frozen=True):
    """The measured durations from which limits are derived, in seconds."""

    steps_s: tuple[float, ...] = ()
    """The newest times of training steps, at most 16: one for each rank and step."""
    longest_s: Mapping[Phase, float] = MappingProxyType({})
    """The longest operation that any rank finished, per phase. `Limits.gap_s` stands for a phase of
    `EVERY_STEP` that no look saw in a step. The time in which a rank was kept waiting, read ahead
    or was traced does not count."""


class Watched(Value, frozen=True):
    """Everything known about one rank. Silences are in seconds, since the page last changed."""

    progress: Progress
    quiet_s: float = 0.0
    """Silence of the rank's own."""
    kept_s: float = 0.0
    """Silence in which another rank of the replica kept the rank waiting."""
    is_kept: bool = False
    """True if one does so now (Note [Ranks that wait inside their replica])."""
    reading_s: float = 0.0
    """Time for which looks have seen the same reading ahead (Note [Ranks that read ahead])."""
    stopped_s: float = 0.0
    traced_s: float = 0.0
    """Time in which a tracer held the rank."""
    step_s: float = 0.0
    """Time since the step began, without the time in which a tracer held a rank of the replica."""
    told: frozenset[Verdict] = frozenset()
    """Verdicts that were reported since the page changed."""

    @property
    def silent_s(self) -> float:
        """Return the sum of the rank's own silence and that in which it was kept waiting."""
        return self.quiet_s + self.kept_s


class Limits(Value, frozen=True):
    """The limits of the detector, in seconds. `Deadlines` has the reason for each."""

    deadline_s: float
    """The user's one deadline."""
    gap_s: float
    """The longest time between two looks that counts."""
    stopped_s: float
    """The shortest time after which a stopped process is named and may be condemned."""
    hung_s: float
    """The shortest silence after which a rank hangs."""
    after_work_s: float
    """Time for which a replica counts as at work after it was last seen at work."""


class DetectorState(Value, frozen=True):
    """Everything that the detector knows. Start with `DetectorState(limits)`."""

    limits: Limits
    now_s: float | None = None
    generation: Generation = 0
    ranks: Mapping[tuple[ReplicaId, int], Watched] = MappingProxyType({})
    figures: Figures = Figures()
    """Figures of this generation."""
    older: Figures = Figures()
    """Figures of the newest generation before this one that had enough steps."""
    condemned: frozenset[ReplicaId] = frozenset()
    worked_s: Mapping[ReplicaId, float] = MappingProxyType({})
    """Time of the look that last saw each replica at work."""
    at_work: tuple[ReplicaId, ...] = ()
    """Replicas of the newest `SeenAtWork`."""
    suspects: Suspects = Suspects()
    """The newest `Suspects`."""
    places: Mapping[ReplicaId, Mapping[tuple[int, bool], float]] = MappingProxyType({})
    """On several nodes: the newest places of each replica as in `Part.places`, and the time of the
    look that saw a rank there last. The newest is last."""
    traced_at_s: Mapping[ReplicaId, float] = MappingProxyType({})
    """On several nodes: the newest look that saw a tracer hold a rank of a replica."""
