"""The machines on a virtual clock: how long a step takes, undisturbed and with a loss early, late and in the reduction."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from megatron_recover.control_plane.encoding import packed_status
from megatron_recover.control_plane.wire import STATUSES_A_FRAME
from megatron_recover.core.digest import commitment
from megatron_recover.core.membership_messages import NewGeneration
from megatron_recover.core.quota import ticks
from megatron_recover.core.replica import Committed, LinkLost
from megatron_recover.core.values import Pipeline, Record, Status, Statuses
from megatron_recover.faults import Fault, FaultPoint
from megatron_recover.sim.timed.actors import TimedReplica
from megatron_recover.sim.timed.job import TimedJob
from megatron_recover.sim.timed.models import LEDGER_COLUMNS, MEMBER_BYTES, Scenario, Timing
from megatron_recover.sim.timed.rank import Pass
from scripts.draw.timeline import BACKWARD, FORWARD, Action, undisturbed
from tests.sim.build import job_of, kill, scenario, step_seconds

TALK_S = 0.01
"""More than all messages of a step take here."""


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [4, 5, 9])
def test_the_times_of_a_pass_are_those_of_the_real_schedule(stages: int, num_microbatches: int) -> None:
    timeline = undisturbed(Pipeline(stages), num_microbatches)
    for stage in range(stages):
        running = Pass(0.0, FORWARD + BACKWARD, FORWARD / (FORWARD + BACKWARD), stage, stages)
        running.extend(range(num_microbatches), 0.0)
        for i in range(num_microbatches):
            assert running.backward_begins(i) == pytest.approx(timeline.starts[Action(stage, 0, i, True)])
            # While the pipeline fills, a stage may wait for its neighbour a little longer than the formula says.
            begins = timeline.starts[Action(stage, 0, i, False)]
            assert running.forward_begins(i) == pytest.approx(begins) or (
                stage + i < stages and running.forward_begins(i) < begins
            )
        assert running.ends() == running.backward_begins(num_microbatches - 1) + BACKWARD
    assert Pass.ends(running) <= timeline.end == pytest.approx((num_microbatches + stages - 1) * (FORWARD + BACKWARD))


@pytest.mark.parametrize("stages", [1, 2])
def test_an_undisturbed_step_takes_the_ideal_time_and_little_talk(stages: int) -> None:
    what = scenario(job={"stages": stages})
    job = job_of(what)
    assert job.run().exit_code == 0
    ideal = Timing(what.job, what.compute, what.network).ideal_step_s(4, 32)
    for seconds in step_seconds(job)[1:]:
        assert ideal < seconds < ideal + TALK_S
    assert ideal > ticks(8, Pipeline(stages))


def test_what_dies_early_is_dealt_into_the_passes_that_run() -> None:
    what = scenario()
    job = job_of(what, kill(1, 1, "forward", 2, occurrence=2))
    assert job.run().exit_code == 0
    [recovery] = job.account.recoveries.values()
    assert (recovery.redone, recovery.in_schedule) == (8, 8)
    ideal = Timing(what.job, what.compute, what.network).ideal_step_s(3, 32)
    assert step_seconds(job)[2] == pytest.approx(ideal, abs=TALK_S), "as if the death had been known from the start"


def test_what_dies_in_the_reduction_is_computed_in_a_second_pass() -> None:
    what = scenario()
    job = job_of(what, kill(1, 0, "reduce", 2, bucket=1))
    assert job.run().exit_code == 0
    [recovery] = job.account.recoveries.values()
    assert (recovery.redone, recovery.in_schedule) == (8, 0)
    timing = Timing(what.job, what.compute, what.network)
    alone = timing.ideal_step_s(4, 32)
    second_pass = ticks(3, Pipeline(2))
    # Bucket 0 is safe, bucket 1 had got half its way when it was broken off; the rest is still to be reduced by the three.
    assert alone + second_pass < step_seconds(job)[2] < alone + second_pass + timing.reduction_s(4) + 0.1


def test_what_is_dealt_for_the_first_time_after_a_loss_is_not_redone() -> None:
    """The leader dies before its plan of step 2, which the others have begun when the loss is noticed."""
    what = scenario(failures={"detect_s": 0.5, "grace_s": 2.0})
    job = job_of(what, kill(1, 0, "optimizer", 1))
    assert job.run().exit_code == 0
    [recovery] = job.account.recoveries.values()
    assert what.compute.optimizer_s < 0.5 and recovery.step == 2
    assert (recovery.redone, recovery.in_schedule) == (0, 0)


def test_what_a_second_death_leaves_unfinished_is_redone_once() -> None:
    """As in a trace, a microbatch is redone when its backward has ended."""
    job = job_of(scenario(), kill(1, 0, "reduce", 2, bucket=1), kill(2, 0, "recompute", 2))
    assert job.run().exit_code == 0
    first, second = job.account.recoveries.values()
    assert first.redone == 5, "the replica that dies had 3 of 8, and has finished none"
    assert second.redone == 8 + 3, "what the dead had at first, and what it was to compute again"


def test_survivors_know_what_to_do_soon_after_the_death() -> None:
    what = scenario(failures={"detect_s": 0.15})
    job = job_of(what, kill(3, 0, "backward", 1), kill(0, 1, "optimizer", 2))
    assert job.run().exit_code == 0
    first, second = job.account.recoveries.values()
    assert 0.15 < first.planned - first.began < 0.15 + TALK_S
    assert (first.step, second.step) == (1, 3)
    assert [time.num_members for _, time in sorted(job.account.steps.items())] == [4, 3, 3, 2]


def test_a_job_ends_with_its_last_replica() -> None:
    job = job_of(scenario(job={"replicas": 2}), kill(0, 0, "backward", 1), kill(1, 1, "before_reduce", 2))
    assert job.run().exit_code == 13
    assert "replica" in job.account.reason


def test_a_busy_control_thread_is_late_with_the_last_message() -> None:
    quick, slow = (job_of(scenario(network={"message_s": seconds})) for seconds in (0.0, 0.1))
    quick.run()
    slow.run()
    # Per step a leader sends three votes and reads three, one after the other.
    assert step_seconds(slow)[2] - step_seconds(quick)[2] > 0.3


def test_a_step_ends_with_its_last_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    times: dict[int, list[float]] = {}
    original = TimedJob.committed

    def committed(self: TimedJob, one: TimedReplica, effect: Committed) -> None:
        original(self, one, effect)
        times.setdefault(effect.record.step, []).append(self.clock.now)

    monkeypatch.setattr(TimedJob, "committed", committed)
    job = job_of(scenario(network={"message_s": 0.1}))
    job.run()
    assert {step: one.ended for step, one in job.account.steps.items()} == {step: max(each) for step, each in times.items()}
    assert all(min(each) < max(each) for each in times.values())


def struck(what: Scenario, *faults: Fault) -> list[tuple[int, int]]:
    """(step of each recovery, replicas that finished it) for a job with these faults, each of which has to strike."""
    job = job_of(what, *faults)
    assert job.run().exit_code == 0 and not job.unstruck and not job.awaits_faults
    return [(recovery.step, job.account.steps[recovery.step].num_members) for recovery in job.account.recoveries.values()]


@pytest.mark.parametrize("point", ["forward", "backward"])
def test_occurrences_are_counted_over_the_whole_run(point: str) -> None:
    what = scenario(job={"replicas": 2, "microbatches": 8, "steps": 6})  # each has four in a step
    assert struck(what, Fault(replica=1, rank=0, point=FaultPoint(point), occurrence=10)) == [(2, 1)]
    assert struck(what, Fault(replica=1, rank=0, point=FaultPoint(point), occurrence=8)) == [(1, 1)]


@pytest.mark.parametrize("first", ["forward", "reduce"])  # what is dealt goes to the pass that runs, or to one of its own
@pytest.mark.parametrize(("point", "occurrence"), [("backward", 9), ("recompute", 1)])
def test_work_that_is_taken_over_passes_its_points(first: str, point: str, occurrence: int) -> None:
    # Eight are each replica's own; the ninth backward is of what the lost one leaves.
    assert struck(scenario(), kill(3, 0, first, 1), kill(1, 1, point, 1, occurrence=occurrence)) == [(1, 2), (1, 2)]


def test_a_forward_of_work_that_is_taken_over_is_no_first_one() -> None:
    job = job_of(scenario(), kill(3, 0, "forward", 1), kill(1, 1, "forward", 1, occurrence=9))
    assert job.run().exit_code == 0
    assert [fault.replica for fault in job.unstruck] == [1]


def test_a_sum_after_a_loss_is_a_second_one() -> None:
    late = kill(1, 0, "second_reduce", 1)
    assert struck(scenario(), kill(3, 0, "reduce", 1), late)[-1][0] == 1
    job = job_of(scenario(), late)
    assert job.run().exit_code == 0 and job.unstruck == [late] and len(job.account.recoveries) == 0


def test_a_sum_takes_its_volume_and_its_rounds() -> None:
    """2 (R - 1) / R bytes of each member, in 2 log2(R) rounds; provenance and ledger as they are."""
    what = scenario(network={"latency_s": 0.5})
    timing = Timing(what.job, what.compute, what.network)
    provenance, num_buckets = 8 * (32 + 1), 2 * 2
    assert timing.bucket_bytes(0) == 1e9 / 2 + provenance
    assert timing.bucket_bytes(num_buckets) == 8 * LEDGER_COLUMNS * 32 + provenance
    assert timing.reduce_s(0, 4) == pytest.approx(2 * 3 / 4 * timing.bucket_bytes(0) / 1e9 + 2 * 2 * 0.5)
    assert timing.reduce_s(0, 1) == 0.0


def test_messages_take_the_time_of_who_sends_and_of_who_reads_them() -> None:
    job = job_of(scenario(network={"message_s": 0.25, "bytes_per_s": 1e3, "read_bytes_per_s": 4.0}))
    one = job.replicas[0]
    assert one.occupied(500.0) == 0.25 + 0.5
    one.receive(LinkLost(1))
    assert one.free_at == 0.75 + 0.25
    one.receive(NewGeneration(1, (0, 1, 2)))
    assert one.free_at == 1.0 + 0.25 + 3 * MEMBER_BYTES / 4.0


def test_a_record_that_many_have_committed_is_charged_once_a_frame() -> None:
    job = job_of(scenario())
    job.coordinator.state = replace(job.coordinator.state, roster=tuple(range(1000)))
    record = commitment(Record(0, "train 1", (), paces=tuple((number, 10**9) for number in range(1000))))
    statuses = [Status(number, 2, 1, None, (), (), replace(record)) for number in range(STATUSES_A_FRAME + 1)]
    forms = (packed_status(replace(statuses[-1], committed=None)), record)
    bare, whole = (len(msgspec.msgpack.encode(each)) for each in forms)
    assert job.size_of(statuses[-1]) == bare + whole
    for number, num_frames in ((1, 1), (STATUSES_A_FRAME, 1), (STATUSES_A_FRAME + 1, 2)):
        size = job.size_of(Statuses(number, 2, tuple(statuses[:number])))
        assert size == pytest.approx(num_frames * whole + number * bare, rel=0.01)
