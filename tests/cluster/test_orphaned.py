"""A launcher whose coordinator is lost: which exit code its ranks' ends make."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_recover.cluster.coordinator_loss import CoordinatorLoss
from megatron_recover.cluster.fences import Fences
from megatron_recover.cluster.node import ProcessEnd
from megatron_recover.core.exit_code import ExitCode


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([ExitCode.INTERRUPTED, ExitCode.INTERRUPTED], ExitCode.INTERRUPTED),
        ([ExitCode.OK, ExitCode.OK], ExitCode.OK),
        ([ExitCode.INTERRUPTED, -9], ExitCode.NO_REPLICA_LEFT),
        ([], ExitCode.NO_REPLICA_LEFT),
    ],
)
def test_the_code_of_ranks_that_end_together_is_kept_until_their_deaths_are_confirmed(
    statuses: list[int], expected: int
) -> None:
    ends: list[int] = []
    fences: Any = SimpleNamespace(is_nobody_left=not statuses)
    anything: Any = SimpleNamespace(says=lambda text: None)
    loss = CoordinatorLoss(anything, anything, fences, deadlines=anything, end=lambda code, reason: ends.append(code))
    loss.begin("closed by the other end", has_begun=True)
    for rank, status in enumerate(statuses):
        loss.ended(ProcessEnd(0, rank, status))
        loss.end_alone(has_begun=True)
    assert not ends or ends == [ExitCode.NO_REPLICA_LEFT]
    fences.is_nobody_left = True
    loss.end_alone(has_begun=True)
    assert ends[0] == expected


@pytest.mark.parametrize(("nodes", "node"), [((), 0), (("a", "b"), 0), (("a", "b"), 1)])
def test_a_coordinator_that_stays_silent_is_given_up_on_any_node_once_no_rank_is_left(
    nodes: tuple[str, ...], node: int
) -> None:
    ends: list[int] = []
    fences: Any = SimpleNamespace(is_nobody_left=False)
    anything: Any = SimpleNamespace(
        says=lambda text: None, silence_s=1.0, nodes=nodes, node=node, node_s=10.0, deadline_s=60.0
    )  # fmt: skip
    loss = CoordinatorLoss(anything, anything, fences, deadlines=anything, end=lambda code, reason: ends.append(code))
    for is_nobody_left, silent_s in ((False, 61.0), (True, 9.0)):
        fences.is_nobody_left = is_nobody_left
        loss.look(silent_s, is_gone=False)
        loss.end_alone(has_begun=True)
    assert not ends and not loss.has_given_up
    loss.look(60.0, is_gone=False)
    loss.end_alone(has_begun=True)
    assert ends == [ExitCode.NO_REPLICA_LEFT] and loss.has_given_up


def test_a_signal_is_promised_what_becomes_of_it_with_a_coordinator_a_silent_one_and_none() -> None:
    anything: Any = SimpleNamespace(says=lambda text: None, silence_s=1.0, nodes=("a", "b"), node=1, node_s=10.0)
    anything.deadline_s, anything.is_nobody_left = 60.0, False
    loss = CoordinatorLoss(anything, anything, anything, deadlines=anything, end=lambda code, reason: None)
    together = "all replicas end after the same step, with a checkpoint if --save is set"
    assert loss.promise() == together
    loss.look(2.0, is_gone=False)
    assert loss.promise() == f"once the coordinator is heard again, {together}"
    loss.look(12.0, is_gone=False)
    assert loss.promise() == (
        "nothing was heard of the coordinator for 12 s, and without it no common step can be chosen; training ends at the next "
        "save point"
    )
    loss.look(0.1, is_gone=False)
    assert loss.promise() == together
    loss.begin("closed by the other end", has_begun=True)
    assert loss.promise().startswith("the coordinator is gone (closed by the other end), and without it")


def test_a_node_that_ends_alone_records_the_end_of_each_rank_that_nobody_had_fenced() -> None:
    recorded: list[Any] = []
    ended: list[tuple[int, int]] = []
    job: Any = SimpleNamespace(replicas_here=(1, 2, 3), slots=lambda replica: (0, 1))
    recording: Any = SimpleNamespace(record=recorded.append, ended=lambda *rank: ended.append(rank))
    unused: Any = None
    fences = Fences(job, unused, recording, loop=unused, deadlines=unused, send=unused)
    fences.gone.add(1)
    fences.set_aside.add((3, 1))
    fences.end_alone()
    assert [(event.replica, event.ranks) for event in recorded] == [(2, (0, 1)), (3, (0,))]
    assert ended == [(2, 0), (2, 1), (3, 0)]
