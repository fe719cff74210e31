"""Nodes on this machine: each with network, processes, name, clock, file systems and shared memory of its own.

The nodes of a `Network` hang on a bridge in a *cage* (`inside.py`), so that nothing of them is in this machine's network, and
nothing is left when the process that made the cage has ended, however it did. Needs root, `ip` and `nsenter`.

Programs of Python that a node starts are forks of what the cage has imported. A packet to a node that is off, or beyond a cut,
vanishes: neighbour tables are fixed, so nobody is told that an address does not answer.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from megatron_recover.cluster.readiness import is_readable
from tests.cluster.waiting import until_files
from tests.nodes.inside import MESSAGE_BYTES, NOT_PERMITTED
from tests.nodes.proxy import Settings, Weather

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0
_IMPORTS_S = 180.0
"""What importing torch and Megatron may take where all cores are busy."""
NUM_NODES = 4
SHM_BYTES = 2**29
_LISTENING = "0A"
_NOWHERE = "02:4d:52:00:00:fe"
"""A hardware address that nobody has."""
_CLOCK = Path(__file__).with_name("clock.c")


class NoSuchDevice(OSError):
    """There is no network device with this name."""


class Program:
    """A program in a node, which outlives no node."""

    def __init__(
        self, control: socket.socket, command: Sequence[str], environment: Mapping[str, str], cwd: Path, output: Path
    ) -> None:
        """Start it. `control`: what the first process of its namespace takes orders from. `output`: where it prints to."""
        order = {"order": "start", "command": list(command), "environment": dict(environment), "cwd": str(cwd)}
        self._status, theirs = _socket_pair()
        with open(output, "ab") as file, theirs:
            socket.send_fds(control, [json.dumps(order).encode()], [file.fileno(), theirs.fileno()])
        self.command, self.output = command, output
        self.pid, _ = _receive(self._status)
        """As this process sees it."""
        self.returncode: int | None = None
        """Its exit code; negative: the signal that ended it; None: nobody has seen its end."""

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float = DEADLINE_S) -> int:
        """Return the exit code once it is over; raises `subprocess.TimeoutExpired`, with what it has printed."""
        if self.returncode is None:
            if not is_readable(self._status.fileno(), timeout):
                raise subprocess.TimeoutExpired(list(self.command), timeout, self.text())
            code = b""
            with contextlib.suppress(ConnectionError):
                code = self._status.recv(64)
            self._status.close()
            self.returncode = int(code) if code else -signal.SIGKILL  # its node has ended
        return self.returncode

    def text(self) -> str:
        """Return what it has printed."""
        return self.output.read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it is over."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class Cage:
    """The process that all nodes of a test session are forks of, and the network that holds their bridges."""

    def __init__(self, *, preload: bool = True) -> None:
        """Start it. `preload`: import torch and Megatron first. Raises OSError where it cannot be had."""
        self.folder = folder = Path(tempfile.mkdtemp(prefix="megatron-recover-nodes-"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.has_clocks = build_clock(library := folder / "clock.so")
        """Whether nodes can have clocks that are off."""
        if self.has_clocks:
            environment["LD_PRELOAD"] = " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
        self.environment = environment
        """Of programs in nodes."""
        self._control, theirs = _socket_pair()
        self.log = folder / "cage.log"
        with open(self.log, "wb") as log, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.nodes.inside", str(theirs.fileno()), str(folder), *["preload"] * preload],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        self.pid = self._first_words(self._control, _IMPORTS_S)
        self._num_bridges = 0

    def _first_words(self, link: socket.socket, deadline_s: float = DEADLINE_S) -> int:
        """Return the pid of who says `ready`; raises OSError with what else it says."""
        pid, words = _receive(link, deadline_s)
        if words == NOT_PERMITTED:
            raise PermissionError(words)
        if words != "ready":
            raise OSError(words or self.log.read_text() or "the test network's process has ended")
        return pid

    def start(self, command: Sequence[str], output: Path) -> Program:
        """Start a program beside the nodes, where their bridges are."""
        return Program(self._control, command, self.environment, ROOT, output)

    def make_node(self, order: Mapping[str, Any]) -> tuple[int, socket.socket]:
        """Return the pid of a node's first process, and what it takes orders from."""
        control, theirs = _socket_pair()
        with theirs:
            socket.send_fds(self._control, [json.dumps({"order": "node", **order}).encode()], [theirs.fileno()])
        return self._first_words(control), control

    def new_bridge(self) -> str:
        """Return the name of one that is up."""
        name = f"br{self._num_bridges}"
        self._num_bridges += 1
        configure(self.pid, "link set lo up", f"link add {name} type bridge mcast_snooping 0", f"link set {name} up")
        return name

    def close(self) -> None:
        """End it, and with it all that it made."""
        self._control.close()
        self._process.wait(DEADLINE_S)


