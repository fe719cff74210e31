"""Checks of what the system gives the processes of one node. Each reads files of the kernel only.

Nothing here waits, except the look-up of the host name (`HostName`), which has a deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_recover import packages
from megatron_recover.cluster.doctor.findings import Check, Finding, Need, fail, ok, warn
from megatron_recover.cluster.doctor.slurm import srun_line
from megatron_recover.host import control_group
from megatron_recover.host.addresses import family_of
from megatron_recover.host.reachable import interface_of, interfaces, is_loopback

_MIB, _GIB = 2**20, 2**30
_SHARED_BYTES, _FORKED_BYTES, _WARM_BYTES = _GIB // 2, _GIB * 2 // 5, _GIB
"""Host memory after the imports: of the fork server, of each rank that it forks (0.45 and 0.32 GiB
were measured with torch 2.13), and of each rank that imports everything itself. The model comes on
top."""
_FILES, _FILES_OF_RANK = 160, 8
"""Open files of the largest process: a rank has about 130 and some for each other replica, and the
launcher 30 and 6 for each rank of its node (measured)."""
_EASY_FILES = 1024
"""Open files with which no data set of many parts and no NCCL of usual size gets into need."""
_SHM_OF_RANK = 32 * _MIB
"""Shared memory that is wanted for each rank: samples from the workers of its data loaders, and on
a GPU NCCL's buffers between ranks without a direct path. The default of Docker is 64 MiB in all."""
_INFINIBAND = Path("/sys/class/infiniband")
_SHM = Path("/dev/shm")
_TOO_EARLY = 1_700_000_000
"""Seconds since 1970 (November 2023): no clock that somebody has set is before this release."""
_UNSYNCHRONISED = 0x40
"""STA_UNSYNC of adjtimex(2): no daemon keeps the clock right."""


def interpreter() -> Finding:
    """Check that the interpreter is one that a scheduler can start by its path."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not (sys.executable and os.access(sys.executable, os.X_OK)):
        return fail(Check.INTERPRETER, f"Python {version} does not know its path", "start it by its full path")
    return ok(Check.INTERPRETER, f"Python {version} ({sys.executable})")


def installed(requirements: Sequence[str]) -> list[Finding]:
    """Check the packages that training needs: one finding, or one for each mistake."""
    found = [fail(Check.PACKAGES, *_cut(line)) for line in packages.mistakes(requirements)]
    names = [packages.name_of(each) for each in requirements]
    return found or [ok(Check.PACKAGES, ", ".join(f"{name} {packages.version(name)}" for name in names))]


def _cut(line: str) -> tuple[str, str]:
    """Return what is wrong, and the remedy, which a message has behind its last semicolon."""
    value, _, remedy = line.rpartition("; ")
    return value, remedy


def megatron(mistake: str | None) -> Finding:
    """Return which Megatron the job imports; `mistake`: why there is not exactly one, if so."""
    if mistake is not None:
        return fail(Check.MEGATRON, *_cut(mistake))
    folder = packages.megatron_folder()
    if folder is None:
        return fail(Check.MEGATRON, "none is found", "put the folder of a checkout in PYTHONPATH, or install megatron-core")
    return ok(Check.MEGATRON, str(folder))


def cores(need: Need) -> Finding:
    """Compare the cores that this process may use, and the time on them, with the ranks.

    Fewer cores than ranks are reported where something restricts this process, or where ranks
    drive GPUs: a laptop may well have less.
    """
    affinity, all_of_them = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _core_quota()
    allowed = affinity if quota is None else min(affinity, quota.amount)
    value = f"{affinity} of {all_of_them}" + (f", of which {quota.file} allows the time of {quota.amount:g}" if quota else "")
    if need.num_ranks is not None:
        value += f", for {need.ranks}"
        if allowed < need.num_ranks and (need.on_gpus or allowed < all_of_them):
            remedy = "ask the container (--cpus, --cpuset-cpus), taskset or numactl for at least one core a rank"
            if line := srun_line(need.environment):
                remedy = f"write: {line}"
            return warn(Check.CORES, value, remedy)
    return ok(Check.CORES, value)


def _core_quota() -> control_group.Limit | None:
    try:
        return control_group.core_limit(control_group.groups_of("self", "cpu"))
    except OSError:
        return None


def memory(need: Need) -> Finding:
    """Compare the memory that the control groups allow with what the imports of all ranks take."""
    has, whose = _memory_here()
    value = f"{_gib(has)} ({whose})"
    wanted = _imports(need)
    if wanted > has:
        return warn(
            Check.MEMORY, f"{value}; {need.ranks} take {_gib(wanted)} before there is a model",
            "raise the limit (Slurm: --mem=0; Docker: --memory), or start fewer ranks on this node",
        )  # fmt: skip
    return ok(Check.MEMORY, value + (f", of which the imports of {need.ranks} take {_gib(wanted)}" if need.num_ranks else ""))


def _memory_here() -> tuple[int, str]:
    """Return the memory of this node in bytes, and what limits it: the machine or a file."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = control_group.memory_limit(control_group.groups_of("self", "memory"))
    except OSError:
        limit = None
    has = machine if limit is None else min(machine, int(limit.amount))
    return has, "that of the machine" if limit is None or has == machine else str(limit.file)


