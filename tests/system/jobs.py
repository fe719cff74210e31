"""Runs real jobs for the system tests: `megatron-recover run` with the real `pretrain()`, real processes and real kills.

Every job is small (a GPT of a few thousand parameters), has a hard deadline, and prints the one line that runs it again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from tests import forks

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_S = 150.0
FSDP2 = ("--use-torch-fsdp2", "--untie-embeddings-and-output-weights")
"""Megatron's flags of a job that FSDP2 shards; without the first the same job has DDP."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The shape and length of one training run."""

    replicas: int = 2
    tp: int = 1
    pp: int = 1
    lanes: int = 1
    steps: int = 6
    microbatches: int = 6
    seed: int = 1234
    determinism: str = "exact"
    rebalance: str = "off"
    """Faults name microbatches of a replica, and on a busy machine speeds are anybody's guess."""
    heal: str = "off"
    """Most tests look at those who are left; `in-place`: what is lost comes back."""
    bucket_elements: int = 8000
    """Small, so that a small model has several buckets on every stage."""
    extra: tuple[str, ...] = ()
    """Further Megatron flags."""
    run_flags: tuple[str, ...] = ()
    """Further flags of `megatron-recover run`."""
    save_interval: int = 1000
    eval_interval: int = 1000
    timeouts: tuple[str, ...] = ()
    """Flags that say how soon a standstill is noticed; what is computed does not depend on them."""
    module: str = "megatron_recover"
    """What is started instead of `megatron-recover`."""
    train_iters: int | None = None
    """`--train-iters` (length of the schedules); default: `steps`."""

    def megatron_flags(self, data: pathlib.Path, save: pathlib.Path | None) -> list[str]:
        """The Megatron part of the command line."""
        layers = max(2, self.pp)
        flags = (
            f"--num-layers {layers} --hidden-size 32 --num-attention-heads 4"
            f" --seq-length 32 --max-position-embeddings 32"
            f" --micro-batch-size 1 --global-batch-size {self.microbatches * self.lanes}"
            f" --train-iters {self.train_iters or self.steps}"
            f" --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 1"
            f" --clip-grad 1.0 --weight-decay 0.01 --seed {self.seed}"
            f" --tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp}"
            f" --tokenizer-type NullTokenizer --vocab-size 257 --split 90,5,5 --data-path {data}"
            f" --log-interval 1 --eval-iters 2 --eval-interval {self.eval_interval}"
            f" --recover-determinism {self.determinism} --recover-bucket-elements {self.bucket_elements}"
            f" --recover-rebalance {self.rebalance} --recover-heal {self.heal}"
        )
        if save is not None:
            flags += f" --save {save} --load {save} --save-interval {self.save_interval}"
        return [*shlex.split(flags), *self.extra, *self.timeouts]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended and what it left."""

    exit_code: int
    output: str
    run_dir: pathlib.Path
    command: str
    codes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Exit code on each node of a job on several nodes; `exit_code` is that of node 0."""
    left: str = ""
    """What is left on these nodes behind the job."""

    def lines(self) -> Iterator[bytes]:
        """All whole lines of the trace, one node after the other."""
        for folder in (self.run_dir, *sorted(self.run_dir.glob("nodes/*"))):
            if (file := folder / "events.jsonl").exists():
                yield from file.read_bytes().split(b"\n")[:-1]

    def events(self, kind: str) -> list[dict[str, object]]:
        """All trace events of one type, in the order of the file."""
        return [event for event in map(json.loads, self.lines()) if event["event"] == kind]

    def saves(self) -> list[tuple[int, str]]:
        """(iteration, phase) of everything about saves in the trace, in the order of the file."""
        found = [(event["iteration"], event["phase"]) for event in self.events("checkpoint") if event["phase"] != "loaded"]
        return cast("list[tuple[int, str]]", found)

    @property
    def summary(self) -> dict[str, object]:
        """The run's summary.json."""
        return json.loads((self.run_dir / "summary.json").read_text())

    def expect(self, exit_code: int = 0) -> Outcome:
        """Fail the test, with the line that reproduces the run, unless it ended with `exit_code`."""
        assert self.exit_code == exit_code, (
            f"exit code {self.exit_code}, not {exit_code}; run it again with:\n{self.command}\n{self.output[-6000:]}"
        )
        return self


