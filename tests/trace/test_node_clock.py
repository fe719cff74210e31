"""The clock of a node: its processes share it, it outlives them, and only believable stamps of proven peers move it."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from megatron_recover.control_plane.leader_messages import PeerHello
from megatron_recover.control_plane.wire import Link, LinkClosed
from megatron_recover.core.hybrid_clock import MAX_AHEAD_MS, milliseconds, stamp_at
from megatron_recover.trace import node_clock
from megatron_recover.trace.node_clock import AGENT, COORDINATOR, FIRST_RANK, NodeClock
from tests.control_plane.partners import KEYS

pytestmark = pytest.mark.timeout(60)
NOW_MS = 1_795_000_000_000


def clock(offset_ms: int = 0) -> NodeClock:
    return NodeClock(None, physical_ms=lambda: NOW_MS + offset_ms)


def test_processes_of_a_node_share_a_clock_that_outlives_them() -> None:
    memory = node_clock.create(2)
    mine = NodeClock(memory, AGENT, physical_ms=lambda: NOW_MS)
    child = os.fork()
    if not child:
        rank = NodeClock(memory, FIRST_RANK + 1, physical_ms=lambda: NOW_MS - 10_000)
        rank.see(stamp_at(NOW_MS + 5_000))
        rank.tick()
        os._exit(0)
    os.waitpid(child, 0)
    assert mine.tick() == stamp_at(NOW_MS + 5_000) + 2, "what the rank had seen and recorded came before"
    coordinator = NodeClock(memory, COORDINATOR, physical_ms=lambda: NOW_MS)
    assert coordinator.tick() == stamp_at(NOW_MS + 5_000) + 3
    os.close(memory)


def test_an_offset_is_part_of_the_physical_clock() -> None:
    memory = node_clock.create(1, offset_ms=-30_000)
    assert NodeClock(memory, physical_ms=lambda: NOW_MS).tick() == stamp_at(NOW_MS - 30_000)
    os.close(memory)


def test_threads_of_a_process_never_get_the_same_stamp() -> None:
    shared, found = clock(), []
    threads = [threading.Thread(target=lambda: found.extend([shared.tick() for _ in range(500)])) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(set(found)) == 2000


def test_a_stamp_from_far_ahead_is_told_and_moves_no_clock() -> None:
    mine, told = clock(), []
    mine.report_refused(told.append)
    mine.see(stamp_at(NOW_MS + MAX_AHEAD_MS + 500))
    mine.see(stamp_at(NOW_MS + MAX_AHEAD_MS + 900))
    assert told == [MAX_AHEAD_MS / 1e3 + 0.5], "once a minute"
    assert mine.tick() == stamp_at(NOW_MS)
    mine.see(stamp_at(NOW_MS + MAX_AHEAD_MS))
    assert milliseconds(mine.tick()) == NOW_MS + MAX_AHEAD_MS


def test_an_old_stamp_moves_no_clock_back() -> None:
    """The physical clock of this node is behind, so only the stamps that it has seen keep its order."""
    mine = clock(-30_000)
    mine.see(stamp_at(NOW_MS))
    before = mine.tick()
    mine.see(stamp_at(NOW_MS - 10_000))
    assert mine.tick() > before


def ends(ahead_ms: int) -> tuple[Link, NodeClock, Link, NodeClock]:
    ours, theirs = socket.socketpair()
    here, there = clock(), clock(ahead_ms)
    return Link(ours, KEYS, here), here, Link(theirs, KEYS.of_other_end, there), there


def test_a_frame_carries_the_senders_clock_to_the_receiver() -> None:
    link, here, other, there = ends(30_000)
    before = there.tick()
    other.send(PeerHello(1))
    assert list(link.receive()) == [PeerHello(1)] and here.tick() > before
    behind = here.tick()
    link.send(PeerHello(2))
    list(other.receive())
    assert there.tick() > behind
    link.close()
    other.close()


def test_a_frame_from_far_ahead_is_delivered_and_its_stamp_is_not_taken_over() -> None:
    link, here, other, _ = ends(MAX_AHEAD_MS + 1)
    other.send(PeerHello(1))
    assert list(link.receive()) == [PeerHello(1)] and here.tick() == stamp_at(NOW_MS)
    link.close()
    other.close()


def test_a_frame_that_was_changed_moves_no_clock() -> None:
    """The stamp itself was changed: the MAC covers it."""
    ours, theirs = socket.socketpair()
    here, sent = clock(), socket.socketpair()
    Link(sent[0], KEYS.of_other_end, clock()).send(PeerHello(1))
    frame = bytearray(sent[1].recv(2**16))
    frame[8:16] = stamp_at(NOW_MS + 1000).to_bytes(8, "big")
    theirs.sendall(frame)
    link = Link(ours, KEYS, here)
    with pytest.raises(LinkClosed, match="MAC"):
        list(link.receive())
    assert here.tick() == stamp_at(NOW_MS)
    link.close()
    theirs.close()
    for each in sent:
        each.close()
