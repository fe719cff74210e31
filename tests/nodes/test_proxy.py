"""Bad weather between nodes is what it claims to be, and what is sent arrives whole."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable

import pytest

from tests.nodes.nodes import Cage, Network
from tests.nodes.proxy import Way, Weather
from tests.nodes.test_harness import call, serve, until_printed

NUM_BYTES = 3_000_000
RECEIVE = f"""
import socket, zlib
with socket.create_server(("0.0.0.0", 3000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    data = b"".join(iter(lambda: connection.recv(2**20), b""))
    print(len(data) == {NUM_BYTES}, zlib.crc32(data))
"""
SEND = f"""
import random, socket, sys, zlib
data = random.Random(1).randbytes({NUM_BYTES})
with socket.create_connection((sys.argv[1], 3000)) as connection:
    connection.sendall(data)
print(True, zlib.crc32(data))
"""


@pytest.fixture(scope="module")
def cage(cheap_cage: Cage) -> Cage:
    """Nothing here imports torch."""
    return cheap_cage


def test_frames_come_late_and_the_weather_clears_up(make_network: Callable[..., Network]) -> None:
    network = make_network(2)
    serve(network[0])
    client = call(network[1], network[0].address)
    until_printed(client, "echo")
    network.set_weather(Weather(delay_s=0.05))
    before = len(client.text())
    for _ in range(4):
        until_printed(client, "echo")
    late = [int(ms) for ms in re.findall(r"after (\d+) ms", client.text()[before:])]
    assert min(late[1:]) >= 100
    assert statistics.median(late[1:]) < 200
    network.set_weather(None)
    before = len(client.text())
    for _ in range(4):
        until_printed(client, "echo")
    assert statistics.median(int(ms) for ms in re.findall(r"after (\d+) ms", client.text()[before:])) < 50
    assert "silence" not in client.text()


def test_what_is_lost_is_sent_again(make_network: Callable[..., Network]) -> None:
    """Also to a node that was switched on in bad weather."""
    network = make_network(2)
    network.set_weather(Weather(loss=0.05, delay_s=0.001, jitter_s=0.002, stall_s=0.1, calm_s=0.2), seed=7)
    network[0].power_off()
    network[0].power_on()
    receiver = network[0].start([sys.executable, "-c", RECEIVE])
    until_printed(receiver, "listening")
    code, sent = network[1].run(sys.executable, "-c", SEND, network[0].address)
    assert (code, receiver.wait()) == (0, 0), sent + receiver.text()
    assert receiver.text() == f"listening\n{sent}"
    assert "lost" in network.weather_log.read_text()


def test_the_seed_decides_what_befalls_a_frame() -> None:
    weather = Weather(loss=0.3, delay_s=0.01, jitter_s=0.02, stall_s=0.5, calm_s=1.0)

    def fate(seed: str) -> list[tuple[float, bytes]]:
        way = Way(weather, seed, 0.0)
        for number in range(200):
            way.take(b"%d" % number, number / 100)
        return list(way.waiting)

    assert fate("1") == fate("1") != fate("2")
    arrived = fate("1")
    assert 100 < len(arrived) < 180
    assert [due for due, _ in arrived] == sorted(due for due, _ in arrived)
    late_s = [due - int(frame) / 100 for due, frame in arrived]
    assert 0.01 <= min(late_s) < 0.03
    assert 0.2 < max(late_s) <= 0.53, "it never stalled"
