"""The host seldom waits for the device, however large the model and the step are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from megatron_recover.trainer.host_copy import HostCopy, to_device
from scripts import pretrain_gpt
from tests.megatron.loopback import LoopbackDriver
from tests.megatron.synchronisation import LARGE, SMALL, Size, train, waits_of_a_step
from tests.pretend_gpu import DEVICE, Event, pretended

MOST = 4
"""Waits a step, beside those of upstream."""


@pytest.mark.parametrize("determinism", ["fast", "exact"])
def test_waits_do_not_grow_with_buckets_microbatches_or_parameters(determinism: str) -> None:
    small, large = (waits_of_a_step(size, determinism=determinism) for size in (SMALL, LARGE))
    assert small == large and 0 < large.total() <= MOST, large


def test_a_digest_of_all_state_is_one_wait_more() -> None:
    without, due = (waits_of_a_step(SMALL, digests_state=digests) for digests in (False, True))
    assert due.total() == without.total() + 1 <= MOST


def test_the_loss_of_the_script_waits_for_nothing() -> None:
    """It is called in each microbatch. A loss that is not finite is found in the ledger (`LedgerSum.is_finite`)."""
    with pretended() as gpu:
        _, tokens, report = pretrain_gpt.loss_of(gpu.tensor(torch.tensor([1, 0])), gpu.tensor(torch.tensor([3.0, 5.0])))
        assert not gpu.waits
        assert (tokens.tolist(), report["lm loss"].tolist()) == (1, [3.0, 1.0])


def test_a_copy_to_the_host_is_asked_for_and_waited_for_once() -> None:
    """The pretended GPU sees each wait: without one the copy has not arrived, and every read that is not a copy is one."""
    with pretended() as gpu:
        flag, first = gpu.tensor(torch.tensor(True)), gpu.tensor(torch.arange(6.0).view(2, 3))
        copy = HostCopy([flag, first, torch.tensor([7])])
        assert gpu.order == ["copy on training", "event 1 on training"], "the event says nothing of the copy"
        assert not copy.has_arrived() and not gpu.waits
        tensors = copy.tensors()
        assert [each.tolist() for each in tensors] == [True, [[0, 1, 2], [3, 4, 5]], [7]] and gpu.num_waits == 1
        assert copy.has_arrived() and copy.tensors() == tensors and gpu.num_waits == 1
        reads = (
            lambda: float(sent[0]), lambda: sent.cpu(), lambda: bool((sent == 1).all()), lambda: sent[sent == 1],
            lambda: sent[[0, 1]], lambda: sent.unique(), lambda: sent.tolist(),
        )  # fmt: skip
        sent = to_device(torch.arange(3.0), DEVICE)
        assert sent.is_cuda and gpu.num_waits == 1
        for number, read in enumerate(reads, start=2):
            read()
            assert gpu.num_waits == number
        torch.arange(3.0).to(DEVICE)
        assert gpu.num_waits == len(reads) + 2
        pinned = {torch.arange(3.0).pin_memory().data_ptr()}
        assert not pinned & gpu.pinned, "memory that was given back counts as pinned"


def test_the_event_of_a_copy_is_on_the_stream_of_the_copy() -> None:
    """On another stream it has completed before the copy, and the host reads what was there before."""
    with pretended() as gpu:
        early, late = gpu.tensor(torch.ones(1)), gpu.tensor(torch.ones(2))
        with torch.cuda.stream(torch.cuda.Stream()):
            first = HostCopy([early])
        second, third = HostCopy([late]), HostCopy([late])
        assert gpu.order == ["copy on reduction", "event 1 on reduction", *["copy on training", "event 1 on training"]] + [
            "copy on training", "event 2 on training",
        ]  # fmt: skip
        second.wait()
        assert second.has_arrived() and not third.has_arrived() and not first.has_arrived()
        third.wait()
        second.tensors()
        assert gpu.num_waits == 2 and not first.has_arrived()


def test_a_microbatch_that_the_device_finishes_after_the_step_is_in_no_later_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal begins anew with each step, and ids come again."""
    is_behind = True
    steps, finished = iter(range(3)), list[tuple[int, int]]()
    monkeypatch.setattr(Event, "query", lambda event: not is_behind)
    monkeypatch.setattr(LoopbackDriver, "finished", lambda driver, microbatch: finished.append((step, microbatch)))

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        nonlocal step, is_behind
        step = next(steps)
        is_behind = step == 0
        yield

    step = 0
    with pretended() as gpu:
        train(gpu.tensor, Size(1, 2, 1), around)
    assert finished == [(1, 0), (1, 1), (2, 0), (2, 1)]
