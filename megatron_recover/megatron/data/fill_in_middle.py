"""Makes the samples of `--fim-data` follow from their index.

Upstream's `GPTFIMDataset` draws all its samples from one generator, and each reading moves this
generator on. So which texts are rearranged, and where they are cut, depends on what the process has
read before. Here any replica may read a microbatch, in any order, and again after a fault. The
first and the last stage of a replica each read it for themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy


class FillInMiddle:
    """Replaces `GPTFIMDataset._query_document_sample_shuffle_indices` (seam `fim`)."""

    def __init__(self, original: Callable[[Any, int], Any]) -> None:
        self._original = original

    def __get__(self, dataset: Any, owner: type) -> Callable[[int], Any]:
        """Return the method of `dataset`."""
        return functools.partial(self.read, dataset)

    def read(self, dataset: Any, idx: int) -> Any:
        """Return upstream's sample `idx` of `dataset`, from a generator of its own.

        The generator follows from the data set's seed and `idx`. One thread at a time reads a data
        set (`trainer/read_ahead.py`, Note [One reading at a time]).
        """
        dataset.np_rng = numpy.random.RandomState(numpy.random.MT19937((dataset.config.random_seed, int(idx))))
        return self._original(dataset, idx)
