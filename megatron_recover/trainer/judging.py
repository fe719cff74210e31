"""Brings from the device what the host has to know of a sum before it holds the result.

Decides nothing. The device works it out behind the sum (a summary of the provenance, the checksum),
and one copy brings it to the host. The sum of the next bucket begins meanwhile. On a CPU all of it
is there at once.
"""

from __future__ import annotations

from torch import Tensor

from megatron_recover.trainer import provenance
from megatron_recover.trainer.bucket_sums import BucketSum, LedgerSum
from megatron_recover.trainer.checksum import Checksums
from megatron_recover.trainer.host_copy import HostCopy


class Judging:
    """One bucket whose sum is complete. `finish` sets the attributes."""

    was_finite: bool
    """True if this rank's gradient is finite, or is not checked."""
    all_finite: bool
    """True if that holds on all ranks that took part in the sum."""
    is_once: bool
    """True if the result counts every microbatch once."""
    checksum: int
    """Checksum of the result."""

    def __init__(self, bucket_sum: BucketSum, is_finite: Tensor | None = None, *, seconds: float = 0.0) -> None:
        """Enqueue the work of the device.

        - `is_finite`: whether this rank's gradient is finite, as a scalar on the device; None: it
          is not checked.
        - `seconds`: how long the sum took.
        """
        self.bucket_sum, self.seconds = bucket_sum, seconds
        summary = provenance.summary(bucket_sum.provenance, bucket_sum.num_lanes)
        own = summary.new_ones(()) if is_finite is None else is_finite
        self._checksums = Checksums([bucket_sum.result])
        rows = [bucket_sum.result] if isinstance(bucket_sum, LedgerSum) else []
        self._copy = HostCopy([summary, own, *rows, *self._checksums.parts])

    def is_ready(self) -> bool:
        """Return whether `finish` would return at once."""
        return self._copy.has_arrived()

    def finish(self) -> None:
        """Wait until the device has worked everything out, and set the attributes."""
        summary, own, *parts = self._copy.tensors()
        is_once, self.bucket_sum.bound, num_not_finite = summary.tolist()
        self.is_once, self.all_finite, self.was_finite = bool(is_once), num_not_finite == 0, bool(own)
        if isinstance(self.bucket_sum, LedgerSum):
            self.bucket_sum.on_host, *parts = parts
        (self.checksum,) = self._checksums.values(parts)
