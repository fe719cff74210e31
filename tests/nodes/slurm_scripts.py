"""Printed batch scripts with the real `run` under a real Slurm: the second part of the table of losses (`slurm_losses.py`).

A tiny GPT trains, one replica on each node. Each row is one function, as there; the *coordinator's node* is that of the batch
script in an allocation, and that of the first job to claim the endpoint's file in an array.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_recover.cluster.slurm import script
from megatron_recover.observe.outcome import outcome
from tests.nodes import nodes, slurm_losses
from tests.nodes.nodes import ROOT, Node
from tests.nodes.slurm import KILL_WAIT_S, Slurm
from tests.nodes.slurm_losses import NUM_NODES, OVER, Shape, Where

NODE_TIMEOUT_S = 3.0
_START_S = 240.0
"""What a start may take where all cores are busy: each node imports torch and Megatron."""
_END_S = 120.0
"""What an end may take: without a coordinator, ranks wait for a lost peer as long as a sum may take (`Deadlines.slowest_s`)."""
_SIGNAL_S = 60
_GOING_ON = 10
"""So many steps more say that a node goes on."""
_FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --global-batch-size 6 --train-iters 1000000 --lr 1e-3 --eval-interval 10000000 --eval-iters 1"
    " --tokenizer-type NullTokenizer --vocab-size 257 --mock-data --split 90,5,5 --log-interval 100"
    " --recover-deadline-s 300 --recover-heal off"
)
_THEIRS = ("/tmp/torchinductor_", "wandb-artifacts", "wandb-media")
"""What torch keeps, and what wandb removes at its exit, which a killed process has not."""
_SLOW = ROOT / "tests" / "system" / "slow_save_pretrain.py"


class PrintedJob:
    """A job of a printed script, which trains on all nodes of a Slurm but its last."""

    def __init__(
        self,
        slurm: Slurm,
        shape: Shape,
        *,
        pretrain: str | Path = "scripts/pretrain_gpt.py",
        save_interval: int = 100,
        starts: int = 1,
    ) -> None:
        """Submit it. `starts`: number of starts of a series: in an allocation by requeue, in an array by a chain."""
        self.slurm, self.shape = slurm, shape
        self.run_dir, self.save = slurm.network.shared / "runs", slurm.network.shared / "save"
        self.run_dir.mkdir()
        saving = f"--save {self.save} --load {self.save} --save-interval {save_interval}"
        is_array = shape is Shape.ARRAY
        launch = ("--nproc-per-node", "1", "--node-timeout", f"{NODE_TIMEOUT_S:g}", str(ROOT / pretrain))
        settings = script.Settings(
            command=(), launch=(*launch, *shlex.split(f"{_FLAGS} {saving}")), run_dir=str(self.run_dir), python=sys.executable,
            nodes=NUM_NODES, shape=shape.value, save=str(self.save), chain=starts if is_array else 1, requeues=starts - 1,
            signal_s=_SIGNAL_S, directives=("--job-name=gpt", "--time=20"),
        )  # fmt: skip
        self.ids = [slurm.submit(script.text(settings))]
        for _ in range(1, starts if is_array else 1):
            self.ids.append(slurm.submit(script.text(settings), f"--dependency=afterany:{self.ids[-1]}"))

    def start(self, number: int = 0) -> Path:
        """Return the run directory of a start."""
        if self.shape is Shape.ARRAY:
            return self.run_dir / self.ids[number]
        return self.run_dir / f"{self.ids[0]}-{number}"

    def jobs(self, number: int = 0) -> list[str]:
        """Return the ids of the jobs of a start."""
        if self.shape is Shape.ARRAY:
            return [f"{self.ids[number]}_{task}" for task in range(NUM_NODES)]
        return self.ids

    def states(self, number: int = 0) -> list[str]:
        """Return the state of each job of a start."""
        return [self.slurm.state(each) for each in self.jobs(number)]

    def owner(self) -> str:
        """Return the name of the coordinator's node."""
        if self.shape is Shape.ARRAY:
            return (self.run_dir / f"{self.ids[0]}.endpoint.owner").read_text()
        return self.slurm.job(self.ids[0])["BatchHost"]

    def applied(self, number: int = 0) -> dict[str, list[float]]:
        """Return when each node has applied steps, by name, in seconds of that node's trace."""
        start = self.start(number)
        listed = json.loads((start / "run.json").read_text())["nodes"] if (start / "run.json").exists() else []
        found = {}
        for each in listed:
            path = start / "events.jsonl" if each["number"] == 0 else start / "nodes" / str(each["number"]) / "events.jsonl"
            lines = path.read_bytes().splitlines() if path.exists() else []
            found[each["name"]] = [
                json.loads(line)["t"] for line in lines if line.startswith(b'{"event":"applied"') and line.endswith(b"}")
            ]
        return found

    def until_training(self, number: int = 0) -> None:
        """Wait until all nodes have applied some steps in a start."""

        def are_training() -> bool:
            applied = self.applied(number)
            return len(applied) == NUM_NODES and min(map(len, applied.values())) >= _GOING_ON

        self.slurm.until(are_training, f"start {number} trains", _START_S)

    def pause_s(self, node: str) -> float:
        """Return the longest time between two steps of a node, but its first ones."""
        times = self.applied()[node][2:]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)

    def verdict(self, number: int = 0) -> str:
        """Return what `megatron-recover verdict` prints on a start."""
        found = outcome(self.start(number))
        return found.verdict if found.exit_code is None else f"{found.verdict} {found.exit_code}"

    def left(self) -> dict[str, list[str]]:
        """Return what is left on any node but what other packages make in /tmp wherever they are imported (`_THEIRS`)."""
        found = {
            name: [line for line in lines if not any(each in line for each in _THEIRS)]
            for name, lines in self.slurm.leftovers().items()
        }
        return {name: lines for name, lines in found.items() if lines}

    def end(self) -> None:
        """Have it end after a common step, with a checkpoint, and never come back."""
        self.save.mkdir(exist_ok=True)
        (self.save / "STOP").write_text("ended by the test\n")
        running = [each for each in self.jobs() if self.slurm.state(each) == "RUNNING"]
        if running:
            self.slurm.run("scancel", "--signal=USR2", *running)


