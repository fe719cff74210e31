"""Decides which member is at fault when members cannot reach each other, if the evidence names one.

The evidence is a set of pairs (accuser, accused): the accuser waited in vain for the accused, or
lost its connection to the accused. One report does not show which end of a link is bad, so the
member at fault is read from the graph of all pairs.

Note [Rule]
    The members at fault are the smallest set that contains an end of every pair: a bad network card
    explains all pairs of its owner, a bad link explains one pair. Only one member is named at a
    time, with those that share its network card, because a fence is final and the evidence after
    it is better. In detail:

    1. A member that missed its own deadline (a pair with itself, from an overdue save) is named
       before all others; of several, the one with the most counterparts, then the highest id.
    2. In a chain of waits only the last member is at fault. So a pair counts if both ends accuse
       each other, or if the accused accuses nobody who explains why it kept the accuser waiting:

       - Only a wait in the same generation explains it: a member that is held up in one attempt may
         be at fault in the next. If the accused has reported nothing of that generation, those of
         all generations do.
       - A wait for votes explains only another wait for votes. A member votes when its own sums and
         copies are over, so what it then waits for does not hold up those of others.

       If no pair is of either kind, all pairs count.
    3. The candidates are the members of all smallest sets, or of one small set if these are large.
       A *silent* one is named first: others wait for it, and it has not reported that it is stuck
       itself. Then decide, in this order: the most counterparts, the most accusers, the highest id
       (the lowest id is the writer).
    4. An accuser of several members that are all silent is not named if nobody accuses it: it is
       early, or they are slow. Slow computing is not judged here.
    5. Of two members, unless rule 1 names one, only a silent one is named. If both are stuck,
       either of them may be at fault, or the link between them.
    6. Members on the same node share its network card and its links. With a member that rule 3
       names go those that have ranks on a node of it and are in each smallest set that it is in:
       one bad card, or one bad link between two nodes, is one loss and not one for each replica.
       None goes along while there is a member that has not reported and is not accused.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from megatron_recover.core.values import Generation, ReplicaId, Value

Pair = tuple[ReplicaId, ReplicaId]
"""(accuser, accused); a member that missed its own deadline accuses itself."""
Edge = tuple[ReplicaId, ReplicaId]
"""The two members of a pair, ascending."""

_EXACT_SIZE = 4
"""The largest size for which all smallest sets are found: the search takes exponential time."""


class Report(NamedTuple):
    """A report of a member that it was stuck in one generation, and of those that it accuses."""

    accuser: ReplicaId
    generation: Generation
    for_votes: bool
    """True if it waited for votes; False: for statuses, or for data, or it lost a connection."""
    accused: tuple[ReplicaId, ...]
    """Ascending; may be empty."""


class Evidence(Value, frozen=True):
    """The members that accuse each other or themselves, and those that are stuck.

    The coordinator drops evidence after a committed step, a loss, or the end of an overdue save. An
    excuse drops all but missed deadlines (`core/excuses.py`).
    """

    reports: tuple[Report, ...] = ()
    """Sorted; at most two of a member and a generation, of each kind one."""
    overdue: tuple[ReplicaId, ...] = ()
    """Members that missed a deadline of their own; ascending."""

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Return the pairs of all generations, sorted, each once."""
        accused = {(report.accuser, each) for report in self.reports for each in report.accused}
        return tuple(sorted(accused | {(late, late) for late in self.overdue}))

    @property
    def stuck(self) -> tuple[ReplicaId, ...]:
        """Return the members that reported that they wait or cannot continue, ascending."""
        return tuple(sorted({report.accuser for report in self.reports}))


def with_report(
    evidence: Evidence,
    accuser: ReplicaId,
    accused: Iterable[ReplicaId],
    generation: Generation,
    *,
    for_votes: bool = False,
) -> Evidence:
    """Return the evidence with a report of `accuser` that it was stuck in `generation`.

    `accused` may be empty. With `for_votes` they are those whose vote it waited for.
    """
    reports, key = evidence.reports, (accuser, generation, for_votes)
    begin = bisect.bisect_left(reports, key)
    end = begin + (reports[begin : begin + 1] != () and reports[begin][:3] == key)
    named = {*accused, *(each for report in reports[begin:end] for each in report.accused)}
    return Evidence((*reports[:begin], Report(*key, tuple(sorted(named))), *reports[end:]), evidence.overdue)


def with_missed_deadline(evidence: Evidence, replica: ReplicaId) -> Evidence:
    """Return the evidence with the fact that `replica` missed a deadline of its own."""
    return Evidence(evidence.reports, tuple(sorted({*evidence.overdue, replica})))


def without_reports(evidence: Evidence, of: Collection[ReplicaId]) -> Evidence:
    """Return the evidence without what the replicas `of` have reported, and what accuses them."""
    reports = tuple(
        report._replace(accused=tuple(each for each in report.accused if each not in of))
        for report in evidence.reports if report.accuser not in of
    )  # fmt: skip
    return Evidence(reports, tuple(late for late in evidence.overdue if late not in of))


def own_deadlines(evidence: Evidence) -> Evidence:
    """Return only the evidence that members missed deadlines of their own."""
    return Evidence(overdue=evidence.overdue)


