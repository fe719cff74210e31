"""The traces of all nodes at the end of a run: node 0 waits for them, and gathers those it lacks.

Each other node offers its trace once that is whole. Node 0 looks for it in the run directory. Where
the folder is not shared, node 0 asks for the files part by part, so one part of a node is on its
way at a time, and of all nodes `_AT_ONCE`. The coordinator carries the messages. Disks are read and
written by threads of this module, never by the thread of the launcher.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from megatron_recover.cluster.job import Job
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import (
    NodeGone,
    NodeState,
    TraceDone,
    TraceEnds,
    TraceNext,
    TraceOffer,
    TracePart,
)
from megatron_recover.control_plane.wire import Message
from megatron_recover.deadlines import Deadlines, figure
from megatron_recover.observe.outcome import outcome
from megatron_recover.trace.event_files import TraceError
from megatron_recover.trace.gathering import FilePart, Gatherer, is_missing, packed
from megatron_recover.trace.merging import folder_of

_LOOK_S = 0.1
"""Seconds between two looks at the folders of other nodes, and at signals."""
_AT_ONCE = 32
"""Parts of all nodes that are on their way at a time, at most.

The parts of hundreds of nodes would be more than the coordinator keeps for node 0
(`wire.MAX_QUEUED_BYTES`). It would then end the link to node 0, and no trace would come.
"""


class Collector:
    """Node 0: waits for the traces of the others, and writes those that are not in its folder."""

    def __init__(self, job: Job, *, loop: Loop, deadlines: Deadlines, send: Callable[[Message], None]) -> None:
        """`send(message)` sends to the coordinator, in the loop's thread."""
        self._job, self._loop, self._deadlines, self._send = job, loop, deadlines, send
        self._news: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._awaited = {node.number for node in job.nodes if node.number}
        self._names = {node.number: node.name for node in job.nodes}
        self._late: set[int] = set()
        """Nodes that came after the start, and have been spares."""
        self._missing: dict[int, str] = {}
        """Node -> why its trace is missing or has no end."""
        self._gatherers: dict[int, Gatherer] = {}
        self._turns: deque[int] = deque()
        """Nodes of which a part is to be asked for, in this order."""
        self._asked: dict[int, float] = {}
        """Node whose next part is on its way -> time until which no other node gets its place."""
        self._num_parts = 0
        self._is_over = False

    def handle(self, message: Message) -> None:
        """Take a message about the trace of another node."""
        self._news.put(message)

    def note(self, nodes: Iterable[NodeState]) -> None:
        """Wait also for the traces of nodes that came after the start. Call it before `finish`.

        One that is lost and has had no rank is not awaited.
        """
        for node in nodes:
            if node.number not in self._names and node.state in ("spare", "here", "drained"):
                self._names[node.number] = node.name
                self._late.add(node.number)
                self._awaited.add(node.number)
            elif node.number in self._late and node.state == "lost" and not node.replicas:
                self._awaited.discard(node.number)

    def finish(self, is_hurried: Callable[[], bool]) -> list[str]:
        """Return when all traces have their end, or wait no longer; return a line for each other.

        Call it when the trace of node 0 is whole. The wait is over after `traces_s` without a part
        of a file, after `report_s`, and once `is_hurried()`.
        """
        thread = threading.Thread(target=self._collect, name="gathering", daemon=True)
        thread.start()
        now = self._loop.time()
        seen, until, last = self._num_parts, now + self._deadlines.traces_s, now + self._deadlines.report_s
        while thread.is_alive() and not is_hurried() and self._loop.time() < min(until, last):
            self._loop.run_once(_LOOK_S)
            if self._num_parts != seen:
                seen, until = self._num_parts, self._loop.time() + self._deadlines.traces_s
        self._is_over = True
        self._loop.run_once(0.0)  # the last messages of the thread
        late = f"it did not come within {figure(self._deadlines.traces_s)} s"
        if is_hurried():
            late = "a signal ended the wait for it"
        missing = dict.fromkeys(self._awaited.copy(), late) | self._missing
        return [
            f"the trace of node {node} ({self._names[node]}) is missing or has no end: {missing[node]}"
            for node in sorted(missing)
        ]

    # --- The thread -------------------------------------------------------------------------------

    def _collect(self) -> None:
        for node in self._late & self._awaited:  # `run.json` lists those of the start only; a reader sees the folder
            with contextlib.suppress(OSError):
                folder_of(self._job.run_dir, node).mkdir(parents=True, exist_ok=True)
        while not self._is_over and (self._awaited or not self._news.empty()):
            try:
                message = self._news.get(timeout=_LOOK_S)
            except queue.Empty:
                for node in list(self._awaited - self._gatherers.keys()):
                    self._look(node)
                self._ask()
                continue
            assert isinstance(message, TraceOffer | TracePart | TraceEnds | NodeGone)
            try:
                self._take(message)
            except (OSError, ValueError) as error:
                self._give_up(message.node, str(error))
                self._answer(TraceDone(message.node))
            self._ask()
        for gatherer in self._gatherers.values():
            gatherer.close()

    def _take(self, message: TraceOffer | TracePart | TraceEnds | NodeGone) -> None:
        node = message.node
        if not isinstance(message, TraceOffer):
            self._asked.pop(node, None)
        match message:
            case TraceOffer() if node in self._gatherers:
                pass  # offered twice
            case TraceOffer() if self._look(node):
                self._answer(TraceDone(node))
            case TraceOffer() if is_missing(self._job.run_dir, node):
                self._awaited.add(node)  # also the trace of one that was lost and came back
                self._missing.pop(node, None)
                self._gatherers[node] = Gatherer(self._job.run_dir, node)
                self._turns.append(node)
            case TraceOffer():
                self._answer(TraceDone(node))  # the folder is shared, and its end will be seen soon
            case TracePart() if node in self._gatherers:
                self._gatherers[node].take(FilePart(message.name, message.size, message.offset, message.data))
                self._num_parts += 1
                self._turns.append(node)
            case TraceEnds() if (gatherer := self._gatherers.pop(node, None)) is not None:
                gatherer.close()
                if not self._look(node):
                    raise ValueError("what the node has sent has no end")
                self._answer(TraceDone(node))
            case NodeGone(_, why) if node in self._awaited and not self._look(node):
                self._give_up(node, why)  # without an answer: a node that comes back may still offer its trace

    def _ask(self) -> None:
        """Ask for the next parts, as far as `_AT_ONCE` allows; a node that is late gives way."""
        now = time.monotonic()
        while self._turns and sum(until > now for until in self._asked.values()) < _AT_ONCE:
            node = self._turns.popleft()
            if node in self._gatherers:
                self._asked[node] = now + self._deadlines.traces_s / 4
                self._answer(TraceNext(node))

    def _look(self, node: int) -> bool:
        """Return whether the trace of a node has its end in the run directory."""
        try:
            is_whole = outcome(folder_of(self._job.run_dir, node)).exit_code is not None
        except (OSError, TraceError):
            is_whole = False
        if is_whole:
            self._awaited.discard(node)
            self._missing.pop(node, None)
        return is_whole

    def _give_up(self, node: int, why: str) -> None:
        if (gatherer := self._gatherers.pop(node, None)) is not None:
            gatherer.close()
        self._missing[node] = why
        self._awaited.discard(node)

    def _answer(self, message: Message) -> None:
        self._loop.post(lambda: self._send(message))


