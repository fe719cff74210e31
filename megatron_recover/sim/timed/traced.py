"""Random jobs that write a trace, in memory, so that `check` can judge them by its own rules.

    job = TracedJob(seed)
    verdict = fuzz.run(job, seed)
    job.trace  # (line, event), as of a run whose recorder has lost nothing

The events are those that the drivers record for the same effects. Where the simulator has no such
detail, the trace is a simpler one that can have happened, too: a rank begins and ends all
microbatches of a plan when it takes the plan, and nobody names a checkpoint.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from megatron_recover import trace
from megatron_recover.control_plane import membership_events
from megatron_recover.control_plane.protocol_events import ProtocolEvents
from megatron_recover.core import coordinator, invariants, replica
from megatron_recover.core.membership_messages import Diverged, Entered, Hello, JoinRefused, LossKind, Miscounted
from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.values import Claim, ReplicaId, Status, Vote
from megatron_recover.sim.multiset import voted
from megatron_recover.sim.timed.actors import TimedCoordinator, TimedReplica
from megatron_recover.sim.timed.fuzz import RandomJob
from megatron_recover.sim.timed.memory import Counts
from megatron_recover.sim.timed.rank import TimedRank


class TracedReplica(TimedReplica):
    """A replica whose leader records what it does, before others can see it."""

    def __init__(self, job: Any, number: ReplicaId, *arguments: Any, **options: Any) -> None:
        super().__init__(job, number, *arguments, **options)
        self._traced = cast(TracedJob, job)
        self._events = ProtocolEvents(number, job.record)

    def carry_out(self, effect: replica.Effect) -> None:
        events = self._events
        match effect:
            case replica.ToPeers(message=Status() as status):
                events.status(status)
            case replica.ToPeers(message=Vote() as vote):
                events.vote(vote)
            case replica.ToPeers(peers=(member, *_), message=Claim() as claim):
                events.claim(member, claim)
            case replica.ToPeers(message=JoinRefused() as refused):  # the newcomer records it, if it hears it
                events.refused(refused, self.number)
            case replica.ToRanks(order=Plan() as plan):
                events.plan(plan)
            case replica.ToCoordinator(message=Entered() as entered):
                self._traced.record(trace.Entered(replica=self.number, generation=entered.generation, seconds=0.0))
            case replica.ToCoordinator(message=Diverged() as report):
                events.disagreement(report, self.state.work)
            case replica.ToCoordinator(message=Miscounted() as report):
                self._miscounted(report)
            case replica.Decided():
                events.decided(effect)
            case replica.Voted():
                events.voted(effect)
            case replica.Committed():
                events.committed(effect.record, effect.generation, effect.adopted)
        super().carry_out(effect)

    def _miscounted(self, report: Miscounted) -> None:
        wrong: Any = {"bucket": 0, "microbatches": (0,), "own_counts": (1,) * self.job.table.microbatches}
        self._traced.record(
            trace.Miscounted(replica=self.number, rank=0, generation=report.generation, step=report.step, **wrong)
        )  # fmt: skip


class TracedCoordinator(TimedCoordinator):
    """A coordinator that records what it decides, before others can see it."""

    def carry_out(self, effect: coordinator.Effect) -> None:
        record = cast(TracedJob, self.job).record
        match effect:
            case coordinator.Announce(new):
                record(membership_events.generation(new))
            case coordinator.Form(number):
                record(trace.Forming(newcomer=number))
            case coordinator.Refuse(refused):
                for event in membership_events.refusal(refused):
                    record(event)
            case coordinator.EndJob(exit_code, reason) if exit_code:
                record(trace.Stopping(exit_code=exit_code, reason=reason))
        super().carry_out(effect)


class _TracedCounts(Counts):
    """Memory whose ranks record the microbatches that they compute."""

    def __init__(self, job: TracedJob) -> None:
        super().__init__(job.table.microbatches, job.observe)
        self._record = job.record

    def compute(self, rank: Any, plan: Plan) -> None:
        where: Any = {
            "replica": rank.replica.number, "rank": rank.position, "generation": plan.generation, "step": plan.step,
        }  # fmt: skip
        for one in self.computes(rank, plan):
            into = tuple(bucket for bucket in one.into if bucket in rank.machine.buckets)
            for microbatch in one.microbatches:
                self._record(trace.MicrobatchStarted(**where, microbatch=microbatch))
                self._record(trace.MicrobatchFinished(**where, microbatch=microbatch, seconds=0.0, into=into))
        super().compute(rank, plan)


class TracedJob(RandomJob):
    """The random job of a seed, with its trace. Tests plant bugs in it as in a `RandomJob`."""

    replica_type = TracedReplica
    coordinator_type = TracedCoordinator

    def __init__(self, seed: int) -> None:
        self.trace: list[tuple[int, trace.AnyEvent]] = []
        """(line from 1, event); complete after `finish`."""
        super().__init__(seed)
        self.counts = _TracedCounts(self)
        self.memory = self.counts
        self._plans: dict[ReplicaId, Plan] = {}
        """The newest plan of each replica."""
        table = self.table
        self.record(
            trace.RunStarted(
                replicas=table.replicas,
                layout=trace.Layout(tp=table.ranks // table.stages, pp=table.stages),
                determinism="exact",
                seed=seed,
                argv=("fuzz",),
                min_replicas=self.min_replicas,
                num_microbatches=table.microbatches,
            )
        )

    def record(self, event: trace.Event) -> None:
        """Append an event to the trace."""
        event = msgspec.structs.replace(event, t=round(self.clock.now, 6))
        self.trace.append((len(self.trace) + 1, cast(trace.AnyEvent, event)))

    @property
    def gone_drifted(self) -> set[ReplicaId]:
        """Return the replicas whose results have shown a drift, and that went before a vote.

        They were lost or have left for another reason, so nobody has outvoted them. What they did
        is in the trace, and differs from what the others did; it is in no committed step.
        """
        outvoted = {loss.replica for loss in self.coordinator.state.losses if loss.kind is LossKind.DIVERGED}
        results = (event for _, event in self.trace if isinstance(event, trace.Reduced | trace.Transferred))
        return {event.replica for event in results if event.checksum < 0} - outvoted

    def finish(self) -> None:
        """Write the end of the trace: what was lost is dead by then."""
        for loss in self.coordinator.state.losses:
            self.fence_now(loss.replica)
        assert self.account.exit_code is not None, "the job has not ended"
        self.record(trace.RunFinished(exit_code=self.account.exit_code, reason=self.account.reason))

    def fence_now(self, number: ReplicaId) -> None:
        """Kill what is left of a replica, without the time that a fence takes."""
        for position in range(self.table.ranks):
            self.bury(number, position)

    def bury(self, number: ReplicaId, position: int) -> None:
        if not self.is_dead(number, position):
            self.record(trace.Fenced(replica=number, ranks=(position,)))
        super().bury(number, position)

    def hello(self, number: ReplicaId) -> Hello:
        greeting = super().hello(number)
        buckets = self.shape.bucket_ranks
        self.record(trace.Joined(replica=number, fingerprint=greeting.fingerprint, bucket_ranks=buckets))
        return greeting

    def judge(
        self, before: coordinator.CoordinatorState, message: coordinator.Input, after: coordinator.CoordinatorState
    ) -> None:
        for event in membership_events.judgements(before, after, message):
            self.record(event)
        super().judge(before, message, after)

    def observe(self, fact: invariants.Fact) -> None:
        match fact:
            case invariants.Planned(number, plan):
                self._plans[number] = plan
            case invariants.Held():
                self._held(fact)
            case invariants.Digested(number, position, step, digest):
                self._digested(number, position, step, self._works[step].label, digest)
            case invariants.StateKnown(number, position, step, digest):
                self._known(number, position, step, digest)
            case invariants.Applied():
                self._applied(fact)
        super().observe(fact)

    def _held(self, fact: invariants.Held) -> None:
        checksum = abs(fact.checksum)
        if fact.step >= self.counts.drifted.get(fact.replica, fact.step + 1):
            checksum = voted((checksum,), drifted=True)
        where: Any = {
            "replica": fact.replica, "rank": fact.rank, "generation": fact.generation, "step": fact.step,
            "bucket": fact.bucket, "version": fact.version, "checksum": checksum,
        }  # fmt: skip
        if fact.version == fact.generation:
            counts = fact.counts
            self.record(trace.Reduced(**where, provenance="ones" if counts is None or {*counts} == {1} else counts))
            return
        transfers = self._plans[fact.replica].transfers
        source = next(one.source for one in transfers if (one.bucket, one.version) == (fact.bucket, fact.version))
        self.record(trace.Transferred(**where, source=source))

    def _digested(self, number: ReplicaId, position: int, step: int, label: str, digest: int) -> None:
        self.record(trace.StateDigested(replica=number, rank=position, step=step, label=label, digest=f"{digest:016x}"))

    def _known(self, number: ReplicaId, position: int, step: int, digest: int) -> None:
        one = self.replicas[number]
        each: TimedRank = one.ranks[position]
        if each.has_entered:
            self._digested(number, position, step, each.label, digest)
            return
        sources = len(one.newcomer.sources)
        told: Any = {"label": one.newcomer.label, "digest": f"{digest:016x}", "num_sources": sources}
        self.record(trace.StateRead(replica=number, rank=position, **told))

    def _applied(self, fact: invariants.Applied) -> None:
        committed = next(
            event for _, event in reversed(self.trace)
            if isinstance(event, trace.Committed) and (event.replica, event.step) == (fact.replica, fact.step)
        )  # fmt: skip
        where: Any = {"replica": fact.replica, "rank": fact.rank, "step": fact.step}
        self.record(
            trace.Applied(**where, generation=committed.generation, label=committed.label, parameter_digest=fact.digest)
        )  # fmt: skip
