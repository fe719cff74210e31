"""What a trace says of state and checkpoints: replicas that agree hold the same state, and what is saved was agreed before.

Functions that judge a step, or the facts of a run; `rules` says to which invariant each belongs.
"""

from __future__ import annotations

from megatron_recover import trace
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import Findings, History, is_agreement, is_training, iteration_of
from megatron_recover.observe.step import Step


def equal_states(history: History, step: Step) -> Findings:
    """All who commit a step that carries the state digest began it with the same state, rank by rank, and told so first.

    What a replica was outvoted for differs, and commits nothing.
    """
    ranks = {rank for holders in history.bucket_ranks for rank in holders}
    voted: dict[int, int] = {}
    for line, vote in step.votes:
        voted.setdefault(vote.replica, line)
    first: dict[int, tuple[int, str]] = {}
    for replica, (line, record) in sorted(step.commits.items()):
        if record.state_digest is None:
            if is_agreement(record.label):
                yield line, f"replica {replica} committed step {step.number} ({record.label}) without a digest of the state"
            continue
        mine = step.digests.get(replica, {})
        late = {rank for rank, (at, _) in mine.items() if at > voted.get(replica, line)}
        if missing := sorted((ranks - mine.keys()) | late):
            yield line, f"replica {replica} voted for step {step.number} before its ranks {missing} had digested their state"
        for rank, (at, digest) in sorted(mine.items()):
            other, theirs = first.setdefault(rank, (replica, digest))
            if digest != theirs:
                what = f"rank {rank} began step {step.number} ({record.label}) with the state {digest} on replica {replica}"
                yield at, f"{what}, {theirs} on replica {other}"


def saved_what_was_agreed(history: History, gaps: Gaps) -> Findings:
    """A checkpoint gets its name only after a record has carried the digest of the state that is in it.

    That is the record of `save N`; or that of the end of training, where what is saved is the last state.
    """
    if gaps.touched:  # one of those steps may have been the agreement
        return
    agreed: dict[int, int] = {}
    trained = None
    for record in history.records.values():
        if is_training(record.label):
            trained = iteration_of(record.label)
        elif is_agreement(record.label) and record.has_digest:
            iteration = iteration_of(record.label) if record.label.startswith("save ") else trained
            if iteration is not None:
                agreed.setdefault(iteration, record.line)
    for line, event in history.of(trace.Checkpoint):
        if event.phase == "finished" and agreed.get(event.iteration, line) >= line:
            yield line, f"the checkpoint of iteration {event.iteration} was named, and no record had carried its digest"
