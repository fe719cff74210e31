"""The mean loss of a step, and the scale of its gradient, by upstream's own rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_recover.fsdp2 import shards
from megatron_recover.trainer.host_copy import to_device
from megatron_recover.trainer.ledger import first_losses


def gradient_scale(chunk: Any, arguments: Mapping[str, Any]) -> float:
    """Return the ratio of the summed gradient to the gradient of the step's mean loss.

    The ratio is lanes times CP, times the loss scale. With FSDP2, which takes the mean over the
    lanes, it is the loss scale. Replicas add no factor: each microbatch is in one of them, and its
    loss is divided by the M of the whole step.

    With a per-token loss upstream divides no loss that comes with a token count, and the ratio is
    an upper bound: it counts tokens that the loss leaves out, and the whole sequence for each
    context-parallel rank. Such loss functions are of two kinds, and upstream accepts both:

    - those that return the sum over the rank's own tokens, whose gradient is smaller by the
      context-parallel size;
    - those for older versions of upstream, which multiply the loss by that size and count the
      tokens of all context-parallel ranks.

    The ratio bounds both, because a sum that outgrows the grid (`trainer/exact.py`) is not exact.
    For the first kind the grid is log2(CP) bits coarser than needed.
    """
    config = get_model_config(chunk)
    scale = 1.0
    if not shards.is_sharded(chunk):
        scale = float(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
    if config.calculate_per_token_loss:
        scale *= arguments["num_microbatches"] * arguments["micro_batch_size"] * arguments["seq_length"]
    if config.grad_scale_func is not None:
        scale *= float(config.grad_scale_func(torch.ones(1, device=next(chunk.parameters()).device)))
    return scale


def mean_loss(rows: Tensor, device: torch.device) -> float | None:
    """Return the mean of the first reported loss over all microbatches, lanes and CP ranks.

    `rows` are the ledger's, in host memory. The mean is upstream's: a loss that comes with a token
    count is weighted by tokens. Returns None if the first row reports no loss. Otherwise collective
    over the lanes and the context-parallel ranks of the last stage, if these are several ranks;
    `device` is theirs.
    """
    values = first_losses(rows)
    if not values.numel():
        return None
    total = torch.stack([values[:, 0].sum(), values[:, 1].sum() if values.shape[1] == 2 else values.new_tensor(len(values))])
    lanes = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if lanes.size() > 1:
        total = to_device(total, device)
        torch.distributed.all_reduce(total, group=lanes)
        total = total.cpu()  # waits for the device
    return float(total[0] / total[1])
