"""The RUN_DIR argument of commands that read a run."""

from __future__ import annotations

from pathlib import Path

from megatron_recover.trace import EVENTS_FILE

_NAMED = 3


def run_folder(path: str) -> Path:
    """Return the folder of a run, given the folder or its events.jsonl."""
    place = Path(path)
    return place.parent if place.name == EVENTS_FILE else place


def no_trace(path: Path) -> str:
    """Return the message for a path without a trace.

    The message names the first few traces below the path, as in the folder of a demo.
    """
    folder = path.parent if path.name == EVENTS_FILE else path
    try:
        inside = sorted(str(one.parent) for one in folder.glob(f"*/{EVENTS_FILE}"))
    except OSError:  # the folder cannot be read
        inside = []
    if not inside:
        return f"no trace at {path}; give the --run-dir of a run"
    others = f" ({len(inside) - _NAMED} more beside them)" if len(inside) > _NAMED else ""
    return f"no trace at {path}; did you mean {' or '.join(inside[:_NAMED])}?{others}"
