"""Members' speeds as all members believe them: a pure function of the committed records.

Each vote carries the time that a microbatch took the voter (`Record.paces`). A committed record has
the times of all voters, and every member learns from the same records in the same order. So all
members believe the same and plan the same quotas, whether they committed or adopted a record.

This module never decides quotas (`core/quota.py`). It uses whole numbers only, since floating point
might round differently on different machines.

Note [Noise]
    Quotas that follow every measurement would never settle. Three rules prevent that.

    (1) The estimate of a member is a running mean, which noise moves little. The n-th measurement
    has the weight 1/n in the mean, and all from the `MEMORY`-th on have 1/`MEMORY`.

    (2) One measurement far from the estimate (`FAR`) changes nothing. Two in a row that are near
    each other replace the estimate. So a pause of one step makes no straggler, and a first step
    that warms up does not count. A member that slows down twofold is known after two steps.

    (3) Beliefs stay until the estimate of a member differs from the belief by more than
    1/`TOLERANCE` of the belief. Then the estimates of all members are believed. Members count as
    alike if all their beliefs are within 1/`TOLERANCE` of the median.

    `tests/core/test_speed.py` has the figures.

Note [Members that compute nothing]
    A member may be so slow that its quota is 0: its one microbatch would take longer than the whole
    shares of the others. Then nobody measures it. Its estimate shrinks a little with every step
    (`FORGETTING`), as if the member recovered, until the member gets a microbatch again. If its
    measurement is then far from the shrunk estimate and near the old one, the new estimate is the
    mean of the measurement and the old estimate.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec.structs import replace

from megatron_recover.core.memo import newest_kept
from megatron_recover.core.values import Record, ReplicaId, Value

MEMORY = 16
"""A measurement near the estimate has at least the weight 1/MEMORY in the mean."""
FAR = 4
"""A measurement is far from a number if it differs by more than 1/FAR of the number."""
TOLERANCE = 12
"""An estimate has left a number if it differs by more than 1/TOLERANCE of the number (8 %)."""
FORGETTING = 64
"""The estimate of a member that computes nothing shrinks by 1/FORGETTING per step."""


class Estimate(Value, frozen=True):
    """The estimate that the measurements of one replica give."""

    replica: ReplicaId
    pace_ns: int = 0
    """Nanoseconds per microbatch; 0 while nothing is known."""
    num: int = 0
    """Number of measurements in the mean; stays at `MEMORY`. 1 while the estimate shrinks."""
    odd_ns: int = 0
    """The last measurement if it was far from `pace_ns`, else 0.

    For a member that computes nothing: its estimate before it began to shrink, unless the last
    measurement was far.
    """


class Speeds(Value, frozen=True):
    """Estimates and beliefs of all members after the same records."""

    num_steps: int = 0
    """Number of steps whose records were learned from."""
    estimates: tuple[Estimate, ...] = ()
    """Estimates of the voters that reported a pace in the last record with paces, by replica."""
    believed: tuple[tuple[ReplicaId, int], ...] = ()
    """(replica, nanoseconds per microbatch) as last believed, by replica; empty: all are alike."""


UNKNOWN = Speeds()
"""Speeds before the first record."""


def reported_paces(speeds: Speeds, replica: ReplicaId, pace_ns: int) -> tuple[tuple[ReplicaId, int], ...]:
    """Return `Record.paces` for a vote in a training step; empty for a replica never measured."""
    known = any(estimate.replica == replica for estimate in speeds.estimates)
    return ((replica, pace_ns),) if pace_ns or known else ()


@newest_kept
def learn(speeds: Speeds, record: Record) -> Speeds:
    """Return the speeds after a committed record; unchanged if it was learned from before.

    Only training steps have paces. A record without paces only counts.
    """
    if record.step < speeds.num_steps:
        return speeds
    if not record.paces:
        return replace(speeds, num_steps=record.step + 1)
    known = {estimate.replica: estimate for estimate in speeds.estimates}
    estimates = tuple(_estimated(known.get(replica, Estimate(replica)), pace) for replica, pace in sorted(record.paces))
    return Speeds(record.step + 1, estimates, _believed(speeds, estimates))


@newest_kept
def paces(speeds: Speeds, members: Sequence[ReplicaId]) -> tuple[int, ...]:
    """Return nanoseconds per microbatch of each member, or all 1 if they are alike or unknown.

    An unknown member has the median of the others.
    """
    roster = frozenset(members)
    believed = {replica: pace for replica, pace in speeds.believed if replica in roster}
    if not believed:
        return (1,) * len(members)
    usual = statistics.median_low(believed.values())
    if all(_is_near(pace, usual, TOLERANCE) for pace in believed.values()):
        return (1,) * len(members)
    return tuple(believed.get(member, usual) for member in members)


def _estimated(before: Estimate, measured: int) -> Estimate:
    """Return the new estimate by rules (1) and (2) of Note [Noise].

    `measured` is 0 for a member that computed nothing: then a known estimate shrinks.
    """
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
    """Return the new beliefs by rule (3) of Note [Noise]."""
    now = {estimate.replica: estimate.pace_ns for estimate in estimates if estimate.pace_ns}
    if not now:
        return speeds.believed
    before = dict.fromkeys(now, statistics.median_low(now.values())) | dict(speeds.believed)
    if all(_is_near(pace, before[replica], TOLERANCE) for replica, pace in now.items()):
        return speeds.believed
    return tuple(now.items())


def _is_near(one: int, other: int, part: int) -> bool:
    """Return whether `one` differs from `other` by at most 1/`part` of `other`."""
    return abs(one - other) * part <= other
