"""Finds the samples of a microbatch.

The samples of a lane are a pure function of two numbers: how many samples the job has consumed, and
the microbatch's id. So every replica reads the same samples for an id. All ids of a step have
exactly the samples that upstream's `MegatronPretrainingSampler` gives to a data-parallel job of the
same global batch; with `--dataloader-type cyclic` those of its `MegatronPretrainingRandomSampler`
in a job of one data-parallel rank (`Shuffled`). Which replica computes a microbatch is decided
elsewhere.

Note [Workers]
    Upstream reads ahead in forked worker processes, each of which knows its samples for the whole
    run. Here the samples of a step are known only from its plan, and a forked child would keep a
    dead rank's sockets open. So one thread reads ahead what the plan orders, but not at first and
    not after a fault (`trainer/read_ahead.py`, Note [What is not read ahead]). `--num-workers` is
    the most microbatches that it reads ahead. With 0 the training thread reads each microbatch when
    it is due, as upstream does with 0. Upstream's default of 2 hides a read that takes longer than
    one microbatch; more only takes memory, unless reading times differ much.

Note [Generators]
    Upstream's datasets draw from none, or from a generator that they make for each sample (that of
    `--fim-data` only through `fill_in_middle.py`). A generator of a dataset's own that moves on
    with each reading is not seen here, and breaks "samples follow from the id". A dataset that
    draws from a generator of the process must read in the training thread: its sample then follows
    from the microbatch's random state (`randomness.py`), and no other thread changes that state. So
    a dataset is read ahead only after a batch of it was read without a draw. A dataset that draws
    for some of its samples and not for others needs `--num-workers 0`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from megatron_recover.core.progress import Phase
from megatron_recover.core.values import MicrobatchId
from megatron_recover.megatron.data.masks import Masks, fill_mask_caches
from megatron_recover.megatron.data.randomness import state_of_generators
from megatron_recover.progress_page import ProgressPage
from megatron_recover.trainer.read_ahead import Batch, ReadAhead

logger = logging.getLogger(__name__)


class Dataset(Protocol):
    """A source of samples, such as upstream's `GPTDataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


class MicrobatchCursor:
    """Names the microbatch whose samples are read next.

    One per rank, shared by all its data iterators. `commit.CommitLoop` sets the microbatch before
    each forward.
    """

    def __init__(self, page: ProgressPage | None = None, num_ahead: int = 0) -> None:
        """Start at microbatch 0. `page` shows when samples are read; None: nobody reads it.

        `num_ahead`: most microbatches of each iterator that a thread reads ahead (Note [Workers]).
        """
        self.page = page or ProgressPage()
        self.read_ahead = ReadAhead(self.page, num_ahead)
        self.microbatch = 0
        """Id of the microbatch that `next(iterator)` returns. Set it before every forward."""
        self._iterators: list[MicrobatchIterator] = []
        """Iterators of the step."""

    def begin(self, data_iterator: Any, num_microbatches: int) -> None:
        """Begin a step of `num_microbatches` (M) microbatches in the iterators of `data_iterator`.

        `data_iterator` is Megatron's argument: an iterator, a list with one per model chunk, or
        None. Iterators that `Loaders` has not built are ignored. Call this once per rank and step
        with microbatches, also in evaluation and also if the rank reads nothing. Do not call it
        again for further passes of the step, which read the samples of the same step.
        """
        self._iterators = of_loaders(data_iterator)
        for iterator in self._iterators:
            iterator.begin(num_microbatches)

    def close(self, patience_s: float) -> None:
        """Stop reading ahead; wait at most `patience_s` seconds for the thread to end."""
        self.read_ahead.close(patience_s)

    @contextlib.contextmanager
    def reading_ahead(self, microbatches: Sequence[MicrobatchId]) -> Iterator[None]:
        """Read these microbatches of the step ahead, in this order, while the body runs.

        At most `num_ahead` batches of each iterator wait at a time. Iterators that may not be read
        ahead, or not yet, are left out. What the body leaves is dropped.
        """
        self.read_ahead.expect(iterator.batch(microbatch) for microbatch in microbatches for iterator in self._iterators)
        try:
            yield
        finally:
            self.read_ahead.expect(())


def of_loaders(data_iterator: Any) -> list[MicrobatchIterator]:
    """Return the iterators that `Loaders` has built among Megatron's (`MicrobatchCursor.begin`)."""
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    # Megatron wraps our iterator in its RerunDataIterator.
    unwrapped = [getattr(iterator, "iterable", iterator) for iterator in iterators]
    return [iterator for iterator in unwrapped if isinstance(iterator, MicrobatchIterator)]


