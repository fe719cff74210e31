"""Who stood still, where, for how long, and what came of it: from traces made by hand, a millisecond from event to event."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_recover import trace
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.observe import summary
from megatron_recover.observe.history import History
from megatron_recover.observe.report import perfetto
from megatron_recover.observe.report import writing as report
from megatron_recover.observe.report.lanes import picture
from megatron_recover.observe.report.timeline import Timeline
from megatron_recover.observe.standstills import Standstill, standstills
from tests.observe import traces


def history_of(run: traces.Run) -> History:
    return History(enumerate(run.events, start=1))


def silent(run: traces.Run, verdict: str, seconds: float, replica: int = 1, rank: int = 1, **more: object) -> None:
    fields = {"phase": "backward", "microbatches": (4,), "state": "R", "label": run.label, "step": run.step}
    run.add(trace.RankSilent, replica=replica, rank=rank, verdict=verdict, seconds=seconds, **(fields | more))


def hang(run: traces.Run) -> None:
    """Rank 1 of replica 1 hangs in a backward of a step, is slow, then hung, and is fenced; the others finish the step."""
    dealt = run.deal(range(run.num_microbatches))
    run.plan(dealt, traces.BUCKETS)
    for replica in (0, 2):
        run.compute(replica, dealt[replica], traces.BUCKETS)
    for rank in (0, 1):
        run.add(trace.MicrobatchStarted, **run.where(1), rank=rank, microbatch=1)
    run.t += 2.0
    silent(run, "slow", 2.0)
    run.t += 2.0
    waiting = tuple(
        trace.WaitingRank(replica=replica, rank=rank, phase="reduction", seconds=3.5)
        for replica, rank in ((0, 0), (0, 1), (2, 1))
    )
    silent(run, "hung", 4.001, waiting=waiting)
    run.generation, run.roster = 2, (0, 2)
    lost = trace.Loss(replica=1, kind=LossKind.HUNG, detail="rank 1: hung for 4.0 s")
    run.add(trace.Generation, generation=2, roster=run.roster, losses=(lost,), reason="hung")
    run.add(trace.Fenced, replica=1, ranks=(0, 1))
    run.statuses({replica: dealt[replica] for replica in (0, 2)}, lambda replica: ())
    run.plan({0: (1,), 2: (4,)}, traces.BUCKETS)
    run.compute(0, (1,), traces.BUCKETS)
    run.compute(2, (4,), traces.BUCKETS)
    run.reduce(traces.BUCKETS)
    for replica in run.roster:
        run.add(trace.Recovery, **run.where(replica), phase="commit", seconds=0.01)
    run.commit(dict.fromkeys(traces.BUCKETS, 2))


@pytest.fixture
def hung() -> traces.Run:
    run = traces.Run()
    run.quiet_step()
    hang(run)
    run.quiet_step()
    run.add(trace.RunFinished, exit_code=0)
    return run


def only(run: traces.Run) -> Standstill:
    [one] = standstills(history_of(run))
    return one


def test_a_rank_that_is_slow_and_then_hangs_stood_still_once_from_its_last_progress_to_the_fence(hung: traces.Run) -> None:
    one = only(hung)
    told = [event for event in hung.events if isinstance(event, trace.RankSilent)]
    [announced] = [event for event in hung.events if isinstance(event, trace.Generation) and event.losses]
    assert (one.who, one.verdict, one.where) == ("replica 1 rank 1", "hung", "backward of microbatch 4, train 2")
    assert one.begin == pytest.approx(told[0].t - 2.0) and one.told_at == told[0].t
    assert (one.end, one.lost_in) == (announced.t, 2)
    assert one.outcome == "its replica was fenced in generation 2 (rank 1: hung for 4.0 s)"
    assert (one.log, one.stacks) == ("logs/replica-1-rank-1.log", "the stack of its training thread is in its log")
    assert [(replica, rank) for replica, rank, _ in one.waiting] == [(0, 0), (0, 1), (2, 1)]


def test_a_standstill_that_nobody_injected_is_a_fault_from_its_last_progress_on(hung: traces.Run) -> None:
    history = history_of(hung)
    [fault] = summary.faults(history)
    assert fault.words == "replica 1 rank 1 hung (in backward of microbatch 4)"
    assert fault.t == only(hung).begin
    [recovery] = summary.summarize(history).recoveries
    assert recovery.detect_s == pytest.approx(4.002, abs=2e-3), "from the last progress to the announcement"


def test_the_last_progress_is_that_of_the_page_and_no_standstill_begins_before_it() -> None:
    """A rank may have been in an operation for long when it is stopped; and the first look at a stop counts too much."""
    run = traces.Run()
    run.quiet_step()
    run.t += 9.0
    silent(run, "stopped", 0.5, state="T", idle_s=7.25)
    one = only(run)
    assert (one.last_progress, one.begin) == (pytest.approx(run.t - 7.25), pytest.approx(run.t - 0.5))
    run = traces.Run()
    run.quiet_step()
    run.t += 9.0
    silent(run, "stopped", 0.5, state="T", idle_s=0.47)
    assert only(run).last_progress == only(run).begin == pytest.approx(run.t - 0.47)


def test_an_injected_fault_explains_the_standstill_and_is_counted_once(hung: traces.Run) -> None:
    first = next(index for index, event in enumerate(hung.events) if isinstance(event, trace.RankSilent))
    where = {"replica": 1, "rank": 1, "point": "backward", "kind": "loop", "step": 1, "microbatch": 4}
    hung.events.insert(first, trace.Fault(t=hung.events[first].t - 2.0, **where))  # type: ignore[arg-type]
    [fault] = summary.faults(history_of(hung))
    assert (fault.kind, fault.until) == ("loop", only(hung).end)


def test_a_failure_after_a_freeze_that_thawed_is_another_fault() -> None:
    run = traces.Run()
    run.quiet_step()
    run.add(trace.Fault, replica=1, rank=0, point="forward", kind="freeze", step=1, microbatch=1, until="committed")
    run.t += 1.0
    run.add(trace.Thawed, replica=1, rank=0)
    run.quiet_step()
    run.add(trace.Failure, replica=1, rank=1, cause="SIGKILL")
    told = [(fault.kind, fault.rank, fault.cause) for fault in summary.faults(history_of(run))]
    assert told == [("freeze", 0, None), ("external", 1, "SIGKILL")]


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_failure_that_a_freeze_may_explain_is_no_other_fault(is_removed: bool) -> None:
    """The rank is still frozen, or its replica was removed before it thawed; another rank thaws in both cases."""
    run = traces.Run()
    run.quiet_step()
    run.add(trace.Fault, replica=1, rank=0, point="forward", kind="freeze", step=1, microbatch=1, until="generation")
    run.add(trace.Thawed, replica=1, rank=1)
    if is_removed:
        lost = trace.Loss(replica=1, kind=LossKind.SUSPECTED)
        run.add(trace.Generation, generation=2, roster=(0, 2), losses=(lost,), reason="no progress")
        run.add(trace.Thawed, replica=1, rank=0)
    run.add(trace.Failure, replica=1, rank=0, cause="exit code 1")
    assert [fault.kind for fault in summary.faults(history_of(run))] == ["freeze"]


def test_the_lanes_show_who_hung_and_who_waited_for_it(hung: traces.Run) -> None:
    history = history_of(hung)
    timeline = Timeline(history)
    assert [(one.kind, one.end) for one in timeline.still[1, 1]] == [("hung", only(hung).end)]
    assert {rank: [one.kind for one in found] for rank, found in timeline.still.items() if rank[0] != 1} == {
        (0, 0): ["waiting"], (0, 1): ["waiting"], (2, 1): ["waiting"],
    }  # fmt: skip
    [episode] = timeline.episodes
    drawn = picture(history, timeline, episode)
    bars = {(group.name, lane.name): lane.still for group in drawn.groups for lane in group.lanes}
    [bar] = bars["replica 1", "rank 1"]
    assert bar.kind == "still hung" and bar.label == "hung in backward of microbatch 4" and bar.width > 50.0
    assert bar.text.startswith("hung in backward of microbatch 4, train 2, 4.0")
    assert bars["replica 2", "rank 0"] == () and bars["replica 2", "rank 1"][0].kind == "still waiting"


def test_a_rank_that_shows_progress_again_went_on_by_itself() -> None:
    run = traces.Run()
    run.quiet_step()
    run.t += 1.0
    silent(run, "stopped", 1.0, state="T")
    run.t += 3.0
    run.add(trace.RankMoved, replica=1, rank=1, step=1)
    moved_at = run.t
    run.t += 1.0
    silent(run, "slow", 0.7)
    run.quiet_step()
    first, second = standstills(history_of(run))
    assert (first.verdict, first.end, first.outcome, first.lost_in) == ("stopped", moved_at, "went on by itself", None)
    assert "no stacks" in first.stacks
    [record] = [record for step, record in history_of(run).records.items() if step == 1]
    assert (second.verdict, second.end) == ("slow", record.t), "a step is not committed without its members"
    [fault] = summary.faults(history_of(run))
    assert (fault.kind, fault.until) == ("stopped", moved_at), "slowness alone is no fault"
    timeline = Timeline(history_of(run))
    assert timeline.around(fault) is not None, "there is a picture of it, though nothing was lost"


def test_a_standstill_that_nothing_ended_lasts_to_the_end_of_the_trace() -> None:
    run = traces.Run()
    run.quiet_step()
    run.t += 5.0
    silent(run, "traced", 5.0, state="t")
    assert (only(run).end, only(run).outcome) == (None, "it still lasts at the end of the trace")
    run.add(trace.RunFinished, exit_code=1)
    assert only(run).outcome == "nobody was fenced; the run ended"


def test_a_process_that_survives_sigkill_is_told_of(hung: traces.Run) -> None:
    hung.add(trace.SetAside, replica=1, rank=1, pid=4711, state="D", wchan="nfs_wait")
    assert only(hung).outcome.endswith("; its process does not end (state D in nfs_wait) and is waited for no more")


def test_silent_leaders_the_coordinator_and_a_waiting_job_are_told_of_once_each() -> None:
    run = traces.Run()
    run.quiet_step()
    run.add(trace.LeaderSilent, member=1, generation=1, phase="began", seconds=4.0, waiting_for=(2,))
    for replica in (0, 2):
        run.add(
            trace.CoordinatorSilent, replica=replica, generation=1, phase="began", seconds=3.0, waits="", waiting_for=(),
            pid=77, state="T",
        )  # fmt: skip
    run.add(
        trace.CoordinatorSilent, replica=2, generation=1, phase="began", seconds=5.0, waits="a new generation",
        waiting_for=(1,), pid=77, state="T",
    )  # fmt: skip
    for replica in (0, 2):
        run.add(
            trace.CoordinatorSilent, replica=replica, generation=1, phase="over", seconds=6.0, waits="", waiting_for=(),
            pid=77, state="S",
        )  # fmt: skip
    over = run.t
    run.add(trace.LeaderSilent, member=1, generation=1, phase="over", seconds=9.0, waiting_for=())
    run.add(trace.Waiting, replicas=(1,), reason="replica 1 alone has the state")
    waits = run.t
    run.add(trace.Generation, generation=2, roster=run.roster, reason="replica 1 answers")
    found = {one.who: one for one in standstills(history_of(run))}
    assert found.keys() == {"leader of replica 1", "coordinator (pid 77)", "the job, for replica 1"}
    leader, coordinator, job = (found[who] for who in ("leader of replica 1", "coordinator (pid 77)", "the job, for replica 1"))
    assert leader.outcome.startswith("answers again after 9.0 s") and leader.log == "logs/replica-1-rank-0.log"
    assert (coordinator.state, coordinator.end) == ("T", over)
    assert coordinator.phase == "noticed by replicas 0, 2; replica 2 waits for a new generation"
    assert (job.begin, job.end, job.phase) == (waits, run.t, "replica 1 alone has the state")


def test_a_wait_for_one_at_work_lasts_until_a_step_is_committed_however_many_generations_are_made() -> None:
    run = traces.Run()
    run.add(trace.Waiting, replicas=(1,), reason="it reads data", limit_s=20.0)
    begin = run.t
    for generation in (2, 3):
        run.generation = generation
        run.add(trace.Generation, generation=generation, roster=run.roster, reason="no progress")
    (job,) = standstills(history_of(run))
    assert (job.who, job.begin, job.end) == ("the job, for replica 1", begin, None)
    run.quiet_step()
    (job,) = standstills(history_of(run))
    assert job.end == history_of(run).records[0].t and job.outcome == "over with the next step or loss"


def test_page_summary_and_perfetto_have_the_standstill(tmp_path: Path, hung: traces.Run) -> None:
    run_dir = traces.write(tmp_path / "run", hung.events)
    report.write(run_dir)
    content = json.loads((run_dir / summary.SUMMARY_FILE).read_text())
    [told] = content["standstills"]
    assert (told["who"], told["verdict"], told["label"], told["microbatches"]) == ("replica 1 rank 1", "hung", "train 2", [4])
    assert summary.load(run_dir).standstills == standstills(History.read(run_dir))
    page = ElementTree.fromstring((run_dir / "report.html").read_text())
    [row] = page.findall(".//*[@id='standstills']//tbody/tr")
    cells = [" ".join(" ".join(cell.itertext()).split()) for cell in row]
    assert cells[:3] == ["replica 1 rank 1", "hung", "backward of microbatch 4, train 2 3 ranks waited meanwhile"]
    assert cells[4:6] == ["4.0 s", "its replica was fenced in generation 2 (rank 1: hung for 4.0 s)"]
    [link] = row.findall(".//a")
    assert link.get("href") == "logs/replica-1-rank-1.log"
    assert page.findall(".//*[@id='fault-1']//rect[@class='still hung']"), "the picture shows it"
    events = json.loads((run_dir / perfetto.TRACE_FILE).read_text())["traceEvents"]
    spans = [event for event in events if event.get("cat") == "standstill"]
    assert sorted((event["pid"] - 1, event["name"]) for event in spans) == [
        (0, "waiting"), (0, "waiting"), (1, "hung"), (2, "waiting"),
    ]  # fmt: skip
    [span] = [event for event in spans if event["name"] == "hung"]
    assert span["dur"] == pytest.approx(4.0e6, rel=0.01) and span["args"]["what"] == "hung in backward of microbatch 4, train 2"


def test_a_page_elsewhere_names_the_log_and_links_to_none(tmp_path: Path, hung: traces.Run) -> None:
    run_dir = traces.write(tmp_path / "run", hung.events)
    report.write(run_dir, place=tmp_path / "elsewhere.html")
    page = ElementTree.fromstring((tmp_path / "elsewhere.html").read_text())
    [row] = page.findall(".//*[@id='standstills']//tbody/tr")
    assert not row.findall(".//a") and "logs/replica-1-rank-1.log" in "".join(row.itertext())
