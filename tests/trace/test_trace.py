"""The event log: events survive the way to disk and back; killed writers, and only they, leave lines that are forgiven."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import typing
from pathlib import Path

import msgspec
import pytest

from megatron_recover import trace
from tests.observe import traces

DONE = trace.MicrobatchFinished(replica=1, rank=0, generation=1, step=3, microbatch=5, seconds=0.25, into=(0, 2))


def _log(path: Path) -> trace.EventLog:
    return trace.EventLog(path, time.monotonic())


COMMON = {"v", "t", "h", "replica", "rank", "generation", "step"}


def test_the_documented_events_are_those_that_there_are() -> None:
    """docs/reference/trace.md's table: every event, who writes it (its docstring's first word), and all its fields."""
    text = (Path(trace.__file__).parents[2] / "docs" / "reference" / "trace.md").read_text()
    table = text.partition("## Events")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines() if row.startswith("| `")]
    documented = {
        event.strip("`"): (writer.split(",")[0], set(re.findall(r"`(\w+)`", fields))) for event, writer, fields in rows
    }
    actual = {}
    for kind in typing.get_args(trace.AnyEvent):
        writer = re.split("[:,]", kind.__doc__)[0].lower()
        actual[kind.__struct_config__.tag] = (writer, set(kind.__struct_fields__) - COMMON)
    assert documented == actual


def test_every_event_that_a_log_can_have_is_named_by_the_package() -> None:
    kinds = {one for one in vars(trace).values() if isinstance(one, type) and issubclass(one, trace.Event)} - {trace.Event}
    assert kinds == set(typing.get_args(trace.AnyEvent))


def test_events_read_back_as_they_were_recorded(tmp_path: Path) -> None:
    events = traces.faulty_run().events
    with _log(tmp_path / "events.jsonl") as log:
        assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600, "it is for nobody else"
        for event in events:
            log.record(event)
    read = list(trace.read(tmp_path / "events.jsonl"))
    assert [line for line, _ in read] == list(range(1, len(events) + 1))
    assert [type(event) for _, event in read] == [type(event) for event in events]
    assert [event.t for _, event in read] == sorted(event.t for _, event in read)
    line = (tmp_path / "events.jsonl").read_text().splitlines()[0]
    assert line.startswith('{"event":"run_started","v":2,"t":')


def test_the_name_of_an_event_is_read_without_decoding_its_line() -> None:
    for event in traces.faulty_run().events:
        assert trace.name_in(msgspec.json.encode(event) + b"\n") == trace.name_of(event)  # type: ignore[arg-type]
    for line in (b"", b'{"event":"vo', b"\xff" * 20 + b"\n", b'{"event":"\xff","v":2}\n'):
        assert trace.name_in(line) not in trace.NAMES


@pytest.mark.parametrize(
    "line", ['{"event":"run_finished","v":1,"t":0.5,"exit_code":0}', '{"event":"news","v":3,"t":0.5,"x":1}']
)
def test_a_trace_of_another_version_is_refused_as_that(line: str, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(line + "\n")
    with pytest.raises(trace.TraceError, match=r"events.jsonl:1: written by another version of megatron-recover \(run.json"):
        list(trace.read(tmp_path / "events.jsonl"))


def test_lines_of_threads_and_processes_never_mix(tmp_path: Path) -> None:
    path, count, writers = tmp_path / "events.jsonl", 400, 4
    log = _log(path)
    children = []
    for replica in range(writers):
        if (pid := os.fork()) == 0:
            event = trace.ReductionFailed(replica=replica, rank=0, generation=1, step=0, reason="x" * 300)
            for _ in range(count):
                log.record(event)
            os._exit(0)
        children.append(pid)
    threads = [threading.Thread(target=lambda: [log.record(DONE) for _ in range(count)]) for _ in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * writers
    assert sum(1 for _ in trace.read(path)) == 2 * count * writers


@pytest.mark.parametrize("length", [1, 5, 40, 100])
def test_a_cut_last_line_is_no_event_and_is_told(tmp_path: Path, length: int) -> None:
    path = tmp_path / "events.jsonl"
    with _log(path) as log:
        log.record(DONE)
        log.record(DONE)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[: first + length])
    cuts: list[tuple[int, str]] = []
    assert len(list(trace.read(path, lambda *cut: cuts.append(cut)))) == 1
    assert cuts == [(2, whole[first : first + length].decode())]


def test_a_fragment_before_the_event_of_another_process_is_no_event_and_is_told(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with _log(path) as log:
        log.record(DONE)
    path.write_bytes(b'{"event":"microba' + path.read_bytes())
    cuts: list[tuple[int, str]] = []
    read = list(trace.read(path, lambda *cut: cuts.append(cut)))
    assert [line for line, _ in read] == [1]
    assert cuts == [(1, '{"event":"microba')]


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"step":3', '"step":"3"', "$.step"),
        ('"step":3,', "", "step"),
        ('"step":3', '"step":3,"colour":1', "colour"),
        ('"v":2', '"v":1', "another version"),
        ("microbatch_finished", "microbatch_eaten", "microbatch_eaten"),
        ('"into":[0,2]}', '"into":[0,2]', "malformed|truncated|end of"),
        ('{"event"', 'noise{"event"', "noise"),
    ],
)
def test_every_other_bad_line_is_refused_with_line_and_field(tmp_path: Path, old: str, new: str, named: str) -> None:
    path = tmp_path / "events.jsonl"
    with _log(path) as log:
        log.record(trace.RunFinished(exit_code=0))
        log.record(DONE)
    text = path.read_text()
    assert old in text
    path.write_text(new.join(text.rsplit(old, 1)))
    with pytest.raises(trace.TraceError, match=f"events.jsonl:2: .*({named.replace('$', '[$]')})"):
        list(trace.read(path))


def test_a_layout_of_no_ranks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with _log(path) as log:
        log.record(trace.RunStarted(replicas=1, layout=trace.Layout(tp=1, pp=1), determinism="fast", seed=1, argv=()))
    path.write_text(path.read_text().replace('"tp":1', '"tp":0'))
    with pytest.raises(trace.TraceError, match=r"events.jsonl:1: .*>= 1.*\$\.layout\.tp"):
        list(trace.read(path))


def test_a_recorded_event_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    if (pid := os.fork()) == 0:
        _log(path).record(DONE)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert len(list(trace.read(path))) == 1


def test_a_full_disk_is_an_error_not_a_hole(tmp_path: Path) -> None:
    with _log(Path("/dev/full")) as log, pytest.raises(OSError, match="No space left"):
        log.record(DONE)


def test_recording_is_cheap(tmp_path: Path) -> None:
    """Under 15 us of CPU an event, against 10 events per microbatch and rank: invisible beside any real backward."""
    count = 5000
    with _log(tmp_path / "events.jsonl") as log:
        assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600, "it is for nobody else"
        begin = time.thread_time()
        for _ in range(count):
            log.record(DONE)
        microseconds = (time.thread_time() - begin) / count * 1e6
    print(f"{microseconds:.1f} us an event")
    assert microseconds < 15


def test_the_trace_needs_no_torch() -> None:
    code = "import sys, megatron_recover.trace; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
