"""`megatron-recover plan`: compares layouts by the memory of a rank and by what a death costs.

The sizes of the model come from the user's script and flags, which one process reads
(`megatron/layout/measure.py`). Nothing is trained, and no GPU is used.
"""

from __future__ import annotations

import argparse
import functools
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from megatron_recover import packages
from megatron_recover.cli import meeting_flags, training_script
from megatron_recover.cli.launch_line import TORCHRUN
from megatron_recover.cluster.rank_process import set_parent_death_signal
from megatron_recover.config import BAD_ARGUMENTS, alone_without_gpu, module_command
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.wording import counted
from megatron_recover.flags import Parser, misplaced, split, unreadable
from megatron_recover.megatron.launch import one_megatron
from megatron_recover.megatron.launch.arguments import recover_flags
from megatron_recover.megatron.launch.preflight import FLAGS, Undecided
from megatron_recover.megatron.layout.choice import USABLE, Gpus, Judged, judge
from megatron_recover.megatron.layout.sizes import Elements, Layout, Numerics, Sizes

_UNITS = {"GB": 10**9, "GiB": 2**30}
_GB = 10**9
_ROWS = 12
"""Layouts that are printed at most without `--all`."""
_ROWS_OF_NONE = 3
"""Layouts that are printed at most without `--all` if none fits."""
_WIDTH = 10_000
"""More columns than any table needs: a narrow terminal wraps its lines, and no figure is lost."""
_PARTS = ("weights", "gradient", "result", "optimizer", "activations", "sums", "redirected", "gathered")
_MEASURE = "megatron_recover.megatron.layout.measure"
_TRACEBACK = "Traceback (most recent call last):"
_WARNING = r"^\S+:\d+: \w*Warning: .*\n?(^  .*\n?)?|^\[rank\d+\]:\[W.*\n?|^\[rank\d+\]: "
"""A warning as Python prints it, with the line of code that it shows, or as torch does; and the
rank, with which torch begins the lines of a traceback."""
_NO_SCRIPT = (
    "the training script is missing; write it and its flags behind those of plan, for example: scripts/pretrain_gpt.py ..."
)
_MODULE = "--module"
_OF_RUN = {
    "--replicas": "plan compares all numbers of replicas",
    "--lanes": "plan compares all numbers of lanes",
    **dict.fromkeys(
        (
            "--spares",
            "--rank-start",
            "--run-dir",
            "--chaos",
            "--trace-level",
            "--trace-file-bytes",
            "--quiet",
            *meeting_flags.OURS,
        ),
        "plan starts no rank",
    ),
    **dict.fromkeys(
        ("--metrics-port", "--metrics-address", "--metrics-textfile", "--on-event", "--chained"), "plan starts no run"
    ),
    **dict.fromkeys((name for flag in TORCHRUN if flag.name != _MODULE for name in flag.names), "plan starts no rank"),
}
"""Flags of `run`, with the reason why `plan` has no use for them."""
_MEASURED_REPLICAS = 1000
"""Largest number of replicas that a measurement in docs/evidence/benchmarks.md has."""


class ScriptError(Exception):
    """The training script has ended by an error or a signal before it trained."""


def _bytes(text: str) -> int:
    """Return the number of bytes that `text` names. Raises ArgumentTypeError with the remedy."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(GB|GiB)", text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text} is no memory of a GPU; write one like 80GB or 80GiB")
    return round(float(found[1]) * _UNITS[found[2]])


def _at_least_one(text: str) -> int:
    """Return the number that `text` names. Raises ArgumentTypeError with the remedy."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of at least 1")
    return int(text)


class _PlanParser(Parser):
    """The parser of `plan`."""

    elsewhere = "; Megatron's flags go behind the script's name"


