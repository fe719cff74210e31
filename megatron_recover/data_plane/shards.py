"""The arithmetic of a direct reduction, without sockets: owners, segments, order of additions.

A tensor above `small_bytes` is cut into one contiguous shard per member. The member at position j
of the roster owns shard j: it adds shard j of all members and sends the sum to all. A shard travels
in segments, so that scratch stays small and adding overlaps with receiving. Any other tensor is one
*shared* segment, which every member adds for itself: one message each way instead of two. A tensor
without elements has no segment.

Every element is added in ascending order of replica id, so the result has the same bits on all
members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Segment(NamedTuple):
    """Elements `start` to `stop` (exclusive) of one flattened tensor of an operation."""

    tensor: int
    start: int
    stop: int
    shared: bool
    """True if every member adds the segment for itself; the sum is then not sent."""


def shard_bounds(num_elements: int, num_members: int) -> list[int]:
    """Return the num_members + 1 borders of the shards.

    Shards differ by at most one element; the first shards are the longer ones.
    """
    base, longer = divmod(num_elements, num_members)
    return [position * base + min(position, longer) for position in range(num_members + 1)]


def segments_by_owner(
    sizes: Sequence[tuple[int, int]], num_members: int, *, segment_bytes: int, small_bytes: int
) -> list[list[Segment]]:
    """Return the segments that each position of the roster adds, in the order in which they travel.

    `sizes` holds (number of elements, bytes per element) for each tensor. The function is pure, so
    all members compute the same segments.
    """
    owners: list[list[Segment]] = [[] for _ in range(num_members)]
    for tensor, (num_elements, element_bytes) in enumerate(sizes):
        small = num_elements * element_bytes <= small_bytes
        bounds = shard_bounds(num_elements, num_members)
        length = max(1, segment_bytes // element_bytes)
        for position, segments in enumerate(owners):
            first, last = (0, num_elements) if small else (bounds[position], bounds[position + 1])
            step = max(1, num_elements) if small else length
            segments.extend(Segment(tensor, at, min(at + step, last), small) for at in range(first, last, step))
    return owners


def add_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of `parts`, added from first to last, to `out`.

    All have equal shape and dtype, and `out` overlaps no part. fp64, fp32 and integers are added in
    their own dtype. bf16 and fp16 are added in fp32 and rounded once at the end, so that the error
    does not grow with the number of members.
    """
    if len(parts) == 1:
        out.copy_(parts[0])
    elif out.dtype in (torch.bfloat16, torch.float16):
        total = torch.add(parts[0].float(), parts[1])
        for part in parts[2:]:
            total.add_(part)
        out.copy_(total)
    else:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
