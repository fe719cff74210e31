"""A trace of one machine as the traces of several nodes: what their recorders would have written, with wrong clocks.

Each event goes to the node of its writer. The stamps are those of real hybrid clocks that hear only the frames that the
protocol needs: the control plane's, none of the data plane. So two events have an order only if a frame gives it to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from megatron_recover import trace
from megatron_recover.core import hybrid_clock
from megatron_recover.trace import merging

EPOCH_MS = 1_795_000_000_000
START_S = (0.0, 7.25, -3.5, 100.0)
"""Seconds by which the zeros of the nodes' own clocks differ."""
ByRank = Callable[[int, int], int]
"""Node of (replica, rank)."""
WORK = (
    trace.MicrobatchStarted, trace.MicrobatchFinished, trace.BucketPassed, trace.Extended, trace.Reduced, trace.Transferred,
)  # fmt: skip


def by_replica(replica: int, rank: int) -> int:
    """Each replica has a node, and a newcomer that of a replica of the start."""
    return replica % 3


def by_rank(replica: int, rank: int) -> int:
    """The ranks of a replica are on different nodes."""
    return (replica + rank) % 3


def is_heard(cause: trace.Event, event: trace.Event) -> bool:
    """Whether the writer of `event` has to have a frame that was sent after `cause`."""

    def same(*fields: str) -> bool:
        return all(getattr(cause, name, None) == getattr(event, name, None) for name in fields)

    match event:
        case trace.Generation():
            kinds = trace.Joined | trace.Failure | trace.Fenced | trace.Miscounted | trace.Disagreed | trace.Claimed
            return isinstance(cause, kinds)
        case trace.Claimed():
            return isinstance(cause, trace.StateRead) and same("replica")
        case trace.Proven():
            return isinstance(cause, trace.Committed) and same("generation")
        case trace.Forming():
            return isinstance(cause, trace.Fenced)
        case trace.Entered():
            return isinstance(cause, trace.Generation) and same("generation")
        case trace.Status():
            return same("replica")
        case trace.Plan():
            return isinstance(cause, trace.Status) and same("generation")
        case trace.Voted():
            return isinstance(cause, trace.Reduced | trace.Transferred | trace.StateDigested) and same("replica", "step")
        case trace.Committed():
            return isinstance(cause, trace.Voted | trace.Status) and same("generation")
        case trace.Applied():
            return isinstance(cause, trace.Committed) and same("replica", "step")
        case trace.Checkpoint():
            is_granted = isinstance(cause, trace.Granted) and cause.writer == event.replica
            return is_granted or (isinstance(cause, trace.Committed) and same("replica"))
        case trace.RunFinished() | trace.Stopping():
            return isinstance(cause, trace.Applied | trace.Failure | trace.Fenced)
    return isinstance(event, WORK) and isinstance(cause, trace.Plan) and same("replica", "generation", "step")


def split(
    events: Sequence[trace.Event], place: ByRank = by_replica, offsets_ms: Sequence[int] = (0, 30_000, -30_000), *,
    hears: bool = True, ends: bool = True,
) -> list[list[trace.Event]]:  # fmt: skip
    """The events of each node. Without `hears` the stamps are those of the wall clocks; without `ends` nodes have no end."""
    count = len(offsets_ms)
    newest, files = [0] * count, [list[trace.Event]() for _ in range(count)]
    bases = [hybrid_clock.stamp_at(EPOCH_MS + offset) for offset in offsets_ms]
    sent: list[list[tuple[trace.Event, int]]] = [[] for _ in offsets_ms]

    def write(node: int, event: trace.Event) -> None:
        now_ms = int(EPOCH_MS + event.t * 1000 + offsets_ms[node])
        newest[node] = hybrid_clock.tick(newest[node], now_ms)
        zero = {"t": round(event.t + START_S[node] - START_S[0], 6), "h": newest[node] - bases[node]}
        files[node].append(msgspec.structs.replace(event, **zero))

    def introduce(node: int, t: float) -> None:
        write(node, trace.NodeStarted(t=t, node=node, name=f"host-{node}", clock=bases[node]))

    for node in range(1, count):
        introduce(node, 0.0)
    if hears:  # every node has been told who they are by the coordinator, which has heard all of them
        newest = [max(newest)] * count
    for event in events:
        parts = [event]
        if isinstance(event, trace.Fenced):  # each agent confirms the ends of its own ranks
            homes = {place(event.replica, rank) for rank in event.ranks}
            mine = {home: tuple(rank for rank in event.ranks if place(event.replica, rank) == home) for home in homes}
            parts = [msgspec.structs.replace(event, ranks=ranks) for ranks in mine.values()]
        for part in parts:
            rank = part.ranks[0] if isinstance(part, trace.Fenced) else getattr(part, "rank", 0)
            node = place(part.replica, rank) if getattr(part, "replica", -1) >= 0 else 0
            for there in range(count) if hears else ():
                heard = (stamp for cause, stamp in reversed(sent[there]) if is_heard(cause, part))
                if there != node:
                    newest[node] = max(newest[node], next(heard, 0) + 1)  # of several frames the last has the largest stamp
            write(node, part)
            sent[node].append((part, newest[node]))
            if isinstance(part, trace.RunStarted):
                introduce(0, part.t)
    for node in range(1, count) if ends else ():
        write(node, trace.RunFinished(t=events[-1].t, exit_code=0))
    return files


def write(run_dir: Path, files: Sequence[Sequence[trace.Event]], names: bool = True) -> Path:
    """Write the traces of all nodes as their recorders leave them."""
    for node, events in enumerate(files):
        folder = merging.folder_of(run_dir, node)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / trace.EVENTS_FILE).write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    if names:
        listed = [{"number": node, "name": f"host-{node}"} for node in range(len(files))]
        (run_dir / "run.json").write_bytes(msgspec.json.encode({"nodes": listed}))
    return run_dir
