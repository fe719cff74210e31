"""What the policies make of losses: ours by the real machines, the baselines against what can be counted by hand."""

from __future__ import annotations

import pytest

from megatron_recover.sim.timed import policies
from megatron_recover.sim.timed.models import Losses, Timing
from megatron_recover.sim.timed.policies import simulate, young_daly
from megatron_recover.sim.timed.recover import RecoverJob, recover
from tests.sim.build import scenario

EVERY_THIRD = {"every_steps": 3, "until_replicas": 2, "at": "reduction"}


def test_without_losses_every_policy_does_the_same_but_saves() -> None:
    what = scenario(policies=["recover", "shrink", "drop-step", "checkpoint-restart"], job={"steps": 6})
    ours, *others, saving = simulate(what).values()
    assert ours.goodput_of_ideal == pytest.approx(1, abs=1e-3)
    for other in others:
        assert other.goodput_of_ideal == pytest.approx(1)
    assert saving.goodput_of_ideal == pytest.approx(1), "nothing is lost: nothing need be saved before the end"


def test_ours_keeps_the_batch_and_nearly_all_of_the_time() -> None:
    outcome = recover(scenario(job={"steps": 12, "microbatches": 128}, failures=EVERY_THIRD))
    assert (outcome.losses, outcome.replicas_end, outcome.microbatches) == (2, 2, 12 * 128)
    assert outcome.microbatches_redone == 32 + 43
    assert outcome.goodput_of_ideal > 0.9


