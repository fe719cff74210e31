"""`scripts/pretrain_gpt.py` on a disk that is full: while a checkpoint is written, no file may grow beyond `NUM_BYTES`.

So it is for all saves, or with the environment variable `ROOM_FROM` for those of earlier iterations. `PATIENCE_S` is how long
the last save is tried again. With `LOST_AT_END` the folder can no longer be read when the last checkpoint is written.
"""

from __future__ import annotations

import functools
import os
import pathlib
import resource
import runpy
from typing import Any

from msgspec.structs import replace

from megatron_recover.deadlines import Deadlines
from megatron_recover.megatron.checkpoint.checkpoints import Checkpoints

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"
NUM_BYTES = 100_000


def main() -> None:
    """Train; run out of room."""
    from megatron.training import training

    upstream, room_from = training.save_checkpoint, int(os.environ.get("ROOM_FROM", "1000"))

    @functools.wraps(upstream)
    def save_with_little_room(iteration: int, *args: Any, **kwargs: Any) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if iteration < room_from:
            resource.setrlimit(resource.RLIMIT_FSIZE, (NUM_BYTES, hard))
        try:
            upstream(iteration, *args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    init = Checkpoints.__init__

    @functools.wraps(init)
    def with_patience(self: Checkpoints, *args: Any, deadlines: Deadlines, **kwargs: Any) -> None:
        patience_s = float(os.environ.get("PATIENCE_S", deadlines.save_s))
        init(self, *args, deadlines=replace(deadlines, save_s=patience_s), **kwargs)

    settle = Checkpoints.settle

    @functools.wraps(settle)
    def without_the_folder(self: Checkpoints, *args: Any, **kwargs: Any) -> None:
        if self._saver.is_writer() and self._saver.rank == 0 and "LOST_AT_END" in os.environ:
            path = self.folder.path
            path.rename(path.with_name("aside"))
            path.symlink_to(path)  # every look at it ends with ELOOP
        settle(self, *args, **kwargs)

    Checkpoints.settle = without_the_folder
    Checkpoints.__init__ = with_patience
    training.save_checkpoint = save_with_little_room
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
