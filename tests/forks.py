"""Processes that start with everything imported: forks of one server for each pytest process (`preload.py`).

A fresh interpreter that imports torch and Megatron takes 4 CPU-seconds, and a job of the system tests has four programs that
import (launcher, recorder, fork server, and who makes the summary at the end). Here each of them is a fork of a process that
has imported all of it, and is otherwise what `python -m` makes of it: a process with a session, environment, descriptors and
signal handlers of its own. That the real programs import what they need is what tests find that start them with `subprocess`.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.reduction import DupFd
from typing import Any, NoReturn

from megatron_recover.config import module_command
from megatron_recover.host.gpus import has_gpu

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preload"])  # the only list: Python ignores every one after the start of its server
_MAIN = multiprocessing.current_process()
"""In a fork: the process object of the server, which imports this module."""
_PACKAGES = ("megatron_recover.", "tests.")
_ROOT = str(pathlib.Path(__file__).resolve().parents[1])
if _ROOT not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    # Training scripts of tests import tests, and no job imports from its working directory. A fork has what the server
    # started with, so this is set before that, and for all alike.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
_TORCHRUNS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
"""The module that starts torchrun's ranks; at its import it has taken `Popen` from `subprocess`."""
_READ_AT_START = "PYTHON"
"""What variables begin with that an interpreter reads when it starts, and not later."""
_AT_START = {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_START)}


def _can_fork(environment: Mapping[str, str]) -> bool:
    """Return whether a fork is what a fresh interpreter with this environment would be."""
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)} == _AT_START


def can_be_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a fork is what `command`, an interpreter that runs a module, would be in this environment."""
    # A fork could use no GPU.
    return list(command[:2]) == [sys.executable, "-m"] and not has_gpu() and _can_fork(environment)


def start(
    command: Sequence[str],
    *,
    cwd: pathlib.Path,
    environment: Mapping[str, str],
    output: int | None = None,
    hangup: signal.Handlers = signal.SIG_DFL,
    is_fresh: bool = False,
) -> Program | subprocess.Popen[str]:
    """Start a program at the head of a session; as a fork, if it is a module of Python and finds the same then.

    What it prints goes to the descriptor `output`; None: to a pipe. It finds SIGHUP set to `hangup`. `is_fresh`: start an
    interpreter in any case.
    """
    if not is_fresh and can_be_fork(command, environment):
        return Program(command, cwd=cwd, environment=environment, output=output, hangup=hangup)
    return subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE if output is None else output, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL, start_new_session=True, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),
    )  # fmt: skip


def run(command: Sequence[str], *, cwd: pathlib.Path, deadline_s: float) -> tuple[int, str]:
    """Run a program to its end; return its exit code, and what it printed. After the deadline it is killed."""
    process = start(command, cwd=cwd, environment=os.environ)
    try:
        output, _ = process.communicate(deadline_s)
    except BaseException:
        process.kill()
        raise
    assert process.returncode is not None
    return process.returncode, output


class Program:
    """`python -m MODULE ARGUMENT...` as a fork, with the methods of `subprocess.Popen` that are needed.

    It leads a session, and its stdout and stderr are one: a pipe of text, or what is given.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: pathlib.Path,
        environment: Mapping[str, str],
        output: int | None = None,
        hangup: signal.Handlers = signal.SIG_DFL,
    ) -> None:
        """Start `command`, which begins with `sys.executable -m`. `hangup`: what it finds SIGHUP set to."""
        assert list(command[:2]) == [sys.executable, "-m"], command
        reading, writing = os.pipe()
        try:
            self._pipe: Any = open(reading, errors="replace")  # noqa: SIM115
            handed = _Descriptor(writing if output is None else output)
            arguments = (handed, command[1:], cwd, dict(environment), hangup)
            # Not waited for at the end of pytest, should a test leave it behind.
            self._process = CONTEXT.Process(target=begin, args=arguments, daemon=True)
            self._process.start()
        finally:
            os.close(writing)
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._pipe as file:
            self._output.append(file.read())

    @property
    def returncode(self) -> int | None:
        """Its exit code; negative: the signal that ended it; None: it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it is over."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code once it is over; raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("python -m", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait until nobody can write to the pipe any more and the process is over; raises `subprocess.TimeoutExpired`."""
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise subprocess.TimeoutExpired("python -m", timeout or 0.0)
        self._process.join()
        return self._output[0], None


