"""The judge of the campaign fails a run that does not do what is promised for its kind: each promise, broken by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.hybrid_clock import COUNTER_BITS
from megatron_recover.faults import Fault, FaultPoint
from tests.system import evidence, judging
from tests.system.evidence import Evidence
from tests.system.jobs import Job, Outcome
from tests.system.judging import judge
from tests.system.plans import Drift, Miscount, Scenario
from tests.system.scenarios import KINDS
from tests.system.strikes import Strike, StrikeKind

AT = Fault(replica=0, rank=0, point=FaultPoint.OPTIMIZER, step=1)
KILL = {"event": "fault", "replica": 1, "rank": 0, "step": 2, "kind": "kill", "point": "reduce"}
UNFINISHED = "all holds\nUNFINISHED: the trace has no run_finished"


def applied(replica: int, step: int, digest: str = "") -> dict[str, object]:
    return {
        "event": "applied", "replica": replica, "rank": 0, "generation": 1, "step": step - 1, "label": f"train {step}",
        "parameter_digest": digest or f"d{step}",
    }  # fmt: skip


def committed(replica: int, label: str) -> dict[str, object]:
    return {"event": "committed", "replica": replica, "label": label}


def checkpoint(iteration: int) -> dict[str, object]:
    return {"event": "checkpoint", "replica": 0, "rank": 0, "iteration": iteration, "phase": "finished"}


def generation(*losses: tuple[int, str]) -> dict[str, object]:
    return {"event": "generation", "losses": [{"replica": replica, "kind": kind} for replica, kind in losses]}


@dataclasses.dataclass
class Made:
    """A run that is made up: everything that the judge looks at, to be altered."""

    plan: Scenario
    folder: Path
    exit_code: int = 0
    output: str = ""
    steps: int = 6
    trace: list[dict[str, object]] = dataclasses.field(default_factory=list)
    kept: list[dict[str, object]] = dataclasses.field(default_factory=list)
    """Of replica 0, rank 0."""
    reports: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    """Of `check`: alone, against the reference, and of the resumed run against it."""
    latest: int = 0
    resumed: int = 0
    has_struck: bool = True
    codes: dict[int, int] = dataclasses.field(default_factory=dict)
    left: str = ""
    unfenced: str = ""
    mistakes: list[str] = dataclasses.field(default_factory=list)
    """Of `check` with what the ranks have kept."""

    def verdict(self, monkeypatch: pytest.MonkeyPatch) -> str:
        run, reference, again, copies, save = (self.folder / name for name in ("run", "reference", "again", "copies", "save"))
        for each in (run, reference, copies, save):
            each.mkdir(exist_ok=True)
        write(run / "events.jsonl", [event | {"t": 1.5} for event in self.trace])
        write(reference / "events.jsonl", [applied(0, step + 1) for step in range(12)])
        write(copies / "events.0.0", [event | {"t": 1.0} for event in self.kept])
        (run / "summary.json").write_text(json.dumps({"steps": self.steps}))
        (save / "latest_checkpointed_iteration.txt").write_text(str(self.latest))

        def check(run_dir: Path, against: Path | None = None) -> tuple[int, str]:
            assert against in (None, reference)
            name = "resumed" if run_dir == again else "alone" if against is None else "against"
            return self.reports.get(name, (0, "all holds"))

        monkeypatch.setattr(judging, "check", check)
        monkeypatch.setattr(evidence, "check", check)
        proven = SimpleNamespace(violations=[], problems=self.mistakes, not_judged=())
        monkeypatch.setattr(judging.verify, "check", lambda run_dir, against: proven)
        monkeypatch.setattr(judging, "_whole", lambda evidence: run)
        return judge(
            Evidence(
                self.plan, Outcome(self.exit_code, self.output, run, "", self.codes, self.left), reference,
                copies=copies if self.plan.strike is not None else None, save=save, has_struck=self.has_struck,
                unfenced=self.unfenced, resume=lambda: Outcome(self.resumed, "", again, ""),
            )
        )  # fmt: skip


def write(file: Path, events: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(event) + "\n" for event in events))


def in_steps(folder: Path) -> Made:
    return Made(Scenario(kind="faults in steps", job=Job()), folder)


def struck(folder: Path, name: str, kind: StrikeKind, seconds: float | None) -> Made:
    fault = Fault(replica=1, rank=0, point=FaultPoint.REDUCE, step=2)
    plan = Scenario(
        kind=name, job=Job(steps=12), faults=(fault,), strike=Strike(kind=kind, at=AT, seconds=seconds)
    )  # fmt: skip
    events = [KILL, *(applied(0, step + 1) for step in range(12))]
    return Made(plan, folder, steps=12, trace=[generation((1, "died")), *events], kept=events)


def stopped(folder: Path) -> Made:
    made = struck(folder, "stopped launcher and a death", StrikeKind.STOP, 4.0)
    made.output = "the launcher stood still for 4 s"
    return made


def stalled(folder: Path) -> Made:
    return struck(folder, "stalled disk", StrikeKind.STALL, 2.0)


def full(folder: Path) -> Made:
    """The trace ends after step 4 (counted from 0), and `check` says that it has no end."""
    made = struck(folder, "full disk", StrikeKind.FULL, None)
    made.trace, made.reports["against"] = made.trace[:7], (ExitCode.UNFINISHED, UNFINISHED)
    made.output = "WARNING: the trace cannot be written to"
    return made


def roomy(folder: Path) -> Made:
    """There was room again: events of steps 4 and 5 are missing, and `check` says so."""
    made = struck(folder, "full disk", StrikeKind.FULL, 0.3)
    made.trace = made.trace[:6] + made.trace[8:]
    told = "NOT JUDGED: events are missing, of replica 0 rank 0 (2): not judged are steps 4 to 5"
    made.reports["against"] = (ExitCode.UNFINISHED, told)
    made.output = "WARNING: 2 events of this run are lost so far"
    return made


def failing(folder: Path) -> Made:
    made = full(folder)
    made.plan = dataclasses.replace(
        made.plan, kind="failing disk", strike=Strike(kind=StrikeKind.FAIL, at=AT)
    )  # fmt: skip
    return made


def drifted(folder: Path, replicas: int = 2) -> Made:
    """After step 5, compared every 16 steps and before each second step is saved: in `save 6`."""
    drift = Drift(replica=1, rank=0, step=5, what="exp_avg", interval=16)
    made = Made(Scenario(kind="drift", job=Job(replicas=replicas, save_interval=2), drift=drift), folder)
    labels = ["train 4", "save 4", "train 5", "train 6"]
    made.trace = [committed(replica, label) for label in labels for replica in range(replicas)]
    if replicas == 2:
        made.exit_code, made.latest = ExitCode.DIVERGED, 4
        made.reports["against"] = (ExitCode.INVARIANT_VIOLATED, "the runs cannot be compared")
    else:
        made.trace += [committed(0, "save 6"), committed(2, "save 6"), generation((1, "diverged"))]
        made.latest = 6
    return made


def outvoted(folder: Path) -> Made:
    return drifted(folder, 3)


def miscounted(folder: Path) -> Made:
    made = Made(Scenario(kind="miscount", job=Job(), miscount=Miscount(replica=1, step=2)), folder)
    made.trace = [{"event": "miscounted", "replica": replica, "step": 2} for replica in (0, 1)]
    made.reports["against"] = (0, "computed anew: step 2, bucket 1: miscounted\nall holds")
    return made


def on_nodes(folder: Path, name: str, kind: StrikeKind, node: int, seconds: float | None, codes: list[int]) -> Made:
    """Three nodes with a replica each."""
    strike = Strike(kind=kind, at=AT, node=node, seconds=seconds)
    plan = Scenario(kind=name, job=Job(replicas=3, steps=12, save_interval=3), saves=True, slots=(1, 1, 1), strike=strike)
    events = [applied(0, step + 1) for step in range(12)]
    made = Made(plan, folder, steps=12, trace=list(events), kept=events, latest=12, codes=dict(enumerate(codes)))
    made.trace += [generation((replica, "died")) for replica in plan.lost]
    return made


def lost(folder: Path) -> Made:
    return on_nodes(folder, "lost node", StrikeKind.LOSS, 1, None, [0, -9, 0])


def lost_writer(folder: Path) -> Made:
    """The second checkpoint was named after the loss."""
    made = on_nodes(folder, "lost node of the writer", StrikeKind.LOSS, 1, None, [0, -9, 0])
    made.kept = [*made.kept, *(checkpoint(iteration) for iteration in (3, 6))]
    return made


def lost_coordinator(folder: Path) -> Made:
    made = on_nodes(folder, "lost node of the coordinator", StrikeKind.LOSS, 0, None, [-9, 13, 13])
    made.exit_code, made.reports["alone"] = -9, (ExitCode.UNFINISHED, UNFINISHED)
    made.latest = 9
    return made


def lost_coordinator_alone(folder: Path) -> Made:
    """No replica of two ranks fits on the first node."""
    made = lost_coordinator(folder)
    job = dataclasses.replace(made.plan.job, replicas=2, pp=2)
    made.plan, made.codes = dataclasses.replace(made.plan, job=job, slots=(1, 2, 2)), {0: -9, 1: 15, 2: 15}
    made.trace = made.trace[:12]
    return made


def lost_coordinator_at_the_end(folder: Path) -> Made:
    """All was trained and saved before the others learned of it: nothing is left for a run that resumes."""
    made = lost_coordinator_alone(folder)
    made.latest, made.codes = 12, {0: -9, 1: 0, 2: 0}
    made.reports["resumed"] = BROKEN
    return made


def cut_short(folder: Path) -> Made:
    return on_nodes(folder, "short cut", StrikeKind.CUT, 2, 0.5, [0, 0, 0])


def cut_long(folder: Path) -> Made:
    return on_nodes(folder, "long cut", StrikeKind.CUT, 2, 7.0, [0, 0, 0])


def cut_for_ever(folder: Path) -> Made:
    return on_nodes(folder, "long cut", StrikeKind.CUT, 2, None, [0, 0, 13])


def changed(**fields: object) -> Callable[[Made], None]:
    def alter(made: Made) -> None:
        for name, value in fields.items():
            setattr(made, name, value)

    return alter


def traced(*events: dict[str, object]) -> Callable[[Made], None]:
    return lambda made: made.trace.extend(events)


def said(**reports: tuple[int, str]) -> Callable[[Made], None]:
    return lambda made: made.reports.update(reports)


def another_end(made: Made) -> None:
    made.kept[-1] = applied(0, 12, "other")


def no_end(made: Made) -> None:
    del made.kept[-1]


def twice(made: Made) -> None:
    made.kept.append(applied(0, 12))


def back(made: Made) -> None:
    (made.folder / "copies").mkdir()
    write(made.folder / "copies" / "events.2.0", [checkpoint(3) | {"t": 2.0, "replica": 2}])


def lower(made: Made) -> None:
    """The copies of a rank of replica 2, which names an older checkpoint before the first writer names its own."""
    (made.folder / "copies").mkdir()
    write(made.folder / "copies" / "events.2.0", [checkpoint(2) | {"t": 0.5, "replica": 2}])


def nobody_removed(made: Made) -> None:
    made.trace = made.kept


def a_hole(made: Made) -> None:
    del made.trace[3]


MORE = "NOT JUDGED: events are missing, of replica 0 rank 0 (2): not judged are steps 0 to 5"
LESS = "NOT JUDGED: events are missing, of replica 0 rank 0 (2): not judged are steps 4"
REMOVED = traced(generation((2, "late")))
BROKEN = (ExitCode.INVARIANT_VIOLATED, "PROBLEM: both runs are exact, but the parameters differ")
CASES: dict[str, tuple[Callable[[Path], Made], Callable[[Made], None], str]] = {
    "it ends with a code": (in_steps, changed(exit_code=13), "exit code 13"),
    "it makes too few steps": (in_steps, changed(steps=5), "5 steps"),
    "it computes a step anew": (in_steps, traced({"event": "miscounted", "step": 1}), "computed anew"),
    "its parameters are others": (in_steps, said(against=BROKEN), "parameters differ"),
    "stop: it does not come": (stopped, changed(has_struck=False), "has not come"),
    "stop: the job ends": (stopped, changed(exit_code=13), "exit code 13"),
    "stop: an innocent is removed": (stopped, REMOVED, "removed were [1, 2]"),
    "stop: nobody is told": (stopped, changed(output=""), "stood still"),
    "stop: its parameters are others": (stopped, said(against=BROKEN), "parameters differ"),
    "stall: the job ends": (stalled, changed(exit_code=1), "exit code 1"),
    "stall: an innocent is removed": (stalled, REMOVED, "removed were [1, 2]"),
    "stall: the trace is not whole": (stalled, said(against=(3, UNFINISHED)), "UNFINISHED"),
    "stall: its parameters are others": (stalled, another_end, "parameters differ"),
    "full: the job ends": (full, changed(exit_code=1), "exit code 1"),
    "full: an innocent is removed": (full, REMOVED, "removed were [1, 2]"),
    "full: its parameters are others": (full, another_end, "parameters differ"),
    "full: it does not come to the end": (full, no_end, "train 12 is not the end"),
    "full: an invariant is broken": (full, said(against=(14, "INV-1 BROKEN\nUNFINISHED")), "check ends with 14"),
    "full: check says that it is whole": (full, said(against=(0, "all holds")), "check ends with 0"),
    "full: a hole is not told": (full, a_hole, "steps [1] are missing inside the trace"),
    "full: the console is silent": (full, changed(output=""), "no line says so"),
    "room: check is silent": (roomy, said(against=(0, "all holds")), "check ends with 0"),
    "room: check leaves out a step": (roomy, said(against=(3, LESS)), "steps [5] are missing inside"),
    "room: check leaves out too many": (roomy, said(against=(3, MORE)), "nothing of steps [0, 1] is missing"),
    "fail: the job ends": (failing, changed(exit_code=1), "exit code 1"),
    "fail: its parameters are others": (failing, another_end, "parameters differ"),
    "drift: it is found late": (drifted, traced(committed(0, "save 6")), "to be found in (6, 1)"),
    "drift: the job ends well": (drifted, changed(exit_code=0), "exit code 0"),
    "drift: it is saved": (drifted, changed(latest=6), "newest checkpoint is 6, not 4"),
    "drift: a checkpoint is lost": (drifted, changed(latest=2), "newest checkpoint is 2, not 4"),
    "drift: an invariant is broken": (drifted, said(alone=(14, "INV-6 BROKEN")), "INV-6"),
    "drift: it cannot be resumed": (drifted, changed(resumed=1), "it ends with 1"),
    "drift: resumed, it ends otherwise": (drifted, said(resumed=BROKEN), "parameters differ"),
    "drift of one of three: it is found late": (outvoted, traced(committed(1, "save 6")), "to be found in (6, 1)"),
    "drift of one of three: nobody is removed": (outvoted, lambda made: made.trace.pop() and None, "removed were []"),
    "drift of one of three: an innocent is removed": (outvoted, traced(generation((0, "late"))), "removed were [(0"),
    "drift of one of three: the job ends": (outvoted, changed(exit_code=12), "exit code 12"),
    "drift of one of three: saves stop": (outvoted, changed(latest=4), "newest checkpoint is 4, not 6"),
    "drift of one of three: its parameters are others": (outvoted, said(against=BROKEN), "parameters differ"),
    "loss: it does not come": (lost, changed(has_struck=False), "has not come"),
    "loss: a survivor ends": (lost, changed(codes={0: 0, 1: -9, 2: 13}), "exit codes {0: 0, 2: 13}"),
    "loss: something is left": (lost, changed(left="left behind: {'n2': ['port 1']}"), "left behind"),
    "loss: a step is applied twice": (lost, twice, "applied step 11 after step 11"),
    "loss: it makes too few steps": (lost, changed(steps=11), "11 steps"),
    "loss: an innocent is removed": (lost, REMOVED, "removed were [1, 2]"),
    "loss: its replica stays": (lost, nobody_removed, "not [1]"),
    "loss: an invariant is broken": (lost, said(alone=(14, "INV-1 BROKEN")), "INV-1"),
    "loss: microbatches are missing": (lost, changed(mistakes=["INV-1: step 3 lacks 2"]), "step 3 lacks 2"),
    "loss: its parameters are others": (lost, another_end, "parameters differ"),
    "loss: it saves no more": (lost, changed(latest=6), "newest checkpoint is 6"),
    "writer: nothing is named": (lost_writer, lambda made: made.kept.clear(), "train 12 is not the end"),
    "writer: names go back": (lost_writer, back, "named the checkpoint of iteration 3 after"),
    "writer: one of before names": (lost_writer, lower, "named the checkpoint of iteration 3 after replica 2 had named that"),
    "writer: it cannot be resumed": (lost_writer, changed(resumed=1), "it ends with 1"),
    "writer: resumed, it ends otherwise": (lost_writer, said(resumed=BROKEN), "parameters differ"),
    "coordinator: the others end well": (lost_coordinator, changed(codes={0: -9, 1: 0, 2: 0}), "exit codes {1: 0, 2: 0}"),
    "coordinator alone: a failure ends it": (lost_coordinator_alone, changed(codes={0: -9, 1: 13, 2: 13}), "exit codes"),
    "coordinator alone: not all is saved": (lost_coordinator_at_the_end, changed(latest=9), "exit codes {1: 0, 2: 0}"),
    "coordinator alone: they differ": (lost_coordinator_at_the_end, changed(codes={0: -9, 1: 0, 2: 15}), "exit codes"),
    "coordinator: it cannot be resumed": (lost_coordinator, changed(resumed=2), "it ends with 2"),
    "coordinator: resumed, it ends otherwise": (lost_coordinator, said(resumed=BROKEN), "parameters differ"),
    "short cut: somebody is removed": (cut_short, traced(generation((2, "died"))), "removed were [2]"),
    "short cut: its parameters are others": (cut_short, said(against=BROKEN), "parameters differ"),
    "long cut: nobody is removed": (cut_long, nobody_removed, "not [2]"),
    "long cut: ranks are left": (cut_long, changed(unfenced="replica-2.0"), "left on the node are replica-2.0"),
    "cut for ever: it ends well": (cut_for_ever, changed(codes={0: 0, 1: 0, 2: 0}), "exit codes"),
    "miscount: it does not come": (miscounted, changed(trace=[]), "computed anew were [], not 2"),
    "miscount: another step too": (miscounted, traced({"event": "miscounted", "step": 3}), "computed anew were [2, 3]"),
    "miscount: check is silent": (miscounted, said(against=(0, "all holds")), "does not say what was computed anew"),
    "miscount: somebody is removed": (miscounted, REMOVED, "removed were [2]"),
    "miscount: the job stops": (miscounted, changed(exit_code=14), "exit code 14"),
    "miscount: its parameters are others": (miscounted, said(against=(14, "computed anew: step 2, x\nPROBLEM: y")), "PROBLEM"),
}


@pytest.mark.parametrize(
    "make",
    [
        in_steps, stopped, stalled, full, roomy, failing, drifted, outvoted, miscounted, lost, lost_writer, lost_coordinator,
        lost_coordinator_alone, lost_coordinator_at_the_end, cut_short, cut_long, cut_for_ever,
    ],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_a_run_that_does_what_is_promised_passes(
    make: Callable[[Path], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path)
    assert made.plan.kind in KINDS
    assert made.verdict(monkeypatch) == "passed"


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_does_not_is_failed(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, alter, words = CASES[case]
    made = make(tmp_path)
    alter(made)
    verdict = made.verdict(monkeypatch)
    assert verdict.startswith("FAILED: ") and words in verdict


def test_a_trace_has_what_a_lost_node_took_along(tmp_path: Path) -> None:
    """Its file ends after one event of its rank. A second one is added, in the time and by the clock of its node."""
    made, start = lost(tmp_path), {"event": "node_started", "v": 2, "t": 0.5, "clock": 1000 << COUNTER_BITS, "h": 0}
    run, copies = tmp_path / "run", tmp_path / "copies"
    for folder in (run / "nodes" / "1", run / "nodes" / "2", run / "logs", copies):
        folder.mkdir(parents=True)
    first = applied(1, 1) | {"t": 0.7, "h": 200 << COUNTER_BITS}
    write(run / "events.jsonl", [{"event": "run_finished"}])
    write(run / "nodes" / "1" / "events.jsonl", [start, first])
    write(run / "nodes" / "2" / "events.jsonl", [{"event": "run_finished"}])
    stamps = (1200 << COUNTER_BITS, 1450 << COUNTER_BITS)
    write(copies / "events.1.0", [applied(1, step + 1) | {"t": 77.0 + step, "h": h} for step, h in enumerate(stamps)])
    whole = judging._whole(Evidence(made.plan, Outcome(0, "", run, ""), None, copies=copies))
    lines = [json.loads(line) for line in (whole / "nodes" / "1" / "events.jsonl").read_text().splitlines()]
    assert lines[:2] == [start, first]
    assert lines[2] == applied(1, 2) | {"t": 0.95, "h": 450 << COUNTER_BITS}
    assert lines[3]["event"] == "run_finished" and len(lines) == 4