def culprit(evidence: Evidence, roster: Sequence[ReplicaId]) -> ReplicaId | None:
    """Return the member that is at fault by Note [Rule], or None if the evidence names nobody."""
    pairs = _among(evidence, roster)
    late = {*evidence.overdue}.intersection(roster)
    if late:
        return max(late, key=lambda member: (_degree(member, pairs), member))
    silent = {accused for _, accused in pairs} - set(evidence.stuck)
    if len(roster) <= 2:
        return min(silent, default=None)
    candidates = {member for cover in _smallest_covers(_counted(evidence, pairs)) for member in cover}
    accused_by, accusers_of = _by_member(pairs), _by_member((accused, accuser) for accuser, accused in pairs)

    def weight(member: ReplicaId) -> tuple[bool, int, int, ReplicaId]:
        """Return the weight of the evidence against a member (Note [Rule], 3)."""
        accusers = accusers_of.get(member, set())
        return member in silent, len(accusers | accused_by.get(member, set())), len(accusers), member

    def only_waits(member: ReplicaId) -> bool:
        """Return whether nobody accuses the member, and it accuses several members, all silent."""
        accused = accused_by.get(member, set())
        return len(accused) > 1 and accused <= silent and member not in accusers_of

    return max((member for member in candidates if not only_waits(member)), key=weight, default=None)


def on_its_nodes(
    named: ReplicaId, evidence: Evidence, roster: Sequence[ReplicaId], nodes: Iterable[Collection[ReplicaId]]
) -> tuple[ReplicaId, ...]:
    """Return the members that go with the one that `culprit` names (Note [Rule], 6), ascending.

    `nodes` has the replicas with ranks on each node; empty if all are on one.
    """
    pairs = _among(evidence, roster)
    told = {*evidence.stuck, *(accused for _, accused in pairs)}
    if named in evidence.overdue or not told.issuperset(roster):
        return ()
    covers = [cover for cover in _smallest_covers(_counted(evidence, pairs)) if named in cover]
    mates = {member for node in nodes if named in node for member in node} - {named}
    return tuple(sorted(mates.intersection(*covers))) if covers else ()


def _among(evidence: Evidence, roster: Sequence[ReplicaId]) -> set[Pair]:
    """Return the pairs of two members."""
    members = frozenset(roster)
    return {pair for pair in evidence.pairs if pair[0] != pair[1] and members.issuperset(pair)}


def _counted(evidence: Evidence, pairs: Collection[Pair]) -> Collection[Pair]:
    """Return those of `pairs` that count (Note [Rule], 2)."""
    among, counted = frozenset(pairs), set[Pair]()
    said: dict[tuple[ReplicaId, Generation | None], _Said] = {}
    for report in evidence.reports:
        named = {other for other in report.accused if (report.accuser, other) in among}
        # A wait whose members it has not named yet says nothing of its generation.
        is_of_one = bool(report.accused) or not report.for_votes
        for key in ((report.accuser, None), *(((report.accuser, report.generation),) if is_of_one else ())):
            one = said.setdefault(key, _Said(set(), set()))
            one.named.update(named)
            one.held_up_by.update(() if report.for_votes else named)
    nothing = _Said(set(), set())
    for accuser, generation, for_votes, accused in evidence.reports:
        for other in accused:
            one = said.get((other, generation)) or said.get((other, None), nothing)
            is_explained = bool(one.named if for_votes else one.held_up_by)
            if (accuser, other) in among and (accuser in one.named or not is_explained):
                counted.add((accuser, other))
    return counted or pairs


class _Said(NamedTuple):
    """The members that one member accuses, in one generation or in all."""

    named: set[ReplicaId]
    held_up_by: set[ReplicaId]
    """Without those for whose vote it waits: these do not hold up its sums and copies."""


def _by_member(pairs: Iterable[Pair]) -> dict[ReplicaId, set[ReplicaId]]:
    """Return the second members of the pairs, by the first."""
    found: dict[ReplicaId, set[ReplicaId]] = {}
    for one, other in pairs:
        found.setdefault(one, set()).add(other)
    return found


def _degree(member: ReplicaId, pairs: Collection[Pair]) -> int:
    """Return the number of other members that share a pair with this one."""
    return len({(min(pair), max(pair)) for pair in pairs if member in pair})


def _smallest_covers(pairs: Iterable[Pair]) -> list[frozenset[ReplicaId]]:
    """Return all smallest sets with an end of every pair, or one small set if they are large.

    Large means more than `_EXACT_SIZE` members. The one small set is built greedily.
    """
    edges = sorted({(min(pair), max(pair)) for pair in pairs})
    others = _by_member((one, other) for edge in edges for one, other in (edge, edge[::-1]))
    most = max(map(len, others.values()), default=0)
    for size in range(_EXACT_SIZE + 1):
        found = _covers(edges, size) if len(edges) <= size * most else set()
        if found:
            return sorted(found, key=sorted)
    chosen: set[ReplicaId] = set()
    while others:
        member = max(others, key=lambda end: (len(others[end]), end))
        chosen.add(member)
        for other in others.pop(member):
            others[other].discard(member)
            if not others[other]:
                del others[other]
    return [frozenset(chosen)]


def _covers(edges: Sequence[Edge], size: int) -> set[frozenset[ReplicaId]]:
    """Return sets of at most `size` members that have an end of every edge.

    All sets from which no member can be left out are among them.
    """
    if not edges:
        return {frozenset()}
    if not size:
        return set()
    return {
        cover | {end} for end in edges[0] for cover in _covers([edge for edge in edges if end not in edge], size - 1)
    }  # fmt: skip
