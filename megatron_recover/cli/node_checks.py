"""The checks of this node (`cluster/doctor`) that `run` makes before it starts anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence

from megatron_recover.cluster.doctor.findings import Check, Folder, Need
from megatron_recover.cluster.doctor.folders import DEEDS
from megatron_recover.cluster.doctor.node import examine
from megatron_recover.cluster.job import Job
from megatron_recover.config import inherited_environment
from megatron_recover.flags import value_of
from megatron_recover.host.addresses import host_name
from megatron_recover.host.gpus import has_gpu
from megatron_recover.host.reachable import is_loopback


def folders_of(words: Sequence[str], but: Collection[Check] = ()) -> tuple[Folder, ...]:
    """Return the folders that a command line names, except those of the flags `but`.

    A name with `://` is no folder.
    """
    given = [(check, value_of(words, check)) for check in DEEDS if check not in but]
    return tuple(Folder(check, os.path.abspath(path)) for check, path in given if path and "://" not in path)


def refusals(job: Job) -> list[str]:
    """Return a line for each reason why this node cannot run the job.

    Print these lines, and those of what may go wrong, on stderr. What `run` has judged by itself is
    left out: interpreter, packages, Megatron, its run directory.
    """
    is_of_several = len(job.nodes) > 1 and not is_loopback(job.address)  # else all nodes are on this machine
    need = Need(
        num_ranks=job.num_ranks_here, num_nodes=len(job.nodes) if is_of_several else 1, on_gpus=has_gpu(),
        ranks_per_gpu=job.config.ranks_per_gpu, folders=folders_of(job.argv, but=[Check.RUN_DIR]),
        address=job.address if is_of_several else None, environment=inherited_environment(),
    )  # fmt: skip
    told = [(each.level, each.line(host_name())) for each in examine(need) if each.level != "ok"]
    for _, line in told:
        print(f"megatron-recover run: {line}", file=sys.stderr)
    return [line for level, line in told if level == "fail"]
