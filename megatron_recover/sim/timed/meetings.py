"""The data plane on the virtual clock: ranks of equal position meet for sums and copies.

It promises what a transport promises (`data_plane/transport.py`):

- A sum has a result only when all members took part, a copy only when its source did.
- Where a needed member is dead, the operation fails at each member that waits.
"""

from __future__ import annotations

from megatron_recover.core.plan import Operation
from megatron_recover.core.values import ReplicaId
from megatron_recover.faults import FaultPoint
from megatron_recover.sim import channels
from megatron_recover.sim.timed.rank import TimedRank, key_of
from megatron_recover.sim.timed.world import JobParts

Key = tuple[object, ...]
"""Fields of an operation without its members, which may be many, and the position of the ranks."""


class Meeting:
    """One sum or copy of one bucket between ranks of one position."""

    __slots__ = ("here", "operation", "parts", "position", "stalled_since")

    def __init__(self, operation: Operation, position: int) -> None:
        self.operation, self.position = operation, position
        self.here: dict[ReplicaId, TimedRank] = {}
        """Ranks that have arrived and not left, by replica."""
        self.parts: dict[ReplicaId, object] = {}
        """Local gradients, or results to copy, by replica."""
        self.stalled_since: dict[ReplicaId, float] = {}
        """Time since which a replica has waited for what a broken channel does not deliver."""


