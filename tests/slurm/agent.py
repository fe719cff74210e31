"""Stands in for `megatron-recover run` on a node of a batch job: notes how it was started; runs a toy job on the first node.

``python -m tests.slurm.agent <flags of run>``. On other nodes it ends with the run, as an agent does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import msgspec

from megatron_recover.flags import value_of
from megatron_recover.observe.outcome import outcome
from tests.cluster.jobs import ROOT, Spec, command


def main() -> None:
    """Become the toy job, or wait for its end."""
    argv, node = sys.argv[1:], os.environ["SLURMD_NODENAME"]
    run_dir, key = Path(value_of(argv, "--run-dir") or ""), value_of(argv, "--key-file")
    note = {
        "argv": argv,
        "parent": Path(f"/proc/{os.getppid()}/comm").read_text().strip(),
        "key": (Path(key).read_text(), os.stat(key).st_mode & 0o777) if key else None,
    }
    run_dir.with_name(f"{node}-{run_dir.name}.json").write_text(json.dumps(note))
    print(f"agent on {node}", flush=True)
    endpoint = value_of(argv, "--rdzv-endpoint") or node
    if endpoint.startswith(f"{node}:") or endpoint == node or os.environ.get("SLURM_ARRAY_TASK_ID") == "0":
        spec = msgspec.json.decode(value_of(argv, "--toy") or "{}", type=Spec)
        words = command(msgspec.structs.replace(spec, run_dir=str(run_dir)))
        os.chdir(ROOT)
        os.execv(words[0], words)
    while outcome(run_dir).exit_code is None:
        time.sleep(0.2)


if __name__ == "__main__":
    main()
