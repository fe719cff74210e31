"""The agent of a node: starts the ranks, sees at once when one ends, and can kill those of a replica for certain (fence).

It decides nothing: what an end means and who is fenced is the coordinator's business.

Note [Seeing a death]. The kernel frees a dead process's memory before it closes its sockets and tells its parent: up to
0.1 s per GB. The flag PF_EXITING in /proc/PID/stat is set before all that, so it is what `poll` looks at; pidfd and the fork
server's report are what confirms that nothing of the process can run any more.
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

from megatron_recover.cluster import forkserver
from megatron_recover.cluster.node import End, NodeLost, Undying
from megatron_recover.cluster.output import Output
from megatron_recover.cluster.packets import receive
from megatron_recover.cluster.readiness import is_readable
from megatron_recover.core.detector import Progress
from megatron_recover.deadlines import Deadlines, figure
from megatron_recover.host.process_stat import fields_of
from megatron_recover.progress_page import DESCRIPTOR, PageReader

_PF_EXITING = 0x4
_STATE_FIELD, _FLAGS_FIELD, _EXIT_CODE_FIELD = 3, 9, 52
"""Of /proc/PID/stat, counted from 1 (proc(5))."""
_STOPPED = b"T"
_TRACED = "t"
_ALIVE = ("R", "S", "D", "I")
_CANNOT_WRITE = ("T", _TRACED, "D", "Z", "")
"""States in which a process runs no handler of a signal."""
_PIDFD_SIGNAL_THREAD, _PIDFD_SIGNAL_PROCESS_GROUP = 1, 4
"""Flags of pidfd_send_signal(2): the first thread alone; the process group that the process leads. Linux 6.9."""
_LOOK_S = 1.0
"""Between two looks at a fork server that is waited for."""


_NO_DESCRIPTOR = "the launcher has no descriptor left to watch a rank with; raise `ulimit -n`"


@contextlib.contextmanager
def descriptors_needed() -> Iterator[None]:
    """Raise `NodeLost` with the remedy where something inside finds that this process may open no more descriptors."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise NodeLost(_NO_DESCRIPTOR) from error


class _Stat:
    """`/proc/PID/stat` of one process, kept open: it never tells of another that got the same pid."""

    def __init__(self, pid: int) -> None:
        try:
            self._file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # reaped already
            self._file = -1

    def read(self) -> list[bytes]:
        """Its fields at their numbers, the command left empty; none once it is reaped (who did that knows how it ended)."""
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
        """Of /proc/PID/stat at the newest look."""
        self.reported = False
        """Its end was handed out by `poll`."""
        self.confirmed = False
        """The fork server has reaped it and killed what was left of its group."""
        self.killed_at: float | None = None
        """When SIGKILL was sent to it first."""
        self.traced = False
        """A tracer held it at the last look at its state."""
        self.blocking: frozenset[str] = frozenset()
        """Threads that had blocked the signal for stacks before it was sent."""

    def has_handled(self, number: int) -> bool:
        """Return whether a signal sent to the process is neither pending nor being handled (its thread blocks it meanwhile)."""
        pending = _mask_of(Path(f"/proc/{self.pid}/status"), b"ShdPnd:") >> (number - 1) & 1
        return not pending and not _threads_blocking(self.pid, number) - self.blocking

    def ask_for_stack(self) -> None:
        """Have the training thread, which is the process's first, write its stack."""
        with contextlib.suppress(ProcessLookupError):
            try:
                signal.pidfd_send_signal(self.pidfd, forkserver.STACK_SIGNAL, None, _PIDFD_SIGNAL_THREAD)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # An older kernel gives the signal to the first thread too, unless another one is faster. That writes its own.
                signal.pidfd_send_signal(self.pidfd, forkserver.STACK_SIGNAL)

    def dying_status(self) -> int | None:
        """How it is ending, once the kernel has begun to take it down; None while it lives."""
        fields = self.fields = self.stat.read()
        if not fields or not int(fields[_FLAGS_FIELD]) & _PF_EXITING:
            return None
        return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE_FIELD]))

    def undying(self) -> Undying:
        """Return what there is to say of it if it does not die."""
        fields, wchan = self.stat.read(), ""
        with contextlib.suppress(OSError):
            wchan = Path(f"/proc/{self.pid}/wchan").read_text().strip("0\n")  # 0: it may not be read, or there is none
        return Undying(self.replica, self.rank, self.pid, fields[_STATE_FIELD].decode() if fields else "", wchan)

    def kill(self) -> None:
        """Kill the rank, and every process of its group (data loaders' workers) at once.

        The pidfd names the group that this very process leads, so no other one can be struck, whoever has its number by now.
        Kernels before 6.9 cannot do that. There the fork server kills the group, when it reaps the rank.
        """
        if self.killed_at is None:
            self.killed_at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):  # reaped, and its report is on the way
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL, None, _PIDFD_SIGNAL_PROCESS_GROUP)

    def close(self) -> None:
        self.stat.close()
        os.close(self.pidfd)


