"""The checks between nodes: rules over reports, real sockets, and real networks with what is wrong with them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_recover.authentication import admission
from megatron_recover.cluster.doctor import conversation, probing, sharing
from megatron_recover.cluster.doctor import service as service_module
from megatron_recover.cluster.doctor.between import Report, judged, lines
from megatron_recover.cluster.doctor.findings import Check, Folder, Need, warn
from megatron_recover.cluster.doctor.probing import (
    ALL_PAIRS,
    CROWDED_PORTS,
    MAX_PORTS,
    Answer,
    Peer,
    peers_of,
    probe,
    sample,
    tried,
)
from megatron_recover.cluster.doctor.service import Service
from megatron_recover.cluster.doctor.session import Opened, Session
from tests.cluster.doctor_node import KEY
from tests.nodes.nodes import build_clock

HERE = "127.0.0.1"
_PATIENCE_S = 30.0


# --- Whom to try ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_nodes", [1, 2, 3, ALL_PAIRS, ALL_PAIRS + 1, 64, 100, 1024])
def test_few_nodes_try_all_pairs_and_many_a_bounded_number_that_leaves_nobody_out(num_nodes: int) -> None:
    tries = {node: peers_of(node, num_nodes) for node in range(num_nodes)}
    crowded = {node: [peer for peer, is_crowded in peers.items() if is_crowded] for node, peers in tries.items()}
    assert all(peers in ([], [0]) and (num_nodes > ALL_PAIRS or not peers) for peers in crowded.values())
    by = {node: [other for other, peers in tries.items() if node in peers] for node in range(num_nodes)}
    assert all(node not in peers for node, peers in tries.items())
    if num_nodes <= ALL_PAIRS:
        assert all(len(peers) == num_nodes - 1 for peers in tries.values())
        return
    assert all(0 in peers for node, peers in tries.items() if node)
    assert max(map(len, tries.values())) <= (num_nodes - 1).bit_length() + 1
    assert all(
        (num_nodes - 1).bit_length() - 1 <= len(by[node]) <= (num_nodes - 1).bit_length() for node in range(1, num_nodes)
    )
    assert sum(map(len, tries.values())) <= 11 * num_nodes
    assert sum(not peers for peers in crowded.values()) <= (num_nodes - 1).bit_length() + 1, "node 0 is full of packets"
    reached, edge = {num_nodes // 2}, {num_nodes // 2}
    for _ in range((num_nodes - 1).bit_length()):  # the farthest of them is as many connections away
        edge = {peer for node in edge for peer in tries[node]}
        reached |= edge
    assert len(reached) == num_nodes


def test_a_range_of_ports_is_tried_from_end_to_end() -> None:
    assert sample(40000, 40000) == [40000] and sample(1, MAX_PORTS) == [*range(1, MAX_PORTS + 1)]
    many = sample(40000, 50000)
    assert (many[0], many[-1], len({*many})) == (40000, 50000, MAX_PORTS)


# --- What follows from reports --------------------------------------------------------------------


def _reports(*answers: Answer, sights: dict[str, sharing.Sight] | None = None) -> list[Report]:
    """Those of three nodes: node 1 has the answers and sights, the others none."""
    return [Report(node=0, name="a"), Report(node=1, name="b", answers=answers, sights=sights or {}), Report(node=2, name="c")]


def _judged(reports: list[Report]) -> list[str]:
    return lines(judged(reports), ["a", "b", "c"])


def test_nodes_that_reach_each_other_are_ok() -> None:
    fine = {"has_echo": True, "packet_bytes": 1500, "passed_bytes": 1500, "within_s": 0.1}
    reports = _reports(Answer(node=0, ahead_s=0.2, **fine), sights={"--save": "seen"})
    reports[0] = msgspec.structs.replace(reports[0], answers=(Answer(node=1, **fine), Answer(node=2, **fine)))
    assert _judged(reports) == [
        "ok    a  ports: each node is reached from 1 others",
        "ok    a  packets: packets of 1500 bytes, and messages of 256 KiB",
        "ok    a  clock: at most 0.200 s between it and others", "ok    a  --save: shared by 2 nodes",
    ]  # fmt: skip


@pytest.mark.parametrize(("ahead_s", "within_s", "level"), [
    (0.9, 0.0, "ok"), (1.2, 0.3, "ok"), (1.2, 0.1, "warn"), (-59.0, 0.0, "warn"), (60.5, 1.0, "warn"), (61.5, 1.0, "fail"),
    (-3600.0, 0.0, "fail"),
])  # fmt: skip
def test_clocks_are_judged_by_what_they_differ_for_sure(ahead_s: float, within_s: float, level: str) -> None:
    reports = _reports(Answer(node=0, ahead_s=ahead_s, within_s=within_s))
    found = [each for _, each in judged(reports) if each.check is Check.CLOCK]
    assert [each.level for each in found] == [level]
    if level != "ok":  # the other clock is node 0's, and the line is about this node
        assert found[0].value.startswith(f"{abs(ahead_s):.1f} s {'behind' if ahead_s > 0 else 'ahead of'} a")
    not_with_the_first = judged(_reports(Answer(node=2, ahead_s=ahead_s)))
    assert [each for _, each in not_with_the_first if each.check is Check.CLOCK] == []


@pytest.mark.parametrize(("answer", "level", "text"), [
    (Answer(node=0, has_echo=False, packet_bytes=1500, passed_bytes=1400), "fail",
     "packets of 1500 bytes to a are lost, and 1400 arrive: a message of 256 KiB does not come back by TCP"),
    (Answer(node=0, has_echo=False), "fail", "nothing large arrives at a: a message of 256 KiB does not come back by TCP"),
    (Answer(node=0, has_echo=True, packet_bytes=9000, passed_bytes=1500), "warn",
     "packets of 9000 bytes to a are lost, and 1500 arrive: TCP has to find that out"),
    (Answer(node=0, has_echo=True), "ok", "packets of unknown size (UDP is closed), and messages of 256 KiB"),
    (Answer(node=0), None, ""),
])  # fmt: skip
def test_lost_packets_are_told_with_what_passes(answer: Answer, level: str | None, text: str) -> None:
    found = [each for _, each in judged(_reports(answer)) if each.check is Check.PACKETS]
    assert [(each.level, each.value.startswith(text)) for each in found] == ([] if level is None else [(level, True)])


def test_a_port_is_named_where_it_is_closed_with_those_who_do_not_reach_it() -> None:
    lost = ((40001, "no answer"), (40002, "no answer"), (40003, "Connection refused"))
    reports = _reports(Answer(node=2, unreached=lost[:2]))
    reports[0] = msgspec.structs.replace(reports[0], answers=(Answer(node=2, unreached=lost),), taken=(40007,))
    found = [line for line in _judged(reports) if "ports:" in line]
    remedy = "open it in the firewall, or give --interface or --port-range"
    assert found == [
        f"fail  c  ports: 2 ports, such as 40001, are not reached from any of 2 nodes (no answer); {remedy}",
        f"fail  c  ports: port 40003 is not reached from a (Connection refused); {remedy}",
        "warn  a  ports: 1 ports of --port-range are in use, such as 40007; give another --port-range, or end the program: "
        "ss -tlnp",
    ]  # fmt: skip
    levels, alone = ({finding.level for _, finding in judged(each)} for each in (reports, _reports()))
    assert "fail" in levels and "fail" not in alone


@pytest.mark.parametrize(("check", "level"), [
    (Check.SAVE, "fail"), (Check.LOAD, "fail"), (Check.RUN_DIR, "ok"), (Check.CACHE, "ok"), (Check.TENSORBOARD, "warn"),
])  # fmt: skip
def test_a_local_folder_is_refused_only_where_it_has_to_be_shared(check: Check, level: str) -> None:
    found = [(node, each.level) for node, each in judged(_reports(sights={check.value: "absent"})) if each.check is check]
    assert found == [(1, level)]
    later = [msgspec.structs.replace(each, has_later_ranks=True) for each in _reports(sights={check.value: "absent"})]
    expected = "warn" if check is Check.CACHE else level  # the cache is built by rank 0 of a replica, on another node
    assert [each.level for _, each in judged(later) if each.check is check] == [expected]
    unknown = [each.level for _, each in judged(_reports(sights={check.value: "unknown"})) if each.check is check]
    assert unknown == (["warn"] if level == "fail" else [])


def test_equal_lines_of_many_nodes_are_one() -> None:
    found = [(node, warn(Check.CORES, "few", "more")) for node in range(1000)]
    assert lines(found, [f"n{node}" for node in range(1000)]) == ["warn  n0,n1,n2 and 997 more  cores: few; more"]


# --- Real sockets ---------------------------------------------------------------------------------


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service(HERE, KEY, 1, (0, 0), now_ns=lambda: time.time_ns() + 7_000_000_000)
    yield made
    made.close()


def test_a_node_that_answers_is_reached_at_all_ports_and_its_clock_is_read(service: Service) -> None:
    [answer] = probe(0, [Peer(1, HERE, service.ports)], KEY)
    assert answer.unreached == () and answer.has_echo and answer.passed_bytes == answer.packet_bytes == 9000
    assert answer.ahead_s is not None and abs(answer.ahead_s - 7) <= answer.within_s + 0.01 and answer.within_s < 1


def test_a_closed_port_a_silent_program_and_another_job_are_told_apart(service: Service) -> None:
    with socket.create_server((HERE, 0)) as silent, socket.socket() as closed:
        closed.bind((HERE, 0))
        ports = (service.ports[0], closed.getsockname()[1], silent.getsockname()[1])
        begin = time.monotonic()
        [answer] = probe(0, [Peer(1, HERE, ports)], KEY)
        assert dict(answer.unreached) == {ports[1]: "Connection refused", ports[2]: "answers, but not the job's program"}
        assert answer.has_echo and time.monotonic() - begin < 10
    [of_another_job] = probe(0, [Peer(1, HERE, service.ports[:1])], bytes(32))
    [of_another_node] = probe(0, [Peer(3, HERE, service.ports[:1])], KEY)
    assert [len(each.unreached) for each in (of_another_job, of_another_node)] == [1, 1]
    assert of_another_job.ahead_s is None and of_another_job.has_echo is None
    assert "job's key" in of_another_job.unreached[0][1]


def test_nodes_that_crowd_each_other_out_try_again(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_UNPROVEN", 1)
    with ThreadPoolExecutor(24) as pool:
        peer = Peer(1, HERE, service.ports[:1], is_crowded=True)
        answers = [*pool.map(lambda node: probe(node, [peer], KEY)[0], range(2, 26))]
    assert [each.unreached for each in answers] == [()] * 24
    assert all(each.ahead_s is not None and each.has_echo is None and not each.packet_bytes for each in answers)


def test_many_nodes_with_a_range_of_ports_do_not_keep_each_other_from_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would keep the connections that it has, and wait for the rest: node 0 has room for a limited number."""
    service = Service(HERE, KEY, 0, [0] * MAX_PORTS)
    peer = Peer(0, HERE, service.ports, is_crowded=True)
    monkeypatch.setattr(service_module, "_MAX_CONVERSATIONS", 40)
    with ThreadPoolExecutor(64) as pool:
        answers = [*pool.map(lambda node: probe(node, [peer], KEY)[0], range(1, 65))]
        answers += pool.map(lambda node: probe(node, [msgspec.structs.replace(peer, is_crowded=False)], KEY)[0], range(1, 3))
    service.close()
    assert [each.unreached for each in answers] == [()] * 66
    shares = [tried(node, peer) for node in range(1, 65)]
    assert {port for share in shares for port in share} == {*service.ports} and {*map(len, shares)} == {CROWDED_PORTS}
    assert [*tried(1, msgspec.structs.replace(peer, ports=(1, 2)))] == [1, 2]


