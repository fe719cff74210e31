"""The interface of a node to the launcher: start ranks, report their ends, kill and inspect them.

`cluster.agent.Agent` is the node that this process runs on. Each node of a job has a launcher of
its own, which reaches the others by way of the coordinator.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

import msgspec

from megatron_recover.cluster.output import Output
from megatron_recover.core.progress import Progress
from megatron_recover.host.process_stat import cause_of


class ProcessEnd(msgspec.Struct, frozen=True):
    """The end of a rank's process, which has ended or is certain to."""

    replica: int
    rank: int
    status: int
    """Exit code, or minus the signal."""

    @property
    def cause(self) -> str:
        """Return `status` in words, such as `SIGKILL` or `exit code 1`."""
        return cause_of(self.status)


class Undying(msgspec.Struct, frozen=True):
    """A process that SIGKILL has not ended.

    Most often it is in an uninterruptible wait (state D) for a disk or a device.
    """

    replica: int
    """Replica of the process. -1: no replica; rank -1 is then the fork server, and rank 0 the dry
    run."""
    rank: int
    pid: int
    state: str
    """State letter in /proc/PID/stat; empty if that cannot be read."""
    wchan: str
    """Kernel function in which the process waits; empty if that cannot be read."""

    def __str__(self) -> str:
        ours = "the dry run" if self.rank >= 0 else "the fork server"
        who = f"replica {self.replica} rank {self.rank}" if self.replica >= 0 else ours
        where = f" in {self.wchan}" if self.wchan else ""
        return f"{who} (pid {self.pid}, state {self.state or 'unknown'}{where})"


class NodeLost(RuntimeError):
    """The node can no longer start, watch or end processes. Its ranks end with it."""


class Node(Protocol):
    """The processes of one node. One thread uses it. Every method may raise `NodeLost`."""

    def is_ready(self) -> bool:
        """Return True once: at the first call after the node can start ranks.

        Call it until then, and not again.
        """

    def importing(self) -> str:
        """Return, while the node is not ready, which process still imports, and its state."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while a report of the node is unread.

        `poll` may return the end of a rank before its report has come.
        """

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

        The rank gets a progress page.
        """

    def poll(self) -> list[ProcessEnd]:
        """Return the ranks whose end is certain and was not reported before."""

    def page(self, replica: int, rank: int) -> Progress | None:
        """Return the content of a rank's progress page, also after the rank's end.

        None if the page is torn or was never written.
        """

    def state(self, replica: int, rank: int, *, at_the_poll: bool = False) -> str:
        """Return the state letter of a rank's process (proc(5)); empty after it is reaped.

        `at_the_poll`: prefer what the newest `poll` read to another read.
        """

    def pid(self, replica: int, rank: int) -> int:
        """Return the process id of a rank that was started; the process may have ended."""

    def tracer(self, replica: int, rank: int) -> str:
        """Return the name and pid of the process that traces a rank; empty if none does."""

    def ask_for_stacks(self, replica: int, *, of_all_threads: bool) -> None:
        """Have each rank of a replica write its stack, or all its threads' stacks, to its log.

        A rank that a tracer holds is left out.
        """

    def have_written_stacks(self, replica: int) -> bool:
        """Return whether every rank that can write has written the requested stacks.

        These are the stacks of all threads.
        """

    def fence(self, replica: int) -> None:
        """Kill every rank of a replica that is not known to be dead, with its process group."""

    def is_fenced(self, replica: int, but: Container[tuple[int, int]] = ()) -> bool:
        """Return whether all ranks of a replica are dead, except ranks (replica, rank) in `but`.

        What else was in their process groups was killed.
        """

    def has_ended(self, replica: int, rank: int) -> bool:
        """Return whether the process of a rank is confirmed dead."""

    def lives(self, replica: int, rank: int) -> bool:
        """Return whether a process of a rank may live; not if none was ever started."""

    def former_groups(self, ranks: Iterable[tuple[int, int]]) -> tuple[tuple[int, float], ...]:
        """Return the process groups of ranks that have ended, and when: seconds since boot."""

    def undying(self) -> list[Undying]:
        """Return the killed ranks that do not end."""

    def num_living(self) -> int:
        """Return the number of ranks that are not confirmed dead."""

    def is_stopped(self, replica: int, rank: int) -> bool:
        """Return whether a rank is stopped (SIGSTOP)."""

    def thaw(self, replica: int, rank: int) -> None:
        """Continue a rank that is stopped."""

    def wake_server(self) -> bool:
        """Continue the fork server if somebody has stopped it; return whether it was stopped."""

    def close(self) -> list[Undying]:
        """Kill every rank and end the node; return the processes that did not end in time."""
