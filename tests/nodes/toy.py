"""The toy trainer on several nodes: it also leaves when and in which generation it applied a step (`history.py`).

Where a test wants it (`names.Naming`), it also names checkpoints.

All nodes have one monotonic clock, that of the machine, so these times say what came before what, whatever the traces say.
"""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from megatron_recover import trace
from megatron_recover.core.request import NO_COORDINATOR
from megatron_recover.deadlines import NODE_S
from tests.cluster.toy import Toy, main
from tests.nodes.names import Namer


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
        lapse_s = self.deadlines.with_node(self.context.node_s or NODE_S).lapse_s
        self.namer = Namer.of(self.member, Path(self.sums_dir), lapse_s)
        self.is_ending = False
        """True after a record has asked for the end of the job."""

    def step(self, iteration: int, sums: Any) -> tuple[str, ...]:
        """Make a step, and name a checkpoint after it if it is time.

        Without a coordinator the job ends at the next save point, as the product does (`checkpoint/boundary.py`). One more step
        follows, in which the others wait for the writer.
        """
        if self.namer is None:
            return super().step(iteration, sums)
        if iteration == 1:
            self.namer.before_first_step()
        if self.member.is_last_generation() and self.namer.is_save_point(iteration):
            self.member.request(NO_COORDINATOR)
        requests = super().step(iteration, sums)
        is_over, self.is_ending = self.is_ending, any(each.startswith("exit: ") for each in self.member.requests)
        if not is_over:
            self.namer.after_step(iteration, is_last=self.is_ending or iteration == self.num_steps - 1)
        return requests if is_over else ()


if __name__ == "__main__":
    main(NodesToy)
