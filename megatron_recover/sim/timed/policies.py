"""What a job does about a loss, and what that costs: the protocol of `core` on the virtual clock, and the usual alternatives.

`recover` runs the machines (`sim/timed/job.py`). The others are baselines, in closed form, step by step, over the same models
and the same random losses. They pay nothing for votes, plans or membership: a baseline is simplified in its favour.

checkpoint-restart
    A blocking save every n steps, n by Daly's formula (Daly 2006; Young 1974 is its first term). A loss ends the job; after
    `restart_s` the survivors go on from the last save with quotas as even as integers allow, which Megatron does not: it needs
    equal ones, and that is checkpoint-restart-equal.
shrink
    Collectives survive, but the lost microbatches are left out: every survivor goes on with its own quota, so the batch shrinks
    (ReCoVer's ablation AdaptiveWorldPolicy).
drop-step
    The step of a loss is thrown away by all, and the batch shrinks from then on (torchft without spares: `should_commit`).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from megatron_recover.core.values import NewGeneration, Plan, ReplicaId
from megatron_recover.faults import Fault, FaultPoint
from megatron_recover.sim.timed.job import TimedJob, TimedReplica
from megatron_recover.sim.timed.models import FailuresTable, PolicyName, Scenario, Timing

HOUR_S = 3600.0
MAX_FRUITLESS = 100
"""Generations without a loss and without a committed step. The coordinator removes no replica where all wait for each other."""


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
    """What the committed steps take over the best integer quotas of those whose work they hold, when nothing is lost."""
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


class Losses:
    """When replicas are lost: a pure function of seed and of what is run. Every policy gets its own."""

    def __init__(self, scenario: Scenario) -> None:
        self.failures, self.ranks = scenario.failures, scenario.job.ranks
        self.dice = random.Random(scenario.job.seed)
        self.num_steps = 0
        """Begun so far."""
        self.exposure = self.dice.expovariate(1.0)
        """Until the next loss, in expected losses."""

    def hazard(self, num_members: int) -> float:
        """Losses per second."""
        return (self.failures.per_gpu_hour or 0.0) * num_members * self.ranks / HOUR_S

    def in_step(self, num_members: int) -> float | None:
        """A step begins: the part of it (0..1) at which a loss by `every_steps` strikes, if one does."""
        self.num_steps += 1
        every = self.failures.every_steps
        if every is None or self.num_steps % every or num_members <= self.failures.until_replicas:
            return None
        return self.dice.random()

    def within(self, seconds: float, num_members: int) -> float | None:
        """So many seconds go by: after how many of them a loss by rate strikes, if one does."""
        hazard = self.hazard(num_members)
        if not hazard or num_members <= self.failures.until_replicas:
            return None
        if self.exposure > hazard * seconds:
            self.exposure -= hazard * seconds
            return None
        at, self.exposure = self.exposure / hazard, self.dice.expovariate(1.0)
        return at


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
        """So many steps are committed, which hold the work of so many members."""
        outcome = self.outcome
        outcome.steps += count
        outcome.microbatches += count * num_microbatches
        outcome.ideal_seconds += count * self.ideal_s(num_members, num_microbatches)
        outcome.curve.append((outcome.gpu_seconds, outcome.microbatches))


class RecoverJob(TimedJob):
    """A job of the real machines that loses replicas as the scenario says.

    Steps that can not differ from the ones before are not simulated again: when two steps without a recovery have taken
    equally long, those up to the next loss take as long, and only their time is added.
    """

    def __init__(self, scenario: Scenario, on_step: Callable[[int], None] | None = None) -> None:
        """`on_step(count)` is called when so many steps are committed."""
        failures = scenario.failures
        super().__init__(
            scenario.job, Timing(scenario.job, scenario.compute, scenario.network), timers_of(failures),
            detect_s=failures.detect_s, stall_timeout_s=failures.stall_timeout_s, faults=scenario.fault,
        )  # fmt: skip
        self.failures, self.losses = failures, Losses(scenario)
        self.meter, self._on_step = Meter("recover", scenario), on_step
        self.step_seconds: list[float] = []
        """Of every step, from commit to commit."""
        self.num_left_out = 0
        """Steps whose time was only added."""
        self._disturbed = True
        self._begun = -1
        self._ended = self._spent = 0.0
        self._next_loss: float | None = None
        self._alike = 0
        """Steps without a recovery since the last one that had one."""
        self._draw()

    def _draw(self) -> None:
        """When the next loss by rate strikes, if nothing is left out until then."""
        hazard = self.losses.hazard(self.meter.outcome.replicas_end)
        self._next_loss = None
        if hazard and self.meter.outcome.replicas_end > self.failures.until_replicas:
            self._schedule(self.clock.now + self.losses.exposure / hazard)
            self.losses.exposure = self.losses.dice.expovariate(1.0)

    def _schedule(self, time: float) -> None:
        self._next_loss = time
        self.clock.at(time, self._lose_by_rate, time)

    def _lose_by_rate(self, due: float) -> None:
        if due == self._next_loss:
            self.kill(self._victim(), self.losses.dice.randrange(self.table.ranks))
            self._draw()

    def _victim(self) -> ReplicaId:
        return self.losses.dice.choice([one.number for one in self.replicas if one.number not in self._dead])

    def kill(self, number: ReplicaId, position: int = 0) -> None:
        self._spend()
        if number not in self._dead:
            self.meter.lose()
        super().kill(number, position)

    def _spend(self) -> None:
        self.meter.spend(self.clock.now - self._spent)
        self._spent = self.clock.now

    def announced(self, new: NewGeneration) -> None:
        self._disturbed = True  # a step that others had committed ends with who has died before it did
        super().announced(new)
        self._disturbed = True
        if self.coordinator.state.fruitless > MAX_FRUITLESS:
            raise self._too_slow(f"{MAX_FRUITLESS} generations in a row came without a step")

    def fence(self, number: ReplicaId) -> None:
        super().fence(number)
        if number not in self._deaths:  # replicas do nothing wrong here but die: this one was only slower than a timeout
            detail = next(loss.detail for loss in self.coordinator.state.losses if loss.replica == number)
            raise self._too_slow(f"no fault struck replica {number}, but it {detail}")

    def _too_slow(self, what: str) -> ValueError:
        return ValueError(
            f"{what}: [network] (latency_s, local_latency_s, message_s, bytes_per_s) is too slow for [failures] "
            f"(follow_timeout_s = {self.failures.follow_timeout_s:g}, stall_timeout_s = {self.failures.stall_timeout_s:g}); "
            "look at the units"
        )

    def planned(self, one: TimedReplica, plan: Plan) -> None:
        super().planned(one, plan)
        if plan.step > self._begun:
            self._begun = plan.step
            part = self.losses.in_step(self.meter.outcome.replicas_end)
            if part is not None:
                self._lose_in(plan, part)

    def _lose_in(self, plan: Plan, part: float) -> None:
        victim, position = self._victim(), self.losses.dice.randrange(self.table.ranks)
        if self.failures.at == "reduction":
            bucket = self.losses.dice.choice(self.buckets_of[position])
            for point in (FaultPoint.REDUCE, FaultPoint.SECOND_REDUCE):  # whichever comes first; it dies once
                self.add_fault(Fault(replica=victim, rank=position, point=point, step=plan.step, bucket=bucket))
        else:
            seconds = self.meter.ideal_s(len(plan.roster), plan.work.num_microbatches)
            self.clock.after(part * seconds, self.kill, victim, position)

    def step_ended(self, step: int) -> None:
        self._spend()
        self.meter.commit(self.account.steps[step].members, self.table.microbatches)
        self.step_seconds.append(self.clock.now - self._ended)
        self._ended = self.clock.now
        self._alike = 0 if self._disturbed else self._alike + 1
        self._disturbed = False
        if self._alike >= 2 and self.failures.every_steps is None and not self.awaits_faults:
            self._leave_out(step)
        if self._on_step is not None:
            self._on_step(self.meter.outcome.steps)

    def _leave_out(self, step: int) -> None:
        before, seconds = self.step_seconds[-2:]
        if not math.isclose(seconds, before, rel_tol=1e-6):
            return
        count = self.num_steps - step - 3
        if self._next_loss is not None:
            count = min(count, int((self._next_loss - self.clock.now) / seconds) - 1)
        if count > 0:
            self.num_left_out += count
            self.num_steps -= count
            self.meter.spend(count * seconds)
            self.step_seconds += [seconds] * count
            self.meter.commit(self.account.steps[step].members, self.table.microbatches, count)
            if self._next_loss is not None:
                self._schedule(self._next_loss - count * seconds)


def timers_of(failures: FailuresTable) -> dict[str, float]:
    """Seconds of every `core.coordinator.Setting`; the start of a job is not simulated."""
    return {
        "follow_timeout_s": failures.follow_timeout_s, "finish_timeout_s": failures.stall_timeout_s,
        "save_timeout_s": failures.save_timeout_s, "grace_s": failures.grace_s,
        "load_timeout_s": math.inf, "start_timeout_s": math.inf,
    }  # fmt: skip


def run_recover(scenario: Scenario, on_step: Callable[[int], None] | None = None) -> RecoverJob:
    """A job that has run. Raises as `simulate`, and RuntimeError where it ended wrong for no fault of the scenario."""
    job = RecoverJob(scenario, on_step)
    account = job.run()

    def told(number: int, fault: Fault) -> str:
        where = f"replica {fault.replica}, rank {fault.rank}, {fault.point.value}, occurrence {fault.occurrence}"
        return f"[[fault]] {number} ({where})"

    if account.exit_code and job.struck:
        last = job.struck[-1]
        said = told(scenario.fault.index(last) + 1, last)
        raise ValueError(f"{said} ends the job: {account.reason}; leave it out, or begin with more replicas")
    if account.exit_code:
        raise RuntimeError(f"the simulated job ended with exit code {account.exit_code}: {account.reason}")
    mistakes = [
        f"{told(number, fault)} never struck: the rank does not pass that point so often in this job, or is dead before; "
        "give another step or bucket or a smaller occurrence, or leave the fault out"
        for number, fault in enumerate(scenario.fault, 1)
        if fault in job.unstruck
    ]
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return job


def recover(scenario: Scenario, on_step: Callable[[int], None] | None = None) -> Outcome:
    """Ours: the real machines. Raises as `run_recover`."""
    job = run_recover(scenario, on_step)
    account = job.account
    outcome = job.meter.outcome
    outcome.steps_left_out = job.num_left_out
    recoveries = [recovery for recovery in account.recoveries.values() if recovery.planned]
    outcome.microbatches_redone = sum(recovery.redone for recovery in recoveries)
    outcome.in_schedule = sum(recovery.in_schedule for recovery in recoveries)
    waits = [recovery.planned - recovery.began for recovery in recoveries]
    if waits:
        outcome.kill_to_plan_s = statistics.median(waits), max(waits)
    return outcome


# --- Baselines -----------------------------------------------------------------------------------------------------------


def _begin_step(meter: Meter, losses: Losses, scenario: Scenario, seconds: float) -> float | None:
    """A step of so many seconds begins: after how many of them a loss strikes, or None."""
    members = meter.outcome.replicas_end
    part = losses.in_step(members)
    if part is None:
        return losses.within(seconds, members)
    if scenario.failures.at == "anywhere":
        return part * seconds
    return seconds - scenario.compute.optimizer_s - part * meter.timing.reduction_s(members)


def checkpoint_restart(scenario: Scenario) -> Outcome:
    """Saves at Daly's interval, with quotas as even as integers allow on whatever is left."""
    return _checkpoint_restart(scenario, _interval(scenario), "checkpoint-restart")


