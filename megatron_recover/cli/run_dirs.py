"""Run directories on a command line: RUN_DIR, and the folder of a run that is refused."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from megatron_recover.cluster.slurm.script import COMMENT
from megatron_recover.trace import EVENTS_FILE

_NAMED = 3
_SLURM_S = 20.0
_SLURM_JOB = re.compile(r"[0-9]+([_+][0-9]+)?")
"""Number of a job, also of one in an array."""


def run_folder(path: str) -> Path:
    """Return the folder of a run, given the folder or its events.jsonl."""
    place = Path(path)
    return place.parent if place.name == EVENTS_FILE else place


def exists(wanted: Path | None) -> bool:
    """Return whether the folder that a user gives for a new run is there.

    False where that cannot be seen.
    """
    return wanted is not None and os.path.exists(wanted)


def remove(folder: Path, *, existed: bool) -> None:
    """Empty a run directory, and remove it unless it existed before. It may be gone already.

    Other nodes remove what is theirs (`remove_part`), before or after.
    """
    if not folder.exists():
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    if not existed:
        _remove_if_empty(folder)


def remove_part(folder: Path, *, existed: bool) -> None:
    """Remove the part of another node than node 0, and the run directory with the last part.

    Node 0 may have removed the run directory before this node made its part. It stays where it
    existed before.
    """
    shutil.rmtree(folder, ignore_errors=True)
    _remove_if_empty(folder.parent)
    if not existed:
        _remove_if_empty(folder.parent.parent)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # others are in it, or have removed it
        folder.rmdir()


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two ways to name a job: its folder, or its number in Slurm."""
    parser.add_argument("run_dir", nargs="?", type=run_folder, metavar="RUN_DIR", help="the folder of the job")
    parser.add_argument("--jobid", metavar="J", help="number of a Slurm job that `megatron-recover sbatch` has made")


def folder_of_job(arguments: argparse.Namespace) -> Path:
    """Return the folder that the arguments of `add_job_arguments` name. Raises ValueError."""
    run_dir, job = arguments.run_dir, arguments.jobid
    if run_dir is None and job is None:
        raise ValueError("give the folder of a job, or --jobid")
    if run_dir is not None and job is not None:
        raise ValueError("give only one of RUN_DIR and --jobid")
    if job is not None:
        return _of_slurm_job(job)
    if run_dir.is_file():
        raise ValueError(f"{run_dir} is no folder; give the --run-dir of a job")
    return Path(run_dir)


def _of_slurm_job(job: str) -> Path:
    """Return the folder of a Slurm job, from its comment. Raises ValueError with the remedy."""
    if not _SLURM_JOB.fullmatch(job):
        raise ValueError(f"--jobid is {job}; give the number of a Slurm job, such as 4711")
    remedy = "give the folder of the job instead"
    commands = (["squeue", "-h", "-t", "all", "-j", job, "-o", "%k"], ["sacct", "-n", "-P", "-X", "-j", job, "-o", "Comment"])
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SLURM_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ValueError(f"{command[0]} does not answer here ({error}); {remedy}") from error
        for line in done.stdout.splitlines():
            if line.strip().startswith(COMMENT):
                return Path(line.strip().removeprefix(COMMENT))
    raise ValueError(f"Slurm knows no job {job} whose comment has a run directory; {remedy}")


def no_trace(path: Path) -> str:
    """Return the message for a path without a trace.

    The message names the first few traces below the path, as in the folder of a demo.
    """
    folder = path.parent if path.name == EVENTS_FILE else path
    try:
        inside = sorted(str(one.parent) for one in folder.glob(f"*/{EVENTS_FILE}"))
    except OSError:  # the folder cannot be read
        inside = []
    if not inside:
        return f"no trace at {path}; give the --run-dir of a run"
    others = f" ({len(inside) - _NAMED} more beside them)" if len(inside) > _NAMED else ""
    return f"no trace at {path}; did you mean {' or '.join(inside[:_NAMED])}?{others}"
