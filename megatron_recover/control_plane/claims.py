"""The claims of newcomers at a leader: its own, and those of others that it has to answer.

The machine of the replica decides about both (`core/admission.py`). Here is when it is asked.
Everything runs in the leader's control thread.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_recover.control_plane.loop import Loop
from megatron_recover.core import replica as machine
from megatron_recover.core.joining import state_digest
from megatron_recover.core.membership_messages import JoinRefused
from megatron_recover.core.rank_messages import StateDigested
from megatron_recover.core.values import Claim
from megatron_recover.deadlines import figure


class Claims:
    """Feeds the machine of one replica what concerns claims, each at its time."""

    def __init__(
        self,
        num_ranks: int,
        *,
        loop: Loop,
        stall_s: float,
        state: Callable[[], machine.ReplicaState],
        feed: Callable[[machine.Input], None],
        refused: Callable[[JoinRefused], None],
    ) -> None:
        """Prepare for a replica of `num_ranks` ranks.

        - A claim of its own that nobody answers for `stall_s` counts as refused.
        - `state()` is the present state of the machine; `feed(input)` feeds it.
        - `refused(answer)` is called when the claim of this newcomer is refused.
        """
        self._num_ranks, self._loop, self._stall_s = num_ranks, loop, stall_s
        self._state, self._feed, self._refused = state, feed, refused
        self._to_ask: int | None = None
        """Member that is to be asked to vouch for this newcomer, until the claim is sent."""
        self._asked: int | None = None
        """Member that was asked and has not answered."""
        self._waiting: list[Claim] = []
        """Claims of newcomers that this member has not answered yet."""

    # --- of this newcomer ------------------------------------------------------------------------

    def ask(self, member: int) -> None:
        """Have `member` vouch for this newcomer, once all its ranks have digested their state."""
        self._to_ask = member
        self._claim_when_complete()

    def fed(self, message: machine.Input, before: machine.ReplicaState) -> None:
        """Go on with the claim of this newcomer after an input; `before` is the state before it."""
        if isinstance(message, StateDigested):
            self._claim_when_complete()
        if isinstance(message, JoinRefused) and before.claim is not None and self._state().claim is None:
            self._asked = None
            self._refused(message)

    def link_lost(self, peer: int, why: str) -> None:
        """Give this newcomer's claim up if `peer`, to which a link broke, has not answered it."""
        claim = self._state().claim
        if peer == self._asked and claim is not None and self._state().phase is machine.ReplicaPhase.JOINING:
            self._feed(JoinRefused(claim.replica, claim.label, f"the link to replica {peer}, which was asked, broke ({why})"))

    def _claim_when_complete(self) -> None:
        if (member := self._to_ask) is None or len(self._state().served) < self._num_ranks:
            return
        self._to_ask, self._asked = None, member
        self._feed(machine.SendClaim(member))
        if (claim := self._state().claim) is not None:
            self._loop.after(self._stall_s, lambda: self._unanswered(claim))

    def _unanswered(self, claim: Claim) -> None:
        """Give a claim up that nobody answers: the message or the member that was asked is lost."""
        if self._state().claim is claim and self._state().phase is machine.ReplicaPhase.JOINING:
            self._feed(JoinRefused(claim.replica, claim.label, f"no answer came within {figure(self._stall_s)} s"))

    # --- of others -------------------------------------------------------------------------------

    def received(self, claim: Claim) -> None:
        """Take a newcomer's claim, and answer it as soon as that is possible."""
        self._waiting.append(claim)
        self.answer()

    def forget(self, newcomer: int) -> None:
        """Forget the claims of a newcomer to which a link broke: no answer would reach it."""
        self._waiting = [each for each in self._waiting if each.replica != newcomer]

    def answer(self) -> None:
        """Feed the machine each claim as soon as it knows its own digest of that state.

        The ranks of this replica digest what they serve while it is read, and may take longer for
        it. A claim of a step that is not computed any more is refused at once.
        """
        if not self._waiting:
            return
        state = self._state()
        waits = state.phase is machine.ReplicaPhase.WORKING and not state.is_closed and state_digest(state) is None
        for claim in self._waiting:
            if not (waits and state.work is not None and state.work.label == claim.label):
                self._waiting.remove(claim)
                self._feed(claim)
                return  # which has looked at the others
