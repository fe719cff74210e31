"""What the members of a new generation do next: a pure function of all their statuses, so all come to the same plan.

1. A member that has committed a step gives its record to those that have not (they voted for it, so they hold its results).
2. A bucket that a member holds complete is decided and goes to those that lack it. Not so a result in which a replica took part
   that was outvoted since: in a step that nobody has committed it counts as held by nobody.
3. An undecided bucket is reduced again, whole. Ids that no member's local gradient of that bucket holds are dealt to those that
   will be done with them first, and computed into exactly the undecided buckets that miss them.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_recover.core import contribution
from megatron_recover.core.bucket import Decision, decide
from megatron_recover.core.quota import ONE_STAGE, deal
from megatron_recover.core.speed import UNKNOWN, Speeds, learn, paces
from megatron_recover.core.values import (
    BucketId,
    Commitment,
    Generation,
    MicrobatchId,
    Pipeline,
    ReplicaId,
    Status,
    Value,
    Work,
)
from megatron_recover.core.vote import Disagreement, disagreement


class Recovery(Value, frozen=True):
    """The common answer of a status exchange."""

    step: int
    """The step that nobody has committed."""
    adopt: Commitment | None
    """Record of `step - 1`, for members that have not committed it."""
    work: Work | None
    """Of `step`, or None if nobody has begun it: then everyone begins it afresh."""
    decisions: tuple[Decision, ...]
    reduces: tuple[BucketId, ...]
    """Undecided buckets."""
    dealt: tuple[tuple[ReplicaId, MicrobatchId, tuple[BucketId, ...]], ...]
    """(who computes, which microbatch, into which buckets), by id."""
    quotas: tuple[int, ...]
    reason: str


def recover(
    statuses: Sequence[Status], trusted_from: Generation, *, speeds: Speeds = UNKNOWN, pipeline: Pipeline = ONE_STAGE
) -> Recovery | Disagreement:
    """The answer to the statuses of all members of one generation, whose announcement says `trusted_from`.

    `speeds` are of all the steps that this member has committed. Raises ValueError if their steps differ by more than one.
    """
    ordered = sorted(statuses, key=lambda status: status.replica)
    step = max(status.step for status in ordered)
    if min(status.step for status in ordered) < step - 1:
        raise ValueError(f"steps of members differ by more than one: {[(s.replica, s.step) for s in ordered]}")
    current = [status for status in ordered if status.step == step]
    conflict = disagreement({s.replica: s.work for s in current if s.work is not None}, f"what step {step} is") or disagreement(
        {s.replica: s.committed for s in current}, f"the record of step {step - 1}"
    )
    if conflict is not None:
        return conflict
    behind = [status.replica for status in ordered if status.step < step]
    adopt = current[0].committed if behind else None
    reason = f"replicas {behind} adopt step {step - 1}; " if behind else ""
    work = next((status.work for status in current if status.work is not None), None)
    if work is None:
        return Recovery(step, adopt, None, (), (), (), (), reason + f"nobody has begun step {step}")
    held = {status.replica: status.contributions if status.step == step else () for status in ordered}
    decisions = decide(current, work.buckets, trusted_from)
    decided = {decision.bucket for decision in decisions}
    reduces = tuple(bucket for bucket in work.buckets if bucket not in decided)
    missing = contribution.missing(held.values(), reduces, work.num_microbatches)
    loads = {replica: {i for each in groups for i in each.microbatches} for replica, groups in held.items()}
    finished = {status.replica: set(status.journal.finished) for status in ordered}
    left = {replica: len(ids - finished[replica]) for replica, ids in loads.items()}
    # A member that is behind has yet to learn from the step that it adopts; the others have.
    pace = paces(learn(speeds, adopt.record) if adopt is not None else speeds, sorted(loads))
    owners = deal(missing, left, dict(zip(sorted(loads), pace, strict=True)), pipeline)
    dealt = tuple((owners[microbatch], microbatch, missing[microbatch]) for microbatch in sorted(missing))
    for microbatch, owner in owners.items():
        loads[owner].add(microbatch)
    quotas = tuple(len(loads[replica]) for replica in sorted(loads))
    if any(item.version < trusted_from for status in current for item in status.complete):
        reason += f"results older than generation {trusted_from} are withdrawn; "
    reason += f"buckets {sorted(decided)} decided, {list(reduces)} not; microbatches {sorted(missing)} held by no member"
    return Recovery(step, adopt, work, decisions, reduces, dealt, quotas, reason)
