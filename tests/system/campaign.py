"""A campaign: many real jobs, each with a random shape and random faults from one seed, each judged by `check`.

    python -m tests.system.campaign --runs 100 --seed 1 [--out docs/campaign.md]

Run k has seed SEED + k, which decides its shape and its faults; `--runs 1 --seed S` repeats one. A run passes if it ends with
code 0 before its deadline and `check` finds all invariants kept and its parameters bit-identical to those of the failure-free
run of a single replica. Prints one line a run and at the end `N passed, N failed`; exit code 1 if any failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import random
import shutil
import sys
import tempfile
import time
from typing import get_args

from megatron_recover.trace import Phase
from tests.system.jobs import Job, Outcome, check, run_job, text_data

MAX_PROCESSES = 8
RATE = 0.5
HEADER = (
    "| seed | job | faults (replica.rank at step: point) | replicas | lost | redone | wasted | worst recovery (ms) | seconds "
    "| verdict |\n|---|---|---|---|---|---|---|---|---|---|"
)


def shape(seed: int) -> Job:
    """The job of a seed."""
    dice = random.Random(seed)
    tp, pp = dice.choice(((1, 1), (1, 1), (1, 2), (1, 2), (2, 1), (2, 2)))
    lanes = dice.choice((1, 1, 2)) if tp * pp == 1 else 1
    replicas = dice.randint(2, min(4, MAX_PROCESSES // (tp * pp * lanes)))
    extra: tuple[str, ...] = ()
    if dice.random() < 0.3:
        extra += ("--bf16",)
    if dice.random() < 0.3:
        extra += ("--use-distributed-optimizer",)
    if dice.random() < 0.3:
        extra += ("--calculate-per-token-loss",)
    return Job(
        replicas=replicas, tp=tp, pp=pp, lanes=lanes, microbatches=dice.randint(replicas, 8), extra=extra,
        run_flags=("--chaos", f"rate={RATE},seed={seed},steps=6"),
    )  # fmt: skip


def describe(job: Job) -> str:
    """One cell of the table."""
    flags = " ".join(flag.removeprefix("--") for flag in job.extra)
    return f"R{job.replicas} TP{job.tp} PP{job.pp} L{job.lanes} M{job.microbatches} {flags}".rstrip()


def verdict(outcome: Outcome, reference: pathlib.Path) -> str:
    """`passed`, or what is wrong."""
    if outcome.exit_code != 0:
        return f"FAILED: exit code {outcome.exit_code}"
    code, report = check(outcome.run_dir, reference)
    return "passed" if code == 0 else f"FAILED: {report.splitlines()[-1]}"


def line_of(seed: int, job: Job, outcome: Outcome, seconds: float, result: str) -> str:
    """One row of the table."""
    summary = outcome.summary if (outcome.run_dir / "summary.json").is_file() else {}
    faults = ", ".join(
        f"{event['replica']}.{event['rank']} at {event['step']}: {event['point']}" for event in outcome.events("fault")
    )
    recoveries = [sum(each[f"{phase}_s"] or 0.0 for phase in get_args(Phase)) for each in summary.get("recoveries", [])]
    worst = f"{1000 * max(recoveries):.0f}" if recoveries else "-"
    counts = " | ".join(str(summary.get(f"microbatches_{name}")) for name in ("lost", "redone", "wasted"))
    replicas = f"{job.replicas} to {summary.get('replicas_end')}"
    return f"| {seed} | {describe(job)} | {faults or 'none'} | {replicas} | {counts} | {worst} | {seconds:.0f} | {result} |"


def main() -> int:
    """Run the campaign; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.campaign", description="Many real jobs with random faults.")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run; the others follow")
    parser.add_argument("--out", type=pathlib.Path, help="append the table rows to this file")
    parser.add_argument("--keep", type=pathlib.Path, help="keep the folders of failed runs here (default: a temporary folder)")
    arguments = parser.parse_args()
    keep = arguments.keep or pathlib.Path(tempfile.gettempdir()) / "megatron-recover-failed"
    references: dict[Job, pathlib.Path] = {}
    num_failed = 0
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory(prefix="megatron-recover-campaign-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        for seed in range(arguments.seed, arguments.seed + arguments.runs):
            job = shape(seed)
            alone = dataclasses.replace(job, replicas=1, run_flags=())
            if alone not in references:
                references[alone] = folder / f"reference-{len(references)}"
                run_job(alone, references[alone], data, quiet=True).expect(0)
            since = time.monotonic()
            outcome = run_job(job, folder / f"run-{seed}", data, quiet=True)
            seconds = time.monotonic() - since
            result = verdict(outcome, references[alone])
            line = line_of(seed, job, outcome, seconds, result)
            print(line, flush=True)
            if arguments.out:
                with arguments.out.open("a") as table:
                    table.write(line + "\n")
            if result == "passed":
                shutil.rmtree(outcome.run_dir)
            else:
                num_failed += 1
                keep.mkdir(parents=True, exist_ok=True)
                shutil.move(outcome.run_dir, keep / f"run-{seed}")
                again = f"python -m tests.system.campaign --runs 1 --seed {seed}"
                print(f"run again with: {again}\n{outcome.output[-3000:]}", flush=True)
    print(f"{arguments.runs - num_failed} passed, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
