"""Decides what losses and ends mean: kinds of losses, poisoned microbatches, exit codes.

These functions are pure. Only `core/generations.py` changes the roster.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations

from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.label import label_of
from megatron_recover.core.membership_messages import Loss, LossKind, ReplicaFailing, ReplicaFinished
from megatron_recover.core.request import MISCOUNTED, TOO_FEW, UNSAVED, RequestKind, details
from megatron_recover.core.values import MicrobatchId


def exit_code(requests: Sequence[str]) -> int:
    """Return the exit code of a replica whose last record carries `requests`."""
    if MISCOUNTED in requests:
        return ExitCode.INVARIANT_VIOLATED  # also with UNSAVED: a defect matters more than a full disk
    if UNSAVED in requests:
        return ExitCode.UNSAVED
    if TOO_FEW in requests:
        return ExitCode.TOO_FEW_REPLICAS
    return ExitCode.INTERRUPTED if details(requests, RequestKind.EXIT) else ExitCode.OK


def about_the_coordinator(node: str, *, saves: bool, has_ranks: bool) -> str:
    """Return what the loss of the coordinator means, for the user of a job of several nodes.

    `node`: the name of the coordinator's node. `saves`: whether the job has `--save`. `has_ranks`:
    whether ranks run on that node. If so, its loss is also a failure without a coordinator.
    """
    where = "the next save point, and ends there" if saves else "the end of the step, and ends there without a checkpoint"
    goes_on = f"training goes on to {where} with exit code 15"
    ends = f"the job ends with exit code 13{' at the newest checkpoint' if saves else ', without a checkpoint'}"
    if has_ranks:
        return f"the coordinator is on node {node}: if that node is lost, {ends}; if only the coordinator is, {goes_on}"
    return f"the coordinator is on node {node}: if that node is lost, {goes_on}; after a failure before that {ends}"


ENDED_TOGETHER = frozenset({ExitCode.OK, ExitCode.TOO_FEW_REPLICAS, ExitCode.INTERRUPTED, ExitCode.UNSAVED})
"""Exit codes of a job whose replicas all end after the same step, and of no rank that fails.

After a miscount replicas end together with `INVARIANT_VIOLATED`. It is left out, since a rank that
fails alone has the same code."""


def untrained(requests: Sequence[str]) -> str:
    """Return the description of the last state if nothing was trained (`UNTRAINED`), else ""."""
    return next(iter(details(requests, RequestKind.UNTRAINED)), "")


SIGNALS_OF_COMPUTATION = frozenset({4, 6, 7, 8, 11})
"""SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV (signal(7), Linux): a process causes them by itself."""
_SIGABRT, _SIGKILL = 6, 9


def loss_of(status: int, *, started: bool, out_of_memory: bool = False) -> LossKind:
    """Classify the loss of a replica whose rank ended unasked with `status`.

    `status`: the exit code, or minus the signal.
    `started`: generation 1 was made. A script that ends with code 0 before that has not called
    `pretrain`. After that it has left without the others (`sys.exit`), and the kind is that of a
    signal from outside, `PROCESS_ENDED`.
    `out_of_memory`: the kernel has just killed a process of the rank's control group for want of
    memory, possibly this one. It counts only with SIGKILL.
    """
    if -status in SIGNALS_OF_COMPUTATION or (status == -_SIGKILL and out_of_memory):
        return LossKind.CRASHED
    if status == ExitCode.INVARIANT_VIOLATED:
        return LossKind.INVARIANT_VIOLATED
    if status == ExitCode.NO_REPLICA_LEFT:  # gave up waiting for the coordinator: no fault of training
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
    r"|watchdog thread terminated with exception"
    # torch's heartbeat monitor: the watchdog itself hangs, in a call of NCCL or CUDA.
    r"|ProcessGroupNCCL's watchdog got stuck"
    r"|Terminating the process after attempting to dump debug info"
)
_ASSERT = "device-side assert triggered"
"""Error of a device that the computation has caused, such as an index out of range.

