"""The inside of a test network: a *cage*, and in it nodes. Each is a namespace whose first process starts programs as forks.

``python -m tests.nodes.inside DESCRIPTOR FOLDER [preload]`` makes the cage: a network and a PID namespace. Its first process
takes orders from the socket DESCRIPTOR; with `preload` it has imported what `tests/preload.py` names. It ends with that socket,
and all that it made ends with it: the kernel kills what is in a PID namespace whose first process ends. FOLDER is removed then.
The outside, which gives the orders, is `nodes.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests import forks

MESSAGE_BYTES = 2**20
NOT_PERMITTED = "this machine lets nobody make namespaces"
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1
_COVERED = ("/tmp", "/run")
"""Folders that each node has of its own, beside /dev/shm; empty when it starts."""
_LIBC = ctypes.CDLL(None, use_errno=True)
Handler = Callable[[dict[str, Any], list[int]], None]


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount as mount(2) does."""
    if _LIBC.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"mount of {source or kind} ({options}): {os.strerror(number)}", target)


def serve(control: socket.socket, handle: Mapping[str, Handler]) -> NoReturn:
    """Obey the orders that come through `control`, and reap all children, until its other end closes.

    An order is JSON with a field `order`, and descriptors. `start` is known to all, `handle` has the others.
    """
    status_of: dict[int, socket.socket] = {}

    def start(order: dict[str, Any], descriptors: list[int]) -> None:
        pid, status = _start(order, *descriptors)
        status_of[pid] = status

    handlers = {"start": start, **handle}
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if woken in ready:
            os.read(woken, 2**16)
            _reap(status_of)
        if control.fileno() in ready:
            text, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 8, socket.MSG_CMSG_CLOEXEC)
            if not text:
                os._exit(0)
            order = json.loads(text)
            handlers[order.pop("order")](order, descriptors)


def _reap(status_of: dict[int, socket.socket]) -> None:
    """Reap who has ended, and report the exit code of each program through its socket."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if pid in status_of:
                with contextlib.suppress(OSError), status_of.pop(pid) as report:
                    report.send(str(os.waitstatus_to_exitcode(status)).encode())


def _start(order: dict[str, Any], output: int, report: int) -> tuple[int, socket.socket]:
    """Start a program; it introduces itself through the socket `report`, which shows the receiver its pid there."""
    status = socket.socket(fileno=report)
    pid = os.fork()
    if pid:
        os.close(output)
        return pid, status
    try:
        status.send(b"started")
        command, environment = order["command"], order["environment"]
        if forks.can_be_fork(command, environment):
            forks.begin(output, command[1:], Path(order["cwd"]), environment)
        _execute(output, command, order["cwd"], environment)
    finally:
        os._exit(127)


def _execute(output: int, command: Sequence[str], cwd: str, environment: Mapping[str, str]) -> NoReturn:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(cwd)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
        os._exit(127)


def _make_node(order: dict[str, Any], descriptors: list[int]) -> None:
    """Fork a node, which says `ready` through its socket, or what is wrong."""
    [control] = descriptors
    link = socket.socket(fileno=control)
    if os.fork():
        link.close()
        return
    try:
        os.unshare(os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWNS | os.CLONE_NEWUTS | os.CLONE_NEWIPC)
        if os.fork():
            os._exit(0)
        _furnish(**order)
        link.send(b"ready")
        os.chdir("/")
        serve(link, {})
    except BaseException as error:
        link.send(str(error).encode() or b"it failed")
    finally:
        os._exit(1)


def _furnish(name: str, seen: Sequence[str], own: Mapping[str, str], shm_bytes: int, clock_offset_s: float) -> None:
    """Give a node its file systems, name and clock.

    `seen`: paths below `_COVERED` that stay visible. `own`: paths in the node -> what is found there.
    """
    _set_clock(clock_offset_s)
    socket.sethostname(name)
    mount("", "/", flags=_MS_REC | _MS_PRIVATE)
    inside = {**{path: path for path in seen if path.startswith(tuple(f"{each}/" for each in _COVERED))}, **own}
    sources = {path: os.open(source, os.O_PATH | os.O_CLOEXEC) for path, source in inside.items()}
    cgroups = os.open("/sys/fs/cgroup", os.O_PATH | os.O_CLOEXEC)
    for folder in _COVERED:
        mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")
    mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=1777,size={shm_bytes}")
    for path, source in sources.items():
        found = f"/proc/self/fd/{source}"
        if os.path.isdir(found):
            os.makedirs(path, exist_ok=True)
        mount(found, path, flags=_MS_BIND | _MS_REC)
        os.close(source)
    mount("sysfs", "/sys", "sysfs")
    mount(f"/proc/self/fd/{cgroups}", "/sys/fs/cgroup", flags=_MS_BIND | _MS_REC)
    os.close(cgroups)
    mount("proc", "/proc", "proc")


def _set_clock(offset_s: float) -> None:
    """Shift the wall clock of this process and its forks, if `clock.c` is loaded."""
    if hasattr(shift := ctypes.CDLL(None), "set_clock_offset"):
        shift.set_clock_offset(ctypes.c_longlong(round(offset_s * 1e9)))


def main() -> None:
    """Make the cage."""
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        os.unshare(os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWNS)
    except PermissionError:
        control.send(NOT_PERMITTED.encode())
        return
    if pid := os.fork():
        control.close()
        os.waitpid(pid, 0)
        shutil.rmtree(sys.argv[2], ignore_errors=True)
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    mount("", "/", flags=_MS_REC | _MS_PRIVATE)
    mount("proc", "/proc", "proc")
    if "preload" in sys.argv[3:]:
        import tests.preload  # noqa: F401
    control.send(b"ready")
    serve(control, {"node": _make_node})


if __name__ == "__main__":
    main()
