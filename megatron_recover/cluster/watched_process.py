"""A rank's process as the agent watches it: its entries in /proc, its pidfd and its signals.

See Note [Seeing a death] in `cluster/agent.py`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from pathlib import Path

from megatron_recover.cluster.node import Undying
from megatron_recover.cluster.rank_process import STACK_SIGNAL
from megatron_recover.host.process_stat import fields_of

_PF_EXITING = 0x4
STATE_FIELD, _FLAGS_FIELD, _EXIT_CODE_FIELD = 3, 9, 52
"""Fields of /proc/PID/stat, counted from 1 (proc(5))."""
STOPPED = b"T"
TRACED = "t"
ALIVE = ("R", "S", "D", "I")
CANNOT_WRITE = ("T", TRACED, "D", "Z", "")
"""State letters in which a process runs no handler of a signal."""
_PIDFD_SIGNAL_THREAD, _PIDFD_SIGNAL_PROCESS_GROUP = 1, 4
"""Flags of pidfd_send_signal(2). The first sends to the first thread alone. The second sends to the
process group that the process leads (Linux 6.9)."""


class Stat:
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
        """Close the file, if it is open; `read` then returns what it does of a reaped process."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class WatchedProcess:
    """A rank's process. One thread uses it."""

    def __init__(self, replica: int, rank: int, pid: int, pidfd: int) -> None:
        self.replica, self.rank, self.pid, self.pidfd = replica, rank, pid, pidfd
        self.stat = Stat(pid)
        self.fields: list[bytes] = []
        """Fields of /proc/PID/stat at the newest look."""
        self.reported = False
        """True if `poll` has returned the end of the process."""
        self.confirmed = False
        """True if the fork server has reaped the process and killed what was left of its group."""
        self.confirmed_at = 0.0
        """Seconds since boot at which that was known."""
        self.killed_at: float | None = None
        """`time.monotonic()` of the first SIGKILL to the process; None: none was sent."""
        self.traced = False
        """True if a tracer held the process at the last look at its state."""
        self.blocking: frozenset[str] = frozenset()
        """Ids of the threads that had blocked the signal for stacks before that signal was sent."""

    def confirm(self) -> None:
        """Note that the fork server has reaped the process, and close what showed it.

        A run may have ever more newcomers.
        """
        self.confirmed, self.confirmed_at = True, time.clock_gettime(time.CLOCK_BOOTTIME)
        self.close()

    def has_handled(self, number: int) -> bool:
        """Return whether a signal sent to the process is neither pending nor being handled.

        While a thread runs the handler, it blocks that signal.
        """
        pending = _mask_of(Path(f"/proc/{self.pid}/status"), b"ShdPnd:") >> (number - 1) & 1
        return not pending and not threads_blocking(self.pid, number) - self.blocking

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
        """Return exit code or minus the signal while the kernel ends the process.

        None before, and after the process is reaped.
        """
        fields = self.fields = self.stat.read()
        if not fields or not int(fields[_FLAGS_FIELD]) & _PF_EXITING:
            return None
        return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE_FIELD]))

    def undying(self) -> Undying:
        """Return a description of the process, for the case that it does not die."""
        fields, wchan = self.stat.read(), ""
        with contextlib.suppress(OSError):
            wchan = Path(f"/proc/{self.pid}/wchan").read_text().strip("0\n")  # 0: unreadable, or none
        return Undying(self.replica, self.rank, self.pid, fields[STATE_FIELD].decode() if fields else "", wchan)

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
        """Close the pidfd and the file in /proc, if they are open."""
        self.stat.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _mask_of(status: Path, name: bytes) -> int:
    """Return a set of signals in /proc/PID/status (proc(5)), bit n - 1 for signal n.

    0 if the process is gone.
    """
    try:
        lines = status.read_bytes().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1], 16) for line in lines if line.startswith(name)), 0)


def tracer_pid(pid: int) -> int:
    """Return the pid of the process that traces a process; 0 if none does, or if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(b"TracerPid:")), 0)


def threads_blocking(pid: int, number: int) -> frozenset[str]:
    """Return the ids of the threads of a process that block a signal."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return frozenset()
    return frozenset(
        thread for thread in threads if _mask_of(Path(f"/proc/{pid}/task/{thread}/status"), b"SigBlk:") >> (number - 1) & 1
    )


def ends_by(pidfd: int, until: float) -> bool:
    """Return whether the process ends before the instant `until` of `time.monotonic()`."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))
