"""The driver of healing, in the coordinator: it has lost replicas replaced by newcomers.

`core/slots.py` decides who is formed where. Once the end of every process of a lost replica was
seen, the machine of membership gives the newcomer an id (`CoordinatorDriver.ask_form`). The nodes
of its slots check them (`FormReplica`, `SlotsReady`), and start its ranks (`StartReplica`) when all
nodes are ready. From then on its leader speaks for it. Its end is a loss like any other, and no
member waits for any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from megatron_recover.control_plane.coordinator_driver import CoordinatorDriver
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import (
    FormReplica,
    NodeReady,
    ReplicaGone,
    Say,
    SlotsReady,
    SlotsUnfit,
    StartReplica,
)
from megatron_recover.control_plane.wire import Message
from megatron_recover.core import generations, leaving, policy, slots
from megatron_recover.core.coordinator_state import CoordinatorState
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import Loss, LossKind
from megatron_recover.core.placement import Slot
from megatron_recover.core.values import ReplicaId
from megatron_recover.deadlines import Deadlines, figure


class _Forming(msgspec.Struct):
    """A newcomer whose ranks are not started yet."""

    nodes: tuple[int, ...]
    ready: set[int]
    leader: str = ""
    store: str = ""


class Healing:
    """Replaces the lost replicas of one job. Everything runs in the loop's thread."""

    def __init__(
        self,
        settings: slots.Settings,
        seats: Mapping[ReplicaId, Sequence[Slot]],
        spares: Iterable[Slot],
        *,
        membership: CoordinatorDriver,
        loop: Loop,
        deadlines: Deadlines,
        send: Callable[[int, Message], None],
        hosts: Callable[[ReplicaId, tuple[int, ...]], None],
        wanted: Callable[[], int],
    ) -> None:
        """Watch over the replicas in `seats`, by rank, and the spare slots.

        - `send(node, message)` sends to the agent of a node, unless it is gone.
        - `hosts(replica, nodes)` notes the nodes that will have ranks of a newcomer.
        - `wanted()` returns the number of replicas that the job wants (`core/scaling.py`).
        """
        self._settings, self._membership, self._loop, self._deadlines = settings, membership, loop, deadlines
        self._send, self._note_hosts, self._wanted = send, hosts, wanted
        self._pasts = slots.seated(seats, spares)
        self._nodes: dict[ReplicaId, tuple[int, ...]] = {replica: _nodes(of) for replica, of in seats.items()}
        """Replica -> numbers of the nodes with ranks of it."""
        self._lost_nodes: set[int] = set()
        self._drained: set[int] = set()
        """Numbers of the nodes that were given back, also of those that still prepare."""
        self._confirmed: dict[ReplicaId, set[int]] = {}
        """Lost replica -> numbers of the nodes that have seen the end of all its ranks there."""
        self._broken: dict[ReplicaId, int] = {}
        """Replica -> the first of its ranks that an agent has named as the cause of its loss."""
        self._blameless: set[ReplicaId] = set()
        """Replicas whose loss is not their slots' own: somebody has stopped a rank."""
        self._given_up: set[ReplicaId] = set()
        """Newcomers that were removed here: they are not wanted any more, or a slot is unfit."""
        self._next: slots.Newcomer | None = None
        """The newcomer for which the machine is asked for an id."""
        self._forming: dict[ReplicaId, _Forming] = {}
        self._since: dict[ReplicaId, int] = {}
        """Newcomer that is a proven member -> the number of committed steps at which it was."""
        self._stays_free: set[ReplicaId] = set()
        """Replicas that leave, and whose slots are used again, as more replicas were asked for."""
        self._proven: set[ReplicaId] = set()
        self._again_at_s = 0.0
        """Time of the loop's clock from which another plan may form more."""
        self._told: set[tuple[Slot, str]] = set()

    # --- What becomes of replicas -----------------------------------------------------------------

    def broke(self, gone: ReplicaGone) -> None:
        """Note what causes the loss of a replica; call it before the loss is judged."""
        replica = gone.loss.replica
        if replica in self._confirmed or any(each.replica == replica for each in self._membership.state.losses):
            return  # what its other ranks do is a consequence
        if gone.is_from_outside:
            self._blameless.add(replica)
        if gone.rank is not None:
            self._broken.setdefault(replica, gone.rank)

    def fenced(self, replica: ReplicaId) -> None:
        """Note that a replica is lost, as the machine of membership says why."""
        loss = next(each for each in reversed(self._membership.state.losses) if each.replica == replica)
        self._forming.pop(replica, None)
        self._again_at_s = 0.0
        kind = LossKind.PROCESS_ENDED if replica in self._blameless | self._given_up else loss.kind
        self._pasts = slots.lost(
            self._pasts, replica, kind, loss.detail, self._settings, now_s=self._loop.time(),
            rank=self._broken.get(replica), is_early=self._is_early(replica),
        )  # fmt: skip

    def _is_early(self, replica: ReplicaId) -> bool:
        """Return whether a lost replica was a newcomer that never was a member, and was wanted."""
        is_newcomer = replica >= self._membership.state.policy.num_replicas
        return is_newcomer and replica not in self._since and replica not in self._given_up

    def left(self, replica: ReplicaId) -> None:
        """Note that a replica leaves as requested: its slots are given back."""
        self._pasts = slots.given_back(self._pasts, replica, now_s=self._loop.time())
        if replica in self._stays_free:
            self._pasts = slots.lent_again(self._pasts, {replica})

    def ended(self, replica: ReplicaId, node: int) -> None:
        """Note that a node has seen the end of all ranks of a lost replica there."""
        self._confirmed.setdefault(replica, set()).add(node)
        self._look_at_ends(replica)

    def node_lost(self, node: int) -> None:
        """Note that a node is lost; its replicas are reported as lost after this."""
        self._lost_nodes.add(node)
        self._pasts = slots.node_lost(self._pasts, node)
        for replica in {each.user for each in self._pasts if each.user is not None and each.lost_at_s is not None}:
            self._look_at_ends(replica)

    @property
    def settings(self) -> slots.Settings:
        """Return the settings, which are the same on all nodes."""
        return self._settings

    def node_joined(self, node: int, num_slots: int) -> None:
        """Use the slots of a node that came after the start: all of them are spares."""
        self._pasts = slots.drained(slots.node_joined(self._pasts, node, num_slots), self._drained)
        self._again_at_s = 0.0
        self._loop.post(self.heal)

    @property
    def drained(self) -> frozenset[int]:
        """Return the numbers of the nodes that were given back."""
        return frozenset(self._drained)

    def drain(self, nodes: Collection[int]) -> None:
        """Use no slot of these nodes again; the caller removes what is formed there."""
        self._drained.update(nodes)
        self._pasts = slots.drained(self._pasts, self._drained)
        self._again_at_s = 0.0
        self._loop.post(self.heal)

    def _look_at_ends(self, replica: ReplicaId) -> None:
        """Free the slots of a replica whose ends all nodes have seen that are there."""
        if {*self._nodes.get(replica, ())} - self._lost_nodes <= self._confirmed.get(replica, set()):
            self._pasts = slots.gone(self._pasts, replica)
            self._again_at_s = 0.0
            self._loop.post(self.heal)

    def look(self) -> None:
        """Form what can be formed by now; call it regularly, and after each generation."""
        self._prove()
        if self._loop.time() >= self._again_at_s:
            self.heal()

    def _prove(self) -> None:
        """Trust the slots of newcomers that have committed enough steps as members."""
        state = self._membership.state
        for replica in generations.members(state):
            if replica < state.policy.num_replicas or replica in self._proven:
                continue
            if state.step - self._since.setdefault(replica, state.step) >= self._settings.proven_steps:
                self._proven.add(replica)
                self._pasts = slots.proven(self._pasts, replica)

    # --- Another number of replicas ---------------------------------------------------------------

    def room(self) -> int:
        """Return the number of replicas for which there are slots, now or later."""
        return slots.room(self._pasts, self._staying(), self._settings).num_replicas

    def room_without(self, nodes: Collection[int], hosted: Collection[ReplicaId]) -> int:
        """Return for how many replicas there are slots without these nodes.

        `hosted`: the replicas that have ranks there.
        """
        pasts = slots.drained(self._pasts, self._drained | {*nodes})
        return slots.room(pasts, self._staying() - {*hosted}, self._settings).own

    def rescale(self) -> None:
        """Form what the wanted number lacks, also in slots that were given back, if needed."""
        room = slots.room(self._pasts, self._staying(), self._settings)
        again = room.given_back[: max(0, self._wanted() - room.own)]
        self._stays_free = {*again}  # not also those of an earlier request for more, which this one takes back
        self._pasts = slots.lent_again(self._pasts, again)
        self._again_at_s = 0.0
        self.heal()

    def drop(self, replica: ReplicaId, why: str) -> None:
        """Give up a newcomer that is not wanted any more."""
        self._given_up.add(replica)
        self._membership.lost(Loss(replica, LossKind.PROCESS_ENDED, why))  # its slots are not to blame

    def _staying(self) -> set[ReplicaId]:
        """Return the replicas that live, or are formed, and were not asked to leave.

        One that was asked, and that the job needs since a loss, counts as gone: it leaves once a
        newcomer has joined.
        """
        state = self._membership.state
        living = {each.user for each in self._pasts if each.user is not None and each.is_taken}
        return living - {*leaving.asked(state.requests, state.roster)}

    # --- Forming ----------------------------------------------------------------------------------

    def heal(self) -> None:
        """Have newcomers formed for the replicas that are missing, where there are slots now."""
        state = self._membership.state
        if not state.generation or _is_ending(state):
            return
        self._again_at_s = float("inf")
        wanted = self._wanted() - len(self._staying())
        if wanted < 1:
            self._membership.know_room(True)  # as far as one knows: of the next loss
            return
        plan = slots.plan(self._pasts, wanted=wanted, settings=self._settings, now_s=self._loop.time())
        for newcomer in plan.newcomers:
            self._next = newcomer
            self._membership.ask_form(1, newcomer.in_place_of, newcomer.reason)
            if self._next is not None:  # the job is over
                self._next = None
                return
        self._tell_left_out(plan)
        if plan.again_at_s is not None:
            self._again_at_s = plan.again_at_s
        # The slots of one that forms are room: they are free again if it is lost.
        has_room = bool(plan.newcomers or self._membership.state.forming) or plan.may_form_later
        self._membership.know_room(has_room)

    def form(self, replica: ReplicaId) -> None:
        """Begin to form a newcomer, to which the machine has given this id."""
        newcomer, self._next = self._next, None
        if newcomer is None:
            detail = "nobody has chosen slots for it"
            self._loop.post(lambda: self._membership.lost(Loss(replica, LossKind.SUSPECTED, detail)))
            return
        self._pasts = slots.taken(self._pasts, replica, newcomer.slots)
        nodes = self._nodes[replica] = _nodes(newcomer.slots)
        self._forming[replica] = _Forming(nodes, set())
        self._note_hosts(replica, nodes)
        for node in nodes:
            seats = tuple((rank, slot.slot) for rank, slot in enumerate(newcomer.slots) if slot.node == node)
            self._send(node, FormReplica(replica, seats, len(nodes) > 1))
        self._loop.after(self._deadlines.deadline_s, lambda: self._give_up(replica))

    def answered(self, node: int, answer: SlotsReady | SlotsUnfit) -> None:
        """Take what a node says about the slots of a newcomer."""
        if isinstance(answer, SlotsReady):
            self._ready(node, answer)
        else:
            self._unfit_there(node, answer)

    def _ready(self, node: int, ready: SlotsReady) -> None:
        """Start the ranks of a newcomer on all its nodes once all of them are ready."""
        forming = self._forming.get(ready.replica)
        if forming is None or node not in forming.nodes:
            return
        forming.ready.add(node)
        forming.leader, forming.store = ready.leader or forming.leader, ready.store or forming.store
        if len(forming.ready) == len(forming.nodes):
            del self._forming[ready.replica]
            for each in forming.nodes:
                self._send(each, StartReplica(ready.replica, forming.leader, forming.store))

    def _unfit_there(self, node: int, unfit: SlotsUnfit) -> None:
        """Put slots off that are not fit, and remove the newcomer that was to use them."""
        if node not in self._nodes.get(unfit.replica, ()):
            return
        self._given_up.add(unfit.replica)
        blamed = {Slot(node, slot) for slot in unfit.slots}
        self._pasts = slots.unfit(self._pasts, blamed, unfit.why, self._settings, now_s=self._loop.time())
        self._membership.lost(Loss(unfit.replica, LossKind.SUSPECTED, f"it could not be started: {unfit.why}"))

    def _give_up(self, replica: ReplicaId) -> None:
        """Remove a newcomer that is not formed at the end of the deadline."""
        state = self._membership.state
        if replica in state.forming and all(hello.replica != replica for hello in state.hellos):
            detail = f"it was not formed within {figure(self._deadlines.deadline_s)} s"
            self._membership.lost(Loss(replica, LossKind.SUSPECTED, detail))

    # --- For people -------------------------------------------------------------------------------

    def _tell_left_out(self, plan: slots.Plan) -> None:
        """Say which slots stay empty although replicas are missing, each reason once per slot."""
        found = (each for each in plan.left_out if not each.is_usual)
        fresh = [each for each in found if (each.slot, each.reason) not in self._told]
        self._told.update((each.slot, each.reason) for each in fresh)
        for reason in dict.fromkeys(each.reason for each in fresh):
            where = slots.described(each.slot for each in fresh if each.reason == reason)
            self._say(f"no newcomer is formed on {where}: {reason}")

    def _say(self, text: str) -> None:
        self._send(0, Say(text))


def _nodes(of: Iterable[Slot]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(slot.node for slot in of))


def _is_ending(state: CoordinatorState) -> bool:
    """Return whether the job ends: nobody is formed who would not train."""
    return state.over or bool(state.finished) or policy.exit_code(state.requests) != ExitCode.OK


def spares_of(ready: Mapping[int, NodeReady]) -> list[Slot]:
    """Return the slots without a rank, from what the nodes have reported."""
    return [Slot(node, slot) for node, one in ready.items() for slot in one.spares]


def seats_of(ready: Mapping[int, NodeReady]) -> dict[ReplicaId, tuple[Slot, ...]]:
    """Return the slots of each replica by rank, from what the nodes have reported."""
    found: dict[ReplicaId, dict[int, Slot]] = {}
    for node, one in ready.items():
        for replica, seats in one.seats:
            found.setdefault(replica, {}).update({rank: Slot(node, slot) for rank, slot in seats})
    return {replica: tuple(of[rank] for rank in sorted(of)) for replica, of in found.items()}
