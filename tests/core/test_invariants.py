"""A history that holds, and every invariant broken by hand once: the rule must name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_recover.core.invariants import (
    Applied,
    Committed,
    Fact,
    Formed,
    Held,
    InvariantViolation,
    Planned,
    Read,
    Voted,
    check,
)
from megatron_recover.core.membership_messages import Entered
from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.values import BucketVersion, Compute, Record, Shape, Transfer, Work

SHAPE = Shape(2, ((0,), (1,)))
WORK = Work("train 0", 2, (0, 1))
RECORD = Record(0, "train 0", (BucketVersion(0, 1, (5,)), BucketVersion(1, 1, (6,))))


def plan(replica: int, generation: int = 1, ids: tuple[int, ...] | None = None, roster: tuple[int, ...] = (0, 1)) -> Planned:
    computes = (Compute(ids if ids is not None else (replica,), (0, 1)),)
    return Planned(replica, Plan(0, generation, roster, WORK, (1, 1), (), computes, (0, 1)))


def held(replica: int, bucket: int, *, counts: tuple[int, ...] = (1, 1)) -> Held:
    return Held(replica, bucket, 1, 0, bucket, 1, 5 + bucket, counts)


def good() -> list[Fact]:
    """Both replicas commit step 0 in generation 1; replica 0 is one step ahead when replica 1 is lost."""
    facts: list[Fact] = [Formed(1, (0, 1)), Entered(0, 1, 0), Entered(1, 1, 0), plan(0), plan(1)]
    facts += [Read(0, 0, 0, 0, (1, 0)), Read(1, 0, 0, 0, (0, 1)), held(0, 0), held(1, 0), held(0, 1), held(1, 1)]
    facts += [Voted(r, 1, RECORD) for r in (0, 1)]
    facts += [Committed(r, 1, RECORD, False) for r in (0, 1)]
    facts += [Applied(r, rank, 0, ((rank, (1, 1)),), f"digest {rank}") for r in (0, 1) for rank in (0, 1)]
    return [*facts, Formed(2, (0,)), Entered(0, 2, 1)]


def after(kind: type, facts: list[Fact]) -> int:
    """Position behind the last fact of a type."""
    return max(i for i, fact in enumerate(facts) if isinstance(fact, kind)) + 1


def swap(old: Fact, new: Fact) -> Callable[[list[Fact]], list[Fact]]:
    return lambda facts: [new if fact == old else fact for fact in facts]


def insert(behind: type, *new: Fact) -> Callable[[list[Fact]], list[Fact]]:
    return lambda facts: [*facts[: after(behind, facts)], *new, *facts[after(behind, facts) :]]


def drop(old: Fact) -> Callable[[list[Fact]], list[Fact]]:
    return lambda facts: [fact for fact in facts if fact != old]


def test_a_history_that_holds() -> None:
    history = check(SHAPE, good())
    assert history.rosters == ((0, 1), (0,)) and dict(history.committed) == {0: 1, 1: 1}


other = Record(0, "train 0", (BucketVersion(0, 1, (5,)), BucketVersion(1, 2, (6,))))
enter_2 = (Formed(2, (0, 1)), Entered(0, 2, 0), Entered(1, 2, 0))


@pytest.mark.parametrize(
    ("invariant", "what", "breaks"),
    [
        (1, "counts its microbatches (2, 1) times", swap(held(1, 1), held(1, 1, counts=(2, 1)))),
        (1, "counts its microbatches (1, 0) times", swap(held(1, 1), held(1, 1, counts=(1, 0)))),
        (1, "counts", swap(Applied(1, 1, 0, ((1, (1, 1)),), "digest 1"), Applied(1, 1, 0, ((1, (0, 1)),), "digest 1"))),
        (2, "has checksum 9", swap(held(1, 0), Held(1, 0, 1, 0, 0, 1, 9, None))),
        (2, "its rank 1 does not hold", drop(held(0, 1))),
        (2, "elsewhere", swap(Committed(1, 1, RECORD, False), Committed(1, 1, other, False))),
        (2, "after 1 steps", insert(Committed, Committed(1, 1, RECORD, False))),
        (2, "which its replica has not committed", drop(Committed(1, 1, RECORD, False))),
        (2, "its parameters are", swap(Applied(1, 1, 0, ((1, (1, 1)),), "digest 1"), Applied(1, 1, 0, None, "else"))),
        (2, "adopting", insert(Voted, Committed(1, 1, RECORD, True))),
        (3, "the local gradient has (2, 0)", swap(Read(0, 0, 0, 0, (1, 0)), Read(0, 0, 0, 0, (2, 0)))),
        (3, "the local gradient has (1, 1)", swap(Read(1, 0, 0, 0, (0, 1)), Read(1, 0, 0, 0, (1, 1)))),
        (4, "holds in version 1", insert(Held, *enter_2, plan(0, 2, ()))),
        (5, "takes a result", insert(Planned, *enter_2, held(0, 0))),
        (5, "votes", insert(Held, *enter_2, Voted(0, 1, RECORD))),
        (5, "commits", insert(Voted, *enter_2, Committed(0, 1, RECORD, False))),
        (5, "plans", insert(Planned, *enter_2, plan(0, 1, ()))),
        (5, "after a newer one", insert(Planned, *enter_2, Entered(0, 1, 0))),
        (6, "generation 3 follows generation 1", swap(Formed(2, (0,)), Formed(3, (0,)))),
        (6, "has replicas", lambda facts: [*facts, Formed(3, (0, 1))]),
        (6, "whose member it is not", lambda facts: [*facts, Entered(1, 2, 1)]),
        (6, "never made", lambda facts: [*facts, Entered(0, 3, 1)]),
        (6, "without the votes of replicas [1]", drop(Voted(1, 1, RECORD))),
        (7, "whose gradient replica 0 holds", swap(plan(1), plan(1, ids=(0, 1)))),
    ],
    ids=lambda value: str(value) if isinstance(value, int | str) else "",
)
def test_each_invariant_broken_by_hand(invariant: int, what: str, breaks: Callable[[list[Fact]], list[Fact]]) -> None:
    facts = breaks(good())
    assert facts != good(), "nothing was broken"
    with pytest.raises(InvariantViolation) as caught:
        check(SHAPE, facts)
    assert caught.value.invariant == invariant, caught.value
    assert what in str(caught.value)
    assert caught.value.__notes__[0].startswith("at fact ")


def test_what_a_lost_replica_does_is_lost() -> None:
    """Its plans waste nothing of the members, but what it commits has to be the same."""
    facts = [*good()[:5], Formed(2, (0,)), Entered(0, 2, 0), plan(0, 2, (1,), (0,))]
    check(SHAPE, facts)
    zombie = [*good()[:13], Formed(2, (0,)), Committed(1, 1, RECORD, False)]
    check(SHAPE, zombie)


def test_a_rank_gives_up_what_is_fetched_anew() -> None:
    """Two ranks share a bucket; one had its result, gave it up to fetch it beside the other, and the source died in between."""
    shape, work = Shape(2, ((0, 1),)), Work("train 0", 2, (0,))

    def ordered(replica: int, generation: int, roster: tuple[int, ...], **what: Any) -> Planned:
        parts = {"transfers": (), "computes": (), "reduces": ()} | what
        return Planned(replica, Plan(0, generation, roster, work, (1, 1), **parts))

    def has(replica: int, rank: int, generation: int) -> Held:
        return Held(replica, rank, generation, 0, 0, 1, 5 + rank, (1, 1))

    facts: list[Fact] = [Formed(1, (0, 1)), Entered(0, 1, 0), Entered(1, 1, 0)]
    facts += [ordered(r, 1, (0, 1), computes=(Compute((r,), (0,)),), reduces=(0,)) for r in (0, 1)]
    facts += [has(0, 1, 1), has(1, 0, 1), has(1, 1, 1), Formed(2, (0, 1)), Entered(0, 2, 0), Entered(1, 2, 0)]
    facts += [ordered(r, 2, (0, 1), transfers=(Transfer(0, 1, 1, (0,)),)) for r in (0, 1)]
    facts += [has(0, 0, 2), Formed(3, (0,)), Entered(0, 3, 0)]
    check(shape, [*facts, ordered(0, 3, (0,), computes=(Compute((1,), (0,)),), reduces=(0,))])
    with pytest.raises(InvariantViolation, match="INV-4"):
        check(shape, [*facts[:-2], has(0, 1, 2), *facts[-2:], ordered(0, 3, (0,), reduces=(0,))])
