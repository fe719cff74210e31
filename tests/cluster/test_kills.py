"""Real processes of toy jobs are killed at every fault point; whatever is committed then must hold every microbatch once."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recover import trace
from megatron_recover.faults import Fault, FaultKind, FaultPoint
from tests.cluster.jobs import Spec, run, sums

pytestmark = pytest.mark.timeout(180)


def fault(text: str) -> Fault:
    """`replica rank point when [bucket]`; when: a step, or #n for the n-th passage (a member can be one step behind)."""
    replica, rank, point, when, *bucket = text.split()
    return Fault(
        replica=int(replica),
        rank=int(rank),
        point=FaultPoint(point),
        step=None if when[0] == "#" else int(when),
        occurrence=int(when[1:]) if when[0] == "#" else 1,
        bucket=int(bucket[0]) if bucket else None,
    )


def survivors_of(num_replicas: int, faults: tuple[Fault, ...]) -> list[int]:
    return sorted(set(range(num_replicas)) - {fault.replica for fault in faults})


# Two steps apart: a death after a vote belongs to the recovery of the next step for those that have begun it.
IN_A_STEP = (
    ("1 0 forward 1", "2 1 forward 3", "0 0 backward 5"),
    ("0 1 backward 1", "2 0 before_reduce 3", "1 1 before_reduce 5"),
    ("3 0 reduce 1 0", "0 1 reduce 3 1", "1 1 reduce 5 2"),
    ("0 0 before_vote 1", "1 1 before_vote 3", "2 0 in_vote 5"),
    ("3 0 after_vote 1", "0 1 after_vote 3", "1 0 optimizer 5"),
    ("0 1 optimizer 1", "1 0 in_vote 3", "3 1 reduce 5 1"),
)
# Who dies before a second reduction dies inside the first: a sum of what all have computed exists, so all have begun the step.
IN_A_RECOVERY = (
    ("1 0 forward 1", "2 0 promise #2", "0 1 backward 3", "4 1 promise #4"),
    ("1 1 before_reduce 1", "0 0 status #2", "2 0 reduce 3 0"),
    ("0 1 reduce 1 1", "1 1 second_reduce 1", "2 0 after_vote 3", "3 0 backward 5"),
    ("3 1 reduce 1 1", "2 1 promise #2", "1 1 second_reduce 1", "0 0 in_vote 3"),
)


@pytest.mark.parametrize("texts", IN_A_STEP, ids=", ".join)
def test_survivors_finish_the_step_of_a_kill(tmp_path: Path, texts: tuple[str, ...]) -> None:
    faults = tuple(map(fault, texts))
    outcome = run(Spec(run_dir=str(tmp_path / "run"), replicas=4, steps=7, faults=faults))
    outcome.assert_finished(survivors_of(4, faults))
    assert len(outcome.of(trace.Fault)) == len(faults), "a fault did not strike"
    assert {each.replica for each in outcome.of(trace.Fenced)} == {each.replica for each in faults}


@pytest.mark.parametrize("texts", IN_A_RECOVERY, ids=", ".join)
def test_survivors_finish_the_step_of_a_kill_inside_a_recovery(tmp_path: Path, texts: tuple[str, ...]) -> None:
    faults = tuple(map(fault, texts))
    outcome = run(Spec(run_dir=str(tmp_path / "run"), replicas=5, steps=7, microbatches=11, faults=faults))
    outcome.assert_finished(survivors_of(5, faults))
    assert len(outcome.of(trace.Fault)) == len(faults), "a fault did not strike"


def test_kills_while_lost_microbatches_are_computed_again(tmp_path: Path) -> None:
    # It dies inside a sum of what all have computed, so nobody has anything left, and the two lost ones go to replicas 0 and 1.
    again = tuple(fault(f"{replica} {replica % 2} recompute {step}") for replica in (0, 1, 2) for step in (1, 3))
    faults = (fault("4 0 reduce 1 0"), *again)
    outcome = run(Spec(run_dir=str(tmp_path / "run"), replicas=5, steps=5, microbatches=11, faults=faults))
    struck = {(each.replica, each.point) for each in outcome.of(trace.Fault)}
    assert (4, "reduce") in struck and len(struck) >= 2, "no microbatch was computed again by an armed replica"
    outcome.assert_finished(sorted(set(range(5)) - {replica for replica, _ in struck}))


