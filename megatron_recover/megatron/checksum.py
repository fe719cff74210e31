"""Names the bytes of tensors in 63 bits, the same on every device: it tells corruption and divergence, not forgery.

Note [What a checksum misses]
    A row of words x of 32 bits becomes the sum of w * x modulo 2**64. The weights w are odd and pseudo-random modulo
    2**33. Two rows have equal sums where the sum of w * d is 0, with d the differences of their words. |d| is less than 2**32,
    so a d that is not 0 ends in at most 31 zero bits.
    - One changed word is always seen, since an odd weight has an inverse.
    - Two flipped bits are always seen. In one word they are one change. In two words, +-2**a and +-2**b cancel only where
      a = b, as the weights are odd, and where the weights are equal or opposite modulo 2**33: no two of them are.
    - Any other change goes unseen with probability 2**-32 at most. Take the changed word whose d ends in the fewest zero bits:
      whatever the other weights are, the sum is 0 for at most one value of its weight modulo 2**33, of 2**32 odd ones. The
      weights are fixed, so this holds for changes that do not depend on them, such as errors, not for chosen ones.
    With words of 64 bits none of this would hold: modulo 2**64 every even number of flips of their highest bits cancels.
    What is hashed (the sums of the rows, and what is left of a tensor) collides with probability 2**-63.

Note [Exact sums]
    A processor multiplies float64 several times as fast as int64. A weight has three digits of size 2**10 at most, so a word
    times a digit, summed over a row of 2**11 words, is no larger than 2**52: float64 holds each such sum exactly, in whatever
    order it is taken. The three sums make the one modulo 2**64. Other devices compute that in int64, which gives the same.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_recover.core.digest import combined

__all__ = ["checksum", "checksums", "combined"]

_ROW = 2048
"""32-bit words a row. The sums of the rows, and what is left of a tensor, are hashed in order. Hashing is ten times as slow as
summing, so a row is no longer than it takes to leave little to hash."""
_ROW_BYTES = 4 * _ROW
_DIGIT_BITS, _NUM_DIGITS = 11, 3
"""Of a weight. See Note [Exact sums]."""
_CACHED_ROWS = 32
"""Rows that are float64 at once: 512 KiB, which stay in the cache of a processor."""
_CHUNK_ROWS = 2048
"""Rows whose products are in the memory of another device at once: 32 MiB."""


def checksum(tensor: Tensor) -> int:
    """The checksum of a contiguous tensor, 0..2**63-1. Its dtype and shape do not matter, its size does."""
    return checksums([tensor])[0]


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return the checksum of each of these contiguous tensors; a device is waited for once, not once a tensor."""
    all_bytes = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
    ends = [data.numel() // _ROW_BYTES * _ROW_BYTES for data in all_bytes]  # of what is whole rows
    sums = _row_sums([_rows(data[:end]) for data, end in zip(all_bytes, ends, strict=True) if end])
    on_host = _to_host([*sums, *(data[end:] for data, end in zip(all_bytes, ends, strict=True))])
    summed, rests = iter(on_host[: len(sums)]), on_host[len(sums) :]
    found = []
    for data, end, rest in zip(all_bytes, ends, rests, strict=True):
        digest = hashlib.blake2b(data.numel().to_bytes(8, "little"), digest_size=8)
        if end:
            digest.update(next(summed).numpy())
        digest.update(rest.numpy())
        found.append(int.from_bytes(digest.digest(), "little") >> 1)
    return found


def _rows(whole: Tensor) -> Tensor:
    """Return bytes as rows of words, of shape (rows, `_ROW`)."""
    if whole.data_ptr() % 4:
        whole = whole.clone()
    return whole.view(torch.int32).view(-1, _ROW)


def _to_host(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return these byte tensors in host memory: what is on one device comes in one copy."""
    found: list[Tensor] = list(parts)
    for device in {part.device for part in parts if part.device.type != "cpu"}:
        there = [index for index, part in enumerate(parts) if part.device == device]
        pieces = torch.cat([parts[index] for index in there]).cpu().split([parts[index].numel() for index in there])
        for index, piece in zip(there, pieces, strict=True):
            found[index] = piece
    return found


def _row_sums(many: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of the rows of each of `many` (rows, `_ROW`), as bytes on its device."""
    on_cpu = [rows for rows in many if rows.device.type == "cpu"]
    sums = iter(_sums_in_float64(on_cpu).split([len(rows) for rows in on_cpu])) if on_cpu else iter(())
    return [(next(sums) if rows.device.type == "cpu" else _sums_in_int64(rows)).view(torch.uint8) for rows in many]


def _sums_in_float64(many: Sequence[Tensor]) -> Tensor:
    """Return what `_sums_in_int64` does, of all rows of `many`. See Note [Exact sums]."""
    words = torch.empty(min(_CACHED_ROWS, sum(map(len, many))), _ROW, dtype=torch.float64)
    filled, sums = 0, list[Tensor]()
    for part in (part for rows in many for part in rows.split(_CACHED_ROWS)):  # small tensors share a product
        if filled + len(part) > _CACHED_ROWS:
            sums.append(_digits() @ words[:filled].t())
            filled = 0
        words[filled : filled + len(part)].copy_(part)
        filled += len(part)
    sums.append(_digits() @ words[:filled].t())
    return _from_digits(torch.cat(sums, dim=1))


def _sums_in_int64(rows: Tensor) -> Tensor:
    weights = _weights(rows.device)
    return torch.cat([(part * weights).sum(dim=1) for part in rows.split(_CHUNK_ROWS)])


@functools.cache
def _weights(device: torch.device) -> Tensor:
    return _from_digits(_digits()).to(device)


@functools.cache
def _digits() -> Tensor:
    """Return the digits of the weights, lowest first: -1024..1023, the lowest odd, so that every odd weight is as likely."""
    drawn = bytearray(hashlib.shake_256(b"weights of a row").digest(2 * _NUM_DIGITS * _ROW))
    digits = torch.frombuffer(drawn, dtype=torch.int16).view(_NUM_DIGITS, _ROW) >> (16 - _DIGIT_BITS)
    digits[0] |= 1
    return digits.to(torch.float64)


@functools.cache
def _places() -> Tensor:
    return torch.tensor([1 << _DIGIT_BITS * place for place in range(_NUM_DIGITS)])


def _from_digits(digits: Tensor) -> Tensor:
    """Return the numbers modulo 2**64 that have these digits (float64), one column a number."""
    return _places() @ digits.to(torch.int64)
