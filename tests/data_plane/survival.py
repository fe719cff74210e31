"""What every kill matrix does: a member is struck around a sum, and the survivors go on together."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from tests.data_plane.ranks import Fault, Outcome, Ranks

FAILURES = {"PeerLost", "Revoked", "TransportError"}


def check_failed_call(outcomes: dict[int, Outcome], instant: str) -> None:
    for survivor, outcome in outcomes.items():
        assert outcome.source_intact, f"replica {survivor}'s input changed"
        assert outcome.status == "done" or outcome.status in FAILURES, outcome
        if outcome.status == "done":
            assert instant != "before", "a sum was complete without a member"
            assert outcome.right


def survive(run: Ranks, members: Iterable[int], victim: int, size: int, fault: Fault) -> None:
    """`fault` strikes the victim before or in a sum of generation 1; the others' sum in generation 2 is right."""
    members = tuple(members)
    survivors = [member for member in members if member != victim]
    if fault.instant == "before":
        run.signal(victim, fault.signal)
        run.sums(survivors, size, 2)
    else:
        run.sums(members, size, 2, {victim: fault})
        assert run.receive(victim) == f"{signal.Signals(fault.signal).name} at {fault.instant}"
    if fault.signal == signal.SIGKILL:
        run.await_end(victim)
    run.tell(survivors, "promise", 2)
    failed = run.outcomes(survivors)
    print({survivor: f"{outcome.status} {outcome.seconds * 1e3:.0f} ms" for survivor, outcome in failed.items()})
    check_failed_call(failed, fault.instant)

    run.open(2, survivors)
    run.sums(survivors, size, 3)
    again = run.outcomes(survivors)
    print({survivor: f"again {outcome.seconds * 1e3:.0f} ms" for survivor, outcome in again.items()})
    assert {outcome.status for outcome in again.values()} == {"done"}, again
    assert all(outcome.right and outcome.source_intact and outcome.canaries_intact for outcome in again.values()), again
    assert len({outcome.checksum for outcome in again.values()}) == 1
