"""What a pass tells about each forward and backward, and what it keeps away from upstream's schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_recover.megatron.pipeline import Queue
from megatron_recover.megatron.schedule import Schedule
from megatron_recover.megatron.work_queue import Task


class Notes:
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, int]] = []
        self.losses: dict[int, Any] = {}

    def forward_begins(self, task: Task, chunk: int) -> None:
        self.lines.append(("F", task.microbatch, chunk))

    def forward_ended(self, task: Task, chunk: int, tokens: torch.Tensor, losses: Any) -> None:
        self.losses[task.microbatch] = losses

    def backward_begins(self, task: Task, chunk: int, last: bool) -> None:
        self.lines.append(("b", task.microbatch, chunk))

    def backward_ended(self, task: Task, chunk: int) -> None:
        self.lines.append(("B", task.microbatch, chunk))


class Given:
    """A queue whose microbatches are known."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self._left = [Task(microbatch, (), 1, False) for microbatch in ids]

    def prepare(self) -> None: ...

    def next(self) -> Task | None:
        return self._left.pop(0) if self._left else None

    def has_ended(self) -> bool:
        return not self._left


class Upstream:
    """Stands for Megatron: its two step functions, and schedules that call them through the seams."""

    def __init__(self) -> None:
        self.divisors: list[int] = []
        self.seen: list[Any] = []
        self.schedule = Schedule(self._forward, self._backward)
        self.config = SimpleNamespace(
            no_sync_func="theirs", grad_sync_func="theirs", finalize_model_grads_func=self._finalize, timers=None,
        )  # fmt: skip
        self.finalized = 0
        self.reports = True

    def _finalize(self, *_: Any, **__: Any) -> None:
        self.finalized += 1

    def _forward(
        self, func: Any, iterator: Any, model: Any, num: int, received: Any, store: list[Any], *_: Any, **__: Any
    ) -> Any:
        self.divisors.append(num)
        if self.reports:
            store.append({"loss": torch.tensor(float(len(self.divisors)))})
        return torch.zeros(1), torch.tensor(2)

    def _backward(self, received: Any, output: Any, gradient: Any, config: Any) -> None:
        self.seen.append(output)

    def one_after_the_other(self, *, num_microbatches: int, config: Any, **_: Any) -> None:
        assert config.no_sync_func is None and config.grad_sync_func is None
        store: list[Any] = ["what an earlier call left"]
        for _ in range(num_microbatches):
            output, _ = self.schedule.forward_step(None, None, None, num_microbatches, None, store, config, 1)
            self.schedule.backward_step(None, output, None, config)
        config.finalize_model_grads_func([None], None)

    def warmed_up(self, *, num_microbatches: int, config: Any, **_: Any) -> None:
        """All forwards first, like a first stage."""
        outputs = [
            self.schedule.forward_step(None, None, None, num_microbatches, None, [], config, 1)[0]
            for _ in range(num_microbatches)
        ]
        for output in outputs:
            self.schedule.backward_step(None, [output], None, config)

    def in_wrong_order(self, *, num_microbatches: int, config: Any, **_: Any) -> None:
        outputs = [
            self.schedule.forward_step(None, None, None, num_microbatches, None, [], config, 1)[0]
            for _ in range(num_microbatches)
        ]
        for output in reversed(outputs):
            self.schedule.backward_step(None, output, None, config)

    def forwards_only(self, *, num_microbatches: int, config: Any, **_: Any) -> None:
        for _ in range(num_microbatches):
            self.schedule.forward_step(None, None, None, num_microbatches, None, [], config, 1)

    def too_few(self, *, num_microbatches: int, config: Any, **_: Any) -> None:
        self.one_after_the_other(num_microbatches=num_microbatches - 1, config=config)

    def run(self, schedule: Callable[..., Any], arguments: dict[str, Any], ids: tuple[int, ...], **others: Any) -> None:
        """A pass whose operations come in the order of `schedule`."""

        class Stage:
            def __init__(self, steps: Any) -> None: ...

            def run(self, queue: Queue) -> None:
                num = 0
                while queue.next() is not None:
                    num += 1
                if num:
                    schedule(**{**arguments, "num_microbatches": num})

        steps = mock.Mock(return_value=SimpleNamespace(num_chunks=1))
        with mock.patch.multiple("megatron_recover.megatron.schedule", Stage=Stage, Steps=steps):
            self.schedule.run_pass(arguments, Given(ids), **others)

    def arguments(self) -> dict[str, Any]:
        model = SimpleNamespace(config=self.config)
        return {"model": [model], "config": self.config, "num_microbatches": 99}


