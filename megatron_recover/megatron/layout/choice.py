"""Finds the layouts that a model allows on some GPUs, the cost of a death, and the best layout.

Pure functions of `Sizes` and the numbers of GPUs.

Note [Choice]
    Of the layouts that fit, the one whose replicas have the fewest GPUs is chosen: a death takes a
    whole replica, and a lost replica is not replaced within the run. Among equal ones, the one with
    the least communication inside a replica: a smaller tensor-parallel size first, since its
    collectives are in every layer, then fewer pipeline stages, then fewer expert-parallel ranks.
    What is left are lanes, which communicate once a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

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
        """Return the share of the throughput that a death takes for the rest of the run."""
        return 1 / self.layout.replicas

    @property
    def longer_step(self) -> float:
        """Return by which share of its time the step of a death gets longer, at most.

        The other replicas compute the whole share of the lost one once more.
        """
        return 1 / (self.layout.replicas - 1)


def judge(sizes: Sizes, gpus: Gpus) -> list[Judged]:
    """Return all layouts that the model allows on exactly these GPUs, the preferred ones first.

    Layouts that fit come first. Those that do not fit are in the order of the memory they need.
    """
    found = []
    for layout in layouts(sizes, gpus):
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
    """Yield every layout of at least two replicas that uses all GPUs and that the model allows."""
    model, flags = sizes.model, sizes.flags
    known = {(each.tp, each.pp) for each in sizes.activations}
    for num_ranks in divisors(gpus.number):
        replicas = gpus.number // num_ranks
        if replicas < max(2, flags.min_replicas + 1):
            continue
        for tp in tensor_sizes(model, flags, gpus.per_node):
            for pp in divisors(num_ranks):
                vpp = chunks_of_stage(model, flags, pp)
                if (tp, pp) not in known or vpp is None or num_ranks % (tp * pp * flags.cp):
                    continue
                lanes = num_ranks // (tp * pp * flags.cp)
                if not _has_microbatches(flags, replicas, lanes):
                    continue
                for ep in _expert_sizes(model, flags, tp, lanes):
                    yield Layout(
                        replicas=replicas, tp=tp, pp=pp, cp=flags.cp, ep=ep, expert_tp=flags.expert_tp or tp, vpp=vpp,
                        lanes=lanes,
                    )  # fmt: skip


def tensor_sizes(model: Model, flags: Flags, per_node: int) -> list[int]:
    """Return the tensor-parallel sizes that the model allows inside one node."""
    groups = model.num_query_groups
    return [
        tp
        for tp in divisors(per_node)
        if model.num_heads % tp == 0
        and (groups % tp == 0 or tp % groups == 0)
        # Upstream trains experts with tensor parallelism only if sequences are split as well.
        and (tp == 1 or not model.num_experts or flags.sequence_parallel)
    ]


def chunks_of_stage(model: Model, flags: Flags, pp: int) -> int | None:
    """Return the model chunks of a pipeline stage; None if the layers cannot be split so."""
    stages = layers_of_stages(len(model.layers), pp, flags)
    if stages is None:
        return None
    if flags.layers_per_chunk is None and flags.num_chunks is None:
        return 1
    if pp == 1:
        return None  # as `run` judges: virtual stages need a pipeline
    of_stage = (len(model.layers) + flags.counts_embedding + flags.counts_loss) // pp
    if flags.layers_per_chunk is not None:
        return None if of_stage % flags.layers_per_chunk else of_stage // flags.layers_per_chunk
    assert flags.num_chunks is not None
    return None if of_stage % flags.num_chunks else flags.num_chunks


def _has_microbatches(flags: Flags, replicas: int, lanes: int) -> bool:
    """Return whether a step has whole microbatches, and at least one for each replica."""
    samples = flags.micro_batch_size * lanes
    return flags.global_batch_size % samples == 0 and flags.global_batch_size // samples >= replicas


def _expert_sizes(model: Model, flags: Flags, tp: int, lanes: int) -> list[int]:
    """Return the expert-parallel sizes: they divide experts, and the ranks of a stage."""
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
