"""What a pass tells about each forward and backward, and what it keeps away from upstream's gradient synchronisation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules

from megatron_recover.megatron.schedule.passes import run_pass
from megatron_recover.trainer.work_queue import Task
from tests.megatron.test_pipeline import Given, Rank

pytestmark = pytest.mark.usefixtures("world")


class Notes:
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, int]] = []
        self.losses: dict[tuple[int, int], Any] = {}
        self.last: list[tuple[int, int]] = []

    def forward_begins(self, task: Task, chunk: int) -> None:
        self.lines.append(("f", task.microbatch, chunk))

    def forward_ended(self, task: Task, chunk: int, tokens: torch.Tensor, losses: Any) -> None:
        self.lines.append(("F", task.microbatch, chunk))
        self.losses[task.microbatch, chunk] = losses

    def backward_begins(self, task: Task, chunk: int, last: bool) -> None:
        self.lines.append(("b", task.microbatch, chunk))
        self.last += [(task.microbatch, chunk)] * last

    def backward_ended(self, task: Task, chunk: int) -> None:
        self.lines.append(("B", task.microbatch, chunk))

    def of(self, kind: str) -> list[tuple[int, int]]:
        return [(microbatch, chunk) for what, microbatch, chunk in self.lines if what == kind]


def told(ids: Sequence[int], *shape: int, divisor: int = 8, before: Any = None, **options: Any) -> tuple[Notes, list[int]]:
    """What a pass over these microbatches tells on a stage (stage, stages, chunks), and what losses are divided by."""
    notes, divisors = Notes(), []
    with pytest.MonkeyPatch.context() as patch:
        rank = Rank(*shape, monkeypatch=patch, **options)
        forward = schedules.forward_step
        patch.setattr(schedules, "forward_step", lambda *args, **kwargs: divisors.append(args[3]) or forward(*args, **kwargs))
        if before is not None:
            before(rank, notes)
        run_pass(rank.arguments, Given(0, ids) if ids else Given(0), divisor=divisor, listener=notes)
    return notes, divisors


def test_ids_divisor_and_losses() -> None:
    notes, divisors = told((5, 2), 0, 1, divisor=12)
    assert [line[:2] for line in notes.lines] == [(what, microbatch) for microbatch in (5, 2) for what in "fFbB"]
    assert divisors == [12, 12]
    assert notes.losses == {(5, 0): {}, (2, 0): {}} and notes.last == [(2, 0)]


@pytest.mark.parametrize("shape", [(0, 3), (2, 3), (0, 2, 2), (1, 2, 2)], ids=str)
def test_a_backward_belongs_to_its_forward(shape: tuple[int, ...]) -> None:
    ids, num_chunks = (7, 1, 3, 4), shape[2] if len(shape) > 2 else 1
    notes, _ = told(ids, *shape)
    for chunk in range(num_chunks):
        for kind in "fFbB":
            assert [microbatch for microbatch, of in notes.of(kind) if of == chunk] == list(ids)
    assert sorted(notes.last) == [(4, chunk) for chunk in range(num_chunks)]


def test_a_stage_without_a_loss_reports_none() -> None:
    notes, _ = told((5, 2), 0, 2)
    assert notes.losses == {(5, 0): None, (2, 0): None}


def test_no_ids_run_nothing() -> None:
    assert told((), 0, 1)[0].lines == []


@pytest.mark.parametrize("shape", [(0, 1), (1, 2), (0, 2, 2)], ids=str)
def test_an_evaluation_has_no_backwards(shape: tuple[int, ...]) -> None:
    notes, _ = told((4, 6), *shape, forward_only=True)
    assert {what for what, *_ in notes.lines} == {"f", "F"}


def test_no_gradient_is_synchronised_in_a_pass() -> None:
    inside: list[str] = []

    def watch(rank: Rank, notes: Notes) -> None:
        @contextlib.contextmanager
        def no_sync() -> Iterator[None]:
            inside.append(f"entered after {len(notes.lines)}")
            yield
            inside.append(f"left after {len(notes.lines)}")

        for model in rank.arguments["model"]:
            model.no_sync = no_sync

    told((0,), 0, 1, before=watch)
    assert inside == ["entered after 0", "left after 4"]
