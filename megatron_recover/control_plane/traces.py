"""The coordinator's part of gathering traces: it carries messages between node 0 and the others.

A node speaks for itself only, and sends a part only when node 0 has asked for one. So no more than
one part of each node waits here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import (
    NodeGone,
    TraceDone,
    TraceEnds,
    TraceNext,
    TraceOffer,
    TracePart,
)
from megatron_recover.control_plane.wire import Link


class Traces:
    """Carries messages about traces. Everything runs in the loop's thread."""

    def __init__(self, links: Callable[[], Mapping[int, Link]], loop: Loop) -> None:
        """`links()` returns the links of the nodes that the job uses, by the number of the node."""
        self._links, self._loop = links, loop
        self._asked: set[int] = set()
        """Nodes that may send one part."""

    def carry(self, sender: int, message: TraceOffer | TracePart | TraceEnds | TraceNext | TraceDone) -> None:
        """Carry a message of node `sender`, or ignore one that the node may not send."""
        links = self._links()
        if isinstance(message, TraceNext | TraceDone):
            if sender == 0 and message.node in links:
                if isinstance(message, TraceNext):
                    self._asked.add(message.node)
                self._loop.send(links[message.node], message)
            return
        if sender != message.node or sender <= 0:
            return
        if not isinstance(message, TraceOffer):
            if sender not in self._asked:
                return
            self._asked.discard(sender)
        if 0 in links:
            self._loop.send(links[0], message)
        else:
            self._loop.send(links[sender], TraceDone(sender))

    def left(self, node: int, why: str) -> None:
        """Report a node that sends no trace to node 0; without node 0, dismiss all others."""
        links = self._links()
        if node > 0 and 0 in links:
            self._loop.send(links[0], NodeGone(node, why))
        elif node == 0:
            for number, link in links.items():
                if number:  # its link may be left
                    self._loop.send(link, TraceDone(number))
