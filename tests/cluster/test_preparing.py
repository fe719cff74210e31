"""A node between `Met` and its first rank: it waits no longer for a coordinator that has fallen silent."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_recover.cluster.examination import _Exchange
from megatron_recover.cluster.joining import NotMet
from megatron_recover.cluster.membership import Membership
from megatron_recover.cluster.preparing import Preparation
from megatron_recover.control_plane.node_messages import NodeHello
from megatron_recover.control_plane.node_watch import PREPARING_SILENCES
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import Deadlines

NODE_S = 2.0
DEADLINES = Deadlines.of(600.0).with_node(NODE_S)


class _Clock:
    """A loop in which nothing arrives, and a second passes in each turn."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def run_once(self, seconds: float = 0.0) -> None:
        self.now += 1.0

    def after(self, seconds: float, call: object) -> None:
        pass


@pytest.fixture
def clock() -> Any:
    return _Clock()


@pytest.fixture
def membership(clock: Any, monkeypatch: pytest.MonkeyPatch) -> Membership:
    """The link to a coordinator that was heard last 10 s ago, and is not heard any more."""
    monkeypatch.setattr(Membership, "_connect", lambda self: None)
    unused: Any = None
    made = Membership(
        "node-a:29400", NodeHello(1, "b", 1), key=b"k", clock=unused, loop=clock, deadlines=DEADLINES, patience_s=60.0
    )  # fmt: skip
    clock.now += 10.0
    return made


def _of_silence(reason: str) -> bool:
    limit_s = PREPARING_SILENCES * NODE_S
    return reason.startswith(f"nothing was heard of the coordinator at node-a:29400 for {limit_s:.0f} s before training began;")


def test_a_node_that_is_examined_does_not_wait_a_deadline_for_a_silent_coordinator(clock: Any, membership: Membership) -> None:
    joined: Any = SimpleNamespace(membership=membership, loop=clock, request=None)
    exchange = _Exchange(joined, DEADLINES.deadline_s)
    with pytest.raises(NotMet) as of_others:
        exchange.share(0, b"", bytes, wanted=())
    assert of_others.value.exit_code == ExitCode.FAILED and _of_silence(str(of_others.value))
    assert clock.now == 10.0 + PREPARING_SILENCES * NODE_S
    with pytest.raises(NotMet) as of_this_one:
        _Exchange(joined, DEADLINES.deadline_s).wait_for(Future())
    assert _of_silence(str(of_this_one.value))


@pytest.mark.parametrize("nodes", [("a", "b"), ()])
def test_a_node_that_prepares_does_not_wait_a_deadline_for_a_silent_coordinator(
    clock: Any, membership: Membership, nodes: tuple[str, ...]
) -> None:
    failed: list[tuple[int, str]] = []
    end: Any = SimpleNamespace(is_requested=False, has_come=False)
    end.fail = lambda code, reason: (failed.append((code, reason)), setattr(end, "has_come", True))
    job: Any = SimpleNamespace(nodes=nodes)
    unused: Any = None
    preparation = Preparation(
        job, unused, unused, unused, loop=clock, deadlines=DEADLINES, end=end, membership=membership, turn=clock.run_once
    )
    assert preparation._until(lambda: None, lambda: "late") is None
    [(exit_code, reason)] = failed
    assert exit_code == ExitCode.FAILED
    assert _of_silence(reason) if nodes else reason == "late", "the coordinator of one node is waited for"
