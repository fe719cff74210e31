"""The RUN_DIR of commands that look at a run: what is said where there is no trace, and what `report` and `top` take."""

from __future__ import annotations

from pathlib import Path

from megatron_recover.trace import EVENTS_FILE

_NAMED = 3


def run_folder(path: str) -> Path:
    """The folder of a run, also where its events.jsonl is named instead."""
    place = Path(path)
    return place.parent if place.name == EVENTS_FILE else place


def no_trace(path: Path) -> str:
    """What is wrong with a path at which there is no trace, with the first few inside it (as in the folder of a demo)."""
    folder = path.parent if path.name == EVENTS_FILE else path
    try:
        inside = sorted(str(one.parent) for one in folder.glob(f"*/{EVENTS_FILE}"))
    except OSError:  # it cannot be looked into
        inside = []
    if not inside:
        return f"no trace at {path}; give the --run-dir of a run"
    others = f" ({len(inside) - _NAMED} more beside them)" if len(inside) > _NAMED else ""
    return f"no trace at {path}; did you mean {' or '.join(inside[:_NAMED])}?{others}"
