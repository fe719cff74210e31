"""What faults cost, against times put into the trace by hand."""

from __future__ import annotations

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.observe.goodput import Goodput
from megatron_recover.observe.history import History
from megatron_recover.observe.summary import summarize
from tests.observe import traces


def timed(run: traces.Run, seconds: list[float]) -> History:
    """The run's steps stretched so that step i lasts `seconds[i]`; the time of an event in a step is not kept apart."""
    events: list[trace.Event] = []
    begin, step = 10.0, 0
    for event in run.events:
        if isinstance(event, trace.Plan) and event.step > step:
            begin, step = begin + seconds[step], event.step
        ends = isinstance(event, trace.Committed | trace.Applied | trace.RunFinished)
        t = 9.0 if step == 0 and not events else begin + (seconds[step] if ends else 0.0)
        if isinstance(event, trace.Fault | trace.Failure | trace.Fenced | trace.Generation) and events and event.t > 0.02:
            t = begin + seconds[step] / 2
        events.append(msgspec.structs.replace(event, t=t))
    return History(enumerate(events, start=1))


def test_a_fault_costs_what_its_step_took_longer_than_others_with_as_many_replicas() -> None:
    run = traces.Run()
    for _ in range(3):
        run.quiet_step()
    run.step_with_kill_in_backward(2)
    run.quiet_step()
    goodput = Goodput(timed(run.finish(), [1.0, 1.2, 1.1, 1.6, 1.5]))
    assert [one.label for one in goodput.steps if one.is_disturbed] == ["train 4"]
    assert [one.replicas for one in goodput.steps] == [3, 3, 3, 3, 2]
    assert goodput.lost_s == pytest.approx(1.6 - 1.1)
    assert goodput.share == pytest.approx(1 - 0.5 / 6.4)
    summary = summarize(timed(run, [1.0, 1.2, 1.1, 1.6, 1.5]))
    assert (summary.goodput, summary.lost_to_faults_s) == (pytest.approx(1 - 0.5 / 6.4, abs=1e-6), pytest.approx(0.5))


def test_with_as_many_replicas_never_undisturbed_the_nearest_number_tells() -> None:
    """6 microbatches: a step of 3 replicas takes two rounds, one of 2 three."""
    run = traces.Run()
    run.step_with_kill_in_backward(2)
    run.quiet_step()
    goodput = Goodput(timed(run.finish(), [2.0, 2.4]))
    assert goodput.undisturbed_s(goodput.steps[0]) == pytest.approx(2.4 / 3 * 2)
    assert goodput.lost_s == pytest.approx(0.4)


def test_generations_announced_at_the_same_time_count_in_their_order() -> None:
    run = traces.Run(replicas=4, microbatches=12)
    run.quiet_step()
    run.step_with_kill_in_backward(3)
    run.step_with_kill_in_backward(2)
    history = timed(run.finish(), [1.0, 2.0, 0.0])
    at = [event.t for event in history.generations.values()]
    assert at[-1] > at[-2]
    together = [
        (line, msgspec.structs.replace(event, t=at[-2]) if event is history.generations[len(at) - 1] else event)
        for line, event in history.events
    ]
    steps = Goodput(History(together)).steps
    assert [one.replicas for one in steps] == [4, 4, 2]


def test_of_two_other_numbers_of_replicas_the_nearer_tells() -> None:
    run = traces.Run(replicas=4, microbatches=12)
    run.quiet_step()
    run.step_with_kill_in_backward(3)
    run.step_with_kill_in_backward(2)
    run.step_with_kill_in_backward(1)
    run.quiet_step()
    goodput = Goodput(timed(run.finish(), [3.0, 9.0, 9.0, 9.0, 24.0]))
    assert [one.replicas for one in goodput.steps] == [4, 4, 3, 2, 1]
    # A microbatch of the largest quota took 1 s with four replicas and 2 s with one; with three they are four of them.
    assert goodput.undisturbed_s(goodput.steps[2]) == pytest.approx(4.0)
    assert goodput.undisturbed_s(goodput.steps[3]) == pytest.approx(12.0)


def test_agreeing_to_end_is_no_step() -> None:
    run = traces.quiet_run(3)
    end = {"generation": 1, "step": 3, "label": "end 0"}
    run.events.pop()
    for replica in run.roster:
        run.add(trace.Plan, replica=replica, **end, num_microbatches=0, roster=run.roster, quotas=(0, 0, 0))
        run.add(trace.Committed, replica=replica, **end, digest="d", adopted=False, versions=())
    steps = Goodput(History(enumerate(run.events, start=1))).steps
    assert [one.label for one in steps] == ["train 1", "train 2", "train 3"]


def test_without_an_undisturbed_step_nothing_is_claimed_and_without_a_fault_nothing_is_lost() -> None:
    run = traces.Run()
    run.step_with_kill_in_backward(2)
    alone = Goodput(timed(run.finish(), [2.0]))
    assert (alone.lost_s, alone.share) == (None, None)
    quiet = Goodput(timed(traces.quiet_run(3), [1.0, 1.0, 1.0]))
    assert (quiet.lost_s, quiet.share) == (0.0, 1.0)
    assert Goodput(History(())).share is None


def test_a_generation_that_only_carries_a_request_to_end_disturbs_nothing() -> None:
    run = traces.Run()
    run.quiet_step()
    run.generation += 1
    run.add(trace.Generation, generation=run.generation, roster=run.roster, reason="exit: SIGINT")
    run.quiet_step()
    history = History(enumerate(run.finish().events, start=1))
    assert [one.is_disturbed for one in Goodput(history).steps] == [False, False]