def checkpoint_restart_equal(scenario: Scenario) -> Outcome:
    """The same with equal quotas only, as Megatron has it: replicas beyond the largest divisor of M wait idle."""
    return _checkpoint_restart(scenario, _interval(scenario), "checkpoint-restart-equal")


def best_checkpoint_restart(scenario: Scenario) -> Outcome:
    """`checkpoint_restart` at the interval that turns out best for these very losses, which nobody can know before."""
    young, _ = young_daly(scenario)
    tried = [_checkpoint_restart(scenario, n, "checkpoint-restart") for n in range(1, min(4 * math.ceil(young), 1000) + 1)]
    return max(tried, key=lambda outcome: outcome.microbatches_per_gpu_hour)


def _interval(scenario: Scenario) -> int:
    return max(1, round(young_daly(scenario)[1]))


def young_daly(scenario: Scenario) -> tuple[float, float]:
    """The interval between saves in steps, by Young's formula and by Daly's with its higher-order terms, at full size."""
    assert scenario.checkpoint is not None
    job, save_s = scenario.job, scenario.checkpoint.save_s
    step_s = Timing(job, scenario.compute, scenario.network).ideal_step_s(job.replicas, job.microbatches)
    every, hazard = scenario.failures.every_steps, Losses(scenario).hazard(job.replicas)
    between_s = every * step_s if every is not None else 1 / hazard if hazard else math.inf
    if math.isinf(between_s) or not save_s:
        length = float(job.steps) if save_s else 1.0
        return length, length
    young_s = math.sqrt(2 * save_s * between_s)
    ratio = save_s / (2 * between_s)
    daly_s = young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s if ratio < 1 else between_s
    return young_s / step_s, daly_s / step_s


