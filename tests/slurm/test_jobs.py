"""Printed scripts on a real Slurm: nodes of this machine, and a toy job in place of Megatron's (`agent.py`)."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil
import pytest

from megatron_recover import trace
from megatron_recover.cluster.meeting import MISSING_JOBS
from megatron_recover.cluster.slurm import script
from megatron_recover.observe.outcome import outcome
from tests.cluster.jobs import ROOT, Spec
from tests.cluster.running import FOR_EVER
from tests.slurm.machine import Machine

pytestmark = pytest.mark.slow
TOY = Spec(run_dir="-", replicas=2, ranks=1, steps=3, microbatches=3)


class Job:
    """A submitted script, with the stand-in for `megatron-recover run`."""

    def __init__(
        self, machine: Machine, folder: Path, *, toy: Spec = TOY, minutes: int = 10, inherited: Mapping[str, str] = {},
        **settings: object,
    ) -> None:  # fmt: skip
        """`inherited`: variables of the environment in which the job is submitted."""
        python = folder / "python"
        python.write_text(
            f'#!/bin/sh\n[ "$4" != run ] || {{ shift 4; exec {sys.executable} -m tests.slurm.agent "$@"; }}\n'
            f'exec {sys.executable} "$@"\n'
        )  # fmt: skip
        python.chmod(0o755)
        self.machine, self.run_dir, self.save = machine, folder / "runs", folder / "save"
        self.run_dir.mkdir()
        given = {"save": str(self.save), "command": (), "nodes": 1, "shape": "allocation", **settings}
        self.settings = script.Settings(
            launch=("--toy", msgspec.json.encode(toy).decode(), "train.py"), run_dir=str(self.run_dir), python=str(python),
            directives=("--job-name=toy", f"--time={minutes}"), **given,
        )  # fmt: skip
        (folder / "job.sbatch").write_text(script.text(self.settings))
        done = machine.run(
            "sbatch", "--parsable", str(folder / "job.sbatch"), cwd=ROOT,
            env={**machine.environment, **inherited, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    def until_state(self, *states: str, restarts: str = "0") -> dict[str, str]:
        """Wait for one of these states in that start, and return what Slurm says then."""

        def is_there() -> bool:
            said = self.machine.show(self.id)
            return said.get("JobState") in states and said.get("Restarts") == restarts

        self.machine.until(is_there, f"job {self.id} in state {states}: {self.machine.show(self.id)}", 90)
        return self.machine.show(self.id)

    def until_training(self, start: str) -> None:
        """Wait until the toy job of a start has committed a step."""
        sums = self.run_dir / start / "sums-0-0.jsonl"
        self.machine.until(lambda: sums.exists() and sums.read_text().count("\n") > 3, f"steps in {sums}", 90)

    def said(self, task: str = "") -> str:
        """What the script printed, without srun's remark that this Slurm binds no CPUs."""
        lines = (self.run_dir / f"slurm-{self.id}{task}.out").read_text().splitlines(keepends=True)
        return "".join(line for line in lines if "lacks support for cpu binding" not in line)

    def note(self, node: str, start: str) -> dict:
        return json.loads((self.run_dir / f"{node}-{start}.json").read_text())

    def close(self) -> None:
        self.machine.run("scancel", self.id)
        self.machine.until(lambda: not self.machine.run("squeue", "--noheader", "--jobs", self.id).stdout.strip(), "an end")


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_allocation_runs_an_agent_on_each_node_to_the_end_of_the_run(machine: Machine, tmp_path: Path, nodes: int) -> None:
    job = Job(machine, tmp_path, nodes=nodes)
    try:
        ended = job.until_state("COMPLETED", "FAILED", "TIMEOUT")
        assert (ended["JobState"], ended["ExitCode"], job.said()) == ("COMPLETED", "0:0", "finished 0\n")
        assert outcome(job.run_dir / f"{job.id}-0").verdict == "finished"
        notes = [job.note(node, f"{job.id}-0") for node in ("n1", "n2")[:nodes]]
        assert {each["parent"] for each in notes} == {"slurmstepd"}  # no shell between
        [log] = job.run_dir.glob("*.log")  # %N is the name of the machine, which is that of both nodes here
        assert sorted(line for line in log.read_text().splitlines() if line.startswith("agent on")) == [
            f"agent on {node}" for node in ("n1", "n2")[:nodes]
        ]
        if nodes > 1:
            [key] = {tuple(each["key"]) for each in notes}
            assert key[1] == 0o600 and len(key[0]) == 45
            [argv] = {shlex.join(each["argv"]) for each in notes}
            assert "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint n1:29500 --key-file" in argv and "--chained" in argv
            assert [path.name for path in job.run_dir.glob(".key*")] == []
    finally:
        job.close()


