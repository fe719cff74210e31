"""The loss of a node: from the loss to the plan of all survivors; and nodes that are only silent.

    python -m benchmarks.run --only node_losses        (as root)

Nodes are namespaces on this machine (`tests/nodes/nodes.py`). A toy job has one replica of two
ranks on each of four nodes; agents, leaders and coordinator are those of production. In each run
a fault strikes one node, never that of the coordinator.

- *Killed*: SIGKILL to all processes of the node, in the order in which the kernel lists them. Time
  counts from before the first signal. The node's kernel stays, and ends the connections.
- *Cut off*: all that the node sends, and all that it is sent, vanishes from some instant on. Time
  counts from before that, with `--node-timeout 2`.
- *Cut for 5 s*, with the default of `--node-timeout`. The silence is *seen* when the coordinator
  records it, *shown* when the event is in the trace that `top` follows, and *told* when node 0 has
  printed a line.
- *Busy*: no fault; endless loops keep all cores busy for ten minutes, with the default of
  `--node-timeout`.

The plan of the survivors is that of the last of them. Times of several nodes are compared on the
machine's one monotonic clock (`tests/nodes/merging.py`).
"""

from __future__ import annotations

import contextlib
import math
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.busy import LOOPS_A_CORE, busy_cores
from benchmarks.common import Row, row
from megatron_recover import trace
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import NODE_S, Deadlines
from megatron_recover.observe.follow.tail import Tail
from tests.cluster.waiting import until_files
from tests.nodes import nodes
from tests.nodes.jobs import NodesJob
from tests.nodes.merging import on_one_clock
from tests.nodes.nodes import Cage, Network, Node

RUNS = 20
"""Runs of each of the first three kinds."""
NUM_NODES, MICROBATCHES, PACE_S = 4, 8, 0.05
"""Size of the job; a step takes a tenth of a second."""
TIMEOUT_S = 2.0
"""`--node-timeout` of the runs whose node is cut off."""
CUT_S, BUSY_S = 5.0, 600.0
BEAT_S = Deadlines.of().beat_s


class Silence(NamedTuple):
    """Beats since a node was cut off, and what became of the job."""

    seen: float
    shown: float
    told: float
    num_lost: int


class Busy(NamedTuple):
    """A job beside busy cores."""

    silences_s: list[float]
    """Seconds of each silence of a node."""
    num_lost: int
    num_steps: int


@contextlib.contextmanager
def running(cage: Cage, folder: Path, node_silence_s: float) -> Iterator[NodesJob]:
    """Yield a job that trains on a network of its own, until its end."""
    network = Network(cage, folder, NUM_NODES)
    try:
        job = NodesJob(
            network, num_nodes=NUM_NODES, node_silence_s=node_silence_s, replicas=NUM_NODES, ranks=2, steps=1_000_000,
            microbatches=MICROBATCHES, pace_s=PACE_S, deadlines={},
        )  # fmt: skip
        job.until_training(5)
        time.sleep(random.uniform(0.0, 2 * BEAT_S))  # a loss has no favourite instant within a step or a beat
        yield job
    finally:
        network.close()


def end(job: NodesJob, living: list[Node]) -> None:
    """Have a job end after a common step. Raises RuntimeError if a node ends otherwise."""
    job.agents["n0"].send_signal(signal.SIGTERM)
    codes = job.end(living)
    if set(codes.values()) != {ExitCode.INTERRUPTED}:
        raise RuntimeError(f"the nodes ended with {codes}:\n{job.output()}")


def events_of(job: NodesJob) -> list[dict[str, Any]]:
    """Return the events of all nodes."""
    return [event for _, events in on_one_clock(Path(job.spec.run_dir), job.sums) for event in events]


def num_lost(events: list[dict[str, Any]]) -> int:
    """Return the number of nodes and replicas that were lost."""
    return sum((event["event"] == "node_lost") + len(event.get("losses", ())) for event in events)


def planned_at(job: NodesJob, victim: Node) -> float:
    """Wait until the others of a node that is lost go on, and end the job.

    Return when the last survivor had its plan of the next generation.
    """
    living = [node for node in job.nodes if node is not victim]
    survivors = [node.number for node in living]
    job.until_going_on(survivors, 3)
    end(job, living)
    plans = dict.fromkeys(survivors, math.inf)
    for event in events_of(job):
        if event["event"] == "plan" and event["generation"] == 2:
            assert event["roster"] == survivors, f"the loss of a node made a roster {event['roster']}"
            plans[event["replica"]] = min(event["t"], plans[event["replica"]])
    assert max(plans.values()) < math.inf, f"not all survivors have a plan: {plans}"
    return max(plans.values())


