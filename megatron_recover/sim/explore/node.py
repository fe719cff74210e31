"""Replicas around the core's machines: ranks with data, and reductions that fail on some members.

A `Node` is one replica: its leader's machine, the machines of its ranks, and their memory. Data is
a multiset of microbatch ids per bucket, so exactly-once is checked in the data: `counts[i]` is how
often microbatch i is in it. All is a pure function of frozen values, so outcomes are remembered.

Simulated steps, and why they suffice
-------------------------------------
* Nodes interact by messages only. A rank that arrives at a reduction publishes its local gradient
  (`Addend`). When all members have published, each rank may complete, at any later time or never,
  independently of the others. A transport promises no more (data_plane/transport.py). A transfer of
  a decided bucket works the same way with `Copy`.
* Inside a node these are left to chance: when a rank other than the leader's obeys a `Promise`,
  until which it may still complete a reduction; when rank 0 begins a step; when another rank begins
  a step with a digest, or ends; and, if the scenario says so, when a pass ends (`passes_last`) or a
  training thread takes an order (`slow`). Every other step (reports, publishing) follows at once.
  It is invisible outside the node until the next message, commutes with all steps elsewhere, and is
  undone only by the loss of the node. Being early only adds behaviours: a published `Addend` need
  not be used.
* The same holds for reductions that overlap the last backward. A bucket is published when the pass
  is closed, earlier than backward can reach it. The node's gradient already has the whole pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_recover.core import invariants, rank, replica
from megatron_recover.core.membership_messages import AddRequests, JoinRefused, LeaderMessage, NewGeneration
from megatron_recover.core.plan import Operation
from megatron_recover.core.rank_messages import Order
from megatron_recover.core.values import (
    BucketId,
    Claim,
    Generation,
    ReplicaId,
    Shape,
    Status,
    Statuses,
    Value,
    Version,
    Vote,
    Votes,
    Work,
)
from megatron_recover.sim.multiset import Multiset

EXIT_REASON = "SIGTERM"
"""The reason for which the job is asked to end."""


class Addend(Value, frozen=True):
    """A rank's local gradient of a bucket, published for the reduction of a generation."""

    replica: ReplicaId
    rank: int
    generation: Generation
    step: int
    bucket: BucketId
    counts: Multiset


class Copy(Value, frozen=True):
    """A decided result on its way from a rank to the ranks of equal position in other members."""

    replica: ReplicaId
    rank: int
    generation: Generation
    step: int
    bucket: BucketId
    version: Version
    counts: Multiset


Message = (
    NewGeneration
    | AddRequests
    | Status
    | Statuses
    | Vote
    | Votes
    | Claim
    | JoinRefused
    | replica.Admission
    | replica.HoldAsked
    | Addend
    | Copy
)


class Rank(Value, frozen=True):
    """A rank: its machine, its memory, and what its threads have yet to do."""

    machine: rank.RankState
    gradient: tuple[Multiset, ...]
    """Local gradient of each bucket of the rank."""
    results: tuple[Multiset, ...]
    """Memory of the result of each bucket of the rank; () where unspecified."""
    operations: tuple[Operation, ...] = ()
    """Operations across replicas that the training thread has yet to do, in order."""
    orders: tuple[Order, ...] = ()
    """Orders on their way from the leader."""
    begun: int = -1
    """Newest step that a follower has reported as begun, or at which it has reported its end."""

    def may_end(self) -> bool:
        """Return whether the rank runs a pass whose end it has not requested."""
        return self.machine.in_pass and not self.machine.has_asked

    def can_take(self) -> bool:
        """Return whether the training thread is free and has an order to take."""
        return bool(self.machine.queue) and not self.operations


