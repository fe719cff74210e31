"""Keep the newest answer of a pure function.

All members of a generation compute the same plans, quotas and speeds from equal messages. Where
several members live in one process, as in the simulator, only the first one computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class newest_kept[**Arguments, Answer]:  # noqa: N801 - used as a decorator
    """A pure function with a memory of its newest arguments and answer. Any thread may call it.

    Arguments are compared by equality, and must not be changed after the call. No call hashes them,
    as `functools.lru_cache` would: for the statuses of thousands of members that takes longer than
    the comparison.
    """

    def __init__(self, function: Callable[Arguments, Answer]) -> None:
        self._function = function
        self._newest: tuple[Any, Any, Any] | None = None
        functools.update_wrapper(self, function)

    def __call__(self, *args: Arguments.args, **named: Arguments.kwargs) -> Answer:
        """Return the function's answer. Call it only if the arguments differ from the newest."""
        kept = self._newest  # one read: another thread may replace it meanwhile
        if kept is None or kept[:2] != (args, named):
            self._newest = kept = (args, named, self._function(*args, **named))
        answer: Answer = kept[2]
        return answer

    def forget(self) -> None:
        """Drop what is kept, as after a change of what the function calls (tests, benchmarks)."""
        self._newest = None
