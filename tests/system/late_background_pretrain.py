"""`scripts/pretrain_gpt.py` whose writer writes what `--async-save` leaves to be written `SECONDS` late, thus steps later."""

from __future__ import annotations

import os
import pathlib
import runpy
import time
from typing import Any

from megatron_recover.config import rank_context
from megatron_recover.megatron.checkpoint.background import BackgroundSave

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"
SECONDS = 0.6


def main() -> None:
    """Train; write late, and fail to write what `FAILING` names (replica, number of the write from 1)."""
    context, write, num_writes = rank_context(), BackgroundSave._write, 0
    failing = tuple(map(int, os.environ.get("FAILING", "-1 -1").split()))

    def write_late(self: BackgroundSave, parts: Any, device: int | None) -> None:
        nonlocal num_writes
        num_writes += 1
        time.sleep(SECONDS)
        if context is not None and (context.replica, num_writes) == failing:
            parts = [(f"{path}/not/there", *others) for path, *others in parts]
        write(self, parts, device)

    BackgroundSave._write = write_late  # type: ignore[method-assign]
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
