"""The fork server: the one parent of all ranks of a node, which starts, reaps and reports them.

It has ranks from one of two sources:

- *Forks.* The server imports torch and Megatron once and forks every rank. A forked rank is up in
  tens of milliseconds instead of the 5 CPU-seconds of a fresh interpreter, and shares the imported
  pages. CUDA cannot be used after a fork from a process that has asked the driver anything, so
  forks are for machines without a GPU.
- *Warm processes* (`warm`). The server imports nothing. It starts a fresh interpreter for each rank
  in advance, which imports the modules and waits; a request turns it into the rank. Some more are
  always kept ready for newcomers, which would otherwise import when they are formed.

The launcher decides which ranks are started or killed, with two exceptions. When a rank ends, the
server kills the rest of its process group. When the launcher is gone, or the server cannot go on
(descriptors lack, or a warm process ends in its imports before the server is ready), it kills every
rank and warm process. So no process of a rank's group outlives the rank, and no rank outlives the
launcher.

`cluster.agent.Agent` runs it as ``python -P -m megatron_recover.cluster.forkserver FD REAP_S
NUM_WARM NUM_READY SIGNALS MODULE...``. FD is a SOCK_SEQPACKET socket. REAP_S is the wait at the
end, in seconds, for the children to die. NUM_WARM is the number of warm processes to start in
advance; 0: fork. NUM_READY is the number of them to keep ready after that. SIGNALS are numbers of
signals that only the launcher reacts to, separated by commas. A MODULE may also be a function to
call (``module:function``).
"""

from __future__ import annotations

import abc
import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from megatron_recover.cluster.forkserver_messages import (
    MAX_DESCRIPTORS,
    MAX_PACKET_BYTES,
    REQUEST,
    WARM,
    Exited,
    Importing,
    NotStarted,
    Ready,
    Reply,
    Spawn,
    Started,
    read_request,
)
from megatron_recover.cluster.packets import receive
from megatron_recover.cluster.rank_process import become_rank, flush, preload, prepare, set_parent_death_signal
from megatron_recover.cluster.readiness import is_readable
from megatron_recover.config import importing_without_driver, inherited_environment, module_command
from megatron_recover.host.process_stat import cause_of, state_of

_LOOK_S = 1.0
"""Seconds without an event after which the server looks at the warm processes that are no ranks
yet."""
_LONGEST_PAUSE_S = 60.0
"""Longest pause in seconds before a warm process that was lost is replaced."""
_STOPPED = "T"


def _say(text: str) -> None:
    """Print a line, unless that fails.

    When the launcher is gone, the recorder seals all outputs as it ends. A print then fails with
    EPERM.
    """
    with contextlib.suppress(OSError):
        print(f"fork server: {text}", file=sys.stderr, flush=True)


class _Child:
    """A child of the server: a rank, or a warm process that is none yet."""

    def __init__(self, pid: int, control: socket.socket | None = None) -> None:
        """Take over a process. Raises OSError, after the process's end, if it cannot be watched."""
        try:
            self.pid, self.pidfd = pid, os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)  # nobody else reaps it, so the pid is still its own
            os.waitpid(pid, 0)
            raise
        self.control = control
        """Socket of a warm process; None: the child is a rank, or a warm process that ends."""
        self.spawn: Spawn | None = None
        """Request for the rank that the child is; None: it is none yet."""
        self.is_warm = False
        """True once a warm process has reported, before it became a rank, that it has imported
        everything."""


class _Source(abc.ABC):
    """A source of children that become ranks."""

    @abc.abstractmethod
    def take(self, spawn: Spawn, descriptors: Sequence[int]) -> _Child:
        """Return a child that becomes the rank, and whose end the selector watches.

        The caller keeps the descriptors. Raises OSError if no process can be started.
        """


