"""The environment of the processes that become ranks: the user's variables, and our defaults."""

from __future__ import annotations

import math

from megatron_recover import config
from megatron_recover.deadlines import Deadlines, figure
from megatron_recover.host.addresses import INTERFACE

HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
"""Seconds without progress of torch's NCCL watchdog after which torch's heartbeat monitor begins to
end the process. torch's default is 480 (ProcessGroupNCCL.cpp)."""


def environment_of_workers(environment: dict[str, str], deadlines: Deadlines, *, on_gpus: bool) -> dict[str, str]:
    """Return the user's environment with defaults for ranks that are all on this machine.

    A variable that the user has set keeps its value. By default a rank has one OpenMP thread, and
    gloo listens on the loopback interface only. On GPUs, also by default, NCCL adds in a fixed
    order (`config.NCCL_ORDER`), none of its files makes its calls block
    (`config.NCCL_NOT_BY_FILES`), and torch's heartbeat monitor ends no rank before the user's
    deadline.
    """
    if on_gpus:
        heartbeat = {HEARTBEAT: str(math.ceil(deadlines.deadline_s))}
        environment = config.NCCL_ORDER | config.NCCL_NOT_BY_FILES | heartbeat | environment
    # All ranks of a job are on this machine. By default gloo would listen on the address of the
    # host name, where remote hosts can connect.
    return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE} | environment


def environment_warnings(environment: dict[str, str], deadlines: Deadlines, *, on_gpus: bool) -> list[str]:
    """Return a line for each variable that the user has set against what a run relies on.

    Only `config.NCCL_ORDER` and `HEARTBEAT` are judged here, and only on GPUs: elsewhere no rank
    uses NCCL.
    """
    if not on_gpus:
        return []
    found = [
        f"{name} is {environment[name]} in the environment, not {pinned}: replicas stay bit-identical only if NCCL "
        "adds in the same order in each of them"
        for name, pinned in config.NCCL_ORDER.items()
        if environment.get(name, pinned) != pinned
    ]
    heartbeat = environment.get(HEARTBEAT, "")
    if heartbeat.isdecimal() and int(heartbeat) < deadlines.deadline_s:
        found.append(
            f"{HEARTBEAT} is {heartbeat} in the environment: torch may end a rank whose NCCL does not answer before "
            f"--recover-deadline-s ({figure(deadlines.deadline_s)} s) is over; leave the variable out"
        )
    return found
