"""A replica whose lanes FSDP2 shards: against Megatron alone, and by coded gradients at every instant of a step.

The codes are those of tests/megatron/toy.py: microbatch i contributes 2**i to every element. One lane shards nothing, but
FSDP2's hooks are the same. Lanes are in the tests with real processes.
"""

from __future__ import annotations

import inspect
import itertools
import random
import weakref
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_recover.config import RecoverConfig
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.fsdp2 import shards
from megatron_recover.fsdp2.gradients import BackwardWatch, ParameterGroup, ShardedGradients, _may_watch
from megatron_recover.fsdp2.parameter_gradient import FlatSum, Gradient, WideGradient
from megatron_recover.megatron.losses import gradient_scale
from megatron_recover.megatron.state import TrainingState
from megatron_recover.trainer.regions import number
from tests.megatron.loopback import Strike
from tests.megatron.processes import Layout, recovered, run, upstream_alone
from tests.megatron.test_commit import NUM_BUCKETS, Run, first_strikes, second_strikes
from tests.megatron.test_reduction import AFTER_A_LOSS, AT_ONCE, INTO_SOME, _assert_close, _assert_same
from tests.megatron.toy import SIZES, Stage, Threads, model_config, wrap_sharded
from tests.parts import in_parts

pytestmark = pytest.mark.timeout(300)

# --- Against Megatron alone ----------------------------------------------------------------------------------------------

