"""What a rank does with a plan's transfers and sums, on a gradient buffer made by hand: which results count, which never."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from megatron_recover import trace
from megatron_recover.config import RecoverConfig
from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.values import Held, Transfer, Work
from megatron_recover.data_plane.transport import CallPart, DeadlineExceeded, PeerLost, Revoked, TransportError
from megatron_recover.faults import FaultPoint
from megatron_recover.trainer.crossing import Miscounted, NotFinite
from megatron_recover.trainer.reduction import Reduction
from megatron_recover.trainer.regions import Region
from tests.pretend_gpu import Gpu, pretended

M = 2
EVERYTHING = (0, 1, 2)
"""Two buckets of 6 elements, and the ledger."""


class Buffers:
    """One gradient buffer of 12 elements a chunk."""

    checks_finite, can_watch = True, False

    def __init__(self, num_chunks: int, gpu: Gpu | None = None) -> None:
        alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        self.num_chunks = num_chunks
        local = torch.zeros(12) if gpu is None else gpu.tensor(torch.zeros(12))
        self.regions = [
            Region(local.clone(), chunk=chunk, group=alone, scale=1.0, sharded=False, bucket_elements=6)
            for chunk in range(num_chunks)
        ]

    def collect_into(self, into: Any) -> None:
        assert into is None or set(into) >= {0, 1}, "no test here leaves out a bucket of gradients"


class Transport:
    """Sums over this rank alone, and copies the `sent` provenance; notes every call."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.not_finite_at: set[int] = set()
        """Numbers of the calls in which another rank's gradient is not finite."""
        self.sent: Sequence[float] = [1.0] * M + [0.0, 0.0]
        self.fails_at: dict[int, Exception] = {}
        """By number of the call."""
        self.promises_at: dict[int, int] = {}
        """By number of the call: a generation that is promised while it is under way."""

    def _called(self, what: str, tag: int) -> None:
        self.driver.calls.append(what)
        self.driver.told.append(what)
        self.driver.tags.append(tag)
        self.driver.promised = self.promises_at.get(len(self.driver.calls) - 1, self.driver.promised)
        if (error := self.fails_at.get(len(self.driver.calls) - 1)) is not None:
            raise error

    def sum_into(self, sources: Sequence[Tensor], results: Sequence[Tensor], *, tag: int, probe: Any, **_: Any) -> None:
        self._called("sum", tag)
        for instant in ("begin", "sent", "middle", "end") if probe is not None else ():
            probe(instant)
        for source, result in zip(sources, results, strict=True):
            result.copy_(source)
        if len(self.driver.calls) - 1 in self.not_finite_at:
            results[1][-1:] += 1.0

    def copy_into(self, tensors: Sequence[Tensor], *, source: int, tag: int, **_: Any) -> None:
        self._called("copy", tag)
        if source != self.driver.replica:
            tensors[0].fill_(7)
            for provenance in tensors[1:]:
                provenance.copy_(torch.tensor(self.sent))


class Driver:
    """A control endpoint that holds whatever it is told, unless a newer generation is promised."""

    replica, rank = 1, 0

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.tags: list[int] = []
        self.told: list[str] = []
        """What was held or blocked, in its order, among the calls of the transport."""
        self.held: list[Held] = []
        self.errors: list[tuple[int, BaseException]] = []
        self.open = Transport(self)
        self.generation = self.promised = 0

    def overlap_refusal(self, generation: int, operands: object) -> str:
        return ""

    def transport(self, generation: int) -> Transport:
        self.generation = generation
        if generation < self.promised:
            raise Revoked("overtaken")
        return self.open

    def hold(self, held: Held) -> bool:
        if self.promised > self.generation:
            return False
        self.held.append(held)
        self.told.append(f"held {held.bucket}")
        return True

    def blocked(self, generation: int, error: BaseException) -> None:
        self.errors.append((generation, error))
        self.told.append("blocked")


class Points:
    """A fault injector that notes what is passed."""

    def __init__(self) -> None:
        self.passed: list[tuple[FaultPoint, int | None]] = []

    def at(self, point: FaultPoint, *, step: int | None = None, bucket: int | None = None) -> None:
        self.passed.append((point, bucket))


