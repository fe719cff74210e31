"""A stable `ProcessGroup` for torch to hold, over a transport that each generation replaces.

Training does not use it, and takes its transports from `RankDriver.transport`. It is for code that
needs a torch process group over all replicas.

A native process group can neither shrink nor change its rank. Code that caches a group (Megatron's
DDP, buffers and optimizers; torch's DDP, DeviceMesh and FSDP2) keeps it for life. So the object
stays, and only the transport inside is replaced. The verbs are those of MPI's fault tolerance
(ULFM):

revoke
    Retire the current transport. Until a newer generation each collective raises, on any thread,
    also a pending one unless its last transfer is complete.
agree
    Not a method of the group. The coordinator decides the members of the next generation; their
    status exchange and vote (`core/replica.py`) decide what becomes of a step. The caller then
    applies the decision with `shrink` or `grow`.
shrink, grow
    Enter a generation with fewer or more members, without waiting for peers. They connect in the
    first collective; with gloo at once, in a thread of the transport.

Every collective works on scratch and writes its tensors only after success, either all of them or
none. A failed collective raises inside the call. So does one with `async_op=True`, whose work is
already complete when it is returned.

Collectives: all_reduce, reduce_scatter_tensor (both SUM and AVG), all_gather,
all_gather_into_tensor, broadcast, barrier, and the coalesced forms of all_reduce and of the two
that end in `_tensor`; all others are refused. AVG divides by the current number of members, so it
refuses integers, and its meaning changes with the membership. Prefer to sum gradients and divide
them by a count of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d

from megatron_recover.data_plane.transport import Endpoint, Revoked, Transport

if TYPE_CHECKING:
    from torch import Tensor

BACKEND = "fault_tolerant"


class FaultTolerantGroup(dist.ProcessGroup):
    """The same-position ranks of all replicas as a `torch.distributed` group.

    Group ranks follow ascending replica ids. One thread at a time uses the group; only `revoke` is
    thread-safe. The endpoint's `Deadlines` bound the calls.
    """

    def __init__(self, endpoint: Endpoint, me: int, *, name: str, device: str = "cpu") -> None:
        """Make a group that has no generation yet: see `grow`.

        `me` is this replica's id. `name` must be unique in this process. `device` is that of the
        barrier's tensor.
        """
        super().__init__(0, 1)
        self._endpoint = endpoint
        self._me = me
        self._transport: Transport | None = None
        self._addresses: dict[int, str] = {}
        self._num_calls = 0
        self._name = name
        self._device = device

    # --- the verbs --------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The current transport's generation; 0 before the first."""
        return 0 if self._transport is None else self._transport.generation

    @property
    def members(self) -> tuple[int, ...]:
        """Replica ids of the current generation, ascending. Positions are group ranks.

        Before the first generation only this replica is a member.
        """
        return (self._me,) if self._transport is None else self._transport.members

    def revoke(self) -> None:
        """Make collectives raise `Revoked` until a newer generation, also a pending one.

        A pending collective whose last transfer is complete still writes its tensors and returns.
        """
        if self._transport is not None:
            self._transport.revoke()

    def shrink(self, generation: int, members: Iterable[int]) -> None:
        """Enter `generation`, which consists of `members`.

        Raises ValueError if the address of a member is unknown or if this replica is not a member,
        and what `Endpoint.open` raises.
        """
        self._enter(generation, set(members))

    def grow(self, generation: int, addresses: Mapping[int, str]) -> None:
        """Enter `generation`: the current members and those at `addresses`.

        `addresses` maps a replica id to the address of its endpoint. For the first generation it
        must include this replica's own address. Raises as `shrink` does.
        """
        self._addresses.update(addresses)
        members = set(self._transport.members) if self._transport is not None else set()
        self._enter(generation, members | set(addresses))

    def _enter(self, generation: int, members: set[int]) -> None:
        if self._me not in members or not members <= set(self._addresses):
            known = sorted(self._addresses)
            raise ValueError(f"replica {self._me} cannot form a group of {sorted(members)}; it knows the addresses of {known}")
        addresses = {member: self._addresses[member] for member in sorted(members)}
        self._transport = self._endpoint.open(generation, self._me, addresses)
        self._num_calls = 0
        if self in distributed_c10d._world.pg_map:
            distributed_c10d._world.pg_group_ranks[self] = rank_map(self)

    def close(self) -> None:
        """Revoke the transport and unregister the group from torch.

        The caller closes the endpoint.
        """
        self.revoke()
        if self in distributed_c10d._world.pg_map:
            dist.destroy_process_group(self)

    def shutdown(self) -> None:
        """Revoke; `destroy_process_group` calls this method."""
        self.revoke()

    def abort(self) -> None:
        """Revoke; `abort` is torch's name for it."""
        self.revoke()

    # --- what torch asks of a group ---------------------------------------------------------------

    def rank(self) -> int:
        return self.members.index(self._me)

    def size(self) -> int:
        return len(self.members)

    def getRank(self) -> int:  # noqa: N802 - the name by which C++ callers ask
        return self.rank()

    def getSize(self) -> int:  # noqa: N802
        return self.size()

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        results = self._sum(tensors, getattr(opts, "reduceOp", dist.ReduceOp.SUM))
        return _replace(tensors, results)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce whole inputs and keep one part. This moves as many bytes as an all-reduce."""
        results = self._sum(inputs, getattr(opts, "reduceOp", dist.ReduceOp.SUM))
        return _replace(outputs, [_chunks(result, self.size())[self.rank()] for result in results])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        gathered = [torch.empty(output.numel(), dtype=output.dtype, device=output.device) for output in outputs]
        parts = [_chunks(part, self.size()) for part in gathered]
        for mine, own in zip(parts, inputs, strict=True):
            mine[self.rank()].copy_(own.detach().reshape(-1))
        for position, member in enumerate(self.members):
            self._copy([chunks[position] for chunks in parts], member)
        return _replace(outputs, gathered)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:  # noqa: A002
        return self.all_gather_single_coalesced([output], [input], opts)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        (targets,), (own,) = outputs, inputs
        gathered = own.new_empty(own.numel() * self.size())
        self.all_gather_single(gathered, own)
        return _replace(targets, gathered.chunk(self.size()), outputs)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Broadcast from group rank `opts.rootRank`.

        Call it with `group_src=`: a global rank means different members on different replicas.
        """
        copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        self._copy(copies, self.members[getattr(opts, "rootRank", 0)])
        return _replace(tensors, copies)

    def barrier(self, opts: Any = None) -> dist.Work:
        self._sum([torch.ones(1, device=self._device)], dist.ReduceOp.SUM)
        return _work([])

    # Names of the same methods before torch 2.13.
    _reduce_scatter_base = reduce_scatter_single
    _allgather_base = all_gather_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _refuse(self, *arguments: Any, **options: Any) -> NoReturn:
        raise ValueError(
            "a fault-tolerant group does all_reduce, reduce_scatter_tensor, all_gather(_into_tensor), broadcast and barrier; "
            "run any other collective on a group inside the replica"
        )

    send = recv = recv_anysource = gather = scatter = reduce = reduce_scatter = _refuse
    alltoall = alltoall_base = all_to_all_single = allgather_coalesced = _refuse
    monitored_barrier = split_group = merge_remote_group = _refuse

    # --- on the transport -------------------------------------------------------------------------

    def _sum(self, tensors: Sequence[Tensor], op: Any) -> list[Tensor]:
        average = op == dist.ReduceOp.AVG  # in this order: the enumeration's own == does not know the C++ type
        if not average and not op == dist.ReduceOp.SUM:  # noqa: SIM201
            raise ValueError(f"a fault-tolerant group reduces by SUM or AVG, not by {op}")
        sources = [tensor.detach().contiguous() for tensor in tensors]
        results = [torch.empty_like(source) for source in sources]
        self._current().sum_into(sources, results, tag=self._next_tag())
        if average:
            for result in results:
                result.div_(self.size())
        return results

    def _copy(self, tensors: Sequence[Tensor], source: int) -> None:
        targets = [member for member in self.members if member != source]
        tag = self._next_tag()
        self._current().copy_into(tensors, source=source, targets=targets, tag=tag)

    def _current(self) -> Transport:
        if self._transport is None:
            raise Revoked("the group has no generation yet; grow it")
        return self._transport

    def _next_tag(self) -> int:
        self._num_calls += 1
        return self._num_calls

    def register(self) -> Self:
        """Register the group with torch, without any communication; see `register_group`."""
        register_group(self)
        return self


