"""The end of a run on several nodes: node 0 waits for the traces of the others, and gathers those that it does not see."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from megatron_recover import trace
from megatron_recover.cluster import gathering
from megatron_recover.cluster.gathering import Collector, Handover
from megatron_recover.cluster.job import Job
from megatron_recover.cluster.meeting import Meeting
from megatron_recover.config import RecoverConfig
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import (
    NodeGone,
    NodePlace,
    NodeState,
    TraceDone,
    TraceEnds,
    TraceNext,
    TraceOffer,
    TracePart,
)
from megatron_recover.control_plane.wire import Message
from megatron_recover.deadlines import Deadlines
from megatron_recover.observe.verify.check import check
from megatron_recover.trace.gathering import PART_BYTES
from tests import forks
from tests.cluster.jobs import ROOT, Spec, command

pytestmark = pytest.mark.timeout(120)
DEADLINES = replace(Deadlines.of(20.0), traces_s=0.5, offer_s=3.0)
NODES = (NodePlace(0, "n0", 1), NodePlace(1, "n1", 1))
END = msgspec.json.encode(trace.RunFinished(t=1.0, exit_code=0, reason="")) + b"\n"


def job(folder: Path, node: int) -> Job:
    run_dir = folder / "run" / "nodes" / "1" if node else folder / "run"
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    layout = trace.Layout(tp=1, pp=1)
    return Job(
        argv=("t.py",), num_replicas=1, layout=layout, config=RecoverConfig(), run_dir=run_dir, node=node, nodes=NODES
    )  # fmt: skip


class Pair:
    """Node 0 in this thread and node 1 in another one, without a coordinator between them."""

    def __init__(self, here: Path, there: Path, deadlines: Deadlines = DEADLINES) -> None:
        self.loops = [Loop(), Loop()]
        self.sent: list[Message] = []
        self.run_dir = here / "run"
        self.collector = Collector(job(here, 0), loop=self.loops[0], deadlines=deadlines, send=self._to_1)
        self.handover = Handover(job(there, 1), loop=self.loops[1], deadlines=deadlines, send=self._to_0)
        self.folder = there / "run" / "nodes" / "1"
        self.num_dropped_after: int | None = None

    def _to_1(self, message: Message) -> None:
        self.sent.append(message)
        self.loops[1].post(lambda: self.handover.handle(message))

    def _to_0(self, message: Message) -> None:
        self.sent.append(message)
        if self.num_dropped_after is None or len(self.parts) <= self.num_dropped_after:
            self.loops[0].post(lambda: self.collector.handle(message))

    @property
    def parts(self) -> list[TracePart]:
        return [each for each in self.sent if isinstance(each, TracePart)]

    def finish(self, is_hurried: Callable[[], bool] = lambda: False) -> list[str]:
        node_1 = threading.Thread(target=self.handover.finish, args=(lambda: False,))
        node_1.start()
        lines = self.collector.finish(is_hurried)
        if not any(isinstance(each, TraceDone) for each in self.sent):
            self.handover.handle(TraceDone(1))  # what the coordinator sends when node 0 hangs up
        node_1.join(10.0)
        assert not node_1.is_alive()
        return lines


def write(folder: Path) -> dict[str, bytes]:
    """Write a trace with an end, a part put aside and logs; return the files."""
    files = {"events.jsonl": END, "events.0001.jsonl.gz": b"zip", "logs/replica-0-rank-0.log": b"x" * (2 * PART_BYTES + 7)}
    files["logs/empty.log"] = b""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def test_node_0_gathers_what_it_does_not_see_part_by_part(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "a", tmp_path / "b")
    files = write(pair.folder)
    assert pair.finish() == []
    gathered = pair.run_dir / "nodes" / "1"
    assert {str(path.relative_to(gathered)): path.read_bytes() for path in gathered.rglob("*") if path.is_file()} == files
    kinds = [type(each) for each in pair.sent]
    assert all(kinds[index - 1] is TraceNext for index, kind in enumerate(kinds) if kind is TracePart), "one part at a time"


def test_what_node_0_sees_is_not_sent_and_waited_for_until_it_has_its_end(tmp_path: Path) -> None:
    """Also where the offer comes before its disk shows the end, as on a network file system."""
    pair = Pair(tmp_path, tmp_path)
    (pair.folder / "events.jsonl").write_bytes(b"")
    timer = threading.Timer(0.3, lambda: write(pair.folder))
    timer.start()
    began = time.monotonic()
    assert pair.finish() == [] and time.monotonic() - began >= 0.3
    assert pair.parts == []


@pytest.mark.parametrize("num_parts", [0, 2])
def test_a_trace_that_does_not_come_is_named_after_a_short_wait(tmp_path: Path, num_parts: int) -> None:
    pair = Pair(tmp_path / "a", tmp_path / "b")
    write(pair.folder)
    pair.num_dropped_after = num_parts
    began = time.monotonic()
    lines = pair.finish() if num_parts else pair.collector.finish(lambda: False)
    assert lines == ["the trace of node 1 (n1) is missing or has no end: it did not come within 0.5 s"]
    assert 0.5 <= time.monotonic() - began < 3.0
    until = time.monotonic() + 5.0
    while list(pair.run_dir.rglob("*.gathering")) and time.monotonic() < until:
        time.sleep(0.01)
    assert not list(pair.run_dir.rglob("*.gathering")), "no half of a file is left"


def test_node_0_waits_for_late_nodes_that_were_spares_and_not_for_one_that_was_lost_without_a_rank(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "a", tmp_path / "b")
    write(pair.folder)

    def late(number: int, state: Any, *replicas: int) -> NodeState:
        return NodeState(number, f"n{number}", state, replicas)

    pair.collector.note(
        [late(0, "here", 0), late(1, "here"), late(2, "spare"), late(3, "spare"), late(4, "idle"), late(-1, "idle")]
    )
    pair.collector.note([late(2, "here", 5), late(3, "lost"), late(4, "lost"), late(5, "silent")])
    assert pair.finish() == ["the trace of node 2 (n2) is missing or has no end: it did not come within 0.5 s"]
    assert (pair.run_dir / "nodes" / "2").is_dir(), "a reader of the run sees that a node is missing"
    assert not (pair.run_dir / "nodes" / "3").exists() and not (pair.run_dir / "nodes" / "4").exists()


def test_a_trace_whose_parts_keep_coming_is_waited_for_longer(tmp_path: Path) -> None:
    class Slow(Pair):
        def _to_0(self, message: Message) -> None:
            time.sleep(0.4)  # as a slow line does
            super()._to_0(message)

    pair = Slow(tmp_path / "a", tmp_path / "b", replace(DEADLINES, traces_s=1.5))
    write(pair.folder)
    began = time.monotonic()
    assert pair.finish() == [] and time.monotonic() - began > 1.5


def test_a_node_that_was_lost_behind_the_end_of_its_trace_is_not_named(tmp_path: Path) -> None:
    pair = Pair(tmp_path, tmp_path)
    write(pair.folder)
    pair.collector.handle(NodeGone(1, "the node was lost: it is silent"))
    assert pair.collector.finish(lambda: False) == []


def test_a_node_that_was_lost_is_named_and_not_waited_for_but_welcome_if_it_comes_back(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "a", tmp_path / "b", replace(DEADLINES, traces_s=60.0))
    pair.collector.handle(NodeGone(1, "the node was lost: it is silent"))
    assert pair.collector.finish(lambda: False) == [
        "the trace of node 1 (n1) is missing or has no end: the node was lost: it is silent"
    ]
    write(pair.folder)
    back = Pair(tmp_path / "a", tmp_path / "b")
    back.collector.handle(NodeGone(1, "the node was lost: it is silent"))
    back.collector.handle(TraceOffer(1))
    assert back.finish() == [] and (back.run_dir / "nodes" / "1" / "events.jsonl").read_bytes() == END


def test_a_part_that_may_not_be_written_ends_the_gathering_of_its_node(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "a", tmp_path / "b")
    pair.collector.handle(TraceOffer(1))
    pair.collector.handle(TracePart(1, "../../evil", 1, 0, b"x"))
    [line] = pair.collector.finish(lambda: False)
    assert "'../../evil' is not gathered: no file of a trace or log has this name" in line
    assert pair.sent[-1] == TraceDone(1) and not (tmp_path / "a" / "evil").exists()


def test_few_parts_are_on_their_way_however_many_nodes_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator keeps 128 MiB for node 0. More would end the link, and node 0 may just stand still."""
    monkeypatch.setattr(gathering, "_AT_ONCE", 4)
    nodes = tuple(NodePlace(number, f"n{number}", 1) for number in range(40))
    loop, on_their_way, asked = Loop(), set[int](), list[int]()
    most, silent = 0, {7, 8, 9, 10}

    def coordinator(message: Message) -> None:
        nonlocal most
        if isinstance(message, TraceNext):
            on_their_way.add(message.node)
            most = max(most, len(on_their_way - silent))
            if message.node in silent:
                return
            number = asked.count(message.node)
            asked.append(message.node)
            part = TracePart(message.node, "events.jsonl", len(END), 0, END) if number == 1 else TraceEnds(message.node)
            if number == 0:
                part = TracePart(message.node, "train.log", 1, 0, b"x")
            loop.after(0.001, lambda: arrive(part))

    def arrive(message: TracePart | TraceEnds) -> None:
        on_their_way.discard(message.node)
        collector.handle(message)

    whole = replace(job(tmp_path, 0), nodes=nodes)
    collector = Collector(whole, loop=loop, deadlines=replace(DEADLINES, traces_s=2.0), send=coordinator)
    for number in range(1, 40):
        collector.handle(TraceOffer(number))
    lines = collector.finish(lambda: False)
    assert [line.split()[4] for line in lines] == [*map(str, sorted(silent))], "nodes that do not answer keep others waiting"
    assert most <= 4
    first_of_last, last_of_first = asked.index(39), len(asked) - 1 - asked[::-1].index(1)
    assert first_of_last < last_of_first, "each node waits only for one part of each other"