@dataclass(frozen=True)
class Result:
    """A row of the table."""

    going_on: tuple[str, ...]
    """Nodes that trained on."""
    pause_s: float
    """The longest time between two steps of a node that trained on."""
    running: tuple[str, ...]
    """State of each job after the loss."""
    has_ended: bool
    """Whether the jobs ended by themselves; otherwise they were cancelled."""
    accounted: tuple[str, ...]
    """State of each job at its end, as `sacct` has it."""
    verdict: str
    left: dict[str, list[str]]
    """Node -> what is left there at the end."""

    def __str__(self) -> str:
        goes, ends = ", ".join(self.going_on) or "none", "" if self.has_ended else " (by scancel)"
        states, ended = "/".join(self.running), "/".join(self.accounted)
        return f"{goes} | {self.pause_s:.2f} | {states} | {ended}{ends} | {self.verdict} | {self.left or 'nothing'}"


def cancel(case: slurm_losses.Case) -> None:
    """A user cancels the job, whose save takes longer than Slurm waits."""
    case.slurm.run("scancel", *case.jobs)
    time.sleep(KILL_WAIT_S)


STRIKES: tuple[Callable[[slurm_losses.Case], None], ...] = (
    slurm_losses.power, slurm_losses.power_and_back_soon, slurm_losses.power_and_back_late, slurm_losses.slurmstepd,
    slurm_losses.slurmd, slurm_losses.down, cancel,
)  # fmt: skip
CASES = tuple(
    (strike, shape, where)
    for strike, shape, where in itertools.product(STRIKES, Shape, Where)
    if where is Where.BATCH_HOST or strike is not cancel
)


