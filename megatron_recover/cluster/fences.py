"""The fences of a node: the ranks that are to end, and those that do not end.

The coordinator has replicas fenced (killed) or dismissed (they leave by themselves). Each end is
recorded and confirmed to it. A rank that SIGKILL does not end is set aside: nobody waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from megatron_recover import trace
from megatron_recover.cluster.job import Job
from megatron_recover.cluster.node import Node, Undying
from megatron_recover.cluster.recording import Recording
from megatron_recover.cluster.seats import Seats
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.node_messages import FenceDone
from megatron_recover.deadlines import Deadlines


class Fences:
    """Ends replicas on one node. Everything runs in the launcher's thread."""

    def __init__(
        self,
        job: Job,
        seats: Seats,
        node: Node,
        recording: Recording,
        *,
        loop: Loop,
        deadlines: Deadlines,
        send: Callable[[FenceDone], None],
    ) -> None:
        """Watch the ends on `node`. `send(message)` sends to the coordinator."""
        self._job, self._seats, self._node, self._recording = job, seats, node, recording
        self._loop, self._deadlines, self._send = loop, deadlines, send
        self._fencing: set[int] = set()
        self._late: set[int] = set()
        """Replicas that were dismissed and have not ended in time."""
        self.set_aside: set[tuple[int, int]] = set()
        """Killed ranks (replica, rank) that do not end."""
        self.gone: set[int] = set()
        """Replicas that were fenced or dismissed, or whose fencing has begun."""
        self._told_gone: set[int] = set()
        """Replicas that have left, and whose end the coordinator was told."""
        self.dismissed: dict[int, float] = {}
        """Replicas that leave, and the time of the loop's clock until which their ranks may end by
        themselves."""

    @property
    def is_nobody_left(self) -> bool:
        """Return whether no rank of this node lives, but those that are set aside."""
        return self._node.num_living() <= len(self.set_aside)

    def explain(self, replica: int, rank: int) -> bool:
        """Return whether a rank ends because it was killed here."""
        return replica in self._fencing or (replica, rank) in self.set_aside

    def fence(self, replica: int) -> None:
        """Kill all ranks of a replica; `follow` confirms their end."""
        self._fencing.add(replica)
        self.gone.add(replica)
        self._node.fence(replica)
        self._tell_if_empty("are lost")

    def dismiss(self, replica: int) -> None:
        """Expect that all ranks of a replica end with exit code 0: the replica leaves the job."""
        self.gone.add(replica)
        self.dismissed[replica] = self._loop.time() + self._deadlines.end_s
        self._tell_if_empty("have left or are lost")

    @property
    def is_out_of_job(self) -> bool:
        """Return whether the job goes on without this node; node 0 is in the job to the end."""
        return self._job.node > 0 and self.gone.issuperset(self._seats.replicas_here)

    def _tell_if_empty(self, what: str) -> None:
        if self._job.nodes and self.gone.issuperset(self._seats.replicas_here):
            back = f"; `kill {os.getpid()}` gives it back at once, and the job goes on" if self._job.node else ""
            heals = self._job.config.heal != "off"
            until = "a newcomer, or, if it was drained, the end of the job" if heals else "the end of the job"
            self._recording.says(f"all replicas with ranks on this node {what}: the node waits for {until}{back}")

    def fence_late(self) -> None:
        """Report the end of replicas that leave; kill those whose ranks have not ended in time."""
        for replica, end_by in list(self.dismissed.items()):
            if all(self._node.has_ended(replica, rank) for rank in self._seats.slots(replica)):
                if replica not in self._told_gone:
                    self._told_gone.add(replica)
                    self._send(FenceDone(replica))
            elif self._loop.time() > end_by and replica not in self._late:
                self._late.add(replica)
                self.fence(replica)

    def follow(self) -> None:
        """Record the ends of ranks of fenced replicas.

        Set the ranks aside that SIGKILL does not end.
        """
        for replica, rank in [each for each in self.set_aside if self._node.has_ended(*each)]:
            self.set_aside.discard((replica, rank))
            self._recording.record(trace.Fenced(replica=replica, ranks=(rank,)))
            self._confirm_fence(replica)
        for process in self._node.undying():
            self.give_up(process)
        for replica in [each for each in self._fencing if self._node.is_fenced(each, but=self.set_aside)]:
            self._fencing.discard(replica)
            ranks = tuple(rank for rank in self._seats.slots(replica) if (replica, rank) not in self.set_aside)
            self._recording.record(trace.Fenced(replica=replica, ranks=ranks))
            self._confirm_fence(replica)

    def _confirm_fence(self, replica: int) -> None:
        """Confirm a fence once no process of the replica is left here, set-aside ones included."""
        if replica not in self._fencing and replica not in {each for each, _ in self.set_aside}:
            self._send(FenceDone(replica))

    def end_alone(self) -> None:
        """Record the end of what no coordinator had fenced, after the last process of this node.

        The node ends without a coordinator. That may have removed the node, and be alive beyond a
        cut in the network. Then the node's replicas are lost, and only this node sees their end.
        """
        for replica in self._seats.replicas_here:
            if replica in self.gone:
                continue
            ranks = tuple(rank for rank in self._seats.slots(replica) if (replica, rank) not in self.set_aside)
            for rank in ranks:
                self._recording.ended(replica, rank)
            self._recording.record(trace.Fenced(replica=replica, ranks=ranks))

    def give_up(self, process: Undying) -> None:
        """Report a process that SIGKILL does not end, and wait for it no longer; once per process.

        The process keeps its place (replica, rank), in which no other one is ever started.
        """
        if (process.replica, process.rank) in self.set_aside:
            return
        self.set_aside.add((process.replica, process.rank))
        if process.replica >= 0:
            self._recording.ended(process.replica, process.rank)  # it runs no further instruction, and writes nothing more
            self._recording.record(
                trace.SetAside(
                    replica=process.replica, rank=process.rank, pid=process.pid, state=process.state, wchan=process.wchan
                )  # fmt: skip
            )
        self._recording.says(
            f"{process} does not end although it was killed; the run does not wait for it. It keeps its memory and devices: "
            "see `dmesg` for the disk or device that hangs"
        )
