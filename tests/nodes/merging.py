"""One trace of a toy job on several nodes, merged by the machine's one monotonic clock, which the nodes share.

What a toy left beside the trace (`toy.py`) says when each line was recorded. So the order of the merged file is what happened,
whatever the nodes' wall clocks said.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_recover import trace
from tests.nodes.history import History

_OF_ONE = ("run_started", "run_finished", "nodes_met")
"""Events that each node records and that a merged trace has once: those of node 0."""


def merge(run_dir: Path, sums: Path, into: Path) -> Path:
    """Write the merged trace of all nodes to the new folder `into`, and return that."""
    at = {(each.replica, each.rank, each.step): each.at for each in History.read(sums).applied}
    lines: list[tuple[float, str]] = []
    for folder in (run_dir, *sorted((run_dir / "nodes").glob("*"))):
        events = [json.loads(line) for line in _whole_lines(folder / trace.EVENTS_FILE)]
        offsets = [at[key] - event["t"] for event in events if event["event"] == "applied" and (key := _key(event)) in at]
        if not offsets:
            continue
        now = float("-inf")
        for event in events:
            now = max(now, event["t"] + max(offsets))  # within a file the order of lines stands
            if folder == run_dir or event["event"] not in _OF_ONE:
                lines.append((now, json.dumps(event)))
    into.mkdir()
    (into / trace.EVENTS_FILE).write_text("".join(f"{line}\n" for _, line in sorted(lines, key=lambda each: each[0])))
    return into


def _key(event: dict) -> tuple[int, int, int]:
    return event["replica"], event["rank"], event["step"]


def _whole_lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
