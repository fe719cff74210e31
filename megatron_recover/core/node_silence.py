"""Decides which nodes are removed for silence.

Note [Who is cut off]
    A coordinator that hears nothing of a node cannot tell a dead node from a cut in the network. If
    the cut is around the coordinator itself, all others are silent, and may be well. So it removes
    nodes only while it hears at least half of the agents, the one of its own node included (INV-6).
    An agent that has ended is no longer counted.
"""

from __future__ import annotations

from collections.abc import Mapping

OWN = 0
"""Number of the coordinator's node."""


def to_remove(silent_s: Mapping[int, float], *, seen_s: float, limit_s: float) -> tuple[int, ...]:
    """Return the nodes to remove for silence, ascending.

    - `silent_s`: seconds since each living agent was heard last, by the number of its node.
    - `seen_s`: a node that is silent for so long does not count as heard.
    - `limit_s`: a node that is silent for so long is removed, if that is allowed.
    """
    heard = {node for node, seconds in silent_s.items() if seconds < seen_s}
    hears_enough = 2 * len(heard) >= len(silent_s) and (OWN in heard or OWN not in silent_s)
    return tuple(sorted(node for node, seconds in silent_s.items() if seconds >= limit_s)) if hears_enough else ()
