"""`megatron-recover doctor`: checks this node for a job, without starting any of it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

import msgspec

from megatron_recover import packages
from megatron_recover.cli import launch_line, training_script
from megatron_recover.cli.node_checks import folders_of
from megatron_recover.cli.run_flags import add_flags
from megatron_recover.cluster.doctor.findings import Check, Finding, Need, warn
from megatron_recover.cluster.doctor.node import examine, software
from megatron_recover.cluster.meeting import Meeting, addresses_of, only_here
from megatron_recover.config import inherited_environment
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.flags import Parser, misplaced, split, value_of
from megatron_recover.host import reachable
from megatron_recover.host.addresses import host_name
from megatron_recover.host.gpus import has_gpu
from megatron_recover.megatron.launch import one_megatron
from megatron_recover.megatron.launch.arguments import recover_flags
from megatron_recover.megatron.launch.preflight import FLAGS, shape_of

_PER_GPU = ("gpu", "auto")
"""Numbers of processes that torch would have to find. The driver is asked once for all here."""


class _DoctorParser(Parser):
    """The parser of `doctor`."""

    elsewhere = "; Megatron's flags go behind the script's name"


def _parser() -> Parser:
    parser = _DoctorParser(
        prog="megatron-recover doctor",
        description="Check this machine for a job, in a few seconds, and print a line for each check: ok, warn or fail, and "
        "what to change. Nothing is started. Write `doctor` where the line of a job has `run`.",
        usage="megatron-recover doctor [--json] [flags of run] [SCRIPT [Megatron flags]]",
        epilog="docs/how_to/doctor.md explains every check. Exit code 0: the job can run here; 2: a check fails, or bad input. "
        "`run` makes the same checks before it starts anything, and prints what is not ok.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_flags(parser)
    return parser


def _need(arguments: Namespace, command: Sequence[str], environment: dict[str, str]) -> tuple[Need, list[Finding]]:
    """Return what a launch line asks of this node, and the findings about where nodes meet.

    Raises ValueError where the line is wrong.
    """
    wanted = arguments.nproc_per_node or environment.get("PET_NPROC_PER_NODE")
    is_rank_per_gpu = wanted in _PER_GPU and has_gpu()
    if is_rank_per_gpu:  # `launch_line.read` would import torch to count them
        arguments = Namespace(**vars(arguments) | {"nproc_per_node": None})
        environment = {name: value for name, value in environment.items() if name != "PET_NPROC_PER_NODE"}
    line = launch_line.read(arguments, environment)
    if command:
        training_script.judge(command[0], "doctor", is_module=line.is_module)
    num_ranks = line.num_processes
    if num_ranks is None and arguments.replicas is not None and not line.nodes.is_of_several:
        num_ranks = arguments.replicas * shape_of(command[1:], arguments.lanes).num_ranks
    address, mistake = _address(line.nodes)
    run_dir = [] if arguments.run_dir is None else ["--run-dir", str(arguments.run_dir)]
    ranks_per_gpu = value_of(command, "--recover-ranks-per-gpu") or "1"
    need = Need(
        num_ranks=num_ranks, is_rank_per_gpu=is_rank_per_gpu, on_gpus=has_gpu(),
        num_nodes=line.nodes.most_nodes if address or mistake else 1, address=address, address_mistake=mistake,
        ranks_per_gpu=int(ranks_per_gpu) if ranks_per_gpu.isdecimal() and int(ranks_per_gpu) else 1,
        folders=folders_of([*command, *run_dir]), environment=inherited_environment(),
    )  # fmt: skip
    is_only_here = line.nodes.is_of_several and not (address or mistake)
    return need, [warn(Check.ADDRESS, *only_here(line.nodes))] if is_only_here else []


def _address(meeting: Meeting) -> tuple[str | None, str]:
    """Return the address that this node would publish, or why it has none.

    Neither for one node, and where all nodes meet at a loopback address of this machine.
    """
    if not meeting.is_of_several:
        return None, ""
    if meeting.endpoint_file is not None:
        return _address_of_first(meeting)
    try:
        endpoint, found = addresses_of(meeting)
    except ValueError as error:
        return None, str(error)
    return (None if all(map(reachable.is_loopback, endpoint)) else found), ""


def _address_of_first(meeting: Meeting) -> tuple[str | None, str]:
    """Return the address that this node would write into the file of the endpoint, or why not."""
    try:
        return reachable.own_address(interface=meeting.interface, local_addr=meeting.local_addr), ""
    except ValueError as error:
        return None, str(error)


def _software(arguments: Namespace, command: Sequence[str]) -> list[Finding]:
    """Check what the job would import; without a script, what a script in this folder would."""
    mistake = None
    try:
        one_megatron.choose(command[0] if command else "", is_module=not command or arguments.module is not None)
    except ValueError as error:
        mistake = str(error)
    return software(packages.TRAINING, mistake)


def _other_nodes(num_nodes: int) -> Iterator[Finding]:
    """Yield that this command judges no other node, and no pair of nodes, if there are others."""
    if num_nodes > 1:
        yield warn(
            Check.PORTS,
            f"this command examines this node alone, and no connection to the other {num_nodes - 1} of {num_nodes} nodes",
            "give it on every node; `run` examines all nodes, and each pair of them, before it starts anything",
        )


def main(argv: list[str]) -> int:
    """Print the findings; return 0, or 2 if a check fails."""
    parser = _parser()
    ours, command = split(argv, parser)
    if found := misplaced(ours, [*FLAGS, *recover_flags()]):
        parser.error("\n".join(found))
    arguments = parser.parse_args(ours)
    try:
        need, about_meeting = _need(arguments, command, inherited_environment())
    except ValueError as error:
        parser.error(str(error))
    findings = [*_software(arguments, command), *examine(need), *about_meeting, *_other_nodes(need.num_nodes)]
    findings.sort(key=lambda each: [*Check].index(each.check))
    if arguments.json:
        rows = [{"node": host_name()} | msgspec.structs.asdict(each) for each in findings]
        print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
    else:
        print("\n".join(each.line(host_name()) for each in findings))
    return ExitCode.BAD_INPUT if any(each.level == "fail" for each in findings) else ExitCode.OK
