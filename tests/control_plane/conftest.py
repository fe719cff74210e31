"""Partners of the control plane that a test plays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.control_plane.partners import Partner


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
