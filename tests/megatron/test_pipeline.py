"""Our 1F1B against upstream's: the same forwards, backwards, sends and receives in the same order, for every stage."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection

from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.values import Compute, Work
from megatron_recover.megatron.schedule.interleaved import InterleavedStage
from megatron_recover.megatron.schedule.pipeline import MegatronPass, Stage
from megatron_recover.trainer.work_queue import Task, WorkQueue
from tests.megatron.toy import Stage as Model
from tests.megatron.toy import model_config

BUCKETS = (0, 1)
TOLD = ("current_microbatch", "is_first_microbatch", "checkpoint_activations_microbatch", "vp_stage", "is_last_stage")
"""What upstream's schedule tells its forward step."""
SHAPE = [1, 1, 8]
"""Of a message between chunks."""


pytestmark = pytest.mark.usefixtures("world")


class Handle:
    """An operation that is on its way: before `wait` what is received is not there, and what is sent may not go."""

    def __init__(self, received: torch.Tensor | None = None, sent: torch.Tensor | None = None) -> None:
        self._received, self._sent, self.waited = received, sent, False
        self._data = None if sent is None else sent.data_ptr()

    def wait(self) -> None:
        self.waited = True
        assert self._sent is None or self._sent.data_ptr() == self._data, "freed before it was sent"
        if self._received is not None:
            self._received.data.zero_()


