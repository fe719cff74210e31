"""The frames of sums and copies over streams that the test holds: whatever is cut, late or far ahead, the sum is the same.

Segments are a few bytes here, so that one call has many of them and members can be far apart in it.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_recover.data_plane import exchange
from megatron_recover.data_plane.exchange import FRAME, CopyExchange, Exchange, SumExchange
from megatron_recover.data_plane.transport import TransportError, no_probe

MEMBERS = (2, 5, 6)


@pytest.fixture(autouse=True, scope="module")
def small_segments() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "SEGMENT_BYTES", 24)
        patch.setattr(exchange, "SMALL_BYTES", 16)
        yield


class Stream:
    """One direction of a connection: takes and gives at most `piece` bytes at a time."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.piece = 1 << 20

    def send(self, views: deque[memoryview]) -> bool:
        left = self.piece
        while views and left:
            taken = views[0][:left]
            self.bytes += taken
            left -= len(taken)
            views[0] = views[0][len(taken) :]
            if not len(views[0]):
                views.popleft()
        return True

    def receive(self, views: list[memoryview]) -> bool:
        given = self.bytes[: self.piece]
        if not given and not any(not len(view) for view in views):
            return False
        while views and (given or not len(views[0])):
            part = given[: len(views[0])]
            views[0][: len(part)] = part
            views[0] = views[0][len(part) :]
            del given[: len(part)], self.bytes[: len(part)]
            if not len(views[0]):
                views.pop(0)
        return True


class Calls:
    """The same call on all members, and the streams between them."""

    def __init__(self, calls: dict[int, Exchange]) -> None:
        self.calls = calls
        self.streams = {(one, other): Stream() for one in calls for other in calls if one != other}

    def send(self, member: int, peer: int) -> None:
        if self.calls[member].outgoing[peer]:
            self.streams[member, peer].send(self.calls[member].outgoing[peer])

    def receive(self, member: int, peer: int) -> bool:
        call = self.calls[member]
        return call.wants(peer) and call.receive(peer, self.streams[peer, member])

    def run(self, chance: random.Random) -> None:
        """Move bytes in any order until all calls are complete; what is complete is left alone, as the transport does."""
        for _ in range(100_000):
            busy = [member for member, call in self.calls.items() if not call.complete()]
            if not busy:
                return
            member = chance.choice(busy)
            peer = chance.choice([other for other in self.calls if other != member])
            for stream in (self.streams[member, peer], self.streams[peer, member]):
                stream.piece = chance.choice((1, 7, 50, 1 << 20))
            for _ in range(chance.choice((1, 1, 30))):
                self.send(member, peer)
                self.receive(member, peer)
        raise AssertionError(f"no end: {[(call._left, call.outgoing) for call in self.calls.values()]}")


def operands(num_elements: Sequence[int]) -> tuple[dict[int, list[torch.Tensor]], dict[int, list[torch.Tensor]]]:
    types = (torch.float32, torch.float64, torch.bfloat16)
    generator = torch.Generator().manual_seed(sum(num_elements))
    sources = {
        member: [torch.randn(size, generator=generator).to(types[at % 3]) for at, size in enumerate(num_elements)]
        for member in MEMBERS
    }
    return sources, {member: [torch.full_like(source, -9) for source in sources[member]] for member in MEMBERS}


def sums(sources: Any, results: Any, scratch: Any, generation: int = 4, tag: int = 1) -> dict[int, Exchange]:
    return {
        member: SumExchange(generation, tag, MEMBERS, member, sources[member], results[member], scratch[member], no_probe)
        for member in MEMBERS
    }


