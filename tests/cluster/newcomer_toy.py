"""A toy whose newcomers do not train: they note how they were started, and then wait, or break as the test says.

The folder `sums_dir` has a file `mode`: `wait`, `abort`, `abort NODE-SLOT` (there alone) or `exit N`.
Each rank leaves `slot-N-S-R.json` there (node, slot, replica): how it was started, and which former users of its slot lived.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import msgspec

from megatron_recover.config import inherited_descriptor, rank_context
from megatron_recover.control_plane import listening, rendezvous
from megatron_recover.host.process_stat import state_of
from megatron_recover.progress_page import DESCRIPTOR as PAGE
from megatron_recover.trace import node_clock, ring
from tests.cluster import toy

DESCRIPTORS = (listening.LEADER, rendezvous.DESCRIPTOR, ring.DESCRIPTOR, node_clock.DESCRIPTOR, PAGE)


def main() -> None:
    """Run one rank."""
    context, folder = rank_context(), Path(json.loads(sys.argv[1])["sums_dir"])
    assert context is not None
    if not context.dry_run:
        slot = f"{os.environ['GROUP_RANK']}-{context.clock_place - node_clock.FIRST_RANK}"
        former = [json.loads(file.read_text())["pid"] for file in folder.glob(f"slot-{slot}-*.json")]
        note = {
            "pid": os.getpid(),
            "context": msgspec.to_builtins(context),
            "descriptors": [name for name in DESCRIPTORS if inherited_descriptor(name) is not None],
            "lived": [pid for pid in former if state_of(pid) not in ("", "Z", "X")],
            "at": time.monotonic(),
        }
        file = folder / f"slot-{slot}-{context.replica}.json"
        file.with_suffix(".new").write_text(json.dumps(note))
        file.with_suffix(".new").rename(file)
    if not context.newcomer:
        toy.main()
        return
    print(f"newcomer {context.replica} rank {context.rank}", flush=True)
    match (folder / "mode").read_text().split():
        case ["abort"]:
            os.abort()
        case ["abort", where] if where == slot:
            os.abort()
        case ["exit", code]:
            sys.exit(int(code))
        case _:
            time.sleep(3600)


if __name__ == "__main__":
    main()
