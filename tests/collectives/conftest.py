"""What tests of the control plane share: partners that the test plays, and an address that is free."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from megatron_recover.collectives.wire import address_of, listen
from megatron_recover.config import describe_descriptors
from tests.collectives.partners import Partner


@pytest.fixture
def partner() -> Iterator[Partner]:
    """The other end of the link under test: the leader of a rank, or the coordinator of a leader."""
    played = Partner()
    yield played
    played.close()


@pytest.fixture
def other_leader() -> Iterator[Partner]:
    """The leader of another replica."""
    played = Partner()
    yield played
    played.close()


@pytest.fixture
def hand_down(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with names and descriptors, which this process then finds as a rank finds what the launcher handed down."""
    return lambda **named: [monkeypatch.setenv(*each) for each in describe_descriptors(named).items()]  # type: ignore[return-value]


@pytest.fixture
def free() -> str:
    """An address at which nobody listens."""
    listener = listen("127.0.0.1:0")
    address = address_of(listener)
    listener.close()
    return address
