"""A campaign: real jobs with random shapes and random faults, one after another until so many faults have struck, each judged.

    python -m tests.system.campaign --faults 300 --seed 1 [--only joins] [--fsdp2] [--out docs/evidence/campaign.md]

Run k has seed SEED + k, which decides its job and its faults (`tests.system.scenarios`); `--faults 1 --seed S` repeats one. It
passes if it ends before its deadline and keeps what is promised for its kind (`tests.system.judging`). Prints one line a run
and at the end `N passed, N failed`; exit code 1 if any failed, 130 after Ctrl-C, which ends the run that goes on. Kinds with a
disk or with nodes of their own need root: what this machine cannot have is left out, and said at the start.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from typing import get_args

import msgspec

from megatron_recover.cluster import chaos
from megatron_recover.deadlines import Deadlines
from megatron_recover.observe.stop_mark import STOP_MARK
from megatron_recover.sim.workers import CTRL_C_CODE, ended_by_ctrl_c
from megatron_recover.trace import Phase
from tests.disk import Disk
from tests.nodes import nodes
from tests.nodes.nodes import Network
from tests.nodes.real import run_on_nodes
from tests.system import comebacks
from tests.system.evidence import Evidence
from tests.system.jobs import FSDP2, ROOT, Job, Outcome, run_job, text_data
from tests.system.judging import EXPECTATIONS, ends_with_named_codes, judge
from tests.system.kills import Killer
from tests.system.plans import DEADLINE_S as JOB_DEADLINE_S
from tests.system.plans import Scenario
from tests.system.scenarios import KINDS, scenario
from tests.system.strikes import NODE_TIMEOUT_S, ON_DISK, STRIKE, Nemesis, orders

DEADLINE_S = 300.0
MAX_FAILED = 10
"""A campaign with so many failures has found what there is to find."""
GROUPS = {"joins": tuple(comebacks.KINDS), "losses": tuple(kind for kind in KINDS if kind not in comebacks.KINDS)}
COLUMNS = (
    "| seed | job | faults that struck (replica.rank at step: what) | replicas | lost | redone | in the running pass | wasted "
    "| worst recovery (ms) | seconds | verdict |\n|---|---|---|---|---|---|---|---|---|---|---|"
)

DOCUMENT = """\
# Campaign of random faults

    {command}
    python -m tests.system.campaign --faults 1 --seed {seed}{fsdp2}        # one run of it

**{num_runs} runs, {num_faults} faults that struck: {totals}**, at commit {commit} on {date};
{seconds:.0f} s a fault.

| by | faults or runs |
|---|---|
| kind of run | {by_run} |
| kind of fault | {by_kind} |
| point | {by_point} |

The command above writes this file (`tests/system/campaign.py`). Each seed decides these things
(`tests/system/scenarios.py`; `comebacks.py` where what is lost comes back):

- a job: R replicas of TP x PP ranks and L lanes, VP virtual stages, M microbatches a step,
  determinism, Megatron's flags, the slots of its nodes if it has several;
- the kind of the run;
- the faults: at points inside ranks, some of them at once or inside the recovery from another
  fault, what a rank does to another one as it passes a point, and strikes and kills from outside.

A fault that the run did not reach is not listed. A slow rank is listed and not counted.
`--recover-deadline-s` is {job_deadline_s:g}. So a standstill that no agent detects is noticed after {stall_s:g} s, and a
replica that does not enter the next generation is removed after {follow_s:g} s more (`megatron-recover explain
timeouts`). With several nodes `--node-timeout` is {node_timeout_s:g}. Each node has network,
processes and file systems of its own (`tests/nodes/nodes.py`).

| kind of run | weight | promises |
|---|---:|---|
{kinds}

Every run has to end within {deadline_s:.0f} s. `tests/system/judging.py` checks these promises:

| promise | meaning |
|---|---|
{promises}

In the table of runs:

- `uneven` and `patient` name scripts that bring about rare situations: a decided bucket that some
  members lack (`uneven`), and a death that finds all other replicas in their pass (`patient`).
