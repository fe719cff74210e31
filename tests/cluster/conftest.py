"""What tests of whole jobs share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.jobs import Spec
from tests.cluster.running import AtTerminal, Running, Start


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a job that is killed at the end of the test, whatever becomes of that."""
    started: list[Running] = []

    def starting(spec: Spec, *, at_terminal: bool = False, **settings: Any) -> Running:
        started.append(AtTerminal(spec) if at_terminal else Running(spec, **settings))
        started[-1].until_training()
        return started[-1]

    yield starting
    for job in started:
        job.close()
