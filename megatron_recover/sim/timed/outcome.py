"""What a policy makes of a scenario: what it spends and what it commits."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_recover.sim.timed.models import HOUR_S, PolicyName, Scenario, Timing


@dataclass
class Outcome:
    """What a policy made of a scenario."""

    policy: PolicyName
    seconds: float = 0.0
    gpu_seconds: float = 0.0
    """Of replicas that are alive."""
    steps: int = 0
    """Committed."""
    microbatches: int = 0
    """In committed steps."""
    ideal_seconds: float = 0.0
    """What the committed steps take without a loss: the best integer quotas of all that lived when their work was dealt."""
    losses: int = 0
    replicas_end: int = 0
    interval_steps: int | None = None
    """Between saves."""
    young_daly_steps: tuple[float, float] | None = None
    """That interval by Young's and by Daly's formula, not rounded."""
    microbatches_redone: int | None = None
    in_schedule: int | None = None
    """Of the microbatches redone: in the pass that ran."""
    steps_left_out: int | None = None
    """Of the steps: those whose time was only added, since nothing in them could differ from the step before."""
    kill_to_plan_s: tuple[float, float] | None = None
    """Median and worst over all losses."""
    curve: list[tuple[float, int]] = field(default_factory=list)
    """(GPU-seconds, microbatches committed) after each step."""

    @property
    def goodput_of_ideal(self) -> float:
        """Of the seconds that went by, the part that the committed steps needed."""
        return self.ideal_seconds / self.seconds

    @property
    def microbatches_per_gpu_hour(self) -> float:
        """Effective throughput: what was trained over the GPU-hours of those that lived (ReCoVer's measure)."""
        return self.microbatches / self.gpu_seconds * HOUR_S

    def microbatches_at(self, gpu_hours: float) -> float | None:
        """How many were committed when so many GPU-hours were spent; None where the run is shorter."""
        before = (0.0, 0)
        for spent, done in self.curve:
            if spent >= gpu_hours * HOUR_S:
                part = (gpu_hours * HOUR_S - before[0]) / (spent - before[0])
                return before[1] + part * (done - before[1])
            before = spent, done
        return None


class Meter:
    """Adds up what a policy spends and commits."""

    def __init__(self, policy: PolicyName, scenario: Scenario) -> None:
        self.timing = Timing(scenario.job, scenario.compute, scenario.network)
        self.ranks = scenario.job.ranks
        self.outcome = Outcome(policy, replicas_end=scenario.job.replicas)
        self._ideal: dict[tuple[int, int], float] = {}

    def spend(self, seconds: float) -> None:
        """Time goes by with the replicas that are left."""
        self.outcome.seconds += seconds
        self.outcome.gpu_seconds += seconds * self.outcome.replicas_end * self.ranks

    def lose(self) -> None:
        """A replica is lost."""
        self.outcome.losses += 1
        self.outcome.replicas_end -= 1

    def ideal_s(self, num_members: int, num_microbatches: int) -> float:
        """`Timing.ideal_step_s`, remembered."""
        key = (num_members, num_microbatches)
        if key not in self._ideal:
            self._ideal[key] = self.timing.ideal_step_s(num_members, num_microbatches)
        return self._ideal[key]

    def commit(self, num_members: int, num_microbatches: int, count: int = 1) -> None:
        """So many steps are committed, whose work was dealt when so many lived."""
        outcome = self.outcome
        outcome.steps += count
        outcome.microbatches += count * num_microbatches
        outcome.ideal_seconds += count * self.ideal_s(num_members, num_microbatches)
        outcome.curve.append((outcome.gpu_seconds, outcome.microbatches))