def test_a_lack_of_descriptors_on_this_node_is_no_port_that_is_closed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 nodes with 64 ports each are more than 1024 connections at a time."""
    dial, num_failures = probing._Probe._dial, 3

    def short(probe: probing._Probe, port: int) -> Any:
        nonlocal num_failures
        num_failures -= 1
        if num_failures >= 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return dial(probe, port)

    monkeypatch.setattr(probing._Probe, "_dial", short)
    [answer] = probe(0, [Peer(1, HERE, service.ports)], KEY)
    assert answer.unreached == () and answer.has_echo


def test_ports_of_other_programs_are_left_out_and_named() -> None:
    with socket.create_server((HERE, 0)) as other:
        taken = other.getsockname()[1]
        service = Service(HERE, KEY, 0, (taken, 0))
        assert (service.taken, len(service.ports)) == ((taken,), 1)
        service.close()
        with pytest.raises(OSError, match=f"other programs use all of the ports {taken} to {taken}"):
            Service(HERE, KEY, 0, (taken,))
    with pytest.raises(OSError, match="assign requested address"):
        Service("192.0.2.1", KEY, 0)


def test_datagrams_of_strangers_are_not_answered_and_bad_requests_end_the_connection(service: Service) -> None:
    port = service._datagrams.getsockname()[1]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.3)
        for packet in (b"", bytes(16), bytes(1000)):
            stranger.sendto(packet, (HERE, port))
        with pytest.raises(TimeoutError):
            stranger.recv(2000)
    ended = conversation.REQUEST.pack(conversation.Kind.ECHO, conversation.MAX_ECHO_BYTES + 1), conversation.REQUEST.pack(77, 0)
    for request in ended:
        connection, _ = probing._Probe(0, Peer(1, HERE, service.ports[:1]), KEY, time.time_ns)._connect()
        assert connection is not None
        connection.sock.settimeout(_PATIENCE_S)
        connection.sock.sendall(request)
        assert connection.sock.recv(1) == b""
        connection.sock.close()
    assert probe(0, [Peer(1, HERE, service.ports)], KEY)[0].has_echo, "the service still answers"


@pytest.mark.parametrize(("family", "level", "option"), [
    (socket.AF_INET, socket.IPPROTO_IP, 10), (socket.AF_INET6, socket.IPPROTO_IPV6, 23),
])  # fmt: skip
def test_no_router_may_cut_a_packet(family: int, level: int, option: int) -> None:
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        assert sock.getsockopt(level, option) != 3
        conversation.forbid_fragments(sock)
        assert sock.getsockopt(level, option) == 3, "not IP_PMTUDISC_PROBE"


def test_a_flood_of_datagrams_holds_neither_the_service_nor_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def endless(_: int) -> tuple[bytes, tuple[str, int]]:
        read.append(1)
        assert len(read) < 1000
        return b"x" * 64, (HERE, 9)

    flooded: Any = SimpleNamespace(_conversations={}, _datagrams=SimpleNamespace(recvfrom=endless))
    Service._echo_datagrams(flooded)
    assert len(read) == 64
    goes_on = threading.Event()
    monkeypatch.setattr(Service, "_turn", lambda self: goes_on.wait(20.0) and False)
    monkeypatch.setattr(service_module, "_END_S", 0.1)
    held = Service(HERE, KEY, 1)
    begun_at = time.monotonic()
    held.close()
    assert time.monotonic() - begun_at < 5.0
    goes_on.set()
    held._thread.join(5.0)


def test_ipv6_is_tried_as_ipv4_is() -> None:
    try:
        service = Service("::1", KEY, 1)
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    [answer] = probe(0, [Peer(1, "::1", service.ports)], KEY)
    service.close()
    assert answer.unreached == () and answer.has_echo and answer.passed_bytes == 9000


def test_marks_are_seen_where_the_folder_is_shared_and_removed_after(tmp_path: Path) -> None:
    folders = [Folder(Check.SAVE, str(tmp_path / "a" / "b")), Folder(Check.CACHE, str(tmp_path)), Folder(Check.LOAD, "/proc/x")]
    marks = sharing.leave(folders)
    assert [Path(each.file).parent if each.file else None for each in marks] == [tmp_path, tmp_path, None]
    assert sharing.look(marks) == {"--save": "seen", "--data-cache-path": "seen", "--load": "unknown"}
    sharing.remove(marks)
    assert sharing.look(marks) == {"--save": "absent", "--data-cache-path": "absent", "--load": "unknown"}
    assert [*tmp_path.iterdir()] == []


# --- Real networks --------------------------------------------------------------------------------


class Network:
    """Nodes in network and mount namespaces of their own, joined by a bridge, as two racks by a switch."""

    def __init__(self, num_nodes: int) -> None:
        self._prefix = f"dr{os.getpid()}"
        self.num_nodes = num_nodes
        self.processes: list[subprocess.Popen[str]] = []

    def build(self) -> None:
        for each in ("switch", *range(self.num_nodes)):
            _ip("netns", "add", f"{self._prefix}{each}")
        self.ip("switch", "link", "add", "name", "bridge", "type", "bridge")
        self.ip("switch", "link", "set", "bridge", "up")
        for node in range(self.num_nodes):
            peer = f"{self._prefix}switch"
            self.ip(node, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{node}", "netns", peer)
            self.ip("switch", "link", "set", f"p{node}", "master", "bridge", "up")
            self.ip(node, "addr", "add", f"10.99.0.{node + 1}/24", "dev", "eth0")
            self.ip(node, "link", "set", "lo", "up")
            # Without segmentation offload a virtual interface drops what its other end cannot take, as a real one does.
            self.ip(node, "link", "set", "eth0", "up", "gso_max_segs", "1")

    def ip(self, node: int | str, *words: str) -> None:
        _ip("-n", f"{self._prefix}{node}", *words)

    def start(self, node: int, ports: str, ahead_s: float, need: Need, setup: str = "true") -> Opened:
        words = [sys.executable, "-m", "tests.cluster.doctor_node", str(node), f"10.99.0.{node + 1}", ports, str(ahead_s)]
        command = ["ip", "netns", "exec", f"{self._prefix}{node}", "sh", "-ec", f'{setup}; exec "$@"', "sh", *words]
        process = subprocess.Popen(
            [*command, msgspec.json.encode(need).decode()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.processes.append(process)
        assert process.stdout is not None
        return msgspec.json.decode(process.stdout.readline(), type=Opened)

    def run(self, node: int, words: list[str], environment: dict[str, str], setup: str = "true") -> subprocess.Popen[str]:
        """Start a command on a node, with a host name of its own."""
        shell = f'hostname n{node}; ip netns exec {self._prefix}{node} sh -ec \'{setup}; exec "$@"\' sh "$@"'
        return subprocess.Popen(
            ["unshare", "--uts", "sh", "-ec", shell, "sh", *words], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def reports(self, opened: list[Opened]) -> list[Report]:
        """Have all nodes try each other at the same time."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(opened).decode() + "\n")
            process.stdin.flush()
        return [msgspec.json.decode(each.stdout.readline(), type=Report) for each in self.processes if each.stdout is not None]

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.communicate(timeout=_PATIENCE_S)
        for each in ("switch", *range(self.num_nodes)):
            with contextlib.suppress(OSError):
                _ip("netns", "del", f"{self._prefix}{each}")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=_PATIENCE_S)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network(3)
    try:
        made.build()
        yield made
    except OSError as error:
        pytest.skip(f"this machine lets nobody make a network: {error}")
    finally:
        made.close()


