"""A toy of which two ranks, one after the other, end as NCCL's watchdog ends a process when a link inside the replica breaks.

What torch prints then, with SIGABRT behind it, is in `WATCHDOG`; the microbatch in work is an innocent one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron_recover.faults import FaultPoint
from tests.cluster.toy import Toy, main

WATCHDOG = """\
[rank0]:[E1123 ProcessGroupNCCL.cpp:684] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)
[rank0]:[E1123 ProcessGroupNCCL.cpp:741] [Rank 0] Some NCCL operations have failed or timed out. Due to the asynchronous \
nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.
[rank0]:[E1123 ProcessGroupNCCL.cpp:755] [Rank 0] To avoid data inconsistency, we are taking the entire process down.
terminate called after throwing an instance of 'c10::DistBackendError'
"""
HEARTBEAT = """\
[rank0]:[E1123 ProcessGroupNCCL.cpp:1870] [PG ID 0 PG GUID 0(default_pg) Rank 0] ProcessGroupNCCL's watchdog got stuck for \
480 seconds without making progress in monitoring enqueued collectives.
[rank0]:[F1123 ProcessGroupNCCL.cpp:1554] [PG ID 0 PG GUID 0(default_pg) Rank 0] Terminating the process after attempting to \
dump debug info, due to ProcessGroupNCCL watchdog hang.
"""
"""What torch prints where the watchdog itself hangs, with SIGABRT behind it."""


class AbortingToy(Toy):
    """Its links break in step 1, while microbatch 0 is computed, for the first two replicas that are dealt it."""

    def at(self, point: FaultPoint, **where: int) -> None:
        super().at(point, **where)
        is_struck = point in (FaultPoint.FORWARD, FaultPoint.RECOMPUTE) and (where["step"], where["microbatch"]) == (1, 0)
        if is_struck and self.context.rank == 0 and self.num_struck() < 2:
            Path(self.context.run_dir, f"struck-{self.context.replica}").touch()
            print(WATCHDOG, file=sys.stderr, flush=True)
            os.abort()

    def num_struck(self) -> int:
        return len(list(Path(self.context.run_dir).glob("struck-*")))


if __name__ == "__main__":
    main(AbortingToy)
