"""Decides which replicas leave the job on request: no microbatch is lost or computed twice by it.

Pure functions, so that all members and the coordinator agree. Their arguments are a roster, the
requests of a committed record, and the least number of members.

Note [Leaving]
    1. The coordinator judges a request (`LeaveAsked`). It gives the accepted ones to one leader
       (`AddRequests`), so that the next record carries `leave k`. No generation is made for that.
    2. From the step after that record on, `leavers` gives k the quota 0. k takes part in sums and
       votes with nothing. If another member is lost, nothing of it is dealt to k.
    3. At the beginning of such a step, k reports that it may leave (`ReplicaLeaving`). k does not
       report while it writes a checkpoint in the background, nor in a step without microbatches,
       which agrees on a checkpoint: a writer finishes its save first.
    4. Once all leavers have reported in one generation, the coordinator makes the next one without
       them, and has their ranks end with code 0 (`Dismiss`).

    A loss may make k indispensable at any time before. Then `leavers` leaves k out on all members,
    in the generation that the loss brings: k stays and computes like any other. The report of an
    older generation has no effect, so k never leaves with what it was dealt since.

    The coordinator applies `leavers` to all requests that it has accepted, which may be more than
    the newest record carries. If not all can leave, the highest ids do. So a member that leaves by
    all requests also leaves by any part of them that names it.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_recover.core.coordinator_state import CoordinatorState, Refusal
from megatron_recover.core.joining import older
from megatron_recover.core.request import RequestKind, details
from megatron_recover.core.values import ReplicaId


def asked(requests: Sequence[str], roster: Sequence[ReplicaId]) -> tuple[ReplicaId, ...]:
    """Return the members that `requests` ask to leave, ascending."""
    return tuple(sorted({int(number) for number in details(requests, RequestKind.LEAVE)} & set(roster)))


def leavers(requests: Sequence[str], roster: Sequence[ReplicaId], min_replicas: int) -> frozenset[ReplicaId]:
    """Return the members that leave by `requests`; at least `min_replicas` and one member stay.

    If not all that are asked can leave, those with the highest ids do.
    """
    wanted = asked(requests, roster)
    number = max(0, min(len(wanted), len(roster) - max(1, min_replicas)))
    return frozenset(wanted[len(wanted) - number :])


def free_to_go(state: CoordinatorState) -> frozenset[ReplicaId]:
    """Return the leavers once all of them have reported in this generation; none before."""
    going = leavers(state.requests, state.roster, state.policy.min_replicas)
    return going if going <= set(state.leaving) else frozenset()


def judged(state: CoordinatorState, replicas: Sequence[ReplicaId]) -> tuple[tuple[ReplicaId, ...], tuple[Refusal, ...]]:
    """Return which of `replicas` may be asked to leave, and why each other one is not asked.

    A replica that is no member, or is asked already, is refused alone. If too few members would
    stay, all of the others are refused, since a node is drained as a whole or not at all. Newcomers
    do not count as members before they are proven.
    """
    refusals = {replica: why for replica in replicas if (why := _refusal(state, replica))}
    wanted = tuple(sorted({*replicas} - refusals.keys()))
    members, least = older(state.roster, state.joins), state.policy.min_replicas
    stay = len(members) - len({*asked(state.requests, members), *wanted})
    if wanted and stay < max(1, least):
        why = f"{stay} would stay, and --recover-min-replicas is {least}" if stay else "no replica would stay"
        refusals |= dict.fromkeys(wanted, why)
        wanted = ()
    return wanted, tuple(Refusal(replica, refusals[replica]) for replica in sorted(refusals))


def _refusal(state: CoordinatorState, replica: ReplicaId) -> str:
    """Return why this replica cannot be asked to leave, whoever stays; empty if it can."""
    num_replicas = state.policy.num_replicas + state.num_newcomers
    if not 0 <= replica < num_replicas:
        return f"there is no such replica: the run has replicas 0 to {num_replicas - 1}"
    if replica in state.left:
        return "it has left already"
    if replica in {loss.replica for loss in state.losses}:
        return "it is lost already"
    if not state.generation:
        return "training has not begun"
    if replica in state.forming or replica not in older(state.roster, state.joins):
        return "it is not a member yet"
    if replica in {item.replica for item in state.finished}:
        return "it has finished training"
    return "it was asked to leave before" if replica in asked(state.requests, state.roster) else ""


def kept(before: CoordinatorState, after: CoordinatorState) -> tuple[Refusal, ...]:
    """Return the members that would have left `before` a loss and have to stay `after` it."""
    least = after.policy.min_replicas
    would_leave = leavers(before.requests, before.roster, least) & set(after.roster)
    stays = sorted(would_leave - leavers(after.requests, after.roster, least))
    return tuple(Refusal(replica, "it is needed since a loss, and stays in the job") for replica in stays)
