"""A member dies or stands still before, during or after a sum: nobody hangs, no input changes, the survivors go on together.

The test is the coordinator: it sees the victim's end (or, for SIGSTOP, is told just before), retires the generation on the
survivors, opens the next one among them, and lets them sum again.
"""

from __future__ import annotations

import random
import signal
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.control_plane.partners import within
from tests.data_plane.ranks import DEADLINE_S, Fault, ranks
from tests.data_plane.survival import check_failed_call, survive

KIB, MIB = 1 << 10, 1 << 20
INSTANTS = ("before", "begin", "sent", "middle", "end")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


def cells() -> list[tuple[str, int, int, str, signal.Signals]]:
    """kind, members, bytes, instant, signal: all combinations at 0.25 and 4 MB, the telling ones at 64 MB."""
    found = [
        (kind, members, size, instant, number)
        for kind in ("direct", "gloo")
        for members in (2, 3, 4)
        for size in (256 * KIB, 4 * MIB)
        for instant in INSTANTS
        for number in SIGNALS
    ]
    found += [
        (kind, 3, 64 * MIB, instant, number)
        for kind in ("direct", "gloo")
        for instant in ("before", "middle" if kind == "direct" else "sent")
        for number in SIGNALS
    ]
    return found


def name(cell: tuple[str, int, int, str, signal.Signals]) -> str:
    kind, members, size, instant, number = cell
    return f"{kind}-{members}-{size / MIB:g}MB-{instant}-{number.name}"


def _parts() -> Iterator[Any]:
    """`make test` runs every third, so that each value of each dimension comes up, and `make long-test` all others."""
    for number, cell in enumerate(cells()):
        yield pytest.param(cell, id=name(cell), marks=pytest.mark.slow if number % 3 else ())


@pytest.mark.timeout(240)
@pytest.mark.parametrize("cell", _parts())
def test_survivors_go_on(cell: tuple[str, int, int, str, signal.Signals]) -> None:
    kind, members, size, instant, number = cell
    seed = zlib.crc32(name(cell).encode())
    print(f"seed {seed}")
    chance = random.Random(seed)
    victim = chance.randrange(members)
    # The gloo transport cannot see inside gloo: there the fault strikes at a random moment after the call was handed over.
    delay_s = chance.random() * 0.02 if kind == "gloo" and instant == "sent" else 0.0
    with ranks(kind, members) as run:
        run.open(1, range(members))
        if chance.random() < 0.5:  # connections exist already, or are made by the call that fails
            run.sums(range(members), 4 * KIB, 1)
            assert all(outcome.right for outcome in run.outcomes(range(members)).values())
        survive(run, range(members), victim, size, Fault(instant, number, delay_s))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("size", [4 * KIB, 256 * KIB, 4 * MIB, 64 * MIB])
@pytest.mark.parametrize("instant", ["before", "begin", "sent", "middle"])
def test_every_survivor_sees_a_death_first_hand(instant: str, size: int) -> None:
    """Direct transport, nobody revokes: each survivor ends by itself, long before its deadline, and blames the dead one."""
    with ranks("direct", 4) as run:
        run.open(1, range(4))
        if instant == "before":
            run.signal(1, signal.SIGKILL)
            run.sums([0, 2, 3], size, 1)
        else:
            run.sums(range(4), size, 1, {1: Fault(instant, signal.SIGKILL)})
        outcomes = run.outcomes([0, 2, 3])
        check_failed_call(outcomes, instant)
        for outcome in outcomes.values():
            assert outcome.seconds < DEADLINE_S / 2
            assert outcome.status in {"done", "PeerLost"} and outcome.peers in {(), (1,)}, outcome


@pytest.mark.timeout(200)
@pytest.mark.parametrize("size", [4 * KIB, 4 * MIB])
@pytest.mark.parametrize("instant", ["before", "middle"])
def test_a_standstill_ends_at_the_deadline_and_blames_the_right_one(instant: str, size: int) -> None:
    """Direct transport, nobody revokes, a member is stopped: the deadline without progress ends the call."""
    with ranks("direct", 4, deadlines=within(5.0)) as run:
        run.open(1, range(4))
        run.sums(range(4), 4 * KIB, 1)
        run.outcomes(range(4))
        if instant == "before":
            run.signal(2, signal.SIGSTOP)
            run.sums([0, 1, 3], size, 2)
        else:
            run.sums(range(4), size, 2, {2: Fault(instant, signal.SIGSTOP)})
        outcomes = run.outcomes([0, 1, 3])
        check = {survivor: (outcome.status, outcome.peers) for survivor, outcome in outcomes.items()}
        print(check, {survivor: outcome.seconds for survivor, outcome in outcomes.items()})
        assert all(outcome.source_intact for outcome in outcomes.values())
        # At `middle` a small sum may be complete everywhere: the stopped member's whole contribution had left it.
        assert set(check.values()) <= {("DeadlineExceeded", (2,))} | ({("done", ())} if instant == "middle" else set())
        if instant == "before":
            assert all(4.9 < outcome.seconds < 50 for outcome in outcomes.values())


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["direct", "gloo"])
def test_a_member_that_wakes_up_in_an_old_generation_changes_nothing(kind: str) -> None:
    with ranks(kind, 3) as run:
        run.open(1, range(3))
        run.sums(range(3), 4 * MIB, 1, {0: Fault("sent", signal.SIGSTOP)})
        run.receive(0)
        run.tell([1, 2], "promise", 2)
        check_failed_call(run.outcomes([1, 2]), "sent")
        run.open(2, [1, 2])
        run.sums([1], 64 * MIB, 2)  # it is inside the new generation's sum while the sleeper wakes up
        run.signal(0, signal.SIGCONT)
        run.tell([0], "promise", 2)
        late = run.outcomes([0])[0]
        assert late.source_intact
        run.sums([2], 64 * MIB, 2)
        again = run.outcomes([1, 2])
        assert all(outcome.right and outcome.canaries_intact and outcome.source_intact for outcome in again.values()), again


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["direct", "gloo"])
def test_deaths_while_a_generation_is_being_formed(kind: str) -> None:
    """A second and a third death, each before the next generation is complete; the last one goes on alone."""
    with ranks(kind, 4) as run:
        members = [0, 1, 2, 3]
        for generation in range(1, 4):
            run.open(generation, members)
            victim = members[0] if generation % 2 else members[-1]
            survivors = [member for member in members if member != victim]
            run.sums(survivors, 256 * KIB, 1)
            run.signal(victim, signal.SIGKILL)
            run.await_end(victim)
            run.tell(survivors, "promise", generation + 1)
            check_failed_call(run.outcomes(survivors), "before")
            members = survivors
        run.open(4, members)
        run.sums(members, 256 * KIB, 1)
        (last,) = run.outcomes(members).values()
        assert last.right and last.canaries_intact
