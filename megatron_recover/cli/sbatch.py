"""`megatron-recover sbatch`: prints the batch script of a job, submits it, or judges one.

The script itself is `cluster/slurm/script.py`, and the judge is `cluster/slurm/check.py`.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from megatron_recover.cli import launch_line, run_flags, training_script
from megatron_recover.cli.run_dirs import no_trace, run_folder
from megatron_recover.cluster.slurm import check, container, script
from megatron_recover.cluster.slurm.node_list import expand
from megatron_recover.config import below_one
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.wording import counted
from megatron_recover.flags import Parser, split, unreadable, value_of
from megatron_recover.observe import margin
from megatron_recover.observe.history import History
from megatron_recover.trace import TraceError

_OURS = ("--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--standalone", "--master-addr",
         "--master-port", "--run-dir", "--key-file", "--chained")  # fmt: skip
"""Flags of `run` that the script gives."""
_SET = ("--nodes", "--ntasks", "--ntasks-per-node", "--exclusive", "--mem", "--no-kill", "--array", "--requeue", "--no-requeue",
        "--signal", "--open-mode", "--output", "--error", "--propagate", "--comment")  # fmt: skip
"""Options of sbatch that the script gives, and --error, which would split the output."""
_LAUNCHER = re.compile(
    r"(\S*/)?(torchrun|megatron-recover run|"
    r"python[\d.]* (-u )?-m (torch\.distributed\.(run|launch)|megatron_recover[. ]run)) "
)
"""Words that a launch line may begin with, each with a space behind it."""
_PLAIN = re.compile(r"[\w./+@=-]+")
SCRIPT_NAME = "job.sbatch"
"""Name of the script that `--submit` leaves in the folder of the series."""


class _SbatchParser(Parser):
    elsewhere = "; flags of the launch line go behind --, other options of sbatch into --sbatch=..."


def _parser() -> Parser:
    parser = _SbatchParser(
        prog="megatron-recover sbatch",
        description="Print a batch script for Slurm in which each line has its reason.",
        usage="megatron-recover sbatch [options] -- LAUNCH LINE\n       megatron-recover sbatch --check FILE",
        epilog="LAUNCH LINE is what stands behind `megatron-recover run` or torchrun on one node: --nproc-per-node 8 "
        "pretrain_gpt.py ... How nodes meet is added to it. With --save and --load in it, a job of --shape "
        "allocation puts itself back into the queue; an array starts again only with --chain N. "
        "docs/how_to/slurm.md",
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes (default: those of --nodelist, or 1)")
    parser.add_argument("--nodelist", metavar="LIST", help="the very nodes to use, as n[001-004,7]; one job has them all")
    parser.add_argument("--time", metavar="T", help="time limit, as sbatch takes it: minutes, h:mm:ss or d-hh:mm:ss")
    parser.add_argument("--partition", metavar="P", help="as for sbatch")
    parser.add_argument("--account", metavar="A", help="as for sbatch")
    parser.add_argument("--gpus-per-node", metavar="G", help="a number, or a type and a number, such as h100:8")
    parser.add_argument("--job-name", metavar="NAME", help="name of the job (default: that of the training script)")
    parser.add_argument(
        "--shape", choices=get_args(script.Shape),
        help="allocation: one job with all nodes; array: one job for each node (default: array with several nodes; allocation "
        "with one node, or with --nodelist)",
    )  # fmt: skip
    parser.add_argument("--spares", type=int, metavar="K", help="with --shape array: K more jobs, which start when others end")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR",
        help="folder that all nodes share: key, logs, a run directory for each start (default: runs/<job name>)",
    )  # fmt: skip
    parser.add_argument("--chain", type=int, metavar="N", help="N jobs, one after the other; each resumes (default: 1)")
    parser.add_argument(
        "--requeues", type=int, metavar="N",
        help="with --shape allocation, without --chain: how often at most the job puts itself back into the queue; 0: never "
        f"(default: {script.REQUEUES} with --save)",
    )  # fmt: skip
    parser.add_argument(
        "--signal-s", type=int, metavar="S",
        help=f"seconds before the time limit at which the job begins to end (default: {script.SIGNAL_S})",
    )  # fmt: skip
    parser.add_argument(
        "--like", type=run_folder, metavar="RUN_DIR", help="take S from a former run: longest step, longest save, and 60 s"
    )
    parser.add_argument(
        "--port", type=int, metavar="P",
        help=f"with --shape allocation: port on which the first node is met (default: {script.PORT})",
    )  # fmt: skip
    parser.add_argument("--module", action="append", default=[], metavar="M", help="a module to load; may be repeated")
    parser.add_argument("--venv", metavar="DIR", help="virtual environment to activate, with its interpreter")
    parser.add_argument("--python", metavar="PATH", help="full path of the interpreter on the nodes, or inside the container")
    parser.add_argument("--container-image", metavar="IMAGE", help="image in which the agents run (pyxis)")
    parser.add_argument("--container-mounts", metavar="A:B,...", help="further mounts, beside the folder of --run-dir")
    parser.add_argument("--sbatch", action="append", default=[], metavar='"--OPTION=VALUE"', help="a further option of sbatch")
    parser.add_argument("--submit", action="store_true", help="submit the script, and leave it in the folder of --run-dir")
    parser.add_argument("--check", type=Path, metavar="FILE", help="judge a batch script: print what would lose a job")
    return parser


def main(argv: list[str]) -> int:
    """Print, submit or judge a script; exit with 2 on bad input, and if the judge finds a line."""
    parser = _parser()
    ours, launch = split(argv, parser)
    if found := _in_front(ours, parser):
        parser.error("\n".join(f"{flag} belongs to the launch line; write it behind --" for flag in found))
    arguments = parser.parse_args(ours)
    try:
        if arguments.check is not None:
            return _check(arguments.check, launch)
        settings = _settings(arguments, launch, ("megatron-recover", "sbatch", *argv))
        text = script.text(settings)
        if findings := check.findings(text):
            raise ValueError("\n".join(f"--sbatch: {each.what}; {each.remedy}" for each in findings))
    except (ValueError, TraceError) as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(unreadable(error))
    if not arguments.submit:
        print(text, end="")
        return ExitCode.OK
    return _submit(settings, text)


def _in_front(ours: Sequence[str], parser: Parser) -> list[str]:
    """Return the flags of `run` alone that are in front of the launch line."""
    known, theirs = (
        {name for action in each._actions for name in action.option_strings} for each in (parser, run_flags.parser())
    )
    return [name for name in (word.partition("=")[0] for word in ours) if name in theirs - known]


def _check(place: Path, launch: Sequence[str]) -> int:
    """Print what is wrong with a script; return 2 if anything is. Raises OSError, ValueError."""
    if launch:
        raise ValueError(f"--check takes no launch line; leave out {shlex.join(launch[:3])}")
    text = place.read_text(errors="replace")
    if (why := check.refusal(text)) is not None:
        raise ValueError(f"{place} is no batch script: {why}")
    found = check.findings(text)
    for each in found:
        print(f"{place}:{each.line}: {each.what}; {each.remedy}")
    if not found:
        print(f"{place}: nothing in it would cost the job more than the microbatches of a lost node")
    return ExitCode.BAD_INPUT if found else ExitCode.OK


def _settings(arguments: argparse.Namespace, launch: Sequence[str], command: Sequence[str]) -> script.Settings:
    """Return what the script depends on. Raises ValueError with one line for each mistake."""
    in_container = arguments.container_image is not None
    words, save, flags = _launch(launch, in_container=in_container)
    is_module = flags.module is not None
    training = split(words, run_flags.parser())[1]
    nodes = 1 if arguments.nodes is None else arguments.nodes
    found = [*_refused(arguments.sbatch)]
    if arguments.nodelist is not None:
        listed = len(expand(arguments.nodelist))
        if arguments.nodes not in (None, listed):
            found.append(f"--nodelist names {counted(listed, 'host')}, and --nodes is {nodes}; leave out --nodes")
        nodes = listed
    shape = arguments.shape or ("allocation" if arguments.nodelist else script.default_shape(nodes + (arguments.spares or 0)))
    found += _mistakes(arguments, shape, save, value_of(training, "--load"))
    if nodes + (arguments.spares or 0) > 1 and flags.nproc_per_node is None:
        found.append(launch_line.NO_NUMBER_OF_SEVERAL)
    name = arguments.job_name or (training[0].rpartition(".")[2] if is_module else Path(training[0]).stem)
    run_dir = str((arguments.run_dir or Path("runs", name)).absolute())
    for flag, text in (("--run-dir", run_dir), ("--job-name", name)):
        if not _PLAIN.fullmatch(text):
            found.append(f"{flag} is {text!r}; Slurm replaces % in it and splits it at blanks: use letters, digits and ./+@=-_")
    if in_container:
        found += container.mistakes(None if is_module else training[0], words, arguments.container_mounts, run_dir)
        if save is not None:  # the script looks for the mark outside of the container
            save = container.host_path(save, container.mounts(container.with_run_dir(arguments.container_mounts, run_dir)))
    signal_s = script.SIGNAL_S if arguments.signal_s is None else arguments.signal_s
    if arguments.like is not None and arguments.signal_s is None:
        signal_s = _signal_s(arguments.like)
    limit_s = None if arguments.time is None else seconds(arguments.time)
    if limit_s is not None and signal_s >= limit_s:
        found.append(f"the job would begin to end {signal_s} s before a limit of {limit_s} s; give a longer --time or a "
                     "shorter --signal-s")  # fmt: skip
    if found:
        raise ValueError("\n".join(found))
    default_python = f"{arguments.venv}/bin/python" if arguments.venv else sys.executable
    return script.Settings(
        command=tuple(command), launch=tuple(words), run_dir=run_dir,
        python=arguments.python or ("/usr/bin/python3" if in_container else default_python),
        nodes=nodes, shape=shape, spares=arguments.spares or 0, save=save, chain=arguments.chain or 1,
        requeues=script.REQUEUES if arguments.requeues is None else arguments.requeues, signal_s=signal_s,
        port=arguments.port or script.PORT, directives=tuple(_directives(arguments, name)),
        modules=tuple(arguments.module), venv=arguments.venv, container=tuple(_container(arguments, run_dir)),
    )  # fmt: skip


def _launch(launch: Sequence[str], *, in_container: bool) -> tuple[list[str], str | None, argparse.Namespace]:
    """Return the words behind `megatron-recover run`, and the folder of `--save` if there is one.

    The last value has the flags of these words.

    Raises ValueError with the remedy, and OSError if the script cannot be read. Ends the process
    with code 2 where `run` would refuse the flags as unknown.
    """
    begin = _LAUNCHER.match(f"{shlex.join(launch)} ")
    words = [*launch][begin[0].count(" ") if begin else 0 :]
    parser = run_flags.parser()
    flags, training = split(words, parser)
    if not training:
        raise ValueError("the launch line is missing; write it behind --, as in: -- --nproc-per-node 8 pretrain_gpt.py ...")
    given = {word.partition("=")[0].replace("_", "-") for word in flags}
    if twice := [flag for flag in _OURS if flag in given]:
        raise ValueError("\n".join(f"{flag} of the launch line is given by the script; leave it out" for flag in twice))
    arguments = parser.parse_args(flags)
    is_module = arguments.module is not None
    if (why := training_script.launcher(training[0], "run", is_module=is_module)) is not None:
        raise ValueError(why)
    launch_line.judge_for_another_machine(arguments)
    if not (is_module or in_container or Path(training[0]).is_file()):
        raise ValueError(f"there is no training script {training[0]} here, where the job will run; write its path")
    if not (is_module or in_container):
        training_script.refuse_shell(training[0])
    save = value_of(training, "--save")
    return words, None if save is None else str(Path(save).absolute()), arguments


def _mistakes(arguments: argparse.Namespace, shape: script.Shape, save: str | None, load: str | None) -> Iterator[str]:
    yield from below_one(
        {f"--{name}": getattr(arguments, name.replace("-", "_")) for name in ("nodes", "chain", "signal-s", "port")}
    )
    is_array = shape == "array"
    if arguments.spares is not None and (not is_array or arguments.spares < 0):
        yield f"--spares is {arguments.spares}; it is the number of spare jobs of --shape array"
    if arguments.requeues is not None and (is_array or arguments.requeues < 0 or (arguments.chain or 1) > 1):
        yield (
            f"--requeues is {arguments.requeues}; only a single job of --shape allocation is requeued; leave it out, or change "
            "--shape"
        )
    if arguments.nodelist is not None and is_array:
        yield "--nodelist is for --shape allocation, since each job of an array has one node; leave it out"
    if arguments.port is not None and is_array:
        yield f"--port is {arguments.port}; the agents of --shape array meet through a file; leave it out"
    if arguments.like is not None and arguments.signal_s is not None:
        yield "--like and --signal-s exclude each other; leave one out"
    goes_on = (arguments.chain or 1) > 1 or (not is_array and arguments.requeues != 0)
    if (arguments.chain or 1) > 1 and save is None:
        yield "--chain needs --save in the launch line: otherwise each job would begin anew"
    elif goes_on and save is not None and (load is None or str(Path(load).absolute()) != save):
        yield f"--save is {save}, and --load is {load}: a job that comes back would not resume; give both the same folder" + (
            "" if is_array else ", or --requeues 0"
        )
    if arguments.container_mounts is not None and arguments.container_image is None:
        yield "--container-mounts needs --container-image"
    if arguments.container_image is not None and arguments.venv is not None:
        yield "--venv is outside of the image of --container-image; give --python, the interpreter inside"
    for flag, path in (("--python", arguments.python), ("--venv", arguments.venv)):
        if path is not None and not Path(path).is_absolute():
            yield f"{flag} is {path}; give its full path, since Slurm starts it in a folder that may be another"


def _refused(options: Sequence[str]) -> Iterator[str]:
    for option in options:
        if not re.fullmatch(r"--?[a-zA-Z][\w-]*(=.*)?", option):
            yield f'--sbatch is {option!r}; give one option with =, such as --sbatch="--constraint=h100"'
        elif option.partition("=")[0] in _SET:
            yield f"--sbatch: {option.partition('=')[0]} is given by the script; leave it out"


def _directives(arguments: argparse.Namespace, name: str) -> Iterator[str]:
    yield f"--job-name={name}"
    for flag, value in (("partition", arguments.partition), ("account", arguments.account), ("time", arguments.time),
                        ("nodelist", arguments.nodelist), ("gpus-per-node", arguments.gpus_per_node)):  # fmt: skip
        if value is not None:
            yield f"--{flag}={value}"
    yield from arguments.sbatch


def _container(arguments: argparse.Namespace, run_dir: str) -> Iterator[str]:
    if arguments.container_image is not None:
        yield f"--container-image={arguments.container_image}"
        yield f"--container-mounts={container.with_run_dir(arguments.container_mounts, run_dir)}"


def seconds(time: str) -> int:
    """Return the seconds of a time limit as sbatch takes it. Raises ValueError with the remedy."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if found is None:
        raise ValueError(
            f"--time is {time}; give minutes, minutes:seconds, hours:minutes:seconds or days-hours:minutes:seconds"
        )
    days, *rest = (None if each is None else int(each) for each in found.groups())
    given = [each for each in rest if each is not None]
    if days is not None or len(given) == 3:  # hours come first
        hours, minutes, second = (*given, 0, 0)[:3]
    else:
        hours, (minutes, second) = 0, (*given, 0)[:2]
    return (days or 0) * 86400 + hours * 3600 + minutes * 60 + second


