"""The agent of a node: starts ranks, sees at once when one ends, and kills replicas (fence).

The agent decides nothing. The coordinator decides what an end means and which replica is fenced.

Note [Seeing a death]. The kernel frees a dead process's memory before it closes the process's
sockets and notifies the parent. That takes up to 0.1 s per GB. The kernel sets the flag PF_EXITING
in /proc/PID/stat before all of this, so `poll` looks at that flag. The pidfd and the fork server's
report then confirm that nothing of the process can run any more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from megatron_recover.cluster import forkserver_messages as messages
from megatron_recover.cluster.node import NodeLost, ProcessEnd, Undying
from megatron_recover.cluster.output import Output
from megatron_recover.cluster.packets import receive
from megatron_recover.cluster.rank_process import STACK_SIGNAL, STACKS_SIGNAL
from megatron_recover.cluster.readiness import is_readable
from megatron_recover.core.detector import Progress
from megatron_recover.deadlines import Deadlines, figure
from megatron_recover.host.process_stat import fields_of
from megatron_recover.progress_page import DESCRIPTOR, PageReader

_PF_EXITING = 0x4
_STATE_FIELD, _FLAGS_FIELD, _EXIT_CODE_FIELD = 3, 9, 52
"""Fields of /proc/PID/stat, counted from 1 (proc(5))."""
_STOPPED = b"T"
_TRACED = "t"
_ALIVE = ("R", "S", "D", "I")
_CANNOT_WRITE = ("T", _TRACED, "D", "Z", "")
"""State letters in which a process runs no handler of a signal."""
_PIDFD_SIGNAL_THREAD, _PIDFD_SIGNAL_PROCESS_GROUP = 1, 4
"""Flags of pidfd_send_signal(2). The first sends to the first thread alone. The second sends to the
process group that the process leads (Linux 6.9)."""
_LOOK_S = 1.0
"""Seconds between two looks at a fork server while the agent waits for its reply."""


_NO_DESCRIPTOR = "the launcher has no descriptor left to watch a rank with; raise `ulimit -n`"


@contextlib.contextmanager
def descriptors_needed() -> Iterator[None]:
    """Raise `NodeLost` with the remedy if this process has no descriptors left."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise NodeLost(_NO_DESCRIPTOR) from error


