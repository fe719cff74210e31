"""State that drifts where no sum shows it is found by the next record that carries a digest, on whichever stage it is.

In one process, with the real schedule and the real core; real jobs are in tests/system/test_durable.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_recover import trace
from megatron_recover.config import RecoverConfig
from megatron_recover.core.alike import differences
from megatron_recover.core.digest import combined
from megatron_recover.core.progress import Phase
from megatron_recover.faults import FaultPoint
from megatron_recover.megatron.state import TrainingState
from megatron_recover.progress_page import ProgressPage
from tests.megatron.loopback import Job, Killed, LoopbackDriver, Strike
from tests.megatron.toy import Events, Threads, Trainer

pytestmark = pytest.mark.usefixtures("threads")


def optimizer_of(trainer: Trainer) -> SimpleNamespace:
    """What the toy's steps never read: master weights with a moment each, and a persistent buffer in the model."""
    masters = []
    for chunk in trainer.chunks:
        chunk.module.register_buffer("bias_of_router", torch.zeros(3))
        masters += [weight.detach().clone() for weight in chunk.module.weights]
    optimizer = torch.optim.SGD(masters, lr=0.5)
    for master in masters:
        optimizer.state[master]["exp_avg"] = torch.zeros_like(master)
    return SimpleNamespace(optimizer=optimizer, grad_scaler=None)


DRIFTS: dict[str, Callable[[Trainer, SimpleNamespace], torch.Tensor]] = {
    "a moment": lambda trainer, leaf: leaf.optimizer.state[leaf.optimizer.param_groups[0]["params"][1]]["exp_avg"],
    "a master weight": lambda trainer, leaf: leaf.optimizer.param_groups[0]["params"][0],
    "a persistent buffer": lambda trainer, leaf: trainer.chunks[-1].module.bias_of_router,
}


def flip(tensor: torch.Tensor) -> None:
    """Change the lowest bit of one element."""
    tensor.view(torch.int32)[1] ^= 1


class Run:
    """Training steps and then an agreement before a save; what `drift` names changes in replica 1 after the first step."""

    def __init__(
        self, threads: Threads, num_replicas: int, num_ranks: int, *, drift: str | None, rank: int = 0, interval: int = 1,
        steps: int = 3, num_chunks: int = 1, strikes: tuple[Strike, ...] = (), evaluate: bool = False,
    ) -> None:  # fmt: skip
        self.job, self.log = Job(num_replicas, num_ranks, strikes), Events()
        self.saved: list[int] = []
        self.digests: dict[tuple[int, int], int] = {}
        config = RecoverConfig(bucket_elements=16, rebalance="off", state_digest_interval=interval)

        def life(driver: Any, faults: Any) -> None:
            trainer = Trainer(
                self.job, threads, driver, faults, config, num_microbatches=4, num_chunks=num_chunks, log=self.log
            )  # fmt: skip
            leaf = optimizer_of(trainer)
            trainer.loop.know_state(trainer.chunks, leaf)
            for step in range(steps):
                trainer.step()
                if step == 0 and drift is not None and (driver.replica, driver.rank) == (1, rank):
                    flip(DRIFTS[drift](trainer, leaf))
            if evaluate:
                trainer.step(forward_only=True)
            trainer.loop.agree(f"save {steps}")
            self.saved.append(driver.replica)
            self.digests[driver.replica, driver.rank] = TrainingState(trainer.chunks, leaf).digest()

        self.job.run(life)

    def labels(self, replica: int = 0) -> list[str]:
        return [record.label for record in self.job.records.get(replica, [])]


