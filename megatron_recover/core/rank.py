"""The machine of one rank: which orders it has, which operation may run, which result counts.

`step(state, input) -> (state, effects)`. Both threads of a rank drive the same state under one lock; the machine never blocks.

Caller's contract
-----------------
* Control thread: feed every order of the leader's stream, in order. Carry the effects out before the next input.
* Training thread: `Begin` on arriving at a step; then `Take` whenever the queue is not empty and obey `state.taken`:

  - a `Plan`: run all its computes in full, whatever happens, in one pass (Note [Passes]); as soon as `in_pass` is over, its
    operations (`operations(plan, state.replica, state.buckets)` of `core/plan.py`) one by one, each only while
    `may_run(state, plan.generation)`; `Completed` after each that succeeded, `Failed` at the first that did not (then leave
    the rest of the plan), and `Take` again;
  - a `Close`, the one order that `state.taken` does not become: look for it at the head of the queue before `Take`. The pass
    ends with the microbatches that are known;
  - a `Plan` that voids: first empty the local gradient and all counts of the step;
  - an `Apply`: the results are the gradient now; go on to the next step;
  - a `Stop`: end.

* A result counts iff it is in `state.held` after `Completed`; otherwise drop it (a newer generation was promised).
* `Retire(g)`: revoke every transport of a generation below g. From its return on none of them writes any memory. It comes
  before the acknowledgement `ToLeader(Promised(g))`, and this order is what INV-5 and INV-8 rest on.

Note [Passes]
    A pass of the schedule belongs to all ranks of a replica, and they must agree on what is in it without waiting for each
    other. It begins with a `Plan` that has computes, takes in the computes of every `Plan` that follows in the stream of
    orders, and ends at `Close`. Rank 0 (of the first stage) feeds `EndPass` one forward before the schedule needs to know of
    more than rank 0 does, and the leader puts `Close` into the stream: the same place for everybody. So a microbatch that is
    dealt before that moment is computed in the pass that runs; later ones open a pass of their own. Of the plans of a pass
    only the newest is reduced: the others are of generations that are over.

    A plan that voids what the step has so far (`Plan.voids`) never comes into a pass: it follows from a sum of the generation
    before, to which every member has contributed, and a member contributes when the pass is closed.

    The machine knows whether a pass runs here (`in_pass`) and whether its end was asked for, and the end of a pass that nobody
    opened is a defect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.plan import results
from megatron_recover.core.values import (
    Apply,
    Begun,
    Blocked,
    BucketId,
    Close,
    Closing,
    Computed,
    Ended,
    Generation,
    Held,
    Holds,
    Journal,
    MicrobatchId,
    Order,
    Plan,
    Promise,
    Promised,
    Raised,
    ReplicaId,
    Report,
    Saving,
    Stop,
    Value,
    Work,
)


class RankState(Value, frozen=True):
    """What a rank knows. Start with `RankState(replica, rank, buckets)`."""

    replica: ReplicaId
    rank: int
    buckets: tuple[BucketId, ...]
    """Buckets that this rank holds (those of its stage)."""
    promised: Generation = 0
    """Newest generation promised."""
    step: int = 0
    """The step that is not applied yet."""
    queue: tuple[Plan | Close | Apply | Stop, ...] = ()
    """Orders that the training thread has not taken yet."""
    taken: Plan | Apply | Stop | None = None
    """The order that the training thread obeys."""
    in_pass: bool = False
    """Whether the training thread runs a pass: it has taken a plan that computes, and no `Close` since."""
    has_asked: bool = False
    """Of rank 0: the end of that pass is asked for."""
    held: tuple[Held, ...] = ()
    """Results of this step that count, by bucket."""
    unreported: tuple[Held, ...] = ()
    """Results that the leader does not know yet."""
    journal: Journal = Journal()
    """Of rank 0: its microbatches of this step."""


# --- Inputs: any Order from the leader, and from the rank's own training thread: ------------------------------------------


class Begin(Value, frozen=True):
    """The training thread arrives at its next step (`state.step`)."""

    work: Work
    requests: tuple[str, ...] = ()
    digest: int | None = None
    """As in `values.Begun`."""


class Take(Value, frozen=True):
    """The training thread asks for its next order; the queue is not empty."""


class EndPass(Value, frozen=True):
    """Rank 0's schedule is about to need more microbatches than are known; once in a pass is enough."""


