"""What tests of whole jobs share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
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


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of this machine that allows 64 MiB; the test is skipped where none can be made."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = [path.lstrip("/") for _, controllers, path in lines if "memory" in controllers.split(",")]
    root = Path("/sys/fs/cgroup/memory") / own[0] if own else Path("/sys/fs/cgroup") / lines[-1][2].lstrip("/")
    group = root / f"test-{uuid.uuid4().hex}"
    limit = "memory.limit_in_bytes" if own else "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made in {root}: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip(f"{group} does not limit memory")
        (group / limit).write_text(str(64 * 2**20))
        yield group
    finally:
        group.rmdir()
