"""The thread that carries out plans where passes may overlap: on a pretended GPU, with a backward that is made by hand."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_recover.trainer import result_summary
from megatron_recover.trainer.checksum import Checksums
from megatron_recover.trainer.overlap import Overlap
from megatron_recover.trainer.reducing_thread import ReducingThread
from megatron_recover.trainer.reduction import Reduction
from megatron_recover.trainer.work_queue import Task
from tests.pretend_gpu import Gpu, pretended
from tests.trainer.test_reducing import EVERYTHING, Driver, begun, compute, plan

DEADLINE_S = 30.0
NAME = "recover-reduce"


class Watch:
    """Makes the buffers of a reduction ones whose backward can be watched; `passed` stands for the hooks."""

    def __init__(self, reduction: Reduction) -> None:
        self.passed: Callable[[int], None] = lambda bucket: None
        buffers: Any = reduction._gradients
        buffers.can_watch, buffers.watch, buffers.end_watch = True, self._begin, lambda: None

    def _begin(self, chunk: int, passed: Callable[[int], None]) -> None:
        self.passed = passed


def backward(
    reduction: Reduction, watch: Watch, overlap: Overlap, between: Callable[[int], object] = lambda bucket: None
) -> None:
    """The last backward of a pass, of microbatch 1; `between` is called when it has passed a bucket."""
    overlap.last_backward_begins(Task(1, EVERYTHING, 1), 0)
    for bucket in (0, 1):
        reduction._gradients.regions[0].local[6 * bucket : 6 * bucket + 6] += 2.0
        watch.passed(bucket)
        between(bucket)
    reduction.end_backward(1, 0, EVERYTHING)
    reduction.count_ledger(1)


@pytest.fixture
def watched() -> Iterator[tuple[Gpu, Reduction, Driver, Watch]]:
    """A reduction on a pretended GPU in which microbatch 0 is computed."""
    with pretended() as gpu:
        reduction, driver = begun((0,), gpu=gpu)
        yield gpu, reduction, driver, Watch(reduction)


def test_each_sum_is_behind_the_kernels_that_write_its_gradient(watched: tuple[Gpu, Reduction, Driver, Watch]) -> None:
    """Without one of the waits a sum reads, or the optimizer uses, what is not there yet."""
    gpu, reduction, driver, watch = watched
    begun_sums = [threading.Event() for _ in EVERYTHING]
    original = driver.open.sum_into

    def sum_into(*args: Any, **kwargs: Any) -> None:
        bucket = sum(each.is_set() for each in begun_sums)
        gpu.order.append(f"sum {bucket}")
        original(*args, **kwargs)
        begun_sums[bucket].set()

    driver.open.sum_into = sum_into  # type: ignore[method-assign]

    def between(bucket: int) -> None:
        gpu.order.append(f"passed {bucket}")
        assert begun_sums[bucket].wait(DEADLINE_S), "nothing is reduced beside the backward"

    overlap = Overlap(reduction, plan)
    gpu.order.clear()
    with overlap:
        backward(reduction, watch, overlap, between)
        overlap.finish(lambda: gpu.order.append("noted"))
    seen = [each for each in gpu.order if not each.endswith(" on reduction")]
    waits = [each for each in seen if not each.startswith(("passed", "copy"))]
    assert waits == [
        "reduction waits for training",
        "event 1 on training", "reduction waits for event 1 on training", "sum 0",
        "event 2 on training", "reduction waits for event 2 on training", "sum 1",
        "event 3 on training", "reduction waits for event 3 on training", "sum 2",
        "noted", "training waits for reduction",
    ]  # fmt: skip
    assert [each for each in seen if each.startswith(("passed", "sum"))] == ["passed 0", "sum 0", "passed 1", "sum 1", "sum 2"]
    assert [held.bucket for held in driver.held] == [0, 1, 2]
    reduction.apply(EVERYTHING)
    assert reduction._gradients.regions[0].local.tolist() == [3.0] * 12


def test_no_reduction_beside_a_backward_is_the_first_of_its_thread(
    watched: tuple[Gpu, Reduction, Driver, Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first product of a thread makes torch allocate on the device. A plan without a pass has the same thread."""
    _, reduction, driver, watch = watched
    summed: list[threading.Thread] = []

    def checksums(tensors: Any) -> Checksums:
        summed.append(threading.current_thread())
        return Checksums(tensors)

    monkeypatch.setattr(result_summary, "Checksums", checksums)
    driver.overlap_refusal = lambda generation, operands: "" if summed else "nothing was summed"  # type: ignore[method-assign]
    for step in (3, 4):
        overlap = Overlap(reduction, plan)
        with overlap:
            backward(reduction, watch, overlap)
            assert (overlap._started is not None) == (step == 4)
            overlap.finish()
        reduction.reduce(plan())
        reduction.begin(step + 1, 2)
        compute(reduction, (0,))
    assert len(summed) == 12 and {each.name for each in summed} == {NAME} and len(set(summed)) == 1


def test_the_thread_is_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread is on device 0, where each rank of the machine would get a context."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    thread = ReducingThread(torch.device("cuda", 3))
    for _ in range(2):
        thread.begin(lambda: None).result(DEADLINE_S)
    assert devices == [torch.device("cuda", 3)]
    ReducingThread(torch.device("cpu")).begin(lambda: None).result(DEADLINE_S)
    assert len(devices) == 1


def test_what_a_plan_raises_is_raised_to_who_waits_and_ends_no_thread() -> None:
    thread, seen = ReducingThread(torch.device("cpu")), list[threading.Thread]()

    def fail() -> None:
        seen.append(threading.current_thread())
        raise SystemExit(3)

    failed, done = thread.begin(fail), thread.begin(lambda: seen.append(threading.current_thread()))
    with pytest.raises(SystemExit):
        failed.result(DEADLINE_S)
    done.result(DEADLINE_S)
    assert seen[0] is seen[1] and seen[0].name == NAME and seen[0].daemon, "the end of the process would wait for it"


def test_the_thread_ends_with_its_reduction() -> None:
    reduction, _ = begun()
    watch, seen = Watch(reduction), list[threading.Thread]()
    reduction._thread.begin(lambda: seen.append(threading.current_thread())).result(DEADLINE_S)
    reduction.reduce(plan())
    assert seen[0].is_alive()
    del reduction, watch
    gc.collect()
    seen[0].join(DEADLINE_S)
    assert not seen[0].is_alive()
