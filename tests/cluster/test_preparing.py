"""A node before its first rank: it waits no longer for a coordinator that has fallen silent, and claims no end of the job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron_recover import trace
from megatron_recover.cluster.examination import _Exchange
from megatron_recover.cluster.joining import NotMet, Place
from megatron_recover.cluster.launcher import Launcher
from megatron_recover.cluster.meeting import Meeting
from megatron_recover.cluster.membership import CoordinatorProcess, Joined, Membership
from megatron_recover.cluster.preparing import Preparation
from megatron_recover.cluster.run_end import RunEnd
from megatron_recover.cluster.signals import EndRequest
from megatron_recover.control_plane.node_messages import EndAsked, NodeHello
from megatron_recover.control_plane.node_watch import PREPARING_SILENCES
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import Deadlines
from tests import forks
from tests.cluster.jobs import ROOT, Spec, command
from tests.cluster.waiting import until_ended
from tests.host.test_addresses import free_range

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
    assert _of_silence(str(of_this_one.value)) and membership.has_given_up


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
    assert membership.has_given_up


@pytest.mark.parametrize("is_heard", [True, False])
@pytest.mark.parametrize("how", ["signal", "deadline"])
def test_an_end_of_the_start_is_one_by_silence_only_if_nothing_was_heard(
    how: str, is_heard: bool, clock: Any, membership: Membership
) -> None:
    """A start that ends for another reason leaves a coordinator that is heard to itself."""
    ends: list[int] = []
    end: Any = SimpleNamespace(is_requested=False, has_come=False, signal_name="SIGTERM")
    end.fail = end.begin = lambda code, reason: ends.append(code)
    unused: Any = None

    def turn() -> None:
        clock.run_once()
        if is_heard:
            membership.listen_anew()
        end.is_requested = how == "signal" and clock.now > 10.0 + NODE_S

    preparation = Preparation(
        SimpleNamespace(nodes=(SimpleNamespace(name="a"),) if is_heard else (), node=0), unused, unused, unused,  # type: ignore[arg-type]
        loop=clock, deadlines=DEADLINES, end=end, membership=membership, turn=turn,
    )  # fmt: skip
    assert preparation._until(lambda: None, lambda: "late") is None
    assert ends == [ExitCode.INTERRUPTED if how == "signal" else ExitCode.FAILED]
    assert membership.has_given_up == (not is_heard)


@pytest.mark.parametrize("names", [("a", "b"), ()])
def test_a_node_that_gets_a_signal_as_it_prepares_ends_with_the_line_that_the_others_get(
    clock: Any, membership: Membership, names: tuple[str, ...]
) -> None:
    sent: list[Any] = []
    request = EndRequest()
    unused: Any = None
    job: Any = SimpleNamespace(nodes=[SimpleNamespace(name=name) for name in names], node=1, shutdown_s=None)
    end = RunEnd(
        job, loop=clock, deadlines=DEADLINES, says=lambda line: None, send=sent.append, has_begun=lambda: False,
        promise=unused, is_alone=lambda: False, request=request,
    )  # fmt: skip
    preparation = Preparation(
        job, unused, unused, unused, loop=clock, deadlines=DEADLINES, end=end, membership=membership, turn=unused
    )
    for number in (signal.SIGUSR2, signal.SIGTERM):
        end._signalled(number)
    assert preparation._until(lambda: None, lambda: "late") is None
    assert sent == [EndAsked("SIGUSR2")]
    assert end.exit_code == ExitCode.INTERRUPTED
    assert end.reason == ("b: " if names else "") + "SIGUSR2 before training began"


@pytest.mark.parametrize(("node", "has_given_up", "expected"), [(0, True, True), (1, True, False), (1, False, True)])
def test_only_the_node_of_the_coordinator_knows_that_its_silence_ends_the_job(
    node: int, has_given_up: bool, expected: bool
) -> None:
    """It kills the coordinator, without which no job can begin. For another node the job may go on elsewhere."""
    launcher = Launcher.__new__(Launcher)
    parts: Any = SimpleNamespace(
        job=SimpleNamespace(node=node), loss=SimpleNamespace(knows_end=True),
        joined=SimpleNamespace(membership=SimpleNamespace(has_given_up=has_given_up)),
    )  # fmt: skip
    launcher._job, launcher._loss, launcher._joined = parts.job, parts.loss, parts.joined
    assert launcher.knows_end == expected


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is stopped, in the place of a coordinator."""
    process = subprocess.Popen(["sleep", "600"])
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    yield process
    process.kill()
    process.wait()


def _owner(process: subprocess.Popen[bytes], membership: Any, loop: Any) -> Joined:
    """Return the place of the node that has started the coordinator `process`, among two nodes."""
    coordinator = CoordinatorProcess.__new__(CoordinatorProcess)
    coordinator.process = process
    met: Any = SimpleNamespace(nodes=(0, 1))
    return Joined(membership, loop, b"k", None, 0, coordinator, None, met)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_given_up", [True, False])
