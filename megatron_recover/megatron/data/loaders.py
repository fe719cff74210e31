"""Which samples a microbatch has, and the index cache that they are found through.

Decides nothing about who computes a microbatch. Samples are a pure function of how many the job has consumed and of the
microbatch's id, so any replica reads the same ones: exactly those that upstream's `MegatronPretrainingSampler` deals to a
data-parallel job of the same global batch.

Note [Reading in the training thread]
    Upstream reads ahead in forked worker processes. A forked child keeps a dead rank's sockets open and would have to be
    told ids that are not known yet; a sample of an indexed dataset is a copy out of a memory map. So samples are read when
    they are due, and `--num-workers` has no effect.
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
    """What is read from: upstream's `GPTDataset` and its like."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


class MicrobatchCursor:
    """Where the schedule is. One per rank, shared by all its data iterators; the schedule moves it, the iterators follow."""

    def __init__(self, page: ProgressPage | None = None) -> None:
        """`page` shows when samples are read; None: nobody looks."""
        self.page = page or ProgressPage()
        self.microbatch = 0
        """The id whose samples the next `next(iterator)` returns. Set it before every forward."""

    def begin(self, data_iterator: Any, num_microbatches: int) -> None:
        """A step begins: `data_iterator` is what Megatron gave the schedule (one per model chunk, or None), M its microbatches.

        Call it once per step and rank, whether or not the rank will read anything, training and evaluation alike; not again
        for the passes of a recovery, which read the same step's samples.
        """
        for iterator in data_iterator if isinstance(data_iterator, list) else [data_iterator]:
            microbatches = getattr(iterator, "iterable", iterator)  # Megatron wraps ours in its RerunDataIterator
            if isinstance(microbatches, MicrobatchIterator):
                microbatches.begin(num_microbatches)


class MicrobatchIterator:
    """Iterator over a dataset whose `next` is the batch of the microbatch that the cursor is at, this rank's lane of it.

    Every value of a sample is stacked over the micro-batch: tensors of shape [micro_batch_size, ...].
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
        """A step of so many microbatches begins where the step before ended."""
        self._position += self._num_microbatches * self._micro_batch_size * self._num_lanes
        self._num_microbatches = num_microbatches

    def indices(self, microbatch: int) -> range:
        """Samples of a microbatch of this step that are this lane's."""
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
    """Stands in for `build_pretraining_data_loader` (seam `data_loader`)."""

    def __init__(self, cursor: MicrobatchCursor, get_args: Callable[[], Any]) -> None:
        self._cursor = cursor
        self._get_args = get_args

    def build(self, dataset: Dataset | None, consumed_samples: int) -> MicrobatchIterator | None:
        """The iterator of one split; None on ranks that read no data."""
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


# --- The index cache -----------------------------------------------------------------------------------------------------


def cache_directory(data_cache_path: str | None, prefixes: Sequence[str]) -> Path | None:
    """Where upstream keeps its index cache: `--data-cache-path`, else beside the first dataset; None without data."""
    if data_cache_path is not None:
        return Path(data_cache_path)
    return Path(prefixes[0]) / "cache" if prefixes else None


@contextlib.contextmanager
def building_cache(directory: Path, patience_s: float) -> Iterator[None]:
    """Let one process at a time build upstream's index cache, and let no other ever see a half-written file of it.

    Upstream takes a cache whose files exist for complete, and overwrites files that others may have mapped. Inside, each
    array is written beside its final name, synced, and renamed: a builder that is killed leaves files complete or absent,
    and the next one builds what is absent. The lock only spares the others the work. It ends with its holder's life, and
    whoever has waited for `patience_s` seconds, because the holder is stopped or slow, does the work beside it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ".building.lock"
    with lock_file.opened(path) as lock:
        if lock_file.is_held(lock, patience_s):
            lock.truncate(0)
            print(f"pid {os.getpid()}", file=lock, flush=True)
        else:
            holder = lock.read().strip() or "another process"
            print(f"{holder} has held {path} for {figure(patience_s)} s: building the index beside it", file=sys.stderr)
        save = numpy.save
        numpy.save = _atomic(save)
        try:
            yield
        finally:
            numpy.save = save


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
