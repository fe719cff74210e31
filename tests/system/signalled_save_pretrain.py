"""`scripts/pretrain_gpt.py` under a scheduler that loses patience in the middle of a save.

In the first checkpoint that replica 0 saves, launcher and ranks get SIGUSR2, then SIGTERM twice; the save goes on when the
launcher has answered the first of them.
"""

from __future__ import annotations

import functools
import os
import pathlib
import runpy
import signal
import time
from typing import Any

import psutil

from megatron_recover.config import rank_context

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"
DEADLINE_S = 60.0


def lose_patience(run_dir: pathlib.Path) -> None:
    """Send what a scheduler sends at a time limit; return when the trace says that the launcher has asked for the end."""
    server = psutil.Process(os.getppid())
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM):
        server.parent().send_signal(number)
        for rank in server.children():
            rank.send_signal(number)
    until = time.monotonic() + DEADLINE_S
    while '"exit: SIGUSR2"' not in (run_dir / "events.jsonl").read_text():
        assert time.monotonic() < until, "the launcher has not asked for the end"
        time.sleep(0.01)


def main() -> None:
    """Train."""
    from megatron.training import training

    context, upstream = rank_context(), training.save_checkpoint
    patience: list[None] = [None]

    @functools.wraps(upstream)
    def save(*args: Any, **kwargs: Any) -> None:
        if context is not None and context.replica == 0 and patience:
            patience.clear()
            lose_patience(pathlib.Path(context.run_dir))
        upstream(*args, **kwargs)

    training.save_checkpoint = save
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