def register_group(group: FaultTolerantGroup) -> None:
    """Enter `group` in torch's registries: by object, by name, and its ranks.

    Code then finds it as `group=` or by name (functional collectives). The default group (the
    replica's own world) must exist. Registration relies on a private function of torch; raises
    ValueError in a torch without it.
    """
    register = getattr(distributed_c10d, "_register_pg_in_world", None)
    if register is None:
        raise ValueError(f"torch {torch.__version__} cannot register a process group locally; use torch 2.13")
    group._set_group_name(group.group_name)
    register(
        group,
        backend_name=BACKEND,
        store=dist.HashStore(),
        group_name=group.group_name,
        backend_config=str(dist.distributed_c10d.BackendConfig(dist.Backend("gloo"))),
        rank_mapping=rank_map(group),
    )


def rank_map(group: FaultTolerantGroup) -> dict[int, int]:
    """Return the map from global rank to group rank, in the order of group ranks.

    This rank keeps its own global rank. The others live in other worlds, where their global ranks
    mean other processes here. They get numbers beyond this world's size. Such numbers serve for
    counting and for DeviceMesh; of all collectives only this group's `broadcast` accepts them.
    """
    world_size = dist.get_world_size()
    return {
        dist.get_rank() if position == group.rank() else world_size + member: position
        for position, member in enumerate(group.members)
    }


def _chunks(tensor: Tensor, num_chunks: int) -> list[Tensor]:
    """Split a contiguous tensor into equal flat views. Raises ValueError if it does not divide."""
    flat = tensor.view(-1)
    if flat.numel() % num_chunks:
        raise ValueError(f"{flat.numel()} elements do not divide among {num_chunks} members")
    return list(flat.split(max(1, flat.numel() // num_chunks)) if flat.numel() else [flat] * num_chunks)


def _replace(targets: Sequence[Tensor], results: Sequence[Tensor], value: Any = None) -> dist.Work:
    with torch.no_grad():
        for target, result in zip(targets, results, strict=True):
            target.copy_(result.view(target.shape))
    return _work(list(targets) if value is None else value)


def _work(value: Any) -> dist.Work:
    """Return a completed work."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return _create_work_from_future(future)
