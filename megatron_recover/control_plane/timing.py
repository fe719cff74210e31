"""How long a recovery takes, phase by phase, as one leader sees it. Only measures: nothing depends on what it says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import get_args

from megatron_recover import trace

_PHASES: tuple[trace.Phase, ...] = get_args(trace.Phase)
_ORDER = {phase: position for position, phase in enumerate(_PHASES)}


class RecoveryClock:
    """Turns the instants of a recovery into `trace.Recovery` events.

    detect
        From the coordinator's first sign of the loss to its announcement.
    agree
        To the status of every member.
    redeal
        To the training thread taking the new plan; it may be in the middle of a pass, which it finishes.
    recompute
        To the end of the passes over what was dealt again.
    reduce
        To all ranks of this replica holding all results.
    commit
        To the vote of every member.

    A newer generation ends the measurement; where nobody had begun a step there is nothing to do after `agree`.
    """

    def __init__(self, replica: int, record: Callable[[trace.Event], None]) -> None:
        self._replica, self._record = replica, record
        self._lock = threading.Lock()
        self._phase: trace.Phase | None = None
        self._generation = 0
        self._step = 0
        self._announced = self._since = self._detected_s = 0.0

    def announced(self, generation: int, noticed_s: float) -> None:
        """This leader learns of a generation `noticed_s` seconds after the first sign of what is behind it."""
        with self._lock:
            self._announced = self._since = time.monotonic()
            self._detected_s = noticed_s
            self._generation = generation
            self._phase = "agree" if generation > 1 else None

    def since_announced_s(self) -> float:
        """Seconds since the newest generation was announced to this leader."""
        return time.monotonic() - self._announced

    def agreed(self, step: int, *, begun: bool) -> None:
        """All statuses are there; `begun`: there is work to do for `step`."""
        with self._lock:
            if self._phase == "agree":
                self._step = step
                self._write("detect", self._detected_s)
                self._end("agree")
                self._phase = self._phase if begun else None

    def taken(self, generation: int) -> None:
        """Training thread: the plan of `generation` is obeyed from now on."""
        self._reached("redeal", generation)

    def computed(self, generation: int) -> None:
        """Training thread: the passes of the plan are done."""
        self._reached("recompute", generation)

    def voted(self, generation: int) -> None:
        """All ranks hold all results."""
        self._reached("reduce", generation)

    def committed(self, generation: int, step: int) -> None:
        """The step is committed here (one that was adopted is an older one)."""
        if step == self._step:
            self._reached("commit", generation)

    def _reached(self, phase: trace.Phase, generation: int) -> None:
        """The end of a phase, and of those before it that nothing had to be done for."""
        with self._lock:
            while self._phase is not None and self._generation == generation and _ORDER[self._phase] <= _ORDER[phase]:
                self._end(self._phase)

    def _end(self, phase: trace.Phase) -> None:
        now = time.monotonic()
        self._write(phase, now - self._since)
        following = _ORDER[phase] + 1
        self._phase, self._since = (_PHASES[following] if following < len(_PHASES) else None), now

    def _write(self, phase: trace.Phase, seconds: float) -> None:
        self._record(
            trace.Recovery(
                replica=self._replica, generation=self._generation, step=self._step, phase=phase, seconds=round(seconds, 6)
            )  # fmt: skip
        )