def test_a_hurry_ends_both_waits(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "a", tmp_path / "b", replace(DEADLINES, traces_s=60.0, offer_s=60.0))
    began = time.monotonic()
    [line] = pair.collector.finish(lambda: True)
    assert "a signal ended the wait" in line and pair.handover.finish(lambda: True) == []
    assert time.monotonic() - began < 5.0


DIES = """
import os
from megatron_recover.cluster import launcher
launcher.Handover.finish = lambda *arguments: os._exit(9)
"""
"""Node 2: its agent dies when it would offer its trace."""
NAMES = """
from megatron_recover.cluster import launcher
finish = launcher.Collector.finish
launcher.Collector.finish = lambda *arguments: print(*(lines := finish(*arguments)), sep="\\n", flush=True) or lines
"""
"""Node 0: what it would name on stderr."""
RUNS = "import sys; sys.path.insert(0, '.'); from tests.cluster import jobs; sys.exit(jobs.main())"


FREEZES = """
import psutil
from megatron_recover.cluster import launcher
def finish(*arguments):
    for process in [*psutil.Process().children(), psutil.Process()]:
        process.suspend()
launcher.Collector.finish = finish
"""
"""Node 0: its agent and the coordinator freeze when its agent would wait for traces."""


def lines(folder: Path, run_dir: Path, *patches: str, node_s: float = 10.0) -> Iterator[list[str]]:
    """Yield the command lines of the nodes of one job, each with its patch."""
    key = folder / "key"
    key.write_text("a key that only this test knows of\n")
    key.chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    num_nodes = len(patches)
    for node, patch in enumerate(patches):
        meeting = Meeting(
            least_nodes=num_nodes, most_nodes=num_nodes, node_rank=node, host="127.0.0.1", port=port, flag="--master-addr",
            join_s=60, node_s=node_s,
        )  # fmt: skip
        spec = Spec(
            run_dir=str(run_dir), replicas=num_nodes, ranks=1, steps=8, microbatches=6, meeting=meeting, slots=1,
            key_file=str(key),
        )  # fmt: skip
        yield [sys.executable, "-c", patch + RUNS, command(spec)[-1]]


