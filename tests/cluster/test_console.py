"""What a person sees of a run: only what is known, and a request to end is not told as a loss."""

from __future__ import annotations

import ast
import inspect
import io
import os
import textwrap
import threading
from pathlib import Path

import pytest

from megatron_recover import trace
from megatron_recover.cluster import console as console_module
from megatron_recover.cluster.console import Console, Missing
from megatron_recover.cluster.job import create_run_dir, log_file
from megatron_recover.core.values import ExitCode
from megatron_recover.observe.progress import Progress

LINES = [f" iteration {step}/ 3 | lm loss: 1.0" for step in (1, 2, 3)]


def plan(label: str, quotas: tuple[int, ...]) -> trace.Plan:
    return trace.Plan(
        replica=0, generation=1, step=0, label=label, num_microbatches=sum(quotas), roster=(0, 1), quotas=quotas, transfers=(),
        computes=(), reduces=(), decided=(),
    )  # fmt: skip


def shown(tmp_path: Path, *events: trace.Event, exit_code: ExitCode = ExitCode.OK) -> tuple[str, str]:
    """The live line and everything that was printed, after these events."""
    printed = io.StringIO()
    console = Console(create_run_dir(tmp_path / "run"), num_replicas=2, num_ranks=1, stream=printed)
    for event in events:
        console.take(event)
    console.start()
    console.finished(exit_code, "training finished")
    return console.live_line(), printed.getvalue()


def test_at_the_start_nothing_is_claimed(tmp_path: Path) -> None:
    assert shown(tmp_path)[0] == "starting"


def test_a_folder_that_is_gone_is_not_pointed_at(tmp_path: Path) -> None:
    begun = trace.Generation(generation=1, roster=(0, 1), losses=(), reason="start")
    for events, kept in (((), False), ((begun,), True)):
        said = shown(tmp_path / str(kept), *events, exit_code=ExitCode.INTERRUPTED)[1]
        assert ("everything is in" in said) is kept, said


def test_quotas_are_those_of_training(tmp_path: Path) -> None:
    begun = trace.Generation(generation=1, roster=(0, 1), losses=(), reason="start")
    line, _ = shown(tmp_path, begun, plan("train 1", (3, 2)), plan("end 0", (0, 0)))
    assert line == "starting | replicas 2/2 | gen 1 | quotas 3 2"


def test_a_request_to_end_is_not_told_as_a_new_generation(tmp_path: Path) -> None:
    begun = trace.Generation(generation=1, roster=(0, 1), losses=(), reason="start")
    asked = trace.Generation(generation=2, roster=(0, 1), losses=(), reason="exit: SIGINT")
    line, printed = shown(tmp_path, begun, asked)
    assert line == "starting | ending (SIGINT) | replicas 2/2 | gen 2"
    assert "generation 1: replicas 0 1" in printed and "generation 2" not in printed


def test_every_event_that_the_console_shows_is_one_that_it_is_given() -> None:
    """The recorder gives the console the events of `WANTED` only. An event is shown where a `case` names its class."""
    for shows in (Console._event, Progress.take):
        [function] = ast.parse(textwrap.dedent(inspect.getsource(shows))).body
        classes = [each.cls for each in ast.walk(function) if isinstance(each, ast.MatchClass)]
        names = [each.attr for each in classes if isinstance(each, ast.Attribute)]
        assert len(names) > 4, f"no `case` was found in {shows.__qualname__}"
        shown = {getattr(trace, name).__struct_config__.tag for name in names}
        assert shown <= Console.WANTED, f"{shows.__qualname__} would show {sorted(shown - Console.WANTED)} too"


def test_what_the_run_waits_for_is_shown(tmp_path: Path) -> None:
    waits = trace.Waiting(replicas=(1,), reason="replica 1 alone has the state")
    silent = trace.LeaderSilent(member=1, generation=2, phase="began", seconds=4.0, waiting_for=())
    _, printed = shown(tmp_path, waits, silent)
    assert "WARNING: waiting for replicas 1: replica 1 alone has the state" in printed
    assert "the leader of replica 1 has not answered for 4 s" in printed


