"""The bytes that a rank of a layout needs, by part. Pure arithmetic.

Note [Peaks]
    Weights, gradient and optimizer are always there, and so are the buffers of a sum once the first
    is done: NCCL's scratch lives as long as the reduction, and torch's allocator keeps the memory
    of the copies for lanes. The rest comes and goes:

    - A step without failures has its activations first. The reduction begins when they are gone
      (with `--overlap-grad-reduce` before the last backward), and allocates the results, which are
      free again after `Apply`.
    - In a recovery, buckets that a member holds complete are decided. Their results have to stay,
      since the local gradient of a replica alone cannot replace them. Meanwhile the lost
      microbatches are computed, with all their activations. In the worst case one small bucket is
      undecided, so nearly all results stay. Gradient of decided buckets is redirected
      (`gradient_buffers.Redirection`): to one dump as large as the largest parameter, and to a copy
      of each parameter that is only partly in an undecided bucket.
    - Sums have one order, so the undecided buckets are neighbours. In the buffer they are one range
      in each shard (`trainer/regions.py`, Note [Columns]). Each of the two borders of each range
      may cut a parameter.

    So the peak of a recovery decides whether a layout fits: a rank that runs out of memory in a
    recovery would end the second replica after a death, and perhaps all.

    With FSDP2 the lanes share weights, gradient, result and optimizer. While a microbatch is
    computed, FSDP2 gathers parameters (Note [Gathered]). What a pass must not add to is set aside
    in whole parameters: in the worst case FSDP2 makes nearly all of a shard's gradient anew
    (`fsdp2/gradients.py`, Note [Set aside]). A gradient that is summed in fp32 and computed in bf16
    is dropped instead.

    Workspaces of kernels are not counted. One of cuBLAS is ours: checksums multiply on the stream
    of the reduction (`trainer/checksum.py`), and torch keeps a workspace for each stream.

Note [Gathered]
    FSDP2 gathers and reduces the parameters of a group together: the embedding, each layer, and the
    output layer. The most exists at the end of the backward of a group: its whole parameters and
    their gradients, the buffer into which FSDP2 gathers the group whose backward is next, and the
    buffer from which the gradient of the last group is summed over the lanes. A little later the
    last two are freed, and the buffer of this group is made beside its gradients. All have the type
    of the parameters, but gradients in bf16 are summed in buffers in fp32, unless
    `--grad-reduce-in-bf16` is given. With one lane nothing is gathered beforehand. Where the
    parameters stay whole after the forward, those of all groups that come later in the backward
    exist as well, and no buffer. The root module is whole until the end of the backward, and so are
    its gradients. It has the final norm, which counts with the output layer here, and with
    Megatron's local layers the output layer itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from megatron_recover.megatron.layout.sizes import Fsdp2, Layout, Numerics, OnRank, Sizes, layers_of_stages, on_stage


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the rank of a replica that needs the most, by part."""

    weights: int
    gradient: int
    """The gradient buffer; with `exact` the float64 accumulators as well."""
    result: int
    """Results of the sums over replicas."""
    optimizer: int
    """Main parameters and moments."""
    activations: int
    """Activations as upstream estimates them, corrected for gated units and experts."""
    sums: int
    """Buffers of the sum of one bucket over lanes and replicas, which are kept."""
    redirected: int
    """Gradient of decided buckets in a recovery."""
    gathered: int = 0
    """Whole parameters and their gradients, and FSDP2's buffers for them. See Note [Gathered]."""
    step_copy: int = 0
    """Copy of the gradient in the optimizer's step, if the gradient is not fp32."""
    start: int = 0
    """The whole model, before FSDP2 shards it."""
    is_overlapped: bool = False

    @property
    def always(self) -> int:
        """Return the bytes that are never free."""
        return self.weights + self.gradient + self.optimizer + self.sums

    @property
    def peak(self) -> int:
        """Return the peak of a step without failures. See Note [Peaks]."""
        computing = self.activations + self.gathered
        if self.is_overlapped:
            return max(self.start, self.always + max(computing + self.result, self.step_copy))
        return max(self.start, self.always + max(computing, self.result, self.step_copy))

    @property
    def recovery(self) -> int:
        """Return the peak of a recovery. See Note [Peaks]."""
        computing = self.activations + self.gathered + self.redirected
        return max(self.start, self.always + self.result + max(computing, self.step_copy))


def memory(sizes: Sizes, layout: Layout) -> Memory:
    """Return the memory of a rank of the pipeline stage whose recovery needs the most.

    Raises ValueError if the model cannot be split so: its layers over the stages, or the rest over
    the tensor-parallel ranks.
    """
    stages = layers_of_stages(len(sizes.model.layers), layout.pp, sizes.flags)
    if stages is None:
        raise ValueError(f"{len(sizes.model.layers)} layers cannot be split over {layout.pp} pipeline stages")
    found = {(each.tp, each.pp): each.bytes for each in sizes.activations}
    if (layout.tp, layout.pp) not in found:
        raise ValueError(f"the model cannot be split over TP {layout.tp} x PP {layout.pp}")
    activations = found[layout.tp, layout.pp] // layout.cp
    on_ranks = (on_stage(sizes.model, layout, stage, stages) for stage in range(layout.pp))
    return max((of_rank(each, sizes.numerics, layout, activations) for each in on_ranks), key=lambda each: each.recovery)