@pytest.mark.parametrize("shape", ["allocation", "array"])
def test_a_job_that_is_submitted_inside_of_an_allocation_takes_nothing_of_it(
    machine: Machine, tmp_path: Path, shape: str
) -> None:
    """Each of these variables is an option of srun, some of which exclude each other, or ask for what the node lacks."""
    values = dict.fromkeys(script.OF_ANOTHER_JOB, "1")
    values |= {"SLURM_GPU_BIND": "none", "SLURM_HINT": "nomultithread", "SLURM_TRES_PER_TASK": "gres/gpu:1"}
    job = Job(machine, tmp_path, nodes=2, shape=shape, inherited=values)
    try:
        machine.until(lambda: not machine.run("squeue", "--noheader", "--jobs", job.id).stdout.strip(), "an end", 90)
        for task in ("",) if shape == "allocation" else ("_0", "_1"):
            assert job.said(task) == "finished 0\n"
    finally:
        job.close()


def test_an_array_runs_one_job_a_node_and_spares_end_at_once(machine: Machine, tmp_path: Path) -> None:
    job = Job(machine, tmp_path, nodes=2, shape="array", spares=1)
    try:
        machine.until(lambda: not machine.run("squeue", "--noheader", "--jobs", job.id).stdout.strip(), "an end", 90)
        assert [job.said(f"_{task}") for task in range(3)] == ["finished 0\n", "finished 0\n", ""]
        keys = {tuple(job.note(node, job.id)["key"]) for node in ("n1", "n2")}
        endpoints = {job.note(node, job.id)["argv"][7] for node in ("n1", "n2")}
        shown = machine.run(sys.executable, "-m", "megatron_recover", "status", "--jobid", job.id, cwd=ROOT)
        assert shown.stdout.startswith("ended with exit code 0"), shown  # any job of the array names the one run
        assert len(keys) == 1 and endpoints == {f"file:{job.run_dir}/{job.id}.endpoint"}
    finally:
        job.close()


def test_a_signal_ends_a_start_the_job_comes_back_and_a_cancelled_one_does_not(machine: Machine, tmp_path: Path) -> None:
    """The scheduler's signal goes to the agent and not to the script: code 15 requeues the job. scancel is for good."""
    job = Job(machine, tmp_path, toy=msgspec.structs.replace(TOY, steps=FOR_EVER), requeues=2)
    try:
        job.until_training(f"{job.id}-0")
        status = (sys.executable, "-m", "megatron_recover", "status", "--jobid", job.id)
        machine.until(lambda: machine.run(*status, cwd=ROOT).stdout.startswith("running, as of "), "a status")
        machine.run("scancel", "--signal=USR2", job.id)
        job.until_state("RUNNING", restarts="1")
        machine.until(lambda: machine.show(job.id)["Comment"].endswith(f"/{job.id}-1"), "the comment of the second start")
        assert outcome(job.run_dir / f"{job.id}-0").exit_code == 15
        job.until_training(f"{job.id}-1")
        machine.run("scancel", job.id)
        assert job.until_state("CANCELLED", restarts="1")["JobState"] == "CANCELLED"
        machine.until(lambda: outcome(job.run_dir / f"{job.id}-1").exit_code == 15, "the end of the second start")
        job.machine.until(lambda: job.said().count("requeue 15\n") == 2, "two verdicts")
        assert machine.show(job.id)["JobState"] == "CANCELLED"
    finally:
        job.close()


def test_slurm_signals_the_agent_ahead_of_the_time_limit(machine: Machine, tmp_path: Path) -> None:
    job = Job(machine, tmp_path, toy=msgspec.structs.replace(TOY, steps=FOR_EVER), minutes=5, signal_s=270, requeues=0)
    try:
        assert job.until_state("FAILED", "COMPLETED", "TIMEOUT")["ExitCode"] == "15:0"
        assert outcome(job.run_dir / f"{job.id}-0").reason.endswith("as asked for (SIGUSR2)")
    finally:
        job.close()


