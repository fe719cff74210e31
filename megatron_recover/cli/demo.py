"""`megatron-recover demo`: trains a model twice, and kills real processes in the second run.

It then shows whether the deaths made a difference. The demo runs the verbs `data` and `run` as a
user would, and calls the functions behind `check --against` and `report --against`. This module
chooses the runs and prints the checker's findings in words. It computes no result itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, get_args

import msgspec

from megatron_recover import packages, trace
from megatron_recover.cli import command_line
from megatron_recover.cluster.job import claim_folder, new_folder
from megatron_recover.core.values import ExitCode
from megatron_recover.deadlines import Deadlines
from megatron_recover.faults import FaultKind
from megatron_recover.flags import Parser
from megatron_recover.host.gpus import has_gpu
from megatron_recover.host.process_stat import cause_of
from megatron_recover.observe.history import History
from megatron_recover.observe.report import plot
from megatron_recover.observe.report import writing as report
from megatron_recover.observe.report.page import PAGE_FILE
from megatron_recover.observe.summary import SUMMARY_FILE, FaultSummary, Summary
from megatron_recover.observe.verify.check import Verdict, check, describe
from megatron_recover.observe.work import Redone, WorkAccount
from megatron_recover.shipped import shipped
from megatron_recover.trace import TraceError

REPLICAS, RANKS, STEPS, MICROBATCHES, SEED = 3, 6, 20, 36, 1234
"""Sizes of the runs. A replica learns of a death within 0.1 s. With 36 microbatches it is still
computing then, on fast machines too."""
PRETRAIN = shipped("scripts") / "pretrain_gpt.py"
DEADLINES = Deadlines.of()
"""Deadlines of the runs that the demo starts, which set no deadline. A run that takes longer than
its deadline is killed."""
LAST_WORDS = 12
"""Lines of a failed command's stderr that are shown."""

MODEL = (
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 128 --max-position-embeddings 128 --tokenizer-type NullTokenizer --vocab-size 257"
)
TRAINING = (
    f"--micro-batch-size 1 --global-batch-size {MICROBATCHES} --train-iters {STEPS} --lr 3e-3 --min-lr 3e-4 "
    f"--lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 1.0 --weight-decay 0.01 --seed {SEED} --split 90,5,5 "
    "--log-interval 1 --eval-interval 1000 --eval-iters 1 --overlap-grad-reduce "
    "--recover-determinism exact --recover-bucket-elements 40000 --recover-rebalance off"
)
"""Flags of the training. Rebalancing is off: all replicas share this machine's cores, so a measured
pace shows only how long the other replicas used the cores."""
PLAIN_TORCH = (
    "--transformer-impl local --attention-backend unfused --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion"
)
"""Flags for a GPU without Transformer Engine and Apex, which Megatron's defaults need."""
CHAOS = """\
# Two stragglers and two deaths, of different pipeline stages (rank 0 is the first stage, rank 1 the second).
[[fault]]  # both survivors are slow, so that the first death finds their 1F1B running, however busy the machine is
replica = 0
rank = 1
point = "compute"
kind = "slow"
factor = 10.0
step = 8
steps = 1

[[fault]]
replica = 1
rank = 1
point = "compute"
kind = "slow"
factor = 10.0
step = 8
steps = 1

[[fault]]  # a last stage dies within its step: the others have begun theirs, and are far from done: 3 -> 2 replicas
replica = 2
rank = 1
point = "backward"
step = 8
occurrence = 4

[[fault]]  # the replica that writes logs dies while its first stage sums a bucket beside the backward: 2 -> 1 replicas
replica = 0
rank = 0
point = "reduce"
step = 15
occurrence = 2
"""


@dataclass(frozen=True)
class Claim:
    """One claim of the demo, and whether the evidence shows it."""

    text: str
    holds: bool
    evidence: str


def _taken_in(history: History) -> Iterator[str]:
    """Yield a sentence for each step in which a running pass was extended by lost microbatches."""
    by_step: dict[int, list[Redone]] = {}
    for one in WorkAccount(history).redone:
        if one.in_schedule:
            by_step.setdefault(one.step, []).append(one)
    for step, taken in by_step.items():
        replicas = sorted({one.replica for one in taken})
        yield (
            f"{history.label(step)}: microbatches {', '.join(map(str, sorted(one.microbatch for one in taken)))} "
            f"taken into the running 1F1B by replica{'s' * (len(replicas) > 1)} {' and '.join(map(str, replicas))}"
        )


