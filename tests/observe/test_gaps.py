"""What `check` says of a trace in which events are missing: nothing of the steps that are touched, everything of the others.

And of one that is too large to be kept: the same as of one that is.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.cli import check as verb
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.observe.gaps import LAUNCHER, Gaps
from megatron_recover.observe.history import History
from megatron_recover.observe.report.page import render
from megatron_recover.observe.report.timeline import Timeline
from megatron_recover.observe.summary import summarize
from megatron_recover.observe.verify.check import Violation, check, describe, violations
from tests.observe import test_check, traces

Events = list[trace.Event]


def random_run(random: random.Random) -> traces.Run:
    """Some steps, with deaths, drift and evaluations."""
    run = traces.Run(random.randint(1, 4), random.randint(4, 8), random.choice(("exact", "fast")))
    for _ in range(random.randint(3, 8)):
        kind, members = random.random(), len(run.roster)
        if members > 1 and kind < 0.2:
            run.step_with_kill_in_backward(random.choice(run.roster), random.random() < 0.5)
        elif members > 1 and kind < 0.35:
            run.step_with_kill_in_reduction(random.choice(run.roster))
        elif members > 2 and kind < 0.45:
            run.quiet_step()
            run.step_with_drift(random.choice(run.roster))
        elif kind < 0.55:
            run.step_outside_training(f"evaluate {run.trained}/{run.step}", 3)
        else:
            run.quiet_step()
    return run.finish()


def writer(event: trace.Event) -> tuple[int, int]:
    """Replica and rank in whose ring an event lies: those of a leader in that of rank 0, all others in the launcher's."""
    kind = type(event)
    if kind in (trace.Fenced, trace.Failure, trace.Generation, trace.RunStarted, trace.RunFinished, trace.Stopping):
        return LAUNCHER, 0
    return getattr(event, "replica", LAUNCHER), getattr(event, "rank", 0)


def with_a_gap(events: Events, place: tuple[int, int], first: int, last: int) -> tuple[Events, set[int]]:
    """Drop the events `first` to `last` of those that a rank wrote; returns the rest, and the steps of what was dropped."""
    mine = [index for index, event in enumerate(events) if writer(event) == place]
    dropped = mine[first : last + 1]
    lost = [events[index] for index in dropped]
    then = events[mine[last + 1]].t if last + 1 < len(mine) else events[dropped[-1]].t
    gap = trace.Gap(t=then, replica=place[0], rank=place[1], num_events=len(lost), since=lost[0].t)
    left = [gap if index == dropped[-1] else event for index, event in enumerate(events) if index not in set(dropped[:-1])]
    return left, {event.step for event in lost if getattr(event, "step", None) is not None}  # type: ignore[attr-defined]


def judged(events: Events) -> tuple[Violation, ...]:
    return violations(History(enumerate(events, start=1)))


@pytest.mark.parametrize("seed", range(60))
def test_a_gap_is_never_a_violation_and_its_steps_are_never_vouched_for(seed: int) -> None:
    """Runs of one rank's events are dropped; the first line of all stays (without it nothing can be judged)."""
    rng = random.Random(seed)
    events: Events = random_run(rng).events
    for _ in range(rng.randint(1, 3)):
        place = rng.choice(sorted({writer(event) for event in events[1:] if not isinstance(event, trace.Gap)}))
        mine = [event for event in events if writer(event) == place]
        lowest = 1 if place[0] == LAUNCHER else 0
        if len(mine) <= lowest + 1 or any(isinstance(event, trace.Gap) for event in mine):
            continue
        first = rng.randint(lowest, len(mine) - 1)
        last = min(len(mine) - 1, first + rng.choice((0, 1, 5, 40)))
        events, touched = with_a_gap(events, place, first, last)
        history = History(enumerate(events, start=1))
        gaps = Gaps(history)
        unseen = {step for step in touched if step > max(history.steps)} if gaps.hides_later else set()
        assert touched - unseen <= gaps.touched, (place, first, last)
    assert judged(events) == (), [event for event in events if isinstance(event, trace.Gap)]


@pytest.mark.parametrize("run", [traces.faulty_run, traces.drifting_run], ids=lambda run: run.__name__)
@pytest.mark.parametrize("length", [1, 2])
def test_no_event_of_a_run_is_missed_where_a_gap_stands_for_it(run: Callable[[], traces.Run], length: int) -> None:
    """One after the other, and each with the next of its rank."""
    events: Events = run().events
    for place in sorted({writer(event) for event in events}):
        for first in range(1 if place[0] == LAUNCHER else 0, sum(writer(event) == place for event in events) - length + 1):
            left, touched = with_a_gap(events, place, first, first + length - 1)
            assert judged(left) == (), (place, first)
            assert touched <= Gaps(History(enumerate(left, start=1))).touched, (place, first)


