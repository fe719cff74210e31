"""A sample is the same whichever sample a process has read before, though upstream's cache of masks is not."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers import MegatronTokenizer

from megatron_recover.cli.data import write_dataset
from megatron_recover.megatron.data.loaders import Loaders, MicrobatchCursor

PADDING, SAMPLES = ord("e"), 6
"""A token that the text has, as the padding of a tokenizer may be."""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("text") / "json"
    write_dataset(prefix, iter(sorted(Path(os.__file__).parent.glob("json/*.py"))))
    return str(prefix)


def dataset(prefix: str, cache: Path, **fields: Any) -> GPTDataset:
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=257)
    flags = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    config = GPTDatasetConfig(
        random_seed=1, split="1,0,0", path_to_cache=str(cache), tokenizer=tokenizer, blend=([prefix], None),
        **({"sequence_length": 32} | flags | fields),
    )  # fmt: skip
    low = IndexedDataset(prefix)
    made = GPTDataset(low, prefix, numpy.arange(len(low.document_indices) - 1, dtype=numpy.int32), 200, Split.train, config)
    made._pad_token_id = PADDING
    return made


def read(source: Any, first: int) -> list[dict[str, torch.Tensor]]:
    """All samples, after `first` was read."""
    source[first]
    return [source[index] for index in range(SAMPLES)]


def alike(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(one, other, strict=True)
    )


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> Loaders:
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda: 0)
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 1)
    return Loaders(
        MicrobatchCursor(), lambda: SimpleNamespace(eval_micro_batch_size=1, micro_batch_size=1, dataloader_type="single")
    )


@pytest.mark.parametrize("masks", [True, False], ids=["attention masks", "none"])
@pytest.mark.parametrize("blended", [True, False], ids=["blend", "one"])
def test_what_was_read_before_changes_no_sample(
    prefix: str, tmp_path: Path, loaders: Loaders, blended: bool, masks: bool
) -> None:
    found = []
    for first in (0, SAMPLES - 1):
        source = dataset(prefix, tmp_path, create_attention_mask=masks)
        loaders.build(SimpleNamespace(datasets=[source], split=Split.train) if blended else source, 0)
        found.append(read(source, first))
    assert alike(*found)
    kept = torch.stack([sample["loss_mask"] for sample in found[0]])
    assert {0.0, 1.0} == set(kept.unique().tolist()) and len(kept.unique(dim=0)) > 1, "the padding decides nothing here"
    alone = []  # as upstream has each sample where it is the first one
    for index in range(SAMPLES):
        alone.append(dataset(prefix, tmp_path, create_attention_mask=masks)[index])
    assert alike(found[0], alone)


def test_upstream_alone_lets_the_first_sample_change_the_others(prefix: str, tmp_path: Path) -> None:
    """If this fails, upstream has mended it, and `megatron/data/masks.py` can go."""
    first, other = (read(dataset(prefix, tmp_path), index) for index in (0, SAMPLES - 1))
    assert not alike(first, other)


def test_masks_that_depend_on_the_sample_are_not_cached(prefix: str, tmp_path: Path, loaders: Loaders) -> None:
    source = dataset(prefix, tmp_path, eod_mask_loss=True)
    loaders.build(source, 0)
    assert not source.masks_and_position_ids_are_cached


def test_data_sets_of_two_lengths_have_masks_of_their_own_and_other_data_sets_stay(
    prefix: str, tmp_path: Path, loaders: Loaders
) -> None:
    short, long = dataset(prefix, tmp_path), dataset(prefix, tmp_path, sequence_length=64)
    loaders.build(SimpleNamespace(datasets=[short], dataset=long, split=Split.train), 0)
    assert (len(short[0]["loss_mask"]), len(long[0]["loss_mask"])) == (32, 64)
    again = dataset(prefix, tmp_path)
    loaders.build(again, 0)
    assert again.cached_position_ids is short.cached_position_ids, "each split has masks of its own"
    loaders.build(SimpleNamespace(datasets=None, dataset=None, split=Split.train), 0)
