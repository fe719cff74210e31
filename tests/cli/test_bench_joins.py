"""The benchmarks of joins: how the instants of a trace become parts, pauses and useful work."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from benchmarks import join_times, joins, joins_deaths, run
from benchmarks.join_times import Usual
from megatron_recover.cluster import chaos
from tests.system.jobs import chaos_text

Event = dict[str, Any]


def event(name: str, t: float, **others: Any) -> Event:
    return {"event": name, "t": t, **others}


def forming(t: float, newcomer: int, *in_place_of: int) -> Event:
    return event("forming", t, newcomer=newcomer, in_place_of=[*in_place_of])


def read(t: float, newcomer: int, label: str, *, rank: int = 0, tries: int = 1, seconds: float = 0.2) -> Event:
    return event(
        "state_read", t, replica=newcomer, rank=rank, label=label, num_tries=tries, num_bytes=100 + rank, seconds=seconds
    )  # fmt: skip


def announced(t: float, generation: int, roster: Sequence[int], *newcomers: int) -> Event:
    return event("generation", t, generation=generation, roster=[*roster], newcomers=[*newcomers])


def proven(t: float, generation: int, *newcomers: int) -> Event:
    return event("proven", t, generation=generation, newcomers=[*newcomers])


def claimed(t: float, newcomer: int, label: str) -> Event:
    return event("claimed", t, replica=newcomer, label=label)


KILLED = 10.0
RETURNS = [
    announced(0.0, 1, [0, 1]),
    forming(3.0, 2, 1),  # of an earlier loss of an equal id: not in this run, and not after the kill
    announced(10.1, 2, [0]),
    event("fenced", 10.5, replica=1),
    forming(10.6, 3, 1),
    event("joined", 13.0, replica=3),
    read(14.0, 3, "train 7", tries=2),
    read(14.1, 3, "train 7", rank=1),
    claimed(14.2, 3, "train 7"),
    event("claim_refused", 14.3, newcomer=3, label="train 7", reason="too late"),
    read(15.0, 3, "train 8"),
    read(15.3, 3, "train 8", rank=1, seconds=0.4),
    claimed(15.4, 3, "train 8"),
    announced(15.5, 3, [0, 3], 3),
    proven(16.5, 3, 3),
]


def test_the_instants_of_a_return_become_parts_that_add_up() -> None:
    found = join_times.returned(RETURNS, 1, KILLED)
    assert found is not None
    parts = {
        "processes ended": 0.5, "forming begun": 0.1, "formed": 2.4, "state read": 2.3, "claimed": 0.1, "announced": 0.1,
        "proven": 1.0,
    }  # fmt: skip
    assert found.parts == pytest.approx(parts) and [*found.parts] == [*parts]
    assert sum(found.parts.values()) == pytest.approx(found.total_s) == pytest.approx(6.5)
    assert (found.newcomer, found.num_formed, found.tries) == (3, 1, 3), "rank 0 has begun to read three states"
    assert (found.num_bytes, found.read_s) == (201, 0.4), "of the state with which it has joined"


def test_nobody_has_returned_before_a_step_has_the_newcomers_vote() -> None:
    assert join_times.returned(RETURNS[:-1], 1, KILLED) is None
    assert join_times.returned(RETURNS, 0, KILLED) is None


def test_a_newcomer_in_the_place_of_a_lost_one_counts_for_the_replica_that_was_killed() -> None:
    first = [*RETURNS[:5], event("fenced", 12.0, replica=3), forming(12.1, 4, 3)]
    later = [each | {"replica": 4} if each.get("replica") == 3 else each for each in RETURNS[5:-2]]
    found = join_times.returned([*first, *later, announced(15.5, 3, [0, 4], 4), proven(16.5, 3, 4)], 1, KILLED)
    assert found is not None and (found.newcomer, found.num_formed) == (4, 2)
    assert found.forming == 12.1 and sum(found.parts.values()) == pytest.approx(6.5)


def committed(step: int, t: float, *replicas: int) -> list[Event]:
    return [
        event("committed", t + 0.01 * replica, replica=replica, step=step, label=f"train {step + 1}") for replica in replicas
    ]


def test_a_step_lasts_for_those_who_were_members_before_it() -> None:
    trace = [*committed(0, 1.0, 0, 1), *committed(1, 2.0, 0, 1), *committed(2, 4.0, 0, 1, 5)]
    found = join_times.steps(trace)
    assert [(step.label, step.members) for step in found] == [("train 2", (0, 1)), ("train 3", (0, 1))]
    assert [step.seconds for step in found] == pytest.approx([1.0, 2.0])
    assert join_times.at(found, 3.0) == found[1] and join_times.at(found, 5.0) is None
    assert join_times.mostly_within(found, 1.0, 2.5) == found[:1]


def microbatches(step: int, *spans: tuple[float, float], replica: int = 0) -> list[Event]:
    return [event("microbatch_finished", end, replica=replica, step=step, seconds=end - begin) for begin, end in spans]


def test_time_between_microbatches_is_a_pause_and_a_hold_is_none() -> None:
    trace = [
        *committed(0, 0.0, 0), *microbatches(1, (0.0, 0.5), (0.5, 1.0)), *committed(1, 1.0, 0),
        *microbatches(2, (1.0, 1.5), (1.6, 2.1)), event("pass_held", 2.4, replica=0, label="train 3", seconds=0.3),
        *committed(2, 2.5, 0),
    ]  # fmt: skip
    plain, joined = join_times.steps(trace)
    normal = join_times.usual(trace, [plain])
    assert normal == pytest.approx(Usual(1.0, 0.0))
    assert join_times.cost(trace, joined, normal) == pytest.approx((1.2, 0.1, 0.3, 0.3))


def test_state_that_moves_with_its_newcomer_announced_is_no_unused_state() -> None:
    trace = list(itertools.chain.from_iterable(committed(step, float(step), 0) for step in range(5)))
    trace += [read(1.1, 3, "train 3"), read(3.5, 3, "train 5"), announced(3.7, 2, [0, 3], 3)]
    steps = join_times.steps(trace)
    assert [step.label for step in join_times.moving(trace, steps, 3)] == ["train 2", "train 3"], "it began in train 2"
    assert join_times.moving(trace, steps, 4) == []


def test_members_are_those_with_a_vote_that_live() -> None:
    trace = [announced(0.0, 1, [0, 1, 2]), event("fenced", 1.0, replica=1)]
    assert join_times.members(trace) == (0, 2)
    trace.append(announced(2.0, 2, [0, 2, 3, 4], 3, 4))
    assert join_times.members(trace) == (0, 2)
    trace += [event("turned_away", 2.1, generation=2, newcomers=[4]), proven(3.0, 2, 3)]
    assert join_times.members(trace) == (0, 2, 3)


def test_whole_steps_within_the_time_are_useful() -> None:
    trace = [*committed(0, 1.0, 0, 1), *committed(1, 2.0, 0, 1), *committed(2, 3.0, 1), *committed(3, 4.0, 1)]
    evaluation = event("committed", 2.5, replica=0, step=9, label="evaluate 2/1")
    assert join_times.num_steps([*trace, evaluation], 1.0, 2.1) == 2


def test_what_returns_cost_comes_from_the_steps_in_which_they_happen() -> None:
    trace = [*RETURNS, *itertools.chain.from_iterable(committed(step, 9.0 + step, 0) for step in range(9))]
    found = join_times.returned(trace, 1, KILLED)
    assert found is not None
    seen = joins.judged(trace, [found], Usual(1.0, 0.0))
    assert len(seen.forming) == 2, "from 11 to 13 s, and not the step with the kill"
    assert len(seen.moving) == 2, "train 6 and 7: from 13.8 to 14.1 s"
    assert [each.step for each in seen.entering] == pytest.approx([1.0])
    assert joins.goal_s(found, 2.0, 201.0, seen.normal) == pytest.approx(5.0)


def test_each_fault_of_a_newcomer_is_charged_to_the_step_in_which_it_strikes() -> None:
    trace = [each for step, t in enumerate((0.0, 1.0, 2.1, 3.3, 6.5, 7.6)) for each in committed(step, t, 0, 1)]
    trace += [
        event("fault", 0.5, replica=2, point="backward", kind="kill"),
        event("fault", 1.5, replica=3, point="state_read", kind="kill"),
        event("fault", 2.5, replica=4, point="admitted", kind="kill"),
        event("fault", 3.5, replica=5, point="admitted", kind="stop"), event("fenced", 5.5, replica=5),
        event("fault", 6.6, replica=6, point="claim", kind="freeze"),
        event("claim_refused", 7.0, newcomer=6), event("claim_refused", 7.1, newcomer=6),
    ]  # fmt: skip
    found = joins_deaths.struck(trace, Usual(1.0, 0.0))
    assert {kind: [each.cost.step for each in some] for kind, some in found.items()} == {
        "killed outside": pytest.approx([1.1]), "killed inside": pytest.approx([1.2]), "stopped": pytest.approx([3.2]),
        "refused": pytest.approx([1.1]),
    }  # fmt: skip
    assert found["stopped"][0].detection == pytest.approx(2.0)


def test_the_faults_of_newcomers_can_be_read() -> None:
    texts = joins_deaths.faults()
    assert [int(text.split()[0]) for text in texts] == [2, *range(3, 2 + len(texts))]
    job = joins_deaths.JOB
    target = chaos.Target(
        num_replicas=job.replicas, num_ranks=1, num_microbatches=job.microbatches, num_steps=job.steps, heals=True
    )  # fmt: skip
    assert len(chaos.parse(chaos_text(*texts), target)) == len(texts)


def test_a_long_benchmark_runs_only_where_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.is_long("joins_goodput") and not run.is_long("joins")
    ran: list[str] = []
    rows: Callable[[], list[Any]] = lambda: ran.append("long") or []  # noqa: E731
    monkeypatch.setattr(run, "modules", lambda: ["joins_goodput"])
    monkeypatch.setattr("benchmarks.joins_goodput.rows", rows)
    out = ["--out", "/dev/null"]
    assert run.main(out) == 0 and not ran
    assert "joins_goodput" in capsys.readouterr().err
    assert run.main(["--only", "joins_goodput", *out]) == 0 and ran == ["long"]
