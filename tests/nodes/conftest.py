"""What tests on several nodes share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nodes import nodes
from tests.nodes.nodes import Cage, Network
from tests.nodes.slurm import Slurm
from tests.nodes.slurm_losses import NUM_NODES


@pytest.fixture(scope="session")
def cage() -> Iterator[Cage]:
    """The cage of this session. Skips where none can be had."""
    with nodes.cage() as made:
        yield made


@pytest.fixture(scope="module")
def cheap_cage() -> Iterator[Cage]:
    """A cage for tests that import no torch."""
    with nodes.cage(preload=False) as made:
        yield made


@pytest.fixture
def make_network(cage: Cage, tmp_path: Path) -> Iterator[Callable[..., Network]]:
    """Makes networks that are gone at the end of the test."""
    with contextlib.ExitStack() as stack:
        made: list[Network] = []

        def make(num_nodes: int = nodes.NUM_NODES, **settings: Any) -> Network:
            made.append(Network(cage, tmp_path / f"network-{len(made)}", num_nodes, **settings))
            stack.callback(made[-1].close)
            return made[-1]

        yield make


@pytest.fixture
def network(make_network: Callable[..., Network]) -> Network:
    """Four nodes."""
    return make_network()


@pytest.fixture
def slurm(make_network: Callable[..., Network]) -> Slurm:
    """One with three nodes for jobs, and one for its control."""
    return Slurm(make_network(NUM_NODES + 1))
