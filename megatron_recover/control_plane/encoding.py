"""Compact forms of large messages.

Ids are sent as runs, each committed record once a frame, addresses as one table of bytes. Each form
is lossless: unpacking restores what was packed. The size of the result is checked before memory is
allocated for it, and a malformed form raises ValueError. This module uses no sockets and no frames
(`control_plane/wire.py`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from megatron_recover.core.values import (
    Commitment,
    Contribution,
    Generation,
    HeldVersion,
    Journal,
    ReplicaId,
    Status,
    Statuses,
    Value,
    Version,
    Work,
)

MAX_IDS = 2**23
"""Number of ids that the runs of one frame may stand for, equal runs counted once. Enough for 1024
different buckets of 8192 microbatches."""

Runs = tuple[int, ...]
"""A sequence of ids as first, count, first, count, ...; within a run each id is one more than the
id before. Contiguous ids take two numbers."""


def runs(ids: Iterable[int]) -> Runs:
    """Return a sequence of ids as runs, in the same order."""
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
    """Unpacks the runs of one frame, at most `MAX_IDS` ids altogether.

    Equal runs share one tuple.
    """

    def __init__(self) -> None:
        self._left = MAX_IDS
        self._known: dict[Runs, tuple[int, ...]] = {}

    def ids(self, packed: Runs) -> tuple[int, ...]:
        """Return the ids that `packed` stands for.

        Raises ValueError if `packed` is malformed, or if the frame stands for too many ids.
        """
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


# --- Statuses -----------------------------------------------------------------------------------


class PackedWork(Value, frozen=True):
    """The form in which `Work` is sent."""

    label: str
    num_microbatches: int
    buckets: Runs
    digests: bool


class PackedStatus(Value, frozen=True):
    """The form in which `Status` is sent."""

    replica: ReplicaId
    generation: Generation
    step: int
    work: PackedWork | None
    contributions: tuple[tuple[Runs, Runs], ...]
    """(buckets, microbatches) of each contribution."""
    complete: tuple[tuple[Version, Runs], ...]
    committed: Commitment | None
    started: Runs
    finished: Runs
    """The finished microbatches of the journal, in its order, like `started`."""
    state_digest: int | None


class PackedStatuses(Value, frozen=True):
    """The form in which `Statuses` is sent, with each committed record once.

    A record has the pace of every member, and most members hold the same record.
    """

    replica: ReplicaId
    generation: Generation
    records: tuple[Commitment, ...]
    statuses: tuple[tuple[PackedStatus, int | None], ...]
    """(status without its record, position of that record in `records` or None) of each status."""


def packed_status(status: Status) -> PackedStatus:
    """Return the form in which a status is sent."""
    work = status.work
    return PackedStatus(
        status.replica, status.generation, status.step,
        PackedWork(work.label, work.num_microbatches, runs(work.buckets), work.digests) if work is not None else None,
        tuple((runs(each.buckets), runs(each.microbatches)) for each in status.contributions),
        tuple((each.version, runs(each.buckets)) for each in status.complete),
        status.committed, runs(status.journal.started), runs(status.journal.finished), status.state_digest,
    )  # fmt: skip


def unpacked_status(message: PackedStatus) -> Status:
    """Return the status that was sent in this form. Raises ValueError if the form is malformed."""
    return _status(message, _Unpacker())


def _status(message: PackedStatus, unpacker: _Unpacker) -> Status:
    ids, work = unpacker.ids, message.work
    return Status(
        message.replica, message.generation, message.step,
        Work(work.label, work.num_microbatches, ids(work.buckets), work.digests) if work is not None else None,
        tuple(Contribution(ids(buckets), ids(microbatches)) for buckets, microbatches in message.contributions),
        tuple(HeldVersion(version, ids(buckets)) for version, buckets in message.complete),
        message.committed, Journal(ids(message.started), ids(message.finished)), message.state_digest,
    )  # fmt: skip


def packed_statuses(message: Statuses) -> PackedStatuses:
    """Return the form in which several statuses are sent."""
    records: list[Commitment] = []
    statuses = tuple(
        (packed_status(replace(status, committed=None)), _position(records, status.committed)) for status in message.statuses
    )
    return PackedStatuses(message.replica, message.generation, tuple(records), statuses)


def unpacked_statuses(message: PackedStatuses, known: list[Commitment]) -> Statuses:
    """Return the statuses that were sent in this form. Raises ValueError if the form is malformed.

    A record that equals one of `known` is replaced by that object; then `known` becomes the records
    of this message. So statuses that arrive in several frames share their records in memory.
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
    return Statuses(message.replica, message.generation, tuple(statuses))


def _position(records: list[Commitment], record: Commitment | None) -> int | None:
    """Return the position of a record in `records`, after appending it if it is missing.

    None for no record.
    """
    if record is None:
        return None
    if record not in records:
        records.append(record)
    return records.index(record)


# --- Addresses ----------------------------------------------------------------------------------


class Peer(Value, frozen=True):
    """The addresses of the ranks of one replica."""

    replica: ReplicaId
    leader_address: str
    data_addresses: tuple[str, ...]
    """Data-plane addresses, by rank."""


class PackedPeers(Value, frozen=True):
    """The form in which `Peer`s are sent: two bytes an address where a host has many.

    The addresses of each peer are in the order leader, then ranks.
    """

    replicas: Runs
    sizes: tuple[tuple[int, int], ...]
    """(number of addresses of a peer, number of consecutive peers with so many)."""
    hosts: tuple[tuple[str, int], ...]
    """(host, number of consecutive addresses on that host)."""
    ports: bytes
    """Ports, two bytes each, big-endian; 0 for an address that is in `others`."""
    others: tuple[str, ...]
    """Addresses that are not `host:port`, unchanged."""


_ADDRESS = re.compile(r"([^:/]*|\[[^\]/]*\]):([1-9][0-9]{0,4})")
MAX_ADDRESSES = 2**21
"""Largest number of addresses in one announcement: 1000 replicas of 2000 ranks."""


def packed_peers(peers: Sequence[Peer]) -> PackedPeers:
    """Return the form in which peers are sent."""
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
    """Return the peers that were sent in this form.

    Raises ValueError if parts are missing or left over, or if there are more than `MAX_ADDRESSES`.
    """
    ports = [high << 8 | low for high, low in zip(message.ports[::2], message.ports[1::2], strict=True)]
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
    """Return each run of equal items as (item, length of the run)."""
    return tuple((item, sum(1 for _ in group)) for item, group in itertools.groupby(items))


def _repeated[T](counted: Sequence[tuple[T, int]], total: int) -> list[T]:
    """Undo `_counted`. Raises ValueError unless `counted` stands for `total` items."""
    if any(count < 1 for _, count in counted) or sum(count for _, count in counted) != total:
        raise ValueError(f"runs that have to stand for {total} items stand for {sum(count for _, count in counted)}")
    return [item for item, count in counted for _ in range(count)]
