"""A newcomer that has the state of another replica goes on bit by bit as that one does."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from megatron_recover.megatron.launch.arguments import joining_refusals
from megatron_recover.megatron.newcomer import Entrance, Newcomer, Progress, TrainArguments, copies_in, different
from megatron_recover.megatron.state import CARRIED, Carried, Published, TrainingState
from megatron_recover.trainer.state import Scalar, State, assigned, flattened
from tests.megatron.newcomers import ENTERS, Copied, Found, go_on
from tests.megatron.toy import FusedAdam

pytestmark = pytest.mark.timeout(300)


def assert_equal(found: Copied, wanted: Copied) -> None:
    assert found.scalars == wanted.scalars
    assert [name for name, _ in found.tensors] == [name for name, _ in wanted.tensors]
    unlike = [
        name for (name, a), (_, b) in zip(found.tensors, wanted.tensors, strict=True)
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    ]  # fmt: skip
    assert not unlike
    assert (found.layout, found.digest) == (wanted.layout, wanted.digest)


SCALED = "--fp16 --initial-loss-scale 524288 --hysteresis 1 --loss-scale-window 2 "
ZERO1 = "--use-distributed-optimizer --bf16 "
MTP = "--position-embedding-type rope --calculate-per-token-loss --mtp-num-layers 1 "
VIRTUAL = "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2 "
BIAS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.05 --moe-aux-loss-coeff 0.01 --disable-bias-linear "
)


@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [
        ("--global-batch-size 2", 1),
        ("--global-batch-size 2 --bf16 --dataloader-type cyclic --untie-embeddings-and-output-weights", 1),
        (f"--global-batch-size 2 {SCALED}", 1),
        ("--step-batch-size-schedule 0:2,64:4 --save FOLDER --save-interval 1000", 1),
        ("--global-batch-size 2 --optimizer sgd --lr-decay-style WSD --lr-wsd-decay-iters 2", 1),
        (f"--global-batch-size 4 {ZERO1}", 2),
        (f"--global-batch-size 4 {ZERO1} --overlap-grad-reduce --overlap-param-gather", 2),
        (f"--global-batch-size 2 --pipeline-model-parallel-size 2 {VIRTUAL}", 2),
        (f"--global-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel {MTP}", 2),
        (f"--global-batch-size 2 {BIAS}", 1),
        (f"--global-batch-size 4 --expert-model-parallel-size 2 {ZERO1} {BIAS}", 2),
    ],
    ids=[
        "fp32", "bf16, cyclic", "fp16", "growing batch", "sgd", "lanes", "lanes, late gather", "virtual stages, tied",
        "tp, mtp", "experts", "experts over lanes",
    ],
)  # fmt: skip
def test_it_goes_on_as_the_replica_whose_state_it_has(flags: str, num_ranks: int) -> None:
    compare(*go_on(flags, num_ranks))


@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [("--global-batch-size 2 --bf16", 1), (f"--global-batch-size 4 {ZERO1}", 2)],
    ids=["bf16", "lanes"],
)  # fmt: skip
def test_it_loads_nothing_where_the_others_have_loaded_a_checkpoint(flags: str, num_ranks: int) -> None:
    """That checkpoint is gone. An optimizer that was loaded has the names of one that was not."""
    compare(*go_on(flags, num_ranks, resumes=True))


def compare(donors: list[Found], newcomers: list[Found]) -> None:
    for donor, newcomer in zip(donors, newcomers, strict=True):
        assert_equal(newcomer.at_entrance, donor.at_entrance)
        assert newcomer.at_entrance.scalars["carried.iteration"] == ENTERS - 1
        assert newcomer.steps == donor.steps
        assert newcomer.steps[0][0] == f"train {ENTERS}" and len(newcomer.steps) > 5
        assert_equal(newcomer.at_end, donor.at_end)
        assert newcomer.ends == donor.ends and newcomer.ends[1] > 0
        assert newcomer.log == donor.log
        assert newcomer.saves == donor.saves
        assert newcomer.configuration == donor.configuration and newcomer.configuration
    assert len(donors[-1].log) >= 4


# --- the parts ------------------------------------------------------------------------------------------------------------


def test_a_usual_rank_loads_and_trains_by_upstreams_own_functions() -> None:
    called: list[Any] = []

    def load(*args: Any, **kwargs: Any) -> tuple[int, int]:
        called.append((args, kwargs))
        return 7, 70

    def train(model: Any, *, config: Any) -> str:
        called.append((model, config))
        return "trained"

    entrance = Entrance(load, train, newcomer=pytest.fail, enter=None)
    assert entrance.load_checkpoint("a", strict=False) == (7, 70)
    assert entrance.train("model", config="config") == "trained"
    assert called == [(("a",), {"strict": False}), ("model", "config")]


def test_a_newcomer_is_prepared_before_it_enters_and_trains_after_it() -> None:
    done: list[str] = []

    class Prepared:
        def __init__(self, arguments: TrainArguments) -> None:
            assert (arguments.model, arguments.pg_collection) == ("model", None), "arguments are found by name"

        def prepare(self) -> None:
            done.append("prepared")

    def train(
        forward_step_func: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, train_data_iterator: Any,
        valid_data_iterator: Any, config: Any, p2p_communicator: Any = None, pg_collection: Any = None,
    ) -> None:  # fmt: skip
        done.append("trains")

    def enter(newcomer: Any) -> None:
        assert isinstance(newcomer, Prepared)
        done.append("entered")

    entrance = Entrance(pytest.fail, train, newcomer=Prepared, enter=enter)  # type: ignore[arg-type]
    assert entrance.load_checkpoint("model", "optimizer", strict=False) == (0, 0)
    entrance.train("step", "model", "optimizer", "scheduler", "train", "valid", config="config")
    assert done == ["prepared", "entered", "trains"]


def test_what_is_flattened_can_be_assigned() -> None:
    """Types stay: a digest tells 1, 1.0 and True apart."""
    tensor = torch.zeros(2)
    value = {"a": [1, {"b": (2.0, None, "x")}], "t": tensor, "kind": torch.float32, "flag": True}
    other = {"a": [5, {"b": (0.5, "y", "z")}], "t": torch.ones(2), "kind": torch.float32, "flag": False}
    scalars = {name: found for name, found in flattened("v", other) if not isinstance(found, torch.Tensor)}
    inside = value["a"]
    assert assigned("v", value, scalars) is value and value["a"] is inside, "somebody may hold the parts"
    assert {**value, "t": None} == {**other, "t": None} and value["t"] is tensor
    assert assigned("v", {"a": [1, 2]}, {"v.a.1": 7}) == {"a": [1, 7]}


def newcomer_of(state: TrainingState, args: Namespace, carried: dict[str, Carried]) -> Newcomer:
    arguments = TrainArguments(**dict.fromkeys(TrainArguments._fields) | {"model": []})
    nothing: Any = None
    return Newcomer(arguments, state, lambda: args, carried=carried, cursor=nothing, seed=nothing, train_step=nothing)


def fused_state(step: int, scale: float, args: Namespace) -> TrainingState:
    leaf = Namespace(optimizer=FusedAdam([torch.nn.Parameter(torch.zeros(3))], step, scale), grad_scaler=None)
    scheduler = Namespace(num_steps=step, lr_decay_style="cosine")
    scheduler.state_dict = lambda: {name: vars(scheduler)[name] for name in ("num_steps", "lr_decay_style")}
    return TrainingState([], leaf, scheduler, lambda: {"consumed_train_samples": args.consumed_train_samples})


def test_steps_of_groups_and_scales_are_installed_and_what_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_recover.megatron.newcomer.update_num_microbatches", lambda *_, **__: None)
    there, here = (Namespace(consumed_train_samples=samples, consumed_valid_samples=0) for samples in (90, 0))
    donor, mine = fused_state(9, 0.25, there), fused_state(1, 1.0, here)
    scalars = Published(donor, {"n": Carried(lambda: 5, lambda _: None)}).scalars()
    got: list[int] = []
    newcomer = newcomer_of(mine, here, {"n": Carried(lambda: None, got.append)})
    newcomer.install(scalars)
    assert not different(mine.scalars(), donor.scalars()) and mine.digest() == donor.digest()
    assert got == [5] and here.consumed_train_samples == 90
    assert "optimizer0.group1.step" not in scalars, "nothing depends on it"
    with pytest.raises(ValueError, match=r"cannot be set: chunk0\.new, optimizer0\.group0\.lr$"):
        less = {name: value for name, value in scalars.items() if name != "optimizer0.group0.lr"}
        newcomer.install(less | {"chunk0.new": 1})
    with pytest.raises(ValueError, match=r"what is carried differs: \['m'\]"):
        newcomer.install(scalars | {f"{CARRIED}.m": 1})


def test_scalars_that_only_a_digest_tells_apart_differ() -> None:
    assert different({"a": 1, "b": float("nan"), "c": None}, {"a": 1.0, "b": float("nan")}) == ["a"]
    assert different({"a": True}, {"a": 1}) == ["a"]


def test_tensors_that_are_copies_are_found() -> None:
    class Gaps(State):
        def values(self) -> Any:
            yield "dense", dense
            yield "with gaps", torch.arange(12.0).view(3, 4)[:, :2]
            yield "extra", torch.frombuffer(bytearray(8), dtype=torch.uint8)

    dense = torch.zeros(4)
    assert copies_in(Gaps()) == ["with gaps", "extra"]


@pytest.mark.parametrize("begun_with", [0, 3 * 10**30, 1.5e30], ids=["nothing", "more than 64 bits", "a float"])
def test_no_digit_of_the_operations_is_lost(begun_with: float) -> None:
    args, other = (Namespace(num_floating_point_operations_so_far=count, curr_iteration=4) for count in (begun_with, 0))
    here, there = Progress(lambda: args), Progress(lambda: other)
    for passed in (None, begun_with + 1):
        if passed is not None:
            here.passed(passed)
        scalars: dict[str, Scalar] = {name: each.get() for name, each in here.carried().items()}
        for name, each in there.carried().items():
            each.put(scalars[name])
        found = other.num_floating_point_operations_so_far
        assert found == (begun_with if passed is None else passed) and type(found) is type(begun_with)
    assert (other.iteration, other.curr_iteration) == (4, 4)


def test_arguments_with_which_nobody_can_join_are_named() -> None:
    usual: dict[str, Any] = {
        "optimizer_cpu_offload": False, "phase_transition_iterations": None, "vision_pretraining": False,
        "vision_pretraining_type": "classify",
    }  # fmt: skip
    assert joining_refusals(Namespace(**usual)) == []
    dino = {"vision_pretraining": True, "vision_pretraining_type": "dino"}
    lines = joining_refusals(Namespace(**usual | dino | {"optimizer_cpu_offload": True, "phase_transition_iterations": [5]}))
    flags = ["--optimizer-cpu-offload", "--phase-transition-iterations", "--vision-pretraining-type"]
    assert [line.split()[0] for line in lines] == flags
    assert all("lets no replica join while others train: " in line and "; " in line for line in lines)
    assert len(joining_refusals(Namespace())) == 3, "an argument that cannot be judged is not passed over"