def begun(
    ids: Sequence[int] = range(M),
    faults: Any = None,
    determinism: str = "fast",
    num_chunks: int = 1,
    log: Any = None,
    parameters_checksum: int = 0,
    gpu: Gpu | None = None,
) -> tuple[Reduction, Driver]:
    """A reduction in which each id of `ids` was computed, and added 2**id to every element of the first chunk."""
    driver = Driver()
    config = RecoverConfig(bucket_elements=6, determinism=determinism)
    made = Reduction(
        Buffers(num_chunks, gpu),
        stage=0,
        is_last_stage=True,
        config=config,
        driver=driver,
        gather=lambda value: [value],
        record=trace.RankTrace(log, replica=driver.replica, rank=driver.rank),
        faults=faults,
    )
    made.begin(3, M, parameters_checksum=parameters_checksum)
    compute(made, ids)
    return made, driver


def compute(reduction: Reduction, ids: Sequence[int]) -> None:
    for microbatch in ids:
        reduction._gradients.regions[0].local += 2.0**microbatch
        reduction.end_backward(microbatch, 0, EVERYTHING)
        reduction.count_ledger(microbatch)


def plan(generation: int = 1, transfers: Sequence[Transfer] = (), reduces: Sequence[int] = EVERYTHING) -> Plan:
    work = Work("train 1", M, EVERYTHING)
    return Plan(3, generation, (0, 1), work, (1, 1), tuple(transfers), (), tuple(reduces))


def versions(driver: Driver) -> list[tuple[int, int]]:
    return [(held.bucket, held.version) for held in driver.held]


def test_a_backward_counts_for_the_buckets_of_its_own_chunk() -> None:
    reduction, _ = begun((), num_chunks=2)
    everything = range(5)
    assert reduction.end_backward(0, 0, everything) == (0, 1)
    assert reduction.end_backward(0, 1, everything) == (2, 3)
    assert reduction.end_backward(1, 1, (0, 3)) == (3,)


@pytest.mark.parametrize("determinism", ["fast", "exact"])
@pytest.mark.parametrize(
    ("values", "is_finite"), [((3e38, 3e38), True), ((float("nan"), 1.0), False), ((1.0, float("inf")), False)]
)
def test_values_that_are_not_finite_are_found_wherever_the_gradient_is(
    determinism: str, values: tuple[float, float], is_finite: bool
) -> None:
    reduction, driver = begun((0,), determinism=determinism)
    reduction._gradients.regions[0].local[4:6] = torch.tensor(values)
    compute(reduction, (1,))
    with contextlib.nullcontext() if is_finite else pytest.raises(RuntimeError, match="microbatches .0, 1. .*not finite"):
        reduction.reduce(plan())
    assert bool(driver.held) == is_finite


def test_every_bucket_gets_its_own_provenance_over_the_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    reduction, _ = begun(())
    reduction.end_backward(0, 0, (0,))
    reduction.end_backward(1, 0, (1,))
    for bucket_sum in reduction._sums[:2]:
        bucket_sum.num_lanes = 2
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, group: tensor.mul_(2))
    provenances = [reduction._sums[at].source_provenance(None) for at in (1, 2, 0)]
    assert [provenance.tolist() for provenance in provenances] == [[0, 2, 0, 0], [0, 0, 0, 0], [2, 0, 0, 0]]


@pytest.mark.parametrize("ids", [(0,), (0, 1, 1)], ids=["one is missing", "one is there twice"])
def test_inv_1_a_sum_that_is_not_of_every_microbatch_once_is_not_even_offered(ids: tuple[int, ...]) -> None:
    reduction, driver = begun(ids)
    reduction.reduce(plan())
    ((generation, error),) = driver.errors
    assert driver.held == [] and generation == 1 and isinstance(error, Miscounted) and error.miscounted
    assert "bucket 0: counts that are not 1, by microbatch: {1: " in str(error)


@pytest.mark.parametrize(
    "provenance",
    [[1.0, 0.0, 0.0, 0.0], [1.0, 2.0, 0.0, 0.0], [1.0, 1.5, 0.0, 0.0], [1.0, float("nan"), 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]],
    ids=["missing", "twice", "part", "no number", "not finite"],
)
def test_inv_1_a_transferred_result_is_checked_like_a_sum(provenance: list[float]) -> None:
    reduction, driver = begun()
    driver.open.sent = provenance
    reduction.reduce(plan(2, [Transfer(0, 1, 0, (1,))], [1]))
    ((_, error),) = driver.errors
    assert driver.held == [] and "the copy of bucket 0 from replica 0 is damaged: " in str(error)
    assert ("not finite" if provenance[-1] else f"{{1: {provenance[1]}}}") in str(error)
    assert isinstance(error, TransportError) and not error.miscounted and error.peers == (0,), "its source does not hold that"


