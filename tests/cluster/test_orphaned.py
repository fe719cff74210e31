"""A launcher whose coordinator is lost: which exit code its ranks' ends make."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_recover.cluster.launcher import Launcher
from megatron_recover.cluster.node import ProcessEnd
from megatron_recover.core.values import ExitCode


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
    living = [len(statuses)]
    launcher: Any = SimpleNamespace(
        _orphaned="the coordinator is gone", _ended_together=None, _generation=1, _set_aside=set(),
        _node=SimpleNamespace(num_living=lambda: living[0]), _end=lambda code, reason: ends.append(code),
    )  # fmt: skip
    for rank, status in enumerate(statuses):
        Launcher._ended_alone(launcher, ProcessEnd(0, rank, status))
        Launcher._end_alone(launcher)
    assert not ends or ends == [ExitCode.NO_REPLICA_LEFT]
    living[0] = 0
    Launcher._end_alone(launcher)
    assert ends[0] == expected
