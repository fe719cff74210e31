"""The commit rule: what a full set of votes says, and who is right when members disagree.

A step is committed in a generation when *all* its members voted for records that are equal apart from what each says of
itself, its requests and its pace (and, which `core/replica.py` sees to, no newer generation is promised). One missing vote
means: nothing is known yet.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import msgspec

from megatron_recover.core.values import Ballot, Record, ReplicaId, Value


class Disagreement(Value, frozen=True):
    """Members say different things that had to be equal."""

    minority: tuple[ReplicaId, ...]
    """Whom a strict majority outvotes; empty if there is no strict majority."""
    reason: str


def unite(requests: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Sorted union of requests."""
    return tuple(sorted({request for group in requests for request in group}))


def bare(record: Record) -> Record:
    """What all votes for a step have to agree on: the record without what each voter says of itself."""
    return msgspec.structs.replace(record, requests=(), paces=())


def disagreement(opinions: Mapping[ReplicaId, Hashable], subject: str) -> Disagreement | None:
    """None if all opinions are equal, else who is in the minority. `subject` names what they are about."""
    first = next(iter(opinions.values()), None)
    if all(opinion is first or opinion == first for opinion in opinions.values()):  # most often; hashing them takes longer
        return None
    groups: dict[Hashable, list[ReplicaId]] = {}
    for replica in sorted(opinions):
        groups.setdefault(opinions[replica], []).append(replica)
    sides = " against ".join(str(group) for group in groups.values())
    largest = max(groups.values(), key=len)
    if 2 * len(largest) <= len(opinions):
        return Disagreement((), f"replicas disagree on {subject}, and no majority says who is right: {sides}")
    minority = tuple(replica for replica in sorted(opinions) if replica not in largest)
    return Disagreement(minority, f"replicas disagree on {subject}: {sides}")


def gather(ballots: Sequence[Ballot], more: Iterable[Ballot]) -> tuple[Ballot, ...]:
    """All votes, those for the same in one ballot. A voter's first word counts; what they say of themselves is united."""
    known = {voter for ballot in ballots for voter in ballot.voters}
    groups: dict[Record, list[tuple[Record, Sequence[ReplicaId]]]] = {}
    for ballot, voters in (
        *((ballot, ballot.voters) for ballot in ballots),
        *((ballot, [voter for voter in ballot.voters if voter not in known]) for ballot in more),
    ):
        if voters:
            groups.setdefault(bare(ballot.record), []).append((ballot.record, voters))
    united = (
        Ballot(_united(record, group), tuple(sorted(voter for _, voters in group for voter in voters)))
        for record, group in groups.items()
    )
    return tuple(sorted(united, key=lambda ballot: ballot.voters))


def _united(record: Record, said: Iterable[tuple[Record, Collection[ReplicaId]]]) -> Record:
    """The bare record with what voters said of themselves in the records beside them."""
    said = [(each, frozenset(voters)) for each, voters in said]
    paces = sorted((replica, pace) for each, voters in said for replica, pace in each.paces if replica in voters)
    return msgspec.structs.replace(record, requests=unite(each.requests for each, _ in said), paces=tuple(paces))


def voters_of(ballots: Iterable[Ballot]) -> frozenset[ReplicaId]:
    """Who has voted."""
    return frozenset(voter for ballot in ballots for voter in ballot.voters)


def tally(ballots: Sequence[Ballot], roster: Sequence[ReplicaId]) -> Record | Disagreement | None:
    """The committed record, a disagreement, or None while a member's vote is missing.

    `ballots` are what members said in one step and generation (`gather`). The record has the requests and paces of the voters.
    """
    members = frozenset(roster)
    if not members <= voters_of(ballots):
        return None
    cast = [(bare(ballot.record), ballot) for ballot in ballots if not members.isdisjoint(ballot.voters)]
    record = cast[0][0]
    opinions = {voter: opinion for opinion, ballot in cast for voter in ballot.voters if voter in members}
    conflict = disagreement(opinions, f"the result of step {record.step}")
    if conflict is not None:
        return conflict
    return _united(record, ((ballot.record, ballot.voters) for _, ballot in cast))