LAYOUTS = {
    "lanes2": Layout(fsdp2=True, lanes=2),
    "lanes2-overlap": Layout(fsdp2=True, lanes=2, overlap=True),
    "lanes3": Layout(fsdp2=True, lanes=3),  # divides no parameter of the model
    "tp2-lanes2": Layout(fsdp2=True, tp=2, lanes=2, overlap=True),
    "lanes2-bf16": Layout(fsdp2=True, lanes=2, bf16=True, reduce_in_bf16=True),
    "lanes2-recompute": Layout(fsdp2=True, lanes=2, recompute=True, overlap=True),
    "lanes1": Layout(fsdp2=True),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_equals_megatron(layout: Layout) -> None:
    exactly = msgspec.structs.replace(layout, determinism="exact")
    rounds = (AT_ONCE, AFTER_A_LOSS, INTO_SOME)
    reference, *fast = run(layout, (upstream_alone, ()), *((recovered, (each,)) for each in rounds))
    exact = run(exactly, *((recovered, (each,)) for each in rounds))
    for rank, step in itertools.product(range(layout.num_ranks), range(2)):
        expected = reference[rank][step]
        assert expected["success"] and expected["norm"] > 0
        _assert_same(fast[0][rank][step], expected)
        for found in (*fast, *exact) if not (layout.bf16 and step) else ():  # `_assert_close_in_bf16` says why
            _assert_close(found[rank][step], expected)
        for found in exact:
            _assert_same(found[rank][step], exact[0][rank][step])
    shapes = [fast[0][rank][0]["shape"] for rank in range(layout.num_ranks)]
    assert all(shape == shapes[0] for shape in shapes) and len(shapes[0].bucket_ranks) > 3


@pytest.mark.parametrize(("tp", "bf16"), [(1, False), (1, True), (2, False)])
def test_a_loss_per_token_is_divided_as_without_fsdp2(tp: int, bf16: bool) -> None:
    """Megatron alone does not divide it with FSDP2, so what is compared with are lanes without."""
    plain, sharded = (Layout(tp=tp, lanes=2, per_token=True, bf16=bf16, fsdp2=fsdp2) for fsdp2 in (False, True))
    [reference] = run(plain, (upstream_alone, ()))
    found = run(sharded, (recovered, (AT_ONCE,)), (recovered, (INTO_SOME,)))
    for rank, step, each in itertools.product(range(plain.num_ranks), range(1 if bf16 else 2), found):
        _assert_close(each[rank][step], reference[rank][step])


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gradients_in_bf16_are_summed_in_fp32_as_without_fsdp2(tp: int) -> None:
    """With FSDP2 Megatron alone sums them in bf16, so what is compared with are lanes without, which sum in fp32."""
    layout = Layout(tp=tp, lanes=2, bf16=True, overlap=True, fsdp2=True)
    sums = [(recovered, changes, each) for changes in ({}, {"determinism": "exact"}) for each in (AFTER_A_LOSS, INTO_SOME)]
    jobs = ((upstream_alone, {"fsdp2": False}), *sums, (recovered, {"reduce_in_bf16": True}, AT_ONCE))
    reference, *found, rough = run(layout, *((_changed, job) for job in jobs))
    for rank, each in itertools.product(range(layout.num_ranks), found):
        assert unlike(each[rank][0], reference[rank][0]) < 1e-5
        _assert_close(each[rank][0], reference[rank][0])
        assert each[rank][1]["success"]
    assert unlike(rough[0][0], reference[0][0]) > 1e-3, "sums in bf16 are as good: the test shows nothing"


def _changed(layout: Layout, job: Any, changes: dict[str, Any], *arguments: Any) -> Any:
    return job(msgspec.structs.replace(layout, **changes), *arguments)


def unlike(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of two gradients, as a share of the largest element of the parameter's gradient."""
    pairs = zip(found["gradients"], expected["gradients"], strict=True)
    return max(float((one.double() - other.double()).abs().max() / other.double().abs().max()) for one, other in pairs)


# --- Coded gradients -----------------------------------------------------------------------------------------------------

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@TYPES
@pytest.mark.parametrize("determinism", ["fast", "exact"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_without_faults(
    threads: Threads, num_replicas: int, overlap: bool, determinism: str, dtype: torch.dtype
) -> None:  # fmt: skip
    """With eight microbatches a sum has more bits than bf16."""
    settings: dict[str, Any] = {"overlap": overlap, "fsdp2": True, "determinism": determinism, "dtype": dtype}
    Run(threads, num_replicas, 1, [], num_microbatches=8, **settings).check()


@TYPES
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_at_every_instant(threads: Threads, victim: int, overlap: bool, dtype: torch.dtype) -> None:
    for strike in first_strikes(victim, 2, 1):
        print(strike)
        found = Run(threads, 2, 1, [strike], overlap=overlap, fsdp2=True, dtype=dtype).check()
        assert strike.struck and found.job.dead == {victim}


def deaths() -> list[tuple[Strike, Strike]]:
    """A death at every instant of a step, and another at every instant of the recovery from it."""
    return [
        (list(first_strikes(1, 3, 1))[first], second)
        for first, victim in itertools.product(range(len(list(first_strikes(1, 3, 1)))), (0, 2))
        for second in second_strikes(victim, 1)
    ]


@pytest.mark.parametrize(("dtype", "part"), in_parts([(torch.float32,), (torch.bfloat16,)], 5))
def test_a_second_death_at_every_instant_of_the_recovery(threads: Threads, dtype: torch.dtype, part: slice) -> None:
    num_second = num_partly = 0
    for count, (first, second) in list(enumerate(deaths()))[part]:
        print(first, second)
        found = Run(threads, 3, 1, [first, second], overlap=bool(count % 2), fsdp2=True, dtype=dtype).check()
        assert first.struck
        num_second += second.struck
        redone = [event for event in found.log.events if type(event).__name__ == "MicrobatchFinished"]
        num_partly += any(0 < len(event.into) < NUM_BUCKETS for event in redone if event.generation > 1 and event.step == 1)
    assert num_second > 3 and num_partly > 1


# --- Defects -------------------------------------------------------------------------------------------------------------


def is_seen(threads: Threads, runs: list[tuple[Strike, ...]], **options: Any) -> bool:
    """Whether one of these runs fails."""
    for strikes in runs:
        try:
            Run(threads, 3, 1, list(strikes), fsdp2=True, **options).check()
        except (AssertionError, InvariantViolation, ValueError) as error:
            print(f"{type(error).__name__}: {error}")
            return True
    return False


@TYPES
def test_a_gradient_that_is_not_set_aside_is_seen(
    world: None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Whole runs seldom show it: a decided bucket has to be summed again, because whoever had its result died."""
    for kind in (Gradient, WideGradient):
        monkeypatch.setattr(kind, "set_aside", kind.attach)
    with pytest.raises(AssertionError, match="84.0 == 15.0"):
        test_a_pass_adds_to_the_buckets_that_miss_it_only(dtype)


def test_a_gradient_that_is_not_put_back_is_seen(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32. One that is added up in fp32 stays the parameter's `main_grad` while it is set aside."""
    collect = ParameterGroup.collect_into
    monkeypatch.setattr(ParameterGroup, "collect_into", lambda self, into: collect(self, into) if into is not None else None)
    assert is_seen(threads, deaths())


@pytest.mark.parametrize("determinism", ["fast", "exact"])
def test_gradients_that_are_added_up_in_bf16_are_seen(threads: Threads, determinism: str) -> None:
    settings: dict[str, Any] = {"num_microbatches": 8, "dtype": torch.bfloat16, "determinism": determinism}
    assert not is_seen(threads, [()], **settings)
    assert is_seen(threads, [()], in_fp32=False, **settings)


def test_fsdp2_calls_hooks_on_the_stream_on_which_it_has_added() -> None:
    """No test on a CPU can see the stream; this is what `fsdp2/gradients.py`, Note [Passed], relies on in torch's source."""
    source = inspect.getsource(_fsdp_collectives.foreach_reduce)
    body = source.rpartition("    with device_handle.stream(post_reduce_stream):\n")[2]
    inside = "".join(itertools.takewhile(lambda line: line.startswith(" " * 8), body.splitlines(keepends=True)))
    order = ("grad._local_tensor += new_sharded_grad", "_post_accumulate_grad_hooks", "hook(fsdp_param.sharded_param)")
    places = [inside.rindex(text) for text in order]
    assert places == sorted(places)
    # Of a gradient in fp32 also that both hooks run on one stream, behind the sum over the lanes.
    order = ("post_reduce_stream = all_reduce_stream\n        all_reduce_stream.wait_stream(reduce_scatter_stream)\n",
             "with device_handle.stream(all_reduce_stream):\n            all_reduce_hook(reduce_output)\n")  # fmt: skip
    places = [source.index(text) for text in order]
    assert places == sorted(places) and places[1] < source.index("    with device_handle.stream(post_reduce_stream):\n")
    order = ("reduce_scatter_stream.wait_stream(current_stream)", "reduce_output = reduce_scatter_comm.allocate(")  # [Freed]
    assert 0 < source.index(order[0]) < source.index(order[1])
    assert "wait_event" in inspect.getsource(_fsdp_param_group.FSDPParamGroup.finalize_backward)


class Stream:
    """Notes what a stream is told to do."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log, self._events = name, log, 0

    def record_event(self) -> str:
        self._events += 1
        self._log.append(event := f"{self.name} {self._events}")
        return event

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self.name} waits for {event}")


def test_a_sum_that_is_not_rounded_is_freed_when_the_training_stream_waits_for_its_additions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next reduce-scatter, which may get its memory, waits for the training stream. No host waits."""
    log: list[str] = []
    training, adding = Stream("training", log), Stream("adding", log)
    current = training
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: current)
    kept = FlatSum()
    kept.begin(torch.device("meta"))
    current, alive = adding, []
    for count in range(4):
        flat = torch.empty(4, device="meta")
        alive.append(weakref.ref(flat))
        kept.keep(flat)
        del flat
        assert [each() is not None for each in alive] == [False] * (count - 1) + [True] * min(2, count + 1)
    assert log == ["adding 1", "training waits for adding 1", "adding 2", "training waits for adding 2", "adding 3"]
    kept.forget()
    assert not any(each() is not None for each in alive)


def test_a_bucket_that_is_summed_before_fsdp2_has_added_to_it_is_seen(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = BackwardWatch.begin

    def early(self: BackwardWatch, chunk: int, passed: Any) -> None:
        for bucket in {bucket.id for buckets in self._buckets[chunk].values() for bucket in buckets}:
            passed(bucket)
        begin(self, chunk, lambda bucket: None)

    assert not is_seen(threads, [()], overlap=True, determinism="exact")
    monkeypatch.setattr(BackwardWatch, "begin", early)
    assert is_seen(threads, [()], overlap=True, determinism="exact")


# --- Gradients and shards ------------------------------------------------------------------------------------------------


def sharded(dtype: torch.dtype = torch.float32, *, in_fp32: bool = True, **fields: Any) -> tuple[Any, ShardedGradients]:
    model = wrap_sharded(Stage(model_config()).to(dtype), in_fp32=in_fp32, **fields)
    gradients = ShardedGradients([model], bucket_elements=16, in_fp32=True)
    number(gradients.regions, 0, [(0, tuple(bucket.size for region in gradients.regions for bucket in region.buckets))])
    for region in gradients.regions:
        region.begin()
    return model, gradients


def backward(model: Any, code: float = 1.0) -> None:
    model(torch.tensor(code)).sum().backward()


def test_a_gradient_that_is_not_finite_ends_the_rank(threads: Threads) -> None:
    with pytest.raises(RuntimeError, match="not finite"):
        Run(threads, 1, 1, [], broken=2, fsdp2=True)


@pytest.mark.usefixtures("world")
def test_shards_are_back_as_soon_as_a_step_begins() -> None:
    """After an evaluation with `--torch-fsdp2-no-reshard-after-forward`, also in a replica that computes nothing then."""
    model, gradients = sharded(reshard_after_forward=False)
    with torch.no_grad():
        model(torch.tensor(1.0))
    assert not any(isinstance(weight, DTensor) for weight in model.parameters()), "nothing is whole: the test shows nothing"
    gradients.regions[0].begin()
    assert all(isinstance(weight, DTensor) for weight in model.parameters())


@pytest.mark.usefixtures("world")
def test_a_sum_that_is_not_rounded_is_kept_no_longer_than_its_backward() -> None:
    model, gradients = sharded(torch.bfloat16)
    [region] = gradients.regions
    backward(model)
    assert region._flat._sum is not None
    region.backward_ended(0, (0, 1, 2))
    assert region._flat._sum is None


@pytest.mark.usefixtures("world")
def test_shards_are_looked_at_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str | None]] = []
    monkeypatch.setattr(shards, "refuse_empty", lambda parameters, version: seen.append((len([*parameters]), version)))
    sharded()
    assert seen == [(len(SIZES), None)]


def test_on_a_gpu_with_tensor_parallelism_no_backward_is_watched() -> None:
    for device, tp, expected in (("cpu", 2, True), ("cuda", 1, True), ("cuda", 2, False)):
        parameter = SimpleNamespace(device=torch.device(device))
        chunk = SimpleNamespace(
            parameters=lambda parameter=parameter: iter([parameter]), config=SimpleNamespace(tensor_model_parallel_size=tp)
        )  # fmt: skip
        assert _may_watch(chunk) is expected


@pytest.mark.usefixtures("world")
def test_fsdp2_cannot_be_told_to_leave_out_its_sums() -> None:
    """Nor to leave the training stream without a wait for them. What was told before is taken back."""
    model = wrap_sharded(Stage(model_config()))
    model.module.set_requires_gradient_sync(False)
    gradients = ShardedGradients([model], bucket_elements=16)
    [region] = gradients.regions
    region.begin()
    for name in ("requires_gradient_sync", "is_last_backward"):
        call = getattr(model.module, f"set_{name}")
        with pytest.raises(RuntimeError, match=rf"^set_{name}\(False\) is not supported: lanes are summed in every backward"):
            call(False)
        with pytest.raises(RuntimeError, match=rf"^set_{name}\(False\)"):
            call(**{name: False})
        call(True)
    backward(model)
    region.backward_ended(0, (0, 1, 2))
    assert region.local.all()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("in_fp32", [True, False])
def test_trained_parameters_of_two_types_are_refused(in_fp32: bool) -> None:
    """Megatron's optimizer would fail at the fp32 one (without a `main_grad`), in its first step."""
    stage = Stage(model_config())
    stage.other = torch.nn.Linear(2, 3)
    stage.weights.to(torch.bfloat16)
    stage.other.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"types: torch.bfloat16 \(shape .*\), torch.float32 \(shape \(3, 2\)\); with --use"):
        ShardedGradients([wrap_sharded(stage, in_fp32=in_fp32)], bucket_elements=16, in_fp32=in_fp32)
    stage = Stage(model_config())
    stage.other = torch.nn.Linear(2, 3).requires_grad_(False)
    stage.weights.to(torch.bfloat16)
    ShardedGradients([wrap_sharded(stage, in_fp32=in_fp32)], bucket_elements=16, in_fp32=in_fp32)


@pytest.mark.usefixtures("world")
def test_parameters_that_are_sharded_in_another_way_are_refused() -> None:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    whole = torch.zeros(4, 3)
    assert shards.padded_elements(DTensor.from_local(whole, mesh, [Shard(0)])) == 12
    for parameter, told in (
        (DTensor.from_local(whole, mesh, [Shard(1)]), r"Shard\(dim=1\)"),
        (DTensor.from_local(whole, mesh, [Replicate()]), r"Replicate\(\)"),
        (whole, "not at all"),
    ):
        with pytest.raises(ValueError, match=f"a parameter is sharded .*{told}.*; only parameters whose first dimension"):
            shards.padded_elements(parameter)


@pytest.mark.usefixtures("world")
def test_the_grid_of_a_mean_over_lanes_counts_no_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 takes the mean, Megatron's buffers the sum: `test_the_grid_is_scaled_like_the_gradient` has those."""
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda **_: 3)
    model, _ = sharded()
    arguments = {"num_microbatches": 4, "micro_batch_size": 2, "seq_length": 8}
    assert gradient_scale(model, arguments) == 1.0
    model.config.calculate_per_token_loss = True
    model.config.grad_scale_func = lambda loss: loss * 128
    assert gradient_scale(model, arguments) == 128 * 64


@pytest.mark.usefixtures("world")
def test_a_bucket_has_whole_parameters() -> None:
    _, gradients = sharded()
    [region] = gradients.regions
    assert [bucket.size for bucket in region.buckets] == [*SIZES]
    assert [len(each) for each in region.gradients.values()] == [1, 1, 1]


@TYPES
@pytest.mark.usefixtures("world")
def test_a_pass_adds_to_the_buckets_that_miss_it_only(dtype: torch.dtype) -> None:
    model, gradients = sharded(dtype)
    [region] = gradients.regions
    gradients.collect_into((1,))
    backward(model)
    region.backward_ended(0, (1,))
    gradients.collect_into(None)
    sums = [float(region.local[bucket.start : bucket.stop].sum()) for bucket in region.buckets]
    assert sums[0] == sums[2] == 0 < sums[1]
    backward(model)
    assert float(region.local[region.buckets[1].start : region.buckets[1].stop].sum()) == 2 * sums[1]
    assert float(region.local[: region.buckets[0].stop].sum()) > 0


@TYPES
@pytest.mark.usefixtures("world")
def test_a_step_that_begins_forgets_which_buckets_a_pass_before_has_left_out(dtype: torch.dtype) -> None:
    """As where that pass has ended by an exception: the same buckets may be those of the next pass."""
    model, gradients = sharded(dtype)
    [region] = gradients.regions
    for _ in range(2):
        gradients.collect_into((1,))
        backward(model)
        region.backward_ended(0, (1,))
        assert [bucket.id for bucket in region.buckets if region.local[bucket.start : bucket.stop].any()] == [1]
        region.begin()
    backward(model)
    assert region.local.all()


@TYPES
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("replaced", [True, False])
def test_a_gradient_that_somebody_else_replaces_is_found(replaced: bool, dtype: torch.dtype) -> None:
    model, gradients = sharded(dtype)
    [region] = gradients.regions
    backward(model)
    region.backward_ended(0, (0, 1, 2))
    weight, name = next(iter(model.parameters())), "grad" if dtype == torch.float32 else "main_grad"
    setattr(weight, name, getattr(weight, name).clone() if replaced else None)  # as some optimizers and hooks do
    with pytest.raises(InvariantViolation, match="INV-3"):
        region.backward_ended(1, (0, 1, 2))


@pytest.mark.usefixtures("world")
def test_a_gradient_in_bf16_that_was_not_added_up_is_found() -> None:
    model, gradients = sharded(torch.bfloat16)
    [region] = gradients.regions
    backward(model)
    region.backward_ended(0, (0, 1, 2))
    weight = next(iter(model.parameters()))
    assert weight.grad is None
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(InvariantViolation, match="INV-3"):
        region.applied()


@pytest.mark.usefixtures("world")
def test_a_gradient_that_fsdp2_has_rounded_before_it_was_seen_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = sharded(torch.bfloat16, in_fp32=False)
    with pytest.raises(RuntimeError, match="not in fp32"):
        backward(model)
    monkeypatch.setattr(FlatSum, "keep", lambda self, flat: None)
    model, _ = sharded(torch.bfloat16)
    with pytest.raises(InvariantViolation, match="INV-3"):
        backward(model)


@pytest.mark.usefixtures("world")
def test_a_gradient_in_bf16_has_its_part_also_where_another_parameter_gets_none() -> None:
    stage = Stage(model_config())
    stage.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    stage.to(torch.bfloat16)
    model = wrap_sharded(stage, in_fp32=True)
    [region] = ShardedGradients([model], bucket_elements=1000, in_fp32=True).regions
    region.begin()
    backward(model)
    assert stage.unused.main_grad.to_local().tolist() == [0.0, 0.0, 0.0]
    for size, weight in zip(SIZES, stage.weights, strict=True):
        assert weight.main_grad.to_local().tolist() == [1.0 + index % 7 for index in range(size)]


@pytest.mark.usefixtures("world")
def test_a_parameter_without_gradient_has_zeros_and_a_frozen_one_has_none() -> None:
    stage = Stage(model_config())
    stage.unused, stage.frozen = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(4), requires_grad=False)
    model = wrap_sharded(stage)
    [region] = ShardedGradients([model], bucket_elements=1000).regions
    region.begin()
    backward(model)
    region.backward_ended(0, ())
    assert stage.unused.grad.to_local().tolist() == [0.0, 0.0, 0.0] and stage.frozen.grad is None
    assert region.local.numel() == sum(SIZES) + 3


