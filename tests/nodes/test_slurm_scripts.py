"""Printed scripts with the real `run` under a real Slurm that has losses: who trains on, the verdict, what is left."""

from __future__ import annotations

import pytest

from tests.nodes import slurm_losses
from tests.nodes.nodes import Cage
from tests.nodes.slurm import Slurm, why_not
from tests.nodes.slurm_losses import NUM_NODES, Shape, Where
from tests.nodes.slurm_scripts import NODE_TIMEOUT_S, cancel, play, resume

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cage(cheap_cage: Cage) -> Cage:
    """Slurm starts the agents, so no fork of what is imported is of use."""
    return cheap_cage


@pytest.mark.parametrize("shape", Shape)
def test_a_node_without_power_costs_its_microbatches(slurm: Slurm, shape: Shape) -> None:
    result = play(slurm, slurm_losses.power, shape, Where.OTHER)
    assert len(result.going_on) == NUM_NODES - 1 and result.pause_s < NODE_TIMEOUT_S + 5.0, result
    assert (result.running.count("NODE_FAIL"), result.running.count("RUNNING")) == {
        Shape.ARRAY: (1, 2),
        Shape.ALLOCATION: (0, 1),
    }[shape]
    assert (result.has_ended, result.verdict, result.left) == (True, "requeue 15", {}), result


@pytest.mark.parametrize("shape", Shape)
def test_a_cancelled_job_leaves_nothing_though_its_save_takes_longer(slurm: Slurm, shape: Shape) -> None:
    result = play(slurm, cancel, shape, Where.BATCH_HOST)
    assert all(state.startswith("CANCELLED") for state in result.accounted) and result.left == {}, result


@pytest.mark.parametrize("shape", Shape)
def test_the_next_start_resumes_where_the_time_limit_ended_one(slurm: Slurm, shape: Shape) -> None:
    verdict, iteration = resume(slurm, shape)
    assert verdict == "requeue 15" and iteration > 0
