"""The random state that a microbatch is computed with: a function of what it is, never of who computes it or when.

Upstream's seeds are linear in stage and rank, so adding an id would make different (id, stage, rank) share a state; here
they are hashed. The states of dropout are set before each forward; recomputation in the backward restores them by itself
(upstream keeps them with the activations).
"""

from __future__ import annotations

import hashlib
import random

import numpy
import torch

_BITS = 63
"""Generators take signed 64-bit seeds; Megatron wants positive ones."""


def microbatch_seed(
    seed: int, iteration: int, microbatch: int, *, stage: int, chunk: int, purpose: str, ranks: tuple[int, ...] = ()
) -> int:
    """A seed in [1, 2**63) for one use of randomness in one microbatch.

    `seed` is ``--seed``; `stage` and `chunk` the pipeline stage and its model chunk; `ranks` the position in those groups
    whose members must differ in this use (none: they must agree, as for dropout outside of tensor-parallel regions).
    """
    words = repr((seed, iteration, microbatch, stage, chunk, purpose, ranks)).encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest()) % (2**_BITS - 1) + 1


def seed_microbatch(
    seed: int,
    iteration: int,
    microbatch: int,
    *,
    stage: int,
    chunk: int,
    tp: int,
    ep: int = 0,
    expert_tp: int = 0,
    lane: int = 0,
) -> None:
    """Put every generator of this process at the beginning of a microbatch (CPU, current CUDA device, Megatron's tracker).

    `lane` makes the lanes of a microbatch differ, as each has samples of its own. The tracker gets the three states that
    `model_parallel_cuda_manual_seed` gives it, under the same names.
    """
    from megatron.core.tensor_parallel import random as megatron_random

    def seed_of(purpose: str, *ranks: int) -> int:
        return microbatch_seed(seed, iteration, microbatch, stage=stage, chunk=chunk, purpose=purpose, ranks=(lane, *ranks))

    default = seed_of("default")
    random.seed(default)
    numpy.random.seed(default % 2**32)
    # torch.manual_seed would also queue a seed for every CUDA device that a process without CUDA will never have.
    torch.default_generator.manual_seed(default)
    tracker = megatron_random.get_cuda_rng_tracker()
    tracker.reset()
    torch.cuda.manual_seed(default)
    tracker.add(megatron_random.get_data_parallel_rng_tracker_name(), default)
    tracker.add("model-parallel-rng", seed_of("tensor parallel", tp))
    tracker.add(megatron_random.get_expert_parallel_rng_tracker_name(), seed_of("expert parallel", ep, expert_tp))
