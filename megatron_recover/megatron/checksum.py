"""Names the bytes of a tensor in 64 bits: the same on every device, changed by any change of a bit or of a position.

Not cryptographic: it tells corruption and divergence, not forgery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_ROW = 8192
"""64-bit words a row; rows are weighted sums modulo 2**64 and their sums are hashed in order."""
_CHUNK_ROWS = 512
"""Rows whose products are in memory at once where the device has no integer matrix product (32 MiB)."""


def checksum(tensors: Iterable[Tensor]) -> int:
    """The checksum of contiguous tensors, in this order, 0..2**63-1. Their dtypes and shapes do not matter, their sizes do."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        data = tensor.detach().reshape(-1).view(torch.uint8)
        if data.data_ptr() % 8:
            data = data.clone()
        num_words = data.numel() // 8
        num_rows = num_words // _ROW
        words = data[: num_words * 8].view(torch.int64)
        digest.update(data.numel().to_bytes(8, "little"))
        digest.update(_row_sums(words[: num_rows * _ROW].view(num_rows, _ROW)).cpu().numpy().tobytes())
        digest.update(data[num_rows * _ROW * 8 :].cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def _row_sums(rows: Tensor) -> Tensor:
    # Odd weights are invertible modulo 2**64, so no change of a single word can leave its row's sum as it was.
    weights = torch.arange(1, 2 * _ROW, 2, dtype=torch.int64, device=rows.device) * 0x1E3779B97F4A7C15
    if rows.device.type == "cpu":
        return rows @ weights
    sums = [(part * weights).sum(dim=1) for part in rows.split(_CHUNK_ROWS)]
    return torch.cat(sums) if sums else rows.new_empty(0)
