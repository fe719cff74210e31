"""The examination of all nodes of a job, after they have met and before any of them imports.

What a node finds out travels over its link to the coordinator, which hands it to the others
(`NodeShares`, `NodesShared`). `cluster/doctor` has the checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from megatron_recover.cluster.doctor import between
from megatron_recover.cluster.doctor.between import Report
from megatron_recover.cluster.doctor.probing import peers_of
from megatron_recover.cluster.doctor.session import Opened, Session
from megatron_recover.cluster.joining import NotMet
from megatron_recover.cluster.membership import Joined
from megatron_recover.control_plane.node_messages import EndAsked, JobEnds, NodeShares, NodesShared
from megatron_recover.control_plane.wire import Message
from megatron_recover.core.exit_code import ExitCode

_TURN_S = 0.02


class Examined(NamedTuple):
    """The result of an examination, as lines for the console of a node."""

    told: list[str]
    """Findings that are not ok: those of all nodes on node 0; elsewhere those that fail."""
    refusals: list[str]
    """Findings that fail, on any node; equal on all nodes."""


def examine(joined: Joined, names: Sequence[str], deadline_s: float, open_session: Callable[[], Session]) -> Examined:
    """Examine this node together with the others of its job; all of them call it.

    `names` are those of the nodes. A node waits for the others for at most `deadline_s` seconds in
    each round; their checks take 5 s, and 10 s for each 16 connections. `open_session()` is called
    in a thread, so that signs of life go on. Raises `NotMet` if the job ends meanwhile, or if a
    node is late or the coordinator is silent; the caller then hangs up. Raises what `open_session`
    raises.
    """
    exchange = _Exchange(joined, deadline_s)
    with ThreadPoolExecutor(1, thread_name_prefix="examination") as pool:
        session = exchange.wait_for(pool.submit(open_session))
        try:
            node, num_nodes = session.opened.node, len(names)
            tried = tuple(peers_of(node, num_nodes))
            opened = exchange.share(0, session.opened, Opened, wanted=tried)
            report = exchange.wait_for(pool.submit(session.report, dict(zip(tried, opened, strict=True)), num_nodes))
            reports = exchange.share(1, report, Report, wanted=() if node else tuple(range(num_nodes)))
        finally:
            session.close()
    found = [each for each in between.judged(reports) if each[1].level != "ok"] if reports else []
    mine = between.lines([each for each in found if each[1].level == "fail"], names)
    [refusals] = exchange.share(2, mine, list[str], wanted=(0,))
    return Examined(between.lines(found, names) if reports else refusals, refusals)


class _Exchange:
    """The rounds of this node. One thread uses it."""

    def __init__(self, joined: Joined, deadline_s: float) -> None:
        self._joined, self._deadline_s = joined, deadline_s
        self._shared: dict[int, NodesShared] = {}
        self._end: NotMet | None = None
        self._has_asked = False
        """True once the end was requested that a signal to this process wants."""
        joined.membership.listen_anew()
        joined.membership.handle(self._take, self._lose)

    def share[Value](self, number: int, mine: Value, kind: type[Value], *, wanted: tuple[int, ...]) -> list[Value]:
        """Send this node's part of a round, and wait for those of all nodes.

        Return the parts of the `wanted` nodes, in this order.
        """
        self._joined.membership.send(NodeShares(number, msgspec.msgpack.encode(mine), wanted))
        late = NotMet(ExitCode.FAILED, f"not all nodes were examined in {self._deadline_s:g} s")
        until = self._joined.loop.time() + self._deadline_s
        while number not in self._shared:
            if self._joined.loop.time() > until:
                self._joined.membership.note_silence()
                raise late
            self._turn()
        return [msgspec.msgpack.decode(each, type=kind) for each in self._shared[number].data]

    def wait_for[Value](self, work: Future[Value]) -> Value:
        """Return the result of work in another thread. Raises what it raises."""
        while not work.done():
            self._turn()
        return work.result()

    def _turn(self) -> None:
        request = self._joined.request
        if request is not None and request.kept and not self._has_asked:
            self._joined.membership.send(EndAsked(request.kept))
            self._has_asked = True
        self._joined.loop.run_once(_TURN_S)
        if self._end is None and (silence := self._joined.membership.silence):
            self._joined.membership.note_silence()
            self._end = NotMet(ExitCode.FAILED, silence)
        if self._end is not None:
            raise self._end

    def _take(self, message: Message) -> None:
        match message:
            case NodesShared(number, _):
                self._shared[number] = message
            case JobEnds(exit_code, reason):
                self._end = NotMet(exit_code, reason)

    def _lose(self, why: str) -> None:
        self._end = self._end or NotMet(ExitCode.FAILED, f"the coordinator is lost ({why}) before training began")