def of_rank(held: OnRank, numerics: Numerics, layout: Layout, activations: int = 0) -> Memory:
    """Return the memory of a rank that holds these elements."""
    if numerics.fsdp2 is not None:
        return _of_shards(held, numerics, numerics.fsdp2, layout.num_shards, activations)
    groups = [(held.dense, layout.num_shards), (held.experts, layout.num_expert_shards)]
    elements = held.dense + held.experts
    shares = sum(-(-number // shards) for number, shards in groups)
    optimized = shares if numerics.is_sharded else elements
    return Memory(
        weights=elements * numerics.weight,
        gradient=elements * (numerics.gradient + (8 if numerics.is_exact else 0)),
        result=shares * numerics.summed,
        optimizer=optimized * numerics.optimizer,
        activations=activations,
        sums=max(_sum_of_bucket(number, shards, numerics) for number, shards in groups),
        redirected=0 if numerics.is_exact else _redirected(held, groups) * numerics.gradient,
        step_copy=optimized * numerics.step_copy,
        is_overlapped=numerics.is_overlapped,
    )


def _of_shards(held: OnRank, numerics: Numerics, fsdp2: Fsdp2, num_shards: int, activations: int) -> Memory:
    """Return the memory of a rank whose lanes share parameters, gradients and optimizer.

    FSDP2 rounds the first dimension of each parameter up to a multiple of the lanes, which is not
    counted.
    """
    shard = -(-held.dense // num_shards)
    largest = -(-max((*held.tables, held.largest)) // num_shards)
    start = 0 if fsdp2.built_on_host else held.dense
    is_wide = numerics.gradient > numerics.weight
    # FSDP2's sums of two groups, and the last of them rounded (`fsdp2/parameter_gradient.py`).
    unrounded = -(-max(held.groups, default=0) // num_shards) * (2 * numerics.gradient + numerics.weight)
    return Memory(
        weights=shard * numerics.weight,
        gradient=shard * (numerics.gradient + (8 if numerics.is_exact else 0)),
        result=shard * numerics.summed,
        optimizer=shard * numerics.optimizer,
        activations=activations,
        # A bucket has whole parameters.
        sums=max(_sum_of_bucket(shard, 1, numerics), largest * numerics.summed) + (unrounded if is_wide else 0),
        redirected=0 if numerics.is_exact or is_wide else shard * numerics.gradient,
        gathered=_gathered(held.groups, fsdp2, num_shards, is_wide=is_wide) * numerics.weight,
        step_copy=shard * numerics.step_copy,
        start=start * numerics.weight,
        is_overlapped=numerics.is_overlapped,
    )


def _gathered(groups: Sequence[int], fsdp2: Fsdp2, num_shards: int, *, is_wide: bool = False) -> int:
    """Return the elements of whole parameters and gradients that FSDP2 has at most at a time.

    `groups` are as in `OnRank.groups`. With `is_wide` what is summed over the lanes takes twice the
    bytes of a parameter, and counts as two elements. See Note [Gathered].
    """
    wide = 2 if is_wide else 1
    kept = groups[-1] if fsdp2.keeps_output else 0
    others = groups[:-1] if fsdp2.keeps_output else groups
    found = []
    for number, group in enumerate(others):
        is_fetched = number > 0 and fsdp2.reshards and num_shards > 1
        whole = group if fsdp2.reshards else sum(others[: number + 1])
        fetched = others[number - 1] if is_fetched else 0
        reduced = wide * sum(others[number + 1 : number + 2])
        found.append(whole + fetched + max(group + reduced, wide * group))
    return max(max(found, default=0) + 2 * kept, kept + wide * kept)


def _redirected(held: OnRank, groups: Sequence[tuple[int, int]]) -> int:
    """Return a bound of the elements that a recovery redirects at a time. See Note [Peaks].

    `groups` are (elements, shards) of what is summed alike. Which parameters are cut depends on
    their places in the buffer; the largest are counted. A second failure during a recovery, or sums
    that were under way beside one that failed, can leave further ranges, which are not counted.
    """
    num_cut = max((2 * shards for number, shards in groups if number), default=0)
    sizes = sorted((*held.tables, *[held.largest] * num_cut), reverse=True)
    return sizes[0] + min(sum(sizes[:num_cut]), held.dense + held.experts)


def _sum_of_bucket(elements: int, num_shards: int, numerics: Numerics) -> int:
    """Return the bytes that the sum of one bucket takes beside source and result.

    With lanes the bucket is copied, and a lane's part of its sum over the lanes is a tensor of its
    own (`regions.Bucket.sum_over_lanes`). NCCL sums into scratch (`data_plane/scratch.py`).
    """
    bucket = elements // max(1, round(elements / numerics.bucket_elements))
    part = -(-bucket // num_shards)
    over_lanes = bucket + part if num_shards > 1 else 0
    return (over_lanes + part) * numerics.summed
