"""The address of a node that others reach: in a network of its own with two interfaces, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_recover.host import reachable
from megatron_recover.host.reachable import (
    NoAnswer,
    NotFound,
    Unknown,
    endpoint_addresses,
    in_time,
    interface_of,
    interfaces,
    is_loopback,
    node_address,
    own_address,
    resolve,
)

NODE = reachable.host_name()
NETWORK = """
set -e
ip link set lo up
ip link add fast0 type veth peer name slow0
ip addr add 10.9.0.5/24 dev fast0
ip addr add fd00:9::5/64 dev fast0 nodad
ip addr add 10.8.0.5/24 dev slow0
ip link add off0 type veth peer name off1
ip link add bare0 type veth peer name bare1
ip addr add 10.7.0.5/24 dev off0
ip link set fast0 up
ip link set slow0 up
ip link set bare0 up
ip link set bare1 up
for each in fast0 slow0 bare0; do until ip link show $each | grep -q 'state UP'; do sleep 0.02; done; done
exec "$@"
"""
"""Two interfaces with addresses, of which one has both families; one that is down; one without an address."""
ASKED = """
import json, sys
from megatron_recover.host.reachable import interface_of, interfaces, node_address
def ask(endpoint, interface, local_addr):
    try:
        address = node_address((endpoint,), 29400, flag="--rdzv-endpoint", interface=interface, local_addr=local_addr)
        return [address, interface_of(address, interfaces())]
    except ValueError as error:
        return str(error)