def test_each_fault_of_a_network_is_found_and_named(network: Network, tmp_path: Path) -> None:
    """Three nodes: node 1 has a port that a firewall drops and a local --save; the clock of node 2 is 75 s ahead."""
    for name in ("save", "cache"):
        (tmp_path / name).mkdir()
    folders = (Folder(Check.SAVE, str(tmp_path / "save")), Folder(Check.CACHE, str(tmp_path / "cache")))
    need = Need(num_nodes=3, folders=folders)
    network.ip(1, "rule", "add", "ipproto", "tcp", "sport", "40001", "blackhole")
    opened = [
        network.start(0, "0", 0.0, need),
        network.start(1, "40000,40001", 0.0, need, setup=f"mount -t tmpfs none {tmp_path}/save"),
        network.start(2, "0", 75.0, need),
    ]
    begin = time.monotonic()
    found = _told(network.reports(opened))
    assert time.monotonic() - begin < 20
    assert found == {
        "ports": [(1, "fail", "port 40001 is not reached from any of 2 nodes (no answer)")],
        "packets": [(0, "ok", "packets of 1500 bytes, and messages of 256 KiB")],
        "clock": [(0, "ok", "at most 0.0"), (2, "fail", "75.0 s ahead of n0: traces could not be put in order")],
        "--save": [(1, "fail", "not the folder that n0 has under this path"), ],
        "--data-cache-path": [(0, "ok", "shared by 3 nodes")],
    }  # fmt: skip

    network.ip(1, "rule", "del", "ipproto", "tcp", "sport", "40001", "blackhole")
    network.ip(1, "link", "set", "eth0", "mtu", "1400")  # TCP agrees on less, larger packets are lost
    found = _told(network.reports(opened))
    assert found["ports"] == [(0, "ok", "each node is reached from 2 others")]
    assert found["packets"] == [
        (0, "ok", "packets of 1400 bytes or 1500 bytes"),
        (0, "warn", "packets of 1500 bytes to n1 are lost, and 1400 arrive: TCP has to find"),
        (2, "warn", "packets of 1500 bytes to n1 are lost, and 1400 arrive: TCP has to find"),
    ]  # fmt: skip

    network.ip(1, "link", "set", "eth0", "mtu", "1500")
    network.ip("switch", "link", "set", "p1", "mtu", "1400")  # and now nobody tells TCP
    found = _told(network.reports(opened))
    what = "are lost, and 1400 arrive: a message of 256 KiB does not come back by TCP"
    assert [(node, level, text) for node, level, text in found["packets"] if level != "ok"] == [
        (0, "fail", f"packets of 1500 bytes to n1 {what}"), (1, "fail", f"packets of 1500 bytes to n0 {what}"),
        (1, "fail", f"packets of 1500 bytes to n2 {what}"), (2, "fail", f"packets of 1500 bytes to n1 {what}"),
    ]  # fmt: skip
    network.close()
    assert [*tmp_path.glob("*/.*")] == [], "marks are left"


