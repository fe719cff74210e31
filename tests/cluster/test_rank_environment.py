"""The environment that the launcher gives ranks for libraries that read it: NCCL, gloo, OpenMP."""

from __future__ import annotations

from megatron_recover.cluster.job import sharing_a_gpu


def test_ranks_that_share_a_gpu_have_hosts_of_their_own_and_only_sockets() -> None:
    """NCCL takes a plugin for the network or InfiniBand before sockets, unless it is told which (src/plugin/net.cc)."""
    one, other = sharing_a_gpu(0), sharing_a_gpu(1)
    assert one["NCCL_HOSTID"] != other["NCCL_HOSTID"]
    assert one["NCCL_NET"] == "Socket" and one["NCCL_SHM_DISABLE"] == one["NCCL_P2P_DISABLE"] == "1"
