"""Random times for a job of the fuzzer, and a clock that can stop processes of the job."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from megatron_recover.core.values import ReplicaId
from megatron_recover.sim.timed.actors import TimedCoordinator, TimedReplica
from megatron_recover.sim.timed.clock import Clock
from megatron_recover.sim.timed.models import ComputeTable, JobTable, NetworkTable, Timing
from megatron_recover.sim.timed.rank import TimedRank


class RandomTiming(Timing):
    """Random seconds of everything: mostly few, sometimes many."""

    def __init__(self, dice: random.Random, job: JobTable) -> None:
        super().__init__(job, ComputeTable(microbatch_s=0.1), NetworkTable(bytes_per_s=1e9, gradient_bytes=1e6))
        self.dice = dice
        self.scale_s = 10 ** dice.uniform(-4, -1)
        """Mean seconds of a message between leaders, 0.0001 to 0.1, before `_some` lengthens some.
        The mean of a microbatch is in the same sense, and so are those below."""
        self.microbatch_mean_s = 0.1
        self.forming_mean_s = 1.0
        self.state_mean_s = 0.05
        self.paces: dict[tuple[ReplicaId, int], float] = {}
        """Seconds of a microbatch, by (replica, step)."""

    def _some(self, mean_s: float) -> float:
        """Return random seconds of that mean; in one case of 50, 20 times as many."""
        return self.dice.expovariate(1 / mean_s) * (20 if self.dice.random() < 0.02 else 1)

    def latency_s(self) -> float:
        # Shorter than the wait for members to follow: without a fault no replica is fenced.
        return min(0.5, self._some(self.scale_s))

    def local_latency_s(self) -> float:
        return min(0.5, self._some(self.scale_s / 3))

    def message_s(self, num_bytes: float = 0.0) -> float:
        return 0.0

    def reading_s(self, num_bytes: float = 0.0) -> float:
        return 0.0

    def microbatch_s(self, replica: ReplicaId, step: int) -> float:
        # Equal for all ranks of a replica: they wait for each other inside the pass.
        if (replica, step) not in self.paces:
            self.paces[replica, step] = self._some(self.microbatch_mean_s)
        return self.paces[replica, step]

    def optimizer_s(self) -> float:
        return self._some(0.05)

    def forming_s(self) -> float:
        return self._some(self.forming_mean_s)

    def state_s(self) -> float:
        return self._some(self.state_mean_s)

    def digest_s(self) -> float:
        return self._some(0.01)

    def reduce_s(self, bucket: int, num_members: int) -> float:
        return self._some(0.02)

    def together_s(self, seconds: float, replica: ReplicaId) -> float:
        # Members finish at different times.
        return seconds + self._some(0.02)

    def transfer_s(self, bucket: int) -> float:
        return self._some(0.02)


Process = TimedRank | TimedCoordinator


class FreezingClock(Clock):
    """A clock that can stop processes.

    Calls to a stopped process wait, in order, until it continues.
    """

    def __init__(self) -> None:
        super().__init__()
        self._frozen: dict[Process, float] = {}
        """Stopped processes, and the time at which each continues."""
        self._waiting: dict[Process, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {}

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        super().at(time, self._unless_frozen, call, arguments)

    def freeze(self, one: Process, until: float) -> None:
        """Stop a process until the latest of the times requested for it."""
        self._frozen[one] = max(until, self._frozen.get(one, 0.0))
        super().at(until, self._thaw, one)

    def is_frozen(self, one: Process) -> bool:
        """Return whether a process is stopped."""
        return one in self._frozen

    def _thaw(self, one: Process) -> None:
        if self._frozen.get(one, math.inf) <= self.now:
            del self._frozen[one]
            for call, arguments in self._waiting.pop(one, ()):
                call(*arguments)

    def _unless_frozen(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        one = _process_of(call, arguments)
        if one in self._frozen:
            self._waiting.setdefault(one, []).append((call, arguments))
        else:
            call(*arguments)


def _process_of(call: Callable[..., None], arguments: tuple[Any, ...]) -> Process | None:
    """Return the rank or coordinator in whose process a call happens, or None."""
    for one in (getattr(call, "__self__", None), *arguments[:1]):
        if isinstance(one, TimedRank | TimedCoordinator):
            return one
        if isinstance(one, TimedReplica):
            return one.ranks[0]
    return None
