"""`megatron-recover demo`: trains a model twice, and kills real processes in the second run.

It then shows whether the deaths made a difference. The demo runs the verbs `data` and `run` as a
user would, and calls the functions behind `check --against` and `report --against`. This module
chooses the runs and prints the checker's findings in words. It computes no result itself.

Note [The end of the demo]
    How long a replica takes to come back depends on the machine: about 2 s on an idle one, 40 s on
    a GPU, where its processes start CUDA. In that time the others make few steps or very many. So
    the run with deaths has no fixed number of steps. It goes on until all replicas have trained
    together again for some steps; then the demo ends it by SIGTERM, as Ctrl-C would. The reference
    run comes after it, with the same flags, and makes as many steps (`--exit-interval`). What a
    step computes does not depend on when a run ends: both have the same `--train-iters`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec

from megatron_recover import packages
from megatron_recover.cli import command_line
from megatron_recover.cli.demo_claims import Claim, claims, node_claims, story
from megatron_recover.cluster.job import claim_folder, new_folder
from megatron_recover.config import inherited_environment
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import Deadlines
from megatron_recover.flags import Parser
from megatron_recover.host.gpus import has_gpu
from megatron_recover.host.process_stat import cause_of
from megatron_recover.megatron.launch.arguments import FUSED_GRADIENTS
from megatron_recover.observe.history import History
from megatron_recover.observe.report import plot
from megatron_recover.observe.report import writing as report
from megatron_recover.observe.report.page import PAGE_FILE
from megatron_recover.observe.summary import SUMMARY_FILE, summarize
from megatron_recover.observe.verify.check import Verdict, check, describe
from megatron_recover.shipped import shipped
from megatron_recover.trace import TraceError

REPLICAS, RANKS, MICROBATCHES, SEED = 3, 6, 36, 1234
"""Sizes of the runs. A replica learns of a death within 0.1 s. With 36 microbatches it is still
computing then, on fast machines too."""
FIRST_DEATH, LAST_DEATH, STEPS, STEPS_TOGETHER = 5, 8, 12, 3
"""The training steps of the deaths; the least number of steps of a run; and the number of steps
that all replicas train together before the run with deaths ends."""
MOST_STEPS, DECAY_STEPS = 5000, 60
"""Megatron's `--train-iters`, which no run of the demo comes to, and the steps in which the
learning rate falls."""
PATIENCE_S = 180.0
"""Seconds from the last death after which the run ends although replicas are missing."""
NODES, NODES_STEPS, KILLED_AFTER = 3, 10, 4
"""Numbers of a demo with `--nodes`: nodes, steps of each run, and the step after whose end a node
is killed. No replica comes back there, since the slots of a lost node are gone and there are no
others."""
KILL_DELAY_S = 0.4
"""Seconds from the end of step `KILLED_AFTER` to the kill."""
_LOOK_S = 0.05
"""Seconds between two looks at the file of the endpoint."""
PRETRAIN = shipped("scripts") / "pretrain_gpt.py"
DEADLINES = Deadlines.of()
"""Deadlines of the runs that the demo starts, which set no deadline. A run that takes longer than
its deadline is killed."""
LAST_WORDS = 12
"""Lines of a failed command's stderr that are shown."""

