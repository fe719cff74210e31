"""The commit rule: what a full set of votes says, and who is right when members disagree.

A step is committed in a generation when *all* its members voted for records that are equal apart from requests (and, which
`core/replica.py` sees to, no newer generation is promised). One missing vote means: nothing is known yet.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import msgspec

from megatron_recover.core.values import Record, ReplicaId, Value, Vote


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


def tally(votes: Iterable[Vote], roster: Sequence[ReplicaId]) -> Record | Disagreement | None:
    """The committed record, a disagreement, or None while a member's vote is missing.

    `votes` are of one step and generation, at most one per replica. The record's requests are the union of the voters'.
    """
    records = {vote.replica: vote.record for vote in votes if vote.replica in roster}
    if len(records) < len(roster):
        return None
    bare = {replica: msgspec.structs.replace(record, requests=()) for replica, record in records.items()}
    step = bare[roster[0]].step
    conflict = disagreement(bare, f"the result of step {step}")
    if conflict is not None:
        return conflict
    return msgspec.structs.replace(bare[roster[0]], requests=unite(record.requests for record in records.values()))
