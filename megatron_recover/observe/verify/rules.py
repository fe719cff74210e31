"""List all rules, by the invariant that they judge.

A rule trusts the order of the lines (cause before effect, see `trace`). It does not trust what a
process reports about its own correctness.
"""

from __future__ import annotations

from megatron_recover.observe.verify import (
    agreement,
    bounded_waits,
    decided_once,
    exactly_once,
    fencing,
    least_work,
    no_corruption,
    single_history,
)
from megatron_recover.observe.verify.rule import Rule

RULES: tuple[tuple[str, str, tuple[type[Rule], ...]], ...] = (
    ("INV-1", "exactly once", exactly_once.RULES),
    ("INV-2", "agreement", agreement.RULES),
    ("INV-3", "no corruption", no_corruption.RULES),
    ("INV-4", "decided once", decided_once.RULES),
    ("INV-5", "fencing", fencing.RULES),
    ("INV-6", "single history", single_history.RULES),
    ("INV-7", "least work", least_work.RULES),
    ("INV-8", "bounded waits", bounded_waits.RULES),
)
"""Number, name and rules of every invariant that a trace can show."""
