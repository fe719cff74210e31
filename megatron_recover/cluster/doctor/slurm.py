"""Checks of the variables that Slurm gives a task: settings that keep a node's job from its node.

Pure functions over the environment.

Note [Numbers of the job]
    `SLURM_CPUS_ON_NODE` and `SLURM_GPUS_ON_NODE` are those of the step: inside a step that asks for
    one core they are 1. So what the job has on this node is read from what its batch script got.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_recover.cluster.doctor.findings import Check, Finding, fail, ok, warn
from megatron_recover.cluster.slurm.node_list import expand
from megatron_recover.config import VISIBLE_GPUS


def srun_line(environment: Mapping[str, str]) -> str:
    """Return the srun command that gives the agent its whole node; empty outside a Slurm job.

    A number that is not known of the job is left out (Note [Numbers of the job]).
    """
    if "SLURM_JOB_ID" not in environment:
        return ""
    words = ["srun", "--ntasks-per-node=1"]
    if (cores := _cores_here(environment)) is not None:
        words.append(f"--cpus-per-task={cores}")
    words.append("--cpu-bind=none")
    if _gpus_here(environment) is not None:
        words.append(f"--gpus-per-node={environment['SLURM_GPUS_PER_NODE']}")
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
    allocated = _cores_here(environment)
    if allocated is not None and num_cores < allocated:
        value = f"this task may use {num_cores} of the {allocated} cores that the job has here"
        found.append(warn(Check.SLURM, f"{value} (srun does not take --cpus-per-task from sbatch)", f"write: {line}"))
    gpus, shown = _gpus_here(environment), environment.get(VISIBLE_GPUS)
    if gpus is not None and shown and (num := len(shown.split(","))) < gpus:
        cause = next((name for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_BIND") if name in environment), "")
        value = f"this task sees {num} of the {gpus} GPUs that the job has here" + (
            f" ({cause} is {environment[cause]})" if cause else ""
        )
        found.append(warn(Check.SLURM, value, f"leave out --gpus-per-task and --gpu-bind: {line}"))
    return found or [ok(Check.SLURM, f"job {environment['SLURM_JOB_ID']}")]


def _cores_here(environment: Mapping[str, str]) -> int | None:
    """Return the number of cores that the job has on this node; None if it is not known."""
    try:
        nodes = expand(environment.get("SLURM_JOB_NODELIST", ""))
        return _by_node(environment.get("SLURM_JOB_CPUS_PER_NODE", ""))[nodes.index(environment.get("SLURMD_NODENAME", ""))]
    except (ValueError, IndexError):
        return None


def _gpus_here(environment: Mapping[str, str]) -> int | None:
    """Return the number of GPUs that the job has on each node; None if it is not known.

    Slurm gives what `--gpus-per-node` gave: `8`, `h100:8`, or several types with commas.
    """
    found = [re.fullmatch(r"(?:[\w.-]+:)*(\d+)", each) for each in environment.get("SLURM_GPUS_PER_NODE", "").split(",")]
    numbers = [int(each[1]) for each in found if each is not None]
    return sum(numbers) if len(numbers) == len(found) else None


def _by_node(text: str) -> list[int]:
    """Return the numbers of a text such as `16(x2),8`, one for each node."""
    numbers: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        numbers += [int(number)] * int(times or 1)
    return numbers


def _tasks_here(environment: Mapping[str, str]) -> int:
    """Return the number of tasks of this step on this node; 1 outside a step.

    A terminal (`srun --pty`) belongs to the first task alone, so the others do not count.
    """
    if "SLURM_PTY_PORT" in environment:
        return 1
    numbers = _by_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environment.get("SLURM_NODEID", "0")
    return numbers[int(node)] if node.isdecimal() and int(node) < len(numbers) else 1
