"""The fork server: one process that has imported torch and Megatron once and forks every rank.

A forked rank is up in tens of milliseconds instead of the 5 CPU-seconds of a fresh interpreter, and
shares the imported pages. The server starts ranks, waits for them and reports how they ended. The
launcher decides which ranks are started or killed, with two exceptions. When a rank ends, the
server kills the rest of its process group. When the launcher is gone, it kills every rank. So no
process of a rank's group outlives the rank, and no rank outlives the launcher.

`cluster.agent.Agent` runs it as ``python -m megatron_recover.cluster.forkserver FD REAP_S
MODULE...``. FD is a SOCK_SEQPACKET socket. Each packet of the server is one JSON message; `Started`
has a descriptor attached. A request to the server is the packet `REQUEST`, with the descriptor of a
file in memory that has the request's JSON: a command line may be longer than a packet.

Note [Stacks]. Python (3.12) writes the stacks of other threads while these run. It follows frames
that change meanwhile, and may end the process by SIGSEGV (python/cpython#116008). So all stacks are
requested only from a replica that is about to be fenced anyway. A rank that may be healthy writes
the stack of one thread. That is the thread that gets the signal, which runs no Python meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from typing import NoReturn

import msgspec

from megatron_recover.cluster.packets import receive
from megatron_recover.config import add_to_environment, describe_descriptors
from megatron_recover.host import memory_file

MAX_PACKET_BYTES = 4096
REQUEST = b"request"
MAX_DESCRIPTORS = 16
"""Maximum of descriptors with one packet."""
STACK_SIGNAL = signal.SIGRTMIN + 8
"""Signal at which a rank writes the stack of the thread that gets it into its log. Whatever that
thread does, nothing else of the rank changes."""
STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Signal at which a rank writes the stacks of all its threads into its log, which may end the rank
(Note [Stacks])."""
TOLD_TO_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that request the end of a job. The launcher reacts to them; fork server, recorder and, by
default, ranks ignore them."""
_IOLBF = 1
"""Mode of setvbuf(3): print line by line."""


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """A request to the server to start a rank, in a file (`write_request`).

    The packet has these descriptors, in order: that file's; that of the output into which stdout
    and stderr of the rank go; one for each name in `descriptors`.
    """

    replica: int
    rank: int
    argv: tuple[str, ...]
    """The script and its arguments."""
    environment: dict[str, str]
    """Variables added to the server's own environment."""
    descriptors: tuple[str, ...] = ()
    """Names of the descriptors after the first two, for `config.inherited_descriptor` in the
    rank."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A message from the server: the modules are imported."""

    seconds: float


class Started(msgspec.Struct, frozen=True, tag=True):
    """A message from the server, with the pidfd of a rank that has started.

    The pidfd was opened before the pid could be used again.
    """

    replica: int
    rank: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A message from the server: a rank and all of its process group are dead and reaped."""

    replica: int
    rank: int
    status: int
    """Exit code, or minus the signal."""


Reply = Ready | Started | Exited


def write_request(spawn: Spawn) -> int:
    """Return the descriptor of a new file in memory that has `spawn` as JSON.

    The caller closes it. Raises OSError.
    """
    descriptor = memory_file.create("megatron-recover-request")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(msgspec.json.encode(spawn))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


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


def _print_by_lines() -> None:
    """Have each line that Python or native code prints leave the process at once.

    So the line outlives a SIGKILL. By default both would gather whole blocks, as stdout is no
    terminal. Forked ranks inherit the setting.
    """
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    libc = ctypes.CDLL(None)
    libc.setvbuf(_native_stdout(libc), None, _IOLBF, 0)


def _flush() -> None:
    """Print buffered parts of lines that have no end yet, of Python and of native code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):  # a script may have closed it, or put anything in its place
            stream.flush()
    libc = ctypes.CDLL(None)
    libc.fflush(_native_stdout(libc))  # no other stream: if a thread reads from a stream, that stream is locked


def _say(text: str) -> None:
    """Print a line, unless that fails.

    When the launcher is gone, the recorder seals all outputs as it ends. A print then fails with
    EPERM.
    """
    with contextlib.suppress(OSError):
        print(f"fork server: {text}", file=sys.stderr, flush=True)


def _native_stdout(libc: ctypes.CDLL) -> ctypes.c_void_p:
    return ctypes.c_void_p.in_dll(libc, "stdout")