def run_job(
    job: Job,
    run_dir: pathlib.Path,
    data: pathlib.Path,
    *,
    chaos: str = "",
    save: pathlib.Path | None = None,
    deadline_s: float = DEADLINE_S,
    quiet: bool = False,
    script: pathlib.Path = ROOT / "scripts" / "pretrain_gpt.py",
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a job to its end, in a process group of its own that is killed at the deadline (which fails the test).

    `environment`: variables that are set for it.
    """
    command = command_of(job, run_dir, data, chaos=chaos, save=save, script=script)
    line = shlex.join(command)
    if not quiet:
        print(line)
    return Outcome(*_run(command, deadline_s, line, environment), run_dir, line)


def command_of(
    job: Job,
    run_dir: pathlib.Path,
    data: pathlib.Path,
    *,
    chaos: str = "",
    save: pathlib.Path | None = None,
    script: pathlib.Path = ROOT / "scripts" / "pretrain_gpt.py",
) -> list[str]:
    """Return the command line that runs a job; write its chaos file."""
    command: list[str] = [
        sys.executable, "-m", job.module, "run", "--replicas", str(job.replicas), "--run-dir", str(run_dir),
    ]  # fmt: skip
    if job.lanes > 1:
        command += ["--lanes", str(job.lanes)]
    if chaos:
        chaos_file = run_dir.with_suffix(".chaos.toml")
        chaos_file.write_text(chaos)
        command += ["--chaos", str(chaos_file)]
    return [*command, *job.run_flags, "--", str(script), *job.megatron_flags(data, save)]


def _run(command: Sequence[str], deadline_s: float, line: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    process = forks.start(command, cwd=ROOT, environment=os.environ | dict(environment or {}))
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        raise AssertionError(f"no end after {deadline_s:g} s; run it again with:\n{line}\n{output[-6000:]}") from None
    except BaseException:  # Ctrl-C, or the time limit of the test
        process.send_signal(signal.SIGTERM)  # and it is waited for: nobody may write where the caller removes everything
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    return process.returncode, output


def check(run_dir: pathlib.Path, against: pathlib.Path | None = None) -> tuple[int, str]:
    """`megatron-recover check`."""
    command = [sys.executable, "-m", "megatron_recover", "check", str(run_dir)]
    if against is not None:
        command += ["--against", str(against)]
    return forks.run(command, cwd=ROOT, deadline_s=120.0)


def text_data(folder: pathlib.Path) -> pathlib.Path:
    """A small byte-level data set made from Python's own sources; returns the prefix for `--data-path`."""
    prefix = folder / "text"
    sources = sorted(pathlib.Path(json.__file__).parents[1].glob("[a-c]*.py"))
    command = [sys.executable, "-m", "megatron_recover", "data", "--output", str(prefix), *map(str, sources)]
    exit_code, output = forks.run(command, cwd=ROOT, deadline_s=120.0)
    assert exit_code == 0, output
    return prefix


def chaos_text(*faults: str) -> str:
    """A chaos file from lines of the form `replica rank point [key=value ...]`."""
    return "\n".join(map(_fault, faults))


def _fault(text: str) -> str:
    replica, rank, point, *rest = text.split()
    lines = ["[[fault]]", f"replica = {replica}", f"rank = {rank}", f'point = "{point}"']
    for item in rest:
        key, value = item.split("=")
        lines.append(f"{key} = {value}" if value.isdigit() else f'{key} = "{value}"')
    return "\n".join(lines) + "\n"


def assert_struck_and_finished(outcome: Outcome, job: Job, faults: Sequence[str], left: int) -> None:
    """Check that all `faults` struck, that `left` replicas made all steps, and that only what was lost was computed again."""
    struck = [event["point"] for event in outcome.events("fault")]
    assert sorted(struck) == sorted(fault.split()[2] for fault in faults), f"{outcome.command}\n{struck}"
    assert outcome.summary["replicas_end"] == left
    assert outcome.summary["steps"] == job.steps
    assert outcome.summary["microbatches_wasted"] == 0
    assert outcome.summary["microbatches_redone"] == outcome.summary["microbatches_lost"]
