"""The seconds that each phase of a recovery takes, measured by one leader.

Nothing depends on them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import get_args

from megatron_recover import trace

_PHASES: tuple[trace.Phase, ...] = get_args(trace.Phase)
_ORDER = {phase: position for position, phase in enumerate(_PHASES)}


class RecoveryClock:
    """Turns the instants of a recovery into `trace.Recovery` events, from generation 2 on.

    The phases, each from the end of the one before:

    detect
        From the coordinator's first sign of the loss or request to its announcement of the new
        generation.
    agree
        Until the status of every member has arrived.
    redeal
        Until the training thread takes the new plan, either inside the pass that runs or after it.
    recompute
        Until the passes over the microbatches that were dealt again are done.
    reduce
        Until all ranks of this replica hold all results.
    commit
        Until the vote of every member has arrived.

    A newer generation ends the measurement. `agree` is the last phase if this replica has not begun
    the step when all statuses have arrived, or has already committed it.
    """

    def __init__(self, replica: int, record: Callable[[trace.Event], None]) -> None:
        self._replica, self._record = replica, record
        self._lock = threading.Lock()
        self._phase: trace.Phase | None = None
        self._generation = 0
        self._step = 0
        self._announced = self._since = self._detected_s = 0.0

    def announced(self, generation: int, noticed_s: float) -> None:
        """Note that `generation` was announced `noticed_s` seconds after the sign of its cause."""
        with self._lock:
            self._announced = self._since = time.monotonic()
            self._detected_s = noticed_s
            self._generation = generation
            self._phase = "agree" if generation > 1 else None

    def since_announced_s(self) -> float:
        """Return the seconds since the newest generation was announced to this leader."""
        return time.monotonic() - self._announced

    def agreed(self, step: int, *, begun: bool) -> None:
        """Note that all statuses have arrived. `begun`: this replica works on `step` now."""
        with self._lock:
            if self._phase == "agree":
                self._step = step
                self._write("detect", self._detected_s)
                self._end("agree")
                self._phase = self._phase if begun else None

    def taken(self, generation: int) -> None:
        """Note that the training thread has taken the plan of `generation`."""
        self._reached("redeal", generation)

    def computed(self, generation: int) -> None:
        """Note that the training thread has done the passes of the plan."""
        self._reached("recompute", generation)

    def voted(self, generation: int) -> None:
        """Note that all ranks hold all results."""
        self._reached("reduce", generation)

    def committed(self, generation: int, step: int) -> None:
        """Note that a step is committed here. Any step but the one that is recovered is ignored."""
        if step == self._step:
            self._reached("commit", generation)

    def _reached(self, phase: trace.Phase, generation: int) -> None:
        """Record the end of a phase, and of the phases before it that had nothing to do."""
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
