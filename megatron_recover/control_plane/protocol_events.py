"""The events of the trace that a leader writes about the protocol.

The core's values become events: the statuses, plans, votes and records of one replica, and what
members disagree on. `ReplicaDriver` calls the methods in its own thread, as the machine's effects
say.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_recover import trace
from megatron_recover.core import replica as machine
from megatron_recover.core.digest import bare, digest
from megatron_recover.core.membership_messages import Diverged, JoinRefused
from megatron_recover.core.rank_messages import Plan
from megatron_recover.core.replica_state import Hold
from megatron_recover.core.values import Claim, Record, Status, Vote, Work


class ProtocolEvents:
    """Records the events of one replica."""

    def __init__(self, replica: int, record: Callable[[trace.Event], None]) -> None:
        """`record(event)` writes an event to the trace."""
        self._replica, self._record = replica, record
        self._decided: machine.Decided | None = None
        self._voted: machine.Voted | None = None
        self._vote_digest = b""
        """Digest of the record that this replica voted for."""

    def decided(self, decided: machine.Decided) -> None:
        """Note what is decided in a recovery; the plan that follows has it in its event."""
        self._decided = decided

    def voted(self, voted: machine.Voted) -> None:
        """Note the record for which this replica votes."""
        self._voted = voted

    def vote(self, vote: Vote) -> None:
        """Record this replica's vote."""
        self._vote_digest = vote.digest
        self._record(trace.Voted(replica=vote.replica, generation=vote.generation, step=vote.step, digest=vote.digest.hex()))

    def status(self, status: Status) -> None:
        """Record the status that this replica sends to the other members."""
        self._record(
            trace.Status(
                replica=status.replica,
                generation=status.generation,
                step=status.step,
                work=status.work is not None,
                contributions=tuple(
                    trace.Contribution(buckets=each.buckets, microbatches=each.microbatches) for each in status.contributions
                ),
                complete=tuple(sorted((bucket, each.version) for each in status.complete for bucket in each.buckets)),
                committed=status.committed.record.step if status.committed is not None else None,
                finished=status.journal.finished,
                computing=status.journal.computing,
                state_digest=_hex(status.state_digest),
            )  # fmt: skip
        )

    def claim(self, member: int, claim: Claim) -> None:
        """Record the claim of this newcomer, which it is about to send to a member."""
        self._record(
            trace.Claimed(replica=claim.replica, member=member, label=claim.label, digest=f"{claim.digest:016x}")
        )  # fmt: skip

    def refused(self, refused: JoinRefused, member: int) -> None:
        """Record that a member does not vouch for a claim of this newcomer."""
        self._record(
            trace.ClaimRefused(newcomer=refused.newcomer, label=refused.label, reason=refused.reason, member=member)
        )  # fmt: skip

    def held(self, hold: Hold, seconds: float) -> None:
        """Record a hold of this member that is over, and for how long it kept the pass open."""
        self._record(
            trace.PassHeld(
                replica=self._replica, label=hold.label, newcomers=hold.newcomers, is_asked=hold.is_asked,
                seconds=round(seconds, 6),
            )
        )  # fmt: skip

    def plan(self, plan: Plan) -> None:
        """Record the plan that this replica's ranks get."""
        decided = self._decided
        if decided is not None and (decided.step, decided.generation) != (plan.step, plan.generation):
            decided = None
        self._record(
            trace.Plan(
                replica=self._replica,
                generation=plan.generation,
                step=plan.step,
                label=plan.work.label,
                num_microbatches=plan.work.num_microbatches,
                roster=plan.roster,
                quotas=plan.quotas,
                transfers=tuple(
                    trace.Transfer(bucket=each.bucket, version=each.version, source=each.source, targets=each.targets)
                    for each in plan.transfers
                ),
                computes=tuple(trace.Compute(microbatches=each.microbatches, into=each.into) for each in plan.computes),
                reduces=plan.reduces,
                decided=tuple(
                    trace.Decided(bucket=bucket, version=version, source=source)
                    for bucket, version, source in (decided.decided if decided is not None else ())
                ),
            )  # fmt: skip
        )

    def committed(self, record: Record, generation: int, adopted: bool) -> None:
        """Record a committed record, which this replica may have adopted from another member."""
        self._record(
            trace.Committed(
                replica=self._replica,
                generation=generation,
                step=record.step,
                label=record.label,
                digest=self._digest_of(record).hex(),
                adopted=adopted,
                requests=record.requests,
                paces=record.paces,
                state_digest=_hex(record.state_digest),
                versions=_results(record),
            )  # fmt: skip
        )

    def disagreement(self, report: Diverged, work: Work | None) -> None:
        """Record what members disagree on, with this replica's own vote: votes carry only digests.

        Without a vote they disagree on what the step is, or on the record of the step before.
        `work` is that of the step, if this replica has begun it.
        """
        voted = self._voted
        label, vote_digest, state_digest = work.label if work else "", "", None
        versions: tuple[trace.Result, ...] = ()
        if voted is not None and (voted.record.step, voted.generation) == (report.step, report.generation):
            label, vote_digest = voted.record.label, self._vote_digest.hex()
            versions, state_digest = _results(voted.record), _hex(voted.record.state_digest)
        self._record(
            trace.Disagreed(
                replica=report.replica,
                generation=report.generation,
                step=report.step,
                label=label,
                digest=vote_digest,
                versions=versions,
                state_digest=state_digest,
                reason=report.reason,
            )  # fmt: skip
        )

    def _digest_of(self, record: Record) -> bytes:
        """Return the digest of a committed record, from the vote if the vote was for it."""
        voted = self._voted
        if voted is not None and bare(voted.record) == bare(record):
            return self._vote_digest
        return digest(record)


def _hex(state_digest: int | None) -> str | None:
    """Return a state digest in the form that the trace uses."""
    return None if state_digest is None else f"{state_digest:016x}"


def _results(record: Record) -> tuple[trace.Result, ...]:
    """Return the versions of a record in the form that the trace uses."""
    return tuple(trace.Result(bucket=each.bucket, version=each.version, checksums=each.checksums) for each in record.versions)
