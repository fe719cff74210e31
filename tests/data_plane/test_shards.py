"""The arithmetic of shards, segments and sums, against its definition."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.data_plane.shards import add_in_order, segments_by_owner, shard_bounds

SIZES = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([1, 2, 4, 8])), max_size=4)


@given(num_elements=st.integers(0, 10**9), num_members=st.integers(1, 70))
def test_shards_cover_everything_once_and_differ_by_one_element_at_most(num_elements: int, num_members: int) -> None:
    bounds = shard_bounds(num_elements, num_members)
    lengths = [last - first for first, last in zip(bounds, bounds[1:], strict=False)]
    assert (bounds[0], bounds[-1], len(lengths)) == (0, num_elements, num_members)
    assert max(lengths) - min(lengths) <= 1 and min(lengths) >= 0


@given(sizes=SIZES, num_members=st.integers(1, 9), segment_bytes=st.integers(1, 4000), small_bytes=st.integers(0, 4000))
def test_each_element_is_added_by_one_owner_or_by_everyone(
    sizes: list[tuple[int, int]], num_members: int, segment_bytes: int, small_bytes: int
) -> None:
    owners = segments_by_owner(sizes, num_members, segment_bytes=segment_bytes, small_bytes=small_bytes)
    assert len(owners) == num_members
    for tensor, (num_elements, width) in enumerate(sizes):
        small = num_elements * width <= small_bytes
        counts = torch.zeros(num_elements, dtype=torch.int64)
        for segments in owners:
            for segment in segments:
                if segment.tensor == tensor:
                    counts[segment.start : segment.stop] += 1
                    assert segment.shared == small
                    assert 0 <= segment.start < segment.stop <= num_elements, "an empty segment would be a message for nothing"
                    assert small or (segment.stop - segment.start) * width <= max(segment_bytes, width)
        assert counts.eq(num_members if small else 1).all()
    for segments in owners:
        assert segments == sorted(segments, key=lambda segment: (segment.tensor, segment.start)), "all must agree on the order"


@given(st.lists(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=3, max_size=3), min_size=1, max_size=6))
def test_a_sum_is_the_sum_from_first_to_last(values: list[list[float]]) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        parts = [torch.tensor(row, dtype=dtype) for row in values]
        kept = [part.clone() for part in parts]
        out = torch.empty(3, dtype=dtype)
        add_in_order(parts, out)
        total = parts[0].float() if dtype is torch.bfloat16 else parts[0].clone()
        for part in parts[1:]:
            total = total + part
        assert torch.equal(out, total.to(dtype))
        assert all(torch.equal(part, before) for part, before in zip(parts, kept, strict=True))


def test_bfloat16_rounds_once() -> None:
    parts = [torch.tensor([256.0], dtype=torch.bfloat16)] + [torch.tensor([1.0], dtype=torch.bfloat16)] * 4
    out = torch.empty(1, dtype=torch.bfloat16)
    add_in_order(parts, out)
    assert out.item() == 260.0, "256 + 1 rounds to 256 in bfloat16: adding one by one would never leave it"
