"""The nemesis does what its seed says, and its judge sees what is wrong."""

from __future__ import annotations

import pytest

from tests.nodes.nemesis import LONG_S, NODE_TIMEOUT_S, SHORT_S, Plan, Strike, plan, wrong_end


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
    assert "no replica has applied all steps" in wrong_end(struck(1), {"n0": 0}, 0)


def test_only_replicas_on_nodes_without_power_are_fenced_by_nobody() -> None:
    assert struck(1).hosted([]) == set()
    assert struck(1).hosted([1]) == {2, 3}
    assert struck(1).hosted([0, 3]) == {0, 1, 6, 7}
    assert Plan(1, 3, 3, 2, (), None).hosted([2]) == {2}
