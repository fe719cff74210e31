"""The machine of one rank: queued orders, operations that may run, results that count.

`step(state, input) -> (state, effects)` never blocks. All threads of a rank drive the same state
under one lock. With overlap the thread `recover-reduce` carries out operations of a plan, and feeds
`Hold` and `Block`, in place of the training thread.

Caller's contract
-----------------
* Control thread: feed every order of the leader, in order. Carry out its effects before the next
  input.
* Training thread: feed `Begin` on arriving at a step. Then feed `Take` whenever the queue is not
  empty, and obey `state.taken`:

  - `Plan`: run all its computes in full, whatever happens, in one pass (Note [Passes]). As soon as
    `in_pass` is over, run its operations (`operations(plan, state.replica, state.buckets)` of
    `core/plan.py`) one by one, each only while `may_run(state, plan.generation)`. Feed `Hold`
    after each that succeeded. At the first that did not, feed `Block`, leave the rest of the plan,
    and feed `Take` again.
  - `Plan` that `voids`: before all else empty the local gradient and all counts of the step.
  - `Close`: the one queued order that never becomes `state.taken`. Look for `Close` at the head of
    the queue before `Take`. The pass ends with the microbatches that are known.
  - `Apply`: the results are the gradient now. Continue with the next step.
  - `EnterTraining`: begin training at the step, whose state this rank has read; a rank that has
    begun already continues. Only newcomers are ordered this (`core/joining.py`).
  - `Stop`: end.

* A result counts if and only if it is in `state.held` after `Hold`. Otherwise drop the result.
* `Retire(g)`: revoke every transport of a generation below g. From its return on no thread of
  them writes memory that anything else can reach (`data_plane/transport.py`). At a promise
  `Retire(g)` comes before the acknowledgement `ToLeader(Promised(g))`; INV-5 and INV-8 rest on
  this order. A `Stop` has no acknowledgement.

Note [Passes]
    All ranks of a replica run the same passes of the schedule. They have to agree on the
    microbatches of a pass without waiting for each other.

    - A pass begins with a `Plan` that has computes.
    - The pass includes the computes of every `Plan` that follows before `Close`.
    - The pass ends at `Close`. Rank 0 (of the first stage) feeds `AskClose` when it begins the last
      forward that it knows of. The leader then puts `Close` into the stream, at the same place for
      all.

    So a microbatch that is dealt before `Close` is computed in the pass that runs. A later one is
    computed in a pass of its own. Of the plans of a pass only the newest is reduced: the
    generations of the others are over.

    A plan that voids the step (`Plan.voids`) never comes into a pass. It follows from a sum of the
    generation before, to which every member has contributed. A member contributes only when its
    pass is closed.

    The machine knows whether a pass runs here (`in_pass`) and whether rank 0 has requested its end
    (`has_asked`). A `Close` without a pass is a defect, and raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.plan import results
from megatron_recover.core.rank_messages import (
    Apply,
    Begun,
    Close,
    CloseAsked,
    EnterTraining,
    Holds,
    Order,
    PassTimed,
    Plan,
    Promise,
    Promised,
    RankBlocked,
    RankFailing,
    RankFinished,
    RankSaving,
    Report,
    StateDigested,
    Stop,
)
from megatron_recover.core.values import BucketId, Generation, Held, Journal, MicrobatchId, ReplicaId, Value, Work


class RankState(Value, frozen=True):
    """The state of a rank's machine; the first one is `RankState(replica, rank, buckets)`."""

    replica: ReplicaId
    rank: int
    buckets: tuple[BucketId, ...]
    """Buckets that this rank holds: those of its stage."""
    promised: Generation = 0
    """Newest generation that this rank has promised; 0 before the first."""
    step: int = 0
    """The step that this rank has not applied yet."""
    queue: tuple[Plan | Close | Apply | Stop | EnterTraining, ...] = ()
    """Orders that the training thread has not taken yet, oldest first."""
    taken: Plan | Apply | Stop | EnterTraining | None = None
    """The order that the training thread carries out."""
    in_pass: bool = False
    """True while a pass runs: a plan that computes was taken, and no `Close` since."""
    has_asked: bool = False
    """True once rank 0 has requested the end of the pass that runs; False on other ranks."""
    held: tuple[Held, ...] = ()
    """Results of `step` that count, by bucket."""
    unreported: tuple[Held, ...] = ()
    """Results that the leader does not know of yet."""
    journal: Journal = Journal()
    """The microbatches of `step` that rank 0 has started and finished; empty on other ranks."""


