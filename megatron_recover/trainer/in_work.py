"""The microbatches in work on this rank: a death or a hang inside a computation is charged to them.

On a CPU this is the microbatch being computed. A GPU runs behind the thread that enqueues its work:
a microbatch is in work until an event behind its kernels has completed, and only then it is
finished in the journal. The event is only queried, never waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from megatron_recover.core.values import MicrobatchId


class DeviceEvent(Protocol):
    """A mark in the work of a device (`torch.cuda.Event`)."""

    def query(self) -> bool: ...


class InWork:
    """The microbatches being computed, or enqueued and not known to be complete; oldest first."""

    def __init__(self, mark: Callable[[], DeviceEvent] | None) -> None:
        """Use `mark()` to put an event behind all enqueued work; None: work is never enqueued."""
        self._mark = mark
        self._enqueued: deque[tuple[MicrobatchId, DeviceEvent, Callable[[], None]]] = deque()

    @classmethod
    def on(cls, device: torch.device) -> InWork:
        """Return an `InWork` that fits the device."""
        return cls((lambda: torch.cuda.current_stream().record_event()) if device.type == "cuda" else None)

    def begins(self, microbatch: MicrobatchId) -> tuple[MicrobatchId, ...]:
        """Return the microbatches in work as a forward or backward of `microbatch` begins."""
        return self._unique((*self._behind(), microbatch))

    def ended(self, microbatch: MicrobatchId, then: Callable[[], None] | None = None) -> tuple[MicrobatchId, ...]:
        """Note that the host has issued a forward or backward of `microbatch`.

        Return the microbatches that the device still works on: on a GPU usually this one too, on a
        CPU none. `then()` is called once the device has done this work: now, or in a later call of
        a method, and never if `forget` is called before.
        """
        if self._mark is None:
            (then or _nothing)()
        else:
            self._enqueued.append((microbatch, self._mark(), then or _nothing))
        return self.note_finished()

    def note_finished(self) -> tuple[MicrobatchId, ...]:
        """Call each `then` that is due; return the microbatches that the device still works on."""
        return self._unique(self._behind())

    def forget(self) -> None:
        """Drop each `then` that was not called yet: the journal begins anew (new step, or void)."""
        self._enqueued = deque((microbatch, mark, _nothing) for microbatch, mark, _ in self._enqueued)

    def _behind(self) -> tuple[MicrobatchId, ...]:
        while self._enqueued and self._enqueued[0][1].query():
            self._enqueued.popleft()[2]()
        return tuple(microbatch for microbatch, _, _ in self._enqueued)

    @staticmethod
    def _unique(microbatches: tuple[MicrobatchId, ...]) -> tuple[MicrobatchId, ...]:
        return microbatches if len(microbatches) < 2 else tuple(dict.fromkeys(microbatches))


def _nothing() -> None:
    """Do nothing."""