class Handover:
    """Another node: offers its trace, and sends the files that node 0 asks for."""

    def __init__(self, job: Job, *, loop: Loop, deadlines: Deadlines, send: Callable[[Message], None]) -> None:
        """`send(message)` sends to the coordinator, in the loop's thread."""
        self._job, self._loop, self._deadlines, self._send = job, loop, deadlines, send
        self._asked = threading.Semaphore(0)
        self._num_asked = 0
        self._is_over = False

    def handle(self, message: Message) -> None:
        """Take an answer of node 0, or that of the coordinator if there is no node 0 any more."""
        if isinstance(message, TraceNext):
            self._num_asked += 1
            self._asked.release()
        else:
            self._is_over = True

    def finish(self, is_hurried: Callable[[], bool]) -> list[str]:
        """Return when node 0 has what it needs, or wait no longer. No node but node 0 has lines.

        Call it when the trace of this node is whole. The wait is over after `offer_s` without a
        question of node 0, and once `is_hurried()`.
        """
        self._send(TraceOffer(self._job.node))
        threading.Thread(target=self._hand_over, name="gathering", daemon=True).start()
        seen, until = self._num_asked, self._loop.time() + self._deadlines.offer_s
        while not self._is_over and not is_hurried() and self._loop.time() < until:
            self._loop.run_once(_LOOK_S)
            if self._num_asked != seen:
                seen, until = self._num_asked, self._loop.time() + self._deadlines.offer_s
        self._is_over = True
        self._asked.release()
        return []

    def _hand_over(self) -> None:
        for message in self._messages():
            self._asked.acquire()
            if self._is_over:
                return
            self._post(message)

    def _messages(self) -> Iterator[Message]:
        """Yield the parts of all files, and then the end. One part at most is read ahead."""
        node = self._job.node
        try:
            for part in packed(self._job.run_dir):
                yield TracePart(node, part.name, part.size, part.offset, part.data)
        except OSError:
            pass  # node 0 finds no end in what it has, and says so
        yield TraceEnds(node)

    def _post(self, message: Message) -> None:
        self._loop.post(lambda: self._send(message))
