"""The machine of one replica, run at its leader: orders for its ranks, status and votes for its peers.

`step(state, input) -> (state, effects)`: pure, deterministic, total over every input in any order (what does not fit is
dropped, so late, repeated and reordered messages are harmless). It never waits; `waiting_for` says whom it waits for.

Caller's contract (docs/protocol.md has all of it)
--------------------------------------------------
* Feed every input; carry the effects out in order before the next input.
* `ToRanks` goes to every rank of this replica, the leader's own included, over one FIFO link each.
* `ToPeers` goes to these leaders over FIFO links. A link may break: feed `LinkLost(peer)`, never resend by yourself. Messages
  for a generation that the receiver has not heard of are fed as they come; the machine keeps the newest of each peer.
* `ToCoordinator` goes to the coordinator.
* While `waiting_for(state)` is not empty and neither it, nor `state.generation`, nor `state.step` changed for the stall
  timeout: feed `Expired(generation, step)`.
* `Decided`, `Committed`, and the messages themselves are what the trace is written from.
"""

from __future__ import annotations

import enum

from megatron_recover.core.values import (
    BucketId,
    Generation,
    Held,
    MicrobatchId,
    NewGeneration,
    Order,
    Plan,
    Record,
    ReplicaId,
    Report,
    Shape,
    Status,
    Stop,
    Value,
    Version,
    Vote,
    Work,
)
from megatron_recover.core.values import (
    ToCoordinator as CoordinatorMessage,
)


class Phase(enum.Enum):
    """Where a replica is in its generation."""

    JOINING = "joining"
    """No generation yet."""
    PROMISING = "promising"
    """Waits for its own ranks to promise."""
    EXCHANGING = "exchanging"
    """Has sent its status; waits for the status of every member."""
    IDLE = "idle"
    """All statuses are there; its training loop has not begun the step."""
    WORKING = "working"
    """Its ranks compute and reduce."""
    VOTED = "voted"
    """All its ranks hold all results; waits for the vote of every member."""
    STOPPED = "stopped"


class ReplicaState(Value, frozen=True):
    """What a leader knows. Start with `ReplicaState(replica, shape)`."""

    replica: ReplicaId
    shape: Shape
    phase: Phase = Phase.JOINING
    generation: Generation = 0
    roster: tuple[ReplicaId, ...] = ()
    step: int = 0
    """The step that is not committed yet."""
    work: Work | None = None
    """The step's work once the training loop has begun it."""
    requests: tuple[str, ...] = ()
    """This replica's own requests for the step's vote."""
    forced: tuple[str, ...] = ()
    """Requests that came with generations (`NewGeneration.requests`)."""
    promised: tuple[int, ...] = ()
    """Ranks that promised `generation`."""
    contributions: tuple[tuple[MicrobatchId, ...], ...] = ()
    """Per bucket of the shape the ids that this replica's local gradients hold or will hold."""
    held: tuple[tuple[Held, ...], ...] = ()
    """Per rank its complete results of this step, by bucket."""
    plan: Plan | None = None
    """The plan that the ranks obey, or (phase IDLE) that waits for the training loop to begin the step."""
    statuses: tuple[Status, ...] = ()
    """Newest status of each member, own included, by replica."""
    votes: tuple[Vote, ...] = ()
    """Votes for this step or the next, by (replica, step)."""
    committed: Record | None = None
    """Record of `step - 1`."""
    blocked: bool = False
    """A newer generation was asked for."""
    ended: bool = False
    """The training loop is over."""


# --- Inputs: NewGeneration and Stop (coordinator), Report (ranks), Status and Vote (other leaders), and: -------------------


class LinkLost(Value, frozen=True):
    """The link to another leader broke; messages may be lost."""

    peer: ReplicaId
    detail: str = ""


class Expired(Value, frozen=True):
    """A wait took too long. Dropped unless the replica still waits in this generation and step."""

    generation: Generation
    step: int


Input = NewGeneration | Stop | Report | Status | Vote | LinkLost | Expired


# --- Effects -------------------------------------------------------------------------------------------------------------


class ToRanks(Value, frozen=True):
    """Send to every rank of this replica."""

    order: Order


class ToPeers(Value, frozen=True):
    """Send to these leaders (may be empty: a roster of one)."""

    peers: tuple[ReplicaId, ...]
    message: Status | Vote


class ToCoordinator(Value, frozen=True):
    """Send to the coordinator."""

    message: CoordinatorMessage


class Decided(Value, frozen=True):
    """A recovery plan was made: what was decided and why (the plan itself follows in `ToRanks`)."""

    step: int
    generation: Generation
    decided: tuple[tuple[BucketId, Version, ReplicaId], ...]
    """(bucket, version, a member that holds it)."""
    dealt: tuple[tuple[MicrobatchId, ReplicaId], ...]
    """Who recomputes what."""
    reason: str


class Committed(Value, frozen=True):
    """The step is committed here."""

    record: Record
    generation: Generation
    adopted: bool
    """The record came with a member's status instead of from votes."""


Effect = ToRanks | ToPeers | ToCoordinator | Decided | Committed
