"""Parts of the failure-free overhead: thread CPU time of each part of a rank, per step.

    python -m benchmarks.parts

It runs the small step of `overhead` once. It judges nothing, so it is no part of `make bench`.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile

from benchmarks.overhead import CASES, commands, shaped
from benchmarks.timed_pretrain import MARK, STEPS
from tests.system.jobs import ROOT, text_data


def main() -> None:
    """Run the job and print the table."""
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        job = shaped(CASES[-1], steps=STEPS)
        command, _ = commands(job, text_data(folder), folder, "run")
        command[command.index("--") + 1] = str(ROOT / "benchmarks" / "timed_pretrain.py")
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr, timeout=300)
        logs = [(folder / "run" / "logs" / f"replica-0-rank-{rank}.log").read_text() for rank in (0, job.pp - 1)]
    first, last = (json.loads(log.split(MARK)[1].splitlines()[0]) for log in logs)
    print("| part | first stage, ms a step | last stage |\n|---|---|---|")
    for part in sorted({*first, *last}, key=lambda part: -max(first.get(part, 0), last.get(part, 0))):
        print(f"| {part} | {first.get(part, 0):.2f} | {last.get(part, 0):.2f} |")


if __name__ == "__main__":
    main()
