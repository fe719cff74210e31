"""Finds the samples of a microbatch, and guards upstream's index cache while it is built.

Samples are a pure function of two numbers: how many samples the job has consumed, and the
microbatch's id. So every replica reads the same samples for an id: exactly the samples that
upstream's `MegatronPretrainingSampler` gives to a data-parallel job of the same global batch. Which
replica computes a microbatch is decided elsewhere.

Note [Reading in the training thread]
    Upstream reads ahead in forked worker processes. A forked child would keep a dead rank's sockets
    open. It would also need the ids of microbatches before they are known. Reading a sample of an
    indexed dataset only copies from a memory map. So the training thread reads samples when they
    are due, and `--num-workers` has no effect.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy
from torch import Tensor
from torch.utils.data import default_collate

from megatron_recover.core.detector import Phase
from megatron_recover.deadlines import figure
from megatron_recover.host import lock_file
from megatron_recover.host.whole_file import replacing
from megatron_recover.progress_page import ProgressPage


class Dataset(Protocol):
    """A source of samples, such as upstream's `GPTDataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


class MicrobatchCursor:
    """Names the microbatch whose samples are read next.

    One per rank, shared by all its data iterators. The schedule sets the microbatch before each
    forward.
    """

    def __init__(self, page: ProgressPage | None = None) -> None:
        """Start at microbatch 0. `page` shows when samples are read; None: nobody reads it."""
        self.page = page or ProgressPage()
        self.microbatch = 0
        """Id of the microbatch that `next(iterator)` returns. Set it before every forward."""

    def begin(self, data_iterator: Any, num_microbatches: int) -> None:
        """Begin a step of `num_microbatches` (M) microbatches in all data iterators of this rank.

        `data_iterator` is Megatron's argument: an iterator, a list with one per model chunk, or
        None. Call this once per step and rank, also in evaluation and also if the rank reads
        nothing. Do not call it again for further passes of the step, which read the samples of the
        same step.
        """
        for iterator in data_iterator if isinstance(data_iterator, list) else [data_iterator]:
            # Megatron wraps our iterator in its RerunDataIterator.
            microbatches = getattr(iterator, "iterable", iterator)
            if isinstance(microbatches, MicrobatchIterator):
                microbatches.begin(num_microbatches)


class MicrobatchIterator:
    """Iterator over a dataset: `next` returns this lane's batch of the cursor's microbatch.

    Each value of the batch is stacked over the samples: a tensor of shape [micro_batch_size, ...].
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

    def begin(self, num_microbatches: int) -> None:
        """Begin a step of `num_microbatches` microbatches, after the samples of the step before."""
        self._position += self._num_microbatches * self._micro_batch_size * self._num_lanes
        self._num_microbatches = num_microbatches

    def indices(self, microbatch: int) -> range:
        """Return the indices of this lane's samples of a microbatch of this step."""
        first = self._position + (microbatch * self._num_lanes + self._lane) * self._micro_batch_size
        return range(first, first + self._micro_batch_size)

    def __iter__(self) -> MicrobatchIterator:
        return self

    def __next__(self) -> dict[str, Tensor]:
        indices = self.indices(self._cursor.microbatch)
        if indices.stop > len(self._dataset):
            raise StopIteration(
                f"the dataset has {len(self._dataset)} samples; microbatch {self._cursor.microbatch} needs {indices}"
            )
        with self._cursor.page.within(Phase.DATA):
            return default_collate([self._dataset[index] for index in indices])


class Loaders:
    """Replaces `build_pretraining_data_loader` (seam `data_loader`)."""

    def __init__(self, cursor: MicrobatchCursor, get_args: Callable[[], Any]) -> None:
        self._cursor = cursor
        self._get_args = get_args

    def build(self, dataset: Dataset | None, consumed_samples: int) -> MicrobatchIterator | None:
        """Return the iterator of one split, which begins after `consumed_samples` samples.

        Returns None without a dataset: ranks that read no data have none.
        """
        from megatron.core import parallel_state
        from megatron.core.datasets.utils import Split

        if dataset is None:
            return None
        args = self._get_args()
        split = getattr(dataset, "split", None) or getattr(dataset, "index_split", None)
        return MicrobatchIterator(
            dataset,
            self._cursor,
            consumed_samples=consumed_samples,
            micro_batch_size=args.eval_micro_batch_size if split in (Split.valid, Split.test) else args.micro_batch_size,
            lane=parallel_state.get_data_parallel_rank(),
            num_lanes=parallel_state.get_data_parallel_world_size(),
        )


# --- The index cache ------------------------------------------------------------------------------


def cache_directory(data_cache_path: str | None, prefixes: Sequence[str]) -> Path | None:
    """Return the folder of upstream's index cache, or None without data.

    The folder is `--data-cache-path`, else `cache` below the first of `prefixes`.
    """
    if data_cache_path is not None:
        return Path(data_cache_path)
    return Path(prefixes[0]) / "cache" if prefixes else None


@contextlib.contextmanager
def building_cache(directory: Path, patience_s: float) -> Iterator[None]:
    """Let one process at a time build upstream's index cache, and expose no partial array.

    Upstream treats a cache as complete if its files exist, and overwrites files that other
    processes may have mapped. Within this context each array is written beside its final name,
    synced and renamed. So a killed builder leaves each array complete or absent, and the next
    builder builds the absent ones. Upstream's description beside them, which nothing reads back,
    may be partial.

    The lock only saves work. The kernel releases it when its holder ends. A process that has waited
    for `patience_s` seconds, because the holder is stopped or slow, builds the cache without the
    lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ".building.lock"
    with lock_file.opened(path) as lock:
        try:
            if lock_file.acquired(lock, patience_s):
                lock.truncate(0)
                print(f"pid {os.getpid()}", file=lock, flush=True)
            else:
                holder = lock.read().strip() or "another process"
                _build_unlocked(f"{holder} has held {path} for {figure(patience_s)} s")
        except OSError as error:  # a file system without locks, or a full one
            _build_unlocked(f"{path} cannot be locked ({error.strerror})")
        save = numpy.save
        numpy.save = _atomic(save)
        try:
            yield
        finally:
            numpy.save = save


def _build_unlocked(why: str) -> None:
    print(f"{why}: building the index without the lock", file=sys.stderr)


def _atomic(save: Callable[..., None]) -> Callable[..., None]:
    def atomic_save(file: Any, array: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(file, str | os.PathLike):
            save(file, array, *args, **kwargs)
            return
        with replacing(Path(file)) as stream:
            save(stream, array, *args, **kwargs)
            stream.flush()
            os.fsync(stream.fileno())

    return atomic_save
