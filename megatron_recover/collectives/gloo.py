"""Gloo as a data plane that is never trusted to let go: abandon, do not abort.

Nothing ends a blocked gloo call (its `abort` does nothing, and far ring neighbours of a dead member wait for the timeout), so
no caller ever blocks in one. Each generation has one thread of its own: it builds the process group, runs the collectives on
scratch, and at the end destroys the group. The caller waits for that thread or leaves it behind: after a revoke the thread
owns all that gloo may still write to, and ends when gloo lets go, no later than gloo's own timeout. The caller copies scratch
to results itself, and only if nothing revoked the call before. That copy is what out of place costs here.

Rendezvous: each endpoint serves a small store; a generation meets in that of its lowest member, under a prefix used once. It is
no single point of failure: it is needed while a group is being built, and without its owner that generation is over anyway.

Gloo adds in the order of its ring: the same bits on all members of a generation, but not in ascending order of replica id, and
bf16 is rounded after each addition. Gloo's own sockets can not be closed in forked children. Prefer `direct`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOp

from megatron_recover.collectives.transport import (
    DeadlineExceeded,
    Probe,
    Revoked,
    TransportError,
    check_operands,
    no_probe,
)

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = 2.0
"""Gloo's own timeout in deadlines: how long an abandoned operation may live on."""


class GlooEndpoint:
    """A rank's rendezvous store. Address: ``host:port``."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._store: TCPStore | None = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._host = host
        self.address = f"{host}:{self._store.port}"
        self._generation = 0
        self._current: GlooTransport | None = None

    def open(self, generation: int, me: int, addresses: Mapping[int, str], *, deadline_s: float) -> GlooTransport:
        """The transport of `generation`; retires the previous one. Building begins at once, in the transport's thread.

        `deadline_s` is the longest that a call of this transport will wait. Raises Revoked unless `generation` is newer than
        all that were opened before.
        """
        if self._store is None or generation <= self._generation:
            reason = "the endpoint is closed" if self._store is None else f"it is in generation {self._generation}"
            raise Revoked(f"cannot open generation {generation}: {reason}")
        if self._current is not None:
            self._current.close()
        self._generation = generation
        self._current = GlooTransport(generation, me, addresses, host=self._host, deadline_s=deadline_s)
        return self._current

    def close(self) -> None:
        """Stop serving rendezvous and retire the current transport."""
        if self._current is not None:
            self._current.close()
        self._store = None


class GlooTransport:
    """One generation among `addresses`; its thread outlives it if gloo does not let go."""

    def __init__(self, generation: int, me: int, addresses: Mapping[int, str], *, host: str, deadline_s: float) -> None:
        self.generation = generation
        self.members = tuple(sorted(addresses))
        self.me = me
        self._shared = _Shared(threading.Condition())
        if len(self.members) > 1:
            rank, size = self.members.index(me), len(self.members)
            timeout = timedelta(seconds=PATIENCE * deadline_s)
            meeting = addresses[self.members[0]]

            def build() -> ProcessGroupGloo:
                # A client of its own, also in the process that serves: an abandoned builder holds its client's lock.
                store = _join(meeting, timeout)
                options = ProcessGroupGloo._Options()
                options._timeout = timeout
                options._devices = [ProcessGroupGloo.create_device(hostname=host)]
                return ProcessGroupGloo(PrefixStore(f"generation-{generation}", store), rank, size, options)

            # A daemon, so that an operation that gloo does not let go cannot keep the process from ending.
            name = f"gloo-generation-{generation}"
            self.thread = threading.Thread(target=_serve, args=(self._shared, build), name=name, daemon=True)
            self.thread.start()

    def sum_into(
        self, sources: Sequence[Tensor], results: Sequence[Tensor], *, tag: int, deadline_s: float, probe: Probe | None = None
    ) -> None:
        """See `Transport.sum_into`, except for the order of additions (above). `deadline_s` bounds the whole call."""
        check_operands(sources, results, device="cpu")
        probe = probe or no_probe
        self._check()
        probe("begin")
        if len(self.members) == 1:
            summed: Sequence[Tensor] = sources
            probe("sent")
        else:
            summed = [source.detach().clone() for source in sources]
            options = AllreduceOptions()
            options.reduceOp = ReduceOp.SUM

            def reduce(group: ProcessGroupGloo) -> None:
                for work in [group.allreduce([scratch], options) for scratch in summed if scratch.numel()]:
                    work.wait()

            self._do(reduce, deadline_s, lambda: probe("sent"))
        probe("middle")
        for scratch, result in zip(summed, results, strict=True):
            result.copy_(scratch.view_as(result))
        probe("end")

    def copy_into(self, tensors: Sequence[Tensor], *, source: int, targets: Sequence[int], tag: int, deadline_s: float) -> None:
        """See `Transport.copy_into`. `deadline_s` bounds the whole call."""
        check_operands(tensors, device="cpu")
        if not {source, *targets} <= set(self.members):
            raise ValueError(f"copy from {source} to {list(targets)}, but the members are {list(self.members)}")
        self._check()
        if self.me == source:
            flat = [tensor.detach().view(-1) for tensor in tensors if tensor.numel()]
            ranks = [self.members.index(target) for target in targets if target != source]

            def send(group: ProcessGroupGloo) -> None:
                for work in [group.send([tensor], rank, index) for rank in ranks for index, tensor in enumerate(flat)]:
                    work.wait()

            if ranks:
                self._do(send, deadline_s)
        elif self.me in targets:
            scratch = [torch.empty_like(tensor.detach().view(-1)) for tensor in tensors]
            rank = self.members.index(source)

            def receive(group: ProcessGroupGloo) -> None:
                for work in [group.recv([part], rank, index) for index, part in enumerate(p for p in scratch if p.numel())]:
                    work.wait()

            self._do(receive, deadline_s)
            for part, tensor in zip(scratch, tensors, strict=True):
                tensor.detach().view(-1).copy_(part)

    def revoke(self) -> None:
        """See `Transport.revoke`. The thread is left to itself; a blocked operation is made to fail where gloo allows it."""
        with self._shared.changed:
            first, self._shared.revoked = not self._shared.revoked, True
            group = self._shared.group if self._shared.job is not None else None
            self._shared.changed.notify_all()
        if first and group is not None:
            threading.Thread(target=_poison, args=(group,), name="gloo-poison", daemon=True).start()

    def close(self) -> None:
        """See `Transport.close`. Gloo's resources are released by the transport's thread, later if it is still blocked."""
        self.revoke()

    def _check(self) -> None:
        if self._shared.revoked:
            raise Revoked(f"generation {self.generation} was revoked")
        if self._shared.failure:
            raise TransportError(f"generation {self.generation} is broken: {self._shared.failure}")

    def _do(self, job: Callable[[ProcessGroupGloo], None], deadline_s: float, begun: Callable[[], None] | None = None) -> None:
        """Have the thread run `job`, and wait for it or leave."""
        shared = self._shared
        with shared.changed:
            shared.job = job
            shared.changed.notify_all()
        if begun is not None:
            begun()
        with shared.changed:
            shared.changed.wait_for(lambda: shared.job is None or shared.revoked or bool(shared.failure), deadline_s)
            self._check()
            if shared.job is not None:
                shared.failure = f"waited {deadline_s:g} s"
                raise DeadlineExceeded([member for member in self.members if member != self.me], deadline_s)


class _Shared:
    """What a transport and its thread have in common, all under `changed`."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed = changed
        self.group: ProcessGroupGloo | None = None
        self.job: Callable[[ProcessGroupGloo], None] | None = None
        """Handed in by the caller; None again when it is done."""
        self.failure = ""
        self.revoked = False


