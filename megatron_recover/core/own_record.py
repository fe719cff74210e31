"""The record that a replica's own results make: the replica votes for it and may commit it.

The record is made whenever it is needed, from the results that the replica's ranks hold. It does
not travel with votes, and no other field of the state repeats it.
"""

from __future__ import annotations

from msgspec.structs import replace

from megatron_recover.core.bucket import complete
from megatron_recover.core.digest import combined, digest
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.replica_state import ReplicaState
from megatron_recover.core.values import BucketVersion, Commitment, Record


def held_complete(state: ReplicaState) -> tuple[BucketVersion, ...]:
    """Return the buckets of the step that all their ranks hold in one version."""
    return complete(state.shape, state.held, state.work.buckets) if state.work is not None else ()


def own_record(state: ReplicaState) -> Record:
    """Return the record of the step as this replica holds it, without requests and paces."""
    label = state.work.label if state.work is not None else ""
    return Record(state.step, label, held_complete(state), state_digest=_state_digest(state))


def _state_digest(state: ReplicaState) -> int | None:
    """Return the digest of the state that the step began with; None if the record has none.

    All ranks must have sent their digests.
    """
    if state.work is None or not state.work.digests:
        return None
    return combined([of_rank for _, of_rank in state.digests])


def adopted(state: ReplicaState, commitment: Commitment) -> Record:
    """Return the whole record that a member has committed, made from this replica's results.

    Raises InvariantViolation if the digests differ. Nobody commits without the votes of all, so
    this replica has voted for the record. It has not dropped a result since: a plan that replaces a
    result needs the status of the member that committed.
    """
    record = replace(commitment.record, versions=held_complete(state))
    if digest(record) != commitment.digest:
        where = f"replica {state.replica} is to adopt step {state.step} in generation {state.generation}"
        raise InvariantViolation(2, f"{where}, and does not hold the results that were committed")
    return record
