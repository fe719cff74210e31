"""`megatron-recover status RUN_DIR`: prints the state of a job, wherever its folder can be seen."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec

from megatron_recover.cli.run_dirs import add_job_arguments, folder_of_job
from megatron_recover.cluster import status
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.wording import counted, named
from megatron_recover.flags import Parser

_OLD_S = 60.0
"""Age in seconds from which a state is called old."""


def main(argv: list[str]) -> int:
    """Print the state of a job."""
    parser = Parser(
        prog="megatron-recover status",
        description="Print the state of a job: its nodes, replicas, iteration, losses, newest checkpoint.",
        epilog=f"Exit code {ExitCode.OK:d}: there is a state. {ExitCode.BAD_INPUT:d}: there is none.",
    )
    add_job_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the state as JSON")
    arguments = parser.parse_args(argv)
    try:
        run_dir = folder_of_job(arguments)
        found = status.read(run_dir)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if found is None:
        whole = run_dir.parent.parent if run_dir.parent.name == "nodes" else None
        what = "the --run-dir of a job that has begun to train" if whole is None else f"{whole}, the folder of the whole job"
        parser.error(f"{run_dir} has no {status.STATUS_FILE}; give {what}")
    print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() if arguments.json else _described(found, run_dir))
    return ExitCode.OK


def _age_s(run_dir: Path) -> float:
    """Return the seconds since the state was written.

    The clock of this host may be far from that of the file system. So the time of a file that is
    made there now counts, if the folder accepts one.
    """
    try:
        now = status.made_now(run_dir).st_mtime
    except OSError:
        now = time.time()
    with contextlib.suppress(OSError):
        return max(0.0, now - (run_dir / status.STATUS_FILE).stat().st_mtime)
    return 0.0


def _described(found: status.Status, run_dir: Path) -> str:
    """Return the state in words."""
    age_s = _age_s(run_dir)
    if found.exit_code is not None:
        lines = [f"ended with exit code {found.exit_code} ({ExitCode.words(found.exit_code)}): {found.reason}"]
    else:
        old = ": it changes with each step, so look whether the job still lives on node 0" if age_s >= _OLD_S else ""
        lines = [f"running, as of {age_s:.0f} s ago{old}"]
    done = f"{counted(found.step, 'step')}, evaluations and saves included"
    if found.iteration is not None:
        done = f"iteration {found.iteration}" + (f" of {found.iterations}" if found.iterations is not None else "")
    forming = "".join(f", replica {replica} forms" for replica in found.forming)
    wanted = found.replicas if found.wanted is None else found.wanted
    lines.append(
        f"generation {found.generation}, {done}, {counted(len(found.roster), 'replica')} "
        f"({' '.join(map(str, found.roster)) or 'none'}), {wanted} wanted, {found.losses} lost{forming}; {found.checkpoint}"
    )
    for node in found.nodes:
        number = f"node {node.number}" if node.number >= 0 else "spare node"
        lines.append(f"{number}  {node.name}  {node.state}  {named(node.replicas)}")
    lines.append(f"folder: {run_dir}")
    return "\n".join(lines)
