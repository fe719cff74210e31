"""Decides which nodes are removed for silence.

Note [Who is cut off]
    A coordinator that hears nothing of a node cannot tell a dead node from a cut in the network. If
    the cut is around the coordinator itself, all others are silent, and may be well. So it removes
    nodes only while it hears at least half of the agents, the one of its own node included (INV-6).
    An agent that has ended is no longer counted. While a node is silent, only its time removes it:
    to the coordinator's other timers its replicas are at work (`control_plane/nodes_driver.py`).

    A node that came after the start and has had no rank is not counted either: however many of
    these hang, they hold up no removal of a node, and end no job. They are removed for silence like
    the others, while enough of the others are heard.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OWN = 0
"""Number of the coordinator's node."""


def hears_enough(silent_s: Mapping[int, float], seen_s: float) -> bool:
    """Return whether a coordinator hears so many agents that it may remove the others.

    The arguments are those of `to_remove`.
    """
    heard = {node for node, seconds in silent_s.items() if seconds < seen_s}
    return 2 * len(heard) >= len(silent_s) and (OWN in heard or OWN not in silent_s)


def is_cut_off(silent_s: Mapping[int, float], *, seen_s: float, limit_s: float) -> bool:
    """Return whether the coordinator's own node is the one that is cut off, for twice the limit.

    Its own agent is heard or has ended, and fewer than half of all are heard. Then the job ends
    here: the others end by themselves, as they have no coordinator. The arguments are those of
    `to_remove`.
    """
    own_is_heard = silent_s.get(OWN, 0.0) < seen_s
    lasts = any(seconds >= 2 * limit_s for seconds in silent_s.values())
    return own_is_heard and lasts and not hears_enough(silent_s, seen_s)


def to_remove(
    silent_s: Mapping[int, float], spare_s: Mapping[int, float] = MappingProxyType({}), *, seen_s: float, limit_s: float
) -> tuple[int, ...]:
    """Return the nodes to remove for silence, ascending.

    - `silent_s`: seconds since each living agent was heard last, by the number of its node.
    - `spare_s`: the same of nodes that came after the start and have had no rank.
    - `seen_s`: a node that is silent for so long does not count as heard.
    - `limit_s`: a node that is silent for so long is removed, if that is allowed.
    """
    if not hears_enough(silent_s, seen_s):
        return ()
    return tuple(sorted(node for node, seconds in {**silent_s, **spare_s}.items() if seconds >= limit_s))
