"""A real job on several nodes of this machine, by the command line: a node is lost, a late one takes its place, it returns."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import time
from collections.abc import Callable

import msgspec
import psutil
import pytest

from megatron_recover.cluster import status
from tests import forks
from tests.cluster.test_late_nodes import free_port
from tests.system.jobs import ROOT, Job, check, command_of, run_job
from tests.system.joining_pretrain import ORDERS, Orders
from tests.system.test_endings import losses
from tests.system.test_joins import SCRIPT

pytestmark = pytest.mark.timeout(400)
JOB = Job(steps=60, heal="in-place")
DEADLINE_S = 150.0
SLOW = {ORDERS: msgspec.json.encode(Orders(microbatches=JOB.microbatches, step_s=1.0, full_step_s=0.5)).decode()}


class Launchers:
    """The launchers of one job, each a node with one slot."""

    def __init__(self, folder: pathlib.Path, data: pathlib.Path, stack: contextlib.ExitStack) -> None:
        self.folder, self.run_dir, self._data, self._stack = folder, folder / "run", data, stack
        (key := folder / "key").write_text("k" * 44)
        key.chmod(0o600)
        self._where = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--key-file", str(key))
        self.programs: dict[str, forks.Program] = {}

    def start(self, name: str, node_rank: int) -> None:
        flags = ("--nnodes", "1:2", "--nproc-per-node", "1", "--node-rank", str(node_rank), "--node-timeout", "3", *self._where)
        job = dataclasses.replace(JOB, run_flags=flags)
        command = command_of(job, self.run_dir, self._data, script=SCRIPT)
        with open(self.folder / f"{name}.out", "ab") as output:
            environment = {**os.environ, **SLOW}
            self.programs[name] = forks.start(command, cwd=ROOT, environment=environment, output=output.fileno())
        self._stack.callback(self.programs[name].kill)

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            are_here = all(program.poll() is None for program in self.programs.values())
            assert are_here and time.monotonic() < end, f"{what}\n{self.output()}"
            time.sleep(0.1)

    def output(self) -> str:
        return "\n".join(f"--- {path.name}:\n{path.read_text()[-6000:]}" for path in sorted(self.folder.glob("*.out")))

    def status(self) -> status.Status | None:
        return status.read(self.run_dir) if self.run_dir.exists() else None

    def until_state(self, number: int, word: str) -> None:
        def is_so() -> bool:
            found = self.status()
            return found is not None and (number, word) in [(each.number, each.state) for each in found.nodes]

        self.until(is_so, f"node {number} is {word}")

    def signal_all(self, name: str, number: int) -> None:
        launcher = psutil.Process(self.programs[name].pid)
        for process in (launcher, *launcher.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def test_a_late_node_takes_the_place_of_a_lost_one_which_returns_and_nothing_else_changes(
    tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    reference = run_job(dataclasses.replace(JOB, heal="off"), tmp_path / "calm", data).expect()
    with contextlib.ExitStack() as stack:
        nodes = Launchers(tmp_path, data, stack)
        nodes.start("n0", 0)
        nodes.start("n1", 1)
        nodes.until(lambda: (found := nodes.status()) is not None and (found.iteration or 0) >= 3, "training")
        nodes.signal_all("n1", signal.SIGSTOP)
        nodes.until_state(1, "lost")
        nodes.start("late", 1)
        nodes.until(lambda: (found := nodes.status()) is not None and found.roster == (0, 2), "the newcomer")
        nodes.signal_all("n1", signal.SIGCONT)
        nodes.until_state(3, "spare")
        codes = {name: program.wait(DEADLINE_S) for name, program in nodes.programs.items()}
    assert set(codes.values()) == {0}, (codes, nodes.output())
    code, told = check(nodes.run_dir, reference.run_dir)
    # The node that stood still has written all that it did: it goes on to write when it is continued.
    assert code == 0, f"{told}\n{nodes.output()}"
    assert losses(nodes.run_dir) == losses(reference.run_dir)
    assert "of 2 replicas left, 1 loss, 1 joined" in nodes.output()