def test_nodes_without_a_shared_folder_leave_one_run_directory_on_node_0(tmp_path: Path) -> None:
    """Nodes 1 and 2 have a disk of their own where the run directory is. The agent of node 2 dies before it has sent."""
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode:
        pytest.skip("a disk of one node alone needs a mount namespace")
    disk = tmp_path / "disk"
    disk.mkdir()
    nodes: list[forks.Program | subprocess.Popen[str]] = []
    with contextlib.ExitStack() as stack:
        for node, words in enumerate(lines(tmp_path, disk / "run", NAMES, "", DIES)):
            line = shlex.join(words)
            if node:
                line = f"mount -t tmpfs none {shlex.quote(str(disk))} && exec {line}"
            program = [*(["unshare", "-rm"] if node else []), "sh", "-c", line]
            output = stack.enter_context(open(tmp_path / f"{node}.out", "wb"))
            nodes.append(forks.start(program, cwd=ROOT, environment=os.environ, output=output.fileno()))
            stack.callback(nodes[-1].kill)
        for each in nodes:
            each.communicate(60.0)
    texts = [(tmp_path / f"{node}.out").read_text() for node in range(3)]
    assert [each.poll() for each in nodes] == [0, 0, 9], texts
    gathered = disk / "run" / "nodes" / "1"
    assert {"events.jsonl", "launcher.log", "logs/replica-1-rank-0.log"} <= {
        str(path.relative_to(gathered)) for path in gathered.rglob("*")
    }
    assert "the trace of node 2 (" in texts[0] and "its agent is gone (" in texts[0] and "of node 1" not in texts[0]
    verdict = check(disk / "run")
    assert not verdict.violations and not verdict.is_whole and "node 1" not in " ".join(verdict.not_judged), verdict


def test_a_node_that_hears_nothing_of_node_0_at_the_end_does_not_offer_its_trace_for_long(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        nodes = []
        for node, words in enumerate(lines(tmp_path, tmp_path / "run", FREEZES, "", node_s=2.0)):
            output = stack.enter_context(open(tmp_path / f"{node}.out", "wb"))
            nodes.append(forks.start(words, cwd=ROOT, environment=os.environ, output=output.fileno()))
            stack.callback(nodes[-1].kill)
        stack.callback(lambda: [each.kill() for each in psutil.Process(nodes[0].pid).children()])  # the coordinator
        assert nodes[1].wait(40.0) == 0, (tmp_path / "1.out").read_text()  # the offer alone would take `offer_s`, 90 s
        assert psutil.Process(nodes[0].pid).status() == psutil.STATUS_STOPPED
