"""Real agents on one machine: nodes that come after the start of a job, and take the place of those that are lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from megatron_recover import trace
from megatron_recover.cluster import status
from megatron_recover.cluster.meeting import Meeting
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.observe.verify.check import Verdict, check, describe
from tests import forks
from tests.cluster import test_newcomers
from tests.cluster.jobs import ROOT, Outcome, Spec, command, run
from tests.cluster.running import FOR_EVER
from tests.cluster.test_joins import IN_PLACE, TOY

pytestmark = pytest.mark.timeout(240)
DEADLINE_S = 100.0


def free_port() -> int:
    """A port that no connection gets by itself: the coordinator listens there only later."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


class Nodes:
    """The agents of one toy job with a replica of one rank on each of its two nodes, and those that come later."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.key = self.make_key("key", "a key that only this test knows of")
        self.meeting = Meeting(
            least_nodes=2, most_nodes=2, host="127.0.0.1", port=free_port(), flag="--master-addr", join_s=60, node_s=2.0
        )
        self.spec = Spec(
            run_dir=str(folder / "run"), sums_dir=str(folder), replicas=2, ranks=1, slots=1, steps=FOR_EVER, microbatches=6,
            pace_s=0.02, config=IN_PLACE, heals=True, script=str(TOY), key_file=str(self.key), meeting=self.meeting,
        )  # fmt: skip
        self.programs: dict[str, forks.Program] = {}

    def make_key(self, name: str, text: str) -> Path:
        (key := self.folder / name).write_text(f"{text}\n")
        key.chmod(0o600)
        return key

    def start(self, name: str, node_rank: int, **others: object) -> None:
        """Start the agent of a node."""
        spec = replace(self.spec, meeting=replace(self.meeting, node_rank=node_rank), **others)
        with open(self.folder / f"{name}.out", "ab") as output:
            self.programs[name] = forks.start(command(spec), cwd=ROOT, environment=os.environ, output=output.fileno())
        self._stack.callback(self.programs[name].kill)

    def start_both(self, **others: object) -> None:
        """Start the two nodes of the job, and return when they train."""
        for node_rank in range(2):
            self.start(f"n{node_rank}", node_rank, **others)
        self.until(lambda: min(self.num_steps(0), self.num_steps(1)) > 10, "training")

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"{what}\n{self.output()}"
            time.sleep(0.05)

    def num_steps(self, replica: int) -> int:
        """How many steps the replica has applied."""
        path = self.folder / f"sums-{replica}-0.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def until_steps(self, num: int = 15) -> None:
        """Return when replica 0 has applied so many steps more."""
        before = self.num_steps(0)
        self.until(lambda: self.num_steps(0) >= before + num, f"{num} steps more")

    @property
    def said(self) -> str:
        """What node 0 has said."""
        log = self.folder / "run" / "launcher.log"
        return log.read_text() if log.exists() else ""

    def nodes(self) -> list[tuple[int, str]]:
        """Number and state of each node, as `status` shows them."""
        found = status.read(self.folder / "run")
        return [] if found is None else [(each.number, each.state) for each in found.nodes]

    def kill_group(self, name: str) -> None:
        """End an agent at once, with its process group."""
        os.killpg(self.programs[name].pid, signal.SIGKILL)

    def signal_all(self, name: str, number: int) -> None:
        """Send a signal to the processes of a node, its agent first."""
        agent = psutil.Process(self.programs[name].pid)
        for process in (agent, *agent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def output(self) -> str:
        return "\n".join(f"--- {path.name}:\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("*.out")))

    def end(self, *names: str, code: int = ExitCode.INTERRUPTED) -> tuple[Outcome, Verdict]:
        """End the job by a signal to node 0; what these nodes have done holds, and is that of an undisturbed run."""
        if code == ExitCode.INTERRUPTED:
            self.programs["n0"].terminate()
        codes = {name: self.programs[name].wait(DEADLINE_S) for name in names}
        assert set(codes.values()) == {code}, (codes, self.output())
        outcome = Outcome(self.spec, code, self.output())
        outcome.assert_exactly_once()
        verdict = check(self.folder / "run")
        assert verdict.holds, describe(verdict)
        by_step: dict[int, set[str]] = {}
        for replica in range(10):
            for line in outcome.sums(replica, 0):
                by_step.setdefault(line["step"], set()).add(line["digest"])
        calm = replace(self.spec, run_dir=str(self.folder / "calm"), sums_dir="", meeting=None, slots=0, pace_s=0.0)
        undisturbed = run(replace(calm, steps=len(by_step)))
        assert {line["step"]: {line["digest"]} for line in undisturbed.sums(0, 0)} == by_step, "bit by bit"
        return outcome, verdict


def num_changes(outcome: Outcome) -> int:
    """How many generations were made for a loss or a newcomer."""
    return sum(bool(event.losses or event.newcomers) for event in outcome.of(trace.Generation))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Two nodes, which the test starts; all agents are killed at its end."""
    with contextlib.ExitStack() as stack:
        yield Nodes(tmp_path, stack)


def test_a_node_that_comes_after_a_loss_takes_the_place_of_the_lost_one(nodes: Nodes) -> None:
    nodes.start_both()
    nodes.kill_group("n1")
    nodes.until(lambda: "replica 1 lost" in nodes.said, "the loss")
    nodes.until_steps()
    nodes.start("late", 1)
    nodes.until(lambda: "replica 2 joins" in nodes.said, "the newcomer")
    nodes.until(lambda: nodes.num_steps(2) > 15, "steps of the newcomer")
    nodes.until(lambda: (2, "here") in nodes.nodes() and (1, "lost") in nodes.nodes(), "the state")
    outcome, _ = nodes.end("n0", "late")
    assert outcome.roster == (0, 2), outcome.output
    [joined] = outcome.of(trace.NodeJoined)
    assert (joined.node, joined.slots) == (2, 1)
    assert "has come late, as node 2: its 1 slot is spare" in nodes.said


