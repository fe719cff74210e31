"""The checks of this node (`cluster/doctor`) that `run` makes before it starts anything."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Sequence

from megatron_recover.cluster import examination
from megatron_recover.cluster.doctor import between, machine
from megatron_recover.cluster.doctor.findings import Check, Folder, Need
from megatron_recover.cluster.doctor.folders import DEEDS
from megatron_recover.cluster.doctor.node import examine
from megatron_recover.cluster.doctor.probing import sample
from megatron_recover.cluster.doctor.session import Session
from megatron_recover.cluster.job import Job
from megatron_recover.cluster.membership import Joined
from megatron_recover.config import inherited_environment
from megatron_recover.core.wording import counted
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


def refusals(job: Job, joined: Joined | None) -> list[str]:
    """Return a line for each reason why the nodes of a job cannot run it.

    Print these lines, and those of what may go wrong, on stderr. With other nodes, all are examined
    together: all return the same then, and node 0 alone prints what may go wrong. A node that came
    after the start is examined alone. What `run` has judged by itself is left out: interpreter,
    packages, Megatron, its run directory. Raises `NotMet` if the job ends before, and ValueError
    for more spares than this node has room for.
    """
    is_of_several = len(job.nodes) > 1 and not is_loopback(job.address)  # else all nodes are on this machine
    num_ranks = job.num_slots_here if job.is_late else job.num_ranks_here + job.num_spares
    need = Need(
        num_ranks=num_ranks, num_spares=job.num_spares, num_nodes=len(job.nodes) if is_of_several else 1, on_gpus=has_gpu(),
        ranks_per_gpu=job.config.ranks_per_gpu, folders=folders_of(job.argv, but=[Check.RUN_DIR]),
        has_later_ranks=any(0 not in job.slots(replica) for replica in job.replicas_here),
        address=job.address if len(job.nodes) > 1 else None, environment=inherited_environment(),
    )  # fmt: skip
    most, why = machine.most_spares(need)
    if job.num_spares > most:
        raise ValueError(
            f"--spares is {job.num_spares}, and this node has room for {most} beside its "
            f"{counted(job.num_ranks_here, 'rank')} ({why}); "
            + (f"give --spares {most} or fewer" if most else "leave out --spares")
        )
    if joined is None or len(job.nodes) < 2 or job.is_late:
        with contextlib.nullcontext() if joined is None else joined.membership.kept():
            found = [(0, each) for each in examine(need) if each.level != "ok"]
        told = between.lines(found, [host_name()])
        refused = between.lines([each for each in found if each[1].level == "fail"], [host_name()])
    else:
        ports = sample(*job.ports) if job.ports is not None and is_of_several else [0]
        names = [each.name for each in job.nodes]
        told, refused = examination.examine(
            joined, names, job.config.deadline_s, lambda: Session(job.node, host_name(), need, joined.key, ports=ports)
        )  # fmt: skip
    for line in told:
        print(f"megatron-recover run: {line}", file=sys.stderr)
    return refused
