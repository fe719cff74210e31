"""The Perfetto file: valid trace events, nested on each thread, with everything that the ranks did."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.observe.history import History
from megatron_recover.observe.report import perfetto
from megatron_recover.observe.report.timeline import Span, Timeline
from tests.observe import traces


class _Event(msgspec.Struct, tag_field="ph", forbid_unknown_fields=True, kw_only=True):
    """Base of the kinds of Chrome's trace events that we write, with their required fields."""

    name: str
    pid: int
    args: dict[str, Any]


class Complete(_Event, tag="X"):
    tid: int
    cat: str
    ts: int
    dur: int


class Instant(_Event, tag="i"):
    tid: int
    ts: int
    s: Literal["g", "p", "t"]


class Counter(_Event, tag="C"):
    ts: int


class Metadata(_Event, tag="M"):
    tid: int
    name: Literal["process_name", "process_sort_index", "thread_name", "thread_sort_index"]  # type: ignore[assignment]


class File(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    displayTimeUnit: Literal["ms", "ns"]  # noqa: N815
    traceEvents: list[Complete | Instant | Counter | Metadata]  # noqa: N815


def written(tmp_path: Path, run: traces.Run) -> File:
    history = History(enumerate(run.events, start=1))
    assert perfetto.write(history, Timeline(history), tmp_path / perfetto.TRACE_FILE)
    return msgspec.json.decode((tmp_path / perfetto.TRACE_FILE).read_bytes(), type=File)


def threads(file: File) -> dict[tuple[int, int], list[Complete]]:
    found: dict[tuple[int, int], list[Complete]] = defaultdict(list)
    for event in file.traceEvents:
        if isinstance(event, Complete):
            found[event.pid, event.tid].append(event)
    return found


def assert_nested(spans: list[Complete]) -> None:
    """Each begins where those around it have begun and not ended, and ends no later than they."""
    around: list[Complete] = []
    for span in spans:
        assert span.dur >= 0
        while around and around[-1].ts + around[-1].dur <= span.ts:
            around.pop()
        for other in around:
            assert other.ts <= span.ts and span.ts + span.dur <= other.ts + other.dur, (other, span)
        around.append(span)


def test_every_forward_backward_and_sum_is_there_on_the_thread_of_its_rank(tmp_path: Path) -> None:
    run = traces.faulty_run()
    file = written(tmp_path, run)
    names = {(event.pid, event.tid, event.name): event.args for event in file.traceEvents if isinstance(event, Metadata)}
    for number in (0, 1, 2):
        assert names[number + 1, 0, "process_name"] == {"name": f"replica {number}"}
    assert names[4, 0, "process_name"] == {"name": "job"}
    finished = [event for event in run.events if isinstance(event, trace.MicrobatchFinished)]
    computed = [event for event in file.traceEvents if isinstance(event, Complete) and event.cat in ("forward", "backward")]
    assert len(computed) == 2 * len(finished)
    one = next(event for event in finished if (event.replica, event.rank, event.step) == (1, 1, 2))
    name = {"name": "rank 1"}
    (thread,) = [tid for pid, tid, kind in names if pid == 2 and kind == "thread_name" and names[pid, tid, kind] == name]
    assert any(
        (event.pid, event.tid, event.name, event.ts + event.dur) == (2, thread, f"backward {one.microbatch}", 1e6 * one.t)
        for event in computed
    )
    sums = [event for event in file.traceEvents if isinstance(event, Complete) and event.cat == "reduce"]
    assert len(sums) == sum(isinstance(event, trace.Reduced) for event in run.events)
    again = {event.args["microbatch"] for event in computed if event.args.get("again")}
    assert again == {2, 5} | {0, 2, 4}, "the microbatches of replica 2, then of replica 0"


def test_spans_nest_on_every_thread(tmp_path: Path) -> None:
    file = written(tmp_path, traces.faulty_run())
    found = threads(file)
    assert len(found) > 10
    for spans in found.values():
        assert_nested(spans)
    inside = [event for event in found[2, 1] if event.cat == "forward"]
    steps = [event for event in found[2, 1] if event.cat == "step"]
    assert [event.name for event in steps] == [f"train {number}" for number in range(1, 6)]
    assert all(any(step.ts <= one.ts < step.ts + step.dur for step in steps) for one in inside)


def test_sums_that_overlap_have_threads_of_their_own(tmp_path: Path) -> None:
    run = traces.quiet_run(2)
    run.events = [
        msgspec.structs.replace(event, seconds=0.004) if isinstance(event, trace.Reduced) else event for event in run.events
    ]
    file = written(tmp_path, run)
    for spans in threads(file).values():
        assert_nested(spans)
    sums = [event for event in file.traceEvents if isinstance(event, Complete) and event.cat == "reduce"]
    assert len({event.tid for event in sums if event.pid == 1}) == 3, "rank 0 one, rank 1 two whose buckets overlap"


def test_what_concerns_all_is_in_a_process_of_its_own(tmp_path: Path) -> None:
    run = traces.faulty_run()
    run.events = [  # as real runs do, every replica says the loss
        msgspec.structs.replace(event, loss=5.0 - 0.1 * event.step)
        if isinstance(event, trace.Applied) and event.rank == 1 else event
        for event in run.events
    ]  # fmt: skip
    file = written(tmp_path, run)
    job = 4
    steps = threads(file)[job, 1]
    assert [event.name for event in steps] == [f"train {number}" for number in range(1, 6)]
    assert [event.args["disturbed"] for event in steps] == [False, True, False, True, False]
    instants = [event.name for event in file.traceEvents if isinstance(event, Instant)]
    assert instants == [
        "fault: replica 2 rank 1 killed at backward of microbatch 5", "fault: replica 0 rank 0 killed at reduce of bucket 1",
        "generation 1: start", "generation 2: loss", "generation 3: loss",
    ]  # fmt: skip
    counters = [(event.name, event.args[event.name]) for event in file.traceEvents if isinstance(event, Counter)]
    assert counters[:3] == [("replicas", 3), ("replicas", 2), ("replicas", 1)]
    assert [value for name, value in counters if name == "loss"] == pytest.approx([5.0, 4.9, 4.8, 4.7, 4.6])


@pytest.mark.parametrize("length", [0, 3, 40, 90])
def test_a_run_that_has_got_anywhere_can_be_written(tmp_path: Path, length: int) -> None:
    run = traces.faulty_run()
    run.events = run.events[:length]
    for spans in threads(written(tmp_path, run)).values():
        assert_nested(spans)


def test_of_a_very_long_run_only_what_is_around_faults_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "MAX_SPANS", 50)
    history = History(enumerate(traces.faulty_run().events, start=1))
    timeline = Timeline(history)
    assert not perfetto.write(history, timeline, tmp_path / "out.json")
    file = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=File)
    spans = [event for event in file.traceEvents if isinstance(event, Complete) and event.cat in ("forward", "reduce")]
    shown = [(1e6 * one.begin_shown, 1e6 * one.end_shown) for one in timeline.episodes]
    assert spans and all(any(begin - 1 <= event.ts <= end + 1 for begin, end in shown) for event in spans)
    whole = sum(span.kind == "forward" for some in timeline.computing.values() for span in some)
    assert sum(event.cat == "forward" for event in spans) < whole
    for thread in threads(file).values():
        assert_nested(thread)


def test_rows_keep_spans_apart() -> None:
    spans = [Span("reduce", begin, end, 0, 1) for begin, end in ((0.0, 3.0), (1.0, 2.0), (2.5, 4.0), (3.0, 5.0))]
    assert [[span.begin for span in row] for row in perfetto._rows(spans)] == [[0.0, 3.0], [1.0, 2.5]]
