"""All state of a rank is named once: nothing that upstream saves is missing, nothing counts twice, padding is left out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_recover.megatron.state import TrainingState, _leaves
from megatron_recover.trainer.state import StateTensor
from tests.megatron.processes import Layout, Training, _InOrder, run

LAYOUTS = {
    "fp32": Layout(),
    "bf16": Layout(bf16=True),
    "fp32, sharded over lanes": Layout(lanes=2, distributed_optimizer=True),
    "bf16, sharded over lanes": Layout(lanes=2, distributed_optimizer=True, bf16=True),
    "virtual stages": Layout(pp=2, vpp=2, tp=1),
    "experts": Layout(lanes=2, ep=2, num_experts=4, distributed_optimizer=True, bf16=True),
}


def trained(layout: Layout, steps: int) -> tuple[Training, TrainingState]:
    """A training after so many steps of upstream alone, and its state. Every replica would make the same."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    training = Training(layout)
    for chunk in training.chunks:  # a buffer of each kind, since this model has none
        chunk.module.register_buffer("bias_of_router", torch.zeros(5))
        chunk.module.register_buffer("table", torch.zeros(5), persistent=False)
    for _ in range(steps):
        training.cursor.begin(training.iterators, layout.num_microbatches)
        training.iterators = [_InOrder(iterator, training.cursor) for iterator in training.iterators]
        training.step(get_forward_backward_func())
        training.iterators = [iterator.iterable for iterator in training.iterators]
    consumed = {"consumed_train_samples": steps * layout.num_microbatches}
    return training, TrainingState(training.chunks, training.optimizer, None, lambda: consumed)


def examine(layout: Layout) -> None:
    """On one rank: everything is covered, once; any one bit counts; two that are trained alike are named alike."""
    training, state = trained(layout, 2)
    _, twin = trained(layout, 2)
    tensors = state.tensors()
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert [tensor.layout for tensor in tensors] == [tensor.layout for tensor in twin.tensors()]
    assert (state.digest(), state.layout_digest()) == (twin.digest(), twin.layout_digest())
    counted = addresses(tensors)
    for name, tensor in saved(training):
        start = tensor.data_ptr()
        covering = [(a, b) for a, b in counted if a < start + tensor.numel() * tensor.element_size() and start < b]
        assert sum(min(b, start + tensor.nbytes) - max(a, start) for a, b in covering) == tensor.nbytes, f"{name} is missing"
    every_bit_counts(state, tensors)
    padding_does_not(training, state)
    gradient_and_what_is_not_saved_do_not(training, state)


def addresses(tensors: list[StateTensor]) -> list[tuple[int, int]]:
    found = sorted((tensor.data.data_ptr(), tensor.data.data_ptr() + tensor.data.nbytes) for tensor in tensors)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(found)), "something is counted twice"
    return found


def saved(training: Training) -> Iterator[tuple[str, Tensor]]:
    """All that upstream's state dictionaries have; the distributed optimizer leaves its tensors to functions of their own."""
    for number, chunk in enumerate(training.chunks):
        for name, value in chunk.state_dict().items():
            if isinstance(value, Tensor):
                yield f"{number}.{name}", value
    for number, leaf in enumerate(_leaves(training.optimizer)):
        yield from tensors_in(f"optimizer {number}", leaf.state_dict() if leaf.optimizer.state else {})
        yield from tensors_in(f"torch's optimizer {number}", leaf.optimizer.state_dict())
        yield from tensors_in(f"shards {number}", getattr(leaf, "shard_fp32_from_float16_groups", []))


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for key, item in enumerate(value):
            yield from tensors_in(f"{name}.{key}", item)


def every_bit_counts(state: TrainingState, tensors: list[StateTensor]) -> None:
    before, chance = state.digest(), random.Random(1)
    for tensor in tensors:
        octets = tensor.data.view(torch.uint8)
        place, bit = chance.randrange(octets.numel()), 1 << chance.randrange(8)
        octets[place] ^= bit
        assert state.digest() != before, f"byte {place} of {tensor.name} does not count"
        octets[place] ^= bit
    assert state.digest() == before


def padding_does_not(training: Training, state: TrainingState) -> None:
    before, ends = state.digest(), 0
    for chunk in training.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            if buffer.param_data is None:
                continue
            used = torch.zeros(buffer.param_data.numel(), dtype=torch.bool)
            for start, stop, *_ in buffer.param_index_map.values():
                used[start:stop] = True
            ends += int((~used).sum())
            buffer.param_data[~used] += 1
    assert state.digest() == before
    assert ends or not training.layout.distributed_optimizer, "nothing was padded, so nothing was shown"


