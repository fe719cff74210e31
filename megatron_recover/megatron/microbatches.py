"""What becomes of each microbatch of a step on this rank, while the schedule runs it.

Puts the rank into the microbatch (samples, random state), passes its fault points, and notes what came of it: provenance,
ledger, trace. Decides nothing: which ids are computed, and into which buckets, comes with each pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from megatron_recover import trace
from megatron_recover.core.values import BucketId, Compute, Generation
from megatron_recover.faults import FaultInjector, FaultPoint
from megatron_recover.megatron.reduction import Reduction


class Microbatches:
    """The `Listener` of the passes of one step."""

    def __init__(
        self,
        reduction: Reduction,
        step: int,
        *,
        forward_only: bool,
        num_chunks: int,
        enter: Callable[[int, int], None],
        record: trace.Recorder,
        faults: FaultInjector | None,
    ) -> None:
        """`enter(microbatch, chunk)` puts samples and random state at the beginning of a microbatch."""
        self._reduction, self._step, self._forward_only, self._num_chunks = reduction, step, forward_only, num_chunks
        self._enter, self._record, self._faults = enter, record, faults
        self._current: int | None = None
        """The id being computed."""
        self._pass = Compute((), ())
        self._generation: Generation = 0
        self._num_plans = 0
        self._since = 0.0
        self._seconds: dict[tuple[int, int], float] = {}

    def begin_plan(self, generation: Generation) -> None:
        """What follows belongs to the plan of `generation`; in every plan but a step's first, others' losses are recomputed."""
        self._generation, self._num_plans = generation, self._num_plans + 1

    def begin_pass(self, compute: Compute) -> None:
        """What follows belongs to this pass."""
        self._pass = compute

    def end_pass(self) -> None:
        """The microbatches of the pass are done; an exception from here on is about any of them."""
        self._current = None

    def suspects(self) -> tuple[int, ...]:
        """The ids one of which an exception is about: only within a microbatch is it known which."""
        return self._pass.microbatches if self._current is None else (self._current,)

    # --- Listener --------------------------------------------------------------------------------------------------------

    def forward_begins(self, microbatch: int, chunk: int) -> None:
        self._current = microbatch
        self._record(trace.MicrobatchStarted, generation=self._generation, step=self._step, microbatch=microbatch, chunk=chunk)
        again = self._num_plans > 1
        point = FaultPoint.EVALUATE if self._forward_only else FaultPoint.RECOMPUTE if again else FaultPoint.FORWARD
        self._pass_fault(point, microbatch)
        self._enter(microbatch, chunk)
        self._since = time.perf_counter()

    def forward_ended(self, microbatch: int, chunk: int, tokens: Tensor, losses: dict[str, Tensor] | None) -> None:
        self._seconds[microbatch, chunk] = time.perf_counter() - self._since
        if losses is not None and self._takes_ledger() and self._reduction.ledger is not None:
            self._reduction.ledger.write(microbatch, tokens, losses)
        if self._forward_only:
            self._finish(microbatch, chunk, ())

    def backward_begins(self, microbatch: int, chunk: int) -> None:
        self._current = microbatch
        self._pass_fault(FaultPoint.BACKWARD, microbatch)
        self._since = time.perf_counter()

    def backward_ended(self, microbatch: int, chunk: int) -> None:
        self._seconds[microbatch, chunk] += time.perf_counter() - self._since
        self._finish(microbatch, chunk, self._reduction.count(microbatch, chunk, self._pass.into))

    def _takes_ledger(self) -> bool:
        return self._reduction.is_last_stage and self._reduction.ledger_bucket in self._pass.into

    def _pass_fault(self, point: FaultPoint, microbatch: int) -> None:
        if self._faults is not None:
            self._faults.at(point, step=self._step, microbatch=microbatch)

    def _finish(self, microbatch: int, chunk: int, taken: tuple[BucketId, ...]) -> None:
        seconds = self._seconds.pop((microbatch, chunk))
        if self._takes_ledger() and self._reduction.ledger is not None:
            self._reduction.ledger.add_seconds(microbatch, seconds)
            if chunk == self._num_chunks - 1:
                self._reduction.count_ledger(microbatch)
                taken = (*taken, self._reduction.ledger_bucket)
        self._record(
            trace.MicrobatchFinished, generation=self._generation, step=self._step, microbatch=microbatch, chunk=chunk,
            seconds=round(seconds, 6), into=taken,
        )  # fmt: skip
        self._current = None
