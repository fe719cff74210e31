"""Replicas that die come back in real jobs, and nothing else changes: members, losses, checkpoints, the end of the job.

While members are missing the steps are slow (`joining_pretrain.py`), so that a newcomer has time to enter. CI runs a few of the
jobs. `make long-test` runs the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import pytest

from megatron_recover.core.exit_code import ExitCode
from megatron_recover.faults import NEWCOMER_ONLY, Fault, FaultPoint
from tests.system.jobs import Job, Outcome, chaos_text, check, run_job
from tests.system.joining_pretrain import ORDERS, Act, Orders
from tests.system.test_endings import losses

pytestmark = pytest.mark.timeout(300)
SCRIPT = pathlib.Path(__file__).with_name("joining_pretrain.py")
DEADLINE_S = 240.0
ZERO1 = ("--use-distributed-optimizer",)
VIRTUAL = ("--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1")
EXPERTS = (
    *("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32"),
    *("--moe-aux-loss-coeff", "0.01", "--disable-bias-linear"),
)
FP16 = ("--fp16", "--initial-loss-scale", str(2**20), "--hysteresis", "1", "--loss-scale-window", "4")
TWO = Job(steps=40, heal="in-place")
DEATH = "1 0 backward step=1"
"""Of a member that the newcomer with the lowest id replaces."""
slow = pytest.mark.slow


def act(at: str, do: str) -> Act:
    """`at`: as a line of `chaos_text`."""
    replica, rank, point, *rest = at.split()
    where = {key: int(value) for key, value in (item.split("=") for item in rest)}
    return Act(Fault(replica=int(replica), rank=int(rank), point=FaultPoint(point), **cast("Any", where)), do)


def run(
    job: Job, run_dir: pathlib.Path, data: pathlib.Path, *faults: str, acts: Sequence[Act] = (),
    save: pathlib.Path | None = None, deadline_s: float = DEADLINE_S, **orders: Any,
) -> Outcome:  # fmt: skip
    """Run a job with these faults and acts, to its end, with any exit code."""
    # A rank without any faults passes no points.
    never = [f"{each.at.replica} {each.at.rank} {each.at.point.value} occurrence=1000000000" for each in acts]
    told = msgspec.json.encode(Orders(microbatches=job.microbatches * job.lanes, acts=tuple(acts), **orders)).decode()
    outcome = run_job(
        job, run_dir, data, chaos=chaos_text(*faults, *never), save=save, script=SCRIPT, environment={ORDERS: told},
        deadline_s=deadline_s,
    )  # fmt: skip
    print(f"with {ORDERS}='{told}'", outcome.output, sep="\n")
    return outcome


def rosters(outcome: Outcome) -> list[list[int]]:
    """The members of each generation, without newcomers that it turned away."""
    out = {event["generation"]: set(cast("list[int]", event["newcomers"])) for event in outcome.events("turned_away")}
    return [
        [replica for replica in cast("list[int]", event["roster"]) if replica not in out.get(event["generation"], ())]
        for event in outcome.events("generation")
    ]


def blamed(outcome: Outcome) -> set[int]:
    """All replicas that were lost, newcomers or not."""
    return {cast("int", event["replica"]) for event in outcome.events("fenced")}


def assert_exact(outcome: Outcome, reference: pathlib.Path) -> None:
    """All of the run is what the undisturbed run is, bit for bit."""
    code, told = check(outcome.run_dir, reference)
    assert code == 0, f"{told}\n{outcome.command}"
    assert losses(outcome.run_dir) == losses(reference), outcome.command


@dataclasses.dataclass(frozen=True, kw_only=True)
class Back:
    """A job in which replicas come back."""

    name: str
    job: Job
    deaths: tuple[str, ...] = (DEATH,)
    roster: tuple[int, ...] = (0, 2)
    """Members at the end."""
    lost: tuple[int, ...] = (1,)


def _back(name: str, *, extra: Sequence[str] = (), **others: Any) -> Back:
    fields = {each.name for each in dataclasses.fields(Back)}
    mine = {key: others.pop(key) for key in [*others] if key in fields}
    return Back(name=name, job=dataclasses.replace(TWO, extra=tuple(extra), **others), **mine)


BACK = (
    _back("two replicas"),
    _back("three replicas", replicas=3, roster=(0, 2, 3)),
    _back("pipeline", pp=2),
    _back("tensor parallel", tp=2, deaths=("1 1 reduce step=1",)),
    _back("distributed optimizer over lanes, bf16", lanes=2, extra=(*ZERO1, "--bf16")),
    _back("plain optimizer over lanes", lanes=2, deaths=("1 1 optimizer step=1",)),
    _back("bf16", extra=("--bf16",)),
    _back("fp16 with a loss scaler", extra=FP16, deaths=("1 0 backward step=6",)),
    _back("virtual stages", pp=2, extra=VIRTUAL),
    _back("experts", lanes=2, extra=EXPERTS),
    _back("overlapped reduction", extra=("--overlap-grad-reduce",)),
    _back("overlapped gather", lanes=2, extra=(*ZERO1, "--overlap-grad-reduce", "--overlap-param-gather")),
    _back("the writer", deaths=("0 0 backward step=1",), roster=(1, 2), lost=(0,)),
    _back("two at once", replicas=3, deaths=(DEATH, "2 0 backward step=1"), roster=(0, 3, 4), lost=(1, 2)),
    _back(
        "all that there were, one after the other", steps=60,
        deaths=(DEATH, "0 0 backward step=30", "2 0 backward step=45"), roster=(3, 4), lost=(0, 1, 2),
    ),
)  # fmt: skip
IN_CI = ("two replicas", "distributed optimizer over lanes, bf16", "pipeline")


@pytest.mark.parametrize("case", [pytest.param(each, id=each.name, marks=() if each.name in IN_CI else slow) for each in BACK])
def test_a_replica_comes_back_and_the_job_is_what_it_would_have_been(
    case: Back, tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    outcome = run(case.job, tmp_path / "run", data, *case.deaths).expect()
    assert rosters(outcome)[-1] == [*case.roster]
    assert blamed(outcome) == {*case.lost}, "nobody else"
    assert_exact(outcome, reference(case.job))


@slow
def test_a_replica_with_the_flex_dispatcher_comes_back(
    tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    """All ranks have the substitute of DeepEP (`tests/megatron/token_exchange.py`)."""
    job = dataclasses.replace(TWO, lanes=2, extra=(*EXPERTS, *ZERO1, "--bf16", "--moe-router-dtype", "fp32"))
    flex, all_to_all = (
        dataclasses.replace(job, extra=(*job.extra, "--moe-token-dispatcher-type", *flags))
        for flags in (("flex", "--moe-flex-dispatcher-backend", "hybridep"), ("alltoall",))
    )
    outcome = run(flex, tmp_path / "run", data, DEATH, substitute=True).expect()
    assert rosters(outcome)[-1] == [0, 2]
    assert_exact(outcome, reference(all_to_all))


# --- A newcomer dies ------------------------------------------------------------------------------

OUTSIDE = ("form", "start_up", "state_read", "claim")
INSIDE = ("admitted", "before_reduce", "reduce", "before_vote", "in_vote", "after_vote", "optimizer", "promise")


@slow
def test_newcomers_that_die_before_they_join_cost_nobody_anything(
    tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    job = dataclasses.replace(TWO, steps=80)
    deaths = [f"{replica} 0 {point}" for replica, point in enumerate(OUTSIDE, 2)]
    outcome = run(job, tmp_path / "run", data, DEATH, *deaths).expect()
    assert rosters(outcome) == [[0, 1], [0], [0, 6]], "no generation for a death outside the roster"
    assert blamed(outcome) == {1, 2, 3, 4, 5}
    assert_exact(outcome, reference(job))


@pytest.mark.parametrize("point", [pytest.param(point, marks=() if point == "admitted" else slow) for point in INSIDE])
def test_a_newcomer_dies_around_its_first_step_and_another_one_joins(
    point: str, tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    outcome = run(TWO, tmp_path / "run", data, DEATH, f"2 0 {point}").expect()
    assert [event["point"] for event in outcome.events("fault")] == ["backward", point]
    assert rosters(outcome)[-1] == [0, 3] and blamed(outcome) == {1, 2}
    assert_exact(outcome, reference(TWO))


def test_each_point_of_newcomers_is_struck() -> None:
    assert {point.value for point in NEWCOMER_ONLY} <= {*OUTSIDE, *INSIDE}


@slow
@pytest.mark.parametrize("point", ["form", "state_read", "admitted", "before_reduce", "before_vote"])
def test_a_newcomer_that_stops_is_removed_soon_and_nobody_else(
    point: str, tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    outcome = run(TWO, tmp_path / "run", data, DEATH, f"2 0 {point} kind=stop").expect()
    (stopped,) = (event for event in outcome.events("fault") if event["kind"] == "stop")
    (ended,) = (event for event in outcome.events("fenced") if event["replica"] == 2)
    assert cast("float", ended["t"]) - cast("float", stopped["t"]) < 8.0, "1 s or three steps, on a busy machine"
    assert rosters(outcome)[-1] == [0, 3] and blamed(outcome) == {1, 2}
    assert_exact(outcome, reference(TWO))


# --- Others die -----------------------------------------------------------------------------------

THREE = dataclasses.replace(TWO, replicas=3)


@pytest.mark.parametrize("point", ["state_read", pytest.param("claim", marks=slow), pytest.param("admitted", marks=slow)])
@pytest.mark.parametrize("victim", [pytest.param(0), pytest.param(2, marks=slow)])
def test_a_member_dies_that_the_newcomer_needs(
    point: str, victim: int, tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    """Replica 0 is the writer."""
    outcome = run(THREE, tmp_path / "run", data, DEATH, acts=[act(f"3 0 {point}", f"kill {victim} 0")]).expect()
    assert len(rosters(outcome)[-1]) == 3 and {1, victim} <= blamed(outcome)
    assert blamed(outcome) <= {1, victim, 3}, "the other member is at no fault"
    assert_exact(outcome, reference(THREE))


@slow
def test_the_last_member_dies_while_a_newcomer_forms(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    """Nobody has the state any more: the job ends at once and says so."""
    begun = time.monotonic()
    outcome = run(TWO, tmp_path / "run", data, DEATH, acts=[act("2 0 form", "kill 0 0"), act("2 0 form", "sleep 60")])
    assert outcome.exit_code == ExitCode.NO_REPLICA_LEFT and time.monotonic() - begun < 60
    assert blamed(outcome) == {0, 1, 2}


# --- Evaluation, saves, resuming ------------------------------------------------------------------


@slow
def test_a_newcomer_comes_between_evaluations_and_saves_and_then_writes(
    tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    """The first writer is lost in the middle: then the newcomer has the lowest id, and names what a job without any resumes."""
    whole = dataclasses.replace(TWO, steps=44, eval_interval=3, save_interval=4)
    job = dataclasses.replace(whole, extra=("--exit-interval", "40"))
    deaths = ("1 0 backward step=1", "0 0 backward occurrence=80")
    outcome = run(job, tmp_path / "run", data, *deaths, save=tmp_path / "save").expect()
    assert rosters(outcome)[-1] == [2, 3] and blamed(outcome) == {0, 1}
    saved = [event for event in outcome.events("checkpoint") if event["phase"] == "finished"]
    assert [event["iteration"] for event in saved] == [*range(4, 41, 4)]
    assert [*dict.fromkeys(event["replica"] for event in saved)] == [0, 2]
    code, told = check(outcome.run_dir)
    assert code == 0, told
    alone = dataclasses.replace(whole, replicas=1, heal="off")
    resumed = run_job(alone, tmp_path / "resumed", data, save=tmp_path / "save").expect()
    assert losses(outcome.run_dir) | losses(resumed.run_dir) == losses(reference(whole))
    assert [*losses(resumed.run_dir)] == [41, 42, 43, 44]


@slow
def test_a_replica_comes_back_in_a_job_that_was_resumed(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    whole = dataclasses.replace(TWO, save_interval=4)
    alone = run(dataclasses.replace(whole, replicas=1), tmp_path / "alone", data, save=tmp_path / "other").expect()
    first = dataclasses.replace(whole, extra=("--exit-interval", "4"))
    run(first, tmp_path / "first", data, save=tmp_path / "save").expect()
    second = run(whole, tmp_path / "second", data, "1 0 backward step=5", save=tmp_path / "save").expect()
    assert rosters(second)[-1] == [0, 2] and blamed(second) == {1}
    code, told = check(tmp_path / "second")
    assert code == 0, told
    wanted, found = losses(alone.run_dir), losses(second.run_dir)
    assert found and found.items() <= wanted.items()


# --- The end of the job ---------------------------------------------------------------------------


def _nothing_left(outcome: Outcome) -> None:
    for file in outcome.run_dir.glob("pid.*"):
        with contextlib.suppress(FileNotFoundError):
            line = pathlib.Path(f"/proc/{file.read_text()}/cmdline").read_bytes()
            assert b"replica-" not in line and b"pretrain" not in line, f"{file.name} lives"


FORMS = act("2 0 form", "sleep 60")
"""It takes its time to form."""


def test_the_job_ends_while_a_newcomer_forms(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    outcome = run(dataclasses.replace(TWO, steps=12), tmp_path / "run", data, DEATH, acts=[FORMS], deadline_s=100).expect()
    assert rosters(outcome) == [[0, 1], [0]]
    _nothing_left(outcome)
    assert check(outcome.run_dir)[0] == 0
    (ended,) = outcome.events("run_finished")
    last = max(cast("float", event["t"]) for event in outcome.events("applied"))
    assert cast("float", ended["t"]) - last < 10, "nobody waits for it"


@slow
def test_the_job_is_asked_to_end_while_a_newcomer_forms(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    outcome = run(
        TWO, tmp_path / "run", data, DEATH, acts=[act("2 0 form", "term"), FORMS], save=tmp_path / "save", deadline_s=100
    )
    assert outcome.exit_code == ExitCode.INTERRUPTED
    assert rosters(outcome) == [[0, 1], [0], [0]], "the last one carries the request"
    assert blamed(outcome) == {1, 2}
    assert [phase for _, phase in outcome.saves()][-1:] == ["finished"]
    _nothing_left(outcome)


@slow
def test_a_member_is_drained_while_a_newcomer_forms_and_does_not_come_back(
    tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    outcome = run(THREE, tmp_path / "run", data, DEATH, acts=[act("3 0 form", "drain 0"), act("3 0 form", "sleep 8")]).expect()
    assert [event["left"] for event in outcome.events("generation") if event["left"]] == [[0]]
    assert rosters(outcome)[-1] == [2, 3] and blamed(outcome) == {1}
    assert [event["newcomer"] for event in outcome.events("forming")] == [3], "nobody for the one that has left"
    assert_exact(outcome, reference(THREE))


# --- Newcomers that cannot join -------------------------------------------------------------------


def test_newcomers_that_break_of_their_own_are_set_aside(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    outcome = run(dataclasses.replace(TWO, steps=20), tmp_path / "run", data, DEATH, newcomers_raise=True).expect()
    assert rosters(outcome) == [[0, 1], [0]] and blamed(outcome) == {1, 2, 3}
    assert "set aside" in outcome.output and "RuntimeError: this script does not run in newcomers" in outcome.output
    assert check(outcome.run_dir)[0] == 0


@slow
@pytest.mark.parametrize(
    ("flags", "named"), [(("--weight-decay", "0.02"), "weight_decay"), (("--seed", "1235"), "seed")], ids=["decay", "seed"]
)
def test_a_newcomer_with_another_configuration_is_refused_with_the_difference(
    flags: tuple[str, ...], named: str, tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    job = dataclasses.replace(TWO, steps=30)
    outcome = run(job, tmp_path / "run", data, DEATH, newcomers_get=flags).expect()
    assert rosters(outcome) == [[0, 1], [0]]
    assert "does not start like replica 0" in outcome.output and named in outcome.output
    assert_exact(outcome, reference(job))


@slow
def test_a_newcomer_that_would_read_other_data_is_refused(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    mine = tmp_path / "text"
    for suffix in (".bin", ".idx"):
        mine.with_suffix(suffix).write_bytes(data.with_suffix(suffix).read_bytes())
    changed = bytearray(data.with_suffix(".bin").read_bytes())
    changed[1000:1100] = bytes(100)
    (tmp_path / "changed").write_bytes(changed)
    job = dataclasses.replace(TWO, steps=30)
    copies = act("0 0 backward step=1", f"copy {tmp_path / 'changed'} {mine.with_suffix('.bin')}")
    outcome = run(job, tmp_path / "run", mine, DEATH, acts=[copies]).expect()
    assert rosters(outcome) == [[0, 1], [0]]
    assert "does not start like replica 0" in outcome.output and "data" in outcome.output