def test_a_breakage_outside_a_gap_is_found_and_one_inside_is_not_vouched_for(tmp_path: Path) -> None:
    events = list(traces.faulty_run().events)
    index = next(
        i for i, event in enumerate(events) if isinstance(event, trace.Reduced) and (event.step, event.bucket) == (2, 0)
    )  # fmt: skip
    events[index] = msgspec.structs.replace(events[index], checksum=77)
    mine = [i for i, event in enumerate(events) if writer(event) == (1, 1)]
    of_step = {
        step: [
            n for n, i in enumerate(mine) if getattr(events[i], "step", None) == step and isinstance(events[i], trace.Reduced)
        ]
        for step in (0, 2)
    }
    elsewhere, touched = with_a_gap(events, (1, 1), of_step[0][0], of_step[0][0])
    assert touched == {0} and Gaps(History(enumerate(elsewhere, start=1))).touched == {0}
    assert {one.invariant for one in judged(elsewhere)} == {"INV-2"}
    here, _ = with_a_gap(events, (1, 1), of_step[2][0], of_step[2][0])
    assert judged(here) == () and Gaps(History(enumerate(here, start=1))).touched == {2}
    verdict = check(traces.write(tmp_path / "here", here))
    assert verdict.holds and not verdict.is_whole
    assert "NOT JUDGED: events are missing, of replica 1 rank 1 (1): not judged are steps 2" in describe(verdict)


def test_what_is_missing_without_a_gap_is_found() -> None:
    events, _ = with_a_gap(list(traces.faulty_run().events), (1, 1), 20, 29)
    assert judged(events) == ()
    assert judged([event for event in events if not isinstance(event, trace.Gap)]) != ()


def test_every_breakage_is_found_beside_a_gap_in_another_step() -> None:
    """The last step is touched; each breakage of an earlier one has to be found as without a gap."""
    found = 0
    for invariant, breakage in test_check.BREAKAGES:
        events = list(traces.faulty_run().events)
        line = breakage(events) + 1
        step = getattr(events[line - 1], "step", None)
        mine = [i for i, event in enumerate(events) if writer(event) == (1, 1) and getattr(event, "step", None) == 4]
        if len(events) != len(traces.faulty_run().events) or step not in (0, 1, 2) or len(mine) < 4:
            continue
        place = mine[2]
        gap = trace.Gap(t=events[place].t, replica=1, rank=1, num_events=1, since=events[place].t)
        events[place] = gap
        broken = [(one.invariant, one.line) for one in judged(events)]
        assert (invariant, line) in broken, breakage.__name__
        found += 1
    assert found >= 15


def test_a_step_that_a_gap_takes_out_whole_is_listed() -> None:
    """One replica of one rank: nobody else tells that there was such a step."""
    run = traces.Run(replicas=1)
    for _ in range(4):
        run.quiet_step()
    run.finish()
    events = [
        msgspec.structs.replace(event, rank=0) if getattr(event, "rank", None) == 1 else event
        for event in run.events if not isinstance(event, trace.RunFinished)
    ]  # fmt: skip
    mine = [i for i, event in enumerate(events) if getattr(event, "step", None) in (1, 2)]
    gap = trace.Gap(t=events[mine[-1]].t, replica=0, rank=0, num_events=len(mine), since=events[mine[0]].t)
    left = [*events[: mine[0]], gap, *events[mine[-1] + 1 :]]
    gaps = Gaps(History(enumerate(left, start=1)))
    assert gaps.touched >= {1, 2} and gaps.ranges() == ((0, 3),)


def test_an_event_without_a_generation_is_not_one_of_a_generation_whose_announcement_is_missing() -> None:
    """A state digest names a step and no generation; a gap of the launcher elsewhere does not touch its step."""
    run = traces.Run(replicas=2)
    for _ in range(6):
        run.quiet_step()
    events = [*run.finish().events]
    end = max(i for i, event in enumerate(events) if getattr(event, "step", None) == 5)
    digest = trace.StateDigested(t=events[end].t, replica=0, rank=0, step=5, label="train 5", digest="0")
    early = min(i for i, event in enumerate(events) if getattr(event, "step", None) == 1)
    gap = trace.Gap(t=events[early].t, replica=LAUNCHER, rank=0, num_events=1, since=events[early].t)
    with_digest = [*events[:early], gap, *events[early : end + 1], digest, *events[end + 1 :]]
    assert 5 not in Gaps(History(enumerate(with_digest, start=1))).touched


