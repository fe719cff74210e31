"""`scripts/pretrain_gpt.py` in which replicas have time to come back, and things happen at fault points of any rank.

As long as members are missing, a step takes `Orders.step_s`, which the ranks spend asleep, a part before each forward. With the
full roster it takes `Orders.full_step_s`: they compute as fast as they can.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import msgspec
import psutil

from megatron_recover.config import RankContext, rank_context
from megatron_recover.control_plane.rank_driver import RankDriver
from megatron_recover.faults import Fault, FaultInjector, FaultPoint, Passages
from tests.megatron import token_exchange

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"
ORDERS = "JOINING_ORDERS"
ACTS = "acts"
"""File in the run directory with a line for each act that ends or asks for something, written before it is done."""
_RECORDED = ("kill", "term", "drain", "scale")


class Act(msgspec.Struct, frozen=True):
    """What a rank does as it passes a fault point."""

    at: Fault
    do: str
    """`kill REPLICA RANK`, `term` (SIGTERM to the launcher), `drain REPLICA`, `scale REPLICAS`, `sleep SECONDS`,
    `copy FROM TO`."""


class Orders(msgspec.Struct, frozen=True):
    """What is different from the script, in `ORDERS` as JSON."""

    microbatches: int
    step_s: float = 0.75
    full_step_s: float = 0.0
    full: int = 0
    """Number of members from which on the roster is full; 0: that at the start."""
    acts: tuple[Act, ...] = ()
    newcomers_raise: bool = False
    newcomers_get: tuple[str, ...] = ()
    """Further flags that newcomers alone have."""
    substitute: bool = False
    """All ranks have the substitute of DeepEP."""


def main() -> None:
    """Train as ordered."""
    spec = importlib.util.spec_from_file_location("pretrain_gpt", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    context = rank_context()
    if context is not None and not context.dry_run:
        orders = msgspec.json.decode(os.environ[ORDERS], type=Orders)
        if orders.substitute:
            token_exchange.install()
        (pathlib.Path(context.run_dir) / f"pid.{context.replica}.{context.rank}").write_text(str(os.getpid()))
        if context.newcomer and orders.newcomers_raise:
            raise RuntimeError("this script does not run in newcomers")
        if context.newcomer:
            sys.argv += orders.newcomers_get
        _act(context, orders.acts)
        _take_time(script, context, orders)
    script.main()


def _take_time(script: Any, context: RankContext, orders: Orders) -> None:
    drivers: list[RankDriver] = []
    init, forward_step = RankDriver.__init__, script.forward_step

    def remember(self: RankDriver, *args: Any, **others: Any) -> None:
        init(self, *args, **others)
        drivers.append(self)

    def forward(*args: Any, **others: Any) -> Any:
        num_members = len(drivers[0].roster) if drivers else 0
        step_s = orders.step_s if num_members < (orders.full or context.num_replicas) else orders.full_step_s
        time.sleep(step_s * num_members / orders.microbatches)
        return forward_step(*args, **others)

    RankDriver.__init__, script.forward_step = remember, forward  # type: ignore[method-assign]


def _act(context: RankContext, acts: tuple[Act, ...]) -> None:
    """Do what is ordered in the thread that passes a point, before anything else happens there."""
    mine = [act for act in acts if (act.at.replica, act.at.rank) == (context.replica, context.rank)]
    if not mine:
        return
    passages, pass_point = Passages({act.at: None for act in mine}), FaultInjector.at

    def at(self: FaultInjector, point: FaultPoint, **where: Any) -> None:
        if (due := passages.take(point, **where)) is not None:
            for act in mine:
                if act.at == due:
                    _record(context, act)
                    _do(context, *act.do.split())
        pass_point(self, point, **where)

    FaultInjector.at = at  # type: ignore[method-assign]


def _record(context: RankContext, act: Act) -> None:
    if act.do.split()[0] in _RECORDED:
        with open(pathlib.Path(context.run_dir) / ACTS, "a") as file:
            file.write(f"{act.at.replica}.{act.at.rank} in {act.at.point.value}: {act.do}\n")


def _do(context: RankContext, what: str, *arguments: str) -> None:
    folder = pathlib.Path(context.run_dir)
    match what:
        case "kill":
            os.kill(int((folder / f"pid.{'.'.join(arguments)}").read_text()), signal.SIGKILL)
        case "term":
            os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGTERM)
        case "drain":
            _ask("drain", arguments[0], str(folder))
        case "scale":
            _ask("scale", str(folder), "--replicas", arguments[0])
        case "sleep":
            time.sleep(float(arguments[0]))
        case "copy":
            changed = pathlib.Path(arguments[1]).with_suffix(".changed")
            changed.write_bytes(pathlib.Path(arguments[0]).read_bytes())
            changed.rename(arguments[1])
        case _:
            raise AssertionError(what)


def _ask(*words: str) -> None:
    """Start a command of the user, which goes on by itself."""
    subprocess.Popen(
        [sys.executable, "-m", "megatron_recover", *words], start_new_session=True, stdin=subprocess.DEVNULL
    )  # fmt: skip


if __name__ == "__main__":
    main()
