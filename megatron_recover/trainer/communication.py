"""Which exceptions say that communication inside a replica failed, and not that a microbatch cannot be computed.

A flap of the network strikes whatever happens to be computed, on every replica that it reaches: charging it to microbatches
would end the job with innocent ids (INV-9). torch has classes for some of these errors (`torch.distributed.DistError`); gloo
raises plain RuntimeErrors whose text begins with the place in its sources.
"""

from __future__ import annotations

import torch.distributed as dist

from megatron_recover.core.policy import tells_of_communication


def is_communication_error(error: BaseException | None) -> bool:
    """Return whether `error`, or what it was raised from, is an error of `torch.distributed`.

    An OSError is not: a data set that is read over a network raises those, and reading belongs to the microbatch.
    """
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and tells_of_communication(str(error))):
            return True
        error = error.__cause__
    return False
