"""Gloo as a data plane that is never trusted to let go: abandon, do not abort.

Nothing ends a blocked gloo call (its `abort` does nothing, and far ring neighbours of a dead member wait for the timeout), so
no caller ever blocks in one. Each generation has one thread of its own: it builds the process group, runs the collectives on
scratch, and at the end destroys the group. The caller waits for that thread or leaves it behind: after a revoke the thread
owns all that gloo may still write to, and ends when gloo lets go, no later than gloo's own timeout. The caller copies scratch
to results itself, piece by piece (`writing.py`), so `revoke` returns when no result is written any more. That copy is what out
of place costs here.

Rendezvous: gloo wants a store; it gets one that swaps the members' entries over a `direct` transport of the same generation. So
forming a group has that transport's fences and is ended by a revoke, and no member serves the others. (A TCPStore has neither,
and looks up each peer's name at every connection: with a name server that drops a packet, 5 s in the middle of a recovery.)
That store lives only while the group is built, so gloo connects then also where `TORCH_GLOO_LAZY_INIT` asks for the first sum.
Transfers go over the same sockets: a wait for gloo's send or receive that ends early would close all connections of the group.

Note [Pieces of a sum]. Gloo does not tell a sum that is slow from one that stalls: an operation reports nothing until it is
done. So a large sum is many operations, one for each piece of at most `PIECE_BYTES`, in the same order on all members, and
`sum_s` bounds the time without a finished piece, not the whole sum. At most `PIECES_AT_ONCE` are given to gloo at a time. So
small sums are submitted at once as a whole, and what is left behind by a revoke is these pieces and not the rest of the sum.

Gloo adds in the order of its ring: the same bits on all members of a generation, but not in ascending order of replica id, and
bf16 is rounded after each addition. Gloo's own sockets can not be closed in forked children. Prefer `direct`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch
from torch.distributed import ProcessGroupGloo, Store, Work
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOp

from megatron_recover.data_plane.direct import DirectTransport
from megatron_recover.data_plane.transport import (
    DeadlineExceeded,
    Part,
    Probe,
    Revoked,
    TransportError,
    check_operands,
    no_probe,
)
from megatron_recover.data_plane.writing import WriteGate
from megatron_recover.deadlines import Deadlines

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = 2.0
"""Gloo's own timeout in units of `slowest_s`: how long an abandoned operation may live on."""
_POISON_S = 0.001
"""The wait of a receive that is meant to run out."""
COPIED_ELEMENTS = 1 << 20
"""Of scratch, copied to a result between two looks at whether the transport was revoked."""
PIECE_BYTES = 1 << 20
"""Summed by one operation of gloo, at most, or one element. See Note [Pieces of a sum]."""
PIECES_AT_ONCE = 16
"""Operations that gloo is given before the first of them is waited for."""
ENTRY_BYTES = 1024
"""Room for what gloo swaps at rendezvous (178 bytes in torch 2.13) and its length."""


