"""A toy rank whose data is a memory map, of which the file is cut at step 1: a real SIGBUS.

Microbatch i is on page i. What a step begins with is read ahead by the product's thread.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

from megatron_recover.core.progress import Phase
from megatron_recover.core.values import Compute
from megatron_recover.faults import FaultPoint
from megatron_recover.trainer.read_ahead import Batch, ReadAhead
from tests.cluster.toy import Toy, main


class MappedToy(Toy):
    """The page of its last microbatch is gone from step 1 on, as where somebody writes a data set anew under a run."""

    may_read_ahead = True

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.file.truncate(self.num_microbatches * mmap.PAGESIZE)
        self.mapped = mmap.mmap(self.file.fileno(), self.num_microbatches * mmap.PAGESIZE)
        self.ahead = ReadAhead(self.page, 2)

    def prepared(self, batch: int) -> int:
        return batch

    def read(self, indices: range) -> int:
        return self.mapped[indices.start * mmap.PAGESIZE]

    read_when_due = read

    def batch(self, microbatch: int) -> Batch:
        return Batch(self, microbatch, range(microbatch, microbatch + 1))

    def compute(self, step: int, generation: int, compute: Compute, *, again: bool) -> None:
        if step == 1:
            os.ftruncate(self.file.fileno(), (self.num_microbatches - 1) * mmap.PAGESIZE)
        self.ahead.expect(map(self.batch, () if again else compute.microbatches))
        super().compute(step, generation, compute, again=again)

    def at(self, point: FaultPoint, **where: int) -> None:
        super().at(point, **where)
        if point in (FaultPoint.FORWARD, FaultPoint.RECOMPUTE):
            with self.page.within(Phase.DATA):
                self.ahead.take(self.batch(where["microbatch"]))


if __name__ == "__main__":
    main(MappedToy)
