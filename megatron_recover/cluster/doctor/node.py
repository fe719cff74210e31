"""All checks of one node, together within `DEADLINE_S` seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec

from megatron_recover.cluster.doctor import machine, slurm
from megatron_recover.cluster.doctor.findings import Check, Finding, Need
from megatron_recover.cluster.doctor.folders import Trials
from megatron_recover.cluster.doctor.gpus import Query, judged
from megatron_recover.cluster.doctor.machine import HostName
from megatron_recover.config import VISIBLE_GPUS
from megatron_recover.host.gpus import visible

DEADLINE_S = 5.0
"""Seconds after which what has not answered is reported so: a disk, a driver, a name server."""


def examine(need: Need, timeout_s: float = DEADLINE_S) -> list[Finding]:
    """Check this node; return the findings in the order of docs/how_to/doctor.md.

    What may wait runs in other processes, or in a thread, and all of it at the same time. Takes at
    most a little more than `timeout_s` seconds.
    """
    until = time.monotonic() + timeout_s
    trials = Trials(need.folders)
    query = Query()
    name = HostName()
    if need.is_rank_per_gpu and not isinstance(there := query.answer(timeout_s), Finding):
        need = msgspec.structs.replace(need, num_ranks=len(visible(there, need.environment.get(VISIBLE_GPUS))))
    found = [
        machine.cores(need), machine.memory(need), machine.open_files(need), machine.locked_memory(need),
        machine.shared_memory(need), machine.address(need), machine.clock(need),
        *slurm.settings(need.environment, len(os.sched_getaffinity(0))), name.finding(need, until - time.monotonic()),
    ]  # fmt: skip
    there = query.answer(until - time.monotonic())
    found.append(there if isinstance(there, Finding) else judged(need, there))
    found += trials.findings(until - time.monotonic())
    order = [*Check]
    return sorted((each for each in found if each is not None), key=lambda each: order.index(each.check))


def software(requirements: Sequence[str], mistake: str | None) -> list[Finding]:
    """Check interpreter, packages and Megatron, which `run` judges by itself.

    `mistake`: why there is not exactly one Megatron, if so.
    """
    return [machine.interpreter(), *machine.installed(requirements), machine.megatron(mistake)]