def test_a_target_holds_what_its_source_held_and_a_source_nothing_new() -> None:
    reduction, driver = begun()
    reduction._sums[1].allocate()  # it was held in generation 3
    transfers = [Transfer(0, 4, 0, (1,)), Transfer(1, 3, 1, (0,))]
    reduction.reduce(plan(5, transfers, [2]))
    assert driver.calls == ["copy", "copy", "sum"]
    assert versions(driver) == [(0, 4), (2, 5)]
    reduction.apply((0,))
    assert reduction._gradients.regions[0].local[:6].tolist() == [7.0] * 6


def test_buckets_are_summed_in_the_order_of_backward() -> None:
    """All members sum in one order: a rank with an order of its own would wait for the others for ever."""
    reduction, driver = begun(num_chunks=2)
    for microbatch in range(M):
        reduction.end_backward(microbatch, 1, (2, 3))
    reduction.reduce(plan(1, reduces=(4, 1, 3, 2, 0)))
    assert versions(driver) == [(2, 1), (3, 1), (0, 1), (1, 1), (4, 1)]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_follows_a_failure_is_left_undone_and_the_leader_hears_of_it(failing: int) -> None:
    reduction, driver = begun()
    lost = PeerLost(0, "gone")
    driver.open.fails_at[failing] = lost
    reduction.reduce(plan(2, [Transfer(0, 1, 0, (1,))], [1, 2]))
    assert len(driver.calls) == failing + 1
    assert versions(driver) == [(0, 1), (1, 2), (2, 2)][:failing]
    assert driver.errors == [(2, lost)]


@pytest.mark.parametrize("stalled", [True, False])
def test_a_revoke_is_told_only_where_the_operation_had_stalled(stalled: bool) -> None:
    """Then whom it waited for is evidence, though the generation is over."""
    reduction, driver = begun()
    revoked = driver.open.fails_at[0] = Revoked("a newer generation", (0,), stalled=stalled)
    reduction.reduce(plan())
    assert driver.errors == ([(1, revoked)] if stalled else [])


def test_a_plan_that_was_overtaken_is_no_failure() -> None:
    reduction, driver = begun()
    driver.promised = 2
    reduction.reduce(plan(1))
    assert (driver.calls, driver.held, driver.errors) == ([], [], [])


@pytest.mark.parametrize("overtaken", [0, 1, 2], ids=["transfer", "sum", "last sum"])
def test_inv_5_a_result_that_comes_after_a_newer_promise_does_not_count(overtaken: int) -> None:
    """It is the one operation that a revocation came too late for: what follows is left undone, and nobody is to blame."""
    events: list[trace.Event] = []
    reduction, driver = begun(log=SimpleNamespace(record=events.append))
    driver.open.promises_at[overtaken] = 3
    reduction.reduce(plan(2, [Transfer(0, 1, 0, (1,))], [1, 2]))
    assert len(driver.calls) == overtaken + 1
    assert (versions(driver), driver.errors) == ([(0, 1), (1, 2), (2, 2)][:overtaken], [])
    assert isinstance(events[-1], trace.ReductionFailed) and "Revoked" in events[-1].reason
    reduction.reduce(plan(3))
    assert versions(driver)[overtaken:] == [(bucket, 3) for bucket in EVERYTHING]
    reduction.apply(EVERYTHING)
    assert reduction._gradients.regions[0].local.tolist() == [3.0] * 12, "the result that did not count was used"


def test_a_defect_is_not_taken_for_a_failure_of_the_network() -> None:
    reduction, driver = begun()
    driver.open.fails_at[0] = RuntimeError("a defect")
    with pytest.raises(RuntimeError, match="a defect"):
        reduction.reduce(plan())
    assert driver.errors == []


