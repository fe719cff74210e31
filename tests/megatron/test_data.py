"""Samples by id are those of upstream's sampler, whoever asks and in whatever order; a dead builder leaves no broken index."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_recover.megatron.data.index_cache import building_cache, cache_directory
from megatron_recover.megatron.data.loaders import MicrobatchCursor, MicrobatchIterator, Shuffled, never_ends
from tests.forks import CONTEXT


class Numbers:
    """A dataset whose sample i says i."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, numpy.ndarray]:
        return {"tokens": numpy.array([index, -index])}


def upstream_samples(consumed: int, micro_batch_size: int, rank: int, size: int, num: int) -> list[list[int]]:
    """What upstream's sampler deals rank `rank` of a data-parallel job of `size` ranks."""
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    sampler = iter(MegatronPretrainingSampler(10_000, consumed, micro_batch_size, rank, size))
    return [next(sampler) for _ in range(num)]


def samples(batch: dict[str, torch.Tensor]) -> list[int]:
    return batch["tokens"][:, 0].tolist()


@pytest.mark.parametrize(("replicas", "lanes", "micro"), [(1, 1, 1), (2, 1, 2), (3, 1, 4), (2, 2, 2), (3, 2, 1), (1, 4, 3)])
def test_ids_are_upstreams_samples_in_any_order(replicas: int, lanes: int, micro: int) -> None:
    """M ids of L lanes hold exactly the samples that a plain job of R x L ranks reads in the same steps."""
    quota, steps, consumed = 4, 3, 32 * micro * lanes
    num = replicas * quota
    seed = 20260000 + replicas * 100 + lanes * 10 + micro
    print(f"seed {seed}")
    order = random.Random(seed)
    cursor = MicrobatchCursor()
    iterators = [
        MicrobatchIterator(
            Numbers(10_000), cursor, consumed_samples=consumed, micro_batch_size=micro, lane=lane, num_lanes=lanes
        )
        for lane in range(lanes)
    ]
    ours: list[set[int]] = []
    for _ in range(steps):
        read: list[int] = []
        cursor.begin(iterators, num)
        for microbatch in order.sample(range(num), num):
            cursor.microbatch = microbatch
            for lane, iterator in enumerate(iterators):
                batch = samples(next(iterator))
                assert batch == upstream_samples(consumed, micro, lane, lanes, len(ours) * num + microbatch + 1)[-1]
                read += batch
        assert len(read) == len(set(read)) == num * lanes * micro
        ours.append(set(read))
    plain = [upstream_samples(consumed, micro, rank, replicas * lanes, steps * quota) for rank in range(replicas * lanes)]
    for step in range(steps):
        assert ours[step] == {i for rank in plain for batch in rank[step * quota : (step + 1) * quota] for i in batch}


@pytest.mark.parametrize(("replicas", "lanes", "micro"), [(1, 1, 1), (3, 1, 4), (2, 2, 2), (1, 3, 3)])
def test_cyclic_samples_are_upstreams_of_one_rank_over_the_ends_of_epochs(replicas: int, lanes: int, micro: int) -> None:
    """Also from the middle of an epoch; 50 samples, of which an epoch leaves out what fills no microbatch."""
    from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler
    from megatron.training.training import cyclic_iter

    num, steps, consumed = 2 * replicas, 9, 5 * micro
    sampler = cyclic_iter(MegatronPretrainingRandomSampler(None, 50, consumed, micro, 0, 1, True))
    wanted = [next(sampler) for _ in range(steps * num * lanes)]
    cursor = MicrobatchCursor()
    iterators = [
        MicrobatchIterator(
            Shuffled(Numbers(50), micro), cursor, consumed_samples=consumed, micro_batch_size=micro, lane=lane, num_lanes=lanes
        )
        for lane in range(lanes)
    ]
    for step in range(steps):
        cursor.begin([never_ends(iterator) for iterator in iterators], num)
        for microbatch in random.Random(step).sample(range(num), num):
            cursor.microbatch = microbatch
            for lane, iterator in enumerate(iterators):
                assert samples(next(iterator)) == wanted[(step * num + microbatch) * lanes + lane]


def test_a_data_set_below_a_microbatch_is_no_epoch() -> None:
    with pytest.raises(ValueError, match="the dataset has 3 samples, fewer than a microbatch of 4"):
        Shuffled(Numbers(3), 4)


