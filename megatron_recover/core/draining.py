"""Decides what a request to give a node back leads to: a pure function.

Note [A drained node]
    All slots of a drained node go out of use for good, whatever is in them: members leave
    (`core/leaving.py`), newcomers that are formed there are removed, and `core/slots.py` never uses
    a slot there again. A request is carried out as a whole, or is refused and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_recover.core import policy
from megatron_recover.core.coordinator_state import CoordinatorState
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.joining import older
from megatron_recover.core.leaving import asked, judged, leavers
from megatron_recover.core.values import ReplicaId, Value
from megatron_recover.core.wording import counted, named, verb


class Drain(Value, frozen=True):
    """The consequences of a request to give a node back."""

    refused: str = ""
    """The reason and the remedy if the request is refused, else empty."""
    leaving: tuple[ReplicaId, ...] = ()
    """The members that are to leave for it, ascending."""
    asked_before: tuple[ReplicaId, ...] = ()
    """The members there that were asked to leave before, and have not left, ascending."""
    dropped: tuple[ReplicaId, ...] = ()
    """The newcomers that are formed in vain, ascending."""
    node: str = ""

    @property
    def text(self) -> str:
        """Return what will happen, in words."""
        found = [f"no new replica is formed on {self.node} any more"]
        if self.leaving:
            found.append(f"{named(self.leaving)} {verb(len(self.leaving), 'leaves', 'leave')} after a common step")
        if self.asked_before:
            number = len(self.asked_before)
            found.append(f"{named(self.asked_before)} {verb(number, 'was', 'were')} asked to leave before")
        if self.dropped:
            found.append(f"{named(self.dropped)} {verb(len(self.dropped), 'is', 'are')} not formed there any more")
        return "; ".join(found)


def drained(state: CoordinatorState, node: str, hosted: Collection[ReplicaId], *, is_drained: bool, room: int | None) -> Drain:
    """Return what a request to give a node back leads to.

    - `node`: its name. `hosted`: all replicas that have, or have had, ranks there.
    - `is_drained`: it was given back before.
    - `room`: the number of replicas for which there are slots without the node, those of members
      included. None: no newcomer is formed in this job, so that a slot without a rank is of no use.
    """
    forms = room is not None
    if state.over or state.finished or policy.exit_code(state.requests) != ExitCode.OK:
        return Drain("the job ends, and gives all nodes back")
    if not state.generation:
        return Drain("training has not begun; ask again once it has")
    members = older(state.roster, state.joins)
    here = sorted({*hosted} & {*members})
    before = {*asked(state.requests, members)}
    leaving = tuple(replica for replica in here if replica not in before)
    dropped = tuple(sorted({*hosted} & {*state.forming}))
    new = [claim.replica for claim in state.joins if claim.replica in hosted]
    if new:
        return Drain(f"{named(new)} {verb(len(new), 'is in its', 'are in their')} first step; ask again")
    if not leaving and not dropped and (is_drained or (here and not forms)):
        return Drain(_fact(state, node, here))
    if not here and not forms:
        return Drain(
            f"no replica that trains has a rank on node {node}, and no new one is formed in this job: none has to leave"
        )
    if leaving and (why := judged(state, leaving)[1]):
        return Drain(f"replica {why[0].replica} does not leave: {why[0].why}")
    least = state.policy.min_replicas
    if room is not None and len(members) < least and room < least:
        return Drain(
            f"the job waits for {counted(least - len(members), 'more replica')}, and without node {node} there are slots for "
            f"{counted(room, 'replica')} in all; add slots first, or end the job by SIGTERM to its launcher"
        )
    return Drain(leaving=leaving, asked_before=tuple(sorted(before & {*here})), dropped=dropped, node=node)


def _fact(state: CoordinatorState, node: str, here: Collection[ReplicaId]) -> str:
    """Return what has become of an earlier request for this node."""
    going = leavers(state.requests, state.roster, state.policy.min_replicas)
    if leave := sorted(going & {*here}):
        return f"node {node} is drained already: {named(leave)} {verb(len(leave), 'still leaves', 'still leave')}"
    if stay := sorted({*here} - going):
        stays = f"{named(stay)} {verb(len(stay), 'stays', 'stay')}"
        return f"node {node} is drained already, but {stays}, which the job needs since a loss"
    return f"node {node} is drained already: no replica has a rank there, and no new one is formed there"