class Node(Value, frozen=True):
    """One replica."""

    leader: replica.ReplicaState
    ranks: tuple[Rank, ...]
    work: tuple[Work, ...]
    """Steps of the job. After a step that is given up, or whose record has the request to end the
    job, comes a save only."""
    drifted: bool = False
    """True if its parameters differ from those of the others."""
    flawed: bool = False
    """True if it counts microbatch 0 once too often, until the step is applied or becomes void."""
    state_drifted: bool = False
    """True if other state differs, such as a moment of the optimizer. No sum depends on it yet."""
    is_newcomer: bool = False
    read: int = -1
    """Newest step whose state this newcomer has read; -1: none."""

    def may_miscount(self) -> bool:
        """Return whether the node may miscount: in the step that it is in, or in its next one."""
        work = self.leader.work
        return not self.flawed and (self.between_steps() if work is None else bool(work.buckets))

    def may_begin(self) -> bool:
        """Return whether rank 0 can begin its next step, or end."""
        leader = self.leader
        free = self.trains() and leader.work is None and not leader.ended
        return free and self.has_applied(0)

    def trains(self) -> bool:
        """Return whether the training loop runs: it does in a generation, once admitted."""
        leader = self.leader
        return leader.phase is not replica.ReplicaPhase.JOINING and (leader.claim is None or leader.admitted_in > 0)

    def may_read(self) -> bool:
        """Return whether a newcomer has yet to read a state, or to read another one."""
        return self.is_newcomer and self.leader.phase is replica.ReplicaPhase.JOINING and self.leader.claim is None

    def has_read(self) -> bool:
        """Return whether a newcomer may ask a member to vouch for what it has read."""
        return self.may_read() and len(self.leader.served) == len(self.ranks)

    def serves(self) -> int | None:
        """Return the step with whose state all ranks are to begin or have begun, or None."""
        step = self.leader.step
        return step if all(self.has_applied(rank) for rank in range(len(self.ranks))) and step < len(self.work) else None

    def has_applied(self, rank: int) -> bool:
        """Return whether a rank has applied all that is committed."""
        return self.ranks[rank].machine.step == self.leader.step

    def to_arrive(self) -> list[int]:
        """Return the followers that have yet to begin the next step with a digest, or to end."""
        leader, at_end = self.leader, self.leader.step == len(self.work)
        if not self.trains() or not (leader.ended if at_end else self.work[leader.step].digests):
            return []
        followers = range(1, len(self.ranks))
        return [rank for rank in followers if self.has_applied(rank) and self.ranks[rank].begun < leader.step]

    def between_steps(self) -> bool:
        """Return whether all ranks have applied the last step and none has begun the next."""
        leader = self.leader
        begun = leader.work is not None or leader.ended or leader.digests
        return not begun and all(self.has_applied(rank) for rank in range(len(self.ranks)))


# --- Stimuli: what can happen to a node -----------------------------------------------------------


class Miscount(Value, frozen=True):
    """A fault that makes the node miscount in an attempt at a step."""


class BeginStep(Value, frozen=True):
    """The training loop arrives at its next step, or at its end."""


class Arrive(Value, frozen=True):
    """A follower begins the next step where its digest is due, or ends later than rank 0.

    That it begins any other step is no event: it reports nothing.
    """

    rank: int


class CarryOut(Value, frozen=True):
    """A rank carries out the next order on its way to it."""

    rank: int


class TakeUp(Value, frozen=True):
    """The training thread of a rank takes its next order. Left to chance only if `Threads.slow`."""

    rank: int


class AskClose(Value, frozen=True):
    """Rank 0 asks for the end of its pass; its gradient has all known microbatches by then.

    Unless `Threads.passes_last`, this follows at once when rank 0 takes a plan.
    """


class Complete(Value, frozen=True):
    """The operation at which a rank has arrived completes with this result."""

    rank: int
    counts: Multiset


class Fail(Value, frozen=True):
    """The operation at which a rank has arrived fails on this rank, and perhaps not on others."""

    rank: int


class Stall(Value, frozen=True):
    """A rank's operation has waited in vain for these replicas, as far as the rank knows."""

    rank: int
    accused: tuple[ReplicaId, ...]


class Serve(Value, frozen=True):
    """The ranks digest the state that they serve to newcomers."""


class ReadState(Value, frozen=True):
    """The ranks of a newcomer read the state with which a member begins a step."""

    step: int
    drifted: bool
    state_drifted: bool
    """Both as those of the member that is read from."""


class Drift(Value, frozen=True):
    """The parameters change, between two steps only: a step takes their checksum when it begins."""


class DriftState(Value, frozen=True):
    """State changes that no sum depends on, between two steps only."""


Stimulus = (
    NewGeneration | AddRequests | Status | Statuses | Vote | Votes | replica.LinkLost | replica.CoordinatorLost
    | replica.SendClaim | Serve | ReadState | Claim | JoinRefused | replica.Admission
    | replica.AskHold | replica.HoldAsked | replica.HoldExpired
    | BeginStep | Arrive | CarryOut | TakeUp | AskClose | Complete | Fail | Stall | Drift | DriftState | Miscount
)  # fmt: skip


class Outcome(Value, frozen=True):
    """Result of a stimulus."""

    node: Node
    messages: tuple[tuple[Message, tuple[ReplicaId, ...]], ...]
    """(message, replicas to which it is sent)."""
    reports: tuple[LeaderMessage, ...]
    facts: tuple[invariants.Fact, ...]


def new_node(
    number: ReplicaId, shape: Shape, work: Sequence[Work], tree_above: int, min_replicas: int = 1, *, is_newcomer: bool = False
) -> Node:
    """Return a replica that knows no generation."""
    zeros = (0,) * work[0].num_microbatches
    ranks = []
    for position in range(shape.num_ranks):
        buckets = tuple(bucket for bucket, holders in enumerate(shape.bucket_ranks) if position in holders)
        machine = rank.RankState(number, position, buckets)
        ranks.append(Rank(machine, (zeros,) * len(buckets), ((),) * len(buckets)))
    leader = replica.ReplicaState(number, shape, tree_above, min_replicas)
    return Node(leader, tuple(ranks), tuple(work), is_newcomer=is_newcomer)


def pending(node: Node) -> list[tuple[int, Operation]]:
    """Return (rank, operation) of every operation at which a rank has arrived."""
    return [(position, one.operations[0]) for position, one in enumerate(node.ranks) if one.operations]
