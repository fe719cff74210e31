"""`megatron-recover drain REPLICA|NODE RUN_DIR`: has replicas of a running job leave it.

The request is left in the run directory, where node 0 of the job reads it.
"""

from __future__ import annotations

import getpass
import time
from pathlib import Path

from megatron_recover.cli.run_dirs import add_job_arguments, folder_of_job
from megatron_recover.cluster import status
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.wording import counted, named, verb
from megatron_recover.flags import Parser
from megatron_recover.host.addresses import host_name

_LOOK_S = 0.5
WAIT_S = 600.0


def main(argv: list[str]) -> int:
    """Ask a job to give replicas back, and wait until they have left."""
    parser = Parser(
        prog="megatron-recover drain",
        description="Have a replica, or all replicas with ranks on a node, leave a running job after a common step. No "
        "microbatch is lost. The job goes on with the others. It uses the slots of a replica again only if "
        "`megatron-recover scale` asks for more replicas, and a slot of a node never, also one without a rank.",
        epilog=f"Exit code {ExitCode.OK:d}: they have left, or the node had none. {ExitCode.FAILED:d}: one was lost before. "
        f"{ExitCode.BAD_INPUT:d}: the job refuses, or there is none. "
        f"{ExitCode.UNFINISHED:d}: they have not left in time, or the job has not answered.",
    )
    parser.add_argument("target", metavar="REPLICA|NODE", help="number of a replica, or name of a node")
    add_job_arguments(parser)
    parser.add_argument(
        "--wait", type=float, default=WAIT_S, metavar="S", help=f"longest wait for their end, in seconds (default: {WAIT_S:g})"
    )
    arguments = parser.parse_args(argv)
    if not arguments.target.strip():
        parser.error("REPLICA|NODE is empty; give the number of a replica or the name of a node, see `megatron-recover status`")
    try:
        run_dir = folder_of_job(arguments)
        now = status.read(run_dir)
        if now is None or now.exit_code is not None:
            parser.error(f"no job trains in {run_dir}; `megatron-recover status {run_dir}` says more")
        leaving = status.targets(arguments.target, now.replicas, now.nodes, now.roster)
        if not leaving and (why := _why_nobody(arguments.target, now)):
            parser.error(why)
        asked = ask(run_dir, parser, drain=arguments.target)
        return _await(run_dir, asked, leaving, arguments.wait, parser)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _why_nobody(target: str, now: status.Status) -> str:
    """Return why a target names nothing to give back; empty for a node without members."""
    if target in map(str, now.forming):
        return f"replica {target} is formed, and no member yet; ask again once it has joined"
    states = [node.state for node in now.nodes if node.name == target]
    if states:
        is_lost = all(state == "lost" for state in states)
        return f"node {target} is lost: nothing of it is in use" if is_lost else ""
    roster, nodes = " ".join(map(str, now.roster)), ", ".join(node.name for node in now.nodes)
    return f"{target} is no replica and no node of the job; replicas are {roster}, nodes are {nodes}"


def ask(run_dir: Path, parser: Parser, drain: str = "", replicas: int | None = None) -> str:
    """Leave a request for a job, as in `status.Request`; return its id. Raises as `status.ask`."""
    try:
        return status.ask(run_dir, drain, f"{getpass.getuser()}@{host_name()}", replicas)
    except PermissionError as error:
        parser.error(f"{error.filename}: {error.strerror}; only the owner of the folder, who runs the job, and root may ask")


def _await(run_dir: Path, asked: str, leaving: tuple[int, ...], wait_s: float, parser: Parser) -> int:
    """Wait until the replicas have left, and say so; return the exit code."""
    until, is_accepted = time.monotonic() + wait_s, False
    while time.monotonic() < until:
        now = status.read(run_dir)
        if now is not None:
            for answer in now.answers:
                if answer.id == asked and answer.refused:
                    parser.error(answer.refused)
                if answer.id == asked and not is_accepted:
                    is_accepted, leaving = True, answer.leaving or (() if answer.text else leaving)
                    print(answer.text, end="\n" if answer.text else "", flush=True)
            if set(leaving) & set(now.lost):
                lost = tuple(sorted(set(leaving) & set(now.lost)))
                how = verb(len(lost), "was lost before it left", "were lost before they left")
                print(f"{named(lost)} {how}; {_rest(now)}")
                return ExitCode.FAILED
            if (leaving or is_accepted) and not set(leaving) & set(now.roster):
                print(f"{_have_left(leaving)}; {_rest(now)}")
                return ExitCode.OK
            if now.exit_code is not None:
                parser.error(f"the job has ended with exit code {now.exit_code}: {now.reason}")
        time.sleep(_LOOK_S)
    if is_accepted:  # with members that leave: without any it has returned
        has, leave = verb(len(leaving), "has", "have"), verb(len(leaving), "it leaves", "they leave")
        text = (
            f"{named(leaving)} {has} not left within {wait_s:g} s; {leave} after the next common step, or, where the job has "
            "lost others, once newcomers have joined"
        )
    else:
        text = (
            f"the job has not answered within {wait_s:g} s; the request stays in {run_dir / status.REQUESTS}, and "
            f"`megatron-recover status {run_dir}` says when the job has last written its state"
        )
    print(text)
    return ExitCode.UNFINISHED


def _have_left(leaving: tuple[int, ...]) -> str:
    """Return in words that replicas have left."""
    return f"{named(leaving)} {verb(len(leaving), 'has', 'have')} left" if leaving else "no replica had to leave"


def _rest(now: status.Status) -> str:
    return f"{counted(len(now.roster), 'replica')} {verb(len(now.roster), 'goes', 'go')} on"
