"""The record that a replica's own results make: what it votes for, and what it commits when all have voted alike.

The record is put together from the results that the replica's ranks hold, whenever it is needed: it does not travel with votes,
and nothing else in the state repeats it.
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
    """Return the record of the step as this replica holds it, without what voters say of themselves."""
    label = state.work.label if state.work is not None else ""
    return Record(state.step, label, held_complete(state), state_digest=_state_digest(state))


def _state_digest(state: ReplicaState) -> int | None:
    """Return the digest of the state that the replica began the step with, if the record carries one. All ranks told theirs."""
    if state.work is None or not state.work.digests:
        return None
    return combined([of_rank for _, of_rank in state.digests])


def adopted(state: ReplicaState, commitment: Commitment) -> Record:
    """Return the whole record that a member has committed. Raises InvariantViolation if it is not of this replica's results.

    Nobody commits without the vote of all, so this replica has voted for that record, and has not given up a result since: a
    plan that replaces a result needs the status of the member that committed.
    """
    record = replace(commitment.record, versions=held_complete(state))
    if digest(record) != commitment.digest:
        where = f"replica {state.replica} is to adopt step {state.step} in generation {state.generation}"
        raise InvariantViolation(2, f"{where}, and does not hold the results that were committed")
    return record