def claims(reference: Verdict, faulty: Verdict) -> tuple[Claim, ...]:
    """Return the claims about the two runs; `faulty` was checked against `reference`."""
    summary, quiet = faulty.summary, reference.summary
    kills = [fault for fault in summary.faults if fault.kind == FaultKind.KILL.value]
    backward, reduction = ([fault for fault in kills if fault.point == point] for point in ("backward", "reduce"))
    stages = sorted({fault.rank for fault in (*backward, *reduction)})
    broken = sorted({violation.invariant for violation in (*reference.violations, *faulty.violations)})
    killed = {event.replica for _, event in faulty.history.of(trace.Failure) if event.cause == "SIGKILL"}
    return (
        Claim(
            "Real processes were killed: in a backward and inside a reduction, of different pipeline stages",
            bool(backward and reduction) and len(stages) > 1 and killed >= {one.replica for one in (*backward, *reduction)},
            "; ".join(f"{one.label}: replica {one.replica} rank {one.rank} {_place(one)}" for one in kills) or "none",
        ),
        Claim(
            "Training went on without a restart, down to one replica",
            summary.exit_code == 0 and summary.replicas_end == 1 and summary.steps == quiet.steps >= 20,
            f"{summary.steps} of {quiet.steps} steps, {summary.replicas_start} -> {summary.replicas_end} replicas, "
            f"exit code {summary.exit_code}",
        ),
        Claim(
            "The others did not let their pipelines drain first: the lost microbatches joined the 1F1B that they were running",
            summary.microbatches_redone_in_schedule > 0,
            "; ".join(_taken_in(faulty.history)) or "all was computed in a second pass, after the running one",
        ),
        Claim(
            f"Every step was made from the same {summary.microbatches_per_step} microbatches, each counted exactly once",
            not [one for one in faulty.violations if one.invariant == "INV-1"]
            and summary.microbatches_per_step == quiet.microbatches_per_step,
            "counted from what was computed and from what was summed (INV-1)",
        ),
        Claim(
            "Only what the dead replicas held was computed again",
            0 < summary.microbatches_redone <= summary.microbatches_lost and summary.microbatches_wasted == 0,
            f"{summary.microbatches_lost} lost, {summary.microbatches_redone} computed again, "
            f"{summary.microbatches_wasted} wasted",
        ),
        Claim(
            "All replicas held bit-identical parameters after every step",
            summary.replicas_bit_identical is True,
            "parameter digests of every rank and step",
        ),
        Claim(
            "The result is bit for bit that of the undisturbed run",
            summary.param_bit_identical is True and summary.loss_max_abs_diff == 0.0,
            f"largest difference of a parameter {summary.param_max_rel_diff}, of a loss {summary.loss_max_abs_diff}",
        ),
        Claim(
            "No invariant is broken in either run",
            all(one.holds and one.is_whole for one in (reference, faulty)),
            f"broken: {', '.join(broken)}"
            if broken
            else "; ".join([*faulty.problems, *faulty.not_judged, *reference.not_judged]) or "INV-1 to INV-8",
        ),
    )


_ITERATION = re.compile(
    r"iteration\s+(\d+)/\s*(\d+) .* lm loss: (\S+) .* generation: (\d+) \| replicas: (\S+) \| quotas: ([\d ]+?) \|"
)


def short(line: str) -> str:
    """Return a line of a run's output, with Megatron's long line of an iteration made short."""
    found = _ITERATION.search(line)
    if found is None:
        return line
    iteration, last, loss, generation, replicas, quotas = found.groups()
    return (
        f"iteration {iteration:>2}/{last} | loss {float(loss):.4f} | generation {generation} | replicas {replicas} | "
        f"quotas {quotas}"
    )


