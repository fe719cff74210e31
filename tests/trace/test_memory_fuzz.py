"""Memory that a dying process wrote: whatever is in a ring or on a progress page, its readers end and raise nothing."""

from __future__ import annotations

import mmap
import os
import struct
import zlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_recover import progress_page
from megatron_recover.core.progress import Phase
from megatron_recover.trace import ring
from megatron_recover.trace.ring import Merge, RingReader

pytestmark = pytest.mark.timeout(60)
CAPACITY = 4096
words = st.one_of(st.integers(0, 2 * CAPACITY), st.integers(-(2**63), 2**63 - 1))
records = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.builds(struct.Struct("<qqq").pack, words, words, st.one_of(st.sampled_from([-1, 0, 8, 24]), words)),
    ),
    max_size=20,
).map(b"".join)


@given(
    header=st.tuples(words, words, words, words, words), body=records, again=records, position=st.integers(0, CAPACITY // 8),
)  # fmt: skip
@example(header=(0, 2**62, 0, 0, 0), body=struct.pack("<qqq", 0, 0, -1), again=b"", position=0)
@settings(max_examples=300, deadline=None)
def test_a_ring_of_anything_is_read_to_an_end(header: tuple[int, ...], body: bytes, again: bytes, position: int) -> None:
    """A position that no writer can have reached kept the reader busy for ever."""
    descriptor = ring.create(capacity=CAPACITY)
    with mmap.mmap(descriptor, 0) as memory:
        struct.pack_into("=5q", memory, 8 * ring._SEQUENCE, *header)
        for start, text in ((0, body), (8 * (CAPACITY // 16), again)):
            kept = text[: CAPACITY - start]
            memory[mmap.PAGESIZE + start : mmap.PAGESIZE + start + len(kept)] = kept
    merge = Merge(settle=lambda: None)
    merge.add(0, RingReader(descriptor, position=8 * position))
    os.close(descriptor)
    merge.ended(0)
    for now in (10, 2**62):
        items = merge.drain(now)
        assert sum(len(each.what) for each in items if isinstance(each.what, bytes)) <= CAPACITY
        assert len(items) <= CAPACITY // 8 + 2
    merge.remove(0)


fields = st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 5, st.integers(0, 255), st.integers(0, 255), st.binary(max_size=48))


@given(page=st.binary(max_size=200))
def test_an_arbitrary_page_names_nobody(page: bytes) -> None:
    padded = page.ljust(progress_page.PAGE_BYTES, b"\0")
    assert progress_page.parse(padded) is None


@given(values=fields, ids=st.binary(max_size=100))
def test_a_page_whose_checksum_fits_is_read_or_names_nobody(values: tuple, ids: bytes) -> None:
    """Whatever its fields are: a phase or a number of microbatches that there is not, a label that is no text."""
    body = progress_page._FIXED.pack(*values) + ids.ljust(4 * 256, b"\0")
    count = values[6]
    covered = body[: progress_page._FIXED.size + 4 * count]
    page = (struct.pack("<I", zlib.crc32(covered)) + body).ljust(progress_page.PAGE_BYTES, b"\0")
    found = progress_page.parse(page)
    if values[5] in frozenset(Phase) and count <= progress_page.MAX_MICROBATCHES:
        assert found is not None and len(found.microbatches) == count
    else:
        assert found is None


@given(values=fields, position=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_a_page_with_one_changed_byte_names_nobody(values: tuple, position: int, flip: int) -> None:
    fixed = (*values[:5], int(Phase.FORWARD), 3, values[7])
    body = progress_page._FIXED.pack(*fixed) + struct.pack("<3i", 1, 2, 3)
    page = bytearray(struct.pack("<I", zlib.crc32(body)) + body)
    page[position % len(page)] ^= flip
    assert progress_page.parse(bytes(page).ljust(progress_page.PAGE_BYTES, b"\0")) is None
