"""A microbatch's random state is a function of what it is: same gradient on any replica, in any order; unlike any other's."""

from __future__ import annotations

import hashlib
import itertools
import random
from typing import Any

import pytest

from megatron_recover.megatron.data.randomness import microbatch_seed
from tests.forks import CONTEXT

MICROBATCHES = [(iteration, microbatch) for iteration in (1, 2) for microbatch in range(3)]


def gradients(order: list[tuple[int, int]], recompute: bool, answers: Any) -> None:
    """In a process of its own: for each microbatch of `order` the digests of two real GPTs' gradients.

    One has dropout where all tensor-parallel ranks agree (the default state), one where they differ (Megatron's tracker).
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron_recover.megatron.cpu import enable_cpu
    from megatron_recover.megatron.data.randomness import seed_microbatch

    enable_cpu()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.default_generator.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    common: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False, "masked_softmax_fusion": False, "persist_layer_norm": False,
        "bias_dropout_fusion": False,
    }  # fmt: skip
    if recompute:
        common |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    models = [
        GPTModel(
            TransformerConfig(hidden_dropout=hidden, attention_dropout=attention, **common),
            get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16,
        )
        for hidden, attention in ((0.3, 0.0), (0.0, 0.3))
    ]  # fmt: skip
    tokens, positions = torch.arange(16).unsqueeze(0), torch.arange(16).unsqueeze(0)
    mask = torch.ones(1, 1, 16, 16).triu(1).bool()
    digests = {}
    for iteration, microbatch in order:
        found = []
        for model in models:
            seed_microbatch(1234, iteration, microbatch, stage=0, chunk=0, tp=0)
            model.zero_grad()
            model(tokens, positions, mask, labels=tokens).sum().backward()
            content = b"".join(parameter.grad.numpy().tobytes() for parameter in model.parameters())
            found.append(hashlib.blake2b(content, digest_size=8).hexdigest())
        digests[iteration, microbatch] = found
    answers.send(digests)


def compute(order: list[tuple[int, int]], *, recompute: bool = False) -> dict[tuple[int, int], list[str]]:
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=gradients, args=(order, recompute, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(60), "no gradient came"
        return ours.recv()
    finally:
        process.kill()


@pytest.mark.timeout(200)
def test_gradient_does_not_depend_on_order_or_process() -> None:
    order = random.Random(20261121).sample(MICROBATCHES, len(MICROBATCHES))
    straight = compute(MICROBATCHES)
    for digests in zip(*straight.values(), strict=True):
        assert len(set(digests)) == len(MICROBATCHES), "different microbatches had the same dropout"
    assert compute(order) == straight
    # Upstream puts the forward's random state back for the recomputation, so it changes nothing.
    assert compute(order[:2], recompute=True) == {each: straight[each] for each in order[:2]}


def test_no_two_uses_share_a_seed() -> None:
    """Upstream's seeds are sums, and (id, tp 1) would meet (id + 1, tp 0)."""
    seeds = {
        microbatch_seed(1234, iteration, microbatch, stage=stage, chunk=chunk, purpose=purpose, ranks=(0, tp))
        for iteration, microbatch, stage, chunk, tp, purpose in itertools.product(
            range(1, 6), range(20), range(4), range(2), range(4), ("default", "tensor parallel", "expert parallel")
        )
    }
    assert len(seeds) == 5 * 20 * 4 * 2 * 4 * 3
    assert all(0 < seed < 2**63 for seed in seeds)
