"""A data plane over gloo, which cannot be trusted to stop: abandon its operations, do not abort.

Nothing surely ends a blocked gloo call: its `abort` does nothing, and distant ring neighbours of a
dead member wait for the timeout. So no caller ever blocks in gloo. Each generation of two or more
members has one thread of its own. That thread builds the process group, runs the collectives on
scratch, and at the end destroys the group. The caller waits for the thread or abandons it. After a
revoke the thread owns all memory that gloo may still write. It ends when gloo returns, at gloo's
own timeout at the latest. The caller itself copies scratch to results, piece by piece
(`writing.py`), so no result is written after `revoke` returns. That copy is the price of working
out of place.

Rendezvous: gloo needs a store. Its store here exchanges the members' entries over a `direct`
transport of the same generation. So the exchange has the fences of that transport, a revoke ends
it, and no member is a server for the others. (A TCPStore offers neither. It also looks up each
peer's name at every connection: with a name server that drops a packet, 5 s in the middle of a
recovery.) A revoke does not end gloo's connecting, which follows. The store lives only while the
group is built. So gloo connects eagerly, even where `TORCH_GLOO_LAZY_INIT` would delay connecting
until the first sum. Transfers use the same `direct` sockets. Through gloo they could not end early:
a send or receive that times out closes all connections of the group.

Note [Pieces of a sum]. Gloo cannot distinguish a slow sum from a stalled one: an operation reports
nothing until it is done. So a large sum is many operations, one for each piece of at most
`PIECE_BYTES`, in the same order on all members. `sum_s` bounds the time without a finished piece,
not the whole sum. Gloo gets at most `PIECES_AT_ONCE` operations at a time. So a small sum is
submitted at once as a whole, and a revoke abandons only these pieces, not the rest of the sum.

Gloo adds in the order of its ring. The result has the same bits on all members of a generation.
The order is not that of replica ids, and bf16 is rounded after each addition. Gloo's own sockets
cannot be closed in forked children. Prefer `direct`.
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
    CallPart,
    DeadlineExceeded,
    Probe,
    Revoked,
    TransportError,
    check_operands,
    no_probe,
)
from megatron_recover.data_plane.writing import WriteGate

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = 2.0
"""Gloo's own timeout in units of `slowest_s`: the longest life of an abandoned operation."""
_POISON_S = 0.001
"""Seconds that `_poison`'s receive waits before it times out, as intended."""
COPIED_ELEMENTS = 1 << 20
"""Elements of scratch that are copied to a result between two looks at revocation."""
PIECE_BYTES = 1 << 20
"""Most bytes (at least one element) that one gloo operation sums. See Note [Pieces of a sum]."""
PIECES_AT_ONCE = 16
"""Operations submitted to gloo before waiting for the first of them."""
ENTRY_BYTES = 1024
"""Bytes for a member's rendezvous entry (178 in torch 2.13) and its length."""


