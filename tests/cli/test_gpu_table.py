"""`make gpu-test` fails where there is a GPU and nothing was shown on it; its table names what was decided."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from megatron_recover.host.gpus import has_gpu
from tests.cluster.jobs import ROOT
from tests.gpu.findings import FINDINGS, has_failed, table, verdicts


def test_one_failure_fails_a_finding_and_what_nobody_ran_is_not_decidable() -> None:
    found = verdicts([("G1", "passed"), ("G3", "passed"), ("G3", "failed"), ("G8", "skipped")])
    assert (found["G1"], found["G3"], found["G8"], found["G16"]) == ("passed", "failed", "not decidable", "not decidable")
    lines = table(found, {"G8": "Transformer Engine is not installed"})
    assert len(lines) == len(FINDINGS)
    assert next(line for line in lines if line.startswith("G8 ")).endswith("(Transformer Engine is not installed)")


@pytest.mark.parametrize(
    ("outcomes", "gpu", "expected"),
    [
        ([], True, True),
        ([], False, False),
        ([("G1", "passed")], True, False),
        ([("G1", "passed"), ("G4", "failed")], True, True),
    ],
)
def test_a_gpu_on_which_nothing_ran_is_a_failure(outcomes: list, gpu: bool, expected: bool) -> None:
    assert has_failed(verdicts(outcomes), has_gpu=gpu) == expected


SOME = """
import pytest

@pytest.mark.finding("G1")
def test_holds(record_property):
    record_property("seconds", 3)

@pytest.mark.finding("G3")
def test_fails():
    assert False

@pytest.mark.finding("G8")
@pytest.mark.skip(reason="Transformer Engine is not installed")
def test_skips(): ...
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_the_table_is_that_of_all_workers(workers: int, tmp_path: pathlib.Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.gpu.conftest import *\ncollect_ignore_glob = []\n")
    (tmp_path / "test_some.py").write_text(SOME)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers), "--rootdir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    for row in ("G1   passed", "G2   passed", "G3   failed", "G8   not decidable", "test_holds: seconds: 3"):
        assert f"\n{row}" in done.stdout, done.stdout
    assert "(Transformer Engine is not installed)" in done.stdout


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_without_a_gpu_the_target_says_so_and_passes() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and "nothing ran: this machine has no GPU" in done.stdout, done.stdout
    assert all(f"{name:4} not decidable" in done.stdout for name in FINDINGS)
