"""What a save in the background does with upstream's request, also where the host has no memory for the copy."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_recover.megatron.checkpoint.background import BackgroundSave, Planning, write_results
from megatron_recover.megatron.seams import seams
from megatron_recover.trainer.state_window import StateWindow


def request(written: list[Any], results: Any, tensor: torch.Tensor) -> SimpleNamespace:
    def write(rank: int, buckets: Any, found: Any) -> None:
        written.extend((path, item, each.tolist()) for path, _, (_, tensors) in buckets for item, each in tensors)
        found.put({0: ["result"]})

    buckets = [("path", "key", ([], [("item", tensor)]))]
    return SimpleNamespace(async_fn=write, async_fn_args=[0, buckets, results], async_fn_kwargs={}, finalize_fns=[])


def test_the_copy_is_written_and_upstream_gets_the_results() -> None:
    written, results, tensor = [], queue.SimpleQueue(), torch.ones(2)
    save = BackgroundSave(request(written, results, tensor), StateWindow())
    tensor.zero_()
    save.wait()
    assert save.is_written and not save.failure
    assert written == [("path", "item", [1, 1])] and results.get_nowait() == {0: ["result"]}


def test_the_thread_that_writes_works_on_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on device 0; its first call of CUDA would make a context there, in each rank of another device."""
    devices: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append((threading.current_thread().name, device)))
    written: list[Any] = []
    save = BackgroundSave(request(written, queue.SimpleQueue(), torch.ones(2)), StateWindow())
    save.wait()
    assert written and devices == [("checkpoint", 3)]


def test_without_memory_for_the_copy_the_save_has_failed_and_no_more() -> None:
    class Full(StateWindow):
        def copy(self, tensors: Any) -> Any:
            raise RuntimeError("CUDA error: out of memory")

    written: list[Any] = []
    save = BackgroundSave(request(written, queue.SimpleQueue(), torch.ones(2)), Full())
    save.wait()
    assert save.is_written and save.failure == "no copy of the state: RuntimeError: CUDA error: out of memory"
    assert written == []


def test_an_error_of_the_write_is_the_failure() -> None:
    def failing(rank: int, buckets: Any, found: Any) -> None:
        found.put(RuntimeError("a disk"))

    asked = request([], queue.SimpleQueue(), torch.ones(2))
    asked.async_fn = failing
    save = BackgroundSave(asked, StateWindow())
    save.wait()
    assert save.failure == "RuntimeError: a disk"


def test_only_a_save_of_torch_dcp_gets_what_completes_it_alone() -> None:
    plan = Planning(lambda state, **settings: (("writer", state, settings), "central plan", "local plan", False, False)).plan
    assert plan("state", planner=1) == (("writer", "state", {"planner": 1}), "central plan", "local plan", False, False)
    for caches in (False, True):
        assert plan("state", planner=1, enable_cache=caches) == ("writer", "state", {"planner": 1})


def test_each_save_has_a_queue_of_its_own_and_no_process_for_it() -> None:
    installation = seams.Installation([seam for seam in seams.load() if seam.name == "write_results"])
    installation.install({"write_results": write_results})
    try:
        failed, again = filesystem_async.get_write_results_queue(), filesystem_async.get_write_results_queue()
    finally:
        installation.remove()
    failed.put("what the save that failed has written")
    with pytest.raises(queue.Empty):
        again.get_nowait()
    assert not multiprocessing.active_children()