# --- Inputs: any Order from the leader, and from the rank's own threads: --------------------------


class Begin(Value, frozen=True):
    """The training thread arrives at its next step (`state.step`)."""

    work: Work
    requests: tuple[str, ...] = ()
    digest: int | None = None
    stays: bool = False
    """`digest` and `stays` are those of `Begun`."""


class Take(Value, frozen=True):
    """The training thread requests its next order; the queue must not be empty."""


class AskClose(Value, frozen=True):
    """Rank 0 begins the last forward that it knows of; feeding this once in a pass is enough."""


class MicrobatchStarted(Value, frozen=True):
    """Rank 0 begins the forward of a microbatch."""

    microbatch: MicrobatchId


class MicrobatchFinished(Value, frozen=True):
    """Rank 0 has finished the backward of a microbatch (in evaluation its forward)."""

    microbatch: MicrobatchId


class TimePass(Value, frozen=True):
    """The duration of a training step's first pass, measured by rank 0 (`PassTimed`)."""

    num_microbatches: int
    elapsed_ns: int


class Hold(Value, frozen=True):
    """An operation across replicas (transfer to this replica, or reduction) delivered a result."""

    held: Held


class Block(Value, frozen=True):
    """An operation across replicas of `generation` failed or waited too long."""

    generation: Generation
    reason: str
    suspects: tuple[ReplicaId, ...] = ()
    stalled: bool = False
    """`suspects` and `stalled` are those of `RankBlocked`."""
    miscounted: bool = False
    """True if the sum of the bucket did not count every microbatch exactly once."""


class Fail(Value, frozen=True):
    """An exception is about to end the process."""

    microbatches: tuple[MicrobatchId, ...]
    """The microbatches of `RankFailing`."""
    error: str


class Save(Value, frozen=True):
    """The training thread begins a checkpoint save, or has ended it (`over`)."""

    over: bool


class Digest(Value, frozen=True):
    """The rank has digested the state with which the training step `label` begins."""

    label: str
    digest: int


class Finish(Value, frozen=True):
    """The training loop has ended."""


Input = (
    Order
    | Begin
    | Take
    | MicrobatchStarted
    | MicrobatchFinished
    | AskClose
    | TimePass
    | Hold
    | Block
    | Fail
    | Save
    | Digest
    | Finish
)


# --- Effects --------------------------------------------------------------------------------------


class Retire(Value, frozen=True):
    """An instruction to revoke every transport of a generation below `generation`, now."""

    generation: Generation


class ToLeader(Value, frozen=True):
    """A report to send to the leader."""

    report: Report


Effect = Retire | ToLeader


# --- The machine ----------------------------------------------------------------------------------

Step = tuple[RankState, tuple[Effect, ...]]


def step(state: RankState, message: Input) -> Step:
    """Apply one input.

    Raises InvariantViolation if an `Apply` names a result that this rank does not hold. `Take`
    raises ValueError if the queue is empty, if `Close` comes without a pass, or if a plan that
    voids the step comes into one.
    """
    return TABLE[type(message)](state, message)


def may_run(state: RankState, generation: Generation) -> bool:
    """Return whether an operation across the replicas of `generation` may begin or continue."""
    return generation == state.promised and not (state.queue and isinstance(state.queue[-1], Stop))


