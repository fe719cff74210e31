"""Finds the layouts that a model allows on some GPUs, the cost of a death, and the best layout.

Pure functions of `Sizes`, the numbers of GPUs, and the layouts that the other flags allow.

Note [Choice]
    Of the layouts that fit, the one whose replicas have the fewest GPUs is chosen: a death takes a
    whole replica, until it is back or for the rest of the run. Among equal ones, the one with the
    least communication inside a replica: a smaller tensor-parallel size first, since its
    collectives are in every layer, then fewer pipeline stages, then fewer expert-parallel ranks.
    What is left are lanes, which communicate once a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec

from megatron_recover.megatron.launch.preflight import num_chunks
from megatron_recover.megatron.layout.memory import Memory, memory
from megatron_recover.megatron.layout.sizes import Flags, Layout, Model, Sizes, layers_of_stages

USABLE = 0.9
"""Share of a GPU's memory that a layout may need. The rest is for what nobody can compute in
advance: the CUDA context, NCCL's buffers of each communicator, workspaces of kernels, and gaps
between blocks of the allocator."""


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of a job."""

    num_nodes: int = 1
    per_node: int
    bytes: int
    """Memory of one GPU."""

    @property
    def number(self) -> int:
        """Return the number of GPUs of all nodes."""
        return self.num_nodes * self.per_node


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A layout with its memory and the cost of a death."""

    layout: Layout
    memory: Memory
    fits: bool
    num_deaths: int
    """Deaths that the run survives."""

    @property
    def lost_share(self) -> float:
        """Return the share of the throughput that a death takes until its replica is back."""
        return 1 / self.layout.replicas

    @property
    def longer_step(self) -> float:
        """Return by which share of its time the step of a death gets longer, at most.

        The other replicas compute the whole share of the lost one once more.
        """
        return 1 / (self.layout.replicas - 1)


def judge(sizes: Sizes, gpus: Gpus, allowed: Callable[[Layout], bool] = lambda layout: True) -> list[Judged]:
    """Return the layouts that `layouts` yields and `allowed` accepts, the preferred ones first.

    `allowed` judges what `layouts` does not: the batch and other flags of the job. Layouts that fit
    come first. Those that do not fit are in the order of the memory they need.
    """
    found = []
    for layout in filter(allowed, layouts(sizes, gpus)):
        needed = memory(sizes, layout)
        num_deaths = layout.replicas - sizes.flags.min_replicas
        found.append(Judged(layout=layout, memory=needed, fits=needed.recovery <= USABLE * gpus.bytes, num_deaths=num_deaths))
    return sorted(found, key=_preference)


def _preference(judged: Judged) -> tuple[object, ...]:
    """Return the sort key of a layout. See Note [Choice]."""
    layout = judged.layout
    if not judged.fits:
        return 1, judged.memory.recovery, layout.num_ranks
    return 0, layout.num_ranks, layout.tp, layout.pp, layout.ep, judged.memory.recovery


def layouts(sizes: Sizes, gpus: Gpus) -> Iterator[Layout]:
    """Yield every layout that uses all GPUs, survives a death, and that model and flags allow.

    Its tensor-parallel size divides the GPUs of a node. The context-parallel size is that of the
    flags.
    """
    model, flags = sizes.model, sizes.flags
    known = {(each.tp, each.pp) for each in sizes.activations}
    for num_ranks in divisors(gpus.number):
        replicas = gpus.number // num_ranks
        if replicas <= flags.min_replicas:
            continue
        for tp in tensor_sizes(model, flags):
            for pp in divisors(num_ranks):
                vpp = chunks_of_stage(model, flags, pp)
                if (tp, pp) not in known or vpp is None or gpus.per_node % tp or num_ranks % (tp * pp * flags.cp):
                    continue
                lanes = num_ranks // (tp * pp * flags.cp)
                for ep in _expert_sizes(model, flags, tp, lanes):
                    yield Layout(
                        replicas=replicas, tp=tp, pp=pp, cp=flags.cp, ep=ep, expert_tp=flags.expert_tp or tp, vpp=vpp,
                        lanes=lanes,
                    )  # fmt: skip


def tensor_sizes(model: Model, flags: Flags) -> list[int]:
    """Return the tensor-parallel sizes that the model and the flags allow."""
    groups = model.num_query_groups
    return [
        tp
        for tp in divisors(model.num_heads)
        if (groups % tp == 0 or tp % groups == 0)
        and model.tensor_parts % tp == 0
        and model.expert_parts % (flags.expert_tp or tp) == 0
        # Upstream trains experts with tensor parallelism only if sequences are split as well.
        and (tp == 1 or not model.num_experts or flags.sequence_parallel)
    ]


def chunks_of_stage(model: Model, flags: Flags, pp: int) -> int | None:
    """Return the number of model chunks of a stage; None if the layers cannot be split so."""
    if layers_of_stages(len(model.layers), pp, flags) is None:
        return None
    counted = len(model.layers) + flags.counts_embedding + flags.counts_loss
    found, mistakes = num_chunks(counted, pp, flags.layers_per_chunk, flags.num_chunks)
    return None if mistakes else found


def _expert_sizes(model: Model, flags: Flags, tp: int, lanes: int) -> list[int]:
    """Return the expert-parallel sizes.

    Each divides the number of experts (of a model without experts: 1), and times the ranks of an
    expert the ranks of a stage.
    """
    ranks, of_expert = tp * flags.cp * lanes, flags.expert_tp or tp
    return [
        ep
        for ep in divisors(max(1, model.num_experts))
        if ranks % (of_expert * ep) == 0
    ]  # fmt: skip


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, ascending."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
