"""The common plan of a new generation: a pure function of all its members' statuses.

1. A member that has committed a step gives its record to those that have not. They voted for the
   record, so they hold its results.
2. A bucket that a member holds complete is decided and is sent to members without it. Exception: in
   a step that nobody has committed, nobody counts as holding a result in which a replica took part
   that was outvoted since.
3. An undecided bucket is reduced again, whole. Ids that no member's local gradient of that bucket
   holds are dealt to the members that will finish them first, but never to one that leaves. Their
   gradient goes into exactly the undecided buckets that miss them.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_recover.core import contribution
from megatron_recover.core.bucket import Decision, decide
from megatron_recover.core.joining import Admissions, judged
from megatron_recover.core.leaving import leavers
from megatron_recover.core.memo import newest_kept
from megatron_recover.core.quota import ONE_STAGE, deal
from megatron_recover.core.speed import UNKNOWN, Speeds, learn, paces
from megatron_recover.core.values import (
    BucketId,
    Claim,
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
from megatron_recover.core.wording import named, verb


class Recovery(Value, frozen=True):
    """The common outcome of a status exchange."""

    step: int
    """The step that no member has committed."""
    adopt: Commitment | None
    """Record of `step - 1` for members that have not committed it; None if there are none."""
    work: Work | None
    """Work of `step`, or None if no member has begun it; then every member begins it afresh."""
    decisions: tuple[Decision, ...]
    reduces: tuple[BucketId, ...]
    """Undecided buckets, which are reduced again."""
    dealt: tuple[tuple[ReplicaId, MicrobatchId, tuple[BucketId, ...]], ...]
    """(member that computes, microbatch, buckets that it goes into), by microbatch."""
    quotas: tuple[int, ...]
    reason: str
    admissions: Admissions = Admissions()
    """The newcomers that the plan admits. None of them is dealt a microbatch."""


@newest_kept
def recover(
    statuses: Sequence[Status],
    trusted_from: Generation,
    *,
    speeds: Speeds = UNKNOWN,
    pipeline: Pipeline = ONE_STAGE,
    min_replicas: int = 1,
    claims: Sequence[Claim] = (),
) -> Recovery | Disagreement:
    """Return the common plan of one generation, or the disagreement that its statuses show.

    `statuses` has one of every older member, `claims` has those of the newcomers. `trusted_from` is
    that of the generation's announcement. `speeds` must have learned from all steps that this
    member has committed. `min_replicas` is that of `leavers`. Raises ValueError if the steps of two
    members differ by more than one.
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
    reason = f"{named(behind)} {verb(len(behind), 'adopts', 'adopt')} step {step - 1}; " if behind else ""
    work = next((status.work for status in current if status.work is not None), None)
    admissions = judged(claims, current, work)
    reason += f"{admissions.reason}; " if admissions.reason else ""
    if work is None:
        return Recovery(step, adopt, None, (), (), (), (), reason + f"nobody has begun step {step}", admissions)
    held = {status.replica: status.contributions if status.step == step else () for status in ordered}
    decisions = decide(current, work.buckets, trusted_from)
    decided = {decision.bucket for decision in decisions}
    reduces = tuple(bucket for bucket in work.buckets if bucket not in decided)
    missing = contribution.missing(held.values(), reduces, work.num_microbatches)
    loads = {replica: {i for each in groups for i in each.microbatches} for replica, groups in held.items()}
    finished = {status.replica: set(status.journal.finished) for status in ordered}
    left = {replica: len(ids - finished[replica]) for replica, ids in loads.items()}
    # A member that is behind has not yet learned from the step that it adopts; the others have.
    pace = paces(learn(speeds, adopt.record) if adopt is not None else speeds, sorted(loads))
    before = current[0].committed
    out = leavers(before.record.requests if before is not None else (), tuple(loads), min_replicas)
    left = {replica: num for replica, num in left.items() if replica not in out}
    owners = deal(missing, left, dict(zip(sorted(loads), pace, strict=True)), pipeline)
    dealt = tuple((owners[microbatch], microbatch, missing[microbatch]) for microbatch in sorted(missing))
    for microbatch, owner in owners.items():
        loads[owner].add(microbatch)
    loads |= {replica: set() for replica in admissions.admitted}
    quotas = tuple(len(loads[replica]) for replica in sorted(loads))
    if any(item.version < trusted_from for status in current for item in status.complete):
        reason += f"results older than generation {trusted_from} are withdrawn; "
    reason += f"buckets {sorted(decided)} decided, {list(reduces)} not; microbatches {sorted(missing)} held by no member"
    return Recovery(step, adopt, work, decisions, reduces, dealt, quotas, reason, admissions)
