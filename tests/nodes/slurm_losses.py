"""What a real Slurm does to a job when something is lost: a table with a row for each loss, for both shapes of a job.

Each row is one function, which brings its loss about on a node, the *victim*, of a running job (`Case`).
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.nodes import nodes
from tests.nodes.nodes import ROOT, Node
from tests.nodes.slurm import KILL_WAIT_S, TIMEOUT_S, Slurm

NUM_NODES = 3
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
    where: Where
    victim: Node
    folder: Path
    jobs: list[str] = field(default_factory=list)
    """Ids: one, or one for each node."""
    save_s: float = 0.5

    @property
    def others(self) -> list[Node]:
        """All nodes of the job but the victim."""
        return [node for node in self.slurm.nodes if node is not self.victim]

    def submit(self, *flags: str) -> None:
        """Submit the job."""
        command = [sys.executable, "-m", "tests.nodes.beating", str(self.folder), f"{self.save_s:g}"]
        names = [node.name for node in self.slurm.nodes]
        script = script_of(self.shape, command, names)
        if self.shape is Shape.ALLOCATION:
            self.jobs = [self.slurm.submit(script, f"--nodes={len(names)}", *flags)]
        else:
            array = self.slurm.submit(script, f"--array=0-{len(names) - 1}%{len(names)}", *flags)
            self.jobs = [f"{array}_{number}" for number in range(len(names))]

    def beats(self, node: Node) -> list[dict]:
        """Return what the program of a node has left."""
        path = self.folder / f"beats-{node.name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until_running(self, nodes: Iterable[Node] | None = None) -> None:
        """Wait until the programs of all these nodes beat."""
        wanted = list(self.slurm.nodes if nodes is None else nodes)
        self.slurm.until(lambda: all(len(self.beats(node)) > 5 for node in wanted), "all beat")

    def pause_s(self, nodes: Iterable[Node]) -> float:
        """Return the longest time between two beats of any of these nodes."""
        times = [[beat["at"] for beat in self.beats(node)] for node in nodes]
        return max((later - earlier for each in times for earlier, later in itertools.pairwise(each)), default=0.0)

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


def script_of(shape: Shape, command: list[str], nodes: list[str]) -> str:
    """Return a batch script: what each shape has to have, and `command` on each node."""
    head = ["#!/bin/bash", "#SBATCH --exclusive --mem=0 --open-mode=append --output=%x-%j.out"]
    if shape is Shape.ARRAY:
        return "\n".join([*head, "#SBATCH --nodes=1 --no-requeue", f"cd {ROOT}", f"exec {shlex.join(command)}", ""])
    step = "srun --no-kill --nodes=1 --ntasks=1 --mpi=none --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --overlap"
    steps = [f"{step} --nodelist={node} --chdir={ROOT} --output={node}.log {shlex.join(command)} &" for node in nodes]
    return "\n".join([*head, "#SBATCH --no-kill", *steps, "wait", "exit 0", ""])


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
        with contextlib.suppress(psutil.NoSuchProcess):  # srun has a child, which ends with it
            process.send_signal(number)


def gone_before_its_step(case: Case) -> None:
    """The node has lost its power when the job is submitted, and Slurm has not seen that yet."""
    case.victim.power_off()
    case.submit()
    case.until_running(case.others if case.shape is Shape.ARRAY or case.where is Where.OTHER else ())
    _until_down(case)


def cancel(case: Case) -> None:
    """A user cancels the job, whose save takes longer than Slurm waits."""
    case.slurm.run("scancel", *case.jobs)
    case.slurm.until(lambda: not case.slurm.leftovers(), "nothing is left", 3 * KILL_WAIT_S)


STRIKES = (
    power, power_and_back_soon, power_and_back_late, slurmstepd, slurmd, down, drain, srun_stopped, srun_killed,
    gone_before_its_step, cancel,
)  # fmt: skip
CASES = tuple(
    (strike, shape, where)
    for strike, shape, where in itertools.product(STRIKES, Shape, Where)
    if shape is Shape.ALLOCATION or strike not in (srun_stopped, srun_killed)  # an array has no srun
)
ENDS_ALL = {
    (down, Shape.ALLOCATION, Where.BATCH_HOST),
    (gone_before_its_step, Shape.ALLOCATION, Where.BATCH_HOST),
}
"""Slurm kills the batch script, and with it all steps; or it never starts, and the job is queued again."""
NEEDS_SCANCEL = ENDS_ALL - {(down, Shape.ALLOCATION, Where.BATCH_HOST)} | {
    *itertools.product((power, power_and_back_soon, power_and_back_late), [Shape.ALLOCATION], [Where.BATCH_HOST]),
    *itertools.product([srun_stopped], [Shape.ALLOCATION], Where),
    *itertools.product([slurmstepd], Shape, Where),
}
"""The job runs on when its programs have ended: nobody is left who would end it."""
SPARES_VICTIM = (slurmstepd, slurmd, drain, srun_stopped)
"""Losses that the program on the node itself survives."""
WATCHED_S = 3.0
"""For so long after a loss it is seen who goes on."""
STILL_S = 1.0
"""A program that has not beaten for so long has ended."""


@dataclass(frozen=True)
class Result:
    """A row of the table: what became of a job."""

    going_on: tuple[str, ...]
    """Nodes whose programs went on."""
    pause_s: float
    """The longest time between two beats of a program that went on."""
    running: tuple[str, ...]
    """State of each job after the loss."""
    has_ended: bool
    """Whether the job ended when its programs did. If not, it was cancelled."""
    accounted: tuple[str, ...]
    """State of each job at its end, in the account."""
    left: dict[str, list[str]]
    """Node -> what is left there at the end."""

    def __str__(self) -> str:
        goes = ", ".join(self.going_on) or "none"
        ends = "" if self.has_ended else " (by scancel: it did not end by itself)"
        states, ended = "/".join(self.running), "/".join(self.accounted)
        return f"{goes} | {self.pause_s:.2f} | {states} | {ended}{ends} | {self.left or 'nothing'}"


def play(slurm: Slurm, strike: Callable[[Case], None], shape: Shape, where: Where) -> Result:
    """Run a job, have a loss strike, and return what became of the job."""
    folder = slurm.network.shared / "beats"
    folder.mkdir()
    save_s = KILL_WAIT_S + 5.0 if strike is cancel else 0.5
    case = Case(slurm, shape, where, slurm.nodes[0 if where is Where.BATCH_HOST else 1], folder, save_s=save_s)
    if strike is not gone_before_its_step:
        case.submit()
        case.until_running()
    strike(case)
    time.sleep(WATCHED_S)
    now = time.monotonic()
    going_on = [node for node in slurm.nodes if (beats := case.beats(node)) and now - beats[-1]["at"] < STILL_S]
    pause_s, running = case.pause_s(going_on), tuple(case.states())
    case.end()
    has_ended = True
    try:
        case.until_over(20.0)
    except AssertionError:
        has_ended = False
        slurm.run("scancel", *case.jobs)
    accounted = tuple(case.until_over())
    with contextlib.suppress(AssertionError):
        slurm.until(lambda: not slurm.leftovers(), "nothing is left", 2.0 * KILL_WAIT_S)
    return Result(tuple(node.name for node in going_on), pause_s, running, has_ended, accounted, slurm.leftovers())


def main() -> None:
    """Print the table, or the rows that are named."""
    wanted = sys.argv[1:]
    print(
        "| loss | shape | where | go on | longest pause (s) | state | at the end | left |\n|---|---|---|---|---:|---|---|---|"
    )
    with nodes.cage(preload=False) as cage, tempfile.TemporaryDirectory() as folder:
        cases = [each for each in CASES if not wanted or each[0].__name__ in wanted]
        for number, (strike, shape, where) in enumerate(cases):
            network = nodes.Network(cage, Path(folder) / str(number), NUM_NODES + 1)
            try:
                result = play(Slurm(network), strike, shape, where)
            except (AssertionError, OSError) as error:
                result = f"FAILED: {error}"
            finally:
                network.close()
            print(f"| {strike.__name__.replace('_', ' ')} | {shape.value} | {where.value} | {result} |", flush=True)


if __name__ == "__main__":
    main()
