"""Answers from a replica's state: whose status and vote it has received, for whose it waits, to whom it forwards them.

The rules by which members hear each other directly or over a tree are in `core/tree.py`.
"""

from __future__ import annotations

from megatron_recover.core.replica_state import Effect, Phase, ReplicaState, ToPeers
from megatron_recover.core.tree import awaited, neighbours, told
from megatron_recover.core.values import ReplicaId, Status, Statuses, Votes
from megatron_recover.core.vote import voters_of


def waiting_for(state: ReplicaState) -> tuple[ReplicaId, ...]:
    """Return the members whose message this replica needs before it can go on."""
    if state.phase not in (Phase.EXCHANGING, Phase.VOTED):
        return ()
    return awaited(state.roster, state.replica, heard_from(state), state.tree_above)


def heard_from(state: ReplicaState) -> frozenset[ReplicaId]:
    """Return the members whose vote is here; before there is a plan, those whose status is."""
    if state.phase in (Phase.PROMISING, Phase.EXCHANGING):
        return frozenset(status.replica for status in state.statuses if status.generation == state.generation)
    return voters_of(state.votes)


def told_at_once(state: ReplicaState) -> tuple[ReplicaId, ...]:
    """Return the members to which this replica sends its own status and vote by itself: all neighbours, none in a tree."""
    if len(state.roster) > state.tree_above:
        return ()
    return neighbours(state.roster, state.replica, state.tree_above)


def handed_on(state: ReplicaState, before: frozenset[ReplicaId], message: Statuses | Votes) -> tuple[Effect, ...]:
    """Return what forwards `message` in a tree, to the neighbours for whom what came since `before` completes it."""
    to = told(state.roster, state.replica, heard_from(state), state.tree_above)
    return (ToPeers(to, message),) if to and to != told(state.roster, state.replica, before, state.tree_above) else ()


def newest_of_each(known: tuple[Status, ...], said: tuple[Status, ...]) -> tuple[Status, ...]:
    """Keep the newest status of each replica: bounded, and a member that sent a newer one has promised to leave the old."""
    newest = {status.replica: status for status in known}
    for status in said:
        if status.replica not in newest or newest[status.replica].generation < status.generation:
            newest[status.replica] = status
    return tuple(newest[replica] for replica in sorted(newest))