def _checkpoint_restart(scenario: Scenario, interval: int, policy: PolicyName) -> Outcome:
    assert scenario.checkpoint is not None
    job, table = scenario.job, scenario.checkpoint
    meter, losses = Meter(policy, scenario), Losses(scenario)
    meter.outcome.interval_steps, meter.outcome.young_daly_steps = interval, young_daly(scenario)
    saved = meter.outcome.steps, meter.outcome.microbatches, meter.outcome.ideal_seconds
    while meter.outcome.steps < job.steps:
        workers = meter.outcome.replicas_end
        if policy == "checkpoint-restart-equal":
            workers = next(count for count in range(workers, 0, -1) if job.microbatches % count == 0)
        seconds = meter.ideal_s(workers, job.microbatches)
        at = _begin_step(meter, losses, scenario, seconds)
        if at is None:
            meter.spend(seconds)
            meter.commit(meter.outcome.replicas_end, job.microbatches)
            if meter.outcome.steps % interval or meter.outcome.steps == job.steps:
                continue
            at = losses.within(table.save_s, meter.outcome.replicas_end)
            if at is None:
                meter.spend(table.save_s)
                saved = meter.outcome.steps, meter.outcome.microbatches, meter.outcome.ideal_seconds
                continue
        while at is not None:
            meter.spend(at)
            meter.lose()
            meter.spend(scenario.failures.detect_s)
            at = losses.within(table.restart_s, meter.outcome.replicas_end)
        meter.spend(table.restart_s)
        meter.outcome.steps, meter.outcome.microbatches, meter.outcome.ideal_seconds = saved
    return meter.outcome


