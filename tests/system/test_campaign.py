"""What the campaign would run: every point, kind and shape comes up, and every scenario is one that a job can take."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_recover.cluster import chaos
from megatron_recover.faults import NEWCOMER_ONLY, FaultKind, FaultPoint
from tests.system import campaign, jobs
from tests.system.judging import EXPECTATIONS
from tests.system.placing import placement
from tests.system.plans import (
    CHARGED,
    MAX_PROCESSES,
    MISCOUNTING,
    NARROW,
    OVERLAP,
    PATIENT,
    PLAIN,
    SILENT,
    STRUCK,
    UNEVEN,
)  # fmt: skip
from tests.system.scenarios import KINDS, scenario
from tests.system.strikes import StrikeKind

SEEDS = range(1, 401)


def test_scenarios_are_a_function_of_their_seed() -> None:
    assert [scenario(seed) for seed in SEEDS] == [scenario(seed) for seed in SEEDS]
    assert len({str(scenario(seed)) for seed in SEEDS}) > 50


def test_every_scenario_is_one_that_a_job_can_take() -> None:
    for seed in SEEDS:
        plan = scenario(seed)
        num_ranks = plan.job.tp * plan.job.pp * plan.job.lanes
        assert plan.job.replicas * num_ranks <= MAX_PROCESSES
        target = chaos.Target(
            num_replicas=plan.job.replicas, num_ranks=num_ranks, num_microbatches=plan.job.microbatches,
            num_steps=plan.job.steps,
        )  # fmt: skip
        assert chaos.parse(chaos.render(plan.faults, ""), target) == plan.faults
        hit = Counter(fault.replica for fault in plan.faults if fault.kind is not FaultKind.SLOW)
        assert hit or plan.others, "nothing happens"
        assert max(hit.values(), default=0) <= 1 and len(hit) < plan.job.replicas, "nobody is left for certain"
        assert plan.strike is None or plan.strike.at.replica not in hit, "nobody is left to ask for the strike"
        assert plan.spared not in {*hit, *plan.lost}
        charged = [fault for fault in plan.faults if fault.kind in CHARGED]
        assert len(charged) <= 1, "two of these over one microbatch end a job (INV-9)"


def test_scenarios_share_the_references_that_they_can() -> None:
    """A reference costs as much as a run. Where replicas differ in what they wait for and compare, it is the same."""
    plans = [scenario(seed) for seed in SEEDS if scenario(seed).job.determinism == "exact"]
    extra = {flag for plan in plans for flag in plan.reference().extra if flag.startswith("--")}
    assert not {flag for flag in extra if flag.startswith("--recover")} | {OVERLAP} & extra
    assert len({plan.reference() for plan in plans}) < 0.8 * len(plans)


def test_everything_comes_up() -> None:
    plans = [scenario(seed) for seed in SEEDS]
    faults = [fault for plan in plans for fault in plan.faults]
    assert {fault.point for fault in faults} == {*FaultPoint} - NEWCOMER_ONLY
    assert {fault.kind for fault in faults} == set(FaultKind)
    assert {(fault.point, fault.kind) for fault in faults} >= {
        (point, FaultKind.FREEZE) for point in (FaultPoint.REDUCE, FaultPoint.PROMISE, FaultPoint.IN_VOTE)
    }
    assert {plan.kind for plan in plans} == set(KINDS) == set(EXPECTATIONS), "the judge knows what is promised for each kind"
    assert {plan.script for plan in plans} == {PLAIN, PATIENT, UNEVEN, STRUCK, SILENT, MISCOUNTING}
    strikes = [plan.strike for plan in plans if plan.strike is not None]
    assert {strike.kind for strike in strikes} == set(StrikeKind)
    full = {(strike.seconds is None, plan.job.module == NARROW) for plan in plans
            if (strike := plan.strike) is not None and strike.kind is StrikeKind.FULL}  # fmt: skip
    assert full == {(True, True), (True, False), (False, True), (False, False)}
    on_nodes = [plan for plan in plans if plan.slots]
    assert {strike.kind for plan in on_nodes if (strike := plan.strike)} == {StrikeKind.LOSS, StrikeKind.CUT}
    placed = [placement(plan.job, plan.slots) for plan in on_nodes]
    assert {max(len(each.nodes_of(replica)) for replica in range(len(each.replicas))) for each in placed} >= {1, 2}
    assert {0, 1, 2} <= {len(plan.lost) for plan in on_nodes} and {plan.saves for plan in on_nodes} == {True, False}
    assert {len(plan.slots) for plan in on_nodes} == {2, 3} and any(plan.faults for plan in on_nodes)
    drifts = [(plan.drift.what, plan.job.replicas > 2) for plan in plans if plan.drift is not None]
    assert {what for what, _ in drifts} == {"exp_avg", "exp_avg_sq", "weight", "buffer"}
    assert {has_majority for _, has_majority in drifts} == {True, False}
    assert {plan.job.pp for plan in plans} == {1, 2, 4} and {plan.job.tp for plan in plans} == {1, 2}
    assert {plan.job.lanes for plan in plans} == {1, 2} and {plan.job.determinism for plan in plans} == {"fast", "exact"}
    flags = {flag for plan in plans for flag in plan.job.extra}
    assert flags >= {
        OVERLAP, "--bf16", "--use-distributed-optimizer", "--calculate-per-token-loss",
        "--num-layers-per-virtual-pipeline-stage",
    }  # fmt: skip


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As started from a terminal; and what a campaign does about signals ends with it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_is_answered_with_the_totals_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Some:
        def __init__(self, folder: Path, keep: Path, stack: object) -> None:
            self.folder = folder

        def attempt(self, seed: int) -> object:
            if seed == 7:
                folders.append(self.folder)
                os.kill(os.getpid(), signal.SIGINT)
            return SimpleNamespace(seed=seed, passed=seed != 6, num_struck=1)

    folders: list[Path] = []
    monkeypatch.setattr(campaign, "Campaign", Some)
    monkeypatch.setattr(sys, "argv", ["campaign", "--seed", "5", "--keep", str(tmp_path)])
    assert campaign.main() == 130
    assert capsys.readouterr().out.splitlines()[-2:] == ["interrupted in the run of seed 7", "1 passed, 1 failed"]
    assert not folders[0].exists()


@pytest.mark.usefixtures("interruptible")
def test_a_reference_that_fails_fails_its_run_and_is_kept_and_made_again_for_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two runs with one reference, which cannot be run at all the first time."""
    made: list[Path] = []

    def run_job(job: jobs.Job, run_dir: Path, *args: object, **more: object) -> jobs.Outcome:
        run_dir.mkdir()
        made.append(run_dir)
        return jobs.Outcome(-6 if len(made) == 1 else 0, "double free", run_dir, "the command")

    plan = scenario(next(seed for seed in range(1, 99) if scenario(seed).job.determinism == "exact"))
    monkeypatch.setattr(campaign, "text_data", lambda folder: folder)
    monkeypatch.setattr(campaign, "run_job", run_job)
    monkeypatch.setattr(campaign, "scenario", lambda seed: replace(plan, slots=(), strike=None))
    monkeypatch.setattr(campaign, "judge", lambda evidence: "passed")
    monkeypatch.setattr(campaign, "Row", lambda *given: SimpleNamespace(passed=given[-1] == "passed", verdict=given[-1]))
    folder, keep = tmp_path / "campaign", tmp_path / "keep"
    folder.mkdir()
    runs = campaign.Campaign(folder, keep, pytest.fail)
    assert runs.attempt(1).verdict.startswith("FAILED") and len(made) == 1
    [kept] = keep.iterdir()
    assert (kept / "reference").is_dir()
    assert runs.attempt(2).passed and runs.attempt(3).passed
    assert [each.name for each in made] == ["reference", "reference", "run", "run"]


