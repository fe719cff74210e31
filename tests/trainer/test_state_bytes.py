"""The bytes of a state: each once, in any ranges, of any type, also where a tensor has gaps; scalars keep type and bits."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.trainer.state_bytes import StateBytes, decoded, encoded
from tests.trainer.states import Tensors, of_every_kind


def bytes_of(state: Tensors) -> StateBytes:
    return StateBytes([tensor.data for tensor in state.tensors()])


@given(st.lists(st.integers(0, 1000), max_size=6))
def test_ranges_of_one_state_fill_another_and_nothing_beside_it(cuts: list[int]) -> None:
    one, other = of_every_kind(1), of_every_kind(2)
    tensors = other.tensors()
    source, target = bytes_of(one), StateBytes([tensor.data for tensor in tensors])
    assert source.num_bytes == target.num_bytes
    edges = sorted({0, source.num_bytes, *(min(cut, source.num_bytes) for cut in cuts)})
    for start, stop in zip(edges, edges[1:], strict=False):
        buffer = torch.full((stop - start + 3,), 7, dtype=torch.uint8)
        source.copy_out(start, stop, buffer)
        assert buffer[stop - start :].tolist() == [7, 7, 7]
        target.copy_in(start, stop, buffer)
    for tensor in tensors:
        tensor.put_back()
    assert one.bits() == other.bits()
    assert other.padding() == of_every_kind(2).padding(), "what has no name stays"


def test_a_view_counts_with_its_own_bytes_and_shared_memory_once() -> None:
    whole = torch.arange(100.0)
    assert bytes_of(Tensors({"view": whole[10:20]})).num_bytes == 40
    assert bytes_of(Tensors({"tied": whole, "again": whole, "part": whole[3:7], "other": whole.view(10, 10)})).num_bytes == 400
    assert bytes_of(Tensors({"empty": torch.empty(0, 4)})).num_bytes == 0
    assert bytes_of(Tensors({})).num_bytes == 0


@pytest.mark.parametrize("stride", [(0, 1), (1, 0), (0, 0)])
def test_elements_that_share_memory_are_put_back(stride: tuple[int, int]) -> None:
    memory = torch.zeros(4)
    state = Tensors({"shared": memory.as_strided((3, 4), stride)})
    (tensor,) = state.tensors()
    source = torch.arange(5.0).add(1).as_strided((3, 4), stride)
    tensor.data.copy_(source.contiguous().view(-1))
    tensor.put_back()
    assert state.tensors()[0].data.equal(source.contiguous().view(-1))


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**200), 2**200), st.floats(), st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from([0, -0.0, 0.0, 1, 1.0, True, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, math.inf, math.nan, "", "1"]),
)  # fmt: skip


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), SCALARS))
def test_scalars_keep_their_type_and_bits(scalars: dict[str, int | float | str | bool | None]) -> None:
    found = decoded(encoded(scalars))
    assert [(name, type(value)) for name, value in found.items()] == [(name, type(value)) for name, value in scalars.items()]
    assert [bits(value) for value in found.values()] == [bits(value) for value in scalars.values()]


def bits(value: object) -> object:
    return struct.pack("<d", value) if isinstance(value, float) else value


@pytest.mark.parametrize("message", [b"", b"\xc1", b"\x91\x01", b"\x81\xa1a\x91\x01", b"\x81\x01\x01"])
def test_what_is_no_scalars_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's own errors, whatever they say
        decoded(message)
