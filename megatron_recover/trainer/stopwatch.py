"""The duration of the first pass of a training step on this rank, from which quotas follow.

On a CPU a pass is over when the schedule returns. On a GPU its kernels may still run. So two events
on the stream measure the pass, and their times are read once both have completed, usually at the
next step. A stopwatch never waits for a device.
"""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """A stopwatch for whole passes of rank 0.

    Waiting for slower stages counts, since the replica waits as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begun: int | torch.cuda.Event | None = None
        self._ended: tuple[int, int | torch.cuda.Event, int | torch.cuda.Event] | None = None

    def begin(self) -> None:
        """Begin to measure a pass. The measurement counts when `end` is called."""
        self._begun = self._now()

    def end(self, num_microbatches: int) -> None:
        """End the measurement: the pass has issued all its work, for `num_microbatches`."""
        if self._begun is not None:
            self._ended, self._begun = (num_microbatches, self._begun, self._now()), None

    def take(self) -> tuple[int, int] | None:
        """Return (microbatches, nanoseconds) of the last pass that was measured, once.

        None: the GPU has not finished that pass, the pair was returned before, or no pass was
        measured.
        """
        if self._ended is None:
            return None
        num, begun, ended = self._ended
        if isinstance(begun, torch.cuda.Event):
            assert isinstance(ended, torch.cuda.Event)
            if not ended.query():
                return None
            elapsed = int(1e6 * begun.elapsed_time(ended))
        else:
            assert isinstance(ended, int)
            elapsed = ended - begun
        self._ended = None
        return num, elapsed

    def _now(self) -> int | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