class Node:
    """One node; it is on until `power_off`."""

    def __init__(self, network: Network, number: int, clock_offset_s: float) -> None:
        """Nodes are made by a `Network`, and switched on by it."""
        self.network, self.number, self.clock_offset_s = network, number, clock_offset_s
        self.name = f"n{number}"
        self.address = f"10.77.0.{10 + number}"
        self.address6 = f"fd77::{10 + number}"
        self.disk = network.folder / "disks" / self.name
        """What this node finds at `network.local`; it outlives a power loss."""
        self._etc = network.folder / "etc" / self.name
        self.port = f"{network.bridge}n{number}"
        """The other end of its link, in the cage."""
        self.hardware = f"02:4d:52:00:00:{10 + number:02x}"
        self._blocked: set[int] = set()
        self._stopped: list[psutil.Process] = []
        self._num_programs = 0
        self.pid: int | None = None
        """Of its first process, as this process sees it; None: it is off."""
        for folder in (self.disk, self._etc):
            folder.mkdir(parents=True)
        self.write_hosts(f"{node_address} n{each}" for each, node_address in enumerate(network.addresses))

    def write_hosts(self, lines: Iterator[str] | Sequence[str]) -> None:
        """Write its /etc/hosts, beside the line of localhost."""
        (self._etc / "hosts").write_text("\n".join(("127.0.0.1 localhost", "::1 localhost ip6-localhost", *lines, "")))
        (self._etc / "hostname").write_text(f"{self.name}\n")

    def power_on(self) -> None:
        """Switch it on, with nothing left of what ran before, but its disk."""
        assert self.pid is None, f"{self.name} is on"
        network, cage = self.network, self.network.cage
        own = {str(network.shared): str(network.shared), str(network.local): str(self.disk)}
        own |= {f"/etc/{each.name}": str(each) for each in self._etc.iterdir() if Path("/etc", each.name).exists()}
        seen = [str(ROOT), sys.prefix, sys.base_prefix, str(cage.folder)]
        self.pid, self._control = cage.make_node(
            {"name": self.name, "seen": seen, "own": own, "shm_bytes": SHM_BYTES, "clock_offset_s": self.clock_offset_s}
        )
        configure(
            cage.pid, f"link add {self.port} type veth peer name eth0 address {self.hardware} netns {self.pid}",
            f"link set {self.port} master {network.bridge} up",
        )  # fmt: skip
        configure(
            self.pid, "link set lo up", f"addr add {self.address}/24 dev eth0", f"addr add {self.address6}/64 dev eth0 nodad",
            "link set eth0 up", *self._ways({each.number for each in network.nodes}),
        )  # fmt: skip
        network.forecast()

    def power_off(self) -> None:
        """Take its power: its link goes down first, then all its processes end at once. Nobody is told."""
        assert self.pid is not None, f"{self.name} is off"
        configure(self.network.cage.pid, f"link set {self.port} down")
        descriptor = os.pidfd_open(self.pid)
        try:
            os.kill(self.pid, signal.SIGKILL)
            assert is_readable(descriptor, DEADLINE_S), f"{self.name} does not end: {self.processes()}"
        finally:
            os.close(descriptor)
        with contextlib.suppress(NoSuchDevice):  # its kernel took it along, or would still send what nobody has acknowledged
            configure(self.network.cage.pid, f"link del {self.port}")
        self._control.close()
        self._stopped.clear()
        self.pid = None

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        cwd: Path = ROOT,
        output: Path | None = None,
    ) -> Program:
        """Start a program at the head of a session; `python -m` as a fork. `environment`: variables that are set for it.

        `output`: where it prints to; a file of its own by default.
        """
        assert self.pid is not None, f"{self.name} is off"
        whole = {**self.network.cage.environment, "CLOCK_OFFSET_MS": f"{self.clock_offset_s * 1000:.0f}", **(environment or {})}
        output = output or self.network.folder / f"{self.name}-{self._num_programs}.out"
        self._num_programs += 1
        return Program(self._control, command, whole, cwd, output)

    def run(self, *command: str, deadline_s: float = DEADLINE_S) -> tuple[int, str]:
        """Run a program to its end; return its exit code, and what it printed."""
        program = self.start(command)
        return program.wait(deadline_s), program.text()

    def freeze(self) -> None:
        """Stop all its processes, until `thaw`. Its kernel goes on: it acknowledges what arrives."""
        while running := [each for each in self.processes() if _state(each) not in ("T", "t", "Z", "X", "")]:
            for process in running:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            self._stopped += [each for each in running if each not in self._stopped]

    def thaw(self) -> None:
        """Let those go on that `freeze` stopped."""
        for process in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self._stopped.clear()

    def cut(self, *others: Node, one_way: str | None = None) -> None:
        """Have all vanish that is sent between this node and `others` (default: all others).

        `one_way`: "out", only what this node sends; "in": only what it is sent.
        """
        self._set_ways(others, one_way, blocked=True)

    def heal(self, *others: Node) -> None:
        """Undo cuts between this node and `others` (default: all others)."""
        self._set_ways(others, None, blocked=False)

    def _set_ways(self, others: Sequence[Node], one_way: str | None, *, blocked: bool) -> None:
        assert one_way in (None, "out", "in"), one_way
        others = others or [each for each in self.network.nodes if each is not self]
        if one_way != "in":
            self._block({each.number for each in others}, blocked=blocked)
        if one_way != "out":
            for each in others:
                each._block({self.number}, blocked=blocked)

    def _block(self, numbers: set[int], *, blocked: bool) -> None:
        self._blocked = self._blocked | numbers if blocked else self._blocked - numbers
        if self.pid is not None:
            configure(self.pid, *self._ways(numbers))

    def _ways(self, numbers: set[int]) -> list[str]:
        """Return commands of `ip` that say at which hardware address these nodes are: at none, if what is sent shall vanish."""
        others = [each for each in self.network.nodes if each.number in numbers and each is not self]
        where = {each.number: _NOWHERE if each.number in self._blocked else each.hardware for each in others}
        return [
            f"neigh replace {address} lladdr {where[each.number]} dev eth0 nud permanent"
            for each in others
            for address in (each.address, each.address6)
        ]

    def reset(self, port: int | None = None) -> None:
        """Break its connections off (RST to both ends); `port`: those of this own port only."""
        assert self.pid is not None, f"{self.name} is off"
        which = ["sport", "=", f":{port}"] if port is not None else []
        _command("nsenter", f"--net=/proc/{self.pid}/ns/net", "ss", "--kill", "--tcp", "state", "connected", *which)

    def processes(self) -> list[psutil.Process]:
        """Return all processes in it, but its first."""
        if self.pid is None:
            return []
        inside = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if pid != self.pid and os.readlink(f"/proc/{pid}/ns/pid") == inside:
                    found.append(psutil.Process(pid))
        return found

    def listening(self) -> list[int]:
        """Return the TCP ports on which somebody listens."""
        tables = (Path(f"/proc/{self.pid}/net/{kind}").read_text().splitlines() for kind in ("tcp", "tcp6"))
        lines = [line.split() for table in tables for line in table]
        return sorted({int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == _LISTENING})

    def leftovers(self) -> list[str]:
        """Return what is in it beside its first process: processes, listening ports, files in /dev/shm and /tmp."""
        if self.pid is None:
            return []
        left = [f"process {each.pid}: {_command_line(each)}" for each in self.processes()]
        left += [f"port {port}" for port in self.listening()]
        root = Path(f"/proc/{self.pid}/root")
        seen = (ROOT, self.network.folder, self.network.cage.folder)
        kept = {path.relative_to("/") for each in seen for path in (each, *each.parents)}
        for folder in ("dev/shm", "tmp"):
            left += [f"/{folder}/{each.name}" for each in (root / folder).iterdir() if Path(folder, each.name) not in kept]
        return left

    def find_process(self, *words: str) -> list[psutil.Process]:
        """Return its processes whose command line or name has all these words."""
        return [each for each in self.processes() if all(word in _command_line(each) for word in words)]


