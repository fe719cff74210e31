"""Rows that say themselves what is in them."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from megatron_recover.sim.timed.models import LEDGER_COLUMNS
from megatron_recover.trainer.ledger import Ledger, count_tokens, first_losses, read_losses
from tests.pretend_gpu import pretended


def report(value: float) -> dict[str, torch.Tensor]:
    return {"lm loss": torch.tensor([value, 7.0]), "aux": torch.tensor(value / 3, dtype=torch.float64)}


def test_the_simulators_ledger_is_as_large_as_this_one() -> None:
    assert Ledger(5).rows().shape == (5, LEDGER_COLUMNS)
    assert Ledger(5).rows().element_size() == 8


def test_a_replica_that_computed_nothing_reads_what_the_others_wrote() -> None:
    mine, theirs = Ledger(4), Ledger(4)
    for microbatch in (0, 3):
        mine.write(microbatch, torch.tensor(10), report(1.5 + microbatch))
        mine.add_seconds(microbatch, 0.25)
        mine.add_seconds(microbatch, 0.5)
    theirs.write(1, torch.tensor(11), report(0.1))
    theirs.write(2, torch.tensor(12, dtype=torch.int), {"other": torch.tensor([1e-30], dtype=torch.float32)})
    rows = mine.rows() + theirs.rows() + Ledger(4).rows()
    losses = read_losses(rows, rows)
    assert [set(each) for each in losses] == [{"lm loss", "aux"}, {"lm loss", "aux"}, {"other"}, {"lm loss", "aux"}]
    for microbatch, expected in ((0, report(1.5)), (1, report(0.1)), (3, report(4.5))):
        for key, value in expected.items():
            found = losses[microbatch][key]
            assert found.dtype == value.dtype and found.shape == value.shape and torch.equal(found, value)
    assert torch.equal(losses[2]["other"], torch.tensor([1e-30]))
    assert int(count_tokens(rows)) == 43 and count_tokens(rows).dtype == torch.int
    assert rows[:, 1].tolist() == [0.75, 0, 0, 0.75]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_losses_that_are_not_finite_are_known_without_a_wait_and_named(on_gpu: bool) -> None:
    with pretended() if on_gpu else contextlib.nullcontext() as gpu:
        place = gpu.tensor if gpu is not None else torch.Tensor.clone
        ledger = Ledger(4, place(torch.zeros(0)).device)
        for microbatch, losses in enumerate(({}, report(1.0), report(math.nan), report(math.inf))):
            ledger.write(microbatch, place(torch.tensor(1)), {key: place(value) for key, value in losses.items()})
            ledger.is_finite()
        assert gpu is None or set(gpu.waits) <= {"tensor"}, "only what is encoded once may wait"
        assert not ledger.is_finite() and ledger.not_finite() == (2, 3)
        again = {"lm loss": place(torch.ones(1)), "aux": place(torch.tensor(math.nan))}
        for microbatch in (2, 3):
            ledger.write(microbatch, place(torch.tensor(1)), again)
        assert bool(ledger.is_finite()) and ledger.not_finite() == (), "only the first loss is trained"


def test_a_report_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a long name.*report fewer"):
        Ledger(1).write(0, torch.tensor(1), {f"a long name {index}": torch.zeros(2) for index in range(20)})


def test_reports_of_all_ids_alike_are_read_without_looking_at_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows were taken apart in Python before: 8192 of them took 63 ms."""
    ledger = Ledger(500)
    for microbatch in range(500):
        ledger.write(microbatch, torch.tensor(1), report(microbatch))
    rows, taken, original = ledger.rows(), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: taken.append(self.numel()) or original(self))
    losses = read_losses(rows, rows)
    monkeypatch.undo()
    assert sum(taken) <= 2 * rows.shape[1]
    for microbatch in range(500):
        for key, value in report(microbatch).items():
            found = losses[microbatch][key]
            assert found.dtype == value.dtype and found.shape == value.shape and torch.equal(found, value)
    assert read_losses(rows[:0], rows[:0]) == []


def test_ids_that_report_nothing_have_empty_dictionaries_of_their_own() -> None:
    ledger = Ledger(2)
    for microbatch in range(2):
        ledger.write(microbatch, torch.tensor(1), {})
    first, second = read_losses(ledger.rows(), ledger.rows())
    assert first == second == {} and first is not second


def test_the_first_loss_of_all_ids_is_read_whatever_else_they_report() -> None:
    ledger = Ledger(3)
    for microbatch, others in enumerate(({"aux": torch.ones(1)}, {"other": torch.ones(1)}, {})):
        ledger.write(microbatch, torch.tensor(1), {"lm loss": torch.tensor([1.5 + microbatch, 7.0])} | others)
    assert first_losses(ledger.rows()).tolist() == [[1.5, 7.0], [2.5, 7.0], [3.5, 7.0]]
    assert first_losses(Ledger(0).rows()).shape == (0, 0)
    ledger = Ledger(2)
    ledger.write(0, torch.tensor(1), {"lm loss": torch.tensor(1.0)})
    ledger.write(1, torch.tensor(1), {"other": torch.tensor(1.0)})
    with pytest.raises(KeyError):
        first_losses(ledger.rows())
    ledger.write(0, torch.tensor(1), {})
    assert first_losses(ledger.rows()).shape == (2, 0)
