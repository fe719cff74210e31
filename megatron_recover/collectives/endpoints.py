"""Which data plane a rank uses, by name. Imports the implementation only when it is asked for."""

from __future__ import annotations

from typing import Literal

from megatron_recover.collectives.transport import Endpoint

TransportKind = Literal["auto", "direct", "gloo", "nccl"]


def open_endpoint(kind: TransportKind, *, device: str = "cpu", host: str = "127.0.0.1") -> Endpoint:
    """A rank's address on the data plane, to be published to the same-position ranks of the other replicas.

    `auto` is direct sockets for CPU tensors and NCCL for CUDA tensors. `device` is where the tensors are (``cpu`` or ``cuda``),
    `host` the interface to listen on, as the other replicas reach it. Raises ValueError if the kind can not serve the device.
    """
    on_cuda = device.split(":")[0] == "cuda"
    chosen = ("nccl" if on_cuda else "direct") if kind == "auto" else kind
    if (chosen == "nccl") != on_cuda:
        remedy = "nccl" if on_cuda else "direct"
        raise ValueError(f"--recover-transport {chosen} does not move {device} tensors; use {remedy} or auto")
    if chosen == "direct":
        from megatron_recover.collectives.direct import DirectEndpoint

        return DirectEndpoint(host)
    if chosen == "gloo":
        from megatron_recover.collectives.gloo import GlooEndpoint

        return GlooEndpoint(host)
    if chosen == "nccl":
        from megatron_recover.collectives.nccl import NcclEndpoint

        return NcclEndpoint(host)
    raise ValueError(f"--recover-transport is {kind!r}; choose auto, direct, gloo or nccl")
