"""Runs a pass: one of the two schedules over a queue of microbatches.

Chooses the schedule, and keeps upstream from synchronising gradients during the pass. Which
microbatches a replica computes is decided elsewhere. Nothing here reduces a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_recover.megatron.schedule.interleaved import InterleavedStage
from megatron_recover.megatron.schedule.pipeline import Listener, MegatronPass, Queue, Stage


def run_pass(arguments: Mapping[str, Any], queue: Queue, *, divisor: int, listener: Listener, is_first: bool = True) -> None:
    """Run forwards and backwards (with `forward_only` forwards alone) until the queue ends.

    `arguments` are the arguments of Megatron's call of its forward-backward function. Losses are
    divided by `divisor`, except with `--calculate-per-token-loss` (Note [Divisor] in
    `schedule/pipeline.py`). `is_first`: this is the step's first pass. When this function returns,
    the listener has had every call for every microbatch.
    """
    upstream = MegatronPass(arguments, divisor=divisor, listener=listener, is_first=is_first)
    with contextlib.ExitStack() as stack:
        # Within a pass upstream neither reduces nor finalizes a gradient. `Reduction` reduces it,
        # and upstream finalizes it once, when the step is committed.
        for model in upstream.models:
            if hasattr(model, "no_sync"):
                stack.enter_context(model.no_sync())
        stack.enter_context(_timed(upstream.config))
        (Stage if upstream.num_chunks == 1 else InterleavedStage)(upstream, queue).run()


@contextlib.contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Run the timer that upstream's schedules run around themselves."""
    if config.timers is None:
        yield
        return
    config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers("forward-backward").stop()