- *In the running pass* counts the microbatches computed again that a schedule took in while it ran.
- *Worst recovery* adds up the phases of the slowest recovery, from the fault to the votes.
- A trace that the disk did not take has no such figures (`?`, `-`).
"""


class Row:
    """One run of the campaign: what it was and what came of it."""

    def __init__(self, seed: int, evidence: Evidence, seconds: float, verdict: str) -> None:
        plan, outcome = evidence.plan, evidence.outcome
        self.seed, self.plan, self.seconds, self.verdict = seed, plan, seconds, verdict
        self.faults = evidence.faults()
        others = [plan.others] if evidence.has_struck and plan.others else []
        self._others = [*others, *evidence.acts(), *(f"{who}: kill from outside" for who in evidence.killed)]
        self.num_struck = sum(event["kind"] != "slow" for event in self.faults) + len(self._others)
        """A slow rank fails at nothing: it does not count."""
        self._summary = outcome.summary if (outcome.run_dir / "summary.json").is_file() else {}

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"

    def __str__(self) -> str:
        """As a row of the table."""
        faults = [
            f"{event['replica']}.{event['rank']} at {event['step']}: {event['kind']} in {event['point']}"
            for event in self.faults
        ]
        faults += self._others
        phases = [[each[f"{phase}_s"] or 0.0 for phase in get_args(Phase)] for each in self._summary.get("recoveries", ())]
        names = ("lost", "redone", "redone_in_schedule", "wasted")
        left = self._summary.get("replicas_end", "?")
        cells = (
            self.seed, self.plan, ", ".join(faults) or "none", f"{self.plan.job.replicas} to {left}",
            *(self._summary.get(f"microbatches_{name}", "?") for name in names),
            f"{1000 * max(map(sum, phases)):.0f}" if phases else "-", f"{self.seconds:.0f}", self.verdict,
        )  # fmt: skip
        return f"| {' | '.join(map(str, cells))} |"


class Campaign:
    """Runs scenarios in a folder of its own."""

    def __init__(
        self, folder: pathlib.Path, keep: pathlib.Path, make_cage: Callable[[], nodes.Cage], *, fsdp2: bool = False
    ) -> None:  # fmt: skip
        """`keep`: where the folders of failed runs go. `make_cage`: makes that of all networks of nodes, if there are any."""
        self._folder, self._keep, self._make_cage, self._fsdp2 = folder, keep, make_cage, fsdp2
        self._data = text_data(folder)
        self._references: dict[Job, pathlib.Path] = {}

    def attempt(self, seed: int) -> Row:
        """Run the scenario of a seed and judge it."""
        plan = scenario(seed, fsdp2=self._fsdp2)
        folder = self._folder / f"run-{seed}"
        folder.mkdir()
        since = time.monotonic()
        try:
            evidence = self._run(seed, plan, self._reference(plan, folder), folder)
            verdict = judge(evidence)
        except (AssertionError, OSError) as error:  # killed at its deadline, what strikes it does not work, no reference
            copies = (folder / "network" / "shared" if plan.slots else folder) / "copies" if plan.strike is not None else None
            evidence = Evidence(plan, Outcome(-1, str(error), folder / "run", ""), None, copies=copies, has_struck=False)
            verdict = f"FAILED: {str(error).splitlines()[0]}"
        row = Row(seed, evidence, time.monotonic() - since, verdict)
        if row.passed:
            shutil.rmtree(folder)
        else:
            self._keep.mkdir(parents=True, exist_ok=True)
            shutil.move(folder, self._keep / f"run-{seed}-{os.getpid()}")
            print(
                f"{evidence.outcome.output[-3000:]}\nrun again with: python -m tests.system.campaign --faults 1 --seed {seed}"
                f"{' --fsdp2' if self._fsdp2 else ''}",
                flush=True,
            )  # fmt: skip
        return row

    def _run(self, seed: int, plan: Scenario, reference: pathlib.Path | None, folder: pathlib.Path) -> Evidence:
        """Run a scenario, with what comes to it from outside."""
        with contextlib.ExitStack() as stack:
            network = disk = nemesis = None
            place, run = folder, run_job
            if plan.slots:
                network = stack.enter_context(
                    contextlib.closing(Network(self._cage, folder / "network", len(plan.slots)))
                )  # fmt: skip
                place, run = network.shared, functools.partial(run_on_nodes, network, plan.slots, NODE_TIMEOUT_S)
            copies, save, run_dir = place / "copies", place / "save" if plan.saves else None, place / "run"
            copies.mkdir()
            environment, faults = plan.environment(), (*plan.faults, *plan.never())
            if plan.strike is not None:
                assert plan.spared is not None
                told = orders(plan.strike, copies, plan.spared)
                environment[STRIKE] = msgspec.json.encode(told).decode()
                faults += tuple(told.never())
                if plan.strike.kind in ON_DISK:
                    disk = stack.enter_context(contextlib.closing(Disk(folder / "own")))
                    run_dir = disk.place / "run"
                where = disk if network is None else network[plan.strike.node]
                nemesis = stack.enter_context(Nemesis(plan.strike, copies, where))
            killer = stack.enter_context(Killer(plan.kills, run_dir, plan.spared)) if plan.kills is not None else None
            text = chaos.render(faults, f"seed {seed}") if faults else ""
            try:
                outcome = run(
                    plan.job, run_dir, self._data, chaos=text, save=save, deadline_s=DEADLINE_S, quiet=True,
                    script=ROOT / plan.script, environment=environment,
                )  # fmt: skip
            finally:
                if disk is not None and nemesis is not None:
                    nemesis.end()
                    with contextlib.suppress(FileNotFoundError):  # it was interrupted before there was anything
                        disk.rescue(run_dir, folder / "run")
            outcome = dataclasses.replace(outcome, run_dir=place / "run")

        def resume() -> Outcome:
            if save is not None:
                (save / STOP_MARK).unlink(missing_ok=True)
            return run_job(plan.job, place / "resumed", self._data, save=save, deadline_s=DEADLINE_S, quiet=True)

        struck = {} if nemesis is None else {
            "has_struck": nemesis.has_struck, "struck_at": nemesis.struck_at, "unfenced": nemesis.unfenced, "copies": copies
        }  # fmt: skip
        killed = () if killer is None else tuple(killer.killed)
        return Evidence(plan, outcome, reference, save=save, resume=resume, killed=killed, **struck)

    @functools.cached_property
    def _cage(self) -> nodes.Cage:
        return self._make_cage()

    def _reference(self, plan: Scenario, folder: pathlib.Path) -> pathlib.Path | None:
        """The failure-free run that an exact one has to end like; made once. One that fails stays in `folder`, of this run."""
        if plan.job.determinism != "exact":
            return None
        alone = plan.reference()
        if alone not in self._references:
            run_job(alone, folder / "reference", self._data, quiet=True, deadline_s=DEADLINE_S).expect(0)
            made = self._folder / f"reference-{len(self._references)}"
            self._references[alone] = (folder / "reference").rename(made)
        return self._references[alone]


def totals(rows: list[Row]) -> str:
    """The last line."""
    num_passed = sum(row.passed for row in rows)
    return f"{num_passed} passed, {len(rows) - num_passed} failed"


def document(rows: list[Row], command: str) -> str:
    """Return the text of docs/evidence/campaign.md."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    faults = [event for row in rows for event in row.faults]
    num_struck = sum(row.num_struck for row in rows)
    by_run = collections.Counter(row.plan.kind for row in rows)
    deadlines = Deadlines.of(JOB_DEADLINE_S)
    by_kind, by_point = (
        ", ".join(f"{count} {name}" for name, count in collections.Counter(event[key] for event in faults).most_common())
        for key in ("kind", "point")
    )
    head = DOCUMENT.format(
        command=command, seed=rows[0].seed, fsdp2=" --fsdp2" if FSDP2[0] in rows[0].plan.job.extra else "",
        num_runs=len(rows), num_faults=num_struck, totals=totals(rows), commit=commit,
        date=time.strftime("%Y-%m-%d"), seconds=sum(row.seconds for row in rows) / max(1, num_struck), by_kind=by_kind,
        by_point=by_point, deadline_s=DEADLINE_S, job_deadline_s=JOB_DEADLINE_S, stall_s=deadlines.stall_s,
        follow_s=deadlines.follow_s, node_timeout_s=NODE_TIMEOUT_S,
        by_run=", ".join(f"{count} {kind}" for kind, count in by_run.most_common()),
        kinds=_kinds(), promises=_promises(),
    )  # fmt: skip
    return "\n".join((head, COLUMNS, *map(str, rows), ""))


