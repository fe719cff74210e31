"""Draws the tables of the state machines for docs/design/states.md, straight from the code.

python -m scripts.draw.diagram > docs/design/states.md
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megatron_recover.core import coordinator, rank, replica


def page() -> str:
    """Return the content that docs/design/states.md must have."""
    parts = [
        "# States",
        "Drawn from the tables of the machines by `python -m scripts.draw.diagram > docs/design/states.md`; a test "
        "keeps it current.\n"
        "Inputs that a table does not list for a phase are dropped: they are late, repeated, or mean nothing there. "
        "One input can lead through several phases: a replica whose vote is the last commits at once (working to idle), "
        "and with the last status it may plan and vote.",
        "## One replica (`core/replica.py`)",
        _phases(),
        _replica_diagram(),
        "The diagram leaves out `Stop`, which leads from every phase to stopped.",
        _handlers({kind: row.handler for rows in replica.TABLE.values() for kind, row in rows.items()}),
        _replica_table(),
        "## One rank (`core/rank.py`)",
        "No phases: what matters is which generation is promised, and which order the training thread obeys.",
        _handlers(rank.TABLE),
        "## Membership (`core/coordinator.py`)",
        "No phases but before generation 1, during the job, and over. Then every input is ignored.",
        _handlers(coordinator.TABLE),
    ]
    return "\n\n".join(parts) + "\n"


def _phases() -> str:
    source = inspect.getsource(replica.ReplicaPhase).splitlines()
    docs = [line.strip().strip('"') for line in source if line.strip().startswith('"""')][1:]
    lines = [f"- **{phase.value}**: {text}" for phase, text in zip(replica.ReplicaPhase, docs, strict=True)]
    return "\n".join(lines)


def _replica_diagram() -> str:
    """Return the diagram of the edges that change the phase, without edges to `stopped`."""
    edges: dict[tuple[str, str], list[str]] = {}
    for phase, rows in replica.TABLE.items():
        for kind, row in rows.items():
            for after in sorted(row.leads_to - {phase}, key=lambda item: item.value):
                edges.setdefault((phase.value, after.value), []).append(kind.__name__)
    lines = [f"    {a} --> {b}: {', '.join(sorted(kinds))}" for (a, b), kinds in edges.items() if b != "stopped"]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> joining", *lines, "```"])


def _replica_table() -> str:
    kinds = sorted({kind for rows in replica.TABLE.values() for kind in rows}, key=lambda kind: kind.__name__)
    phases = list(replica.TABLE)
    lines = ["| input | " + " | ".join(phase.value for phase in phases) + " |", "|---" * (len(phases) + 1) + "|"]
    for kind in kinds:
        cells = [_cell(phase, replica.TABLE[phase].get(kind)) for phase in phases]
        lines.append(f"| `{kind.__name__}` | " + " | ".join(cells) + " |")
    return "Where each input leads (`.`: stays, empty: dropped):\n\n" + "\n".join(lines)


def _cell(phase: replica.ReplicaPhase, row: replica.Row | None) -> str:
    if row is None:
        return ""
    others = sorted(item.value for item in row.leads_to - {phase})
    return ", ".join(["."] * (phase in row.leads_to) + others)


def _handlers(table: Mapping[type, Callable[..., Any]]) -> str:
    lines = ["| input | what it does |", "|---|---|"]
    for kind, handler in table.items():
        lines.append(f"| `{kind.__name__}` | {' '.join((inspect.getdoc(handler) or '').split())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
