"""Runs a pass: one of the two pipelines over a queue of microbatches.

Decides which of them, and keeps upstream from synchronising gradients meanwhile. It never decides which microbatches a replica
computes and never touches a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_recover.megatron.schedule.interleaved import InterleavedStage
from megatron_recover.megatron.schedule.pipeline import Listener, Queue, Stage, Upstream


def run_pass(arguments: Mapping[str, Any], queue: Queue, *, divisor: int, listener: Listener) -> None:
    """Run forward and backward (or `forward_only`) of the queue's microbatches, in its order, until it ends.

    `arguments` are what Megatron called its forward-backward function with; losses are divided by `divisor`. On return every
    listener call was made for every microbatch.
    """
    upstream = Upstream(arguments, divisor=divisor, listener=listener)
    with contextlib.ExitStack() as stack:
        # Upstream neither reduces nor finalizes a gradient inside: that is done once a step, when it is committed.
        for model in upstream.models:
            if hasattr(model, "no_sync"):
                stack.enter_context(model.no_sync())
        stack.enter_context(_timed(upstream.config))
        (Stage if upstream.num_chunks == 1 else InterleavedStage)(upstream, queue).run()


@contextlib.contextmanager
def _timed(config: Any) -> Iterator[None]:
    """The timer that upstream's schedules run around themselves."""
    if config.timers is None:
        yield
        return
    config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers("forward-backward").stop()