class Network:
    """Nodes that see each other, all of them on."""

    def __init__(self, cage: Cage, folder: Path, num_nodes: int = NUM_NODES, *, clock_offsets_s: Sequence[float] = ()) -> None:
        """`folder`: a new one for all files of it. `clock_offsets_s`: how far the wall clock of each node is off."""
        if any(clock_offsets_s) and not cage.has_clocks:
            pytest.skip("no C compiler: a node cannot have a clock of its own (tests/nodes/clock.c)")
        self.cage, self.folder = cage, folder
        self.shared = folder / "shared"
        """A folder that all nodes share, at this path."""
        self.local = folder / "local"
        """A folder that each node has of its own, at this path."""
        for each in (self.shared, self.local):
            each.mkdir(parents=True)
        self.weather_log = folder / "weather.out"
        """What the proxy prints that makes the weather."""
        self._weather: tuple[Weather | None, int] = (None, 0)
        self._proxy: Program | None = None
        self.bridge = cage.new_bridge()
        self.addresses = [f"10.77.0.{10 + number}" for number in range(num_nodes)]
        offsets = [*clock_offsets_s, *[0.0] * num_nodes]
        self.nodes: list[Node] = []
        self.nodes += [Node(self, number, offsets[number]) for number in range(num_nodes)]
        try:
            for node in self.nodes:
                node.power_on()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, number: int) -> Node:
        return self.nodes[number]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def set_weather(self, weather: Weather | None, seed: int = 0) -> None:
        """Have frames between nodes come late, or not at all; None: the weather is good again."""
        self._weather = weather, seed
        self.forecast()

    def forecast(self) -> None:
        """See to it that the weather is what it should be, and concerns all nodes that are on."""
        weather, seed = self._weather
        if self._proxy is not None:
            self._proxy.kill()
            self._proxy.wait()
            self._proxy = None
        on = {node.port: node.hardware for node in self.nodes if node.pid is not None}
        if weather is None:
            configure(self.cage.pid, *(f"link set {port} master {self.bridge}" for port in on))
            return
        configure(self.cage.pid, *(f"link set {port} nomaster" for port in on))
        settings = Settings(ports=on, weather=weather, seed=seed)
        command = [sys.executable, "-m", "tests.nodes.proxy", msgspec.json.encode(settings).decode()]
        self._proxy = self.cage.start(command, self.weather_log)
        until_files(lambda: "ready" in self.weather_log.read_text(), "the proxy", self.folder, deadline_s=DEADLINE_S)

    def assert_nothing_left(self, deadline_s: float = 5.0) -> None:
        """Fail unless nothing is left in any node within the deadline."""
        end = time.monotonic() + deadline_s
        while left := {node.name: found for node in self.nodes if (found := node.leftovers())}:
            assert time.monotonic() < end, f"left behind: {left}"
            time.sleep(0.05)

    def close(self) -> None:
        """Switch all nodes off, and remove the bridge."""
        for node in self.nodes:
            if node.pid is not None:
                node.power_off()
        self.set_weather(None)
        configure(self.cage.pid, f"link del {self.bridge}")