@pytest.mark.parametrize("determinism", ["fast", "exact"])
def test_inv_3_a_reduction_leaves_the_local_gradient_to_the_next_one(determinism: str) -> None:
    """A sum was lost after it had been taken; what it is taken from the second time is the same."""
    reduction, driver = begun(determinism=determinism)
    driver.open.fails_at[2] = PeerLost(0, "gone")
    reduction.reduce(plan(1))
    first = [bucket_sum.result.clone() for bucket_sum in reduction._sums[:2]]
    reduction.reduce(plan(2))
    assert versions(driver) == [(0, 1), (1, 1), (0, 2), (1, 2), (2, 2)]
    reduction.apply(EVERYTHING)
    assert reduction._gradients.regions[0].local.tolist() == torch.cat(first).float().tolist() == [3.0] * 12


@pytest.mark.parametrize("determinism", ["fast", "exact"])
def test_a_step_begins_with_nothing(determinism: str) -> None:
    reduction, driver = begun(determinism=determinism)
    reduction.reduce(plan())
    reduction.apply(EVERYTHING)
    reduction._gradients.regions[0].local.zero_()  # as Megatron does
    reduction.begin(4, M)
    compute(reduction, (1, 0))
    reduction.reduce(plan(1))
    reduction.apply(EVERYTHING)
    assert reduction._gradients.regions[0].local.tolist() == [3.0] * 12


def test_whether_a_step_is_exact_depends_on_its_own_gradient(caplog: pytest.LogCaptureFixture) -> None:
    reduction, _ = begun((), determinism="exact")

    def step(values: tuple[float, float], scale: float) -> str:
        caplog.clear()
        reduction.begin(0, M, scale)
        for microbatch, value in enumerate(values):
            reduction._gradients.regions[0].local[:6] += value
            reduction.end_backward(microbatch, 0, EVERYTHING)
            reduction.count_ledger(microbatch)
        reduction.reduce(plan(1))
        reduction.apply(EVERYTHING)
        reduction._gradients.regions[0].local.zero_()
        return caplog.text

    for _ in range(4):  # what is added in four steps would not fit on the grid
        assert step((30.0, 30.0), 1.0) == ""
    assert "the gradient of bucket 0 outgrew the grid" in step((100.0, -100.0), 1.0)
    assert step((100.0, -100.0), 2.0) == "", "a loss that is a sum has gradients that are larger alike"


def test_only_the_buckets_of_the_record_are_applied() -> None:
    reduction, _ = begun()
    reduction.reduce(plan())
    reduction._gradients.regions[0].local.fill_(-1)
    reduction.apply((1, 2))
    assert reduction._gradients.regions[0].local.tolist() == [-1.0] * 6 + [3.0] * 6


def test_no_two_operations_of_a_generation_share_a_tag() -> None:
    """A generation lasts many steps; the transport tells their messages apart by the tag alone."""
    reduction, driver = begun()
    for step in (3, 4, 5):
        reduction.begin(step, M)
        compute(reduction, range(M))
        reduction.reduce(replace(plan(1), step=step))
        reduction.reduce(replace(plan(1, [Transfer(bucket, 1, 0, (1,)) for bucket in EVERYTHING], []), step=step))
    assert len(set(driver.tags)) == len(driver.tags) == 3 * 2 * len(EVERYTHING)


def test_inv_2_parameters_that_differ_make_checksums_that_differ() -> None:
    checksums = []
    for parameters in (0, 1):
        reduction, driver = begun(parameters_checksum=parameters)
        reduction.reduce(plan(1, [Transfer(0, 1, 0, (1,))], [1]))
        checksums.append([held.checksum for held in driver.held])
    assert all(one != other for one, other in zip(*checksums, strict=True))


def test_fault_points_say_whether_it_is_the_steps_first_reduction() -> None:
    points = Points()
    reduction, _ = begun(faults=points)
    reduction.takes(plan(1))
    reduction.reduce(plan(1, reduces=[0]))
    reduction.reduce(plan(2, [Transfer(0, 1, 0, (1,))], [1]))
    reduction.begin(4, M)
    reduction.takes(plan(2))
    compute(reduction, range(M))
    reduction.reduce(plan(2, reduces=[2]))
    before = (FaultPoint.BEFORE_REDUCE, None)
    again = [before, (FaultPoint.TRANSFER, 0), (FaultPoint.SECOND_REDUCE, 1)]
    assert points.passed == [before, (FaultPoint.REDUCE, 0), *again, before, (FaultPoint.REDUCE, 2)]


