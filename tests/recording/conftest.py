"""What tests of recordings share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.recording.runs import Run


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts recordings, whose recorders are ended at the end of the test."""
    runs: list[Run] = []

    def starting(run_dir: Path = tmp_path / "run", **fields: object) -> Run:
        runs.append(Run(run_dir, **fields))
        return runs[-1]

    yield starting
    for run in runs:
        run.recording.close()