def test_a_dead_srun_ends_nothing(machine: Machine, tmp_path: Path) -> None:
    """The agent trains on, its log is written on, and the script waits for the end of the run."""
    job = Job(machine, tmp_path, toy=msgspec.structs.replace(TOY, steps=FOR_EVER), requeues=0)
    try:
        start = job.run_dir / f"{job.id}-0"
        job.until_training(start.name)
        sruns = [
            each for each in psutil.process_iter() if each.name() == "srun" and str(job.run_dir) in " ".join(each.cmdline())
        ]
        assert len(sruns) == 2  # the younger one is there to end the step after a death of the older one
        for srun in reversed(sruns):
            srun.kill()
        steps = (start / "sums-0-0.jsonl").read_text().count("\n")
        machine.until(lambda: (start / "sums-0-0.jsonl").read_text().count("\n") > steps + 200, "further steps")
        assert machine.show(job.id)["JobState"] == "RUNNING"
        machine.run("scancel", "--signal=USR2", job.id)
        assert job.until_state("FAILED", "COMPLETED")["ExitCode"] == "15:0"
        assert job.said().endswith("requeue 15\n")
        [log] = job.run_dir.glob("*.log")
        assert "SIGUSR2: all replicas end after the same step" in log.read_text()
    finally:
        job.close()


def test_a_marked_chain_ends_before_it_starts_anything(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "STOP").write_text("exit code 11: look at the data\n")
    job = Job(machine, tmp_path, chain=3)
    try:
        machine.until(lambda: not machine.run("squeue", "--noheader", "--jobs", job.id).stdout.strip(), "an end")
        [output] = job.run_dir.glob("*.out")
        assert output.read_text() == f"{tmp_path}/save/STOP:\nexit code 11: look at the data\n"
        states = [line.split()[0] for line in machine.run("scontrol", "--oneliner", "show", "job", job.id).stdout.splitlines()]
        shown = machine.run("scontrol", "--oneliner", "show", "job", job.id).stdout
        assert len(states) >= 2 and "JobState=CANCELLED" in shown and "ExitCode=2:0" in shown, shown
        assert os.listdir(job.run_dir) == [output.name]
    finally:
        job.close()


def test_a_job_of_an_array_that_is_held_ends_the_others_in_time_and_is_cancelled(machine: Machine, tmp_path: Path) -> None:
    """Here the real `run` meets nobody. Without an end of the wait the other job would hold its node idle."""
    run_dir, save = tmp_path / "runs", tmp_path / "save"
    run_dir.mkdir()
    (tmp_path / "train.py").touch()
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 257 "
        f"--mock-data --save {save} --load {save} --save-interval 2"
    )
    line = ("--nproc-per-node", "1", "--rdzv-conf", "join_timeout=3", str(tmp_path / "train.py"))
    text = script.text(script.Settings(
        command=(), launch=(*line, *flags.split()),
        run_dir=str(run_dir), python=sys.executable, nodes=2, shape="array", save=str(save), chain=2,
    ))  # fmt: skip
    (tmp_path / "job.sbatch").write_text(text)
    environment = {**machine.environment, "PYTHONPATH": str(ROOT)}
    job = machine.run("sbatch", "--hold", "--parsable", str(tmp_path / "job.sbatch"), cwd=ROOT, env=environment).stdout.strip()
    assert machine.run("scontrol", "release", f"{job}_0").returncode == 0
    try:
        machine.until(lambda: not machine.run("squeue", "--noheader", "--jobs", job).stdout.strip(), "an end", 120)
        [log] = run_dir.glob("*.log")
        assert "exit code 10" in log.read_text() and "1 of 2 nodes was there after 3 s" in log.read_text()
        assert MISSING_JOBS in log.read_text() and MISSING_JOBS in (save / "STOP").read_text()
        said = (run_dir / f"slurm-{job}_0.out").read_text()
        assert f"The run ended before training began: see the logs of the nodes, {run_dir}/*.log" in said
        assert (run_dir / f"{job}.over").exists() and not (run_dir / job).exists()
        shown = machine.run("scontrol", "--oneliner", "show", "job", f"{job}_1").stdout
        assert "JobState=CANCELLED" in shown, shown
    finally:
        machine.run("scancel", job)


def test_a_killed_run_is_started_again(machine: Machine, tmp_path: Path) -> None:
    """The trace has no end: the verdict is unknown, and the job comes back, at most so often."""
    job = Job(machine, tmp_path, toy=msgspec.structs.replace(TOY, steps=FOR_EVER), requeues=1)
    try:
        for restart in range(2):
            start = f"{job.id}-{restart}"
            job.until_training(start)
            pid = json.loads((job.run_dir / start / "run.json").read_text())["launcher"]["pid"]
            os.kill(pid, 9)
            if restart == 0:
                job.until_state("RUNNING", restarts="1")
        assert job.until_state("FAILED", restarts="1")["ExitCode"] == "1:0"
        assert job.said().count("unknown\n") == 2
        assert not (job.run_dir / f"{job.id}-0" / trace.EVENTS_FILE).read_bytes().count(b"run_finished")
    finally:
        job.close()
