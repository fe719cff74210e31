"""Sets the random state of a microbatch, the same whichever replica computes the microbatch.

Upstream's seeds are linear in stage and rank. Adding the microbatch's id would let different (id,
stage, rank) share a state, so here these numbers are hashed. The states are set before each
forward. Recomputation in the backward restores them itself: upstream keeps them with the
activations.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable

import numpy
import torch

_BITS = 63
"""Bits of a seed: generators accept signed 64-bit seeds, and Megatron requires positive seeds."""


def microbatch_seed(
    seed: int, iteration: int, microbatch: int, *, stage: int, chunk: int, purpose: str, ranks: tuple[int, ...] = ()
) -> int:
    """Return a seed in [1, 2**63) for one use of randomness in one microbatch.

    - `seed`: ``--seed``.
    - `stage`, `chunk`: the pipeline stage and its model chunk.
    - `purpose`: names the use of randomness.
    - `ranks`: the rank's position in each process group whose ranks must differ in this use.
      Without the tensor-parallel rank, the ranks of a tensor-parallel group agree, as dropout
      outside of tensor-parallel regions requires.
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
    """Seed the generators of this process for the forward of a microbatch in one model chunk.

    The generators are Python's, numpy's, torch's of the CPU and of the current CUDA device, and
    Megatron's tracker. The tracker gets the three states that `model_parallel_cuda_manual_seed`
    creates, under the same names. `lane` makes lanes differ, since each lane has samples of its
    own.
    """
    from megatron.core.tensor_parallel import random as megatron_random

    def seed_of(purpose: str, *ranks: int) -> int:
        return microbatch_seed(seed, iteration, microbatch, stage=stage, chunk=chunk, purpose=purpose, ranks=(lane, *ranks))

    default = seed_of("default")
    random.seed(default)
    numpy.random.seed(default % 2**32)
    # Without CUDA, torch.manual_seed would also queue a seed for CUDA devices that the process
    # never has.
    torch.default_generator.manual_seed(default)
    tracker = megatron_random.get_cuda_rng_tracker()
    tracker.reset()
    torch.cuda.manual_seed(default)
    tracker.add(megatron_random.get_data_parallel_rng_tracker_name(), default)
    tracker.add("model-parallel-rng", seed_of("tensor parallel", tp))
    tracker.add(megatron_random.get_expert_parallel_rng_tracker_name(), seed_of("expert parallel", ep, expert_tp))


def state_of_generators() -> tuple[object, ...]:
    """Return the states of the generators of the CPU that all threads of this process share."""
    _, key, position, *normal = numpy.random.get_state()
    return random.getstate(), key.tobytes(), position, *normal, torch.default_generator.get_state().numpy().tobytes()


def seeding(seed: int) -> Callable[[int, int, int], None]:
    """Return a function of (iteration, microbatch, chunk) that sets this rank's random state."""

    @functools.cache
    def place() -> dict[str, int]:  # called late, as Megatron has no groups while `seeding` runs
        from megatron.core import parallel_state

        return {
            "stage": parallel_state.get_pipeline_model_parallel_rank(),
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "ep": parallel_state.get_expert_model_parallel_rank(),
            "expert_tp": parallel_state.get_expert_tensor_parallel_rank(),
            "lane": parallel_state.get_data_parallel_rank(),
        }

    def begin(iteration: int, microbatch: int, chunk: int) -> None:
        seed_microbatch(seed, iteration, microbatch, chunk=chunk, **place())

    return begin