def _place(fault: FaultSummary) -> str:
    """Return where a fault struck, in words."""
    if fault.point == "reduce":
        return f"inside the reduction of bucket {fault.bucket}"
    if fault.point == "backward":
        return f"in the backward of microbatch {fault.microbatch}"
    return f"in {fault.point}" if fault.point else f"by {fault.cause}"


def story(summary: Summary) -> Iterator[str]:
    """Yield what happened at each fault and in the recovery from it, a line each."""
    for fault in summary.faults:
        if fault.kind == FaultKind.SLOW.value:
            yield f"{fault.label}: replica {fault.replica} rank {fault.rank} was slowed down for a step"
            continue
        yield f"{fault.label}: replica {fault.replica} rank {fault.rank} was killed {_place(fault)}"
        for one in summary.recoveries:
            if fault.replica in one.lost_replicas:
                took = [(phase, getattr(one, f"{phase}_s")) for phase in get_args(trace.Phase)]
                times = ", ".join(f"{phase} {1000 * seconds:.0f} ms" for phase, seconds in took if seconds is not None)
                yield f"  the others finished that very step in generation {one.generation}: {times}"


def num_gpus(devices: Path = Path("/dev")) -> int:
    """Return the number of GPUs that torch can use.

    A process of its own asks torch, and only on a machine that has a GPU. Raises ValueError, with
    the remedy, if that process fails.
    """
    if not has_gpu(devices):
        return 0
    command = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except subprocess.CalledProcessError as error:
        cause = next(iter(error.stderr.strip().splitlines()[-1:]), cause_of(error.returncode))
        raise ValueError(
            f"this machine has a GPU, and torch cannot be asked for it ({cause}); correct the installation of torch until "
            f"`{shlex.join(command)}` prints a number"
        ) from error


class _Demo:
    """The four stages of the demo, in one folder, on `gpus` GPUs or on the CPU."""

    def __init__(self, folder: Path, say: TextIO, gpus: int) -> None:
        self.folder, self._say = folder, say
        shared = -(-RANKS // (gpus or RANKS))
        self._extra = ["--recover-ranks-per-gpu", str(shared)] if shared > 1 else []
        if gpus:
            self._extra.append("--deterministic-mode")  # for --recover-determinism exact
        if gpus and importlib.util.find_spec("transformer_engine") is None:
            self._extra += shlex.split(PLAIN_TORCH)
        self.data = folder / "data" / "python-stdlib"
        self.reference, self.faulty = folder / "reference", folder / "faulty"

    def tell(self, text: str) -> None:
        print(text, file=self._say, flush=True)

    def run(self) -> tuple[Verdict, Verdict]:
        """Make the data, run both runs and check them; return the verdicts on both.

        Raises RuntimeError if a verb fails, OSError if a file cannot be written, and what `check`
        raises.
        """
        model = "a GPT of 4 layers as 2 pipeline stages"
        self.tell("1/4  the text of Python's standard library becomes a data set")
        self._command("data", "--output", str(self.data))
        self.tell(f"2/4  reference: {STEPS} steps of {model}, {REPLICAS} replicas, nothing fails")
        self._train(self.reference)
        self.tell("3/4  the same again, with kill -9 of two processes on the way")
        chaos = self.folder / "chaos.toml"
        chaos.write_text(CHAOS)
        self._train(self.faulty, "--chaos", str(chaos))
        self.tell("4/4  what do the two traces prove?")
        return check(self.reference), check(self.faulty, self.reference)

    def _train(self, run_dir: Path, *flags: str) -> None:
        megatron = [*shlex.split(MODEL), *shlex.split(TRAINING), *self._extra, "--data-path", str(self.data)]
        replicas = ["--replicas", str(REPLICAS), "--run-dir", str(run_dir)]
        self._command("run", *replicas, *flags, "--", str(PRETRAIN), *megatron)

    def _command(self, *arguments: str) -> None:
        """Run one verb in a separate process, and show its output indented and short.

        Its output also goes to a file. Its stderr goes to another file, which matters only if the
        command fails. Kills the process after `DEADLINES.deadline_s`. Raises RuntimeError unless
        the exit code is 0.
        """
        command = [sys.executable, "-m", "megatron_recover", *arguments]
        log, errors = (self.folder / f"{arguments[0]}.{kind}" for kind in ("log", "err"))
        with open(log, "a", encoding="utf-8") as file, open(errors, "wb") as error_file:
            print(f"$ {shlex.join(command)}", file=file, flush=True)
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=error_file, text=True)
            watchdog = threading.Timer(DEADLINES.deadline_s, process.kill)
            watchdog.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    file.write(line)
                    self.tell(f"     {short(line.rstrip())}")
                code = process.wait()
            finally:
                watchdog.cancel()
                _end(process)
        if code != ExitCode.OK:
            last = errors.read_text(errors="replace").splitlines()[-LAST_WORDS:]
            said = "".join(f"     {line}\n" for line in last)
            raise RuntimeError(f"exit code {code} of: {shlex.join(command)}\n{said}its output is in {log} and {errors}")


