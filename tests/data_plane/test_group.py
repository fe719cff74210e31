"""The stable group as torch sees it: collectives, DDP, DeviceMesh and HSDP over it, before and after its members change.

Every rank is a replica of its own: a process whose `torch.distributed` world is itself alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from megatron_recover.data_plane.group import FaultTolerantGroup
from megatron_recover.data_plane.transport import Endpoint, TransportError
from tests.control_plane.partners import within
from tests.data_plane.ranks import ranks

pytestmark = pytest.mark.timeout(240)
PATIENT = within(200.0)
"""The joiner waits for the others from the start, and their first use of DDP imports a lot."""


def make_group(endpoint: Endpoint, me: int, addresses: dict[int, str]) -> FaultTolerantGroup:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = FaultTolerantGroup(endpoint, me, name="replicas")
    group.grow(1, addresses)
    return group.register()


def collectives(group: FaultTolerantGroup, me: int) -> None:
    """Each supported collective once, against what it must give."""
    members = group.members
    total, position, size = float(sum(2**member for member in members)), members.index(me), len(members)
    assert (dist.get_rank(group), dist.get_world_size(group)) == (position, size)

    tensor = torch.full((7, 3), 2.0**me).t()  # not contiguous
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((3, 7), total))
    work = dist.all_reduce(counts := torch.tensor([2**me]), group=group, async_op=True)
    work.wait()
    assert counts.item() == int(total)
    mean = torch.tensor([2.0**me])
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
    assert mean.item() == pytest.approx(total / size)

    whole = torch.arange(4.0 * size) * 2.0**me
    part = torch.empty(4)
    dist.reduce_scatter_tensor(part, whole, group=group)
    assert torch.equal(part, torch.arange(4.0 * size)[4 * position : 4 * position + 4] * total)
    gathered = torch.empty(4 * size)
    dist.all_gather_into_tensor(gathered, part, group=group)
    assert torch.equal(gathered, torch.arange(4.0 * size) * total)
    pieces = [torch.empty(2) for _ in members]
    dist.all_gather(pieces, torch.full((2,), float(me)), group=group)
    assert [int(piece[0]) for piece in pieces] == list(members)

    sent = torch.tensor([float(me)])
    dist.broadcast(sent, group_src=size - 1, group=group)
    assert sent.item() == members[-1]
    dist.barrier(group=group)
    with dist._coalescing_manager(group=group):
        first, second = torch.ones(3), torch.full((2,), 2.0)
        dist.all_reduce(first, group=group)
        dist.all_reduce(second, group=group)
    assert (first[0].item(), second[0].item()) == (size, 2.0 * size)

    for target in (group, group.group_name):  # functional collectives reach C++ and come back through the trampoline
        summed = functional.all_reduce(torch.full((5,), 2.0**me), "sum", target)
        assert torch.equal(functional.wait_tensor(summed), torch.full((5,), total))
    for refused in (
        lambda: dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX, group=group),
        lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size), group=group),
        lambda: dist.send(torch.ones(1), group_dst=0, group=group),
    ):
        with pytest.raises(ValueError, match="fault-tolerant group|Invalid destination"):
            refused()


def swap_script(endpoint: Endpoint, me: int, addresses: dict[int, str], use: Callable[..., Callable[[], None]]) -> str:
    """`use` the group among 0, 1, 2; replica 1 dies: among 0, 2; replica 3 joins: among 0, 2, 3. The same objects each time."""
    if me == 3:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = FaultTolerantGroup(endpoint, me, name="replicas")
        group.grow(3, {replica: addresses[replica] for replica in (0, 2, 3)})
        group.register()
        use(group, me)()
        return "ok"
    group = make_group(endpoint, me, {replica: addresses[replica] for replica in (0, 1, 2)})
    again = use(group, me)
    again()
    if me == 1:
        return "ended"
    with pytest.raises(TransportError):
        gradient = torch.full((100_000,), 2.0**me)
        try:
            dist.all_reduce(gradient, group=group)  # replica 1 is gone, or never comes
        finally:
            assert torch.equal(gradient, torch.full((100_000,), 2.0**me)), "a failed reduction changed a gradient"
    group.revoke()
    group.shrink(2, [0, 2])
    again()
    group.grow(3, {3: addresses[3]})
    again()
    return "ok"


def end(endpoint: Endpoint, me: int) -> None:
    os._exit(0)


def use_collectives(group: FaultTolerantGroup, me: int) -> Callable[[], None]:
    return lambda: collectives(group, me)


def use_ddp(group: FaultTolerantGroup, me: int) -> Callable[[], None]:
    """torch's DDP, built once: C++ calls the group from inside backward. It divides by the size at that moment."""
    torch.manual_seed(me)
    if me == 3:  # a DDP object can not be built alone: it compares shapes and broadcasts weights at construction
        model: Any = torch.nn.Linear(4, 2, bias=False)

        def joiner() -> None:
            model(torch.full((1, 4), 2.0**me)).sum().backward()
            gradient = model.weight.grad / 3
            dist.all_reduce(gradient, group=group)
            torch.testing.assert_close(gradient, torch.full((2, 4), (1 + 4 + 8) / 3))

        return joiner
    model = DistributedDataParallel(torch.nn.Linear(4, 2, bias=False), process_group=group)
    weights = [torch.empty(2, 4) for _ in group.members]
    dist.all_gather(weights, model.module.weight.detach(), group=group)
    assert all(torch.equal(weight, weights[0]) for weight in weights), "DDP did not broadcast the weights"

    def again() -> None:
        model.zero_grad()
        model(torch.full((1, 4), 2.0**me)).sum().backward()
        total = float(sum(2**member for member in group.members))
        torch.testing.assert_close(model.module.weight.grad, torch.full((2, 4), total / len(group.members)))

    return again


