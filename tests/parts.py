"""Long tests in parts: `make test` runs one part of each case, `make long-test` all others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest


def in_parts(cases: Iterable[tuple[Any, ...]], num_parts: int) -> Iterator[Any]:
    """Each case with the number of each part behind it. CI's part differs from that of the case before."""
    for number, case in enumerate(cases):
        for part in range(num_parts):
            yield pytest.param(*case, part, marks=() if part == number % num_parts else pytest.mark.slow)
