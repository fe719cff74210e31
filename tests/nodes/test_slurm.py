"""A real Slurm on nodes that lose what a job needs: what becomes of the job, in each of its two shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.nodes.nodes import Cage
from tests.nodes.slurm import Slurm, why_not
from tests.nodes.slurm_losses import (
    CASES,
    ENDS_ALL,
    NEEDS_SCANCEL,
    NUM_NODES,
    SPARES_VICTIM,
    Shape,
    Where,
    cancel,
    play,
    srun_killed,
)

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cage(cheap_cage: Cage) -> Cage:
    """Nothing here imports torch."""
    return cheap_cage


def test_a_node_that_lost_its_power_is_down_and_comes_back(slurm: Slurm) -> None:
    names = slurm.run("srun", f"--nodes={NUM_NODES}", "hostname").split()
    assert sorted(names) == [node.name for node in slurm.nodes]
    slurm.nodes[1].power_off()
    slurm.until(lambda: slurm.states()["n1"].startswith("DOWN"), "n1 is down")
    slurm.nodes[1].power_on()
    slurm.start_node(slurm.nodes[1])
    slurm.until(lambda: slurm.states()["n1"] == "IDLE", "n1 is back")
    slurm.assert_nothing_left()


@pytest.mark.parametrize(
    ("strike", "shape", "where"), CASES, ids=[f"{strike.__name__}-{shape.value}-{where.name}" for strike, shape, where in CASES]
)
def test_a_loss(slurm: Slurm, strike: Callable, shape: Shape, where: Where) -> None:
    result = play(slurm, strike, shape, where)
    print(result)
    victim = slurm.nodes[0 if where is Where.BATCH_HOST else 1].name
    others = tuple(node.name for node in slurm.nodes if node.name != victim)
    assert result.left == {}
    if strike is cancel:
        assert result.going_on == ()
        assert all(state.startswith("CANCELLED") for state in result.accounted)
    elif (strike, shape, where) in ENDS_ALL:
        assert result.going_on == ()
    else:
        assert set(others) <= set(result.going_on), "the loss of one node ended what ran on others"
        assert result.pause_s < 2.0
        if strike is not srun_killed:  # it depends on when slurmstepd misses its srun
            assert (victim in result.going_on) == (strike in SPARES_VICTIM)
    assert result.has_ended == ((strike, shape, where) not in NEEDS_SCANCEL)