def why_not() -> str:
    """Return why no network can be made here; empty: it can."""
    if os.geteuid() != 0:
        return "a network of nodes needs root (namespaces, mounts)"
    missing = [name for name in ("ip", "nsenter", "ss") if shutil.which(name) is None]
    return f"a network of nodes needs {', '.join(missing)} (Debian: iproute2, util-linux)" if missing else ""


@contextlib.contextmanager
def cage(*, preload: bool = True) -> Iterator[Cage]:
    """A cage that is gone at the end. Skips the test where none can be had."""
    if reason := why_not():
        pytest.skip(reason)
    try:
        made = Cage(preload=preload)
    except PermissionError as error:
        pytest.skip(f"no network of nodes: {error}")
    try:
        yield made
    finally:
        made.close()


def configure(pid: int, *commands: str) -> None:
    """Run commands of `ip` in the network of a process."""
    _command("nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-", text="\n".join(commands))


def _command(*words: str, text: str = "") -> str:
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        missing = "Cannot find device" in done.stderr or "No such device" in done.stderr
        raise (NoSuchDevice if missing else OSError)(f"{' '.join(words)}: {done.stderr.strip()}\n{text}")
    return done.stdout


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return one end that learns the pid of who sends to it, and the other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
    return ours, theirs


def _receive(link: socket.socket, deadline_s: float = DEADLINE_S) -> tuple[int, str]:
    """Return the pid of a sender as this process sees it, and what it said."""
    if not is_readable(link.fileno(), deadline_s):
        raise TimeoutError(f"the test network says nothing for {deadline_s:g} s")
    text, ancillary, _, _ = link.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(struct.calcsize("3i")))
    pids = [array.array("i", data)[0] for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS]
    return pids[0] if pids else 0, text.decode()


def build_clock(library: Path) -> bool:
    """Build the clock that is off (`clock.c`); return False if this machine has no compiler."""
    if shutil.which("gcc") is None:
        return False
    _command("gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(_CLOCK), "-ldl")
    return True


def _state(process: psutil.Process) -> str:
    """Return its letter in /proc; empty: it is gone. A process counts as stopped if all its threads are."""
    with contextlib.suppress(OSError):
        states = {
            Path(task, "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{process.pid}/task").iterdir()
        }
        return next(iter(states - {"T"}), "T")
    return ""


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join([process.name(), *process.cmdline()])
    except psutil.NoSuchProcess:
        return "(gone)"
