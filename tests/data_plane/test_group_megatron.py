"""Megatron's own DDP over the fault-tolerant group, as its data-parallel group and across distributed optimizer instances."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_recover.data_plane.group import FaultTolerantGroup
from megatron_recover.data_plane.transport import Endpoint, TransportError
from tests.control_plane.partners import within
from tests.data_plane.ranks import ranks

pytestmark = pytest.mark.timeout(240)


def megatron_script(endpoint: Endpoint, me: int, addresses: dict[int, str]) -> str:
    """Both uses in one process, since importing Megatron is most of the time."""
    if not torch.cuda.is_available():
        from megatron_recover.megatron.cpu import enable_cpu

        enable_cpu()
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    reduces_gradients(endpoint, me, addresses, generation=1, instances=1)
    reduces_gradients(endpoint, me, addresses, generation=3, instances=3)
    return "ok"


def reduces_gradients(endpoint: Endpoint, me: int, addresses: dict[int, str], *, generation: int, instances: int) -> None:
    """Gradients of 2^me are summed among three members; member 1 leaves; the same DDP object sums among two."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    group = FaultTolerantGroup(endpoint, me, name=f"replicas {generation}")
    group.grow(generation, addresses)
    group.register()
    collection = ProcessGroupCollection.use_mpu_process_groups()
    collection.expt_dp = collection.intra_expt_dp = collection.dp
    if instances == 1:
        collection.dp = collection.dp_cp = collection.intra_dp_cp = group
    else:  # the gradient's shard is reduced inside the replica, then summed over the replicas
        collection.dp = collection.dp_cp = collection.intra_dp_cp
        collection.inter_dist_opt = group
    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, calculate_per_token_loss=True),
        DistributedDataParallelConfig(
            use_distributed_optimizer=instances > 1,
            overlap_grad_reduce=instances > 1,
            num_distributed_optimizer_instances=instances,
        ),
        torch.nn.Linear(4, 2, bias=False),
        pg_collection=collection,
    )

    def step() -> torch.Tensor:
        model.zero_grad_buffer()
        model(torch.full((1, 4), 2.0**me)).sum().backward()
        model.finish_grad_sync()
        return model.module.weight.main_grad

    summed = step()
    assert torch.equal(summed, torch.full((2, 4), 7.0)), f"a per-token loss is summed, 1 + 2 + 4, not {summed}"
    if me == 1:
        group.revoke()
        return
    with pytest.raises((TransportError, RuntimeError)):  # out of C++ it comes as a RuntimeError
        step()
    group.revoke()
    group.shrink(generation + 1, [0, 2])
    for bucket_group in model.bucket_groups:  # upstream has no way back from a reduction that raised
        bucket_group.reset()
        bucket_group.grad_reduce_handle = None
    summed = step()
    assert torch.equal(summed, torch.full((2, 4), 5.0)), f"without member 1 it is 1 + 4, not {summed}"


def test_megatrons_ddp_takes_the_group() -> None:
    with ranks("direct", 3, deadlines=within(200.0)) as run:  # who imports Megatron first waits for the others
        assert run.call(megatron_script, run.addresses) == dict.fromkeys(range(3), "ok")