def _parser() -> Parser:
    parser = _PlanParser(
        prog="megatron-recover plan",
        description="Compare all layouts that use all GPUs and survive at least one death: the memory that a rank needs, "
        "by part, and what a death costs. Nothing is trained, and no GPU is needed.",
        usage="megatron-recover plan [options] SCRIPT [Megatron flags]",
        epilog="Flags of Megatron that give tensor-, pipeline- or expert-parallel sizes are ignored: all sizes are compared. "
        "--context-parallel-size and --expert-tensor-parallel-size are kept. With --use-torch-fsdp2 the lanes share weights, "
        "gradient and optimizer. "
        "docs/how_to/choose_a_layout.md explains every column. Exit code 1: an error in the script; 2: bad input, or no layout "
        "fits.",
    )
    parser.add_argument("--nodes", type=_at_least_one, default=1, metavar="N", help="nodes of the job (default: 1)")
    parser.add_argument(
        "--gpus-per-node", type=_at_least_one, default=8, metavar="N",
        help="GPUs of a node; tensor parallelism stays inside a node (default: 8)",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-memory", type=_bytes, default="80GB", metavar="N", help="memory of a GPU, in GB (10^9) or GiB (default: 80GB)"
    )
    parser.add_argument("-m", _MODULE, action="store_true", help="the script is the name of a module, as for python -m")
    parser.add_argument("--all", action="store_true", help="print every layout, also those that do not fit")
    parser.add_argument("--json", action="store_true", help="print every layout as JSON")
    return parser


