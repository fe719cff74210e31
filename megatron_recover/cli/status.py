"""`megatron-recover status RUN_DIR`: prints the state of a job, wherever its folder can be seen."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import msgspec

from megatron_recover.cli.run_dirs import run_folder
from megatron_recover.cluster import status
from megatron_recover.cluster.slurm.script import COMMENT
from megatron_recover.core.values import ExitCode
from megatron_recover.flags import Parser

_SLURM_S = 20.0


def main(argv: list[str]) -> int:
    """Print the state of a job."""
    parser = Parser(
        prog="megatron-recover status",
        description="Print the state of a job: its nodes, replicas, committed steps, losses, newest checkpoint.",
        epilog=f"Exit code {ExitCode.OK:d}: there is a state. {ExitCode.BAD_INPUT:d}: there is none.",
    )
    parser.add_argument("run_dir", nargs="?", type=run_folder, metavar="RUN_DIR", help="the folder of the job")
    parser.add_argument("--jobid", metavar="J", help="number of a Slurm job that `megatron-recover sbatch` has made")
    parser.add_argument("--json", action="store_true", help="print the state as JSON")
    arguments = parser.parse_args(argv)
    if (arguments.run_dir is None) == (arguments.jobid is None):
        parser.error("give the folder of a job, or --jobid")
    try:
        run_dir = arguments.run_dir if arguments.jobid is None else _run_dir_of(arguments.jobid)
        found = status.read(run_dir)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if found is None:
        parser.error(f"{run_dir} has no {status.STATUS_FILE}; give the --run-dir of a job that has begun to train")
    print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() if arguments.json else _described(found))
    return ExitCode.OK


def _run_dir_of(job: str) -> Path:
    """Return the folder of a Slurm job, from its comment. Raises ValueError with the remedy."""
    remedy = "give the folder of the job instead"
    for command in (
        ["squeue", "-h", "-t", "all", "-j", job, "-o", "%k"],
        ["sacct", "-n", "-P", "-X", "-j", job, "-o", "Comment"],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SLURM_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ValueError(f"{command[0]} does not answer here ({error}); {remedy}") from error
        for line in done.stdout.splitlines():
            if line.strip().startswith(COMMENT):
                return Path(line.strip().removeprefix(COMMENT))
    raise ValueError(f"Slurm knows no job {job} whose comment has a run directory; {remedy}")


def _described(found: status.Status) -> str:
    """Return the state in words."""
    age_s = max(0.0, time.time() - found.at)
    if found.exit_code is not None:
        lines = [f"ended with exit code {found.exit_code} ({ExitCode.words(found.exit_code)}): {found.reason}"]
    else:
        lines = [f"running, as of {age_s:.0f} s ago"]
    saved = "no checkpoint yet" if found.saved is None else f"newest checkpoint: iteration {found.saved}"
    lines.append(
        f"generation {found.generation}, {found.step} committed steps, {len(found.roster)} of {found.replicas} replicas "
        f"({' '.join(map(str, found.roster)) or 'none'}), {found.losses} lost; {saved}"
    )
    for node in found.nodes:
        replicas = f"replicas {' '.join(map(str, node.replicas))}" if node.replicas else "no replicas"
        number = f"node {node.number}" if node.number >= 0 else "spare node"
        lines.append(f"{number}  {node.name}  {node.state}  {replicas}")
    return "\n".join(lines)
