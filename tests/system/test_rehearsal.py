"""A scenario on real processes: `simulate --processes` runs what the file says, kills included, and tells every step's time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec

from megatron_recover.cluster import rehearsal
from megatron_recover.sim.timed.models import Scenario
from tests.sim.build import scenario
from tests.system.jobs import ROOT, check

SCENARIO = """\
[job]
replicas = 2
ranks = 1
microbatches = 4
steps = 4
buckets = 2

[compute]
microbatch_s = 0.05
forward_share = 0.9

[network]
bytes_per_s = 1e9
gradient_bytes = 1e5

[[fault]]
replica = 1
rank = 0
point = "backward"
step = 2
"""


def test_a_scenario_runs_on_real_processes(tmp_path: Path) -> None:
    path, run_dir = tmp_path / "small.toml", tmp_path / "run"
    path.write_text(SCENARIO)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_recover", "simulate", str(path), "--processes", str(run_dir), "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads(done.stdout)["steps"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["simulated_over_real"] == step["simulated_s"] / step["real_s"] for step in steps)
    # After the death one replica has all four microbatches of 45 ms and more; nothing makes them shorter.
    assert steps[2]["real_s"] > 4 * 0.045
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["replicas_end"], summary["steps"], len(summary["faults"])) == (1, 4, 1)
    code, said = check(run_dir)
    assert code == 0, said


def test_what_this_machine_cannot_run_is_refused() -> None:
    def refused(what: Scenario) -> str:
        return "\n".join(rehearsal.refusals(what))

    small = scenario(job={"replicas": 2})
    assert refused(small) == ""
    assert "replicas x ranks is 80; on one machine it must be at most 32" in refused(
        scenario(job={"replicas": 40, "microbatches": 80})
    )
    assert "steps is 1; the first step, in which processes warm up, is not compared" in refused(scenario(job={"steps": 1}))
    assert "ranks / stages is 3" in refused(scenario(job={"ranks": 6}))
    assert "[failures] has a rate" in refused(
        msgspec.structs.replace(small, failures=scenario(failures={"every_steps": 2}).failures)
    )