def test_a_coordinator_that_was_given_up_for_its_silence_is_killed_also_if_it_is_stopped(
    has_given_up: bool, stopped: subprocess.Popen[bytes]
) -> None:
    membership: Any = SimpleNamespace(close=lambda: None, has_given_up=has_given_up)
    seen = psutil.Process(stopped.pid)
    _owner(stopped, membership, None).close(DEADLINES)
    is_left = seen.is_running() and seen.status() == psutil.STATUS_STOPPED
    assert is_left is not has_given_up, "other nodes may need one that is heard"


@pytest.mark.parametrize("kept", ["", "SIGTERM"])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_node_that_meets_nobody_kills_its_own_coordinator_that_does_not_answer(
    is_known: bool, kept: str, stopped: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Membership, "_connect", lambda self: None)
    loop: Any = _Clock()
    loop.close = lambda: None
    hello, unused = NodeHello(1, "b", 1), None
    membership = Membership(
        "127.0.0.1:1", hello, key=b"k", clock=unused, loop=loop, deadlines=DEADLINES, patience_s=60.0  # type: ignore[arg-type]
    )  # fmt: skip
    membership.is_known = is_known
    membership._link = SimpleNamespace(refusal="", wants_write=False)  # type: ignore[assignment]
    loop.send = loop.drop = lambda *_: None
    request: Any = SimpleNamespace(kept=kept, numbers=())
    place = Place(Meeting(least_nodes=2, most_nodes=2, host="127.0.0.1", join_s=3, node_s=NODE_S), DEADLINES, EndRequest())
    place._request = request
    with pytest.raises(NotMet) as end:
        place._wait(_owner(stopped, membership, loop), "127.0.0.1:1", "")
    of_silence = ExitCode.FAILED if is_known else ExitCode.TOO_FEW_REPLICAS
    assert end.value.exit_code == (ExitCode.INTERRUPTED if kept else of_silence)
    assert stopped.wait(10) == -signal.SIGKILL


def until(condition: Callable[[], object], what: str) -> None:
    """Return when `condition()` holds."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"not within a minute: {what}"
        time.sleep(0.05)


@pytest.mark.timeout(150)
def test_a_coordinator_that_is_stopped_before_ranks_start_is_killed_and_other_nodes_claim_no_end(tmp_path: Path) -> None:
    """A batch system would act on the end, and in a chain a mark would stay."""
    first, last = free_range("127.0.0.2", 12)
    (key := tmp_path / "key").write_text("a key that only this test knows of\n")
    key.chmod(0o600)
    (script := tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")  # its dry run does not end
    run_dir = tmp_path / "run"
    folders = [run_dir, run_dir / "nodes" / "1"]
    with contextlib.ExitStack() as stack:
        nodes = []
        for node in range(2):
            meeting = Meeting(
                least_nodes=2, most_nodes=2, node_rank=node, host="127.0.0.2", port=last, flag="--master-addr", join_s=60,
                local_addr=f"127.0.0.{2 + node}", ports=(first, last - 1), node_s=NODE_S,
            )  # fmt: skip
            spec = Spec(
                run_dir=str(run_dir), replicas=2, ranks=1, meeting=meeting, slots=1, key_file=str(key), script=str(script)
            )  # fmt: skip
            output = stack.enter_context(open(tmp_path / f"{node}.out", "wb"))
            nodes.append(forks.start(command(spec), cwd=ROOT, environment=os.environ, output=output.fileno()))
            stack.callback(nodes[-1].kill)
        logs = [folder / "launcher.log" for folder in folders]
        until(lambda: all(log.exists() and "importing" in log.read_text() for log in logs), "imports on both nodes")
        processes = [each for node in nodes for each in psutil.Process(node.pid).children()]
        [coordinator] = [each for each in processes if each.name() == "coordinator"]
        coordinator.send_signal(signal.SIGSTOP)
        stack.callback(lambda: coordinator.is_running() and coordinator.kill())
        until(lambda: all(each.poll() is not None for each in nodes), "the ends of both nodes")
        until_ended([coordinator], 10.0)
    texts = [(tmp_path / f"{node}.out").read_text() for node in range(2)]
    assert [each.poll() for each in nodes] == [ExitCode.FAILED] * 2, texts
    is_silent = ["nothing was heard of the coordinator" in text for text in texts]
    assert is_silent[0] and (is_silent[1] or "the coordinator is gone" in texts[1]), texts  # node 0 has killed it by then
    ends = [[event for _, event in trace.read(each) if isinstance(event, trace.RunFinished)] for each in folders]
    assert [len(each) for each in ends] == [1, not is_silent[1]], "node 0 ends the start, and node 1 does not know that"
