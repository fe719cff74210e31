"""The messages between the agents of nodes and the coordinator (`nodes_driver.py`)."""

from __future__ import annotations

from typing import Literal

from megatron_recover.core.coordinator_state import MembershipSettings
from megatron_recover.core.membership_messages import Loss, ReplicaFailing
from megatron_recover.core.slots import Settings as Healing
from megatron_recover.core.values import Generation, ReplicaId, Value
from megatron_recover.core.verdict import Known, Part

Seat = tuple[int, int]
"""A rank of a replica, and the number of its slot on its node."""

# --- From an agent --------------------------------------------------------------------------------


class NodeHello(Value, frozen=True):
    """The first message of an agent: its node wants to take part in the job."""

    identity: int
    """A random number, by which the node that started the coordinator is known."""
    name: str
    """Name of the host."""
    slots: int
    """Number of ranks that this node runs."""
    node_rank: int | None = None
    """Number that the launch line gives to the node."""
    run_dir: str = ""
    """Run directory; empty unless the node has started a coordinator."""
    run_id: str = ""
    """TORCHELASTIC_RUN_ID of the ranks, the same on all nodes."""
    alike: tuple[tuple[str, str], ...] = ()
    """Named values that have to be equal on all nodes, as (name, value) pairs."""
    address: str = ""
    """Address of the node, at which its processes listen."""
    mistake: str = ""
    """Reason why the node can take no part; empty: it can. With a reason, a job that has not begun
    ends on all nodes."""
    job: int = 0
    """The job that the agent belongs to, from `Met` or `Idle`; 0: none yet. Another start may have
    the same key and endpoint."""


class NodeShares(Value, frozen=True):
    """The findings of a node in one round of the examination of all nodes, before it prepares.

    The coordinator does not read `data`. It waits for that of all nodes.
    """

    round: int
    data: bytes
    wanted: tuple[int, ...]
    """Numbers of the nodes whose findings this node gets."""


class NodeReady(Value, frozen=True):
    """The node has imported everything and its dry run has passed: it can start ranks."""

    settings: MembershipSettings
    replicas: tuple[ReplicaId, ...]
    """The replicas that have ranks on this node."""
    leaders: tuple[tuple[ReplicaId, str], ...]
    """(replica, address of its leader) of the replicas whose rank 0 is on this node."""
    stores: tuple[tuple[ReplicaId, str], ...] = ()
    """(replica, address of its store) of those that also have ranks on other nodes."""
    seats: tuple[tuple[ReplicaId, tuple[Seat, ...]], ...] = ()
    """The slots here of each replica's ranks, if lost replicas are to be replaced."""
    spares: tuple[int, ...] = ()
    """The slots here that have no rank, in the same case."""
    healing: Healing | None = None
    """The settings by which lost replicas are replaced; None: they are not."""


class NodeFailed(Value, frozen=True):
    """The node can take no part in the job, or no longer."""

    exit_code: int
    reason: str


class NodeLaunched(Value, frozen=True):
    """The processes of all ranks of the node are started."""


class NodeBeat(Value, frozen=True):
    """A sign of life of an agent, which the coordinator answers with the same message."""


class ReplicaGone(Value, frozen=True):
    """A replica is lost through a rank of this node, or has to be treated as lost."""

    loss: Loss
    failing: ReplicaFailing | None = None
    """The microbatches to which the loss is charged."""
    rank: int | None = None
    """The rank that has caused the loss, if it is known."""
    is_from_outside: bool = False
    """True if the rank was stopped or traced by somebody: its slot is not to blame. A signal that
    ends a rank is told from others by the kind of the loss."""


class NodeAtWork(Value, frozen=True):
    """The replicas of which a rank on this node has work of its own (`AtWork`)."""

    replicas: tuple[ReplicaId, ...]


class NodeSuspects(Value, frozen=True):
    """The replicas that the agent suspects of a hang (`core/condemning.py`, `Suspected`)."""

    number: int
    """Number of the report, from 1."""
    silent: tuple[ReplicaId, ...]
    accused: tuple[ReplicaId, ...]


class NodePart(Value, frozen=True):
    """The answer to `AskPart`."""

    question: int
    part: Part


class EndAsked(Value, frozen=True):
    """An agent requests the end of the job after a common step, mostly for a signal."""

    reason: str


class DrainAsked(Value, frozen=True):
    """A request that replicas leave the job, or that a node is not used any more."""

    replicas: tuple[ReplicaId, ...]
    reason: str
    id: str = ""
    """Name of the request, for its answer."""
    node: str = ""
    """Name of the node that is to be given back; empty: the request is for `replicas`."""


