"""What a loss leads to: the decisions of membership that are no protocol. Pure functions, each with its reason.

`core/coordinator.py` asks them; it alone changes the roster.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations

from megatron_recover.core.label import label_of
from megatron_recover.core.request import MISCOUNTED, TOO_FEW, UNSAVED, RequestKind, details
from megatron_recover.core.values import ExitCode, Failing, Finished, Loss, LossKind, MicrobatchId


def exit_code(requests: Sequence[str]) -> int:
    """How a replica ends whose last record carries `requests`."""
    if MISCOUNTED in requests:
        return ExitCode.INVARIANT_VIOLATED  # also where the state could not be saved: a defect matters more than a full disk
    if UNSAVED in requests:
        return ExitCode.UNSAVED
    if TOO_FEW in requests:
        return ExitCode.TOO_FEW_REPLICAS
    return ExitCode.INTERRUPTED if details(requests, RequestKind.EXIT) else ExitCode.OK


def untrained(requests: Sequence[str]) -> str:
    """Return what the last state is, in words, if the last record says that nothing was trained; else nothing."""
    return next(iter(details(requests, RequestKind.UNTRAINED)), "")


SIGNALS_OF_COMPUTATION = frozenset({4, 6, 7, 8, 11})
"""SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV (signal(7), Linux): what a process does to itself."""
_SIGABRT, _SIGKILL = 6, 9


def loss_of(status: int, *, started: bool, out_of_memory: bool = False) -> LossKind:
    """Why a replica is lost of which a rank ended with `status` (exit code, or minus the signal) before it was told to.

    `started`: generation 1 has been made. A training script that ends well before that has not called `pretrain`; after that
    it has left without the others (`sys.exit`), which is as good as killed. `out_of_memory`: the kernel has killed a process
    of the rank's control group for want of memory, and this end may be that.
    """
    if -status in SIGNALS_OF_COMPUTATION or (status == -_SIGKILL and out_of_memory):
        return LossKind.CRASHED
    if status == ExitCode.INVARIANT_VIOLATED:
        return LossKind.INVARIANT_VIOLATED
    if status == ExitCode.NO_REPLICA_LEFT:  # it gave up waiting for a launcher that was stopped: no fault of the training
        return LossKind.PROCESS_ENDED
    if status == ExitCode.OK and not started:
        return LossKind.ENDED_EARLY
    return LossKind.EXCEPTION if status > 0 else LossKind.PROCESS_ENDED


_COMMUNICATION = re.compile(
    r"/gloo/\w+"
    r"|Connection (closed|reset|refused) by peer"
    r"|Timed out waiting \d+ms for \w+ operation"
    r"|NCCL (error|communicator was aborted)"
    r"|Watchdog caught collective operation timeout"
    r"|taking the entire process down"
)
_DEVICE = "CUDA error"
_LAST_WORDS = 16_384
"""Characters in which the watchdog's words are looked for: it prints the stack of its own C++ behind them."""


def tells_of_communication(text: str) -> bool:
    """Return whether torch says in `text` that communication inside a replica failed; gloo's errors have no class."""
    return _COMMUNICATION.search(text) is not None


def aborted_by_communication(status: int, said: str) -> bool:
    """Return whether torch's watchdog of NCCL has ended a process (SIGABRT) because communication inside its replica failed.

    `said`: what the process has printed last. The watchdog also ends a process whose device has failed, in a kernel that was
    given a wrong index for example. It names that error, which is the computation's.
    """
    said = said[-_LAST_WORDS:]
    return status == -_SIGABRT and tells_of_communication(said) and _DEVICE not in said


def first_to_die(statuses: Sequence[int]) -> int:
    """Return the index of the end that explains the others, of ranks of one replica whose ends were seen in one look.

    A signal from outside goes before all else, since it charges nothing; an exit code and SIGABRT are what ranks do that find
    another one gone (the connection broke; NCCL's watchdog aborts).
    """

    def precedence(index: int) -> int:
        number = -statuses[index]
        if number > 0 and number not in SIGNALS_OF_COMPUTATION:
            return 0
        return 1 if number > 0 and number != _SIGABRT else 2 if number <= 0 else 3

    return min(range(len(statuses)), key=precedence)


_WITNESSED = frozenset({LossKind.CRASHED, LossKind.HUNG})
"""Losses that only what the agent has witnessed is charged to: other ranks of the replica then raise as a consequence."""
_UNCHARGED = frozenset({LossKind.PROCESS_ENDED, LossKind.INVARIANT_VIOLATED})


