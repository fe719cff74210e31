"""How the process of a rank ends: what it waits for after each exit code, and what bounds that wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_recover.cluster.run_end import RunEnd
from megatron_recover.cluster.signals import EndRequest
from megatron_recover.core import policy
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.request import MISCOUNTED, TOO_FEW, UNSAVED, exit_for
from megatron_recover.deadlines import Deadlines
from tests.cluster.jobs import ROOT

SCRIPT = """
import atexit, sys, threading, time
def delete():
    for number in range(10):
        time.sleep(0.02)
    print("deleted")
atexit.register(print, "exit handler")
threading.Thread(target=delete).start()
{end}
"""
"""As upstream with `--save-retain-interval`: a thread that is no daemon deletes a checkpoint."""
RUN = "import os, sys; from megatron_recover.cluster import rank_process as it; status = it._run_script((sys.argv[1],)); "
RUN += "it.flush(); os._exit(status)"


@pytest.mark.parametrize(
    ("end", "code", "waits"),
    [
        ("", 0, True),
        ("sys.exit(15)", 15, True),
        ("sys.exit(12)", 12, False),
        ("sys.exit('why')", 1, False),
        ("raise RuntimeError", 1, False),
    ],
)
def test_a_rank_waits_for_threads_and_exit_handlers_only_where_all_end_together(
    tmp_path: Path, end: str, code: int, waits: bool
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(end=end))
    done = subprocess.run(
        [sys.executable, "-c", RUN, tmp_path / "script.py"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.split("\n")) == (code, ["deleted", "exit handler", ""] if waits else [""]), done.stderr


def test_a_crash_in_native_code_leaves_its_stack_and_ends_by_its_signal(tmp_path: Path) -> None:
    """As glibc's abort after a broken heap: the log has the line of Python under which it happened."""
    (tmp_path / "script.py").write_text("import os\ndef breaks():\n    os.abort()\nbreaks()\n")
    become = "import os, sys; from megatron_recover.cluster import rank_process as it; from types import SimpleNamespace as S; "
    become += "it.become_rank(S(replica=0, rank=0, descriptors=(), environment={}, argv=(sys.argv[1],)), os.dup(2), ())"
    done = subprocess.run(
        [sys.executable, "-c", become, tmp_path / "script.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert "Fatal Python error: Aborted" in done.stderr and 'script.py", line 3 in breaks' in done.stderr


def test_codes_of_an_agreed_end_are_known() -> None:
    """All but that of a miscount, which a rank that fails has as well."""
    requests = [(), (exit_for("SIGTERM"),), (TOO_FEW,), (UNSAVED,)]
    assert {policy.exit_code(each) for each in requests} == policy.ENDED_TOGETHER
    assert policy.exit_code((MISCOUNTED,)) == ExitCode.INVARIANT_VIOLATED


@pytest.mark.parametrize("shutdown_s", [None, 3])
@pytest.mark.parametrize("began", [True, False])
@pytest.mark.parametrize("code", [0, 1, 10, 12, 15, 16])
def test_the_launcher_bounds_the_wait(code: int, began: bool, shutdown_s: int | None) -> None:
    deadlines, loop = Deadlines.of(), SimpleNamespace(time=lambda: now)
    now = 1000.0
    end = RunEnd(
        SimpleNamespace(shutdown_s=shutdown_s, signals=()), loop=loop, deadlines=deadlines, says=print, send=print,
        has_begun=lambda: began, promise=lambda: "", is_alone=lambda: False, request=EndRequest(()),
    )  # fmt: skip
    end.begin(code, "over")
    after_failure_s = deadlines.stop_s if shutdown_s is None else shutdown_s
    wait_s = deadlines.end_s if code == 0 or (code in (10, 15, 16) and shutdown_s is None) else after_failure_s
    now += wait_s if began or code == 0 else 0.0
    assert not end.is_late
    now += 0.001
    assert end.is_late


@pytest.mark.parametrize("is_alone", [True, False])
def test_only_a_node_that_ends_a_job_for_all_names_the_launchers_of_the_others(is_alone: bool) -> None:
    said = list[str]()
    end = RunEnd(
        SimpleNamespace(shutdown_s=None, nodes=("a", "b")), loop=SimpleNamespace(time=lambda: 0.0), deadlines=Deadlines.of(),
        says=said.append, send=lambda message: None, has_begun=lambda: True, promise=lambda: "it ends",
        is_alone=lambda: is_alone, request=EndRequest(),
    )  # fmt: skip
    end._signalled(signal.SIGTERM)
    kill = f"SIGTERM: it ends; `kill -9 {os.getpid()}`"
    everything = ", and of the launcher on each other node, kills everything at once, and nothing is saved"
    assert said == [kill + (" ends it at once" if is_alone else everything)]
