"""Between two iterations: requests that end all, whoever was asked, and the making up for what a dead writer owes."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_recover.core.request import NO_COORDINATOR, SAVED, UNSAVED, exit_for
from megatron_recover.megatron.checkpoint.boundary import Boundary


class Driver:
    """What exits see of one."""

    def __init__(self) -> None:
        self.requests: frozenset[str] = frozenset()
        self.requested: list[str] = []
        self.is_last = False
        """No member has a coordinator any more."""

    def is_last_generation(self) -> bool:
        return self.is_last

    def request(self, request: str) -> None:
        self.requested.append(request)


class Saves:
    """Stands for `Checkpoints`."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def make_up(self, iteration: int, *_: Any, **__: Any) -> None:
        self.asked.append(iteration)


@pytest.fixture
def args() -> Iterator[Namespace]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield Namespace(
        exit_duration_in_mins=None, exit_signal_handler=False, exit_signal=signal.SIGTERM, exit_interval=None,
        save=None, save_interval=None,
    )  # fmt: skip
    for number, handler in before.items():
        signal.signal(number, handler)


def decide(boundary: Boundary, iteration: int) -> bool:
    return boundary.decide(None, None, None, iteration, 0, {}, None)


def boundary_of(driver: Driver, args: Namespace) -> Boundary:
    def upstream(*values: Any) -> bool:
        return bool(args.exit_interval) and values[3] % args.exit_interval == 0

    boundary = Boundary(driver, Saves(), upstream, lambda: args)  # type: ignore[arg-type]
    boundary.take_over(args)
    return boundary


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGUSR2])
def test_signal_asks_and_only_a_record_ends(asked: signal.Signals, args: Namespace) -> None:
    args.exit_signal_handler, args.exit_signal = True, signal.SIGUSR2
    driver = Driver()
    boundary = boundary_of(driver, args)
    assert not args.exit_signal_handler, "Megatron would act on it in one replica alone"
    os.kill(os.getpid(), asked)
    assert not decide(boundary, 5), "no other replica knows of it yet"
    assert boundary._checkpoints.asked == [5], "what a dead writer owes is not made up for"  # type: ignore[attr-defined]
    assert driver.requested == [exit_for(asked.name)]
    assert not decide(boundary, 6)
    assert len(driver.requested) == 1
    driver.requests = frozenset({exit_for("something that another replica was asked")})
    assert decide(boundary, 7)


def test_time_limit_asks_once(args: Namespace) -> None:
    args.exit_duration_in_mins = 1e-9
    driver = Driver()
    boundary = boundary_of(driver, args)
    assert args.exit_duration_in_mins is None
    assert not decide(boundary, 1)
    assert not decide(boundary, 2)
    assert driver.requested == [exit_for("ran for 1e-09 minutes")]


def test_time_limit_of_zero_is_none(args: Namespace) -> None:
    """As in Megatron."""
    args.exit_duration_in_mins = 0
    driver = Driver()
    assert not decide(boundary_of(driver, args), 1) and not driver.requested


def test_a_request_that_is_no_exit_ends_nothing(args: Namespace) -> None:
    driver = Driver()
    boundary = boundary_of(driver, args)
    driver.requests = frozenset({SAVED, UNSAVED})
    assert not decide(boundary, 3) and args.exit_interval is None
    assert driver.requested == []


def test_without_a_coordinator_all_end_at_the_next_save_point(args: Namespace) -> None:
    """The record of the step before the save point carries the request, so the save is the last one."""
    args.save, args.save_interval = "folder", 4
    driver = Driver()
    boundary = boundary_of(driver, args)
    assert not decide(boundary, 3) and driver.requested == [], "there is a coordinator"
    driver.is_last = True
    assert not any(decide(boundary, iteration) for iteration in (4, 5, 6)) and driver.requested == []
    assert not decide(boundary, 7) and driver.requested == [NO_COORDINATOR]
    driver.requests = frozenset(driver.requested)
    assert decide(boundary, 8)


def test_without_a_coordinator_and_without_a_place_to_save_all_end_after_the_next_step(args: Namespace) -> None:
    driver = Driver()
    driver.is_last = True
    boundary = boundary_of(driver, args)
    assert not decide(boundary, 5) and driver.requested == [NO_COORDINATOR]
    driver.requests = frozenset(driver.requested)
    assert decide(boundary, 6)


def test_what_is_owed_is_made_up_for_before_megatron_saves_and_leaves(args: Namespace) -> None:
    """With all that Megatron needs to save: it is given to the one as to the other."""
    seen: list[tuple[Any, ...]] = []

    class Owed:
        def make_up(self, iteration: int, *values: Any, train_data_iterator: Any) -> None:
            seen.append(("made up", iteration, *values, train_data_iterator))

    def upstream(*values: Any) -> bool:
        seen.append(("upstream", *values))
        return True

    boundary = Boundary(Driver(), Owed(), upstream, lambda: args)  # type: ignore[arg-type]
    assert boundary.decide("model", "optimizer", "scheduler", 7, 1.5, {"context": 1}, "samples")
    given = ("model", "optimizer", "scheduler")
    assert seen == [
        ("made up", 7, *given, 1.5, {"context": 1}, "samples"),
        ("upstream", *given, 7, 1.5, {"context": 1}, "samples"),
    ]


def test_the_count_of_operations_is_noted_after_each_iteration(args: Namespace) -> None:
    """Megatron's training loop has it in a variable of its own."""
    noted: list[Any] = []
    boundary = Boundary(Driver(), Saves(), lambda *_: False, lambda: args, noted.append)  # type: ignore[arg-type]
    boundary.take_over(args)
    for iteration in (1, 2):
        boundary.decide(None, None, None, iteration, iteration * 100, {}, None)
    assert noted == [100, 200]
