"""Chaos files say what is wrong with them and where; a rate and a seed are a file that can be replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recover import faults as faults_module
from megatron_recover.cluster.chaos import Target, faults_of, parse, render, unstruck
from megatron_recover.faults import Fault, FaultInjector, FaultKind, FaultPoint, InjectedFault, never_passed

TARGET = Target(num_replicas=4, num_ranks=2, num_microbatches=8, num_steps=100)
GOOD = """
[[fault]]
replica = 1
rank = 0
point = "backward"
step = 3
microbatch = 7

[[fault]]
replica = 2
rank = 1
point = "promise"
kind = "stop"
"""
FREEZE = GOOD.replace('kind = "stop"', 'kind = "freeze"\nuntil = "generation"')


SLOW = """
[[fault]]
replica = 1
rank = 0
point = "compute"
kind = "slow"
factor = 2.5
step = 3
steps = 4
"""


def test_a_slow_rank_is_written_and_read() -> None:
    (fault,) = parse(SLOW, TARGET)
    expected = {"point": FaultPoint.COMPUTE, "kind": FaultKind.SLOW, "factor": 2.5, "step": 3, "steps": 4}
    assert fault == Fault(replica=1, rank=0, **expected)
    assert parse(render((fault,), "why"), TARGET) == (fault,)
    assert [step for step in range(10) if fault.slows(step)] == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("factor = 2.5\n", "", "line 2: factor is missing; say how many times as long"),
        ("factor = 2.5", "factor = 0.5", "line 7: factor is 0.5; it must be 1 to 1000"),
        ("factor = 2.5", "factor = inf", "line 7: factor is inf; it must be 1 to 1000"),
        ("steps = 4", "steps = 0", "line 9: steps is 0; it must be 1 or more"),
        ('point = "compute"', 'point = "forward"', "line 5: a slow rank is slow in every forward and backward; give point"),
        ('kind = "slow"', 'kind = "stop"', 'line 7: factor is for a slow rank only; give kind = "slow"'),
        ('kind = "slow"', 'kind = "stop"', 'line 5: point = "compute" is for a slow rank only'),
        ("step = 3", "microbatch = 3", "line 8: microbatch does not fit a slow rank"),
    ],
)
def test_a_wrong_slow_rank_is_refused_with_the_line(old: str, new: str, message: str) -> None:
    assert old in SLOW
    with pytest.raises(ValueError) as refusal:
        parse(SLOW.replace(old, new, 1), TARGET)
    assert message in str(refusal.value)


def test_a_slow_rank_waits_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, said = [], []
    monkeypatch.setattr(faults_module.time, "sleep", slept.append)
    injector = FaultInjector(parse(SLOW, TARGET), replica=1, rank=0, record=lambda **fields: said.append(fields))
    assert [injector.stretch(step, 2.0) for step in (2, 3, 6, 7)] == [2.0, 5.0, 5.0, 2.0]
    assert slept == [3.0, 3.0]
    assert [(fault["kind"], fault["step"]) for fault in said] == [("slow", 3)]


def test_a_file_and_its_rendering_mean_the_same() -> None:
    faults = parse(GOOD, TARGET)
    assert faults == (
        Fault(replica=1, rank=0, point=FaultPoint.BACKWARD, step=3, microbatch=7),
        Fault(replica=2, rank=1, point=FaultPoint.PROMISE, kind=FaultKind.STOP),
    )
    assert parse(render(faults, "why"), TARGET) == faults
    frozen = parse(FREEZE, TARGET)
    assert (frozen[1].kind, frozen[1].until) == (FaultKind.FREEZE, "generation")
    assert parse(render(frozen, "why"), TARGET) == frozen


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("microbatch = 7", "microbach = 7", "line 7: unknown key 'microbach'; did you mean microbatch?"),
        ('kind = "stop"', 'color = "red"', "line 13: unknown key 'color'; known are replica"),
        (
            'point = "promise"',
            'point = "promised"',
            "line 12: point: Invalid enum value 'promised'; known are start_up",
        ),
        ("rank = 1", "rank = 2", "line 11: rank is 2; it must be 0 to 1"),
        ("replica = 2", "replica = 4", "line 10: replica is 4; it must be 0 to 3"),
        ("microbatch = 7", "microbatch = 8", "line 7: microbatch is 8; it must be 0 to 7"),
        ("step = 3", "step = -3", "line 6: step is -3; it must be 0 or more"),
        ("step = 3", 'step = "three"', "line 6: step: Expected `int | null`, got `str`"),
        ("rank = 0\n", "", "line 2: rank is missing"),
        ("[[fault]]\nreplica = 1", "rate = 1\n[[fault]]\nreplica = 1", "line 2: unknown key 'rate'"),
        ("step = 3", "step = ", "not a TOML file"),
        ('kind = "stop"', 'kind = "freeze"', "line 9: until is missing; name the event of the trace that ends the freeze"),
        ('kind = "stop"', 'kind = "freeze"\nuntil = "generations"', "line 14: until: there is no event 'generations'"),
        ('kind = "stop"', 'kind = "stop"\nuntil = "generation"', "line 14: until is for a freeze only"),
        ('"backward"', '"reduce"', "line 7: reduce is passed for no microbatch; leave microbatch out, or take forward"),
        ("microbatch = 7", "bucket = 7", "line 7: backward is passed for no bucket; leave bucket out, or take reduce"),
        ('"promise"', '"status"', "line 11: only rank 0, the leader of its replica, passes status; give rank = 0"),
        ('"promise"', '"start_up"\nstep = 1', "line 13: start_up is passed for no step; leave step out"),
    ],
)
def test_a_wrong_file_is_refused_with_the_line(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ValueError) as refusal:
        parse(GOOD.replace(old, new, 1), TARGET)
    assert message in str(refusal.value)


def test_a_rank_that_is_no_number_is_told_once() -> None:
    with pytest.raises(ValueError) as refusal:
        parse('[[fault]]\nreplica = 1\nrank = true\npoint = "status"\n', TARGET)
    assert str(refusal.value) == "line 3: rank: Expected `int`, got `bool`"


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "chaos.toml"
    path.write_text(
        GOOD.replace("[[fault]]", "rate = 1\n[[fault]]", 1).replace("rank = 0\n", "")
        .replace("step = 3", "step = -1\nstepz = 4")
        .replace('"promise"', '"promisse"').replace("replica = 2", 'replica = "two"')
    )  # fmt: skip
    with pytest.raises(ValueError) as refusal:
        faults_of(str(path), TARGET)
    lines = [line.removeprefix(f"--chaos {path}: ") for line in str(refusal.value).splitlines()]
    assert [line.partition(";")[0] for line in lines] == [
        "line 2: unknown key 'rate'",
        "line 6: step is -1",
        "line 7: unknown key 'stepz'",
        "line 3: rank is missing",
        "line 11: replica: Expected `int`, got `str`",
        "line 13: point: Invalid enum value 'promisse'",
    ]


def test_a_rate_is_reproduced_by_its_seed_and_by_its_file(tmp_path: Path) -> None:
    faults, text = faults_of("rate=0.1,seed=7", TARGET)
    assert faults and faults_of("rate=0.1,seed=7", TARGET)[0] == faults
    assert faults_of("rate=0.1,seed=8", TARGET)[0] != faults
    (tmp_path / "chaos.toml").write_text(text)
    assert faults_of(str(tmp_path / "chaos.toml"), TARGET)[0] == faults


@pytest.mark.parametrize("seed", range(50))
def test_random_faults_leave_the_job_enough_replicas(seed: int) -> None:
    target = Target(num_replicas=4, num_ranks=2, num_microbatches=8, num_steps=100, min_replicas=2)
    faults, _ = faults_of(f"rate=0.5,seed={seed}", target)
    hit = [fault.replica for fault in faults]
    assert len(hit) == len(set(hit)) == 2
    for fault in faults:
        assert fault.step is not None and fault.step < 100 and fault.rank < 2


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("missing.toml", "missing.toml: cannot be read (No such file or directory); give a TOML file, or rate="),
        ("/tmp", "/tmp: cannot be read (Is a directory)"),
        ("rate=2,seed=1", "rate is 2.0; it must be 0 to 1"),
        ("rate=nan,seed=1", "rate is nan; it must be 0 to 1"),
        ("rate=0.1", "seed is missing; give rate=NUMBER,seed=NUMBER"),
        ("rate=0.1,seed", "seed: Expected `int`, got `str`"),
        ("rate=0.1,seed=7,steps=0", "steps is 0; it must be 1 or more"),
        ("rate=0.1,seed=7,seed=8", "a key is given twice"),
        ("rate=0.1,sed=7", "unknown key 'sed'; did you mean seed?"),
        ("rate=often,seed=7", "rate: Expected `float`"),
        ("rates=often,seed=x", "\n"),
    ],
)
def test_a_wrong_argument_is_refused(argument: str, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        faults_of(argument, TARGET)
    assert message in str(refusal.value) and argument in str(refusal.value)


def test_newcomers_are_named_by_ids_above_those_of_the_start() -> None:
    healing = Target(num_replicas=4, num_ranks=2, num_microbatches=8, num_steps=100, heals=True)
    (fault,) = parse('[[fault]]\nreplica = 7\nrank = 1\npoint = "state_read"\noccurrence = 2\n', healing)
    assert fault == Fault(replica=7, rank=1, point=FaultPoint.STATE_READ, occurrence=2)
    for target, replica, message in (
        (TARGET, 4, "line 2: replica is 4; it must be 0 to 3"),
        (TARGET, 3, "line 4: form is passed by newcomers only, and this job forms none; give --recover-heal in-place"),
        (healing, 3, "line 2: only newcomers pass form; give replica = 4, the first of their ids, or more"),
    ):
        with pytest.raises(ValueError) as refusal:
            parse(f'[[fault]]\nreplica = {replica}\nrank = 1\npoint = "form"\n', target)
        assert message in str(refusal.value)


def test_a_rate_needs_a_number_of_steps() -> None:
    target = Target(num_replicas=4, num_ranks=2, num_microbatches=8, num_steps=None)
    with pytest.raises(ValueError, match="number of steps is not known"):
        faults_of("rate=0.1,seed=7", target)
    assert max(fault.step or 0 for fault in faults_of("rate=1,seed=7,steps=3", target)[0]) < 3


def test_the_injector_strikes_once_at_the_nth_passage_and_records_before() -> None:
    recorded: list[dict[str, object]] = []
    faults = [
        Fault(replica=0, rank=1, point=FaultPoint.FORWARD, kind=FaultKind.RAISE, step=2, occurrence=2),
        Fault(replica=1, rank=1, point=FaultPoint.FORWARD, kind=FaultKind.RAISE),
    ]
    injector = FaultInjector(faults, replica=0, rank=1, record=lambda **fields: recorded.append(fields))
    injector.at(FaultPoint.FORWARD, step=1, microbatch=0)
    injector.at(FaultPoint.BACKWARD, step=2, microbatch=0)
    injector.at(FaultPoint.FORWARD, step=2, microbatch=0)
    assert recorded == []
    with pytest.raises(InjectedFault, match="microbatch 4"):
        injector.at(FaultPoint.FORWARD, step=2, microbatch=4)
    assert [(each["point"], each["kind"], each["microbatch"]) for each in recorded] == [("forward", "raise", 4)]
    injector.at(FaultPoint.FORWARD, step=2, microbatch=5)
    assert len(recorded) == 1


def test_without_faults_there_is_no_injector() -> None:
    assert FaultInjector.of((), replica=0, rank=0, record=lambda **fields: None) is None


def test_what_never_struck_is_named_once_for_each_passage_that_is_missing() -> None:
    faults = [Fault(replica=1, rank=0, point=FaultPoint.FORWARD, step=step) for step in (1, 500)]
    faults.append(Fault(replica=2, rank=0, point=FaultPoint.REDUCE))
    assert list(unstruck(faults, [(1, 0, "forward"), (2, 1, None)])) == [(2, faults[1]), (3, faults[2])]
    assert list(unstruck(faults, [(2, 0, "reduce"), (1, 0, "forward"), (1, 0, "forward")])) == []
    assert list(unstruck(faults[:2], [])) == [(1, faults[0]), (2, faults[1])]


@pytest.mark.parametrize("point", FaultPoint, ids=lambda point: point.value)
def test_what_a_point_is_passed_for_can_be_given(point: FaultPoint) -> None:
    allowed = {
        "microbatch": {"forward", "backward", "recompute", "evaluate"},
        "bucket": {"reduce", "second_reduce", "transfer"},
        "step": {one.value for one in FaultPoint} - {"start_up", "form", "state_read", "claim"},
    }  # fmt: skip
    if point is FaultPoint.COMPUTE:
        return  # of a slow rank, with rules of its own
    for key, points in allowed.items():
        refused = [one for one, _ in never_passed({"replica": 0, "rank": 0, "point": point.value, key: 1})]
        assert refused == ([] if point.value in points else [key])
    refused = [one for one, _ in never_passed({"replica": 0, "rank": 1, "point": point.value})]
    assert refused == (["rank"] if point.value in ("in_vote", "status", "claim") else [])
