"""Real processes are stopped (SIGSTOP) and continued (SIGCONT) at the worst moments; an event ends a freeze, never a time.

Whoever goes on before he is given up takes part again, and nothing is lost; whoever goes on later changes nothing (INV-5).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recover import trace
from megatron_recover.cluster.thawing import Thawing
from megatron_recover.faults import Fault, FaultKind, FaultPoint
from tests.cluster.jobs import Spec, run, sums

pytestmark = pytest.mark.timeout(180)

PATIENT = {**sums(300.0), "stall_s": 300.0, "finish_s": 300.0, "follow_s": 300.0, "beat_s": 0.25, "silence_s": 1.0}
"""Nobody is suspected, and a leader that does not answer is told soon."""
SUSPICIOUS = {**sums(2.0), "stall_s": 2.0, "finish_s": 2.0, "follow_s": 300.0}
"""Who is waited for too long is suspected, but given all the time to follow."""


def freeze(replica: int, rank: int, point: str, until: str, *, step: int | None = 1, occurrence: int = 1) -> Fault:
    return Fault(
        replica=replica, rank=rank, point=FaultPoint(point), step=step, occurrence=occurrence, kind=FaultKind.FREEZE,
        until=until,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("frozen", "deadlines", "num_generations"),
    [
        # The others go on to compute the next step, and one can even commit: all are back before anyone has waited too long.
        # (They may have computed all that they can before the frozen one is at the fault: only its silence certainly follows.)
        (freeze(1, 0, "optimizer", "leader_silent"), PATIENT, 1),
        (freeze(0, 0, "in_vote", "leader_silent"), PATIENT, 1),
        # The others have suspected it: it follows them into the next generation, and what it was at is void.
        (freeze(1, 0, "backward", "generation"), SUSPICIOUS, 2),
        (freeze(1, 1, "reduce", "generation"), SUSPICIOUS, 2),
        (freeze(1, 0, "in_vote", "generation"), SUSPICIOUS, 2),
    ],
    ids=lambda value: f"{value.point.value} until {value.until}" if isinstance(value, Fault) else "",
)
def test_who_thaws_in_time_takes_part_again(
    tmp_path: Path, frozen: Fault, deadlines: dict[str, float], num_generations: int
) -> None:
    outcome = run(Spec(run_dir=str(tmp_path / "run"), deadlines=deadlines, faults=(frozen,)))
    outcome.assert_finished([0, 1, 2])
    assert [(each.replica, each.rank) for each in outcome.of(trace.Thawed)] == [(frozen.replica, frozen.rank)]
    assert len(outcome.of(trace.Generation)) >= num_generations
    assert {each.roster for each in outcome.of(trace.Generation)} == {(0, 1, 2)}


@pytest.mark.parametrize(("rank", "point"), [(1, "promise"), (0, "status")])
def test_who_thaws_late_in_a_recovery_takes_part_in_the_next(tmp_path: Path, rank: int, point: str) -> None:
    frozen = freeze(1, rank, point, "generation", step=None, occurrence=2)
    kill = Fault(replica=0, rank=1, point=FaultPoint.BACKWARD, step=1)
    outcome = run(Spec(run_dir=str(tmp_path / "run"), deadlines=SUSPICIOUS, faults=(kill, frozen)))
    outcome.assert_finished([1, 2])
    assert len(outcome.of(trace.Thawed)) == 1
    assert {each.roster for each in outcome.of(trace.Generation)[2:]} == {(1, 2)}


@pytest.mark.parametrize(
    ("rank", "point"),
    [(0, "backward"), (1, "backward"), (0, "reduce"), (1, "reduce"), (1, "before_vote"), (0, "in_vote")],
)
def test_inv_5_who_thaws_after_it_was_given_up_changes_nothing(tmp_path: Path, rank: int, point: str) -> None:
    frozen = freeze(1, rank, point, "generation")
    # The pace gives the launcher, which reads in the trace when to thaw and when to fence, seconds before the others are done.
    outcome = run(Spec(run_dir=str(tmp_path / "run"), steps=150, pace_s=0.005, hasty=True, faults=(frozen,)))
    outcome.assert_finished([0, 2])
    names = [trace.name_of(event) for event in outcome.events]
    fault, thawed = names.index("fault"), names.index("thawed")
    assert names.index("generation", fault) < thawed < names.index("fenced")
    meanwhile = [event for event in outcome.events[fault + 1 : thawed] if getattr(event, "rank", None) == rank]
    assert [event for event in meanwhile if event.replica == 1] == [], "what comes of a thaw stands in the trace before it"
    assert any(getattr(event, "replica", 0) == 1 for event in outcome.events[thawed + 1 : names.index("fenced")]), (
        "it has done nothing that could have counted"
    )
    applied = [event for event in outcome.of(trace.Applied) if event.replica == 1]
    # With all results and everyone's vote it commits what the others commit; nothing after that.
    assert max(event.step for event in applied) <= (0 if point in ("backward", "reduce") else 1)


def test_only_what_others_write_ends_a_freeze(tmp_path: Path) -> None:
    log = trace.EventLog(tmp_path / trace.EVENTS_FILE, 0.0)
    frozen = freeze(1, 0, "reduce", "reduced")
    thawing = Thawing((frozen,), tmp_path / trace.EVENTS_FILE)

    def reduced(replica: int) -> None:
        log.record(
            trace.Reduced(
                replica=replica, rank=0, generation=1, step=1, bucket=0, version=1, checksum=1, provenance="ones", seconds=0.0
            )
        )

    reduced(0)
    log.record(trace.Fault(replica=1, rank=0, point="reduce", kind="freeze", until="reduced"))
    reduced(1)
    assert thawing.due() == []
    reduced(2)
    assert thawing.due() == thawing.due() == [(1, 0)], "named until it is done: its stop may be on its way"
    thawing.done(1, 0)
    assert thawing.due() == []
    for until in ("reduced", "voted"):
        log.record(trace.Fault(replica=1, rank=0, point="reduce", kind="freeze", until=until))
    reduced(0)
    log.record(trace.Fenced(replica=1, ranks=(0, 1)))
    assert thawing.due() == [], "it is gone"


def test_a_trace_that_cannot_be_read_ends_no_freeze_and_no_run(tmp_path: Path) -> None:
    frozen = freeze(1, 0, "reduce", "reduced")
    (tmp_path / trace.EVENTS_FILE).touch()
    (tmp_path / "events.0002.jsonl.gz").touch()
    thawing = Thawing((frozen,), tmp_path / trace.EVENTS_FILE)
    assert thawing.due() == thawing.due() == []