print(json.dumps([ask(*each) for each in json.loads(sys.argv[1])]))
"""


def test_the_address_is_that_of_the_route_or_of_the_interface_that_is_named() -> None:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("making a network namespace needs root, ip and unshare")
    expected: dict[tuple[str, str | None, str | None], object] = {
        ("10.9.0.7", None, None): ["10.9.0.5", "fast0"],
        ("10.8.0.7", None, None): ["10.8.0.5", "slow0"],
        ("fd00:9::7", None, None): ["fd00:9::5", "fast0"],
        ("10.9.0.5", None, None): ["10.9.0.5", "fast0"],  # on the node whose address the endpoint has
        ("127.0.0.1", None, None): ["127.0.0.1", "lo"],
        ("::1", None, None): ["::1", "lo"],
        ("10.9.0.7", "slow0", None): ["10.8.0.5", "slow0"],
        ("10.9.0.7", "fast0", None): ["10.9.0.5", "fast0"],
        ("fd00:9::7", "fast0", None): ["fd00:9::5", "fast0"],  # the family of the endpoint, where the interface has both
        ("fd00:9::7", "slow0", None): ["10.8.0.5", "slow0"],
        ("10.9.0.7", None, "10.8.0.5"): ["10.8.0.5", "slow0"],
        ("127.0.0.1", None, "127.0.0.3"): ["127.0.0.3", "lo"],
        ("10.6.0.7", None, None): f"--rdzv-endpoint: node {NODE} has no route to 10.6.0.7; see `ip route get 10.6.0.7`, or "
        "give --interface NAME",
        ("10.9.0.7", "ib0", None): f"--interface ib0 does not exist or is down on node {NODE}, which has fast0 (10.9.0.5, "
        "fd00:9::5), lo (127.0.0.1, ::1), slow0 (10.8.0.5); give one of these",
        ("10.9.0.7", "off0", None): f"--interface off0 does not exist or is down on node {NODE}, which has fast0 (10.9.0.5, "
        "fd00:9::5), lo (127.0.0.1, ::1), slow0 (10.8.0.5); give one of these",
        ("10.9.0.7", "bare0", None): f"--interface bare0 has no IPv4 or IPv6 address on node {NODE}, which has fast0 "
        "(10.9.0.5, fd00:9::5), lo (127.0.0.1, ::1), slow0 (10.8.0.5); give one of these",
        ("10.9.0.7", None, "10.9.0.6"): f"--local-addr: 10.9.0.6 is no address of node {NODE}, which has fast0 (10.9.0.5, "
        "fd00:9::5), lo (127.0.0.1, ::1), slow0 (10.8.0.5); give one of these, or leave the flag out",
    }  # fmt: skip
    command = ["unshare", "--net", "sh", "-c", NETWORK, "sh", sys.executable, "-c", ASKED, json.dumps([*expected])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(zip(expected, json.loads(done.stdout), strict=True))
    assert found == expected


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[str]]:
    """What names resolve to; other names do not resolve. /etc/hosts is a file of the test."""
    known: dict[str, list[str]] = {}
    (tmp_path / "hosts").write_text("# 127.0.1.1 n03\n127.0.0.1 localhost\n127.0.1.1\tn03.cluster  n03  # by the installer\n")

    def getaddrinfo(host: str, port: object, **_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if is_address(host):
            return [(0, 0, 0, "", (host, 0))]
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in known[host] for _ in range(2)]

    monkeypatch.setattr(reachable.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(reachable, "HOSTS", tmp_path / "hosts")
    monkeypatch.setattr(reachable, "host_name", lambda: "n03")
    return known


def is_address(host: str) -> bool:
    return any(each.isdigit() for each in host) and set(host) <= set("0123456789abcdef.:")


def test_a_name_resolves_to_its_addresses(names: dict[str, list[str]]) -> None:
    names |= {"head": ["10.0.0.3", "fd00::3"], "mixed": ["127.0.1.1", "10.0.0.3"]}
    assert resolve("head", "--master-addr") == ("10.0.0.3", "fd00::3")
    assert resolve("mixed", "--master-addr") == ("10.0.0.3",), "others reach only this one"
    assert resolve("127.0.0.1", "--master-addr") == ("127.0.0.1",), "whoever gives this knows"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("nowhere", "--rdzv-endpoint: nowhere does not resolve on node n03 (Name or service not known); give an address, or "
         "enter the name in {hosts} or at the name server of n03"),
        ("n03", "--rdzv-endpoint: n03 resolves to 127.0.1.1 on node n03, which no other node reaches; in {hosts} of n03, line "
         "3 (127.0.1.1 n03.cluster n03 # by the installer), give n03 the address that others reach"),
        ("n04", "--rdzv-endpoint: n04 resolves to 127.0.1.1 on node n03, which no other node reaches; have the name server of "
         "n03 return the address that others reach, or give that address"),
        ("localhost", "--rdzv-endpoint: localhost resolves to 127.0.0.1 and ::1 on node n03, which no other node reaches; give "
         "the name or address of the node whose endpoint that is (127.0.0.1 if all nodes are on this machine)"),
    ],
)  # fmt: skip
def test_a_name_that_leads_no_other_node_here_is_refused(names: dict[str, list[str]], host: str, expected: str) -> None:
    names |= {"n03": ["127.0.1.1"], "n04": ["127.0.1.1"], "localhost": ["127.0.0.1", "::1"]}
    with pytest.raises(ValueError) as refusal:
        resolve(host, "--rdzv-endpoint")
    assert str(refusal.value) == expected.format(hosts=reachable.HOSTS)


class Clock:
    """Time that passes where somebody sleeps; what happens then is a function of the seconds."""

    def __init__(self) -> None:
        self.now = 1e6
        self.happens = lambda seconds: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.happens(self.now - 1e6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(reachable, "time", made)
    return made


def test_a_name_server_that_comes_back_costs_no_start_and_one_line_says_what_is_awaited(
    names: dict[str, list[str]], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, said = reachable.socket.getaddrinfo, list[str]()

    def getaddrinfo(host: str, port: object, **named: object) -> object:
        if clock.now < 1e6 + 400:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return known(host, port, **named)

    monkeypatch.setattr(reachable.socket, "getaddrinfo", getaddrinfo)
    clock.happens = lambda seconds: names.update({"head": ["10.0.0.3"]}) if seconds >= 450 else None  # its entry is late, too
    assert in_time(lambda: resolve("head", "--master-addr"), 600.0, bool, said.append) == ("10.0.0.3",)
    assert said == [
        "--master-addr: head does not resolve on node n03 (Temporary failure in name resolution); this is asked again, for at "
        "most 600 s"
    ]
    assert 450 <= clock.now - 1e6 < 460


@pytest.mark.parametrize(
    ("code", "patience_s", "kind", "limit_s"),
    [
        (socket.EAI_AGAIN, 600.0, NoAnswer, 600),
        (socket.EAI_NONAME, 600.0, Unknown, 60),
        (socket.EAI_NODATA, 600.0, Unknown, 60),
        (socket.EAI_NONAME, 5.0, Unknown, 5),
    ],
)
def test_a_name_that_does_not_resolve_in_time_is_refused_in_the_name_of_the_node(
    code: int, patience_s: float, kind: type, limit_s: int, names: object, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(*_: object, **__: object) -> object:
        raise socket.gaierror(code, "it is so")

    monkeypatch.setattr(reachable.socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(kind, match=r"--master-addr: head does not resolve on node n03 \(it is so\); give an address"):
        in_time(lambda: resolve("head", "--master-addr"), patience_s, bool, lambda line: None)
    assert limit_s <= clock.now - 1e6 <= limit_s + 2
    with pytest.raises(kind if kind is NoAnswer else NotFound, match="--local-addr: head does not resolve") as refusal:
        own_address(interface=None, local_addr="head")
    assert not isinstance(refusal.value, Unknown), "nothing is to wait for the name of this node itself"


def test_what_no_wait_can_mend_is_refused_at_once_and_a_signal_ends_the_wait(names: dict[str, list[str]], clock: Clock) -> None:
    names["localhost"] = ["127.0.0.1"]
    with pytest.raises(NotFound, match="localhost resolves to 127.0.0.1"):
        in_time(lambda: resolve("localhost", "--master-addr"), 600.0, bool, lambda line: None)
    assert clock.now == 1e6
    ended = list[str]()
    clock.happens = lambda seconds: ended.append("SIGTERM")
    assert in_time(lambda: resolve("head", "--master-addr"), 600.0, lambda: ended, lambda line: None) is None


def test_the_first_node_takes_its_names_address_or_that_of_the_default_route(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Debian the name resolves to 127.0.1.1, and docker0 is the first interface. Nobody else reaches either."""
    known = {"docker0": ("172.17.0.1",), "eno1": ("10.0.0.3",), "ib0": ("10.1.0.3",), "lo": ("127.0.0.1",)}
    monkeypatch.setattr(reachable, "interfaces", lambda: known)
    monkeypatch.setattr(reachable, "_source", lambda target, port: "10.0.0.3")
    names["n03"] = ["127.0.1.1"]
    assert own_address(interface=None, local_addr=None) == "10.0.0.3"
    names["n03"] = ["10.1.0.3"]
    assert own_address(interface=None, local_addr=None) == "10.1.0.3"
    names["n03"] = ["172.17.0.1", "10.0.0.3"]  # of nss-myhostname, which knows all of them
    assert own_address(interface=None, local_addr=None) == "10.0.0.3"
    del names["n03"]
    monkeypatch.setattr(reachable, "_source", lambda target, port: "fd00::3" if ":" in target else None)
    known["eno1"] = ("fd00::3",)
    assert own_address(interface=None, local_addr=None) == "fd00::3", "a node without IPv4"
    monkeypatch.setattr(reachable, "_source", lambda target, port: None)  # no default route
    assert own_address(interface=None, local_addr=None) == "172.17.0.1"
    known.clear()
    assert own_address(interface=None, local_addr=None) == "127.0.0.1"