class ScaleAsked(Value, frozen=True):
    """A request that the job has another number of replicas."""

    num_replicas: int
    reason: str
    id: str = ""
    """Name of the request, for its answer."""


class KillAsked(Value, frozen=True):
    """A person requests that all nodes kill everything at once."""

    exit_code: int
    reason: str


class FenceDone(Value, frozen=True):
    """The end of every rank of a fenced replica on this node was seen."""

    replica: ReplicaId


class SlotsReady(Value, frozen=True):
    """The slots of a newcomer on this node are free and fit: its ranks can be started."""

    replica: ReplicaId
    leader: str = ""
    """Address of its leader, if rank 0 is on this node."""
    store: str = ""
    """Address of its store, if rank 0 is on this node and others are elsewhere."""


class SlotsUnfit(Value, frozen=True):
    """A newcomer cannot be started on this node."""

    replica: ReplicaId
    slots: tuple[int, ...]
    """The slots to blame."""
    why: str


# --- Between node 0 and another node, by way of the coordinator -----------------------------------


class TraceOffer(Value, frozen=True):
    """A message to node 0: the trace of this node is whole, in its own folder."""

    node: int


class TracePart(Value, frozen=True):
    """A message to node 0, the answer to `TraceNext`: a part of a file (`gathering.FilePart`)."""

    node: int
    name: str
    size: int
    offset: int
    data: bytes


class TraceEnds(Value, frozen=True):
    """A message to node 0, the answer to `TraceNext`: there is no further part."""

    node: int


class TraceNext(Value, frozen=True):
    """A message to a node: send one part of the files that node 0 does not see."""

    node: int


class TraceDone(Value, frozen=True):
    """A message to a node: nothing of it is needed any more. Also where node 0 is gone."""

    node: int


# --- From the coordinator -------------------------------------------------------------------------


class NodePlace(Value, frozen=True):
    """One node of the job."""

    number: int
    """Number of the node, from 0; node 0 has the coordinator."""
    name: str
    slots: int


class Met(Value, frozen=True):
    """The nodes of the job are complete; or the receiver, which came later, is to be a spare."""

    nodes: tuple[NodePlace, ...]
    """All nodes that have a number, also those that were lost since, by number."""
    you: int
    run_dir: str
    run_id: str
    job: int = 0
    """A random number by which this job is known from other starts."""
    num_late: int = 0
    """Number of nodes that came after the start: they are the last of `nodes`."""

    @property
    def at_start(self) -> tuple[NodePlace, ...]:
        """Return the nodes that met at the start: replicas were placed on these alone."""
        return self.nodes[: len(self.nodes) - self.num_late]

    @property
    def is_late(self) -> bool:
        """Return whether the receiver came after the start: all of its slots are spares."""
        return self.you >= len(self.at_start)


class NodesShared(Value, frozen=True):
    """All nodes have ended a round. `data` is what the receiver wanted, in its order."""

    round: int
    data: tuple[bytes, ...]


class Launch(Value, frozen=True):
    """All nodes are ready: start the ranks."""

    leaders: tuple[tuple[ReplicaId, str], ...]
    """(replica, address of its leader) of every replica that has ranks on the receiver's node."""
    stores: tuple[tuple[ReplicaId, str], ...] = ()
    """(replica, address of its store) of those that also have ranks on other nodes."""


class Roster(Value, frozen=True):
    """A new generation was announced to the leaders."""

    generation: Generation
    roster: tuple[ReplicaId, ...]
    losses: tuple[Loss, ...]
    reason: str
    """The reason of the generation, as in `NewGeneration`."""
    left: tuple[ReplicaId, ...] = ()
    """Replicas that have left as requested, as in `NewGeneration`."""
    newcomers: tuple[ReplicaId, ...] = ()
    """Replicas of the roster that are unproven."""


class NotAdmitted(Value, frozen=True):
    """Newcomers of the roster were turned away: they form again, and are no members."""

    newcomers: tuple[ReplicaId, ...]


class FenceReplica(Value, frozen=True):
    """Kill all ranks of a replica on this node."""

    replica: ReplicaId


class FormReplica(Value, frozen=True):
    """Check the slots of a newcomer on this node, and listen for it; the answer is `SlotsReady`."""

    replica: ReplicaId
    seats: tuple[Seat, ...]
    """Its ranks on this node."""
    spans_nodes: bool = False
    """True if it has ranks on other nodes, too."""