def _signal_s(run_dir: Path) -> int:
    """Return S from a former run, and print its parts. Raises ValueError and `TraceError`."""
    try:
        found = margin.margin(History.read(run_dir))
    except FileNotFoundError as error:
        raise ValueError(f"--like: {no_trace(Path(error.filename))}") from error
    if found is None:
        raise ValueError(f"--like: the run in {run_dir} has no two training steps to measure; give --signal-s")
    print(f"megatron-recover sbatch: {found.words}", file=sys.stderr)
    return found.seconds


def _submit(settings: script.Settings, text: str) -> int:
    """Write the script into the folder of the series and submit it; return sbatch's exit code."""
    place = Path(settings.run_dir, SCRIPT_NAME)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    except OSError as error:
        print(f"megatron-recover sbatch: {place} cannot be written ({error.strerror}); give another --run-dir", file=sys.stderr)
        return ExitCode.BAD_INPUT
    before: str | None = None
    for _ in range(settings.chain if settings.shape == "array" else 1):
        after = [] if before is None else [f"--dependency=afterany:{before}"]
        try:
            done = subprocess.run(["sbatch", "--parsable", *after, str(place)], stdout=subprocess.PIPE, text=True, check=False)
        except FileNotFoundError:
            print(f"megatron-recover sbatch: there is no sbatch here; submit {place} on a login node", file=sys.stderr)
            return ExitCode.FAILED
        if done.returncode:
            print(f"megatron-recover sbatch: sbatch has refused it, as it says; the script is left as {place}", file=sys.stderr)
            return ExitCode.FAILED
        before = done.stdout.strip().partition(";")[0]
        print(f"submitted job {before}: {place}")
    return ExitCode.OK
