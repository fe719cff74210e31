"""Settings of all tests, and what tests of several rooms share."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from megatron_recover.config import describe_descriptors
from megatron_recover.core.quota import balanced
from megatron_recover.core.recovery import recover
from megatron_recover.core.speed import learn, paces
from megatron_recover.core.vote import tally, voters_of
from megatron_recover.host.addresses import address_of
from tests.stderr import StalledStderr

# An example may take as long as the machine makes it, and so may its choice: the time limit of the test bounds both. A failing
# example prints the line that replays it.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("project")

LONG_TESTS = Path(__file__).with_name("long_tests.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite golden files of tests/core and tests/slurm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out for time, which is listed in one place."""
    listed = {line for line in LONG_TESTS.read_text().splitlines() if line.startswith("tests/")}
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    """No answer of a pure function outlives a test, which may have planted a bug below it (`core/memo.py`)."""
    for function in (recover, learn, paces, voters_of, tally, balanced):
        function.forget()


@pytest.fixture
def hand_down(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with names and descriptors, which this process then finds as a rank finds what the launcher handed down."""
    return lambda **named: [monkeypatch.setenv(*each) for each in describe_descriptors(named).items()]  # type: ignore[return-value]


@pytest.fixture
def free() -> Iterator[str]:
    """An address at which nobody listens, and nobody but who is told of it: the port stays bound meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # `listen` binds to it as well
        holder.bind(("127.0.0.1", 0))
        yield address_of(holder)


@pytest.fixture
def stalled_stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], StalledStderr]]:
    """Have stderr of this process stall from the call on. (pytest would put it back between this fixture and the test.)"""
    made: list[StalledStderr] = []

    def stall() -> StalledStderr:
        made.append(StalledStderr())
        monkeypatch.setattr(sys, "stderr", made[0].file())
        return made[0]

    yield stall
    for each in made:
        each.close()
