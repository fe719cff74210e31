"""The frames that one call of a direct transport sends and expects, per peer; the sum itself.

All members derive the same frames in the same order from tensors of the same types and sizes. Any
other frame (another call, generation, tensor, shard or size) raises TransportError. Its payload is
never written outside the buffer of the expected frame. Nothing here waits.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from megatron_recover.data_plane.connection import Connection
from megatron_recover.data_plane.shards import Segment, add_in_order, segments_by_owner
from megatron_recover.data_plane.transport import Probe, TransportError

if TYPE_CHECKING:
    from torch import Tensor

SEGMENT_BYTES = 1 << 20
SMALL_BYTES = 1 << 15
SLOTS = 2
"""Segments that a peer may be ahead of the slowest peer. So scratch has at most (members - 1) *
SLOTS * SEGMENT_BYTES bytes."""

FRAME = struct.Struct("<QqIIIQQ")
"""Generation, tag, kind, tensor, shard (position of its owner; copy: 0), bytes, first element.

A copy sends each tensor in one frame, so the number of bytes has 64 bits."""
CONTRIBUTION, SUM, COPY = 1, 2, 3

Frame = tuple[bytes, memoryview]
"""Header and payload."""


class Exchange:
    """The frames of one call that are still to be sent or still expected."""

    def __init__(self, generation: int, tag: int, peers: Sequence[int]) -> None:
        self.outgoing: dict[int, deque[memoryview]] = {peer: deque() for peer in peers}
        self._expected: dict[int, Iterator[Frame]] = {}
        self._left = dict.fromkeys(peers, 0)
        self._views: dict[int, list[memoryview]] = {peer: [] for peer in peers}
        self._headers: dict[int, tuple[bytes, bytearray]] = {}
        self._entered: set[int] = set()
        """Peers that have sent a byte of this call."""
        self._generation = generation
        self._tag = tag

    def complete(self) -> bool:
        """Return whether the kernel has all outgoing bytes and all expected frames have arrived."""
        return not any(self._left.values()) and not any(self.outgoing.values())

    def wants(self, peer: int) -> bool:
        """Return whether bytes from `peer` are expected and have a destination now."""
        return self._left[peer] > 0

    def waits_for(self, peer: int) -> bool:
        """Return whether `peer` itself delays this call, and not a third that delays `peer`."""
        return self.wants(peer)

    def has_entered(self, peer: int) -> bool:
        """Return whether `peer` is known to be inside this call, or is no longer needed."""
        return peer in self._entered or not (self._left[peer] or self.outgoing[peer])

    def receive(self, peer: int, connection: Connection) -> bool:
        """Receive at most the rest of one frame; return whether any byte came.

        Call `arrived` if the frame is complete. Raises TransportError if the header is not the
        expected one, PeerLost at the end of the stream, and OSError if the connection has failed.
        """
        views = self._views[peer]
        if not views:
            header, payload = next(self._expected[peer])
            self._headers[peer] = header, (got := bytearray(len(header)))
            views.extend((memoryview(got), payload))
        if not connection.receive(views):
            return False
        self._entered.add(peer)
        if len(views) < 2:
            expected, got = self._headers[peer]
            if got != expected:
                raise TransportError(f"replica {peer} sent frame {FRAME.unpack(got)}, expected {FRAME.unpack(expected)}")
        if not views:
            self._left[peer] -= 1
            self.arrived(peer)
        return True

    def arrived(self, peer: int) -> None:
        """Handle a complete frame of `peer`."""

    def tell(self) -> None:
        """Call the probe for the instants that were reached."""

    def frame(self, kind: int, segment: Segment, shard: int, payload: memoryview) -> Frame:
        header = FRAME.pack(self._generation, self._tag, kind, segment.tensor, shard, len(payload), segment.start)
        return header, payload

    def enqueue(self, peer: int, frame: Frame) -> None:
        self.outgoing[peer].extend((memoryview(frame[0]), frame[1]))


class SumExchange(Exchange):
    """The exchange of a sum: contributions to the owners of shards, then sums from the owners.

    A shared segment's contribution goes to all peers, and no sum follows. Probe instants, once
    each: `sent` (the kernel has all contributions), `middle` (this member has added a first
    segment), `end` (by `finish`).
    """

    def __init__(
        self,
        generation: int,
        tag: int,
        members: Sequence[int],
        me: int,
        sources: Sequence[Tensor],
        results: Sequence[Tensor],
        scratch: dict[int, Tensor],
        probe: Probe,
    ) -> None:
        """Enqueue this member's contributions.

        `scratch` holds the contributions received from each peer. It is enlarged where it is too
        small, and reused by later calls.
        """
        peers = [member for member in members if member != me]
        super().__init__(generation, tag, peers)
        self._members, self._me = members, me
        self._sources = [flat(source) for source in sources]
        self._results = [flat(result) for result in results]
        self._widths = [source.element_size() for source in self._sources]
        self._source_bytes = [bytes_of(source) for source in self._sources]
        self._result_bytes = [bytes_of(result) for result in self._results]
        sizes = [(source.numel(), source.element_size()) for source in self._sources]
        owners = segments_by_owner(sizes, len(members), segment_bytes=SEGMENT_BYTES, small_bytes=SMALL_BYTES)
        self._shards = dict(zip(members, owners, strict=True))
        self._mine = self._shards[me]
        self._num_summed = 0
        self._num_contributions = dict.fromkeys(peers, 0)
        self._probe = probe
        self._instants = ["sent", "middle", "end"]
        self._reached: list[str] = []
        """Instants whose probe is still to be called. `tell` calls it outside the sections of
        `WriteGate`, since a probe may wait."""
        self._scratch = scratch
        self._slot_bytes = (max((self._size(segment) for segment in self._mine), default=0) + 7) & ~7
        for peer in peers:
            if peer not in scratch or scratch[peer].numel() < SLOTS * self._slot_bytes:
                scratch[peer] = torch.empty(SLOTS * self._slot_bytes, dtype=torch.uint8)
            self._expected[peer] = self._frames_from(peer)
            self._left[peer] = len(self._mine) + sum(not segment.shared for segment in self._shards[peer])
            for segment in self._shards[peer]:
                self.enqueue(peer, self._frame(CONTRIBUTION, segment, peer, self._source_bytes))

    def alone(self) -> Iterator[Callable[[], None]]:
        """Yield the additions of a roster of one, in bounded pieces; nothing if there are peers."""
        if not self.outgoing:
            for segment in self._mine:
                yield partial(self._add_up, segment)

    def complete(self) -> bool:
        if "sent" in self._instants and not any(self.outgoing.values()):
            self._reach("sent")
        return super().complete()

    def finish(self) -> None:
        """Reach the instants that were not reached (empty operands, a lone member), then `end`."""
        for instant in list(self._instants):
            self._reach(instant)
        self.tell()

    def tell(self) -> None:
        """Call the probe for the instants that were reached."""
        while self._reached:
            self._probe(self._reached.pop(0))

    def wants(self, peer: int) -> bool:
        # A contribution needs a free slot; a sum goes directly into the result. This cannot
        # deadlock: the lowest segment that is not summed yet has a slot for every peer, and
        # contributions wait for nothing but their own connection.
        contributed = self._num_contributions[peer]
        return self._left[peer] > 0 and (contributed == len(self._mine) or contributed < self._num_summed + SLOTS)

    def waits_for(self, peer: int) -> bool:
        return self._num_contributions[peer] < len(self._mine) and self.wants(peer)

    def arrived(self, peer: int) -> None:
        if self._num_contributions[peer] == len(self._mine):
            return  # a sum, received directly into the result
        self._num_contributions[peer] += 1
        while self._num_summed < min(self._num_contributions.values()):
            self._add_up(self._mine[self._num_summed])
            self._num_summed += 1
            if "middle" in self._instants:
                self._reach("middle")

    def _add_up(self, segment: Segment) -> None:
        result = self._results[segment.tensor][segment.start : segment.stop]
        own = self._sources[segment.tensor][segment.start : segment.stop]
        parts = [
            own if member == self._me else self._slot(member, self._num_summed, segment).view(result.dtype)
            for member in self._members
        ]
        add_in_order(parts, result)
        if not segment.shared:
            for peer in self.outgoing:
                self.enqueue(peer, self._frame(SUM, segment, self._me, self._result_bytes))

    def _frames_from(self, peer: int) -> Iterator[Frame]:
        for index, segment in enumerate(self._mine):
            header, _ = self._frame(CONTRIBUTION, segment, self._me, self._source_bytes)
            yield header, bytes_of(self._slot(peer, index, segment))
        for segment in self._shards[peer]:
            if not segment.shared:
                yield self._frame(SUM, segment, peer, self._result_bytes)

    def _frame(self, kind: int, segment: Segment, owner: int, tensors: Sequence[memoryview]) -> Frame:
        width = self._widths[segment.tensor]
        payload = tensors[segment.tensor][segment.start * width : segment.stop * width]
        return self.frame(kind, segment, self._members.index(owner), payload)

    def _size(self, segment: Segment) -> int:
        return (segment.stop - segment.start) * self._widths[segment.tensor]

    def _slot(self, peer: int, index: int, segment: Segment) -> Tensor:
        first = index % SLOTS * self._slot_bytes
        return self._scratch[peer][first : first + self._size(segment)]

    def _reach(self, instant: str) -> None:
        self._instants.remove(instant)
        self._reached.append(instant)


class CopyExchange(Exchange):
    """The exchange of a copy: whole tensors from one member to its peers.

    `sending` is true on the source; each target has the source as its one peer.
    """

    def __init__(self, generation: int, tag: int, peers: Sequence[int], tensors: Sequence[Tensor], *, sending: bool) -> None:
        super().__init__(generation, tag, peers)
        frames = [
            self.frame(COPY, Segment(index, 0, tensor.numel(), True), 0, bytes_of(flat(tensor)))
            for index, tensor in enumerate(tensors)
        ]
        for peer in peers:
            if sending:
                for frame in frames:
                    self.enqueue(peer, frame)
            else:
                self._expected[peer] = iter(frames)
                self._left[peer] = len(frames)


def flat(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as one dimension, without copy or autograd."""
    return tensor.detach().view(-1)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a flat tensor, without copy."""
    return memoryview(tensor.view(torch.uint8).numpy())
