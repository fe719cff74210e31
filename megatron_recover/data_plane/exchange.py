"""What one call of a direct transport sends to each peer and expects from it, frame by frame; the sum happens here.

All members derive the same frames in the same order from the same tensors, so a frame that is not exactly the expected one
(another call, generation, tensor, shard or size) is an error, and never written past its place. Nothing here waits.
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
"""Segments that a peer may be ahead of the slowest one; bounds scratch to (members - 1) * SLOTS * SEGMENT_BYTES."""

FRAME = struct.Struct("<QqIIIIQ")
"""Generation, tag, kind, tensor, shard (its owner's position), bytes, first element."""
CONTRIBUTION, SUM, COPY = 1, 2, 3

Frame = tuple[bytes, memoryview]
"""Header and payload."""


class Exchange:
    """The frames of one call that are still to be sent, and those that are still expected."""

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
        """Whether everything was handed to the kernel and everything arrived."""
        return not any(self._left.values()) and not any(self.outgoing.values())

    def wants(self, peer: int) -> bool:
        """Whether bytes from `peer` are expected and have a place to go now."""
        return self._left[peer] > 0

    def waits_for(self, peer: int) -> bool:
        """Whether it is `peer` that keeps this call waiting, rather than a third that keeps `peer` waiting."""
        return self.wants(peer)

    def has_entered(self, peer: int) -> bool:
        """Whether `peer` is known to be inside this call, or is not needed any more."""
        return peer in self._entered or not (self._left[peer] or self.outgoing[peer])

    def receive(self, peer: int, connection: Connection) -> bool:
        """Read at most one frame; whether any byte came."""
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
        """A frame of `peer` is complete."""

    def tell(self) -> None:
        """Call the probe for the instants that were reached, if this exchange has any."""

    def frame(self, kind: int, segment: Segment, shard: int, payload: memoryview) -> Frame:
        header = FRAME.pack(self._generation, self._tag, kind, segment.tensor, shard, len(payload), segment.start)
        return header, payload

    def enqueue(self, peer: int, frame: Frame) -> None:
        self.outgoing[peer].extend((memoryview(frame[0]), frame[1]))


class SumExchange(Exchange):
    """Contributions to the owners of shards, then sums from the owners.

    Probes, each once: `sent` (the kernel has all contributions), `middle` (the first sum exists), `end` (by `finish`).
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
        """`scratch` keeps the received contributions per peer and is reused from call to call."""
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
        """Instants whose probe was not called yet: that is done by `tell`, outside of what may not be interrupted."""
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
        """Yield what a roster of one has to do, in pieces of bounded size; nothing where there are peers."""
        if not self.outgoing:
            for segment in self._mine:
                yield partial(self._add_up, segment)

    def complete(self) -> bool:
        if "sent" in self._instants and not any(self.outgoing.values()):
            self._reach("sent")
        return super().complete()

    def finish(self) -> None:
        """Reach the instants that the operands were too small to have, then `end`."""
        for instant in list(self._instants):
            self._reach(instant)
        self.tell()

    def tell(self) -> None:
        """Call the probe for the instants that were reached."""
        while self._reached:
            self._probe(self._reached.pop(0))

    def wants(self, peer: int) -> bool:
        # A contribution needs a free slot; sums go straight into the result. No deadlock: the lowest segment that is not
        # summed yet has a slot from every peer, and contributions never wait for anything but their own connection.
        contributed = self._num_contributions[peer]
        return self._left[peer] > 0 and (contributed == len(self._mine) or contributed < self._num_summed + SLOTS)

    def waits_for(self, peer: int) -> bool:
        return self._num_contributions[peer] < len(self._mine) and self.wants(peer)

    def arrived(self, peer: int) -> None:
        if self._num_contributions[peer] == len(self._mine):
            return  # it was a sum, and is where it belongs
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
    """Whole tensors from one member to its peers (`sending`), or from its one peer."""

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
    """The elements of a contiguous tensor in one dimension; no copy, no autograd."""
    return tensor.detach().view(-1)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a flat tensor; no copy."""
    return memoryview(tensor.view(torch.uint8).numpy())
