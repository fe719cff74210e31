"""The data plane on the virtual clock: where same-position ranks meet for a sum or a copy, and how long that takes.

It promises what a transport promises (`data_plane/transport.py`): a result only when all members took part, and a failure at
each of those that wait when one of them is dead.
"""

from __future__ import annotations

from megatron_recover.core.plan import Operation
from megatron_recover.core.values import ReplicaId
from megatron_recover.faults import FaultPoint
from megatron_recover.sim import channels
from megatron_recover.sim.timed.rank import TimedRank, key_of
from megatron_recover.sim.timed.world import World

Key = tuple[object, ...]
"""An operation without its members, who may be many, and the position of those that meet."""


class Meeting:
    """One sum or copy of one bucket between ranks of one position."""

    __slots__ = ("here", "operation", "parts", "position", "stalled_since")

    def __init__(self, operation: Operation, position: int) -> None:
        self.operation, self.position = operation, position
        self.here: dict[ReplicaId, TimedRank] = {}
        """Who has arrived and not left."""
        self.parts: dict[ReplicaId, object] = {}
        """What each handed in."""
        self.stalled_since: dict[ReplicaId, float] = {}
        """Since when each waits for what a broken channel does not deliver."""


class Meetings:
    """All meetings of a job that are not over."""

    def __init__(self, job: World) -> None:
        self.job = job
        self.open: dict[Key, Meeting] = {}

    def arrive(self, rank: TimedRank, operation: Operation) -> None:
        """A rank comes to an operation, and hands in what it has for it."""
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
        elif job.broken or any(map(job.is_reading, operation.members)):
            # A member that is held up elsewhere by a broken channel does not come, nor one that reads. One that computes is
            # waited for: here the `stall_s` may be shorter than a pass.
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
        """The source goes on at once; a target has its copy a transfer later than both are here."""
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
        """True if a result arrives; otherwise the rank waits for it until `stall_s` is over."""
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
        if all(job.replicas[member].ranks[meeting.position].operations or job.is_reading(member) for member in missing):
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
        """A rank has left, with nothing: a newer generation is promised there. Whom it waited for in vain it reports."""
        meeting, me, job = self.open.get(_key(rank, operation)), rank.replica.number, self.job
        if meeting is None:
            return
        meeting.here.pop(me, None)
        if job.clock.now - meeting.stalled_since.get(me, job.clock.now) >= job.stall_s / 2 and rank.alive:
            rank.report_stall(operation, channels.accused(operation, me, job.broken))

    def broken(self, victim: ReplicaId, position: int) -> None:
        """A rank is dead: those that meet it see their connection break."""
        for meeting in list(self.open.values()):
            operation = meeting.operation
            if meeting.position == position and victim in operation.members:
                for arrived in list(meeting.here.values()):
                    if arrived.replica.number != victim and not self._has_what_it_needs(operation, meeting, victim):
                        self.job.clock.after(self.job.timing.latency_s(), self.fail, arrived, operation, (victim,))

    def _has_what_it_needs(self, operation: Operation, meeting: Meeting, victim: ReplicaId) -> bool:
        """Of a copy: the victim is another target, or the source and gone after it had sent."""
        return operation.source is not None and (operation.source != victim or victim in meeting.parts)

    def fail(self, rank: TimedRank, operation: Operation, suspects: tuple[ReplicaId, ...]) -> None:
        """An operation fails on one rank, if it is still there."""
        meeting = self.open.get(_key(rank, operation))
        if meeting is not None and meeting.here.pop(rank.replica.number, None) is not None:
            rank.failed(operation, "a connection broke", suspects)

    def forget(self, generation: int) -> None:
        """All live ranks have left the generations before this one."""
        self.open = {key: meeting for key, meeting in self.open.items() if meeting.operation.generation >= generation}


def _key(rank: TimedRank, operation: Operation) -> Key:
    return (*key_of(operation), rank.position)
