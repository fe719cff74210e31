"""`megatron-recover run` before and after the job itself, which is made up here."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from megatron_recover import trace
from megatron_recover.cli import command_line, describing, finish, node_checks, run, run_flags
from megatron_recover.cluster.job import Job, create_run_dir
from megatron_recover.cluster.membership import Joined
from megatron_recover.cluster.rank_process import TOLD_TO_ALL
from megatron_recover.cluster.signals import EndRequest
from megatron_recover.config import RecoverConfig
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import Deadlines
from megatron_recover.faults import Fault, FaultKind, FaultPoint
from megatron_recover.host.gpus import has_gpu
from megatron_recover.host.process_stat import signal_name
from megatron_recover.megatron.launch.arguments import recover_flags
from megatron_recover.observe.report.plot import PLOT_FILE
from megatron_recover.observe.summary import load
from tests.observe import traces
from tests.unprivileged import NOBODYS, run_verb


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A process that ends after a run needs no handlers of its own any more; this one does."""
    before = {number: signal.getsignal(number) for number in TOLD_TO_ALL}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """The job that `run` finds on any command line."""
    job = Job(
        argv=("script.py",), num_replicas=2, layout=trace.Layout(tp=1, pp=1), config=RecoverConfig(),
        run_dir=create_run_dir(tmp_path / "run"),
    )  # fmt: skip
    monkeypatch.setattr(describing, "job_of", lambda arguments, command: (job, "", None))
    return job


@pytest.mark.parametrize(
    ("folder", "remedy"),
    [
        ("file", "cannot be used (a file stands where a folder is meant); give another folder"),
        ("file/run", "cannot be used (a file stands where a folder is meant); give another folder"),
        ("used", "is not empty (it has precious); give another folder, as every run needs its own"),
        ("/proc/run", "cannot be used (No such file or directory); give another folder"),
    ],
)
def test_a_folder_that_cannot_take_a_run_is_refused_with_the_remedy(folder: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "precious").touch()
    with pytest.raises(ValueError) as refusal:
        create_run_dir(tmp_path / folder)
    assert str(refusal.value).startswith(f"--run-dir {tmp_path / folder}") and str(refusal.value).endswith(remedy)


