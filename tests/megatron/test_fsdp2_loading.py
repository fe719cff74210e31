"""The state into which a checkpoint of shards is loaded has all that the checkpoint has."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_recover.fsdp2.loading import chained_state_dict
from tests.megatron.toy import FusedAdam


def create(optimizer: Any, config: Any = None) -> None:
    """As Megatron's `init_state_fn`: the moments alone."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                if isinstance(optimizer, torch.optim.AdamW):
                    optimizer.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)


def chained(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = make([torch.nn.Parameter(torch.ones(3))])
    leaf = Namespace(optimizer=optimizer, init_state_fn=create, config=None, state_dict=optimizer.state_dict)
    return Namespace(chained_optimizers=[leaf]), optimizer


@pytest.mark.parametrize("make", [FusedAdam, torch.optim.AdamW], ids=["in its groups", "for each parameter"])
def test_the_count_of_steps_is_loaded_wherever_the_optimizer_has_it(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], tmp_path: Path
) -> None:
    saved, optimizer = chained(make)
    for _ in range(7):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones(3)
        optimizer.step()
    dcp.save({"optimizer": chained_state_dict(saved)}, checkpoint_id=tmp_path, no_dist=True)
    loading, fresh = chained(make)
    state = {"optimizer": chained_state_dict(loading, is_loading=True)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    fresh.load_state_dict(state["optimizer"])
    [parameter] = fresh.param_groups[0]["params"]
    assert int(fresh.param_groups[0].get("step", fresh.state[parameter].get("step", 0))) == 7
    assert torch.equal(fresh.state[parameter]["exp_avg"], optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"])