class _Stat:
    """`/proc/PID/stat` of one process.

    The file stays open, so it never describes another process that got the same pid.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # reaped already
            self._file = -1

    def read(self) -> list[bytes]:
        """Return the fields at their numbers (the command left empty).

        The list is empty after the process is reaped; the fork server then reports the exit status.
        """
        try:
            text = os.pread(self._file, 4096, 0) if self._file >= 0 else b""
        except ProcessLookupError:
            text = b""
        return fields_of(text)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)


class _Process:
    def __init__(self, replica: int, rank: int, pid: int, pidfd: int) -> None:
        self.replica, self.rank, self.pid, self.pidfd = replica, rank, pid, pidfd
        self.stat = _Stat(pid)
        self.fields: list[bytes] = []
        """Fields of /proc/PID/stat at the newest look."""
        self.reported = False
        """True if `poll` has returned the end of the process."""
        self.confirmed = False
        """True if the fork server has reaped the process and killed what was left of its group."""
        self.killed_at: float | None = None
        """`time.monotonic()` of the first SIGKILL to the process; None: none was sent."""
        self.traced = False
        """True if a tracer held the process at the last look at its state."""
        self.blocking: frozenset[str] = frozenset()
        """Ids of the threads that had blocked the signal for stacks before that signal was sent."""

    def has_handled(self, number: int) -> bool:
        """Return whether a signal sent to the process is neither pending nor being handled.

        While a thread runs the handler, it blocks that signal.
        """
        pending = _mask_of(Path(f"/proc/{self.pid}/status"), b"ShdPnd:") >> (number - 1) & 1
        return not pending and not _threads_blocking(self.pid, number) - self.blocking

    def ask_for_stack(self) -> None:
        """Have the training thread, the first thread of the process, write its stack."""
        with contextlib.suppress(ProcessLookupError):
            try:
                signal.pidfd_send_signal(self.pidfd, STACK_SIGNAL, None, _PIDFD_SIGNAL_THREAD)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # An older kernel also prefers the first thread, but another thread may be faster.
                # That other thread then writes its own stack.
                signal.pidfd_send_signal(self.pidfd, STACK_SIGNAL)

    def dying_status(self) -> int | None:
        """Return exit code or minus the signal, once the kernel ends the process; else None."""
        fields = self.fields = self.stat.read()
        if not fields or not int(fields[_FLAGS_FIELD]) & _PF_EXITING:
            return None
        return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE_FIELD]))

    def undying(self) -> Undying:
        """Return a description of the process, for the case that it does not die."""
        fields, wchan = self.stat.read(), ""
        with contextlib.suppress(OSError):
            wchan = Path(f"/proc/{self.pid}/wchan").read_text().strip("0\n")  # 0: unreadable, or none
        return Undying(self.replica, self.rank, self.pid, fields[_STATE_FIELD].decode() if fields else "", wchan)

    def kill(self) -> None:
        """Kill the rank and every process of its group (such as data loaders' workers) at once.

        The pidfd names the group that this process leads, so no other group can be hit, even if its
        number was used again. Kernels before 6.9 cannot do that. There the fork server kills the
        group when it reaps the rank.
        """
        if self.killed_at is None:
            self.killed_at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):  # reaped, and the report of its end is on the way
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL, None, _PIDFD_SIGNAL_PROCESS_GROUP)

    def close(self) -> None:
        self.stat.close()
        os.close(self.pidfd)


class Agent:
    """The owner of one fork server and of the ranks that it started. One thread uses it."""

    def __init__(
        self,
        *,
        preload: tuple[str, ...],
        environment: dict[str, str],
        output: Output,
        deadlines: Deadlines | None = None,
        num_warm: int = 0,
    ) -> None:
        """Start the fork server with the variables of `environment` and no others.

        The server imports the modules `preload` and forks ranks; see `is_ready`. With `num_warm`,
        that many warm processes import the modules instead, and each becomes a rank (`warm`).
        """
        self._deadlines = deadlines or Deadlines.of()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [
            sys.executable,
            "-m",
            "megatron_recover.cluster.forkserver",
            str(theirs.fileno()),
            str(self._deadlines.reap_s),
            str(num_warm),
            *preload,
        ]
        with theirs:
            self._server = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output.descriptor, stderr=output.descriptor,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        self._forks = not num_warm
        self._server_stat = _Stat(self._server.pid)
        self._output = output
        self._pending: deque[messages.Reply] = deque()
        self._processes: dict[tuple[int, int], _Process] = {}
        self._pages: dict[tuple[int, int], PageReader] = {}
        self._decode = msgspec.json.Decoder(messages.Reply).decode

    def is_ready(self) -> bool:
        """Return whether the modules are imported.

        Raises `NodeLost`, with the log's last line, if an import fails.
        """
        return isinstance(self._receive(), messages.Ready)

    def spawn(
        self,
        replica: int,
        rank: int,
        *,
        argv: tuple[str, ...],
        environment: dict[str, str],
        output: Output,
        descriptors: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Start a rank that runs the script `argv` and prints into `output`.

        Returns when the rank has started. `descriptors` maps names to open descriptors of this
        process. The rank gets a copy of each (`config.inherited_descriptor`). The caller keeps its
        own descriptors, and that of `output`.
        """
        with descriptors_needed():
            page = self._pages[replica, rank] = PageReader(f"progress-{replica}.{rank}")
        handed_down = {**descriptors, DESCRIPTOR: page.descriptor}
        spawn = messages.Spawn(replica=replica, rank=rank, argv=argv, environment=environment, descriptors=tuple(handed_down))
        try:
            self._request(spawn, [output.descriptor, *handed_down.values()])
        finally:
            page.release()
        until = time.monotonic() + self._deadlines.fork_s
        while not isinstance(reply := self._receive(deadline_s=_LOOK_S), messages.Started):
            if reply is None and (self.wake_server() or time.monotonic() < until):
                continue
            if reply is None:
                raise NodeLost(
                    f"the fork server did not start a rank within {figure(self._deadlines.fork_s)} s; see {self._output.log}"
                )
            self._pending.append(reply)

    def _request(self, spawn: messages.Spawn, descriptors: Sequence[int]) -> None:
        with descriptors_needed():
            request = messages.write_request(spawn)
        try:
            socket.send_fds(self._control, [messages.REQUEST], [request, *descriptors])
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server is gone: `_receive` raises
        finally:
            os.close(request)

    def page(self, replica: int, rank: int) -> Progress | None:
        """Return the content of a rank's progress page, also after the rank's end.

        None if the page is torn or was never written.
        """
        return self._pages[replica, rank].read()

    def wake_server(self) -> bool:
        """Continue the fork server if somebody has stopped it (SIGSTOP).

        Returns whether it was stopped. Meanwhile no rank can be started, reaped or fenced, so the
        run would hang at the next of these.
        """
        fields = self._server_stat.read()
        is_stopped = bool(fields) and fields[_STATE_FIELD] == _STOPPED
        if is_stopped:
            self._server.send_signal(signal.SIGCONT)
        return is_stopped

    def fileno(self) -> int:
        """Return a descriptor that is readable while something of the fork server is unread.

        `poll` may see a dying process earlier, and also returns ends that `spawn` has read already.
        """
        return self._control.fileno()

    def poll(self) -> list[ProcessEnd]:
        """Return the ranks whose end is certain and was not reported before.

        A rank that ends with exit code 0 is reported when its end is confirmed; any other rank at
        the first sign.
        """
        ends = []
        while (reply := self._receive()) is not None:
            self._pending.append(reply)
        while self._pending:
            reply = self._pending.popleft()
            if isinstance(reply, messages.Exited):
                process = self._processes[reply.replica, reply.rank]
                process.confirmed = True
                if not process.reported:
                    process.reported = True
                    ends.append(ProcessEnd(process.replica, process.rank, reply.status))
        for process in self._processes.values():
            if not process.reported and (status := process.dying_status()):
                process.reported = True
                ends.append(ProcessEnd(process.replica, process.rank, status))
        return ends

    def fence(self, replica: int) -> None:
        """Kill every rank of a replica that is not known to be dead, with its process group.

        `is_fenced` reports when all of them are dead.
        """
        for process in self._processes.values():
            if process.replica == replica and not process.confirmed:
                process.kill()

    def pid(self, replica: int, rank: int) -> int:
        """Return the process id of a rank that was started; the process may have ended."""
        return self._processes[replica, rank].pid

    def state(self, replica: int, rank: int, *, at_the_poll: bool = False) -> str:
        """Return the state letter of a rank's process in /proc/PID/stat; empty after it is reaped.

        `at_the_poll`: return what the newest `poll` read, without another read. A process that was
        seen in state `t` is reported as `t` until its tracer is gone. The reason is strace, which
        lets the process run between its system calls, where the tracer also delays it.
        """
        process = self._processes[replica, rank]
        if process.reported or not (at_the_poll and process.fields):
            process.fields = process.stat.read()
        fields = process.fields
        state = fields[_STATE_FIELD].decode() if fields else ""
        process.traced = state == _TRACED or (process.traced and bool(_tracer_pid(process.pid)))
        return _TRACED if process.traced and state in _ALIVE else state

    def tracer(self, replica: int, rank: int) -> str:
        """Return name and pid of a rank's tracer, such as `gdb (pid 12)`; empty if none."""
        pid = _tracer_pid(self._processes[replica, rank].pid)
        if not pid:
            return ""
        try:
            return f"{Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()} (pid {pid})"
        except OSError:  # the tracer belongs to another user, or is gone
            return f"pid {pid}"

    def ask_for_stacks(self, replica: int, *, of_all_threads: bool) -> None:
        """Have each rank of a replica write a stack into its log, or the stacks of all its threads.

        Without `of_all_threads` it is the training thread's stack. Request all threads only of a
        replica that is about to be fenced (`rank_process`, Note [Stacks]); `have_written_stacks`
        reports when these are written. A rank that a tracer holds is left out: the signal would go
        to the tracer, and stop a debugger.
        """
        for process in self._living(replica):
            if self.state(process.replica, process.rank) == _TRACED:
                continue
            if of_all_threads:
                process.blocking = _threads_blocking(process.pid, STACKS_SIGNAL)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process.pidfd, STACKS_SIGNAL)
            else:
                process.ask_for_stack()

    def have_written_stacks(self, replica: int) -> bool:
        """Return whether every rank that can write has written the requested stacks of all threads.

        A rank in state T, t or D cannot write, and is left out. This reads only /proc.
        """
        return all(
            self.state(process.replica, process.rank) in _CANNOT_WRITE or process.has_handled(STACKS_SIGNAL)
            for process in self._living(replica)
        )

    def _living(self, replica: int) -> list[_Process]:
        return [each for each in self._processes.values() if each.replica == replica and not each.reported]

    def is_stopped(self, replica: int, rank: int) -> bool:
        """Return whether a rank is stopped (SIGSTOP)."""
        return self.state(replica, rank) == _STOPPED.decode()

    def thaw(self, replica: int, rank: int) -> None:
        """Continue a rank that is stopped."""
        with contextlib.suppress(ProcessLookupError):  # reaped meanwhile
            signal.pidfd_send_signal(self._processes[replica, rank].pidfd, signal.SIGCONT)

    def is_fenced(self, replica: int, but: Container[tuple[int, int]] = ()) -> bool:
        """Return whether all ranks of a replica are dead, except ranks (replica, rank) in `but`.

        What else was in their process groups has got SIGKILL.
        """
        ranks = [each for each in self._processes.values() if each.replica == replica]
        return all(each.confirmed or (each.replica, each.rank) in but for each in ranks)

    def has_ended(self, replica: int, rank: int) -> bool:
        """Return whether the process of a rank is confirmed dead."""
        return self._processes[replica, rank].confirmed

    def undying(self) -> list[Undying]:
        """Return the killed ranks that do not end."""
        now, found = time.monotonic(), []
        for process in self._processes.values():
            if process.confirmed or process.killed_at is None or now - process.killed_at < self._deadlines.sigkill_s:
                continue
            if process.dying_status() is None or now - process.killed_at >= self._deadlines.end_s:
                found.append(process.undying())
        return found

    def num_living(self) -> int:
        """Return the number of ranks that are not confirmed dead."""
        return sum(not each.confirmed for each in self._processes.values())

    def close(self) -> list[Undying]:
        """Kill every rank and end the fork server; return the processes that are still there then.

        Three waits take at most `Deadlines.close_s` each: for the server, for it again after
        SIGKILL, and for all ranks together. A rank that `undying` lists is not waited for.
        """
        for replica in {each.replica for each in self._processes.values()}:
            self.fence(replica)
        given_up = {(each.replica, each.rank) for each in self.undying()}
        self.wake_server()
        self._control.close()  # the server kills and reaps what is left, then ends
        if self._forks and not self._processes:
            self._server.kill()  # no child is left to reap, and the server may import for a long time
        left = []
        try:
            self._server.wait(timeout=self._deadlines.close_s)
        except subprocess.TimeoutExpired:
            self._server.kill()  # its ranks get SIGKILL from the kernel
            try:
                self._server.wait(timeout=self._deadlines.close_s)
            except subprocess.TimeoutExpired:
                fields = self._server_stat.read()
                left.append(Undying(-1, -1, self._server.pid, fields[_STATE_FIELD].decode() if fields else "", ""))
        until = time.monotonic() + self._deadlines.close_s
        for key, process in self._processes.items():
            if not _ended(process.pidfd, 0.0 if key in given_up else until):
                left.append(process.undying())
            process.close()
        self._processes.clear()
        for page in self._pages.values():
            page.close()
        self._pages.clear()
        self._server_stat.close()
        return left

    def _receive(self, *, deadline_s: float = 0.0) -> messages.Reply | None:
        """Return the next reply, or None if none comes within `deadline_s` seconds.

        A rank that the reply names as started is registered here. Raises `NodeLost`.
        """
        # `receive` would block without a packet.
        if not is_readable(self._control, deadline_s):
            return None
        packet, descriptors = receive(self._control, messages.MAX_PACKET_BYTES, 1)
        if not packet:
            lines = self._output.end().strip().splitlines()
            raise NodeLost(
                f"the fork server has ended; its output is in {self._output.log}; it ends with: "
                f"{lines[-1] if lines else 'no output'}"
            )
        reply: messages.Reply = self._decode(packet)
        if isinstance(reply, messages.Started):
            if not descriptors:  # the kernel drops descriptors that exceed the process's limit
                raise NodeLost(_NO_DESCRIPTOR)
            with descriptors_needed():
                process = _Process(reply.replica, reply.rank, reply.pid, descriptors[0])
            self._processes[reply.replica, reply.rank] = process
        return reply


def _mask_of(status: Path, name: bytes) -> int:
    """Return a set of signals in /proc/PID/status (proc(5)), bit n - 1 for signal n.

    0 if the process is gone.
    """
    try:
        lines = status.read_bytes().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1], 16) for line in lines if line.startswith(name)), 0)


def _tracer_pid(pid: int) -> int:
    """Return the pid of the process that traces a process; 0 if none does, or if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(b"TracerPid:")), 0)


def _threads_blocking(pid: int, number: int) -> frozenset[str]:
    """Return the ids of the threads of a process that block a signal."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return frozenset()
    return frozenset(
        thread for thread in threads if _mask_of(Path(f"/proc/{pid}/task/{thread}/status"), b"SigBlk:") >> (number - 1) & 1
    )


def _ended(pidfd: int, until: float) -> bool:
    """Return whether the process ends before the instant `until` of `time.monotonic()`."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))
