"""The slots of this node and who sits there: replicas of the start, and newcomers since.

A slot is taken by a newcomer only after the process of each former user has ended: two processes
would share a device and a place in the node's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_recover.cluster.job import Job


class Seats:
    """The users of one node's slots. Everything runs in the launcher's thread."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._at_start = {replica: job.slots(replica) for replica in job.replicas_here}
        self._newcomers: dict[int, dict[int, int]] = {}
        self._users = {slot: [(replica, rank)] for replica, of in self._at_start.items() for rank, slot in of.items()}
        """Slot -> all who have ever sat there (replica, rank), in order."""

    @property
    def replicas_here(self) -> tuple[int, ...]:
        """Return the replicas that have or had ranks on this node, ascending."""
        return (*self._at_start, *self._newcomers)

    @property
    def newcomers(self) -> tuple[int, ...]:
        """Return the replicas among them that were not there at the start."""
        return tuple(self._newcomers)

    def users(self, slot: int) -> tuple[tuple[int, int], ...]:
        """Return all who have ever sat in a slot (replica, rank), in order."""
        return tuple(self._users.get(slot, ()))

    def slots(self, replica: int) -> Mapping[int, int]:
        """Return the slot on this node of each rank of a replica, by rank."""
        return self._at_start.get(replica) or self._newcomers.get(replica) or {}

    def stands_for(self, replica: int, rank: int) -> int:
        """Return the place of a rank among the ranks of the start.

        It is that of the first user of its slot: what a user has chosen for that rank's output
        holds for every later one. In a slot that had no rank at the start it is the rank's own.
        """
        first = self._users[self.slots(replica)[rank]][0]
        return self._job.place_of(*(first if first[0] < self._job.num_replicas else (replica, rank)))

    def take(self, replica: int, slots: Mapping[int, int], lives: Callable[[int, int], bool]) -> None:
        """Have a newcomer sit in `slots`, by rank.

        `lives(replica, rank)` returns whether a process of a rank here may live. Raises ValueError
        if one of a former user does.
        """
        for former in (user for slot in slots.values() for user in self.users(slot)):
            if lives(*former):
                raise ValueError(f"replica {former[0]} rank {former[1]} has not ended")
        self._newcomers[replica] = dict(slots)
        for rank, slot in slots.items():
            self._users.setdefault(slot, []).append((replica, rank))