def _on_promise(state: RankState, order: Promise) -> Step:
    """Retire older transports, send unreported results, acknowledge; ignore an older promise."""
    if order.generation <= state.promised:
        return state, ()
    state, effects = _flush(replace(state, promised=order.generation))
    # The leader must not get the journal of an attempt that a queued plan voids. The rank's own is
    # emptied when the training thread takes that plan.
    voided = any(isinstance(queued, Plan) and queued.voids for queued in state.queue)
    journal = Journal() if voided else state.journal
    return state, (Retire(order.generation), *effects, ToLeader(Promised(state.rank, order.generation, journal)))


def _on_order(state: RankState, order: Plan | Close | Apply | EnterTraining) -> Step:
    """Queue the order, unless `Stop` is queued; an `Apply` must name only results that are held."""
    if state.queue and isinstance(state.queue[-1], Stop):
        return state, ()
    if isinstance(order, Apply):
        _check_held(state, order)
    return replace(state, queue=(*state.queue, order)), ()


def _check_held(state: RankState, order: Apply) -> None:
    """Raise InvariantViolation if the record names a result that this rank does not hold (INV-2).

    Such a record is a defect of the protocol. Without this check a part of the replica would apply.
    """
    held = {item.bucket: item.version for item in state.held}
    for item in order.record.versions:
        if item.bucket in state.buckets and held.get(item.bucket) != item.version:
            raise InvariantViolation(
                2,
                f"replica {state.replica} rank {state.rank} is to apply bucket {item.bucket} version "
                f"{item.version} of step {order.record.step}, but holds version {held.get(item.bucket)}",
            )


def _on_stop(state: RankState, order: Stop) -> Step:
    """Replace all queued orders by `Stop`, or queue it behind them; retire all transports.

    With exit code 0 `Stop` is queued: training is over, or the replica leaves, and its other ranks
    may obey the orders before it, together with this one.
    """
    return replace(state, queue=(order,) if order.exit_code else (*state.queue, order)), (Retire(state.promised + 1),)


def _on_begin(state: RankState, begin: Begin) -> Step:
    """Report the step to the leader; ranks other than 0 only with a request or a digest."""
    if state.rank != 0 and not begin.requests and begin.digest is None:
        return state, ()
    return state, (ToLeader(Begun(state.rank, state.step, begin.work, begin.requests, begin.digest, begin.stays)),)


def _on_take(state: RankState, _: Take) -> Step:
    """Take an order: `Close` ends the pass, `Apply` the step; a plan drops what it replaces."""
    if not state.queue:
        raise ValueError("there is no order to take: ask only when the queue is not empty")
    order, *rest = state.queue
    if isinstance(order, Close):
        if not state.in_pass:
            raise ValueError(f"replica {state.replica} rank {state.rank} is told to close a pass, and none is open")
        return replace(state, queue=tuple(rest), in_pass=False, has_asked=False), ()
    if isinstance(order, Plan) and order.voids and state.in_pass:
        raise ValueError(f"replica {state.replica} rank {state.rank} is told to void a step in the middle of a pass")
    state = replace(state, queue=tuple(rest), taken=order)
    if isinstance(order, Apply):
        return replace(state, step=order.record.step + 1, held=(), unreported=(), journal=Journal()), ()
    if isinstance(order, EnterTraining):
        return replace(state, step=order.step), ()
    if isinstance(order, Plan):
        state = replace(state, journal=Journal()) if order.voids else state
        replaced = results(order, state.replica)
        held = tuple(item for item in state.held if item.bucket not in replaced)
        return replace(state, held=held, in_pass=state.in_pass or bool(order.computes)), ()
    return state, ()


def _on_ask_close(state: RankState, _: AskClose) -> Step:
    """Request `Close` from the leader, only on rank 0, in a pass, and once."""
    if state.rank != 0 or not state.in_pass or state.has_asked:
        return state, ()
    return replace(state, has_asked=True), (ToLeader(CloseAsked(state.rank, state.step)),)


