"""Losses of multi-token prediction, carried per microbatch as the other losses are.

Upstream adds them to a tracker in each forward, and logs and clears it after the step
(`core/transformer/multi_token_prediction.py`, `MTPLossLoggingHelper`). A replica's tracker would
have the replica's own microbatches only, and among them those that do not count. So what a forward
adds is moved from the tracker to the microbatch's row of the ledger. Once the step is committed the
tracker gets the sum over all ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

_KEY = "mtp"
_VALUES = ("loss_values", "correct_values", "total_values")


def taken() -> dict[str, Tensor]:
    """Return what the tracker has, as one loss, and zero the tracker.

    Return an empty dictionary if the tracker was never used. The loss has the shape (3, layers):
    for each layer its loss, its number of correct predictions, and its number of predictions.
    """
    tracker = MTPLossLoggingHelper.tracker
    if any(name not in tracker for name in _VALUES):
        return {}
    values = torch.stack([tracker[name] for name in _VALUES])
    for name in _VALUES:
        tracker[name].zero_()
    return {_KEY: values}


def give(losses: Sequence[dict[str, Tensor]]) -> None:
    """Remove the entries that come from `taken` from the losses of all ids.

    Store their sum in the tracker, and the group over which upstream averages it. Do nothing if no
    id has such an entry.
    """
    values = [each.pop(_KEY) for each in losses if _KEY in each]
    if not values:
        return
    total = torch.stack(values).double().sum(0)
    for name, its_total in zip(_VALUES, total.to(values[0].dtype).unbind(), strict=True):
        MTPLossLoggingHelper.tracker[name] = its_total
    # Upstream sets the group in a forward, and this replica may have run none since upstream has
    # cleared the tracker.
    MTPLossLoggingHelper.tracker["avg_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
