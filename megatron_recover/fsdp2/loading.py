"""Lets Megatron load a checkpoint of a model that FSDP2 shards.

Megatron 0.19 makes the state into which it loads such a checkpoint by
`optimizer.state_dict(is_loading=True)`, and the optimizer that it has built, a `ChainedOptimizer`,
does not take that argument. So it fails before it has read anything, also where there is no
checkpoint yet.
"""

from __future__ import annotations

from typing import Any

import torch


def chained_state_dict(self: Any, is_loading: bool = False) -> Any:
    """Return the state of all optimizers in a `ChainedOptimizer` (seam `chained_state_dict`).

    `is_loading`: first create the tensors into which the state is loaded.
    """
    for each in self.chained_optimizers if is_loading else ():
        _create_state(each)
    states = [each.state_dict() for each in self.chained_optimizers]
    return states[0] if len(states) == 1 else states


def _create_state(optimizer: Any) -> None:
    """Create the state of one of Megatron's optimizers, which creates it in its first step.

    Megatron's own function leaves out the count of steps. torch's Adam has it for each parameter,
    and FusedAdam of Transformer Engine and Apex for each group with parameters, from its first step
    on. torch loads what the state has and leaves out all else without a word. So without the count
    Adam would begin to correct its moments anew.
    """
    if optimizer.init_state_fn is None:
        return
    optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    if isinstance(optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW):
        for state in optimizer.optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0))
        return
    for group in optimizer.optimizer.param_groups:
        if group["params"]:
            group.setdefault("step", 0)
