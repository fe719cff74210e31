"""Ranks are asked for their stacks: that ends none that is healthy, and charges none that is about to be fenced anyway."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_recover.cluster.agent import Agent
from megatron_recover.cluster.node import ProcessEnd
from megatron_recover.cluster.output import Output, create
from megatron_recover.cluster.rank_process import STACK_SIGNAL
from megatron_recover.cluster.watch import Watch
from megatron_recover.core import detector
from megatron_recover.core.membership_messages import LossKind, ReplicaFailing
from megatron_recover.core.progress import Phase
from megatron_recover.core.verdict import Condemned, Named, Verdict
from megatron_recover.deadlines import Deadlines
from tests.cluster.waiting import until_readable

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import json, sys, threading, time
begun = threading.Event()
def work():
    begun.set()
    while "busy" in sys.argv:
        json.loads(json.dumps({"a": list(range(50)), "b": {"c": "x" * 50}}, indent=1))
    time.sleep(3600)
threading.Thread(target=work, daemon=True).start()
begun.wait()
def train():
    print("it trains")
    while True:
        time.sleep(3600)
train()
"""
HEADER = "most recent call first"


@pytest.fixture
def rank(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Agent, Output]]:
    """A rank whose training thread, with `train` on its stack, waits while another thread computes (`busy`), or waits too."""
    (tmp_path / "script.py").write_text(SCRIPT)
    agent = Agent(preload=(), environment=dict(os.environ), output=create(tmp_path / "server.log"))
    try:
        until_readable(agent.fileno(), agent.is_ready, "the fork server")
        output = create(tmp_path / "rank.log")
        agent.spawn(1, 0, argv=(str(tmp_path / "script.py"), request.param), environment={}, output=output)
        until(lambda: "it trains" in printed(output))
        yield agent, output
    finally:
        agent.close()


def until(holds: Callable[[], object]) -> None:
    give_up = time.monotonic() + 50
    while not holds():
        assert time.monotonic() < give_up, "too late"
        time.sleep(0.002)


def printed(output: Output) -> str:
    return os.pread(output.descriptor, 2**24, 0).decode()


@pytest.mark.parametrize("rank", ["busy"], indirect=True)
@pytest.mark.parametrize("kernel", ["6.9", "6.8"])
def test_a_healthy_rank_survives_being_asked_for_its_stack(
    rank: tuple[Agent, Output], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the stacks of all threads this rank died by SIGSEGV after 74 to 231 times: CPython follows frames that change."""
    agent, output = rank
    real = signal.pidfd_send_signal

    def older(pidfd: int, number: int, info: None = None, flags: int = 0) -> None:
        if flags:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(pidfd, number, info, flags)

    if kernel == "6.8":
        monkeypatch.setattr(signal, "pidfd_send_signal", older)
    process = agent._processes[1, 0]
    for number in range(1, 501):
        agent.ask_for_stacks(1, of_all_threads=False)
        until(lambda number=number: printed(output).count(HEADER) == number or agent.poll())
        until(lambda: process.has_handled(STACK_SIGNAL))  # a dump beside another one is left out
        assert agent.num_living() == 1, f"it was ended by being asked {number} times"
    stacks = printed(output)
    assert stacks.count("in train") == stacks.count(HEADER) == 500, "another thread wrote its stack"


@pytest.mark.parametrize("rank", ["idle"], indirect=True)
def test_a_rank_that_is_to_be_fenced_writes_the_stacks_of_all_its_threads(rank: tuple[Agent, Output]) -> None:
    """Of a thread that runs meanwhile nothing is certain."""
    agent, output = rank
    agent.ask_for_stacks(1, of_all_threads=True)
    until(lambda: agent.have_written_stacks(1))
    assert printed(output).count(HEADER) >= 2 and "in train" in printed(output) and "in work" in printed(output)


class Asked:
    """An agent that notes whom it asks for stacks, which are never written."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []

    def ask_for_stacks(self, replica: int, *, of_all_threads: bool) -> None:
        self.asked.append((replica, of_all_threads))

    def have_written_stacks(self, replica: int) -> bool:
        return False

    def pid(self, replica: int, rank: int) -> int:
        return os.getpid()

    def page(self, replica: int, rank: int) -> SimpleNamespace:
        return SimpleNamespace(microbatches=(7,), phase=Phase.FORWARD, label="train 21", ahead=None)


HUNG = [Named(replica, 0, Verdict.HUNG, Phase.FORWARD, 3.0, 2.0, "S", 20, "train 21", (3,)) for replica in range(2)]
FAILING = ReplicaFailing(1, "train 21", (3,), "it hangs", witnessed=True)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watch, Asked]]:
    """A watch that has just found that replicas 0 and 1 hang, and that the second is to be fenced for it."""
    agent = Asked()
    made = Watch(
        agent, deadlines=Deadlines.of(60.0), log_of=lambda *rank: Path("rank.log"), record=lambda event: None,
        says=lambda line: None, at_work=lambda replicas: None, clock=lambda: 100.0,
    )  # type: ignore[arg-type]  # fmt: skip
    found = (*HUNG, Condemned(HUNG[1], FAILING))
    monkeypatch.setattr(detector, "step", lambda state, look: (state, () if look.are_newcomers else found))
    assert made.look(1, (0, 1)) == []
    yield made, agent


def test_only_a_replica_that_is_to_be_fenced_is_asked_for_all_threads(watch: tuple[Watch, Asked]) -> None:
    _, agent = watch
    assert agent.asked == [(0, False), (1, True)]


def test_a_rank_that_dies_while_it_writes_its_stacks_is_lost_as_its_replica_would_have_been(
    watch: tuple[Watch, Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = watch
    loss, failing = made.loss(ProcessEnd(1, 0, -signal.SIGSEGV), started=True)
    assert (loss.kind, failing) == (LossKind.HUNG, FAILING) and "hung" in loss.detail and "SIGSEGV" in loss.detail
    loss, failing = made.loss(ProcessEnd(0, 0, -signal.SIGSEGV), started=True)
    assert loss.kind is LossKind.CRASHED and failing is not None and failing.microbatches == (7,)
