"""One trace of a toy job on several nodes, merged by the machine's one monotonic clock, which the nodes share.

What a toy left beside the trace (`toy.py`) says when each line was recorded. So the order of the merged file is what happened,
whatever the nodes' wall clocks said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_recover import trace
from tests.nodes.history import History

_OF_ONE = ("run_started", "run_finished", "nodes_met")
"""Events that each node records and that a merged trace has once: those of node 0."""


def merge(run_dir: Path, sums: Path, into: Path) -> Path:
    """Write the merged trace of all nodes to the new folder `into`, and return that.

    A node whose file has no end lost its power, or its agent: it may lack the newest events of its ranks, which the merged
    trace says. Node 0 may also lack those of the coordinator, which may have lived on.
    """
    at = _times(sums)
    end = max(at.values())
    events: list[dict[str, Any]] = []
    for folder, of_node in on_one_clock(run_dir, sums):
        now = float("-inf")
        for event in of_node:
            now = event["t"] = max(now, event["t"])  # within a file the order of lines stands
        if of_node[-1]["event"] != "run_finished":
            applied = [event for event in of_node if event["event"] == "applied"]
            places = {(event["replica"], event["rank"]) for event in applied}
            ended = max(when for (replica, rank, _), when in at.items() if (replica, rank) in places)
            of_node += [_gap(now, max(now, ended), *place) for place in sorted(places)]
            if folder == run_dir:
                of_node.append(_gap(now, max(now, end), -1, 0))
        events += [event for event in of_node if folder == run_dir or event["event"] not in _OF_ONE]
    seen = {(event["replica"], event["rank"]) for event in events if event["event"] == "applied"}
    for replica, rank in sorted({(replica, rank) for replica, rank, _ in at} - seen):  # of a node that has written nothing yet
        events.append(
            _gap(min(at.values()), max(when for key, when in at.items() if key[:2] == (replica, rank)), replica, rank)
        )
    into.mkdir()
    first = min(event["t"] for event in events)
    with open(into / trace.EVENTS_FILE, "w") as file:
        for event in sorted(events, key=lambda each: each["t"]):
            times = {name: event[name] - first for name in ("t", "since") if name in event}
            file.write(json.dumps(event | times) + "\n")
    return into


def on_one_clock(run_dir: Path, sums: Path) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """Yield folder and events of each node that has applied a step, with the times of the machine's monotonic clock.

    They are late by the time from a toy's line to its event, at the least of all steps of the node: some ten microseconds.
    """
    at = _times(sums)
    for folder in (run_dir, *sorted((run_dir / "nodes").glob("*"))):
        events = [json.loads(line) for line in _whole_lines(folder / trace.EVENTS_FILE)]
        offsets = [at[key] - event["t"] for event in events if event["event"] == "applied" and (key := _key(event)) in at]
        if not offsets:
            continue
        for event in events:
            event |= {name: event[name] + max(offsets) for name in ("t", "since") if name in event}
        yield folder, events


def _times(sums: Path) -> dict[tuple[int, int, int], float]:
    """Return when each rank (replica, rank) applied each step."""
    return {(each.replica, each.rank, each.step): each.at for each in History.read(sums).applied}


def _gap(since: float, until: float, replica: int, rank: int) -> dict[str, Any]:
    return {"event": "gap", "v": 2, "t": until, "replica": replica, "rank": rank, "num_events": 1, "since": since}


def _key(event: dict) -> tuple[int, int, int]:
    return event["replica"], event["rank"], event["step"]


def _whole_lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
