"""`megatron-recover` whose rings have little room: while the disk takes no events, some are lost."""

from __future__ import annotations

import sys
from typing import Any

from msgspec.structs import replace

from megatron_recover import cli
from megatron_recover.cli import run
from megatron_recover.cluster.job import Job
from megatron_recover.cluster.launcher import Launcher

RING_BYTES = 2**15


def main() -> int:
    """Run the command line."""
    run.Launcher = lambda job, **others: _narrow(job, **others)  # type: ignore[assignment, misc]
    return cli.main()


def _narrow(job: Job, **others: Any) -> Launcher:
    return Launcher(replace(job, ring_bytes=RING_BYTES), **others)


if __name__ == "__main__":
    sys.exit(main())
