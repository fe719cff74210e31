"""Memory of a rank with FSDP2, compared with DDP over lanes and with unmodified Megatron's FSDP2.

Measured as in `memory`: the slope of private memory between two sizes of the model, in bytes per
parameter and rank, fp32 and `fast`, in two replicas of two lanes. Unmodified Megatron runs one such
replica under torchrun: FSDP2 over two ranks shards as ours does. The promise is one shard of the
gradient more than that, 4 bytes per parameter divided by the number of lanes: the result of the sum
over replicas, which is out of place.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Mapping

from benchmarks import memory
from benchmarks.common import Row, row
from benchmarks.overhead import commands, ranks
from tests.system.jobs import FSDP2, Job, text_data

RUNS, SMALL, LARGE = 3, memory.SMALL, memory.LARGE
JOB = Job(replicas=2, lanes=2, microbatches=2, steps=10_000, determinism="fast", bucket_elements=40_000_000)
SHARD_BYTES = 4 / JOB.lanes
"""Size of one shard of the gradient, in bytes per parameter."""
OURS, DDP, UPSTREAM = "ours", "ours, DDP", "upstream's FSDP2"


def num_parameters(hidden: int) -> int:
    """Return the number of parameters of the benchmark's GPT, whose output layer has its own."""
    return memory.num_parameters(hidden) + memory.VOCABULARY * hidden


def measured(hidden: int, data: pathlib.Path, folder: pathlib.Path) -> dict[str, float]:
    """Return the private bytes of a rank of each side, for a model of this width."""
    size = ("--hidden-size", str(hidden), "--num-layers", str(memory.LAYERS))
    sharded = dataclasses.replace(JOB, extra=(*FSDP2, *size))
    whole = dataclasses.replace(JOB, extra=(*FSDP2[1:], *size))
    alone = dataclasses.replace(sharded, replicas=1, microbatches=JOB.microbatches // JOB.replicas)
    sides = {
        OURS: (commands(sharded, data, folder, f"ours-{hidden}")[0], JOB.replicas * ranks(JOB)),
        DDP: (commands(whole, data, folder, f"ddp-{hidden}")[0], JOB.replicas * ranks(JOB)),
        UPSTREAM: (commands(alone, data, folder, f"upstream-{hidden}")[1], ranks(JOB)),
    }
    return {side: memory.private_bytes(command, num_ranks) for side, (command, num_ranks) in sides.items()}


def slopes(data: pathlib.Path, folder: pathlib.Path) -> Mapping[str, float]:
    """Return the bytes per parameter and rank of each side, in one run."""
    folder.mkdir()
    small, large = measured(SMALL, data, folder), measured(LARGE, data, folder)
    return {side: (large[side] - small[side]) / (num_parameters(LARGE) - num_parameters(SMALL)) for side in small}


def rows() -> list[Row]:
    """Return bytes per parameter, against both baselines."""
    with tempfile.TemporaryDirectory(prefix="megatron-recover-bench-") as name:
        folder = pathlib.Path(name)
        data = text_data(folder)
        found = [slopes(data, folder / str(run)) for run in range(RUNS)]
    upstream, ddp = "unmodified Megatron's FSDP2 over as many ranks under torchrun", "DDP over as many lanes, in our replicas"
    ours = ", ".join(f"{each[OURS]:.2f}" for each in found)
    return [
        row(f"FSDP2: memory a parameter and rank, 2 lanes (fp32, fast; ours {ours} bytes)",
            [each[OURS] / each[UPSTREAM] for each in found], "ratio", baseline=upstream),
        row("FSDP2: memory added a parameter and rank, 2 lanes (fp32, fast)",
            [each[OURS] - each[UPSTREAM] for each in found], "bytes", baseline=upstream, goal=f"<= {SHARD_BYTES:g}"),
        row("FSDP2: memory a parameter and rank, 2 lanes (fp32, fast), against DDP",
            [each[OURS] / each[DDP] for each in found], "ratio", baseline=ddp, goal="< 1"),
    ]  # fmt: skip
