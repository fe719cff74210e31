"""`megatron-recover` whose coordinator gives members more time to follow a generation than they wait before they request one.

No deadline of a user's leads to that order. Here it lets a rank stand still in one recovery and take part in the next.
"""

from __future__ import annotations

import sys
from typing import Any

from msgspec.structs import replace

from megatron_recover import cli
from megatron_recover.cli import run
from megatron_recover.cluster.job import Job
from megatron_recover.cluster.launcher import Launcher

FOLLOW_S = 100.0


def main() -> int:
    """Run the command line."""
    run.Launcher = lambda job, **others: _lenient(job, **others)  # type: ignore[assignment, misc]
    return cli.main()


def _lenient(job: Job, **others: Any) -> Launcher:
    return Launcher(job, deadlines=replace(job.config.deadlines, follow_s=FOLLOW_S), **others)


if __name__ == "__main__":
    sys.exit(main())