def gradient_and_what_is_not_saved_do_not(training: Training, state: TrainingState) -> None:
    before = state.digest()
    for chunk in training.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            buffer.grad_data += 1
        chunk.module.table += 1
    assert state.digest() == before


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", LAYOUTS)
def test_all_that_upstream_saves_is_named_once_and_every_bit_counts(name: str) -> None:
    run(LAYOUTS[name], (examine, ()))


# --- Without a model -----------------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """An output layer that shares the memory of an embedding, by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.arange(12.0).view(4, 3))
        self.output = torch.nn.Parameter(self.embedding.detach())
        self.frozen = torch.nn.Parameter(torch.ones(2, 2).t(), requires_grad=False)


class Leaf:
    """What upstream wraps around one of torch's optimizers."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.grad_scaler = optimizer, None


class Chain:
    def __init__(self, *optimizers: Any) -> None:
        self.chained_optimizers = optimizers


def names(state: TrainingState) -> list[str]:
    return [tensor.name for tensor in state.tensors()]


def test_a_tied_weight_counts_once_and_a_frozen_one_counts() -> None:
    module = Tied()
    state = TrainingState([module])
    assert names(state) == ["chunk0.embedding", "chunk0.frozen"]
    every_bit_counts(state, state.tensors())


def test_overlapping_tensors_are_cut_and_tensors_with_gaps_are_copied() -> None:
    memory = torch.arange(20.0)
    module = torch.nn.Module()
    for name, value in {
        "a": memory[4:8],
        "b": memory[:10],
        "c": memory[9:12],
        "d": memory[12:20:2],
        "e": memory[12:20:2],
    }.items():
        module.register_buffer(name, value)
    found = {tensor.name: tensor.data.numel() * tensor.data.element_size() for tensor in TrainingState([module]).tensors()}
    assert found == {"chunk0.a": 16, "chunk0.b[0:16]": 16, "chunk0.b[32:40]": 8, "chunk0.c[4:12]": 8, "chunk0.d": 16}


def test_moments_scales_and_masters_of_any_optimizer_count() -> None:
    """As with Transformer Engine: remainders of the master weights in the state, scales of the moments beside it."""
    module = torch.nn.Linear(3, 2)
    torch_optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    torch_optimizer.param_groups[0]["step"] = 7
    torch_optimizer._scales = {module.bias: {"exp_avg": torch.ones(1)}}  # type: ignore[attr-defined]
    torch_optimizer.state[module.weight]["master_param"] = torch.zeros(6, dtype=torch.int16)
    state = TrainingState([module], Chain(Leaf(None), Leaf(torch_optimizer)))
    assert names(state)[2:] == ["optimizer1.group0.0.master_param", "optimizer1.group0.1.scale.exp_avg"]
    every_bit_counts(state, state.tensors())
    before = state.digest()
    for key, value in (("step", 8), ("lr", 0.25)):
        kept, torch_optimizer.param_groups[0][key] = torch_optimizer.param_groups[0][key], value
        assert state.digest() != before
        torch_optimizer.param_groups[0][key] = kept
    assert state.digest() == before
    with pytest.raises(TypeError, match="optimizer1.group0.lr"):
        torch_optimizer.param_groups[0]["lr"] = object()
        state.digest()


def test_scheduler_scaler_and_counters_count() -> None:
    from types import SimpleNamespace

    scheduler, scaler, counters = {"num_steps": 3}, {"scale": torch.ones(1), "growth_tracker": 1}, {"consumed_train_samples": 6}
    leaf = Leaf(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()))
    leaf.grad_scaler = SimpleNamespace(state_dict=lambda: scaler)
    state = TrainingState([], leaf, SimpleNamespace(state_dict=lambda: scheduler), lambda: counters)
    seen = {state.digest()}
    for values, key in (
        (scheduler, "num_steps"),
        (scaler, "growth_tracker"),
        (scaler, "scale"),
        (counters, "consumed_train_samples"),
    ):
        values[key] = values[key] + 1
        seen.add(state.digest())
    assert len(seen) == 5


def test_shape_and_type_are_part_of_the_state() -> None:
    one, other = torch.nn.Module(), torch.nn.Module()
    one.register_buffer("a", torch.zeros(4))
    other.register_buffer("a", torch.zeros(2, 2))
    assert (
        TrainingState([one]).layout_digest() != TrainingState([other]).layout_digest()
        and TrainingState([one]).digest() != TrainingState([other]).digest()
    )
