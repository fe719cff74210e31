"""The link of a rank to the leader of its replica, for all ranks but rank 0, which is the leader.

The leader may start later than the rank. So until the leader's first order a link that fails is
made anew. From then on a lost link means a lost leader, and the rank ends.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.config import RankContext
from megatron_recover.control_plane.calling import OutgoingLink
from megatron_recover.control_plane.leader_messages import RankHello
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.wire import Link, LinkClosed, Message
from megatron_recover.core.rank_messages import CloseAsked, PassTimed, RankSaving, Report
from megatron_recover.deadlines import Deadlines
from megatron_recover.trace.node_clock import NodeClock

_RETRY_S = 0.02


class LeaderLink:
    """Links one rank to its leader. Everything runs in the loop's thread."""

    def __init__(
        self,
        context: RankContext,
        hello: RankHello,
        *,
        key: bytes,
        clock: NodeClock,
        loop: Loop,
        deadlines: Deadlines,
        deliver: Callable[[Message], None],
        fail: Callable[[str], None],
        is_stopped: Callable[[], bool],
    ) -> None:
        """Link to the leader, and send `hello`.

        - `key` is the job's; `clock` is that of this node.
        - `deliver(message)` is called with each message of the leader.
        - `fail(reason)` ends this rank, if the leader is not there within `leader_s`, or `follow_s`
          after it was lost.
        - `is_stopped()`: this rank ends anyway, so the end of the link is no loss.
        """
        self._context, self._hello, self._key, self._clock, self._loop = context, hello, key, clock, loop
        self._deadlines, self._deliver, self._fail, self._is_stopped = deadlines, deliver, fail, is_stopped
        self._link: Link | None = None
        self._began = loop.time()
        self._try()

    def has_order(self) -> None:
        """Note that the leader has sent an order: from now on a lost link means a lost leader."""
        if self._link is not None:
            self._loop.watch(self._link, lambda link, message: self._deliver(message), self._lost)

    def send(self, report: Report) -> None:
        """Send the leader a report."""
        if self._link is not None:
            assert not isinstance(report, CloseAsked | PassTimed | RankSaving), "rank 0 alone reports this"
            self._loop.send(self._link, report)

    def _try(self) -> None:
        """Link to the leader. If that fails, do so again, for `leader_s` at most."""
        try:
            me, leader = Party(Role.RANK, self._context.replica, self._context.rank), Party(Role.LEADER, self._context.replica)
            self._link = OutgoingLink(
                self._context.leader, self._key, me, leader, clock=self._clock, patience_s=self._deadlines.leader_s
            )  # fmt: skip
        except LinkClosed as closed:
            self._again(str(closed))
            return
        self._loop.watch(self._link, lambda link, message: self._deliver(message), lambda link, why: self._again(why))
        self._loop.send(self._link, self._hello)

    def _again(self, why: str) -> None:
        if (waited_s := self._loop.time() - self._began) > self._deadlines.leader_s:
            self._fail(f"rank 0 of replica {self._context.replica} was not there after {waited_s:.0f} s ({why})")
        else:
            self._loop.after(_RETRY_S, self._try)

    def _lost(self, link: Link, why: str) -> None:
        if not self._is_stopped():
            reason = f"rank 0 of replica {self._context.replica} is gone ({why})"
            # The agent kills a broken replica; only if it does not, this process ends itself.
            self._loop.after(self._deadlines.follow_s, lambda: self._fail(reason))