def test_ids_divisor_and_losses() -> None:
    upstream, notes = Upstream(), Notes()
    upstream.run(upstream.one_after_the_other, upstream.arguments(), (5, 2), divisor=12, listener=notes)
    assert notes.lines == [("F", 5, 0), ("b", 5, 0), ("B", 5, 0), ("F", 2, 0), ("b", 2, 0), ("B", 2, 0)]
    assert upstream.divisors == [12, 12]
    assert {microbatch: float(losses["loss"]) for microbatch, losses in notes.losses.items()} == {5: 1.0, 2: 2.0}


def test_a_backward_belongs_to_its_forward() -> None:
    upstream, notes = Upstream(), Notes()
    upstream.run(upstream.warmed_up, upstream.arguments(), (7, 1, 3), divisor=8, listener=notes)
    assert [line[:2] for line in notes.lines if line[0] != "b"] == [("F", 7), ("F", 1), ("F", 3), ("B", 7), ("B", 1), ("B", 3)]


def test_synchronisation_is_upstreams_again_after_a_pass() -> None:
    upstream = Upstream()
    upstream.run(upstream.one_after_the_other, upstream.arguments(), (0,), divisor=8, listener=Notes())
    assert upstream.finalized == 0
    assert upstream.config.no_sync_func == upstream.config.grad_sync_func == "theirs"
    assert upstream.config.finalize_model_grads_func == upstream._finalize


def test_no_gradient_is_synchronised_in_a_pass() -> None:
    upstream, inside = Upstream(), []

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        inside.append("entered")
        yield
        inside.append("left")

    def schedule(**arguments: Any) -> None:
        inside.append("schedule")
        upstream.one_after_the_other(**arguments)

    arguments = upstream.arguments()
    arguments["model"][0].no_sync = no_sync
    upstream.run(schedule, arguments, (0,), divisor=8, listener=Notes())
    assert inside == ["entered", "schedule", "left"]


def test_a_stage_without_a_loss_reports_none() -> None:
    upstream, notes = Upstream(), Notes()
    upstream.reports = False
    upstream.run(upstream.one_after_the_other, upstream.arguments(), (5, 2), divisor=8, listener=notes)
    assert notes.losses == {5: None, 2: None}


def test_no_ids_run_nothing() -> None:
    upstream = Upstream()
    upstream.run(lambda **_: pytest.fail("called"), upstream.arguments(), (), divisor=8, listener=Notes())


def test_outside_of_a_pass_the_seams_are_upstreams_functions() -> None:
    upstream = Upstream()
    upstream.warmed_up(num_microbatches=3, config=upstream.config)
    assert upstream.divisors == [3, 3, 3] and len(upstream.seen) == 3


@pytest.mark.parametrize("wrong", ["in_wrong_order", "too_few", "forwards_only"])
def test_a_schedule_that_does_something_else_is_refused(wrong: str) -> None:
    upstream = Upstream()
    with pytest.raises(RuntimeError, match="microbatch"):
        upstream.run(getattr(upstream, wrong), upstream.arguments(), (4, 6), divisor=8, listener=Notes())
    upstream.divisors.clear()
    upstream.warmed_up(num_microbatches=3, config=upstream.config)
    assert upstream.divisors == [3, 3, 3], "a pass that failed is still taken for running"


def test_an_evaluation_has_no_backwards() -> None:
    upstream = Upstream()
    arguments = upstream.arguments() | {"forward_only": True}
    upstream.run(upstream.forwards_only, arguments, (4, 6), divisor=8, listener=Notes())
