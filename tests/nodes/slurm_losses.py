"""What a real Slurm does to a job when something is lost: a table with a row for each loss, for both shapes of a job.

Each row is one function, which brings its loss about on a node, the *victim*, of a running job (`Case`).
"""

from __future__ import annotations

import enum
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.nodes.nodes import ROOT, Node
from tests.nodes.slurm import TIMEOUT_S, Slurm

OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
SOON_S = 3.0
"""A node that comes back so soon is back before Slurm takes it for down."""


class Shape(enum.Enum):
    """How the nodes of a job come about."""

    ARRAY = "array"
    """A single-node job for each node."""
    ALLOCATION = "allocation"
    """One job with several nodes, and one srun for each."""


class Where(enum.Enum):
    """Which node is struck."""

    BATCH_HOST = "batch host"
    """The one where the script runs (array: the first)."""
    OTHER = "another node"


@dataclass
class Case:
    """A running job, and the node of it that is struck."""

    slurm: Slurm
    shape: Shape
    victim: Node
    folder: Path
    jobs: list[str] = field(default_factory=list)
    """Ids: one, or one for each node."""
    save_s: float = 0.5

    @property
    def others(self) -> list[Node]:
        """All nodes of the job but the victim."""
        return [node for node in self.slurm.nodes if node is not self.victim]

    def submit(self, *flags: str, held_back: str = "") -> None:
        """Submit the job. `held_back`: lines of the script before its steps start."""
        command = [sys.executable, "-m", "tests.nodes.beating", str(self.folder), f"{self.save_s:g}"]
        names = [node.name for node in self.slurm.nodes]
        script = script_of(self.shape, command, names, held_back)
        if self.shape is Shape.ALLOCATION:
            self.jobs = [self.slurm.submit(script, f"--nodes={len(names)}", *flags)]
        else:
            array = self.slurm.submit(script, f"--array=0-{len(names) - 1}%{len(names)}", *flags)
            self.jobs = [f"{array}_{number}" for number in range(len(names))]

    def job_on(self, node: Node) -> str:
        """Return the id of the job that has a node."""
        return next(each for each in self.jobs if node.name in _expanded(self.slurm.job(each)["NodeList"]))

    def beats(self, node: Node) -> list[dict]:
        """Return what the program of a node has left."""
        path = self.folder / f"beats-{node.name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until_running(self, nodes: Iterable[Node] | None = None) -> None:
        """Wait until the programs of all these nodes beat."""
        wanted = list(nodes or self.slurm.nodes)
        self.slurm.until(lambda: all(len(self.beats(node)) > 5 for node in wanted), "all beat")

    def pause_s(self, nodes: Iterable[Node] | None = None) -> float:
        """Return the longest time between two beats of any of these nodes (default: all but the victim)."""
        times = [[beat["at"] for beat in self.beats(node)] for node in (nodes or self.others)]
        return max(later - earlier for each in times for earlier, later in zip(each, each[1:], strict=False))

    def end(self) -> None:
        """Have the programs end by themselves."""
        (self.folder / "end").touch()

    def states(self) -> list[str]:
        """Return the state of each job."""
        return [self.slurm.state(each) for each in self.jobs]

    def until_over(self, deadline_s: float = 60.0) -> list[str]:
        """Wait until all jobs are over; return their states as `sacct` has them."""
        self.slurm.until(lambda: all(state in OVER for state in self.states()), f"over: {self.jobs}", deadline_s)
        return [self.slurm.accounted(each) or self.slurm.state(each) for each in self.jobs]


def script_of(shape: Shape, command: list[str], nodes: list[str], held_back: str) -> str:
    """Return a batch script: what each shape has to have, and `command` on each node."""
    head = ["#!/bin/bash", "#SBATCH --exclusive --mem=0 --open-mode=append --output=%x-%j.out"]
    if shape is Shape.ARRAY:
        return "\n".join([*head, "#SBATCH --nodes=1 --no-requeue", held_back, f"cd {ROOT}", f"exec {shlex.join(command)}", ""])
    step = "srun --no-kill --nodes=1 --ntasks=1 --mpi=none --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --overlap"
    steps = [f"{step} --nodelist={node} --chdir={ROOT} --output={node}.log {shlex.join(command)} &" for node in nodes]
    return "\n".join([*head, "#SBATCH --no-kill", held_back, *steps, "wait", "exit 0", ""])