@pytest.mark.parametrize("rank_start", ["fork", "warm"])
def test_a_spare_node_waits_until_a_node_is_lost(nodes: Nodes, rank_start: str) -> None:
    nodes.start_both(rank_start=rank_start)
    nodes.start("late", 7, rank_start=rank_start)
    nodes.until(lambda: (2, "spare") in nodes.nodes(), "the spare node")
    nodes.until_steps()
    assert nodes.num_steps(2) == 0, "the job has all the replicas that it wants"
    nodes.kill_group("n1")
    nodes.until(lambda: nodes.num_steps(2) > 15, "steps of the newcomer")
    outcome, _ = nodes.end("n0", "late")
    assert outcome.roster == (0, 2), outcome.output
    assert sum(bool(event.losses) for event in outcome.of(trace.Generation)) == 1, (
        "on a busy machine it may join at a second try"
    )


def test_healthy_slots_of_a_lost_replica_and_late_ones_form_a_replica_together(nodes: Nodes) -> None:
    """Three slots a node, and two ranks a replica: replica 1 has one rank on each node, and loses the one on node 1."""
    (nodes.folder / "mode").write_text("wait")
    nodes.spec = replace(nodes.spec, script=str(test_newcomers.TOY), replicas=3, ranks=2, slots=3)
    nodes.start_both()
    nodes.kill_group("n1")
    nodes.until(lambda: "replica 2 lost" in nodes.said, "the loss")
    nodes.start("late", 1)
    nodes.until(lambda: sum(replica > 2 for replica, _ in test_newcomers.notes(nodes.folder)) == 4, "two newcomers")
    nodes.until_steps()
    nodes.programs["n0"].terminate()
    assert {nodes.programs[name].wait(DEADLINE_S) for name in ("n0", "late")} == {ExitCode.INTERRUPTED}, nodes.output()
    found = {key: note["context"] for key, note in test_newcomers.notes(nodes.folder).items() if key[0] > 2}
    late = 2 * test_newcomers.NEXT_NODE
    assert {slot for _, slot in found} == {2, late, late + 1, late + 2}
    over_both = [replica for replica, slot in found if slot == 2]
    where = {(each["leader"], each["store"]) for (replica, _), each in found.items() if replica in over_both}
    assert len(where) == 1 and all(store for _, store in where), "its ranks have one leader and one store"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_late_node_that_dies_or_hangs_while_it_prepares_costs_nobody_anything(nodes: Nodes, number: signal.Signals) -> None:
    nodes.start_both()
    nodes.start("late", 2)
    nodes.until(lambda: "importing" in (nodes.folder / "late.out").read_text(), "its preparation")
    nodes.signal_all("late", number)
    nodes.until(lambda: "is lost, which had no ranks" in nodes.said, "its loss")
    nodes.until_steps()
    outcome, verdict = nodes.end("n0", "n1")
    assert not num_changes(outcome) and outcome.of(trace.NodeLost)[0].replicas == ()
    assert verdict.is_whole, describe(verdict)
    assert "is missing" not in outcome.output


@pytest.mark.parametrize(
    ("other", "why"),
    [({"slots": 2}, "--nproc-per-node is 2 on"), ({"replicas": 1}, "its flags make another job than those of node 0"),
     ({"key_file": ""}, "give the same --key-file")],
    ids=["slots", "job", "key"],
)  # fmt: skip
def test_a_late_node_that_does_not_fit_is_turned_away_and_the_job_goes_on(
    nodes: Nodes, other: dict[str, object], why: str
) -> None:
    nodes.start_both()
    if "key_file" in other:
        other = {"key_file": str(nodes.make_key("other-key", "a key of another job, of which this one knows nothing"))}
    nodes.start("late", 2, **other)
    assert nodes.programs["late"].wait(DEADLINE_S) != 0
    assert why in (nodes.folder / "late.out").read_text(), nodes.output()
    nodes.until_steps()
    outcome, _ = nodes.end("n0", "n1")
    assert not num_changes(outcome) and not outcome.of(trace.NodeJoined)


def test_a_node_that_was_lost_returns_as_a_spare_under_a_new_number(nodes: Nodes) -> None:
    """It stands still for longer than `--node-timeout`: a spare node takes its place, and it comes back beside that."""
    nodes.start_both()
    nodes.start("late", 2)
    nodes.until(lambda: (2, "spare") in nodes.nodes(), "the spare node")
    nodes.signal_all("n1", signal.SIGSTOP)
    nodes.until(lambda: nodes.num_steps(2) > 5, "the newcomer on the spare node")
    nodes.signal_all("n1", signal.SIGCONT)
    nodes.until(lambda: (3, "spare") in nodes.nodes(), "its return")
    assert nodes.nodes() == [(0, "here"), (1, "lost"), (2, "here"), (3, "spare")]
    nodes.kill_group("late")
    nodes.until(lambda: nodes.num_steps(3) > 5, "the newcomer on the node that has returned")
    outcome, _ = nodes.end("n0", "n1")
    assert outcome.roster == (0, 3), outcome.output
