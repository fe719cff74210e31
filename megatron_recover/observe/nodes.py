"""The nodes of a run, as `run.json` lists them, and the trace of all of them.

A run of one node has no list, and its trace is that of the run directory.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from megatron_recover.observe.follow.launcher import RUN_FILE
from megatron_recover.trace import event_files, merging
from megatron_recover.trace.merging import MergedTrace


class ListedNode(msgspec.Struct, frozen=True):
    """A node as `run.json` lists it, under `nodes`."""

    number: int
    name: str


class _Description(msgspec.Struct):
    nodes: tuple[ListedNode, ...] = ()


def listed(run_dir: Path) -> dict[int, str]:
    """Return the names of the nodes that `run.json` lists, by number; empty if it lists none."""
    try:
        found = msgspec.json.decode((run_dir / RUN_FILE).read_bytes(), type=_Description).nodes
    except (OSError, msgspec.MsgspecError):
        return {}
    return {each.number: each.name for each in found}


def folders(run_dir: Path) -> dict[int, Path]:
    """Return the folder of each node of a run, by number: those that are listed or are there.

    Raises `event_files.TraceError` if the run directory cannot be read.
    """
    with event_files.reading(run_dir):
        there = merging.folders(run_dir)
    return there | {node: merging.folder_of(run_dir, node) for node in listed(run_dir)}


def merged(run_dir: Path) -> MergedTrace | None:
    """Return the merged trace of a run directory; None if the run has one node.

    Raises FileNotFoundError or `event_files.TraceError` if the trace of node 0 cannot be read.
    """
    found = folders(run_dir)
    return MergedTrace(found) if len(found) > 1 else None
