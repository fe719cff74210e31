"""A sample of `--fim-data` is the same whatever was read before, though upstream's data set draws from one generator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers import MegatronTokenizer
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig

from megatron_recover.cli.data import write_dataset
from megatron_recover.megatron.data.fill_in_middle import FillInMiddle
from megatron_recover.megatron.seams import seams

SAMPLES = 6
SPECIAL = {"prefix": 250, "middle": 251, "suffix": 252, "pad": 253, "eod": 256}
FRAGMENT = ord(":")


def tokenizer() -> MegatronTokenizer:
    """A tokenizer with one token for each character, and `SPECIAL`."""
    made = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=257)
    inner = made._tokenizer
    inner.tokens_to_ids = lambda tokens: [FRAGMENT] if isinstance(tokens, str) else [SPECIAL[each] for each in tokens]
    inner.ids_to_text = lambda ids, remove_special_tokens: "".join(chr(each) for each in ids)
    inner.text_to_ids = lambda text: [ord(each) for each in text]
    return made


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("text") / "json"
    write_dataset(prefix, iter(sorted(Path(os.__file__).parent.glob("json/*.py"))))
    return str(prefix)


def dataset(prefix: str, cache: Path, seed: int = 1, split_sample: str | None = None) -> GPTFIMDataset:
    config = GPTFIMDatasetConfig(
        random_seed=seed, split="1,0,0", path_to_cache=str(cache), tokenizer=tokenizer(), blend=([prefix], None),
        sequence_length=64, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        fim_rate=0.8, fim_spm_rate=0.5, fim_fragment_rate=0.8, fim_split_sample=split_sample,
        fim_extra_tokens={name: name for name in SPECIAL},
    )  # fmt: skip
    low = IndexedDataset(prefix)
    documents = numpy.arange(len(low.document_indices) - 1, dtype=numpy.int32)
    return GPTFIMDataset(low, prefix, documents, 200, Split.train, config)


def read(source: Any, order: list[int]) -> torch.Tensor:
    """The tokens of samples 0 to `SAMPLES` - 1, which are read in `order`."""
    found = {index: source[index]["tokens"] for index in order}
    return torch.stack([found[index] for index in range(SAMPLES)])


@pytest.fixture
def seam() -> Iterator[None]:
    made = seams.Installation([each for each in seams.load() if each.name == "fim"])
    made.install({"fim": FillInMiddle(made.originals["fim"])})
    yield
    made.remove()


FORWARD = list(range(SAMPLES))
AGAIN = [3, 3, 5, 0, 3, 4, 2, 1, 5]


@pytest.mark.usefixtures("seam")
@pytest.mark.parametrize("split_sample", [None, ":"], ids=["samples", "fragments"])
def test_a_sample_follows_from_its_index(prefix: str, tmp_path: Path, split_sample: str | None) -> None:
    source = dataset(prefix, tmp_path, split_sample=split_sample)
    found = read(source, FORWARD)
    assert torch.equal(read(source, FORWARD), found), "another epoch of the same data set"
    assert torch.equal(read(source, AGAIN), found)
    assert torch.equal(read(dataset(prefix, tmp_path, split_sample=split_sample), AGAIN), found), "another rank"
    middles = [tokens.tolist().index(SPECIAL["middle"]) for tokens in found if SPECIAL["middle"] in tokens]
    assert len(set(middles)) > 1, "samples do not differ in where they are cut"
    assert not torch.equal(read(dataset(prefix, tmp_path, seed=2, split_sample=split_sample), FORWARD), found)


def test_upstream_alone_lets_what_was_read_change_a_sample(prefix: str, tmp_path: Path) -> None:
    """If this fails, upstream has mended it, and the seam `fim` can go."""
    source = dataset(prefix, tmp_path)
    assert not torch.equal(read(source, FORWARD), read(source, FORWARD))
