"""Write a run for Perfetto: processes are replicas, threads are ranks, one more process is the job.

The format is Chrome's trace events (the JSON object form: complete events `X` that nest on each
thread, instants `i`, counters `C`, names `M`; times in microseconds). Sums run beside the computing
of a rank, so they have threads of their own, as many as overlap. This module writes what `timeline`
found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from megatron_recover.core.label import label_of
from megatron_recover.host.whole_file import replacing
from megatron_recover.observe.goodput import Goodput
from megatron_recover.observe.history import History
from megatron_recover.observe.joins import sizes
from megatron_recover.observe.report.timeline import MAX_SPANS, Span, Timeline
from megatron_recover.observe.standstills import standstills
from megatron_recover.observe.summary import faults

TRACE_FILE = "perfetto.json"


_RECOVERY = 0
_JOB_STEPS, _JOB_FAULTS, _JOB_STANDSTILLS = 1, 2, 3
_STILL = 98
"""Offset of the standstill thread of a rank, after the threads of its sums. Ranks are 100 threads
apart."""


def write(history: History, timeline: Timeline, place: Path) -> bool:
    """Write the file. Return whether it has all spans, or only those around faults."""
    spans = [*timeline.computing.values(), *timeline.reducing.values()]
    is_whole = timeline.is_whole and sum(map(len, spans)) <= MAX_SPANS
    encode = msgspec.json.Encoder().encode
    with replacing(place) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(events(history, timeline, is_whole=is_whole)):
            file.write((b",\n" if number else b"") + encode(event))
        file.write(b"\n]}\n")
    return is_whole


def events(history: History, timeline: Timeline, *, is_whole: bool = True) -> Iterator[dict[str, Any]]:
    """Yield all events of the file.

    Unless `is_whole`, forwards, backwards and sums are only those that begin inside a drawn
    episode, and ranks have no spans of steps.
    """
    labels = {step: facts.label for step, facts in history.steps.items() if facts.label is not None}
    ranks = sorted(timeline.computing.keys() | timeline.reducing.keys() | timeline.still.keys())
    for replica in sorted({replica for replica, _ in ranks} | timeline.recovering.keys() | timeline.joining.keys()):
        yield from _named(replica + 1, f"replica {replica}", replica + 1)
        yield from _thread(replica + 1, _RECOVERY, "recovery", -1)
        for span in timeline.recovering.get(replica, ()):
            yield _complete(replica + 1, _RECOVERY, span.kind, span, generation=span.generation)
        for one in timeline.joining.get(replica, ()):
            yield {
                "ph": "X", "pid": replica + 1, "tid": _RECOVERY, "name": one.kind, "cat": "join", "ts": _micros(one.begin),
                "dur": _micros(one.end) - _micros(one.begin), "args": {"what": one.text},
            }  # fmt: skip
    for replica, rank in ranks:
        yield from _of_rank(timeline, labels, replica, rank, is_whole)
    replicas = [replica for replica, _ in ranks] + [*timeline.joining]
    yield from _of_job(history, 1 + max(replicas, default=-1) + 1)


def _of_rank(timeline: Timeline, labels: dict[int, str], replica: int, rank: int, is_whole: bool) -> Iterator[dict[str, Any]]:
    process, thread = replica + 1, 100 * rank + 1
    computing, reducing = timeline.computing.get((replica, rank), []), timeline.reducing.get((replica, rank), [])
    steps = timeline.steps.get((replica, rank), [])
    if not is_whole:
        steps = []
        computing, reducing = (_around(timeline, spans) for spans in (computing, reducing))
    yield from _thread(process, thread, f"rank {rank}", thread)
    for span in sorted([*steps, *computing], key=lambda span: (span.begin, span.kind != "step")):
        if span.kind == "step":
            yield _complete(process, thread, labels.get(span.step, f"step {span.step}"), span, step=span.step)
            continue
        more = {"step": span.step, "generation": span.generation, "microbatch": span.number, "chunk": span.chunk}
        more |= {"again": True} if span.is_again else {}
        more |= {"lost": True} if span.is_lost else {}
        yield _complete(process, thread, f"{span.kind} {span.number}", span, **more)
    still = timeline.still.get((replica, rank), ())
    if still:
        yield from _thread(process, thread + _STILL, f"rank {rank} stands still", thread + _STILL)
    for one in still:
        yield {
            "ph": "X", "pid": process, "tid": thread + _STILL, "name": one.kind, "cat": "standstill", "ts": _micros(one.begin),
            "dur": _micros(one.end) - _micros(one.begin), "args": {"what": one.text},
        }  # fmt: skip
    for row, spans in enumerate(_rows(reducing)):
        beside = thread + 1 + row
        yield from _thread(process, beside, f"rank {rank} sums", beside)
        for span in spans:
            yield _complete(
                process, beside, f"bucket {span.number}", span, step=span.step, generation=span.generation, bucket=span.number
            )  # fmt: skip


def _around(timeline: Timeline, spans: Iterable[Span]) -> list[Span]:
    """Return the spans that begin in the shown period of a drawn episode, each once."""
    shown = [(one.begin_shown, one.end_shown) for one in timeline.drawn]
    return [span for span in spans if any(begin <= span.begin <= end for begin, end in shown)]


def _rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans, ordered by begin, over as few rows as keep the spans of a row apart."""
    rows: list[list[Span]] = []
    for span in spans:
        row = next((row for row in rows if _micros(row[-1].end) <= _micros(span.begin)), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def _of_job(history: History, process: int) -> Iterator[dict[str, Any]]:
    """Yield the events of the job.

    These are steps, faults, standstills, generations, and the curves of losses and replicas.
    """
    yield from _named(process, "job", -1)
    yield from _thread(process, _JOB_STEPS, "steps", 1)
    yield from _thread(process, _JOB_FAULTS, "faults and generations", 2)
    for one in Goodput(history).steps:
        more = {"step": one.step, "replicas": one.replicas, "microbatches": one.num_microbatches, "disturbed": one.is_disturbed}
        yield _complete(process, _JOB_STEPS, one.label, Span("step", one.begin, one.end, one.step, 0), **more)
    for fault in faults(history):
        yield _instant(process, f"fault: {fault.words}", fault.t, fault)
    yield from _standstills(history, process)
    for generation in history.generations.values():
        name = f"generation {generation.generation}" + (f": {generation.reason}" if generation.reason else "")
        yield _instant(process, name, generation.t, {"roster": generation.roster, "losses": generation.losses})
    for t, size in sizes(history):
        yield _counter(process, "replicas", t, size)
    for _, facts in sorted(history.steps.items()):
        if facts.loss is not None and facts.loss_at is not None and label_of(facts.loss_label or "").is_training:
            yield _counter(process, "loss", facts.loss_at, facts.loss)


def _standstills(history: History, process: int) -> Iterator[dict[str, Any]]:
    """Yield the standstills of leaders, coordinator and job, side by side if they overlap."""
    found = [one for one in standstills(history) if one.rank is None]
    ends: list[float] = []
    for one in found:
        end = history.seconds if one.end is None else one.end
        row = next((row for row, before in enumerate(ends) if before <= one.begin), len(ends))
        if row == len(ends):
            ends.append(end)
            yield from _thread(process, _JOB_STANDSTILLS + row, "standstills", _JOB_STANDSTILLS + row)
        ends[row] = end
        yield {
            "ph": "X", "pid": process, "tid": _JOB_STANDSTILLS + row, "name": f"{one.who}: {one.verdict}", "cat": "standstill",
            "ts": _micros(one.begin), "dur": _micros(end) - _micros(one.begin),
            "args": {"what": one.where, "outcome": one.outcome},
        }  # fmt: skip


def _micros(seconds: float) -> int:
    return round(1e6 * seconds)


def _named(process: int, name: str, place: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": place}}


def _thread(process: int, thread: int, name: str, place: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": place}}


def _complete(process: int, thread: int, name: str, span: Span, **more: Any) -> dict[str, Any]:
    begin = _micros(span.begin)
    kind = "recovery" if thread == _RECOVERY else span.kind
    return {
        "ph": "X", "pid": process, "tid": thread, "name": name, "cat": kind, "ts": begin, "dur": _micros(span.end) - begin,
        "args": more,
    }  # fmt: skip


def _instant(process: int, name: str, t: float, more: Any) -> dict[str, Any]:
    return {"ph": "i", "pid": process, "tid": _JOB_FAULTS, "name": name, "s": "g", "ts": _micros(t), "args": more}


def _counter(process: int, name: str, t: float, value: float) -> dict[str, Any]:
    return {"ph": "C", "pid": process, "name": name, "ts": _micros(t), "args": {name: value}}