def test_several_replicas_die_at_the_same_instant(tmp_path: Path) -> None:
    faults = tuple(map(fault, ("0 0 backward 1", "1 1 backward 1", "3 0 backward 1")))
    outcome = run(Spec(run_dir=str(tmp_path / "run"), replicas=4, faults=faults))
    outcome.assert_finished([2])


def test_one_rank_a_replica(tmp_path: Path) -> None:
    faults = tuple(map(fault, ("0 0 reduce 1 1", "2 0 in_vote 2")))
    outcome = run(Spec(run_dir=str(tmp_path / "run"), replicas=3, ranks=1, faults=faults))
    outcome.assert_finished([1])


GRACE = {"grace_s": 2.0}
"""Before a request makes a generation the others have so long to complete the sum that a test breaks for one of them."""


def test_a_reduction_that_breaks_without_a_death_is_repaired_by_the_same_roster(tmp_path: Path) -> None:
    outcome = run(Spec(run_dir=str(tmp_path / "run"), dropped=((0, 0, 1, 0), (2, 1, 2, 1)), deadlines=GRACE))
    outcome.assert_finished([0, 1, 2])
    assert [each.roster for each in outcome.of(trace.Generation)] == [(0, 1, 2)] * 3
    moved = {(each.replica, each.bucket) for each in outcome.of(trace.Transferred)}
    assert moved == {(0, 0), (2, 1)}, "a complete bucket was not sent to the replica that lacked it"


@pytest.mark.parametrize("victim", ["target", "source"])
def test_a_kill_inside_a_transfer(tmp_path: Path, victim: str) -> None:
    # Replica 0 lacks bucket 0 of step 1, whose source is the first of those that hold it: replica 1.
    replica = {"target": 0, "source": 1}[victim]
    faults = (fault(f"{replica} 0 transfer 1 0"),)
    outcome = run(Spec(run_dir=str(tmp_path / "run"), dropped=((0, 0, 1, 0),), faults=faults, deadlines=GRACE))
    outcome.assert_finished(survivors_of(3, faults))
    assert len(outcome.of(trace.Fault)) == 1


def test_a_replica_that_dies_at_start_up_is_left_behind(tmp_path: Path) -> None:
    faults = (Fault(replica=1, rank=1, point=FaultPoint.START_UP),)
    outcome = run(Spec(run_dir=str(tmp_path / "run"), faults=faults))
    outcome.assert_finished([0, 2])


@pytest.mark.parametrize(("rank", "point"), [(0, "backward"), (1, "before_reduce"), (0, "in_vote")])
def test_a_stopped_process_is_fenced(tmp_path: Path, rank: int, point: str) -> None:
    faults = (Fault(replica=1, rank=rank, point=FaultPoint(point), step=1, kind=FaultKind.STOP),)
    outcome = run(Spec(run_dir=str(tmp_path / "run"), faults=faults))
    outcome.assert_finished(survivors_of(3, faults))
    assert 1 in {each.replica for each in outcome.of(trace.Fenced)}


def test_a_process_that_is_stopped_in_a_promise_is_fenced(tmp_path: Path) -> None:
    stop = Fault(replica=1, rank=1, point=FaultPoint.PROMISE, occurrence=2, kind=FaultKind.STOP)
    # The stall timeout would find it as well, much later.
    deadlines = {**sums(300.0), "stall_s": 300.0, "follow_s": 2.0}
    outcome = run(Spec(run_dir=str(tmp_path / "run"), deadlines=deadlines, faults=(stop, fault("0 0 backward 1"))))
    outcome.assert_finished([2])
    assert {each.replica for each in outcome.of(trace.Fenced)} == {0, 1}