def _kinds() -> str:
    """The kinds of runs as rows of a table."""
    return "\n".join(
        f"| {kind} | {weight} | {', '.join(each.__name__.replace('_', ' ') for each in EXPECTATIONS[kind])} |"
        for kind, (weight, _) in KINDS.items()
    )


def _promises() -> str:
    """What each expectation means, in its own words."""
    distinct = dict.fromkeys(each for kind in KINDS for each in EXPECTATIONS[kind])
    lines = ((each.__name__.replace("_", " "), " ".join((each.__doc__ or "").split())) for each in distinct)
    return "\n".join(f"| *{name}* | {meaning} |" for name, meaning in lines)


def why_not(kind: str) -> str:
    """Return why this machine cannot have runs of a kind; empty: it can."""
    is_on_nodes, is_on_disk = ends_with_named_codes in EXPECTATIONS[kind], any(each.value == kind for each in ON_DISK)
    if is_on_nodes:
        return nodes.why_not()
    return "a disk of its own needs root" if is_on_disk and os.geteuid() != 0 else ""


def _seeds(first: int, rows: list[Row], num_faults: int, kinds: Collection[str]) -> Iterator[int]:
    """Seeds of these kinds until so many faults have struck, or too many runs have failed."""
    for seed in itertools.count(first):
        if sum(row.num_struck for row in rows) >= num_faults or sum(not row.passed for row in rows) >= MAX_FAILED:
            return
        if scenario(seed).kind in kinds:
            yield seed