def _end(process: subprocess.Popen[str]) -> None:
    """End a command that still runs: by SIGTERM, then by SIGKILL; wait `stop_s` after each.

    Ranks that have lost their launcher end by themselves.
    """
    for tell in (process.terminate, process.kill):
        if process.poll() is None:
            tell()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=DEADLINES.stop_s)


def _verdict(folder: Path, found: tuple[Claim, ...], reference: Verdict, faulty: Verdict, seconds: float) -> str:
    """Return the text of the last screen.

    These are what happened, each claim with its evidence, and where to look. If a claim does not
    hold, the text also has what `check` says of both runs.
    """
    lines = ["", *(f"     {line}" for line in story(faulty.summary)), ""]
    for claim in found:
        lines += [f"  [{'yes' if claim.holds else ' NO'}] {claim.text}", f"        {claim.evidence}"]
    if not all(claim.holds for claim in found):
        lines += ["", describe(reference), describe(faulty)]
    lines += [
        "",
        f"  {'PROVEN' if all(claim.holds for claim in found) else 'NOT PROVEN'} in {seconds:.0f} s. See for yourself:",
        f"    {folder / 'faulty' / PAGE_FILE}   what happened, on one page (docs/how_to/read_a_report.md)",
        f"    {folder / 'faulty' / SUMMARY_FILE}   the numbers",
        f"    {command_line('check', str(folder / 'faulty'), '--against', str(folder / 'reference'))}",
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run the demo and return its exit code; exit with 2 on bad input.

    0: every claim holds; 14: a claim does not hold; 1: a stage failed; 15: interrupted.
    """
    parser = Parser(
        prog="megatron-recover demo",
        description="Train a small GPT on real text twice, once with kill -9 of real processes, and prove that the result is "
        "bit for bit the same. On CUDA where torch finds a GPU, else on the CPU: under 3 minutes on two cores.",
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON (progress goes to stderr)")
    parser.add_argument("--run-dir", type=Path, metavar="D", help="folder for everything it makes (default: runs/demo-<time>)")
    arguments = parser.parse_args(argv)
    try:
        packages.require(packages.TRAINING)
        gpus = num_gpus()
        folder = arguments.run_dir or new_folder("demo-")
        claim_folder(folder)
    except ValueError as error:
        parser.error(str(error))

    demo = _Demo(folder, sys.stderr if arguments.json else sys.stdout, gpus)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a demo that is terminated ends its runs
    try:
        reference, faulty = demo.run()
        report.write(demo.faulty, demo.reference)
        if (left_out := plot.left_out()) is not None:
            demo.tell(f"     {left_out}")
    except KeyboardInterrupt:
        print(f"megatron-recover demo: interrupted; what it has written is in {folder}", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # of stdout, as every other verb ends
        raise
    except (RuntimeError, OSError, TraceError) as error:
        print(f"megatron-recover demo: {error}", file=sys.stderr)
        return ExitCode.FAILED
    found, seconds = claims(reference, faulty), time.monotonic() - began
    demo.tell(_verdict(folder, found, reference, faulty, seconds))
    if arguments.json:
        content = {"proven": all(one.holds for one in found), "claims": found, "seconds": seconds, "summary": faulty.summary}
        print(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())
    return ExitCode.OK if all(claim.holds for claim in found) else ExitCode.INVARIANT_VIOLATED
