"""Names the bytes of tensors in 63 bits: the same on every device, changed by any change of a bit or of a position.

Not cryptographic: it tells corruption and divergence, not forgery.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_ROW = 8192
"""64-bit words a row. Rows become weighted sums modulo 2**64; these, and what is left of a tensor, are hashed in order."""
_CHUNK_ROWS = 512
"""Rows whose products are in memory at once where the device has no integer matrix product (32 MiB)."""


def checksum(tensor: Tensor) -> int:
    """The checksum of a contiguous tensor, 0..2**63-1. Its dtype and shape do not matter, its size does."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    num_rows = data.numel() // (8 * _ROW)
    digest = hashlib.blake2b(data.numel().to_bytes(8, "little"), digest_size=8)
    if num_rows:
        whole = data[: num_rows * _ROW * 8]
        rows = (whole.clone() if whole.data_ptr() % 8 else whole).view(torch.int64).view(num_rows, _ROW)
        digest.update(_row_sums(rows).cpu().numpy().tobytes())
    digest.update(data[num_rows * _ROW * 8 :].cpu().numpy().tobytes())
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
