"""Our 1F1B against upstream's: the same forwards, backwards, sends and receives in the same order, for every stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from megatron_recover.core.values import Compute, Plan, Work
from megatron_recover.megatron.cpu import enable_cpu
from megatron_recover.megatron.pipeline import Stage
from megatron_recover.megatron.work_queue import Task, WorkQueue
from tests.megatron.toy import Stage as Model
from tests.megatron.toy import model_config, start_world

BUCKETS = (0, 1)
TOLD = ("current_microbatch", "is_first_microbatch", "checkpoint_activations_microbatch")
"""What upstream's schedule tells its forward step."""


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    if not torch.cuda.is_available():
        enable_cpu()
    start_world()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class Link:
    """A stage's `P2PCommunicator` to nobody: writes down what is asked of it, and answers with something to compute with."""

    def __init__(self, stage: int, num_stages: int, notes: list[str]) -> None:
        self.current_stage, self.total_stages = stage, num_stages
        self.is_pp_first_stage, self.is_pp_last_stage = stage == 0, stage == num_stages - 1
        self.config = None
        self._notes = notes

    def _answer(self, name: str, nothing: bool) -> list[Any]:
        self._notes.append(name)
        return [None] if nothing else [torch.zeros(1, requires_grad=True)]

    def recv_forward(self, shapes: Any, is_first_stage: bool) -> list[Any]:
        return self._answer("recv_forward", is_first_stage)

    def recv_backward(self, shapes: Any, is_last_stage: bool) -> list[Any]:
        return self._answer("recv_backward", is_last_stage)

    def send_forward(self, tensors: Any, is_last_stage: bool) -> None:
        self._notes.append("send_forward")

    def send_backward(self, tensors: Any, is_first_stage: bool) -> None:
        self._notes.append("send_backward")

    def send_forward_recv_backward(self, tensors: Any, shapes: Any, is_last_stage: bool) -> list[Any]:
        return self._answer("send_forward_recv_backward", is_last_stage)

    def send_backward_recv_forward(self, tensors: Any, shapes: Any, is_first_stage: bool) -> list[Any]:
        return self._answer("send_backward_recv_forward", is_first_stage)


class Rank:
    """One stage with a model, whose operations are written down."""

    def __init__(self, stage: int, num_stages: int, *, forward_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[str] = []
        originals = (schedules.forward_step, schedules.backward_step)

        def forward(*args: Any, **kwargs: Any) -> Any:
            facts = {
                name: kwargs.get(name)
                for name in ("current_microbatch", "is_first_microbatch", "checkpoint_activations_microbatch")
            }
            self.notes.append(f"forward {facts}")
            return originals[0](*args, **kwargs)

        def backward(*args: Any) -> Any:
            self.notes.append("backward")
            return originals[1](*args)

        monkeypatch.setattr(schedules, "forward_step", forward)
        monkeypatch.setattr(schedules, "backward_step", backward)
        config = model_config(num_stages)
        config.num_microbatches_with_partial_activation_checkpoints = None
        model = Model(config)
        self.arguments = {
            "forward_step_func": lambda iterator, model: (model(torch.ones(())), self._loss), "data_iterator": None,
            "model": [model], "seq_length": 1, "micro_batch_size": 1, "forward_only": forward_only,
            "p2p_communicator": Link(stage, num_stages, self.notes),
            "pg_collection": schedules._build_default_pg_collection(),
        }  # fmt: skip

    @staticmethod
    def _loss(output: torch.Tensor) -> Any:
        return output.sum(), {}


class Given:
    """A queue whose work is all known."""

    def __init__(self, num: int) -> None:
        self._left = [Task(index, BUCKETS, 1, False) for index in range(num)]

    def next(self) -> Task | None:
        return self._left.pop(0) if self._left else None

    def has_ended(self) -> bool:
        return not self._left


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(("stage", "num_stages"), [(stage, num) for num in (2, 3, 4) for stage in range(num)])
def test_same_operations_as_upstreams_1f1b(
    stage: int, num_stages: int, forward_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for num in range(1, 10):
        with monkeypatch.context() as patch:
            theirs = Rank(stage, num_stages, forward_only=forward_only, monkeypatch=patch)
            schedules.forward_backward_pipelining_without_interleaving(**theirs.arguments, num_microbatches=num)
        with monkeypatch.context() as patch:
            ours = Rank(stage, num_stages, forward_only=forward_only, monkeypatch=patch)
            Stage(ours.arguments).run(Given(num))
        assert ours.notes == theirs.notes, f"{num} microbatches"


@pytest.mark.parametrize("forward_only", [False, True])
def test_same_steps_as_upstreams_without_a_pipeline(forward_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for num in range(1, 6):
        with monkeypatch.context() as patch:
            theirs = Rank(0, 1, forward_only=forward_only, monkeypatch=patch)
            arguments = {name: value for name, value in theirs.arguments.items() if name != "p2p_communicator"}
            schedules.forward_backward_no_pipelining(**arguments, num_microbatches=num)
        with monkeypatch.context() as patch:
            ours = Rank(0, 1, forward_only=forward_only, monkeypatch=patch)
            Stage(ours.arguments).run(Given(num))
        steps = [note for note in ours.notes if "send" not in note and "recv" not in note]
        assert steps == theirs.notes, f"{num} microbatches"


# --- The queue -------------------------------------------------------------------------------------------------------------


def plan(generation: int, *microbatches: int, work: Work | None = None) -> Plan:
    work = work or Work("train 1", 8, BUCKETS)
    computes = (Compute(microbatches, BUCKETS),) if microbatches else ()
    return Plan(0, generation, (0, 1), work, (4, 4), (), computes, BUCKETS)


class Stream:
    """A member whose stream of orders is given: plans, and None for `Close`."""

    def __init__(self, *orders: Plan | None) -> None:
        self._orders = list(orders)
        self.asked_after: list[int] = []
        self.handed_out = 0

    def more_work(self) -> Plan | None:
        assert self.asked_after, "nobody has asked for the end of the pass: this would wait for ever"
        return self._orders.pop(0)

    def end_pass(self) -> None:
        self.asked_after.append(self.handed_out)


def drain(queue: WorkQueue, member: Stream) -> list[int]:
    found = []
    while (task := queue.next()) is not None:
        member.handed_out += 1
        found.append(task.microbatch)
    assert queue.next() is None
    return found


def test_the_pass_ends_where_the_stream_says() -> None:
    member = Stream(None)
    assert drain(WorkQueue(member, plan(1, 0, 1, 2), again=False), member) == [0, 1, 2]
    assert member.asked_after == [2], "asked when the last one that is known is handed out, once"


def test_a_plan_before_the_end_extends_the_pass() -> None:
    member = Stream(plan(2, 5), plan(3), plan(4, 6, 7), None)
    extended: list[Plan] = []
    queue = WorkQueue(member, plan(1, 0, 1), again=False, extended=extended.append)
    assert drain(queue, member) == [0, 1, 5, 6, 7]
    assert member.asked_after == [1]
    assert queue.plan.generation == 4
    assert [each.generation for each in extended] == [2, 4], "a plan without work for this replica extends nothing"


def test_a_plan_for_something_else_is_refused() -> None:
    member = Stream(plan(2, 5, work=Work("train 2", 8, BUCKETS)))
    queue = WorkQueue(member, plan(1, 0), again=False)
    queue.next()
    with pytest.raises(RuntimeError, match="ordered to work on"):
        queue.next()
