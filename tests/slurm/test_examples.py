"""The examples in scripts/slurm: the laptop's trains, and what the others print is judged, here and by a real slurmctld."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_recover.cluster.slurm import check
from megatron_recover.observe.outcome import outcome
from tests.slurm.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "scripts" / "slurm"
PRINTING = ("container", "eight_gpus", "many_nodes")


def _run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [EXAMPLES / f"{name}.sh", *arguments], cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True,
        timeout=250,
    )  # fmt: skip


def test_no_example_is_left_out() -> None:
    assert {path.stem for path in EXAMPLES.iterdir()} == {"laptop", *PRINTING}
    assert "was not run with pyxis" in (EXAMPLES / "container.sh").read_text()


@pytest.mark.parametrize("name", PRINTING)
def test_what_an_example_prints_passes_the_judge(name: str) -> None:
    done = _run(name)
    assert done.returncode == 0, done.stderr
    assert check.findings(done.stdout) == []
    if (shellcheck := shutil.which("shellcheck")) is not None:
        for text in (done.stdout, (EXAMPLES / f"{name}.sh").read_text()):
            judged = subprocess.run([shellcheck, "-"], input=text, capture_output=True, text=True)
            assert judged.returncode == 0, judged.stdout


def test_a_real_slurmctld_would_start_the_example_on_64_nodes(machine: Machine, tmp_path: Path) -> None:
    place = tmp_path / "many.sbatch"
    place.write_text(_run("many_nodes", "--partition", "wide").stdout)
    assert "#SBATCH --array=0-63\n" in place.read_text()
    done = machine.run("sbatch", "--test-only", str(place))
    assert done.returncode == 0, done.stderr
    assert "using 64 processors on nodes f001 in partition wide" in done.stderr  # the first of the 64 jobs


def test_the_laptops_example_trains(tmp_path: Path) -> None:
    done = _run("laptop", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "iteration        5/       5" in done.stdout and outcome(tmp_path / "run").verdict == "finished"
