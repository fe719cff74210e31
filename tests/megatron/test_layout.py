"""The memory of layouts, their order and their legality: arithmetic alone, without torch."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_recover.megatron.launch.preflight import Undecided
from megatron_recover.megatron.layout.choice import USABLE, Gpus, divisors, judge, layouts
from megatron_recover.megatron.layout.memory import Memory, memory, of_rank
from megatron_recover.megatron.layout.sizes import (
    Activations,
    Elements,
    Flags,
    Layout,
    Model,
    Numerics,
    OnRank,
    Sizes,
    layers_of_stages,
    on_stage,
)

GB = 10**9
BF16 = Numerics(weight=2, gradient=4, optimizer=12, is_sharded=True, bucket_elements=40_000_000)


def eight_billion(**flags: object) -> Sizes:
    """Llama-3-8B: 32 layers of 218 M elements, an embedding and an output layer of 525 M each."""
    table = Elements(rows=4096)
    layer = Elements(split=218_103_808, whole=8192, largest_split=117_440_512, largest_whole=4096)
    model = Model(
        first=table, layers=(layer,) * 32, last=table + Elements(whole=4096, largest_whole=4096), vocabulary=128256,
        num_heads=32, num_query_groups=8, tensor_parts=2048,
    )  # fmt: skip
    given_flags = Flags(**flags)
    activations = tuple(Activations(tp=tp, pp=pp, bytes=8 * GB // tp) for tp in (1, 2, 4, 8) for pp in divisors(32))
    return Sizes(model=model, numerics=BF16, flags=given_flags, activations=activations)


def needed(sizes: Sizes, **layout: int) -> Memory:
    return memory(sizes, Layout(**{"replicas": 2, **layout}))


def test_a_model_of_8_billion_needs_the_known_bytes() -> None:
    found = needed(eight_billion(), lanes=4)
    assert found.weights == pytest.approx(16.06 * GB, rel=1e-3)
    assert found.gradient == pytest.approx(32.12 * GB, rel=1e-3)
    assert found.result == pytest.approx(32.12 / 4 * GB, rel=1e-3)
    assert found.optimizer == pytest.approx(96.36 / 4 * GB, rel=1e-3)
    assert found.always - found.sums + found.result == pytest.approx(80.3 * GB, rel=1e-3)


def test_results_add_to_activations_in_a_recovery_only() -> None:
    found = needed(eight_billion(), tp=2, lanes=2)
    assert found.peak == found.always + found.result
    assert found.recovery == found.always + found.result + found.activations + found.redirected
    overlapped = msgspec.structs.replace(found, is_overlapped=True)
    assert overlapped.peak == found.always + found.activations + found.result


def test_ranks_of_context_parallelism_share_sums_like_lanes_and_split_activations() -> None:
    lanes, contexts = needed(eight_billion(), lanes=2), needed(eight_billion(), cp=2)
    assert (contexts.result, contexts.optimizer, contexts.sums) == (lanes.result, lanes.optimizer, lanes.sums)
    assert contexts.activations == lanes.activations // 2
    experts = Layout(replicas=2, tp=2, cp=2, lanes=2, ep=4, expert_tp=1)
    assert (experts.num_shards, experts.num_expert_shards) == (4, 2)


def test_a_tenth_of_a_gpu_is_left_free_and_a_death_below_the_least_replicas_does_not_count() -> None:
    sizes = eight_billion()
    need = needed(sizes, tp=4).recovery
    for memory_bytes, fits in ((int(need / 0.9) + 1, True), (int(need / 0.9) - 2, False)):
        found = judge(sizes, Gpus(per_node=8, bytes=memory_bytes))
        assert [each.fits for each in found if (each.layout.tp, each.layout.pp, each.layout.lanes) == (4, 1, 1)] == [fits]
    for least, deaths in ((1, 3), (2, 2)):
        found = judge(eight_billion(min_replicas=least), Gpus(per_node=4, bytes=500 * GB))
        assert max(each.num_deaths for each in found) == deaths


def test_the_worst_stage_is_the_one_whose_recovery_needs_the_most() -> None:
    """The first stage has the largest parameter, and the last one more parameters."""
    sizes = eight_billion()
    large = msgspec.structs.replace(sizes.model.layers[0], split=1_000_000, largest_split=3_000_000_000)
    model = msgspec.structs.replace(sizes.model, layers=(large, *sizes.model.layers[1:]))
    found = needed(msgspec.structs.replace(sizes, model=model), pp=2)
    assert found.redirected == 3_000_000_000 * 4 + found.gradient


@pytest.mark.parametrize("numbers", [(1000, 0, 4, 1), (0, 1000, 1, 4), (1000, 1000, 4, 2)])
def test_a_recovery_copies_a_parameter_for_each_border_of_a_range_of_buckets(numbers: tuple[int, int, int, int]) -> None:
    """Beside the dump, which is as large as the largest: 8 cut parameters where 4 ranks share a sum, each table once."""
    dense, experts, shards, expert_shards = numbers
    layout = Layout(tp=4, expert_tp=1, ep=16 // expert_shards, lanes=4) if shards == 4 else Layout(tp=4, expert_tp=1)
    assert (layout.num_shards, layout.num_expert_shards) == (shards, expert_shards)
    held = OnRank(dense, experts, tables=(50,), largest=20)
    assert of_rank(held, BF16, layout).redirected == 4 * (50 + 50 + 7 * 20)


def test_a_recovery_copies_no_parameter_twice() -> None:
    held = OnRank(dense=100, experts=0, tables=(50,), largest=20)
    assert of_rank(held, BF16, Layout(lanes=4)).redirected == 4 * (50 + 100)


def test_the_buffers_of_a_sum_are_never_free() -> None:
    found = needed(eight_billion(), tp=2, lanes=2)
    more = msgspec.structs.replace(found, sums=found.sums + GB)
    assert (more.peak - found.peak, more.recovery - found.recovery) == (GB, GB)


def test_virtual_stages_need_a_pipeline() -> None:
    for chunks in ({"num_chunks": 2}, {"layers_per_chunk": 2}):
        found = list(layouts(eight_billion(**chunks), Gpus(per_node=8, bytes=80 * GB)))
        assert found and all(layout.pp > 1 for layout in found)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"gradient": 4000, "result": 1000, "optimizer": 3000, "step_copy": 0}),
        ({"is_sharded": False}, {"gradient": 4000, "result": 1000, "optimizer": 12000, "step_copy": 0}),
        ({"is_exact": True}, {"gradient": 12000, "result": 2000, "optimizer": 3000, "redirected": 0}),
        ({"gradient": 2, "step_copy": 4}, {"gradient": 2000, "result": 500, "optimizer": 3000, "step_copy": 1000}),
        ({"weight": 4, "optimizer": 8}, {"weights": 4000, "optimizer": 2000}),
    ],
)
def test_precision_and_sharding(changes: dict[str, object], expected: dict[str, int]) -> None:
    held = of_rank(
        OnRank(dense=1000, experts=0, tables=(), largest=100), msgspec.structs.replace(BF16, **changes), Layout(lanes=4)
    )
    assert {name: getattr(held, name) for name in expected} == expected


def test_experts_are_shared_by_fewer_ranks() -> None:
    layout = Layout(replicas=2, tp=2, lanes=4, ep=4, expert_tp=2)
    held = of_rank(OnRank(dense=0, experts=1000, tables=(), largest=100), BF16, layout)
    assert (layout.num_shards, layout.num_expert_shards) == (4, 1)
    assert (held.result, held.optimizer) == (4000, 12000)


def test_the_buffers_of_a_sum_follow_from_its_bucket() -> None:
    held = OnRank(dense=4000, experts=0, tables=(), largest=100)
    numerics = msgspec.structs.replace(BF16, bucket_elements=1000)
    assert of_rank(held, numerics, Layout()).sums == 4 * 1000  # scratch alone
    assert of_rank(held, numerics, Layout(lanes=2)).sums == 4 * (1000 + 500 + 500)  # the bucket, a lane's part, scratch


def test_the_stage_that_needs_the_most_is_reported() -> None:
    sizes = eight_billion()
    model = msgspec.structs.replace(sizes.model, last=Elements(whole=4096), is_tied=False)
    small = msgspec.structs.replace(sizes, model=model)
    assert needed(small, pp=4, lanes=1).weights == 2 * (8 * 218_112_000 + 4096 * 128256)  # the first
    model = msgspec.structs.replace(model, first=Elements(rows=64), last=sizes.model.last)
    small = msgspec.structs.replace(sizes, model=model)
    assert needed(small, pp=4, lanes=1).weights == 2 * (8 * 218_112_000 + 4096 * 128256 + 4096)  # the last


def test_a_tied_output_layer_is_copied_to_the_last_of_several_stages() -> None:
    sizes = eight_billion()
    model = msgspec.structs.replace(sizes.model, last=Elements(), is_tied=True)
    sizes = msgspec.structs.replace(sizes, model=model)
    on_last = [on_stage(model, Layout(pp=pp), pp - 1, layers_of_stages(32, pp, sizes.flags) or []) for pp in (1, 2)]
    assert [each.dense for each in on_last] == [32 * 218_112_000 + 4096 * 128256, 16 * 218_112_000 + 4096 * 128256]


def test_embedding_and_loss_may_count_as_layers() -> None:
    flags = Flags(counts_embedding=True, counts_loss=True)
    assert [len(each) for each in layers_of_stages(30, 4, flags) or []] == [7, 8, 8, 7]
    assert layers_of_stages(32, 4, flags) is None


elements = st.integers(0, 1000).map(lambda number: 64 * number)
shapes = st.builds(Elements, split=elements, whole=elements, expert_split=elements, expert_whole=elements)


@settings(max_examples=60, deadline=None)
@given(
    first=shapes, layers=st.lists(shapes, min_size=8, max_size=8), last=shapes, tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4, 8]), ep=st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_the_stages_and_ranks_of_a_replica_hold_every_parameter(
    first: Elements, layers: list[Elements], last: Elements, tp: int, pp: int, ep: int
) -> None:
    model = Model(first=first, layers=tuple(layers), last=last, vocabulary=64, num_heads=8, num_query_groups=8)
    flags = Flags()
    layout = Layout(tp=tp, pp=pp, ep=ep, expert_tp=tp, lanes=ep)
    stages = layers_of_stages(8, pp, flags)
    assert stages is not None
    ranks = [on_stage(model, layout, stage, stages) for stage in range(pp)]
    everything = sum(layers, first + last)
    assert sum(each.dense for each in ranks) * tp == everything.split + tp * everything.whole
    assert sum(each.experts for each in ranks) * tp * ep == everything.expert_split + tp * everything.expert_whole


@settings(max_examples=60, deadline=None)
@given(
    nodes=st.integers(1, 4), per_node=st.sampled_from([1, 2, 4, 8]), batch=st.sampled_from([4, 6, 96, 128]),
    cp=st.sampled_from([1, 2]), memory_gb=st.integers(20, 300), chunks=st.sampled_from([None, 2]),
)  # fmt: skip
def test_every_layout_is_legal_and_the_best_that_fits_is_first(
    nodes: int, per_node: int, batch: int, cp: int, memory_gb: int, chunks: int | None
) -> None:
    sizes = eight_billion(cp=cp, num_chunks=chunks)
    gpus = Gpus(num_nodes=nodes, per_node=per_node, bytes=memory_gb * GB)
    job = Undecided(f"--micro-batch-size 1 --global-batch-size {batch} --train-iters 1".split())
    found = judge(sizes, gpus, job.allows)
    assert len({each.layout for each in found}) == len(found) == len(list(filter(job.allows, layouts(sizes, gpus))))
    for judged in found:
        layout = judged.layout
        assert layout.replicas >= 2 and layout.replicas * layout.num_ranks == nodes * per_node
        assert per_node % layout.tp == 0 and 32 % (layout.pp * layout.vpp) == 0 and 8 % layout.tp == 0 and layout.cp == cp
        assert batch % layout.lanes == 0 and batch // layout.lanes >= layout.replicas
        assert judged.fits == (judged.memory.recovery <= USABLE * gpus.bytes)
        assert judged.memory.peak <= judged.memory.recovery and judged.num_deaths >= 1
    fitting = [each for each in found if each.fits]
    assert found[: len(fitting)] == fitting
    for other in fitting[1:]:
        best, others = fitting[0].layout, other.layout
        assert (best.num_ranks, best.tp, best.pp) <= (others.num_ranks, others.tp, others.pp)


@pytest.mark.parametrize(
    ("parts", "of_experts", "expert_tp", "expected"),
    [
        (0, 0, None, {1, 2, 3, 6}),
        (28672, 0, None, {1, 2}),
        (0, 3, None, {1, 3}),
        (0, 4, 2, {1, 2, 3, 6}),
        (0, 3, 2, set()),
    ],
)
def test_a_tensor_parallel_size_divides_all_that_it_splits_and_the_gpus_of_a_node(
    parts: int, of_experts: int, expert_tp: int | None, expected: set[int]
) -> None:
    sizes = eight_billion()
    model = msgspec.structs.replace(
        sizes.model, num_heads=48, num_query_groups=48, tensor_parts=parts, expert_parts=of_experts
    )  # fmt: skip
    activations = tuple(Activations(tp=tp, pp=1, bytes=GB) for tp in divisors(48))
    changed = msgspec.structs.replace(sizes, model=model, flags=Flags(expert_tp=expert_tp), activations=activations)
    found = layouts(changed, Gpus(num_nodes=4, per_node=6, bytes=80 * GB))
    assert {layout.tp for layout in found} == expected


@pytest.mark.parametrize("cut", ["lanes", "tp", "pp"])
def test_more_ranks_of_a_replica_never_need_more(cut: str) -> None:
    one, two, four = (needed(eight_billion(), **{cut: number}).recovery for number in (1, 2, 4))
    assert one > two > four


def test_the_chosen_layout_for_8_billion_on_one_node() -> None:
    chosen = judge(eight_billion(), Gpus(per_node=8, bytes=80 * GB))[0]
    assert (chosen.layout.replicas, chosen.layout.tp, chosen.layout.pp, chosen.layout.lanes) == (2, 1, 2, 2)
    assert (chosen.lost_share, chosen.longer_step) == (0.5, 1.0)


def test_a_layout_fits_only_if_its_recovery_does() -> None:
    memory_of_two = needed(eight_billion(), tp=2, lanes=2)
    between = (memory_of_two.peak + memory_of_two.recovery) / 2
    judged = judge(eight_billion(), Gpus(per_node=8, bytes=int(between / USABLE)))
    [found] = [each for each in judged if each.layout == Layout(replicas=2, tp=2, expert_tp=2, lanes=2)]
    assert found.memory == memory_of_two and not found.fits


def test_experts_need_sequence_parallelism_beside_tensor_parallelism() -> None:
    sizes = eight_billion()
    model = msgspec.structs.replace(sizes.model, num_experts=8)
    for splits in (False, True):
        flags = msgspec.structs.replace(sizes.flags, sequence_parallel=splits)
        found = layouts(msgspec.structs.replace(sizes, model=model, flags=flags), Gpus(per_node=8, bytes=80 * GB))
        assert {layout.tp > 1 for layout in found} == {False, splits}
        for layout in found:
            assert layout.tp * layout.lanes % (layout.expert_tp * layout.ep) == 0