def _serve(shared: _Shared, build: Callable[[], ProcessGroupGloo]) -> None:
    """A generation's thread: builder, worker, and in the end the one that waits for gloo to let go."""
    try:
        group = build()
        with shared.changed:
            shared.group = group
        while True:
            with shared.changed:
                shared.changed.wait_for(lambda: shared.job is not None or shared.revoked)
                job = shared.job
                if job is None or shared.revoked:
                    break
            job(group)
            with shared.changed:
                shared.job = None
                shared.changed.notify_all()
    except RuntimeError as error:  # gloo's and the store's errors; the caller raises it as a TransportError
        with shared.changed:
            shared.failure = shared.failure or f"gloo: {str(error).splitlines()[0]}"
            shared.changed.notify_all()
            shared.changed.wait_for(lambda: shared.revoked)
    with shared.changed:
        shared.group = shared.job = None


def _join(address: str, timeout: timedelta) -> Store:
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


def _poison(group: ProcessGroupGloo) -> None:
    """Make blocked operations fail: a point-to-point wait that times out closes all connections of a gloo group.

    Without it an abandoned operation keeps its scratch until gloo's timeout; with it mostly some milliseconds.
    """
    with contextlib.suppress(RuntimeError):  # the timeout is the point
        group.recv_anysource([torch.empty(1)], 1 << 20).wait(timedelta(milliseconds=1))