def test_what_the_agent_writes_about_a_rank_is_not_what_the_rank_has_recorded() -> None:
    """The last event of a step is lost; before the gap is stored the agent finds the rank silent in the next step."""
    events = list(traces.quiet_run().events)
    index = max(i for i, event in enumerate(events) if isinstance(event, trace.Applied) and event.step == 1)
    lost = events[index]
    assert isinstance(lost, trace.Applied) and all(getattr(event, "step", 2) > 1 for event in events[index + 1 :])
    silent = trace.RankSilent(
        t=lost.t, replica=lost.replica, rank=lost.rank, verdict="slow", phase="between", seconds=2.0, step=2, label="train 3"
    )
    gap = trace.Gap(t=lost.t, replica=lost.replica, rank=lost.rank, num_events=1, since=lost.t)
    left = [*events[:index], silent, gap, *events[index + 1 :]]
    assert 1 in Gaps(History(enumerate(left, start=1))).touched
    assert judged(left) == ()


def test_the_exit_code_and_json_tell_that_a_part_was_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = traces.write(tmp_path / "whole", traces.faulty_run().events)
    assert verb.main([str(whole)]) == ExitCode.OK
    events, _ = with_a_gap(list(traces.faulty_run().events), (1, 0), 20, 22)
    run_dir = traces.write(tmp_path / "gap", events)
    assert verb.main([str(run_dir)]) == ExitCode.UNFINISHED
    assert "NOT JUDGED: events are missing, of replica 1 rank 0 (3)" in capsys.readouterr().out
    assert verb.main([str(run_dir), "--json"]) == ExitCode.UNFINISHED
    told = msgspec.json.decode(capsys.readouterr().out)
    assert (told["holds"], told["finished"], told["whole"]) == (True, True, False)
    assert told["not_judged"] and told["summary"]["steps_not_vouched_for"] and told["summary"]["events_missing"] == 3
    verdict = check(run_dir)
    page = render(verdict, Timeline(verdict.history))
    assert "What could be judged holds" in page and "Not judged: events are missing" in page


@pytest.mark.parametrize("is_finished", [True, False], ids=["its ranks' last events are lost", "the trace is cut off"])
def test_the_end_of_a_run_that_the_trace_does_not_have_is_not_held_against_it(tmp_path: Path, is_finished: bool) -> None:
    """Exact, and equal to its reference as far as it is known. A loss that differs in a known step is a problem still."""
    whole = traces.quiet_run().events
    last = max(event.step for event in whole if isinstance(event, trace.Applied))
    mine = [index for index, event in enumerate(whole) if getattr(event, "step", None) == last]
    gaps = [
        trace.Gap(t=whole[-1].t, replica=replica, rank=rank, num_events=9, since=whole[mine[0]].t)
        for replica in (0, 1, 2) for rank in (0, 1)
    ]  # fmt: skip
    left = [*whole[: mine[0]], *([*gaps, whole[-1]] if is_finished else ())]
    run_dir, reference = traces.write(tmp_path / "run", left), traces.write(tmp_path / "reference", whole)
    assert verb.main([str(run_dir), "--against", str(reference)]) == ExitCode.UNFINISHED
    assert "NOT JUDGED: parameters cannot be compared with" in describe(check(run_dir, reference))
    other = [msgspec.structs.replace(event, loss=9.0) if isinstance(event, trace.Applied) else event for event in whole]
    assert verb.main([str(run_dir), "--against", str(traces.write(tmp_path / "other", other))]) == ExitCode.INVARIANT_VIOLATED


def test_parameters_are_not_compared_where_only_evaluations_are_left_of_the_end(tmp_path: Path) -> None:
    """The trace was written again when the last training step, whose digests decide, was over."""
    whole = traces.quiet_run().events
    last = max(event.step for event in whole if isinstance(event, trace.Applied))

    def evaluated(event: trace.Event) -> trace.Event:
        if getattr(event, "step", -1) not in (last - 1, last):
            return event
        if isinstance(event, trace.Applied):
            event = msgspec.structs.replace(event, parameter_digest=None, lane_digest=None, replicated_digest=None)
        return msgspec.structs.replace(event, label=f"evaluate 9/{event.step}") if hasattr(event, "label") else event

    ended = [evaluated(event) for event in whole]
    trained = [event for event in ended if getattr(event, "step", None) == last - 2]
    gaps = [
        trace.Gap(t=trained[-1].t, replica=replica, rank=rank, num_events=9, since=trained[0].t)
        for replica in (0, 1, 2) for rank in (0, 1)
    ]  # fmt: skip
    at = ended.index(trained[0])
    left = [*ended[:at], *gaps, *(event for event in ended[at:] if event not in trained)]
    run_dir, reference = traces.write(tmp_path / "run", left), traces.write(tmp_path / "reference", ended)
    told = describe(check(run_dir, reference))
    assert "NOT JUDGED: parameters cannot be compared with" in told and "PROBLEM" not in told
    assert "PROBLEM: parameters cannot be compared" in describe(
        check(traces.write(tmp_path / "cut", [event for event in ended if event not in trained]), reference)
    )


