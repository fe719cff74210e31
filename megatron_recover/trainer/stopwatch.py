"""How long the first pass of a training step takes on this rank: what quotas follow. Never waits for a device.

On a CPU a pass is over when the schedule returns. On a GPU its kernels are not: two events on the stream measure it, and what
they say is read when they have passed by themselves, as a rule at the next step.
"""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Measures passes of rank 0, the whole of them: waiting for slower stages counts, since the replica waits as well."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begun: int | torch.cuda.Event | None = None
        self._ended: tuple[int, int | torch.cuda.Event, int | torch.cuda.Event] | None = None

    def begin(self) -> None:
        """A pass begins; it counts when `end` is called."""
        self._begun = self._now()

    def end(self, num_microbatches: int) -> None:
        """The pass has issued all its work, for so many microbatches."""
        if self._begun is not None:
            self._ended, self._begun = (num_microbatches, self._begun, self._now()), None

    def take(self) -> tuple[int, int] | None:
        """(microbatches, nanoseconds) of the last pass, once, as soon as they are known."""
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