@given(st.integers(0, 2**32), st.lists(st.integers(0, 90), min_size=1, max_size=3), st.lists(st.integers(0, 90), max_size=2))
@example(0, [1, 6, 33], [])  # segments of 4, 16 and 22 bytes: the longest one is no multiple of a number's size
def test_the_sum_is_right_whoever_is_ahead_however_streams_are_cut(seed: int, first: list[int], second: list[int]) -> None:
    scratch: dict[int, dict[int, torch.Tensor]] = {member: {} for member in MEMBERS}
    chance = random.Random(seed)
    for sizes in (first, second):
        sources, results = operands(sizes)
        kept = {member: [source.clone() for source in sources[member]] for member in MEMBERS}
        run = Calls(sums(sources, results, scratch))
        run.run(chance)
        for member in MEMBERS:
            assert not any(run.streams[member, peer].bytes for peer in MEMBERS if peer != member), "bytes were left over"
            assert all(map(torch.equal, sources[member], kept[member]))
            for at, result in enumerate(results[member]):
                parts = [sources[each][at].float() if result.dtype is torch.bfloat16 else sources[each][at] for each in MEMBERS]
                assert torch.equal(result, ((parts[0] + parts[1]) + parts[2]).to(result.dtype))


def test_a_member_that_is_far_ahead_waits_for_room() -> None:
    """Scratch is bounded: the third contribution of one peer has no place before the first of the other is there."""
    sources, results = operands([90])
    run = Calls(sums(sources, results, {member: {} for member in MEMBERS}))
    me, fast, slow = MEMBERS
    for _ in range(100):
        run.send(fast, me)
        run.receive(me, fast)
    assert not run.calls[me].wants(fast) and run.streams[fast, me].bytes, "everything fitted: this test shows nothing"
    assert not run.calls[me].waits_for(fast) and run.calls[me].waits_for(slow)
    run.run(random.Random(0))
    assert torch.equal(results[me][0], (sources[me][0] + sources[fast][0]) + sources[slow][0])


@pytest.mark.parametrize("stale", [{"generation": 3}, {"tag": 2}], ids=str)
def test_a_frame_of_another_generation_or_call_is_refused(stale: dict[str, int]) -> None:
    sources, results = operands([90])
    calls = sums(sources, results, {member: {} for member in MEMBERS})
    calls |= {MEMBERS[1]: sums(sources, results, {member: {} for member in MEMBERS}, **stale)[MEMBERS[1]]}
    with pytest.raises(TransportError, match="expected"):
        Calls(calls).run(random.Random(1))


@given(st.integers(0, 2**32))
def test_copies_are_what_the_source_has(seed: int) -> None:
    tensors = {member: [torch.full((40,), float(member)), torch.full((3,), member)] for member in MEMBERS}
    source, *targets = MEMBERS
    calls: dict[int, Exchange] = {source: CopyExchange(1, 1, targets, tensors[source], sending=True)}
    calls |= {target: CopyExchange(1, 1, [source], tensors[target], sending=False) for target in targets}
    run = Calls(calls)
    chance = random.Random(seed)
    while any(not call.complete() for call in calls.values()):
        target = chance.choice(targets)
        run.streams[source, target].piece = chance.choice((1, 33, 1 << 20))
        run.send(source, target)
        run.receive(target, source)
    assert all(tensor.unique().tolist() == [source] for each in tensors.values() for tensor in each)


@pytest.mark.parametrize(("claimed", "why"), [(1 << 32, ""), ((1 << 32) + 1, "sent frame"), (0, "sent frame")])
def test_a_tensor_of_four_gib_is_copied_in_one_frame(claimed: int, why: str) -> None:
    """Its size did not fit into the header, which raised no TransportError. No byte of the tensor is touched here."""
    tensor = torch.empty(1 << 32, dtype=torch.uint8)
    source = CopyExchange(1, 1, [5], [tensor], sending=True)
    header, payload = source.outgoing[5]
    assert len(payload) == 1 << 32
    target, stream = CopyExchange(1, 1, [2], [tensor], sending=False), Stream()
    fields = list(FRAME.unpack(header))
    fields[fields.index(1 << 32)] = claimed
    stream.bytes += FRAME.pack(*fields)
    with pytest.raises(TransportError, match=why) if why else contextlib.nullcontext():
        assert target.receive(2, stream)  # type: ignore[arg-type]
        assert len(target._views[2][0]) == 1 << 32, "it waits for the elements now"
