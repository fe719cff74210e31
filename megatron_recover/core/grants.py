"""Grants: the right of one replica at a time to name a checkpoint (INV-6).

The coordinator's side is `Ledger`, the side of the replica that writes is `Holding`. Both are pure.
The caller of `Holding` gives the time of its own clock, in seconds.

Note [Grants]
    All members agree on what is saved, but members of two generations may both be writing. The
    older one may have been frozen, or cut off, and wakes when the newer one has named a later
    checkpoint. Its late rename must not move `latest` back. So a checkpoint gets its name only
    under a grant:

    - The coordinator gives the writer of its roster one grant ahead. So nobody waits for a grant
      when nothing fails.
    - An attempt to name a checkpoint uses the grant up, whether the attempt succeeds or not. The
      holder confirms the end of the attempt, and the coordinator gives the next grant. The one
      exception is Note [Last generation].
    - If the holder is lost, the coordinator gives no grant before that holder can name nothing any
      more: its confirmation came, its death is confirmed, or its lease has lapsed.

Note [Lease]
    A holder that is cut off cannot be killed, and cannot confirm. It stops by its own clock: it
    begins no attempt later than `Deadlines.lease_s` after a time at which it certainly was a
    member. That time is when the holder sent the answer that the newest beat followed: the
    coordinator sends a beat only after the answer to the one before, and sends none to a lost
    replica. The time at which the holder *read* the beat proves nothing, since a frozen process
    reads old beats when it wakes. The coordinator counts `Deadlines.lapse_s`, which is longer, from
    the loss, so from a time after its last beat to that replica. Each clock measures only its own
    interval.

Note [Last generation]
    If the coordinator is lost, no beat renews the lease. A replica whose vote says that the
    coordinator is lost enters no newer generation (`core/replica_generation.py`). A committed
    record that says so for every member of its roster proves that this generation is the last one,
    and its writer the last writer. That writer needs no lease. If the coordinator has ever given it
    a grant, the newest one lasts: it may name any number of checkpoints under it, one after the
    other. This matters because a coordinator may be lost for `Deadlines.node_s` before anybody
    notices, and a checkpoint that is named meanwhile has used up the grant that was given ahead.

    Why nobody else may name then:

    - The coordinator gives a grant only while none is open. So when it gave this writer one, all
      earlier grants were closed: confirmed, or their holders dead or without a lease. An earlier
      holder that takes an older generation for its last one is none: the members of that one were
      bound to it, this writer among them.
    - A later grant goes to the lowest id of a roster. So it goes to this writer, until the
      coordinator removes it, in a generation newer than the last one. Another replica of that
      roster was also a member of the last generation, and is bound: it enters no newer one, and a
      grant of one counts for nothing there (`received`). A newcomer gets no grant before it is
      proven (`core/joining.py`). In a generation newer than the last one that takes votes of
      members that are bound.

    A writer without any grant proves nothing of the kind: it became the writer when another replica
    was lost, whose lease may not have lapsed yet. It names nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from megatron_recover.core.membership_messages import Grant
from megatron_recover.core.request import coordinator_lost
from megatron_recover.core.values import Generation, ReplicaId, Value


def writer_of(roster: Collection[ReplicaId]) -> ReplicaId:
    """Return the member that logs, saves and writes TensorBoard: the one with the lowest id."""
    return min(roster)


def is_last_generation(requests: Collection[str], roster: Collection[ReplicaId]) -> bool:
    """Return whether committed `requests` say that no member of `roster` has a coordinator.

    See Note [Last generation].
    """
    return bool(roster) and all(coordinator_lost(member) in requests for member in roster)


# --- The coordinator's side -----------------------------------------------------------------------


class Ledger(Value, frozen=True):
    """The grants of a run, as the coordinator knows them."""

    num_given: int = 0
    open: Grant | None = None
    """The newest grant while its holder may still name a checkpoint with it; else None."""

    @property
    def lease(self) -> str:
        """Return the name of the timer that ends the lease of the open grant, or ""."""
        return f"lease {self.open.number}" if self.open is not None else ""


def given(ledger: Ledger, generation: Generation, roster: Collection[ReplicaId]) -> Ledger:
    """Return the ledger with a new grant for the writer of `roster`, unless a grant is open."""
    if ledger.open is not None or not roster:
        return ledger
    number = ledger.num_given + 1
    return Ledger(number, Grant(number, generation, writer_of(roster)))


def confirmed(ledger: Ledger, replica: ReplicaId, number: int) -> Ledger:
    """Return the ledger after `replica` has ended its attempt under the grant `number`."""
    grant = ledger.open
    is_open = grant is not None and (grant.writer, grant.number) == (replica, number)
    return replace(ledger, open=None) if is_open else ledger


def ended(ledger: Ledger, replica: ReplicaId) -> Ledger:
    """Return the ledger after the death of all processes of `replica`, which was lost, is known."""
    return replace(ledger, open=None) if ledger.open is not None and ledger.open.writer == replica else ledger


def lapsed(ledger: Ledger, timer: str) -> Ledger:
    """Return the ledger after the timer of a lease has run out; a stale timer changes nothing."""
    return replace(ledger, open=None) if timer == ledger.lease else ledger


# --- The holder's side ----------------------------------------------------------------------------


class Holding(Value, frozen=True):
    """The grant of one replica, and the time of its lease. Start with `Holding(now)`.

    `now` is the time at which the replica greets the coordinator.
    """

    answered_at: float
    """Time at which the replica sent its newest answer to a beat, or its greeting."""
    renewed_at: float | None = None
    """Time from which the lease counts; None before the first beat. See Note [Lease]."""
    newest: Grant | None = None
    """The newest grant that was received."""
    is_used: bool = False
    """True after an attempt under the newest grant has begun."""
    attempt: Grant | None = None
    """The grant under which the replica is naming a checkpoint now."""


def heard(holding: Holding, now: float) -> Holding:
    """Return the holding after a beat was read at `now`, before the beat is answered."""
    return replace(holding, renewed_at=holding.answered_at, answered_at=now)


def received(holding: Holding, grant: Grant, generation: Generation) -> Holding:
    """Return the holding with a grant of the coordinator; a grant counts once.

    `generation`: that of the replica. The announcement of a generation comes before its grants. So
    a grant of a newer generation is for a generation that this replica does not enter, and counts
    for nothing (Note [Last generation]).
    """
    is_old = holding.newest is not None and grant.number <= holding.newest.number
    if is_old or grant.generation > generation:
        return holding
    return replace(holding, newest=grant, is_used=False)


def refusal(holding: Holding, now: float, lease_s: float, *, is_last: bool = False) -> str:
    """Return why the replica must not begin to name a checkpoint at `now`; "" if it may.

    `is_last`: its generation is the last one, so neither the lease nor the use of the newest grant
    counts (Note [Last generation]).
    """
    if holding.attempt is not None or holding.newest is None or (holding.is_used and not is_last):
        return "the coordinator has not given the next grant yet"
    if is_last:
        return ""
    silent_s = now - holding.renewed_at if holding.renewed_at is not None else now
    if holding.renewed_at is None or silent_s > lease_s:
        return f"nothing proves for {silent_s:.0f} s that this replica is still a member: its lease of {lease_s:g} s has lapsed"
    return ""


def begun(holding: Holding) -> Holding:
    """Return the holding after an attempt has begun, which uses the grant up.

    Call it only where `refusal` is empty.
    """
    return replace(holding, attempt=holding.newest, is_used=True)


def attempted(holding: Holding) -> Holding:
    """Return the holding after the attempt has ended. The end is to be confirmed (`Named`)."""
    return replace(holding, attempt=None)
