"""Bad weather between nodes: in place of the bridge, a program that hands on their frames late, in bursts, or not at all.

``python -m tests.nodes.proxy JSON`` runs in the cage's network; JSON is a `Settings`. TCP sees what it sees on a bad network,
and sends lost segments again after its own timeouts. The order of frames from one node to another stays. What befalls the n-th
frame from one node to another is a function of the seed, but for stalls, which go by the clock.
"""

from __future__ import annotations

import collections
import random
import select
import socket
import sys
import time

import msgspec

_ETH_P_ALL, _SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 0x3, 263, 15, 23
_HEADER_BYTES = 10
"""Of virtio_net: what is left to do for a frame (checksum, cutting it up), which goes with it to its receiver."""
_FRAME_BYTES = 2**17
_MAX_WAITING = 10_000
"""More frames of one node to another are lost, as in any switch."""


class Weather(msgspec.Struct, frozen=True, kw_only=True):
    """What befalls frames of each node to each other."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """At most so much more."""
    loss: float = 0.0
    """The share of frames that vanish."""
    stall_s: float = 0.0
    """Nothing arrives for so long, in one direction between two nodes, again and again ..."""
    calm_s: float = 1.0
    """... after so long on average."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the program is told."""

    ports: dict[str, str]
    """Name of a network device -> hardware address of the node behind it."""
    weather: Weather
    seed: int


class Way:
    """What one node sends to another."""

    def __init__(self, weather: Weather, seed: str, now: float) -> None:
        self._weather, self._random = weather, random.Random(seed)
        self._stalls = random.Random(f"{seed} stalls")
        self.waiting: collections.deque[tuple[float, bytes]] = collections.deque()
        """When a frame is due, and the frame; in order."""
        self._due = now
        self._stall_at = now
        self._calm_at = now
        self._next_stall(now)

    def _next_stall(self, now: float) -> None:
        self._stall_at = now + self._stalls.expovariate(1 / self._weather.calm_s)
        self._calm_at = self._stall_at + self._weather.stall_s

    def take(self, frame: bytes, now: float) -> bool:
        """Take a frame; return whether it will arrive."""
        weather = self._weather
        is_lost = self._random.random() < weather.loss
        late_s = weather.delay_s + weather.jitter_s * self._random.random()
        if is_lost or len(self.waiting) >= _MAX_WAITING:
            return False
        self._due = max(self._due, self._after_stall(now) + late_s)
        self.waiting.append((self._due, frame))
        return True

    def _after_stall(self, now: float) -> float:
        while self._calm_at <= now:
            self._next_stall(self._calm_at)
        return self._calm_at if self._weather.stall_s and self._stall_at <= now else now


def run(settings: Settings) -> None:
    """Hand frames on for ever."""
    links = {name: _link(name) for name in settings.ports}
    port_of = {bytes.fromhex(hardware.replace(":", "")): name for name, hardware in settings.ports.items()}
    start = time.monotonic()
    ways = {
        (here, there): Way(settings.weather, f"{settings.seed} {here[-2:]} {there[-2:]}", start)
        for here in links
        for there in links
        if here != there
    }
    poll = select.poll()
    name_of = {link.fileno(): name for name, link in links.items()}
    for descriptor in name_of:
        poll.register(descriptor, select.POLLIN)
    print("ready", flush=True)
    num_lost = 0
    while True:
        due = min((way.waiting[0][0] for way in ways.values() if way.waiting), default=None)
        wait_ms = None if due is None else max(0.0, 1000 * (due - time.monotonic()))
        for descriptor, event in poll.poll(wait_ms):
            here = name_of[descriptor]
            if not event & select.POLLIN:
                poll.unregister(descriptor)  # the node is off
                continue
            frame = links[here].recv(_FRAME_BYTES)
            there = port_of.get(frame[_HEADER_BYTES : _HEADER_BYTES + 6])
            if there is not None and there != here and not ways[here, there].take(frame, time.monotonic()):
                num_lost += 1
                print(f"lost {num_lost}", flush=True)
        now = time.monotonic()
        for (_, there), way in ways.items():
            while way.waiting and way.waiting[0][0] <= now:
                _, frame = way.waiting.popleft()
                _send(links[there], frame)


def _send(link: socket.socket, frame: bytes) -> None:
    try:
        link.send(frame)
    except OSError as error:  # that node is off
        print(f"not sent: {error}", flush=True)


def _link(name: str) -> socket.socket:
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    link.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    link.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**24)
    link.bind((name, _ETH_P_ALL))
    return link


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Settings))
