"""What a loss leads to: the decisions of membership that are no protocol. Pure functions, each with its reason.

`core/coordinator.py` asks them; it alone changes the roster.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from megatron_recover.core.values import ExitCode, Failing, Finished, Loss, LossKind

EXIT = "exit: "
"""Requests that begin with this end the training loop at the step whose record carries them."""
TOO_FEW = EXIT + "too few replicas"
SAVED = "the last checkpoint is there"
"""Request of whoever sees it at the end of training: the record that carries it lets all replicas leave together."""
UNSAVED = "the last checkpoint cannot be written"
"""Request of the writer at the end of training: give up waiting for room on its disk."""


def exit_code(requests: Sequence[str]) -> int:
    """How a replica ends whose last record carries `requests`."""
    if UNSAVED in requests:
        return ExitCode.UNSAVED
    if TOO_FEW in requests:
        return ExitCode.TOO_FEW_REPLICAS
    return ExitCode.INTERRUPTED if any(request.startswith(EXIT) for request in requests) else ExitCode.OK


def loss_of(status: int, *, started: bool) -> LossKind:
    """Why a replica is lost of which a rank ended with `status` (exit code, or minus the signal) before it was told to.

    `started`: generation 1 has been made. A training script that ends well before that has not called `pretrain`; after that
    it has left without the others (`sys.exit`), which is as good as killed.
    """
    if status == ExitCode.INVARIANT_VIOLATED:
        return LossKind.INVARIANT_VIOLATED
    if status == ExitCode.OK and not started:
        return LossKind.ENDED_EARLY
    return LossKind.EXCEPTION if status > 0 else LossKind.PROCESS_ENDED


def poisoned(failing: Sequence[Failing], losses: Sequence[Loss]) -> tuple[int, str] | None:
    """The end of a job in which computing one microbatch has ended two replicas (INV-9), or None.

    A replica that a signal ended is not blamed on the microbatch at which its other ranks then raised, nor one in which a
    check failed. Where a replica knows only the pass that raised (its gradient is not finite), the microbatch is in what both
    replicas computed: what one replica was dealt first, another computes only after that one is lost.
    """
    ended = {loss.replica for loss in losses if loss.kind not in (LossKind.PROCESS_ENDED, LossKind.INVARIANT_VIOLATED)}
    pairs = [
        (sorted({*one.microbatches} & {*other.microbatches}), one, other)
        for one, other in combinations([item for item in failing if item.replica in ended], 2)
        if one.label == other.label and one.replica != other.replica
    ]
    both, one, other = min((pair for pair in pairs if pair[0]), key=lambda pair: len(pair[0]), default=([], None, None))
    if one is None or other is None:
        return None
    named = f"microbatch {both[0]}" if len(both) == 1 else f"one of microbatches {', '.join(map(str, both))}"
    return ExitCode.POISONED_MICROBATCH, (
        f"computing {named} of {one.label} ended replicas {one.replica} and {other.replica}, "
        f"so it is not dealt a third time: {other.error}"
    )


def nobody_left(failing: Sequence[Failing], losses: Sequence[Loss]) -> tuple[int, str]:
    """The end of a job whose last replica is gone: a defect if a check failed or every replica raised, else they died."""
    raised = {item.replica: f"{item.label}: {item.error}" for item in failing}
    if losses and all(loss.kind is LossKind.EXCEPTION for loss in losses):
        last = losses[-1]
        return ExitCode.FAILED, (
            f"training raised on every replica, at last on replica {last.replica} in {raised.get(last.replica, last.detail)}"
        )
    if losses and all(loss.kind is LossKind.ENDED_EARLY for loss in losses):
        return ExitCode.FAILED, (
            "the training script ended with exit code 0 on every replica before it had joined the run; does it call "
            "megatron_recover.megatron.pretrain instead of Megatron's pretrain?"
        )
    detail = "; ".join(f"replica {loss.replica}: {loss.kind.value} {loss.detail}".rstrip() for loss in losses)
    if any(loss.kind is LossKind.INVARIANT_VIOLATED for loss in losses):
        return ExitCode.INVARIANT_VIOLATED, f"a check inside the run failed ({detail}); read the log of that rank"
    return ExitCode.NO_REPLICA_LEFT, f"no replica is left ({detail}); resume from the last checkpoint"


def all_finished(finished: Sequence[Finished]) -> tuple[int, str]:
    """The end of a job whose members have all finished."""
    code = max(item.exit_code for item in finished)
    if code == ExitCode.UNSAVED:
        return code, "training ended, but its last checkpoint could not be written: resume from the newest one that was"
    return code, "training finished" if code == ExitCode.OK else "training was asked to end and did"
