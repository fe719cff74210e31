"""Outcome of a policy in a scenario: the time that it spends, and the work that it commits."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_recover.sim.timed.healing import Newcomers
from megatron_recover.sim.timed.models import HOUR_S, PolicyName, Scenario, Timing


@dataclass
class Outcome:
    """Time that a policy spent in a scenario, and work that it committed.

    None in a field: the policy has no such number, or (`kill_to_plan_s`) nothing was recovered.
    """

    policy: PolicyName
    seconds: float = 0.0
    """Seconds that the run took."""
    gpu_seconds: float = 0.0
    """GPU-seconds of living replicas."""
    steps: int = 0
    """Committed steps."""
    microbatches: int = 0
    """Microbatches in committed steps."""
    ideal_seconds: float = 0.0
    """Seconds that the committed steps need without a loss.

    Each step has the best integer quotas over all replicas that lived when its work was dealt
    (`shrink`: over those that are left after a loss in the step).
    """
    losses: int = 0
    """Replicas that were lost."""
    replicas_end: int = 0
    """Replicas that are left."""
    interval_steps: int | None = None
    """Steps between saves."""
    young_daly_steps: tuple[float, float] | None = None
    """The interval by Young's and by Daly's formula, in steps, not rounded."""
    microbatches_redone: int | None = None
    """Microbatches that were computed although an older plan had dealt them for the same bucket, as
    `observe/work.py` counts them in a trace."""
    in_schedule: int | None = None
    """Microbatches among these that were added to a pass that still ran."""
    steps_left_out: int | None = None
    """Steps whose time was only added, since nothing in them could differ from the step before."""
    kill_to_plan_s: tuple[float, float] | None = None
    """Seconds from a death to the last member's plan: median and worst over all recoveries."""
    full_seconds: float = 0.0
    """Seconds that the committed steps need without a loss, with all replicas of the start."""
    newcomers: Newcomers | None = None
    """Account of the newcomers, of policies that form any."""
    curve: list[tuple[float, int]] = field(default_factory=list)
    """(GPU-seconds, microbatches committed) after each commit of a step. Steps that were left out
    have one entry together. After a restart the microbatches fall to those of the last save."""

    @property
    def goodput_of_ideal(self) -> float:
        """Part of the seconds spent that the committed steps needed."""
        return self.ideal_seconds / self.seconds

    @property
    def ettr(self) -> float:
        """Effective training time ratio: part of the seconds spent that a whole job would need.

        A job that lacks a replica, and trains on without it, is not whole.
        """
        return self.full_seconds / self.seconds

    @property
    def microbatches_per_gpu_hour(self) -> float:
        """Effective throughput: microbatches a GPU-hour of living replicas (ReCoVer's measure)."""
        return self.microbatches / self.gpu_seconds * HOUR_S

    def microbatches_at(self, gpu_hours: float) -> float | None:
        """Return how many microbatches were committed when `gpu_hours` were spent.

        Interpolate between two entries of `curve`: the microbatches of a step count evenly over its
        time, also if a loss struck in it. Between the last commit before a restart and the first
        one after it the result therefore falls evenly, although the work since the save was lost at
        once. Return None if the run is shorter.
        """
        before = (0.0, 0)
        for spent, done in self.curve:
            if spent >= gpu_hours * HOUR_S:
                part = (gpu_hours * HOUR_S - before[0]) / (spent - before[0])
                return before[1] + part * (done - before[1])
            before = spent, done
        return None


class Meter:
    """Meter of the time that a policy spends and of the work that it commits."""

    def __init__(self, policy: PolicyName, scenario: Scenario) -> None:
        self.timing = Timing.of(scenario)
        self.gpus = scenario.job.gpus
        self.outcome = Outcome(policy, replicas_end=scenario.job.replicas)
        self._ideal: dict[tuple[int, int], float] = {}
        self.num_microbatches = scenario.job.microbatches
        self.full_s = self.timing.ideal_step_s(scenario.job.replicas, scenario.job.microbatches)
        """Seconds of a step of the whole job."""

    @property
    def done(self) -> tuple[int, int, float, float]:
        """Return what is committed: steps, microbatches, ideal seconds and seconds of a whole job.

        A restart sets it back to that of the last save.
        """
        outcome = self.outcome
        return outcome.steps, outcome.microbatches, outcome.ideal_seconds, outcome.full_seconds

    @done.setter
    def done(self, done: tuple[int, int, float, float]) -> None:
        outcome = self.outcome
        outcome.steps, outcome.microbatches, outcome.ideal_seconds, outcome.full_seconds = done

    def spend(self, seconds: float) -> None:
        """Add `seconds` of run time, and the GPU-seconds of the replicas that are left."""
        self.outcome.seconds += seconds
        self.outcome.gpu_seconds += seconds * self.outcome.replicas_end * self.gpus

    def lose(self, *, is_member: bool = True) -> None:
        """Count the loss of a replica; one of a newcomer is no loss for the others."""
        self.outcome.losses += is_member
        self.outcome.replicas_end -= 1

    def ideal_s(self, num_members: int, num_microbatches: int) -> float:
        """Return `Timing.ideal_step_s`, which is remembered."""
        key = (num_members, num_microbatches)
        if key not in self._ideal:
            self._ideal[key] = self.timing.ideal_step_s(num_members, num_microbatches)
        return self._ideal[key]

    def commit(self, num_members: int, num_microbatches: int, count: int = 1) -> None:
        """Count `count` committed steps; `num_members` are those that their ideal time is for."""
        outcome = self.outcome
        outcome.steps += count
        outcome.microbatches += count * num_microbatches
        outcome.ideal_seconds += count * self.ideal_s(num_members, num_microbatches)
        outcome.full_seconds += count * self.full_s * num_microbatches / self.num_microbatches
        outcome.curve.append((outcome.gpu_seconds, outcome.microbatches))
