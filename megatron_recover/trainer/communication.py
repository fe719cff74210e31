"""Exceptions that mean a failure of communication or of a device, not of a microbatch.

A network fault strikes whatever is being computed, on every replica that it reaches. If it were
charged to microbatches, the job would end and blame innocent ids (INV-9). torch has classes for
some of these errors (`torch.distributed.DistError`). Gloo raises plain RuntimeErrors whose text
begins with a place in gloo's sources.

The same holds for a device: after an error nothing can be computed on it any more, whatever was
computed when it failed. Only a failed assertion in a kernel is charged to microbatches: wrong data
cause it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_recover.core.policy import is_communication_text, is_computed
from megatron_recover.data_plane.transport import DeviceError


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


def is_device_error(error: BaseException | None) -> bool:
    """Return whether `error`, or one of its causes, is an error of a device.

    A failed assertion in a kernel is none: a computation causes it.
    """
    while error is not None:
        if isinstance(error, DeviceError) or (isinstance(error, torch.AcceleratorError) and not is_computed(str(error))):
            return True
        error = error.__cause__
    return False