def _charged(failing: Sequence[Failing], losses: Sequence[Loss]) -> list[Failing]:
    """Return what of `failing` counts, given how each replica was lost."""
    kinds = {loss.replica: loss.kind for loss in losses}
    return [
        item
        for item in failing
        if item.replica in kinds
        and kinds[item.replica] not in _UNCHARGED
        and item.witnessed == (kinds[item.replica] in _WITNESSED)
    ]


def poisoned(
    failing: Sequence[Failing], losses: Sequence[Loss], samples: tuple[int, int] | None = None
) -> tuple[int, str] | None:
    """The end of a job in which computing one microbatch has ended two replicas (INV-9), or None.

    `samples`: those of every training step, and of every microbatch, where they are known and do not change.

    A replica that a signal from outside ended is not blamed on the microbatch at which its other ranks then raised, nor one in
    which a check failed. One that a signal of the computation or a hang ended is blamed on what the progress page names. Where
    several microbatches are named (a gradient that is not finite, a device that runs behind), the common one counts: what one
    replica was dealt first, another computes only after that one is lost.
    """
    pairs = [
        (sorted({*one.microbatches} & {*other.microbatches}), one, other)
        for one, other in combinations(_charged(failing, losses), 2)
        if one.label == other.label and one.replica != other.replica
    ]
    both, one, other = min((pair for pair in pairs if pair[0]), key=lambda pair: len(pair[0]), default=([], None, None))
    if one is None or other is None:
        return None
    named = f"microbatch {both[0]}" if len(both) == 1 else f"one of microbatches {', '.join(map(str, both))}"
    which = _samples(one.label, both[0], *samples) if samples is not None and len(both) == 1 else ""
    return ExitCode.POISONED_MICROBATCH, (
        f"computing {named} of {one.label}{which} ended replicas {one.replica} and {other.replica}, "
        f"so it is not dealt a third time: {other.error}"
    )


def _samples(label: str, microbatch: MicrobatchId, of_step: int, of_microbatch: int) -> str:
    """Return which samples a microbatch of a training step has, in words; nothing for an evaluation."""
    step = label_of(label)
    if not step.is_training or step.iteration < 1:
        return ""
    first = (step.iteration - 1) * of_step + microbatch * of_microbatch
    return f" (samples {first} to {first + of_microbatch - 1} in the order of training, from 0)"


def nobody_left(failing: Sequence[Failing], losses: Sequence[Loss], miscount: str = "") -> tuple[int, str]:
    """The end of a job whose last replica is gone and of which none had finished.

    A defect if a step was given up (`miscount` says why), a check failed or every replica raised, else they died.
    """
    detail = "; ".join(f"replica {loss.replica}: {loss.kind.value} {loss.detail}".rstrip() for loss in losses)
    if miscount:
        unknown = "no replica is left to say whether the state before that step is saved"
        return ExitCode.INVARIANT_VIOLATED, f"{miscount}; {unknown} ({detail})"
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
    if any(loss.kind is LossKind.INVARIANT_VIOLATED for loss in losses):
        return ExitCode.INVARIANT_VIOLATED, f"a check inside the run failed ({detail}); read the log of that rank"
    return ExitCode.NO_REPLICA_LEFT, f"no replica is left ({detail})"


def all_finished(finished: Sequence[Finished], miscount: str, requests: Sequence[str] = ()) -> tuple[int, str]:
    """The end of a job whose members have all finished, or are gone after the first of them had: its last record says the end.

    `miscount`: why a step was given up, or nothing. `requests`: what the coordinator had the members ask for.
    """
    if miscount:
        kept = "is saved" if all(item.is_saved for item in finished) else "was not saved"
        if finished[0].untrained and all(item.untrained == finished[0].untrained for item in finished):
            kept = f"is {finished[0].untrained}: nothing was trained"
        return ExitCode.INVARIANT_VIOLATED, f"{miscount}; the state before that step {kept}"
    code = max(item.exit_code for item in finished)
    if code == ExitCode.UNSAVED:
        return code, "training ended, but its last checkpoint could not be written"
    if code == ExitCode.OK:
        return code, "training finished"
    why = " and ".join(details(requests, RequestKind.EXIT))
    return code, f"all replicas ended after the same step, as asked for ({why or 'a time limit, or a signal to a rank'})"
