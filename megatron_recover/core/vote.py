"""The commit rule: what a full set of votes says, and who is right when members disagree.

A step is committed in a generation when *all* its members voted for records that are equal apart from requests (and, which
`core/replica.py` sees to, no newer generation is promised). One missing vote means: nothing is known yet.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

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


def disagreement(opinions: Mapping[ReplicaId, Hashable], subject: str) -> Disagreement | None:
    """None if all opinions are equal, else who is in the minority. `subject` names what they are about."""
    groups: dict[Hashable, list[ReplicaId]] = {}
    for replica in sorted(opinions):
        groups.setdefault(opinions[replica], []).append(replica)
    if len(groups) <= 1:
        return None
    sides = " against ".join(str(group) for group in groups.values())
    largest = max(groups.values(), key=len)
    if 2 * len(largest) <= len(opinions):
        return Disagreement((), f"replicas disagree on {subject}, and no majority says who is right: {sides}")
    minority = tuple(replica for replica in sorted(opinions) if replica not in largest)
    return Disagreement(minority, f"replicas disagree on {subject}: {sides}")


def gather(ballots: Sequence[Ballot], more: Iterable[Ballot]) -> tuple[Ballot, ...]:
    """All votes, those for the same in one ballot. Of each voter the first word counts; requests are united."""
    known = {voter for ballot in ballots for voter in ballot.voters}
    groups: dict[Record, tuple[list[ReplicaId], list[tuple[str, ...]]]] = {}
    for ballot, voters in (
        *((ballot, ballot.voters) for ballot in ballots),
        *((ballot, [voter for voter in ballot.voters if voter not in known]) for ballot in more),
    ):
        if voters:
            group = groups.setdefault(_bare(ballot.record), ([], []))
            group[0].extend(voters)
            group[1].append(ballot.record.requests)
    return tuple(
        sorted(
            (
                Ballot(msgspec.structs.replace(record, requests=unite(requests)), tuple(sorted(voters)))
                for record, (voters, requests) in groups.items()
            ),
            key=lambda ballot: ballot.voters,
        )
    )


def voters_of(ballots: Iterable[Ballot]) -> frozenset[ReplicaId]:
    """Who has voted."""
    return frozenset(voter for ballot in ballots for voter in ballot.voters)


def tally(ballots: Sequence[Ballot], roster: Sequence[ReplicaId]) -> Record | Disagreement | None:
    """The committed record, a disagreement, or None while a member's vote is missing.

    `ballots` are what members said in one step and generation (`gather`). The record's requests are the union of the voters'.
    """
    members = frozenset(roster)
    if not members <= voters_of(ballots):
        return None
    cast = [(_bare(ballot.record), ballot) for ballot in ballots if not members.isdisjoint(ballot.voters)]
    record = cast[0][0]
    opinions = {voter: bare for bare, ballot in cast for voter in ballot.voters if voter in members}
    conflict = disagreement(opinions, f"the result of step {record.step}")
    if conflict is not None:
        return conflict
    return msgspec.structs.replace(record, requests=unite(ballot.record.requests for _, ballot in cast))


def _bare(record: Record) -> Record:
    return msgspec.structs.replace(record, requests=())
