"""A writer that begins to write when all others are in their next step, so that each of them has the record of that save.

One that dies sooner may leave a survivor behind that still waits for the record. That one is the writer when the record comes:
it saves at once, and nothing has to be made up for.
"""

from __future__ import annotations

import pathlib
import time
from typing import Any

from megatron_recover.control_plane.rank_driver import RankDriver
from megatron_recover.megatron.checkpoint.checkpoints import Checkpoints

DEADLINE_S = 60.0


def save_late(run_dir: pathlib.Path) -> None:
    """Have this rank say when it begins a step, and write late."""
    begin, write = RankDriver.begin, Checkpoints._write

    def begin_and_say(self: RankDriver, *args: Any, **others: Any) -> int:
        step = begin(self, *args, **others)
        _begun(run_dir, step, self.replica, self.rank).touch()
        return step

    def write_late(self: Checkpoints, *args: Any, **others: Any) -> None:
        writer = self._saver
        assert isinstance(writer, RankDriver)
        awaited = [
            _begun(run_dir, writer.step + 1, replica, rank)
            for replica in set(writer.roster) - {writer.replica}
            for rank in range(writer.num_ranks)
        ]
        until = time.monotonic() + DEADLINE_S
        while not all(file.exists() for file in awaited):  # the others are other processes; only files tell what they are at
            assert time.monotonic() < until, f"not there: {awaited}"
            time.sleep(0.005)
        write(self, *args, **others)

    RankDriver.begin, Checkpoints._write = begin_and_say, write_late  # type: ignore[method-assign]


def _begun(run_dir: pathlib.Path, step: int, replica: int, rank: int) -> pathlib.Path:
    return run_dir / f"begun.{step}.{replica}.{rank}"