class StartReplica(Value, frozen=True):
    """Start the ranks of a newcomer on this node: all its slots are fit."""

    replica: ReplicaId
    leader: str
    store: str = ""
    """Address of its store, if it spans nodes."""


class Say(Value, frozen=True):
    """A line for people, from the coordinator to node 0."""

    text: str


class DismissReplica(Value, frozen=True):
    """A replica leaves the job: ends of its ranks are no losses. Kill those that do not end."""

    replica: ReplicaId


class DrainAnswer(Value, frozen=True):
    """The answer to `DrainAsked`."""

    id: str
    refused: tuple[tuple[ReplicaId, str], ...]
    """(replica, reason) of those that do not leave."""
    why: str = ""
    """Reason and remedy if the request for a node is refused, else empty."""
    text: str = ""
    """The consequences for a node, in words."""
    leaving: tuple[ReplicaId, ...] = ()
    """The members that leave for it."""


class ScaleAnswer(Value, frozen=True):
    """The answer to `ScaleAsked`."""

    id: str
    refused: str
    """Reason and remedy if the request is refused, else empty."""
    text: str = ""
    """The consequences in words."""
    leaving: tuple[ReplicaId, ...] = ()
    """The members that leave for it."""


class AskPart(Value, frozen=True):
    """Report what the ranks of a replica on this node do; another node accuses the replica."""

    question: int
    replica: ReplicaId


class TellKnown(Value, frozen=True):
    """The facts known about a replica that the agent accuses."""

    report: int
    """Number of the `NodeSuspects` that is answered."""
    known: Known


class JobEnds(Value, frozen=True):
    """The job is over, and its leaders were told so."""

    exit_code: int
    reason: str
    at_once: bool = False
    """True: kill what is left without waiting."""
    too_few: bool = False
    """True: fewer nodes than the job needs were there when the wait for them was over."""


class NodeState(Value, frozen=True):
    """One node, as the coordinator sees it."""

    number: int
    name: str
    state: Literal["here", "silent", "lost", "spare", "idle", "drained"]
    """`spare`: it came after the start, and newcomers may be formed on it. `idle`: it is not used;
    it may be about to become a spare. `drained`: it was given back, and has no member any more."""
    replicas: tuple[ReplicaId, ...]
    """The replicas with ranks there: all at the start for a lost node, else those of the roster."""


class JobState(Value, frozen=True):
    """The state of the job, for node 0, which writes it down (`cluster/status.py`)."""

    generation: Generation
    roster: tuple[ReplicaId, ...]
    step: int
    """Number of committed steps, evaluation and saves included."""
    nodes: tuple[NodeState, ...]
    wanted: int | None = None
    """Number of replicas that the job wants (`core/scaling.py`); None: that of its start."""


class NodeGone(Value, frozen=True):
    """A message to node 0: a node was lost or has hung up. It sends no trace."""

    node: int
    why: str


class Idle(Value, frozen=True):
    """The job does not use this node. The node waits for the end of the job, or for `Met`."""

    reason: str
    job: int = 0
    """The number of the job, as in `Met`."""


class StartAnew(Value, frozen=True):
    """The node was removed, and every rank of the job has ended on it: end this run of the node.

    The node then meets the others anew, and becomes a spare under a new number.
    """


class OtherJob(Value, frozen=True):
    """The answer to the hello of an agent that belongs to another job than this coordinator."""


class GivesUp(Value, frozen=True):
    """The coordinator leaves the job, which goes on to its next save point without one."""

    reason: str


FromAgent = (
    NodeHello
    | NodeShares
    | NodeReady
    | NodeFailed
    | NodeLaunched
    | NodeBeat
    | ReplicaGone
    | NodeAtWork
    | NodeSuspects
    | NodePart
    | EndAsked
    | DrainAsked
    | ScaleAsked
    | KillAsked
    | FenceDone
    | SlotsReady
    | SlotsUnfit
    | TraceOffer
    | TracePart
    | TraceEnds
    | TraceNext
    | TraceDone
)
ToAgent = (
    Met
    | NodesShared
    | Launch
    | Roster
    | NotAdmitted
    | FenceReplica
    | FormReplica
    | StartReplica
    | Say
    | DismissReplica
    | DrainAnswer
    | ScaleAnswer
    | AskPart
    | TellKnown
    | JobEnds
    | Idle
    | StartAnew
    | OtherJob
    | GivesUp
    | JobState
    | NodeGone
    | TraceOffer
    | TracePart
    | TraceEnds
    | TraceNext
    | TraceDone
)
