"""Reading samples: the time that a microbatch waits for its samples, and the time of both together.

Three loaders read the same samples of one indexed data set, one after the other in each run:
upstream's (torch's `DataLoader` with upstream's sampler and two worker processes), ours that reads
two microbatches ahead in a thread, and ours that reads when a microbatch is due. Between two
batches the training thread computes a product of matrices, beside which others can read.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, row

SEQUENCE, SAMPLES, MICROBATCHES, STEPS, RUNS, NUM_AHEAD = 4096, 4, 8, 4, 5, 2
"""Tokens of a sample; samples of a microbatch; microbatches of a step; measured steps of a run;
runs; microbatches that are read ahead, and worker processes."""
_WIDTH, _PRODUCTS = 1024, 2
_SLOW_S = 0.005
"""Seconds that a sample of the slow store takes longer."""


def _dataset(folder: Path, *, mask: bool) -> Any:
    """Return upstream's data set over Python's own sources, with an attention mask or without."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=257)
    prefix = str(folder / "text")
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=SEQUENCE, split="1,0,0", path_to_cache=str(folder / "cache"), tokenizer=tokenizer,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, blend=([prefix], None),
        create_attention_mask=mask,
    )  # fmt: skip
    low = IndexedDataset(prefix)
    documents = torch.arange(low.document_indices.shape[0] - 1, dtype=torch.int32).numpy()
    return GPTDataset(low, prefix, documents, SAMPLES * MICROBATCHES * (STEPS + 1), Split.train, config)


class _Slow(torch.utils.data.Dataset):
    """The data set on a slow store: each sample takes `_SLOW_S` longer, without a processor."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        time.sleep(_SLOW_S)
        return self._dataset[index]


class _Computing:
    """The work of a microbatch: products of matrices in one thread."""

    def __init__(self) -> None:
        self._matrix = torch.randn(_WIDTH, _WIDTH)

    def __call__(self) -> None:
        for _ in range(_PRODUCTS):
            torch.mm(self._matrix, self._matrix)


Steps = Iterator[Callable[[], object]]
"""The `next` of each microbatch; the loader goes from one step to the next between two of them."""


def _upstreams(dataset: Any) -> Steps:
    """Yield the reads of upstream's loader, as `build_pretraining_data_loader` creates it."""
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    loader = torch.utils.data.DataLoader(
        dataset, batch_sampler=MegatronPretrainingSampler(len(dataset), 0, SAMPLES, 0, 1), num_workers=NUM_AHEAD,
        persistent_workers=True, multiprocessing_context="fork",
    )  # fmt: skip
    reader = iter(loader)
    for _ in range((STEPS + 1) * MICROBATCHES):
        yield lambda: next(reader)


def _ours(dataset: Any, num_ahead: int) -> Steps:
    """Yield our reads; each step is read ahead from the moment at which it is known."""
    from megatron_recover.megatron.data.loaders import MicrobatchCursor, MicrobatchIterator

    cursor = MicrobatchCursor(num_ahead=num_ahead)
    reader = MicrobatchIterator(dataset, cursor, consumed_samples=0, micro_batch_size=SAMPLES, lane=0, num_lanes=1)
    for _ in range(STEPS + 1):
        cursor.begin(reader, MICROBATCHES)
        with cursor.reading_ahead(range(MICROBATCHES)):
            for microbatch in range(MICROBATCHES):
                cursor.microbatch = microbatch
                yield lambda: next(reader)
    cursor.read_ahead.close(patience_s=STEPS)


def _measure(steps: Steps, compute: Callable[[], None]) -> tuple[float, float]:
    """Return the mean milliseconds that a microbatch waits for samples, and takes in all.

    The first step is not counted: workers start and caches fill.
    """
    waited: list[float] = []
    began = time.perf_counter()
    for number, read in enumerate(steps):
        if number == MICROBATCHES:
            waited.clear()
            began = time.perf_counter()
        asked = time.perf_counter()
        read()
        waited.append(time.perf_counter() - asked)
        compute()
    took = time.perf_counter() - began
    return 1e3 * sum(waited) / len(waited), 1e3 * took / len(waited)


def rows() -> list[Row]:
    """Return waiting and total time of a microbatch: each data set, each loader."""
    from megatron_recover.cli.data import write_dataset

    logging.getLogger("megatron").setLevel(logging.WARNING)
    result = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dataset(folder / "text", sorted(Path(json.__file__).parents[1].glob("*.py")))
        plain = _dataset(folder, mask=False)
        datasets = {"memory map": plain, "attention mask": _dataset(folder, mask=True), "slow store": _Slow(plain)}
        for kind, dataset in datasets.items():
            for loader, pairs in _compare(dataset).items():
                for number, what in enumerate(("wait for samples", "microbatch")):
                    result.append(row(f"{what}, {kind}: {loader}", [pair[number] for pair in pairs], unit="ms"))
    return result


def _compare(dataset: Any) -> dict[str, list[tuple[float, float]]]:
    """Return the measurements of each loader, one after the other in each of `RUNS` runs."""
    compute = _Computing()
    loaders: dict[str, Callable[[], Steps]] = {
        "upstream's": lambda: _upstreams(dataset),
        "ours, 2 ahead": lambda: _ours(dataset, NUM_AHEAD),
        "ours, when due": lambda: _ours(dataset, 0),
    }
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
    for _ in range(RUNS):
        for name, steps in loaders.items():
            measured[name].append(_measure(steps(), compute))
    return measured
