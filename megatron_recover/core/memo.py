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

    Arguments are compared by equality. Unlike `functools.lru_cache`, no call hashes them, which
    would take longer than the comparison for the statuses of thousands of members. Any thread may
    call the function.
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
