"""Names the bytes of tensors in 63 bits: the same on every device, changed by any change of a bit or of a position.

Not cryptographic: it tells corruption and divergence, not forgery.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_recover.core.digest import combined

__all__ = ["checksum", "checksums", "combined"]

_ROW = 1024
"""64-bit words a row. Rows become weighted sums modulo 2**64; these, and what is left of a tensor, are hashed in order. Hashing
is ten times as slow as summing, so a row is no longer than it takes to leave little to hash."""
_CHUNK_ROWS = 4096
"""Rows whose products are in memory at once where the device has no integer matrix product (32 MiB)."""


def checksum(tensor: Tensor) -> int:
    """The checksum of a contiguous tensor, 0..2**63-1. Its dtype and shape do not matter, its size does."""
    return checksums([tensor])[0]


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return the checksum of each of these contiguous tensors; a device is waited for once, not once a tensor."""
    parts = [_reduced(tensor) for tensor in tensors]
    on_host = iter(_to_host([part for _, *both in parts for part in both]))
    found = []
    for num_bytes, _, _ in parts:
        digest = hashlib.blake2b(num_bytes.to_bytes(8, "little"), digest_size=8)
        digest.update(next(on_host).numpy())
        digest.update(next(on_host).numpy())
        found.append(int.from_bytes(digest.digest(), "little") >> 1)
    return found


def _reduced(tensor: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return the size in bytes, the sums of the rows, and the bytes behind the last row; both on the tensor's device."""
    data = tensor.detach().view(-1).view(torch.uint8)
    num_bytes = data.numel()
    num_rows = num_bytes // (8 * _ROW)
    summed = num_rows * 8 * _ROW
    if not num_rows:
        return num_bytes, data[:0], data
    whole = data[:summed] if data.data_ptr() % 8 == 0 else data[:summed].clone()
    return num_bytes, _row_sums(whole.view(torch.int64).view(num_rows, _ROW)).view(torch.uint8), data[summed:]


def _to_host(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return these byte tensors in host memory: what is on one device comes in one copy."""
    found: list[Tensor] = list(parts)
    for device in {part.device for part in parts if part.device.type != "cpu"}:
        there = [index for index, part in enumerate(parts) if part.device == device]
        pieces = torch.cat([parts[index] for index in there]).cpu().split([parts[index].numel() for index in there])
        for index, piece in zip(there, pieces, strict=True):
            found[index] = piece
    return found


def _row_sums(rows: Tensor) -> Tensor:
    weights = _weights(rows.device)
    if rows.device.type == "cpu":
        return rows @ weights
    return torch.cat([(part * weights).sum(dim=1) for part in rows.split(_CHUNK_ROWS)])


@functools.cache
def _weights(device: torch.device) -> Tensor:
    # Odd weights are invertible modulo 2**64, so no change of a single word can leave its row's sum as it was.
    return torch.arange(1, 2 * _ROW, 2, dtype=torch.int64, device=device) * 0x1E3779B97F4A7C15
