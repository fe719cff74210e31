"""The agent as process 1 of a container: it survives deaths, ends by any signals, and reaps or kills all that is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cluster.jobs import ROOT, Outcome, Spec, command
from tests.cluster.running import FOR_EVER
from tests.cluster.waiting import until_ended, until_files

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root makes a namespace of processes"),
]
_ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def _kill_a_rank_then_ask_for_the_end(launcher: psutil.Process, until: Callable[[Callable[[], object], str], None]) -> None:
    [rank] = [each for each in launcher.children(recursive=True) if each.name() == "replica-1.0"]
    rank.kill()
    until(lambda: not rank.is_running(), "the death of a rank")
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
        launcher.send_signal(number)


def _kill_the_fork_server(launcher: psutil.Process, until: Callable[[Callable[[], object], str], None]) -> None:
    [server] = [each for each in launcher.children() if each.name() not in ("recorder", "coordinator")]
    server.kill()


@pytest.mark.parametrize(("harm", "code"), [(_kill_a_rank_then_ask_for_the_end, 15), (_kill_the_fork_server, 1)])
def test_the_agent_works_as_process_1(harm: Callable[..., None], code: int, tmp_path: Path) -> None:
    spec = Spec(run_dir=str(tmp_path / "run"), replicas=3, ranks=1, steps=FOR_EVER, microbatches=3)
    output = tmp_path / "output"
    with open(output, "wb") as file:
        outside = subprocess.Popen([*_ALONE, *command(spec)], cwd=ROOT, stdout=file, stderr=file)
    try:

        def until(condition: Callable[[], object], what: str) -> None:
            until_files(condition, what, tmp_path / "run", tmp_path)

        sums = tmp_path / "run" / "sums-0-0.jsonl"
        until(lambda: sums.exists() and sums.read_text().count("\n") > 20, "training")
        [launcher] = psutil.Process(outside.pid).children()
        assert Path(f"/proc/{launcher.pid}/status").read_text().split("NSpid:")[1].split()[:2] == [str(launcher.pid), "1"]
        others = launcher.children(recursive=True)
        harm(launcher, until)
        assert outside.wait(60) == code, output.read_text()
        until_ended(others)
        outcome = Outcome(spec, code, output.read_text())
        outcome.assert_exactly_once()
        assert outcome.roster == ((0, 2) if code == 15 else (0, 1, 2))
    finally:
        outside.kill()
        outside.wait()
