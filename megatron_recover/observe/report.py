"""What a run leaves for its readers beside the trace: `summary.json` and `loss.svg`, rebuilt from the trace at any time."""

from __future__ import annotations

from pathlib import Path

from megatron_recover.observe import plot, summary


def write(run_dir: str | Path, against: str | Path | None = None) -> summary.Summary:
    """Write both files of a run directory, compared with a reference run if one is given; returns the summary."""
    result = summary.write(run_dir, against)
    plot.write(run_dir, against)
    return result