torch ends the text of every error of a device with the words `to enable device-side assertions`.
"""
_DEVICE_ERROR = re.compile(r"(CUDA|HIP) error: .+")
"""Error of a device as torch prints it, to the end of its line."""
_LAST_WORDS = 16_384
"""Characters at the end of the output that are searched: a C++ stack follows the message."""


def is_communication_text(text: str) -> bool:
    """Return whether torch reports in `text` that communication inside a replica failed.

    The text decides, because gloo's errors have no class of their own.
    """
    return _COMMUNICATION.search(text) is not None


def is_computed(device_error: str) -> bool:
    """Return whether an error of a device is one that a computation causes.

    Any other may come from the device itself, or from a peer that died and whose memory a kernel
    was reading over NVLink. It would strike whatever is computed then.
    """
    return _ASSERT in device_error


def uncharged_abort(status: int, said: str) -> str:
    """Return why torch's NCCL watchdog ended a process if no microbatch is to blame, else "".

    The watchdog ends the process by SIGABRT where communication or the device has failed; so does
    torch's heartbeat monitor where the watchdog hangs. `said`: the newest output of the process. If
    it names an error of the device, the device is the reason. An error that a computation causes
    (`is_computed`) gives "".
    """
    said = said[-_LAST_WORDS:]
    if status != -_SIGABRT or not is_communication_text(said) or is_computed(said):
        return ""
    if (found := _DEVICE_ERROR.search(said)) is not None:
        return f"its device failed ({found[0]})"
    return "communication inside its replica failed"


def first_to_die(statuses: Sequence[int]) -> int:
    """Return the index of the end that explains the others.

    `statuses`: the ends of ranks of one replica that the agent saw in one look, as in `loss_of`.
    SIGKILL and other signals from outside come first: they end a rank that has done nothing. Exit
    codes and then SIGABRT come last: ranks end so after another rank is gone, because their
    connection breaks or NCCL's watchdog aborts.
    """

    def precedence(index: int) -> int:
        number = -statuses[index]
        if number > 0 and number not in SIGNALS_OF_COMPUTATION:
            return 0
        return 1 if number > 0 and number != _SIGABRT else 2 if number <= 0 else 3

    return min(range(len(statuses)), key=precedence)


_WITNESSED = frozenset({LossKind.CRASHED, LossKind.HUNG})
"""Kinds of losses that only failures witnessed by the agent explain: other ranks of such a replica
raise as a consequence."""
_UNCHARGED = frozenset({LossKind.PROCESS_ENDED, LossKind.INVARIANT_VIOLATED, LossKind.NODE_LOST})
"""Kinds of losses that are charged to no microbatch."""


def _charged(failing: Sequence[ReplicaFailing], losses: Sequence[Loss]) -> list[ReplicaFailing]:
    """Return the failures that count, given the kind of each replica's loss."""
    kinds = {loss.replica: loss.kind for loss in losses}
    return [
        item
        for item in failing
        if item.replica in kinds
        and kinds[item.replica] not in _UNCHARGED
        and item.witnessed == (kinds[item.replica] in _WITNESSED)
    ]


def poisoned(
    failing: Sequence[ReplicaFailing], losses: Sequence[Loss], samples: tuple[int, int] | None = None
) -> tuple[int, str] | None:
    """Return exit code and reason if computing one microbatch has ended two replicas (INV-9).

    Return None otherwise. `samples`: samples per training step and per microbatch, if they are
    known and do not change (`MembershipSettings.samples`).

    - A loss of kind `PROCESS_ENDED` (such as a signal from outside), `INVARIANT_VIOLATED` or
      `NODE_LOST` is charged to no microbatch. What other ranks of the replica then raise does not
      count.
    - A loss of kind `CRASHED` or `HUNG` is charged to the microbatches that the progress page
      names. Any other loss is charged to those that a rank named before it ended.
    - Several microbatches may be named (a gradient that is not finite, a device that runs behind).
      Then only what both replicas name counts: a microbatch dealt to one replica is computed by
      another only after the first is lost. Of several pairs of failures, the one with the fewest
      common microbatches is named.
    """
    by_step: dict[str, list[ReplicaFailing]] = {}  # a job that heals has ever more failures
    for item in _charged(failing, losses):
        by_step.setdefault(item.label, []).append(item)
    pairs = [
        (sorted({*one.microbatches} & {*other.microbatches}), one, other)
        for of_step in by_step.values()
        for one, other in combinations(of_step, 2)
        if one.replica != other.replica
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
    """Return text that names a microbatch's samples, from 0 in the order of training.

    Return "" unless the step trains. `of_step`, `of_microbatch`: samples per step, per microbatch.
    """
    step = label_of(label)
    if not step.is_training or step.iteration < 1:
        return ""
    first = (step.iteration - 1) * of_step + microbatch * of_microbatch
    which = f"sample {first}" if of_microbatch == 1 else f"samples {first} to {first + of_microbatch - 1}"
    return f" ({which} in the order of training, from 0)"


def nobody_left(failing: Sequence[ReplicaFailing], losses: Sequence[Loss], miscount: str = "") -> tuple[int, str]:
    """Return exit code and reason of a job whose last replica is lost and of which none finished.

    `miscount`: the reason why a step was given up, or "".
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
            "Megatron's pretrain?"
        )
    if any(loss.kind is LossKind.INVARIANT_VIOLATED for loss in losses):
        return ExitCode.INVARIANT_VIOLATED, f"a check inside the run failed ({detail}); read the log of that rank"
    return ExitCode.NO_REPLICA_LEFT, f"no replica is left ({detail})"


def all_finished(finished: Sequence[ReplicaFinished], miscount: str, requests: Sequence[str] = ()) -> tuple[int, str]:
    """Return exit code and reason of a job whose members have all finished.

    Members that are lost after the first one finished do not matter: the last record decides.
    `miscount`: the reason why a step was given up, or "". `requests`: the coordinator's own
    job-wide requests.
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
