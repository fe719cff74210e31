"""Makes the description of a job, and its run directory, from a command line of `run`.

A job of several nodes is described on each of them, once they have met.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import megatron_recover
from megatron_recover import packages, trace
from megatron_recover.cli import launch_line, run_dirs, several_nodes, training_script
from megatron_recover.cluster import chaos
from megatron_recover.cluster.job import Job, RankStart, claim_log_links, create_run_dir
from megatron_recover.cluster.joining import refuse
from megatron_recover.cluster.membership import Joined
from megatron_recover.cluster.output import file_limit_mistake
from megatron_recover.cluster.signals import EndRequest
from megatron_recover.config import inherited_environment
from megatron_recover.core.placement import most_replicas, place
from megatron_recover.core.wording import counted
from megatron_recover.faults import Fault
from megatron_recover.flags import value_of
from megatron_recover.host.addresses import HOST
from megatron_recover.host.gpus import has_gpu
from megatron_recover.megatron.launch import one_megatron
from megatron_recover.megatron.launch.preflight import Preflight, Undecided, preflight, shape_of
from megatron_recover.observe import stop_mark

PRELOAD = (
    "torch",
    "megatron_recover.megatron.cpu:leave_out_what_needs_a_gpu",
    "torch._dynamo",
    "megatron.training",
    "megatron_recover.megatron.training",
    "megatron_recover.megatron.commit",
    "megatron_recover.megatron.checkpoint.checkpoints",
)
"""Modules that every rank starts with, and a function to call (`cluster/forkserver.py`). torch's
optimizers import `torch._dynamo` at their first use, which every rank would do for itself."""
RUNNER = Path(megatron_recover.__file__).parent / "megatron" / "launch" / "script.py"
_LEAST_PART_BYTES = 2**20
"""Smallest size of a part of the trace in bytes. With smaller parts a run of days would leave a
hundred thousand files."""


def job_of(arguments: argparse.Namespace, command: Sequence[str]) -> tuple[Job, str, Joined | None]:
    """Return the job, with its new run directory, the text of its chaos file, and its place.

    The text is empty without chaos, and the place is None without other nodes. Prints notes about
    torchrun's flags and the replicas unless `--quiet` is given. Raises ValueError with the remedy,
    `NotMet` if other nodes or a signal end the job, and OSError if a file that the command line
    names cannot be reached.
    """
    line = launch_line.read(arguments, inherited_environment())
    script, *flags = command
    words = (*(["-m"] if line.is_module else []), script)
    if not line.nodes.is_of_several:
        rank_start = _judged(arguments, line, script, flags)
        return *_described(arguments, line, words, flags, rank_start), None
    request = EndRequest(line.signals)
    request.keep()
    try:
        return _job_of_several(arguments, line, words, flags, request)
    except BaseException:
        request.release()
        raise


def _job_of_several(
    arguments: argparse.Namespace, line: launch_line.Choice, words: Sequence[str], flags: Sequence[str], request: EndRequest
) -> tuple[Job, str, Joined]:
    """Meet the other nodes, and return what `job_of` does. A mistake of this node ends all."""
    if arguments.is_again:
        line = several_nodes.again(line)
    try:
        rank_start = _judged(arguments, line, words[-1], flags)
        wanted = several_nodes.prepare(arguments, line, words, flags)
    except (ValueError, OSError) as error:
        several_nodes.report(line, several_nodes.mistake_of(error), request)
        raise
    if not arguments.quiet:
        _print(line.notes)  # before the wait, which a mistake in an endpoint makes long
    existed = run_dirs.exists(arguments.run_dir)
    joined, address = several_nodes.join(arguments, line, wanted, request)
    try:
        with joined.membership.kept():  # what a rank needs may be measured, for minutes
            return *_described(arguments, line, words, flags, rank_start, joined, address), joined
    except (ValueError, OSError) as error:
        refuse(joined, several_nodes.mistake_of(error), wanted.deadlines)
        if joined.met is not None and joined.met.you == 0:
            run_dirs.remove(Path(joined.met.run_dir), existed=existed)
        raise


def _judged(arguments: argparse.Namespace, line: launch_line.Choice, script: str, flags: Sequence[str]) -> RankStart:
    """Judge what this node can judge alone; return how its ranks start. Raises ValueError."""
    training_script.judge(script, "run", is_module=line.is_module)
    _refuse_stopped(flags, is_chained=arguments.chained)
    one_megatron.choose(script, is_module=line.is_module)
    if arguments.trace_file_bytes and arguments.trace_file_bytes < _LEAST_PART_BYTES:
        raise ValueError(
            f"--trace-file-bytes is {arguments.trace_file_bytes}; it must be 0 (never) or at least {_LEAST_PART_BYTES} (1MiB)"
        )
    if (mistake := file_limit_mistake()) is not None:
        raise ValueError(mistake)
    packages.require(packages.TRAINING)
    return _rank_start(arguments.rank_start)


def _described(
    arguments: argparse.Namespace,
    line: launch_line.Choice,
    words: Sequence[str],
    flags: Sequence[str],
    rank_start: RankStart,
    joined: Joined | None = None,
    address: str = HOST,
) -> tuple[Job, str]:
    """Return the job and the text of its chaos file. `address` is that of this node.

    Raises as `job_of` does.
    """
    slots = _slots(line, joined)
    fitting = _fitting(arguments, None if slots is None else sum(slots), words, flags)
    num_replicas, lanes = _size(arguments, slots, flags, None if fitting is None else fitting[0])
    judged = preflight(flags, num_replicas=num_replicas, lanes=lanes)
    launch_line.judge(line, num_replicas * judged.layout.num_ranks, judged.config)
    _refuse_spares(arguments.spares, line, judged)
    placement = None
    if joined is not None and slots is not None:
        num_ranks = judged.layout.num_ranks
        placement = place(slots, num_replicas=num_replicas, num_ranks=num_ranks, tp=judged.layout.tp)
    faults: tuple[Fault, ...] = ()
    chaos_text = ""
    if arguments.chaos is not None:
        faults, chaos_text = chaos.faults_of(arguments.chaos, _target(num_replicas, judged))
        _refuse_unseen(faults, arguments.trace_level)
    log_links, run_dir = _folders(line, arguments.run_dir, joined)
    job = Job(
        argv=(*words, *flags), num_replicas=num_replicas, num_spares=arguments.spares, placement=placement, address=address,
        ports=line.nodes.ports,
        node=0 if joined is None or joined.met is None else joined.met.you,
        nodes=() if joined is None or joined.met is None else joined.met.nodes,
        is_late=joined is not None and joined.met is not None and joined.met.is_late,
        node_s=line.nodes.node_s if line.nodes.is_of_several else None,
        layout=judged.layout, config=judged.config,
        streams=line.streams, signals=line.signals, shutdown_s=line.shutdown_s, numa_binding=line.numa_binding,
        log_links=log_links, run_dir=run_dir, faults=faults, seed=judged.seed, runner=RUNNER, preload=PRELOAD,
        save=Path(judged.save).absolute() if judged.save is not None else None, rank_start=rank_start, run_id=line.run_id,
        num_microbatches=None if judged.batch_changes else judged.num_microbatches,
        not_healed_by=_not_healed_by(judged), least_microbatches=judged.least_microbatches,
        microbatch_samples=judged.microbatch_samples,
        trace_level=arguments.trace_level, trace_file_bytes=arguments.trace_file_bytes,
    )  # fmt: skip
    if not arguments.quiet:
        _print([
            *([] if line.nodes.is_of_several else line.notes),
            *([] if fitting is None else fitting[1:]),
            *_notes(job, is_derived=arguments.replicas is None or arguments.lanes is None and lanes > 1),
            *several_nodes.notes(job, arguments.run_dir),
        ])  # fmt: skip
    return job, chaos_text


def _print(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"megatron-recover run: {note}", file=sys.stderr, flush=True)


def _not_healed_by(judged: Preflight) -> tuple[str, ...]:
    """Return the flags because of which no lost replica is replaced."""
    if judged.config.heal != "off":
        return ()
    return tuple(line.split()[0] for line in judged.joining_refusals) or ("--recover-heal off",)


def _refuse_spares(num_spares: int, line: launch_line.Choice, judged: Preflight) -> None:
    """Raise ValueError where `--spares` makes no sense."""
    if not num_spares:
        return
    if num_spares < 0:
        raise ValueError(f"--spares is {num_spares}; it must be a number of slots, 0 or more")
    if line.nodes.is_of_several:
        raise ValueError(
            "--spares is for one node; on several nodes slots without a rank are spares: give a larger --nproc-per-node"
        )
    if judged.config.heal == "off":
        found = f"--spares is {num_spares}, but no lost replica is replaced"
        if judged.joining_refusals:
            raise ValueError(f"{found}: {'; '.join(judged.joining_refusals)}, or leave out --spares")
        raise ValueError(f"{found} (--recover-heal off); leave out --spares, or give --recover-heal in-place")


def _refuse_stopped(flags: Sequence[str], *, is_chained: bool) -> None:
    """Raise ValueError where the folder of `--save` has the mark of an end that repeats itself."""
    save = value_of(flags, "--save")
    if save is None:
        if is_chained:
            raise ValueError("--chained needs --save behind the script's name: the mark that ends a chain is left there")
        return
    if (found := stop_mark.found(Path(save))) is not None:
        first = found.partition("\n")[0]
        raise ValueError(
            f"--save {save} has the mark {stop_mark.STOP_MARK} of a run that a person has to look at ({first}); correct its "
            f"cause, then: {stop_mark.remedy(Path(save))}"
        )


def _slots(line: launch_line.Choice, joined: Joined | None) -> list[int] | None:
    """Return the number of processes of each node of the start; None: not given."""
    if joined is None or joined.met is None:
        return None if line.num_processes is None else [line.num_processes]
    return [node.slots for node in joined.met.at_start]


def _folders(line: launch_line.Choice, wanted: Path | None, joined: Joined | None) -> tuple[Path | None, Path]:
    """Create the folder for links to the logs, if there is to be one, and the run directory.

    Returns both. Raises ValueError with the remedy, and leaves neither then. With several nodes the
    run directory of node 0 exists already, and those of the others are inside it.
    """
    existed = run_dirs.exists(wanted)
    # First: the other may be inside it, and it has to be empty.
    run_dir = several_nodes.run_dir(joined.met) if joined is not None and joined.met is not None else create_run_dir(wanted)
    try:
        return None if line.log_dir is None else claim_log_links(line.log_dir, line.run_id), run_dir
    except ValueError:
        if joined is not None and joined.met is not None and joined.met.you:
            run_dirs.remove_part(run_dir, existed=existed)
        else:
            run_dirs.remove(run_dir, existed=existed)
        raise


def _fitting(
    arguments: argparse.Namespace, num_processes: int | None, words: Sequence[str], flags: Sequence[str]
) -> tuple[int, str] | None:
    """Return the number of lanes that memory asks for, and a line about it.

    None: the user gives the number, the number of replicas or no number of processes, or there is
    nothing to choose, as without a GPU. `words` name the script. Raises ValueError if flags are
    wrong whatever the size of a replica is.
    """
    if arguments.replicas is not None or arguments.lanes is not None or num_processes is None or not has_gpu():
        return None
    from megatron_recover.cli.lanes import lanes_that_fit

    if mistakes := Undecided(flags).mistakes():
        raise ValueError("\n".join(mistakes))
    return lanes_that_fit(words, flags, num_processes)


def _size(
    arguments: argparse.Namespace, slots: Sequence[int] | None, flags: Sequence[str], fitting: int | None = None
) -> tuple[int, int]:
    """Return the number of replicas, and of lanes of each: `fitting`, if the user gives neither.

    `slots` has the number of processes of each node; None: not given. Raises ValueError as
    `shape_of` does, and where neither processes nor replicas are given or their numbers do not fit.
    """
    processes, replicas = None if slots is None else sum(slots), arguments.replicas
    wanted = fitting if arguments.lanes is None else arguments.lanes
    shape = shape_of(flags, wanted)
    num_ranks, lanes = shape.num_ranks, shape.lanes if wanted is None else wanted
    if processes is None:
        if replicas is None:
            raise ValueError(launch_line.NO_NUMBER)
        return replicas, lanes
    if slots is not None and len(slots) > 1:
        return max(1, most_replicas(slots, num_ranks)) if replicas is None else replicas, lanes
    if replicas is None and processes % num_ranks == 0:
        return processes // num_ranks, lanes
    if processes != (replicas or 0) * num_ranks:
        of = counted(replicas, "replica") if replicas is not None else "whole replicas"
        raise ValueError(
            f"--nproc-per-node is {processes}, but a replica has TP x PP x CP x lanes = "
            f"{counted(num_ranks, 'process', 'processes')}, so these are not {of}; change one of them"
        )
    return replicas, lanes


def _notes(job: Job, *, is_derived: bool) -> Iterator[str]:
    """Yield what the user should know about the replicas of a job before it starts.

    `is_derived`: the number of replicas or of lanes follows from other flags.
    """
    if is_derived:
        size = f"TP {job.layout.tp} x PP {job.layout.pp} x CP {job.layout.cp} x lanes {job.layout.lanes}"
        yield f"{counted(job.num_replicas, 'replica')} of {counted(job.num_ranks, 'process', 'processes')} ({size})"
    if job.num_replicas == 1:
        yield "nothing is protected: with one replica every death ends the job; give processes for two or more"


def _rank_start(wanted: str) -> RankStart:
    """Return how ranks start here. Raises ValueError for forks on a machine with a GPU."""
    if wanted == "fork" and has_gpu():
        raise ValueError(
            "--rank-start fork cannot work here: this machine has a GPU, and CUDA works in no forked rank; leave it out"
        )
    if wanted == "auto":
        return "warm" if has_gpu() else "fork"
    return "warm" if wanted == "warm" else "fork"


def _refuse_unseen(faults: Iterable[Fault], level: trace.Level) -> None:
    """Raise ValueError if a freeze waits for an event that the trace level leaves out."""
    left_out = {kind.__struct_config__.tag for kind in trace.LEFT_OUT[level]}
    unseen = sorted({fault.until for fault in faults if fault.until is not None} & left_out)
    if unseen:
        raise ValueError(
            f"--trace-level {level} leaves out {', '.join(unseen)}, which a freeze of --chaos waits for; "
            "name another event by until, or leave --trace-level out"
        )


def _target(num_replicas: int, judged: Preflight) -> chaos.Target:
    return chaos.Target(
        num_replicas=num_replicas,
        num_ranks=judged.layout.num_ranks,
        num_microbatches=judged.num_microbatches,
        num_steps=judged.train_iters,
        min_replicas=judged.config.min_replicas,
        heals=judged.config.heal != "off",
    )
