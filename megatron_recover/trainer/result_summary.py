"""Brings from the device what the host has to know of a result before the rank holds the result.

Decides nothing; `crossing.Crossing` judges. The device computes the summary after the sum, and one
copy brings it to the host. The sum of the next bucket begins meanwhile. On a CPU the summary is
there at once.
"""

from __future__ import annotations

from torch import Tensor

from megatron_recover.trainer import provenance
from megatron_recover.trainer.bucket_sums import BucketSum
from megatron_recover.trainer.checksum import Checksums
from megatron_recover.trainer.host_copy import HostCopy


class ResultSummary:
    """The summary of one result that a sum or a copy has completed. `read` sets the attributes."""

    own_is_finite: bool
    """True if this rank's gradient (of the ledger: its losses) is finite, or is not checked."""
    all_finite: bool
    """True if that holds on all ranks that took part in the sum."""
    is_once: bool
    """True if the result counts every microbatch once."""
    checksum: int
    """Checksum of the result."""

    def __init__(self, bucket_sum: BucketSum, is_finite: Tensor | None = None, *, seconds: float = 0.0) -> None:
        """Enqueue the work of the device.

        - `is_finite`: whether this rank's gradient or loss is finite, as a scalar on the device;
          None: it is not checked.
        - `seconds`: how long the sum took.
        """
        self.bucket_sum, self.seconds = bucket_sum, seconds
        summary = provenance.summary(bucket_sum.provenance, bucket_sum.num_lanes)
        own = summary.new_ones(()) if is_finite is None else is_finite
        self._checksums = Checksums([bucket_sum.result])
        self._needed = bucket_sum.needed_on_host()
        self._copy = HostCopy([summary, own, *self._needed, *self._checksums.parts])

    def has_arrived(self) -> bool:
        """Return whether `read` would return at once."""
        return self._copy.has_arrived()

    def wait(self) -> None:
        """Return when this summary and all older ones have arrived."""
        self._copy.wait()

    def read(self) -> None:
        """Wait for the copy, set the attributes, and call `BucketSum.arrived`."""
        summary, own, *parts = self._copy.tensors()
        is_once, bound, num_not_finite = summary.tolist()
        self.is_once, self.all_finite, self.own_is_finite = bool(is_once), num_not_finite == 0, bool(own)
        (self.checksum,) = self._checksums.values(parts[len(self._needed) :])
        self.bucket_sum.arrived(bound, parts[: len(self._needed)])
