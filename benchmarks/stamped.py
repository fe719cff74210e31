"""The launcher and `scripts/pretrain_gpt.py`, with a clock at each stage of the start of a rank.

    python -m benchmarks.stamped run <flags of `megatron-recover run`>
    torchrun --nproc-per-node 2 benchmarks/stamped.py <Megatron's flags>

The first command stamps each request for a rank, the second each call in a rank. A stamp is a line
of stdout: `MARK` and JSON. The launcher also stamps the start of the run, from which the times in
its trace count. All times are of CLOCK_MONOTONIC, which the processes of a machine share.

Under torchrun a rank first imports what our ranks find imported, and then waits for the other
ranks. So the clocks there show upstream's set-up alone.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "scripts" / "pretrain_gpt.py"
MARK = "stamp: "
"""Beginning of the line of a stamp: [stage, replica, rank, seconds]."""
LAUNCH, REQUEST, PRETRAIN, TRAIN, STEP = "launch", "request", "pretrain", "train", "step"
"""Stages: the run starts (replica and rank are -1), the agent requests the rank, our `pretrain` is
entered, upstream's `train` is entered, and the first step is over."""


def _stamp(stage: str, replica: int, rank: int, at_s: float | None = None) -> None:
    line = MARK + json.dumps([stage, replica, rank, time.monotonic() if at_s is None else at_s])
    os.write(sys.stdout.fileno(), f"\n{line}\n".encode())  # at once: under torchrun all ranks share the file


def _stamping(stage: str, call: Callable[..., Any], replica: int, rank: int) -> Callable[..., Any]:
    """Return `call` wrapped: it stamps its first call."""
    is_first = True

    @functools.wraps(call)
    def stamped(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            _stamp(stage, replica, rank)
        return call(*args, **kwargs)

    return stamped


def _import_and_wait(rank: int) -> None:
    """Import what ranks find imported under the launcher, and wait for the other ranks."""
    from megatron_recover.cli.describing import PRELOAD
    from megatron_recover.cluster.rank_process import preload

    for name in PRELOAD:
        preload(name)
    from torch.distributed import TCPStore

    num_ranks = int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if store.add("imported", 1) == num_ranks:
        store.set("all imported", str(rank))
    store.wait(["all imported"])


def train() -> None:
    """Run the training script in this rank."""
    from megatron_recover import megatron as recover
    from megatron_recover.config import rank_context

    context = rank_context()
    if context is None:
        place = (0, int(os.environ["RANK"]))
        _import_and_wait(place[1])
    else:
        place = (context.replica, context.rank)
    from megatron.training import training as upstream

    recover.pretrain = _stamping(PRETRAIN, recover.pretrain, *place)
    upstream.train = _stamping(TRAIN, upstream.train, *place)
    upstream.training_log = _stamping(STEP, upstream.training_log, *place)  # called after each step
    runpy.run_path(str(SCRIPT), run_name="__main__")


def launch() -> int:
    """Run the launcher's command line; return its exit code."""
    from megatron_recover import cli
    from megatron_recover.cluster.agent import Agent
    from megatron_recover.cluster.launcher import Launcher

    spawn, init = Agent.spawn, Launcher.__init__

    @functools.wraps(init)
    def begun(self: Launcher, *args: Any, **others: Any) -> None:
        init(self, *args, **others)
        _stamp(LAUNCH, -1, -1, self._started_at)

    @functools.wraps(spawn)
    def stamped(self: Agent, replica: int, rank: int, **others: Any) -> None:
        _stamp(REQUEST, replica, rank)
        spawn(self, replica, rank, **others)

    Agent.spawn, Launcher.__init__ = stamped, begun  # type: ignore[method-assign]
    return cli.main()


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        sys.exit(launch())
    train()