@pytest.mark.parametrize(("steps", "detect_s"), [(3, 0.05), (2, 0.05), (2, 50.0)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_around_the_commit_takes_no_step_and_no_work_away(rank: int, steps: int, detect_s: float) -> None:
    """Between the last sum and the last member's commit of the second step nothing is lost but the replica."""
    what = scenario(job={"steps": steps}, network={"latency_s": 0.01}, failures={"detect_s": detect_s})
    quiet = RecoverJob(what)
    quiet.run()
    redone = []
    for hundredths in range(-100, 3 if steps > 2 else 1):
        job = RecoverJob(what)
        job.clock.at(quiet.account.steps[1].ended + hundredths / 100, job.kill, 2, rank)
        assert job.run().exit_code == 0
        redone.append(sum(recovery.redone for recovery in job.account.recoveries.values()))
        outcome = job.meter.outcome
        assert (outcome.steps, outcome.microbatches, outcome.losses) == (steps, steps * 32, 1), hundredths
        assert outcome.goodput_of_ideal < 1, hundredths
    assert redone[0] == 8 and redone[-1] == 0, "some die before the last sum, some after it"


def test_a_restart_costs_the_steps_since_the_last_save() -> None:
    what = scenario(job={"steps": 5}, failures=EVERY_THIRD | {"until_replicas": 3})
    timing = Timing(what.job, what.compute, what.network)
    full, less = timing.ideal_step_s(4, 32), timing.ideal_step_s(3, 32)
    outcome = policies._checkpoint_restart(what, 2, "checkpoint-restart")
    # Steps 1 and 2, a save, a part of step 3, the restart; steps 3 and 4, a save, step 5.
    lower = 2 * full + 2 + (full - timing.reduction_s(4)) + 100 + 2 * less + 2 + less
    assert lower - 0.25 < outcome.seconds < lower + timing.reduction_s(4) + 0.1
    assert (outcome.steps, outcome.losses, outcome.microbatches) == (5, 1, 160)


def test_equal_quotas_leave_replicas_idle() -> None:
    what = scenario(job={"steps": 9}, failures=EVERY_THIRD | {"until_replicas": 3})
    uneven = policies._checkpoint_restart(what, 2, "checkpoint-restart")
    equal = policies._checkpoint_restart(what, 2, "checkpoint-restart-equal")
    assert equal.microbatches_per_gpu_hour < 0.9 * uneven.microbatches_per_gpu_hour, "three replicas live, two of them work"


def test_the_interval_between_saves_is_youngs_and_dalys() -> None:
    what = scenario(failures={"every_steps": 10})
    step_s = Timing(what.job, what.compute, what.network).ideal_step_s(4, 32)
    young, daly = young_daly(what)
    assert young == pytest.approx((2 * 2 * 10 * step_s) ** 0.5 / step_s)
    assert daly == pytest.approx(young - 2 / step_s, rel=0.1)


def test_who_shrinks_or_drops_trains_less() -> None:
    what = scenario(job={"steps": 6}, failures=EVERY_THIRD, policies=["shrink", "drop-step"])
    shrink, drop = simulate(what).values()
    assert shrink.microbatches == 32 * 2 + 24 * 3 + 16 and drop.microbatches == 32 * 2 + 24 * 2 + 16 * 2
    assert drop.goodput_of_ideal < shrink.goodput_of_ideal


def test_steps_that_are_left_out_change_nothing() -> None:
    """Losses by rate strike at the same instants of the same job, whether all its steps are simulated or not."""
    what = scenario(job={"steps": 300}, failures={"per_gpu_hour": 0.5, "until_replicas": 1})
    jobs = [RecoverJob(what), Whole(what)]
    for job in jobs:
        assert job.run().exit_code == 0
    short, whole = (job.meter.outcome for job in jobs)
    assert jobs[0].num_left_out > 200 and not jobs[1].num_left_out
    assert whole.losses >= 2
    assert (short.steps, short.losses, short.microbatches) == (whole.steps, whole.losses, whole.microbatches)
    assert short.seconds == pytest.approx(whole.seconds, rel=1e-5)
    assert short.gpu_seconds == pytest.approx(whole.gpu_seconds, rel=1e-5)


class Whole(RecoverJob):
    """Simulates every step."""

    def _leave_out(self, step: int) -> None:
        pass


def test_no_step_is_left_out_between_a_death_and_its_discovery() -> None:
    what = scenario(job={"steps": 12}, network={"latency_s": 0.01}, failures={"per_gpu_hour": 1e-9, "until_replicas": 3})
    quiet = Whole(what)
    quiet.run()
    for milliseconds in range(-80, 20, 4):
        jobs = [RecoverJob(what), Whole(what)]
        for job in jobs:
            job._schedule(quiet.account.steps[5].ended + milliseconds / 1000)
            job.run()
        short, whole = (job.meter.outcome for job in jobs)
        assert jobs[0].num_left_out > 0 and (short.steps, short.losses) == (whole.steps, whole.losses) == (12, 1)
        assert short.seconds == pytest.approx(whole.seconds, rel=1e-5), milliseconds
        assert short.ideal_seconds == pytest.approx(whole.ideal_seconds, rel=1e-5), milliseconds


def test_steps_that_are_not_alike_are_not_left_out() -> None:
    class Uneven(Timing):
        def microbatch_s(self, replica: int, step: int) -> float:
            return 1.0 + step / 100

    what = scenario(job={"steps": 12})
    job = RecoverJob(what)
    job.timing = Uneven(what.job, what.compute, what.network)
    job.run()
    assert job.num_left_out == 0 and job.meter.outcome.steps == 12


def test_a_death_after_the_last_commit_costs_nothing() -> None:
    what = scenario(job={"steps": 2}, network={"latency_s": 0.01}, failures={"detect_s": 50.0})
    quiet = RecoverJob(what)
    quiet.run()
    ended = quiet.account.steps[1].ended
    for milliseconds in (-5, 1, 5):
        job = RecoverJob(what)
        job.clock.at(ended + milliseconds / 1000, job.kill, 2)
        assert job.run().exit_code == 0 and job.clock.now > ended + 5, "the others wait for it"
        assert job.meter.outcome.seconds == pytest.approx(ended, abs=0.01)
        assert job.meter.outcome.losses == (milliseconds < 0)
        assert sum(job.step_seconds) == pytest.approx(job.meter.outcome.seconds)


def test_nobody_is_lost_below_the_limit_though_a_death_is_still_to_come() -> None:
    """A step may end before the instant that was drawn in it: survivors sum faster than those that the draw knew."""
    job = {"replicas": 4, "ranks": 1, "stages": 1, "microbatches": 16, "steps": 5, "buckets": 1, "seed": 450}
    compute, network = {"microbatch_s": 0.1}, {"latency_s": 1e-5}
    outcome = recover(scenario(job=job, compute=compute, network=network, failures={"every_steps": 1, "detect_s": 0.5}))
    assert (outcome.losses, outcome.replicas_end, outcome.steps) == (3, 1, 5)


def test_who_is_to_die_is_not_drawn_again() -> None:
    doomed = RecoverJob(scenario())
    doomed._doomed = {0, 1, 3}
    assert {doomed._victim() for _ in range(20)} == {2}


def test_losses_by_rate_come_as_often_as_they_should() -> None:
    what = scenario(job={"replicas": 32}, failures={"per_gpu_hour": 0.01})
    losses = Losses(what)
    hits = sum(losses.within(10.0, 32) is not None for _ in range(100_000))
    assert hits == pytest.approx(0.01 * 32 * 2 / 3600 * 10.0 * 100_000, rel=0.1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_how_long_a_job_takes_to_begin_is_known_before(ranks: int) -> None:
    network = {"latency_s": 0.5, "local_latency_s": 0.25, "message_s": 0.125, "bytes_per_s": 10.0}
    job = {"ranks": ranks, "stages": 1}
    what = scenario(network=network, job=job)
    entering_s = sum(Timing(what.job, what.compute, what.network).entering_s(4).values())
    recover(scenario(network=network, job=job, failures={"follow_s": 1.001 * entering_s}))
    with pytest.raises(ValueError, match="no fault struck replica 3, but it did not enter generation 1"):
        recover(scenario(network=network, job=job, failures={"follow_s": 0.999 * entering_s}))


def test_a_network_slower_than_the_timeouts_is_told_and_no_endless_run() -> None:
    with pytest.raises(ValueError, match="2 generations in a row came without a step: .* stall_s = 0.5"):
        recover(scenario(network={"latency_s": 1.0}, failures={"stall_s": 0.5}))


def test_a_death_that_is_detected_late_is_no_mistake() -> None:
    """The survivors ask for a generation; the dead replica does not enter it."""
    assert recover(scenario(failures=EVERY_THIRD | {"detect_s": 50.0})).losses == 1


@pytest.mark.parametrize("policy", ["shrink", "drop-step"])
def test_who_shrinks_or_drops_pays_for_regrouping(policy: str) -> None:
    def seconds(regroup_s: float) -> float:
        what = scenario(job={"steps": 6}, failures=EVERY_THIRD, policies=[policy], drop={"regroup_s": regroup_s})
        [outcome] = simulate(what).values()
        return outcome.seconds

    assert seconds(51.0) - seconds(1.0) == pytest.approx(2 * 50), "two losses"
