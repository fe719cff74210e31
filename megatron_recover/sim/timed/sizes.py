"""The bytes of messages on the wire in a simulated job, as far as they grow with the job."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from megatron_recover.control_plane.encoding import packed_status
from megatron_recover.control_plane.wire import STATUSES_A_FRAME
from megatron_recover.core import replica
from megatron_recover.core.membership_messages import NewGeneration
from megatron_recover.core.values import Commitment, ReplicaId, Status, Statuses, Votes
from megatron_recover.sim.timed.models import MEMBER_BYTES, PACE_BYTES


class MessageSizes:
    """Measures messages, each status and each record once."""

    def __init__(self, num_older: Callable[[], int]) -> None:
        """Measure nothing yet. `num_older()` returns the number of older members of the roster."""
        self._num_older = num_older
        self._status_bytes: dict[tuple[ReplicaId, int], tuple[float, float]] = {}
        """Results of `_bytes_of`, by replica and generation."""
        self._statuses_bytes: dict[tuple[ReplicaId, int], float] = {}
        """Bytes of forwarded statuses, by who forwards them up (-1: down) and generation."""
        self._record_bytes: tuple[Commitment | None, float] = (None, 0.0)
        """Newest record that was measured, and its bytes."""

    def forget(self) -> None:
        """Forget all statuses: a new generation has others."""
        self._status_bytes.clear()
        self._statuses_bytes.clear()

    def of(self, message: replica.Input) -> float:
        """Return the bytes of a message; 0 if they do not grow with the job."""
        if isinstance(message, NewGeneration):
            return MEMBER_BYTES * len(message.roster)
        if isinstance(message, Status):
            return sum(self._bytes_of(message))
        if isinstance(message, Statuses):
            # All that goes down the tree is the same. What goes up depends on the sender.
            goes_down = len(message.statuses) == self._num_older()
            key = (-1 if goes_down else message.replica, message.generation)
            if key not in self._statuses_bytes:
                self._statuses_bytes[key] = self._bytes_together(message.statuses)
            return self._statuses_bytes[key]
        if isinstance(message, Votes):
            return sum(MEMBER_BYTES * len(ballot.voters) + PACE_BYTES * len(ballot.paces) for ballot in message.ballots)
        return 0.0

    def _bytes_together(self, statuses: Sequence[Status]) -> float:
        """Return the bytes of forwarded statuses, with each record once a frame."""
        found = [(status.committed and status.committed.digest, *self._bytes_of(status)) for status in statuses]
        records = {record: num_bytes for record, _, num_bytes in found}
        num_frames = math.ceil(len(found) / STATUSES_A_FRAME)
        return num_frames * sum(records.values()) + sum(num_bytes for _, num_bytes, _ in found)

    def _bytes_of(self, status: Status) -> tuple[float, float]:
        """Return the bytes of a status without its record, and of the record, which most share."""
        key = (status.replica, status.generation)
        if key not in self._status_bytes:
            record = status.committed
            if record is not self._record_bytes[0]:
                self._record_bytes = record, float(len(msgspec.msgpack.encode(record)))
            bare = float(len(msgspec.msgpack.encode(packed_status(replace(status, committed=None)))))
            self._status_bytes[key] = bare, self._record_bytes[1]
        return self._status_bytes[key]
