"""Checksums see every change: Note [What a checksum misses] holds, and Note [Exact sums] does."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_recover.core.digest import combined
from megatron_recover.trainer import checksum as module
from megatron_recover.trainer.checksum import checksum, checksums

WORDS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.int32, torch.int64)
SEEDS = st.integers(0, 2**32 - 1)
ROW = 16384
"""Bytes that are summed together."""


def values(dtype: torch.dtype, number: int, seed: int) -> torch.Tensor:
    drawn = torch.randn(number, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype) if dtype.is_floating_point else (drawn * 2**20).to(dtype)


def flipped(tensor: torch.Tensor, bit: int, where: torch.Tensor) -> torch.Tensor:
    """Return a copy with this bit flipped in the elements that the mask `where` has."""
    size = tensor.element_size()
    mask = (1 << bit) - (1 << 8 * size if bit == 8 * size - 1 else 0)
    words = tensor.view(WORDS_OF[size])
    return torch.where(where, words ^ mask, words).view(tensor.dtype)


@pytest.mark.parametrize("size", [0, 1, 5, 16384, 16385, 3 * 16384 + 77])
def test_a_checksum_sees_every_bit_and_place(size: int) -> None:
    tensor = torch.randn(size + 1)[1:]  # starts off the 8-byte grid
    before = checksum(tensor)
    assert before == checksum(tensor.clone()) and 0 <= before < 2**63
    for place in {0, size // 2, size - 1} & set(range(size)):
        for bit in (0, 31):
            changed = tensor.clone()
            changed.view(torch.int32)[place] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            assert checksum(changed) != before
    if size > 1:
        swapped = tensor.clone()
        swapped[0], swapped[-1] = tensor[-1], tensor[0]
        assert checksum(swapped) != before
    assert checksum(torch.cat([tensor, torch.zeros(1)])) != before


def test_order_counts_among_tensors() -> None:
    first, second = checksum(torch.ones(3)), checksum(torch.zeros(3))
    assert combined([first, second]) != combined([second, first])


@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_two_flips_in_a_row_never_cancel(seed: int) -> None:
    """All pairs of bits of 64-bit words, each at random places."""
    random = Random(seed)
    row = torch.frombuffer(bytearray(random.randbytes(ROW)), dtype=torch.uint8)
    pairs = [(one, other) for one in range(64) for other in range(one, 64)]
    changed = row.repeat(len(pairs), 1)
    for copy, pair in zip(changed, pairs, strict=True):
        words = random.sample(range(ROW // 8), 2)
        for word, bit in zip(words, pair, strict=True):
            copy[8 * word + bit // 8] ^= 1 << bit % 8
    before = checksum(row)
    assert [pair for pair, after in zip(pairs, checksums(list(changed)), strict=True) if after == before] == []


@settings(deadline=None)
@given(seed=SEEDS, dtype=st.sampled_from(DTYPES), share=st.sampled_from([0.001, 0.01, 0.1, 0.5, 0.99]), data=st.data())
def test_flips_of_one_bit_in_any_elements_are_seen(seed: int, dtype: torch.dtype, share: float, data: st.DataObject) -> None:
    """In all elements, in every second or in every fourth; of these, a share."""
    size = dtype.itemsize
    tensor = values(dtype, data.draw(st.sampled_from([1, 3])) * ROW // size + 5, seed)
    last = 8 * size - 1
    bit = data.draw(st.sampled_from([last, last - 1, last - 2]) | st.integers(0, last))
    where = torch.rand(tensor.numel(), generator=torch.Generator().manual_seed(seed + 1)) < share
    every = data.draw(st.sampled_from([1, 2, 4]))
    where &= torch.arange(tensor.numel()) % every == every - 1
    assert not where.any() or checksum(flipped(tensor, bit, where)) != checksum(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["random", "alike"])
def test_a_bit_flipped_in_all_elements_is_seen(dtype: torch.dtype, kind: str) -> None:
    tensor = values(dtype, 2 * ROW // dtype.itemsize, 1)
    if kind == "alike":
        tensor = torch.ones_like(tensor)
    every = torch.ones(tensor.numel(), dtype=torch.bool)
    found = [checksum(flipped(tensor, bit, every)) for bit in range(8 * dtype.itemsize)]
    assert len({checksum(tensor), *found}) == 1 + len(found)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["random", "alike", "alternating", "upper elements only"])
def test_a_negated_tensor_is_another_one(dtype: torch.dtype, kind: str) -> None:
    tensor = values(dtype, 2 * ROW // dtype.itemsize, 2)
    if kind == "alike":
        tensor = torch.full_like(tensor, 2.0)
    elif kind == "alternating":
        tensor = torch.full_like(tensor, 2.0)
        tensor[::2] *= -1
    elif kind == "upper elements only":
        tensor = torch.zeros_like(tensor)
        tensor[8 // dtype.itemsize - 1 :: 8 // dtype.itemsize] = -2.0
    assert checksum(-tensor) != checksum(tensor)


def test_no_bytes_weights_are_zero_or_a_multiple_of_anothers() -> None:
    weights = module._weights(torch.device("cpu"), torch.int64).tolist()
    assert len(weights) == ROW and all(any(each) and max(map(abs, each)) <= 63 for each in weights)
    directions = {tuple(weight // gcd(*each) for weight in each) for each in weights}
    assert len(directions | {tuple(-weight for weight in each) for each in directions}) == 2 * ROW


def test_each_weight_is_as_likely() -> None:
    counts = torch.bincount(module._weights(torch.device("cpu"), torch.int64).reshape(-1) + 63, minlength=127)
    assert len(counts) == 127 and counts.min() > 870 and counts.max() < 1194, "1032 of each, within 5 deviations"


@pytest.mark.parametrize("byte", [-128, 127])
def test_sums_of_the_largest_bytes_are_exact(byte: int) -> None:
    rows = torch.full((70, ROW), byte, dtype=torch.int8)
    exact = rows.long() @ module._weights(rows.device, torch.int64)
    assert torch.equal(module._products_in_float32(rows).long(), exact)
    assert torch.equal(module._products(rows).long(), exact)
    assert 128 * 63 * module._PIECE < 2**23 and 128 * 63 * ROW < 2**31, "what any weights could come to"


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, num_rows=st.integers(1, 140))
def test_sums_are_the_same_on_all_kinds_of_devices(seed: int, num_rows: int) -> None:
    rows = torch.frombuffer(bytearray(Random(seed).randbytes(num_rows * ROW)), dtype=torch.int8).view(num_rows, -1)
    exact = rows.long() @ module._weights(rows.device, torch.int64)
    assert torch.equal(module._products(rows).long(), exact)
    assert torch.equal(module._products_in_float32(rows).long(), exact)


@pytest.fixture
def probing() -> Iterator[None]:
    """What the processor can do is found out anew, in the test and after it."""
    module._multiplies_int8.cache_clear()
    yield
    module._multiplies_int8.cache_clear()


@pytest.mark.parametrize("lack", ["saturates", "is missing", "no VNNI", "no oneDNN"])
def test_a_processor_without_fast_and_exact_products_has_the_same_checksums(
    lack: str, probing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.randn(size) for size in (0, 5, 300, 40_000)]
    before = checksums(tensors)

    def saturating(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (rows.int() @ weights.int()).clamp(-(2**15), 2**15 - 1)

    def missing(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not implemented for this processor")

    monkeypatch.setattr(module, "_has_vnni", lambda: lack != "no VNNI")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: lack != "no oneDNN")
    if lack in ("saturates", "is missing"):
        monkeypatch.setattr(torch, "_int_mm", saturating if lack == "saturates" else missing)
    module._multiplies_int8.cache_clear()
    assert not module._multiplies_int8()
    assert checksums(tensors) == before


@pytest.mark.parametrize("has_vnni", [False, True])
def test_autocast_and_another_default_device_change_nothing(
    has_vnni: bool, probing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.randn(40_000)]
    before = checksums(tensors)
    monkeypatch.setattr(module, "_has_vnni", lambda: has_vnni)
    module._multiplies_int8.cache_clear()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        assert checksums(tensors) == before


def test_tensors_that_share_a_product_have_their_own_checksums() -> None:
    sizes = [256, 3, 20_000, 300, 0, 513, 16_384, 300_000, 4096, 8192, *[200_000] * 20, 4096, 300_000]
    tensors = [torch.randn(size) for size in sizes]
    assert checksums(tensors) == [checksum(tensor) for tensor in tensors]
    rows = [torch.empty(tensor.numel() * 4 // ROW, ROW, dtype=torch.int8) for tensor in tensors]
    shared = [sum(map(len, part)) for part in module._sharing(rows)]
    assert max(shared) <= module._CHUNK_ROWS and sum(shared) == sum(map(len, rows)) and len(shared) < len(rows) / 2
