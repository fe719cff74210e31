"""Job-wide requests: what voters ask of all replicas, in their votes. The only place where the text of one is made and read.

A request is part of the record of a step. All replicas act on it when they have committed the step, so they act alike. On the
wire, in the trace and in messages a request is text.
"""

from __future__ import annotations

import enum
from collections.abc import Collection


class RequestKind(enum.StrEnum):
    """What is asked for."""

    EXIT = "exit"
    """End the training loop at the step whose record carries the request. The detail is the reason."""
    MISSING = "missing checkpoint"
    """Begin another save: a replica has become the writer, and the dead one did not finish. The detail is the iteration."""
    SAVED = "the last checkpoint is there"
    """Leave together: whoever sees the last checkpoint asks for that at the end of training."""
    UNSAVED = "the last checkpoint cannot be written"
    """Leave without it: the writer gives up waiting for room on its disk."""
    UNTRAINED = "nothing was trained"
    """Say so at the end of a training that was given up before its first step changed any state, so that nothing had to be
    saved. The detail describes the state."""


def exit_for(reason: str) -> str:
    """Return the request to end training for a reason."""
    return f"{RequestKind.EXIT}: {reason}"


def missing(iteration: int) -> str:
    """Return the request to save the state after `iteration` again."""
    return f"{RequestKind.MISSING}: {iteration}"


def nothing_trained(state: str) -> str:
    """Return the request to say that nothing was trained; `state` describes what there is."""
    return f"{RequestKind.UNTRAINED}: {state}"


TOO_FEW = exit_for("too few replicas")
MISCOUNTED = exit_for("a step was miscounted twice")
SAVED = RequestKind.SAVED.value
UNSAVED = RequestKind.UNSAVED.value


def details(requests: Collection[str], kind: RequestKind) -> list[str]:
    """Return the details of all requests of a kind, in their order."""
    begin = f"{kind}: "
    return [request.removeprefix(begin) for request in requests if request.startswith(begin)]
