"""Keep the newest answer of a pure function.

All members of a generation compute the same plans, quotas and speeds from equal messages. Where
several members live in one process, as in the simulator, only the first one computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def newest_kept[**Arguments, Answer](function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """Return the pure `function` with a memory of its newest arguments and answer.

    Arguments are compared by equality, and must not be changed after the call. No call hashes them,
    as `functools.lru_cache` would: for the statuses of thousands of members that takes longer than
    the comparison. Any thread may call the function.
    """
    newest: tuple[Any, Any, Any] | None = None

    @functools.wraps(function)
    def answer(*args: Arguments.args, **named: Arguments.kwargs) -> Answer:
        nonlocal newest
        kept = newest  # one read: another thread may replace it meanwhile
        if kept is None or kept[:2] != (args, named):
            newest = kept = (args, named, function(*args, **named))
        found: Answer = kept[2]
        return found

    return answer