def killed(cage: Cage, folder: Path, number: int) -> float:
    """Kill all processes of a node; return the seconds until the last survivor had its plan."""
    with running(cage, folder, NODE_S) as job:
        processes = job.nodes[number].processes()
        began = time.monotonic()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return planned_at(job, job.nodes[number]) - began


def cut_off(cage: Cage, folder: Path, number: int) -> float:
    """Cut a node off for good; return the seconds until the last survivor had its plan."""
    with running(cage, folder, TIMEOUT_S) as job:
        began = time.monotonic()
        job.nodes[number].cut()
        return planned_at(job, job.nodes[number]) - began


def cut_for_a_while(cage: Cage, folder: Path, number: int) -> Silence:
    """Cut a node off for `CUT_S`."""
    with running(cage, folder, NODE_S) as job:
        run_dir, victim, console = Path(job.spec.run_dir), job.nodes[number], job.agents["n0"]
        followed = Tail(run_dir / trace.EVENTS_FILE)
        said, at = f"node {victim.name} is silent", dict[str, float]()
        _, num_before = list(followed.lines()), console.text().count(said)  # it may have been slow to start

        def have_said_so() -> bool:
            if any(b'"node_silent"' in line and b'"began"' in line for line in followed.lines()):
                at.setdefault("shown", time.monotonic())
            if console.text().count(said) > num_before:
                at.setdefault("told", time.monotonic())
            return len(at) == 2

        began = time.monotonic()
        victim.cut()
        until_files(have_said_so, "the silence of the node", run_dir, console.output.parent)
        time.sleep(max(0.0, began + CUT_S - time.monotonic()))
        victim.heal()
        job.until_going_on(range(NUM_NODES), 3)
        end(job, job.nodes)
        events = events_of(job)
        silences = [event["t"] for event in events if event["event"] == "node_silent" and event["node"] == number]
        seen_at = min(at_s for at_s in silences if at_s > began)
        return Silence(*((each - began) / BEAT_S for each in (seen_at, at["shown"], at["told"])), num_lost(events))


def beside_busy_cores(cage: Cage, folder: Path) -> Busy:
    """Train for `BUSY_S` seconds beside busy cores."""
    with running(cage, folder, NODE_S) as job:
        with busy_cores():
            time.sleep(BUSY_S)
        end(job, job.nodes)
        events = events_of(job)
        silences_s = [event["seconds"] for event in events if event["event"] == "node_silent" and event["phase"] == "over"]
        return Busy(silences_s, num_lost(events), min(job.steps().values()))


def rows() -> Iterator[Row]:
    """Yield the rows of this benchmark. Raises OSError where no network of nodes can be made."""
    if reason := nodes.why_not():
        raise OSError(reason)
    with nodes.cage() as cage, tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder, numbers = Path(name), [1 + run % (NUM_NODES - 1) for run in range(RUNS)]
        kills = [1000 * killed(cage, folder / f"killed-{run}", number) for run, number in enumerate(numbers)]
        cuts = [cut_off(cage, folder / f"cut-{run}", number) for run, number in enumerate(numbers)]
        silences = [cut_for_a_while(cage, folder / f"silent-{run}", number) for run, number in enumerate(numbers)]
        busy = beside_busy_cores(cage, folder / "busy")
    what = "node killed: kill to the last survivor's plan"
    yield row(what, kills, "ms", goal="< 300")
    yield row(f"{what}, worst", kills, "ms", value=max(kills), goal="< 300")
    what = "node cut off, --node-timeout 2: cut to the last survivor's plan"
    yield row(what, cuts, "s", goal="< 3")
    yield row(f"{what}, worst", cuts, "s", value=max(cuts), goal="< 3")
    for name in ("seen", "shown", "told"):
        beats = [getattr(each, name) for each in silences]
        yield row(f"node cut for {CUT_S:g} s: cut to its silence {name}, worst", beats, "beats", value=max(beats), goal="< 2")
    lost = [each.num_lost for each in silences]
    yield row(f"nodes lost by cuts of {CUT_S:g} s, worst", lost, "count", value=max(lost), goal="== 0")
    beside = f"{LOOPS_A_CORE} endless loops a core, {BUSY_S:.0f} s"
    yield row("nodes lost beside busy cores", [busy.num_lost], "count", baseline=beside, goal="== 0")
    yield row("silences of nodes beside busy cores", [len(busy.silences_s)], "count", baseline=beside)
    yield row("longest silence of a node beside busy cores", [max(busy.silences_s, default=0.0)], "s", baseline=beside)
    yield row("steps beside busy cores", [busy.num_steps], "count", baseline=beside)
