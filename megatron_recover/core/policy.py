"""What a loss leads to: the decisions of membership that are no protocol. Pure functions, each with its reason.

`core/coordinator.py` asks them; it alone changes the roster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_recover.core.values import ExitCode, Failing, Finished, Loss, LossKind, ReplicaId

EXIT = "exit: "
"""Requests that begin with this end the training loop at the step whose record carries them."""
TOO_FEW = EXIT + "too few replicas"


def exit_code(requests: Sequence[str]) -> int:
    """How a replica ends whose last record carries `requests`."""
    if TOO_FEW in requests:
        return ExitCode.TOO_FEW_REPLICAS
    return ExitCode.INTERRUPTED if any(request.startswith(EXIT) for request in requests) else ExitCode.OK


def poisoned(failing: Sequence[Failing], losses: Sequence[Loss]) -> tuple[int, str] | None:
    """The end of a job in which computing one microbatch has ended two replicas (INV-9), or None.

    A replica that a signal ended is not blamed on the microbatch at which its other ranks then raised.
    """
    ended = {loss.replica for loss in losses if loss.kind is not LossKind.PROCESS_ENDED}
    first: dict[tuple[str, int], Failing] = {}
    for item in failing:
        if item.microbatch is None or item.replica not in ended:
            continue
        other = first.setdefault((item.label, item.microbatch), item)
        if other.replica != item.replica:
            return ExitCode.POISONED_MICROBATCH, (
                f"computing microbatch {item.microbatch} of {item.label} ended replicas {other.replica} and {item.replica}, "
                f"so it is not dealt a third time: {item.error}"
            )
    return None


def nobody_left(failing: Sequence[Failing], losses: Sequence[Loss]) -> tuple[int, str]:
    """The end of a job whose last replica is gone: a defect if a check failed or every replica raised, else they died."""
    raised = {item.replica: f"{item.label}: {item.error}" for item in failing}
    if losses and all(loss.kind is LossKind.EXCEPTION for loss in losses):
        last = losses[-1]
        return ExitCode.FAILED, (
            f"training raised on every replica, at last on replica {last.replica} in {raised.get(last.replica, last.detail)}"
        )
    detail = "; ".join(f"replica {loss.replica}: {loss.kind.value} {loss.detail}".rstrip() for loss in losses)
    if any(loss.kind is LossKind.INVARIANT_VIOLATED for loss in losses):
        return ExitCode.INVARIANT_VIOLATED, f"a check inside the run failed ({detail}); read the log of that rank"
    return ExitCode.NO_REPLICA_LEFT, f"no replica is left ({detail}); resume from the last checkpoint"


def all_finished(finished: Sequence[Finished]) -> tuple[int, str]:
    """The end of a job whose members have all finished."""
    code = max(item.exit_code for item in finished)
    return code, "training finished" if code == ExitCode.OK else "training was asked to end and did"


def most_suspected(suspects: Sequence[ReplicaId], roster: Sequence[ReplicaId]) -> ReplicaId | None:
    """The member that was suspected most often, the highest id among equals (the lowest is the writer); None if none was."""
    counts = Counter(suspect for suspect in suspects if suspect in roster)
    return max(counts, key=lambda replica: (counts[replica], replica), default=None)
