"""How fast each member computes, as all members believe it: a pure function of the records that were committed.

Each voter says in its vote how long one of its microbatches took (`Record.paces`); the committed record has what all voters
said, and every member learns from the same records in the same order. So all believe the same, whoever committed a record by
votes and whoever adopted it, and plan the same quotas. It never decides quotas (`core/quota.py`). Whole numbers only, so that
unlike machines cannot round apart.

Note [Noise]
    Quotas that follow every measurement would never be still, so three things stand between a measurement and a quota.
    (1) The estimate of a member is the mean of its last measurements (`MEMORY`), which noise moves little. (2) A measurement
    that is far from the estimate (`FAR`) changes nothing; two in a row that are near each other replace it. So a pause of one
    step is no straggler, a first step that warms up does not count, and a member that slows down twofold is found out in two
    steps. (3) What is believed stays as it is until the estimate of a member has left what is believed of it by more than
    `TOLERANCE`; then the estimates of all are believed. Members that are believed to be within `TOLERANCE` of their median are
    alike.
    `tests/core/test_speed.py` has the figures.

Note [Members that compute nothing]
    A member may be so slow that its quota is 0: its one microbatch would take longer than the whole shares of the others. Then
    nobody measures it. Its estimate shrinks a little with every step (`FORGETTING`), as if it recovered, until it gets a
    microbatch again, and one measurement near the old ones puts the old estimate back.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec.structs import replace

from megatron_recover.core.values import Record, ReplicaId, Value

MEMORY = 16
"""Measurements in the mean."""
FAR = 4
"""A measurement is far from a number if it is off by more than a FAR-th of it."""
TOLERANCE = 12
"""An estimate has left a number if it is off by more than a TOLERANCE-th of it (8 %)."""
FORGETTING = 64
"""The estimate of a member that computes nothing loses a FORGETTING-th of itself a step."""


class Estimate(Value, frozen=True):
    """What the measurements of one replica say."""

    replica: ReplicaId
    pace_ns: int = 0
    """Nanoseconds a microbatch; 0 while nothing is known."""
    num: int = 0
    """Measurements in it, up to `MEMORY`."""
    odd_ns: int = 0
    """The last measurement, if it was far from `pace_ns`; of a member that computes nothing its estimate before; else 0."""


class Speeds(Value, frozen=True):
    """What all members believe after the same records."""

    num_steps: int = 0
    """Records that were learned from."""
    estimates: tuple[Estimate, ...] = ()
    """Of those voters of the last record that said something, by replica."""
    believed: tuple[tuple[ReplicaId, int], ...] = ()
    """(replica, nanoseconds a microbatch) as of the last time that they changed, by replica; empty: nothing told them apart."""


UNKNOWN = Speeds()
"""Before the first record."""


def said(speeds: Speeds, replica: ReplicaId, pace_ns: int) -> tuple[tuple[ReplicaId, int], ...]:
    """`Record.paces` of a vote in a training step. A replica that was never measured says nothing."""
    known = any(estimate.replica == replica for estimate in speeds.estimates)
    return ((replica, pace_ns),) if pace_ns or known else ()


def learn(speeds: Speeds, record: Record) -> Speeds:
    """Take a committed record, once: one that was learned from before changes nothing. Only training steps have paces."""
    if record.step < speeds.num_steps:
        return speeds
    if not record.paces:
        return replace(speeds, num_steps=record.step + 1)
    known = {estimate.replica: estimate for estimate in speeds.estimates}
    estimates = tuple(_estimated(known.get(replica, Estimate(replica)), pace) for replica, pace in sorted(record.paces))
    return Speeds(record.step + 1, estimates, _believed(speeds, estimates))


def paces(speeds: Speeds, members: Sequence[ReplicaId]) -> tuple[int, ...]:
    """Nanoseconds a microbatch of each member; all 1 where they are alike. One that nobody knows has the others' median."""
    roster = frozenset(members)
    believed = {replica: pace for replica, pace in speeds.believed if replica in roster}
    if not believed:
        return (1,) * len(members)
    usual = statistics.median_low(believed.values())
    if all(_is_near(pace, usual, TOLERANCE) for pace in believed.values()):
        return (1,) * len(members)
    return tuple(believed.get(member, usual) for member in members)


def _estimated(before: Estimate, measured: int) -> Estimate:
    """See Note [Noise], (1) and (2)."""
    pace, num, odd = before.pace_ns, before.num, before.odd_ns
    if not measured:  # Note [Members that compute nothing]
        return replace(before, pace_ns=max(1, pace - pace // FORGETTING), num=1, odd_ns=odd or pace) if pace else before
    if pace and _is_near(measured, pace, FAR):
        num = min(num + 1, MEMORY)
        return replace(before, pace_ns=pace + (measured - pace) // num, num=num, odd_ns=0)
    if odd and _is_near(measured, odd, FAR):
        return replace(before, pace_ns=(odd + measured) // 2, num=2, odd_ns=0)
    return replace(before, odd_ns=measured)


def _believed(speeds: Speeds, estimates: Sequence[Estimate]) -> tuple[tuple[ReplicaId, int], ...]:
    """See Note [Noise], (3)."""
    now = {estimate.replica: estimate.pace_ns for estimate in estimates if estimate.pace_ns}
    if not now:
        return speeds.believed
    before = dict.fromkeys(now, statistics.median_low(now.values())) | dict(speeds.believed)
    if all(_is_near(pace, before[replica], TOLERANCE) for replica, pace in now.items()):
        return speeds.believed
    return tuple(now.items())


def _is_near(one: int, other: int, part: int) -> bool:
    """Whether it differs from the other by at most a `part`-th of that."""
    return abs(one - other) * part <= other