def _expanded(names: str) -> list[str]:
    """Expand a list such as `n[0-2,4]` of names with one number."""
    stem, _, ranges = names.rstrip("]").partition("[")
    if not ranges:
        return names.split(",")
    bounds = [each.partition("-") for each in ranges.split(",")]
    return [f"{stem}{number}" for low, _, high in bounds for number in range(int(low), int(high or low) + 1)]


def power(case: Case) -> None:
    """The node loses its power for good."""
    case.victim.power_off()
    _until_down(case)


def power_and_back_soon(case: Case) -> None:
    """The node loses its power, and is back before Slurm takes it for down."""
    case.victim.power_off()
    time.sleep(SOON_S)
    case.victim.power_on()
    case.slurm.start_node(case.victim, rebooted=True)


def power_and_back_late(case: Case) -> None:
    """The node loses its power, and is back after Slurm has taken it for down."""
    case.victim.power_off()
    _until_down(case)
    case.victim.power_on()
    case.slurm.start_node(case.victim, rebooted=True)


def slurmstepd(case: Case) -> None:
    """Only Slurm's own processes around the job's die."""
    case.slurm.kill(case.victim, "slurmstepd")


def slurmd(case: Case) -> None:
    """Only Slurm's daemon dies, and Slurm takes the node for down."""
    case.slurm.kill(case.victim, "slurmd")
    _until_down(case)


def down(case: Case) -> None:
    """An operator sets the node down."""
    case.slurm.run("scontrol", "update", f"nodename={case.victim.name}", "state=down", "reason=test")


def drain(case: Case) -> None:
    """An operator drains the node."""
    case.slurm.run("scontrol", "update", f"nodename={case.victim.name}", "state=drain", "reason=test")


def srun_stopped(case: Case) -> None:
    """The node's srun, on the batch host, is stopped, and its output is not read any more."""
    _srun(case, signal.SIGSTOP)


def srun_killed(case: Case) -> None:
    """The node's srun, on the batch host, is killed."""
    _srun(case, signal.SIGKILL)


def _until_down(case: Case) -> None:
    case.slurm.until(lambda: "DOWN" in case.slurm.states()[case.victim.name], "it is down", 4 * TIMEOUT_S)


def _srun(case: Case, number: int) -> None:
    batch_host = next(node for node in case.slurm.nodes if case.slurm.processes(node, "srun "))
    for process in case.slurm.processes(batch_host, "srun ", f"--nodelist={case.victim.name}"):
        process.send_signal(number)


def cancel(case: Case) -> None:
    """A user cancels the job."""
    case.slurm.run("scancel", *case.jobs)


ROWS = (
    power, power_and_back_soon, power_and_back_late, slurmstepd, slurmd, down, drain, srun_stopped, srun_killed,
)  # fmt: skip
WATCHED_S = 3.0


def observe(case: Case, row: Callable[[Case], None]) -> str:
    """Have a loss strike, and return a row of the table."""
    case.submit()
    case.until_running()
    row(case)
    time.sleep(WATCHED_S)
    at = time.monotonic()
    going = [node.name for node in case.slurm.nodes if (beats := case.beats(node)) and at - beats[-1]["at"] < 1.0]
    pause = case.pause_s()
    states = [*case.states()]
    case.end()
    try:
        ended = case.until_over(20.0)
    except AssertionError:
        case.slurm.run("scancel", *case.jobs)
        ended = ["scancel: ", *case.until_over(40.0)]
    time.sleep(1)
    left = case.slurm.leftovers()
    return f"going {going} pause {pause:.2f} then {states} ended {ended} left {left}"


def main() -> None:
    """Print the table."""
    import tempfile

    from tests.nodes import nodes

    wanted = sys.argv[1:]
    with nodes.cage(preload=False) as cage, tempfile.TemporaryDirectory() as folder:
        number = 0
        for row in ROWS:
            for shape in Shape:
                for where in Where:
                    if wanted and row.__name__ not in wanted:
                        continue
                    number += 1
                    network = nodes.Network(cage, Path(folder) / str(number), 4)
                    slurm = Slurm(network)
                    beats = network.shared / "beats"
                    beats.mkdir()
                    victim = slurm.nodes[0 if where is Where.BATCH_HOST else 1]
                    try:
                        text = observe(Case(slurm, shape, victim, beats), row)
                    except Exception as error:
                        text = f"FAILED {str(error)[:3000]}"
                    print(f"{row.__name__:22} {shape.value:10} {where.value:12} {text}", flush=True)
                    network.close()


if __name__ == "__main__":
    main()
