"""The coordinator: the process that decides which replicas form the job.

The agent of the node at which all nodes meet starts it, in a session of its own. It outlives that
agent: the other nodes go on without it. It ends when:

- no agent is left, also if the job is not over: nobody could carry anything out;
- the job is over, and no agent is awaited any more, or `deadline_s` later;
- it gives up, since too many links were reset at once (`control_plane/node_watch.py`);
- the agent that has started it dies before it has introduced itself.

`cluster.membership.Membership` runs it as ``python -P -m megatron_recover.cluster.coordinator KEY
LISTENERS RING CLOCK SETTINGS``:

- KEY: the descriptor of the sealed key of the job;
- LISTENERS: the descriptors of the listening sockets, with commas between them;
- RING: the descriptor of the ring for its events (`trace/ring.py`);
- CLOCK: the descriptor of the clock of this node (`trace/node_clock.py`);
- SETTINGS: `NodesSettings` as JSON.

It imports no torch.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

import msgspec

from megatron_recover import trace
from megatron_recover.authentication.key import read_sealed
from megatron_recover.cluster.rank_process import TOLD_TO_ALL, set_process_name
from megatron_recover.control_plane.job_start import NodesSettings
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.nodes_driver import NodesDriver
from megatron_recover.trace.node_clock import COORDINATOR, NodeClock
from megatron_recover.trace.ring import RingLog

_TURN_S = 1.0


def main() -> None:
    """Coordinate one job to its end."""
    key, listening, events, clock_memory, settings_text = sys.argv[1:]
    set_process_name("coordinator")
    settings = msgspec.json.decode(settings_text, type=NodesSettings)
    for number in {*TOLD_TO_ALL, *settings.ignored}:  # a scheduler sends them to all processes; the agents react
        signal.signal(number, signal.SIG_IGN)
    listener, *others = [socket.socket(fileno=int(each)) for each in listening.split(",")]
    loop = Loop()
    clock = NodeClock(int(clock_memory), COORDINATOR)
    log = RingLog(int(events), clock)
    clock.report_refused(lambda ahead_s: log.record(trace.ClockRefused(replica=-1, rank=-1, ahead_s=round(ahead_s, 3))))
    driver = NodesDriver(
        settings, listener, key=read_sealed(int(key)), clock=clock, loop=loop, record=log.record, also=others
    )  # fmt: skip
    parent, until = os.getppid(), float("inf")
    while not driver.is_done and loop.time() < until:
        loop.run_once(_TURN_S)
        if driver.has_ended and until == float("inf"):
            until = loop.time() + settings.deadlines.deadline_s
        if os.getppid() != parent and not driver.was_joined:  # the agent died before it had introduced itself
            break
    driver.close()
    loop.close()


if __name__ == "__main__":
    main()
