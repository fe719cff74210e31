"""`--numa-binding`: a rank runs on the CPUs near its GPU, as torch's own function finds them, or the job is refused."""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Callable

import pytest
import torch
from torch.numa import binding

from megatron_recover.config import RankContext
from megatron_recover.megatron.launch import numa

INDEX = "_get_numa_node_index_for_gpu_index" if hasattr(binding, "_get_numa_node_index_for_gpu_index") else (
    "_get_numa_node_index_for_device_index"
)  # fmt: skip


def context(*, gpu: int = 0, dry_run: bool = False, mode: str | None = "node") -> RankContext:
    return RankContext(
        replica=1, rank=0, num_ranks=1, num_replicas=3, coordinator="", leader="", run_dir="", started_at=0.0,
        gpu=gpu, numa_binding=mode, dry_run=dry_run,
    )  # fmt: skip


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two GPUs, with the NUMA node of each; this machine has the node 0."""
    nodes = [0, 0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(nodes))
    monkeypatch.setattr(binding, INDEX, lambda **index: nodes[next(iter(index.values()))])
    return nodes


def in_child(work: Callable[[], None]) -> tuple[list[set[int]], str]:
    """Return the CPUs of two threads of a child after `work` in one of them, and what that raised."""
    ours, theirs = os.pipe()
    if not (pid := os.fork()):
        error, cpus, idle = "", [], threading.Event()
        other = threading.Thread(target=idle.wait, daemon=True)
        other.start()
        try:
            work()
        except BaseException as raised:
            error = repr(raised)
        cpus = [os.sched_getaffinity(thread) for thread in (0, other.native_id)]
        os.write(theirs, repr((cpus, error)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(theirs)
    with open(ours, "rb") as told:
        found: tuple[list[set[int]], str] = ast.literal_eval(told.read().decode())
    return found


def test_all_threads_of_a_rank_run_on_the_cpus_that_torch_names(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    near = {0: {min(allowed)}, 1: {max(allowed)}}
    monkeypatch.setattr(
        binding, "_get_allowed_logical_cpu_indices_for_numa_node", lambda *, numa_node_index: near[numa_node_index]
    )
    gpus[1] = 1
    for gpu in range(2):
        assert in_child(lambda gpu=gpu: numa.bind(context(gpu=gpu))) == ([near[gpu]] * 2, "")
    assert in_child(lambda: numa.bind(context(mode=None))) == ([allowed] * 2, ""), "without the flag nothing is bound"
    assert in_child(lambda: numa.bind(context(dry_run=True))) == ([allowed] * 2, ""), "the dry run is no rank"


def test_the_dry_run_names_the_cpus_for_all_gpus(gpus: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    """By torch's own look at this machine's node 0."""
    numa.bind(context(dry_run=True))
    number = len(os.sched_getaffinity(0))
    line = f"for the console: ranks run on the CPUs near their GPUs (node): {number} for GPU 0, {number} for GPU 1\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize(
    ("node", "mode", "why"),
    [
        (77, "node", "Could not determine CPUs"),
        (None, "socket", "torch sees no GPU"),
        (0, "nearby", "not a valid AffinityMode"),
    ],
)
def test_what_torch_cannot_tell_is_refused_with_the_remedy(
    node: int | None, mode: str, why: str, gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if node is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    else:
        gpus[1] = node
    with pytest.raises(
        ValueError, match=f"--numa-binding is {mode}, but torch .*GPU [01] .*{why}.*; leave it out, or start"
    ) as it:
        numa.bind(context(dry_run=True, mode=mode))
    assert "\n" not in str(it.value)


def test_a_machine_of_which_the_launcher_may_use_no_near_cpu_is_refused(
    gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "_get_cpu_indices_for_numa_node_MAYBE_NOT_ALLOWED", lambda *, numa_node_index: {100_000})
    with pytest.raises(ValueError, match="the launcher may use none of them"):
        numa.bind(context())
