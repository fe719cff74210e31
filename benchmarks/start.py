"""The start of ranks: from the agent's request to upstream's `train`, and to the first step.

    python -m benchmarks.run --only start

Ranks are forks or warm processes (`--rank-start`); both find everything imported. Each run starts
all ranks of a small job. The time from the agent's request for a rank to the call of upstream's
`train` in that rank has two parts: what upstream's own set-up takes, and what is added. Upstream's
set-up is measured in the same round: as many ranks under torchrun, with everything imported, enter
our `pretrain` together, which there is plain Megatron. Of each run the slowest rank counts.

A job of one replica has the same world on both sides. With several replicas ours has a world for
each, and torchrun one for all.

The time to the first step is from the start of the command until the slowest rank has ended its
first step. It has the imports and the judging of the command line.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import NamedTuple, get_args

from benchmarks.common import Row, row
from benchmarks.overhead import commands
from benchmarks.stamped import LAUNCH, MARK, PRETRAIN, REQUEST, STEP, TRAIN
from megatron_recover.cluster.job import RankStart
from megatron_recover.config import inherited_environment
from megatron_recover.host.gpus import has_gpu
from tests.system.jobs import ROOT, Job, text_data

ONE = Job(
    replicas=1, pp=2, microbatches=2, steps=2, determinism="fast", bucket_elements=40_000_000, extra=("--num-workers", "0")
)  # fmt: skip
JOBS = {"1 replica": ONE, "2 replicas": dataclasses.replace(ONE, replicas=2, microbatches=4)}
"""Neither side has worker processes that read data; ours never has."""
ROUNDS = 7
DEADLINE_S = 300.0
TORCHRUN = "torchrun"
_SCRIPT = str(ROOT / "benchmarks" / "stamped.py")


class Started(NamedTuple):
    """One start of all ranks. All times are in seconds, of the slowest rank."""

    to_pretrain_s: float
    """From the agent's request to our `pretrain`; 0 under torchrun, which has no request."""
    to_train_s: float
    """From the agent's request, under torchrun from `pretrain`, to upstream's `train`."""
    to_step_s: float
    """From the start of the command to the end of the first step."""


def _command(job: Job, how: str, data: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Return the command of a job whose ranks start as `how` says, with clocks."""
    ours, baseline = commands(job, data, folder, "run")
    if how == TORCHRUN:
        command = baseline
    else:
        command = ours
        command[command.index("megatron_recover")] = "benchmarks.stamped"
        at = command.index("run") + 1
        command[at:at] = ["--rank-start", how]
    command[command.index(str(ROOT / "scripts" / "pretrain_gpt.py"))] = _SCRIPT
    return command


def _stamps(logs: Sequence[pathlib.Path]) -> dict[str, dict[tuple[int, int], float]]:
    """Return the time of each stage in each rank (replica, rank)."""
    found: dict[str, dict[tuple[int, int], float]] = {LAUNCH: {}, REQUEST: {}, PRETRAIN: {}, TRAIN: {}, STEP: {}}
    for log in logs:
        for stamp in re.findall(rf"^{MARK}(.+)", log.read_text(errors="replace"), re.MULTILINE):
            stage, replica, rank, seconds = json.loads(stamp)
            found[stage][replica, rank] = seconds
    return found


def measure(job: Job, how: str, data: pathlib.Path, folder: pathlib.Path) -> Started:
    """Run a job to its end in the new `folder`. Raises RuntimeError if a rank lacks a stamp."""
    folder.mkdir()
    output = folder / "output.log"
    environment = {"OMP_NUM_THREADS": "1"} | inherited_environment()
    with open(output, "wb") as stream:
        began = monotonic()
        subprocess.run(
            _command(job, how, data, folder), cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, env=environment,
            check=how != TORCHRUN, timeout=DEADLINE_S,
        )  # fmt: skip
    # Not checked for torchrun: of plain runs of 4 ranks about one in 20 aborts when its processes
    # end, since upstream destroys no process group. By then every stage has its stamp.
    at = _stamps([output, *(folder / "run" / "logs").glob("replica-*.log")])
    num_ranks = job.replicas * job.tp * job.pp
    if any(len(at[stage]) != num_ranks for stage in (PRETRAIN, TRAIN, STEP)):
        printed = output.read_text(errors="replace")
        raise RuntimeError(f"not every rank of {num_ranks} has stamped each stage: {at}; printed:\n{printed[-4000:]}")
    since = at[PRETRAIN] if how == TORCHRUN else at[REQUEST]
    return Started(
        to_pretrain_s=max(seconds - since[place] for place, seconds in at[PRETRAIN].items()),
        to_train_s=max(seconds - since[place] for place, seconds in at[TRAIN].items()),
        to_step_s=max(at[STEP].values()) - began,
    )


def _rounds(job: Job, ways: Sequence[str], data: pathlib.Path, folder: pathlib.Path) -> dict[str, list[Started]]:
    """Start a job in each way, in `ROUNDS` rounds of changing order."""
    found: dict[str, list[Started]] = {how: [] for how in ways}
    measure(job, TORCHRUN, data, folder / "first")  # builds the index cache, and is not counted
    for index in range(ROUNDS):
        for how in ways if index % 2 else ways[::-1]:
            found[how].append(measure(job, how, data, folder / f"{how}-{index}"))
            print(f"{folder.name}, {how}: {found[how][-1]}", file=sys.stderr, flush=True)
    return found


def rows() -> Iterator[Row]:
    """Yield the rows of this benchmark. A machine with a GPU has no forks."""
    ways = [how for how in get_args(RankStart) if how == "warm" or not has_gpu()]
    against = "upstream's set-up of as many ranks under torchrun, with everything imported"
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        data = text_data(pathlib.Path(name))
        for what, job in JOBS.items():
            folder = pathlib.Path(name) / what
            folder.mkdir()
            found = _rounds(job, [TORCHRUN, *ways], data, folder)
            alone = found[TORCHRUN]
            for how in ways:
                more = [mine.to_train_s - its.to_train_s for mine, its in zip(found[how], alone, strict=True)]
                title = f"{what}, {how}: request to train(), beyond upstream's set-up"
                yield row(title, more, "s", baseline=against, goal="< 1")
                yield row(f"{what}, {how}: request to pretrain()", [each.to_pretrain_s for each in found[how]], "s")
            yield row(f"{what}, torchrun: upstream's set-up, pretrain() to train()", [each.to_train_s for each in alone], "s")
            for how, starts in found.items():
                yield row(f"{what}, {how}: command to the end of the first step", [each.to_step_s for each in starts], "s")