LANES = 2
"""Lanes of each replica with `--fsdp2`: as many as pipeline stages without."""
MODEL = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --tokenizer-type NullTokenizer "
    "--vocab-size 257"
)
STAGES = f"--pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size {MICROBATCHES}"
SHARDS = (
    "--use-torch-fsdp2 --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion --num-layers 2 "
    f"--global-batch-size {LANES * MICROBATCHES}"
)
"""Flags of the layout, with `--fsdp2` and without. A lane has all layers, so there are fewer."""
TRAINING = (
    f"--micro-batch-size 1 --lr 3e-3 --min-lr 3e-4 "
    f"--lr-decay-style cosine --lr-decay-iters {DECAY_STEPS} "
    f"--lr-warmup-iters 2 --clip-grad 1.0 --weight-decay 0.01 --seed {SEED} --split 90,5,5 "
    "--log-interval 1 --eval-interval 10000 --eval-iters 1 --overlap-grad-reduce "
    "--recover-determinism exact --recover-bucket-elements 40000 --recover-rebalance off"
)
"""Flags of the training. Rebalancing is off: all replicas share this machine's cores, so a measured
pace shows only how long the other replicas used the cores."""
HEALING = ("--recover-heal", "in-place")
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Environment variables that `--overlap-grad-reduce` needs on a GPU (docs/reference/flags.md)."""
PLAIN_TORCH = (
    "--transformer-impl local --attention-backend unfused --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion"
)
"""Flags for a GPU without Transformer Engine and Apex, which Megatron's defaults need."""


def flags_without_kernels() -> list[str]:
    """Return flags that leave out the kernels of packages that are not installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        return shlex.split(PLAIN_TORCH)
    return [] if importlib.util.find_spec(FUSED_GRADIENTS) else ["--no-gradient-accumulation-fusion"]


_SLOW = """\
[[fault]]  # both survivors are slow, so that the first death finds their 1F1B running, however busy the machine is
replica = 0
rank = 1
point = "compute"
kind = "slow"
factor = 10.0
step = {step}
steps = 1

[[fault]]
replica = 1
rank = 1
point = "compute"
kind = "slow"
factor = 10.0
step = {step}
steps = 1
"""
CHAOS = f"""\
# Two stragglers and two deaths, of different pipeline stages (rank 0 is the first), or with --fsdp2 of different lanes.
{_SLOW.format(step=FIRST_DEATH - 1)}
[[fault]]  # a rank dies within its step: the others have begun theirs, and are far from done: 3 -> 2 replicas
replica = 2
rank = 1
point = "backward"
step = {FIRST_DEATH - 1}
occurrence = 4

[[fault]]  # the replica that writes logs dies while its rank 0 sums a bucket beside the backward: 2 -> 1 replicas
replica = 0
rank = 0
point = "reduce"
step = {LAST_DEATH - 1}
occurrence = 2
"""
NODES_CHAOS = _SLOW.format(step=KILLED_AFTER)


@dataclass
class Return:
    """Follows the lines of a run until its replicas are back, or its time is over."""

    since: float | None = None
    """Time of the last death, in seconds of the caller's clock."""
    num_together: int = 0
    """Steps that all replicas have trained since then, without a break."""

    def take(self, line: str, now: float) -> bool:
        """Take a line of the run's output; return whether the run may end."""
        found = _ITERATION.search(line)
        if found is None:
            return False
        iteration, replicas = int(found[1]), found[4]
        if iteration >= LAST_DEATH and self.since is None:
            self.since = now
        is_whole = self.since is not None and replicas == f"{REPLICAS}/{REPLICAS}"
        self.num_together = self.num_together + 1 if is_whole else 0
        is_late = self.since is not None and now - self.since > PATIENCE_S
        return (is_late and not is_whole) or (iteration >= STEPS and self.num_together >= STEPS_TOGETHER)


_ITERATION = re.compile(
    r"iteration\s+(\d+)/\s*\d+ .* lm loss: (\S+) .* generation: (\d+) \| replicas: (\S+) \| quotas: ([\d ]+?) \|"
)


def short(line: str) -> str:
    """Return a line of a run's output, with Megatron's long line of an iteration made short."""
    found = _ITERATION.search(line)
    if found is None:
        return line
    iteration, loss, generation, replicas, quotas = found.groups()
    return (
        f"iteration {iteration:>2} | loss {float(loss):.4f} | generation {generation} | replicas {replicas} | quotas {quotas}"
    )


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


