"""One row of the benchmark table, made from repeated measurements.

A benchmark is a module of this package with a function `rows() -> Iterable[Row]`. `benchmarks.run`
finds it, runs it and joins the rows of all benchmarks into one table and `bench.json`.
"""

from __future__ import annotations

import contextlib
import operator
import signal
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType({
    "<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt, "==": operator.eq,
})  # fmt: skip


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured quantity."""

    name: str
    value: float
    """The number to quote: the median over the runs unless `name` has another word, such as
    "worst"."""
    unit: str
    baseline: str = ""
    """The other side of the comparison in words, such as `unmodified Megatron DP under
    torchrun`."""
    runs: int
    min: float
    median: float
    max: float
    goal: str = ""
    """A comparison with a number, such as ``<= 2``; empty if there is no promise."""
    met: bool | None = None
    """True if `value` meets the goal; None without a goal."""


def row(
    name: str, values: Sequence[float], unit: str, *, baseline: str = "", goal: str = "", value: float | None = None
) -> Row:
    """Summarise one quantity measured in several runs.

    `value` replaces the median as the number to quote. Raises ValueError if there are no values, or
    if the goal is no comparison.
    """
    if not values:
        raise ValueError(f"benchmark {name!r} measured nothing")
    median = statistics.median(values)
    quoted = median if value is None else value
    met = None
    if goal:
        comparison, _, limit = goal.partition(" ")
        if comparison not in COMPARISONS:
            raise ValueError(f"benchmark {name!r}: goal {goal!r} must be one of {', '.join(COMPARISONS)} and a number")
        met = COMPARISONS[comparison](quoted, float(limit))
    return Row(
        name=name, value=quoted, unit=unit, baseline=baseline, runs=len(values), min=min(values), median=median,
        max=max(values), goal=goal, met=met,
    )  # fmt: skip


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Delay signals that end a benchmark.

    Jobs run in sessions of their own, so a job that nobody ends would train for hours.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end(*processes: subprocess.Popen[Any], patience_s: float = 30.0) -> None:
    """Request jobs to end, and kill those left after `patience_s` seconds.

    Signals that end the benchmark wait meanwhile.
    """
    with undisturbed():
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(timeout=patience_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