class _Forks(_Source):
    """Ranks that are forked from this process, which has imported the modules."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector

    def take(self, spawn: Spawn, descriptors: Sequence[int]) -> _Child:
        request, output, *handed_down = descriptors
        server = os.getpid()
        flush()  # or the rank would print it too
        pid = os.fork()
        if pid == 0:
            try:
                inherited = [request, *(key.fd for key in self._selector.get_map().values())]
                self._selector.close()
                self._begin(server, inherited)
                become_rank(spawn, output, handed_down)
            finally:  # or it would go on as a second server
                os._exit(1)
        child = _Child(pid)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        return child

    def _begin(self, server: int, inherited: Sequence[int]) -> None:
        """Separate the fresh fork from the server."""
        os.setsid()
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != server:  # the server died before the death signal was set
            os._exit(1)
        for descriptor in inherited:
            os.close(descriptor)
        gc.unfreeze()
        gc.enable()


class Pauses:
    """Decides when a process is started in the place of one that was lost.

    The first is started at once. If another is lost before there was a calm of `_LONGEST_PAUSE_S`,
    there is a pause before the next start, twice as long each time: whatever ends them, such as
    want of memory, may end every one, and each import costs several seconds of a core.
    """

    def __init__(self) -> None:
        self.num_owed = 0
        """Number of processes that are to be started."""
        self.pause_s = 0.0
        """Newest pause in seconds; 0: none was needed."""
        self._from_s = self._calm_from_s = 0.0

    def lost(self, now_s: float) -> None:
        """Note that a process was lost, by a clock that only grows."""
        self.num_owed += 1
        is_calm = now_s >= self._calm_from_s
        self.pause_s = 0.0 if is_calm else min(_LONGEST_PAUSE_S, max(_LOOK_S, 2 * self.pause_s))
        self._from_s = now_s + self.pause_s
        self._calm_from_s = self._from_s + _LONGEST_PAUSE_S

    def due(self, now_s: float) -> int:
        """Return the number of processes to start now; they are owed no longer."""
        if now_s < self._from_s:
            return 0
        number, self.num_owed = self.num_owed, 0
        return number


class _WarmProcesses(_Source):
    """Ranks that are fresh interpreters, started in advance."""

    def __init__(self, selector: selectors.BaseSelector, num_warm: int, modules: Sequence[str], num_ready: int = 0) -> None:
        """Start `num_warm` processes that import `modules`; keep `num_ready` once they are used."""
        self._selector, self._modules, self._num_ready = selector, modules, num_ready
        self._idle: list[_Child] = []
        """Children that are no rank yet, in the order of their start."""
        self._pauses = Pauses()
        for _ in range(num_warm):
            self.start()

    @property
    def has_idle(self) -> bool:
        """Return whether a process is no rank yet, or is to be started."""
        return bool(self._idle) or self._pauses.num_owed > 0

    def importing(self) -> Importing | None:
        """Return how far the processes are; None if all have imported everything."""
        left = [each for each in self._idle if not each.is_warm]
        if not left:
            return None
        total, pid = len(self._idle), left[0].pid
        return Importing(num_done=total - len(left), num_processes=total, pid=pid, state=state_of(pid))

    def wake(self) -> None:
        """Continue each process that is no rank yet and that somebody has stopped (SIGSTOP).

        A stopped process that imports would keep the run from its start. `take` also continues the
        process that it takes.
        """
        for child in self._idle:
            if state_of(child.pid) == _STOPPED:
                _say(f"somebody stopped a warm process (pid {child.pid}): continued it")
                signal.pidfd_send_signal(child.pidfd, signal.SIGCONT)

    def start(self) -> _Child:
        """Start one more process, and watch its end and its socket. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            theirs.set_inheritable(True)
            command = [*module_command("megatron_recover.cluster.warm"), str(theirs.fileno()), str(os.getpid())]
            child = _Child(
                os.posix_spawn(sys.executable, [*command, *self._modules], inherited_environment(), setsid=True), ours
            )
        self._idle.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._selector.register(ours, selectors.EVENT_READ, child)
        return child

    def take(self, spawn: Spawn, descriptors: Sequence[int]) -> _Child:
        """Return a child that becomes the rank.

        Prefer a process that has imported everything, then the oldest one. Without any, start one.
        A process that still imports counts as the rank at once: it reads the request when it is
        done.
        """
        child = self._take(descriptors)
        if len(self._idle) < self._num_ready:
            self.start_if_possible()
        return child

    def start_if_possible(self) -> None:
        """Start one more process, or say why not: a request that finds none tries again."""
        try:
            self.start()
        except OSError as error:
            _say(f"no other warm process could be started ({error.strerror})")

    def replace_lost(self) -> float:
        """Start a process in the place of one that was lost, now or later; return the pause."""
        self._pauses.lost(time.monotonic())
        self.start_owed()
        return self._pauses.pause_s

    def start_owed(self) -> None:
        """Start the processes whose pause is over."""
        for _ in range(self._pauses.due(time.monotonic())):
            self.start_if_possible()

    def _take(self, descriptors: Sequence[int]) -> _Child:
        while True:
            child = next((each for each in self._idle if each.is_warm), None) or next(iter(self._idle), None) or self.start()
            assert child.control is not None
            try:
                socket.send_fds(child.control, [REQUEST], list(descriptors))
                signal.pidfd_send_signal(child.pidfd, signal.SIGCONT)  # it may be stopped, or be about to be
                return child
            except (BrokenPipeError, ConnectionResetError):  # it has just ended, and will be reaped
                continue
            finally:
                self.forget(child)

    def forget(self, child: _Child) -> None:
        """Remove a child that ends or became a rank, and close its socket."""
        assert child.control is not None
        self._idle.remove(child)
        self._selector.unregister(child.control)
        child.control.close()
        child.control = None


