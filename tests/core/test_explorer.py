"""The exhaustive exploration itself: CI's scenarios hold, leaving steps out loses nothing, and a violation is reported."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_recover.core import recovery
from megatron_recover.sim.explore import explorer
from megatron_recover.sim.explore.explorer import Explorer, JobState
from megatron_recover.sim.explore.scenario import CONFIGS, Scenario

CONTRACT = Path(__file__).parents[2] / "docs" / "design" / "protocol.md"
SHARED = ((0, 1),)
MANY_STATES = 2_700
"""Scenarios with more are left to `make long-test`."""


def documented(scenario: Scenario) -> int | None:
    """The number of states that protocol.md gives for it."""
    name = re.escape(scenario.name.removeprefix("4 replicas, "))
    row = re.search(rf"^\| {name}(?: \(.*\))? \| ([\d,]+) \|$", CONTRACT.read_text(), re.MULTILINE)
    return None if row is None else int(row[1].replace(",", ""))


def _scenarios() -> Iterator[Any]:
    for scenario in CONFIGS["ci"]:
        is_slow = (documented(scenario) or 0) > MANY_STATES
        yield pytest.param(scenario, id=scenario.name.replace(" ", "-"), marks=pytest.mark.slow if is_slow else ())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", _scenarios())
def test_no_behaviour_of_a_small_job_breaks_an_invariant(scenario: Scenario) -> None:
    report = Explorer(scenario).run()
    print(f"{scenario.name}: {report.states} states, {report.transitions} transitions, {report.ends} ends")
    assert report.found is None, "\n".join((*report.found.lines, report.found.detail))
    assert report.ends > 1, "the exploration ended before the jobs did"
    assert documented(scenario) == report.states, "docs/design/protocol.md has another number of states"


class Outcomes(Explorer):
    """Remembers how jobs ended: the rosters, and what every step was committed as."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.outcomes: set[object] = set()

    def over(self, world: JobState) -> bool:
        over = super().over(world)
        if over:
            history = self.histories[world.history]
            self.outcomes.add((history.rosters, tuple((number, step.record) for number, step in history.steps)))
        return over


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "faults",
    [
        {"crashes": 1},
        {"suspicions": 1},
        {"alarms": 1},
        {"crashes": 1, "alarms": 1, "steps": 1},
        {"alarms": 1, "saves": 1, "steps": 1},
        {"miscounts": 2},
        {"miscounts": 2, "crashes": 1, "steps": 1},
        {"crashes": 1, "slow": True, "steps": 1},
        {"crashes": 1, "coordinator_dies": True, "steps": 1},
        {"crashes": 1, "num_ranks": 2, "bucket_ranks": SHARED, "steps": 1},
        {"alarms": 1, "num_ranks": 2, "bucket_ranks": SHARED, "steps": 1},
        {"drifts": 1, "replicas": 3, "microbatches": 3, "steps": 1},
        {"state_drifts": 1, "digested": (1,), "steps": 2},
        {"alarms": 1, "digested": (0,), "of_last_bucket": (0,), "num_ranks": 2, "bucket_ranks": ((0,), (1,)), "steps": 1},
        {"crashes": 1, "replicas": 3, "microbatches": 3, "steps": 1},
        {"suspicions": 1, "replicas": 3, "microbatches": 3, "steps": 1},
        {"crashes": 1, "replicas": 3, "microbatches": 3, "steps": 1, "tree_above": 1},
        {"alarms": 1, "replicas": 3, "microbatches": 3, "steps": 1, "tree_above": 2},
        {"drifts": 1, "replicas": 3, "microbatches": 3, "steps": 1, "tree_above": 1},
        {"readers": 1, "waits": 1, "steps": 1, "microbatches": 1, "hangs": True},
        {"readers": 1, "waits": 1, "steps": 1, "microbatches": 1, "outlasts": True},
        {"readers": 1, "waits": 1, "steps": 1, "microbatches": 1, "late": 1},
        {"readers": 1, "waits": 1, "steps": 1, "microbatches": 1, "saves": 1, "late_saves": True},
        {"leaves": 1},
        {"leaves": 1, "crashes": 1},
        {"newcomers": 1, "crashes": 1, "replicas": 1, "microbatches": 1, "passes_last": True},
        {"newcomers": 1, "alarms": 1, "replicas": 1, "microbatches": 1, "passes_last": True},
        {"newcomers": 1, "saves": 1, "replicas": 1, "microbatches": 1, "passes_last": True},
        {"newcomers": 2, "replicas": 1, "microbatches": 1, "steps": 1, "passes_last": True},
        {"newcomers": 1, "exits": 1, "replicas": 1, "microbatches": 1, "steps": 1, "passes_last": True},
        {"newcomers": 1, "newcomer_crashes": 1, "replicas": 1, "microbatches": 1, "steps": 1, "passes_last": True},
        {"miscounts": 2, "num_ranks": 2, "bucket_ranks": SHARED, "steps": 1, "microbatches": 1, "slow": True},
    ],
    ids=str,
)
def test_what_the_explorer_leaves_out_changes_no_outcome(faults: dict[str, Any]) -> None:
    scenario = Scenario("compare", **{"replicas": 2, "microbatches": 2, **faults})
    reduced, complete = Outcomes(scenario), Outcomes(scenario, reduced=False)
    few, many = reduced.run(), complete.run(limit=500_000)
    assert few.found is None and many.found is None
    assert few.states < many.states
    assert reduced.outcomes == complete.outcomes


def test_the_explorer_is_deterministic() -> None:
    scenario = Scenario("twice", crashes=1)
    assert Explorer(scenario).run() == Explorer(scenario).run()


def test_a_violation_is_printed_with_the_way_to_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(recovery, "decide", lambda *_: ())
    assert explorer.main(["--config", "ci", "--only", "links and a crash"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("VIOLATED INV-4:")
    assert any("dies" in line for line in lines)
    assert any("NewGeneration" in line for line in lines)


def test_the_exit_code_is_0_where_nothing_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert explorer.main(["--config", "ci", "--only", "links and a crash"]) == 0
    assert "no invariant broken in 7795 states" in capsys.readouterr().out


def test_scenarios_explored_side_by_side_are_told_as_they_begin_and_end(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for jobs in (1, 2):
        assert explorer.main(["--only", "a tree of 4 replicas,", "--jobs", str(jobs)]) == 0
        told.append(re.sub(r"[\d.]+ s$", "", capsys.readouterr().out, flags=re.M).splitlines())
        num_running = [line.startswith("exploring: ") - (" transitions, " in line) for line in told[-1]]
        assert max(itertools.accumulate(num_running)) == jobs and num_running[:jobs] == [1] * jobs and sum(num_running) == 0
    alone, beside = told
    assert sorted(alone) == sorted(beside) and alone[-1] == beside[-1]
    assert [line for line in alone if line in beside[:2]] == beside[:2], "in their order"


def test_a_name_that_no_scenario_has_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        explorer.main(["--only", "no such thing"])
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and "no scenario of --config ci has that in its name; there are: " in said


def test_the_number_of_jobs_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        explorer.main(["--jobs", "0"])
    assert exit_.value.code == 2 and "--jobs is 0; it must be at least 1" in capsys.readouterr().err


def test_more_states_than_the_limit_are_an_error() -> None:
    with pytest.raises(MemoryError, match="more than 100 states"):
        Explorer(Scenario("large", crashes=1)).run(limit=100)