# --- Behind a device ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_quick", [False, True])
def test_the_next_sum_begins_before_the_last_is_judged(is_quick: bool) -> None:
    with pretended(is_quick=is_quick) as gpu:
        reduction, driver = begun(gpu=gpu)
        gpu.waits.clear()
        reduction.reduce(plan())
        assert gpu.num_waits == (0 if is_quick else 1)
    told = ["sum", "held 0", "sum", "held 1", "sum", "held 2"]
    assert driver.told == (told if is_quick else sorted(told, reverse=True)[:3] + sorted(told)[:3])


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_sums_that_were_complete_before_a_failure_are_held_before_it_is_told(failing: int) -> None:
    with pretended() as gpu:
        reduction, driver = begun(gpu=gpu)
        driver.open.fails_at[failing] = PeerLost(0, "gone")
        reduction.reduce(plan())
    assert driver.told == ["sum"] * (failing + 1) + [f"held {bucket}" for bucket in range(failing)] + ["blocked"]


@pytest.mark.parametrize(
    "stalled", [Revoked("over", (0,), stalled=True), DeadlineExceeded(CallPart.SUM, (0,), 1.0)], ids=["revoked", "deadline"]
)
def test_whom_a_sum_waited_for_is_told_although_a_result_before_it_was_overtaken(stalled: TransportError) -> None:
    """The newer generation that ends the stalled sum also refuses the older result, which is judged first."""
    events: list[trace.Event] = []
    with pretended() as gpu:
        reduction, driver = begun(gpu=gpu, log=SimpleNamespace(record=events.append))
        driver.open.fails_at[1], driver.open.promises_at[1] = stalled, 2
        reduction.reduce(plan())
    assert (driver.told, driver.errors) == (["sum", "sum", "blocked"], [(1, stalled)])
    assert [event.bucket for event in events if isinstance(event, trace.ReductionFailed)] == [1]


def test_inv_1_a_miscount_that_is_seen_late_is_told_once_and_never_held() -> None:
    with pretended() as gpu:
        reduction, driver = begun((0, 1, 1), gpu=gpu)
        reduction.reduce(plan())
    ((_, error),) = driver.errors
    assert isinstance(error, Miscounted) and "bucket 0" in str(error) and driver.held == []


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("failing", [None, 0, 1])
def test_a_gradient_that_is_not_finite_is_never_held_here_or_elsewhere(on_gpu: bool, failing: int | None) -> None:
    """Whoever has it raises, also where the sum was left out; what the others get says so."""
    with pretended() if on_gpu else contextlib.nullcontext() as gpu:
        reduction, driver = begun(gpu=gpu)
        reduction._gradients.regions[0].local[6:7] *= float("inf")
        if failing is not None:
            driver.open.fails_at[failing] = PeerLost(0, "gone")
        with pytest.raises(RuntimeError, match="microbatches .0, 1. .*not finite"):
            reduction.reduce(plan())
        assert [held.bucket for held in driver.held] == ([] if failing == 0 else [0])
        assert reduction._sums[1].source_provenance(reduction._sums[1].is_finite()).tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("with_gradient", [False, True], ids=["evaluation", "training"])
def test_a_loss_that_is_not_finite_is_never_held_and_is_named(on_gpu: bool, with_gradient: bool) -> None:
    """An evaluation has no gradient to find it in."""
    with pretended() if on_gpu else contextlib.nullcontext() as gpu:
        reduction, driver = begun(gpu=gpu)
        assert reduction.ledger is not None
        losses = [torch.tensor([value, 1.0]) for value in (1.0, float("nan"))]
        for microbatch, loss in enumerate(losses):
            on_device = loss if gpu is None else gpu.tensor(loss)
            reduction.ledger.write(microbatch, on_device[1], {"lm loss": on_device})
        if with_gradient:
            reduction._gradients.regions[0].local[:] *= float("nan")
        with pytest.raises(NotFinite, match="^the loss of microbatches .1. is not finite$") as raised:
            reduction.reduce(plan(reduces=[reduction.ledger_bucket]) if not with_gradient else plan())
        assert raised.value.microbatches == (1,) and not driver.held


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_result_with_another_ranks_gradient_that_is_not_finite_is_a_failed_sum(on_gpu: bool) -> None:
    """No miscount: the step is not void, for the microbatch dies with its rank."""
    with pretended() if on_gpu else contextlib.nullcontext() as gpu:
        reduction, driver = begun(gpu=gpu)
        driver.open.not_finite_at = {1}
        reduction.reduce(plan())
    ((_, error),) = driver.errors
    assert "bucket 1: another rank's gradient" in str(error) and isinstance(error, TransportError) and not error.miscounted
    assert 1 not in [held.bucket for held in driver.held]


