"""Values that tests of the core are made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_recover.core import replica
from megatron_recover.core.bucket import by_version
from megatron_recover.core.contribution import grouped
from megatron_recover.core.digest import commitment, summarize
from megatron_recover.core.membership_messages import NewGeneration
from megatron_recover.core.rank_messages import Begun, Holds, Promised
from megatron_recover.core.values import Ballot, BucketVersion, Held, Record, Shape, Status, Vote, Work

SHAPE = Shape(1, ((0,),))
"""One rank, one bucket."""
WORK = Work("train 0", 3, (0,))


def status(number: int, *, generation: int = 2, step: int = 0, work: Work | None = WORK, **fields: Any) -> Status:
    """A status; nothing held, complete or committed unless said.

    `contributions`: the ids of each bucket. `complete`: what `complete` makes. `committed`: a record.
    """
    given = {"contributions": (), "complete": (), "committed": None, **fields}
    if isinstance(given["committed"], Record):
        given["committed"] = commitment(given["committed"])
    given["contributions"] = grouped(dict(enumerate(given["contributions"])))
    given["complete"] = by_version(given["complete"])
    return Status(number, generation, step, work, **given)


def complete(bucket: int = 0, version: int = 1, checksum: int = 7) -> BucketVersion:
    """A bucket that the only rank holds."""
    return BucketVersion(bucket, version, (checksum,))


def record(step: int = 0, *versions: BucketVersion, requests: tuple[str, ...] = ()) -> Record:
    """A record of a step labelled `train <step>`."""
    return Record(step, f"train {step}", versions or (complete(),), requests)


def vote(number: int, *, generation: int = 1, of: Record | None = None) -> Vote:
    """A vote for `record()` unless said."""
    of = of or record()
    summary = summarize(of)
    return Vote(number, generation, of.step, summary.digest, summary.outline, of.requests, of.paces)


def ballot(of: Record, *voters: int) -> Ballot:
    """The ballot of those who voted for a record."""
    summary = summarize(of)
    return Ballot(summary.digest, summary.outline, voters, of.requests, of.paces)


def lead(state: replica.ReplicaState, *messages: replica.Input) -> tuple[replica.ReplicaState, list[replica.Effect]]:
    """Feed all; all effects."""
    effects: list[replica.Effect] = []
    for message in messages:
        state, more = replica.step(state, message)
        effects += more
    return state, effects


def working(
    number: int = 0, roster: Sequence[int] = (0, 1, 2), shape: Shape = SHAPE, work: Work = WORK
) -> replica.ReplicaState:
    """A replica that obeys the fresh plan of step 0 in generation 1."""
    state, _ = lead(
        replica.ReplicaState(number, shape),
        NewGeneration(1, tuple(roster)),
        *(Promised(rank, 1) for rank in range(shape.num_ranks)),
        *(status(peer, generation=1, work=None) for peer in roster if peer != number),
        Begun(0, 0, work),
    )
    assert state.phase is replica.ReplicaPhase.WORKING
    return state


def holds(version: int = 1, *, rank: int = 0, step: int = 0, bucket: int = 0, checksum: int = 7) -> Holds:
    """A rank's report of one result."""
    return Holds(rank, step, (Held(bucket, version, checksum),))
