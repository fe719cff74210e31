"""Decides what a request for another number of replicas leads to: pure functions.

Note [The wanted number]
    A job wants as many replicas as it has at the start. `scale` sets another number, and each
    replica that is asked to leave lowers it by one, also if that replica is lost before it has
    left. Healing (`core/slots.py`) forms newcomers for what is missing, so it never replaces a
    replica that has left. A request is accepted or refused as a whole, and one that is refused
    changes nothing.

    - *Growing* makes the number larger. Members do not notice that before newcomers claim to join.
    - *Shrinking* has the members with the highest ids leave (`core/leaving.py`), so never the
      writer. Newcomers that are still formed go first, since no member knows them.
"""

from __future__ import annotations

from megatron_recover.core import policy
from megatron_recover.core.coordinator_state import CoordinatorState
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.joining import older
from megatron_recover.core.leaving import asked, judged
from megatron_recover.core.request import RequestKind, details
from megatron_recover.core.values import ReplicaId, Value
from megatron_recover.core.wording import counted, named, verb


class Change(Value, frozen=True):
    """The consequences of a request for a number of replicas."""

    refused: str = ""
    """The reason and the remedy if the request is refused, else empty."""
    leaving: tuple[ReplicaId, ...] = ()
    """The members that are to leave for it, ascending."""
    dropped: tuple[ReplicaId, ...] = ()
    """The newcomers that are formed in vain, ascending."""
    num_missing: int = 0
    """Number of newcomers that are still to be formed."""
    grown: int = 0
    """The argument of that name of `wanted`, from now on."""
    already: int | None = None
    """The requested number, if the job wanted that number before; else None."""

    @property
    def text(self) -> str:
        """Return what will happen, in words."""
        found = [] if self.already is None else [f"the job wants {counted(self.already, 'replica')} already"]
        if self.leaving:
            found.append(f"{named(self.leaving)} {verb(len(self.leaving), 'leaves', 'leave')} after a common step")
        if self.dropped:
            found.append(f"{named(self.dropped)} {verb(len(self.dropped), 'is', 'are')} not formed any more")
        if self.num_missing:
            number, is_ = counted(self.num_missing, "replica"), verb(self.num_missing, "is", "are")
            found.append(f"{number} {is_} formed while the others train")
        return "; ".join(found) or "nothing has to change"


def num_asked_to_leave(state: CoordinatorState) -> int:
    """Return how many replicas were asked to leave, whatever became of them."""
    return len({*details(state.requests, RequestKind.LEAVE)})


def wanted(state: CoordinatorState, grown: int) -> int:
    """Return the number of replicas that the job wants. See Note [The wanted number].

    `grown`: replicas beyond those of the start that were asked for and not asked to leave again;
    below 0 where fewer are wanted than members are asked to leave.
    """
    return state.policy.num_replicas + grown - num_asked_to_leave(state)


def scaled(state: CoordinatorState, num_replicas: int, *, grown: int, room: int | None) -> Change:
    """Return what a request for `num_replicas` replicas leads to.

    - `grown`: as in `wanted`.
    - `room`: the number of replicas for which there are slots, those of members that stay, and of
      replicas that have left or leave, included. None: no newcomer is formed in this job.
    """
    now = wanted(state, grown)
    refused = _refusal(state, num_replicas, now, room)
    if refused:
        return Change(refused, grown=grown)
    members = older(state.roster, state.joins)
    staying = sorted({*members} - {*asked(state.requests, members)})
    leaving = tuple(staying[num_replicas:])
    if state.joins and len(staying) + len(state.joins) > num_replicas:
        who = [claim.replica for claim in state.joins]
        first = verb(len(who), "is in its first step", "are in their first step")
        return Change(f"{named(who)} {first}; ask again", grown=grown)
    if why := [refusal for refusal in judged(state, leaving)[1] if leaving]:
        return Change(f"replica {why[0].replica} cannot leave: {why[0].why}", grown=grown)
    to_come = sorted({*state.forming, *(claim.replica for claim in state.joins)} - {*members})
    dropped = tuple(each for each in to_come[max(0, num_replicas - len(staying)) :] if each in state.forming)
    total = num_asked_to_leave(state) + len(leaving)
    return Change(
        leaving=leaving, dropped=dropped, num_missing=max(0, num_replicas - len(staying) - len(to_come)),
        grown=num_replicas - state.policy.num_replicas + total, already=num_replicas if num_replicas == now else None,
    )  # fmt: skip


def _refusal(state: CoordinatorState, num_replicas: int, now: int, room: int | None) -> str:
    """Return why a request for `num_replicas` replicas is refused, and the remedy; else empty."""
    least = state.policy.min_replicas
    if state.over or state.finished or policy.exit_code(state.requests) != ExitCode.OK:
        return "the job ends; start it again with --replicas"
    if not state.generation:
        return "training has not begun; ask again once it has"
    if num_replicas < 1:
        return f"{num_replicas} replicas cannot train; ask for 1 or more, or end the job by SIGTERM to its launcher"
    if num_replicas < least:
        return f"--recover-min-replicas is {least}; ask for {least} or more"
    if num_replicas <= now:
        return ""
    most = state.policy.least_microbatches
    if most is not None and num_replicas > most:
        changes = state.policy.samples is None
        step = "a training step with the smallest batch of --step-batch-size-schedule" if changes else "a training step"
        larger = "larger batches in --step-batch-size-schedule" if changes else "a larger --global-batch-size"
        return (
            f"{step} has {counted(most, 'microbatch', 'microbatches')}, fewer than {num_replicas} replicas; "
            f"ask for {most} or fewer, or start with {larger}"
        )
    if room is None:
        flags = state.policy.not_healed_by or ("--recover-heal off",)
        return (
            f"no replica can be formed in this job ({' and '.join(flags)} {verb(len(flags), 'excludes', 'exclude')} it); "
            f"start it again with --replicas {num_replicas}"
        )
    if num_replicas > room:
        return (
            f"there are slots for {counted(room, 'replica')}; ask for {room} or fewer, or start with more --spares or processes"
        )
    return ""
