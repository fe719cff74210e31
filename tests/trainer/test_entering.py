"""The way of a newcomer's ranks into the job, with members and a reader that the test plays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from megatron_recover import trace
from megatron_recover.core.membership_messages import JoinRefused
from megatron_recover.trainer.entering import NUM_TRIES, CannotJoin, Entering
from megatron_recover.trainer.state import Scalar, State
from megatron_recover.trainer.state_reader import Offer, Read, StateVoid

PATIENCE_S = 20
BEAT_S = 0.1
MEMBERS = ((4, "four"), (5, "five"))


class Stopped(SystemExit):
    """As `JobStopped`."""


class OneNumber(State):
    """A state of one tensor."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1)

    def values(self) -> Iterator[tuple[str, torch.Tensor | Scalar]]:
        yield "weight", self.weight


class Ranks:
    """All ranks of one newcomer, a thread each."""

    def __init__(self, num_ranks: int, patience_s: float = PATIENCE_S) -> None:
        """`patience_s`: the longest that a gather may take."""
        self.num_ranks = num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=patience_s)
        self.slots: list[Any] = [None] * num_ranks
        self.events: list[trace.Event] = []

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def of_rank(value: Any) -> list[Any]:
            self.slots[rank] = value
            self.barrier.wait()
            found = list(self.slots)
            self.barrier.wait()
            return found

        return of_rank

    def run(self, enter: Callable[[int], Any]) -> list[Any]:
        """What each rank's `enter(rank)` returned or raised."""
        found: list[Any] = [None] * self.num_ranks

        def life(rank: int) -> None:
            try:
                found[rank] = enter(rank)
            except BaseException as error:
                found[rank] = error

        threads = [threading.Thread(target=life, args=(rank,), daemon=True) for rank in range(self.num_ranks)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(PATIENCE_S)
            assert not each.is_alive(), "a rank waits for ever"
        return found


class Job:
    """Members that compute a step after the other, and what they answer to claims, in order."""

    def __init__(self, ranks: Ranks, answers: Sequence[str | JoinRefused | BaseException | None]) -> None:
        self.ranks, self.answers = ranks, list(answers)
        self.step = 0
        self.asked: list[tuple[str, int]] = []
        self.holds: list[tuple[str, int]] = []
        self.digests: list[tuple[int, str]] = []
        self.installed: list[tuple[int, Mapping[str, Scalar]]] = []
        self.reads: list[tuple[int, str, tuple[str, ...]]] = []
        self.void: dict[tuple[int, str], str] = {}
        """(rank, label) -> why its state cannot be read whole."""
        self.has_stopped = False
        self.closes: set[str] = set()
        """Labels whose windows close while they are read, so that the next one is open afterwards."""
        self.silent: set[str] = set()
        """Addresses that offer no window."""
        self.num_beats = 0
        """Beats of a member before it offers a window: it evaluates."""

    def enter(self, rank: int) -> int:
        state = OneNumber()
        return Entering(
            FakeDriver(self, rank), FakeReader(self, rank), state,
            install=lambda scalars: self.installed.append((rank, scalars)),
            gather=self.ranks.gather(rank), record=trace.RankTrace(FakeLog(self.ranks.events), replica=9, rank=rank),
        ).enter()  # fmt: skip


class FakeLog:
    def __init__(self, events: list[trace.Event]) -> None:
        self.events = events

    def record(self, event: trace.Event) -> None:
        self.events.append(event)


class FakeDriver:
    replica = 9

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank

    def sources(self, known: tuple[tuple[int, str], ...] = ()) -> tuple[tuple[int, str], ...]:
        if known:
            self.job.silent.clear()
        return tuple((member, f"{address}:{self.rank}") for member, address in MEMBERS)

    def digested(self, label: str, digest: int) -> None:
        self.job.digests.append((self.rank, label))

    def ask_to_join(self, member: int) -> JoinRefused | None:
        assert self.rank == 0
        self.job.asked.append((f"train {self.job.step}", member))
        answer = self.job.answers.pop(0)
        if isinstance(answer, BaseException):
            self.job.has_stopped = True
            raise answer
        assert not isinstance(answer, str)
        return answer

    def ask_hold(self, member: int, label: str) -> None:
        assert self.rank == 0 and not self.job.has_stopped
        self.job.holds.append((label, member))

    def enter(self) -> int:
        if self.job.has_stopped:
            raise Stopped(0)
        return self.job.step


class FakeReader:
    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank

    def next_window(self, address: str, after: str | None, still: Callable[[], None]) -> Offer:
        assert self.rank == 0, "rank 0 chooses the window"
        for _ in range(self.job.num_beats):
            time.sleep(BEAT_S)
            still()
        if address.split(":")[0] in self.job.silent:
            raise StateVoid("gone")
        if after == f"train {self.job.step}":
            self.job.step += 1
        return Offer(f"train {self.job.step}", 1, 4)

    def read(self, label: str, sources: Sequence[str], state: State) -> Read:
        self.job.reads.append((self.rank, label, tuple(sources)))
        if why := self.job.void.get((self.rank, label)):
            self.job.step += label in self.job.closes
            raise StateVoid(why, num_bytes=12 * 2**20, of_bytes=48 * 2**20, seconds=1.25)
        return Read({"label": label}, 4, 0.5, {sources[0]: 4, sources[1]: 0}, {})


def refused(reason: str = "no", *, is_fault: bool = True) -> JoinRefused:
    return JoinRefused(9, "train 1", reason, is_fault=is_fault)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_all_ranks_read_one_window_each_from_its_own_position(num_ranks: int) -> None:
    ranks = Ranks(num_ranks)
    job = Job(ranks, [None])
    assert ranks.run(job.enter) == [0] * num_ranks, "the window that is open: nobody waits for another step"
    assert sorted(job.reads) == [(rank, "train 0", (f"four:{rank}", f"five:{rank}")) for rank in range(num_ranks)]
    assert sorted(job.digests) == [(rank, "train 0") for rank in range(num_ranks)]
    assert job.asked == [("train 0", 4)], "the member whose window it was"
    assert sorted(rank for rank, _ in job.installed) == list(range(num_ranks))
    assert {(event.num_bytes, event.num_sources, event.num_tries) for event in ranks.events} == {(4, 1, 1)}


def test_a_window_that_opens_after_an_evaluation_longer_than_any_collective_is_waited_for() -> None:
    ranks = Ranks(3, patience_s=20 * BEAT_S)
    job = Job(ranks, [None])
    job.num_beats = 30
    assert ranks.run(job.enter) == [0] * 3


def test_a_window_that_closes_while_it_is_read_is_followed_by_the_next_one() -> None:
    ranks = Ranks(2)
    job = Job(ranks, [None])
    job.void[1, "train 0"] = "the window closed"
    job.closes.add("train 0")
    assert ranks.run(job.enter) == [1] * 2
    assert sorted(label for _, label, _ in job.reads) == ["train 0"] * 2 + ["train 1"] * 2


def test_a_refusal_about_the_job_uses_up_no_try() -> None:
    ranks = Ranks(2)
    job = Job(ranks, [refused("a save is in progress", is_fault=False)] * (NUM_TRIES + 2) + [None])
    assert ranks.run(job.enter) == [NUM_TRIES + 2] * 2
    assert len(job.digests) == 2 * (NUM_TRIES + 3), "each time all of it is read and digested"


def test_tries_are_used_up_by_slowness_of_any_rank_and_by_inequality() -> None:
    ranks = Ranks(2)
    job = Job(ranks, [refused("late"), refused("unequal"), refused("late")])
    job.void[1, "train 2"] = "the window closed"
    found = ranks.run(job.enter)
    assert all(isinstance(error, CannotJoin) for error in found)
    said = str(found[0])
    assert "tries (train 1: unequal; train 2: the window closed; train 3: late)" in said, "the open window was no try"
    assert "MiB in 0.50 s" in said and "a step takes" in said
    assert job.asked == [("train 0", 4), ("train 1", 4), ("train 3", 4)], "nobody claims what one rank has not read"
    labels = [scalars["label"] for _, scalars in job.installed]
    assert sorted(labels) == sorted(["train 0", "train 1", "train 3"] * 2), "what is installed may be gathered over all ranks"
    assert job.holds == [("train 3", 4)], "only on the last try, before the step begins"
    assert {event.num_tries for event in ranks.events if event.rank == 1} == {1, 2}


def test_a_newcomer_whose_windows_all_close_while_it_reads_gives_up_with_the_figures_of_its_slowest_rank() -> None:
    ranks = Ranks(3)
    job = Job(ranks, [])
    job.void = {(1, f"train {step}"): "the window closed" for step in range(NUM_TRIES + 1)}
    found = ranks.run(job.enter)
    assert all(isinstance(error, CannotJoin) for error in found) and not job.asked
    assert len({str(error) for error in found}) == 1, "whichever rank is heard first has the same text"
    said = str(found[0])
    assert "train 3: the window closed); rank 1 read 12.0 of 48.0 MiB in 1.25 s, and a step takes" in said
    assert "a larger --global-batch-size makes steps longer, and --recover-heal off" in said


def test_a_member_that_offers_nothing_is_passed_over_and_others_are_waited_for() -> None:
    ranks = Ranks(1)
    job = Job(ranks, [None])
    job.silent = {"four"}
    assert ranks.run(job.enter) == [0]
    assert job.reads == [(0, "train 0", ("five:0", "four:0"))] and job.asked == [("train 0", 5)]
    job = Job(Ranks(1), [None])
    job.silent = {"four", "five"}
    assert job.ranks.run(job.enter) == [0], "as soon as there are other members"


def test_members_that_serve_it_no_more_are_no_fault_of_the_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(1)
    job = Job(ranks, [None])
    others, asked = [((6, "six:0"),)], []

    def sources(self: FakeDriver, known: Any = ()) -> Any:
        asked.append(None)
        return others.pop() if len(asked) == 2 else tuple((member, f"{address}:0") for member, address in MEMBERS)

    monkeypatch.setattr(FakeDriver, "sources", sources)
    assert ranks.run(job.enter) == [1] and [label for _, label, _ in job.reads] == ["train 1"]


def test_the_end_of_the_job_ends_all_ranks() -> None:
    ranks = Ranks(3)
    job = Job(ranks, [Stopped(0)])
    found = ranks.run(job.enter)
    assert all(isinstance(error, SystemExit) for error in found)