def read_sizes(script: str, flags: Sequence[str], verb: str = "plan") -> Sizes:
    """Return the sizes of the model that a script trains; `-m`: a module, which begins `flags`.

    Raises ValueError for bad input, also for a script that never calls `pretrain`. Raises
    ScriptError if the script fails, and OSError if it cannot be read.
    """
    print(f"megatron-recover {verb}: reading the sizes of the model", file=sys.stderr, flush=True)
    # The file has no name and the child ends with this process, so a signal leaves nothing.
    with tempfile.TemporaryFile() as file:
        process = subprocess.run(
            [*module_command(_MEASURE), f"/proc/self/fd/{file.fileno()}", script, *flags],
            env=alone_without_gpu(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            pass_fds=(file.fileno(),), preexec_fn=functools.partial(set_parent_death_signal, signal.SIGKILL),
        )  # fmt: skip
        if process.returncode == ExitCode.OK and (written := file.read()):
            return msgspec.json.decode(written, type=Sizes)
    complaint = _complaint(flags[0] if script == "-m" else script, process.returncode, process.stderr.splitlines())
    raise (ValueError if process.returncode in (ExitCode.OK, ExitCode.BAD_INPUT) else ScriptError)(complaint)


def _complaint(script: str, code: int, lines: Sequence[str]) -> str:
    """Return why the process that ran a script has no sizes; `lines` are those of its stderr."""
    refused = [line.removeprefix(BAD_ARGUMENTS) for line in lines if line.startswith(BAD_ARGUMENTS)]
    if refused:
        return "\n".join(refused)
    if code == ExitCode.OK:
        return f"{script} never calls Megatron's pretrain; see docs/how_to/train.md"
    if code < 0:
        reason = ", perhaps out of memory" if code == -signal.SIGKILL else ""
        return f"{script} was ended by {signal.Signals(-code).name} before it trained{reason}"
    said = re.sub(_WARNING, "", "\n".join(lines), flags=re.MULTILINE).rstrip()
    _, begin, block = said.rpartition(_TRACEBACK)
    last = f"\n{begin}{block}" if begin else f" {said.rpartition(chr(10))[2]}"
    return f"{script} ended with exit code {code} before it trained:{last}"


def _column(layouts: Sequence[Judged], name: str) -> bool:
    """Return whether any layout has more than one rank in this dimension."""
    return any(getattr(each.layout, name) > 1 for each in layouts)


def table(shown: Sequence[Judged]) -> Table:
    """Return the table of some layouts; the first is marked as chosen if it fits."""
    found = Table(box=None, pad_edge=False, header_style="")
    dimensions = [("replicas", "replicas"), ("tp", "TP"), ("pp", "PP")]
    dimensions += [(name, title) for name, title in (("cp", "CP"), ("ep", "EP")) if _column(shown, name)]
    dimensions.append(("lanes", "lanes"))
    found.add_column("")
    for title in [title for _, title in dimensions]:
        found.add_column(title, justify="right", no_wrap=True)
    # FSDP2 alone gathers parameters.
    parts = [part for part in _PARTS if part != "gathered" or any(each.memory.gathered for each in shown)]
    for title in (*parts, "peak", "recovery", "a death takes", "deaths"):
        found.add_column(title, justify="right", no_wrap=True)
    found.add_column("", no_wrap=True)
    for number, judged in enumerate(shown):
        layout, memory = judged.layout, judged.memory
        found.add_row(
            "*" if number == 0 and judged.fits else "",
            *(str(getattr(layout, name)) for name, _ in dimensions),
            *(gigabytes(getattr(memory, part)) for part in parts),
            gigabytes(memory.peak), gigabytes(memory.recovery),
            f"{_gpus(layout.num_ranks)} ({_share(judged.lost_share)})", str(judged.num_deaths),
            "fits" if judged.fits else "too large",
        )  # fmt: skip
    return found


def gigabytes(number: float) -> str:
    """Return a number of bytes in GB, with one decimal."""
    return f"{number / _GB:.1f}"


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "less than 1%"


def _gpus(number: int) -> str:
    return counted(number, "GPU")


def flags_of(layout: Layout, sizes: Sizes) -> tuple[str, str]:
    """Return the flags of a layout: those of the launcher, and those of Megatron.

    The latter override TP, PP, a CP above 1 and, of a model with experts, EP where these stand
    before them on a command line. Expert TP is named only where the user gave one.
    """
    ours = f"--replicas {layout.replicas}" + (f" --lanes {layout.lanes}" if layout.lanes > 1 else "")
    theirs = f"--tensor-model-parallel-size {layout.tp} --pipeline-model-parallel-size {layout.pp}"
    if layout.cp > 1:
        theirs += f" --context-parallel-size {layout.cp}"
    if sizes.model.num_experts:
        theirs += f" --expert-model-parallel-size {layout.ep}"
    if sizes.flags.expert_tp is not None:
        theirs += f" --expert-tensor-parallel-size {layout.expert_tp}"
    return ours, theirs


def _parameters(sizes: Sizes) -> int:
    """Return the number of parameters of the model, its vocabulary padded."""
    model = sizes.model
    held = sum(model.layers, Elements()) + model.first + model.last
    return held.rows * model.vocabulary + held.split + held.whole + held.expert_split + held.expert_whole


def _choice(chosen: Judged, sizes: Sizes, script: str) -> str:
    """Return the text about the chosen layout, with its command.

    `script` begins with `--`, or with `-m --` in front of the name of a module.
    """
    layout = chosen.layout
    ours, theirs = flags_of(layout, sizes)
    return (
        f"* Chosen: {counted(layout.replicas, 'replica')} of {_gpus(layout.num_ranks)}. No layout that fits has "
        "smaller replicas. Of those with equal\n  ones this has the least communication: the smallest TP, then PP, then EP.\n"
        f"  Until its replica is back, a death takes {_gpus(layout.num_ranks)}, {_share(chosen.lost_share)} of the throughput. "
        f"The step of the death\n  takes up to {_share(chosen.longer_step)} longer; no step is lost. "
        f"The run survives {counted(chosen.num_deaths, 'death')}.\n\n"
        f"  megatron-recover run {ours} {script} <your other flags> {theirs}"
        f"{_environment(layout, sizes.numerics)}"
    )


def _environment(layout: Layout, numerics: Numerics) -> str:
    """Return the lines about the environment of the command, or no text."""
    is_overlapped = numerics.is_overlapped
    if numerics.fsdp2 is not None and layout.tp > 1:
        overlap = ". On a GPU\n  --overlap-grad-reduce overlaps nothing with both." if is_overlapped else "."
        return (
            "\n\n  With --use-torch-fsdp2, Megatron refuses CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment, which it wants "
            f"for a TP\n  above 1 without it{overlap}"
        )
    if layout.tp > 1 or layout.cp > 1:
        overlap = ". With that,\n  --overlap-grad-reduce overlaps nothing." if is_overlapped else "."
        return (
            "\n\n  Before Blackwell, Megatron wants CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment of this command, since "
            f"its TP\n  or CP is above 1{overlap}"
        )
    if is_overlapped and layout.num_ranks > 1:
        return (
            "\n\n  --overlap-grad-reduce overlaps nothing on a GPU without CUDA_DEVICE_MAX_CONNECTIONS=32 in the environment "
            "of this\n  command."
        )
    return ""


def _json(found: Sequence[Judged], sizes: Sizes, gpus: Gpus) -> str:
    rows: list[dict[str, Any]] = [
        {
            **msgspec.to_builtins(each.layout), "fits": each.fits, "chosen": number == 0 and each.fits,
            "bytes": {part: getattr(each.memory, part) for part in (*_PARTS, "peak", "recovery")},
            "gpus_lost_by_a_death": each.layout.num_ranks, "longer_step": each.longer_step,
        }
        for number, each in enumerate(found)
    ]  # fmt: skip
    content = {"parameters": _parameters(sizes), "gpus": msgspec.to_builtins(gpus), "usable": USABLE, "layouts": rows}
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def _lower(sizes: Sizes) -> list[tuple[str, Sizes]]:
    """Return the remedies that lower a flag to 1, each with the sizes that it leads to.

    The flags are `--recover-min-replicas` and `--context-parallel-size`. A flag that is 1 already
    has no remedy.
    """
    given = sizes.flags
    changed = {
        "--recover-min-replicas": msgspec.structs.replace(given, min_replicas=1),
        "--context-parallel-size": msgspec.structs.replace(given, cp=1),
    }
    return [(f"lower {flag}", msgspec.structs.replace(sizes, flags=new)) for flag, new in changed.items() if new != given]


def _remedies(sizes: Sizes, gpus: Gpus, job: Undecided, flags: Sequence[str], smallest: int) -> list[str]:
    """Return those of a few changes that let some layout need less than `smallest` bytes a rank."""
    words = {word.partition("=")[0] for word in flags}
    numerics, replace = sizes.numerics, msgspec.structs.replace
    tried = [("use more GPUs (--nodes)", sizes, replace(gpus, num_nodes=2 * gpus.num_nodes))]
    changes: list[tuple[str, dict[str, Any]]] = []
    if not numerics.is_sharded:
        changes.append(("share the optimizer among lanes (--use-distributed-optimizer)", {"is_sharded": True}))
    if "--bf16" in words and numerics.gradient > 2:
        changes.append(("keep gradients in 2 bytes (--grad-reduce-in-bf16)", {"gradient": 2, "step_copy": 4}))
    tried += [(remedy, replace(sizes, numerics=replace(numerics, **change)), gpus) for remedy, change in changes]
    if sizes.split_activations:
        recompute = [] if {"--recompute-activations", "--recompute-granularity"} & words else ["--recompute-activations"]
        missing = ([] if sizes.flags.sequence_parallel else ["--sequence-parallel"]) + recompute
        split = replace(sizes, activations=sizes.split_activations, flags=replace(sizes.flags, sequence_parallel=True))
        tried.append((f"split activations among tensor-parallel ranks ({' '.join(missing)})", split, gpus))
    tried += [(remedy, changed, gpus) for remedy, changed in _lower(sizes)]
    return [
        remedy
        for remedy, changed, on in tried
        if any(each.memory.recovery < smallest for each in judge(changed, on, job.allows))
    ]


def _nothing_allowed(sizes: Sizes, gpus: Gpus, job: Undecided) -> str:
    """Return why no layout is allowed, with the remedy."""
    if refused := [each.layout for each in judge(sizes, gpus)]:
        least = min(refused, key=lambda layout: layout.replicas * layout.lanes)
        return "\n".join(
            [f"run would refuse every layout; that of --replicas {least.replicas} --lanes {least.lanes}, since"]
            + job.refused(least)
        )
    curing = [remedy for remedy, changed in _lower(sizes) if judge(changed, gpus, job.allows)]
    return (
        f"the model allows no layout that uses all of {_gpus(gpus.number)} and survives a death: "
        f"TP x PP x CP x lanes has to divide them; {' and '.join(curing) or 'change --nodes'}"
    )


def main(argv: list[str]) -> int:
    """Print the layouts of a job; return 0 if one fits, else exit with 2.

    Exits with 2 also for bad input, and with 1 if the script fails.
    """
    parser = _parser()
    ours, command = split(argv, parser)
    words = {word.partition("=")[0] for word in ours}
    found_misplaced = [f"{flag} is a flag of run; {reason}: leave it out" for flag, reason in _OF_RUN.items() if flag in words]
    if found_misplaced := [*found_misplaced, *misplaced(ours, [*FLAGS, *recover_flags()])]:
        parser.error("\n".join(found_misplaced))
    arguments = parser.parse_args(ours)
    if not command:
        parser.error(_NO_SCRIPT)
    script, *flags = command
    gpus = Gpus(num_nodes=arguments.nodes, per_node=arguments.gpus_per_node, bytes=arguments.gpu_memory)
    try:
        training_script.judge(script, "plan", is_module=arguments.module)
        one_megatron.choose(script, is_module=arguments.module)
        packages.require(packages.TRAINING)
        job = Undecided(flags)
        if mistakes := job.mistakes():
            parser.error("\n".join(mistakes))
        sizes = read_sizes("-m", command) if arguments.module else read_sizes(script, flags)
    except ValueError as error:
        parser.error(str(error))
    except ScriptError as error:
        parser.exit(ExitCode.FAILED, "".join(f"{parser.prog}: {line}\n" for line in str(error).splitlines()))
    except OSError as error:
        parser.error(unreadable(error))
    found = judge(sizes, gpus, job.allows)
    if not found:
        parser.error(_nothing_allowed(sizes, gpus, job))
    if arguments.json:
        print(_json(found, sizes, gpus))
    else:
        _print(found, sizes, gpus, f"-m -- {script}" if arguments.module else f"-- {script}", everything=arguments.all)
    if not found[0].fits:
        sys.stdout.flush()  # the complaint is the last line
        smallest = found[0].memory.recovery
        remedies = _remedies(sizes, gpus, job, flags, smallest) or ["use GPUs with more memory"]
        parser.error(f"no layout fits: the smallest needs {gigabytes(smallest)} GB a rank; " + ", or ".join(remedies))
    return ExitCode.OK


def _print(found: Sequence[Judged], sizes: Sizes, gpus: Gpus, script: str, *, everything: bool) -> None:
    """Print the layouts, not all unless `everything`, and the chosen one if any fits."""
    fitting = [each for each in found if each.fits]
    shown = found if everything else fitting[:_ROWS] or found[:_ROWS_OF_NONE]
    print(
        f"{_parameters(sizes) / _GB:.2f} billion parameters on {_gpus(gpus.number)} of {gigabytes(gpus.bytes)} GB, of which "
        f"{gigabytes(int(USABLE * gpus.bytes))} GB may be used. GB of the rank that needs the most:\n",
        flush=True,
    )
    Console(highlight=False, width=_WIDTH).print(table(shown))
    if len(shown) < len(found):
        print(f"\n{len(fitting)} of {len(found)} layouts fit; --all prints all of them.")
    if fitting:
        print(f"\n{_choice(fitting[0], sizes, script)}")
        if fitting[0].layout.replicas > _MEASURED_REPLICAS:
            print(f"\nNo measurement has more than {_MEASURED_REPLICAS:,} replicas (docs/evidence/benchmarks.md).")
