"""What waits for the agent's eye waits for more than two of its looks."""

from __future__ import annotations

from megatron_recover.cluster import launcher
from megatron_recover.deadlines import Deadlines


def test_two_looks_are_shorter_than_what_waits_for_them() -> None:
    deadlines = Deadlines.of()
    assert min(deadlines.grace_s, deadlines.gap_s, deadlines.stopped_s, deadlines.oom_s) > 2 * launcher._POLL_S
