"""A checksum names the same bytes alike on a GPU and on a processor."""

from __future__ import annotations

import pytest
import torch

from megatron_recover.trainer.checksum import checksums

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64], ids=str)
def test_checksums_on_a_gpu_are_those_on_a_processor(dtype: torch.dtype) -> None:
    tensors = [torch.randn(size).mul(1000).to(dtype) for size in (0, 1, 4095, 4096, 1 << 20, (1 << 24) + 3)]
    assert checksums([tensor.cuda() for tensor in tensors]) == checksums(tensors)
