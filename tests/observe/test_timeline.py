"""Spans and episodes of traces made by hand: each event of those is a millisecond after the one before it."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.observe.history import History
from megatron_recover.observe.report.lanes import MAX_BARS, MAX_LANES, Picture, picture
from megatron_recover.observe.report.timeline import Span, Timeline, within
from megatron_recover.observe.summary import faults
from tests.observe import traces


def history_of(run: traces.Run) -> History:
    return History(enumerate(run.events, start=1))


def drawn(run: traces.Run) -> Picture:
    history = history_of(run)
    timeline = Timeline(history)
    return picture(history, timeline, timeline.episodes[0])


def all_bars(one: Picture) -> int:
    return sum(bar.count for group in one.groups for lane in group.lanes for bar in (*lane.computing, *lane.reducing))


def test_a_microbatch_is_a_forward_from_its_start_and_a_backward_up_to_its_end() -> None:
    run = traces.Run()
    run.quiet_step()
    events = [
        event for event in run.events
        if isinstance(event, trace.MicrobatchStarted | trace.MicrobatchFinished)
        and (event.replica, event.rank, event.microbatch) == (1, 0, 4)
    ]  # fmt: skip
    begin, end = (event.t for event in events)
    spans = [span for span in Timeline(history_of(run)).computing[1, 0] if span.number == 4]
    assert [(span.kind, span.begin, span.end) for span in spans] == [
        ("forward", pytest.approx(begin), pytest.approx(begin + 0.001)),
        ("backward", pytest.approx(end - 0.001), pytest.approx(end)),
    ]


def test_an_evaluation_has_no_backward() -> None:
    run = traces.Run()
    run.quiet_step()
    events = [
        msgspec.structs.replace(event, backward_s=0.0) if isinstance(event, trace.MicrobatchFinished) else event
        for event in run.events
    ]
    spans = Timeline(History(enumerate(events, start=1))).computing[0, 0]
    assert {span.kind for span in spans} == {"forward"} and len(spans) == 2


def test_what_a_lost_replica_began_and_what_others_did_again_is_marked() -> None:
    run = traces.Run()
    run.quiet_step()
    began = len(run.events)
    run.step_with_kill_in_backward(2)
    fault = next(index for index, event in enumerate(run.events) if isinstance(event, trace.Fault))
    started = {"replica": 2, "rank": 1, "generation": 1, "step": 1, "microbatch": 5}
    run.events.insert(fault, trace.MicrobatchStarted(t=run.events[fault].t - 0.0005, **started))  # type: ignore[arg-type]
    timeline = Timeline(history_of(run))
    (lost,) = [span for spans in timeline.computing.values() for span in spans if span.is_lost]
    assert (lost.number, lost.kind) == (5, "forward")
    assert lost.end == timeline.gone_at[2, 1] == run.events[fault + 1].t, "no longer than its process lived"
    again = {(rank, span.number) for rank, spans in timeline.computing.items() for span in spans if span.is_again}
    assert again == {((0, 0), 2), ((0, 1), 2), ((1, 0), 5), ((1, 1), 5)}
    assert began and all(not span.is_again for span in timeline.computing[2, 0])


def test_what_a_late_replica_computes_first_is_not_called_again() -> None:
    """Replica 0 begins the step after the loss: its own share was dealt to nobody before."""
    run = traces.Run()
    run.roster = (1, 2)
    run.plan({1: (0, 1), 2: (2, 3)}, traces.BUCKETS)
    run.roster = (0, 1, 2)
    run.lose(2, 0, "backward", microbatch=2)
    run.plan({0: (4, 5, 2), 1: (3,)}, traces.BUCKETS)
    run.compute(0, (4, 5, 2), traces.BUCKETS)
    run.compute(1, (3,), traces.BUCKETS)
    spans = [span for some in Timeline(history_of(run)).computing.values() for span in some]
    assert {(span.number, span.is_again) for span in spans} == {(4, False), (5, False), (2, True), (3, True)}


def test_no_two_spans_of_a_thread_overlap() -> None:
    events = [
        msgspec.structs.replace(event, seconds=0.0008) if isinstance(event, trace.Recovery) else event
        for event in traces.faulty_run().events
    ]
    timeline = Timeline(History(enumerate(events, start=1)))
    for spans in (*timeline.computing.values(), *timeline.recovering.values()):
        assert all(one.begin <= one.end <= other.begin for one, other in pairwise(spans))
    phases = [span.kind for span in timeline.recovering[1]]
    assert phases == ["detect", "agree", "redeal", "recompute", "reduce", "commit"] * 2


def test_an_episode_goes_from_the_fault_to_the_last_commit() -> None:
    run = traces.faulty_run()
    first, second = Timeline(history_of(run)).episodes
    assert (first.lost, second.lost) == ((2,), (0,))
    faults = [event.t for event in run.events if isinstance(event, trace.Fault)]
    ends = [
        max(event.t for event in run.events if isinstance(event, trace.Recovery) and event.generation == generation)
        for generation in (2, 3)
    ]
    assert [(one.fault, one.end, one.step) for one in (first, second)] == [
        (faults[0], ends[0], 1), (faults[1], ends[1], 3),
    ]  # fmt: skip
    for one in (first, second):
        assert one.begin_shown < one.fault < one.end < one.end_shown


def test_a_fault_in_a_recovery_belongs_to_the_same_episode() -> None:
    run = traces.Run()
    run.quiet_step()
    run.plan(run.deal(range(6)), traces.BUCKETS)
    run.lose(2, 0, "backward", microbatch=2)
    run.statuses({}, lambda replica: ())
    run.lose(1, 1, "recompute", microbatch=2)
    run.statuses({}, lambda replica: ())
    run.plan(run.deal(range(6)), traces.BUCKETS)
    run.compute(0, range(6), traces.BUCKETS)
    run.reduce(traces.BUCKETS)
    run.recovered()
    run.commit(dict.fromkeys(traces.BUCKETS, run.generation))
    (episode,) = Timeline(history_of(run.finish())).episodes
    assert episode.lost == (2, 1) and [one.generation for one in episode.generations] == [2, 3]
    assert episode.fault == next(event.t for event in run.events if isinstance(event, trace.Fault))


def test_a_slow_rank_is_seen_in_its_step_and_not_in_the_loss_that_comes_later() -> None:
    run = traces.Run()
    run.quiet_step()
    run.add(trace.Fault, replica=2, rank=0, point="compute", kind="slow", step=1)
    run.quiet_step()
    run.step_with_kill_in_backward(2)
    history = history_of(run.finish())
    slow, kill = faults(history)
    timeline = Timeline(history)
    (episode,) = timeline.episodes
    assert episode.answers(kill) and not episode.answers(slow)
    seen = timeline.around(slow)
    assert seen is not None and seen.answers(slow) and not seen.answers(kill)
    commits = [event.t for event in run.events if isinstance(event, trace.Committed) and event.step == 1]
    assert (seen.begin_shown, seen.end) == (slow.t, max(commits)), "the step had not begun, and then it did"
    assert len(picture(history, timeline, seen).groups) == 3


def test_a_request_to_end_is_no_episode_and_a_suspicion_is_one() -> None:
    run = traces.Run()
    run.quiet_step()
    for reason in ("exit: SIGINT", "replica 1: connection closed"):
        run.generation += 1
        run.add(trace.Generation, generation=run.generation, roster=run.roster, reason=reason)
    (episode,) = Timeline(history_of(run)).episodes
    assert [one.generation for one in episode.generations] == [3] and episode.lost == ()


def test_what_is_within_a_stretch_of_time_is_cut_to_it() -> None:
    spans = [Span("forward", begin, begin + 2.0, 0, 1, number) for number, begin in enumerate((0.0, 2.0, 4.0, 6.0))]
    assert [(span.number, span.begin, span.end) for span in within(spans, 3.0, 6.0)] == [(1, 3.0, 4.0), (2, 4.0, 6.0)]


def test_a_picture_has_a_lane_for_every_rank_and_says_who_was_struck() -> None:
    one = drawn(traces.faulty_run())
    assert [(group.name, group.is_lost, [lane.name for lane in group.lanes]) for group in one.groups] == [
        (f"replica {replica}", replica == 2, ["rank 0", "rank 1"]) for replica in (0, 1, 2)
    ]
    struck = [(group.name, lane.name) for group in one.groups for lane in group.lanes if lane.struck]
    assert struck == [("replica 2", "rank 1")]
    assert [mark.name for mark in one.marks] == ["fault", "generation 2", "commit"]
    assert (one.num_shown, one.num_ranks, one.is_coarse) == (6, 6, False)
    texts = [bar.text for group in one.groups for lane in group.lanes for bar in lane.computing]
    assert "forward of microbatch 5, computed again, 1.0 ms" in texts


def test_a_stopped_process_is_shown_until_it_is_thawed_or_gone() -> None:
    run = traces.Run()
    run.quiet_step()
    run.plan(run.deal(range(6)), traces.BUCKETS)
    run.add(trace.Fault, replica=1, rank=0, point="forward", kind="freeze", step=1, microbatch=1, until="generation")
    run.add(trace.Fault, replica=2, rank=1, point="backward", kind="stop", step=1, microbatch=2)
    frozen_at = run.t
    run.roster, run.generation = (0, 1), 2
    lost = trace.Loss(replica=2, kind=LossKind.SUSPECTED)
    run.add(trace.Generation, generation=2, roster=run.roster, losses=(lost,), reason="suspected")
    run.add(trace.Thawed, replica=1, rank=0)
    run.add(trace.Fenced, replica=2, ranks=(0, 1))
    run.statuses({}, lambda replica: ())
    run.compute(0, range(6), traces.BUCKETS)
    run.recovered()
    timeline = Timeline(history_of(run))
    thawed = next(event.t for event in run.events if isinstance(event, trace.Thawed))
    assert timeline.frozen == {
        (1, 0): [(pytest.approx(frozen_at - 0.001), thawed)], (2, 1): [(frozen_at, timeline.gone_at[2, 1])],
    }  # fmt: skip
    (episode,) = timeline.episodes
    assert episode.fault == pytest.approx(frozen_at - 0.001), "it struck before the other, and was answered by the same"
    one = drawn(run)
    frozen = {(group.name, lane.name): bool(lane.frozen) for group in one.groups for lane in group.lanes}
    assert {place for place, shown in frozen.items() if shown} == {("replica 1", "rank 0"), ("replica 2", "rank 1")}


def test_a_picture_of_a_large_job_shows_some_ranks_and_says_so() -> None:
    run = traces.Run(replicas=40, microbatches=40)
    started = run.events[0]
    assert isinstance(started, trace.RunStarted)
    run.events[0] = msgspec.structs.replace(started, layout=trace.Layout(tp=4, pp=4))
    run.roster = (*range(9, 40), *range(9))  # the first of it takes over what is lost
    run.step_with_kill_in_backward(30)
    one = drawn(run)
    assert (one.num_shown, one.num_ranks) == (MAX_LANES, 16 * 40)
    names = [group.name for group in one.groups]
    assert names == [f"replica {replica}" for replica in (0, 1, 2, 3, 9, 30)], "the lost, who took over, then others"
    assert [lane.name for group in one.groups for lane in group.lanes if lane.struck] == ["rank 1"]


def test_bars_that_nobody_could_tell_apart_are_drawn_as_one() -> None:
    run = traces.Run(replicas=2, microbatches=2000)
    run.step_with_kill_in_backward(1)
    one = drawn(run)
    bars = [bar for group in one.groups for lane in group.lanes for bar in (*lane.computing, *lane.reducing)]
    assert one.is_coarse and MAX_BARS / 4 < len(bars) <= MAX_BARS
    timeline = Timeline(history_of(run))
    (episode,) = timeline.episodes
    spans = [*timeline.computing.values(), *timeline.reducing.values()]
    assert all_bars(one) == sum(len(within(some, episode.begin_shown, episode.end_shown)) for some in spans)