class _Command:
    """A verb that runs in a process of its own. Its output and its stderr go to files."""

    def __init__(
        self, folder: Path, name: str, arguments: Sequence[str], *, is_shown: bool, environment: Mapping[str, str]
    ) -> None:
        """Start the verb. With `is_shown` its output has to be read by `lines`."""
        self._words = [sys.executable, "-m", "megatron_recover", *arguments]
        self._log, self._errors = (folder / f"{name}.{kind}" for kind in ("log", "err"))
        with open(self._log, "a", encoding="utf-8") as file, open(self._errors, "wb") as error_file:
            print(f"$ {shlex.join(self._words)}", file=file, flush=True)
            output = subprocess.PIPE if is_shown else file
            self.process = subprocess.Popen(
                self._words, stdout=output, stderr=error_file, text=True, env=environment
            )  # fmt: skip
        self._watchdog = threading.Timer(DEADLINES.deadline_s, self.process.kill)
        self._watchdog.start()

    def lines(self) -> Iterator[str]:
        """Yield the lines of its output, until its end."""
        assert self.process.stdout is not None
        with open(self._log, "a", encoding="utf-8") as file:
            for line in self.process.stdout:
                file.write(line)
                yield line.rstrip()

    def wait(self, expected: Collection[int] = (ExitCode.OK,)) -> None:
        """Wait for its end. Raises RuntimeError unless the exit code is as expected."""
        code = self.process.wait()
        if code not in expected:
            last = self._errors.read_text(errors="replace").splitlines()[-LAST_WORDS:]
            said = "".join(f"     {line}\n" for line in last)
            files = f"its output is in {self._log} and {self._errors}"
            raise RuntimeError(f"exit code {code} of: {shlex.join(self._words)}\n{said}{files}")

    def close(self) -> None:
        """End it, if it still runs: by SIGTERM, then by SIGKILL; wait `stop_s` after each.

        Ranks that have lost their launcher end by themselves.
        """
        self._watchdog.cancel()
        for tell in (self.process.terminate, self.process.kill):
            if self.process.poll() is None:
                tell()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=DEADLINES.stop_s)


