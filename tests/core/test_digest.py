"""What stands for a record in a vote: equal exactly where records are, small at any size; says where two differ."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_recover.core import digest as of
from megatron_recover.core.digest import bare, differences, digest, summarize
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.membership_messages import Diverged, NewGeneration
from megatron_recover.core.own_record import adopted
from megatron_recover.core.rank_messages import Holds, Promised
from megatron_recover.core.replica import Committed, ToCoordinator, ToPeers
from megatron_recover.core.values import Ballot, BucketVersion, Commitment, Record, Vote
from tests.core.build import complete, holds, lead, record, status, vote, working

checksums = st.integers(0, 2**63 - 1)
versions = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 9), st.lists(checksums, min_size=1, max_size=3).map(tuple)), max_size=80
).map(lambda items: tuple(BucketVersion(*item) for item in items))
records = st.builds(
    Record,
    st.integers(0, 3),
    st.sampled_from(["train 1", "train 2", "evaluate 1/0"]),
    versions,
    st.sampled_from([(), ("exit: SIGTERM",)]),
    st.sampled_from([(), ((0, 10),)]),
)


@given(records, records)
def test_digests_are_equal_exactly_where_records_are(one: Record, other: Record) -> None:
    assert (digest(one) == digest(other)) == (bare(one) == bare(other))
    assert digest(msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=Record)) == digest(one)


@given(records.filter(lambda one: one.versions), st.data())
def test_any_change_changes_the_digest_and_is_named(one: Record, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(one.versions) - 1))
    at = one.versions[index]
    rank = data.draw(st.integers(0, len(at.checksums) - 1))
    flipped = at.checksums[rank] ^ (1 << data.draw(st.integers(0, 62)))
    changed_version = data.draw(
        st.sampled_from([
            replace(at, bucket=at.bucket + 1),
            replace(at, version=at.version + 1),
            replace(at, checksums=(*at.checksums[:rank], flipped, *at.checksums[rank + 1 :])),
            replace(at, checksums=(*at.checksums, 0)),
        ])
    )  # fmt: skip
    other = replace(one, versions=(*one.versions[:index], changed_version, *one.versions[index + 1 :]))
    assert digest(other) != digest(one)
    (group,) = [
        positions
        for number in [min(of.MAX_GROUPS, len(one.versions))]
        for positions in (range(i * len(one.versions) // number, (i + 1) * len(one.versions) // number) for i in range(number))
        if index in positions
    ]
    first, last = one.versions[group[0]].bucket, one.versions[group[-1]].bucket
    named = f"bucket {first}" if len(group) == 1 else f"buckets {first} to {last}"
    assert differences(one, [summarize(other).outline]) == f"they differ in {named}"
    for shorter in (replace(one, versions=one.versions[:-1]), replace(one, versions=(*one.versions, at))):
        assert digest(shorter) != digest(one)


@pytest.mark.parametrize("field", [name for name in Record.__struct_fields__ if name not in ("requests", "paces")])
def test_every_field_that_voters_agree_on_is_in_the_digest(field: str) -> None:
    """A field that is added to the record is covered without more ado; one that is a voter's own has to be in the vote."""
    one = record()
    other = replace(one, **{field: {"versions": (), "state_digest": 5}.get(field)})
    assert digest(other) != digest(one)
    if field != "versions":
        assert differences(one, [summarize(other).outline]) == f"they differ in field {field!r}"


def test_what_voters_say_of_themselves_is_in_the_vote_and_not_in_the_digest() -> None:
    own = [
        name
        for name in Record.__struct_fields__
        if getattr(bare(replace(record(), requests=("a",), paces=((0, 1),))), name) == ()
    ]
    assert own == ["requests", "paces"]
    assert set(own) <= set(Vote.__struct_fields__) and set(own) <= set(Ballot.__struct_fields__)
    assert digest(record(requests=("exit",))) == digest(record())


def test_an_outline_names_each_bucket_up_to_its_groups_and_runs_of_them_above() -> None:
    def sized(num: int, wrong: int = -1) -> Record:
        return record(0, *(complete(bucket, checksum=7 + (bucket == wrong)) for bucket in range(num)))

    assert differences(sized(64), [summarize(sized(64, 33)).outline]) == "they differ in bucket 33"
    assert differences(sized(401), [summarize(sized(401, 400)).outline]) == "they differ in buckets 394 to 400"
    several = [summarize(sized(401, wrong)).outline for wrong in (0, 1, 400)]
    assert differences(sized(401), several) == "they differ in buckets 0 to 5, buckets 394 to 400"
    assert differences(sized(4), [summarize(sized(3)).outline]) == "they differ in the number of buckets"
    assert differences(sized(4), [summarize(sized(4)).outline]) == "their outlines are alike"


@pytest.mark.parametrize(("num_buckets", "num_ranks"), [(64, 1), (401, 8), (5000, 64)])
def test_a_vote_does_not_grow_with_buckets_and_ranks(num_buckets: int, num_ranks: int) -> None:
    """It had the whole record before: 49 KB for 401 buckets of 8 ranks each."""
    large = Record(
        10**6, "train 1000000", tuple(BucketVersion(b, 9, tuple(range(2**62, 2**62 + num_ranks))) for b in range(num_buckets)),
        ("exit: SIGTERM",), ((63, 10**9),),
    )  # fmt: skip
    assert len(msgspec.msgpack.encode(vote(63, of=large))) < 512


def test_a_disagreement_says_which_buckets_differ() -> None:
    state, _ = lead(working(), holds(checksum=7))
    others = [vote(number, of=record(0, complete(checksum=8))) for number in (1, 2)]
    _, (effect,) = lead(state, *others)
    assert isinstance(effect, ToCoordinator) and isinstance(effect.message, Diverged)
    assert effect.message.minority == (0,)
    assert effect.message.reason == "replicas disagree on the result of the step: [0] against [1, 2]; they differ in bucket 0"


def test_a_commitment_travels_without_results_and_is_made_whole_from_the_members_own() -> None:
    done = record(requests=("exit: SIGTERM",))
    ahead = status(1, step=1, work=None, committed=done)
    assert ahead.committed is not None and ahead.committed.record.versions == ()
    state, _ = lead(working(), holds(), NewGeneration(2, (0, 1)), Promised(0, 2))
    assert adopted(state, ahead.committed) == done
    state, effects = lead(state, ahead)
    assert effects[0] == Committed(done, 2, True) and state.committed == done
    # Its own status says the same to others.
    _, effects = lead(state, NewGeneration(3, (0, 1)), Promised(0, 3))
    (said,) = [effect.message for effect in effects if isinstance(effect, ToPeers)]
    assert said == status(0, generation=3, step=1, work=None, committed=done)


@pytest.mark.parametrize("held", [(), (holds(checksum=8),), (holds(2),)], ids=["nothing", "another result", "another version"])
def test_inv_2_a_record_that_is_not_of_a_replicas_own_results_is_never_adopted(held: tuple[Holds, ...]) -> None:
    state, _ = lead(working(), *held, NewGeneration(2, (0, 1)), Promised(0, 2))
    with pytest.raises(InvariantViolation, match="INV-2: replica 0 is to adopt step 0"):
        lead(state, status(1, step=1, work=None, committed=record()))


def test_a_commitment_is_refused_where_any_other_field_was_changed() -> None:
    state, _ = lead(working(), holds(), NewGeneration(2, (0, 1)), Promised(0, 2))
    right = of.commitment(record())
    wrong = Commitment(replace(right.record, label="train 1"), right.digest)
    with pytest.raises(InvariantViolation, match="INV-2"):
        adopted(state, wrong)
