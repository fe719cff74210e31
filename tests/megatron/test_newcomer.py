"""A newcomer that has the state of another replica goes on bit by bit as that one does."""

from __future__ import annotations

import pytest
import torch

from tests.megatron.newcomers import ENTERS, Copied, Found, go_on

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
        "fp32", "bf16, cyclic", "fp16", "growing batch", "sgd", "lanes", "lanes, late gather", "virtual stages, tied", "tp, mtp", "experts",
        "experts over lanes",
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
    assert len(donors[-1].log) >= 4
