"""Queries on a replica's state about statuses and votes: received, awaited, to be forwarded.

`core/tree.py` has the rules by which members exchange messages directly or along a tree.
"""

from __future__ import annotations

from megatron_recover.core.joining import older, talkers, unproven
from megatron_recover.core.replica_state import Effect, ReplicaPhase, ReplicaState, ToPeers
from megatron_recover.core.tree import awaited, forward_to, neighbours
from megatron_recover.core.values import ReplicaId, Status, Statuses, Votes
from megatron_recover.core.vote import voters_of


def waiting_for(state: ReplicaState) -> tuple[ReplicaId, ...]:
    """Return the members whose message this replica needs next; none unless EXCHANGING or VOTED.

    These are all whose message is missing. In a tree they are the children from which or from below
    which one is missing. If there are none, but a message is missing, it is the parent.
    """
    if state.phase not in (ReplicaPhase.EXCHANGING, ReplicaPhase.VOTED):
        return ()
    if state.phase is ReplicaPhase.EXCHANGING and state.replica in unproven(state):
        return older(state.roster, state.joins)[:1]  # it sends the admission
    return awaited(talkers(state), state.replica, heard_from(state), state.tree_above)


def heard_from(state: ReplicaState) -> frozenset[ReplicaId]:
    """Return the members whose vote on this step has arrived.

    When PROMISING or EXCHANGING, return those whose status of this generation has arrived. This
    replica is included once its own vote or status exists.
    """
    if state.phase in (ReplicaPhase.PROMISING, ReplicaPhase.EXCHANGING):
        return frozenset(status.replica for status in state.statuses if status.generation == state.generation)
    return voters_of(state.votes)


def direct_peers(state: ReplicaState) -> tuple[ReplicaId, ...]:
    """Return the members that get this replica's status and vote: all others; in a tree none."""
    if len(talkers(state)) > state.tree_above:
        return ()
    return neighbours(talkers(state), state.replica, state.tree_above)


def forwarded(state: ReplicaState, before: frozenset[ReplicaId], message: Statuses | Votes) -> tuple[Effect, ...]:
    """Return the effect that forwards `message` in a tree; none if its receivers are as `before`.

    `before` are the members heard from earlier. The parent receives `message` once this replica and
    all members below have made theirs. The children receive it once all members have.
    """
    roster = talkers(state)
    to = forward_to(roster, state.replica, heard_from(state), state.tree_above)
    return (ToPeers(to, message),) if to and to != forward_to(roster, state.replica, before, state.tree_above) else ()


def newest_of_each(known: tuple[Status, ...], said: tuple[Status, ...]) -> tuple[Status, ...]:
    """Return the newest status of each replica, which bounds their number.

    A replica that sent a newer status has promised to leave the older generation. Of two statuses
    of one generation the first counts. The result is sorted by replica.
    """
    newest = {status.replica: status for status in known}
    for status in said:
        if status.replica not in newest or newest[status.replica].generation < status.generation:
            newest[status.replica] = status
    return tuple(newest[replica] for replica in sorted(newest))