class GlooTransport:
    """One generation; its thread outlives it if gloo does not let go."""

    def __init__(
        self,
        direct: DirectTransport,
        deadlines: Deadlines,
        *,
        host: str,
        unreachable: Callable[[], tuple[int, ...]] = lambda: (),
    ) -> None:
        """Building begins at once, in the transport's thread. `deadlines`: how long the parts of a call may last.

        `unreachable()` returns the members that do not answer a probe: gloo's ring stalls on all members alike.
        """
        self.generation = direct.generation
        self.members = direct.members
        self.me = direct.me
        self._direct, self._deadlines = direct, deadlines
        self._unreachable = unreachable
        self._shared = _Shared(threading.Condition())
        self._writing = WriteGate()
        if len(self.members) > 1:

            def build() -> ProcessGroupGloo:
                options = ProcessGroupGloo._Options()
                options._timeout = timedelta(seconds=PATIENCE * deadlines.slowest_s)
                options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
                meeting = _Meeting(direct, self._met)
                try:
                    return ProcessGroupGloo(meeting, self.members.index(self.me), len(self.members), options)
                except RuntimeError:
                    if meeting.error is not None:  # says who did not come, which gloo's own error does not
                        raise meeting.error from None
                    raise

            # A daemon, so that an operation that gloo does not let go cannot keep the process from ending.
            name = f"gloo-generation-{self.generation}"
            self.thread = threading.Thread(target=_serve, args=(self._shared, build), name=name, daemon=True)
            self.thread.start()

    def sum_into(self, sources: Sequence[Tensor], results: Sequence[Tensor], *, tag: int, probe: Probe | None = None) -> None:
        """See `Transport.sum_into`, except for the order of additions (above).

        A ring does not tell a member that is late from a link that is broken. So the members meet first, by a sum of one byte
        over `direct`, and gloo's part begins when all of them are there.
        """
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
                running = deque[Work]()
                for piece in _pieces(summed):
                    if len(running) == PIECES_AT_ONCE:
                        running.popleft().wait()
                        self._shared.progress()
                    running.append(group.allreduce([piece], options))
                while running:
                    running.popleft().wait()
                    self._shared.progress()

            self._connect()
            self._direct.sum_into([torch.ones(1, dtype=torch.uint8)], [torch.empty(1, dtype=torch.uint8)], tag=tag)
            self._do(reduce, Part.SUM, lambda: probe("sent"))
        probe("middle")
        for scratch, result in zip(summed, results, strict=True):
            pieces = zip(scratch.detach().view(-1).split(COPIED_ELEMENTS), result.view(-1).split(COPIED_ELEMENTS), strict=True)
            for piece, into in pieces:
                with self._writing:
                    copy(piece, into)
        probe("end")

    def copy_into(self, tensors: Sequence[Tensor], *, source: int, targets: Sequence[int], tag: int) -> None:
        """See `Transport.copy_into`; over the sockets of rendezvous, once the group is built."""
        check_operands(tensors, device="cpu")
        self._check()
        if len(self.members) > 1 and self.me in (source, *targets):
            self._connect()
            self._direct.copy_into(tensors, source=source, targets=targets, tag=tag)

    def revoke(self) -> None:
        """See `Transport.revoke`. The thread is left to itself; a blocked operation is made to fail where gloo allows it."""
        with self._shared.changed:
            first, self._shared.revoked = not self._shared.revoked, True
            group = self._shared.group if self._shared.job is not None else None
            self._shared.changed.notify_all()
        self._direct.revoke()
        self._writing.shut()
        if first and group is not None:
            threading.Thread(target=_poison, args=(group,), name="gloo-poison", daemon=True).start()

    def close(self) -> None:
        """See `Transport.close`. Gloo's resources are released by the transport's thread, later if it is still blocked."""
        self._direct.close()
        self.revoke()

    def _check(self) -> None:
        if self._shared.revoked:
            raise Revoked(f"generation {self.generation} was revoked")
        if self._shared.error is not None:
            raise self._shared.error

    def _met(self) -> None:
        """The members have swapped their addresses: what is left of building the group is gloo's connecting."""
        with self._shared.changed:
            self._shared.met = True
            self._shared.changed.notify_all()

    def _connect(self) -> None:
        """Wait until the group is built."""
        shared = self._shared
        with shared.changed:  # without a limit: the meeting's own call ends it
            shared.changed.wait_for(lambda: shared.met or shared.is_over)
        self._do(lambda group: None, Part.CONNECT)

    def _do(self, job: Callable[[ProcessGroupGloo], None], part: Part, begun: Callable[[], None] | None = None) -> None:
        """Have the thread run `job`, and wait until it is done, or has made no progress for as long as `part` may last."""
        shared, limit_s = self._shared, part.limit_s(self._deadlines)
        with shared.changed:
            shared.job = job
            shared.changed.notify_all()
        if begun is not None:
            begun()
        with shared.changed:
            shared.progressed_at, waited_s = time.monotonic(), 0.0
            while waited_s < limit_s and shared.job is not None and not shared.is_over:
                shared.changed.wait(limit_s - waited_s)  # progress wakes nobody: the wait begins anew where there was some
                waited_s = time.monotonic() - shared.progressed_at
            if shared.job is None and not shared.is_over:
                return
        self._fail(part, waited_s, limit_s)

    def _fail(self, part: Part, waited_s: float, limit_s: float) -> NoReturn:
        """Raise why a call did not complete. Peers are probed without the lock, and only where that delays no recovery."""
        shared = self._shared
        stalled = waited_s >= limit_s / 2
        with shared.changed:
            error, revoked = shared.error, shared.revoked
        anonymous = error is None or type(error) is TransportError
        peers = self._unreachable() if stalled or (anonymous and not revoked) else ()
        with shared.changed:
            if shared.revoked:
                raise Revoked(f"generation {self.generation} was revoked", peers, stalled=stalled)
            if shared.error is None:
                shared.error = DeadlineExceeded(part, peers, limit_s)
            elif type(shared.error) is TransportError:
                shared.error.peers, shared.error.stalled = peers, stalled
            raise shared.error


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield views of all elements in their order, of `PIECE_BYTES` at most: the same for all members."""
    for tensor in tensors:
        if tensor.numel():
            yield from tensor.view(-1).split(max(1, PIECE_BYTES // tensor.element_size()))


def copy(piece: Tensor, into: Tensor) -> None:
    """Copy a piece of scratch to its place in a result."""
    into.copy_(piece)


class _Shared:
    """What a transport and its thread have in common, all under `changed`."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed = changed
        self.group: ProcessGroupGloo | None = None
        self.job: Callable[[ProcessGroupGloo], None] | None = None
        """Handed in by the caller; None again when it is done."""
        self.error: TransportError | None = None
        """Why nothing works any more; every later call raises it."""
        self.revoked = self.met = False
        self.progressed_at = 0.0
        """When the job was begun, or has last finished a piece of its sum, by the monotonic clock."""

    @property
    def is_over(self) -> bool:
        """Whether the caller has left, or is about to."""
        return self.revoked or self.error is not None

    def progress(self) -> None:
        """Note that a piece of a sum is finished. Raises Revoked, in the thread of the transport, where nobody waits."""
        with self.changed:
            if self.is_over:
                raise Revoked("the rest of a sum was left")
            self.progressed_at = time.monotonic()


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
    except (RuntimeError, TransportError) as error:  # gloo's or the rendezvous'; the caller raises it as a TransportError
        with shared.changed:
            mine = error if isinstance(error, TransportError) else TransportError(f"gloo: {str(error).splitlines()[0]}")
            shared.error = shared.error or mine.with_traceback(None)  # whose frames hold the group, and `shared`: a cycle
            shared.changed.notify_all()
            shared.changed.wait_for(lambda: shared.revoked)
    with shared.changed:
        shared.group = shared.job = None


