"""The demo on several nodes as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_recover.core.exit_code import ExitCode


@pytest.mark.timeout(300)
def test_the_real_demo_on_three_nodes_loses_one_of_them_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_recover", "demo", "--nodes", "3", "--json", "--run-dir", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == ExitCode.OK, done.stderr[-6000:]
    content = json.loads(done.stdout)
    assert content["proven"] is True and len(content["claims"]) == 8
    assert (content["summary"]["replicas_start"], content["summary"]["replicas_end"]) == (3, 2)
    [killed] = [line.split()[2:] for line in done.stderr.splitlines() if line.strip().startswith("kill -9 ")]
    assert killed and not any(psutil.pid_exists(int(pid)) for pid in killed)
