"""Properties of the pure pieces: quotas, dealing, decisions, votes, recovery plans."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_recover.core import bucket, quota, recovery, vote
from megatron_recover.core.contribution import by_bucket
from megatron_recover.core.digest import commitment, digest
from megatron_recover.core.plan import plan_of
from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.values import Ballot, BucketVersion, Held, Record, Shape, Status, Work
from tests.core.build import WORK, ballot, complete, record, status

rosters = st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True).map(sorted).map(tuple)


@given(st.integers(0, 40), rosters)
def test_inv_1_shares_cut_the_batch_into_contiguous_even_pieces(num_microbatches: int, roster: tuple[int, ...]) -> None:
    quotas = quota.balanced(num_microbatches, (1,) * len(roster))
    shares = [quota.share(quotas, roster, replica) for replica in roster]
    assert list(itertools.chain(*shares)) == list(range(num_microbatches))
    assert tuple(map(len, shares)) == quotas


def test_a_bucket_is_complete_only_when_all_its_ranks_hold_one_version() -> None:
    shape = Shape(2, ((0, 1), (1,)))
    both = (Held(0, 1, 5),), (Held(0, 1, 6), Held(1, 1, 9))
    assert bucket.complete(shape, both, (0, 1)) == (BucketVersion(0, 1, (5, 6)), BucketVersion(1, 1, (9,)))
    assert bucket.complete(shape, both, (1,)) == (BucketVersion(1, 1, (9,)),)
    mixed = (Held(0, 1, 5),), (Held(0, 2, 6),)
    assert bucket.complete(shape, mixed, (0,)) == ()
    assert bucket.complete(shape, ((Held(0, 1, 5),), ()), (0,)) == ()
    assert bucket.complete(shape, (), (0,)) == ()


def test_the_highest_version_is_decided_and_sources_are_spread() -> None:
    holders = [status(r, complete=tuple(complete(b) for b in range(3))) for r in (1, 4)]
    decisions = bucket.decide([status(0), *holders], range(3), 0)
    assert [item.source for item in decisions] == [1, 4, 1]
    assert all(item.holders == (1, 4) for item in decisions)
    again = [replace(each, generation=3) for each in (status(0), *holders)]
    assert [item.source for item in bucket.decide(again, range(3), 0)] == [4, 1, 4], "a source may be at a bad link"
    newer = bucket.decide([status(0, complete=(complete(0, 1),)), status(1, complete=(complete(0, 3),))], (0,), 0)
    assert newer == (bucket.Decision(0, 3, (1,), 1),)


def naive_tally(cast: dict[int, Record], roster: tuple[int, ...]) -> tuple[str, ...] | None:
    """The commit rule, written down once more: the requests if the step is committed, None if not."""
    if any(replica not in cast for replica in roster):
        return None
    kept = [cast[replica] for replica in roster]
    if any((r.step, r.label, r.versions) != (kept[0].step, kept[0].label, kept[0].versions) for r in kept):
        return None
    return tuple(sorted(set().union(*(r.requests for r in kept))))


records = st.builds(
    record,
    st.just(0),
    st.builds(complete, checksum=st.sampled_from([1, 1, 1, 2])),
    requests=st.sampled_from([(), ("a",), ("b",)]),
)


@given(rosters, st.dictionaries(st.integers(0, 9), records, max_size=8))
def test_inv_2_a_step_is_committed_only_by_equal_votes_of_all(roster: tuple[int, ...], cast: dict[int, Record]) -> None:
    outcome = vote.tally([ballot(item, replica) for replica, item in cast.items()], roster)
    expected = naive_tally(cast, roster)
    if expected is None:
        assert outcome is None or isinstance(outcome, vote.Disagreement)
        assert (outcome is None) == any(replica not in cast for replica in roster)
    else:
        assert isinstance(outcome, Ballot)
        assert outcome.requests == expected


@given(st.lists(st.tuples(st.sets(st.integers(0, 9), min_size=1), records), max_size=8), st.data())
def test_what_is_gathered_in_parts_is_what_all_votes_say(parts: list[tuple[set[int], Record]], data: st.DataObject) -> None:
    """However a tree groups votes, and whatever comes twice: who said what, what was asked for, and how fast who is."""
    paces: dict[int, int] = {}
    said = dict(item for voters, of in reversed(parts) for item in dict.fromkeys(voters, of).items())
    together: tuple[Ballot, ...] = ()
    for number, (voters, of) in enumerate(parts):
        part = vote.gather((), [ballot(replace(of, paces=((voter, number),)), voter) for voter in sorted(voters)])
        paces = dict.fromkeys(voters, number) | paces
        together = vote.gather(together, part)
    cut = data.draw(st.integers(0, len(together)))
    assert vote.gather(together[:cut], together[cut:]) == vote.gather(together, together) == together
    digests = {voter: each.digest for each in together for voter in each.voters}
    assert digests == {voter: digest(of) for voter, of in said.items()}
    assert len({each.digest for each in together}) == len(together)
    assert all(tuple((voter, paces[voter]) for voter in each.voters) == each.paces for each in together)
    asked = {request for each in together for request in each.requests}
    assert asked >= {request for of in said.values() for request in of.requests}


@pytest.mark.parametrize(
    ("opinions", "minority"),
    [
        ({0: 1, 1: 1}, None),
        ({0: 1}, None),
        ({0: 1, 1: 2}, ()),
        ({0: 1, 1: 2, 2: 2}, (0,)),
        ({0: 1, 1: 1, 2: 2, 3: 2}, ()),
        ({0: 1, 1: 2, 2: 3}, ()),
        ({0: 1, 1: 1, 2: 1, 3: 2, 4: 3}, (3, 4)),
    ],
)
def test_a_strict_majority_says_who_is_right(opinions: dict[int, int], minority: tuple[int, ...] | None) -> None:
    found = vote.disagreement(opinions, "this")
    assert (found.minority if found else None) == minority


# --- Recovery ------------------------------------------------------------------------------------------------------------


@st.composite
def exchanges(draw: st.DrawFn) -> list[Status]:
    """Statuses that members of a new generation can have for one step: disjoint contributions, some buckets complete."""
    roster = draw(rosters)
    num_microbatches, num_buckets = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    work = Work("train 0", num_microbatches, tuple(range(num_buckets)))
    held: dict[int, list[set[int]]] = {replica: [set() for _ in range(num_buckets)] for replica in roster}
    for number, microbatch in itertools.product(range(num_buckets), range(num_microbatches)):
        owner = draw(st.sampled_from([*roster, None]))
        if owner is not None:
            held[owner][number].add(microbatch)
    return [
        status(
            replica,
            work=draw(st.sampled_from([work, work])) if any(held[replica]) or draw(st.booleans()) else None,
            contributions=tuple(tuple(sorted(ids)) for ids in held[replica]),
            complete=tuple(complete(number) for number in range(num_buckets) if draw(st.integers(0, 5)) == 0),
        )
        for replica in roster
    ]


@given(exchanges(), st.randoms(use_true_random=False))
def test_inv_1_4_7_a_recovery_plan_covers_every_bucket_exactly_once(statuses: list[Status], shuffle: object) -> None:
    found = recovery.recover(statuses, 0)
    assert isinstance(found, recovery.Recovery)
    if found.work is None:
        return
    assert recovery.recover(statuses[::-1], 0) == found, "the plan depends on the order of the statuses"
    roster = tuple(item.replica for item in statuses)
    plans = {replica: plan_of(found, replica, 2, roster) for replica in roster}
    assert max(found.quotas) <= found.work.num_microbatches
    for replica, count in zip(roster, found.quotas, strict=True):
        (mine,) = (s.contributions for s in statuses if s.replica == replica)
        ids = {i for each in mine for i in each.microbatches} | {i for c in plans[replica].computes for i in c.microbatches}
        assert count == len(ids)
    if found.reduces:
        assert sum(found.quotas) >= found.work.num_microbatches
    if len(found.work.buckets) == 1:
        assert not found.reduces or sum(found.quotas) == found.work.num_microbatches
    common = {(p.transfers, p.reduces, p.quotas, p.work, p.step) for p in plans.values()}
    assert len(common) == 1, "members disagree on the plan"
    decided = {item.bucket for item in found.decisions}
    complete_somewhere = {number for s in statuses for item in s.complete for number in item.buckets}
    assert decided == complete_somewhere & set(found.work.buckets)
    assert decided.isdisjoint(found.reduces) and decided | set(found.reduces) == set(found.work.buckets)
    for number in found.reduces:
        kept = [i for s in statuses for i in by_bucket(s.contributions).get(number, ())]
        fresh = _computed_into(plans, number)
        assert sorted(kept + fresh) == list(range(found.work.num_microbatches)), "INV-1"
        assert set(kept).isdisjoint(fresh), "INV-7"
    for number in decided:
        assert _computed_into(plans, number) == [], "INV-4"
        holders = {s.replica for s in statuses if any(number in item.buckets for item in s.complete)}
        (transfer,) = [t for t in plans[roster[0]].transfers if t.bucket == number] or [None]
        lacking = set(roster) - holders
        assert (transfer is None) == (not lacking)
        assert transfer is None or (transfer.source in holders and set(transfer.targets) == lacking)


def _computed_into(plans: dict[int, Plan], number: int) -> list[int]:
    return [i for p in plans.values() for c in p.computes if number in c.into for i in c.microbatches]


def test_a_member_that_is_behind_adopts_the_record() -> None:
    done = record(0)
    ahead = status(0, step=1, work=None, committed=done)
    found = recovery.recover([ahead, status(1, complete=(complete(),))], 0)
    assert isinstance(found, recovery.Recovery)
    assert (found.step, found.adopt, found.work) == (1, commitment(done), None)


def test_contributions_to_an_older_step_do_not_count() -> None:
    ahead = status(0, step=1, work=WORK, contributions=((0,),), committed=record(0))
    behind = status(1, contributions=((1,),), complete=(complete(),))
    found = recovery.recover([ahead, behind], 0)
    assert isinstance(found, recovery.Recovery)
    assert found.decisions == () and found.reduces == (0,)
    assert found.dealt == ((1, 1, (0,)), (0, 2, (0,)))
    assert found.quotas == (2, 1)


def test_steps_that_differ_by_more_than_one_are_a_defect() -> None:
    with pytest.raises(ValueError, match="differ by more than one"):
        recovery.recover([status(0, step=2, committed=record(1)), status(1, step=0)], 0)


def test_members_that_began_different_work_disagree() -> None:
    other = Work("evaluate 0", 3, (0,))
    found = recovery.recover([status(0), status(1), status(2, work=other)], 0)
    assert isinstance(found, vote.Disagreement)
    assert found.minority == (2,) and "disagree on what step 0 is" in found.reason
    assert found.reason.endswith("; replicas 0 and 2 differ in label: 'train 0' against 'evaluate 0'")


def test_a_tie_says_what_differs_and_both_values() -> None:
    """Not all of it: a message has a line."""
    other = replace(WORK, digests=True, buckets=tuple(range(500)))
    found = recovery.recover([status(1), status(2, work=other)], 0)
    assert isinstance(found, vote.Disagreement) and found.minority == ()
    assert found.reason.startswith("replicas disagree on what step 0 is, and no majority says who is right: [1] against [2]; ")
    assert "buckets: (0,) against (0, 1, 2, " in found.reason and "digests: False against True" in found.reason
    assert len(found.reason) < 300


def test_members_that_committed_different_records_disagree() -> None:
    ahead = [status(r, step=1, work=None, committed=record(0, complete(version=1 + (r == 1)))) for r in range(3)]
    found = recovery.recover(ahead, 0)
    assert isinstance(found, vote.Disagreement)
    assert found.minority == (1,) and "disagree on the record of step 0" in found.reason
    assert re.search(r"; replicas 0 and 1 differ in digest: [0-9a-f]{32} against [0-9a-f]{32}$", found.reason)


def test_a_plan_needs_work() -> None:
    found = recovery.recover([status(0, work=None)], 0)
    assert isinstance(found, recovery.Recovery)
    with pytest.raises(ValueError, match="nobody has begun"):
        plan_of(found, 0, 1, (0,))


def test_what_an_outvoted_replica_took_part_in_is_withdrawn() -> None:
    """Its own ids are dealt; the survivors keep their local gradients."""
    held = [status(r, contributions=((r,),), complete=(complete(version=2),)) for r in (0, 1)]
    found = recovery.recover(held, 3)
    assert isinstance(found, recovery.Recovery)
    assert (found.decisions, found.reduces, found.dealt) == ((), (0,), ((0, 2, (0,)),))
    assert "results older than generation 3 are withdrawn" in found.reason
    made_since = recovery.recover([held[0], status(1, contributions=((1, 2),), complete=(complete(version=3),))], 3)
    assert isinstance(made_since, recovery.Recovery)
    assert made_since.decisions == (bucket.Decision(0, 3, (1,), 1),)


def test_what_a_member_has_committed_is_never_withdrawn() -> None:
    done = record(0)
    behind = status(1, complete=(complete(),))
    found = recovery.recover([status(0, step=1, work=None, committed=done), behind], 2)
    assert isinstance(found, recovery.Recovery)
    assert found.adopt == commitment(done) and "withdrawn" not in found.reason


def test_an_id_goes_only_into_the_buckets_that_miss_it() -> None:
    """Id 2 was lost once before and recomputed for bucket 1 only; now the holder of bucket 0 is lost too."""
    work = Work("train 0", 3, (0, 1))
    found = recovery.recover(
        [status(0, work=work, contributions=((0,), (0, 2))), status(1, work=work, contributions=((1,), (1,)))], 0
    )
    assert isinstance(found, recovery.Recovery)
    assert found.dealt == ((1, 2, (0,)),)
