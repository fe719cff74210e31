"""Real jobs on several nodes: the same command on each of them."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_recover.authentication import key as keys
from tests.nodes.nodes import Network, Program
from tests.system.jobs import DEADLINE_S, Job, Outcome, command_of


def run_on_nodes(
    network: Network,
    slots: Sequence[int],
    node_timeout_s: float,
    job: Job,
    run_dir: Path,
    data: Path,
    *,
    deadline_s: float = DEADLINE_S,
    quiet: bool = False,
    environment: Mapping[str, str] | None = None,
    **settings: Any,
) -> Outcome:
    """Run a job on nodes with so many slots, to the ends of all its launchers.

    `run_dir` has to be in the folder that the nodes share, and `data` is copied there. `settings`: as `command_of` takes them.
    """
    for file in data.parent.glob(f"{data.name}.*"):
        shutil.copy(file, network.shared)
    key_file = network.shared / "key"
    key_file.write_text(keys.make_key().hex())
    key_file.chmod(0o600)
    launchers = []
    for node, num_slots in zip(network, slots, strict=True):
        meeting = (
            "--nnodes", str(len(slots)), "--nproc-per-node", str(num_slots), "--node-rank", str(node.number), "--master-addr",
            network[0].name, "--key-file", str(key_file), "--node-timeout", f"{node_timeout_s:g}",
        )  # fmt: skip
        placed = dataclasses.replace(job, run_flags=(*job.run_flags, *meeting))
        launchers.append(node.start(command_of(placed, run_dir, network.shared / data.name, **settings), environment))
    line = shlex.join(launchers[0].command)
    if not quiet:
        print(line)
    until = time.monotonic() + deadline_s
    codes, left = {}, ""
    try:
        for number, launcher in enumerate(launchers):  # that of a node without power has ended
            codes[number] = launcher.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        said = _said(launchers)[-6000:]
        raise AssertionError(f"no end of n{number} after {deadline_s:g} s; run it again with:\n{line}\n{said}") from None
    try:
        network.assert_nothing_left()
    except AssertionError as error:
        left = str(error)
    return Outcome(codes[0], _said(launchers), run_dir, line, codes, left)


def _said(launchers: Sequence[Program]) -> str:
    return "\n".join(f"--- n{number}:\n{launcher.text()}" for number, launcher in enumerate(launchers))