class MicrobatchStarted(Value, frozen=True):
    """Rank 0 begins the forward of a microbatch."""

    microbatch: MicrobatchId


class MicrobatchFinished(Value, frozen=True):
    """Rank 0 has ended the backward of a microbatch (in evaluation its forward)."""

    microbatch: MicrobatchId


class Measured(Value, frozen=True):
    """Rank 0 knows how long the first pass of a training step took; as in `values.Computed`."""

    num_microbatches: int
    elapsed_ns: int


class Completed(Value, frozen=True):
    """An operation across replicas (a transfer to this replica, or a reduction) delivered a result."""

    held: Held


class Failed(Value, frozen=True):
    """An operation across replicas of `generation` failed or waited too long."""

    generation: Generation
    reason: str
    suspects: tuple[ReplicaId, ...] = ()
    stalled: bool = False
    """Both as in `values.Blocked`."""
    miscounted: bool = False
    """What it delivered does not count every microbatch once."""


class Raise(Value, frozen=True):
    """Computing a microbatch raised; the process is about to end."""

    microbatches: tuple[MicrobatchId, ...]
    """As in `values.Raised`."""
    error: str


class Save(Value, frozen=True):
    """The training thread begins a checkpoint save, or has ended it (`over`)."""

    over: bool


class End(Value, frozen=True):
    """The training loop is over."""


Input = (
    Order | Begin | Take | MicrobatchStarted | MicrobatchFinished | EndPass | Measured | Completed | Failed | Raise | Save | End
)


# --- Effects -------------------------------------------------------------------------------------------------------------


class Retire(Value, frozen=True):
    """Revoke every transport of a generation below this one, now."""

    generation: Generation


class ToLeader(Value, frozen=True):
    """Send to the leader."""

    report: Report


Effect = Retire | ToLeader


# --- The machine ---------------------------------------------------------------------------------------------------------

Step = tuple[RankState, tuple[Effect, ...]]


def step(state: RankState, message: Input) -> Step:
    """Take one input. Raises InvariantViolation if the leader's orders contradict what this rank holds."""
    return TABLE[type(message)](state, message)


def may_run(state: RankState, generation: Generation) -> bool:
    """Whether an operation across the replicas of `generation` may begin or go on."""
    return generation == state.promised and not (state.queue and isinstance(state.queue[0], Stop))


def _on_promise(state: RankState, order: Promise) -> Step:
    """Retire what is older, report what is held, acknowledge; in this order."""
    if order.generation <= state.promised:
        return state, ()
    state, effects = _flush(replace(state, promised=order.generation))
    # What a plan voids counts no more from the order on, whenever the training thread takes it.
    voided = any(isinstance(queued, Plan) and queued.voids for queued in state.queue)
    journal = Journal() if voided else state.journal
    return state, (Retire(order.generation), *effects, ToLeader(Promised(state.rank, order.generation, journal)))


def _on_order(state: RankState, order: Plan | Close | Apply) -> Step:
    """Queue it for the training thread."""
    if state.queue and isinstance(state.queue[0], Stop):
        return state, ()
    if isinstance(order, Apply):
        _check_held(state, order)
    return replace(state, queue=(*state.queue, order)), ()


def _check_held(state: RankState, order: Apply) -> None:
    """No half of a replica may apply: a record that names a result which is not here is a defect of the protocol (INV-2)."""
    held = {item.bucket: item.version for item in state.held}
    for item in order.record.versions:
        if item.bucket in state.buckets and held.get(item.bucket) != item.version:
            raise InvariantViolation(
                2,
                f"replica {state.replica} rank {state.rank} is to apply bucket {item.bucket} version "
                f"{item.version} of step {order.record.step}, but holds version {held.get(item.bucket)}",
            )


def _on_stop(state: RankState, order: Stop) -> Step:
    """Put it before everything else and retire all transports."""
    return replace(state, queue=(order,)), (Retire(state.promised + 1),)


def _on_begin(state: RankState, begin: Begin) -> Step:
    """Tell the leader; of a follower it wants to know requests and digest only."""
    if state.rank != 0 and not begin.requests and begin.digest is None:
        return state, ()
    return state, (ToLeader(Begun(state.rank, state.step, begin.work, begin.requests, begin.digest)),)


