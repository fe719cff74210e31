"""What a replica that computes no microbatch of a step gives upstream's log of multi-token prediction."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_recover.megatron import mtp_losses


def test_a_replica_without_a_microbatch_averages_over_its_lanes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the group upstream would log the losses of one lane alone."""
    lanes = object()
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda *, with_context_parallel: lanes)
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    MTPLossLoggingHelper.clean_metrics_in_tracker()
    losses = [{"lm loss": torch.ones(2), "mtp": torch.full((3, 2), float(number))} for number in (1, 2)]
    mtp_losses.give(losses)
    tracker = MTPLossLoggingHelper.tracker
    assert [list(each) for each in losses] == [["lm loss"], ["lm loss"]]
    assert [tracker[name].tolist() for name in ("loss_values", "correct_values", "total_values")] == [[3.0, 3.0]] * 3
    assert tracker["avg_group"] is lanes


def test_what_is_taken_is_given_back_as_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda *, with_context_parallel: None)
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    assert mtp_losses.taken() == {}
    mtp_losses.give([{"lm loss": torch.ones(2)}])
    assert not MTPLossLoggingHelper.tracker
    MTPLossLoggingHelper.tracker.update(
        loss_values=torch.tensor([0.5]), correct_values=torch.tensor([1.0]), total_values=torch.tensor([4.0])
    )
    taken = mtp_losses.taken()
    assert taken["mtp"].tolist() == [[0.5], [1.0], [4.0]] and mtp_losses.taken()["mtp"].tolist() == [[0.0]] * 3
    mtp_losses.give([taken, {"mtp": taken["mtp"].clone()}])
    assert MTPLossLoggingHelper.tracker["total_values"].tolist() == [8.0]
