"""The reduction of a pass beside its last backwards (`--overlap-grad-reduce`).

Decides when a bucket can be reduced: as soon as the last backward of its chunk in the pass has
added its gradient to every parameter of which the bucket has a part. Upstream starts its own
buckets by the same rule (`core/distributed/param_and_grad_buffer.py`). All other buckets can be
reduced when the pass is over: the ledger, those of a region that no backward passes
(`Region.is_passed`), and those with a parameter that gets no gradient. The thread `recover-reduce`
reduces the buckets in the same order as without overlap.

Note [Last backward]
    A backward is known to be the last one of the pass only after `Close`. Before `Close` more
    microbatches can be dealt, and a bucket that was already reduced would lack them. In three
    cases the pass is reduced only when it is over:
    - `Close` comes later than the last backward begins;
    - the data plane cannot sum beside other work of the device (`Endpoint.overlap_refusal`);
    - without `exact`, the last backward puts its gradient into some of the rank's buckets only, so
      that parts of the gradient arrive after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.values import BucketId
from megatron_recover.trainer.reduction import Reduction
from megatron_recover.trainer.work_queue import Task


class Abandoned(Exception):
    """The pass raised, so nobody waits for its reduction."""


class Overlap:
    """The reduction of one pass's plan, beside the last backwards if possible.

    Otherwise `finish` reduces, when the pass is over. An `Overlap` is a context manager around the
    pass; an exception that leaves the context abandons the reduction.
    """

    def __init__(self, reduction: Reduction, plan: Callable[[], Plan]) -> None:
        """Prepare the reduction of a pass. `plan()` returns the plan to reduce.

        `plan()` is called only after the pass is closed, perhaps several times.
        """
        self._reduction, self._plan = reduction, plan
        self._passed: dict[BucketId, threading.Event] = {}
        self._written: dict[BucketId, torch.cuda.Event] = {}
        """On a GPU: for each bucket an event behind the kernels that write its gradient."""
        self._is_abandoned = False
        self._started: Future[None] | None = None
        """The reduction beside the backwards; None: there is none."""

    def __enter__(self) -> Overlap:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._is_abandoned = True
            self._release()

    def last_backward_begins(self, task: Task, chunk: int) -> None:
        """Start to reduce beside the last backward of `chunk`, and watch that backward.

        Do nothing if the backward cannot be watched or the sums must not run beside it. If another
        chunk has started the reduction, only watch. The training thread calls it before that
        backward, when the pass is closed.
        """
        if not self._reduction.can_watch(task.into):
            return
        if self._started is None:
            plan = self._plan()
            if not self._reduction.may_overlap(plan):
                return
            self._passed = {bucket: threading.Event() for bucket in plan.reduces}
            self._started = self._reduction.start(plan, self._wait_for)
        self._reduction.watch(task, chunk, self._has_passed)

    def finish(self, note_finished: Callable[[], object] = lambda: None) -> None:
        """Reduce what is left after the pass; return when the plan is carried out.

        Called by the training thread, in which `note_finished()` is called as by
        `Reduction.reduce`. Raises the error of the reduction.
        """
        if self._started is None:
            self._reduction.reduce(self._plan(), note_finished=note_finished)
            return
        self._release()
        self._reduction.finish(self._started, note_finished)

    def _has_passed(self, bucket: BucketId) -> None:
        """Let the reduction use `bucket`, whose gradient is enqueued on the current stream.

        Called by the thread that runs the backward, and at the end of the pass for each bucket that
        is left, also after an exception; then by the training thread. Does nothing for a bucket
        that has passed or is not reduced in this pass.
        After an exception the reduction does not use the bucket: the thread that waits for it
        raises `Abandoned`.
        """
        if bucket not in self._passed or self._passed[bucket].is_set():
            return
        if self._reduction.stream is not None:
            self._written[bucket] = torch.cuda.current_stream().record_event()
        self._passed[bucket].set()

    def _release(self) -> None:
        for bucket in self._passed:
            self._has_passed(bucket)

    def _wait_for(self, bucket: BucketId) -> None:
        # The backward sets the event; whatever becomes of the backward, `finish` or `__exit__` sets
        # it (INV-8).
        self._passed[bucket].wait()
        if self._is_abandoned:
            raise Abandoned
        if self._reduction.stream is not None:
            self._reduction.stream.wait_event(self._written[bucket])