@pytest.mark.parametrize("kind", [errno.EACCES, errno.ENOSPC])
def test_a_folder_in_which_nothing_can_be_made_is_refused(kind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    make = Path.mkdir

    def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:  # root may write everywhere, so it is made up
        if self.parent.name == "empty":
            raise OSError(kind, os.strerror(kind))
        make(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(ValueError, match=rf"cannot be used \({os.strerror(kind)}\); give another folder"):
        create_run_dir(tmp_path / "empty")


@pytest.mark.parametrize(
    ("locked", "expected"),
    [
        ("script", "{0}/script.py cannot be read (Permission denied); make it readable, or name another"),
        ("logs", "--log-dir {0}/logs cannot be used (Permission denied); give another folder"),
        ("run", "--run-dir {0}/run/a cannot be used (Permission denied); give another folder"),
        ("data", "--data-path {0}/data/text: {0}/data/text.bin cannot be read (Permission denied); make it readable"),
        ("data/text.idx", "--data-path {0}/data/text: {0}/data/text.idx cannot be read (Permission denied); make it readable"),
    ],
)
def test_what_only_its_owner_may_read_is_refused_before_there_is_a_job(locked: str, expected: str, tmp_path: Path) -> None:
    for folder in ("script", "run", "data", "logs"):
        (tmp_path / folder).mkdir()
    for file in ("script/script.py", "script.py", "data/text.bin", "data/text.idx"):
        (tmp_path / file).touch()
    run_dir, script = tmp_path / "run" / "a", tmp_path / ("script/script.py" if locked == "script" else "script.py")
    flags = "--num-layers 2 --num-attention-heads 2 --micro-batch-size 1 --global-batch-size 2 --train-iters 1"
    flags += " --eval-interval 9"
    data = ["--data-path", str(tmp_path / "data" / "text")] if "data" in locked else ["--mock-data"]
    logs = ["--log-dir", str(tmp_path / "logs")] if locked == "logs" else []
    place = tmp_path / locked
    mode = place.stat().st_mode
    place.chmod(NOBODYS)
    try:
        done = run_verb("run", "--replicas", "2", "--run-dir", str(run_dir), *logs, "--", str(script), *flags.split(), *data)
    finally:
        place.chmod(mode)
    where = script.parent if locked == "script" else tmp_path
    assert (done.returncode, done.stderr) == (ExitCode.BAD_INPUT, f"megatron-recover run: {expected.format(where)}\n")
    assert not run_dir.exists()


def ends(monkeypatch: pytest.MonkeyPatch, exit_code: int, *, is_recorded: bool = True, knows_end: bool = True) -> None:
    """Have the made-up job end so. Its signals are those of a job, from the end of `received` on."""
    request = EndRequest()

    def end() -> int:
        with request.received(lambda number: None):
            pass
        return exit_code

    launcher = SimpleNamespace(
        reason="",
        has_begun=True, untraced=[], run=end, starts_anew=False,
        is_recorded=is_recorded, knows_end=knows_end, is_hurried=lambda: request.is_hurried, release_signals=request.release
    )  # fmt: skip
    monkeypatch.setattr(run, "Launcher", lambda job, **others: launcher)


COMMAND = ["--replicas", "2", "--", "script.py"]


def test_a_refused_run_empties_a_folder_that_was_there_and_leaves_it(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link"
    link.symlink_to(job.run_dir)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (job.run_dir / "of somebody").symlink_to(elsewhere)
    monkeypatch.setattr(describing, "job_of", lambda arguments, command: (msgspec.structs.replace(job, run_dir=link), "", None))
    ends(monkeypatch, ExitCode.BAD_INPUT)
    assert run.main(["--run-dir", str(link), *COMMAND]) == ExitCode.BAD_INPUT
    assert link.is_symlink() and [*link.iterdir()] == [] and (elsewhere / "precious").exists()
    assert capsys.readouterr().err.endswith(f"nothing was trained, so {link} was emptied again\n")


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_does_not_know_the_end_of_the_job_names_the_folder_of_the_whole_run(
    node: int, job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = job.run_dir / "nodes" / "1"
    part.mkdir(parents=True)
    of_node = msgspec.structs.replace(job, node=node, run_dir=part if node else job.run_dir)
    monkeypatch.setattr(describing, "job_of", lambda *_: (of_node, "", None))
    ends(monkeypatch, ExitCode.FAILED, knows_end=False)
    assert run.main(COMMAND) == ExitCode.FAILED
    said = capsys.readouterr().err
    assert "other nodes may train on" in said and f"report {job.run_dir}`" in said


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_signal_behind_a_refused_run_changes_its_exit_code_only_where_the_process_goes_on(
    goes_on: bool, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))  # in place of the end by default
    ends(monkeypatch, ExitCode.BAD_INPUT)
    assert run.main(COMMAND, goes_on=goes_on) == ExitCode.BAD_INPUT
    signal.raise_signal(signal.SIGTERM)
    assert came == [signal.SIGTERM] * goes_on


def test_a_refused_run_removes_its_own_folder(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    ends(monkeypatch, ExitCode.BAD_INPUT)
    assert run.main(COMMAND) == ExitCode.BAD_INPUT
    assert not job.run_dir.exists()


def test_two_runs_that_start_in_one_second_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    assert [create_run_dir(None).name for _ in range(3)] == ["now", "now-2", "now-3"]


def test_a_freeze_that_no_event_of_the_trace_can_end_is_refused() -> None:
    freeze = Fault(replica=0, rank=0, point=FaultPoint.REDUCE, kind=FaultKind.FREEZE, until="reduced")
    describing._refuse_unseen([freeze], "steps")
    with pytest.raises(ValueError, match="--trace-level faults leaves out reduced, .* name another event by until"):
        describing._refuse_unseen([freeze], "faults")


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("full", ["run.json", trace.EVENTS_FILE])
def test_a_folder_that_takes_no_file_is_left_as_it_was(
    full: str, existed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command is not refused when somebody has made room."""

    class Unwritable:
        def __init__(self, job: Job, **_: object) -> None:
            self._folder = job.run_dir

        def run(self) -> int:
            (self._folder / "run.json").touch()
            (self._folder / full).touch()
            raise OSError(errno.ENOSPC, "No space left on device")

        def release_signals(self) -> None:
            pass

    def job_of(arguments: Any, command: Any) -> tuple[Job, str, None]:
        return Job(
            argv=("script.py",), num_replicas=2, layout=trace.Layout(tp=1, pp=1), config=RecoverConfig(),
            run_dir=create_run_dir(arguments.run_dir),
        ), "", None  # fmt: skip

    monkeypatch.setattr(describing, "job_of", job_of)
    monkeypatch.setattr(run, "Launcher", Unwritable)
    folder = tmp_path / "run"
    if existed:
        folder.mkdir()
    words = ["--replicas", "2", "--run-dir", str(folder), "--", "script.py"]
    for _ in range(2):
        assert run.main(words) == ExitCode.FAILED
        assert "Make room there" in capsys.readouterr().err
        assert folder.is_dir() == existed and not (existed and list(folder.iterdir()))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("no memory")])
def test_a_job_that_cannot_be_started_holds_no_folder(
    error: Exception, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of `--save` was made for it, and another job finds nobody there."""

    def fail(*_: object, **__: object) -> None:
        raise error

    save = tmp_path / "save"
    monkeypatch.setattr(describing, "job_of", lambda *_: (msgspec.structs.replace(job, save=save), "", None))
    monkeypatch.setattr(run, "Launcher", fail)
    with contextlib.suppress(RuntimeError):
        run.main(COMMAND)
    assert not save.exists()


def test_a_node_that_starts_no_process_to_be_examined_refuses_the_job_and_tells_the_others(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_process(*_: object) -> list[str]:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    told: list[str] = []
    joined = Joined(*[None] * 5)  # type: ignore[arg-type]
    monkeypatch.setattr(describing, "job_of", lambda *_: (job, "", joined))
    monkeypatch.setattr(node_checks, "refusals", no_process)
    monkeypatch.setattr(run, "refuse", lambda joined, reason, *_: told.append(reason))
    with pytest.raises(SystemExit) as end:
        run.main(COMMAND)
    [reason] = told
    assert reason.startswith("this node cannot be examined (Resource temporarily unavailable); see to")
    assert end.value.code == ExitCode.BAD_INPUT and reason in capsys.readouterr().err and not job.run_dir.exists()


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("-1", "-1 is no number of bytes; write one like 268435456 or 256MiB"),
        ("1TB", "1TB is no number of bytes; write one like 268435456 or 256MiB"),
        ("100", "--trace-file-bytes is 100; it must be 0 (never) or at least 1048576 (1MiB)"),
    ],
)
def test_a_size_of_a_file_that_cannot_be_is_refused(
    text: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").touch()
    with pytest.raises(SystemExit):
        run.main(["--replicas", "2", "--trace-file-bytes", text, "--", str(tmp_path / "script.py")])
    assert remedy in capsys.readouterr().err


def test_a_limit_on_the_size_of_files_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    limit = 2**30
    done = subprocess.run(
        [sys.executable, "-m", "megatron_recover", "run", "--replicas", "2", "--run-dir", "run", "--", "script.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()}, capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == ExitCode.BAD_INPUT and not (tmp_path / "run").exists()
    assert f"files may have {limit} bytes only (`ulimit -f`)" in done.stderr and "`ulimit -f unlimited`" in done.stderr


def test_a_size_may_have_a_unit() -> None:
    assert [run_flags._bytes(text) for text in ("0", "1000", "4KiB", "1GiB", "256 MiB")] == [0, 1000, 4096, 2**30, 2**28]


def test_ranks_are_forked_only_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA works in no fork from a process that has asked the driver anything, as Megatron's imports do."""
    for gpu, expected in ((False, "fork"), (True, "warm")):
        monkeypatch.setattr(describing, "has_gpu", lambda gpu=gpu: gpu)
        assert describing._rank_start("auto") == expected and describing._rank_start("warm") == "warm"
    with pytest.raises(ValueError, match="leave it out"):
        describing._rank_start("fork")


@pytest.mark.parametrize(("names", "expected"), [(("null", "nvidiactl"), False), (("nvidia0",), True), (("kfd",), True)])
def test_a_gpu_is_seen_by_its_file(names: tuple[str, ...], expected: bool, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert has_gpu(tmp_path) == expected


def test_help_lists_the_flags_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--help"])
    text = capsys.readouterr().out
    assert [flag for flag in recover_flags() if flag not in text] == []


def test_nobody_who_has_asked_twice_for_the_end_waits_for_a_plot(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    ends(monkeypatch, 130)
    monkeypatch.setattr(run, "_report", lambda job, launcher: pytest.fail("made a report"))
    assert run.main(COMMAND) == 130


def told(capsys: pytest.CaptureFixture[str], job: Job, *, first: bool = False) -> str:
    """The one line that says why there is no report. `first`: and that the disk has to be seen to first."""
    (line,) = capsys.readouterr().err.splitlines()
    remedy = f"; see to the disk of {job.run_dir} first (if it is full, make room there); then `"
    assert (remedy in line) is first
    line = line.replace(remedy, "; `")
    assert line.endswith(f"; `{command_line('report', str(job.run_dir))}` makes them")
    return line.removeprefix("megatron-recover run: no summary and no plot: ").partition(";")[0]


@pytest.fixture
def stalled(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A run that ended well, on whose trace a reader waits for ever."""
    ends(monkeypatch, ExitCode.OK)
    os.mkfifo(job.run_dir / trace.EVENTS_FILE)
    return job


def test_a_report_of_its_own_process_is_made(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    ends(monkeypatch, ExitCode.TOO_FEW_REPLICAS)
    traces.write(job.run_dir, traces.faulty_run().events)
    assert run.main(COMMAND) == ExitCode.TOO_FEW_REPLICAS
    assert load(job.run_dir).steps == 5 and (job.run_dir / PLOT_FILE).is_file()


def makes_report() -> psutil.Process:
    """The process that makes the report; waits until there is one."""
    deadline = time.monotonic() + 30.0
    while True:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has ended
                if "megatron_recover.cli.finish" in child.cmdline():
                    return child
        assert time.monotonic() < deadline, "no process makes the report"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGRTMIN + 6])
def test_a_report_that_is_killed_changes_nothing(stalled: Job, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As the kernel does where memory runs out: the process is ended while it reads."""
    thread = threading.Thread(target=lambda: makes_report().send_signal(number))
    thread.start()
    assert run.main(COMMAND) == ExitCode.OK
    thread.join(timeout=30.0)
    expected = f"the process that makes them was ended by {signal_name(number)}"
    assert told(capsys, stalled) == expected + (" (perhaps for want of memory)" if number is signal.SIGKILL else "")


def test_a_report_that_hangs_is_ended_and_changes_nothing(
    stalled: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    children = psutil.Process().children()
    deadlines = msgspec.structs.replace(Deadlines.of(), report_s=0.5)
    monkeypatch.setattr(RecoverConfig, "deadlines", deadlines)
    assert run.main(COMMAND) == ExitCode.OK
    assert told(capsys, stalled) == "the process that makes them was ended after 0.5 s"
    assert psutil.Process().children() == children


@pytest.mark.parametrize("number", TOLD_TO_ALL)
def test_a_signal_while_the_report_is_made_ends_only_that(
    stalled: Job, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    children = psutil.Process().children()

    def end() -> None:
        makes_report()
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=end)
    ours = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup, where a run ignores it
    try:
        before = [signal.getsignal(each) for each in TOLD_TO_ALL]
        thread.start()
        assert run.main(COMMAND, goes_on=True) == ExitCode.OK
        assert [signal.getsignal(each) for each in TOLD_TO_ALL] == before
    finally:
        signal.signal(signal.SIGHUP, ours)
    thread.join(timeout=30.0)
    assert told(capsys, stalled) == "interrupted"
    assert psutil.Process().children() == children


def test_a_disk_that_did_not_take_the_trace_is_not_asked_for_a_report(
    stalled: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends(monkeypatch, ExitCode.OK, is_recorded=False)
    monkeypatch.setattr(finish, "failure", lambda *arguments: pytest.fail("a process reads the trace"))
    assert run.main(COMMAND) == ExitCode.OK
    assert told(capsys, stalled, first=True) == "the end of the trace could not be written"


def test_a_disk_without_room_for_a_report_needs_room_first(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends(monkeypatch, ExitCode.OK)
    monkeypatch.setattr(finish, "failure", lambda *arguments: os.strerror(errno.ENOSPC))
    assert run.main(COMMAND) == ExitCode.OK
    assert told(capsys, job, first=True) == "No space left on device"


def test_a_report_that_cannot_be_written_changes_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends(monkeypatch, ExitCode.OK)
    traces.write(job.run_dir, traces.faulty_run().events)
    (job.run_dir / "summary.json").mkdir()
    assert run.main(COMMAND) == ExitCode.OK
    assert told(capsys, job) == "Is a directory"


@pytest.mark.parametrize("text", ["{}\n", None])
def test_a_report_of_no_trace_changes_nothing(
    text: str | None, job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends(monkeypatch, ExitCode.OK)
    if text is not None:
        (job.run_dir / trace.EVENTS_FILE).write_text(text)
    assert run.main(COMMAND) == ExitCode.OK
    assert told(capsys, job).startswith("No such file or directory" if text is None else "the trace cannot be read: ")
