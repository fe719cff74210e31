"""`megatron-recover run`: checks a command line, runs the job, and leaves a run directory."""

from __future__ import annotations

import argparse
import errno
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, get_args

import megatron_recover
from megatron_recover import packages, trace
from megatron_recover.cli import command_line, finish, launch_line, monitor_flags, node_checks, several_nodes
from megatron_recover.cluster import chaos
from megatron_recover.cluster.event_store import PART_BYTES
from megatron_recover.cluster.job import Job, RankStart, claim_log_links, create_run_dir, leaves_files, link_logs
from megatron_recover.cluster.joining import NotMet
from megatron_recover.cluster.launcher import Launcher
from megatron_recover.cluster.membership import Joined
from megatron_recover.cluster.output import file_limit_mistake
from megatron_recover.cluster.save_lock import SaveLock
from megatron_recover.cluster.signals import EndRequest
from megatron_recover.config import inherited_environment
from megatron_recover.core.placement import most_replicas, place
from megatron_recover.core.values import ExitCode
from megatron_recover.faults import Fault
from megatron_recover.flags import Parser, misplaced, split, value_of
from megatron_recover.host.addresses import HOST
from megatron_recover.host.gpus import has_gpu
from megatron_recover.megatron.launch import one_megatron
from megatron_recover.megatron.launch.arguments import add_recover_arguments, recover_flags
from megatron_recover.megatron.launch.preflight import FLAGS, Preflight, Undecided, preflight, shape_of
from megatron_recover.observe import ending, stop_mark, summary
from megatron_recover.observe.report import plot

PRELOAD = (
    "torch",
    "megatron_recover.megatron.cpu:leave_out_the_compiler",
    "torch._dynamo",
    "megatron.training",
    "megatron_recover.megatron.training",
    "megatron_recover.megatron.commit",
    "megatron_recover.megatron.checkpoint.checkpoints",
)
"""Modules that every rank starts with, and a function to call (`cluster/forkserver.py`). torch's
optimizers import `torch._dynamo` at their first use, which every rank would do for itself."""
RUNNER = Path(megatron_recover.__file__).parent / "megatron" / "launch" / "script.py"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
"""Errors of a folder that accepts no more data."""
_NO_SCRIPT = (
    "the training script is missing; write it and its flags behind those of run, for example: scripts/pretrain_gpt.py ..."
)
_LEAST_PART_BYTES = 2**20
"""Smallest size of a part of the trace in bytes. With smaller parts a run of days would leave a
hundred thousand files."""
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _bytes(text: str) -> int:
    """Return the number of bytes that `text` names. Raises ArgumentTypeError with the remedy."""
    found = re.fullmatch(r"([0-9]+) ?(|KiB|MiB|GiB)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is no number of bytes; write one like 268435456 or 256MiB")
    return int(found[1]) * _UNITS[found[2]]


class _RunParser(Parser):
    """The parser of `run`.

    Its help ends with the flags of the trainer, which it does not accept itself.
    """

    elsewhere = "; Megatron's flags go behind the script's name"
    refusal = ""
    """Reason why the command line was refused."""

    def error(self, message: str) -> NoReturn:
        self.refusal = message
        super().error(message)

    def format_help(self) -> str:
        theirs = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
        return f"{super().format_help()}\n{add_recover_arguments(theirs).format_help()}"


def _parser() -> _RunParser:
    parser = _RunParser(
        prog="megatron-recover run",
        description="Train with replicas of the model; when a process dies, the others finish its microbatches in that step.",
        usage="megatron-recover run [--nproc-per-node N | --replicas R] [options] SCRIPT [Megatron flags]",
        epilog="A replica is TP x PP x CP x lanes processes. --global-batch-size is that of the "
        "whole job. Exit codes: docs/reference/exit_codes.md. The flags below go behind the script's name, like Megatron's:",
    )
    add_flags(parser)
    return parser