class GlooTransport:
    """The gloo transport of one generation. Its thread outlives it while gloo is blocked."""

    def __init__(
        self,
        direct: DirectTransport,
        *,
        host: str,
        unreachable: Callable[[], tuple[int, ...]] = lambda: (),
    ) -> None:
        """Begin to build the group at once, in the transport's thread.

        A lone member needs neither group nor thread. If no thread can be started, each call raises
        TransportError. `direct.deadlines` tell how long the parts of a call may last.
        `unreachable()` returns the members that do not answer a probe; gloo's ring stalls on all
        members alike.
        """
        self.generation = direct.generation
        self.members = direct.members
        self.me = direct.me
        self._direct = direct
        self._unreachable = unreachable
        self._shared = _Shared(threading.Condition())
        self._writing = WriteGate()
        if len(self.members) > 1:

            def build() -> ProcessGroupGloo:
                options = ProcessGroupGloo._Options()
                options._timeout = timedelta(seconds=PATIENCE * direct.deadlines.slowest_s)
                options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
                meeting = _Meeting(direct, self._met)
                try:
                    return ProcessGroupGloo(meeting, self.members.index(self.me), len(self.members), options)
                except RuntimeError:
                    if meeting.error is not None:  # names the missing member, which gloo's own error does not
                        raise meeting.error from None
                    raise

            # A daemon thread: an operation blocked in gloo must not keep the process from ending.
            name = f"gloo-generation-{self.generation}"
            self.thread = threading.Thread(target=_serve, args=(self._shared, build), name=name, daemon=True)
            try:
                self.thread.start()
            except RuntimeError as error:  # no thread is left; each call raises this
                self._shared.error = TransportError(f"cannot open generation {self.generation} ({error}); raise `ulimit -u`")

    def sum_into(self, sources: Sequence[Tensor], results: Sequence[Tensor], *, tag: int, probe: Probe | None = None) -> None:
        """Sum as `Transport.sum_into` does, in the order of gloo's ring.

        A ring cannot distinguish a late member from a broken link. So once the group is built the
        members meet, by a sum of one byte over `direct`; gloo's part begins when all have entered.
        A lone member only copies.
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
            self._do(reduce, CallPart.SUM, lambda: probe("sent"))
        probe("middle")
        for scratch, result in zip(summed, results, strict=True):
            pieces = zip(scratch.detach().view(-1).split(COPIED_ELEMENTS), result.view(-1).split(COPIED_ELEMENTS), strict=True)
            for piece, into in pieces:
                with self._writing:
                    copy(piece, into)
        probe("end")

    def copy_into(self, tensors: Sequence[Tensor], *, source: int, targets: Sequence[int], tag: int) -> None:
        """Copy as `Transport.copy_into` does, over the sockets of rendezvous.

        The copy waits until the group is built.
        """
        check_operands(tensors, device="cpu")
        self._check()
        if len(self.members) > 1 and self.me in (source, *targets):
            self._connect()
            self._direct.copy_into(tensors, source=source, targets=targets, tag=tag)

    def revoke(self) -> None:
        """Revoke as `Transport.revoke` does.

        The thread is abandoned, and a blocked operation is made to fail where gloo allows it and a
        thread can be started.
        """
        with self._shared.changed:
            first, self._shared.revoked = not self._shared.revoked, True
            group = self._shared.group if self._shared.job is not None else None
            self._shared.changed.notify_all()
        self._direct.revoke()
        self._writing.shut()
        if first and group is not None:
            with contextlib.suppress(RuntimeError):  # no thread is left; the operation ends at gloo's own timeout
                threading.Thread(target=_poison, args=(group,), name="gloo-poison", daemon=True).start()

    def close(self) -> None:
        """Close as `Transport.close` does.

        The transport's thread releases gloo's resources, later if it is still blocked.
        """
        self._direct.close()
        self.revoke()

    def _check(self) -> None:
        if self._shared.revoked:
            raise Revoked(f"generation {self.generation} was revoked")
        if self._shared.error is not None:
            raise self._shared.error

    def _met(self) -> None:
        """Note that all members have exchanged addresses; only gloo's connecting is left."""
        with self._shared.changed:
            self._shared.met = True
            self._shared.changed.notify_all()

    def _connect(self) -> None:
        """Wait until the group is built. Raises as `_do` does."""
        shared = self._shared
        with shared.changed:  # no limit: the meeting's `sum_into` has its own
            shared.changed.wait_for(lambda: shared.met or shared.is_over)
        self._do(lambda group: None, CallPart.CONNECT)

    def _do(self, job: Callable[[ProcessGroupGloo], None], part: CallPart, begun: Callable[[], None] | None = None) -> None:
        """Run `job` in the thread, and wait until it is done.

        `begun()` is called when the job is handed over. Raises the error of `_fail` if the
        transport is revoked, if its thread has failed, or if the job makes no progress for as long
        as `part` may last.
        """
        shared, limit_s = self._shared, part.limit_s(self._direct.deadlines)
        with shared.changed:
            shared.job = job
            shared.changed.notify_all()
        if begun is not None:
            begun()
        with shared.changed:
            shared.progressed_at, waited_s = time.monotonic(), 0.0
            while waited_s < limit_s and shared.job is not None and not shared.is_over:
                shared.changed.wait(limit_s - waited_s)  # progress does not notify; wait again if there was some
                waited_s = time.monotonic() - shared.progressed_at
            if shared.job is None and not shared.is_over:
                return
        self._fail(part, waited_s, limit_s)

    def _fail(self, part: CallPart, waited_s: float, limit_s: float) -> NoReturn:
        """Raise the reason why a call did not complete; later calls raise it, too.

        If the call had waited for half of its limit, peers are probed, without holding the lock.
        Otherwise they are probed only without a revoke, for which a recovery waits, and only if no
        error names them.
        """
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
    """Yield views of all elements in order, at most `PIECE_BYTES` each; equal on all members."""
    for tensor in tensors:
        if tensor.numel():
            yield from tensor.view(-1).split(max(1, PIECE_BYTES // tensor.element_size()))


def copy(piece: Tensor, into: Tensor) -> None:
    """Copy a piece of scratch to its place in a result."""
    into.copy_(piece)


class _Shared:
    """The state that a transport shares with its thread; `changed` guards every write."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed = changed
        self.group: ProcessGroupGloo | None = None
        self.job: Callable[[ProcessGroupGloo], None] | None = None
        """The caller's job for the thread; None again when it is done."""
        self.error: TransportError | None = None
        """The error that ended the transport; every later call raises it."""
        self.revoked = self.met = False
        self.progressed_at = 0.0
        """Monotonic time when the job began or last finished a piece of its sum."""

    @property
    def is_over(self) -> bool:
        """Return whether the caller has stopped waiting, or is about to."""
        return self.revoked or self.error is not None

    def progress(self) -> None:
        """Note that a piece of a sum is finished.

        Called in the transport's thread. Raises Revoked if no caller waits any more.
        """
        with self.changed:
            if self.is_over:
                raise Revoked("the rest of a sum was left")
            self.progressed_at = time.monotonic()


def _serve(shared: _Shared, build: Callable[[], ProcessGroupGloo]) -> None:
    """Run a generation's thread: build the group, and run jobs until the transport is revoked.

    An error of gloo or of the rendezvous ends the jobs and is kept for the caller. The thread then
    waits for the revoke. It ends only when gloo returns.
    """
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
            shared.error = shared.error or mine.with_traceback(None)  # its frames hold the group and `shared`: a cycle
            shared.changed.notify_all()
            shared.changed.wait_for(lambda: shared.revoked)
    with shared.changed:
        shared.group = shared.job = None


class _Meeting(Store):
    """The store through which gloo's constructor exchanges addresses.

    Each member sets one entry, then reads the entries of all by rank.
    """

    def __init__(self, direct: DirectTransport, met: Callable[[], None]) -> None:
        """Use `direct` for the exchange; call `met()` when all members have exchanged entries."""
        super().__init__()
        self._direct, self._met = direct, met
        self._entries: list[bytes] = []
        self.error: TransportError | None = None
        """The error that `set` raised; gloo's constructor converts it to text."""

    def set(self, key: str, value: bytes) -> None:
        """Exchange entries with all members: a sum in which each member fills its own row."""
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
        """Return at once: `set` returned with all entries."""


def _poison(group: ProcessGroupGloo) -> None:
    """Make blocked operations of `group` fail.

    A point-to-point wait that times out closes all connections of a gloo group. An abandoned
    operation then releases its scratch mostly within milliseconds, instead of at gloo's timeout.
    """
    with contextlib.suppress(RuntimeError):  # the timeout is intended
        group.recv_anysource([torch.empty(1)], 1 << 20).wait(timedelta(seconds=_POISON_S))
