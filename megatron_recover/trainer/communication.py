"""Exceptions that mean a failure of communication inside a replica, not of a microbatch.

A network fault strikes whatever is being computed, on every replica that it reaches. If it were
charged to microbatches, the job would end and blame innocent ids (INV-9). torch has classes for
some of these errors (`torch.distributed.DistError`). Gloo raises plain RuntimeErrors whose text
begins with a place in gloo's sources.
"""

from __future__ import annotations

import torch.distributed as dist

from megatron_recover.core.policy import is_communication_text


def is_communication_error(error: BaseException | None) -> bool:
    """Return whether `error`, or one of its causes, is an error of `torch.distributed`.

    An OSError is none: reading a data set over a network raises it too, and reading belongs to the
    microbatch.
    """
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and is_communication_text(str(error))):
            return True
        error = error.__cause__
    return False
