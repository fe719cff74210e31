"""A replica's right to name a checkpoint, shared by two threads of rank 0 (`core/grants.py`).

The control thread notes beats and grants. The training thread asks, and begins and ends attempts.
"""

from __future__ import annotations

import threading
import time

from megatron_recover.core import grants
from megatron_recover.core.membership_messages import Grant
from megatron_recover.core.values import Generation


def _since_boot_s() -> float:
    """Return a time in seconds that also runs while the host is suspended or a process stopped."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class NamingRight:
    """The right of one replica. Any thread may call the methods."""

    def __init__(self, lease_s: float) -> None:
        """Hold no grant. The holder's lease lasts for `lease_s` seconds."""
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._holding = grants.Holding(_since_boot_s())

    def greets(self) -> None:
        """Note that this replica is about to greet the coordinator."""
        with self._lock:
            self._holding = grants.Holding(_since_boot_s())

    def heard(self) -> None:
        """Note a beat of the coordinator. Call it before the beat is answered."""
        with self._lock:
            self._holding = grants.heard(self._holding, _since_boot_s())

    def received(self, grant: Grant, generation: Generation) -> None:
        """Note a grant of the coordinator; `generation` is that of the replica."""
        with self._lock:
            self._holding = grants.received(self._holding, grant, generation)

    def refusal(self, *, is_last: bool) -> str:
        """Return why this replica must not begin to name a checkpoint now; "" if it may.

        `is_last`: its generation is the last one (`grants.is_last_generation`).
        """
        with self._lock:
            return grants.refusal(self._holding, _since_boot_s(), self._lease_s, is_last=is_last)

    def begin(self, *, is_last: bool) -> str:
        """Begin an attempt, which uses the grant up. Return why not, as `refusal` does, or ""."""
        with self._lock:
            refused = grants.refusal(self._holding, _since_boot_s(), self._lease_s, is_last=is_last)
            if not refused:
                self._holding = grants.begun(self._holding)
            return refused

    def end(self) -> int | None:
        """End the attempt. Return the number of the grant to confirm; None without an attempt."""
        with self._lock:
            attempt, self._holding = self._holding.attempt, grants.attempted(self._holding)
            return attempt.number if attempt is not None else None
