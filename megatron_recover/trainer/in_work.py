"""Which microbatches are in work on this rank: what a death or a hang inside their computation is charged to.

On a CPU that is the one being computed. A GPU runs behind the thread that gives it work: a microbatch is in work until an event
behind its kernels has passed, and the event is only ever asked, never waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from megatron_recover.core.values import MicrobatchId


class Event(Protocol):
    """What marks a place in the work of a device (`torch.cuda.Event`)."""

    def query(self) -> bool: ...


class InWork:
    """The microbatches that are being computed, or enqueued and not known complete; the oldest first."""

    def __init__(self, mark: Callable[[], Event] | None) -> None:
        """`mark()` puts an event behind all that is enqueued; None: nothing is ever enqueued."""
        self._mark = mark
        self._enqueued: deque[tuple[MicrobatchId, Event]] = deque()

    @classmethod
    def on(cls, device: torch.device) -> InWork:
        """Return what fits a device."""
        return cls((lambda: torch.cuda.current_stream().record_event()) if device.type == "cuda" else None)

    def begins(self, microbatch: MicrobatchId) -> tuple[MicrobatchId, ...]:
        """A forward or backward of a microbatch begins: return all that are in work."""
        return self._unique((*self._behind(), microbatch))

    def ended(self, microbatch: MicrobatchId) -> tuple[MicrobatchId, ...]:
        """The host has done its part of it: return what is still in work."""
        if self._mark is not None:
            self._enqueued.append((microbatch, self._mark()))
        return self._unique(self._behind())

    def _behind(self) -> tuple[MicrobatchId, ...]:
        while self._enqueued and self._enqueued[0][1].query():
            self._enqueued.popleft()
        return tuple(microbatch for microbatch, _ in self._enqueued)

    @staticmethod
    def _unique(microbatches: tuple[MicrobatchId, ...]) -> tuple[MicrobatchId, ...]:
        return microbatches if len(microbatches) < 2 else tuple(dict.fromkeys(microbatches))
