"""The part of `run` for a job of several nodes: they meet before there is a job to describe."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_recover import __version__, packages
from megatron_recover.authentication import key as keys
from megatron_recover.cli import run_dirs
from megatron_recover.cli.launch_line import NO_NUMBER_OF_SEVERAL, Choice
from megatron_recover.cluster.job import Job, claim_folder, create_run_dir
from megatron_recover.cluster.joining import NotMet, Place, flags_alike
from megatron_recover.cluster.membership import Joined
from megatron_recover.cluster.signals import EndRequest
from megatron_recover.config import RecoverConfig
from megatron_recover.control_plane.node_messages import Met
from megatron_recover.control_plane.nodes_driver import TELL_S
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.placement import left_over_line
from megatron_recover.core.policy import about_the_coordinator
from megatron_recover.core.wording import counted, named, verb
from megatron_recover.deadlines import Deadlines
from megatron_recover.flags import unreadable
from megatron_recover.megatron.launch.preflight import Undecided
from megatron_recover.observe.files import LOGS

_AGAIN_S = 60
"""Longest wait in seconds for the coordinator of a job that goes on, of which this node was lost.
The job may end meanwhile."""


class Wanted(NamedTuple):
    """The contribution of a node to the meeting with others."""

    key: bytes
    num_processes: int
    deadlines: Deadlines
    alike: tuple[tuple[str, str], ...]
    """Pairs of name and value that have to be equal on all nodes."""


def prepare(arguments: argparse.Namespace, line: Choice, words: Sequence[str], flags: Sequence[str]) -> Wanted:
    """Return what this node takes to the meeting. Raises ValueError with the remedy, and OSError.

    Mistakes that this node can find alone are found here, before any node waits for it.
    """
    if line.num_processes is None:
        raise ValueError(NO_NUMBER_OF_SEVERAL)
    undecided = Undecided(flags)
    if mistakes := undecided.mistakes():
        raise ValueError("\n".join(mistakes))
    return Wanted(
        keys.key_of_several(line.nodes.key_file), line.num_processes, undecided.config.deadlines,
        tuple(_alike(arguments, line, words, flags)),
    )  # fmt: skip


def again(line: Choice) -> Choice:
    """Return the launch line for a node that was lost and meets the others of its job anew.

    It never owns the endpoint. Where its job has ended meanwhile, it would begin another one.
    """
    join_s = min(line.nodes.join_s, _AGAIN_S)
    return msgspec.structs.replace(line, nodes=msgspec.structs.replace(line.nodes, join_s=join_s, is_host=False))


def join(arguments: argparse.Namespace, line: Choice, wanted: Wanted, request: EndRequest) -> tuple[Joined, str]:
    """Meet the other nodes; return the place of this one in the job, and its address.

    `request` keeps signals. Raises ValueError with the remedy, `NotMet` if the job ends before, and
    OSError.
    """
    place = Place(line.nodes, wanted.deadlines, request)
    with removing_run_dir(arguments.run_dir) as make:
        joined = place.join(
            key=wanted.key, level=arguments.trace_level, slots=wanted.num_processes, run_dir=make, run_id=line.run_id,
            alike=wanted.alike,
        )  # fmt: skip
    return joined, place.address


def report(line: Choice, mistake: str, request: EndRequest) -> None:
    """Tell the other nodes a mistake that was found here before `join`; they all end.

    It takes at most `TELL_S` seconds. Without a key, or an address at which nodes can meet, nobody
    is told.
    """
    meeting = msgspec.structs.replace(line.nodes, join_s=TELL_S)
    with contextlib.suppress(NotMet, ValueError, OSError):
        key = keys.key_of_several(meeting.key_file)
        Place(meeting, RecoverConfig().deadlines, request, may_claim=False).report(mistake, key)


@contextlib.contextmanager
def removing_run_dir(wanted: Path | None) -> Iterator[Callable[[], Path]]:
    """Yield the function that makes the run directory; leave none if the context ends early."""
    existed = run_dirs.exists(wanted)
    made: list[Path] = []

    def make() -> Path:
        made.append(create_run_dir(wanted))
        return made[0]

    try:
        yield make
    except BaseException:
        for folder in made:
            run_dirs.remove(folder, existed=existed)
        raise


def _alike(
    arguments: argparse.Namespace, line: Choice, words: Sequence[str], flags: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield what has to be equal on all nodes, by name."""
    yield "megatron-recover", __version__
    yield "Python", platform.python_version()
    for name in map(packages.name_of, packages.TRAINING):
        yield name, packages.version(name) or "none"
    yield "--nnodes", f"{line.nodes.least_nodes}:{line.nodes.most_nodes}"
    for name in ("replicas", "lanes", "rank_start", "chaos", "trace_level"):
        if (value := getattr(arguments, name)) is not None:
            yield f"--{name.replace('_', '-')}", str(value)
    yield "the script", " ".join(words)
    if not line.is_module:
        yield "the content of the script", hashlib.blake2b(Path(words[-1]).read_bytes(), digest_size=8).hexdigest()
    yield from flags_alike(flags)


def run_dir(met: Met) -> Path:
    """Return this node's folder: the run directory itself on node 0, and one inside it on others.

    Raises ValueError with the remedy.
    """
    folder = Path(met.run_dir)
    return folder if met.you == 0 else claim_folder(folder / "nodes" / str(met.you), LOGS)


def mistake_of(error: ValueError | OSError) -> str:
    """Return the message about a mistake that ends the command."""
    return str(error) if isinstance(error, ValueError) else unreadable(error)


def last_words(end: NotMet) -> str:
    """Return the message about a job that has ended before it began."""
    if end.exit_code == ExitCode.BAD_INPUT:
        return f"megatron-recover run: error: {end}\n"
    return f"megatron-recover run: exit code {end.exit_code} ({ExitCode.words(end.exit_code)}): {end}\n"


def notes(job: Job, wanted: Path | None = None) -> Iterator[str]:
    """Yield what the user should know about the nodes of a job before it starts.

    `wanted`: the `--run-dir` of this node.
    """
    if job.placement is None:
        return
    if job.node and wanted is not None and wanted.resolve() != (whole := job.run_dir.parent.parent).resolve():
        yield f"--run-dir {wanted} changes nothing here: the run directory is that of node 0, {whole}"
    if job.is_late:
        are = verb(job.num_slots_here, "is a spare", "are spares")
        yield f"this node came after the start of the job, as node {job.node}: its {counted(job.num_slots_here, 'slot')} {are}"
    else:
        here = f"node {job.node} of {len(job.nodes)} runs {counted(job.num_ranks_here, 'rank')}"
        yield f"{here}, of {named(job.replicas_here, between=', ')}"
    has_ranks = any(slot.node == 0 for slots in job.placement.replicas for slot in slots)
    yield about_the_coordinator(job.nodes[0].name, saves=job.save is not None, has_ranks=has_ranks)
    if (
        job.node == 0
        and (line := left_over_line(job.placement, job.num_ranks, are_spares=job.config.heal != "off")) is not None
    ):
        yield line