class _Meeting(Store):
    """The store through which gloo's constructor swaps addresses: each member sets one entry, then reads all by rank."""

    def __init__(self, direct: DirectTransport, met: Callable[[], None]) -> None:
        """`met()` is called when all members have swapped their entries."""
        super().__init__()
        self._direct, self._met = direct, met
        self._entries: list[bytes] = []
        self.error: TransportError | None = None
        """What went wrong in `set`; gloo's constructor makes a text of it."""

    def set(self, key: str, value: bytes) -> None:
        """Swap entries with all members: a sum in which each fills its own row."""
        members = self._direct.members
        mine = torch.zeros(len(members), ENTRY_BYTES, dtype=torch.uint8)
        entry = len(value).to_bytes(2, "big") + value
        mine[members.index(self._direct.me), : len(entry)] = torch.frombuffer(bytearray(entry), dtype=torch.uint8)
        everyone = torch.empty_like(mine)
        try:
            self._direct.sum_into([mine], [everyone], tag=-1)
        except TransportError as error:
            self.error = error
            raise
        rows = [row.numpy().tobytes() for row in everyone]
        self._entries = [row[2 : 2 + int.from_bytes(row[:2], "big")] for row in rows]
        self._met()

    def get(self, key: str) -> bytes:
        return self._entries[int(key.rpartition("/")[2])]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Nothing to wait for: `set` returned with all entries."""


def _poison(group: ProcessGroupGloo) -> None:
    """Make blocked operations fail: a point-to-point wait that times out closes all connections of a gloo group.

    Without it an abandoned operation keeps its scratch until gloo's timeout; with it mostly some milliseconds.
    """
    with contextlib.suppress(RuntimeError):  # the timeout is the point
        group.recv_anysource([torch.empty(1)], 1 << 20).wait(timedelta(seconds=_POISON_S))
