"""Makes the masks of a sample independent of the samples that were read before it.

Where masks depend on no token, upstream's GPT data set builds loss mask and positions once, keeps
them, and gives every later sample a copy of the loss mask. The first sample gets the kept loss mask
itself, and zeroes it where its labels are padding (`GPTDataset.__getitem__` in
`core/datasets/gpt_dataset.py`). So from then on these places count for nothing in all samples of
the data set that the process reads. Which sample a process reads first depends on the microbatches
that are dealt to its replica. A sample has to be a function of its index alone.
"""

from __future__ import annotations

from typing import Any

import torch

Masks = dict[tuple[int, bool], Any]
"""Masks and positions by (sequence length, with an attention mask), as upstream makes them."""


def fill_mask_caches(dataset: Any, made: Masks) -> None:
    """Fill the caches of masks in upstream's GPT data sets, before a sample is read.

    `dataset` is one of them, a blend of them or a wrapper around one, or any other data set, which
    stays as it is. So does a GPT data set whose masks depend on tokens. Data sets of one length
    share the masks in `made`; masks that `made` lacks are added to it. Nothing changes a mask.
    """
    from megatron.core.datasets.gpt_dataset import GPTDataset, _get_ltor_masks_and_position_ids

    waiting = [dataset]
    while waiting:
        each = waiting.pop()
        waiting += getattr(each, "datasets", None) or ()
        waiting += [inner for inner in (getattr(each, "dataset", None),) if inner is not None]
        if not isinstance(each, GPTDataset) or not each.masks_and_position_ids_are_cacheable:
            continue
        length, with_attention = each.config.sequence_length, each.config.create_attention_mask
        if (length, with_attention) not in made:
            tokens = torch.zeros(length, dtype=torch.long)  # cacheable masks depend on no token
            made[length, with_attention] = _get_ltor_masks_and_position_ids(
                tokens, each.config.tokenizer.eod, False, False, False, with_attention
            )
        each.cached_attention_mask, each.cached_loss_mask, each.cached_position_ids = made[length, with_attention]
        each.masks_and_position_ids_are_cached = True
