"""NCCL with several ranks on one GPU: sums, the stable group, and the kill matrix.

NCCL refuses two ranks on one device of one host, so each rank claims to be a host of its own, and is told to use
sockets.
"""

from __future__ import annotations

import signal
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_recover.cluster.job import sharing_a_gpu
from megatron_recover.data_plane.group import FaultTolerantGroup
from megatron_recover.data_plane.transport import Endpoint
from megatron_recover.deadlines import NCCL_CONNECTS_S
from tests.data_plane.ranks import Fault, ranks
from tests.data_plane.survival import survive

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
MIB = 1 << 20


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_sums_over_generations(num_ranks: int, record_property: Callable[[str, object], None]) -> None:
    """Connecting is over in the time that a run leaves it, and `make gpu-test` prints how long it took."""
    with ranks("nccl", num_ranks, "cuda", sharing_a_gpu) as run:
        for generation in (1, 2):
            run.open(generation, range(num_ranks))
            for tag, size in enumerate((4, 1 << 10, 4 * MIB)):
                run.sums(range(num_ranks), size, tag)
                outcomes = run.outcomes(range(num_ranks))
                assert all(outcome.status == "done" and outcome.right for outcome in outcomes.values()), outcomes
                assert len({outcome.checksum for outcome in outcomes.values()}) == 1
                if tag == 0:
                    seconds = max(outcome.seconds for outcome in outcomes.values())
                    record_property(f"seconds to connect and sum 4 bytes in generation {generation}", f"{seconds:.2f}")
                    assert seconds < NCCL_CONNECTS_S


def retired(endpoint: Any, me: int) -> tuple[int, int]:
    """How many communicators of this rank are in doubt, and how many are kept because a job was linked to them."""
    retirement = endpoint._transport.__self__._retirement
    return retirement.num_in_doubt, len(retirement.kept)


@pytest.mark.finding("G3", "G4")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize("instant", ["before", "sent", "end"])
@pytest.mark.parametrize("size", [MIB // 4, 4 * MIB, 64 * MIB])
@pytest.mark.parametrize("members", [2, 3])
def test_survivors_go_on(
    members: int, size: int, instant: str, number: signal.Signals, record_property: Callable[[str, object], None]
) -> None:
    """As tests/data_plane/test_kill_matrix.py; the communicator is warm, since making one together needs everyone.

    No survivor may be in doubt of a communicator: the kernels of the failed sum have ended, and what they may write was
    given back only then (G3). Nothing here sees memory that is given back too early: tests/data_plane/test_nccl_logic.py.
    """
    seed = zlib.crc32(f"{members} {size} {instant} {number}".encode())
    print(f"seed {seed}")
    victim = Random(seed).randrange(members)
    with ranks("nccl", members, "cuda", sharing_a_gpu) as run:
        run.open(1, range(members))
        run.sums(range(members), 4096, 1)
        assert all(outcome.right for outcome in run.outcomes(range(members)).values())
        survive(run, range(members), victim, size, Fault(instant, number))
        survivors = [member for member in range(members) if member != victim]
        run.tell(survivors, "call", retired, ())
        found = [run.receive(survivor) for survivor in survivors]
        assert not any(in_doubt for in_doubt, _ in found), found
        if kept := sum(kept for _, kept in found):
            record_property("communicators kept", kept)


def one_device_each(rank: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": str(rank)}


@pytest.mark.finding("G16")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU; a peer over NVLink needs two")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize("instant", ["before", "sent", "end"])
@pytest.mark.parametrize("size", [4 * MIB, 256 * MIB])
def test_survivors_go_on_without_a_peer_whose_memory_they_read(size: int, instant: str, number: signal.Signals) -> None:
    """NCCL uses what connects the devices: over NVLink and PCIe a kernel reads the memory of the peer."""
    members = min(4, torch.cuda.device_count())
    with ranks("nccl", members, "cuda", one_device_each) as run:
        run.open(1, range(members))
        run.sums(range(members), 4096, 1)
        assert all(outcome.right for outcome in run.outcomes(range(members)).values())
        survive(run, range(members), members - 1, size, Fault(instant, number))


def group_script(endpoint: Endpoint, me: int, addresses: dict[int, str]) -> float:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = FaultTolerantGroup(endpoint, me, name="replicas", device="cuda")
    group.grow(1, addresses)
    group.register()
    tensor = torch.full((1000,), 2.0**me, device="cuda")
    dist.all_reduce(tensor, group=group)
    dist.broadcast(tensor, group_src=0, group=group)
    dist.barrier(group=group)
    return float(tensor.mean().item())


@pytest.mark.skipif(not hasattr(dist.distributed_c10d, "_register_pg_in_world"), reason="torch cannot register a group")
def test_the_group_over_nccl() -> None:
    with ranks("nccl", 2, "cuda", sharing_a_gpu) as run:
        assert run.call(group_script, run.addresses) == {0: 3.0, 1: 3.0}