class Agent:
    """Owns one fork server and the ranks that it forked. Used by one thread."""

    def __init__(
        self, *, preload: tuple[str, ...], environment: dict[str, str], output: Output, deadlines: Deadlines | None = None
    ) -> None:
        """Start the fork server; it imports the modules `preload` (see `is_ready`) and has no environment but this one."""
        self._deadlines = deadlines or Deadlines.of()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [
            sys.executable,
            "-m",
            "megatron_recover.cluster.forkserver",
            str(theirs.fileno()),
            str(self._deadlines.reap_s),
            *preload,
        ]
        with theirs:
            self._server = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output.descriptor, stderr=output.descriptor,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        self._server_stat = _Stat(self._server.pid)
        self._output = output
        self._pending: deque[forkserver.Reply] = deque()
        self._processes: dict[tuple[int, int], _Process] = {}
        self._pages: dict[tuple[int, int], PageReader] = {}
        self._decode = msgspec.json.Decoder(forkserver.Reply).decode

    def is_ready(self) -> bool:
        """Whether the modules are imported. Raises `NodeLost`, with the log's last line, when they cannot be."""
        return isinstance(self._receive(), forkserver.Ready)

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
        """Fork a rank that runs the script `argv` and prints into `output`. Return when the rank has started.

        `descriptors` maps names to open descriptors of this process. The rank gets a copy of each
        (`config.inherited_descriptor`); the caller keeps its own, and that of `output`.
        """
        with descriptors_needed():
            page = self._pages[replica, rank] = PageReader(f"progress-{replica}.{rank}")
        handed_down = {**descriptors, DESCRIPTOR: page.descriptor}
        spawn = forkserver.Spawn(replica=replica, rank=rank, argv=argv, environment=environment, descriptors=tuple(handed_down))
        try:
            self._request(spawn, [output.descriptor, *handed_down.values()])
        finally:
            page.release()
        until = time.monotonic() + self._deadlines.fork_s
        while not isinstance(reply := self._receive(deadline_s=_LOOK_S), forkserver.Started):
            if reply is None and (self.wake_server() or time.monotonic() < until):
                continue
            if reply is None:
                raise NodeLost(
                    f"the fork server did not start a rank within {figure(self._deadlines.fork_s)} s; see {self._output.log}"
                )
            self._pending.append(reply)

    def _request(self, spawn: forkserver.Spawn, descriptors: Sequence[int]) -> None:
        with descriptors_needed():
            request = forkserver.write_request(spawn)
        try:
            socket.send_fds(self._control, [forkserver.REQUEST], [request, *descriptors])
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server is gone: `_receive` says so
        finally:
            os.close(request)

    def page(self, replica: int, rank: int) -> Progress | None:
        """Return what the progress page of a rank says, also after its end. None where it is torn or was never written."""
        return self._pages[replica, rank].read()

    def wake_server(self) -> bool:
        """Continue the fork server if somebody has stopped it (SIGSTOP), and whether that was so.

        While it is stopped no rank can be started, seen off or fenced: the run would hang at the next of these.
        """
        fields = self._server_stat.read()
        is_stopped = bool(fields) and fields[_STATE_FIELD] == _STOPPED
        if is_stopped:
            self._server.send_signal(signal.SIGCONT)
        return is_stopped

    def fileno(self) -> int:
        """Readable when `poll` has something to say; a dying process may be seen earlier than that."""
        return self._control.fileno()

    def poll(self) -> list[End]:
        """The ranks whose end is certain and was not reported yet.

        A rank that ends with exit code 0 is reported when that is confirmed; everything else at the first sign.
        """
        ends = []
        while (reply := self._receive()) is not None:
            self._pending.append(reply)
        while self._pending:
            reply = self._pending.popleft()
            if isinstance(reply, forkserver.Exited):
                process = self._processes[reply.replica, reply.rank]
                process.confirmed = True
                if not process.reported:
                    process.reported = True
                    ends.append(End(process.replica, process.rank, reply.status))
        for process in self._processes.values():
            if not process.reported and (status := process.dying_status()):
                process.reported = True
                ends.append(End(process.replica, process.rank, status))
        return ends

    def fence(self, replica: int) -> None:
        """Kill every rank of a replica that is not known to be dead, with what it started. `is_fenced` says when it is done."""
        for process in self._processes.values():
            if process.replica == replica and not process.confirmed:
                process.kill()

    def pid(self, replica: int, rank: int) -> int:
        """Return the process id of a rank that was started; the process may have ended."""
        return self._processes[replica, rank].pid

    def state(self, replica: int, rank: int, *, at_the_poll: bool = False) -> str:
        """Return the state of a rank's process as in /proc/PID/stat, one letter; empty once it is reaped.

        `at_the_poll`: as the newest `poll` has found it, which has read the same.
        A process that was seen in state `t` is reported as `t` until its tracer is gone: strace lets it run between its system
        calls, and its time is not its own there either.
        """
        process = self._processes[replica, rank]
        if process.reported or not (at_the_poll and process.fields):
            process.fields = process.stat.read()
        fields = process.fields
        state = fields[_STATE_FIELD].decode() if fields else ""
        process.traced = state == _TRACED or (process.traced and bool(_tracer_pid(process.pid)))
        return _TRACED if process.traced and state in _ALIVE else state

    def tracer(self, replica: int, rank: int) -> str:
        """Return the name and pid of the process that traces a rank, such as `gdb (pid 12)`; empty if none does."""
        pid = _tracer_pid(self._processes[replica, rank].pid)
        if not pid:
            return ""
        try:
            return f"{Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()} (pid {pid})"
        except OSError:  # of another user, or gone
            return f"pid {pid}"

    def ask_for_stacks(self, replica: int, *, of_all_threads: bool) -> None:
        """Have each rank of a replica write a stack into its log: its training thread's, or with `of_all_threads` those of all.

        All threads are for a replica that is about to be fenced, and for no other (`forkserver`, Note [Stacks]);
        `have_written_stacks` says when they are there. A rank that a tracer holds is left out: the signal would go to the
        tracer, and stop a debugger.
        """
        for process in self._living(replica):
            if self.state(process.replica, process.rank) == _TRACED:
                continue
            if of_all_threads:
                process.blocking = _threads_blocking(process.pid, forkserver.STACKS_SIGNAL)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process.pidfd, forkserver.STACKS_SIGNAL)
            else:
                process.ask_for_stack()

    def have_written_stacks(self, replica: int) -> bool:
        """Return whether every rank that can has written the stacks of all threads since they were asked for.

        A rank in state T, t or D can not, and is left out. Reads only /proc.
        """
        return all(
            self.state(process.replica, process.rank) in _CANNOT_WRITE or process.has_handled(forkserver.STACKS_SIGNAL)
            for process in self._living(replica)
        )

    def _living(self, replica: int) -> list[_Process]:
        return [each for each in self._processes.values() if each.replica == replica and not each.reported]

    def is_stopped(self, replica: int, rank: int) -> bool:
        """Whether a rank stands still (SIGSTOP)."""
        return self.state(replica, rank) == _STOPPED.decode()

    def thaw(self, replica: int, rank: int) -> None:
        """Continue a rank that stands still."""
        with contextlib.suppress(ProcessLookupError):  # reaped meanwhile
            signal.pidfd_send_signal(self._processes[replica, rank].pidfd, signal.SIGCONT)

    def is_fenced(self, replica: int, but: Container[tuple[int, int]] = ()) -> bool:
        """Whether no process of a replica is left, other than those of the ranks (replica, rank) in `but`."""
        ranks = [each for each in self._processes.values() if each.replica == replica]
        return all(each.confirmed or (each.replica, each.rank) in but for each in ranks)

    def has_ended(self, replica: int, rank: int) -> bool:
        """Whether the process of a rank is confirmed dead."""
        return self._processes[replica, rank].confirmed

    def undying(self) -> list[Undying]:
        """Return the ranks that do not end although they were killed."""
        now, found = time.monotonic(), []
        for process in self._processes.values():
            if process.confirmed or process.killed_at is None or now - process.killed_at < self._deadlines.sigkill_s:
                continue
            if process.dying_status() is None or now - process.killed_at >= self._deadlines.end_s:
                found.append(process.undying())
        return found

    def num_living(self) -> int:
        """Ranks that are not confirmed dead."""
        return sum(not each.confirmed for each in self._processes.values())

    def close(self) -> list[Undying]:
        """Kill every rank and end the fork server; return what did not end within three times `Deadlines.close_s`."""
        for replica in {each.replica for each in self._processes.values()}:
            self.fence(replica)
        given_up = {(each.replica, each.rank) for each in self.undying()}
        self.wake_server()
        self._control.close()  # the server kills and reaps what is left, then ends
        if not self._processes:
            self._server.kill()  # it has nothing to reap, and may be importing for a long time
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

    def _receive(self, *, deadline_s: float = 0.0) -> forkserver.Reply | None:
        """Return the next reply, or None if none comes in time; starts are entered into the books here. Raises `NodeLost`."""
        # Asked first: `receive` waits.
        if not is_readable(self._control, deadline_s):
            return None
        packet, descriptors = receive(self._control, forkserver.MAX_PACKET_BYTES, 1)
        if not packet:
            lines = self._output.end().strip().splitlines()
            raise NodeLost(
                f"the fork server has ended; its output is in {self._output.log}; it ends with: "
                f"{lines[-1] if lines else 'no output'}"
            )
        reply: forkserver.Reply = self._decode(packet)
        if isinstance(reply, forkserver.Started):
            if not descriptors:  # the kernel cuts off what a process has no room for
                raise NodeLost(_NO_DESCRIPTOR)
            with descriptors_needed():
                process = _Process(reply.replica, reply.rank, reply.pid, descriptors[0])
            self._processes[reply.replica, reply.rank] = process
        return reply


def _mask_of(status: Path, name: bytes) -> int:
    """Return a set of signals in /proc/PID/status (proc(5)), bit n - 1 for signal n; 0 if the process is gone."""
    try:
        lines = status.read_bytes().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1], 16) for line in lines if line.startswith(name)), 0)


def _tracer_pid(pid: int) -> int:
    """Return the pid of the process that traces a process; 0 if none does, or the process is gone."""
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
    """Whether the process ends before the instant `until` of the monotonic clock."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))
