"""The control plane of a growing job: bytes of its messages, seconds of its common decisions.

No process is started and nothing is sent: the benchmark drives the machines and encoders of
production directly. Two sizes: 64 replicas of TP 8 x PP 16 with 8192 microbatches and 401 buckets,
and an announcement to 1000 replicas of 64 ranks.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import torch
from msgspec.structs import replace

from benchmarks.common import Row, row
from megatron_recover.control_plane.coordinator_driver import announcements
from megatron_recover.control_plane.encoding import Peer
from megatron_recover.control_plane.wire import FRAME_BYTES, encode
from megatron_recover.core import replica
from megatron_recover.core.membership_messages import NewGeneration
from megatron_recover.core.quota import balanced
from megatron_recover.core.rank_messages import Begun, Holds, PassTimed, Promised
from megatron_recover.core.recovery import recover
from megatron_recover.core.speed import learn, paces
from megatron_recover.core.values import Held, Journal, Pipeline, Shape, Status, Vote, Work
from megatron_recover.trainer import provenance
from megatron_recover.trainer.ledger import Ledger, read_losses
from megatron_recover.trainer.provenance import Counts

REPLICAS, MICROBATCHES, STAGES, TENSOR_PARALLEL, BUCKETS_A_STAGE = 64, 8192, 16, 8, 25
SHARE = MICROBATCHES // REPLICAS
RUNS = 7
SIZE = f"{REPLICAS} replicas, {MICROBATCHES} microbatches, {STAGES * BUCKETS_A_STAGE + 1} buckets, TP {TENSOR_PARALLEL}"
ANNOUNCED = (1000, 64)


def _shape() -> Shape:
    stages = [tuple(range(stage * TENSOR_PARALLEL, (stage + 1) * TENSOR_PARALLEL)) for stage in range(STAGES)]
    ledger = stages[-1]
    return Shape(
        STAGES * TENSOR_PARALLEL, (*(ranks for ranks in stages for _ in range(BUCKETS_A_STAGE)), ledger), Pipeline(STAGES, 1)
    )


SHAPE = _shape()
BUCKETS = tuple(range(len(SHAPE.bucket_ranks)))


def _lead(state: replica.ReplicaState, *messages: replica.Input) -> tuple[replica.ReplicaState, list[replica.PeerMessage]]:
    """Feed messages to a machine; return its new state and the messages to its peers."""
    said: list[replica.PeerMessage] = []
    for message in messages:
        state, effects = replica.step(state, message)
        said += [effect.message for effect in effects if isinstance(effect, replica.ToPeers)]
    return state, said


def _enter(state: replica.ReplicaState, generation: int, roster: tuple[int, ...]) -> tuple[replica.ReplicaState, Status]:
    promises = (Promised(rank, generation) for rank in range(SHAPE.num_ranks))
    state, [status] = _lead(state, NewGeneration(generation, roster), *promises)
    assert isinstance(status, Status)
    return state, status


def _holds(step: int, buckets: range) -> Iterator[Holds]:
    for rank in range(SHAPE.num_ranks):
        items = (Held(bucket, 1, 2**62 + bucket * 10**9 + rank) for bucket in buckets if rank in SHAPE.bucket_ranks[bucket])
        yield Holds(rank, step, tuple(items))


class Job:
    """A job that has committed one step and loses its last replica in the second."""

    def __init__(self) -> None:
        roster = tuple(range(REPLICAS))
        entered = [_enter(replica.ReplicaState(number, SHAPE), 1, roster) for number in roster]
        state, _ = _lead(entered[0][0], *(status for _, status in entered[1:]), Begun(0, 0, self._work(0)))
        state, [vote] = _lead(state, PassTimed(0, SHARE, SHARE * 10**8), *_holds(0, range(len(BUCKETS))))
        assert isinstance(vote, Vote)
        self.vote = vote
        state, _ = _lead(state, *(replace(vote, replica=number, paces=((number, 10**8 + number),)) for number in roster[1:]))
        assert state.step == 1
        self.speeds = state.speeds
        self.statuses, self.half = [], []
        for number in roster[:-1]:
            one, _ = _lead(replace(state, replica=number), Begun(0, 1, self._work(1)))
            ids = tuple(range(number * SHARE, (number + 1) * SHARE))
            journal = Journal(ids[: SHARE // 2 + 8], ids[: SHARE // 2])
            self.statuses.append(replace(_enter(one, 2, roster[:-1])[1], journal=journal))
            if number < TENSOR_PARALLEL:
                one, _ = _lead(one, *_holds(1, range(0, len(BUCKETS), 2)))
            self.half.append(replace(_enter(one, 2, roster[:-1])[1], journal=journal))

    def _work(self, step: int) -> Work:
        return Work(f"train {step + 1}", MICROBATCHES, BUCKETS)

    def recover(self, statuses: list[Status]) -> None:
        for function in (recover, learn, paces, balanced):
            function.forget()  # a member computes each of them once in a recovery
        recover(statuses, 0, speeds=self.speeds, pipeline=SHAPE.pipeline)


def _seconds(call: Callable[[], object]) -> list[float]:
    """Return the CPU seconds of each of `RUNS` calls, after one call that does not count."""
    found = []
    for _ in range(RUNS + 1):
        since = time.thread_time()
        call()
        found.append(time.thread_time() - since)
    return found[1:]


def _milliseconds(call: Callable[[], object]) -> list[float]:
    return [1e3 * each for each in _seconds(call)]


def _control() -> Iterator[Row]:
    job = Job()
    vote = FRAME_BYTES + len(encode(job.vote))
    yield row(f"vote ({SIZE})", [vote], "bytes", goal="<= 1024")
    yield row("votes of a step, all to all", [vote * REPLICAS * (REPLICAS - 1) / 1e6], "MB")
    yield row("status, nothing complete", [FRAME_BYTES + len(encode(job.statuses[0]))], "bytes")
    yield row("status, half of the buckets complete", [FRAME_BYTES + len(encode(job.half[0]))], "bytes")
    yield row("recover(), nothing complete", _milliseconds(lambda: job.recover(job.statuses)), "ms", goal="< 50")
    yield row(
        "recover(), half of the buckets complete on 8 members", _milliseconds(lambda: job.recover(job.half)), "ms", goal="< 50"
    )


def _announcements() -> Iterator[Row]:
    num_replicas, num_ranks = ANNOUNCED
    peers = {}
    for number in range(num_replicas):
        ports = (1024 + (number * num_ranks + rank) * 7919 % 60_000 for rank in range(num_ranks))
        host = f"10.{number // 65536}.{number // 256 % 256}.{number % 256}"
        addresses = (f"{host}:{port}" for port in ports)
        peers[number] = Peer(number, f"{host}:29000", tuple(addresses))
    roster, where = tuple(range(num_replicas)), f"{num_replicas} x {num_ranks} ranks"
    first = functools.partial(announcements, NewGeneration(1, roster), peers, frozenset(), 0.0)
    later = functools.partial(announcements, NewGeneration(2, roster[:-1]), peers, frozenset(roster), 0.0)
    for name, make, goal in (("first", first, ""), ("later", later, "<= 100000")):
        size = FRAME_BYTES + max(len(body) for _, body in make())
        yield row(f"{name} announcement to a leader ({where})", [size], "bytes", goal=goal)
        yield row(f"{name} announcement, encoded for all leaders", _milliseconds(lambda make=make: list(make())), "ms")


def _step() -> Iterator[Row]:
    result = provenance.empty(MICROBATCHES, torch.device("cpu")).fill_(1)

    def count() -> None:
        slots = [Counts(MICROBATCHES) for _ in range(BUCKETS_A_STAGE + 1)]
        for microbatch in range(SHARE):
            for counts in slots:
                counts.add(microbatch)
        for counts in slots:
            counts.provenance(result.device)
            assert provenance.summary(result, 1)[0]

    times = {"provenance": _milliseconds(count)}
    for name, losses in (
        ("one reported value", {"lm loss": torch.tensor([1.0, 7.0])}),
        ("two reported values", {"lm loss": torch.tensor([1.0, 7.0]), "aux": torch.tensor(3.0)}),
    ):
        ledger = Ledger(MICROBATCHES)
        for microbatch in range(MICROBATCHES):
            ledger.write(microbatch, torch.tensor(10), losses)
        times[name] = _milliseconds(lambda ledger=ledger: read_losses(ledger.rows(), ledger.rows()))
    yield row(f"provenance of {BUCKETS_A_STAGE + 1} buckets, a rank and step", times["provenance"], "ms")
    yield row("loss reports, one value", times["one reported value"], "ms")
    yield row("loss reports, two values", times["two reported values"], "ms")
    both = [sum(each) for each in zip(times["provenance"], times["one reported value"], strict=True)]
    yield row("provenance and loss reports (one value) together", both, "ms", goal="< 10")


def rows() -> list[Row]:
    """Return the rows of this benchmark."""
    return [*_control(), *_announcements(), *_step()]
