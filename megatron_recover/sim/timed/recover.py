"""The policy `recover`: the real machines on the virtual clock, with the losses of a scenario.

This module decides only which replicas are lost and when, and which steps need no simulation
because nothing in them could differ.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from megatron_recover.core import coordinator
from megatron_recover.core.membership_messages import NewGeneration
from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.replica import Committed
from megatron_recover.core.values import ReplicaId
from megatron_recover.faults import Fault, FaultPoint
from megatron_recover.sim.timed.actors import TimedReplica
from megatron_recover.sim.timed.healing import Healing
from megatron_recover.sim.timed.job import TimedJob
from megatron_recover.sim.timed.models import HEALING, FailuresTable, Losses, PolicyName, Scenario, Timing
from megatron_recover.sim.timed.outcome import Meter, Outcome
from megatron_recover.sim.timed.places import Places


class RecoverJob(TimedJob):
    """A job of the real machines that loses replicas as the scenario has it.

    Steps that cannot differ from the ones before are not simulated again. When two steps have taken
    equally long, the second without a recovery, the steps up to the next loss take as long. Only
    their time is added. All steps are simulated with `every_steps`, while an exact fault may still
    strike, and near the next loss and the end. The job's time ends with the last commit.
    """

    def __init__(
        self, scenario: Scenario, on_step: Callable[[int], None] | None = None, policy: PolicyName = "recover"
    ) -> None:
        """Build the job of a scenario. Call `on_step(count)` when `count` steps are committed.

        `policy`: `recover` or one of `HEALING`, which need a `[repair]` table.
        """
        failures = scenario.failures
        super().__init__(
            scenario.job, Timing.of(scenario), timers_of(failures),
            detect_s=failures.detect_s, stall_s=failures.stall_s, faults=scenario.fault,
        )  # fmt: skip
        self.failures, self.losses = failures, Losses(scenario)
        self.meter, self._on_step = Meter(policy, scenario), on_step
        self.step_seconds: list[float] = []
        """Seconds of every step, from commit to commit."""
        self.num_left_out = 0
        """Steps whose time was only added."""
        self._disturbed = True
        self._begun = -1
        self._ended = self._spent = 0.0
        self._appointments: dict[int, tuple[float, Callable[[], None]]] = {}
        """Time and call of what comes without a step, by number. Steps are left out before it."""
        self._num_appointments = 0
        self._next_loss: int | None = None
        """Number of the appointment of the next loss by rate; None: there is none."""
        self._hazard = 0.0
        """Losses per second from which its time was computed."""
        self.left_out_s = 0.0
        """Seconds of the steps whose time was only added."""
        self._doomed: set[ReplicaId] = set()
        """Replicas that will die at an instant that is drawn already."""
        self._is_over = False
        self.healing: Healing | None = None
        if policy in HEALING and scenario.repair is not None:
            spares = scenario.repair.spares if policy == "recover-spares" else 0
            self.healing = Healing(self, Places(scenario, num_spares=spares))
        self._draw()

    # --- Losses by rate, and whatever else comes without a step -----------------------------------

    @property
    def now_s(self) -> float:
        """Return the seconds since the start of the job, those of left-out steps included."""
        return self.clock.now + self.left_out_s

    @property
    def num_committed(self) -> int:
        """Return the number of committed steps, left-out ones included."""
        return self.meter.outcome.steps

    def feed(self, message: coordinator.Input) -> None:
        """Feed an input to the coordinator's machine."""
        if self.account.exit_code is None:
            self.coordinator.feed(message)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Make a call in `seconds`, which may lie in steps that are left out until then."""
        self._appoint(self.clock.now + seconds, call)

    def _appoint(self, time: float, call: Callable[[], None]) -> int:
        self._num_appointments += 1
        self._set(self._num_appointments, time, call)
        return self._num_appointments

    def _set(self, number: int, time: float, call: Callable[[], None]) -> None:
        self._appointments[number] = time, call
        self.clock.at(time, self._keep, number, time)

    def _keep(self, number: int, time: float) -> None:
        due, call = self._appointments.get(number, (math.nan, None))
        if call is not None and due == time:
            del self._appointments[number]
            call()

    def _draw(self) -> None:
        """Appoint the next loss by rate; none without a rate, or with `until_replicas` left."""
        self._next_loss = None
        self._hazard = self.losses.hazard(self.meter.outcome.replicas_end)
        if self._hazard and self.meter.outcome.replicas_end > self.failures.until_replicas:
            self._next_loss = self._appoint(self.clock.now + self.losses.exposure / self._hazard, self._lose_by_rate)
            self.losses.exposure = self.losses.dice.expovariate(1.0)

    def _grown(self) -> None:
        """Bring the next loss by rate nearer, as one more replica can be lost."""
        hazard = self.losses.hazard(self.meter.outcome.replicas_end)
        if self._next_loss is None:
            self._draw()
        elif hazard:
            time, _ = self._appointments[self._next_loss]
            self._schedule(self.clock.now + (time - self.clock.now) * self._hazard / hazard)
            self._hazard = hazard

    def _schedule(self, time: float) -> None:
        """Move the next loss by rate to `time`."""
        assert self._next_loss is not None
        self._set(self._next_loss, time, self._lose_by_rate)

    def _lose_by_rate(self) -> None:
        self.kill(self._victim(), self.losses.dice.randrange(self.table.ranks))
        self._draw()

    def _victim(self) -> ReplicaId:
        gone = self._dead.keys() | self._doomed
        return self.losses.dice.choice([one.number for one in self.replicas if one.number not in gone])

    def kill(self, number: ReplicaId, position: int = 0) -> None:
        self._doomed.discard(number)
        if not self._is_over and number not in self._dead:
            self._spend(self.clock.now)
            self.meter.lose(is_member=self.healing is None or number in self.healing.members)
            if self.healing is not None:
                self.healing.died(number)
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
        is_new = self.replicas[number].is_newcomer and (self.healing is None or number not in self.healing.members)
        if is_new and number not in self._dead and not self._is_over:  # it gave up, or is turned away
            self._spend(self.clock.now)
            self.meter.lose(is_member=False)
        super().fence(number)
        if self.healing is not None:
            self.healing.fenced(number)
        if number not in self._deaths and not is_new:  # replicas only die here: this one was slower than a timeout
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

    # --- Newcomers --------------------------------------------------------------------------------

    @property
    def awaits_next_window(self) -> bool:
        return True

    def form(self, number: ReplicaId) -> None:
        assert self.healing is not None
        self.healing.form(number)
        one = self.replica_type(self, number, self.tree_above, self.min_replicas, is_newcomer=True)
        self.replicas.append(one)
        self._spend(self.clock.now)
        self.meter.outcome.replicas_end += 1
        self._grown()
        self.later(self.timing.forming_s(), lambda: one.newcomer.ready(one.ranks[0]))

    def begun(self) -> None:
        for number in () if self.healing is None else self.healing.entering:
            one = self.replicas[number]
            self.clock.after(self.timing.latency_s(), one.newcomer.look, one.ranks[0])

    def reached(self, one: TimedReplica, phase: str) -> None:
        if phase == "is ready" and self.healing is not None:
            self.healing.ready(one.number)

    def refused(self, one: TimedReplica, reason: str, *, is_fault: bool) -> None:
        if self.healing is not None:
            self.healing.refused(one.number, reason, is_fault=is_fault and one.newcomer.num_failed >= 0)

    def committed(self, one: TimedReplica, effect: Committed) -> None:
        super().committed(one, effect)
        if self.healing is not None and not effect.adopted:
            self.healing.voted(one.number)

    # --- Steps ------------------------------------------------------------------------------------

    def step_ended(self, step: int) -> None:
        ended = self.account.steps[step].ended  # in the past, if a member died before its commit
        self._spend(ended)
        self.meter.commit(self.account.steps[step].num_members, self.table.microbatches)
        self.step_seconds.append(ended - self._ended)
        self._ended = ended
        was_disturbed, self._disturbed = self._disturbed, False
        if self.healing is not None:
            self.healing.committed(self.meter.outcome.steps)
            was_disturbed = was_disturbed or bool(self.healing.entering)
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
        if self._appointments:
            nearest = min(time for time, _ in self._appointments.values())
            count = min(count, int((nearest - self.clock.now) / seconds) - 1)
        if count > 0:
            self.num_left_out += count
            self.num_steps -= count
            self.left_out_s += count * seconds
            self.meter.spend(count * seconds)
            self.step_seconds += [seconds] * count
            self.meter.commit(self.account.steps[step].num_members, self.table.microbatches, count)
            for number, (time, call) in [*self._appointments.items()]:
                self._set(number, time - count * seconds, call)


def timers_of(failures: FailuresTable) -> dict[str, float]:
    """Return the seconds of every `core.coordinator.Setting`; a job's start is not simulated."""
    return {
        "follow_s": failures.follow_s, "finish_s": failures.stall_s,
        "blame_s": 1.5 * failures.stall_s, "save_s": failures.save_s, "grace_s": failures.grace_s,
        "deadline_s": math.inf, "start_s": math.inf, "lapse_s": math.inf, "gather_s": 0.02,
    }  # fmt: skip


def run_recover(scenario: Scenario, on_step: Callable[[int], None] | None = None, policy: PolicyName = "recover") -> RecoverJob:
    """Run the job of a scenario and return it.

    Raise as `simulate` does, and RuntimeError if the job ended wrongly without an exact fault of
    the scenario, or did not end.
    """
    job = RecoverJob(scenario, on_step, policy)
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


def recover(scenario: Scenario, on_step: Callable[[int], None] | None = None, policy: PolicyName = "recover") -> Outcome:
    """Return the outcome of the real machines. Raise as `run_recover` does."""
    job = run_recover(scenario, on_step, policy)
    account = job.account
    outcome = job.meter.outcome
    outcome.steps_left_out = job.num_left_out
    recoveries = [recovery for recovery in account.recoveries.values() if recovery.planned]
    outcome.microbatches_redone = sum(recovery.redone for recovery in recoveries)
    outcome.in_schedule = sum(recovery.in_schedule for recovery in recoveries)
    waits = [recovery.planned - recovery.began for recovery in recoveries]
    if job.healing is not None:
        outcome.newcomers = job.healing.account
    if waits:
        outcome.kill_to_plan_s = statistics.median(waits), max(waits)
    return outcome
