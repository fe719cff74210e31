"""The policy `recover`: the real machines on the virtual clock, with the losses of a scenario.

This module decides only which replicas are lost and when, and which steps need no simulation
because nothing in them could differ.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from megatron_recover.core.membership_messages import NewGeneration
from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.values import ReplicaId
from megatron_recover.faults import Fault, FaultPoint
from megatron_recover.sim.timed.job import TimedJob, TimedReplica
from megatron_recover.sim.timed.models import FailuresTable, Losses, Scenario, Timing
from megatron_recover.sim.timed.outcome import Meter, Outcome


class RecoverJob(TimedJob):
    """A job of the real machines that loses replicas as the scenario has it.

    Steps that cannot differ from the ones before are not simulated again. When two steps have taken
    equally long, the second without a recovery, the steps up to the next loss take as long. Only
    their time is added. All steps are simulated with `every_steps`, while an exact fault may still
    strike, and near the next loss and the end. The job's time ends with the last commit.
    """

    def __init__(self, scenario: Scenario, on_step: Callable[[int], None] | None = None) -> None:
        """Build the job of a scenario. Call `on_step(count)` when `count` steps are committed."""
        failures = scenario.failures
        super().__init__(
            scenario.job, Timing(scenario.job, scenario.compute, scenario.network), timers_of(failures),
            detect_s=failures.detect_s, stall_s=failures.stall_s, faults=scenario.fault,
        )  # fmt: skip
        self.failures, self.losses = failures, Losses(scenario)
        self.meter, self._on_step = Meter("recover", scenario), on_step
        self.step_seconds: list[float] = []
        """Seconds of every step, from commit to commit."""
        self.num_left_out = 0
        """Steps whose time was only added."""
        self._disturbed = True
        self._begun = -1
        self._ended = self._spent = 0.0
        self._next_loss: float | None = None
        self._doomed: set[ReplicaId] = set()
        """Replicas that will die at an instant that is drawn already."""
        self._is_over = False
        self._draw()

    def _draw(self) -> None:
        """Schedule the next loss by rate on the clock, as if no step were left out until then.

        Schedule none without a rate, or with `until_replicas` replicas left.
        """
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
        gone = self._dead.keys() | self._doomed
        return self.losses.dice.choice([one.number for one in self.replicas if one.number not in gone])

    def kill(self, number: ReplicaId, position: int = 0) -> None:
        self._doomed.discard(number)
        if not self._is_over and number not in self._dead:
            self._spend(self.clock.now)
            self.meter.lose()
        super().kill(number, position)

    def _spend(self, until: float) -> None:
        if until > self._spent:
            self.meter.spend(until - self._spent)
            self._spent = until

    def announced(self, new: NewGeneration) -> None:
        super().announced(new)
        self._disturbed = True
        state = self.coordinator.state
        if state.patience:  # only the timeouts can be at fault here
            raise self._too_slow(f"{state.fruitless} generations in a row came without a step")

    def fence(self, number: ReplicaId) -> None:
        super().fence(number)
        if number not in self._deaths:  # replicas only die here: this one was slower than a timeout
            detail = next(loss.detail for loss in self.coordinator.state.losses if loss.replica == number)
            raise self._too_slow(f"no fault struck replica {number}, but it {detail}")

    def _too_slow(self, what: str) -> ValueError:
        return ValueError(
            f"{what}: [network] (latency_s, local_latency_s, message_s, bytes_per_s, read_bytes_per_s) is too slow for "
            f"[failures] (follow_s = {self.failures.follow_s:g}, stall_s = {self.failures.stall_s:g}); "
            "look at the units"
        )

    def planned(self, one: TimedReplica, plan: Plan) -> None:
        super().planned(one, plan)
        if plan.step > self._begun:
            self._begun = plan.step
            part = self.losses.in_step(self.meter.outcome.replicas_end - len(self._doomed))
            if part is not None:
                self._lose_in(plan, part)

    def _lose_in(self, plan: Plan, part: float) -> None:
        victim, position = self._victim(), self.losses.dice.randrange(self.table.ranks)
        if self.failures.at == "reduction":
            bucket = self.losses.dice.choice(self.buckets_of[position])
            for point in (FaultPoint.REDUCE, FaultPoint.SECOND_REDUCE):  # it passes one of them first
                self.add_fault(Fault(replica=victim, rank=position, point=point, step=plan.step, bucket=bucket))
        else:
            seconds = self.meter.ideal_s(len(plan.roster), plan.work.num_microbatches)
            self._doomed.add(victim)
            self.clock.after(part * seconds, self.kill, victim, position)

    def step_ended(self, step: int) -> None:
        ended = self.account.steps[step].ended  # in the past, if a member died before its commit
        self._spend(ended)
        self.meter.commit(self.account.steps[step].num_members, self.table.microbatches)
        self.step_seconds.append(ended - self._ended)
        self._ended = ended
        was_disturbed, self._disturbed = self._disturbed, False
        # A dead replica that is not discovered yet still needs a recovery.
        if not was_disturbed and not self.undiscovered and not self.awaits_faults and self.failures.every_steps is None:
            self._leave_out(step)
        self._is_over = step == self.num_steps - 1
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
            self.meter.commit(self.account.steps[step].num_members, self.table.microbatches, count)
            if self._next_loss is not None:
                self._schedule(self._next_loss - count * seconds)


def timers_of(failures: FailuresTable) -> dict[str, float]:
    """Return the seconds of every `core.coordinator.Setting`; a job's start is not simulated."""
    return {
        "follow_s": failures.follow_s, "finish_s": failures.stall_s,
        "blame_s": 1.5 * failures.stall_s, "save_s": failures.save_s, "grace_s": failures.grace_s,
        "deadline_s": math.inf, "start_s": math.inf, "lapse_s": math.inf, "gather_s": 0.02,
    }  # fmt: skip


def run_recover(scenario: Scenario, on_step: Callable[[int], None] | None = None) -> RecoverJob:
    """Run the job of a scenario and return it.

    Raise as `simulate` does, and RuntimeError if the job ended wrongly without an exact fault of
    the scenario, or did not end.
    """
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
    """Return the outcome of the real machines. Raise as `run_recover` does."""
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
