"""The judge of the campaign fails a run in which what is lost does not come back as promised: each promise, broken by hand."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_recover.cluster.status import Answer
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.faults import Fault, FaultKind, FaultPoint
from tests.system import comeback_judging, comebacks, evidence, judging
from tests.system.evidence import Evidence
from tests.system.jobs import Job, Outcome
from tests.system.joining_pretrain import ACTS, Act
from tests.system.kills import Kills
from tests.system.plans import Scenario
from tests.system.strikes import RANK

JOB = Job(heal="in-place", steps=30)
THREE = dataclasses.replace(JOB, replicas=3)
DEATH = Fault(replica=1, rank=0, point=FaultPoint.REDUCE, step=1)
SCALED_TO_3 = "megatron-recover: scale to 3 of ann@n1: 2 replicas are formed while the others train"
SAID = "no newcomer is formed on node 0: slot 1: set aside for 600 s"
Event = dict[str, Any]


def struck(replica: int, kind: str = "kill", t: float = 1.0) -> Event:
    return {"event": "fault", "replica": replica, "rank": 0, "step": 1, "kind": kind, "point": "reduce", "t": t}


def generation(number: int, *roster: int, lost: tuple[int, ...] = (), joins: tuple[int, ...] = (), **others: Any) -> Event:
    losses = [{"replica": replica, "kind": "died"} for replica in lost]
    return {"event": "generation", "generation": number, "roster": roster, "losses": losses, "newcomers": joins, "left": (),
            "t": float(number)} | others  # fmt: skip


def committed(label: int, t: float) -> Event:
    return {"event": "committed", "replica": 0, "label": f"train {label}", "t": t}


def applied(replica: int, digest: str) -> Event:
    return {"event": "applied", "replica": replica, "rank": 0, "label": "train 3", "parameter_digest": digest, "t": 3.0}


@dataclasses.dataclass
class Made:
    """A run that is made up."""

    plan: Scenario
    trace: list[Event]
    acts: tuple[str, ...] = ()
    killed: tuple[str, ...] = ()
    exit_code: int = 0
    output: str = ""
    steps: int = 30
    latest: int = 30
    pids: tuple[int, ...] = ()
    reports: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    refused: list[str] = dataclasses.field(default_factory=list)
    """Why the job refuses requests."""

    def verdict(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        run, save = folder / "run", folder / "save"
        run.mkdir()
        save.mkdir()
        (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in self.trace))
        (run / "summary.json").write_text(json.dumps({"steps": self.steps}))
        (run / ACTS).write_text("".join(f"{act}\n" for act in self.acts))
        (save / judging.TRACKER).write_text(str(self.latest))
        for number, pid in enumerate(self.pids):
            (run / f"pid.{number}.0").write_text(str(pid))

        def check(run_dir: Path, against: Path | None = None) -> tuple[int, str]:
            name = "alone" if against is None else "against" if run_dir == run else "resumed"
            return self.reports.get(name, (0, "all holds"))

        answers = [Answer("i", why) for why in self.refused]
        monkeypatch.setattr(comeback_judging.status, "read", lambda run_dir: SimpleNamespace(answers=answers))
        for module in (judging, evidence):
            monkeypatch.setattr(module, "check", check)
        return judging.judge(
            Evidence(
                self.plan, Outcome(self.exit_code, self.output, run, ""), folder / "reference", killed=self.killed,
                save=save if self.plan.saves else None, resume=lambda: Outcome(0, "", folder / "again", ""),
            )
        )  # fmt: skip


ENOUGH = [committed(label, 2.0 + 3 * label) for label in range(1, 31)]


def came_back(kind: str = "comeback", **fields: Any) -> Made:
    """Replica 1 is lost, 2 comes."""
    plan = Scenario(kind=kind, job=JOB, faults=(DEATH,), **fields)
    trace = [
        generation(1, 0, 1), struck(1), generation(2, 0, lost=(1,)), {"event": "fenced", "replica": 1, "t": 2.0},
        generation(3, 0, 2, joins=(2,)), {"event": "proven", "generation": 3, "newcomers": (2,), "t": 3.5},
        applied(0, "a"), applied(2, "a"), *ENOUGH,
    ]  # fmt: skip
    return Made(plan, trace)


def killed_at_any_time() -> Made:
    """As `came_back`; the kill came from outside."""
    made = came_back("kills at any time", kills=Kills(number=1, after_s=(0.0, 1.0), seed=1))
    made.plan, made.killed = dataclasses.replace(made.plan, faults=()), ("1.0",)
    made.trace.remove(struck(1))
    return made


def all_replaced() -> Made:
    made = came_back(
        "all replaced", acts=(Act(Fault(replica=2, rank=0, point=FaultPoint.AFTER_VOTE, occurrence=2), "kill 0 0"),)
    )
    made.acts = ("2.0 in after_vote: kill 0 0",)
    made.trace += [generation(4, 2, lost=(0,)), generation(5, 2, 3, joins=(3,))]
    return made


def used_up() -> Made:
    """Of four newcomers none comes."""
    raising = tuple(Fault(replica=2 + number, rank=0, point=FaultPoint.FORM, kind=FaultKind.RAISE) for number in range(4))
    plan = Scenario(kind="spare slots", job=JOB, faults=(DEATH, *raising), missing=1)
    newcomers = [
        event for number in range(4)
        for event in ({"event": "forming", "newcomer": 2 + number, "t": 2.0}, struck(2 + number, "raise"))
    ]  # fmt: skip
    return Made(plan, [generation(1, 0, 1), struck(1), generation(2, 0, lost=(1,)), *newcomers, *ENOUGH], output=SAID)


def drained() -> Made:
    """Replica 0 of three is drained while 3 forms in place of 1."""
    at = Fault(replica=3, rank=0, point=FaultPoint.FORM)
    plan = Scenario(kind="drain beside a newcomer", job=THREE, faults=(DEATH,), acts=(Act(at, "drain 0"),), missing=1)
    trace = [
        generation(1, 0, 1, 2), struck(1), generation(2, 0, 2, lost=(1,)), generation(3, 2, left=(0,)),
        generation(4, 2, 3, joins=(3,)), *ENOUGH,
    ]  # fmt: skip
    return Made(plan, trace, acts=("3.0 in form: drain 0",))


def stopped() -> Made:
    at = Fault(replica=2, rank=0, point=FaultPoint.FORM)
    plan = Scenario(kind="end beside a newcomer", job=JOB, faults=(DEATH,), acts=(Act(at, "term"),), saves=True)
    saved = {"event": "checkpoint", "iteration": 4, "phase": "finished", "replica": 0, "rank": 0, "t": 4.0}
    trace = [generation(1, 0, 1), struck(1), generation(2, 0, lost=(1,)), generation(3, 0, reason="SIGTERM"), saved]
    return Made(plan, trace, acts=("2.0 in form: term",), exit_code=ExitCode.INTERRUPTED, latest=4)


def scaled() -> Made:
    """Two replicas grow to three while 1 is lost, and shrink to one."""
    acts = tuple(
        Act(Fault(replica=0, rank=0, point=FaultPoint.OPTIMIZER, step=step), f"scale {number}")
        for step, number in ((1, 3), (2, 1))
    )  # fmt: skip
    plan = Scenario(kind="scale", job=JOB, faults=(DEATH,), acts=acts, full=3)
    trace = [
        generation(1, 0, 1), struck(1), generation(2, 0, lost=(1,)), generation(3, 0, 2, 3, joins=(2, 3)),
        {"event": "applied", "replica": 0, "rank": 0, "step": 2, "label": "train 2", "parameter_digest": "a", "t": 3.5},
        generation(4, 0, left=(2, 3)), *ENOUGH,
    ]  # fmt: skip
    said = f"{SCALED_TO_3}\nmegatron-recover: scale to 1 of ann@n1: replicas 2 and 3 leave after a common step\n"
    return Made(plan, trace, acts=("0.0 in optimizer: scale 3", "0.0 in optimizer: scale 1"), output=said)


def saved() -> Made:
    return came_back("comeback between saves", saves=True)


def heals() -> Made:
    """A plain job that heals; its newcomer did not come in time."""
    made = came_back("faults in steps")
    without(3)(made)
    made.trace = [event for event in made.trace if event["event"] not in ("proven", "applied")]
    return made


MADE = (came_back, killed_at_any_time, all_replaced, used_up, drained, scaled, stopped, saved, heals)


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_a_run_that_keeps_its_promises_passes(
    make: Callable[[], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    assert made.verdict(tmp_path, monkeypatch) == "passed"


def traced(*events: Event) -> Callable[[Made], None]:
    return lambda made: made.trace.extend(events)


def changed(**fields: Any) -> Callable[[Made], None]:
    return lambda made: [setattr(made, name, value) for name, value in fields.items()] and None


def without(*numbers: int) -> Callable[[Made], None]:
    """Without these generations."""

    def alter(made: Made) -> None:
        made.trace = [event for event in made.trace if event["event"] != "generation" or event["generation"] not in numbers]

    return alter


def refuses(why: str) -> Callable[[Made], None]:
    return lambda made: made.refused.append(why)


BROKEN = (ExitCode.INVARIANT_VIOLATED, "PROBLEM: both runs are exact, but the parameters differ")
CASES: dict[str, tuple[Callable[[], Made], Callable[[Made], None], str]] = {
    "it ends with a code": (came_back, changed(exit_code=13), "exit code 13"),
    "it makes too few steps": (came_back, changed(steps=29), "29 steps"),
    "its parameters are others": (came_back, changed(reports={"against": BROKEN}), "parameters differ"),
    "a newcomer's parameters are others": (came_back, traced(applied(2, "b")), "parameters differ after train 3"),
    "an outsider's loss makes a generation": (came_back, traced(generation(4, 0, 2, lost=(3,))), "losses of [3]"),
    "a loss after it was turned away makes one": (
        came_back,
        lambda made: made.trace.extend((
            generation(4, 0, 2, 3, joins=(3,)), {"event": "turned_away", "generation": 4, "newcomers": (3,), "t": 4.0},
            generation(5, 0, 2, lost=(3,)),
        )),
        "losses of [3]",
    ),
    "a generation follows from nothing": (came_back, traced(generation(4, 0, 2)), "follows from nothing"),
    "an innocent member is removed": (came_back, traced(generation(4, 2, lost=(0,))), "removed were [0, 1], hit [1]"),
    "an innocent newcomer is removed": (came_back, traced(generation(4, 0, lost=(2,))), "removed were [1, 2], hit [1]"),
    "nobody comes": (came_back, without(3), "only [0]"),
    "one is turned away": (
        came_back, traced({"event": "turned_away", "generation": 3, "newcomers": (2,), "t": 3.0}), "only [0]"
    ),
    "too many come": (came_back, traced(generation(4, 0, 2, 3, joins=(3,))), "more than 2"),
    "kills: nobody comes": (killed_at_any_time, without(3), "only [0]"),
    "kills: an innocent is removed": (killed_at_any_time, traced(generation(4, 2, lost=(0,))), "removed were [0, 1], hit [1]"),
    "all replaced: one stays": (all_replaced, without(4, 5), "[0] are left"),
    "spares: nobody is told": (used_up, changed(output=""), "nobody says"),
    "spares: it forms more": (used_up, traced({"event": "forming", "newcomer": 6, "t": 2.0}), "formed were [2, 3, 4, 5, 6]"),
    "spares: one comes": (used_up, traced(generation(3, 0, 6, joins=(6,))), "more than 1"),
    "drain: nobody leaves": (drained, without(3), "drained was [0]"),
    "drain: it comes back": (drained, traced(generation(5, 2, 3, 4, joins=(4,))), "more than 2"),
    "drain: the newcomer does not come": (drained, without(4), "only [2]"),
    "scale: nobody leaves": (scaled, without(4), "wanted were 1"),
    "scale: one is too many": (scaled, traced(generation(5, 0, 4, 5, 6, joins=(4, 5, 6))), "more than 3"),
    "scale: one leaves unasked": (
        scaled, lambda made: made.trace.insert(4, generation(3, 0, left=(2,))), "[2, 2, 3] have left, and 2 were too many"
    ),
    "scale: it does not answer": (scaled, changed(output=SCALED_TO_3), "asked for was 3, 1, and 1 were answered"),
    "scale: it refuses": (scaled, refuses("there are slots for 2 replicas; ask for 2 or fewer"), "refuses to scale: there are"),
    "scale: an innocent is lost": (
        scaled, lambda made: made.trace.insert(4, generation(3, 2, 3, lost=(0,))), "removed were [0, 1], hit [1]"
    ),
    "heals: it has more": (heals, traced(generation(4, 0, 2, 3, joins=(2, 3))), "[0, 2, 3], more than 2"),
    "heals: an innocent is removed": (heals, traced(generation(4, 2, lost=(0,))), "removed were [0, 1], hit [1]"),
    "stop: it ends with another code": (stopped, changed(exit_code=0), "exit code 0"),
    "stop: it ends unasked": (stopped, changed(acts=()), "exit code 15"),
    "stop: it saves nothing": (stopped, lambda made: made.trace.pop() and None, "saved nothing"),
    "stop: resumed, it ends otherwise": (stopped, changed(reports={"resumed": BROKEN}), "parameters differ"),
    "saves: the last is not named": (saved, changed(latest=28), "newest checkpoint is 28"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_breaks_a_promise_fails(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, alter, wrong = CASES[name]
    made = make()
    alter(made)
    verdict = made.verdict(tmp_path, monkeypatch)
    assert verdict.startswith("FAILED: ") and wrong in verdict


def test_who_had_no_time_need_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = came_back()
    without(3)(made)
    made.trace = [event for event in made.trace if event["event"] != "committed" or event["t"] < 20]
    assert made.verdict(tmp_path, monkeypatch) == "passed"


def test_a_rank_that_is_left_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        f"from megatron_recover.cluster.rank_process import set_process_name; set_process_name('{RANK}2.0'); "
        "print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None and rank.stdin is not None and rank.stdout.readline()
        made = came_back()
        made.pids = (rank.pid,)
        verdict = made.verdict(tmp_path, monkeypatch)
        rank.stdin.close()
    assert verdict == "FAILED: 0.0 lives"


def test_each_kind_with_comebacks_is_judged() -> None:
    made = {plan.kind for make in MADE if (plan := make().plan).kind in comebacks.KINDS}
    ordinary = {kind for kind in comebacks.KINDS if judging.EXPECTATIONS[kind] == judging.COMEBACK}
    assert made | ordinary == set(comebacks.KINDS)