@pytest.mark.usefixtures("world")
def test_state_is_the_shards_also_while_whole_parameters_are_there() -> None:
    """With `--torch-fsdp2-no-reshard-after-forward` they stay after an evaluation, and inside a forward they always are."""
    model, gradients = sharded(reshard_after_forward=False)
    state = TrainingState([model])
    before = state.digest()
    addresses = [each.data.data_ptr() for each in state.tensors()]
    with torch.no_grad():
        model(torch.tensor(1.0))
    assert not any(hasattr(weight, "to_local") for weight in model.parameters()), "nothing is whole: the test shows nothing"
    assert [each.data.data_ptr() for each in state.tensors()] == addresses and state.digest() == before
    gradients.regions[0].begin()
    assert TrainingState([model]).digest() == before
    with torch.no_grad():
        shards.local(next(iter(model.parameters())))[0] += 1
    assert state.digest() != before


@pytest.mark.parametrize(
    ("rows", "device", "version", "is_refused"),
    [
        (64, "cuda", "2.17.1", True),  # over 12 lanes 6 each: the last one has none
        (64, "cuda", "2.18.0+cu13", False),
        (64, "cuda", None, False),
        (64, "cpu", "2.17.1", False),
        (60, "cuda", "2.17.1", False),
        (57, "cuda", "2.17.1", False),  # 5 each, and 2
    ],
)
def test_lanes_without_a_shard_are_refused_where_the_fused_optimizer_fails_at_them(
    rows: int, device: str, version: str | None, is_refused: bool
) -> None:
    parameter: Any = SimpleNamespace(shape=(rows, 3), device=torch.device(device), device_mesh=SimpleNamespace(size=lambda: 12))
    if not is_refused:
        shards.refuse_empty([parameter], version)
        return
    with pytest.raises(ValueError, match=r"shape \(64, 3\) has rows for 11 of 12 lanes, .* that divides 64, or Transformer "):
        shards.refuse_empty([parameter], version)


