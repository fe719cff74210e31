"""A program that is forked (`tests/forks.py`) finds what a fresh interpreter finds, and ends alike."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests import forks

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "tests.seen", "again"]


def test_a_fork_finds_what_a_fresh_interpreter_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONLY_NOW", "after the server was started")
    fresh = subprocess.run(
        COMMAND, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, start_new_session=True, check=False,
        env=dict(os.environ), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # as `forks.run` does
    )  # fmt: skip
    exit_code, output = forks.run(COMMAND, cwd=ROOT, deadline_s=60.0)
    assert exit_code == fresh.returncode == 3, output + fresh.stderr
    for found, wanted in zip(json.loads(output), json.loads(fresh.stdout), strict=True):
        for key, value in found.items():
            assert value == wanted[key], key


def test_a_program_that_is_killed_ends_by_the_signal_and_one_that_fails_says_why() -> None:
    program = forks.Program([sys.executable, "-m", "tests.no_such_module"], cwd=ROOT, environment=os.environ)
    output, _ = program.communicate(60.0)
    assert program.returncode == 1 and "No module named tests.no_such_module" in output
    program = forks.Program([sys.executable, "-m", "http.server", "0"], cwd=ROOT, environment=os.environ)
    with pytest.raises(subprocess.TimeoutExpired):
        program.communicate(0.1)
    program.kill()
    program.communicate(60.0)
    assert program.returncode == -9


def test_what_an_interpreter_reads_at_its_start_needs_a_fresh_one() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    process = forks.start([sys.executable, "-m", "seen"], cwd=ROOT.parent, environment=environment)
    output, _ = process.communicate(60.0)
    assert process.returncode == 3, output
