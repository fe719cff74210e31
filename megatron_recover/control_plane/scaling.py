"""The driver of what people ask of a job's size, in the coordinator: growing, shrinking, draining.

`core/scaling.py` and `core/draining.py` decide. Members that are too many leave as after `drain`;
what is missing is formed as after a loss (`control_plane/healing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from megatron_recover.control_plane.coordinator_driver import CoordinatorDriver
from megatron_recover.control_plane.healing import Healing
from megatron_recover.control_plane.node_messages import DrainAnswer, DrainAsked, Say, ScaleAnswer, ScaleAsked
from megatron_recover.core import draining, scaling
from megatron_recover.core.values import ReplicaId


class Scaling:
    """Keeps the wanted number of replicas of one job. Everything runs in the loop's thread."""

    def __init__(self, membership: CoordinatorDriver, say: Callable[[Say], None]) -> None:
        """Want the number of the start. `say(line)` sends a line for people to node 0."""
        self._membership, self._say = membership, say
        self._grown = 0
        """The argument `grown` of `scaling.wanted`."""

    def wanted(self) -> int:
        """Return the number of replicas that the job wants."""
        return scaling.wanted(self._membership.state, self._grown)

    def scale(self, asked: ScaleAsked, healing: Healing | None) -> ScaleAnswer:
        """Carry out a request, or refuse it, which changes nothing; return the answer.

        `healing`: None if this job forms no newcomers.
        """
        room = None if healing is None else healing.room()
        change = scaling.scaled(self._membership.state, asked.num_replicas, grown=self._grown, room=room)
        if change.refused:
            return ScaleAnswer(asked.id, change.refused)
        self._grown = change.grown
        self._say(Say(f"{asked.reason}: {change.text}"))
        if change.leaving:
            self._membership.ask_leave(change.leaving, asked.reason)
        if healing is not None:
            for replica in change.dropped:
                healing.drop(replica, asked.reason)
            healing.rescale()
        return ScaleAnswer(asked.id, "", change.text, change.leaving)

    def drain(
        self, asked: DrainAsked, nodes: frozenset[int], hosted: Collection[ReplicaId], healing: Healing | None
    ) -> DrainAnswer:
        """Give replicas or a node back, or refuse it, which changes nothing; return the answer.

        - `nodes`: numbers of the nodes that the request names. `hosted`: all replicas that have, or
          have had, ranks there.
        - `healing`: None if this job forms no newcomers.
        """
        if not asked.node:
            refused = self._membership.ask_leave(asked.replicas, asked.reason)
            leaving = tuple(each for each in asked.replicas if each not in refused)
            return DrainAnswer(asked.id, tuple(refused.items()), leaving=leaving)
        if not nodes:
            return DrainAnswer(asked.id, (), f"node {asked.node} is lost, or not used by the job: nothing of it is in use")
        is_drained = healing is not None and nodes <= healing.drained
        room = None if healing is None else healing.room_without(nodes, hosted)
        change = draining.drained(self._membership.state, asked.node, hosted, is_drained=is_drained, room=room)
        if change.refused:
            return DrainAnswer(asked.id, (), change.refused)
        self._say(Say(f"{asked.reason}: {change.text}"))
        if healing is not None:
            healing.drain(nodes)  # first: nothing is formed there for what the next calls have missing
        if change.leaving:
            self._membership.ask_leave(change.leaving, asked.reason)
        if healing is not None:
            for replica in change.dropped:
                healing.drop(replica, asked.reason)
        return DrainAnswer(asked.id, (), "", change.text, tuple(sorted({*change.leaving, *change.asked_before})))
