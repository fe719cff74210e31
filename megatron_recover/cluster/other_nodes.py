"""The exchange between the watch of a node and the coordinator about hangs, with several nodes.

`core/condemning.py` has the reasons. This module numbers reports and questions, and drops answers
that are too old. The thread of the node uses it.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_recover.control_plane.node_messages import AskPart, NodePart, NodeSuspects, TellKnown
from megatron_recover.core.values import ReplicaId
from megatron_recover.core.verdict import Known, Others, PartSeen, Suspects


class OtherNodes:
    """The other nodes of a job, as the watch of one node sees them."""

    def __init__(
        self, send: Callable[[NodeSuspects | NodePart], None], *, num_members: int, spanning: frozenset[ReplicaId]
    ) -> None:
        """`send(message)` sends a message to the coordinator.

        `num_members`: replicas at the start of the job. `spanning`: replicas that have ranks here
        and on other nodes.
        """
        self._send, self._spanning = send, spanning
        self.num_members = num_members
        """Members of the newest generation."""
        self._report = 0
        """Number of the newest report of suspicions."""
        self._asked: list[AskPart] = []
        self._answering: list[AskPart] = []
        """Questions of the look in progress."""
        self._known: list[Known] = []

    def spans(self, replica: ReplicaId) -> None:
        """Note a newcomer that has ranks here and on other nodes."""
        self._spanning |= {replica}

    def handle(self, message: AskPart | TellKnown) -> None:
        """Note a message of the coordinator for the next look."""
        if isinstance(message, AskPart):
            self._asked.append(message)
        elif message.report == self._report:
            self._known.append(message.known)

    def take(self) -> Others:
        """Return the facts for a look that begins, each once."""
        self._answering, self._asked = self._asked, []
        known, self._known = tuple(self._known), []
        return Others(self.num_members, known, tuple(each.replica for each in self._answering), self._spanning)

    def report(self, effect: Suspects | PartSeen) -> None:
        """Send what the detector reports of a look, in its order."""
        if isinstance(effect, PartSeen):
            self._send(NodePart(self._answering.pop(0).question, effect.part))
            return
        self._report += 1
        self._known.clear()  # of suspicions that have changed since
        self._send(NodeSuspects(self._report, tuple(sorted(effect.silent)), tuple(sorted(effect.accused))))
