"""Long tests in parts: `make test` runs one part of each case, `make long-test` all others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest


def in_parts(cases: Iterable[tuple[Any, ...]], num_parts: int) -> Iterator[Any]:
    """Each case with each part of a list behind it, as a slice. CI's part differs from that of the case before."""
    for number, case in enumerate(cases):
        for part in range(num_parts):
            marks = () if part == number % num_parts else pytest.mark.slow
            yield pytest.param(*case, slice(part, None, num_parts), marks=marks)
