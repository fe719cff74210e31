"""Ranks of a toy job on several nodes hang: no agent sees all ranks, and the replica is fenced as on one node."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_recover import trace
from megatron_recover.config import RecoverConfig
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.faults import Fault, FaultKind, FaultPoint
from tests.nodes.jobs import NodesJob
from tests.nodes.nodes import Network

pytestmark = pytest.mark.timeout(180)
STEP = 100
"""Late enough for every agent to know how long steps take."""


@pytest.mark.parametrize(
    ("num_nodes", "kind"), [(2, FaultKind.LOOP), (4, FaultKind.LOOP), (4, FaultKind.STOP)], ids=["whole", "spread", "stopped"]
)
def test_a_replica_that_hangs_is_fenced_whether_it_is_on_one_node_or_two(
    make_network: Callable[..., Network], num_nodes: int, kind: FaultKind
) -> None:
    """With four nodes each of the two replicas has its two ranks on two nodes. Nothing but the detectors ends a rank."""
    fault = Fault(replica=1, rank=0, point=FaultPoint.BACKWARD, kind=kind, step=STEP)
    job = NodesJob(
        make_network(num_nodes), num_nodes=num_nodes, replicas=2, ranks=2, steps=STEP + 8, pace_s=0.003, faults=(fault,),
        node_silence_s=60.0, config=RecoverConfig(deadline_s=4500.0), deadlines={},
    )  # fmt: skip
    assert set(job.end().values()) == {0}, job.output()
    [loss] = [loss for event in job.outcome().of(trace.Generation) for loss in event.losses]
    assert (loss.replica, loss.kind) == (1, LossKind.HUNG), job.output()
    assert ("stopped" if kind is FaultKind.STOP else "hung") in loss.detail and "rank 0" in loss.detail
    assert job.history().faults() == [] and job.mistakes() == []
    job.network.assert_nothing_left()
