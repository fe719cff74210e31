"""A toy rank that reads microbatch 0 of every step from a memory map whose file is cut at step 1: a real SIGBUS."""

from __future__ import annotations

import mmap
import os
import tempfile

from megatron_recover.faults import FaultPoint
from tests.cluster.toy import Toy, main


class MappedToy(Toy):
    """Its data is gone from step 1 on, as where somebody writes a data set anew under a run."""

    def at(self, point: FaultPoint, **where: int) -> None:
        super().at(point, **where)
        if point in (FaultPoint.FORWARD, FaultPoint.RECOMPUTE) and where["microbatch"] == 0:
            with tempfile.TemporaryFile() as file:
                file.truncate(mmap.PAGESIZE)
                with mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
                    if where["step"] == 1:
                        os.ftruncate(file.fileno(), 0)
                    mapped[0]


if __name__ == "__main__":
    main(MappedToy)
