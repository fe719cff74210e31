"""The toy trainer on several nodes: it also leaves when and in which generation it applied a step (`history.py`).

All nodes have one monotonic clock, that of the machine, so these times say what came before what, whatever the traces say.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from megatron_recover import trace
from tests.cluster.toy import Toy, main


class _Noting:
    """A log that also writes what is applied to a file of the rank."""

    def __init__(self, log: Any, path: str) -> None:
        self._log, self._file = log, open(path, "a", buffering=1)  # noqa: SIM115
        self._node = socket.gethostname()

    def record(self, event: Any) -> None:
        """Record an event."""
        if isinstance(event, trace.Applied):
            line = {"at": time.monotonic(), "node": self._node, "generation": event.generation, "step": event.step}
            self._file.write(json.dumps(line) + "\n")
        self._log.record(event)


class NodesToy(Toy):
    """One rank."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.log: Any = _Noting(self.log, f"{self.sums_dir}/applied-{self.context.replica}-{self.context.rank}.jsonl")


if __name__ == "__main__":
    main(NodesToy)