def _on_take(state: RankState, _: Take) -> Step:
    """Hand the next order to the training thread; a plan gives up the results that it replaces."""
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
    if isinstance(order, Plan):
        state = replace(state, journal=Journal()) if order.voids else state
        replaced = results(order, state.replica)
        held = tuple(item for item in state.held if item.bucket not in replaced)
        return replace(state, held=held, in_pass=state.in_pass or bool(order.computes)), ()
    return state, ()


def _on_end_pass(state: RankState, _: EndPass) -> Step:
    """Ask the leader to close the pass for all ranks at the same place in the stream of orders."""
    if state.rank != 0 or not state.in_pass or state.has_asked:
        return state, ()
    return replace(state, has_asked=True), (ToLeader(Closing(state.rank, state.step)),)


def _on_started(state: RankState, started: MicrobatchStarted) -> Step:
    """Journal it."""
    journal = state.journal
    return replace(state, journal=replace(journal, started=(*journal.started, started.microbatch))), ()


def _on_finished(state: RankState, finished: MicrobatchFinished) -> Step:
    """Journal it."""
    journal = state.journal
    return replace(state, journal=replace(journal, finished=(*journal.finished, finished.microbatch))), ()


def _on_measured(state: RankState, measured: Measured) -> Step:
    """Tell the leader, for its vote."""
    return state, (ToLeader(Computed(state.rank, measured.num_microbatches, measured.elapsed_ns)),)


def _on_completed(state: RankState, completed: Completed) -> Step:
    """Count the result if the plan asked for it and its generation is still the promised one; report all of a plan at once."""
    plan, held = state.taken, completed.held
    if not isinstance(plan, Plan) or not may_run(state, plan.generation):
        return state, ()
    expected = {bucket: version for bucket, version in results(plan, state.replica).items() if bucket in state.buckets}
    if expected.get(held.bucket) != held.version or any(item.bucket == held.bucket for item in state.held):
        return state, ()
    items = tuple(sorted((*state.held, held), key=lambda item: item.bucket))
    state = replace(state, held=items, unreported=(*state.unreported, held))
    # One report a plan when nothing fails: the leader can do nothing with a part of them.
    return _flush(state) if expected.keys() <= {item.bucket for item in items} else (state, ())


def _flush(state: RankState) -> Step:
    if not state.unreported:
        return state, ()
    return replace(state, unreported=()), (ToLeader(Holds(state.rank, state.step, state.unreported)),)


def _on_failed(state: RankState, failed: Failed) -> Step:
    """Tell the leader, unless the generation is over anyway; that it waited in vain it tells even then."""
    if not may_run(state, failed.generation) and not failed.stalled:
        return state, ()
    miscounted = state.step if failed.miscounted else None
    report = Blocked(state.rank, failed.generation, failed.reason, failed.suspects, failed.stalled, miscounted)
    return state, (ToLeader(report),)


def _on_raise(state: RankState, raised: Raise) -> Step:
    """Tell the leader which microbatch of what."""
    label = state.taken.work.label if isinstance(state.taken, Plan) else f"step {state.step}"
    return state, (ToLeader(Raised(state.rank, state.step, label, raised.microbatches, raised.error)),)


def _on_save(state: RankState, save: Save) -> Step:
    """Tell the leader, if this rank speaks for the replica."""
    return state, (ToLeader(Saving(state.rank, save.over)),) if state.rank == 0 else ()


def _on_end(state: RankState, _: End) -> Step:
    """Tell the leader."""
    return state, (ToLeader(Ended(state.rank)),)


TABLE: Mapping[type, Callable[[RankState, Any], Step]] = {
    Promise: _on_promise,
    Plan: _on_order,
    Close: _on_order,
    Apply: _on_order,
    Stop: _on_stop,
    Begin: _on_begin,
    Take: _on_take,
    MicrobatchStarted: _on_started,
    MicrobatchFinished: _on_finished,
    EndPass: _on_end_pass,
    Measured: _on_measured,
    Completed: _on_completed,
    Failed: _on_failed,
    Raise: _on_raise,
    Save: _on_save,
    End: _on_end,
}
