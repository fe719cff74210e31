"""A toy replica whose data stalls: rank 0 of replica 1 reads from a FIFO in step `STEP`, and its page says so."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_recover.core.progress import Phase
from megatron_recover.faults import FaultPoint
from tests.cluster.toy import Toy, main

STEP = 3
FIFO = "data"
"""In the run's folder; who writes to it ends the stall."""
PID = "reader.pid"
"""There, too."""


class ReadingToy(Toy):
    """Its data comes when somebody writes."""

    def at(self, point: FaultPoint, **where: int) -> None:
        super().at(point, **where)
        if point is FaultPoint.FORWARD and where["step"] == STEP and (self.context.replica, self.context.rank) == (1, 0):
            path = f"{self.context.run_dir}/{FIFO}"
            if not os.path.exists(path):
                Path(self.context.run_dir, PID).write_text(str(os.getpid()))
                os.mkfifo(path)
                with self.page.within(Phase.DATA), open(path, "rb") as data:
                    data.read()


if __name__ == "__main__":
    main(ReadingToy)
