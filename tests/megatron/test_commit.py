"""In-step recovery with the real schedule and the real core: a death at every microbatch x stage x instant, in one process.

Gradients are codes (tests/megatron/toy.py), so what is checked is the data that the optimizer gets, not the bookkeeping.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from msgspec.structs import replace

from megatron_recover import trace
from megatron_recover.config import RecoverConfig
from megatron_recover.core.digest import combined
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.progress import COMPUTES, Phase
from megatron_recover.core.quota import balanced, share
from megatron_recover.core.rank_messages import Apply, Plan
from megatron_recover.core.values import Pipeline, Record, Shape
from megatron_recover.faults import FaultPoint
from megatron_recover.megatron import commit, parameter_digest
from megatron_recover.megatron.commit import CommitLoop, GivenUp
from megatron_recover.megatron.data.loaders import MicrobatchCursor
from megatron_recover.megatron.losses import gradient_scale, mean_loss
from megatron_recover.megatron.parameter_digest import HeldBy
from megatron_recover.progress_page import ProgressPage
from megatron_recover.trainer.bucket_sums import BucketSum
from megatron_recover.trainer.checksum import checksum
from megatron_recover.trainer.ledger import Ledger
from megatron_recover.trainer.microbatches import Microbatches
from megatron_recover.trainer.work_queue import Task
from tests.megatron.loopback import Job, LoopbackDriver, Strike
from tests.megatron.toy import SIZES, Events, Threads, Trainer
from tests.parts import in_parts

M = 4
NUM_BUCKETS = 3
"""A stage's: 42 elements in buckets of about 16."""


pytestmark = pytest.mark.usefixtures("threads")


