"""A campaign: real jobs with random shapes and random faults, one after another until so many faults have struck, each judged.

    python -m tests.system.campaign --faults 300 --seed 1 [--out docs/campaign.md]

Run k has seed SEED + k, which decides its job and its faults (`tests.system.scenarios`); `--faults 1 --seed S` repeats one. A
run passes if it ends with code 0 before its deadline, has made all steps, `check` finds all invariants kept, and, where it is
exact, its parameters are bit-identical to those of the failure-free run of a single replica. Prints one line a run and at the
end `N passed, N failed`; exit code 1 if any failed, 130 after Ctrl-C, which ends the run that goes on.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import get_args

from megatron_recover.cluster import chaos
from megatron_recover.sim.workers import CTRL_C_CODE, ended_by_ctrl_c
from megatron_recover.trace import Phase
from tests.system.jobs import ROOT, Job, Outcome, check, run_job, text_data
from tests.system.scenarios import STEPS, Scenario, scenario

DEADLINE_S = 300.0
MAX_FAILED = 10
"""A campaign with so many failures has found what there is to find."""
COLUMNS = (
    "| seed | job | faults that struck (replica.rank at step: what) | replicas | lost | redone | in the running pass | wasted "
    "| worst recovery (ms) | seconds | verdict |\n|---|---|---|---|---|---|---|---|---|---|---|"
)

DOCUMENT = """\
# Campaign of random faults

    {command}
    python -m tests.system.campaign --faults 1 --seed {seed}        # one run of it

**{num_runs} runs, {num_faults} faults that struck: {totals}**, at commit {commit} on {date}; {seconds:.0f} s a fault.

By kind: {by_kind}. By point: {by_point}.

