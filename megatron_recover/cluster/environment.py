"""The environment of the processes that become ranks: the user's variables, and our defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megatron_recover import config
from megatron_recover.deadlines import Deadlines, figure
from megatron_recover.host.addresses import INTERFACE
from megatron_recover.host.reachable import interface_of

HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
"""Seconds without progress of torch's NCCL watchdog after which torch's heartbeat monitor begins to
end the process. torch's default is 480 (ProcessGroupNCCL.cpp)."""

NCCL_INTERFACES = "NCCL_SOCKET_IFNAME"


def environment_of_workers(
    environment: dict[str, str], deadlines: Deadlines, *, on_gpus: bool, interface: str = INTERFACE
) -> dict[str, str]:
    """Return the user's environment with defaults for ranks.

    A variable that the user has set keeps its value. By default a rank has one OpenMP thread, and
    gloo listens on `interface` only: loopback if all ranks are on this machine, and otherwise the
    interface that has the address of this node. On GPUs, also by default, NCCL adds in a fixed
    order (`config.NCCL_ORDER`), none of its files makes its calls block
    (`config.NCCL_NOT_BY_FILES`), and torch's heartbeat monitor ends no rank before the user's
    deadline.
    """
    if on_gpus:
        heartbeat = {HEARTBEAT: str(math.ceil(deadlines.deadline_s))}
        environment = config.NCCL_ORDER | config.NCCL_NOT_BY_FILES | heartbeat | environment
    # By default gloo would listen on the address of the host name: not always one that other nodes
    # reach, and one where remote hosts can connect to a job on one machine.
    return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface} | environment


def nccl_line(environment: Mapping[str, str], known: Mapping[str, Sequence[str]], address: str) -> str:
    """Return a line that names the interfaces that NCCL takes for its sockets on this node.

    NCCL chooses; nothing of this project sets its variable. `known` is from `reachable.interfaces`,
    and `address` is that of this node. The rule is that of NCCL (src/misc/socket.cc,
    `ncclFindInterfaces`): the variable, or else names that begin with ib, any other names, docker,
    lo, virbr, in this order.
    """
    wanted = environment.get(NCCL_INTERFACES, "")
    usable = [name for name, addresses in known.items() if any(each != "::1" for each in addresses)]
    rules = [wanted] if len(wanted) > 1 else ["ib", "^docker,lo,virbr", "docker", "lo", "virbr"]
    chosen = next((found for rule in rules if (found := _matching(usable, rule))), [])
    why = f"{NCCL_INTERFACES} is {wanted}" if len(wanted) > 1 else f"{NCCL_INTERFACES} is not set"
    if not chosen:
        return f"NCCL finds no interface on this node ({why}); give {NCCL_INTERFACES} one of {', '.join(usable)}"
    line = f"NCCL takes {', '.join(chosen)} by its own rule ({why})"
    own = interface_of(address, known)
    if own in chosen:
        return line
    return f"{line}; this node's address {address} is on {own}: if NCCL connects nowhere, set {NCCL_INTERFACES}={own}"


def _matching(names: Sequence[str], rule: str) -> list[str]:
    """Return the names that a value of NCCL_SOCKET_IFNAME selects.

    The value has prefixes of names. `^` in front means all other names, and `=` whole names.
    """
    is_excluding, is_exact = rule.startswith("^"), rule.lstrip("^").startswith("=")
    prefixes = [each.partition(":")[0] for each in rule.lstrip("^=").split(",")]
    found = [name for name in names if any(name == each if is_exact else name.startswith(each) for each in prefixes)]
    return [name for name in names if name not in found] if is_excluding else found


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
