"""The nodes of the tests are what they claim to be: apart, cut silently, dead at once, off in time, and gone at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cluster.waiting import until_ended, until_files
from tests.nodes.nodes import ROOT, Cage, Network, Node, Program

PORT = 2000
TALK = [sys.executable, "-m", "tests.nodes.talk"]


@pytest.fixture(scope="module")
def cage(cheap_cage: Cage) -> Cage:
    """Nothing here imports torch."""
    return cheap_cage


def serve(node: Node) -> Program:
    program = node.start([*TALK, "serve", str(PORT)])
    until_printed(program, "listening")
    return program


def call(node: Node, address: str) -> Program:
    return node.start([*TALK, "call", address, str(PORT)])


def until_printed(program: Program, words: str) -> None:
    """Wait until a program prints `words`; what it prints again and again: once more than it has."""
    since = program.text().count(words) if words in ("got", "echo", "silence") else 0
    until_files(
        lambda: program.text().count(words) > since, f"{words!r} of {program.command}", program.output.parent, deadline_s=20
    )


def test_nodes_have_names_files_and_processes_of_their_own(network: Network) -> None:
    for node in network:
        code, text = node.run(
            "bash", "-c", f"touch /tmp/mine /dev/shm/mine {network.local}/mine {network.shared}/$(hostname); hostname; echo $$"
        )
        assert (code, text.split()[0]) == (0, node.name)
        assert int(text.split()[1]) < 10, "it sees other processes than its own"
        assert {*node.leftovers()} == {"/tmp/mine", "/dev/shm/mine"}
        assert [each.name for each in node.disk.iterdir()] == ["mine"]
        code, text = node.run("getent", "hosts", *(each.name for each in network))
        assert (code, text.split()[::2]) == (0, network.addresses)
    assert {each.name for each in network.shared.iterdir()} == {each.name for each in network}
    assert not Path("/dev/shm/mine").exists()


def test_clocks_differ_and_waits_do_not(make_network: Callable[..., Network]) -> None:
    network = make_network(2, clock_offsets_s=(0.0, -30.0))
    module = [sys.executable, "-m", "tests.nodes.clocks"]
    for command in (module, ["env", *module]):  # a fork, and an interpreter of its own
        here, there = (node.start(command) for node in network)
        assert (here.wait(), there.wait()) == (0, 0), here.text() + there.text()
        wall, waited = ([float(word) for word in program.text().split()] for program in (here, there))
        assert -40 < waited[0] - wall[0] < -20
        for _, shortest, longest in (wall, waited):
            assert 0.09 < shortest < longest < 5


@pytest.mark.parametrize("number", [1, 3])
def test_a_cut_drops_silently_and_heals(network: Network, number: int) -> None:
    server, clients = serve(network[0]), [call(network[each], network[0].address) for each in (number, 2)]
    address6 = call(network[number], network[0].address6)
    for client in (*clients, address6):
        until_printed(client, "echo")
    network[number].cut()
    for client in (clients[0], address6):
        until_printed(client, "silence")
    late = call(network[number], network[0].address)
    until_printed(late, "TimeoutError")
    until_printed(clients[1], "echo")
    network[number].heal()
    for client in (clients[0], address6):
        until_printed(client, "echo")
    assert {*server.text().split("\n")} == {"listening", "got", ""}


def test_one_way_cuts(network: Network) -> None:
    server, client = serve(network[0]), call(network[1], network[0].address)
    until_printed(client, "echo")
    network[1].cut(one_way="in")
    until_printed(client, "silence")
    assert server.text().count("got") == client.text().count("echo") + 1
    network[1].heal()
    until_printed(client, "echo")
    network[1].cut(network[0], one_way="out")
    until_printed(client, "silence")
    assert server.text().count("got") == client.text().count("echo")


def test_power_loss_is_silent_and_leaves_the_disk_only(network: Network) -> None:
    server, there = serve(network[0]), serve(network[1])
    client = call(network[0], network[1].address)
    caller = call(network[1], network[0].address)
    for each in (client, caller):
        until_printed(each, "echo")
    network[1].run("touch", f"{network.local}/kept", "/dev/shm/lost", "/tmp/lost")
    processes = network[1].processes()
    assert len(processes) == 2
    network[1].power_off()
    until_ended(processes, 1.0)
    assert (there.wait(1), caller.wait(1)) == (-signal.SIGKILL, -signal.SIGKILL)
    until_printed(client, "silence")
    assert {*server.text().split("\n")} == {"listening", "got", ""}, "it was told of the power loss"
    network[1].power_on()
    assert network[1].leftovers() == []
    assert (network[1].disk / "kept").exists()
    until_printed(client, "ConnectionResetError")  # the new kernel knows nothing of the connection
    serve(network[1])
    until_printed(call(network[0], network[1].address), "echo")


def test_a_frozen_node_answers_when_it_thaws(network: Network) -> None:
    serve(network[0])
    client = call(network[1], network[0].address)
    until_printed(client, "echo")
    network[0].freeze()
    assert {each.status() for each in network[0].processes()} == {psutil.STATUS_STOPPED}
    until_printed(client, "silence")
    network[0].thaw()
    until_printed(client, "echo")


def test_resets_reach_both_ends(network: Network) -> None:
    server, client = serve(network[0]), call(network[1], network[0].address)
    until_printed(client, "echo")
    network[0].reset(PORT)
    until_printed(client, "ConnectionResetError")
    assert server.text().split()[-1] != "got"


def test_leftovers_are_found(network: Network) -> None:
    """Also a process that left its session and has no parent any more."""
    server = serve(network[0])
    network[0].run("bash", "-c", "setsid sleep 1000 & touch /dev/shm/left")
    left = network[0].leftovers()
    assert len(left) == 4, left
    for words in ("process", "sleep 1000", f"port {PORT}", "/dev/shm/left"):
        assert any(words in each for each in left), (words, left)
    with pytest.raises(AssertionError, match="left behind"):
        network.assert_nothing_left(0.1)
    for each in network[0].processes():
        each.kill()
    assert server.wait(5) == -signal.SIGKILL
    until_ended(network[0].processes(), 5)
    with pytest.raises(AssertionError, match=r"\{'n0': \['/dev/shm/left'\]\}"):
        network.assert_nothing_left(1.0)
    network[0].run("rm", "/dev/shm/left")
    network.assert_nothing_left()


def test_nothing_outlives_a_killed_pytest(tmp_path: Path) -> None:
    script = """
import pathlib, sys, time
from tests.nodes import nodes
with nodes.cage(preload=False) as cage:
    network = nodes.Network(cage, pathlib.Path(sys.argv[1]) / "network", 2)
    print(cage.folder, network[1].start(["sleep", "1000"]).pid, *(node.pid for node in network), cage.pid, flush=True)
    time.sleep(1000)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    folder, *pids = process.stdout.readline().split()
    started = [psutil.Process(int(pid)) for pid in pids]
    assert len(started) == 4
    process.kill()
    process.wait()
    until_ended(started, 5.0)
    end = time.monotonic() + 5.0
    while Path(folder).exists() or str(tmp_path) in Path("/proc/self/mounts").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
