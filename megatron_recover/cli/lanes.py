"""The number of lanes of a job on GPUs whose user gives the number of processes only.

It is the fewest over which experts can be spread and with which a rank fits into its GPU by the
estimate of `megatron-recover plan`. An estimate refuses nothing: where none fits, or where the
model cannot be measured, the job starts with the fewest, and a line says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from megatron_recover.cli.plan import ScriptError, gigabytes, read_sizes
from megatron_recover.host.gpus import gpu_bytes
from megatron_recover.megatron.launch.preflight import shape_of
from megatron_recover.megatron.layout.choice import USABLE
from megatron_recover.megatron.layout.memory import memory
from megatron_recover.megatron.layout.sizes import Layout, Sizes


def lanes_that_fit(script: Sequence[str], flags: Sequence[str], num_processes: int) -> tuple[int, str] | None:
    """Return the number of lanes of each replica, and a line for the user about it.

    `script` is the path of the script, or `-m` and a module. None: there is nothing to choose,
    since torch sees no GPU, or the processes fit one number of lanes at most. Raises ValueError as
    `shape_of` does.
    """
    shape = shape_of(flags)
    numbers = [
        shape.lanes * factor
        for factor in range(1, num_processes // shape.num_ranks + 1)
        if num_processes % (shape.num_ranks * factor) == 0
    ]
    if len(numbers) < 2 or not (seen := gpu_bytes()[:num_processes]):
        return None
    try:
        first, *others = script
        sizes = read_sizes(first, [*others, *flags], "run")
        needed = {number: _bytes(sizes, shape, number) for number in numbers}
    except (ValueError, ScriptError, OSError) as error:
        reason = str(error).partition("\n")[0]
        return shape.lanes, (
            f"{_lanes(shape.lanes)} a replica, the fewest over which experts can be spread: plan cannot estimate the memory "
            f"of a rank ({reason}); give --lanes for another number"
        )
    return _choice(needed, min(seen))


def _choice(needed: dict[int, int], available: int) -> tuple[int, str]:
    """Return the chosen number of lanes and the line about it; `needed` has bytes by number."""
    fitting = (number for number, size in needed.items() if size <= USABLE * available)
    lanes = next(fitting, None)
    figures = ", ".join(
        f"{gigabytes(size)} GB with {_lanes(number)}"
        for number, size in itertools.takewhile(lambda item: lanes is None or item[0] <= lanes, needed.items())
    )
    room = f"{gigabytes(USABLE * available)} of the {gigabytes(available)} GB of a GPU"
    estimate = f"by plan's estimate a rank needs {figures}, and may use {room}"
    if lanes is None:
        fewest = min(needed)
        return fewest, (
            f"WARNING: {_lanes(fewest)} a replica, though none fits: {estimate}; `megatron-recover plan` compares other layouts"
        )
    return lanes, f"{_lanes(lanes)} a replica, the fewest that fit: {estimate}"


def _bytes(sizes: Sizes, shape: Layout, lanes: int) -> int:
    """Return the bytes of a rank, also in a recovery."""
    return memory(sizes, msgspec.structs.replace(shape, lanes=lanes)).recovery


def _lanes(number: int) -> str:
    return f"{number} lane{'s' if number > 1 else ''}"