def _uneven(layout: Layout, dtype: torch.dtype) -> list[Any]:
    """On each lane the sizes of the buckets, and those of the shards."""
    from megatron.core import parallel_state

    model = wrap_sharded(Stage(model_config()).to(dtype), in_fp32=True)
    gradients = ShardedGradients([model], RecoverConfig(bucket_elements=1).bucket_elements, in_fp32=True)
    assert parallel_state.get_data_parallel_world_size() == layout.lanes
    [region] = gradients.regions
    region.begin()
    random.seed(0)
    backward(model, 2.0 ** dist.get_rank())
    return [
        [bucket.size for bucket in region.buckets],
        [shards.local(weight).numel() for weight in model.parameters()],
        [getattr(weight, "main_grad", weight.grad).full_tensor().tolist() for weight in model.parameters()],
        float(region.local.sum()),
    ]


@TYPES
def test_lanes_with_shards_of_different_sizes_have_the_same_buckets(dtype: torch.dtype) -> None:
    """21, 16 and 5 elements over 4 lanes; the last lane has none of the 5."""
    [lanes] = run(Layout(lanes=4, fsdp2=True), (_uneven, (dtype,)))
    assert all(sizes == [6, 4, 2] for sizes, *_ in lanes)
    assert [held for _, held, *_ in lanes] == [[6, 4, 2], [6, 4, 2], [6, 4, 1], [3, 4, 0]]
    mean = (1 + 2 + 4 + 8) / 4
    for _, _, whole, _ in lanes:
        assert whole == [[mean * (1.0 + index % 7) for index in range(size)] for size in SIZES]
    assert sum(total for *_, total in lanes) == sum(sum(each) for each in lanes[0][2])