def most_spares(need: Need) -> tuple[int, str]:
    """Return for how many spares this node has room beside its ranks, and what limits it.

    That is the memory that the imports of all of them take, or the hard limit of open files.
    """
    has, _ = _memory_here()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared, own = (0, _WARM_BYTES) if need.on_gpus else (_SHARED_BYTES, _FORKED_BYTES)
    limits = [((has - shared) // own, f"{_gib(has)} of memory")]
    if hard != resource.RLIM_INFINITY:
        limits.append(((hard - _FILES) // _FILES_OF_RANK, f"{hard} open files (hard limit)"))
    most, why = min(limits)
    return max(0, most - (need.num_ranks or 0) + need.num_spares), why


def _imports(need: Need) -> int:
    ranks = need.num_ranks or 0
    return ranks * _WARM_BYTES if need.on_gpus else _SHARED_BYTES + ranks * _FORKED_BYTES


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"


def open_files(need: Need) -> Finding:
    """Compare the hard limit of open files, to which `run` raises the soft one, with the ranks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value, wanted = "no limit" if hard == resource.RLIM_INFINITY else str(hard), _FILES + _FILES_OF_RANK * (need.num_ranks or 1)
    if hard == resource.RLIM_INFINITY or hard >= max(_EASY_FILES, 2 * wanted):
        return ok(Check.OPEN_FILES, f"{value} (hard limit, to which run raises its own)")
    remedy = _raise(f"ulimit -n {max(_EASY_FILES, 2 * wanted)}", "nofile", "LimitNOFILE=", need)
    if hard < wanted:
        return fail(Check.OPEN_FILES, f"{value} (hard limit); {need.ranks} need {wanted}", remedy)
    return warn(Check.OPEN_FILES, f"{value} (hard limit): data sets of many files, or NCCL, may need more", remedy)


def _raise(command: str, name: str, unit: str, need: Need) -> str:
    remedy = f"`{command}` as root first, {name} in /etc/security/limits.conf, or {unit} of the service"
    if srun_line(need.environment):
        remedy += "; Slurm takes the limits of the login node along: write srun --propagate=NONE"
    return remedy


def locked_memory(need: Need) -> Finding | None:
    """Check that RDMA may lock memory, where this node has an InfiniBand device."""
    if not _INFINIBAND.is_dir() or not any(_INFINIBAND.iterdir()):
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard == resource.RLIM_INFINITY:
        return ok(Check.LOCKED_MEMORY, "no limit")
    remedy = _raise("ulimit -l unlimited", "memlock", "LimitMEMLOCK=infinity", need) + "; or NCCL_IB_DISABLE=1"
    return warn(Check.LOCKED_MEMORY, f"{hard // 1024} KiB: NCCL cannot register its buffers with InfiniBand", remedy)


def shared_memory(need: Need) -> Finding:
    """Compare size and free bytes of /dev/shm with what data loaders and NCCL of the ranks want.

    This project itself puts nothing there.
    """
    try:
        usage = shutil.disk_usage(_SHM)
    except OSError as error:
        return warn(Check.SHARED_MEMORY, f"not there ({error.strerror})", "mount a tmpfs there: data loaders and NCCL need it")
    wanted = max(2, need.num_ranks or 1) * _SHM_OF_RANK
    value = f"{usage.free // _MIB} MiB free of {usage.total // _MIB}"
    if usage.total < wanted:
        remedy = f"make it {wanted // _MIB} MiB or more (Docker: --shm-size, --ipc=host; else mount -o remount,size=... {_SHM})"
        return warn(Check.SHARED_MEMORY, f"{value}: a data loader or NCCL that finds none ends its rank by SIGBUS", remedy)
    if usage.free < wanted:
        return warn(Check.SHARED_MEMORY, value, f"remove what other jobs have left there (ls -l {_SHM})")
    return ok(Check.SHARED_MEMORY, value)


class HostName:
    """The look-up of this node's own name, which runs in a thread: a name server may not answer."""

    def __init__(self) -> None:
        self._name, self._found = socket.gethostname(), list[str]()
        self._thread = threading.Thread(target=self._look_up, name="host name", daemon=True)
        self._thread.start()

    def _look_up(self) -> None:
        with contextlib.suppress(OSError):  # not known
            found = socket.getaddrinfo(self._name, None, type=socket.SOCK_STREAM)
            self._found = [*dict.fromkeys(str(each[4][0]) for each in found)]

    def finding(self, need: Need, timeout_s: float) -> Finding:
        """Wait up to `timeout_s` seconds, and judge what the name of this node resolves to."""
        self._thread.join(max(0.0, timeout_s))
        name, addresses = self._name, self._found
        remedy = f"give {name} its address in /etc/hosts or DNS, or give --local-addr or --interface"
        if self._thread.is_alive():
            return warn(Check.HOST_NAME, f"{name}: the look-up does not answer", f"see /etc/resolv.conf; or {remedy}")
        value = f"{name} is {', '.join(addresses) or 'not known here'}"
        if need.num_nodes > 1 and not addresses:
            return warn(Check.HOST_NAME, value, remedy)
        if need.num_nodes > 1 and (loopback := [each for each in addresses if is_loopback(each)]):
            used = f", so {need.address} is used" if need.address and not is_loopback(need.address) else ""
            remedy = f"take {name} out of the line of {loopback[0]} in /etc/hosts, or give --local-addr or --interface"
            return warn(Check.HOST_NAME, f"{value}: other nodes cannot reach that{used}", remedy)
        return ok(Check.HOST_NAME, value)


def address(need: Need) -> Finding | None:
    """Check that the published address of this node is its own, and no loopback one."""
    if need.address_mistake:
        return fail(Check.ADDRESS, *_cut(need.address_mistake))
    if need.address is None:
        return None
    if need.num_nodes > 1 and is_loopback(need.address):
        return fail(Check.ADDRESS, f"{need.address} is reached from this node only", "give --interface or --local-addr")
    try:
        with socket.socket(family_of(need.address)) as probe:
            probe.bind((need.address, 0))
    except OSError as error:
        return fail(
            Check.ADDRESS, f"{need.address} is none of this node ({error.strerror})", "give --interface or another --local-addr"
        )  # fmt: skip
    return ok(Check.ADDRESS, f"{need.address} ({interface_of(need.address, interfaces())})")


class _Timex(ctypes.Structure):
    """The part of adjtimex(2)'s structure that is read here, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("rest", ctypes.c_char * 512),
    )  # fmt: skip


def clock(need: Need) -> Finding:
    """Check that the clock was set, and with several nodes that something keeps it right."""
    now = time.time()
    value = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < _TOO_EARLY:
        return warn(Check.CLOCK, value, "set it: start chrony or systemd-timesyncd")
    timex = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
        return ok(Check.CLOCK, value)
    if timex.status & _UNSYNCHRONISED:
        if need.num_nodes > 1:
            return warn(Check.CLOCK, f"{value}, and nothing keeps it right", "start chrony or systemd-timesyncd")
        return ok(Check.CLOCK, f"{value}, and nothing keeps it right, which matters with several nodes only")
    return ok(Check.CLOCK, f"{value}, right to {timex.maxerror / 1000:.0f} ms by its own account")
