"""Samples that are read ahead reach the device without a wait."""

from __future__ import annotations

import numpy
import pytest
import torch

from megatron_recover.megatron.data.loaders import MicrobatchCursor, MicrobatchIterator

pytestmark = [pytest.mark.gpu, pytest.mark.finding("G12"), pytest.mark.xdist_group("timed")]
SIZE, MICROBATCHES = 4096, 8
LONG = 2_000_000_000
"""Cycles: about a second."""


class Numbers:
    """Sample i is the number i, many times."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, numpy.ndarray]:
        return {"tokens": numpy.full(SIZE, index)}


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_a_batch_is_pinned_and_copied_behind_the_device(num_ahead: int) -> None:
    cursor = MicrobatchCursor(None, num_ahead)
    iterator = MicrobatchIterator(Numbers(), cursor, consumed_samples=0, micro_batch_size=2, lane=0, num_lanes=1)
    for step in range(2):
        cursor.begin(iterator, MICROBATCHES)
        ended = torch.cuda.Event()
        torch.cuda._sleep(LONG)
        ended.record()
        copies = []
        with cursor.reading_ahead(range(MICROBATCHES)):
            for cursor.microbatch in range(MICROBATCHES):
                batch = next(iterator)["tokens"]
                assert batch.is_pinned()
                copies.append(batch.cuda(non_blocking=True))
        has_waited = ended.query()
        first = 2 * MICROBATCHES * step
        assert [int(copy[0, 0]) for copy in copies] == list(range(first, first + 2 * MICROBATCHES, 2))
    assert not has_waited, "reading or copying has waited for the device"
    cursor.read_ahead.close(10.0)
