"""What a trace says of state and checkpoints: replicas that agree hold the same state, and what is saved was agreed before.

Each function yields like a rule; `rules` says to which invariant it belongs.
"""

from __future__ import annotations

from megatron_recover import trace
from megatron_recover.observe.history import Findings, History, Line, is_agreement, is_training, iteration_of


def equal_states(history: History) -> Findings:
    """All who commit a step that carries the state digest began it with the same state, rank by rank, and told so first.

    What a replica was outvoted for differs, and commits nothing.
    """
    told: dict[tuple[str, int], dict[int, tuple[Line, str]]] = {}
    for line, event in history.of(trace.StateDigested):
        told.setdefault((event.label, event.replica), {}).setdefault(event.rank, (line, event.digest))
    ranks = {rank for holders in history.bucket_ranks for rank in holders}
    voted: dict[tuple[int, int], Line] = {}
    for line, vote in history.of(trace.Voted):
        voted.setdefault((vote.step, vote.replica), line)
    for step, commits in history.commits.items():
        first: dict[int, tuple[int, str]] = {}
        for replica, (line, record) in sorted(commits.items()):
            if record.state_digest is None:
                if is_agreement(record.label):
                    yield line, f"replica {replica} committed step {step} ({record.label}) without a digest of the state"
                continue
            mine = told.get((record.label, replica), {})
            late = {rank for rank in mine if mine[rank][0] > voted.get((step, replica), line)}
            if missing := sorted((ranks - mine.keys()) | late):
                yield line, f"replica {replica} voted for step {step} before its ranks {missing} had digested their state"
            for rank, (at, digest) in sorted(mine.items()):
                other, theirs = first.setdefault(rank, (replica, digest))
                if digest != theirs:
                    what = f"rank {rank} began step {step} ({record.label}) with the state {digest} on replica {replica}"
                    yield at, f"{what}, {theirs} on replica {other}"


def saved_what_was_agreed(history: History) -> Findings:
    """A checkpoint gets its name only after a record has carried the digest of the state that is in it.

    That is the record of `save N`; or that of the end of training, where what is saved is the last state.
    """
    agreed: set[int] = set()
    trained = None
    for line, event in history.events:
        if isinstance(event, trace.Committed):
            if is_training(event.label):
                trained = max(iteration_of(event.label), trained or 0)
            elif event.label.startswith("save "):
                agreed |= {iteration_of(event.label)} if event.state_digest is not None else set()
            elif is_agreement(event.label) and event.state_digest is not None and trained is not None:
                agreed.add(trained)
        elif isinstance(event, trace.Checkpoint) and event.phase == "finished" and event.iteration not in agreed:
            yield line, f"the checkpoint of iteration {event.iteration} was named, and no record had carried its digest"