def shrink(scenario: Scenario) -> Outcome:
    """The survivors finish the step without what was lost, and go on with a smaller batch."""
    return _smaller(scenario, "shrink", keep_step=True)


def drop_step(scenario: Scenario) -> Outcome:
    """The step is thrown away, and the survivors go on with a smaller batch."""
    return _smaller(scenario, "drop-step", keep_step=False)


def _smaller(scenario: Scenario, policy: PolicyName, *, keep_step: bool) -> Outcome:
    assert scenario.drop is not None
    job, failures = scenario.job, scenario.failures
    meter, losses = Meter(policy, scenario), Losses(scenario)
    outcome, quota = meter.outcome, job.microbatches // job.replicas
    while outcome.steps < job.steps:
        seconds = meter.ideal_s(outcome.replicas_end, quota * outcome.replicas_end)
        at = _begin_step(meter, losses, scenario, seconds)
        if at is None:
            meter.spend(seconds)
            meter.commit(outcome.replicas_end, quota * outcome.replicas_end)
            continue
        meter.spend(at)
        meter.lose()
        meter.spend(failures.detect_s + scenario.drop.regroup_s)
        if keep_step:  # what is summed at the loss is summed again, without the lost share
            meter.spend(max(seconds - at, meter.timing.reduction_s(outcome.replicas_end)))
            meter.commit(outcome.replicas_end, quota * outcome.replicas_end)
    return outcome


_BASELINES: Mapping[PolicyName, Callable[[Scenario], Outcome]] = MappingProxyType({
    "shrink": shrink, "drop-step": drop_step,
    "checkpoint-restart": checkpoint_restart, "checkpoint-restart-equal": checkpoint_restart_equal,
})  # fmt: skip


def simulate(scenario: Scenario, on_step: Callable[[int], None] | None = None) -> dict[PolicyName, Outcome]:
    """All policies of a scenario. `on_step` as of `RecoverJob`: of `recover` only, which takes nearly all of the time.

    Raises ValueError when the simulated job of `recover` is too slow for its own timeouts, when a fault of the scenario takes
    its last replica, and with one line for each that never struck although the job ended.
    """
    return {
        policy: recover(scenario, on_step) if policy == "recover" else _BASELINES[policy](scenario)
        for policy in scenario.policies
    }
