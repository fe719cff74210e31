"""The commit rule: the outcome of all members' votes, and the minority when members disagree.

A step is committed in a generation when *all* its members have voted for the same digest of a
record (`core/digest.py`). Requests and paces, which differ between voters, do not count.
`core/replica_step.py` also ensures that no newer generation is promised. While a vote is missing,
nothing is known.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

from megatron_recover.core.memo import newest_kept
from megatron_recover.core.values import Ballot, ReplicaId, Value, Vote

_SHOWN = 40
"""Most characters shown of a value in which members differ."""


class Disagreement(Value, frozen=True):
    """A difference between members in what has to be equal."""

    minority: tuple[ReplicaId, ...]
    """Members that a strict majority outvotes; empty if there is no strict majority."""
    reason: str


def unite(requests: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the sorted union of requests."""
    return tuple(sorted({request for group in requests for request in group}))


def disagreement(
    opinions: Mapping[ReplicaId, Hashable], subject: str, unproven: Collection[ReplicaId] = ()
) -> Disagreement | None:
    """Return None if all opinions are equal, else who is outvoted (if anyone), and a reason.

    Those of `unproven`, which are not all, count in no majority.

    The reason says that replicas disagree on `subject`. It also names the fields in which the first
    two sides differ, if their opinions have fields.
    """
    first = next(iter(opinions.values()), None)
    if all(opinion is first or opinion == first for opinion in opinions.values()):  # the usual case; hashing takes longer
        return None
    groups: dict[Hashable, list[ReplicaId]] = {}
    for replica in sorted(opinions):
        groups.setdefault(opinions[replica], []).append(replica)
    (one, mine), (other, theirs), *_ = groups.items()
    sides = " against ".join(str(group) for group in groups.values())
    if found := list(_differences("", one, other)):
        sides += f"; replicas {mine[0]} and {theirs[0]} differ in {', '.join(found)}"
    counted = [[each for each in group if each not in unproven] for group in groups.values()]
    largest, size = max(zip(groups.values(), map(len, counted), strict=True), key=lambda group: group[1])
    if 2 * size <= sum(map(len, counted)):
        return Disagreement((), f"replicas disagree on {subject}, and no majority says who is right: {sides}")
    minority = tuple(replica for replica in sorted(opinions) if replica not in largest)
    return Disagreement(minority, f"replicas disagree on {subject}: {sides}")


def _differences(name: str, one: object, other: object) -> Iterator[str]:
    """Yield each field in which two values differ, with both; nothing if they have no fields."""
    if isinstance(one, Value) and type(one) is type(other):
        for field in one.__struct_fields__:
            yield from _differences(f"{name}.{field}" if name else field, getattr(one, field), getattr(other, field))
    elif name and one != other:
        yield f"{name}: {_shortened(one)} against {_shortened(other)}"


def _shortened(value: object) -> str:
    text = value.hex() if isinstance(value, bytes) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def ballot_of(vote: Vote) -> Ballot:
    """Return the ballot of one voter."""
    return Ballot(vote.digest, vote.outline, (vote.replica,), vote.requests, vote.paces)


def gather(ballots: Sequence[Ballot], more: Iterable[Ballot]) -> tuple[Ballot, ...]:
    """Return all votes, equal ones in one ballot with the requests and paces of their voters.

    Only the first vote of a voter counts.
    """
    known = voters_of(ballots)
    groups: dict[bytes, list[tuple[Ballot, Sequence[ReplicaId]]]] = {}
    for ballot, voters in (
        *((ballot, ballot.voters) for ballot in ballots),
        *((ballot, [voter for voter in ballot.voters if voter not in known]) for ballot in more),
    ):
        if voters:
            groups.setdefault(ballot.digest, []).append((ballot, voters))
    return tuple(sorted(map(_united, groups.values()), key=lambda ballot: ballot.voters))


def _united(said: Sequence[tuple[Ballot, Collection[ReplicaId]]]) -> Ballot:
    """Unite ballots of the same digest into one ballot.

    Each item of `said` is a ballot and those of its voters that count. The result has these voters,
    their paces, and the requests of all ballots.
    """
    first, _ = said[0]
    voters = tuple(sorted(voter for _, voters in said for voter in voters))
    paces = sorted(
        (replica, pace) for each, voters in said for of in [frozenset(voters)] for replica, pace in each.paces if replica in of
    )
    return Ballot(first.digest, first.outline, voters, unite(each.requests for each, _ in said), tuple(paces))


@newest_kept
def voters_of(ballots: Sequence[Ballot]) -> frozenset[ReplicaId]:
    """Return the members that have voted."""
    return frozenset(voter for ballot in ballots for voter in ballot.voters)


@newest_kept
def tally(
    ballots: Sequence[Ballot], roster: Sequence[ReplicaId], unproven: Sequence[ReplicaId] = ()
) -> Ballot | Disagreement | None:
    """Return the ballot of all members, a disagreement, or None while a member's vote is missing.

    `unproven` are the newcomers in `roster` that count in no majority. `ballots` are the votes of
    one step and generation (`gather`). The returned ballot has the requests and paces of the
    voters.
    """
    members = frozenset(roster)
    if not members <= voters_of(ballots):
        return None
    cast = [ballot for ballot in ballots if not members.isdisjoint(ballot.voters)]
    opinions = {voter: ballot.digest for ballot in cast for voter in ballot.voters if voter in members}
    conflict = disagreement(opinions, "the result of the step", unproven)
    if conflict is not None:
        return conflict
    return _united([(ballot, ballot.voters) for ballot in cast])
