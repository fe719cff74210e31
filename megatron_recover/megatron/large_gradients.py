"""Warns of a local gradient that is unexpectedly large, with `--check-for-large-grads`.

Upstream checks in its own gradient reduction, which replicas replace. What counts as large is
decided by upstream's function: ten times the largest norm among the first 100 that a process has
seen. As in upstream without its rerun mode, a large gradient is reported, and training continues.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_recover.core.values import BucketId, MicrobatchId

logger = logging.getLogger(__name__)
_THRESHOLD = 10
"""Upstream's factor (`check_grads` in core/distributed/param_and_grad_buffer.py)."""


def warn_of_large(norms: Iterable[tuple[BucketId, list[MicrobatchId], float]], *, iteration: int) -> None:
    """Log each of `norms` (`Reduction.mean_norms`) that is unexpectedly large."""
    machine = get_rerun_state_machine()
    for bucket, microbatches, norm in norms:
        if machine.is_unexpectedly_large(torch.tensor(norm), threshold=_THRESHOLD, context="grads"):
            logger.warning(
                "iteration %d: the local gradient of bucket %d has the norm %g, over microbatches %s, which is at least %d "
                "times the largest of the first ones; look at this rank's device and at these samples",
                iteration, bucket, norm, microbatches, _THRESHOLD,
            )  # fmt: skip
