"""Faults from outside the ranks, for real: the launcher is stopped, the disk under the run directory stalls, is full, or fails.

When they strike is decided inside (`struck_pretrain.py`): after a drawn optimizer step of one rank, which waits until it has
happened. The disks are those of `tests/disk.py`.
"""

from __future__ import annotations

import contextlib
import enum
import pathlib
import signal
import threading
from dataclasses import dataclass
from types import TracebackType

import psutil

from tests.disk import Disk

STRIKE = "STRIKE"
"""Environment variable of the ranks: folder, replica and optimizer step (counted from 1) of a strike."""
NOW, DONE = "now", "done"
"""Files in that folder: a rank asks for the strike, and is told that it has happened."""


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


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault from outside."""

    kind: StrikeKind
    replica: int
    """Whose rank 0 brings it about; no other fault may hit it before."""
    step: int
    """After so many training steps."""
    seconds: float | None = None
    """None: for ever."""

    @property
    def on_disk(self) -> bool:
        """Whether it needs a disk of its own."""
        return self.kind is not StrikeKind.STOP

    def __str__(self) -> str:
        lasts = "" if self.seconds is None else f" for {self.seconds:g} s"
        return f"{self.kind.value} after step {self.step}{lasts}"


def struck_environment(strike: Strike, folder: pathlib.Path) -> dict[str, str]:
    """Return what the ranks of a job have to know of a strike; `folder` is theirs and the nemesis's."""
    return {STRIKE: f"{folder} {strike.replica} {strike.step}"}


class Nemesis:
    """Waits until a rank asks for the strike, brings it about, and ends it after its time, at the latest on leaving."""

    def __init__(self, strike: Strike, folder: pathlib.Path, disk: Disk | None) -> None:
        """`folder`: the one that `STRIKE` names."""
        self._strike, self._folder, self._disk = strike, folder, disk
        self.has_struck = False
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
        self.has_struck = True  # before the rank goes on
        (self._folder / DONE).touch()
        self._over.wait(self._strike.seconds)
        self._undo(launcher)

    def _strike_at(self, launcher: int) -> None:
        match self._strike.kind, self._disk:
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

    def _undo(self, launcher: int) -> None:
        match self._strike.kind, self._disk:
            case StrikeKind.STOP, _:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(launcher).send_signal(signal.SIGCONT)
            case StrikeKind.STALL, Disk() as disk:
                disk.stall(on=False)
            case StrikeKind.FULL, Disk() as disk if self._strike.seconds is not None:
                disk.make_room()
