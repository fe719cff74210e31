"""The forms in which large messages travel: nothing is lost, nothing is taken that is no such form, and sizes are bounded."""

from __future__ import annotations

import enum
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_recover.control_plane import encoding
from megatron_recover.control_plane.coordinator_driver import announcements
from megatron_recover.control_plane.encoding import (
    MAX_IDS,
    PackedPeers,
    PackedStatus,
    PackedStatuses,
    Peer,
    packed_peers,
    packed_status,
    packed_statuses,
    runs,
    unpacked_peers,
    unpacked_status,
    unpacked_statuses,
)
from megatron_recover.control_plane.leader_messages import Announcement
from megatron_recover.control_plane.wire import LinkClosed, Message, encode
from megatron_recover.core.digest import commitment
from megatron_recover.core.membership_messages import NewGeneration
from megatron_recover.core.values import Contribution, HeldVersion, Journal, Record, Status, Statuses, Work
from tests.control_plane.partners import connected, framed
from tests.control_plane.test_wire import pair

sequences = st.one_of(
    st.lists(st.integers(0, 9000), max_size=20), st.builds(range, st.integers(0, 99), st.integers(0, 300)).map(list)
).map(tuple)
works = st.builds(
    Work, label=st.sampled_from(["train 1", "evaluate 1/0"]), num_microbatches=st.integers(0, 9000), buckets=sequences,
    digests=st.booleans(),
)  # fmt: skip
statuses = st.builds(
    Status,
    st.integers(0, 9),
    st.integers(1, 9),
    st.integers(0, 9),
    st.none() | works,
    st.lists(st.builds(Contribution, sequences, sequences), max_size=3).map(tuple),
    st.lists(st.builds(HeldVersion, st.integers(1, 9), sequences), max_size=3).map(tuple),
    st.none()
    | st.builds(
        lambda step, paces: commitment(Record(step, "train 1", (), paces=paces)), st.integers(0, 3), st.just(((0, 7),))
    ),
    st.builds(Journal, sequences, sequences),
)
hosts = st.sampled_from(["127.0.0.1", "10.0.0.2", "node-7", "", "::1", "[::1]", "[fd00::7]"])
addresses = st.one_of(
    st.builds("{}:{}/{:032x}".format, hosts, st.integers(0, 70000), st.integers(0, 2**128 - 1)),
    st.builds("{}:{}".format, hosts, st.sampled_from([1, 80, 65535, 65536, "080", "x", ""])),
    st.text(max_size=8),
)
peers = st.lists(st.builds(Peer, st.integers(0, 999), addresses, st.lists(addresses, max_size=4).map(tuple)), max_size=6).map(
    tuple
)


@given(sequences)
def test_runs_keep_every_sequence(ids: tuple[int, ...]) -> None:
    packed = runs(ids)
    assert len(packed) % 2 == 0 and sum(packed[1::2]) == len(ids)
    assert encoding._Unpacker().ids(packed) == ids


@given(statuses)
def test_a_status_arrives_as_it_was(status: Status) -> None:
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(packed_status(status)), type=PackedStatus)
    assert unpacked_status(travelled) == status


@given(st.lists(statuses, max_size=5))
def test_statuses_arrive_as_they_were(several: list[Status]) -> None:
    message = Statuses(1, 3, tuple(several))
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(packed_statuses(message)), type=PackedStatuses)
    assert unpacked_statuses(travelled, []) == message


@given(peers)
def test_addresses_arrive_as_they_were(several: tuple[Peer, ...]) -> None:
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(packed_peers(several)), type=PackedPeers)
    assert unpacked_peers(travelled) == several


def test_addresses_of_ipv6_are_as_small_as_others() -> None:
    """Their ports are bytes, and their host comes once: nothing is sent as text for each rank."""
    packed = packed_peers((Peer(0, "[fd00::1]:5", ("[fd00::1]:6", "[fd00::1]:7")),))
    assert packed.others == () and packed.hosts == (("[fd00::1]", 3),) and len(packed.ports) == 6