def test_sums_that_the_device_already_has_are_held_after_a_failure_is_told() -> None:
    with pretended() as gpu:
        reduction, driver = begun(gpu=gpu)
        driver.open.not_finite_at = {0}
        reduction.reduce(plan())
    assert driver.told == ["sum", "sum", "sum", "blocked", "held 1", "held 2"]


def test_a_result_has_memory_on_a_gpu_until_it_is_applied() -> None:
    with pretended() as gpu:
        reduction, driver = begun(gpu=gpu)
        for generation in (1, 2):
            assert all(each._result is None for each in reduction._gradient_sums)
            reduction.reduce(plan(generation))
            kept = [each.result for each in reduction._gradient_sums]
            reduction.reduce(plan(generation, [Transfer(0, generation, 1, (0,))], []))
            assert all(one is each.result for one, each in zip(kept, reduction._gradient_sums, strict=True)), (
                "sent from another"
            )
            reduction.apply(EVERYTHING)
            assert reduction._gradients.regions[0].local.tolist() == [3.0] * 12
            reduction._gradients.regions[0].local.zero_()
            reduction.begin(4, M)
            compute(reduction, range(M))
    reduction, _ = begun()
    reduction.reduce(plan())
    reduction.apply(EVERYTHING)
    assert all(each._result is not None for each in reduction._gradient_sums), "a CPU would clear it in each step"


def test_a_reduction_is_behind_the_gradient_and_what_follows_is_behind_the_reduction() -> None:
    """Without one of the two waits the sum reads, or the optimizer uses, what is not there yet."""
    with pretended() as gpu:
        reduction, driver = begun(gpu=gpu)
        gpu.order.clear()
        reduction.reduce(plan())
        assert [each for each in gpu.order if "waits" in each] == [gpu.order[0], gpu.order[-1]]
        assert (gpu.order[0], gpu.order[-1]) == ("reduction waits for training", "training waits for reduction")
        driver.open.fails_at[3] = RuntimeError("a defect")
        with pytest.raises(RuntimeError):
            reduction.reduce(plan(2))
        assert gpu.order[-1] == "training waits for reduction"


def test_all_lanes_of_a_gradient_are_looked_at() -> None:
    reduction, _ = begun()
    region = reduction._gradients.regions[0]
    region.num_lanes, region.width = 2, 6
    bucket_sum = reduction._gradient_sums[0]
    assert [part.start for part in bucket_sum._bucket.slices()] == [0, 6]
    assert bool(bucket_sum.is_finite())
    region.local[8] = float("nan")
    assert not bool(bucket_sum.is_finite()), "the second lane's part was not looked at"


def test_a_journal_is_asked_for_after_each_sum() -> None:
    reduction, driver = begun()
    reduction.reduce(plan(), note_finished=lambda: driver.told.append("noted"))
    assert driver.told == ["sum", "held 0", "noted", "sum", "held 1", "noted", "sum", "held 2", "noted", "noted"]


def test_a_step_that_begins_again_has_the_losses_of_its_last_sum() -> None:
    with pretended() as gpu:
        reduction, _ = begun((), gpu=gpu)
        for generation, loss in ((1, 1.0), (2, 5.0)):
            assert reduction.ledger is not None
            compute(reduction, range(M))
            for microbatch in range(M):
                reduction.ledger.write(microbatch, gpu.tensor(torch.tensor(3)), {"loss": gpu.tensor(torch.tensor(loss))})
            reduction.reduce(plan(generation))
            rows, on_host = reduction.committed_rows()
            assert on_host.tolist() == rows.tolist() and on_host[0].tolist().count(loss) == 1
            reduction.void()
