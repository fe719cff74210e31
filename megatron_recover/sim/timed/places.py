"""The nodes of a simulated job: which of them are free, and which newcomers fit into them.

`core/slots.py` decides who is formed where. Here is only what a scenario adds: a loss that takes a
node away, its repair, and spare nodes. A slot of `core/slots.py` is a whole node here, as a replica
of a scenario has its nodes to itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from megatron_recover.config import RecoverConfig
from megatron_recover.core import slots
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.core.placement import Slot
from megatron_recover.core.values import ReplicaId
from megatron_recover.deadlines import Deadlines
from megatron_recover.sim.timed.models import HOUR_S, Scenario


@dataclass(frozen=True)
class Cause:
    """The cause of a loss."""

    node: int
    """Node of the replica that caused it, from 0."""
    is_hardware: bool
    """True if the node is gone until it is repaired."""


class Places:
    """The nodes of one job, and who sits on them. Times are seconds since the start of the job."""

    def __init__(self, scenario: Scenario, *, num_spares: int) -> None:
        """Seat the replicas of a scenario that has a `[repair]` table."""
        assert scenario.repair is not None
        self.table, job, config = scenario.repair, scenario.job, RecoverConfig()
        self.num_nodes = job.gpus // self.table.node_gpus
        """Nodes of one replica."""
        self.wanted = job.replicas
        self.settings = slots.Settings(
            backoff_s=config.heal_backoff_s, budget=config.heal_budget, num_ranks=self.num_nodes,
            patience_s=max(Deadlines.of().end_s, 2 * self.table.vacate_s),
        )  # fmt: skip
        seats = {
            replica: tuple(Slot(replica * self.num_nodes + index, 0) for index in range(self.num_nodes))
            for replica in range(job.replicas)
        }
        first = job.replicas * self.num_nodes
        self.pasts = slots.seated(seats, (Slot(first + index, 0) for index in range(num_spares)))
        self.living = {*seats}
        """Replicas that live, newcomers that are formed included."""
        self._dice = random.Random(f"causes {job.seed}")

    def cause(self) -> Cause:
        """Draw the cause of the next loss."""
        return Cause(self._dice.randrange(self.num_nodes), self._dice.random() < self.table.hardware_share)

    def lost(self, replica: ReplicaId, kind: LossKind, cause: Cause | None, now_s: float) -> Slot | None:
        """Note the loss of a replica; return the node that is gone with it, if one is.

        Its processes have not ended yet (`vacated`). `cause` None: nothing is known of it.
        """
        node = None
        if cause is not None and cause.is_hardware:
            seat = sorted((each.rank, each.slot) for each in self.pasts if each.user == replica)
            node = seat[cause.node][1]
            self.pasts, kind = slots.node_lost(self.pasts, node.node), LossKind.NODE_LOST
        rank = None if cause is None else cause.node
        self.pasts = slots.lost(self.pasts, replica, kind, "", self.settings, now_s=now_s, rank=rank)
        self.living.discard(replica)
        return node

    def vacated(self, replica: ReplicaId) -> None:
        """Note that the last process of a lost replica has ended."""
        self.pasts = slots.gone(self.pasts, replica)

    def repaired(self, node: Slot) -> None:
        """Note that a node is back that was gone."""
        self.pasts = tuple(slots.Past(node) if each.slot == node else each for each in self.pasts)

    def proven(self, replica: ReplicaId) -> None:
        """Note that a newcomer has trained for as long as its slots need to be trusted again."""
        self.pasts = slots.proven(self.pasts, replica)

    def plan(self, now_s: float) -> slots.Plan:
        """Return the newcomers to form now."""
        missing = self.wanted - len(self.living)
        if missing < 1:
            return slots.Plan((), ())
        return slots.plan(self.pasts, wanted=missing, settings=self.settings, now_s=now_s)

    def taken(self, replica: ReplicaId, newcomer: slots.Newcomer) -> None:
        """Seat a newcomer."""
        self.pasts = slots.taken(self.pasts, replica, newcomer.slots)
        self.living.add(replica)

    @property
    def repair_s(self) -> float | None:
        """Return the seconds until a node that is gone is back; None: it never is."""
        return None if self.table.repair_h is None else self.table.repair_h * HOUR_S


class Restarts:
    """The replicas of a job after each restart, if a restart takes in all healthy nodes."""

    def __init__(self, scenario: Scenario) -> None:
        """Begin with all replicas of a scenario that has a `[repair]` table, and its spares."""
        assert scenario.repair is not None
        self.places = Places(scenario, num_spares=scenario.repair.spares)
        self._num_replicas = scenario.job.replicas
        self._returning: list[tuple[float, Slot]] = []

    def lost(self, now_s: float) -> None:
        """Note the loss of a replica."""
        replica = min(self.places.living)
        node = self.places.lost(replica, LossKind.PROCESS_ENDED, self.places.cause(), now_s)
        self.places.vacated(replica)
        if node is not None and self.places.repair_s is not None:
            self._returning.append((now_s + self.places.repair_s, node))

    def restarted(self, now_s: float) -> int:
        """Return the number of replicas after a restart."""
        for time, node in [*self._returning]:
            if time <= now_s:
                self._returning.remove((time, node))
                self.places.repaired(node)
        for newcomer in self.places.plan(now_s).newcomers:
            self.places.taken(self._num_replicas, newcomer)
            self._num_replicas += 1
        return len(self.places.living)
