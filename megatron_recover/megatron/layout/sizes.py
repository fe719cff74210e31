"""The numbers about a model and its training from which the memory of every layout follows.

`measure.py` reads these numbers from the user's script. This module imports neither torch nor
Megatron.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import msgspec


class Elements(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of elements of some parameters, by how a replica spreads them over its ranks."""

    rows: int = 0
    """Elements for each entry of the padded vocabulary, spread over the tensor-parallel ranks."""
    split: int = 0
    """Other elements that are spread over the tensor-parallel ranks."""
    whole: int = 0
    """Elements that every tensor-parallel rank has."""
    expert_split: int = 0
    """Elements of experts that are spread over the ranks of an expert."""
    expert_whole: int = 0
    """Elements of experts that every rank of an expert has."""
    largest_split: int = 0
    """Elements of the largest parameter in `split`."""
    largest_whole: int = 0
    """Elements of the largest parameter in `whole`."""
    largest_expert: int = 0
    """Elements of the largest parameter in `expert_split`."""

    def __add__(self, other: Elements) -> Elements:
        """Return the elements of both: sums, and the larger of the largest."""
        joined = {
            name: (max if name.startswith("largest_") else operator.add)(getattr(self, name), getattr(other, name))
            for name in self.__struct_fields__
        }
        return Elements(**joined)


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a model, and the numbers that decide how they can be split."""

    first: Elements
    """The parameters that only the first pipeline stage has, such as the embedding."""
    layers: tuple[Elements, ...]
    """The parameters of each layer."""
    last: Elements
    """The parameters that only the last pipeline stage has: the final norm, the output layer."""
    is_tied: bool = False
    """True if embedding and output layer are one parameter. The last of several stages then has a
    copy of it."""
    vocabulary: int
    """Entries of the vocabulary, padded for one tensor-parallel rank."""
    vocabulary_step: int = 1
    """The padded vocabulary is a multiple of this number times the tensor-parallel size."""
    num_heads: int
    num_query_groups: int
    num_experts: int = 0
    tensor_parts: int = 0
    """A number that each tensor-parallel size divides: the greatest common divisor of the lengths
    that tensor parallelism splits. 0: any size does."""
    expert_parts: int = 0
    """The same of experts, for the number of ranks that share one."""


class Fsdp2(msgspec.Struct, frozen=True, kw_only=True):
    """The flags that decide what FSDP2 has of whole parameters."""

    reshards: bool = True
    """False with `--torch-fsdp2-no-reshard-after-forward`: parameters stay whole until the
    backward."""
    built_on_host: bool = False
    """True with `--use-cpu-initialization`: the GPU never has the whole model."""
    keeps_output: bool = False
    """True with `--transformer-impl local`: FSDP2's root module has the output layer, and is whole
    during a forward and during a backward."""


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes for each element of a parameter, and how the optimizer's are spread."""

    weight: int
    gradient: int
    """Bytes of an element of the gradient buffer."""
    optimizer: int
    """Bytes of main parameter and moments, without the weight itself."""
    step_copy: int = 0
    """Bytes of the copy of the gradient that exists during the optimizer's step only."""
    is_sharded: bool = False
    """True if the lanes share the optimizer's state (`--use-distributed-optimizer`, FSDP2)."""
    fsdp2: Fsdp2 | None = None
    """None unless the lanes share parameters and gradients as well (`--use-torch-fsdp2`)."""
    is_exact: bool = False
    """True with `--recover-determinism exact`: float64 accumulators and results."""
    bucket_elements: int
    """`--recover-bucket-elements`."""
    is_overlapped: bool = False
    """True with `--overlap-grad-reduce`: buckets are reduced while the last backward runs."""

    @property
    def summed(self) -> int:
        """Return the bytes of an element of a sum: of its source and of its result."""
        return 8 if self.is_exact else self.gradient


