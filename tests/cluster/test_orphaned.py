"""A launcher whose coordinator is lost: which exit code its ranks' ends make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_recover.cluster import other_ends
from megatron_recover.cluster.coordinator_loss import CoordinatorLoss
from megatron_recover.cluster.fences import Fences
from megatron_recover.cluster.job import LAUNCHER_LOG
from megatron_recover.cluster.node import ProcessEnd
from megatron_recover.cluster.seats import Seats
from megatron_recover.core.exit_code import ExitCode


def _facts(**given: Any) -> Any:
    """Return what a launcher knows: its job, deadlines, loop and what others have told it."""
    facts: Any = SimpleNamespace(
        nodes=(), node=0, silence_s=1.0, node_s=10.0, deadline_s=60.0, now=0.0, hosts={}, num_signals=0, said=[]
    )  # fmt: skip
    facts.says, facts.time = facts.said.append, lambda: facts.now
    facts.__dict__.update(given)
    return facts


def _loss(fences: Any, ends: list[int], facts: Any) -> CoordinatorLoss:
    """Return the loss of the coordinator on a node whose exit code is appended to `ends`."""

    def end(code: int, reason: str) -> None:
        ends.append(code)
        facts.said.append(reason)

    return CoordinatorLoss(
        facts, facts, fences, loop=facts, deadlines=facts, end=end,
        hosts=lambda: facts.hosts, num_signals=lambda: facts.num_signals,
    )  # fmt: skip


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
    loss = _loss(fences, ends, _facts())
    loss.begin("closed by the other end", has_begun=True)
    for rank, status in enumerate(statuses):
        loss.ended(ProcessEnd(0, rank, status), has_begun=True)
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
    loss = _loss(fences, ends, _facts(nodes=nodes, node=node))
    for is_nobody_left, silent_s in ((False, 61.0), (True, 9.0)):
        fences.is_nobody_left = is_nobody_left
        loss.look(silent_s, is_gone=False, has_begun=True)
        loss.end_alone(has_begun=True)
        assert not ends and not loss.has_given_up
    loss.look(60.0, is_gone=False, has_begun=True)
    loss.end_alone(has_begun=True)
    assert ends == [ExitCode.NO_REPLICA_LEFT] and loss.has_given_up


def test_a_signal_is_promised_what_becomes_of_it_with_a_coordinator_a_silent_one_and_none() -> None:
    fences: Any = SimpleNamespace(is_nobody_left=False)
    loss = _loss(fences, [], _facts(nodes=("a", "b"), node=1))
    together = "all replicas end after the same step, with a checkpoint if --save is set"
    assert loss.promise() == together
    loss.look(2.0, is_gone=False, has_begun=True)
    assert loss.promise() == f"once the coordinator is heard again, {together}"
    loss.look(12.0, is_gone=False, has_begun=True)
    assert loss.promise() == (
        "nothing was heard of the coordinator for 12 s, and without it no common step can be chosen; training ends at the next "
        "save point"
    )
    loss.look(0.1, is_gone=False, has_begun=True)
    assert loss.promise() == together
    loss.begin("closed by the other end", has_begun=True)
    assert loss.promise().startswith("the coordinator is gone (closed by the other end), and without it")


class _Waits:
    """Node 0 without ranks and without a coordinator, beside nodes whose files the test writes."""

    def __init__(self, run_dir: Path, *hosts: int, num_signals: int) -> None:
        self.run_dir, self.ends = run_dir, list[int]()
        fences: Any = SimpleNamespace(is_nobody_left=True)
        names = tuple(SimpleNamespace(name=f"n{number}") for number in range(3))
        where = {number: f"n{number}" for number in hosts}
        self.facts = _facts(nodes=names, run_dir=run_dir, hosts=where, num_signals=num_signals)
        self.loss = _loss(fences, self.ends, self.facts)
        self.loss.begin("closed by the other end", has_begun=True)
        self.turn()

    def turn(self) -> None:
        if not self.ends:
            self.loss.end_alone(has_begun=True)

    def write(self, node: int, exit_code: int | None) -> None:
        folder = self.run_dir / "nodes" / str(node)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "events.jsonl", "a", encoding="utf-8") as file:
            event = '"run_finished","t":1.0,"reason":"saved","exit_code":' if exit_code is not None else '"entered","replica":'
            file.write(f'{{"event":{event}{exit_code or 0}}}\n')

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end
            self.turn()
            time.sleep(0.01)


@pytest.fixture
def make_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., _Waits]]:
    monkeypatch.setattr(other_ends, "_LOOK_S", 0.01)
    made: list[_Waits] = []

    def making(*hosts: int, num_signals: int = 0) -> _Waits:
        made.append(_Waits(tmp_path / str(len(made)), *hosts, num_signals=num_signals))
        return made[-1]

    yield making
    for waits in made:
        waits.loss._close_wait()


def test_node_0_without_ranks_takes_the_end_of_the_nodes_that_train_on(make_waits: Callable[..., _Waits]) -> None:
    waits = make_waits(1, 2)
    assert not waits.ends and "waits for the end of the job on n1, n2" in waits.facts.said[-1]
    waits.write(1, None)
    waits.write(2, ExitCode.NO_REPLICA_LEFT)
    waits.until(lambda: waits.loss._others._ends)  # type: ignore[union-attr]
    for _ in range(5):
        waits.turn()
    assert not waits.ends and not waits.loss.knows_end, "node 2 has lost its replicas, and node 1 goes on"
    waits.write(1, ExitCode.INTERRUPTED)
    waits.until(lambda: waits.ends)
    assert waits.ends == [ExitCode.INTERRUPTED] and waits.loss.knows_end


def test_node_0_without_ranks_ends_at_once_if_no_other_node_has_any(make_waits: Callable[..., _Waits]) -> None:
    waits = make_waits(0)
    assert waits.ends == [ExitCode.NO_REPLICA_LEFT] and waits.loss.knows_end


@pytest.mark.parametrize("name", ["events.jsonl", LAUNCHER_LOG])
def test_node_0_awaits_a_node_whose_trace_or_log_still_grows(make_waits: Callable[..., _Waits], name: str) -> None:
    """With `--trace-level faults` the lines of its launcher are the only sign."""
    waits = make_waits(1)
    folder = waits.run_dir / "nodes" / "1"
    folder.mkdir(parents=True)
    others: Any = waits.loss._others
    for now in (40.0, 80.0, 120.0):
        waits.facts.now = now
        before = others._signs.get(1)
        with open(folder / name, "a", encoding="utf-8") as file:
            file.write("training goes on\n")
        waits.until(lambda before=before: waits.ends or any(others._signs.get(1, ())) and others._signs.get(1) != before)
        assert not waits.ends


@pytest.mark.parametrize("is_shared", [True, False])
def test_node_0_awaits_no_node_that_writes_nothing_for_the_deadline_and_claims_no_end_that_it_cannot_know(
    make_waits: Callable[..., _Waits], is_shared: bool
) -> None:
    waits = make_waits(1)
    if is_shared:
        waits.facts.now = 59.0
        waits.write(1, None)
        waits.until(lambda: waits.loss._others._signs.get(1, (None,))[0])  # type: ignore[union-attr]
        waits.facts.now = 118.0
        waits.turn()
        assert not waits.ends, "it has written something"
    waits.facts.now += 60.0
    waits.until(lambda: waits.ends)
    assert waits.ends == [ExitCode.NO_REPLICA_LEFT] and waits.loss.knows_end == is_shared


@pytest.mark.parametrize("is_shared", [True, False])
def test_node_0_claims_no_end_after_that_of_one_node_while_another_was_never_seen(
    make_waits: Callable[..., _Waits], is_shared: bool
) -> None:
    """Node 1 has lost its replicas. Node 2 may train on, if nothing of it is visible here."""
    waits = make_waits(1, 2)
    waits.write(1, ExitCode.NO_REPLICA_LEFT)
    if is_shared:
        waits.write(2, None)
    others: Any = waits.loss._others
    waits.until(lambda: others._ends and 2 in others._signs and (others._signs[2][0] is not None) == is_shared)
    waits.facts.now += 60.0
    waits.until(lambda: waits.ends)
    assert waits.ends == [ExitCode.NO_REPLICA_LEFT] and waits.loss.knows_end == is_shared
    if not is_shared:
        assert "nothing was heard or seen of n2 for 60 s, and" in waits.facts.said[-1], "n1 has ended"


@pytest.mark.parametrize(("node", "has_begun", "expected"), [(1, False, False), (1, True, True), (0, False, True)])
def test_a_node_whose_coordinator_was_silent_before_training_claims_no_end_of_the_job(
    node: int, has_begun: bool, expected: bool
) -> None:
    """The others may have a generation that this node has not heard of. Node 0 kills the coordinator."""
    ends: list[int] = []
    fences: Any = SimpleNamespace(is_nobody_left=True)
    loss = _loss(fences, ends, _facts(nodes=("a", "b"), node=node))
    loss.look(60.0, is_gone=False, has_begun=has_begun)
    loss.end_alone(has_begun=has_begun)
    assert ends == [ExitCode.NO_REPLICA_LEFT] and loss.knows_end == expected


@pytest.mark.parametrize(("has_begun", "expected"), [(False, False), (True, True)])
def test_a_node_whose_rank_gives_up_a_silent_coordinator_before_training_claims_no_end_of_the_job(
    has_begun: bool, expected: bool
) -> None:
    ends: list[int] = []
    fences: Any = SimpleNamespace(is_nobody_left=False)
    loss = _loss(fences, ends, _facts(nodes=("a", "b"), node=1))
    loss.look(20.0, is_gone=False, has_begun=has_begun)
    loss.ended(ProcessEnd(0, 0, ExitCode.NO_REPLICA_LEFT), has_begun=has_begun)
    assert ends == [ExitCode.NO_REPLICA_LEFT] and loss.knows_end == expected


def test_a_signal_ends_the_wait_of_node_0_which_then_claims_no_end_of_the_job(make_waits: Callable[..., _Waits]) -> None:
    """One that came before the wait does not: it has requested the end of training, which the others may still save."""
    waits = make_waits(1, num_signals=2)
    waits.turn()
    assert not waits.ends
    assert waits.loss.promise() == "this node waits no longer; n1 may train on to the next save point"
    waits.facts.num_signals += 1
    waits.turn()
    assert waits.ends == [ExitCode.INTERRUPTED] and not waits.loss.knows_end
    assert "where the job may go on: start none on the same --save" in waits.facts.said[-1]


def test_a_coordinator_that_is_heard_again_decides_again(make_waits: Callable[..., _Waits]) -> None:
    waits = make_waits(1)
    waits.loss.has_given_up = True  # it was only stopped
    waits.loss.look(0.0, is_gone=False, has_begun=True)
    waits.turn()
    assert not waits.ends and not waits.loss.why and waits.loss.knows_end


def test_a_node_without_its_coordinator_shows_that_it_lives_more_often_than_others_would_give_it_up() -> None:
    fences: Any = SimpleNamespace(is_nobody_left=False)
    facts = _facts(nodes=("a", "b"), node=1)
    loss = _loss(fences, [], facts)
    loss.begin("closed by the other end", has_begun=True)
    for now in range(0, 60, 5):
        facts.now = now
        loss.look(0.0, is_gone=True, has_begun=True)
    assert len(facts.said) == 3 and len(set(facts.said)) == 1


def test_a_node_whose_ranks_still_load_promises_no_training_when_its_coordinator_is_silent() -> None:
    fences: Any = SimpleNamespace(is_nobody_left=False)
    facts = _facts(nodes=("a", "b"), node=1)
    loss = _loss(fences, [], facts)
    for silent_s in (10.0, 11.0):
        loss.look(silent_s, is_gone=False, has_begun=False)
    assert loss.why and facts.said == ["nothing was heard of the coordinator for 10 s: this node may be cut off"]
    loss.look(12.0, is_gone=False, has_begun=True)
    [line] = facts.said[1:]
    assert line.endswith("for 11 s: training goes on to the next save point, and ends there")


def test_a_node_that_ends_alone_records_the_end_of_each_rank_that_nobody_had_fenced() -> None:
    recorded: list[Any] = []
    ended: list[tuple[int, int]] = []
    job: Any = SimpleNamespace(replicas_here=(1, 2, 3), slots=lambda replica: {0: 2 * replica, 1: 2 * replica + 1})
    recording: Any = SimpleNamespace(record=recorded.append, ended=lambda *rank: ended.append(rank))
    unused: Any = None
    fences = Fences(job, Seats(job), unused, recording, loop=unused, deadlines=unused, send=unused)
    fences.gone.add(1)
    fences.set_aside.add((3, 1))
    fences.end_alone()
    assert [(event.replica, event.ranks) for event in recorded] == [(2, (0, 1)), (3, (0,))]
    assert ended == [(2, 0), (2, 1), (3, 0)]