def play(slurm: Slurm, strike: Callable[[slurm_losses.Case], None], shape: Shape, where: Where) -> Result:
    """Run a job, have a loss strike, and return what became of the job."""
    pretrain = _SLOW if strike is cancel else "scripts/pretrain_gpt.py"
    job = PrintedJob(slurm, shape, pretrain=pretrain, save_interval=10_000_000 if strike is cancel else 400)
    job.until_training()
    owner = job.owner()
    victim: Node = next(node for node in slurm.nodes if (node.name == owner) == (where is Where.BATCH_HOST))
    before = job.applied()
    strike(slurm_losses.Case(slurm, shape, where, victim, job.run_dir, jobs=job.jobs() if shape is Shape.ARRAY else job.ids))
    time.sleep(NODE_TIMEOUT_S + slurm_losses.WATCHED_S)
    after, running = job.applied(), tuple(job.states())
    going_on = tuple(sorted(name for name in after if len(after[name]) >= len(before[name]) + _GOING_ON))
    if strike is cancel:
        going_on = ()  # they ended
    pause_s = max(map(job.pause_s, going_on), default=0.0)
    job.end()
    has_ended = True
    try:
        slurm.until(lambda: all(state in OVER for state in job.states()), "an end", _END_S)
    except AssertionError:
        has_ended = False
        slurm.run("scancel", *job.jobs())
        slurm.until(lambda: all(state in OVER for state in job.states()), "an end", 60.0)
    accounted = tuple(slurm.accounted(each) or slurm.state(each) for each in job.jobs())
    with contextlib.suppress(AssertionError):
        slurm.until(lambda: not job.left(), "nothing is left", 2 * KILL_WAIT_S)
    return Result(going_on, pause_s, running, has_ended, accounted, job.verdict(), job.left())


def resume(slurm: Slurm, shape: Shape) -> tuple[str, int]:
    """Have the time limit end a start; return its verdict, and the iteration from which the next start goes on."""
    job = PrintedJob(slurm, shape, save_interval=10_000_000, starts=2)
    job.until_training()
    shown = slurm.run("squeue", "-h", "-o", "%M", "-j", job.jobs()[0]).strip().split(":")
    minutes = int(shown[-2]) + (_SIGNAL_S // 60) + 1
    slurm.run("scontrol", "update", f"jobid={job.jobs()[0]}", f"timelimit={minutes}")
    slurm.until(lambda: job.verdict() != "unknown", "the first start ends", 200.0)
    if shape is Shape.ALLOCATION:  # the same job comes back, with the limit that it has got
        slurm.run("scontrol", "update", f"jobid={job.ids[0]}", "timelimit=20")
    job.until_training(1)
    loaded = [
        json.loads(line)["iteration"]
        for line in (job.start(1) / "events.jsonl").read_text().splitlines()
        if '"phase":"loaded"' in line
    ]
    slurm.run("scancel", *job.ids)
    slurm.until(lambda: not job.left(), "nothing is left", 3 * KILL_WAIT_S)
    return job.verdict(), max(loaded, default=0)


def main() -> None:
    """Print the table, or the rows that are named."""
    wanted = sys.argv[1:]
    print(
        "| loss | shape | where | train on | longest pause (s) | state | at the end | verdict | left |\n"
        "|---|---|---|---|---:|---|---|---|---|"
    )
    with nodes.cage(preload=False) as cage, tempfile.TemporaryDirectory() as folder:
        rows: list[tuple[str, Shape, str, Callable[[Slurm], object]]] = [
            (strike.__name__, shape, where.value, lambda slurm, each=(strike, shape, where): play(slurm, *each))
            for strike, shape, where in CASES
        ]
        rows += [("time limit", shape, "", lambda slurm, shape=shape: resume(slurm, shape)) for shape in Shape]
        for number, (name, shape, where, row) in enumerate(rows):
            if wanted and name not in wanted:
                continue
            network = nodes.Network(cage, Path(folder) / str(number), NUM_NODES + 1)
            try:
                result = row(Slurm(network))
            except (AssertionError, OSError) as error:
                result = f"FAILED: {error}"
            finally:
                network.close()
            print(f"| {name} | {shape.value} | {where} | {result} |", flush=True)


if __name__ == "__main__":
    main()
