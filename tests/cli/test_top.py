"""`top`: what it shows of a growing trace, in a pipe and on a terminal, and how it ends."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from megatron_recover import cli, trace
from megatron_recover.cli import top
from megatron_recover.cluster.job import LAUNCHER_LOG, Job, write_description
from megatron_recover.config import RecoverConfig
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.observe.follow import launcher
from megatron_recover.observe.follow.launcher import RUN_FILE
from tests.observe import traces


def growing(place: Path, parts: Sequence[bytes]) -> Callable[[float], None]:
    """A wait during which the next part is appended; there is nothing to wait for after the last."""
    left = list(parts)

    def wait(seconds: float) -> None:
        assert seconds == top.INTERVAL_S and left, "it waits for a run that has ended"
        with open(place, "ab") as file:
            file.write(left.pop(0))

    return wait


def lines_of(run: traces.Run) -> list[bytes]:
    return [msgspec.json.encode(event) + b"\n" for event in run.events]


def test_in_a_pipe_every_step_is_a_line_and_the_end_is_the_last(tmp_path: Path) -> None:
    place, shown = tmp_path / trace.EVENTS_FILE, io.StringIO()
    lines = lines_of(traces.faulty_run())
    # It begins before the trace is there, and sees events that are not whole yet.
    parts = [b"".join(lines[:3]) + lines[3][:20], lines[3][20:], *lines[4:]]
    top.follow(place, shown, growing(place, parts), lambda: 0.0)
    first, *steps, last = shown.getvalue().splitlines()
    assert first == "waiting for the run to start"
    assert [line.split(" | ")[0] for line in steps] == [f"train {number}" for number in range(1, 6)]
    assert last == f"ended with exit code 0 (ok) after {traces.faulty_run().events[-1].t:.0f} s"


def test_how_things_stand_is_shown_after_every_look_and_silence_is_said(tmp_path: Path) -> None:
    lines = lines_of(traces.faulty_run())
    lost = next(i for i, line in enumerate(lines) if b'"losses":[{' in line) + 1
    place = tmp_path / trace.EVENTS_FILE
    place.write_bytes(b"".join(lines[:lost]))
    clock = [0.0]
    parts = [b"", b"", b"".join(lines[lost:])]
    more = growing(place, parts)

    def wait(seconds: float) -> None:
        clock[0] += 20.0
        more(seconds)

    found = [line for kind, line in top.watch(place, wait, lambda: clock[0]) if kind == "now"]
    assert "recovering from the loss of replica 2" in found[0] and "nothing new" not in found[1]
    # In front of what a terminal of 80 columns may cut off.
    assert found[2].split(" | ")[1:3] == ["nothing new for 40 s", "the run may hang, or its launcher was stopped or killed"]
    assert found[3].startswith("train 5 |") and "nothing new" not in found[3]


def test_in_a_pipe_silence_is_said_once_until_there_is_news(tmp_path: Path) -> None:
    lines = lines_of(traces.faulty_run())
    place, shown, clock = tmp_path / trace.EVENTS_FILE, io.StringIO(), [0.0]
    more = growing(place, [b"".join(lines[:-1]), *[b""] * 9, lines[-1]])

    def wait(seconds: float) -> None:
        clock[0] += 10.0
        more(seconds)

    top.follow(place, shown, wait, lambda: clock[0])
    *steps, silence, end = shown.getvalue().splitlines()
    assert "nothing new" not in "".join(steps) and silence.startswith(
        "train 5 | nothing new for 30 s | the run may hang, or its launcher was stopped or killed | loss"
    )
    assert end.startswith("ended with exit code 0")


def test_a_silent_run_is_told_with_how_its_launcher_is(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text("{}")
    assert launcher.about(tmp_path).endswith("the run may hang, or its launcher was stopped or killed")
    process = subprocess.Popen(["sleep", "600"])
    try:
        description = {"launcher": {"host": socket.gethostname(), "pid": process.pid, "began": launcher._stat(process.pid)[1]}}
        (tmp_path / RUN_FILE).write_bytes(msgspec.json.encode(description))
        assert launcher.about(tmp_path).startswith(f"its launcher (process {process.pid}) lives")
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert launcher.about(tmp_path) == f"its launcher is stopped: kill -CONT {process.pid}"
        description["launcher"]["began"] += 1  # the process id is another process's now
        (tmp_path / "again").mkdir()
        (tmp_path / "again" / RUN_FILE).write_bytes(msgspec.json.encode(description))
        assert "has ended: the run is over" in launcher.about(tmp_path / "again")
    finally:
        process.kill()
        process.wait(10)
    assert "has ended: the run is over" in launcher.about(tmp_path)
    description["launcher"]["host"] = "elsewhere"
    (tmp_path / RUN_FILE).write_bytes(msgspec.json.encode(description))
    assert launcher.about(tmp_path).endswith(f"; look at process {process.pid} on elsewhere")


def test_the_launcher_is_named_where_it_describes_its_run(tmp_path: Path) -> None:
    job = Job(argv=("script.py",), num_replicas=2, layout=trace.Layout(tp=1, pp=1), config=RecoverConfig(), run_dir=tmp_path)
    write_description(job)
    assert launcher.about(tmp_path).startswith(f"its launcher (process {os.getpid()}) lives")


def test_a_trace_that_is_removed_ends_it(tmp_path: Path) -> None:
    place = tmp_path / trace.EVENTS_FILE
    place.write_bytes(b"".join(lines_of(traces.quiet_run())[:5]))
    with pytest.raises(top.Gone):
        list(top.watch(place, lambda seconds: place.unlink(), lambda: 0.0))


def test_on_a_terminal_one_line_is_rewritten_and_ctrl_c_leaves_it_whole(tmp_path: Path) -> None:
    run_dir = traces.write(tmp_path / "run", traces.faulty_run().events[:-1])
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "megatron_recover", "top", str(run_dir)]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "60"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test in the background ignores it
    )  # fmt: skip
    os.close(theirs)
    shown, until = b"", time.monotonic() + 60
    try:
        while b"train 5" not in shown and select.select([ours], [], [], max(0.0, until - time.monotonic()))[0]:
            shown += os.read(ours, 1000)
        assert b"train 5" in shown
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == ExitCode.OK
    finally:
        process.kill()
    while chunk := _read(ours):
        shown += chunk
    os.close(ours)
    assert b"Traceback" not in shown and b"train 4" not in shown, "it shows how things stand, not each step"
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1, "the cursor is hidden and shown again"


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1000)
    except OSError:  # the other side is closed
        return b""


def test_a_folder_without_a_run_is_refused_and_one_that_may_get_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    for run_dir in (tmp_path / "nowhere", tmp_path / "other"):
        with pytest.raises(SystemExit) as end:
            cli.main(["top", str(run_dir)])
        assert end.value.code == ExitCode.BAD_INPUT
        expected = f"megatron-recover top: no trace at {run_dir / trace.EVENTS_FILE}; give the --run-dir of a run\n"
        assert capsys.readouterr().err == expected
    traces.write(tmp_path / "demo" / "faulty", traces.quiet_run().events)
    with pytest.raises(SystemExit):
        cli.main(["top", str(tmp_path / "demo")])
    assert f"did you mean {tmp_path / 'demo' / 'faulty'}?" in capsys.readouterr().err
    for started in ("", "logs"):
        (tmp_path / "new" / started).mkdir(parents=True, exist_ok=True)
        assert top._may_start(tmp_path / "new")


def test_a_damaged_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / trace.EVENTS_FILE).write_text("no event\n")
    with pytest.raises(SystemExit) as end:
        cli.main(["top", str(tmp_path)])
    assert end.value.code == ExitCode.BAD_INPUT
    assert "cannot read the trace" in capsys.readouterr().err


def test_a_run_that_comes_to_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = traces.write(tmp_path / "run", traces.quiet_run().events[:5])
    monkeypatch.setattr("time.sleep", lambda seconds: (run_dir / trace.EVENTS_FILE).unlink())
    with pytest.raises(SystemExit) as end:
        cli.main(["top", str(run_dir)])
    assert end.value.code == ExitCode.BAD_INPUT
    said = capsys.readouterr().err
    assert "has gone: the run was refused, or ended before it trained" in said
    assert said.endswith("; read what its `megatron-recover run` printed\n")


@pytest.mark.parametrize(("exit_code", "has_log"), [(0, True), (13, True), (13, False)])
def test_the_end_of_a_run_that_failed_is_shown_with_the_command_that_says_what_to_do_next(
    exit_code: int, has_log: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *events, last = traces.quiet_run().events
    assert isinstance(last, trace.RunFinished)
    run_dir = traces.write(tmp_path / "a run", [*events, msgspec.structs.replace(last, exit_code=exit_code)])
    if has_log:
        (run_dir / LAUNCHER_LOG).touch()
    assert cli.main(["top", str(run_dir)]) == ExitCode.OK
    end = capsys.readouterr().out.splitlines()[-1]
    expected = f"; `tail -n 3 '{run_dir / LAUNCHER_LOG}'` shows why, and what to do next" if exit_code and has_log else ""
    assert end == f"ended with exit code {exit_code} ({ExitCode.words(exit_code)}) after {last.t:.0f} s{expected}"


def test_a_run_that_has_a_folder_and_no_trace_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.sleep", growing(tmp_path / trace.EVENTS_FILE, [b"".join(lines_of(traces.quiet_run(1)))]))
    assert cli.main(["top", str(tmp_path)]) == ExitCode.OK
    first, step, last = capsys.readouterr().out.splitlines()
    assert (first, step.split(" | ")[0], last.split(" after")[0]) == (
        "waiting for the run to start", "train 1", "ended with exit code 0 (ok)",
    )  # fmt: skip