class _Demo:
    """The four stages of the demo, in one folder, on `gpus` GPUs or on the CPU."""

    deaths = "two processes, whose replicas come back"
    chaos = CHAOS
    model = "a GPT of 4 layers as 2 pipeline stages"
    parts = "pipeline stages"
    lanes = 1
    layout = STAGES

    def __init__(self, folder: Path, say: TextIO, gpus: int) -> None:
        self.folder, self._say = folder, say
        shared = -(-RANKS // (gpus or RANKS))
        self._extra = ["--recover-ranks-per-gpu", str(shared)] if shared > 1 else []
        self.environment = inherited_environment()
        if gpus:
            self._extra.append("--deterministic-mode")  # for --recover-determinism exact
            self._extra += flags_without_kernels()
            self.environment = QUEUES | self.environment
        self.data = folder / "data" / "python-stdlib"
        self.reference, self.faulty = folder / "reference", folder / "faulty"

    def tell(self, text: str) -> None:
        print(text, file=self._say, flush=True)

    def run(self) -> tuple[Verdict, Verdict]:
        """Make the data, run both runs and check them; return the verdicts on both.

        Raises RuntimeError if a verb fails, OSError if a file cannot be written, and what `check`
        raises.
        """
        self.tell("1/4  the text of Python's standard library becomes a data set")
        self._command("data", "--output", str(self.data))
        self.tell(f"2/4  {self.model}, {REPLICAS} replicas, with kill -9 of {self.deaths}")
        chaos = self.folder / "chaos.toml"
        chaos.write_text(self.chaos)
        self._train_and_kill(self.faulty, "--chaos", str(chaos))
        steps = summarize(History.read(self.faulty)).steps
        self.tell(f"3/4  reference: the same {steps} steps, and nothing fails")
        self._train(self.reference, steps)
        self.tell("4/4  what do the two traces prove?")
        return check(self.reference), check(self.faulty, self.reference)

    def claims(self, reference: Verdict, faulty: Verdict) -> tuple[Claim, ...]:
        """Return what the demo claims about its two runs."""
        return claims(reference, faulty, parts=self.parts, patience_s=PATIENCE_S, least_steps=STEPS)

    def _train(self, run_dir: Path, steps: int) -> None:
        training = self._training(run_dir, "--train-iters", str(MOST_STEPS), "--exit-interval", str(steps))
        self._command(*self._run(), *training)

    def _train_and_kill(self, run_dir: Path, *flags: str) -> None:
        """Train; a rank kills itself where the chaos file says (Note [The end of the demo])."""
        line = [*self._run(), *flags]
        line += self._training(run_dir, "--train-iters", str(MOST_STEPS), *HEALING)
        follow, is_told = Return(), False
        with contextlib.closing(self._started("run", line)) as command:
            for text in command.lines():
                self.tell(f"     {short(text)}")
                if follow.take(text, time.monotonic()) and not is_told:
                    is_told = True
                    command.process.terminate()
            command.wait((ExitCode.OK, ExitCode.INTERRUPTED))

    def _run(self) -> list[str]:
        """Return the words of a launch line of one node up to its other flags."""
        return ["run", "--replicas", str(REPLICAS), *(["--lanes", str(self.lanes)] if self.lanes > 1 else [])]

    def _training(self, run_dir: Path, *flags: str) -> list[str]:
        """Return the words of a launch line from its run directory on; `flags` are Megatron's."""
        megatron = [*shlex.split(MODEL), *shlex.split(self.layout), *shlex.split(TRAINING), *flags, *self._extra]
        return ["--run-dir", str(run_dir), "--", str(PRETRAIN), *megatron, "--data-path", str(self.data)]

    def _started(self, name: str, line: Sequence[str], *, is_shown: bool = True) -> _Command:
        return _Command(self.folder, name, line, is_shown=is_shown, environment=self.environment)

    def _command(self, *arguments: str) -> None:
        """Run one verb, and show its output indented and short.

        Its stderr matters only if it fails. Kills it after `DEADLINES.deadline_s`. Raises
        RuntimeError unless the exit code is 0.
        """
        with contextlib.closing(self._started(arguments[0], arguments)) as command:
            for line in command.lines():
                self.tell(f"     {short(line)}")
            command.wait()


class _Fsdp2Demo(_Demo):
    """The demo in which FSDP2 shards a model over the lanes of each replica."""

    model = f"a GPT of 2 layers, which FSDP2 shards over {LANES} lanes"
    parts = "lanes"
    lanes = LANES
    layout = SHARDS


class _NodesDemo(_Demo):
    """The demo whose run with a death is on three nodes of this machine, of which one is killed.

    Each node has an agent and the two ranks of a replica. The reference is a run of one node. The
    lost replica does not come back: its slots are gone with the node.
    """

    deaths = f"all processes of one of {NODES} nodes"
    chaos = NODES_CHAOS

    def __init__(self, folder: Path, say: TextIO, gpus: int) -> None:
        super().__init__(folder, say, gpus)
        self.killed: tuple[int, ...] = ()
        """Process ids of the node that was killed."""

    def _train(self, run_dir: Path, steps: int) -> None:
        self._command("run", "--replicas", str(REPLICAS), *self._training(run_dir, "--train-iters", str(NODES_STEPS)))

    def claims(self, reference: Verdict, faulty: Verdict) -> tuple[Claim, ...]:
        return node_claims(reference, faulty, self.killed)

    def _train_and_kill(self, run_dir: Path, *flags: str) -> None:
        key, endpoint = self.folder / "key", self.folder / "endpoint"
        with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(33))
        meeting = [
            "--nnodes", str(NODES), "--nproc-per-node", str(RANKS // NODES), "--rdzv-backend", "c10d", "--rdzv-endpoint",
            f"file:{endpoint}", "--local-addr", "127.0.0.1", "--key-file", str(key),
        ]  # fmt: skip
        line = ["run", *meeting, *flags, *self._training(run_dir, "--train-iters", str(NODES_STEPS))]
        with contextlib.ExitStack() as stack:
            nodes = [
                stack.enter_context(contextlib.closing(self._started("run-node-0", line))),
            ]
            while not endpoint.exists() and nodes[0].process.poll() is None:
                time.sleep(_LOOK_S)  # the first that comes owns the endpoint, and is node 0
            nodes += [
                stack.enter_context(contextlib.closing(self._started(f"run-node-{each}", line, is_shown=False)))
                for each in range(1, NODES)
            ]
            for text in nodes[0].lines():
                self.tell(f"     {short(text)}")
                if not self.killed and short(text).startswith(f"iteration {KILLED_AFTER:>2} "):
                    time.sleep(KILL_DELAY_S)
                    self.killed = _kill_node(nodes[-1].process.pid)
                    self.tell(f"     kill -9 {' '.join(map(str, self.killed))}")
            for node in nodes[:-1]:
                node.wait()


def _kill_node(launcher: int) -> tuple[int, ...]:
    """Kill a launcher and all processes that it has started; return their process ids."""
    import psutil  # type: ignore[import-untyped]

    process = psutil.Process(launcher)
    processes = [process, *process.children(recursive=True)]
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    return tuple(each.pid for each in processes)


def _verdict(folder: Path, found: tuple[Claim, ...], reference: Verdict, faulty: Verdict, seconds: float) -> str:
    """Return the text of the last screen.

    These are what happened, each claim with its evidence, and where to look. If a claim does not
    hold, the text also has what `check` says of both runs.
    """
    lines = ["", *(f"     {line}" for line in story(faulty.summary)), ""]
    for claim in found:
        lines += [f"  [{'yes' if claim.holds else ' NO'}] {claim.text}"]
        lines += [f"        {line}" for line in claim.evidence.splitlines()]
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
        description="Train a small GPT on real text twice, once with kill -9 of real processes, which come back, and prove "
        "that the result is bit for bit the same. On CUDA where torch finds a GPU, else on the CPU: 1 to 3 minutes.",
    )
    parser.add_argument(
        "--nodes", type=int, choices=(1, NODES), default=1,
        help=f"{NODES}: the run with deaths is on {NODES} nodes, all on this machine, and a whole node is killed in mid-step; "
        "nothing comes back in its place, as there is no spare",
    )  # fmt: skip
    parser.add_argument(
        "--fsdp2", action="store_true",
        help=f"each replica is {LANES} lanes, over which FSDP2 shards parameters, gradients and optimizer; without --nodes",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON (progress goes to stderr)")
    parser.add_argument("--run-dir", type=Path, metavar="D", help="folder for everything it makes (default: runs/demo-<time>)")
    arguments = parser.parse_args(argv)
    if arguments.fsdp2 and arguments.nodes > 1:
        parser.error("--fsdp2 and --nodes are two demos; give one of them")
    try:
        packages.require(packages.TRAINING)
        gpus = num_gpus()
        folder = arguments.run_dir or new_folder("demo-")
        claim_folder(folder)
    except ValueError as error:
        parser.error(str(error))

    kind = _NodesDemo if arguments.nodes > 1 else _Fsdp2Demo if arguments.fsdp2 else _Demo
    demo = kind(folder, sys.stderr if arguments.json else sys.stdout, gpus)
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
    found, seconds = demo.claims(reference, faulty), time.monotonic() - began
    demo.tell(_verdict(folder, found, reference, faulty, seconds))
    if arguments.json:
        content = {"proven": all(one.holds for one in found), "claims": found, "seconds": seconds, "summary": faulty.summary}
        print(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())
    return ExitCode.OK if all(claim.holds for claim in found) else ExitCode.INVARIANT_VIOLATED