class MicrobatchIterator:
    """Iterator over a dataset: `next` returns this lane's batch of the cursor's microbatch.

    Each value of the batch is stacked over the samples: a tensor of shape [micro_batch_size, ...],
    on a machine with CUDA in pinned memory, as upstream's loader returns it. `next` does not
    advance: until the cursor's microbatch or the step changes it returns the same samples. It
    raises StopIteration where the dataset ends before the batch does.
    """

    def __init__(
        self,
        dataset: Dataset,
        cursor: MicrobatchCursor,
        *,
        consumed_samples: int,
        micro_batch_size: int,
        lane: int,
        num_lanes: int,
    ) -> None:
        self._dataset = dataset
        self._cursor = cursor
        self._micro_batch_size = micro_batch_size
        self._lane, self._num_lanes = lane, num_lanes
        self._position = consumed_samples
        self._num_microbatches = 0
        self.may_read_ahead: bool | None = None
        """See Note [Generators]; None: not known yet."""

    def begin(self, num_microbatches: int) -> None:
        """Begin a step of `num_microbatches` microbatches, after the samples of the step before."""
        self._position += self._num_microbatches * self._micro_batch_size * self._num_lanes
        self._num_microbatches = num_microbatches

    def move(self, consumed_samples: int) -> None:
        """Let the next step begin after `consumed_samples` samples, whatever was read before."""
        self._position, self._num_microbatches = consumed_samples, 0

    def indices(self, microbatch: int) -> range:
        """Return the indices of this lane's samples of a microbatch of this step."""
        first = self._position + (microbatch * self._num_lanes + self._lane) * self._micro_batch_size
        return range(first, first + self._micro_batch_size)

    def batch(self, microbatch: int) -> Batch:
        """Return this lane's batch of a microbatch of this step, not read yet."""
        return Batch(self, microbatch, self.indices(microbatch))

    def __iter__(self) -> MicrobatchIterator:
        return self

    def __next__(self) -> dict[str, Tensor]:
        with self._cursor.page.within(Phase.DATA):
            return self._cursor.read_ahead.take(self.batch(self._cursor.microbatch))

    def read(self, indices: range) -> dict[str, Tensor]:
        """Return the batch of these samples. Raises StopIteration where the dataset ends before."""
        if indices.stop > len(self._dataset):
            raise StopIteration(f"the dataset has {len(self._dataset)} samples; a microbatch needs {indices}")
        return default_collate([self._dataset[index] for index in indices])

    def prepared(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch, on a machine with CUDA in pinned memory."""
        if not torch.cuda.is_available():
            return batch
        return {name: value.pin_memory() if isinstance(value, Tensor) else value for name, value in batch.items()}

    def read_when_due(self, indices: range) -> dict[str, Tensor]:
        """Return the batch of these samples; find out if reading draws from a shared generator.

        A draw makes `may_read_ahead` False, with a warning; reading without a draw makes it True.
        If it is False already, only read. Not called with `--num-workers 0`, where nothing is read
        ahead.
        """
        if self.may_read_ahead is False:
            return self.read(indices)
        before = state_of_generators()
        batch = self.read(indices)
        draws = state_of_generators() != before
        if draws:
            logger.warning("reading samples changes the random state of the process: no sample is read before it is due")
        self.may_read_ahead = not draws
        return batch


class Shuffled:
    """A data set without an end: all samples of another one, in a new order in each epoch.

    The order of an epoch is that of upstream's cyclic loader in a job of one data-parallel rank: a
    function of the number of the epoch and of the length. So it depends neither on replicas nor on
    lanes. An epoch leaves out the last samples, with which no microbatch is full.
    """

    def __init__(self, dataset: Dataset, micro_batch_size: int) -> None:
        """Shuffle `dataset`. Raises ValueError if it has less than one microbatch."""
        self._dataset, self._length = dataset, len(dataset) // micro_batch_size * micro_batch_size
        if not self._length:
            raise ValueError(f"the dataset has {len(dataset)} samples, fewer than a microbatch of {micro_batch_size}")

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, position: int) -> dict[str, Any]:
        epoch, place = divmod(position, self._length)
        return self._dataset[int(_order(self._length, epoch)[place])]


@functools.lru_cache(maxsize=4)
def _order(length: int, epoch: int) -> Tensor:
    """Return the order of the samples in an epoch.

    Some are kept: of two epochs where a step begins in one and ends in another, for two splits.
    """
    return torch.randperm(length, generator=torch.Generator().manual_seed(epoch))


def never_ends(iterator: MicrobatchIterator) -> MicrobatchIterator:
    """Return `iterator`, which a `Shuffled` data set never ends (seam `cyclic`)."""
    return iterator


class Loaders:
    """Replaces `build_pretraining_data_loader` (seam `data_loader`)."""

    def __init__(self, cursor: MicrobatchCursor, get_args: Callable[[], Any]) -> None:
        self._cursor = cursor
        self._get_args = get_args
        self._masks: Masks = {}
        """Masks that the data sets of all splits share."""

    def build(self, dataset: Dataset | None, consumed_samples: int) -> MicrobatchIterator | None:
        """Return the iterator of one split, which begins after `consumed_samples` samples.

        Fill the dataset's caches of masks first. The validation and test splits get the microbatch
        size of evaluation. With `--dataloader-type cyclic` the samples are shuffled (`Shuffled`).
        Returns None without a dataset: ranks that read no data have none.
        """
        from megatron.core import parallel_state
        from megatron.core.datasets.utils import Split

        if dataset is None:
            return None
        fill_mask_caches(dataset, self._masks)
        args = self._get_args()
        split = getattr(dataset, "split", None) or getattr(dataset, "index_split", None)
        micro_batch_size = args.eval_micro_batch_size if split in (Split.valid, Split.test) else args.micro_batch_size
        return MicrobatchIterator(
            Shuffled(dataset, micro_batch_size) if args.dataloader_type == "cyclic" else dataset,
            self._cursor,
            consumed_samples=consumed_samples,
            micro_batch_size=micro_batch_size,
            lane=parallel_state.get_data_parallel_rank(),
            num_lanes=parallel_state.get_data_parallel_world_size(),
        )
