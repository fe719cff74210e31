"""Checksums of 63 bits over the bytes of tensors, the same on every device.

They reveal corruption and divergence, not forgery.

Note [What a checksum misses]
    A row of 16 KiB x, read as bytes -128..127, becomes 8 sums of w * x. Each sum has weights w of
    its own, -63..63. Integers are added without any modulus. Two rows have equal sums if all 8 sums
    of w * d are 0, where d are the differences of their bytes, -255..255.
    - One changed byte is always detected, since no byte has 8 weights 0.
    - Two changed bytes, and so any two flipped bits, are always detected: the 8 weights of one byte
      are no multiple of another's.
    - Any other change is missed with probability 2**-55 at most. Take one changed byte. Whatever
      the other weights are, each sum is 0 for at most one of the 127 values of its weight. The 8
      weights are drawn independently. The weights are fixed, so this holds for changes that do not
      depend on them, such as errors. It does not hold for chosen changes.
    The sums of the rows and the rest of a tensor are then hashed, with collisions of probability
    2**-63.

Note [Exact sums]
    A sum is no larger than 2**14 * 2**7 * 63 < 2**27. Processors with VNNI sum products of int8 in
    int32, without conversion. Elsewhere the bytes are multiplied as float32 in pieces of 1024
    bytes, whose sums are below 2**23. float32 holds these exactly, in any order of additions.
    Products in TF32 or bfloat16 that are summed in float32 are exact too, since bytes and weights
    have at most 8 bits. Autocast would give sums of 8 bits, so it is off. Weights up to 63 also
    keep libraries exact that sum pairs of products in int16 (255 * 63 * 2 < 2**15).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_recover.trainer.host_copy import HostCopy

_ROW = 16384
"""Bytes in a row. The sums of the rows (1/512 of the bytes) and the rest of a tensor are copied to
the host. There they are hashed in order, which is slow."""
_NUM_SUMS, _LARGEST_WEIGHT = 8, 63
_PIECE = 1024
"""Bytes of a row whose products float32 sums exactly."""
_FEW_ROWS = 64
"""Tensors with fewer rows may share a product, since each product costs some 30 microseconds."""
_CHUNK_ROWS = 512
"""Most rows that are float32 at once on a device other than a CPU: 32 MiB. Also the most rows of a
shared product, and of one product of int8."""
_CACHED_ROWS = 4
"""Most rows that are float32 at once on a CPU: 256 KiB, which fit its cache."""


def checksum(tensor: Tensor) -> int:
    """Return the checksum of a contiguous tensor, 0..2**63-1.

    Its size in bytes counts; its dtype and shape do not.
    """
    return checksums([tensor])[0]


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return the checksum of each of these contiguous tensors.

    Each device is waited for once, not once per tensor.
    """
    computing = Checksums(tensors)
    return computing.values(HostCopy(computing.parts).tensors())


class Checksums:
    """The checksums of contiguous tensors, while their devices compute the sums of the rows."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Enqueue the work of the devices, without waiting for it. A CPU does its work here."""
        all_bytes = [tensor.detach().view(-1).view(torch.int8) for tensor in tensors]
        self._sizes = [data.numel() for data in all_bytes]
        ends = [size // _ROW * _ROW for size in self._sizes]  # ends of the whole rows
        sums = _sums([data[:end].view(-1, _ROW) for data, end in zip(all_bytes, ends, strict=True) if end])
        self.parts = [*sums, *(data[end:] for data, end in zip(all_bytes, ends, strict=True))]
        """Tensors that the host needs (int8, on the devices): the sums of each tensor that has
        rows, then the rest of each tensor."""

    def values(self, parts: Sequence[Tensor]) -> list[int]:
        """Return the checksum of each tensor. `parts`: the attribute's tensors in host memory."""
        num_sums = len(parts) - len(self._sizes)
        summed, found = iter(parts[:num_sums]), []
        for size, rest in zip(self._sizes, parts[num_sums:], strict=True):
            digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=8)
            if size >= _ROW:
                digest.update(next(summed).numpy())
            digest.update(rest.numpy())
            found.append(int.from_bytes(digest.digest(), "little") >> 1)
        return found


def _sums(many: Sequence[Tensor]) -> list[Tensor]:
    """Return for each of `many` (rows, `_ROW`) the sums of its rows, as int8 on its device."""
    found = list[Tensor]()
    for part in _sharing(many):
        products = _products(torch.cat(part) if len(part) > 1 else part[0])
        found += products.split([len(rows) for rows in part])
    return [products.reshape(-1).view(torch.int8) for products in found]


def _sharing(many: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield `many` in order, in lists that share a product.

    Small tensors that follow each other on one device share one, of `_CHUNK_ROWS` rows at most.
    """
    part, num_rows = list[Tensor](), 0
    for rows in many:
        if part and (
            rows.device != part[0].device or max(len(rows), len(part[-1])) >= _FEW_ROWS or num_rows + len(rows) > _CHUNK_ROWS
        ):
            yield part
            part, num_rows = [], 0
        part.append(rows)
        num_rows += len(rows)
    if part:
        yield part


def _products(rows: Tensor) -> Tensor:
    """Return the sums of int8 `rows` (rows, `_ROW`) as int32 (rows, `_NUM_SUMS`).

    See Note [Exact sums].
    """
    if rows.device.type == "cpu" and _multiplies_int8():
        weights = _weights(rows.device, torch.int8)
        return torch.cat([torch._int_mm(chunk, weights) for chunk in rows.split(_CHUNK_ROWS)])
    return _products_in_float32(rows)


def _products_in_float32(rows: Tensor) -> Tensor:
    weights = _weights(rows.device, torch.float32).view(-1, _PIECE, _NUM_SUMS)
    found = []
    with torch.autocast(rows.device.type, enabled=False):
        for chunk in rows.split(_CACHED_ROWS if rows.device.type == "cpu" else _CHUNK_ROWS):
            pieces = chunk.view(len(chunk), -1, _PIECE).transpose(0, 1).to(torch.float32)
            found.append(torch.bmm(pieces, weights).to(torch.int32).sum(dim=0, dtype=torch.int32))
    return torch.cat(found)


@functools.cache
def _multiplies_int8() -> bool:
    """Return whether int8 products are fast and exact on this processor.

    Elsewhere torch uses a scalar loop, if it has such products at all.
    """
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled and _has_vnni()):
        return False
    rows = torch.arange(4 * _ROW, dtype=torch.int32, device="cpu").mul_(37).to(torch.int8).view(4, _ROW)
    rows[0], rows[1] = -128, 127
    try:
        return torch.equal(torch._int_mm(rows, _weights(rows.device, torch.int8)), _products_in_float32(rows))
    except (AttributeError, RuntimeError):  # this torch has no `_int_mm` for int8
        return False


def _has_vnni() -> bool:
    return bool(getattr(torch.cpu, "_is_vnni_supported", lambda: False)())


@functools.cache
def _weights(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the weights (`_ROW`, `_NUM_SUMS`)."""
    drawn = bytearray(hashlib.shake_256(b"weights of a row").digest(2 * _ROW * _NUM_SUMS))
    numbers = torch.frombuffer(drawn, dtype=torch.int16).to(torch.int32).remainder(2 * _LARGEST_WEIGHT + 1)
    return (numbers - _LARGEST_WEIGHT).view(_ROW, _NUM_SUMS).to(device, dtype)
