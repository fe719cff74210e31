"""Reducing beside the backward: on upstream's own DDP and a real backward that is held up in its middle."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_recover import trace
from megatron_recover.config import RecoverConfig
from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.values import Work
from megatron_recover.megatron.gradient_buffers import GradientBuffers
from megatron_recover.trainer.overlap import Abandoned, Overlap
from megatron_recover.trainer.reduction import Reduction
from megatron_recover.trainer.work_queue import Task
from tests.megatron.toy import model_config, wrap
from tests.trainer.test_reducing import Driver

pytestmark = pytest.mark.usefixtures("world")

DEADLINE_S = 30.0
SIZE = 8
BUCKETS = (0, 1, 2)
"""Upstream lays the buffer out in the order of backward: that of the later weights, that of the earlier ones; the ledger."""
PLAN = Plan(0, 1, (1,), Work("train 1", 1, BUCKETS), (1,), (), (), BUCKETS)


class Between(torch.autograd.Function):
    """Calls `then` when the backward comes by."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, then: Any) -> Tensor:
        ctx.then = then
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return gradient, None


class TwoLayers(MegatronModule):
    def __init__(self) -> None:
        super().__init__(model_config())
        self.earlier = torch.nn.Parameter(torch.ones(SIZE))
        self.later = torch.nn.Parameter(torch.ones(SIZE))

    def forward(self, then: Any) -> Tensor:
        return (Between.apply(self.earlier * 2.0, then) * self.later * 3.0).sum()


class Job:
    """One microbatch of one replica, reduced alone."""

    def __init__(self, determinism: str = "fast", plan: Plan = PLAN, **ddp: Any) -> None:
        self.model = wrap(TwoLayers(), overlap_grad_reduce=True, **ddp)
        self.model.zero_grad_buffer()
        self.driver = Driver()
        self.reduction = Reduction(
            GradientBuffers([self.model], SIZE), stage=0, is_last_stage=True, config=RecoverConfig(determinism=determinism),
            driver=self.driver, gather=lambda value: [value], record=self.record,  # type: ignore[arg-type]
        )  # fmt: skip
        assert [bucket.size for region in self.reduction._gradients.regions for bucket in region.buckets] == [SIZE, SIZE]
        self.reduction.begin(0, 1)
        self.overlap = Overlap(self.reduction, lambda: plan)

    def record(self, event: type[trace.Event], **fields: Any) -> None:
        self.driver.calls.append(f"{event.__name__} {fields['bucket']}")

    def backward(self, then: Any = lambda: None, into: tuple[int, ...] = BUCKETS) -> None:
        with self.model.no_sync():
            loss = self.model(then)
            self.reduction.collect_into(into)
            self.overlap.last_backward_begins(Task(0, into, 1), 0)
            loss.backward()
            self.reduction.end_backward(0, 0, into)
            self.reduction.collect_into(None)

    def held(self) -> list[int]:
        return [item.bucket for item in self.driver.held]


@pytest.mark.parametrize("determinism", ["fast", "exact"])
def test_a_bucket_is_reduced_as_soon_as_the_last_backward_has_passed_it(determinism: str) -> None:
    job = Job(determinism)
    seen: list[list[int]] = []
    reached = threading.Event()
    original = job.driver.hold

    def hold(held: Any) -> bool:
        done = original(held)
        reached.set()
        return done

    job.driver.hold = hold  # type: ignore[method-assign]

    def in_the_middle() -> None:
        assert reached.wait(DEADLINE_S), "nothing is reduced beside the backward"
        seen.append(job.held())

    with job.overlap:
        job.backward(in_the_middle)
        assert job.overlap._started is not None
        job.reduction.count_ledger(0)
        job.overlap.finish()
    assert seen == [[0]], "of the layers only the later one has been passed"
    assert job.held() == [0, 1, 2]
    results = [bucket_sum.result for bucket_sum in job.reduction._gradient_sums]
    assert [result.tolist() for result in results] == [[6.0] * SIZE] * 2
    # The trace says first what others may get.
    assert job.driver.calls == [
        "BucketPassed 0", "sum", "Reduced 0", "BucketPassed 1", "sum", "Reduced 1", "sum", "Reduced 2",
    ]  # fmt: skip


def test_without_the_flag_nothing_is_reduced_before_the_pass_is_over() -> None:
    job = Job()
    job.reduction._gradients.can_watch = False
    with job.overlap:
        job.backward(lambda: None)
        assert job.overlap._started is None and not job.held()
        job.reduction.count_ledger(0)
        job.overlap.finish()
    assert job.held() == [0, 1, 2]


@pytest.mark.parametrize(("determinism", "watched"), [("fast", False), ("exact", True)])
def test_gradient_that_arrives_at_the_end_of_the_backward_is_waited_for(determinism: str, watched: bool) -> None:
    """A recomputed microbatch goes into some buckets only, and what is redirected is added when the backward is over."""
    job = Job(determinism, PLAN.__class__(0, 1, (1,), PLAN.work, (1,), (), (), (1,)))
    with job.overlap:
        job.backward(into=(1,))
        assert (job.overlap._started is not None) == watched
        job.overlap.finish()
    assert job.held() == [1]


def test_a_parameter_whose_gradient_comes_twice_is_not_trained_wrongly() -> None:
    job = Job()
    with pytest.raises(RuntimeError, match="leave it out"), job.overlap, job.model.no_sync():
        loss = job.model(lambda: None)
        job.overlap.last_backward_begins(Task(0, BUCKETS, 1), 0)
        loss.backward(retain_graph=True)
        loss.backward()


def test_what_the_reduction_raises_is_raised_in_the_training_thread() -> None:
    job = Job(check_for_nan_in_grad=True)
    with pytest.raises(RuntimeError, match="not finite"), job.overlap:
        job.model.module.earlier.data.fill_(float("inf"))
        job.backward()
        job.overlap.finish()
    assert not job.held(), "nobody gets a part of a gradient that is not finite"


def test_inv_8_a_pass_that_raises_leaves_no_thread_that_waits() -> None:
    job = Job()

    def fail() -> None:
        raise ArithmeticError("in the middle of the backward")

    with pytest.raises(ArithmeticError), job.overlap:
        job.backward(fail)
    assert job.overlap._started is not None
    with pytest.raises(Abandoned):
        job.overlap._started.result(DEADLINE_S)
    assert 1 not in job.held(), "the earlier layer's gradient is not there"


def test_sums_that_must_not_run_beside_other_work_wait_for_the_end_of_the_pass(caplog: pytest.LogCaptureFixture) -> None:
    """On a GPU two communicators can wait for each other; the reason is said once."""
    job = Job()
    job.driver.overlap_refusal = lambda generation, operands: "two queues are needed"
    with job.overlap:
        job.backward(lambda: None)
        assert job.overlap._started is None and job.held() == []
        job.reduction.count_ledger(0)
        job.overlap.finish()
    assert job.held() == [0, 1, 2]
    assert not job.reduction.may_overlap(PLAN)
    assert [record.getMessage() for record in caplog.records] == [
        "the reduction does not overlap with the backward: two queues are needed"
    ]