def test_losses_are_not_compared_where_the_trace_ends_before_the_first(tmp_path: Path) -> None:
    whole = traces.quiet_run().events
    first = next(index for index, event in enumerate(whole) if isinstance(event, trace.Applied))
    run_dir, reference = traces.write(tmp_path / "run", whole[:first]), traces.write(tmp_path / "reference", whole)
    told = describe(check(run_dir, reference))
    assert "NOT JUDGED: losses cannot be compared" in told and "PROBLEM" not in told
    assert verb.main([str(run_dir), "--against", str(reference)]) == ExitCode.UNFINISHED


def run_that_a_finished_replica_leaves() -> traces.Run:
    """It had nothing left to do: that it ends is no loss."""
    run = traces.Run()
    run.quiet_step()
    run.add(trace.Failure, replica=1, rank=0, cause="SIGKILL")
    run.add(trace.Fenced, replica=1, ranks=(0, 1))
    run.roster, run.generation = (0, 2), 2
    run.add(trace.Generation, generation=2, roster=run.roster, reason="process ended")
    run.statuses({}, lambda replica: ())
    return run.finish()


RUNS = [traces.faulty_run, traces.drifting_run, traces.quiet_run, run_that_a_finished_replica_leaves]


@pytest.mark.parametrize("level", ["steps", "faults"])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_what_a_trace_does_not_record_is_said_and_no_false_alarm(
    level: trace.Level, run: Callable[[], traces.Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [
        msgspec.structs.replace(event, level=level) if isinstance(event, trace.RunStarted) else event
        for event in run().events if type(event) not in trace.LEFT_OUT[level]
    ]  # fmt: skip
    run_dir = traces.write(tmp_path, events)
    assert verb.main([str(run_dir)]) == ExitCode.UNFINISHED
    text = capsys.readouterr().out
    assert f"NOT JUDGED: the trace shows no more than {level}: not judged are the rules of INV-1 (" in text
    assert "computed_once" in text and "BROKEN" not in text
    verdict = check(run_dir)
    assert verdict.summary.level == level
    assert "Not judged: the trace shows no more than" in render(verdict, Timeline(verdict.history))


class Whole(History):
    """A history whose steps are all kept open until the end: as a checker has it that keeps everything."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        for facts in self.steps.values():
            facts.last_line = sys.maxsize


def _changed(rng: random.Random, events: Events) -> Events:
    """Events moved, dropped, repeated or altered as a defect might."""
    events = list(events)
    for _ in range(rng.randint(0, 4)):
        index, kind = rng.randrange(1, len(events) - 1), rng.randrange(4)
        event = events[index]
        if kind == 0:
            del events[index]
        elif kind == 1:
            events.insert(rng.randrange(1, len(events) - 1), event)
        elif kind == 2:
            events.insert(min(max(1, index + rng.randint(-30, 30)), len(events) - 2), events.pop(index))
        else:
            fields = [
                name for name in ("replica", "rank", "generation", "step", "microbatch", "bucket", "version", "checksum")
                if isinstance(getattr(event, name, None), int)
            ]  # fmt: skip
            if fields:
                name = rng.choice(fields)
                value = max(0, getattr(event, name) + rng.choice((-1, 1)))
                events[index] = msgspec.structs.replace(event, **{name: value})
    return events


@pytest.mark.parametrize("block", range(4))
def test_the_verdict_is_that_of_a_checker_that_keeps_every_step(block: int) -> None:
    broken = 0
    for seed in range(60 * block, 60 * block + 60):
        rng = random.Random(seed)
        numbered = list(enumerate(_changed(rng, random_run(rng).events), start=1))
        mine = violations(History(numbered))
        assert mine == violations(Whole(numbered)), seed
        assert summarize(History(numbered)) == summarize(Whole(numbered)), seed
        broken += bool(mine)
    assert broken > 25
