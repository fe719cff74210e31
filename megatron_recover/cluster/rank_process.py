"""Turns a process into a rank: its output, signals and environment, the script, and its end.

Forked processes and warm ones (`forkserver`) become ranks in the same way.

Note [Stacks]. Python (3.12) writes the stacks of other threads while these run. It follows frames
that change meanwhile, and may end the process by SIGSEGV (python/cpython#116008). So all stacks are
requested only from a replica that is about to be fenced anyway. A rank that may be healthy writes
the stack of one thread. That is the thread that gets the signal, which runs no Python meanwhile.

Note [Waiting for threads]. When all replicas have ended together (`policy.ENDED_TOGETHER`), a rank
waits for threads that are no daemons, and then runs the exit handlers, as Python does. Upstream
deletes old checkpoints in such a thread (`--save-retain-interval`): a rank that did not wait would
leave half of one under its final name. The launcher bounds the wait: it kills what is left `end_s`
after the end of the job. `--shutdown-timeout` takes the place of `end_s` if the code is not 0, and
counts from the signal if there was one. With any other code the process ends at once: after a
failure its threads may wait for ranks that are gone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from typing import NoReturn

from megatron_recover.cluster.forkserver_messages import STDOUT, Spawn
from megatron_recover.config import add_to_environment, describe_descriptors
from megatron_recover.core.policy import ENDED_TOGETHER

STACK_SIGNAL = signal.SIGRTMIN + 8
"""Signal at which a rank writes the stack of the thread that gets it into its log. Whatever that
thread does, nothing else of the rank changes."""
STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Signal at which a rank writes the stacks of all its threads into its log, which may end the rank
(Note [Stacks])."""
TOLD_TO_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that request the end of a job by default. The launcher reacts to them; fork server,
recorder and monitor outlive them. A rank ignores them until it sets handlers: before training for
SIGTERM, and for `--exit-signal` with `--exit-signal-handler`
(`megatron/checkpoint/boundary.py`)."""
_IOLBF = 1
"""Mode of setvbuf(3): print line by line."""


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send this process `number` when its parent dies (0: nothing).

    Linux; prctl(2), PR_SET_PDEATHSIG.
    """
    _prctl(1, number)


def set_process_name(name: str) -> None:
    """Set the name of this process for `ps -o comm` and `pkill -x`.

    The kernel cuts the name to 15 bytes. prctl(2), PR_SET_NAME.
    """
    _prctl(15, name.encode())


def _prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def preload(name: str) -> None:
    """Import a module, or call a function of a module (``module:function``)."""
    module, _, function = name.partition(":")
    imported = importlib.import_module(module)
    if function:
        getattr(imported, function)()


def prepare(ignored: Iterable[int] = ()) -> None:
    """Let printed lines leave this process at once, and ignore `TOLD_TO_ALL` and `ignored`.

    The fork server and each warm process call this function before their imports. Every process
    that they start ignores the same signals, until it sets a handler.
    """
    _print_by_lines()
    # Slurm and systemd request the end of every process of a job. The launcher reacts, and this
    # process does not: ranks need their parent until they have saved. A rank heeds only signals for
    # which it sets a handler later.
    for number in {*TOLD_TO_ALL, *ignored}:
        signal.signal(number, signal.SIG_IGN)


def _print_by_lines() -> None:
    """Have each line that Python or native code prints leave the process at once.

    So the line outlives a SIGKILL. By default both would gather whole blocks, as stdout is no
    terminal. Forked ranks inherit the setting.
    """
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    libc = ctypes.CDLL(None)
    libc.setvbuf(_native_stdout(libc), None, _IOLBF, 0)


def flush() -> None:
    """Print buffered parts of lines that have no end yet, of Python and of native code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):  # a script may have closed it, or put anything in its place
            stream.flush()
    libc = ctypes.CDLL(None)
    libc.fflush(_native_stdout(libc))  # no other stream: if a thread reads from a stream, that stream is locked


def _native_stdout(libc: ctypes.CDLL) -> ctypes.c_void_p:
    return ctypes.c_void_p.in_dll(libc, "stdout")


def become_rank(spawn: Spawn, output: int, handed_down: Sequence[int]) -> NoReturn:
    """Turn this process, a session's leader, into the rank; end it with the script's exit code.

    `output` is the descriptor for stdout and stderr, and `handed_down` are those that
    `spawn.descriptors` names; `STDOUT` among them takes the place of `output` for stdout.
    """
    status = 1
    try:
        set_process_name(f"replica-{spawn.replica}.{spawn.rank}")
        inherited = dict(zip(spawn.descriptors, handed_down, strict=True))
        stdout = inherited.pop(STDOUT, output)
        os.dup2(stdout, 1)
        os.dup2(output, 2)
        for descriptor in {stdout, output}:
            os.close(descriptor)
        # A crash in native code names the line of Python under which it happened. Other threads
        # still run, and writing their stacks could end the process by another signal.
        faulthandler.enable(file=2, all_threads=False)
        faulthandler.register(STACK_SIGNAL, file=2, all_threads=False, chain=False)
        faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True, chain=False)
        for descriptor in inherited.values():  # for this process alone, not for programs that it starts
            os.set_inheritable(descriptor, False)
        add_to_environment(spawn.environment | describe_descriptors(inherited))
        status = _run_script(spawn.argv)
    finally:
        # Skip the interpreter's own exit: destructors of process groups whose peers are dead can
        # block for ever.
        try:
            flush()
        finally:
            os._exit(status)


def _run_script(argv: tuple[str, ...]) -> int:
    """Run the script as `__main__` in this process and return its exit code.

    See Note [Waiting for threads].
    """
    sys.argv = list(argv)
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    status = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, int):
            status = stop.code
        elif stop.code is not None:
            print(stop.code, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    if status in ENDED_TOGETHER:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    return status