_TEXTS = (
    "at most 0.0", "not the folder that n0 has under this path", "packets of 1400 bytes or 1500 bytes",
    "packets of 1500 bytes to n1 are lost, and 1400 arrive: TCP has to find",
)  # fmt: skip


def _told(reports: list[Report]) -> dict[str, list[tuple[int, str, str]]]:
    """The findings between nodes by check: node, level and text, which is cut where one of `_TEXTS` ends."""
    found: dict[str, list[tuple[int, str, str]]] = {}
    own = {id(finding) for report in reports for finding in report.findings}
    for node, finding in judged(reports):
        if id(finding) not in own:
            text = next((each for each in _TEXTS if finding.value.startswith(each)), finding.value)
            found.setdefault(finding.check.value, []).append((node, finding.level, text))
    return {check: sorted(those) for check, those in found.items()}


def test_a_node_that_cannot_listen_is_reported_and_holds_nobody(tmp_path: Path) -> None:
    with socket.create_server((HERE, 0)) as other:
        taken = other.getsockname()[1]
        need = Need(num_nodes=2, address=HERE)
        sessions = [Session(0, "a", need, KEY), Session(1, "b", need, KEY, ports=[taken])]
        opened = [each.opened for each in sessions]
        reports = [each.report(dict(enumerate(opened)), len(opened)) for each in sessions]
        for each in sessions:
            each.close()
    found = [(node, each) for node, each in judged(reports) if each.check is Check.PORTS]
    assert [(node, each.level, each.value) for node, each in found] == [
        (1, "fail", f"nothing can listen at {HERE} (other programs use all of the ports {taken} to {taken})")
    ]  # fmt: skip