class _Server:
    def __init__(self, control: socket.socket, reap_s: float) -> None:
        """Serve requests on `control`.

        `reap_s`: seconds to wait at the end for the ranks to die (`Deadlines.reap_s`).
        """
        self._control, self._reap_s = control, reap_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._decode = msgspec.json.Decoder(Spawn).decode

    def run(self) -> None:
        """Serve until the launcher closes its end; then kill every rank."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._reap(key)
                elif not self._serve():
                    self._kill_all()
                    return

    def _serve(self) -> bool:
        packet, descriptors = receive(self._control, MAX_PACKET_BYTES, MAX_DESCRIPTORS)
        if not packet:
            return False
        spawn = self._decode(os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0)) if descriptors else None
        if spawn is None or len(descriptors) != 2 + len(spawn.descriptors):  # the kernel drops what exceeds the limit
            _say("no descriptor is left to start a rank with; raise `ulimit -n`")
            return False
        request, output, *handed_down = descriptors
        server = os.getpid()
        _flush()  # or the rank would print it too
        pid = os.fork()
        if pid == 0:
            inherited = [request, *(key.fd for key in self._selector.get_map().values())]
            self._selector.close()
            _become_rank(spawn, output, handed_down, inherited, server)
        for descriptor in descriptors:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, (spawn.replica, spawn.rank, pid))
        self._send(Started(replica=spawn.replica, rank=spawn.rank, pid=pid), [pidfd])
        return True

    def _reap(self, key: selectors.SelectorKey) -> None:
        replica, rank, pid = key.data
        # The zombie still owns the process group's id, so no other group than the rank's is killed
        # here.
        os.waitid(os.P_PIDFD, key.fd, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):  # the rank died before it made its group
            os.killpg(pid, signal.SIGKILL)
        _, raw = os.waitpid(pid, 0)
        self._selector.unregister(key.fd)
        os.close(key.fd)
        self._send(Exited(replica=replica, rank=rank, status=os.waitstatus_to_exitcode(raw)), [])

    def _send(self, reply: Reply, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._control, [msgspec.json.encode(reply)], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            # The launcher is gone; the next select finds the end of the stream, which ends this
            # process.
            _say("the launcher is gone")

    def _kill_all(self) -> None:
        """Kill every rank and reap those which die within `reap_s`.

        A rank in an uninterruptible wait is left to the kernel.
        """
        self._selector.unregister(self._control)
        ranks = [key for key in self._selector.get_map().values() if key.data is not None]
        for key in ranks:
            signal.pidfd_send_signal(key.fd, signal.SIGKILL)
        num_left, until = len(ranks), time.monotonic() + self._reap_s
        while num_left and (left_s := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                self._reap(key)
                num_left -= 1


def _become_rank(spawn: Spawn, output: int, handed_down: list[int], inherited: list[int], server: int) -> NoReturn:
    """Turn the fresh fork into the rank and end the process with the script's exit code."""
    status = 1
    try:
        os.setsid()
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != server:  # the server died before the death signal was set
            os._exit(1)
        set_process_name(f"replica-{spawn.replica}.{spawn.rank}")
        for descriptor in inherited:
            os.close(descriptor)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        faulthandler.register(STACK_SIGNAL, file=2, all_threads=False, chain=False)
        faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True, chain=False)
        for descriptor in handed_down:  # for this process alone, not for programs that it starts
            os.set_inheritable(descriptor, False)
        named = describe_descriptors(dict(zip(spawn.descriptors, handed_down, strict=True)))
        add_to_environment(spawn.environment | named)
        gc.unfreeze()
        gc.enable()
        status = _run_script(spawn.argv)
    finally:
        # Skip the interpreter's own exit: destructors of process groups whose peers are dead can
        # block for ever.
        try:
            _flush()
        finally:
            os._exit(status)


def _run_script(argv: tuple[str, ...]) -> int:
    """Run the script as `__main__` in this process and return its exit code.

    Threads and exit handlers are waited for only after exit code 0: after an error they may wait
    for ranks that are gone.
    """
    sys.argv = list(argv)
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            if isinstance(stop.code, int):
                return stop.code
            print(stop.code, file=sys.stderr)
            return 1
    except BaseException:
        traceback.print_exc()
        return 1
    # Like the interpreter at a normal end: wait for threads that are no daemons, then run the exit
    # handlers.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return 0


def main() -> None:
    """Import the modules named on the command line, then serve."""
    _print_by_lines()
    # Slurm and systemd request the end of every process of a job. Only the launcher reacts: ranks
    # need their parent until they have saved, and a rank heeds only signals that its training
    # script handles.
    for number in TOLD_TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    # Nobody reads the control socket during the imports, so the kernel watches the launcher.
    set_parent_death_signal(signal.SIGKILL)
    control = socket.socket(fileno=int(sys.argv[1]))
    started = time.monotonic()
    for name in sys.argv[3:]:
        importlib.import_module(name)
    if threading.active_count() != 1:
        _say(f"threads started by imports: {threading.enumerate()}")
    # A garbage collection in a child would write to, and so copy, the pages that the child shares
    # with the server.
    gc.disable()
    gc.collect()
    gc.freeze()
    server = _Server(control, float(sys.argv[2]))
    server._send(Ready(seconds=time.monotonic() - started), [])
    # Somebody may have stopped the server. The launcher's death then continues it; it finds the
    # socket closed and kills what is left.
    set_parent_death_signal(signal.SIGCONT)
    server.run()


if __name__ == "__main__":
    main()