class Flags(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about every layout that the flags give."""

    cp: int = 1
    expert_tp: int | None = None
    """Ranks that share an expert. None: the tensor-parallel size."""
    layers_per_chunk: int | None = None
    """`--num-layers-per-virtual-pipeline-stage`."""
    num_chunks: int | None = None
    """`--num-virtual-stages-per-pipeline-rank`."""
    counts_embedding: bool = False
    """True if the embedding counts as a layer in the split over stages; the loss likewise."""
    counts_loss: bool = False
    sequence_parallel: bool = False
    min_replicas: int = 1


class Activations(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of activations on a rank, as `measure.activations_of` estimates them."""

    tp: int
    pp: int
    bytes: int


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """All that the memory of a layout follows from."""

    model: Model
    numerics: Numerics
    flags: Flags
    activations: tuple[Activations, ...]
    """One figure for each pair of tensor- and pipeline-parallel size that the model allows."""
    split_activations: tuple[Activations, ...] = ()
    """The figures with `--sequence-parallel` and `--recompute-activations`, if they are others."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas, and the shape of each."""

    replicas: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    """Ranks that share an expert."""
    vpp: int = 1
    """Model chunks of a pipeline stage."""
    lanes: int = 1

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks, and so of GPUs, of one replica."""
        return self.tp * self.pp * self.cp * self.lanes

    @property
    def num_shards(self) -> int:
        """Return the number of ranks that share one sum: those that have equal parameters."""
        return self.cp * self.lanes

    @property
    def num_expert_shards(self) -> int:
        """Return the number of ranks that share one sum of experts."""
        return self.tp * self.cp * self.lanes // (self.expert_tp * self.ep)


class OnRank(msgspec.Struct, frozen=True):
    """Elements on one rank."""

    dense: int
    experts: int
    tables: tuple[int, ...]
    """Elements of each parameter that has a row for every entry of the vocabulary."""
    largest: int
    """Elements of the largest other parameter."""
    groups: tuple[int, ...] = ()
    """Elements of the parameters that FSDP2 gathers together, in the order of the forward: those of
    the embedding, of each layer, and the rest."""


def layers_of_stages(num_layers: int, num_stages: int, flags: Flags) -> list[range] | None:
    """Return the layers of each pipeline stage; None if they cannot be split evenly."""
    counted = num_layers + flags.counts_embedding + flags.counts_loss
    if counted % num_stages:
        return None
    each = counted // num_stages
    numbers = [each] * num_stages
    numbers[0] -= flags.counts_embedding
    numbers[-1] -= flags.counts_loss
    if min(numbers) < 0:
        return None
    ends = [sum(numbers[: stage + 1]) for stage in range(num_stages)]
    return [range(end - number, end) for end, number in zip(ends, numbers, strict=True)]


def on_stage(model: Model, layout: Layout, stage: int, stages: Sequence[range]) -> OnRank:
    """Return the elements on a rank of pipeline stage `stage`; `stages` has its layers."""
    groups = [model.layers[layer] for layer in stages[stage]]
    rows = []
    if stage == 0:
        groups.insert(0, model.first)
        rows.append(model.first.rows)
    if stage == len(stages) - 1:
        last = model.last
        rows.append(model.last.rows)
        if model.is_tied and stage > 0:
            last += Elements(rows=model.first.rows)
            rows.append(model.first.rows)
        groups.append(last)
    held = sum(groups, Elements())
    vocabulary = padded(model, layout.tp)
    experts = (held.expert_split // layout.expert_tp + held.expert_whole) // layout.ep
    largest = max(held.largest_split // layout.tp, held.largest_whole, held.largest_expert // layout.expert_tp)
    tables = tuple(row * vocabulary // layout.tp for row in rows if row)
    dense = tuple(_dense(group, vocabulary, layout.tp) for group in groups)
    return OnRank(_dense(held, vocabulary, layout.tp), experts, tables, largest, dense)


def _dense(held: Elements, vocabulary: int, tp: int) -> int:
    return (held.rows * vocabulary + held.split) // tp + held.whole


def padded(model: Model, tp: int) -> int:
    """Return the entries of the vocabulary, padded for `tp` tensor-parallel ranks."""
    step = model.vocabulary_step * tp
    return -(-model.vocabulary // step) * step
