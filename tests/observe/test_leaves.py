"""Replicas that leave as requested, in traces: what a valid one shows, what breaks it, and what people are told."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.observe.ending import Account
from megatron_recover.observe.follow.metrics import RunMetrics
from megatron_recover.observe.follow.notices import Notices
from megatron_recover.observe.history import History
from megatron_recover.observe.verify.check import check, describe, violations
from tests.observe import traces


def broken(events: list[trace.Event]) -> list[tuple[str, str]]:
    return [(found.invariant, found.message) for found in violations(History(enumerate(events, start=1)))]


def test_a_leave_is_no_loss_and_costs_nothing(tmp_path: Path) -> None:
    run = traces.leaving_run()
    assert broken(run.events) == []
    verdict = check(traces.write(tmp_path / "run", run.events))
    assert verdict.holds
    assert (verdict.summary.microbatches_lost, verdict.summary.microbatches_redone, verdict.summary.microbatches_wasted) == (
        0,
        0,
        0,
    )
    assert "replica 2 left after train 2, asked by drain: no microbatch lost" in describe(verdict).splitlines()
    assert verdict.summary.faults == () and verdict.summary.lost_to_faults_s == 0.0


def test_a_replica_that_was_dealt_something_does_not_leave_in_that_step(tmp_path: Path) -> None:
    """As if it left one step too early: before the record that asks for it."""
    run = traces.Run()
    run.ask_to_leave(2)
    dealt = run.deal(range(6))
    run.plan(dealt, traces.BUCKETS)
    for replica, ids in dealt.items():
        run.compute(replica, ids, traces.BUCKETS)
    run.roster, run.generation = (0, 1), 2
    run.add(trace.Generation, generation=2, roster=(0, 1), left=(2,), reason="replica 2 leaves")
    run.statuses(dealt, lambda replica: ())
    again = run.deal(dealt[2])
    run.plan(again, traces.BUCKETS)
    for replica, ids in again.items():
        run.compute(replica, ids, traces.BUCKETS)
    run.reduce(traces.BUCKETS)
    run.commit(dict.fromkeys(traces.BUCKETS, 2))
    run.finish()
    found = broken(run.events)
    assert ("INV-7", "replica 2 computes in step 1, though the record of step 0 asked it to leave") in found
    leaves = "replica 2 leaves in generation 2, and was dealt microbatches of step 1, which nobody has committed"
    assert ("INV-7", leaves) in found
    verdict = check(traces.write(tmp_path / "run", run.events))
    assert verdict.summary.microbatches_lost == 2
    assert "replica 2 left after train 1, asked by drain: 2 microbatches lost" in describe(verdict)


@pytest.mark.parametrize(("newcomers", "is_broken"), [((), True), ((1,), True), ((0, 1), False)])
def test_newcomers_in_their_first_step_do_not_count_as_who_stays(newcomers: tuple[int, ...], is_broken: bool) -> None:
    run = traces.Run()
    run.ask_to_leave(2)
    dealt = run.deal(range(6))
    run.plan(dealt, traces.BUCKETS)
    events = [
        msgspec.structs.replace(event, newcomers=newcomers) if isinstance(event, trace.Generation) else event
        for event in run.events
    ]
    computes = ("INV-7", "replica 2 computes in step 1, though the record of step 0 asked it to leave")
    assert (computes in broken(events)) == is_broken


def test_a_replica_does_not_leave_unasked() -> None:
    events = [
        msgspec.structs.replace(event, requests=()) if isinstance(event, trace.Committed) else event
        for event in traces.leaving_run().events
    ]
    assert broken(events) == [("INV-7", "replica 2 leaves in generation 2, and no record asks for it")]


def test_a_replica_that_has_left_does_not_return() -> None:
    events = traces.leaving_run().events
    newest = trace.Generation(t=events[-1].t, generation=3, roster=(0, 1, 2))
    found = broken([*events[:-1], newest, events[-1]])
    assert ("INV-6", "generation 3 contains replicas that were lost or had left before: [2]") in found


@pytest.mark.parametrize(("removed", "why"), [("", "the run ended before"), ("lost", "it was lost before")])
def test_one_that_did_not_leave_is_told(tmp_path: Path, removed: str, why: str) -> None:
    run = traces.Run()
    run.ask_to_leave(2)
    if removed:
        run.step_with_kill_in_backward(2)
    run.add(trace.LeaveAsked, replicas=(), reason="drain", refused=(trace.Refused(replica=7, why="there is no such replica"),))
    run.finish()
    told = describe(check(traces.write(tmp_path / "run", run.events)))
    assert f"replica 2 did not leave, asked by drain: {why}" in told
    assert "replica 7 did not leave, asked by drain: there is no such replica" in told


def test_a_leave_is_neither_a_loss_nor_a_recovery_to_those_who_follow_a_run() -> None:
    metrics, notices, account = RunMetrics(0.0), Notices(run_dir="run", host="host", began_at=0.0), Account(3, "run")
    told = []
    for event in traces.leaving_run().events:
        metrics.take(event)
        told += notices.take(event)
        account.take(event)
    values = {(sample.metric.name, sample.label_value): sample.value for sample in metrics.samples()}
    assert values["replicas_live", ""] == 2 and values["microbatches_lost_total", ""] == 0
    assert not any(value for (name, _), value in values.items() if name == "recoveries_total")
    assert [type(notice).__name__ for notice in told] == ["Ended"]
    assert account.lines(0, "training finished")[1].startswith("2 of 3 replicas left, no losses, 1 asked to leave; ")