The command above writes this file (`tests/system/campaign.py`). Each seed decides a job (R replicas of TP x PP ranks and L
lanes, VP virtual stages, M microbatches a step, determinism, Megatron's flags) and its faults, some at once, some inside the
recovery from another (`tests/system/scenarios.py`; a fault that its run did not reach is not listed). A standstill is noticed
after 6 s here, and who does not follow is given up after 3 more. A run passes if it ends with code 0 within {deadline_s:.0f}
s and has made all steps, `check` finds every invariant kept, and, if it is exact, its parameters are bit-identical to those
of the failure-free run of one replica. `uneven` and `patient` name scripts that bring about what is rare: a decided bucket
that some lack, a death that finds all others in their pass. *In the running pass*: those microbatches computed again that a
schedule took in while it ran. *Worst recovery* adds up the phases of the slowest one, from the fault to the votes.
"""


class Row:
    """One run of the campaign: what it was and what came of it."""

    def __init__(self, seed: int, plan: Scenario, outcome: Outcome, seconds: float, verdict: str) -> None:
        self.seed, self.plan, self.seconds, self.verdict = seed, plan, seconds, verdict
        self.faults = outcome.events("fault")
        self.num_struck = sum(event["kind"] != "slow" for event in self.faults)
        """A slow rank fails at nothing: it does not count."""
        self._summary = outcome.summary if (outcome.run_dir / "summary.json").is_file() else {}

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"

    def __str__(self) -> str:
        """As a row of the table."""
        faults = ", ".join(
            f"{event['replica']}.{event['rank']} at {event['step']}: {event['kind']} in {event['point']}"
            for event in self.faults
        )
        phases = [[each[f"{phase}_s"] or 0.0 for phase in get_args(Phase)] for each in self._summary.get("recoveries", ())]
        names = ("lost", "redone", "redone_in_schedule", "wasted")
        cells = (
            self.seed, self.plan, faults or "none", f"{self.plan.job.replicas} to {self._summary.get('replicas_end', '?')}",
            *(self._summary.get(f"microbatches_{name}", "?") for name in names),
            f"{1000 * max(map(sum, phases)):.0f}" if phases else "-", f"{self.seconds:.0f}", self.verdict,
        )  # fmt: skip
        return f"| {' | '.join(map(str, cells))} |"


class Campaign:
    """Runs scenarios in a folder of its own."""

    def __init__(self, folder: pathlib.Path, keep: pathlib.Path) -> None:
        """`keep`: where the folders of failed runs go."""
        self._folder, self._keep = folder, keep
        self._data = text_data(folder)
        self._references: dict[Job, pathlib.Path] = {}

    def attempt(self, seed: int) -> Row:
        """Run the scenario of a seed and judge it."""
        plan = scenario(seed)
        reference = self._reference(plan)
        run_dir = self._folder / f"run-{seed}"
        save = self._folder / f"save-{seed}" if plan.saves else None
        since = time.monotonic()
        try:
            outcome = run_job(
                plan.job, run_dir, self._data, chaos=chaos.render(plan.faults, f"seed {seed}"), save=save,
                deadline_s=DEADLINE_S, quiet=True, script=ROOT / plan.script,
            )  # fmt: skip
            verdict = self._judge(outcome, reference)
        except AssertionError as error:  # it was killed at its deadline
            outcome, verdict = Outcome(-1, str(error), run_dir, ""), f"FAILED: no end within {DEADLINE_S:.0f} s"
        row = Row(seed, plan, outcome, time.monotonic() - since, verdict)
        if row.passed:
            shutil.rmtree(run_dir)
        else:
            self._keep.mkdir(parents=True, exist_ok=True)
            shutil.move(run_dir, self._keep / f"run-{seed}")
            print(
                f"{outcome.output[-3000:]}\nrun again with: python -m tests.system.campaign --faults 1 --seed {seed}",
                flush=True,
            )
        if save is not None:
            shutil.rmtree(save, ignore_errors=True)
        return row

    def _reference(self, plan: Scenario) -> pathlib.Path | None:
        """The failure-free run that an exact one has to end like; made once."""
        if plan.job.determinism != "exact":
            return None
        alone = plan.reference()
        if alone not in self._references:
            self._references[alone] = self._folder / f"reference-{len(self._references)}"
            run_job(alone, self._references[alone], self._data, quiet=True, deadline_s=DEADLINE_S).expect(0)
        return self._references[alone]

    def _judge(self, outcome: Outcome, reference: pathlib.Path | None) -> str:
        if outcome.exit_code != 0:
            return f"FAILED: exit code {outcome.exit_code}"
        if outcome.summary["steps"] != STEPS:
            return f"FAILED: {outcome.summary['steps']} steps"
        if outcome.events("miscounted"):
            return "FAILED: a step was miscounted, and computed anew"
        code, report = check(outcome.run_dir, reference)
        return "passed" if code == 0 else f"FAILED: {report.splitlines()[-1]}"


def totals(rows: list[Row]) -> str:
    """The last line."""
    num_passed = sum(row.passed for row in rows)
    return f"{num_passed} passed, {len(rows) - num_passed} failed"


def document(rows: list[Row], command: str) -> str:
    """docs/campaign.md."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    faults = [event for row in rows for event in row.faults]
    num_struck = sum(row.num_struck for row in rows)
    by_kind, by_point = (
        ", ".join(f"{count} {name}" for name, count in collections.Counter(event[key] for event in faults).most_common())
        for key in ("kind", "point")
    )
    head = DOCUMENT.format(
        command=command, seed=rows[0].seed, num_runs=len(rows), num_faults=num_struck, totals=totals(rows), commit=commit,
        date=time.strftime("%Y-%m-%d"), seconds=sum(row.seconds for row in rows) / max(1, num_struck), by_kind=by_kind,
        by_point=by_point, deadline_s=DEADLINE_S,
    )  # fmt: skip
    return "\n".join((head, COLUMNS, *map(str, rows), ""))


def _seeds(first: int, rows: list[Row], num_faults: int) -> Iterator[int]:
    """Seeds until so many faults have struck, or too many runs have failed."""
    for seed in itertools.count(first):
        if sum(row.num_struck for row in rows) >= num_faults or sum(not row.passed for row in rows) >= MAX_FAILED:
            return
        yield seed


@ended_by_ctrl_c()
def main() -> int:
    """Run the campaign; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.campaign", description="Real jobs with random faults.")
    parser.add_argument("--faults", type=int, default=300, help="go on until so many have struck (default: 300)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run; the others follow")
    parser.add_argument("--out", type=pathlib.Path, help="write the record to this file, after every run")
    parser.add_argument("--keep", type=pathlib.Path, help="keep the folders of failed runs here (default: a temporary folder)")
    arguments = parser.parse_args()
    if arguments.faults < 1:
        parser.error(f"--faults is {arguments.faults}; give at least 1")
    if arguments.out is not None and not arguments.out.parent.is_dir():
        parser.error(f"--out: there is no folder {arguments.out.parent}; make it, or give another place")
    keep = arguments.keep or pathlib.Path(tempfile.gettempdir()) / "megatron-recover-failed"
    command = f"make campaign FAULTS={arguments.faults} SEED={arguments.seed} OUT=docs/campaign.md"
    rows: list[Row] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a campaign that is told to end takes its run with it
    print(COLUMNS, flush=True)
    is_interrupted = False
    try:
        with tempfile.TemporaryDirectory(prefix="megatron-recover-campaign-") as name:
            campaign = Campaign(pathlib.Path(name), keep)
            for seed in _seeds(arguments.seed, rows, arguments.faults):
                rows.append(campaign.attempt(seed))
                print(rows[-1], flush=True)
                if arguments.out:
                    arguments.out.write_text(document(rows, command))
    except KeyboardInterrupt:
        is_interrupted = True
        print(f"interrupted in the run of seed {arguments.seed + len(rows)}")
    print(totals(rows))
    return CTRL_C_CODE if is_interrupted else int(not all(row.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
