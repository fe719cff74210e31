"""The nemesis does what its seed says, and its judge sees what is wrong."""

from __future__ import annotations

from tests.nodes.nemesis import LONG_S, NODE_TIMEOUT_S, SHORT_S, plan


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
