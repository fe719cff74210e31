"""The cost of the MAC of a frame of the control plane: sent and received with and without it.

    python -m benchmarks.run --only frames

One thread sends messages over a pair of sockets and receives them. The benchmark measures thread
CPU time, both sides in turn in one process. Without the MAC every frame has the same 16 bytes in
its place, and nothing is hashed.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from unittest import mock

from benchmarks.common import Row, row
from megatron_recover.authentication.frame_macs import MAC_BYTES, FrameMacs
from megatron_recover.authentication.handshake import KEY_BYTES, SessionKeys
from megatron_recover.control_plane.wire import FRAME_BYTES, Link, Message, encode
from megatron_recover.core.values import Contribution, HeldVersion, Status, Vote, Work
from megatron_recover.trace.node_clock import NodeClock

RUNS = 15
KEYS = SessionKeys(b"a" * KEY_BYTES, b"b" * KEY_BYTES)
VOTE = Vote(2, 3, 7, b"d" * 32, b"o" * 300, (), ((2, 10**9),))
_WORK = Work("train 8", 8192, tuple(range(401)))
STATUS = Status(3, 3, 7, _WORK, tuple(Contribution((bucket,), tuple(range(0, 400, 2))) for bucket in range(401)),
                (HeldVersion(3, tuple(range(200))),), None)  # fmt: skip
"""A status in which no two microbatches are a run: the largest one of its size."""
MESSAGES: tuple[tuple[str, Message, int], ...] = (("vote", VOTE, 1000), ("large status", STATUS, 30))
"""Name, message, and how many are sent in a run."""


@contextlib.contextmanager
def _without_mac() -> Iterator[None]:
    constant = bytes(MAC_BYTES)
    with mock.patch.object(FrameMacs, "mac", lambda self, header, body: constant):
        yield


def _microseconds(message: Message, count: int) -> float:
    ours, theirs = socket.socketpair()
    sending, receiving = Link(ours, KEYS, NodeClock(None)), Link(theirs, KEYS.of_other_end, NodeClock(None))
    begin = time.thread_time_ns()
    for _ in range(count):
        sending.send(message)
        while not list(receiving.receive()):
            sending.flush()
    found = (time.thread_time_ns() - begin) / count / 1e3
    sending.close()
    receiving.close()
    return found


def rows() -> list[Row]:
    """Return the rows of this benchmark."""
    found = []
    for name, message, count in MESSAGES:
        with_mac, without = [], []
        for _ in range(RUNS):
            with_mac.append(_microseconds(message, count))
            with _without_mac():
                without.append(_microseconds(message, count))
        ratios = [ours / theirs for ours, theirs in zip(with_mac, without, strict=True)]
        size = FRAME_BYTES + len(encode(message))
        found += [
            row(f"sending and receiving a {name} ({size} bytes)", with_mac, "us"),
            row(f"a {name}, with its MAC over without", ratios, "ratio", baseline="the same frames with constant bytes"),
        ]
    return found
