"""The reduction of a pass beside its last backwards (`--overlap-grad-reduce`).

Decides when a bucket can be reduced: as soon as the last backward of the pass has added its gradient to every parameter that
the bucket has a part of, the rule by which upstream starts its own buckets (`core/distributed/param_and_grad_buffer.py`). What
is done with a bucket then is `Reduction.reduce`, the same as without overlap, in a thread of its own.

Note [Last backward]
    Only when `Close` has come is a backward known to be the last one of the pass: until then more can be dealt, and a bucket
    that was reduced would lack it. Where `Close` comes later than the backward begins, or where a pass puts its gradient into
    some buckets only (parts of it then arrive at the end of the backward), the pass is reduced when it is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from megatron_recover.core.values import BucketId, Plan
from megatron_recover.trainer.reduction import Reduction
from megatron_recover.trainer.work_queue import Task


class Abandoned(Exception):
    """The pass raised: nobody waits for its reduction."""


class Overlap:
    """How the plan of one pass gets reduced: beside the last backwards as far as possible, the rest when the pass is over.

    Used as a context manager around the pass: leaving it by an exception leaves the reduction.
    """

    def __init__(self, reduction: Reduction, plan: Callable[[], Plan]) -> None:
        """`plan()`: what the pass reduces. Asked when the pass is closed."""
        self._reduction, self._plan = reduction, plan
        self._passed: dict[BucketId, threading.Event] = {}
        self._stream = torch.cuda.Stream(reduction.device) if reduction.device.type == "cuda" else None
        self._written: dict[BucketId, torch.cuda.Event] = {}
        """On a GPU: when the kernels that write a bucket's gradient are done."""
        self._abandoned = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Overlap:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._abandoned = True
            self._release()

    def last_backward_begins(self, task: Task, chunk: int) -> None:
        """The pass is closed, and this is its last backward of `chunk`."""
        if not self._reduction.can_watch(task.into):
            return
        if self._thread is None:
            plan = self._plan()
            self._passed = {bucket: threading.Event() for bucket in plan.reduces}
            self._thread = threading.Thread(target=self._run, args=(plan,), name="recover-reduce", daemon=True)
            self._thread.start()
        self._reduction.watch(task, chunk, self._has_passed)

    def finish(self) -> None:
        """The pass is over: reduce what is left; return when the plan is carried out. Raises what the reduction raises."""
        if self._thread is None:
            self._reduction.reduce(self._plan())
            return
        self._release()
        self._thread.join()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        if self._error is not None:
            raise self._error

    def _run(self, plan: Plan) -> None:
        try:
            with torch.cuda.stream(self._stream):  # its device, too; nothing without a GPU
                self._reduction.reduce(plan, wait_for=self._wait_for)
        except Abandoned:
            pass
        except BaseException as error:  # carried over to the training thread
            self._error = error

    def _has_passed(self, bucket: BucketId) -> None:
        if bucket not in self._passed or self._passed[bucket].is_set():
            return
        if self._stream is not None:
            self._written[bucket] = torch.cuda.current_stream().record_event()
        self._passed[bucket].set()

    def _release(self) -> None:
        for bucket in self._passed:
            self._has_passed(bucket)

    def _wait_for(self, bucket: BucketId) -> None:
        # Ended by the backward or, whatever becomes of it, by `finish` or `__exit__` (INV-8).
        self._passed[bucket].wait()
        if self._abandoned:
            raise Abandoned
        if self._stream is not None:
            self._stream.wait_event(self._written[bucket])