class Meetings:
    """The meetings of a job: sums until the last rank has its result, others until `forget`."""

    def __init__(self, job: JobParts) -> None:
        self.job = job
        self.open: dict[Key, Meeting] = {}

    def arrive(self, rank: TimedRank, operation: Operation) -> None:
        """Let a rank arrive at an operation, with its data."""
        job, key = self.job, _key(rank, operation)
        meeting = self.open.get(key)
        if meeting is None:
            meeting = self.open[key] = Meeting(operation, rank.position)
        me = rank.replica.number
        meeting.here[me] = rank
        if operation.source is None or operation.source == me:
            meeting.parts[me] = job.memory.read(rank, operation)
        if operation.source is not None:
            self._copy(rank, operation, meeting)
        elif len(meeting.here) == len(operation.members):
            seconds = job.timing.reduce_s(operation.bucket, len(operation.members))
            if job.awaits_faults:
                self._strike(operation, meeting, seconds)
            for number, arrived in meeting.here.items():
                job.clock.at(job.clock.now + job.timing.together_s(seconds, number), self._sum, arrived, operation)
        elif job.broken or any(reader in operation.members for reader in job.readers):
            # A member that a broken channel holds up elsewhere does not come, nor does one that
            # reads. A member that computes is waited for: `stall_s` may be shorter than a pass.
            job.clock.after(job.stall_s, self._absent, rank, meeting)
        dead = [number for number in job.undiscovered if job.is_dead(number, rank.position) and number in operation.members]
        if dead:
            job.clock.after(job.timing.latency_s(), self.fail, rank, operation, tuple(dead))

    def _strike(self, operation: Operation, meeting: Meeting, seconds: float) -> None:
        job = self.job
        for arrived in meeting.here.values():
            point = FaultPoint.REDUCE if arrived.plans_taken == 1 else FaultPoint.SECOND_REDUCE
            job.pass_fault(arrived, point, step=operation.step, bucket=operation.bucket, at=job.clock.now + seconds / 2)

    def _copy(self, rank: TimedRank, operation: Operation, meeting: Meeting) -> None:
        """Let the source continue at once. A target gets its copy a transfer after both arrived."""
        job = self.job
        assert operation.source is not None
        if operation.source == rank.replica.number:
            job.clock.at(job.clock.now, rank.completed, operation, None)
            targets = [arrived for number, arrived in meeting.here.items() if number != operation.source]
        else:
            targets = [rank] if operation.source in meeting.parts else []
        for target in targets:
            job.clock.after(job.timing.transfer_s(operation.bucket), self._copied, target, operation)

    def _copied(self, rank: TimedRank, operation: Operation) -> None:
        meeting = self.open.get(_key(rank, operation))
        if meeting is not None and rank.replica.number in meeting.here and self._arrives(rank, meeting):
            assert operation.source is not None
            self._give(rank, operation, meeting, meeting.parts[operation.source])

    def _sum(self, rank: TimedRank, operation: Operation) -> None:
        meeting = self.open.get(_key(rank, operation))
        if meeting is not None and rank.replica.number in meeting.here and self._arrives(rank, meeting):
            self._give(rank, operation, meeting, self.job.memory.add(list(meeting.parts.values())))

    def _give(self, rank: TimedRank, operation: Operation, meeting: Meeting, result: object) -> None:
        del meeting.here[rank.replica.number]
        if not meeting.here and operation.source is None:
            del self.open[_key(rank, operation)]
        if rank.alive and operation.source is None and self.job.memory.miscounted(result):
            rank.failed(operation, "it is miscounted", (), miscounted=True)
        elif rank.alive:
            rank.completed(operation, self.job.memory.result(rank, operation, result))

    def _arrives(self, rank: TimedRank, meeting: Meeting) -> bool:
        """Return whether no broken channel keeps the result from a rank.

        If one does, let the rank wait for `stall_s`. Then the operation fails at it.
        """
        job, me = self.job, rank.replica.number
        if channels.completes(meeting.operation, me, job.broken):
            return True
        if me not in meeting.stalled_since:
            meeting.stalled_since[me] = job.clock.now
            job.clock.after(job.stall_s, self._stalled, rank, meeting)
        return False

    def _absent(self, rank: TimedRank, meeting: Meeting) -> None:
        job, me, operation = self.job, rank.replica.number, meeting.operation
        missing = tuple(member for member in operation.members if member not in meeting.parts)
        if not missing or meeting.here.get(me) is not rank or self.open.get(_key(rank, operation)) is not meeting:
            return
        if all(job.replicas[member].ranks[meeting.position].operations or member in job.readers for member in missing):
            del meeting.here[me]
            rank.failed(operation, "no progress", missing, stalled=True)
        else:
            job.clock.after(job.stall_s, self._absent, rank, meeting)

    def _stalled(self, rank: TimedRank, meeting: Meeting) -> None:
        me, operation = rank.replica.number, meeting.operation
        if self.open.get(_key(rank, operation)) is meeting and meeting.here.pop(me, None) is not None:
            accused = channels.accused(operation, me, self.job.broken)
            rank.failed(operation, "no progress", accused, stalled=True)

    def leave(self, rank: TimedRank, operation: Operation) -> None:
        """Let a rank leave without a result, as its transport is retired.

        If a broken channel has kept the result from it for at least half of `stall_s`, it reports
        the replicas that it accuses.
        """
        meeting, me, job = self.open.get(_key(rank, operation)), rank.replica.number, self.job
        if meeting is None:
            return
        meeting.here.pop(me, None)
        if job.clock.now - meeting.stalled_since.get(me, job.clock.now) >= job.stall_s / 2 and rank.alive:
            rank.report_stall(operation, channels.accused(operation, me, job.broken))

    def broken(self, victim: ReplicaId, position: int) -> None:
        """Let the operations of a dead rank fail at the ranks that have arrived and need it."""
        for meeting in list(self.open.values()):
            operation = meeting.operation
            if meeting.position == position and victim in operation.members:
                for arrived in list(meeting.here.values()):
                    if arrived.replica.number != victim and not self._has_what_it_needs(operation, meeting, victim):
                        self.job.clock.after(self.job.timing.latency_s(), self.fail, arrived, operation, (victim,))

    def _has_what_it_needs(self, operation: Operation, meeting: Meeting, victim: ReplicaId) -> bool:
        """Return whether the operation is a copy that no longer needs the victim.

        The victim is then another target, or a source that has sent.
        """
        return operation.source is not None and (operation.source != victim or victim in meeting.parts)

    def fail(self, rank: TimedRank, operation: Operation, suspects: tuple[ReplicaId, ...]) -> None:
        """Let an operation fail at one rank, if the rank is still there."""
        meeting = self.open.get(_key(rank, operation))
        if meeting is not None and meeting.here.pop(rank.replica.number, None) is not None:
            rank.failed(operation, "a connection broke", suspects)

    def forget(self, generation: int) -> None:
        """Forget the meetings of older generations, which no rank can complete any more."""
        self.open = {key: meeting for key, meeting in self.open.items() if meeting.operation.generation >= generation}


def _key(rank: TimedRank, operation: Operation) -> Key:
    return (*key_of(operation), rank.position)
