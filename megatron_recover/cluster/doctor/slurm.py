"""Checks of the variables that Slurm gives a task: settings that keep a node's job from its node.

Pure functions over the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_recover.cluster.doctor.findings import Check, Finding, fail, ok, warn
from megatron_recover.config import VISIBLE_GPUS


def srun_line(environment: Mapping[str, str]) -> str:
    """Return the srun command that gives the agent its whole node; empty outside a Slurm job."""
    if "SLURM_JOB_ID" not in environment:
        return ""
    words = ["srun", "--ntasks-per-node=1"]
    if (number := environment.get("SLURM_CPUS_ON_NODE", "")).isdecimal():
        words.append(f"--cpus-per-task={number}")
    words.append("--cpu-bind=none")
    if (number := environment.get("SLURM_GPUS_ON_NODE", "")).isdecimal():
        words.append(f"--gpus-per-node={number}")
    return " ".join([*words, "--mpi=none", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "megatron-recover run ..."])


def settings(environment: Mapping[str, str], num_cores: int) -> list[Finding]:
    """Check the settings of the Slurm job around this process; nothing outside of one.

    `num_cores`: cores that this process may use.
    """
    line = srun_line(environment)
    if not line:
        return []
    found = []
    tasks = _tasks_here(environment)
    if tasks > 1:
        found.append(fail(Check.SLURM, f"{tasks} tasks start on this node, and each would be an agent of it", f"write: {line}"))
    allocated = environment.get("SLURM_CPUS_ON_NODE", "")
    if allocated.isdecimal() and num_cores < int(allocated):
        value = f"this task may use {num_cores} of the {allocated} cores that the job has here"
        found.append(warn(Check.SLURM, f"{value} (srun does not take --cpus-per-task from sbatch)", f"write: {line}"))
    gpus, shown = environment.get("SLURM_GPUS_ON_NODE", ""), environment.get(VISIBLE_GPUS)
    if gpus.isdecimal() and shown and (num := len(shown.split(","))) < int(gpus):
        cause = next((name for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_BIND") if name in environment), "")
        value = f"this task sees {num} of the {gpus} GPUs that the job has here" + (
            f" ({cause} is {environment[cause]})" if cause else ""
        )
        found.append(warn(Check.SLURM, value, f"leave out --gpus-per-task and --gpu-bind: {line}"))
    return found or [ok(Check.SLURM, f"job {environment['SLURM_JOB_ID']}")]


def _tasks_here(environment: Mapping[str, str]) -> int:
    """Return the number of tasks of this step on this node; 1 outside a step.

    A terminal (`srun --pty`) belongs to the first task alone, so the others do not count.
    """
    if "SLURM_PTY_PORT" in environment:
        return 1
    numbers: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        numbers += [int(number)] * int(times or 1)
    node = environment.get("SLURM_NODEID", "0")
    return numbers[int(node)] if node.isdecimal() and int(node) < len(numbers) else 1