def test_kinds_that_cannot_be_had_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Some:
        def __init__(self, *_: object) -> None:
            pass

        def attempt(self, seed: int) -> object:
            kinds.add(scenario(seed).kind)
            return SimpleNamespace(seed=seed, passed=True, num_struck=1)

    kinds: set[str] = set()
    on_nodes = {kind for kind in KINDS if "node" in kind or "cut" in kind}
    monkeypatch.setattr(campaign, "Campaign", Some)
    monkeypatch.setattr(campaign.nodes, "why_not", lambda: "no ip")
    monkeypatch.setattr(sys, "argv", ["campaign", "--faults", "100", "--keep", str(tmp_path)])
    assert campaign.main() == 0
    assert not kinds & on_nodes and len(kinds) > 5
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert all(f"{kind} (no ip)" in line for kind in on_nodes)
    monkeypatch.setattr(sys, "argv", ["campaign", "--kinds", "cut"])
    with pytest.raises(SystemExit, match="2"):
        campaign.main()
    assert "no ip" in capsys.readouterr().err


TOLD = """\
import os, pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.kill(os.getppid(), signal.SIGINT)
signal.sigwait({signal.SIGTERM})
pathlib.Path(sys.argv[1]).touch()
"""


@pytest.mark.usefixtures("interruptible")
def test_a_run_of_a_campaign_that_is_interrupted_is_told_to_end_and_waited_for(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        jobs._run([sys.executable, "-c", TOLD, str(tmp_path / "told")], 60.0, "")
    assert (tmp_path / "told").exists()
