"""Runs the command of `--on-event`, at most once for each notice, one at a time, in their order.

Nothing here is in the way of a run: it is in the monitor's process, in a thread of its own.

- The command is started without a shell, and gets the notice as its stdin, which is memory: no word
  of a notice is ever part of a command line.
- It has `command_s` seconds. Then it is killed, and so is what it has left running in its process
  group when it ends.
- At most `MAX_WAITING` notices wait. Further ones are dropped and counted, but never the end.
- A failure is one line.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from megatron_recover.core.wording import counted, verb
from megatron_recover.deadlines import figure
from megatron_recover.host import memory_file
from megatron_recover.host.process_stat import START_TIME, cause_of, stat_of
from megatron_recover.observe.follow.notices import AnyNotice, Ended

MAX_WAITING = 64
_LAST_WORDS = 500
"""Maximum of bytes of stderr that the line about a failure shows."""
_REAPED_S = 1.0
"""Seconds within which what was killed has ended, unless the kernel holds it."""
_PIPE_BYTES = 2**16
"""Bytes that a pipe holds (pipe(7)): one read takes all that is in it."""
_MEMORY = struct.Struct("=qqqq")
"""Number of the newest notice that was given, process of the command and its start, whether the end
was given."""
_BEGINS = -1
"""Stands for the process of a command that is about to start."""


class Memory:
    """Shared memory that outlives a monitor: what the next one must not do again, and must end."""

    def __init__(self, descriptor: int) -> None:
        """Map the memory behind `descriptor`, which `create_memory` made."""
        self._memory = mmap.mmap(descriptor, 0)

    @property
    def num_given(self) -> int:
        """Return the number of the newest notice that was given to the command; 0: none was."""
        given: int = _MEMORY.unpack_from(self._memory)[0]
        return given

    @property
    def has_end(self) -> bool:
        """Return whether the end of the run was given to the command."""
        return bool(_MEMORY.unpack_from(self._memory)[3])

    def begins(self, notice: AnyNotice) -> None:
        """Note that the command is about to get this notice."""
        _MEMORY.pack_into(self._memory, 0, notice.number, _BEGINS, 0, self.has_end or isinstance(notice, Ended))

    def runs(self, pid: int) -> None:
        """Note the process of the command; 0: there is none."""
        fields = stat_of(pid) if pid else []
        began = int(fields[START_TIME]) if fields else 0
        _MEMORY.pack_into(self._memory, 0, self.num_given, pid if fields else 0, began, self.has_end)

    def end_command(self) -> bool:
        """Kill the command that a monitor before has noted by `runs`, if it still runs.

        Return whether that monitor died between the start and the end of a command.
        """
        _, pid, began, _ = _MEMORY.unpack_from(self._memory)
        fields = stat_of(pid) if pid > 0 else []
        if fields and int(fields[START_TIME]) == began:
            _kill(pid)
        self.runs(0)
        return bool(pid)


def create_memory() -> int:
    """Create such memory, and return its descriptor. Raises OSError."""
    return memory_file.create_sized("megatron-recover-notices", mmap.PAGESIZE)


class EventCommand:
    """The queue of notices, and the thread that gives them to the command."""

    def __init__(self, command: Sequence[str], memory: Memory, *, command_s: float, says: Callable[[str], None]) -> None:
        """Start the thread.

        `command_s`: seconds that one run of the command may take. `says(line)`: called for each
        failure, and when notices were dropped, in the thread of this object.
        """
        self._command, self._memory, self._command_s, self._says = command, memory, command_s, says
        self._waiting: deque[AnyNotice] = deque()
        self._changed = threading.Condition()
        self._num_dropped = 0
        self._hurry_at = float("inf")
        """Time of `time.monotonic()` from which only the end of the run is still given."""
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="on-event", daemon=True)
        self._thread.start()

    def give(self, notice: AnyNotice) -> None:
        """Queue a notice, unless a monitor before has given it or too many wait; this never blocks.

        Of the end of the run the memory knows by itself: a monitor that had no time to read the
        trace again has counted fewer notices than the one before has given.
        """
        if isinstance(notice, Ended):
            if self._memory.has_end:
                return
            notice.number = max(notice.number, self._memory.num_given + 1)
        elif notice.number <= self._memory.num_given:
            return
        with self._changed:
            if len(self._waiting) >= MAX_WAITING and not isinstance(notice, Ended):
                self._num_dropped += 1
            else:
                self._waiting.append(notice)
            self._changed.notify()

    def finish(self) -> None:
        """Give what waits, and nothing after that. Wait for it at most twice `command_s` seconds.

        After the first `command_s` seconds only the end of the run is given: a command that has
        anything else is killed, and the rest is dropped.
        """
        with self._changed:
            self._is_over, self._hurry_at = True, time.monotonic() + self._command_s
            self._changed.notify()
        self._thread.join(2 * self._command_s)

    # --- The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        told = 0
        while (notice := self._next()) is not None:
            if notice.dropped > told:
                number, was = counted(notice.dropped, "event"), verb(notice.dropped, "was", "were")
                self._says(f"{number} so far {was} not given to --on-event, which is too slow for them")
                told = notice.dropped
            self._memory.begins(notice)
            with self._changed:
                left_s = float("inf") if isinstance(notice, Ended) else self._hurry_at - time.monotonic()
            if why := self._give(msgspec.json.encode(notice) + b"\n", min(self._command_s, max(0.0, left_s))):
                self._says(f"--on-event {self._command[0]} {why} (event {notice.number}, {type(notice).__name__.lower()})")

    def _next(self) -> AnyNotice | None:
        """Wait for the next notice; None: there is none any more."""
        with self._changed:
            while not self._waiting and not self._is_over:
                self._changed.wait()
            while len(self._waiting) > 1 and time.monotonic() > self._hurry_at:
                self._waiting.popleft()
                self._num_dropped += 1
            if not self._waiting:
                return None
            notice = self._waiting.popleft()
            notice.dropped = self._num_dropped
            return notice

    def _give(self, text: bytes, limit_s: float) -> str:
        """Run the command with `text` as its stdin, for `limit_s` seconds at most.

        Return why it failed, in words; empty: it did not.
        """
        try:
            given = memory_file.create("megatron-recover-notice")
        except OSError as error:
            self._memory.runs(0)
            return f"cannot be started ({error.strerror})"
        try:
            os.write(given, text)
            os.lseek(given, 0, os.SEEK_SET)
            process = subprocess.Popen(
                self._command, stdin=given, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            self._memory.runs(0)
            return f"cannot be started ({error.strerror})"
        finally:
            os.close(given)
        self._memory.runs(process.pid)
        assert process.stderr is not None
        with process.stderr:
            is_late, said = self._follow(process.pid, process.stderr.fileno(), limit_s)
        # Its leader is not reaped yet, so the number of the group still means this group.
        _kill(process.pid)
        try:
            status = process.wait(_REAPED_S)
        except subprocess.TimeoutExpired:  # it waits for a disk
            return f"does not end although it was killed after {figure(limit_s)} s"
        self._memory.runs(0)
        if is_late:
            return f"was killed after {figure(limit_s)} s"
        lines = said.decode(errors="replace").strip().splitlines()
        return "" if status == 0 else f"ended by {cause_of(status)}" + (f": {lines[-1]}" if lines else "")

    def _follow(self, pid: int, stderr: int, limit_s: float) -> tuple[bool, bytes]:
        """Wait for the end of the command, and read its stderr meanwhile, so that it cannot fill.

        Return whether its time was over first, and the end of its stderr.
        """
        end, said = time.monotonic() + limit_s, b""
        process = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.register(stderr, select.POLLIN)
        try:
            while (left_s := end - time.monotonic()) > 0:
                ready = dict(poll.poll(1000 * left_s))
                if stderr in ready:
                    chunk = os.read(stderr, _PIPE_BYTES)
                    said = (said + chunk)[-_LAST_WORDS:]
                    if not chunk:
                        poll.unregister(stderr)
                if process in ready:  # what it has left running may go on writing
                    return False, said
            return True, said
        finally:
            os.close(process)


def _kill(group: int) -> None:
    """Kill a process group, if it still has a process that is ours."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
