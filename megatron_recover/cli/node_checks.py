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


def folders_of(words: Sequence[str], but: Collection[Check] = ()) -> tuple[Folder, ...]:
    """Return the folders that a command line names, except those of the flags `but`.

    A name with `://` is no folder.
    """
    given = [(check, value_of(words, check)) for check in DEEDS if check not in but]
    return tuple(Folder(check, os.path.abspath(path)) for check, path in given if path and "://" not in path)


def passed(job: Job) -> bool:
    """Return whether this node can run the job; print a line on stderr for what it lacks.

    What `run` has judged by itself is left out: interpreter, packages, Megatron, its run directory.
    """
    need = Need(
        num_ranks=job.num_replicas * job.num_ranks, on_gpus=has_gpu(), ranks_per_gpu=job.config.ranks_per_gpu,
        folders=folders_of(job.argv, but=[Check.RUN_DIR]), environment=inherited_environment(),
    )  # fmt: skip
    found = examine(need)
    for each in found:
        if each.level != "ok":
            print(f"megatron-recover run: {each.line(host_name())}", file=sys.stderr)
    return all(each.level != "fail" for each in found)
