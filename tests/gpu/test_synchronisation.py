"""A step waits for a real device no more often than for the pretended one, and asks whether it has finished."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator

import pytest
import torch

from megatron_recover.trainer.host_copy import HostCopy, to_device
from megatron_recover.trainer.in_work import InWork
from tests.megatron.synchronisation import LARGE, train

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("timed")]
LONG = 2_000_000_000
"""Cycles: about a second."""


@pytest.mark.finding("G11")
@pytest.mark.parametrize("determinism", ["fast", "exact"])
def test_a_step_makes_no_copy_or_read_that_waits(determinism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for two events at most, which torch does not warn of. `exact` reads the loss scale."""
    found: list[list[str]] = []
    synchronize, waited_for = torch.cuda.Event.synchronize, list[torch.cuda.Event]()

    def noted(event: torch.cuda.Event) -> None:
        if not event.query():
            waited_for.append(event)
        synchronize(event)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", noted)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        waited_for.clear()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                yield
            found.append([str(each.message) for each in said if "synchronizing" in str(each.message)])
        finally:
            torch.cuda.set_sync_debug_mode("default")

    train(lambda tensor: tensor.cuda(), LARGE, around, determinism=determinism)
    assert len(found[-1]) == (determinism == "exact"), found[-1]
    assert len(waited_for) <= 2


@pytest.mark.finding("G11")
@pytest.mark.parametrize("is_beside", [False, True], ids=["current stream", "another stream"])
def test_a_copy_to_the_host_comes_behind_the_kernels_and_does_not_wait(is_beside: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    flag = torch.tensor(True, device=device)
    stream = torch.cuda.Stream() if is_beside else torch.cuda.current_stream()
    for cycles in (0, LONG):  # the first time it may wait: kernels are loaded and memory is pinned
        tensor = torch.zeros(4, device=device)
        torch.cuda.synchronize()
        begun = time.monotonic()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            tensor += to_device(torch.arange(4.0), device)
            copy = HostCopy([tensor, flag])
        elapsed_s = time.monotonic() - begun
        has_arrived = copy.has_arrived()
        assert [each.tolist() for each in copy.tensors()] == [[0, 1, 2, 3], True]
        del copy  # or its pinned memory is not free in the next round, and new memory may wait for the device
    assert not has_arrived and elapsed_s < 0.25, "it has waited for the device"


@pytest.mark.finding("G18")
def test_a_microbatch_is_finished_when_the_device_has_finished_it() -> None:
    work, finished = InWork.on(torch.device("cuda", torch.cuda.current_device())), list[int]()
    torch.cuda._sleep(LONG)
    assert work.ended(3, lambda: finished.append(3)) == (3,) and not finished
    torch.cuda.synchronize()
    assert work.note_finished() == () and finished == [3]
