"""Jobs with `--step-batch-size-schedule`, which therefore have no `--global-batch-size`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_recover.flags import value_of

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def first_batch(schedule: str) -> int | None:
    """Return the batch size, in samples, that a schedule begins with; None if it cannot be read.

    Entries may come in any order, with commas or spaces between them, as upstream reads them
    (`StepBatchsizeNumMicroBatchesCalculator`). Upstream checks the thresholds.
    """
    try:
        return min(_entries(schedule))[1]
    except (ValueError, OverflowError):
        return None


def least_batch(schedule: str) -> int:
    """Return the smallest batch size of a schedule, in samples.

    Raises ValueError or OverflowError if the schedule cannot be read.
    """
    return min(batch for _, batch in _entries(schedule))


def _entries(schedule: str) -> list[tuple[int, int]]:
    """Return threshold and batch size of each entry. Raises ValueError or OverflowError."""
    pairs = [entry.split(":", 1) for entry in schedule.replace(",", " ").split()]
    return [(_number(threshold), _number(batch)) for threshold, batch in pairs]


def _number(text: str) -> int:
    """Return the number in `text`, such as `2.4B`. Raises ValueError or OverflowError."""
    unit = _UNITS.get(text[-1:].upper())
    return int(float(text[:-1]) * unit) if unit else int(float(text))


def take_default_batch(args: Namespace, argv: Sequence[str], defaults: Mapping[str, Any], *, lanes: int, replicas: int) -> None:
    """Set the default batch of a job with a schedule, and of its evaluations, in validated `args`.

    The default is one microbatch of each data-parallel rank. Upstream counts its iterations of the
    learning rate's schedule, its evaluations and its data sets in such batches. In a replica
    upstream counts lanes alone. `argv` are the words of the command line, `defaults` the script's
    `args_defaults`; a batch that one of them gives stays. Without a schedule `preflight` requires
    `--global-batch-size`.
    """

    def is_given(name: str) -> bool:
        return value_of(argv, "--" + name.replace("_", "-")) is not None or defaults.get(name) is not None

    if args.step_batch_size_schedule is None or is_given("global_batch_size"):
        return
    args.global_batch_size = args.micro_batch_size * lanes * replicas
    if not is_given("eval_global_batch_size"):
        args.eval_global_batch_size = args.global_batch_size
