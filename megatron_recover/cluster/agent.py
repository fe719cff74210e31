"""The agent of a node: starts ranks, sees at the next `poll` that one ends, and kills replicas.

The agent decides nothing. The coordinator decides what an end means and which replica is killed
(fenced).

Note [Seeing a death]. The kernel frees a dead process's memory before it closes the process's
sockets and notifies the parent. That takes up to 0.1 s per GB. The kernel sets the flag PF_EXITING
in /proc/PID/stat before all of this, so `poll` looks at that flag. The fork server's report then
confirms that nothing of the process can run any more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from megatron_recover.cluster import forkserver_messages as messages
from megatron_recover.cluster.node import NodeLost, ProcessEnd, Undying
from megatron_recover.cluster.output import Output
from megatron_recover.cluster.packets import receive
from megatron_recover.cluster.rank_process import STACKS_SIGNAL
from megatron_recover.cluster.readiness import is_readable
from megatron_recover.cluster.watched_process import (
    ALIVE,
    CANNOT_WRITE,
    STATE_FIELD,
    STOPPED,
    TRACED,
    Stat,
    WatchedProcess,
    ends_by,
    threads_blocking,
    tracer_pid,
)
from megatron_recover.config import module_command
from megatron_recover.core.progress import Progress
from megatron_recover.core.wording import counted, verb
from megatron_recover.deadlines import Deadlines, figure
from megatron_recover.host.process_stat import with_letter
from megatron_recover.progress_page import DESCRIPTOR, PageReader

_LOOK_S = 1.0
"""Seconds between two looks at a fork server while the agent waits for its reply."""

_REMEDIES = {errno.EMFILE: "raise `ulimit -n`", errno.EAGAIN: "raise `ulimit -u`", errno.ENOMEM: "free memory"}
"""Remedies for errors of a system that starts no process, by the number of the error."""
_NO_DESCRIPTOR = "the launcher has no descriptor left to watch a rank with; raise `ulimit -n`"


@contextlib.contextmanager
def descriptors_needed() -> Iterator[None]:
    """Raise `NodeLost` with the remedy if the body fails for lack of a descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise NodeLost(_NO_DESCRIPTOR) from error


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
        num_ready: int = 0,
        ignored: Sequence[int] = (),
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the fork server with the variables of `environment` and no others.

        The server imports the modules `preload` and forks ranks; see `is_ready`. With `num_warm`,
        that many warm processes import the modules instead, and ranks are made of them (`warm`).
        When they are used up, `num_ready` others are kept ready.
        The server ignores `TOLD_TO_ALL` and the signals `ignored`, and so does a rank until it sets
        handlers. `waits()` is called every second while `spawn` waits.
        """
        self._waits = waits
        self._deadlines = deadlines or Deadlines.of()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [
            *module_command("megatron_recover.cluster.forkserver"),
            str(theirs.fileno()),
            str(self._deadlines.reap_s),
            str(num_warm),
            str(num_ready),
            ",".join(map(str, map(int, ignored))),
            *preload,
        ]
        with theirs:
            self._server = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output.descriptor, stderr=output.descriptor,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        self._forks = not num_warm
        self._server_stat = Stat(self._server.pid)
        self._output = output
        self._importing: messages.Importing | None = None
        self._pending: deque[messages.Reply] = deque()
        self._processes: dict[tuple[int, int], WatchedProcess] = {}
        self._pages: dict[tuple[int, int], PageReader] = {}
        self._asked: deque[tuple[int, int]] = deque()
        """Ranks (replica, rank) whose start was requested and not answered, in order."""
        self._answered: tuple[int, int] | None = None
        """The rank whose start was answered last."""
        self._unwatched: set[tuple[int, int]] = set()
        """Ranks that run and cannot be watched, for want of a descriptor; until they have ended."""
        self._fenced: set[int] = set()
        """Replicas of which nothing may live."""
        self._decode = msgspec.json.Decoder(messages.Reply).decode

    def is_ready(self) -> bool:
        """Return True once: at the first call after the modules are imported.

        Call it until then, and not again. Raises `NodeLost`, with the log's last line, if the fork
        server has ended, as after an import that failed.
        """
        while (reply := self._receive()) is not None:
            if isinstance(reply, messages.Ready):
                return True
            if isinstance(reply, messages.Importing):
                self._importing = reply
        return False

    def importing(self) -> str:
        """Return which process still imports, with its state.

        Call this after `is_ready` has returned False. Without a report about warm processes it is
        the fork server.
        """
        if (last := self._importing) is None:
            fields = self._server_stat.read()
            return f"pid {self._server.pid} is {with_letter(fields[STATE_FIELD].decode() if fields else '')}"
        has = verb(last.num_done, "has", "have")
        done = f"{last.num_done} of {counted(last.num_processes, 'process', 'processes')} {has} imported"
        return f"{done}; pid {last.pid} has not, and is {with_letter(last.state)}"

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

        Returns when the rank has started. Raises `NodeLost` if the rank cannot be started, for
        instance because that takes longer than `fork_s`. `descriptors` maps names to open
        descriptors of this process. The rank gets a copy of each (`config.inherited_descriptor`).
        The caller keeps its own descriptors, and that of `output`.
        """
        with descriptors_needed():
            page = self._pages[replica, rank] = PageReader(f"progress-{replica}.{rank}")
        handed_down = {**descriptors, DESCRIPTOR: page.descriptor}
        if output.stdout is not None:
            handed_down[messages.STDOUT] = output.stdout.descriptor
        spawn = messages.Spawn(replica=replica, rank=rank, argv=argv, environment=environment, descriptors=tuple(handed_down))
        self._asked.append((replica, rank))
        try:
            self._request(spawn, [output.descriptor, *handed_down.values()])
        finally:
            page.release()
        until = time.monotonic() + self._deadlines.fork_s
        while not (
            isinstance(reply := self._receive(deadline_s=_LOOK_S), messages.Started) and self._answered == (replica, rank)
        ):
            if reply is None and (self.wake_server() or time.monotonic() < until):
                self._waits()
                continue
            if reply is None:
                raise NodeLost(
                    f"the fork server did not start a rank within {figure(self._deadlines.fork_s)} s; see {self._output.log}"
                )
            if isinstance(reply, messages.Started):
                continue  # late, of a rank that was given up: it is known now, and killed if it is fenced
            if isinstance(reply, messages.NotStarted):
                if self._answered != (replica, rank):
                    continue
                remedy = _REMEDIES.get(reply.errno, f"see {self._output.log}")
                raise NodeLost(f"the fork server could not start a rank ({os.strerror(reply.errno)}); {remedy}")
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

        Returns whether it was stopped. While it is stopped, no rank is started or reaped, and no
        fence is confirmed. So the run would hang at the next of these.
        """
        fields = self._server_stat.read()
        is_stopped = bool(fields) and fields[STATE_FIELD] == STOPPED
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
                self._unwatched.discard((reply.replica, reply.rank))
                process = self._processes.get((reply.replica, reply.rank))
                if process is None:  # one that could not be watched, and so was never a rank of the job
                    continue
                process.confirm()
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
        self._fenced.add(replica)  # also for a rank whose start is answered late
        for process in self._processes.values():
            if process.replica == replica and not process.confirmed:
                process.kill()

    def pid(self, replica: int, rank: int) -> int:
        """Return the process id of a rank that was started; the process may have ended."""
        return self._processes[replica, rank].pid

    def state(self, replica: int, rank: int, *, at_the_poll: bool = False) -> str:
        """Return the state letter of a rank's process in /proc/PID/stat; empty after it is reaped.

        `at_the_poll`: return what the newest `poll` read, without another read if it read the rank
        and has not reported the rank's end. A process that was seen in state `t`, and now runs or
        sleeps, is reported as `t` until its tracer is gone. The reason is strace, which lets the
        process run between its system calls, where the tracer also delays it.
        """
        process = self._processes[replica, rank]
        if process.reported or not (at_the_poll and process.fields):
            process.fields = process.stat.read()
        fields = process.fields
        state = fields[STATE_FIELD].decode() if fields else ""
        process.traced = state == TRACED or (process.traced and bool(tracer_pid(process.pid)))
        return TRACED if process.traced and state in ALIVE else state

    def tracer(self, replica: int, rank: int) -> str:
        """Return name and pid of a rank's tracer, such as `gdb (pid 12)`; empty if none."""
        pid = tracer_pid(self._processes[replica, rank].pid)
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
            if self.state(process.replica, process.rank) == TRACED:
                continue
            if of_all_threads:
                process.blocking = threads_blocking(process.pid, STACKS_SIGNAL)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process.pidfd, STACKS_SIGNAL)
            else:
                process.ask_for_stack()

    def have_written_stacks(self, replica: int) -> bool:
        """Return whether every rank that can write has written the requested stacks of all threads.

        A rank in state T, t, D or Z, or a reaped one, cannot write, and is left out. This reads
        only /proc.
        """
        return all(
            self.state(process.replica, process.rank) in CANNOT_WRITE or process.has_handled(STACKS_SIGNAL)
            for process in self._living(replica)
        )

    def _living(self, replica: int) -> list[WatchedProcess]:
        return [each for each in self._processes.values() if each.replica == replica and not each.reported]

    def is_stopped(self, replica: int, rank: int) -> bool:
        """Return whether a rank is stopped (SIGSTOP)."""
        return self.state(replica, rank) == STOPPED.decode()

    def thaw(self, replica: int, rank: int) -> None:
        """Continue a rank that is stopped."""
        with contextlib.suppress(ProcessLookupError):  # reaped meanwhile
            signal.pidfd_send_signal(self._processes[replica, rank].pidfd, signal.SIGCONT)

    def is_fenced(self, replica: int, but: Container[tuple[int, int]] = ()) -> bool:
        """Return whether all ranks of a replica are dead, except ranks (replica, rank) in `but`.

        What else was in their process groups has got SIGKILL.
        """
        if any(each == replica for each, _ in (*self._asked, *self._unwatched)):
            return False
        ranks = [each for each in self._processes.values() if each.replica == replica]
        return all(each.confirmed or (each.replica, each.rank) in but for each in ranks)

    def has_ended(self, replica: int, rank: int) -> bool:
        """Return whether the process of a rank is confirmed dead."""
        return self._processes[replica, rank].confirmed

    def lives(self, replica: int, rank: int) -> bool:
        """Return whether a process of a rank may live; not if none was ever started."""
        process = self._processes.get((replica, rank))
        return (replica, rank) in (*self._asked, *self._unwatched) or (process is not None and not process.confirmed)

    def former_groups(self, ranks: Iterable[tuple[int, int]]) -> tuple[tuple[int, float], ...]:
        """Return the process groups of ranks that have ended, and when: seconds since boot."""
        found = (self._processes.get(each) for each in ranks)
        return tuple((each.pid, each.confirmed_at) for each in found if each is not None and each.confirmed)

    def undying(self) -> list[Undying]:
        """Return the killed ranks that do not end.

        They have not taken SIGKILL within `sigkill_s`, or took it and have not ended in `end_s`.
        """
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

        Three waits take at most `Deadlines.close_s` each: for the server, for the server again
        after its SIGKILL, and for all ranks together. No rank that `undying` lists is waited for.
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
                left.append(Undying(-1, -1, self._server.pid, fields[STATE_FIELD].decode() if fields else "", ""))
        until = time.monotonic() + self._deadlines.close_s
        for key, process in self._processes.items():
            if not (process.confirmed or ends_by(process.pidfd, 0.0 if key in given_up else until)):
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
        if isinstance(reply, messages.Started | messages.NotStarted):
            self._answered = self._asked.popleft()
        if isinstance(reply, messages.Started):
            self._unwatched.add((reply.replica, reply.rank))
            if not descriptors:  # the kernel drops descriptors that exceed the process's limit
                raise NodeLost(_NO_DESCRIPTOR)
            with descriptors_needed():
                process = WatchedProcess(reply.replica, reply.rank, reply.pid, descriptors[0])
            self._processes[reply.replica, reply.rank] = process
            self._unwatched.discard((reply.replica, reply.rank))
            if reply.replica in self._fenced:
                process.kill()
        return reply