class _Descriptor:
    """A descriptor that is handed to a process of `CONTEXT`."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detached, (DupFd(self._number),)


def _detached(handed: Any) -> int:
    return handed.detach()


def begin(
    output: int,
    command: Sequence[str],
    cwd: pathlib.Path,
    environment: Mapping[str, str],
    hangup: signal.Handlers = signal.SIG_DFL,
) -> NoReturn:
    """Turn a fork of a process that has imported everything into a program whose own programs are forks as well."""
    os.setsid()
    signal.signal(signal.SIGHUP, hangup)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(cwd)
    # A program is nobody's child in the eyes of `multiprocessing`.
    multiprocessing.process._current_process = _MAIN  # type: ignore[attr-defined]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    subprocess.Popen = _Forked  # type: ignore[misc]
    if (torchruns := sys.modules.get(_TORCHRUNS)) is not None:
        torchruns.Popen = _Forked  # type: ignore[attr-defined]
    _become(command, environment, ())


class _Forked(subprocess.Popen):
    """`subprocess.Popen` that forks for a program of this package, and is itself for every other."""

    def __init__(
        self, args: Any, *, env: Mapping[str, str] | None = None, pass_fds: Collection[int] = (), **others: Any
    ) -> None:
        environment = dict(os.environ if env is None else env)
        command = _words(args)
        if not command or not _can_fork(environment):
            super().__init__(args, env=env, pass_fds=pass_fds, **others)
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the fork would print it too
        # It is called behind the fork, with session and standard streams as they are to be, and does not return.
        super().__init__(args, preexec_fn=lambda: _become(command, environment, pass_fds), pass_fds=pass_fds, **others)


def _words(args: Any) -> Sequence[str]:
    """Return the words behind the interpreter if a fork can be what `args` starts: ours, or torchrun's rank; else none."""
    words = [] if isinstance(args, str) else list(args)
    if words[:3] == module_command("")[:3] and words[3].startswith(_PACKAGES):
        return words[2:]
    if words[:2] == [sys.executable, "-u"] and words[2].startswith("tests/"):
        return words[2:]
    return ()


def _become(command: Sequence[str], environment: Mapping[str, str], kept: Collection[int]) -> NoReturn:
    """Turn this process, a fork, into a program with no other descriptors than `kept`.

    `command` is `-m`, a module, and its arguments, or a script and its arguments.
    """
    status = 1
    try:
        _forget_parent(kept)
        os.environ.clear()
        os.environ.update(environment)
        is_module = command[0] == "-m"
        sys.argv = [*command[is_module:]]
        if not is_module:
            sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        status = _run(sys.argv[0], runpy.run_module if is_module else runpy.run_path)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _forget_parent(kept: Collection[int]) -> None:
    """Close the parent's descriptors, and set signal handlers and standard streams as a new interpreter has them."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) != signal.SIG_IGN:  # native code may have set a handler that Python does not know
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # `subprocess` restores them, and an interpreter ignores them
        signal.signal(number, signal.SIG_IGN)
    begin = 3
    for descriptor in sorted(kept):
        os.closerange(begin, descriptor)
        begin = descriptor + 1
    os.closerange(begin, os.sysconf("SC_OPEN_MAX"))
    # Its descriptor is closed, too; it would close the number once more, which is another's by then.
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]  # that of the server is `forkserver`
    sys.stdin, sys.stdout, sys.stderr = (_stream(number) for number in range(3))


def _stream(number: int) -> io.TextIOWrapper:
    like = (sys.__stdin__, sys.__stdout__, sys.__stderr__)[number]
    assert isinstance(like, io.TextIOWrapper)
    is_direct = number > 0 and like.write_through  # PYTHONUNBUFFERED
    file: Any = open(number, "wb" if number else "rb", buffering=0 if is_direct else -1, closefd=False)  # noqa: SIM115
    is_by_line = number == 2 and not is_direct
    return io.TextIOWrapper(file, like.encoding, like.errors, line_buffering=is_by_line, write_through=is_direct)


def _run(name: str, run: Callable[..., object]) -> int:
    """Run a module or script as `__main__` and end as an interpreter does; return the exit code."""
    status = 0
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
            run(name, run_name="__main__", **({"alter_sys": True} if run is runpy.run_module else {}))
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status


def results_of(
    ranks: Sequence[multiprocessing.process.BaseProcess], folder: pathlib.Path, deadline_s: float
) -> list[pathlib.Path]:
    """Wait for processes that write `result.N` or, with a traceback, `error.N` to a folder; return the files of results.

    Nothing runs afterwards. Raises AssertionError with the tracebacks, or if a process does not end in time.
    """
    deadline = time.monotonic() + deadline_s
    while any(process.exitcode is None for process in ranks) and time.monotonic() < deadline:
        ranks[0].join(0.05)
        if any(process.exitcode for process in ranks):
            break
    late = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
    for process in ranks:
        process.kill()
        process.join()
    errors = [path.read_text() for path in sorted(folder.glob("error.*"))]
    assert not errors and not late, f"ranks {late} did not end\n" + "\n".join(errors)
    return [folder / f"result.{rank}" for rank in range(len(ranks))]
