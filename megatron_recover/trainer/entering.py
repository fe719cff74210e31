"""The way of one rank of a newcomer into the job: read, digest, ask, until the members admit it.

Note [Entering]
    All ranks of a newcomer read the state of the same window, which rank 0 chooses at the first of
    the sources. Each rank reads from the ranks at its own position. Then each digests what it has,
    and rank 0 asks the member whose window it was to vouch for them (`core/joining.py`). Nobody
    waits for a newcomer. So it may be too late, or be refused for a reason of the job, such as a
    save. Then it reads the state of a later window, all of it.

    The first window is the one that is open. A newcomer that is formed while its predecessor's step
    is still computed again can so join in that step. How long the window has been open is not
    known, so this is no try. The other windows are read from when they open.

    On the last try rank 0 asks a member to hold the step whose state is read
    (`core/holding.py`). It asks before that step begins.

    A try is used up if the newcomer was too slow or its state was not equal. After the last try it
    gives up, and reports how much its slowest rank read, how long that took, how long a step takes,
    and what to do. All ranks report the same, since people read the report of the first that ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from megatron_recover.core.label import next_training
from megatron_recover.core.membership_messages import JoinRefused
from megatron_recover.faults import FaultInjector, FaultPoint
from megatron_recover.trace import RankTrace, StateRead
from megatron_recover.trainer.driver import Driver
from megatron_recover.trainer.reduction import Gather
from megatron_recover.trainer.state import Scalar, State
from megatron_recover.trainer.state_reader import Offer, Read, StateVoid

NUM_TRIES = 3
"""Tries of a newcomer that are its own fault, before it gives up."""


class CannotJoin(RuntimeError):
    """This newcomer has used up its tries."""


class Reader(Protocol):
    """Reads state from other replicas (`StateReader`)."""

    def next_window(self, address: str, after: str | None, still: Callable[[], None]) -> Offer: ...
    def read(self, label: str, sources: Sequence[str], state: State) -> Read: ...


class _Reading(NamedTuple):
    """The progress of one rank with the state of a window. All ranks of the newcomer gather it."""

    rank: int
    void: str = ""
    """The reason why the state was not read whole; empty: it was."""
    is_slow: bool = True
    """False: there was nobody to read from."""
    num_bytes: int = 0
    of_bytes: int = 0
    seconds: float = 0.0
    step_s: float | None = None
    """The shortest time between two windows; None: unknown, as on all ranks but 0."""


class Entering:
    """Brings one rank of a newcomer into the job. The training thread calls `enter`, once."""

    def __init__(
        self,
        driver: Driver,
        reader: Reader,
        state: State,
        *,
        install: Callable[[Mapping[str, Scalar]], None],
        gather: Gather,
        record: RankTrace,
        faults: FaultInjector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to fill `state`, all of whose tensors exist.

        - `install(scalars)` installs the scalars that were read beside the tensors. All ranks call
          it together.
        - `gather(value)` returns the values of all ranks of this replica, in their order.
        - `clock()` returns seconds.
        """
        self._driver, self._reader, self._state = driver, reader, state
        self._install, self._gather, self._record, self._clock = install, gather, record, clock
        self._faults = faults
        self._newest: Sequence[_Reading] = ()
        """The last readings that have figures, of all ranks."""
        self._num_tries = 0
        """Number of states that this rank has begun to read since the last that it has read."""
        self._windows: list[float] = []
        """Times at which windows opened for which rank 0 has waited."""

    def enter(self) -> int:
        """Read state and ask to join until the members admit this replica.

        Return the step in which its training begins. Raises `CannotJoin`, and `JobStopped`.
        """
        faults: list[str] = []
        label, members = self._at_rank_0(self._open)
        refusal = self._try(label, members)
        while refusal is not None and len(faults) < NUM_TRIES:
            label, members = self._at_rank_0(self._held if len(faults) == NUM_TRIES - 1 else partial(self._next, label))
            refusal = self._try(label, members)
            if refusal is not None and refusal.is_fault:
                faults.append(f"{label}: {refusal.reason}")
        if refusal is None:
            return self._driver.enter()
        raise CannotJoin(
            f"this newcomer gives up after {NUM_TRIES} tries ({'; '.join(faults)}); {self._figures()}; "
            "a larger --global-batch-size makes steps longer, and --recover-heal off does without newcomers"
        )

    def _open(self) -> tuple[str, tuple[int, ...]]:
        """Choose the window that is open now."""
        return self._chosen(lambda _, address: self._current(address))

    def _next(self, last: str) -> tuple[str, tuple[int, ...]]:
        """Choose the next window that opens. `last` is the label whose state was read last."""
        # A window that has closed during the reading is followed at once by the next one. What was
        # refused later may have used up a part of it.
        after = last if self._num_tries else None
        return self._chosen(lambda _, address: self._opening(address, after or self._current(address)))

    def _held(self) -> tuple[str, tuple[int, ...]]:
        """Choose the next window that opens, and ask that member to hold its step."""

        def window(member: int, address: str) -> str:
            current = self._current(address)
            self._driver.ask_hold(member, next_training(current))
            return self._opening(address, current)

        return self._chosen(window)

    def _chosen(self, window: Callable[[int, str], str]) -> tuple[str, tuple[int, ...]]:
        """Return the label that `window(member, address)` returns, and all members, that one first.

        `window` raises StateVoid for a member that ends, or offers nothing.
        """
        sources = self._driver.sources()
        while True:
            for position, (source, address) in enumerate(sources):
                with contextlib.suppress(StateVoid):
                    label = window(source, address)
                    members = tuple(member for member, _ in sources)
                    return label, (*members[position:], *members[:position])
            sources = self._driver.sources(sources)
            self._still()

    def _current(self, address: str) -> str:
        return self._reader.next_window(address, None, self._still).label

    def _opening(self, address: str, after: str) -> str:
        label = self._reader.next_window(address, after, self._still).label
        self._windows.append(self._clock())
        return label

    def _try(self, label: str, members: Sequence[int]) -> JoinRefused | None:
        """Read the state of `label` on all ranks, and ask to join; return the refusal, if any."""
        addresses = dict(self._driver.sources())
        chosen = [addresses[each] for each in members if each in addresses]
        self._num_tries += 1
        read: Read | None = None
        mine = _Reading(self._driver.rank, "other members serve it by now", is_slow=False)
        if chosen:
            try:
                read = self._reader.read(label, chosen, self._state)
                mine = _Reading(self._driver.rank, "", True, read.num_bytes, read.num_bytes, read.seconds)
            except StateVoid as void:
                mine = _Reading(self._driver.rank, str(void), True, void.num_bytes, void.of_bytes, void.seconds)
        # First: what is installed may have to be gathered over the lanes, by all ranks together.
        readings: Sequence[_Reading] = self._gather(mine._replace(step_s=self._step_s()))
        if any(each.of_bytes for each in readings):
            self._newest = readings
        if voids := [each for each in readings if each.void]:
            is_fault = all(each.is_slow for each in voids)
            return JoinRefused(self._driver.replica, label, voids[0].void, is_fault=is_fault)
        assert read is not None
        self._install(read.scalars)
        digest = self._state.digest()
        self._record(
            StateRead, label=label, digest=f"{digest:016x}", num_bytes=read.num_bytes, seconds=round(read.seconds, 6),
            num_sources=sum(count > 0 for count in read.bytes_by_source.values()), num_tries=self._num_tries,
        )  # fmt: skip
        self._num_tries = 0
        self._driver.digested(label, digest)
        return self._at_rank_0(lambda: self._ask(members[0]))

    def _ask(self, member: int) -> JoinRefused | None:
        if self._faults is not None:
            self._faults.at(FaultPoint.CLAIM)
        return self._driver.ask_to_join(member)

    def _at_rank_0[T](self, call: Callable[[], T]) -> T:
        """Return what `call` returns at rank 0.

        If the job stops meanwhile, all ranks raise `JobStopped`.
        """
        said: tuple[Any, bool] | None = None
        stopped: SystemExit | None = None
        if self._driver.rank == 0:
            try:
                said = call(), False
            except SystemExit as stop:  # `JobStopped`: the other ranks wait for rank 0 here
                said, stopped = (None, True), stop
        found: tuple[T, bool] | None = None
        while found is None:
            found = self._gather(said)[0]
        if stopped is not None:
            raise stopped
        if found[1]:
            self._driver.enter()  # raises what the order to stop says
        return found[0]

    def _still(self) -> None:
        """Have the other ranks wait on for rank 0: an evaluation may outlast their collective."""
        self._gather(None)

    def _step_s(self) -> float | None:
        """Return the shortest time between windows that rank 0 has waited for; None: unknown."""
        between = (later - earlier for earlier, later in zip(self._windows, self._windows[1:], strict=False))
        return min(between, default=None)

    def _figures(self) -> str:
        """Describe the newest reading of the slowest rank, and the time between windows."""
        step_s = next((each.step_s for each in self._newest if each.step_s is not None), None)
        step = "no second window opened" if step_s is None else f"a step takes {step_s:.2f} s at most"
        if not self._newest:
            return f"no state was read, and {step}"
        slowest = max(self._newest, key=lambda each: (bool(each.void), each.seconds))
        of = f" of {slowest.of_bytes / 2**20:.1f}" if slowest.void else ""
        return f"rank {slowest.rank} read {slowest.num_bytes / 2**20:.1f}{of} MiB in {slowest.seconds:.2f} s, and {step}"
