"""Real processes whose leaders tell each other status and vote along a tree, killed at its root, inside it and at a leaf."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recover import trace
from megatron_recover.config import RecoverConfig
from tests.cluster.jobs import Spec, run
from tests.cluster.test_kills import fault, survivors_of

pytestmark = pytest.mark.timeout(180)

# Of seven replicas 0 is above 1 and 2, 1 above 3 and 4, 2 above 5 and 6; who is lost shifts all behind it. An inner member
# passes the point twice a step: as it hands votes up, and as it hands all of them down.
KILLS = (
    "1 0 in_vote #3",
    "5 0 in_vote 2",
    "0 0 in_vote 3",
    "2 0 status #4",
)


def test_a_tree_of_leaders_survives_kills_of_its_root_of_an_inner_member_and_of_a_leaf(tmp_path: Path) -> None:
    faults = tuple(map(fault, KILLS))
    config = RecoverConfig(tree_above=2)
    outcome = run(Spec(run_dir=str(tmp_path / "run"), replicas=7, ranks=1, steps=6, config=config, faults=faults))
    outcome.assert_finished(survivors_of(7, faults))
    assert len(outcome.of(trace.Fault)) == len(faults), "a fault did not strike"
