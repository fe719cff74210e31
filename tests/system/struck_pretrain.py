"""`scripts/pretrain_gpt.py` that is struck from outside at a known instant, and keeps what its trace should have.

STRIKE has `strikes.Orders`: a rank that passes a fault point asks for the strike and waits until it has happened. Each rank
writes every event that it records to `events.REPLICA.RANK` in their folder, too, whatever becomes of the disk of the run, with
the machine's monotonic time as `t` and the whole stamp of its node's clock as `h`.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import psutil

from megatron_recover.config import RankContext, rank_context
from megatron_recover.faults import Fault, FaultInjector, FaultPoint, Passages
from megatron_recover.trace.ring import RingLog
from tests.system.strikes import DONE, NOW, OVER, STRIKE, Orders

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"
DEADLINE_S = 30.0
SLOW_S = 0.5
"""What an optimizer step of a slow rank takes: less than what a rank is called hung for."""


def main() -> None:
    """Train; be struck."""
    context = rank_context()
    if context is not None and not context.dry_run:
        orders = msgspec.json.decode(os.environ[STRIKE], type=Orders)
        folder = pathlib.Path(orders.folder)
        _keep_events(context, folder)
        if (context.replica, context.rank) == (orders.at.replica, orders.at.rank):
            _at(orders.at, lambda: _ask(folder))
        if (slow := orders.slow) is not None and (context.replica, context.rank) == (slow.replica, slow.rank):
            _at(slow, lambda: _take_time(folder), is_once=False)
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _keep_events(context: RankContext, folder: pathlib.Path) -> None:
    publish = RingLog._publish
    copy = os.open(folder / f"events.{context.replica}.{context.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def publish_twice(self: RingLog, stamp: int, hybrid: int, line: bytes) -> None:
        publish(self, stamp, hybrid, line)  # first: a rank that is killed in between owes the trace nothing
        event = msgspec.json.decode(line) | {"t": stamp / 1e9, "h": hybrid}
        os.write(copy, msgspec.json.encode(event) + b"\n")

    RingLog._publish = publish_twice  # type: ignore[method-assign]


def _at(passage: Fault, act: Callable[[], None], *, is_once: bool = True) -> None:
    """Call `act` in the thread that passes this point, before anything else happens there."""
    passages, lock = Passages([passage]), threading.Lock()
    pass_point = FaultInjector.at

    def at(self: FaultInjector, point: FaultPoint, **where: Any) -> None:
        with lock:
            is_due = passages.take(point, **where) is not None
            if is_due and not is_once:
                passages.add(passage)
        if is_due:
            act()
        pass_point(self, point, **where)

    FaultInjector.at = at  # type: ignore[method-assign]


def _ask(folder: pathlib.Path) -> None:
    begun = folder / f"{NOW}.begun"
    begun.write_text(str(psutil.Process(os.getppid()).ppid()))
    begun.rename(folder / NOW)
    until = time.monotonic() + DEADLINE_S
    while not (folder / DONE).exists():
        assert time.monotonic() < until, "nothing has struck"
        time.sleep(0.002)


def _take_time(folder: pathlib.Path) -> None:
    until = time.monotonic() + SLOW_S
    while (folder / NOW).exists() and not (folder / OVER).exists() and time.monotonic() < until:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
