"""`scripts/pretrain_gpt.py` that is struck from outside at a known instant, and keeps what its trace should have.

STRIKE is "folder replica step": after that optimizer step rank 0 of that replica asks for the strike and waits until it has
happened. Each rank writes every event that it records to `events.REPLICA.RANK` in that folder, too, whatever becomes of the
disk of the run.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import threading
import time
from typing import Any

import msgspec
import psutil
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_recover import trace
from megatron_recover.config import RankContext, rank_context
from megatron_recover.trace.ring import RingLog
from tests.system.strikes import DONE, NOW, STRIKE

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"
DEADLINE_S = 30.0


def main() -> None:
    """Train; be struck."""
    context = rank_context()
    if context is not None and not context.dry_run:
        folder, replica, step = os.environ[STRIKE].split()
        _keep_events(context, pathlib.Path(folder))
        if (context.replica, context.rank) == (int(replica), 0):
            _ask_after(int(step), pathlib.Path(folder))
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _keep_events(context: RankContext, folder: pathlib.Path) -> None:
    record, encode = RingLog.record, msgspec.json.Encoder().encode
    lock = threading.Lock()  # any thread may record, and both are to have the same order
    copy = os.open(folder / f"events.{context.replica}.{context.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def record_twice(self: RingLog, event: trace.Event) -> None:
        with lock:
            record(self, event)  # first: a rank that is killed in between owes the trace nothing
            os.write(copy, encode(event) + b"\n")

    RingLog.record = record_twice  # type: ignore[method-assign]


def _ask_after(step: int, folder: pathlib.Path) -> None:
    steps: list[None] = []

    def after(*_: Any) -> None:
        steps.append(None)
        if len(steps) != step:
            return
        begun = folder / f"{NOW}.begun"
        begun.write_text(str(psutil.Process(os.getppid()).ppid()))
        begun.rename(folder / NOW)
        until = time.monotonic() + DEADLINE_S
        while not (folder / DONE).exists():
            assert time.monotonic() < until, "nothing has struck"
            time.sleep(0.002)

    register_optimizer_step_post_hook(after)


if __name__ == "__main__":
    main()
