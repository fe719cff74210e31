"""One voice: log lines and TensorBoard of the lowest live replica, requests that end all, whoever was asked."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_recover.core.policy import EXIT
from megatron_recover.megatron.boundary import Boundary
from megatron_recover.megatron.reporting import LogLine, TensorBoard

LINE = " [now] iteration        7/      10 | consumed samples: 84 | throughput per GPU (TFLOP/s/GPU): 12.0 | lm loss: 3.9 |"


class Member:
    """What reporting and exits see of one."""

    def __init__(self) -> None:
        self.generation, self.roster, self.quotas = 2, (1, 2), (6, 6)
        self.writer, self.step = True, 0
        self.requests: frozenset[str] = frozenset()
        self.requested: list[str] = []

    def is_writer(self) -> bool:
        return self.writer

    def request(self, request: str) -> None:
        self.requested.append(request)


def test_log_line_says_generation_replicas_and_quotas() -> None:
    member, printed, flushed = Member(), [], []
    line = LogLine(member, 3, printed.append, lambda: flushed.append(len(printed)))
    line.print_rank_last(LINE)
    line.print_rank_last(" validation loss at iteration 7 | lm loss value: 3.9 |")
    assert printed[0].endswith("lm loss: 3.9 | generation: 2 | replicas: 2/3 | quotas: 6 6 |")
    assert "throughput per GPU (TFLOP/s/GPU): 6.0" in printed[0], "the job's throughput is that of all its devices"
    assert printed[1].endswith("3.9 |")
    member.writer = False
    line.print_rank_last(LINE)
    assert len(printed) == 2
    assert flushed == [0, 1], "values are on the disk before their line is"


def test_tensorboard_is_taken_over_and_not_opened_before() -> None:
    written: list[tuple[Any, ...]] = []

    class Writer:
        def add_scalar(self, *args: Any) -> None:
            written.append(args)

        def flush(self) -> None:
            written.append(("flush",))

    member, created = Member(), []
    board = TensorBoard(member, lambda: created.append(1) or Writer())
    member.writer = False
    for member.step in (6, 7):
        board.add_scalar("lm loss", 3.9, member.step)
        board.add_scalar("lm loss vs samples", 3.9, 12 * member.step)
    board.flush()
    assert (created, written) == ([], [])
    member.writer = True
    board.add_scalar("lm loss", 3.9, 8)
    board.add_scalar("throughput", 12.0, 8)
    board.flush()
    newest = [("lm loss", 3.9, 7), ("lm loss vs samples", 3.9, 84)]  # the dead writer may not have written them
    assert (created, written) == ([1], [*newest, ("lm loss", 3.9, 8), ("throughput", 6.0, 8), ("flush",)])


class Saves:
    """Stands for `Checkpoints`."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def make_up(self, iteration: int, *_: Any, **__: Any) -> None:
        self.asked.append(iteration)


@pytest.fixture
def args() -> Iterator[Namespace]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield Namespace(exit_duration_in_mins=None, exit_signal_handler=False, exit_signal=signal.SIGTERM, exit_interval=None)
    for number, handler in before.items():
        signal.signal(number, handler)


def decide(boundary: Boundary, iteration: int) -> bool:
    return boundary.decide(None, None, None, iteration, 0, {}, None)


def boundary_of(member: Member, args: Namespace) -> Boundary:
    def upstream(*values: Any) -> bool:
        return bool(args.exit_interval) and values[3] % args.exit_interval == 0

    boundary = Boundary(member, Saves(), upstream, lambda: args)  # type: ignore[arg-type]
    boundary.take_over(args)
    return boundary


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGUSR2])
def test_signal_asks_and_only_a_record_ends(asked: signal.Signals, args: Namespace) -> None:
    args.exit_signal_handler, args.exit_signal = True, signal.SIGUSR2
    member = Member()
    boundary = boundary_of(member, args)
    assert not args.exit_signal_handler, "Megatron would act on it in one replica alone"
    os.kill(os.getpid(), asked)
    assert not decide(boundary, 5), "no other replica knows of it yet"
    assert boundary._checkpoints.asked == [5], "what a dead writer owes is not made up for"  # type: ignore[attr-defined]
    assert member.requested == [EXIT + asked.name]
    assert not decide(boundary, 6)
    assert len(member.requested) == 1
    member.requests = frozenset({EXIT + "something that another replica was asked"})
    assert decide(boundary, 7)


def test_time_limit_asks_once(args: Namespace) -> None:
    args.exit_duration_in_mins = 0
    member = Member()
    boundary = boundary_of(member, args)
    assert args.exit_duration_in_mins is None
    assert not decide(boundary, 1)
    assert not decide(boundary, 2)
    assert member.requested == [EXIT + "ran for 0 minutes"]
