"""A newcomer on the virtual clock, until it trains: it is formed, reads a state and asks to join.

The rules are those of `core/joining.py`, Note [Joining]. Here is only the driver's part: from whom
a newcomer reads what, when what it has read is void, which member it asks, and when it gives a
claim up that nobody answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_recover.core import rank, replica
from megatron_recover.core.label import next_training
from megatron_recover.core.membership_messages import JoinRefused
from megatron_recover.core.values import Claim, ReplicaId
from megatron_recover.sim.timed.course import Course
from megatron_recover.sim.timed.rank import TimedRank
from megatron_recover.sim.timed.world import JobParts, JoiningReplica

TRIES = 3
"""Tries of a newcomer (`trainer/entering.py`): on the last it asks for a hold before it reads, and
on all later ones of the fuzzer, in which it never gives up."""


class Newcomer:
    """The part of a newcomer before its training: one reading at a time, then one claim."""

    __slots__ = (
        "course", "has_asked", "is_admitted", "is_formed", "is_reading", "job", "label", "newest", "num_failed", "one", "open",
        "skipped", "sources", "step", "turn",
    )  # fmt: skip

    def __init__(self, job: JobParts, one: JoiningReplica) -> None:
        self.job, self.one = job, one
        self.is_formed = self.is_reading = self.has_asked = self.is_admitted = False
        self.step = -1
        """Step whose state is read, or was read last."""
        self.newest = -1
        """Newest step whose state all ranks have read; -1: none."""
        self.course = Course()
        """The position of the training loop that is part of that state."""
        self.label = ""
        """Label of the step whose state is read, or was read last."""
        self.open: set[int] = set()
        """Ranks that have yet to read their part."""
        self.sources: set[ReplicaId] = set()
        """Members from which a rank has read its part."""
        self.num_failed = -1
        """Void readings, and claims that were refused. -1: none. The first is no try."""
        self.skipped = -1
        """Step in which this newcomer has asked for a hold of the next one; -1: none."""
        self.turn = 0
        """Number of the reading; events of older readings are ignored."""

    def form(self) -> None:
        """Start the ranks. They are ready after a while."""
        self.job.clock.after(self.job.timing.forming_s(), self.ready, self.one.ranks[0])
        self.job.reached(self.one, "is formed")

    def ready(self, leader: TimedRank) -> None:
        """Greet the coordinator: the ranks are ready. Then read the state of the step that runs."""
        if all(each.alive for each in self.one.ranks):
            self.is_formed = True
            self.job.reached(self.one, "is ready")
            self.job.send(self.one, self.job.coordinator, self.job.clock.now, self.job.hello(self.one.number))
            self.look(leader)

    def _look_anew(self, leader: TimedRank) -> None:
        """Begin to read after a refusal: in the running step only if the job lets newcomers."""
        if self.job.awaits_next_window:
            self.newest = max(self.newest, *(one.served_step() for one in self.job.replicas))
        self.look(leader)

    def look(self, leader: TimedRank) -> None:
        """Begin to read if a step runs whose state was not read, and no claim is open.

        The sources of a reading under way say that their step is over, where no newcomer reads in a
        step that runs already.
        """
        state, job = self.one.state, self.job
        if self.is_reading and job.awaits_next_window and all(step > self.step for step in self._served()):
            self._void()
        is_free = state.phase is replica.ReplicaPhase.JOINING and state.claim is None and not self.is_reading
        if not (self.is_formed and is_free and leader.alive):
            return
        step = max((one.served_step() for one in job.replicas), default=-1)
        asks = job.newcomers_ask and self.num_failed >= TRIES - 1 and self.skipped < step - 1
        is_new = step > max(self.newest, self.skipped)
        if step < 0 or not (is_new or (asks and job.awaits_next_window)):
            return
        sources = self._sources(step)
        if asks:
            self.skipped = step
            self.one.feed(replica.AskHold(sources[0], next_training(job.replicas[sources[0]].ranks[0].label)))
            return
        self.is_reading, self.turn, self.step, self.sources = True, self.turn + 1, step, set()
        self.open = set(range(len(self.one.ranks)))
        self.label = job.replicas[sources[0]].ranks[0].label
        for each in self.one.ranks:
            self._read(each, step, job.sources(sources))
        job.reached(self.one, "reads")

    def _served(self) -> list[int]:
        return [step for one in self.job.replicas if (step := one.served_step()) >= 0]

    def _sources(self, step: int) -> list[ReplicaId]:
        return [one.number for one in self.job.replicas if one.served_step() == step]

    def _read(self, each: TimedRank, step: int, sources: Sequence[ReplicaId]) -> None:
        for source in sources:
            served = self.job.replicas[source].ranks[each.position]
            self.job.clock.after(self.job.timing.latency_s(), served.serve, step)
        self.job.clock.after(self.job.timing.state_s(), self._has_read, each, self.turn, step, sources)

    def _has_read(self, each: TimedRank, turn: int, step: int, sources: Sequence[ReplicaId]) -> None:
        """Judge what a rank has read: it is void if a source has applied meanwhile.

        What a dead source did not deliver is read from another one.
        """
        if turn != self.turn or not self.is_reading or not each.alive:
            return
        ranks = [self.job.replicas[source].ranks[each.position] for source in sources]
        if any(self.job.is_stopped(source) for source in ranks):
            self.job.clock.after(self.job.timing.state_s(), self._has_read, each, turn, step, sources)
        elif any(source.alive and source.served_step() != step for source in ranks):
            self._void()
        elif all(source.alive for source in ranks):
            self.sources |= {source.replica.number for source in ranks}
            self.open.discard(each.position)
            if not self.open:
                self._all_have_read(step, ranks[0].course)
        elif others := self._sources(step):
            self._read(each, step, self.job.sources(others))
        else:
            self._void()

    def _void(self) -> None:
        self.job.refused(self.one, "a step ended while its state was read", is_fault=True)
        self.is_reading, self.num_failed = False, self.num_failed + 1
        self.job.clock.after(self.job.timing.latency_s(), self.look, self.one.ranks[0])

    def _all_have_read(self, step: int, course: Course) -> None:
        self.newest, self.course = step, course
        self.job.memory.copy_state(self.one.number, self.sources, step)
        for each in self.one.ranks:
            self.job.clock.after(self.job.timing.digest_s(), self._digest, each, self.turn)

    def _digest(self, each: TimedRank, turn: int) -> None:
        if turn == self.turn and each.alive:
            each.feed(rank.Digest(self.label, self.job.memory.known_state(each, self.newest)))

    def follow(self) -> None:
        """Ask a member, read again or note the entry, if that is due after an input."""
        state = self.one.state
        if state.admitted_in and not self.is_admitted:
            self.is_admitted = True
            self.job.reached(self.one, "is admitted")
        if state.phase is not replica.ReplicaPhase.JOINING or state.claim is not None:
            return
        if self.is_reading and state.served_label == self.label and len(state.served) == len(self.one.ranks):
            self.is_reading, self.has_asked = False, True
            self._ask(self.job.asked(sorted(self.sources)))
        elif self.has_asked:
            self.has_asked, self.num_failed = False, self.num_failed + 1
            self.job.clock.after(self.job.timing.latency_s(), self._look_anew, self.one.ranks[0])

    def _ask(self, member: ReplicaId) -> None:
        self.one.feed(replica.SendClaim(member))
        assert self.one.state.claim is not None
        self.job.clock.after(self.job.answer_s, self._unanswered, self.one.ranks[0], self.one.state.claim)
        self.job.reached(self.one, "asks")

    def _unanswered(self, leader: TimedRank, claim: Claim) -> None:
        """Give a claim up that nobody answers: the message or the member that was asked is lost."""
        state = self.one.state
        if leader.alive and state.phase is replica.ReplicaPhase.JOINING and state.claim == claim:
            self.one.feed(JoinRefused(claim.replica, claim.label, "no answer came"))
