"""A real job whose forwards take a fixed wall time, with faults that strike it, and its trace."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.system.jobs import ROOT, Job


def run(
    job: Job, folder: pathlib.Path, data: pathlib.Path, chaos: str, pace_s: float, *flags: str, deadline_s: float
) -> list[dict[str, Any]]:
    """Train to the end in the new `folder`; return the events of the run.

    `folder / "run"` is the run directory. `data`: see `tests.system.jobs.text_data`. `chaos`: the
    content of a chaos file. `flags`: more flags of `scripts/paced_pretrain.py`.
    """
    folder.mkdir()
    chaos_file = folder / "chaos.toml"
    chaos_file.write_text(chaos)
    command = [
        sys.executable, "-m", "megatron_recover", "run", "--replicas", str(job.replicas), "--lanes", str(job.lanes),
        "--run-dir", str(folder / "run"), "--chaos", str(chaos_file), "--", str(ROOT / "scripts" / "paced_pretrain.py"),
        *job.megatron_flags(data, None), "--paced-forward-s", str(pace_s), *flags,
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=deadline_s)
    return [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]


def counted(events: Iterable[dict[str, Any]]) -> Counter[str]:
    """Count events by name, and silent ranks by verdict (`rank_silent hung`).

    `accused` counts silent ranks with another verdict than slow, and `lost` the lost replicas.
    """
    found: Counter[str] = Counter()
    for event in events:
        name = event["event"]
        if name == "rank_silent":
            name += f" {event['verdict']}"
            found["accused"] += event["verdict"] != "slow"
        found[name] += 1
        found["lost"] += len(event.get("losses", ()))
    return found
