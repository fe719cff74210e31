"""Node 0 without ranks and without a coordinator: it waits until it knows how the other nodes end.

The others train on to the next save point. Until then node 0 holds the lock of `--save`, and its
trace is that of the job: an end there would be wrong, and a batch system would act on it. Each
other node writes its trace, and the end of it, into the run directory, if that is shared. A thread
of this module reads there, never the thread of the launcher.

Note [Nodes that never end]. A launcher whose coordinator is lost has a line written to its log
several times in `deadline_s` (`coordinator_loss.py`), and ranks end within seconds of their
launcher. So a node that has changed neither trace nor log for `deadline_s` has no ranks any more,
and is awaited no longer. Where the run directory is not shared there is nothing to see. After the
same time node 0 then ends without knowing how the job does, and writes no end of it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from megatron_recover.cluster.job import LAUNCHER_LOG, Job
from megatron_recover.control_plane.loop import Loop
from megatron_recover.core import policy
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import Deadlines
from megatron_recover.observe.outcome import outcome
from megatron_recover.trace.event_files import EVENTS_FILE, TraceError
from megatron_recover.trace.merging import folder_of

_LOOK_S = 2.0
"""Seconds between two looks at the folders of other nodes."""
_MAY_TRAIN = ", where the job may go on: start none on the same --save before its launchers there have ended"
"""Ends a reason of node 0, which does not know how the job ends."""
_Sign = tuple[tuple[int, int] | None, ...]
"""Size and time of change of the trace and of the log of a node; None: there is no such file."""


class JobEnd(NamedTuple):
    """The end of a job, as far as node 0 knows it from the others."""

    exit_code: int
    reason: str
    is_known: bool = True
    """False: the other nodes may still train."""


class OtherEnds:
    """Waits for the ends of other nodes. The launcher's thread uses it; one of its own reads."""

    def __init__(self, job: Job, nodes: Mapping[int, str], *, loop: Loop, deadlines: Deadlines) -> None:
        """Begin to wait for `nodes` (number -> name), which have ranks of replicas that live."""
        self._names: Mapping[int, str] = dict(sorted(nodes.items()))
        self._run_dir, self._loop, self._patience_s = job.run_dir, loop, deadlines.deadline_s
        self._heard_at = dict.fromkeys(self._names, loop.time())
        """Node -> time of the loop's clock when its files were last seen to have changed."""
        self._signs: dict[int, _Sign] = {}
        """Node -> what the launcher's thread has seen of its files."""
        self._given_up: set[int] = set()
        self._seen: dict[int, _Sign] = {}
        """Node -> what the other thread has seen of its files."""
        self._ends: dict[int, tuple[int, str]] = {}
        """Node -> exit code and reason of its end."""
        self._over = threading.Event()
        threading.Thread(target=self._read, name="other-ends", daemon=True).start()

    def close(self) -> None:
        """Wait no longer."""
        self._over.set()

    @property
    def names(self) -> str:
        """Return the names of the nodes that are awaited, for people."""
        return ", ".join(self._names.values())

    def look(self) -> JobEnd | None:
        """Return the end of the job once all nodes have theirs, or will never have one."""
        now = self._loop.time()
        for number in self._names.keys() - self._ends.keys() - self._given_up:
            sign = self._seen.get(number)
            if sign is not None and sign != self._signs.get(number):
                self._signs[number], self._heard_at[number] = sign, now
            elif now - self._heard_at[number] >= self._patience_s:
                self._given_up.add(number)
        if not self._are_all_accounted_for:
            return None
        self.close()
        return self._known() or JobEnd(
            ExitCode.NO_REPLICA_LEFT, f"{self._silent}, and no trace of theirs is here{_MAY_TRAIN}", is_known=False
        )  # fmt: skip

    def interrupt(self) -> JobEnd:
        """Wait no longer; return the end of the job as far as it is known by now."""
        self.close()
        return self._known() or JobEnd(
            ExitCode.INTERRUPTED, f"a signal has ended the wait for {self.names}{_MAY_TRAIN}", is_known=False
        )  # fmt: skip

    @property
    def _are_all_accounted_for(self) -> bool:
        return self._ends.keys() | self._given_up == self._names.keys()

    @property
    def _silent(self) -> str:
        names = ", ".join(name for number, name in self._names.items() if number in self._given_up)
        return f"nothing was heard or seen of {names} for {self._patience_s:.0f} s"

    def _known(self) -> JobEnd | None:
        """Return the end of the job: that of nodes whose replicas ended together, if there are any.

        Otherwise the replicas of all nodes have failed. That is not known of a node whose files
        were never seen.
        """
        together = (number for number, (code, _) in sorted(self._ends.items()) if code in policy.ENDED_TOGETHER)
        number = next(together, None)
        are_seen = all(any(self._signs.get(each, ())) for each in self._given_up - self._ends.keys())
        if number is None and not (self._are_all_accounted_for and are_seen):
            return None
        number = min(self._ends, default=None) if number is None else number
        if number is not None:
            code, reason = self._ends[number]
            return JobEnd(code, f"{self._names[number]} ended with exit code {code}: {reason}")
        return JobEnd(ExitCode.NO_REPLICA_LEFT, self._silent)

    # --- The thread -------------------------------------------------------------------------------

    def _read(self) -> None:
        settled: dict[int, _Sign] = {}
        while self._names.keys() != self._ends.keys():
            for number in self._names.keys() - self._ends.keys():
                sign = self._sign(folder_of(self._run_dir, number))
                # A trace with its end does not change any more, so one that changes is not read.
                if sign == self._seen.get(number) and sign != settled.get(number):
                    settled[number] = sign
                    self._read_end(number)
                self._seen[number] = sign
            if self._over.wait(_LOOK_S):
                return

    def _sign(self, folder: Path) -> _Sign:
        signs: list[tuple[int, int] | None] = []
        for name in (EVENTS_FILE, LAUNCHER_LOG):
            try:
                found = os.stat(folder / name)
            except OSError:
                signs.append(None)
            else:
                signs.append((found.st_size, found.st_mtime_ns))
        return tuple(signs)

    def _read_end(self, number: int) -> None:
        try:
            found = outcome(folder_of(self._run_dir, number))
        except (OSError, TraceError):
            return
        if found.exit_code is not None:
            self._ends[number] = found.exit_code, found.reason