def test_steps_count_for_a_rank_that_reads_nothing_of_them() -> None:
    cursor = MicrobatchCursor()
    idle, busy = (
        MicrobatchIterator(Numbers(1000), cursor, consumed_samples=0, micro_batch_size=2, lane=0, num_lanes=1) for _ in range(2)
    )
    for num in (4, 6, 6):
        cursor.begin([idle, None, busy], num)
        cursor.microbatch = 0
        next(busy)
    assert samples(next(idle)) == samples(next(busy)) == [20, 21]


def test_end_of_the_data_is_no_wrong_sample() -> None:
    cursor = MicrobatchCursor()
    iterator = MicrobatchIterator(Numbers(7), cursor, consumed_samples=4, micro_batch_size=2, lane=0, num_lanes=1)
    cursor.begin(iterator, 2)
    assert samples(next(iterator)) == [4, 5]
    cursor.microbatch = 1
    with pytest.raises(StopIteration, match="has 7 samples"):
        next(iterator)


# --- The index cache -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    from megatron_recover.cli.data import write_dataset

    prefix = tmp_path_factory.mktemp("text") / "json"
    write_dataset(prefix, iter(sorted(Path(os.__file__).parent.glob("json/*.py"))))
    return str(prefix)


def build_index(prefix: str, cache: str, die_in: int | None, guarded: bool, answers: Any) -> None:
    """Build upstream's index cache as rank 0 does; `die_in`: SIGKILL in the middle of writing this array."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=257)
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=32, split="1,0,0", path_to_cache=cache, tokenizer=tokenizer, reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, blend=([prefix], None),
    )  # fmt: skip
    save, calls = numpy.save, iter(range(100))

    def fragile(file: Any, array: Any, **others: Any) -> None:
        if next(calls) != die_in:
            save(file, array, **others)
            return
        with open(file, "wb") if isinstance(file, str) else file as stream:
            save(stream, array, **others)
            stream.flush()
            os.truncate(stream.fileno(), stream.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    numpy.save = fragile
    low = IndexedDataset(prefix)
    indices = numpy.arange(low.document_indices.shape[0] - 1, dtype=numpy.int32)

    def build() -> Any:
        dataset = GPTDataset(low, prefix, indices, 200, Split.train, config)
        return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]

    if not guarded:
        answers.send(build())
        return
    directory = cache_directory(cache, [prefix])
    assert directory is not None
    with building_cache(directory, 60.0):
        answers.send(build())


def build(text: str, cache: Path, *, die_in: int | None = None, guarded: bool = True) -> list[list[int]] | int:
    """What a builder process read, or how it ended."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=build_index, args=(text, str(cache), die_in, guarded, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(60), "the builder hangs"
        return ours.recv()
    except EOFError:
        process.join(10)
        return process.exitcode or 0
    finally:
        process.kill()


def test_a_builder_that_stands_still_is_not_waited_for_for_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with building_cache(tmp_path, 60.0):
        assert capsys.readouterr().err == ""
        with building_cache(tmp_path, 0.2):
            numpy.save(str(tmp_path / "index.npy"), numpy.arange(3))
    assert f"pid {os.getpid()} has held {tmp_path / '.building.lock'} for 0.2 s: building" in capsys.readouterr().err
    assert numpy.load(tmp_path / "index.npy").tolist() == [0, 1, 2]
    assert [each.name for each in sorted(tmp_path.iterdir())] == [".building.lock", "index.npy"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("die_in", [0, 1, 2], ids=["document", "sample", "shuffle"])
def test_killed_builder_leaves_nothing_that_others_take_for_complete(die_in: int, text: str, tmp_path: Path) -> None:
    assert build(text, tmp_path, die_in=die_in) == -signal.SIGKILL
    assert build(text, tmp_path) == build(text, tmp_path / "fresh")


@pytest.mark.timeout(120)
def test_upstream_alone_takes_the_half_written_cache(text: str, tmp_path: Path) -> None:
    """The reason for all of it: without the guard the same death leaves a cache that breaks the next job."""
    assert build(text, tmp_path, die_in=2, guarded=False) == -signal.SIGKILL
    assert isinstance(build(text, tmp_path, guarded=False), int)
