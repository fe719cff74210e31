"""What a training script may ask of the job that it runs in."""

from __future__ import annotations

from collections.abc import Iterator

import megatron.training
import megatron.training.arguments
import megatron.training.training
import pytest

from megatron_recover.megatron import is_writer
from megatron_recover.megatron.launch import script


class Entry:
    """Replica 1, which becomes the writer."""

    def __init__(self) -> None:
        self.writes = False

    def is_writer(self) -> bool:
        return self.writes


@pytest.fixture
def entry() -> Iterator[Entry]:
    upstream = (
        megatron.training.arguments.parse_and_validate_args, megatron.training.pretrain, megatron.training.training.pretrain,
    )  # fmt: skip
    made = Entry()
    script.wrap(made)  # type: ignore[arg-type]
    yield made
    (
        megatron.training.arguments.parse_and_validate_args, megatron.training.pretrain, megatron.training.training.pretrain,
    ) = upstream  # fmt: skip


def test_under_plain_torchrun_every_rank_is_the_writers() -> None:
    assert is_writer()


def test_a_script_learns_when_its_replica_becomes_the_writer(entry: Entry) -> None:
    assert script.is_wrapped() and not is_writer()
    entry.writes = True
    assert is_writer()
