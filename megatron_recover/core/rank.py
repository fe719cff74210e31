"""The machine of one rank: which orders it has, which operation may run, which result counts.

`step(state, input) -> (state, effects)`. Both threads of a rank drive the same state under one lock; the machine never blocks.

Caller's contract
-----------------
* Control thread: feed every order of the leader's stream, in order. Carry the effects out before the next input.
* Training thread: `Begin` on arriving at a step; then `Take` whenever the queue is not empty and obey `state.taken`:

  - a `Plan`: run all its computes in full, whatever happens; then its transfers and reductions one by one, each only while
    `may_run(state, plan.generation)`; `Completed` after each that succeeded, `Failed` at the first that did not (then leave
    the rest of the plan), and `Take` again;
  - an `Apply`: the results are the gradient now; go on to the next step;
  - a `Stop`: end.

* A result counts iff it is in `state.held` after `Completed`; otherwise drop it (a newer generation was promised).
* `Retire(g)`: revoke every transport of a generation below g. From its return on none of them writes any memory. It comes
  before the acknowledgement `Report(Promised(g))`, and this order is what INV-5 and INV-8 rest on.
"""

from __future__ import annotations

from megatron_recover.core.values import (
    Apply,
    BucketId,
    Generation,
    Held,
    Order,
    Plan,
    ReplicaId,
    Stop,
    Value,
    Work,
)
from megatron_recover.core.values import (
    Report as ReportValue,
)


class RankState(Value, frozen=True):
    """What a rank knows. Start with `RankState(rank, buckets)`."""

    rank: int
    buckets: tuple[BucketId, ...]
    """Buckets that this rank holds (those of its stage)."""
    promised: Generation = 0
    """Newest generation promised."""
    step: int = 0
    """The step that is not applied yet."""
    queue: tuple[Plan | Apply | Stop, ...] = ()
    """Orders that the training thread has not taken yet."""
    taken: Plan | Apply | Stop | None = None
    """The order that the training thread obeys."""
    held: tuple[Held, ...] = ()
    """Results of this step that count, by bucket."""
    unreported: tuple[Held, ...] = ()
    """Results that the leader does not know yet."""


# --- Inputs: any Order from the leader, and from the rank's own training thread: ------------------------------------------


class Begin(Value, frozen=True):
    """The training thread arrives at its next step (`state.step`)."""

    work: Work
    requests: tuple[str, ...] = ()


class Take(Value, frozen=True):
    """The training thread asks for its next order; the queue is not empty."""


class Completed(Value, frozen=True):
    """An operation across replicas (a transfer to this replica, or a reduction) delivered a result."""

    held: Held


class Failed(Value, frozen=True):
    """An operation across replicas of `generation` failed or waited too long."""

    generation: Generation
    reason: str
    suspects: tuple[ReplicaId, ...] = ()


class Raise(Value, frozen=True):
    """Computing a microbatch raised; the process is about to end."""

    microbatch: int | None
    error: str


class End(Value, frozen=True):
    """The training loop is over."""


Input = Order | Begin | Take | Completed | Failed | Raise | End


# --- Effects -------------------------------------------------------------------------------------------------------------


class Retire(Value, frozen=True):
    """Revoke every transport of a generation below this one, now."""

    generation: Generation


class Report(Value, frozen=True):
    """Send to the leader."""

    report: ReportValue


Effect = Retire | Report