class _Server:
    def __init__(
        self, control: socket.socket, reap_s: float, num_warm: int = 0, modules: Sequence[str] = (), *, num_ready: int = 0
    ) -> None:
        """Prepare to serve requests on `control`; start `num_warm` processes that import `modules`.

        - With `num_warm` 0 ranks are forked.
        - `num_ready` processes are kept ready when those are ranks.
        - `reap_s`: seconds to wait at the end for the children to die (`Deadlines.reap_s`).
        """
        self._control, self._reap_s = control, reap_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._warm = _WarmProcesses(self._selector, num_warm, modules, num_ready) if num_warm else None
        self._source: _Source = self._warm or _Forks(self._selector)
        self._is_ready = self._is_over = False
        self._told: Importing | None = None
        """Newest of these messages that was sent."""

    def run(self) -> None:
        """Serve until the launcher closes its end or the server cannot go on; kill every child."""
        if self._warm is None:
            self._say_ready()
        while not self._is_over:
            events = self._selector.select(_LOOK_S if self._warm is not None and self._warm.has_idle else None)
            for key, _ in events:
                if key.fileobj is self._control:
                    self._is_over = self._is_over or not self._serve()
                elif isinstance(key.fileobj, int):
                    self._reap(key.data)
                else:
                    self._hear(key.data)
            if not events:
                self._look()
        self._kill_all()

    def _look(self) -> None:
        """Continue warm processes that are stopped; report how far they are until all are ready."""
        assert self._warm is not None
        self._warm.wake()
        self._warm.start_owed()
        if not self._is_ready and (news := self._warm.importing()) not in (None, self._told):
            self._told = news
            self._send(news, [])

    def _say_ready(self) -> None:
        self._is_ready = True
        self._send(Ready(), [])

    def _serve(self) -> bool:
        """Start the requested rank; return False if the launcher is gone or descriptors lack.

        If no process can be started, report that to the launcher, and go on.
        """
        packet, descriptors = receive(self._control, MAX_PACKET_BYTES, MAX_DESCRIPTORS)
        if not packet:
            return False
        spawn = read_request(descriptors)
        if spawn is None:
            _say("no descriptor is left to start a rank with; raise `ulimit -n`")
            return False
        try:
            child = self._source.take(spawn, descriptors)
        except OSError as error:
            self._send(NotStarted(errno=error.errno or 0), [])
            return True
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        child.spawn = spawn
        self._send(Started(replica=spawn.replica, rank=spawn.rank, pid=child.pid), [child.pidfd])
        return True

    def _hear(self, child: _Child) -> None:
        """Note that a warm process has imported everything, or that it ends.

        Report `Ready` once all have imported everything.
        """
        assert self._warm is not None
        if child.control is None:  # it became a rank, or was reaped, in this very turn
            return
        packet, _ = receive(child.control, MAX_PACKET_BYTES)
        if packet != WARM:
            self._warm.forget(child)
            return
        child.is_warm = True
        if not self._is_ready and self._warm.importing() is None:
            self._say_ready()

    def _reap(self, child: _Child) -> None:
        # The zombie still owns the process group's id, so no other group than the child's is killed
        # here.
        os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):  # the child died before it made its group
            os.killpg(child.pid, signal.SIGKILL)
        _, raw = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        status = os.waitstatus_to_exitcode(raw)
        if child.spawn is not None:
            self._send(Exited(replica=child.spawn.replica, rank=child.spawn.rank, status=status), [])
        else:
            self._lost(child, status)

    def _lost(self, child: _Child, status: int) -> None:
        """Replace a warm process that had imported everything and ended before it became a rank.

        One that ended while it imported is not replaced, since another one may end in the same way.
        The server then ends, unless it is ready: then others have imported the same, and may be
        ranks. `take` starts a process for a request that finds none.
        """
        assert self._warm is not None
        if self._is_over:
            return
        # Its report and its end may come in one turn, in either order.
        if child.control is not None and is_readable(child.control, 0.0):
            self._hear(child)
        if child.control is not None:
            self._warm.forget(child)
        if child.is_warm:
            pause_s = self._warm.replace_lost()
            later = f" in {pause_s:g} s" if pause_s else ""
            _say(f"a warm process ended by {cause_of(status)}; another one takes its place{later}")
            return
        if status < 0 or self._is_ready:  # else its traceback is the last that was printed
            _say(f"a warm process ended by {cause_of(status)} while it imported")
        self._is_over = not self._is_ready

    def _send(self, reply: Reply, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._control, [msgspec.json.encode(reply)], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            # The launcher is gone; the next select finds the end of the stream, which ends this
            # process.
            _say("the launcher is gone")

    def _kill_all(self) -> None:
        """Kill every child and reap those which die within `reap_s`.

        A child in an uninterruptible wait is left to the kernel.
        """
        children = []
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                children.append(key.data)
            else:
                self._selector.unregister(key.fileobj)
        for child in children:
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        num_left, until = len(children), time.monotonic() + self._reap_s
        while num_left and (left_s := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                self._reap(key.data)
                num_left -= 1


def _import(modules: Sequence[str]) -> None:
    """Import the modules for all ranks, which will be forked from this process."""
    with importing_without_driver(hide_devices=True):
        for name in modules:
            preload(name)
    if threading.active_count() != 1:
        _say(f"threads started by imports: {threading.enumerate()}")
    # A garbage collection that covers what was imported writes to, and so copies, the pages that a
    # child shares with the server. A child has none before `_begin` allows it again.
    gc.disable()
    gc.collect()
    gc.freeze()


def main() -> None:
    """Import the modules named on the command line, or have warm processes do so; then serve."""
    descriptor, reap_s, num_warm, num_ready, ignored, *modules = sys.argv[1:]
    prepare(map(int, filter(None, ignored.split(","))))
    # Nobody reads the control socket during the imports, so the kernel watches the launcher.
    set_parent_death_signal(signal.SIGKILL)
    control = socket.socket(fileno=int(descriptor))
    control.set_inheritable(False)  # or a warm process would hold it, and the launcher never see its end
    if not int(num_warm):
        _import(modules)
    # Somebody may have stopped the server. The launcher's death then continues it; it finds the
    # socket closed and kills what is left.
    set_parent_death_signal(signal.SIGCONT)
    _Server(control, float(reap_s), int(num_warm), modules, num_ready=int(num_ready)).run()


if __name__ == "__main__":
    main()
