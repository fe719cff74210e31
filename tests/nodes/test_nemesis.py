"""The nemesis does what its seed says, and its judge sees what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nodes.history import Applied, History, Latest, Naming
from tests.nodes.nemesis import LAPSE_S, LONG_S, NODE_TIMEOUT_S, SHORT_S, Plan, Run, Strike, plan, unnamed, wrong_end
from tests.nodes.nodes import Cage


def test_a_seed_decides_all() -> None:
    plans = [plan(seed) for seed in range(300)]
    assert plans == [plan(seed) for seed in range(300)]
    kinds = {strike.kind for each in plans for strike in each.strikes}
    assert kinds == {"power", "frozen", "cut off", "reset", "agent killed"}
    assert {strike.one_way for each in plans for strike in each.strikes} == {None, "in", "out"}
    assert SHORT_S[1] < NODE_TIMEOUT_S < LONG_S[0], "a short fault may remove nobody, a long one must"
    for each in plans:
        assert each.replicas * each.ranks % each.num_nodes == 0
        assert 3 <= each.replicas * each.ranks <= 8
        assert [strike.at_step for strike in each.strikes] == sorted(strike.at_step for strike in each.strikes)
    assert 20 < sum(each.is_harmless for each in plans) < 150
    assert 80 < sum(each.empties_node_0 for each in plans) < 250
    assert 100 < sum(each.long_s > 0 for each in plans) < 200
    assert 100 < sum(each.spares_node_0 for each in plans) < 250


def struck(node: int, seconds: float | None = None) -> Plan:
    return Plan(1, 4, 8, 1, (Strike("power", node, 20, seconds),), None)


@pytest.mark.parametrize("code", [1, 2, 12, 14, 16, -9])
def test_no_fault_excuses_a_defect(code: int) -> None:
    """Also where the node with the coordinator is struck."""
    assert "exit codes" in wrong_end(struck(0), {"n1": 13, "n2": code}, 0)
    assert "exit codes" in wrong_end(struck(1), {"n0": 0, "n2": code}, 6)


def test_the_ends_that_faults_allow() -> None:
    assert wrong_end(struck(0), {"n1": 13, "n2": 15}, 0) == ""
    assert wrong_end(struck(1), {"n0": 0, "n2": 0, "n3": 13}, 4) == ""
    assert "exit codes" in wrong_end(struck(1), {"n0": 0, "n2": 15}, 6), "nobody interrupts a job that has its coordinator"
    cut = Plan(1, 4, 8, 1, (Strike("cut off", 1, 20, one_way="out"),), None)
    assert wrong_end(cut, {"n0": 13, "n1": 15, "n2": 13}, 0) == "", "the last replicas were there, and found no coordinator"
    assert "exit codes" in wrong_end(cut, {"n0": 0, "n1": 15}, 6), "others go on, so these are not the whole roster"
    assert "exit codes" in wrong_end(cut, {"n0": 13, "n2": 15}, 0)
    assert "no replica has applied all steps" in wrong_end(struck(1), {"n0": 0}, 0)


def _ended(newest: int, *, first: int = 0, last_generation: int = 2, named: tuple[int, ...] = ()) -> History:
    """A job that made 101 steps, the last of which in `last_generation`: replica 0 left in `first`, replica 1 names."""
    applied = [Applied(float(step), 0, 0, 1, step) for step in range(first)]
    applied += [Applied(step + 0.5, 1, 0, 2 if step < 100 else last_generation, step) for step in range(101)]
    applied.append(Applied(200.0, 2, 0, last_generation, 100))
    naming = [Naming(float(each), each + 0.5, 1, each) for each in named]
    return History(applied, naming=naming, latest=[Latest(1.0, 20), Latest(2.0, newest)])


def test_a_job_that_ends_well_has_named_its_last_checkpoint() -> None:
    mistake = "the newest name is of iteration 80, and replica 1 had the right to name that of iteration 100"
    well, interrupted = {"n0": 0, "n1": 13}, {"n1": 15, "n2": 15}
    assert unnamed(well, _ended(80)) == mistake
    assert unnamed(interrupted, _ended(80, named=(40, 80))) == mistake
    assert unnamed(well, _ended(100)) == unnamed(interrupted, _ended(101, named=(80,))) == ""


def test_who_may_end_without_the_name_of_its_last_checkpoint() -> None:
    well, interrupted = {"n0": 0, "n1": 13}, {"n1": 15, "n2": 15}
    assert unnamed({"n1": 13}, _ended(80, named=(80,))) == "", "it did not end well"
    assert unnamed(well, _ended(80, first=100)) == "", "replica 0 was the writer, and was lost in its last save"
    assert unnamed(well, _ended(80, last_generation=3)) == "", "somebody was lost in the last save: maybe the writer"
    assert unnamed(interrupted, _ended(80, named=(100,))) == "", "without a coordinator it never got a grant"
    assert unnamed({"n1": 0, "n2": 13}, _ended(80, named=(80,))) == "", "the coordinator may have been lost at the end"
    assert unnamed({}, History([])) == ""


def test_only_replicas_on_nodes_without_power_are_fenced_by_nobody() -> None:
    assert struck(1).hosted([]) == set()
    assert struck(1).hosted([1]) == {2, 3}
    assert struck(1).hosted([0, 3]) == {0, 1, 6, 7}
    assert Plan(1, 3, 3, 2, (), None).hosted([2]) == {2}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("seed", "lease_s", "lapse_s", "long_s", "mistakes", "fault"),
    [
        (
            1,
            2.5,
            LAPSE_S,
            7.0,
            {"ignores_refusal": True},
            "FAILED: replica 2 began to name the checkpoint of iteration 40",
        ),
        (2, 2.5, LAPSE_S, 7.0, {"ignores_others": True}, "FAILED: the newest name went back from"),
        (1, 6.0, -6.0, 3.0, {}, "FAILED: replica 2 began to name the checkpoint of iteration 40"),
        (1, 2.5, LAPSE_S, 0.0, {"forgets_last": True}, "FAILED: the newest name is of iteration 380, and replica 4"),
        (1, 6.0, LAPSE_S, 7.0, {}, "passed"),
    ],
    ids=["refusal ignored", "others ignored", "grant at once", "last forgotten", "no mistake"],
)
def test_a_planted_mistake_is_found(
    cage: Cage, tmp_path: Path, seed: int, lease_s: float, lapse_s: float, long_s: float, mistakes: dict[str, bool], fault: str
) -> None:
    """The writer's node is cut off in the pause of the writer, which wakes up when another one has named.

    The last mistake is a coordinator's that gives a grant as soon as its holder is lost. The seed decides whether the pause is
    before the writer asks for its right, or between that and the rename.
    """
    cut = Strike("cut off", 1, 40)
    plan = Plan(seed, 3, 6, 1, (cut,), None, lease_s=lease_s, long_s=long_s, empties_node_0=True)
    run = Run(cage, tmp_path / "run", plan, lapse_s=lapse_s, **mistakes)
    try:
        verdict = run.play()
        assert verdict.startswith(fault), f"{verdict}\n{run.job.output()}"
    finally:
        run.network.close()
