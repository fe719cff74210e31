"""How large messages travel: ids as runs, each committed record once a frame, addresses as one table of bytes.

Each form is lossless: what is unpacked equals what was packed. Whatever is unpacked is bounded before memory is taken for it,
and what is no such form raises ValueError. This module knows nothing of sockets and frames (`control_plane/wire.py`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from megatron_recover.core import values
from megatron_recover.core.values import Contribution, HeldVersion, Value

MAX_IDS = 2**23
"""Ids that the runs of one frame may stand for, equal runs once: 1024 buckets of 8192 microbatches if all buckets differ."""

Runs = tuple[int, ...]
"""A sequence of ids as first, count, first, count, ...: each run ascends by one. Contiguous ids take two numbers."""


def runs(ids: Iterable[int]) -> Runs:
    """Return a sequence of ids as runs; the order of the ids is kept."""
    found: list[int] = []
    expected = None
    for each in ids:
        if each == expected:
            found[-1] += 1
        else:
            found += (each, 1)
        expected = each + 1
    return tuple(found)


class _Unpacker:
    """Takes the runs of one frame apart, within `MAX_IDS` altogether. Equal runs become one tuple in memory."""

    def __init__(self) -> None:
        self._left = MAX_IDS
        self._known: dict[Runs, tuple[int, ...]] = {}

    def ids(self, packed: Runs) -> tuple[int, ...]:
        """Return the ids of runs. Raises ValueError where they are none, or stand for too many ids."""
        if packed not in self._known:
            counts = packed[1::2]
            if len(packed) % 2 or any(count < 1 for count in counts):
                raise ValueError("runs of ids are pairs of a first id and a positive count")
            self._left -= sum(counts)
            if self._left < 0:
                raise ValueError(f"the runs of a frame stand for more than {MAX_IDS} ids")
            spans = (range(first, first + count) for first, count in zip(packed[::2], counts, strict=True))
            self._known[packed] = tuple(itertools.chain.from_iterable(spans))
        return self._known[packed]


# --- Statuses --------------------------------------------------------------------------------------------------------------


class PackedWork(Value, frozen=True):
    """How `values.Work` travels."""

    label: str
    num_microbatches: int
    buckets: Runs
    digests: bool


class PackedStatus(Value, frozen=True):
    """How `values.Status` travels."""

    replica: values.ReplicaId
    generation: values.Generation
    step: int
    work: PackedWork | None
    contributions: tuple[tuple[Runs, Runs], ...]
    """(buckets, microbatches) of each group."""
    complete: tuple[tuple[values.Version, Runs], ...]
    committed: values.Commitment | None
    started: Runs
    finished: Runs
    """Of the journal, in its order."""


class PackedStatuses(Value, frozen=True):
    """How `values.Statuses` travels: each committed record once. It has the pace of every member, and is mostly the same."""

    replica: values.ReplicaId
    generation: values.Generation
    records: tuple[values.Commitment, ...]
    statuses: tuple[tuple[PackedStatus, int | None], ...]
    """Each without its record, and the position of that in `records`."""


def packed_status(status: values.Status) -> PackedStatus:
    """Return a status as it travels."""
    work = status.work
    return PackedStatus(
        status.replica, status.generation, status.step,
        PackedWork(work.label, work.num_microbatches, runs(work.buckets), work.digests) if work is not None else None,
        tuple((runs(each.buckets), runs(each.microbatches)) for each in status.contributions),
        tuple((each.version, runs(each.buckets)) for each in status.complete),
        status.committed, runs(status.journal.started), runs(status.journal.finished),
    )  # fmt: skip


def unpacked_status(message: PackedStatus) -> values.Status:
    """Return a status that has travelled. Raises ValueError for runs that are none or stand for too many ids."""
    return _status(message, _Unpacker())


def _status(message: PackedStatus, unpacker: _Unpacker) -> values.Status:
    ids, work = unpacker.ids, message.work
    return values.Status(
        message.replica, message.generation, message.step,
        values.Work(work.label, work.num_microbatches, ids(work.buckets), work.digests) if work is not None else None,
        tuple(Contribution(ids(buckets), ids(microbatches)) for buckets, microbatches in message.contributions),
        tuple(HeldVersion(version, ids(buckets)) for version, buckets in message.complete),
        message.committed, values.Journal(ids(message.started), ids(message.finished)),
    )  # fmt: skip


def packed_statuses(message: values.Statuses) -> PackedStatuses:
    """Return several statuses as they travel."""
    records: list[values.Commitment] = []
    statuses = tuple(
        (packed_status(replace(status, committed=None)), _position(records, status.committed)) for status in message.statuses
    )
    return PackedStatuses(message.replica, message.generation, tuple(records), statuses)


def unpacked_statuses(message: PackedStatuses, known: list[values.Commitment]) -> values.Statuses:
    """Return several statuses that have travelled. Raises ValueError where a record is missing, or for what is no status.

    Records that are `known` stay those; others replace them: what comes in several frames shares them in memory.
    """
    for _, position in message.statuses:
        if position is not None and not 0 <= position < len(message.records):
            raise ValueError(f"a status refers to record {position} of {len(message.records)}")
    records = [next((other for other in known if other == record), record) for record in message.records]
    known[:] = records
    unpacker = _Unpacker()
    statuses = (
        replace(_status(status, unpacker), committed=None if position is None else records[position])
        for status, position in message.statuses
    )
    return values.Statuses(message.replica, message.generation, tuple(statuses))


def _position(records: list[values.Commitment], record: values.Commitment | None) -> int | None:
    """Return where a record is among those, at the end if it was not yet. There are few, most often it is one of them."""
    if record is None:
        return None
    if record not in records:
        records.append(record)
    return records.index(record)


# --- Addresses -------------------------------------------------------------------------------------------------------------


class Peer(Value, frozen=True):
    """Where to find the ranks of one replica."""

    replica: values.ReplicaId
    leader_address: str
    data_addresses: tuple[str, ...]
    """By rank."""


class PackedPeers(Value, frozen=True):
    """How `Peer`s travel: two bytes an address where many are on a host. Addresses stand in the order leader, then ranks."""

    replicas: Runs
    sizes: tuple[tuple[int, int], ...]
    """(addresses of a peer, how many peers in a row have so many)."""
    hosts: tuple[tuple[str, int], ...]
    """(host, how many addresses in a row are on it)."""
    ports: bytes
    """Two bytes each, big-endian; 0 for an address that is among `others`."""
    others: tuple[str, ...]
    """Addresses of another form, as they are."""


_ADDRESS = re.compile(r"([^:/]*):([1-9][0-9]{0,4})")
MAX_ADDRESSES = 2**21
"""Of one announcement: 1000 replicas of 2000 ranks."""


def packed_peers(peers: Sequence[Peer]) -> PackedPeers:
    """Return peers as they travel."""
    hosts, ports, others = list[str](), bytearray(), list[str]()
    for address in (address for peer in peers for address in (peer.leader_address, *peer.data_addresses)):
        found = _ADDRESS.fullmatch(address)
        if found is None or int(found[2]) >= 2**16:
            others.append(address)
            hosts.append("")
            ports += bytes(2)
        else:
            hosts.append(found[1])
            ports += int(found[2]).to_bytes(2)
    return PackedPeers(
        runs(peer.replica for peer in peers), _counted(1 + len(peer.data_addresses) for peer in peers), _counted(hosts),
        bytes(ports), tuple(others),
    )  # fmt: skip


def unpacked_peers(message: PackedPeers) -> tuple[Peer, ...]:
    """Return peers that have travelled. Raises ValueError where parts are missing or left over, or stand for too many."""
    ports = [high << 8 | low for high, low in zip(message.ports[::2], message.ports[1::2], strict=False)]
    num_addresses = len(ports)
    replicas = _Unpacker().ids(message.replicas)
    sizes = _repeated(message.sizes, len(replicas))
    hosts = _repeated(message.hosts, num_addresses)
    if num_addresses > MAX_ADDRESSES or sum(sizes) != num_addresses or min(sizes, default=1) < 1:
        raise ValueError(f"peers of {sum(sizes)} addresses come with {num_addresses} ports; at most {MAX_ADDRESSES} are taken")
    if ports.count(0) != len(message.others):
        raise ValueError(f"{ports.count(0)} addresses of another form come with {len(message.others)}")
    others = iter(message.others)
    addresses = [f"{host}:{port}" if port else next(others) for host, port in zip(hosts, ports, strict=True)]
    ends = tuple(itertools.accumulate(sizes, initial=0))
    return tuple(
        Peer(replica, addresses[start], tuple(addresses[start + 1 : end]))
        for replica, start, end in zip(replicas, ends, ends[1:], strict=False)
    )


def _counted[T](items: Iterable[T]) -> tuple[tuple[T, int], ...]:
    """Return equal items in a row as one item and their number."""
    return tuple((item, sum(1 for _ in group)) for item, group in itertools.groupby(items))


def _repeated[T](counted: Sequence[tuple[T, int]], total: int) -> list[T]:
    """Undo `_counted`. Raises ValueError unless it stands for `total` items."""
    if any(count < 1 for _, count in counted) or sum(count for _, count in counted) != total:
        raise ValueError(f"runs that have to stand for {total} items stand for {sum(count for _, count in counted)}")
    return [item for item, count in counted for _ in range(count)]