class Run:
    """A whole run: two training steps, an evaluation step, a training step, on all replicas that live so long."""

    def __init__(
        self, threads: Threads, num_replicas: int, num_ranks: int, strikes: list[Strike], *, num_microbatches: int = M,
        seed: int = 0, noisy: bool = False, determinism: str = "fast", broken: int | None = None,
        paces: tuple[int, ...] = (), then: Callable[[Trainer], object] = lambda trainer: None, **model_fields: Any,
    ) -> None:  # fmt: skip
        self.job = Job(num_replicas, num_ranks, strikes, seed)
        self.log = Events()
        self.num_microbatches = num_microbatches
        self.trainers: dict[tuple[int, int], Trainer] = {}
        self.job.paces = paces
        config = RecoverConfig(bucket_elements=16, determinism=determinism, rebalance="on" if paces else "off")

        def life(driver: Any, faults: Any) -> None:
            trainer = Trainer(
                self.job, threads, driver, faults, config, num_microbatches=num_microbatches, noisy=noisy, broken=broken,
                log=self.log, **model_fields,
            )  # fmt: skip
            self.trainers[driver.replica, driver.rank] = trainer
            for forward_only in (False, False, True, False):
                with contextlib.suppress(GivenUp):
                    trainer.step(forward_only)
                if trainer.loop._has_given_up:  # then upstream saves, by the seam that every save goes through, and leaves
                    trainer.loop.agree(f"save {len(trainer.gradients)}")
                    break
            then(trainer)

        self.job.run(life)
        self.survivors = {key: each for key, each in self.trainers.items() if key[0] not in self.job.dead}

    def check(self, *, may_void: bool = False) -> Run:
        """INV-1 by the data, INV-2 by the records, INV-7 by the counts. A step that is computed anew hides what went wrong."""
        assert may_void or not self.log.of(trace.Miscounted), self.log.of(trace.Miscounted)
        assert self.survivors, "nobody is left"
        last = self.job.num_ranks - 1
        for (replica, rank), trainer in self.survivors.items():
            assert len(trainer.gradients) == 3
            for step, gradient in enumerate(trainer.gradients):
                for found, expected in zip(gradient, trainer.expected(), strict=True):
                    assert torch.equal(found, expected), f"replica {replica} rank {rank}, training step {step}"
            if rank == last:  # evaluation, the third step, has samples of its own
                firsts = [int(losses[0]["index"]) // self.num_microbatches for losses in trainer.losses]
                assert firsts == [0, 1, 0, 2], "a step had another step's samples"
            for losses in trainer.losses:
                codes = [2.0**microbatch for microbatch in range(self.num_microbatches)] if rank == last else []
                assert [float(report["code"][0]) for report in losses] == codes
        assert all(records == self.job.records[self.job.roster[0]] for records in self._records())
        self._check_least_work()
        return self

    def _records(self) -> list[Any]:
        return [self.job.records[replica] for replica in self.job.roster]

    def _is_void(self, event: trace.MicrobatchFinished) -> bool:
        void = self.job.void
        return void is not None and event.step == void.step and event.generation < void.since

    def _check_least_work(self) -> None:
        # By bucket: what went to a dump, because a member held the result, is lost with that member.
        taken = Counter(
            (event.step, event.rank, bucket, event.microbatch)
            for event in self.log.of(trace.MicrobatchFinished)
            if event.replica not in self.job.dead and not self._is_void(event)
            for bucket in event.into
        )
        assert max(taken.values()) == 1, [key for key, count in taken.items() if count > 1]


def first_strikes(
    victim: int, num_replicas: int, num_ranks: int, step: int = 1, num_chunks: int = 1
) -> Iterator[Strike]:  # fmt: skip
    """Every instant of a step at which a rank of `victim` passes a fault point."""
    ids = share(balanced(M, (1,) * num_replicas), range(num_replicas), victim)
    for rank in range(num_ranks):
        for point, microbatch in itertools.product((FaultPoint.FORWARD, FaultPoint.BACKWARD), ids):
            yield Strike(victim, rank, point, step=step, microbatch=microbatch)
        yield Strike(victim, rank, FaultPoint.BEFORE_REDUCE, step=step)
        num_buckets = NUM_BUCKETS * num_chunks
        for bucket in range(rank * num_buckets, (rank + 1) * num_buckets + (rank == num_ranks - 1)):
            yield Strike(victim, rank, FaultPoint.REDUCE, step=step, bucket=bucket)


def second_strikes(victim: int, num_ranks: int) -> Iterator[Strike]:
    """Every instant inside a recovery."""
    for rank in range(num_ranks):
        yield Strike(victim, rank, FaultPoint.RECOMPUTE, step=1)
        buckets = range(rank * NUM_BUCKETS, (rank + 1) * NUM_BUCKETS + (rank == num_ranks - 1))
        for point, bucket in itertools.product((FaultPoint.SECOND_REDUCE, FaultPoint.TRANSFER), buckets):
            yield Strike(victim, rank, point, step=1, bucket=bucket)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_without_faults(threads: Threads, num_replicas: int, num_ranks: int, num_chunks: int, overlap: bool) -> None:
    run = Run(threads, num_replicas, num_ranks, [], num_chunks=num_chunks, overlap=overlap).check()
    assert [event.provenance for event in run.log.of(trace.Reduced)] == ["ones"] * len(run.log.of(trace.Reduced))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_ranks", "num_chunks", "group_size", "part"), in_parts([(3, 3, 3), (2, 3, 3), (3, 2, 5)], 4))
def test_any_number_of_microbatches_goes_through_the_chunks(
    threads: Threads, num_ranks: int, num_chunks: int, group_size: int, part: slice
) -> None:
    """Also where upstream refuses it; the link would hang if the stages disagreed on a message."""
    for num_microbatches in range(1, 9)[part]:
        fields = {"num_microbatches": num_microbatches, "microbatch_group_size_per_vp_stage": group_size}
        run = Run(threads, 1, num_ranks, [], num_chunks=num_chunks, **fields)
        for trainer in run.trainers.values():
            for found, expected in zip(trainer.gradients[0], trainer.expected(), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
def test_the_last_backward_of_every_chunk_is_known_when_it_begins(
    threads: Threads, num_ranks: int, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or no reduction would run beside it."""
    begins, seen = Microbatches.backward_begins, {}

    def noted(self: Microbatches, task: Task, chunk: int, last: bool) -> None:
        seen.setdefault((self._step, threading.current_thread().name, chunk), []).append(last)
        begins(self, task, chunk, last)

    monkeypatch.setattr(Microbatches, "backward_begins", noted)
    for num_microbatches in (2, 4, 5):
        Run(threads, 1, num_ranks, [], num_chunks=num_chunks, num_microbatches=num_microbatches)
        assert len(seen) == 3 * num_ranks * num_chunks
        assert set(map(tuple, seen.values())) == {(*[False] * (num_microbatches - 1), True)}
        seen.clear()


@pytest.mark.parametrize("slowest", [4000, 100_000])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_quotas_follow_what_replicas_measure(threads: Threads, num_ranks: int, slowest: int) -> None:
    """From the third step on, also in evaluation, where nobody measures, down to quota 0; and whoever dies then."""
    paces = (1000, 1000, slowest)
    strike = Strike(0, num_ranks - 1, FaultPoint.BACKWARD, step=3)
    run = Run(threads, 3, num_ranks, [strike], num_microbatches=8, paces=paces).check()
    assert strike.struck
    done = Counter((event.step, event.replica) for event in run.log.of(trace.MicrobatchStarted) if not event.rank + event.chunk)
    pipeline = Pipeline(num_ranks)
    for step, expected in enumerate([(1, 1, 1), (1, 1, 1), paces]):
        assert tuple(done[step, replica] for replica in range(3)) == balanced(8, expected, pipeline)
    assert balanced(8, paces, pipeline) != balanced(8, (1, 1, 1), pipeline)


def test_only_the_first_pass_of_a_step_is_timed(threads: Threads) -> None:
    """`LoopbackDriver.pass_timed` fails at another."""
    strike = Strike(1, 0, FaultPoint.BEFORE_REDUCE, step=1)
    run = Run(threads, 3, 1, [strike], paces=(1000, 1000, 1000)).check()
    assert strike.struck
    assert any(event.generation == 2 and event.step == 1 for event in run.log.of(trace.MicrobatchStarted)), "no second pass"


def test_a_replica_without_a_share_is_timed_when_work_is_dealt_to_it_again(threads: Threads) -> None:
    """Or the others would go on to believe how slow it was when it was last given some."""
    strikes = [Strike(replica, 0, FaultPoint.BACKWARD, step=3) for replica in (0, 1)]
    run = Run(threads, 3, 1, strikes, num_microbatches=8, paces=(1000, 1000, 100_000)).check()
    assert all(strike.struck for strike in strikes)
    done = [event for event in run.log.of(trace.MicrobatchStarted) if (event.replica, event.step) == (2, 3)]
    assert done and min(event.generation for event in done) > 1, "it had a share from the beginning"
    assert (2, 3) in run.job.timed


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("victim", "shape", "overlap", "part"),
    [  # shapes are stages and chunks
        *in_parts(itertools.product((0, 1), [(1, 1), (2, 1)], (False, True)), 8),
        *in_parts(itertools.product((0, 1), [(2, 2), (4, 1)], (False, True)), 16),
    ],
)
def test_a_death_at_every_instant(threads: Threads, victim: int, shape: tuple[int, int], overlap: bool, part: slice) -> None:
    num_ranks, num_chunks = shape
    strikes = list(first_strikes(victim, 2, num_ranks, num_chunks=num_chunks))[part]
    assert strikes
    for strike in strikes:
        print(strike)
        run = Run(threads, 2, num_ranks, [strike], overlap=overlap, num_chunks=num_chunks).check()
        assert strike.struck and run.job.dead == {victim}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("shape", "when", "part"),
    [
        *in_parts(itertools.product([(2, 1)], ["open", "closed"]), 8),
        *in_parts(itertools.product([(4, 1), (2, 2), (4, 2)], ["open", "closed"]), 16),
    ],
)
def test_a_death_in_every_forward_and_backward(threads: Threads, shape: tuple[int, int], when: Any, part: slice) -> None:
    """What is lost is computed in the schedule that runs, if the other replica has not announced its end."""
    num_ranks, num_chunks = shape
    victim, points = 1, (FaultPoint.FORWARD, FaultPoint.BACKWARD)
    ids, chunks = share(balanced(M, (1, 1)), range(2), victim), range(1, num_chunks + 1)
    instants = list(itertools.product(range(num_ranks), points, ids, chunks))[part]
    assert instants
    for rank, point, microbatch, occurrence in instants:
        strike = Strike(victim, rank, point, step=1, microbatch=microbatch, occurrence=occurrence, when=when)
        print(strike)
        run = Run(threads, 2, num_ranks, [strike], num_chunks=num_chunks).check()
        assert strike.struck
        taken_in = [event.microbatches for event in run.log.of(trace.Extended)]
        assert taken_in == ([ids] if when == "open" else [])


@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(1, 1), (2, 1), (2, 2)])
def test_a_death_in_evaluation(threads: Threads, num_ranks: int, num_chunks: int) -> None:
    for rank, microbatch in itertools.product(range(num_ranks), share(balanced(M, (1, 1)), range(2), 1)):
        strike = Strike(1, rank, FaultPoint.EVALUATE, step=2, microbatch=microbatch)
        print(strike)
        Run(threads, 2, num_ranks, [strike], num_chunks=num_chunks).check()
        assert strike.struck


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("second_victim", "part"), in_parts([(0,), (2,)], 20))
def test_a_second_death_at_every_instant_of_the_recovery(threads: Threads, second_victim: int, part: slice) -> None:
    num_second = 0
    num_first, num_then = (len(list(each)) for each in (first_strikes(1, 3, 2), second_strikes(second_victim, 2)))
    for first, then in list(itertools.product(range(num_first), range(num_then)))[part]:
        strikes = [list(first_strikes(1, 3, 2))[first], list(second_strikes(second_victim, 2))[then]]
        print(strikes)
        Run(threads, 3, 2, strikes).check()
        assert strikes[0].struck
        num_second += strikes[1].struck
    assert num_second > 1  # not every second instant comes up: whether a transfer is needed depends on who was how far


@pytest.mark.parametrize("part", in_parts([()], 5))
def test_random_deaths_of_all_but_one(threads: Threads, monkeypatch: pytest.MonkeyPatch, part: slice) -> None:
    """Results are given back once they are applied, as on a GPU: nobody may need one afterwards, whoever is behind."""
    monkeypatch.setattr(BucketSum, "release", lambda bucket_sum: setattr(bucket_sum, "_result", None))
    for seed in range(40)[part]:
        chance = random.Random(seed)
        victims = chance.sample(range(4), 3)
        strikes = [
            chance.choice([*first_strikes(victim, 4, 2, step=chance.choice((0, 1, 3))), *second_strikes(victim, 2)])
            for victim in victims
        ]
        print(seed, strikes)
        Run(threads, 4, 2, strikes, seed=seed, overlap=seed % 2 == 1).check()


@pytest.mark.parametrize("kind", ["none", "kill"])
def test_per_token_loss_divides_by_the_tokens_of_the_whole_step(threads: Threads, kind: str) -> None:
    strikes = [] if kind == "none" else [Strike(1, 0, FaultPoint.REDUCE, step=1, bucket=1)]
    run = Run(threads, 2, 1, strikes, calculate_per_token_loss=True)
    for trainer in run.survivors.values():
        for gradient in trainer.gradients:
            for found, expected in zip(gradient, trainer.expected(), strict=True):
                torch.testing.assert_close(found, expected * M / (3 * M), rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_inv_9_a_loss_that_is_not_finite_is_charged_to_its_microbatch(
    num_stages: int, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient, which is found first, is the sum of all microbatches; other stages know nothing else."""
    job = Job(1, num_stages, [], 0)
    monkeypatch.setattr("tests.megatron.test_commit.Job", lambda *_: job)
    with pytest.raises(RuntimeError, match="not finite"):
        Run(threads, 1, num_stages, [], broken=2)
    assert ((2,), "the loss of microbatches [2] is not finite") in [(each, str(error)) for each, error in job.raised]


def test_a_gradient_that_is_not_finite_names_its_microbatch(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "not_finite", lambda _: ())
    with pytest.raises(RuntimeError, match="gradient of microbatches .2. has values that are not finite"):
        Run(threads, 4, 1, [], broken=2)


def test_inv_9_all_microbatches_of_a_pass_are_suspected_where_its_sum_is_not_finite(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(1, 1, [], 0)
    monkeypatch.setattr("tests.megatron.test_commit.Job", lambda *_: job)
    monkeypatch.setattr(Ledger, "not_finite", lambda _: ())
    with pytest.raises(RuntimeError, match="values that are not finite"):
        Run(threads, 1, 1, [], broken=2)
    assert [microbatches for microbatches, _ in job.raised] == [tuple(range(M))]


def test_the_progress_page_follows_a_step(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Phase, tuple[int, ...]]] = []
    enter = ProgressPage.enter

    def entering(page: ProgressPage, phase: Phase, microbatches: tuple[int, ...] | None = None) -> None:
        enter(page, phase, microbatches)
        seen.append((phase, page._ids))

    monkeypatch.setattr(ProgressPage, "enter", entering)
    Run(threads, 1, 1, [])
    computed = [(phase, ids) for phase, ids in seen if phase in COMPUTES]
    ids = range(M)
    first = [(Phase.FIRST_STEPS, (each,)) for each in ids for _ in range(2)]
    assert computed[: 2 * M] == first, "the first steps are phases of their own"
    assert [ids for phase, ids in computed if phase is Phase.BACKWARD][-M:] == [(each,) for each in ids]
    assert {ids for phase, ids in seen if phase in (Phase.PIPELINE, Phase.REDUCTION, Phase.OPTIMIZER)} == {()}
    phases = [phase for phase, _ in seen if phase not in (Phase.LOADING, Phase.DATA, Phase.PIPELINE)]
    last = len(phases) - 1 - phases[::-1].index(Phase.BETWEEN)
    assert phases[last - 2 : last + 1] == [Phase.REDUCTION, Phase.OPTIMIZER, Phase.BETWEEN]


GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:45210: Connection reset by peer. This "
    "is typically caused by a remote worker hanging or bugs in the application."
)


@pytest.mark.parametrize(
    ("error", "suspects"),
    [
        (RuntimeError(GLOO), ()),
        (torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error"), ()),
        (torch.distributed.DistNetworkError("The client socket has timed out"), ()),
        (RuntimeError("CUDA out of memory"), (0,)),
        (ConnectionResetError("the bucket that the data is in hung up"), (0,)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_inv_9_a_communication_error_inside_a_replica_charges_no_microbatch(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, error: Exception, suspects: tuple[int, ...]
) -> None:
    def fails(*_: object) -> None:
        raise error

    job = Job(1, 1, [], 0)
    monkeypatch.setattr("tests.megatron.test_commit.Job", lambda *_: job)
    monkeypatch.setattr(Microbatches, "backward_ended", fails)
    with pytest.raises(type(error)):
        Run(threads, 1, 1, [])
    assert job.raised == [(suspects, error)]


def test_inv_9_no_microbatch_is_suspected_of_a_check_that_fails_in_its_pass(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`training.run` tells of it, without microbatches; only the first report of a rank is heard."""

    def fails(*_: object) -> None:
        raise InvariantViolation(1, "planted")

    job = Job(1, 1, [], 0)
    monkeypatch.setattr("tests.megatron.test_commit.Job", lambda *_: job)
    monkeypatch.setattr(Microbatches, "backward_ended", fails)
    with pytest.raises(InvariantViolation, match="planted"):
        Run(threads, 1, 1, [])
    assert job.raised == []


def test_inv_9_only_the_microbatch_being_computed_is_suspected() -> None:
    reduction: Any = SimpleNamespace(
        ledger=None, ledger_bucket=1, is_last_stage=False, is_again=lambda generation: False, end_backward=lambda *_: (0,),
        collect_into=lambda into: None, end_forward=lambda *_: None,
    )  # fmt: skip
    microbatches = Microbatches(
        reduction, 0, forward_only=False, num_chunks=1, enter=lambda *_: None, record=lambda *_, **__: None, faults=None
    )  # fmt: skip
    microbatches.begin_pass(SimpleNamespace())  # type: ignore[arg-type]
    tasks = [Task(microbatch, (0, 1), 1) for microbatch in (4, 2)]
    for task in tasks:
        microbatches.forward_begins(task, 0)
        assert microbatches.suspects() == (task.microbatch,)
        microbatches.forward_ended(task, 0, torch.tensor(1), None)
        assert microbatches.suspects() == tuple(each.microbatch for each in tasks[: tasks.index(task) + 1]), "between two"
    for task in tasks:
        microbatches.backward_begins(task, 0, last=False)
        assert microbatches.suspects() == (task.microbatch,)
        microbatches.backward_ended(task, 0)
        assert microbatches.suspects() == (4, 2)
    microbatches.end_pass()
    assert microbatches.suspects() == (4, 2)


def test_an_order_for_other_work_than_megatrons_is_refused(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration counted otherwise, say after a resumption, would mix two steps into one gradient."""
    next_order = LoopbackDriver.next_order

    def of_another_step(self: LoopbackDriver) -> Any:
        order = next_order(self)
        return msgspec.structs.replace(order, work=msgspec.structs.replace(order.work, label="train 7"))

    monkeypatch.setattr(LoopbackDriver, "next_order", of_another_step)
    with pytest.raises(RuntimeError, match="ordered to work on .*train 7.* where Megatron is at .*train 1"):
        Run(threads, 2, 1, [])


def applied(plan: Plan, step: int, label: str) -> Apply:
    return Apply(Record(step, label, ()), plan.generation)


@pytest.mark.parametrize(
    "foreign",
    [
        lambda plan: replace(plan, step=plan.step + 1),
        lambda plan: replace(plan, step=plan.step - 1),
        lambda plan: replace(plan, work=replace(plan.work, label="save 8")),
        lambda plan: replace(plan, work=replace(plan.work, buckets=())),
        lambda plan: replace(plan, generation=plan.generation - 1),
        lambda plan: applied(plan, plan.step - 1, "save 7"),
        lambda plan: applied(plan, plan.step, "train 7"),
    ],
    ids=["a later step", "an earlier step", "another save", "other buckets", "an older generation", "applied", "trained"],
)
def test_an_order_that_is_not_for_the_agreement_in_which_a_rank_is_is_refused(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, foreign: Callable[[Plan], Plan | Apply]
) -> None:
    """It would call a state agreed on, and have it saved, that nobody has compared."""
    next_order = LoopbackDriver.next_order

    def another(self: LoopbackDriver) -> Any:
        order = next_order(self)
        return foreign(order) if isinstance(order, Plan) and order.work.label == "save 7" else order

    monkeypatch.setattr(LoopbackDriver, "next_order", another)
    with pytest.raises(RuntimeError, match=r"where Megatron is at .*save 7|comes after one of generation"):
        Run(threads, 2, 1, [], then=lambda trainer: trainer.loop.agree("save 7"))


def test_every_step_has_a_name_of_its_own_and_starts_from_known_parameters(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, joined_with = LoopbackDriver.join, set()

    def noted(self: LoopbackDriver, shape: Shape, fingerprint: str, parts: Any, beginning: Any, state_address: str) -> None:
        joined_with.add((fingerprint, self.rank, beginning))
        join(self, shape, fingerprint)

    monkeypatch.setattr(LoopbackDriver, "join", noted)
    run = Run(threads, 2, 2, [], then=lambda trainer: [trainer.loop.meet(round) for round in (1, 2)])
    assert len(joined_with) == 2, "two replicas of two ranks, and not each rank is alike"
    parameters = f"{combined([checksum(torch.zeros(size)) for size in SIZES]):016x}"
    for _, _, parts in joined_with:
        assert (dict(parts)["toy"], dict(parts)["the digest of the parameters"]) == ("", parameters)
    labels = ["train 1", "train 2", "evaluate 2/1", "train 3", "end 1", "end 2"]
    ledger = 2 * NUM_BUCKETS
    for records in run.job.records.values():
        assert [record.label for record in records] == labels
        assert [[version.bucket for version in record.versions] for record in records[-2:]] == [[ledger]] * 2
    for trainer in run.trainers.values():
        values = [checksum(weight) for chunk in trainer.chunks for weight in chunk.parameters()]
        assert trainer.loop._parameters_checksum == combined(values)
    joined = {event.label: event.parameter_digest for event in run.log.of(trace.Applied) if event.rank == 0}
    assert len({joined[label] for label in labels if label.startswith("train")}) == 3
    assert {joined[label] for label in labels if not label.startswith("train")} == {None}


def test_a_microbatch_is_seeded_and_read_by_what_it_is() -> None:
    seeded, cursor = [], MicrobatchCursor()
    loop = CommitLoop(
        SimpleNamespace(replica=0, rank=0), RecoverConfig(), {}, cursor=cursor,
        seed=lambda *what: seeded.append(what), iteration=lambda: 3, alike=dict,
    )  # fmt: skip
    loop._enter_microbatch(5, 1)
    assert (seeded, cursor.microbatch) == ([(3, 5, 1)], 5)
    with pytest.raises(ValueError, match="process_non_loss_data_func is not supported"):
        loop.run(collect_non_loss_data=True)


def test_exact_holds_where_losses_are_sums(threads: Threads, caplog: pytest.LogCaptureFixture) -> None:
    """Gradients are so large here that the grid of a mean loss would not hold them."""
    run = Run(threads, 2, 2, [], determinism="exact", num_microbatches=5, calculate_per_token_loss=True)
    assert "is not exact" not in caplog.text
    # Upstream adds the stages' counts up: only the last one's is of anything.
    assert {(rank, *trainer.tokens) for (_, rank), trainer in run.trainers.items()} == {(0, 0, 0, 0), (1, 15, 15, 15)}


def test_upstreams_finalize_finds_nothing_left_to_reduce() -> None:
    groups = [SimpleNamespace(param_gather_dispatched=True, grad_reduce_finished=False) for _ in range(2)]
    commit.gradient_is_reduced(SimpleNamespace(bucket_groups=groups[:1], expert_parallel_bucket_groups=groups[1:]))
    assert [(group.param_gather_dispatched, group.grad_reduce_finished) for group in groups] == [(False, True)] * 2


@pytest.mark.parametrize(("per_token", "grad_scale", "scale"), [(False, 1, 3), (True, 1, 3 * 64), (False, 128, 3 * 128)])
def test_the_grid_is_scaled_like_the_gradient(
    per_token: bool, grad_scale: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda with_context_parallel: 3)
    config = SimpleNamespace(calculate_per_token_loss=per_token, grad_scale_func=lambda loss: loss * grad_scale)
    chunk = SimpleNamespace(config=config, parameters=lambda: iter([torch.nn.Parameter(torch.zeros(1))]))
    arguments = {"num_microbatches": 4, "micro_batch_size": 2, "seq_length": 8}
    assert gradient_scale(chunk, arguments) == scale


def test_the_loss_of_a_step_is_averaged_as_upstream_averages_it(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*reports: dict[str, torch.Tensor]) -> torch.Tensor:
        ledger = Ledger(len(reports))
        for microbatch, report in enumerate(reports):
            ledger.write(microbatch, torch.tensor(1), report)
        return ledger.rows()

    counted = rows({"lm loss": torch.tensor([6.0, 2.0]), "other": torch.ones(1)}, {"lm loss": torch.tensor([3.0, 4.0])})
    device = torch.device("cpu")
    assert mean_loss(counted, device) == 1.5
    assert mean_loss(rows({"lm loss": torch.tensor(3.0)}, {"lm loss": torch.tensor(1.0)}), device) == 2.0
    assert mean_loss(rows(), device) is None and mean_loss(rows({}), device) is None
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda **_: SimpleNamespace(size=lambda: 2))
    monkeypatch.setattr(dist, "all_reduce", lambda total, group: total.add_(torch.tensor([11.0, 4.0])))  # the other lane's
    assert mean_loss(counted, device) == (9 + 11) / (6 + 4)


def test_which_ranks_hold_a_parameter_alike() -> None:
    split, of_an_expert = SimpleNamespace(tensor_model_parallel=True), SimpleNamespace(allreduce=False)
    held_by = [parameter_digest._held_by(each) for each in (split, of_an_expert, SimpleNamespace())]
    assert held_by == [HeldBy.LANES, HeldBy.RANK, HeldBy.STAGE]


@pytest.mark.parametrize(("num_microbatches", "outgrown"), [(4, False), (12, True)])
def test_a_gradient_that_outgrows_the_grid_is_reported(
    threads: Threads, caplog: pytest.LogCaptureFixture, num_microbatches: int, outgrown: bool
) -> None:
    Run(threads, 2, 1, [], determinism="exact", num_microbatches=num_microbatches)
    assert ("is not exact: the gradient of bucket" in caplog.text) == outgrown


def test_exact_is_bit_identical_whoever_computed_what(threads: Threads) -> None:
    reference = Run(threads, 1, 2, [], noisy=True, determinism="exact", num_microbatches=12)
    plain = Run(threads, 1, 2, [], noisy=True, num_microbatches=12)
    differences = 0
    for seed in range(12):
        chance = random.Random(seed)
        num_replicas = chance.choice((2, 3, 5))
        strikes = [Strike(1, chance.randrange(2), FaultPoint.REDUCE, step=1, bucket=chance.randrange(7))]
        for determinism, against in (("exact", reference), ("fast", plain)):
            strikes[0].struck = False
            run = Run(threads, num_replicas, 2, strikes, noisy=True, determinism=determinism, seed=seed, num_microbatches=12)
            for (_, rank), trainer in run.survivors.items():
                pairs = zip(
                    itertools.chain.from_iterable(trainer.gradients),
                    itertools.chain.from_iterable(against.trainers[0, rank].gradients),
                    strict=True,
                )
                same = all(torch.equal(found, expected) for found, expected in pairs)
                assert same or determinism == "fast", f"seed {seed}: {num_replicas} replicas, {strikes}"
                differences += not same
    assert differences, "the gradients are too tame to tell exact from fast"