@pytest.mark.parametrize(
    ("targets", "routes", "expected"),
    [
        (("172.17.0.1", "10.0.0.3"), {}, "10.0.0.3"),  # the endpoint is this node's; others know it by the second address
        (("10.0.0.3", "172.17.0.1"), {}, "10.0.0.3"),
        (("10.1.0.3",), {}, "10.1.0.3"),
        (("172.17.0.1", "10.0.0.9"), {"10.0.0.9": "10.0.0.3"}, "10.0.0.3"),  # another node's, and the bridge is here, too
        (("fd00::9", "10.0.0.9"), {"fd00::9": "fd00::3", "10.0.0.9": "10.0.0.3"}, "fd00::3"),  # the system's order of families
        (("10.5.0.9", "10.1.0.9"), {"10.1.0.9": "10.1.0.3"}, "10.1.0.3"),
    ],
)
def test_of_several_routes_to_the_endpoint_the_default_one_is_taken(
    targets: tuple[str, ...], routes: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bridge of containers has the same address on many nodes."""
    own = ("172.17.0.1", "10.0.0.3", "10.1.0.3", "fd00::3")
    default = {"192.0.2.1": "10.0.0.3", "2001:db8::1": "fd00::3"}
    monkeypatch.setattr(reachable, "_source", lambda target, port: target if target in own else (routes | default).get(target))
    assert node_address(targets, 29400, flag="--master-addr", interface=None, local_addr=None) == expected


def unanswered(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def test_this_nodes_own_name_needs_no_entry_that_others_reach(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's installer gives it 127.0.1.1, and a container's name may be known nowhere."""
    known = {"eno1": ("10.0.0.3",), "ib0": ("10.1.0.3",), "lo": ("127.0.0.1",)}
    monkeypatch.setattr(reachable, "interfaces", lambda: known)
    monkeypatch.setattr(reachable, "_source", lambda target, port: "10.0.0.3")

    def found(host: str, interface: str | None = None, local_addr: str | None = None) -> tuple[str, ...]:
        return endpoint_addresses(host, "--master-addr", interface=interface, local_addr=local_addr)

    known["docker0"] = ("172.17.0.1",)
    assert found("n03") == ("10.0.0.3", "10.1.0.3", "172.17.0.1"), "others may know any of them"
    with monkeypatch.context() as patch:
        patch.setattr(reachable.socket, "getaddrinfo", unanswered)
        assert found("n03")[0] == "10.0.0.3"
        with pytest.raises(NoAnswer):
            found("n04")
    names |= {"n03": ["127.0.1.1"], "n03.cluster": ["127.0.1.1"], "n04": ["127.0.1.1"], "localhost": ["127.0.0.1"]}
    assert found("n03") == found("n03.cluster") == ("10.0.0.3", "10.1.0.3", "172.17.0.1")
    assert found("n03", interface="ib0") == found("n03", local_addr="10.1.0.3") == ("10.1.0.3",)
    names["n03.cluster"] = ["10.1.0.3"]
    assert found("n03.cluster") == ("10.1.0.3",)
    for other in ("n04", "n05", "localhost"):
        with pytest.raises(ValueError, match=other):
            found(other)
    known.clear()
    with pytest.raises(ValueError, match="n03 resolves to 127.0.1.1 on node n03, which no other node reaches"):
        found("n03")


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="--master-addr: .*does not resolve"):
        resolve("x" * 70, "--master-addr")


def test_loopback_is_an_interface_and_has_every_address_of_127() -> None:
    known = interfaces()
    assert "127.0.0.1" in known["lo"]
    assert interface_of("127.0.1.9", known) == interface_of("::1", known) == "lo" and interface_of("192.0.2.1", known) is None
    assert [is_loopback(each) for each in ("127.9.0.1", "::1", "10.0.0.1", "fd00::1", "localhost")] == [True, True] + 3 * [
        False
    ]


def test_a_node_of_several_on_one_machine_has_the_address_that_it_is_given() -> None:
    endpoint = ("127.0.0.1",)
    assert node_address(endpoint, 29400, flag="--rdzv-endpoint", interface=None, local_addr="127.0.0.2") == "127.0.0.2"
    assert node_address(endpoint, 29400, flag="--rdzv-endpoint", interface="lo", local_addr=None) == "127.0.0.1"
