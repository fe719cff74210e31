"""Who is at fault when members cannot reach each other: decided from evidence, and nobody where the evidence does not say.

Evidence is a set of pairs (accuser, accused): the accuser waited in vain for the accused, or lost its connection to it. Who is
at fault is read from the graph of these pairs, because one report alone does not tell the two ends of a link apart.

Note [Rule]
    The members at fault are the smallest set that has an end of every pair: a network card that fails explains all pairs of
    its owner, and a link that fails explains one pair. Only one member is named at a time, since a fence cannot be taken back
    and the evidence after it is better. In detail:

    1. A member whose own deadline has passed (a pair with itself, from a save that is overdue) is named before all others.
    2. A pair counts if both ends accuse each other, or if the accused accuses nobody: in a row of waits only the last one is at
       fault. Where no pair is of either kind, all count.
    3. Of the members of all smallest sets that one is named which is *silent*, else the one with the most counterparts, then
       the most accusers, then the highest id (the lowest is the writer). A member is silent if it has not reported that it is
       stuck itself, although others wait for it.
    4. An accuser that nobody accuses, and whose accused are several and all silent, is not named: it is early, or they are
       slow. Their computing is for others to judge than the network.
    5. Of two members only a silent one is named. Where both are stuck, either may be at fault, or the link between them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from megatron_recover.core.values import ReplicaId, Value

Pair = tuple[ReplicaId, ReplicaId]
"""(accuser, accused)."""
Edge = tuple[ReplicaId, ReplicaId]
"""A pair without its direction, ascending."""

_EXACT_SIZE = 4
"""Up to so many members all smallest sets are found; finding larger ones takes exponential time, and one member is named."""


class Evidence(Value, frozen=True):
    """What members reported of each other since a step was committed or a replica was lost."""

    pairs: tuple[Pair, ...] = ()
    """Sorted, each once."""
    stuck: tuple[ReplicaId, ...] = ()
    """Members that reported that they wait or cannot continue. Sorted, each once."""


def heard(evidence: Evidence, accuser: ReplicaId, accused: Iterable[ReplicaId]) -> Evidence:
    """Return the evidence with a report of `accuser` that it is stuck, perhaps without anybody to accuse."""
    pairs = {*evidence.pairs, *((accuser, each) for each in accused)}
    return Evidence(tuple(sorted(pairs)), tuple(sorted({*evidence.stuck, accuser})))


def overdue(evidence: Evidence, replica: ReplicaId) -> Evidence:
    """Return the evidence with a deadline of its own that a member has missed."""
    return Evidence(tuple(sorted({*evidence.pairs, (replica, replica)})), evidence.stuck)


def own_deadlines(evidence: Evidence) -> Evidence:
    """Return what of the evidence is deadlines of their own that members have missed."""
    return Evidence(tuple(pair for pair in evidence.pairs if pair[0] == pair[1]))


def culprit(evidence: Evidence, roster: Sequence[ReplicaId]) -> ReplicaId | None:
    """Return the member that is at fault by Note [Rule], or None where the evidence does not say."""
    pairs = {pair for pair in evidence.pairs if pair[0] in roster and pair[1] in roster}
    late = {one for one, other in pairs if one == other}
    pairs = {pair for pair in pairs if pair[0] != pair[1]}
    if late:
        return max(late, key=lambda member: (_degree(member, pairs), member))
    accusers = {accuser for accuser, _ in pairs}
    silent = {accused for _, accused in pairs} - set(evidence.stuck)
    if len(roster) <= 2:
        return min(silent, default=None)
    counted = {pair for pair in pairs if pair[::-1] in pairs or pair[1] not in accusers} or pairs
    candidates = {member for cover in _smallest_covers(counted) for member in cover}
    named = [member for member in candidates if not _only_waits(member, pairs, silent)]
    return max(named, key=lambda member: _weight(member, pairs, silent), default=None)


def _only_waits(member: ReplicaId, pairs: Collection[Pair], silent: Collection[ReplicaId]) -> bool:
    """True if nobody accuses the member, and it accuses several members that are all silent."""
    accused = [other for accuser, other in pairs if accuser == member]
    return len(accused) > 1 and set(accused) <= set(silent) and all(other != member for _, other in pairs)


def _degree(member: ReplicaId, pairs: Collection[Pair]) -> int:
    """Return the number of other members with which this one has a pair."""
    return len({(min(pair), max(pair)) for pair in pairs if member in pair})


def _weight(member: ReplicaId, pairs: Collection[Pair], silent: Collection[ReplicaId]) -> tuple[bool, int, int, ReplicaId]:
    """Return by how much the evidence speaks against a member, for comparison."""
    return member in silent, _degree(member, pairs), sum(accused == member for _, accused in pairs), member


def _smallest_covers(pairs: Iterable[Pair]) -> list[frozenset[ReplicaId]]:
    """Return all smallest sets of members that have an end of every pair, or one small set where these are large."""
    edges = sorted({(min(pair), max(pair)) for pair in pairs})
    for size in range(_EXACT_SIZE + 1):
        found = _covers(edges, size)
        if found:
            return sorted(found, key=sorted)
    chosen: set[ReplicaId] = set()
    while edges:
        ends = [end for edge in edges for end in edge]
        chosen.add(max(sorted(set(ends)), key=ends.count))
        edges = [edge for edge in edges if not chosen.intersection(edge)]
    return [frozenset(chosen)]


def _covers(edges: Sequence[Edge], size: int) -> set[frozenset[ReplicaId]]:
    """Return the sets of at most `size` members that have an end of every edge, by trying both ends of the first edge."""
    if not edges:
        return {frozenset()}
    if not size:
        return set()
    return {
        cover | {end} for end in edges[0] for cover in _covers([edge for edge in edges if end not in edge], size - 1)
    }  # fmt: skip