def use_mesh(group: FaultTolerantGroup, me: int) -> Callable[[], None]:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("replicate",))
    assert mesh.size() == len(group.members) and mesh.get_group() is group
    assert mesh.get_local_rank() == group.members.index(me)
    return lambda: collectives(mesh.get_group(), me)


@pytest.mark.parametrize("use", [use_collectives, use_ddp, use_mesh], ids=["collectives", "ddp", "mesh"])
def test_one_group_object_before_and_after_members_change(use: Callable[..., Callable[[], None]]) -> None:
    with ranks("direct", 4, deadlines=PATIENT) as run:
        run.tell([0, 1, 2, 3], "call", swap_script, (run.addresses, use))
        assert run.receive(1) == "ended"
        run.tell([1], "call", end, ())
        assert [run.receive(rank) for rank in (0, 2, 3)] == ["ok"] * 3


def hsdp_script(endpoint: Endpoint, me: int, addresses: dict[int, str]) -> list[float]:
    """FSDP2 over a two-dimensional mesh: replicas over our group, shards over the replica's own world."""
    from torch.distributed.fsdp import fully_shard

    group = make_group(endpoint, me, addresses)
    world_size = len(addresses)
    mesh = DeviceMesh.from_group(
        [group, dist.group.WORLD],
        "cpu",
        mesh=torch.tensor([[rank] for rank in dist.get_process_group_ranks(group)]),
        mesh_dim_names=("replicate", "shard"),
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2, bias=False)
    fully_shard(model, mesh=mesh)
    model(torch.full((1, 4), 2.0**me)).sum().backward()
    gradient = model.weight.grad.full_tensor()
    assert torch.allclose(gradient, torch.full((2, 4), sum(2.0**member for member in group.members) / world_size))
    return gradient.flatten().tolist()


def test_fsdp2_replicates_over_the_group() -> None:
    with ranks("direct", 2, deadlines=PATIENT) as run:
        first, second = run.call(hsdp_script, run.addresses).values()
        assert first == second


def test_a_group_without_a_generation_or_with_a_wrong_roster_says_so() -> None:
    class Nothing:
        address = "nowhere"

        def open(self, *arguments: Any, **options: Any) -> Any:
            raise AssertionError("must not be reached")

        def close(self) -> None: ...

    group = FaultTolerantGroup(Nothing(), 0, name="lonely")
    assert (group.rank(), group.size(), group.generation) == (0, 1, 0)
    with pytest.raises(TransportError, match="no generation"):
        group.allreduce([torch.ones(1)])
    with pytest.raises(ValueError, match="knows the addresses"):
        group.shrink(1, [0, 5])
    with pytest.raises(ValueError, match="cannot form"):
        group.grow(1, {5: "elsewhere"})