def _on_started(state: RankState, started: MicrobatchStarted) -> Step:
    """Store the microbatch as started in the journal."""
    journal = state.journal
    return replace(state, journal=replace(journal, started=(*journal.started, started.microbatch))), ()


def _on_finished(state: RankState, finished: MicrobatchFinished) -> Step:
    """Store the microbatch as finished in the journal."""
    journal = state.journal
    return replace(state, journal=replace(journal, finished=(*journal.finished, finished.microbatch))), ()


def _on_time_pass(state: RankState, measured: TimePass) -> Step:
    """Report the time of the pass to the leader, for its vote."""
    return state, (ToLeader(PassTimed(state.rank, measured.num_microbatches, measured.elapsed_ns)),)


def _on_hold(state: RankState, completed: Hold) -> Step:
    """Store a result of the plan, while the plan may run; report all once none is missing."""
    plan, held = state.taken, completed.held
    if not isinstance(plan, Plan) or not may_run(state, plan.generation):
        return state, ()
    expected = {bucket: version for bucket, version in results(plan, state.replica).items() if bucket in state.buckets}
    if expected.get(held.bucket) != held.version or any(item.bucket == held.bucket for item in state.held):
        return state, ()
    items = tuple(sorted((*state.held, held), key=lambda item: item.bucket))
    state = replace(state, held=items, unreported=(*state.unreported, held))
    # One report per plan when nothing fails: the leader has no use for a part of the results.
    return _flush(state) if expected.keys() <= {item.bucket for item in items} else (state, ())


def _flush(state: RankState) -> Step:
    if not state.unreported:
        return state, ()
    return replace(state, unreported=()), (ToLeader(Holds(state.rank, state.step, state.unreported)),)


def _on_block(state: RankState, failed: Block) -> Step:
    """Report a failure that stalled, or that no newer promise and no order to stop explains."""
    if not may_run(state, failed.generation) and not failed.stalled:
        return state, ()
    miscounted = state.step if failed.miscounted else None
    report = RankBlocked(state.rank, failed.generation, failed.reason, failed.suspects, failed.stalled, miscounted)
    return state, (ToLeader(report),)


def _on_fail(state: RankState, raised: Fail) -> Step:
    """Report an exception to the leader, with the microbatches at fault, if any."""
    label = state.taken.work.label if isinstance(state.taken, Plan) else f"step {state.step}"
    return state, (ToLeader(RankFailing(state.rank, state.step, label, raised.microbatches, raised.error)),)


def _on_save(state: RankState, save: Save) -> Step:
    """Report the beginning or end of a save to the leader; only rank 0 reports it."""
    return state, (ToLeader(RankSaving(state.rank, save.over)),) if state.rank == 0 else ()


def _on_finish(state: RankState, _: Finish) -> Step:
    """Report the end of the training loop to the leader."""
    return state, (ToLeader(RankFinished(state.rank)),)


def _on_digest(state: RankState, digest: Digest) -> Step:
    """Report the digest of this rank's state to the leader."""
    return state, (ToLeader(StateDigested(state.rank, digest.label, digest.digest)),)


TABLE: Mapping[type, Callable[[RankState, Any], Step]] = {
    Promise: _on_promise,
    Plan: _on_order,
    Close: _on_order,
    EnterTraining: _on_order,
    Apply: _on_order,
    Stop: _on_stop,
    Begin: _on_begin,
    Take: _on_take,
    MicrobatchStarted: _on_started,
    MicrobatchFinished: _on_finished,
    AskClose: _on_ask_close,
    TimePass: _on_time_pass,
    Hold: _on_hold,
    Block: _on_block,
    Fail: _on_fail,
    Save: _on_save,
    Finish: _on_finish,
    Digest: _on_digest,
}