@ended_by_ctrl_c()
def main() -> int:
    """Run the campaign; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.campaign", description="Real jobs with random faults.")
    parser.add_argument("--faults", type=int, default=300, help="go on until so many have struck (default: 300)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run; the others follow")
    parser.add_argument("--out", type=pathlib.Path, help="write the record to this file, after every run")
    parser.add_argument("--only", choices=[*GROUPS], help="only seeds of kinds in which what is lost comes back, or stays away")
    parser.add_argument("--kinds", help="only seeds of kinds that have this word in their names, such as `node` or `cut`")
    parser.add_argument("--fsdp2", action="store_true", help="FSDP2 shards each replica over its ranks (but for TP)")
    parser.add_argument("--keep", type=pathlib.Path, help="keep the folders of failed runs here (default: a temporary folder)")
    arguments = parser.parse_args()
    if arguments.faults < 1:
        parser.error(f"--faults is {arguments.faults}; give at least 1")
    if arguments.out is not None and not arguments.out.parent.is_dir():
        parser.error(f"--out: there is no folder {arguments.out.parent}; make it, or give another place")
    kinds_of = GROUPS.get(arguments.only, tuple(KINDS))
    wanted = [kind for kind in kinds_of if (arguments.kinds or "") in kind]
    if not wanted:
        parser.error(f"--kinds: no kind has {arguments.kinds} in its name; there are {', '.join(kinds_of)}")
    kinds = [kind for kind in wanted if not why_not(kind)]
    if not kinds:
        parser.error(f"no kind can be had here: {why_not(wanted[0])}")
    if left_out := [f"{kind} ({why_not(kind)})" for kind in wanted if kind not in kinds]:
        print(f"left out: {', '.join(left_out)}")
    keep = arguments.keep or pathlib.Path(tempfile.gettempdir()) / "megatron-recover-failed"
    name = arguments.out.name if arguments.out is not None else "campaign.md"
    only = f"{f' ONLY={arguments.only}' if arguments.only else ''}{' FSDP=1' if arguments.fsdp2 else ''}"
    command = f"make campaign FAULTS={arguments.faults} SEED={arguments.seed}{only} OUT=docs/evidence/{name}"
    rows: list[Row] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a campaign that is told to end takes its run with it
    print(COLUMNS, flush=True)
    is_interrupted = False
    try:
        with (
            tempfile.TemporaryDirectory(prefix="megatron-recover-campaign-") as name,
            contextlib.ExitStack() as stack,
        ):
            campaign = Campaign(
                pathlib.Path(name), keep, lambda: stack.enter_context(nodes.cage()), fsdp2=arguments.fsdp2
            )  # fmt: skip
            for seed in _seeds(arguments.seed, rows, arguments.faults, kinds):
                rows.append(campaign.attempt(seed))
                print(rows[-1], flush=True)
                if arguments.out:
                    arguments.out.write_text(document(rows, command))
    except KeyboardInterrupt:
        is_interrupted = True
        print(f"interrupted in the run of seed {seed}")
    print(totals(rows))
    return CTRL_C_CODE if is_interrupted else int(not all(row.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