class Link:
    """A stage's `P2PCommunicator` to nobody: writes down what is sent and received, and gives something to compute with."""

    def __init__(self, stage: int, num_stages: int, num_chunks: int, notes: list[str]) -> None:
        self.current_stage, self.total_stages = stage, num_stages
        self.is_pp_first_stage, self.is_pp_last_stage = stage == 0, stage == num_stages - 1
        self.virtual_pipeline_model_parallel_size = num_chunks if num_chunks > 1 else None
        self.pp_group = SimpleNamespace(rank=lambda: stage, size=lambda: num_stages)
        self.config = None
        self.sends: dict[str, list[Handle]] = {"send_next": [], "send_prev": []}
        self._notes = notes

    def _answer(self, name: str, nothing: bool) -> Any:
        if not nothing:
            self._notes.append(name)
        return None if nothing else torch.zeros(1, requires_grad=True)

    def recv_forward(self, shapes: Any, is_first_stage: bool) -> Any:
        answer = self._answer("recv_forward", is_first_stage)
        return answer if shapes == SHAPE else [answer]

    def recv_backward(self, shapes: Any, is_last_stage: bool) -> Any:
        answer = self._answer("recv_backward", is_last_stage)
        return answer if shapes == SHAPE else [answer]

    def send_forward(self, tensors: Any, is_last_stage: bool) -> None:
        self._answer("send_forward", is_last_stage)

    def send_backward(self, tensors: Any, is_first_stage: bool) -> None:
        self._answer("send_backward", is_first_stage)

    def send_forward_recv_backward(self, tensors: Any, shapes: Any, is_last_stage: bool) -> list[Any]:
        return [self._answer("send_forward_recv_backward", is_last_stage)]

    def send_backward_recv_forward(self, tensors: Any, shapes: Any, is_first_stage: bool) -> list[Any]:
        return [self._answer("send_backward_recv_forward", is_first_stage)]

    def send_forward_recv_forward(self, output: Any, recv_prev: bool, tensor_shape: Any, overlap_p2p_comm: bool = False) -> Any:
        return self._both("forward", output, "send_next", "recv_prev" * recv_prev, overlap_p2p_comm)

    def send_backward_recv_backward(
        self, input_tensor_grad: Any, recv_next: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        return self._both("backward", input_tensor_grad, "send_prev", "recv_next" * recv_next, overlap_p2p_comm)

    def _both(self, way: str, sent: torch.Tensor | None, sends: str, receives: str, overlap: bool) -> Any:
        sends *= sent is not None
        if sends or receives:
            self._notes.append(f"{way} {sends} {receives} overlap={overlap}")
        received = torch.full((1,), math.nan if overlap else 0.0, requires_grad=True) if receives else None
        if not overlap:
            return received
        handles = {receives: Handle(received=received)} if receives else {}
        if sends:
            handles[sends] = Handle(sent=sent)
            assert all(handle.waited for handle in self.sends[sends][:-1]), "three sends on their way"
            self.sends[sends].append(handles[sends])
        return received, handles


class Rank:
    """One stage with a model, whose operations are written down."""

    def __init__(
        self, stage: int, num_stages: int, num_chunks: int = 1, *, monkeypatch: pytest.MonkeyPatch, forward_only: bool = False,
        group_size: int | None = None, partial: int | None = None, deallocate: bool = False,
    ) -> None:  # fmt: skip
        self.notes: list[str] = []
        self.released: list[Any] = []
        """Outputs that were given up. With several chunks that is when they were sent, which upstream notices elsewhere."""
        originals = (schedules.forward_step, schedules.backward_step, schedules.deallocate_output_tensor)

        def forward(*args: Any, **kwargs: Any) -> Any:
            received = args[4][0] if isinstance(args[4], list) else args[4]
            assert received is None or received.isfinite().all(), "used before it was received"
            told = {name: ({"is_last_stage": True} | kwargs).get(name) for name in TOLD}
            self.notes.append(f"forward {told}")
            return originals[0](*args, **kwargs)

        def backward(received: Any, output: Any, gradient: Any, config: Any) -> Any:
            given = gradient[0] if isinstance(gradient, list) else gradient
            assert given is None or given.isfinite().all(), "used before it was received"
            self.notes.append("backward")
            return originals[1](received, output, gradient, config)

        def release(output: Any, deallocate: bool) -> None:
            if deallocate and num_chunks == 1:
                self.notes.append("release")
            if deallocate and output is not None and not any(each is output for each in self.released):
                self.released.append(output)
            originals[2](output, deallocate)

        monkeypatch.setattr(schedules, "deallocate_output_tensor", release)
        monkeypatch.setattr(schedules, "forward_step", forward)
        monkeypatch.setattr(schedules, "backward_step", backward)
        virtual = {} if num_chunks == 1 else {
            "virtual_pipeline_model_parallel_size": num_chunks, "overlap_p2p_comm": True, "batch_p2p_comm": False,
            "microbatch_group_size_per_vp_stage": group_size,
        }  # fmt: skip
        config = model_config(num_stages, num_layers=num_stages * num_chunks, deallocate_pipeline_outputs=deallocate, **virtual)
        config.num_microbatches_with_partial_activation_checkpoints = partial
        model = Model(config)
        self.link = Link(stage, num_stages, num_chunks, self.notes)
        self.arguments = {
            "forward_step_func": lambda iterator, model, recompute=None: (model(torch.ones(())) * 1, self._loss),
            "data_iterator": [None] * num_chunks, "model": [model] * num_chunks, "seq_length": SHAPE[0], "micro_batch_size": 1,
            "forward_only": forward_only, "p2p_communicator": self.link,
            "pg_collection": schedules._build_default_pg_collection(),
        }  # fmt: skip

    @staticmethod
    def _loss(output: torch.Tensor) -> Any:
        return output.sum(), {}


class Silent:
    """A listener that nobody asks."""

    def forward_begins(self, task: Task, chunk: int) -> None: ...
    def forward_ended(self, task: Task, chunk: int, tokens: torch.Tensor, losses: Any) -> None: ...
    def backward_begins(self, task: Task, chunk: int, last: bool) -> None: ...
    def backward_ended(self, task: Task, chunk: int) -> None: ...


class Given:
    """A queue whose work is all known."""

    def __init__(self, num: int, ids: Sequence[int] | None = None) -> None:
        """`ids`: of the microbatches; 0, 1, ... unless given."""
        self._left = [Task(microbatch, BUCKETS, 1) for microbatch in ids or range(num)]

    def prepare(self) -> None: ...

    def next(self) -> Task | None:
        return self._left.pop(0) if self._left else None

    def has_ended(self) -> bool:
        return not self._left


def operations(run: Callable[[Rank], object], *args: Any, **kwargs: Any) -> list[str]:
    """What a rank does when `run` runs a schedule on it."""
    with pytest.MonkeyPatch.context() as patch:
        rank = Rank(*args, monkeypatch=patch, **kwargs)
        run(rank)
    return [*rank.notes, f"{len(rank.released)} released"]


def ours(num: int) -> Callable[[Rank], object]:
    def run(rank: Rank) -> None:
        upstream = MegatronPass(rank.arguments, divisor=num, listener=Silent())
        (Stage if upstream.num_chunks == 1 else InterleavedStage)(upstream, Given(num)).run()
        assert all(handle.waited for handles in rank.link.sends.values() for handle in handles), "a send was forgotten"

    return run


def upstreams(schedule: Callable[..., Any], num: int) -> Callable[[Rank], object]:
    return lambda rank: schedule(**rank.arguments, num_microbatches=num)


@pytest.mark.parametrize(
    "options", [{}, {"forward_only": True}, {"partial": 1}, {"forward_only": True, "partial": 1}, {"deallocate": True}], ids=str
)
@pytest.mark.parametrize(("stage", "num_stages"), [(stage, num) for num in (2, 3, 4) for stage in range(num)])
def test_same_operations_as_upstreams_1f1b(stage: int, num_stages: int, options: dict[str, Any]) -> None:
    theirs, rank = schedules.forward_backward_pipelining_without_interleaving, (stage, num_stages)
    for num in range(1, 10):
        expected = operations(upstreams(theirs, num), *rank, **options)
        assert operations(ours(num), *rank, **options) == expected, f"{num} microbatches"


@pytest.mark.parametrize("forward_only", [False, True])
def test_same_steps_as_upstreams_without_a_pipeline(forward_only: bool) -> None:
    def theirs(rank: Rank) -> None:
        arguments = {name: value for name, value in rank.arguments.items() if name != "p2p_communicator"}
        schedules.forward_backward_no_pipelining(**arguments, num_microbatches=num)

    for num in range(1, 6):
        expected = operations(theirs, 0, 1, forward_only=forward_only)
        assert operations(ours(num), 0, 1, forward_only=forward_only) == expected, f"{num} microbatches"


@pytest.mark.parametrize(
    ("options", "quotas"),
    [
        ({}, "1 2 3 4 5"),
        ({"forward_only": True}, "1 2 3"),
        ({"partial": 2}, "1 3"),
        ({"forward_only": True, "partial": 2}, "1 3"),
        ({"deallocate": True}, "3"),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_chunks", [2, 3])
@pytest.mark.parametrize(("stage", "num_stages"), [(stage, num) for num in (2, 3, 4) for stage in range(num)])
def test_same_operations_as_upstreams_interleaved(
    stage: int, num_stages: int, num_chunks: int, options: dict[str, Any], quotas: str
) -> None:
    theirs, rank = schedules.forward_backward_pipelining_with_interleaving, (stage, num_stages, num_chunks)
    for num in (int(groups) * num_stages for groups in quotas.split()):
        expected = operations(upstreams(theirs, num), *rank, **options)
        assert operations(ours(num), *rank, **options) == expected, f"{num} microbatches"


@pytest.mark.parametrize(("stage", "num_stages"), [(stage, num) for num in (2, 3) for stage in range(num)])
def test_same_operations_as_upstreams_with_larger_groups(stage: int, num_stages: int) -> None:
    """Upstream takes a last group that is smaller, as long as the stages have enough to do."""
    theirs, rank = schedules.forward_backward_pipelining_with_interleaving, (stage, num_stages, 2)
    for num in (5, 10, 5 + num_stages, 9, 14):
        expected = operations(upstreams(theirs, num), *rank, group_size=5)
        assert operations(ours(num), *rank, group_size=5) == expected, f"{num} microbatches"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_last_group_that_is_smaller_leaves_out_what_it_lacks(num_stages: int) -> None:
    """Of the operations for a full group; both ends of a message alike, which tests/megatron/test_commit.py would see hang."""
    for num in (each for each in range(1, 2 * num_stages) if each % num_stages):
        full = num + -num % num_stages
        for stage in range(num_stages):
            rank = (stage, num_stages, 2)
            found, of_full = operations(ours(num), *rank), operations(ours(full), *rank)
            lacking = [note for note in of_full if any(f"'current_microbatch': {each}," in note for each in range(num, full))]
            forwards = [note for note in of_full if note.startswith("forward {") and note not in lacking]
            assert [note for note in found if note.startswith("forward {")] == forwards
            assert found.count("backward") == 2 * num
            for words in (("send_next",), ("recv_prev", "recv_forward"), ("send_prev",), ("recv_next", "recv_backward")):
                counts = [sum(any(word in note for word in words) for note in notes) for notes in (found, of_full)]
                assert counts[0] * full == counts[1] * num, words


class Watched(Given):
    """Notes how many forwards are done when it is told that `next` is near, and when `next` is called."""

    def __init__(self, num: int, notes: list[str]) -> None:
        super().__init__(num)
        self._notes, self.prepared, self.asked = notes, [], []

    def _num_forwards(self) -> int:
        return sum(note.startswith("forward {") for note in self._notes)

    def prepare(self) -> None:
        self.prepared.append(self._num_forwards())

    def next(self) -> Task | None:
        self.asked.append(self._num_forwards())
        return super().next()


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(("num_stages", "num_chunks"), [(1, 1), (2, 1), (4, 1), (2, 2), (3, 2), (2, 3)])
def test_the_queue_is_asked_as_late_as_can_be(num_stages: int, num_chunks: int, forward_only: bool) -> None:
    """For the next microbatch when all forwards before its first one are done; asked to prepare one forward earlier."""
    num = 3 * num_stages
    sums = [group * num_stages * num_chunks + member for group in range(4) for member in range(num_stages)]
    for stage in range(num_stages):

        def run(rank: Rank) -> None:
            upstream = MegatronPass(rank.arguments, divisor=num, listener=Silent())
            queue = Watched(num, rank.notes)
            (Stage if num_chunks == 1 else InterleavedStage)(upstream, queue).run()
            first_forwards = sums[: num + 1]
            assert queue.asked == first_forwards
            assert queue.prepared == [forward - 1 for forward in first_forwards[1:]]

        operations(run, stage, num_stages, num_chunks, forward_only=forward_only)


class Unsure(Given):
    """Knows only that there is none left when it was asked for one in vain: `Close` comes no sooner."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self._told = False

    def next(self) -> Task | None:
        task = super().next()
        self._told = task is None
        return task

    def has_ended(self) -> bool:
        return self._told


def lasts(queue: Given, num: int, stage: int, num_stages: int, num_chunks: int) -> dict[int, list[bool]]:
    """For each chunk, whether its backwards were told that they are the last, in their order."""
    told: dict[int, list[bool]] = defaultdict(list)

    class Listening(Silent):
        def backward_begins(self, task: Task, chunk: int, last: bool) -> None:
            assert not last or queue.has_ended()
            told[chunk].append(last)

    def run(rank: Rank) -> None:
        upstream = MegatronPass(rank.arguments, divisor=num, listener=Listening())
        (Stage if num_chunks == 1 else InterleavedStage)(upstream, queue).run()

    operations(run, stage, num_stages, num_chunks)
    return told


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(1, 1), (2, 1), (4, 1), (2, 2), (3, 2), (2, 3)])
def test_no_backward_is_the_last_before_the_pass_is_closed(num_stages: int, num_chunks: int) -> None:
    """Else a bucket would be reduced that lacks what is dealt until then. If it is closed in time, each chunk has its last."""
    for stage, num in itertools.product(range(num_stages), (num_stages, 2 * num_stages, 2 * num_stages + 1)):
        unsure = lasts(Unsure(num), num, stage, num_stages, num_chunks)
        assert [len(told) for told in unsure.values()] == [num] * num_chunks
        assert all(sum(told) <= 1 for told in unsure.values())
        sure = lasts(Given(num), num, stage, num_stages, num_chunks)
        assert list(sure.values()) == [[False] * (num - 1) + [True]] * num_chunks


def test_a_pipeline_of_unlike_modules_is_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        rank = Rank(0, 2, monkeypatch=patch)
    with pytest.raises(ValueError, match="unlike modules .* is not supported"):
        arguments = rank.arguments | {"pg_collection": MultiModuleProcessGroupCollection({"language": None})}
        MegatronPass(arguments, divisor=1, listener=Silent())


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
        self.arrived = 0
        """Orders that are here before they are waited for."""

    def more_work(self) -> Plan | None:
        assert self.asked_after or self.arrived, "nobody has asked for the end of the pass: this would wait for ever"
        self.arrived = max(0, self.arrived - 1)
        return self._orders.pop(0)

    def has_order(self) -> bool:
        return self.arrived > 0

    def ask_close(self) -> None:
        self.asked_after = self.asked_after or [self.handed_out]  # as the rank's machine: once in a pass


def drain(queue: WorkQueue, driver: Stream) -> list[int]:
    found = []
    while (task := queue.next()) is not None:
        driver.handed_out += 1
        found.append(task.microbatch)
        queue.prepare()
    assert queue.next() is None
    return found


def test_the_pass_ends_where_the_stream_says() -> None:
    driver = Stream(None)
    assert drain(WorkQueue(driver, plan(1, 0, 1, 2)), driver) == [0, 1, 2]
    assert driver.asked_after == [3], "asked when the last one that is known was handed out, once"


def test_a_plan_before_the_end_extends_the_pass() -> None:
    driver = Stream(plan(2, 5), plan(3), plan(4, 6, 7), None)
    extended: list[Plan] = []
    queue = WorkQueue(driver, plan(1, 0, 1), extended.append)
    assert drain(queue, driver) == [0, 1, 5, 6, 7]
    assert driver.asked_after == [2]
    assert queue.plan.generation == 4
    assert [each.generation for each in extended] == [2, 4], "a plan without work for this replica extends nothing"


def test_nobody_asks_for_the_end_while_more_is_known() -> None:
    driver = Stream(plan(2, 5, 6), plan(3, 7), None)
    driver.arrived = 1
    assert drain(WorkQueue(driver, plan(1, 0, 1)), driver) == [0, 1, 5, 6, 7]
    assert driver.asked_after == [4], "the plan that was there was taken in first, and what comes meanwhile still is"


def test_a_plan_for_something_else_is_refused() -> None:
    driver = Stream(plan(2, 5, work=Work("train 2", 8, BUCKETS)))
    queue = WorkQueue(driver, plan(1, 0))
    queue.next()
    queue.prepare()
    with pytest.raises(RuntimeError, match="ordered to work on"):
        queue.next()
