"""Names the bytes of tensors in 63 bits: the same on every device, changed by any change of a bit or of a position.

Not cryptographic: it tells corruption and divergence, not forgery.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_ROW = 1024
"""64-bit words a row. Rows become weighted sums modulo 2**64; these, and what is left of a tensor, are hashed in order. Hashing
is ten times as slow as summing, so a row is no longer than it takes to leave little to hash."""
_CHUNK_ROWS = 4096
"""Rows whose products are in memory at once where the device has no integer matrix product (32 MiB)."""


def checksum(tensor: Tensor) -> int:
    """The checksum of a contiguous tensor, 0..2**63-1. Its dtype and shape do not matter, its size does."""
    data = tensor.detach().view(-1).view(torch.uint8)
    num_bytes = data.numel()
    num_rows = num_bytes // (8 * _ROW)
    summed = num_rows * 8 * _ROW
    digest = hashlib.blake2b(num_bytes.to_bytes(8, "little"), digest_size=8)
    if num_rows:
        whole = data[:summed] if data.data_ptr() % 8 == 0 else data[:summed].clone()
        digest.update(_row_sums(whole.view(torch.int64).view(num_rows, _ROW)).cpu().numpy())
    if summed < num_bytes:
        digest.update(data[summed:].cpu().numpy())
    return int.from_bytes(digest.digest(), "little") >> 1


def combined(checksums: Sequence[int]) -> int:
    """The checksum of several tensors, in this order."""
    parts = b"".join(value.to_bytes(8, "little") for value in checksums)
    return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "little") >> 1


def _row_sums(rows: Tensor) -> Tensor:
    weights = _weights(rows.device)
    if rows.device.type == "cpu":
        return rows @ weights
    return torch.cat([(part * weights).sum(dim=1) for part in rows.split(_CHUNK_ROWS)])


@functools.cache
def _weights(device: torch.device) -> Tensor:
    # Odd weights are invertible modulo 2**64, so no change of a single word can leave its row's sum as it was.
    return torch.arange(1, 2 * _ROW, 2, dtype=torch.int64, device=device) * 0x1E3779B97F4A7C15
