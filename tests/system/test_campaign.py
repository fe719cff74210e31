"""What the campaign would run: every point, kind and shape comes up, and every scenario is one that a job can take."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from megatron_recover.cluster import chaos
from megatron_recover.config import RecoverConfig
from megatron_recover.core import slots
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.core.placement import Slot
from megatron_recover.faults import Fault, FaultKind, FaultPoint
from tests.system import campaign, comebacks, jobs, kills, scenarios
from tests.system.joining_pretrain import ORDERS, Orders
from tests.system.judging import EXPECTATIONS, expectations_of
from tests.system.placing import hosted, placement
from tests.system.plans import (
    CHARGED,
    JOINING,
    MAX_PROCESSES,
    MISCOUNTING,
    NARROW,
    OVERLAP,
    PATIENT,
    PLAIN,
    SILENT,
    STRUCK,
    UNEVEN,
    Scenario,
)  # fmt: skip
from tests.system.scenarios import KINDS
from tests.system.strikes import StrikeKind

SEEDS = range(1, 1001)
scenario = functools.cache(scenarios.scenario)


def test_scenarios_are_a_function_of_their_seed() -> None:
    assert [scenarios.scenario(seed) for seed in SEEDS] == [scenario(seed) for seed in SEEDS]
    assert len({str(scenario(seed)) for seed in SEEDS}) > 50


def test_every_scenario_is_one_that_a_job_can_take() -> None:
    for seed in SEEDS:
        plan = scenario(seed)
        num_ranks = plan.job.tp * plan.job.pp * plan.job.lanes
        assert plan.job.replicas * num_ranks <= MAX_PROCESSES
        target = chaos.Target(
            num_replicas=plan.job.replicas, num_ranks=num_ranks, num_microbatches=plan.job.microbatches,
            num_steps=plan.job.steps, heals=plan.heals,
        )  # fmt: skip
        faults = (*plan.faults, *plan.never())
        assert chaos.parse(chaos.render(faults, ""), target) == faults


def test_with_fsdp2_a_job_has_as_many_ranks_and_what_megatron_takes() -> None:
    layouts = set()
    for seed in SEEDS:
        plain, plan = scenario(seed), scenario(seed, fsdp2=True)
        job, extra = plan.job, plan.job.extra
        assert job.pp == 1 and job.tp * job.lanes == plain.job.tp * plain.job.pp * plain.job.lanes
        assert {*jobs.FSDP2} <= {*extra} and ("torch_dcp" in extra) is plan.saves and not (plan.saves and job.tp > 1)
        assert not {"--use-distributed-optimizer", "--num-layers", "--num-layers-per-virtual-pipeline-stage"} & {*extra}
        assert plan.reference().extra[-1] == extra[-1] and "fsdp2" in str(plan)
        same = {"slots": plain.slots, "strike": plain.strike, "faults": plain.faults} if plan.slots else {}  # others fit
        assert replace(plan, job=plain.job, step_s=plain.step_s, **same) == plain
        assert not plan.comes_back or 20 < comebacks.STEPS * plan.step_s < 40, "there is time for several joins"
        layouts.add((job.tp, job.lanes))
    assert {(1, 1), (1, 2), (1, 4), (2, 2)} <= layouts


@pytest.mark.parametrize("fsdp2", [False, True])
def test_the_node_that_is_struck_is_the_one_that_the_kind_is_named_after(fsdp2: bool) -> None:
    """Where ranks are depends on the tensor-parallel size, which is another one where replicas are sharded."""
    for plan in (scenario(seed, fsdp2=True) if fsdp2 else scenario(seed) for seed in SEEDS):
        if not plan.slots or plan.strike is None:
            continue
        placed, node = placement(plan.job, plan.slots), plan.strike.node
        writers, has_ranks = placed.replicas[0][0].node, bool(hosted(placed, node))
        assert len(hosted(placed, node)) < plan.job.replicas, "nobody is left"
        assert {
            "lost node": node > 0 and has_ranks,
            "lost node of the writer": node == writers > 0,
            "lost node of the coordinator": node == 0,
            "short cut": True,
            "long cut": node > 0 and has_ranks,
        }[plan.kind], f"{plan}: {plan.strike}"
        assert {fault.replica for fault in plan.faults}.isdisjoint(plan.lost), "the fault would not strike"
        in_save = plan.strike.at.point in (FaultPoint.CHECKPOINT, FaultPoint.CHECKPOINT_TRACKER)
        assert not in_save or plan.kind == "lost node of the writer" or node == writers


def test_every_scenario_leaves_somebody() -> None:
    """Where what is lost stays away."""
    for plan in (plan for seed in SEEDS if not (plan := scenario(seed)).comes_back):
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
    assert {fault.point for fault in faults} == {*FaultPoint}
    assert {fault.kind for fault in faults} == set(FaultKind)
    assert {(fault.point, fault.kind) for fault in faults} >= {
        (point, FaultKind.FREEZE) for point in (FaultPoint.REDUCE, FaultPoint.PROMISE, FaultPoint.IN_VOTE)
    }
    assert {plan.kind for plan in plans} == set(KINDS) == set(EXPECTATIONS), "the judge knows what is promised for each kind"
    assert {plan.script for plan in plans} == {PLAIN, PATIENT, UNEVEN, STRUCK, SILENT, MISCOUNTING, JOINING}
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


# --- Kinds in which what is lost comes back ---------------------------------------------------------------------------------

HEALING = [plan for seed in SEEDS if (plan := scenario(seed)).comes_back]


def of_kind(kind: str) -> list[Scenario]:
    found = [plan for plan in HEALING if plan.kind == kind]
    assert found
    return found


def newcomers(plan: Scenario) -> list[Fault]:
    return [fault for fault in plan.faults if fault.replica >= plan.job.replicas]


def test_whatever_comes_back_is_of_a_kind_of_its_own() -> None:
    assert {plan.kind for plan in HEALING} == set(comebacks.KINDS)
    for plan in HEALING:
        assert plan.script == JOINING and plan.job.steps == comebacks.STEPS and plan.reference().heal == "off"
        orders = msgspec.json.decode(plan.environment()[ORDERS], type=Orders)
        assert orders.acts == plan.acts and orders.microbatches == plan.job.microbatches
        passes = plan.job.microbatches / max(1, plan.job.replicas - 1)
        in_all_s = comebacks.STEPS * plan.step_s * (passes + plan.job.pp - 1) / passes
        assert 20 < in_all_s < 40, "there is time for several joins, and the campaign does not wait for ever"
    assert len({plan.reference() for plan in HEALING}) < 0.4 * len(HEALING)


def test_a_share_of_the_plain_jobs_heals_as_jobs_of_users_do_and_is_judged_for_that() -> None:
    plain = [plan for seed in SEEDS if not (plan := scenario(seed)).comes_back]
    healing = [plan for plan in plain if plan.heals]
    assert {plan.script for plan in healing} == {PLAIN} and not any(plan.strike for plan in healing)
    assert {plan.kind for plan in healing} == {plan.kind for plan in plain if plan.script == PLAIN}
    assert 0.3 < len(healing) / sum(plan.script == PLAIN for plan in plain) < 0.7
    for plan in healing:
        assert {*EXPECTATIONS[plan.kind]} < {*expectations_of(plan)} and plan.reference().heal == "off"
        assert ORDERS not in plan.environment() and "heals" in str(plan)
        off = replace(plan, job=replace(plan.job, heal="off"))
        assert expectations_of(off) == EXPECTATIONS[plan.kind]
    assert all(expectations_of(plan) == EXPECTATIONS[plan.kind] for plan in HEALING)
    assert {plan.job.heal for plan in healing} == {RecoverConfig().heal}, "as without a flag"


def test_whoever_heals_has_a_member_with_the_state_at_any_time() -> None:
    """Without acts nobody but one member of the start is hit at most; who acts is a member when the last of the start dies."""
    for plan in HEALING:
        faults = [fault.replica for fault in plan.faults if fault.replica < plan.job.replicas]
        killed = [int(act.do.split()[1]) for act in plan.acts if act.do.startswith(("kill", "drain"))]
        assert len({*faults, *killed}) == len(faults) + len(killed), "each once"
        assert faults or plan.kills is not None
        if len(faults) + len(killed) < plan.job.replicas:
            continue
        assert plan.kind == "all replaced" and plan.spared is None
        points = [(act.at.replica, act.at.point, act.at.occurrence >= 2) for act in plan.acts]
        assert points == [(plan.job.replicas + number, FaultPoint.AFTER_VOTE, True) for number in range(len(points))]
    assert all(plan.spared is not None for plan in HEALING if plan.kills is not None)


def test_newcomers_die_in_every_phase() -> None:
    kills = FaultKind.KILL, FaultKind.STOP
    outside = {(fault.point, fault.kind) for plan in of_kind("death before admission") for fault in newcomers(plan)}
    assert outside == {(point, kind) for point in comebacks.OUTSIDE for kind in kills}
    assert max(len(newcomers(plan)) for plan in of_kind("death before admission")) == 3
    inside = {fault.point for plan in of_kind("death in a first step") for fault in newcomers(plan)}
    assert inside == {*comebacks.INSIDE} and FaultPoint.ADMITTED in inside
    for plan in of_kind("death after admission"):
        [fault] = newcomers(plan)
        assert fault.occurrence > 1, "its first step is committed"
        assert all(act.at.occurrence < fault.occurrence for act in plan.acts), "it acts before it dies"
    assert {bool(plan.acts) for plan in of_kind("death after admission")} == {True, False}


def test_others_die_while_a_newcomer_is_on_its_way() -> None:
    plans = of_kind("death beside a newcomer")
    points = {act.at.point for plan in plans for act in plan.acts}
    assert points >= {FaultPoint.FORM, FaultPoint.STATE_READ, FaultPoint.CLAIM, FaultPoint.ADMITTED, FaultPoint.AFTER_VOTE}
    assert all(plan.job.replicas >= 3 for plan in plans), "one is left that has the state"
    for plan in of_kind("comeback of two at once"):
        first, second, *_ = plan.faults
        assert (first.point, first.step, first.occurrence) == (second.point, second.step, second.occurrence)
        assert plan.job.replicas >= 3


def test_spare_slots_are_used_up_or_not() -> None:
    """By hand: slots 0 and 1 of the lost replica, spare slot 2; rank 0 breaks in 0, 0 and then, with the spare one, in 1."""
    found = {(plan.job.pp, len(newcomers(plan)), plan.missing) for plan in of_kind("spare slots")}
    assert found == {(1, 2, 0), (1, 4, 1), (2, 2, 0), (2, 3, 1)}
    for pp, num_broken, missing in sorted(found):
        settings = slots.Settings(backoff_s=600.0, budget=3, patience_s=10.0, num_ranks=pp)
        places = [Slot(0, number) for number in range(pp + 1)]
        pasts = slots.gone(slots.seated({1: places[:pp]}, places[pp:]), 1)
        pasts = slots.lost(pasts, 1, LossKind.PROCESS_ENDED, "", settings, now_s=0.0)
        for number in range(num_broken):
            [newcomer] = slots.plan(pasts, wanted=1, settings=settings, now_s=1.0).newcomers
            pasts = slots.taken(pasts, 2 + number, newcomer.slots)
            pasts = slots.lost(pasts, 2 + number, LossKind.SUSPECTED, "raised", settings, now_s=1.0, rank=0)
            pasts = slots.gone(pasts, 2 + number)
        assert len(slots.plan(pasts, wanted=1, settings=settings, now_s=1.0).newcomers) == 1 - missing


def test_jobs_are_scaled_both_ways_while_members_and_newcomers_die() -> None:
    plans, orders = of_kind("scale"), set()
    for plan in plans:
        start, num_ranks = plan.job.replicas, plan.job.tp * plan.job.pp * plan.job.lanes
        assert plan.job.run_flags == ("--spares", str(num_ranks)), "there is room for one more replica"
        requests = [(act.at, int(act.do.split()[1])) for act in plan.acts if act.do.startswith("scale")]
        numbers = [start, *(number for _, number in requests)]
        assert max(numbers) * num_ranks <= MAX_PROCESSES and min(numbers) >= 1 and max(numbers) in (start, start + 1)
        assert {at.replica for at, _ in requests} == {0} and plan.spared == 0, "who asks is never hit, and does not leave"
        orders.add(tuple((after > before) - (after < before) for before, after in zip(numbers, numbers[1:], strict=False)))
        assert plan.full == max(numbers) and plan.faults and plan.missing == 0
    assert orders == {(1, -1), (-1, 1)}
    assert any(newcomers(plan) for plan in plans) and any(act.do.startswith("kill") for plan in plans for act in plan.acts)


def test_requests_come_while_a_newcomer_forms() -> None:
    assert {plan.missing for plan in of_kind("drain beside a newcomer")} == {1}
    assert all(plan.acts[0].do.startswith("drain") for plan in of_kind("drain beside a newcomer"))
    assert all(plan.acts[0].do == "term" and plan.saves for plan in of_kind("end beside a newcomer"))
    for plan in of_kind("comeback between saves"):
        assert plan.saves and plan.job.save_interval == 4 and plan.job.eval_interval == 3 and plan.job.steps % 4 == 0


def test_kills_at_any_time_are_those_of_the_seed_and_spare_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill_all() -> list[str]:
        (tmp_path / "events.jsonl").write_text('{"event":"applied"}\n')
        with kills.Killer(kills.Kills(number=3, after_s=(0.0, 0.01), seed=5), tmp_path, spared=1) as killer:
            until = time.monotonic() + 20
            while len(killer.killed) < 3 and time.monotonic() < until:
                time.sleep(0.01)
        return killer.killed

    class Process:
        def __init__(self, pid: int) -> None:
            self.pid = pid

        def kill(self) -> None:
            ended.add(self.pid)

    for replica in range(4):
        (tmp_path / f"pid.{replica}.0").write_text(str(replica))
    (tmp_path / "pid.4.0").write_text("")  # not written yet
    ended: set[int] = set()
    monkeypatch.setattr(kills.psutil, "Process", Process)
    monkeypatch.setattr(kills, "is_rank", lambda process: process.pid not in ended)
    first = kill_all()
    assert sorted(first) == ["0.0", "2.0", "3.0"] and ended == {0, 2, 3}
    ended.clear()
    assert kill_all() == first


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
        def __init__(self, folder: Path, keep: Path, stack: object, **_: bool) -> None:
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
    monkeypatch.setattr(campaign, "scenario", lambda seed, **_: replace(plan, slots=(), strike=None))
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
        def __init__(self, *_: object, **__: bool) -> None:
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