@pytest.mark.parametrize("drift", DRIFTS)
@pytest.mark.parametrize(("num_ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_one_bit_is_found_by_the_next_digest_and_its_replica_outvoted(
    threads: Threads, drift: str, num_ranks: int, rank: int
) -> None:
    run = Run(threads, 3, num_ranks, drift=drift, rank=rank)
    [told] = run.job.diverged
    assert (told.step, told.minority) == (1, (1,)), "it was not found in the step that follows the drift"
    assert run.labels(0) == run.labels(2) == ["train 1", "train 2", "train 3", "save 3"] and run.labels(1) == ["train 1"]
    assert set(run.saved) == {0, 2}


@pytest.mark.parametrize("drift", DRIFTS)
def test_of_two_replicas_none_saves(threads: Threads, drift: str) -> None:
    run = Run(threads, 2, 2, drift=drift, rank=1)
    [told] = run.job.diverged
    assert (told.step, told.minority) == (1, ()) and not run.saved


@pytest.mark.parametrize("evaluate", [False, True], ids=["after training", "after an evaluation"])
@pytest.mark.parametrize(
    ("num_ranks", "num_chunks", "rank"),
    [(1, 1, 0), (4, 1, 1), (4, 2, 0), (2, 2, 1)],
    ids=["one rank", "PP 4", "PP 4, VPP", "VPP"],
)
def test_what_drifts_between_two_digests_is_never_saved(
    threads: Threads, num_ranks: int, num_chunks: int, rank: int, evaluate: bool
) -> None:
    """Of the stages only the last holds a result in a save step; the others vote by their digest alone."""
    run = Run(threads, 2, num_ranks, drift="a moment", rank=rank, interval=99, num_chunks=num_chunks, evaluate=evaluate)
    [told] = run.job.diverged
    evaluated = ["evaluate 3/1"] if evaluate else []
    assert run.labels() == ["train 1", "train 2", "train 3", *evaluated] and not run.saved
    assert told.step == len(run.labels())


def test_without_drift_all_agree_and_the_record_has_the_digests_of_all_ranks(threads: Threads) -> None:
    run = Run(threads, 2, 2, drift=None, interval=2)
    assert not run.job.diverged and len(run.saved) == 4
    due = [record.label for record in run.job.records[0] if record.state_digest is not None]
    assert due == ["train 2", "save 3"]
    assert run.job.records[0][-1].state_digest == combined([run.digests[0, 0], run.digests[0, 1]])
    told = [event for event in run.log.events if isinstance(event, trace.StateDigested)]
    assert sorted((event.label, event.replica, event.rank) for event in told) == sorted(
        (label, replica, rank) for label in due for replica in (0, 1) for rank in (0, 1)
    )


@pytest.mark.parametrize(("after", "due"), [(0, (2, 4, 6, 8)), (3, (4, 6, 8, 10))], ids=["anew", "resumed"])
def test_parameters_are_compared_by_iteration_whatever_steps_come_between(
    threads: Threads, after: int, due: tuple[int, ...]
) -> None:
    """As it was, by the step's number: here no training step after the save had an even one."""
    job, log = Job(2, 2, (Strike(0, 0, FaultPoint.REDUCE, step=9, bucket=0),)), Events()
    config = RecoverConfig(bucket_elements=16, rebalance="off", digest_interval=2)

    def life(driver: Any, faults: Any) -> None:
        trainer = Trainer(job, threads, driver, faults, config, num_microbatches=4, log=log)
        trainer.iteration = after
        for step in range(8):
            trainer.step()
            trainer.step(forward_only=True)
            if step == 2:
                trainer.loop.agree(f"save {trainer.iteration}")

    job.run(life)
    applied = [event for event in log.of(trace.Applied) if event.replica == 1]
    assert all(event.step % 2 for event in applied if event.label.startswith("train") and event.step > 6)
    for rank in (0, 1):
        labels = [event.label for event in applied if event.rank == rank and event.parameter_digest is not None]
        assert labels == [f"train {iteration}" for iteration in due]


@pytest.mark.parametrize("point", [FaultPoint.BACKWARD, FaultPoint.REDUCE])
def test_a_death_in_the_step_that_compares_does_not_hide_the_drift(threads: Threads, point: FaultPoint) -> None:
    """Its step is finished by the others, whose digests are those of its beginning."""
    where = {"microbatch": 0} if point is FaultPoint.BACKWARD else {"bucket": 0}
    run = Run(threads, 4, 1, drift="a moment", strikes=(Strike(0, 0, point, step=1, **where),))
    assert [told.minority for told in run.job.diverged] == [(1,)]
    assert run.labels(2) == run.labels(3) == ["train 1", "train 2", "train 3", "save 3"]


def test_a_wrongly_read_optimizer_is_named_at_the_start(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are equal, a moment is not: as of a shard that was read wrongly."""
    joined: dict[int, tuple[tuple[str, str], ...]] = {}

    def join(
        self: LoopbackDriver,
        shape: Any,
        fingerprint: str,
        parts: Any,
        beginning: tuple[tuple[str, str], ...],
        state_address: str,
    ) -> None:
        joined[self.replica] = beginning
        raise Killed

    monkeypatch.setattr(LoopbackDriver, "join", join)

    def life(driver: Any, faults: Any) -> None:
        trainer = Trainer(job, threads, driver, faults, RecoverConfig(bucket_elements=16), num_microbatches=4)
        leaf = optimizer_of(trainer)
        if driver.replica == 1:
            flip(DRIFTS["a moment"](trainer, leaf))
        trainer.loop.know_state(trainer.chunks, leaf)
        trainer.step()

    job = Job(2, 1)
    job.run(life)
    assert [name for name, *_ in differences(joined[0], joined[1])] == ["the digest of all state, optimizer included"]


def test_the_progress_page_shows_each_digest_as_a_phase_of_its_own(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take far longer than a step: whoever looks must not take it for a hang between two steps."""
    during: list[Phase] = []
    pages: dict[int, ProgressPage] = {}
    enter, digest = ProgressPage.enter, TrainingState.digest

    def entering(page: ProgressPage, phase: Phase, microbatches: tuple[int, ...] | None = None) -> None:
        pages[threading.get_ident()] = page
        enter(page, phase, microbatches)

    def digesting(state: TrainingState) -> int:
        during.append(pages[threading.get_ident()].phase)
        return digest(state)

    monkeypatch.setattr(ProgressPage, "enter", entering)
    monkeypatch.setattr(TrainingState, "digest", digesting)
    run = Run(threads, 2, 2, drift=None, interval=2)
    due = sum(record.state_digest is not None for record in run.job.records[0])
    assert due == 2 and during.count(Phase.DIGEST) == due * 4