def whole(hint: Any, default: object = msgspec.NODEFAULT) -> st.SearchStrategy[Any]:
    """Values of a type in which no field, at any depth, has its default or is empty: a field that is lost on the way shows."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union or isinstance(hint, types.UnionType):
        found = st.one_of([whole(part) for part in parts if part is not type(None)])
    elif origin is typing.Literal:
        found = st.sampled_from(parts)
    elif origin is tuple and parts[-1] is Ellipsis:
        found = st.lists(whole(parts[0]), min_size=1, max_size=3).map(tuple)
    elif origin is tuple:
        found = st.tuples(*map(whole, parts))
    elif isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = typing.get_type_hints(hint)
        found = st.builds(
            hint, **{field.name: whole(hints[field.name], field.default) for field in msgspec.structs.fields(hint)}
        )
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        found = st.sampled_from(hint)
    else:
        found = {
            int: st.integers(1, 9000), bool: st.booleans(), str: st.text(min_size=1, max_size=8),
            bytes: st.binary(min_size=1, max_size=8), float: st.floats(0.5, 9.0),
        }[hint]  # fmt: skip
    return found.filter(lambda value: value != default)


@pytest.mark.parametrize("kind", typing.get_args(Message), ids=lambda kind: kind.__name__)
@settings(max_examples=5)
@given(data=st.data())
def test_every_field_of_every_message_arrives(kind: type, data: st.DataObject) -> None:
    """Also one that is added later: forms that are packed by hand lost `Work.digests`, which ended a healthy run."""
    sent = data.draw(whole(kind))
    assert _decoded(encode(sent)) == sent


@pytest.mark.parametrize("bad", [(3,), (3, 0), (3, -1), (0, MAX_IDS + 1), (0, MAX_IDS, 0, 1), (0, 2**62)], ids=str)
def test_runs_that_are_none_or_too_many_end_the_link_before_they_take_memory(bad: tuple[int, ...]) -> None:
    packed = replace(packed_status(Status(1, 3, 7, None, (), (), None)), started=bad)
    for message in (packed, PackedStatuses(1, 3, (), ((packed, None),))):
        body = msgspec.msgpack.encode(message)
        link, theirs = pair()
        theirs.sendall(framed(body))
        with pytest.raises(LinkClosed, match="runs of"):
            list(link.receive())
        link.close()
        theirs.close()


def test_equal_runs_of_a_frame_are_one_tuple_and_count_once() -> None:
    same = Contribution(tuple(range(MAX_IDS // 2)), (1,))
    message = Statuses(0, 3, tuple(Status(replica, 3, 7, None, (same,), (), None) for replica in range(4)))
    found = unpacked_statuses(packed_statuses(message), [])
    assert len({id(each.contributions[0].buckets) for each in found.statuses}) == 1


TWO = (Peer(0, "a:1", ("a:2", "odd")), Peer(1, "a:3", ("a:4", "a:5")))


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": (0, 3)}, {"replicas": (0, 1)}, {"sizes": ((3, 1),)}, {"sizes": ((2, 2),)}, {"sizes": ((0, 1), (6, 1))},
        {"sizes": ((9, 1), (-3, 1))}, {"hosts": (("a", 5),)}, {"hosts": (("a", 2**40),)}, {"ports": b""}, {"others": ()},
        {"others": ("x", "y")}, {"ports": packed_peers(TWO).ports + b"1"},
    ],
    ids=str,
)  # fmt: skip
def test_peers_that_do_not_fit_together_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        unpacked_peers(replace(packed_peers(TWO), **change))


# --- Sizes ---------------------------------------------------------------------------------------------------------------


def test_a_status_of_401_buckets_that_are_alike_is_small() -> None:
    """It had the ids once a bucket: 103 KB."""
    ids = tuple(range(128))
    record = commitment(Record(6, "train 7", (), paces=tuple((replica, 10**9) for replica in range(64))))
    work = Work("train 8", 8192, tuple(range(401)))
    status = Status(
        63, 3, 7, work, (Contribution(work.buckets, ids),), (HeldVersion(3, tuple(range(200))),), record, Journal(ids, ids[:99])
    )
    assert len(encode(status)) < 1500


def _job(num_replicas: int, num_ranks: int) -> dict[int, Peer]:
    peers = {}
    for replica in range(num_replicas):
        host = f"10.0.{replica // 250}.{replica % 250}"
        ranks = (f"{host}:{30000 + 7 * rank}" for rank in range(num_ranks))
        peers[replica] = Peer(replica, f"{host}:29000", tuple(ranks))
    return peers


def _sent(new: NewGeneration, peers: dict[int, Peer], announced: set[int]) -> dict[int, bytes]:
    return dict(announcements(new, peers, announced, 0.5))


def test_an_announcement_is_encoded_once_for_all_and_later_ones_have_what_is_new_only() -> None:
    peers = _job(20, 8)
    first = _sent(NewGeneration(1, tuple(range(19))), peers, set())
    assert list(first) == list(range(19)) and len({id(each) for each in first.values()}) == 1
    assert _decoded(first[0]) == Announcement(NewGeneration(1, tuple(range(19))), tuple(peers[r] for r in range(19)), 0.5)
    second = _sent(NewGeneration(2, tuple(range(1, 19))), peers, set(range(19)))
    assert len({id(each) for each in second.values()}) == 1 and _decoded(second[1]).peers == ()
    # A replica that joins is told of all, the others of that one.
    third = _sent(NewGeneration(3, (2, 3, 19)), peers, set(range(19)))
    assert _decoded(third[2]).peers == _decoded(third[3]).peers == (peers[19],)
    assert _decoded(third[19]).peers == (peers[2], peers[3], peers[19])


def _decoded(body: bytes) -> Any:
    link, receiving = connected()
    link.put(body)
    [message] = receiving.receive()
    link.close()
    receiving.close()
    return message


def test_the_size_of_announcements() -> None:
    """Of 1000 replicas of 64 ranks: two bytes an address the first time, and no address at all when a replica is lost."""
    peers = _job(1000, 64)
    first = _sent(NewGeneration(1, tuple(range(1000))), peers, set())[0]
    assert len(first) < 2 * 64 * 1000 + 50_000
    later = _sent(NewGeneration(2, tuple(range(999))), peers, set(range(1000)))[0]
    assert len(later) < 5_000
