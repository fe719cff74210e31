"""The address of this node that the other nodes of a job reach, and what names resolve to here.

Decides which of the node's addresses is published, by its interface or by the route to the
endpoint. Sends no packet of its own; only a look-up of a name may ask a name server. For a job on
one machine nothing here is called.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from megatron_recover.host.addresses import HOST, INTERFACE, family_of, host_name

HOSTS = Path("/etc/hosts")
_LINK_LOCAL = "fe80:"
"""Begin of IPv6 addresses that mean something on one link only. They cannot be published."""
_ANYWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""An address of each family that no host has (RFC 5737, RFC 3849). It shows which address of this
node the default route has."""


_ASK_S = 1.0
UNKNOWN_S = 60.0
"""Seconds for which a name that is unknown is asked for again. Its entry may come later than this
node: Kubernetes makes that of the first pod when the pod has an address."""


class NotFound(ValueError):
    """A host has no address here that another node reaches."""


class Unknown(NotFound):
    """A name has no entry at present."""


class NoAnswer(NotFound):
    """No name server has answered. The same name may resolve at the next start."""


def interfaces() -> dict[str, tuple[str, ...]]:
    """Return the addresses of each network interface that is up, by name; those of IPv4 first."""
    import psutil  # type: ignore[import-untyped]

    stats, found = psutil.net_if_stats(), {}
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        usable = [each for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        if name in stats and stats[name].isup:
            ordered = sorted(usable, key=lambda each: each.family != socket.AF_INET)
            found[name] = tuple(each.address for each in ordered if not each.address.startswith(_LINK_LOCAL))
    return found


def is_loopback(address: str) -> bool:
    """Return whether an address is one that only its own machine reaches. False for a name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def interface_of(address: str, known: Mapping[str, Iterable[str]]) -> str | None:
    """Return the interface that has an address of this node; `known` is from `interfaces`."""
    if is_loopback(address):  # all of 127.0.0.0/8, of which an interface lists one
        return INTERFACE
    return next((name for name, addresses in known.items() if address in addresses), None)


def resolve(host: str, flag: str) -> tuple[str, ...]:
    """Return the addresses of `host`, the value of `flag`, in the system's order.

    Addresses of loopback are left out if there are others. Raises `NotFound` with the remedy if
    `host` is a name that resolves only to loopback; if it does not resolve on this node, `Unknown`
    or `NoAnswer`. An address of loopback itself is accepted: the user knows that all nodes are on
    one machine.
    """
    node = host_name()
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # socket.gaierror included
        why = error.strerror if isinstance(error, OSError) else "no host has such a name"
        kind = NotFound
        if isinstance(error, socket.gaierror):
            kind = NoAnswer if error.errno == socket.EAI_AGAIN else Unknown
        raise kind(
            f"{flag}: {host} does not resolve on node {node} ({why}); give an address, or enter the name in {HOSTS} or at the "
            f"name server of {node}"
        ) from error
    addresses = tuple(dict.fromkeys(str(each[4][0]) for each in found))
    if host not in addresses and all(map(is_loopback, addresses)):
        if host == "localhost":
            remedy = "give the name or address of the node whose endpoint that is (127.0.0.1 if all nodes are on this machine)"
        elif (line := _line_of(host)) is not None:
            remedy = f"in {HOSTS} of {node}, line {line[0]} ({line[1]}), give {host} the address that others reach"
        else:
            remedy = f"have the name server of {node} return the address that others reach, or give that address"
        raise NotFound(
            f"{flag}: {host} resolves to {' and '.join(addresses)} on node {node}, which no other node reaches; {remedy}"
        )
    return tuple(each for each in addresses if not is_loopback(each)) or addresses


def in_time[T](
    look: Callable[[], T], patience_s: float, is_ended: Callable[[], object], say: Callable[[str], None]
) -> T | None:
    """Return what `look` returns, once the names that it needs resolve.

    None if `is_ended()` is truthy before. While no name server answers, `look` is called again for
    `patience_s` seconds; while a name is unknown, for at most `UNKNOWN_S`. `say` is called once,
    with a line about the wait. Raises the `NoAnswer` or `Unknown` of `look` after that time, and
    its other errors at once.
    """
    ends: dict[type, float] = {}
    while not is_ended():
        try:
            return look()
        except (NoAnswer, Unknown) as error:
            limit_s = patience_s if isinstance(error, NoAnswer) else min(patience_s, UNKNOWN_S)
            now = time.monotonic()
            if not ends:
                say(f"{str(error).partition(';')[0]}; this is asked again, for at most {limit_s:g} s")
            if now >= ends.setdefault(type(error), now + limit_s):
                raise
        time.sleep(_ASK_S)
    return None


def _line_of(host: str) -> tuple[int, str] | None:
    """Return number and text of the line of `HOSTS` that gives a name a loopback address."""
    with contextlib.suppress(OSError):
        for number, line in enumerate(HOSTS.read_text(errors="replace").splitlines(), start=1):
            words = line.partition("#")[0].split()
            if host in words[1:] and is_loopback(words[0]):
                return number, re.sub(r"\s+", " ", line.strip())
    return None


def endpoint_addresses(host: str, flag: str, *, interface: str | None, local_addr: str | None) -> tuple[str, ...]:
    """Return the addresses of `host`, at which the nodes meet, as `resolve` does.

    The name of this node itself may be unknown here, or resolve only to loopback: the installer of
    Debian enters 127.0.1.1. No name server may be there. This node cannot know then under which of
    its addresses others know the name. So return `own_address`, and without a flag all addresses of
    this node behind it. Raises ValueError with the remedy, also if all are of loopback.
    """
    try:
        return resolve(host, flag)
    except NotFound:
        own = own_address(interface=interface, local_addr=local_addr) if _is_own_name(host) else HOST
        if is_loopback(own):
            raise
        is_chosen = interface is not None or local_addr is not None
        return (own, *(each for each in _reachable_addresses() if each != own and not is_chosen))


def _reachable_addresses() -> list[str]:
    """Return the addresses of this node but those of loopback, in the order of `interfaces`."""
    return [address for each in interfaces().values() for address in each if not is_loopback(address)]


def _is_own_name(host: str) -> bool:
    """Return whether a name is that of this node, with or without a domain."""
    own = host_name()
    return host == own or (("." in host) != ("." in own) and host.partition(".")[0] == own.partition(".")[0])


def with_route(targets: Sequence[str], port: int) -> tuple[str, ...]:
    """Return those addresses to which this node has a route, or all if there are none."""
    return tuple(each for each in targets if _source(each, port) is not None) or tuple(targets)


def node_address(targets: Sequence[str], port: int, *, flag: str, interface: str | None, local_addr: str | None) -> str:
    """Return the address at which the processes of this node listen, which other nodes reach.

    It is that of `local_addr`, the value of `--local-addr`. Without one it is that of `interface`,
    the value of `--interface`. Without both it is the one from which this node sends to `targets`,
    the addresses of the endpoint, whose host `flag` gives. If these are several of one family, the
    default route's comes first: another one may be that of a bridge of containers, which many nodes
    have. Raises ValueError with the remedy.
    """
    if local_addr is not None:
        return _own(local_addr, targets)
    if interface is not None:
        return _of_interface(interface, targets)
    sources = [address for target in targets if (address := _source(target, port)) is not None]
    if not sources:
        raise ValueError(
            f"{flag}: node {host_name()} has no route to {' or '.join(targets)}; see `ip route get {targets[0]}`, or give "
            "--interface NAME"
        )
    default = _source(_ANYWHERE[family_of(sources[0])], 1) if len(sources) > 1 else None
    return default if default in sources else sources[0]


def own_address(*, interface: str | None, local_addr: str | None) -> str:
    """Return the address of this node where no other node is known yet, as in `node_address`.

    Without both arguments it is an address of this node to which the host's name resolves, or else
    that of the default route, or else the first of an interface: the first name may be that of a
    bridge of containers. If the name resolves to several, the default route's comes first. It is
    one of loopback only if there is no other. Raises ValueError with the remedy.
    """
    if local_addr is not None:
        return _own(local_addr, ())
    if interface is not None:
        return _of_interface(interface, ())
    own = _reachable_addresses()
    named: list[str] = []
    with contextlib.suppress(OSError, UnicodeError):
        entries = socket.getaddrinfo(host_name(), None, type=socket.SOCK_STREAM)
        named = [str(entry[4][0]) for entry in entries if str(entry[4][0]) in own]
    default = next((found for each in _ANYWHERE.values() if (found := _source(each, 1)) in own), None)
    return default if default in (named or own) else [*named, *own, HOST][0]


def _own(local_addr: str, targets: Iterable[str]) -> str:
    """Return the address of `--local-addr`, of a family of `targets` if it has several.

    A name of this node that it does not know is a mistake, and no entry that comes later.
    """
    try:
        addresses = _suitable_first(resolve(local_addr, "--local-addr"), targets)
    except Unknown as error:
        raise NotFound(str(error)) from error
    own = {address for each in interfaces().values() for address in each}
    for address in addresses:
        if address in own or is_loopback(address):
            return address
    raise ValueError(
        f"--local-addr: {' and '.join(addresses)} is no address of node {host_name()}, which has {_listed(interfaces())}; "
        "give one of these, or leave the flag out"
    )


def _of_interface(name: str, targets: Iterable[str]) -> str:
    """Return an address of `--interface`, of a family of `targets` if it has several."""
    known = interfaces()
    if not known.get(name):
        why = "has no IPv4 or IPv6 address" if name in known else "does not exist or is down"
        raise ValueError(f"--interface {name} {why} on node {host_name()}, which has {_listed(known)}; give one of these")
    return _suitable_first(known[name], targets)[0]


def _suitable_first(addresses: Iterable[str], targets: Iterable[str]) -> list[str]:
    """Return addresses, those of a family of `targets` first."""
    families = {family_of(each) for each in targets}
    return sorted(addresses, key=lambda each: family_of(each) not in families)


def _source(target: str, port: int) -> str | None:
    """Return the address from which this node sends to `target`; None if there is no route.

    Connecting a UDP socket makes the kernel choose a route. It sends nothing.
    """
    try:
        with socket.socket(family_of(target), socket.SOCK_DGRAM) as probe:
            probe.connect((target, port))
            address = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if address.startswith(_LINK_LOCAL) else address


def _listed(known: Mapping[str, Iterable[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in known.items() if addresses)
