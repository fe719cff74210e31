"""Several members in one process, each in a thread: enough where no process has to die."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Run the functions in threads of their own; their results or exceptions. A function that does not end fails the test."""
    outcomes: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            outcomes[index] = functions[index]()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a call hangs"
    return outcomes
