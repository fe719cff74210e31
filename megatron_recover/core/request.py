"""Job-wide requests: what a voter wants all replicas to do, as part of its vote.

The committed record of a step carries the requests of all voters. All replicas act on them after
they committed the step, so all act alike. On the wire, in the trace and in messages a request is
text. Only this module writes and parses that text.
"""

from __future__ import annotations

import enum
from collections.abc import Collection


class RequestKind(enum.StrEnum):
    """The kinds of requests. A request may have a detail after the kind's text."""

    EXIT = "exit"
    """End the training loop when Megatron next decides if it exits, after the step whose record
    carries this: after the record of a regular save, that is one iteration later. The detail is the
    reason."""
    MISSING = "missing checkpoint"
    """Save again: the writer died before its save was complete. The detail is the iteration."""
    SAVED = "the last checkpoint is there"
    """Leave the end of training: a replica has seen that the last checkpoint exists."""
    UNSAVED = "the last checkpoint cannot be written"
    """Leave the end of training without the last checkpoint: the writer has given up."""
    ALONE = "the coordinator is lost"
    """The voter has no coordinator any more, and enters no newer generation. The detail is the
    voter (`core/grants.py`, Note [Last generation])."""
    UNTRAINED = "nothing was trained"
    """Report at the end that training was given up before any state changed, so that nothing had to
    be saved. The detail describes the state."""
    LEAVE = "leave"
    """Deal a replica no microbatch from the next step on, so that it can leave the job
    (`core/leaving.py`). The detail is the replica."""


def exit_for(reason: str) -> str:
    """Return the request to end training because of `reason`."""
    return f"{RequestKind.EXIT}: {reason}"


def missing(iteration: int) -> str:
    """Return the request to save the state after `iteration` again."""
    return f"{RequestKind.MISSING}: {iteration}"


def nothing_trained(state: str) -> str:
    """Return the request to report that nothing was trained; `state` describes the state."""
    return f"{RequestKind.UNTRAINED}: {state}"


def leave_of(replica: int) -> str:
    """Return the request that `replica` leaves the job."""
    return f"{RequestKind.LEAVE}: {replica}"


def coordinator_lost(replica: int) -> str:
    """Return the request by which `replica` reports that it has no coordinator any more."""
    return f"{RequestKind.ALONE}: replica {replica}"


NO_COORDINATOR = exit_for("the coordinator is lost")
TOO_FEW = exit_for("too few replicas")
MISCOUNTED = exit_for("a step was miscounted twice")
SAVED = RequestKind.SAVED.value
UNSAVED = RequestKind.UNSAVED.value


def details(requests: Collection[str], kind: RequestKind) -> list[str]:
    """Return the details of all requests of a kind, in the order of `requests`."""
    begin = f"{kind}: "
    return [request.removeprefix(begin) for request in requests if request.startswith(begin)]