def add_flags(parser: Parser) -> None:
    """Add the flags of `run` to its parser, or to that of a verb that takes the same line."""
    parser.add_argument(
        "--replicas", type=int, metavar="R",
        help="complete copies of the model; the data-parallel size is R x L (default: as many as --nproc-per-node gives "
        "processes for)",
    )  # fmt: skip
    parser.add_argument(
        "--lanes", type=int, metavar="L",
        help="data-parallel size inside each replica (default: the smallest over which its experts can be spread and, on "
        "GPUs with --nproc-per-node alone, with which a rank fits by plan's estimate)",
    )  # fmt: skip
    parser.add_argument(
        "--rank-start", choices=("auto", *get_args(RankStart)), default="auto",
        help="how the processes of ranks start: fork, from one process that has imported everything; warm, as fresh "
        "processes that import everything in advance, which CUDA needs; auto: warm where there is a GPU (default: auto)",
    )  # fmt: skip
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="new folder for trace and logs (default: runs/<time>)")
    parser.add_argument(
        "--chaos",
        metavar="FILE|rate=P,seed=N",
        help="inject faults: a TOML file of exact ones, or random ones (docs/reference/chaos.md)",
    )
    parser.add_argument(
        "--trace-level", choices=trace.LEVELS, default="microbatches",
        help="what the trace shows: every microbatch, every step, or faults and recoveries only; check and report know "
        "only what the trace shows (default: microbatches)",
    )  # fmt: skip
    parser.add_argument(
        "--trace-file-bytes", type=_bytes, metavar="N", default=PART_BYTES,
        help="put events.jsonl aside when it has N bytes, at least 1 MiB, and compress it; N may end with KiB, MiB or GiB; "
        "0: never (default: 256MiB)",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print only how the run ends if it does not end well")
    parser.add_argument(
        "--chained", action="store_true",
        help="another start follows by itself, as in a batch job: after exit code 2, too, leave a mark in --save that ends "
        "this (docs/reference/exit_codes.md)",
    )  # fmt: skip
    monitor_flags.add_flags(parser)
    launch_line.add_flags(parser)


def _job(arguments: argparse.Namespace, command: Sequence[str]) -> tuple[Job, str, Joined | None]:
    """Return the job, with its new run directory, the text of its chaos file, and its place.

    The text is empty without chaos, and the place is None without other nodes. Prints notes about
    torchrun's flags and the replicas unless `--quiet` is given. Raises ValueError with the remedy,
    `NotMet` if other nodes or a signal end the job, and OSError if a file that the command line
    names cannot be reached.
    """
    if not command:
        raise ValueError(_NO_SCRIPT)
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
    """Meet the other nodes, and return what `_job` does. Mistakes of this node end all of them."""
    try:
        rank_start = _judged(arguments, line, words[-1], flags)
        wanted = several_nodes.prepare(arguments, line, words, flags)
    except (ValueError, OSError) as error:
        several_nodes.report(line, _text(error), request)
        raise
    existed = arguments.run_dir is not None and os.path.exists(arguments.run_dir)  # False where that cannot be seen
    joined, address = several_nodes.join(arguments, line, wanted, request)
    try:
        return *_described(arguments, line, words, flags, rank_start, joined, address), joined
    except (ValueError, OSError) as error:
        several_nodes.tell(joined, _text(error), flags)
        if joined.met is not None and joined.met.you == 0:
            several_nodes.remove(Path(joined.met.run_dir), existed=existed)
        raise


def _judged(arguments: argparse.Namespace, line: launch_line.Choice, script: str, flags: Sequence[str]) -> RankStart:
    """Judge what this node can judge alone; return how its ranks start. Raises ValueError."""
    if not line.is_module and not Path(script).is_file():
        raise ValueError(f"there is no training script {script}; write its path behind the flags of run")
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


def _text(mistake: ValueError | OSError) -> str:
    """Return the message about a mistake that ends the command."""
    if isinstance(mistake, ValueError):
        return str(mistake)
    return f"{mistake.filename} cannot be read ({mistake.strerror}); make it readable, or name another"


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

    Raises as `_job` does.
    """
    slots = _slots(line, joined)
    fitting = _fitting(arguments, None if slots is None else sum(slots), words, flags)
    num_replicas, lanes = _size(arguments, slots, flags, None if fitting is None else fitting[0])
    judged = preflight(flags, num_replicas=num_replicas, lanes=lanes)
    launch_line.judge(line, num_replicas * judged.layout.num_ranks, judged.config)
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
        argv=(*words, *flags), num_replicas=num_replicas, placement=placement, address=address, ports=line.nodes.ports,
        node=0 if joined is None or joined.met is None else joined.met.you,
        nodes=() if joined is None or joined.met is None else joined.met.nodes,
        node_s=line.nodes.node_s if line.nodes.is_of_several else None,
        layout=judged.layout, config=judged.config,
        streams=line.streams, signals=line.signals, shutdown_s=line.shutdown_s, numa_binding=line.numa_binding,
        log_links=log_links, run_dir=run_dir, faults=faults, seed=judged.seed, runner=RUNNER, preload=PRELOAD,
        save=Path(judged.save).absolute() if judged.save is not None else None, rank_start=rank_start, run_id=line.run_id,
        num_microbatches=None if judged.batch_changes else judged.num_microbatches,
        microbatch_samples=judged.microbatch_samples,
        trace_level=arguments.trace_level, trace_file_bytes=arguments.trace_file_bytes,
    )  # fmt: skip
    if not arguments.quiet:
        for note in (
            *line.notes,
            *([] if fitting is None else fitting[1:]),
            *_notes(job, is_derived=arguments.replicas is None or arguments.lanes is None and lanes > 1),
            *several_nodes.notes(job),
        ):
            print(f"megatron-recover run: {note}", file=sys.stderr)
    return job, chaos_text


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


def _leave_mark(command: Sequence[str], exit_code: int, reason: str, run_dir: Path | None) -> None:
    """Leave a mark in the folder of `--save`, if it is given, after an end that repeats itself."""
    save = value_of(command, "--save")
    if save is None:
        return
    try:
        stop_mark.leave(Path(save), exit_code, reason, run_dir)
    except OSError as error:
        print(f"megatron-recover run: no mark {stop_mark.STOP_MARK} in --save {save}: {error.strerror}", file=sys.stderr)


def _slots(line: launch_line.Choice, joined: Joined | None) -> list[int] | None:
    """Return the number of processes of each node; None: not given."""
    if joined is None or joined.met is None:
        return None if line.num_processes is None else [line.num_processes]
    return [node.slots for node in joined.met.nodes]


def _folders(line: launch_line.Choice, wanted: Path | None, joined: Joined | None) -> tuple[Path | None, Path]:
    """Create the folder for links to the logs, if there is to be one, and the run directory.

    Returns both. Raises ValueError with the remedy, and leaves neither then. With several nodes the
    run directory of node 0 exists already, and those of the others are inside it.
    """
    existed = wanted is not None and os.path.exists(wanted)  # False where that cannot be seen
    # First: the other may be inside it, and it has to be empty.
    run_dir = several_nodes.run_dir(joined.met) if joined is not None and joined.met is not None else create_run_dir(wanted)
    try:
        return None if line.log_dir is None else claim_log_links(line.log_dir, line.run_id), run_dir
    except ValueError:
        several_nodes.remove(run_dir, existed=existed)
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
            raise ValueError("the number of processes is missing; give --nproc-per-node, as for torchrun, or --replicas")
        return replicas, lanes
    if slots is not None and len(slots) > 1:
        return max(1, most_replicas(slots, num_ranks)) if replicas is None else replicas, lanes
    if replicas is None and processes % num_ranks == 0:
        return processes // num_ranks, lanes
    if processes != (replicas or 0) * num_ranks:
        of = f"{replicas} replicas" if replicas is not None else "whole replicas"
        raise ValueError(
            f"--nproc-per-node is {processes}, but a replica has TP x PP x CP x lanes = {num_ranks} processes, so these are "
            f"not {of}; change one of them"
        )
    return replicas, lanes


def _notes(job: Job, *, is_derived: bool) -> Iterator[str]:
    """Yield what the user should know about the replicas of a job before it starts.

    `is_derived`: the number of replicas or of lanes follows from other flags.
    """
    if is_derived:
        size = f"TP {job.layout.tp} x PP {job.layout.pp} x CP {job.layout.cp} x lanes {job.layout.lanes}"
        yield f"{job.num_replicas} replicas of {job.num_ranks} processes ({size})"
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
    )


def main(argv: list[str]) -> int:
    """Run a job to its end and return its exit code."""
    parser = _parser()
    ours, command = split(argv, parser)
    try:
        return _main(parser, ours, command)
    except SystemExit:
        if "--chained" in ours and parser.refusal:
            _leave_mark(command, ExitCode.BAD_INPUT, parser.refusal, None)
        raise


def _main(parser: _RunParser, ours: list[str], command: list[str]) -> int:
    """Run a job as `main` does; exit with 2 if the command line is refused."""
    if found := misplaced(ours, [*FLAGS, *recover_flags()]):
        parser.error("\n".join(found))
    arguments = parser.parse_args(ours)
    existed = arguments.run_dir is not None and os.path.exists(arguments.run_dir)  # False where that cannot be seen
    behind = [
        f"{words} behind {command[0]} is the script's; if it is for the launcher, write: megatron-recover run {words} ... "
        f"{command[0]} ..."
        for words in launch_line.behind_script(command, parser)
    ]
    try:
        wanted = monitor_flags.read(arguments)
        job, chaos_text, joined = _job(arguments, command)
    except NotMet as error:
        if error.exit_code == ExitCode.BAD_INPUT:  # nodes that only did not meet in time may meet at the next start
            parser.refusal = str(error)
        parser.exit(error.exit_code, several_nodes.last_words(error))
    except ValueError as error:
        parser.error("\n".join([*str(error).splitlines(), *behind]))
    except OSError as error:
        parser.error(_text(error))
    for line in behind:
        print(f"megatron-recover run: {line}", file=sys.stderr)
    try:
        refusals = node_checks.refusals(job, joined)
    except NotMet as error:
        if joined is not None:
            several_nodes.tell(joined, str(error), command[1:])
        _discard(job, existed=existed)
        parser.exit(error.exit_code, several_nodes.last_words(error))
    if refusals:
        if joined is not None:
            several_nodes.tell(joined, "\n".join(refusals), command[1:])
        _discard(job, existed=existed)
        return ExitCode.BAD_INPUT
    try:
        link_logs(job)
        save_lock = _locked_save(job)
    except ValueError as error:
        if joined is not None:
            several_nodes.tell(joined, str(error), command[1:])
        _discard(job, existed=existed)
        parser.error(str(error))
    try:
        if chaos_text:
            (job.run_dir / chaos.CHAOS_FILE).write_text(chaos_text)
            if not arguments.quiet and not Path(arguments.chaos).is_file():
                print(chaos_text)
        launcher = Launcher(job, quiet=arguments.quiet, wanted=wanted, joined=joined)
        exit_code = _run(launcher)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        # The run's descriptions or its trace could not be written. Both must exist before training.
        print(
            f"megatron-recover run: --run-dir {job.run_dir}: {error.strerror}; the run could not be started. "
            "Make room there, or give another folder.",
            file=sys.stderr,
        )  # fmt: skip
        events = job.run_dir / trace.EVENTS_FILE
        if not events.exists() or not events.stat().st_size:
            _discard(job, existed=existed)
        return ExitCode.FAILED
    try:
        is_refused = exit_code == ExitCode.BAD_INPUT
        if exit_code in ending.STOPS and job.node == 0 and (arguments.chained or not is_refused):
            _leave_mark(command, exit_code, launcher.reason, None if is_refused else job.run_dir)
        return _ended(launcher, job, exit_code, existed=existed, quiet=arguments.quiet)
    finally:
        launcher.release_signals()
        if save_lock is not None:
            save_lock.release()


def _locked_save(job: Job) -> SaveLock | None:
    """Lock the folder of `--save`, if there is one, so that no second job saves there.

    The node of the coordinator does so for all nodes.

    Raises ValueError with the remedy.
    """
    try:
        return SaveLock(job.save, job.run_dir) if job.save is not None and not job.node else None
    except OSError as error:
        raise ValueError(f"--save {job.save} cannot be locked ({error.strerror}); give another folder") from error


def _run(launcher: Launcher) -> int:
    """Run the job and return its exit code.

    After an exception, restore signal handlers as `Launcher.release_signals` does.
    """
    try:
        return launcher.run()
    except BaseException:
        launcher.release_signals()
        raise


def _ended(launcher: Launcher, job: Job, exit_code: int, *, existed: bool, quiet: bool) -> int:
    """Write the files that a run leaves at its end, or discard its folder; return its exit code.

    The folder is discarded after bad input, and after a signal before training began. After a run
    that was killed on request nothing is written.
    """
    interrupted = exit_code == ExitCode.INTERRUPTED or exit_code > 128
    if exit_code == ExitCode.BAD_INPUT or (interrupted and not launcher.has_begun):
        _discard(job, existed=existed)
    elif leaves_files(exit_code, has_begun=launcher.has_begun) and not job.node:
        for line in launcher.untraced:
            print(f"megatron-recover run: {line}; summary and report lack its events", file=sys.stderr)
        _report(job, launcher)
    elif leaves_files(exit_code, has_begun=launcher.has_begun) and not quiet:
        folder = job.run_dir.parent.parent
        print(f"megatron-recover run: summary and report of all nodes are on {job.nodes[0].name}, in {folder}")
    return exit_code


def _discard(job: Job, *, existed: bool) -> None:
    """Empty the run directory, and remove it if this command made it; parents stay.

    Also remove the folder of links to the logs, if there is one. Nothing was trained, and the same
    command needs the run directory empty.
    """
    run_dir = job.run_dir
    if job.log_links is not None:
        shutil.rmtree(job.log_links)
    if job.node:  # a part of the run directory of node 0, which may remove it at the same time
        shutil.rmtree(run_dir, ignore_errors=True)
        return
    several_nodes.remove(run_dir, existed=existed)
    done = "emptied" if existed else "removed"
    print(f"megatron-recover run: nothing was trained, so {run_dir} was {done} again", file=sys.stderr)


def _report(job: Job, launcher: Launcher) -> None:
    """Make `summary.json` and the loss plot, or print why there are none.

    Once they are made, print the faults of the run that never struck.
    """
    run_dir = job.run_dir
    why: str | None = "the end of the trace could not be written"  # no second wait for a disk that did not answer
    if launcher.is_recorded:
        why = finish.failure(run_dir, job.config.deadlines, launcher.is_hurried)
    if why is None and (left_out := plot.left_out()) is not None:
        print(f"megatron-recover run: {left_out}", file=sys.stderr)
    if why is not None:  # the run is over and has reported its end
        remedy = f"`{command_line('report', str(run_dir))}` makes them"
        if not launcher.is_recorded or any(os.strerror(number) in why for number in _NO_ROOM):
            remedy = f"see to the disk of {run_dir} first (if it is full, make room there); then {remedy}"
        print(f"megatron-recover run: no summary and no plot: {why}; {remedy}", file=sys.stderr)
    if why is not None or not job.faults:  # the disk may have been the reason, so it is not read again
        return
    try:
        told = summary.load(run_dir)
    except (OSError, ValueError):
        return
    for number, fault in chaos.unstruck(job.faults, [(one.replica, one.rank, one.point) for one in told.faults]):
        print(
            f"megatron-recover run: [[fault]] {number} of {run_dir / chaos.CHAOS_FILE} never struck (replica "
            f"{fault.replica}, rank {fault.rank}, {fault.point.value}): the rank did not reach it so often, or had ended",
            file=sys.stderr,
        )