def test_run_is_refused_on_all_nodes_with_the_lines_of_all_before_any_of_them_imports(network: Network, tmp_path: Path) -> None:
    """Node 1 has a local --save, few open files, and a clock that is 75 s ahead."""
    clock = tmp_path / "clock.so"
    if not build_clock(clock):
        pytest.skip("no C compiler: a node cannot have a clock of its own (tests/nodes/clock.c)")
    (tmp_path / "save").mkdir()
    (tmp_path / "train.py").write_text(f"open('{tmp_path}/started', 'w')")
    flags = "--num-layers 2 --num-attention-heads 2 --hidden-size 8 --micro-batch-size 1 --global-batch-size 40 --train-iters 1"
    flags += f" --eval-interval 9 --mock-data --save {tmp_path}/save --save-interval 1"
    line = f"--nnodes 2 --nproc-per-node 20 --master-addr 10.99.0.1 --master-port 29400 --run-dir {tmp_path}/run --node-rank"
    words = [sys.executable, "-m", "megatron_recover", "run", *line.split()]
    environment = os.environ | {"MEGATRON_RECOVER_KEY": KEY.hex()}
    ahead = {"LD_PRELOAD": str(clock), "CLOCK_OFFSET_MS": "75000"}
    script = [str(tmp_path / "train.py"), *flags.split()]
    nodes = [
        network.run(0, [*words, "0", *script], environment),
        network.run(1, [*words, "1", *script], environment | ahead, f"mount -t tmpfs none {tmp_path}/save; ulimit -n 256"),
    ]
    said = [each.communicate(timeout=120)[0] for each in nodes]
    expected = [
        "fail  n1  open files: 256 (hard limit); 20 ranks need 320; ",
        "fail  n1  clock: 75.0 s ahead of n0: traces could not be put in order; ",
        "fail  n1  --save: not the folder that n0 has under this path",
    ]
    for process, text in zip(nodes, said, strict=True):
        lines = [each.removeprefix("megatron-recover run: ") for each in text.splitlines()]
        failed = [each for each in lines if each.startswith("fail")]
        assert process.returncode == 2 and len(failed) == len(expected), text
        assert all(one.startswith(two) for one, two in zip(failed, expected, strict=True)), text
    assert sorted(each.name for each in tmp_path.iterdir()) == ["clock.so", "save", "train.py"]
    assert not [*(tmp_path / "save").iterdir()]
