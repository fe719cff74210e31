"""Faults from outside the ranks, for real: a launcher is stopped, a disk stalls, is full or fails, a node is lost or cut off.

When they strike is decided inside (`struck_pretrain.py`): where a rank passes a drawn fault point. The rank waits until it has
happened. The disks are those of `tests/disk.py`, the nodes those of `tests/nodes/nodes.py`.
"""

from __future__ import annotations

import contextlib
import enum
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import msgspec
import psutil

from megatron_recover.faults import Fault, FaultPoint
from tests.disk import Disk
from tests.nodes.nodes import Node

STRIKE = "STRIKE"
"""Environment variable of the ranks: `Orders` as JSON."""
NOW, DONE, OVER = "now", "done", "over"
"""Files in the folder of a strike: a rank asks for it, and is told that it has happened, and that it is over."""
SHORT_CUT_S, NODE_TIMEOUT_S = (0.2, 1.0), 4.0
"""Seconds of a cut for which no node may be removed, and after which one is removed."""
RANK = "replica-"
"""The name of a rank's process begins so (`cluster/rank_process.py`)."""
FENCED_S = 20.0
"""Within so many seconds of its return a node that was removed has ended its ranks."""


class StrikeKind(enum.Enum):
    """What happens."""

    STOP = "stopped launcher"
    """SIGSTOP to the launcher, and SIGCONT after `Strike.seconds`."""
    STALL = "stalled disk"
    """No write to the disk returns for `Strike.seconds` (FIFREEZE)."""
    FULL = "full disk"
    """There is no room (ENOSPC); with `Strike.seconds` there is room again after so long."""
    FAIL = "failing disk"
    """Everything that touches the disk fails (EIO) to the end of the run."""
    LOSS = "lost node"
    """The link of a node goes down, and all its processes end."""
    CUT = "cut"
    """Nothing that is sent between a node and the others arrives; it does again after `Strike.seconds`."""


ON_DISK = frozenset({StrikeKind.STALL, StrikeKind.FULL, StrikeKind.FAIL})
ON_NODES = frozenset({StrikeKind.LOSS, StrikeKind.CUT})


class Orders(msgspec.Struct, frozen=True):
    """What the ranks of a job have to know of a strike."""

    folder: str
    at: Fault
    slow: Fault | None
    """Where a rank takes its time at each passage between the strike and its end; None: nowhere."""

    def never(self) -> Iterator[Fault]:
        """Yield faults for these ranks that never strike: a rank without any passes no points."""
        for passage in filter(None, (self.at, self.slow)):
            yield msgspec.structs.replace(passage, occurrence=10**9)


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault from outside."""

    kind: StrikeKind
    at: Fault
    """Where it happens: when a rank passes this point. Nothing may befall this rank before."""
    seconds: float | None = None
    """None: for ever."""
    node: int = 0
    """Number of the node that is lost or cut off."""
    one_way: str | None = None
    """"in" or "out": only what the node is sent, or sends, is cut off."""

    @property
    def is_short(self) -> bool:
        """Whether it is a cut for which no node may be removed."""
        return self.kind is StrikeKind.CUT and self.seconds is not None and self.seconds <= SHORT_CUT_S[1]

    def __str__(self) -> str:
        what = f"{self.kind.value}{f' of n{self.node}' if self.kind in ON_NODES else ''}"
        way = f" ({self.one_way})" if self.one_way else ""
        lasts = "" if self.seconds is None else f" for {self.seconds:.3g} s"
        when = f"step {self.at.step}" if self.at.step is not None else f"passage {self.at.occurrence}"
        return f"{what}{way}{lasts} when {self.at.replica}.{self.at.rank} is at {self.at.point.value} of {when}"


def orders(strike: Strike, folder: pathlib.Path, spared: int) -> Orders:
    """Return what the ranks of a job have to know of a strike; `folder` is theirs and the nemesis's.

    `spared`: a replica that nothing hits. It takes its time, so that a node that returns finds the job at work.
    """
    returns = strike.kind is StrikeKind.CUT and strike.seconds is not None
    return Orders(str(folder), strike.at, Fault(replica=spared, rank=0, point=FaultPoint.OPTIMIZER) if returns else None)


class Nemesis:
    """Waits until a rank asks for the strike, brings it about, and ends it after its time, at the latest on leaving."""

    def __init__(self, strike: Strike, folder: pathlib.Path, where: Disk | Node | None) -> None:
        """`folder`: the one that `STRIKE` names. `where`: what is struck; None: the launcher."""
        self._strike, self._folder, self._where = strike, folder, where
        self.has_struck, self.struck_at = False, 0.0
        self.unfenced = ""
        """Ranks that are left on a node that was removed and has returned."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nemesis")

    def __enter__(self) -> Nemesis:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """End the strike, if its time is not over."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        now = self._folder / NOW
        while not now.exists():
            if self._over.wait(0.005):
                return
        launcher = int(now.read_text())
        self._strike_at(launcher)
        self.struck_at = time.monotonic()
        self.has_struck = True  # before the rank goes on
        (self._folder / DONE).touch()
        self._over.wait(self._strike.seconds)
        self._undo(launcher)
        (self._folder / OVER).touch()

    def _strike_at(self, launcher: int) -> None:
        match self._strike.kind, self._where:
            case StrikeKind.STOP, _:
                process = psutil.Process(launcher)
                process.suspend()
                while process.status() != psutil.STATUS_STOPPED and not self._over.wait(0.001):
                    pass
            case StrikeKind.STALL, Disk() as disk:
                disk.stall(on=True)
            case StrikeKind.FULL, Disk() as disk:
                disk.fill()
            case StrikeKind.FAIL, Disk() as disk:
                disk.fail()
            case StrikeKind.LOSS, Node() as node:
                node.power_off()
            case StrikeKind.CUT, Node() as node:
                node.cut(one_way=self._strike.one_way)

    def _undo(self, launcher: int) -> None:
        match self._strike.kind, self._where:
            case StrikeKind.STOP, _:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(launcher).send_signal(signal.SIGCONT)
            case StrikeKind.STALL, Disk() as disk:
                disk.stall(on=False)
            case StrikeKind.FULL, Disk() as disk if self._strike.seconds is not None:
                disk.make_room()
            case StrikeKind.CUT, Node() as node:
                node.heal()
                if not self._strike.is_short:
                    self._await_fence(node)

    def _await_fence(self, node: Node) -> None:
        until = time.monotonic() + FENCED_S
        while (left := node.find_process(RANK)) and not self._over.wait(0.05):
            if time.monotonic() > until:
                self.unfenced = ", ".join(process.name() for process in left)
                return