class Closed(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_the_log_goes_on_when_nobody_looks(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path / "run")
    log_file(run_dir, 0, 0).write_text("\n".join(LINES) + "\n")
    console = Console(run_dir, num_replicas=1, num_ranks=1, stream=Closed())
    console.follow(0, 0)
    console.says("something that nobody reads")
    console.start()
    console.finished(ExitCode.OK, "training finished")
    assert (run_dir / "train.log").read_text().splitlines() == LINES


def test_a_disk_that_stalls_holds_up_neither_what_is_said_nor_the_end(tmp_path: Path) -> None:
    """Opening the log blocks, as it is a FIFO that nobody writes to."""
    run_dir = create_run_dir(tmp_path / "run")
    os.mkfifo(log_file(run_dir, 0, 0))
    printed = io.StringIO()
    console = Console(run_dir, num_replicas=1, num_ranks=1, stream=printed)
    console.follow(0, 0)
    console.start()
    console.says("WARNING: the disk does not answer")
    console.take(trace.Generation(generation=1, roster=(0,), losses=(), reason="start"))
    console.finished(ExitCode.OK, "training finished")
    assert not console._thread.is_alive()
    assert [line.partition(": ")[2] for line in printed.getvalue().splitlines()] == [
        "WARNING: the disk does not answer", "generation 1: replicas 0",
        f"exit code 0 (ok): training finished; everything is in {run_dir}",
    ]  # fmt: skip
    with open(log_file(run_dir, 0, 0), "w"):  # let the thread go
        pass


def test_how_a_run_ended_is_shown_before_the_logs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a log blocks, as it is a FIFO that nobody writes to."""
    monkeypatch.setattr(console_module, "_LAST_WORDS_DEADLINE_S", 2.0)
    run_dir, printed = create_run_dir(tmp_path / "run"), io.StringIO()
    console = Console(run_dir, num_replicas=1, num_ranks=1, stream=printed)
    console.start()
    console.take(trace.Generation(generation=1, roster=(0,), losses=(), reason="start"))
    os.mkfifo(log_file(run_dir, 0, 0))
    missing = console.finished(ExitCode.FAILED, "a rank has failed")
    assert "(failed): a rank has failed; everything is in" in printed.getvalue()
    assert missing is Missing.LOGS
    with open(log_file(run_dir, 0, 0), "w") as file:
        file.write("ValueError: at last\n")
    console._thread.join(10.0)
    assert "ValueError: at last" in printed.getvalue()
    assert console.finished(ExitCode.FAILED, "a rank has failed") is Missing.NOTHING


def test_a_terminal_that_takes_nothing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "_LAST_WORDS_DEADLINE_S", 0.5)
    goes_on = threading.Event()

    class Stopped(io.StringIO):
        def write(self, text: str) -> int:
            assert goes_on.wait(30)
            return len(text)

    console = Console(create_run_dir(tmp_path / "run"), num_replicas=1, num_ranks=1, stream=Stopped())
    console.start()
    assert console.finished(ExitCode.OK, "training finished") is Missing.EVERYTHING
    goes_on.set()
    console._thread.join(10.0)
    assert not console._thread.is_alive()


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    run_dir, printed = create_run_dir(tmp_path / "run"), io.StringIO()
    log_file(run_dir, 0, 0).write_text("x" * 3_000_000 + "\nValueError: it is too large\n")
    console = Console(run_dir, num_replicas=1, num_ranks=1, stream=printed)
    console.start()
    assert console.finished(ExitCode.FAILED, "a rank has failed") is Missing.NOTHING
    assert "ValueError: it is too large" in printed.getvalue() and len(printed.getvalue()) < 70_000


def test_a_console_that_goes_on_for_another_shows_nothing_twice(tmp_path: Path) -> None:
    run_dir, printed = create_run_dir(tmp_path / "run"), io.StringIO()
    log = log_file(run_dir, 1, 0)
    log.write_text(LINES[0] + "\n")
    (run_dir / "train.log").write_text(LINES[0] + "\n")
    console = Console(run_dir, num_replicas=2, num_ranks=1, stream=printed, again=True, roster=(1,))
    console.follow(1, 0)
    with open(log, "a") as file:
        file.write(LINES[1] + "\n")
    console.start()
    console.finished(ExitCode.OK, "training finished")
    assert (run_dir / "train.log").read_text().splitlines() == LINES[:2]
    assert "iteration 2" in printed.getvalue() and "iteration 1" not in printed.getvalue()


def test_while_the_shell_has_the_terminal_nothing_is_written(tmp_path: Path) -> None:
    printed, held = io.StringIO(), threading.Event()
    looked = threading.Semaphore(0)

    def is_held() -> bool:
        looked.release()
        return not held.is_set()

    console = Console(create_run_dir(tmp_path / "run"), num_replicas=1, num_ranks=1, stream=printed, is_held=is_held)
    console.says("something")
    console.start()
    assert looked.acquire(timeout=10) and looked.acquire(timeout=10)
    assert printed.getvalue() == ""
    held.set()
    console.finished(ExitCode.OK, "training finished")
    assert "something" in printed.getvalue()
