"""The course of each microbatch of a step on this rank, while the schedule runs it.

Sets up each microbatch (samples, random state), triggers its fault points, and records its outcome:
provenance, ledger, trace. Decides nothing: each plan names the ids to compute and their buckets.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from torch import Tensor

from megatron_recover import trace
from megatron_recover.core.progress import Phase
from megatron_recover.core.values import BucketId
from megatron_recover.faults import FaultInjector, FaultPoint
from megatron_recover.progress_page import ProgressPage
from megatron_recover.trainer.driver import Driver
from megatron_recover.trainer.in_work import InWork
from megatron_recover.trainer.overlap import Overlap
from megatron_recover.trainer.reduction import Reduction
from megatron_recover.trainer.work_queue import Task


class Microbatches:
    """The `Listener` of the passes of one step (`megatron/schedule/pipeline.py`).

    The training thread calls every method.
    """

    def __init__(
        self,
        reduction: Reduction,
        step: int,
        *,
        forward_only: bool,
        num_chunks: int,
        enter: Callable[[int, int], None],
        record: trace.RankTrace,
        faults: FaultInjector | None,
        journal: Driver | None = None,
        page: ProgressPage | None = None,
        in_work: InWork | None = None,
        is_first: bool = False,
        further_losses: Callable[[], dict[str, Tensor]] = dict,
    ) -> None:
        """Prepare a step.

        - `enter(microbatch, chunk)` sets samples and random state for the microbatch.
        - `journal`: the driver that records begun and finished microbatches; None except on rank 0.
        - `page` shows what is computed; None: nobody reads it.
        - `in_work` tracks the work that the device has not finished; None: work counts as finished
          when it is issued.
        - `is_first`: the step is one of the process's first, in which everything takes longer.
        - `further_losses()` returns and forgets what a forward has reported elsewhere. It is called
          after each forward of the last stage's last chunk.
        """
        self._further_losses = further_losses
        self._page, self._in_work = page or ProgressPage(), in_work or InWork(None)
        self._forward = Phase.EVALUATION if forward_only else Phase.FIRST_STEPS if is_first else Phase.FORWARD
        self._backward = Phase.FIRST_STEPS if is_first else Phase.BACKWARD
        self._reduction, self._step, self._forward_only, self._num_chunks = reduction, step, forward_only, num_chunks
        self._enter, self._record, self._faults, self._journal = enter, record, faults, journal
        self._current: Task | None = None
        """Task of the forward or backward that runs; None between two of them."""
        self.num_passes = 0
        """Passes of the step that have begun."""
        self._of_pass: list[int] = []
        self._overlap: Overlap | None = None
        self._since = 0.0
        self._seconds: dict[tuple[Task, int], float] = {}

    def begin_pass(self, overlap: Overlap) -> None:
        """Begin a new pass, which `overlap` reduces."""
        self.num_passes += 1
        self._of_pass.clear()
        self._overlap = overlap

    def end_pass(self) -> int:
        """End the pass; return the number of its microbatches.

        An exception in the reduction that follows is charged to all of them, unless it names its
        microbatches or is the fault of none.
        """
        self._current = None
        self._reduction.collect_into(None)
        return len(self._of_pass)

    def suspects(self) -> tuple[int, ...]:
        """Return the microbatches to which an exception is charged.

        Inside a forward or backward that is its microbatch. Between two of them no microbatch is
        known to be at fault, so all that the pass has begun are returned.
        """
        return tuple(self._of_pass) if self._current is None else (self._current.microbatch,)

    # --- Listener ---------------------------------------------------------------------------------

    def forward_begins(self, task: Task, chunk: int) -> None:
        self._current = task
        self._page.enter(self._forward, self._in_work.begins(task.microbatch))
        if not chunk:
            self._of_pass.append(task.microbatch)
            if self._journal is not None:
                self._journal.started(task.microbatch)
        self._record(
            trace.MicrobatchStarted, generation=task.generation, step=self._step, microbatch=task.microbatch, chunk=chunk
        )  # fmt: skip
        is_again = self._reduction.is_again(task.generation)
        point = FaultPoint.EVALUATE if self._forward_only else FaultPoint.RECOMPUTE if is_again else FaultPoint.FORWARD
        self._pass_fault(point, task)
        self._enter(task.microbatch, chunk)
        # A fused weight gradient looks up its target in the forward, the others in the backward.
        self._reduction.collect_into(task.into)
        self._since = time.perf_counter()

    def forward_ended(self, task: Task, chunk: int, tokens: Tensor, losses: dict[str, Tensor] | None) -> None:
        self._seconds[task, chunk] = self._elapsed_s()
        self._reduction.end_forward(task.microbatch, chunk)
        if losses is not None:
            losses = losses | self._further_losses()
        if losses is not None and self._takes_ledger(task) and self._reduction.ledger is not None:
            self._reduction.ledger.write(task.microbatch, tokens, losses)
        if self._forward_only:
            self._finish(task, chunk, 0.0, ())
        self._end(task, finishes=self._forward_only and chunk == self._num_chunks - 1)

    def backward_begins(self, task: Task, chunk: int, last: bool) -> None:
        self._current = task
        self._page.enter(self._backward, self._in_work.begins(task.microbatch))
        self._pass_fault(FaultPoint.BACKWARD, task)
        self._reduction.collect_into(task.into)
        if last and self._overlap is not None:
            self._overlap.last_backward_begins(task, chunk)
        self._since = time.perf_counter()

    def backward_ended(self, task: Task, chunk: int) -> None:
        backward_s = self._elapsed_s()
        self._seconds[task, chunk] += backward_s
        self._finish(task, chunk, backward_s, self._reduction.end_backward(task.microbatch, chunk, task.into))
        self._end(task, finishes=chunk == 0)

    def _takes_ledger(self, task: Task) -> bool:
        return self._reduction.is_last_stage and self._reduction.ledger_bucket in task.into

    def _elapsed_s(self) -> float:
        """Return the seconds of the forward or backward that ends now.

        On a GPU these are the seconds in which the host has issued the work. With an injected
        slowdown, wait here first; the wait is included.
        """
        seconds = time.perf_counter() - self._since
        return seconds if self._faults is None else self._faults.stretch(self._step, seconds)

    def _pass_fault(self, point: FaultPoint, task: Task) -> None:
        if self._faults is not None:
            self._faults.at(point, step=self._step, microbatch=task.microbatch)

    def _finish(self, task: Task, chunk: int, backward_s: float, taken: tuple[BucketId, ...]) -> None:
        seconds = self._seconds.pop((task, chunk))
        if self._takes_ledger(task) and self._reduction.ledger is not None:
            self._reduction.ledger.add_seconds(task.microbatch, seconds)
            if chunk == self._num_chunks - 1:
                self._reduction.count_ledger(task.microbatch)
                taken = (*taken, self._reduction.ledger_bucket)
        self._record(
            trace.MicrobatchFinished, generation=task.generation, step=self._step, microbatch=task.microbatch, chunk=chunk,
            seconds=round(seconds, 6), backward_s=round(backward_s, 6), into=taken,
        )  # fmt: skip

    def _end(self, task: Task, *, finishes: bool) -> None:
        """End a forward or backward.

        `finishes`: this was the last work of the replica's first stage on the microbatch. So rank
        0's journal has the microbatch as finished, once the device has done it. The last work is
        the backward of the stage's first chunk, and in an evaluation the forward of its last chunk.
        """
        self._current = None
        then = None
        if finishes and self._journal is not None:
            then = functools.partial(self._journal.finished, task.microbatch)
        self._page.enter(Phase.PIPELINE, self._in_work.ended(task.microbatch, then))
