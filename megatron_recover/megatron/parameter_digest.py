"""Digests of a rank's parameters.

Ranks that hold the same parameters must have equal digests (INV-2).

Two attributes that Megatron sets on a parameter (`core/tensor_parallel/layers.py`) give its
holders:

- `allreduce` is False for an expert's parameter that lanes hold differently: with expert
  parallelism, or with an expert tensor-parallel size that differs from TP. Other experts count
  like any parameter.
- `tensor_model_parallel` is True for a parameter that is sharded over the tensor-parallel ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_recover.core.digest import combined
from megatron_recover.megatron import late_gather
from megatron_recover.trainer.checksum import checksums


class HeldBy(enum.Enum):
    """The ranks of a replica that must hold equal values of a parameter."""

    STAGE = "stage"
    """All ranks of the pipeline stage."""
    LANES = "lanes"
    """The ranks of all lanes at the same tensor-parallel position."""
    RANK = "rank"
    """Perhaps this rank alone: an expert's parameter whose `allreduce` is False."""


class Digests(NamedTuple):
    """Digests of the parameters of one rank, 63 bits each."""

    everything: int
    """Digest of all parameters: equal on the same rank of all replicas."""
    replicated: int | None
    """Digest of the parameters that all ranks of the stage hold (`HeldBy.STAGE`); None where only
    shards are digested (`late_gather.py`)."""
    lanes: int | None
    """Digest of all parameters but those of `HeldBy.RANK`: equal on the ranks of all lanes at the
    same tensor-parallel position. None where no parameter is `HeldBy.RANK` (`everything` is equal
    on these ranks then), and where only shards are digested."""

    def fields(self) -> dict[str, str]:
        """Return the digests as fields of `trace.Applied`."""
        if self.replicated is None:  # no other lane has this shard, so there is nothing to compare it with
            return {"parameter_digest": f"{self.everything:016x}", "lane_digest": ""}
        found = {"parameter_digest": f"{self.everything:016x}", "replicated_digest": f"{self.replicated:016x}"}
        return found if self.lanes is None else found | {"lane_digest": f"{self.lanes:016x}"}


class ParameterDigest:
    """Computes the digests of the parameters of a rank's model chunks (upstream's DDP modules).

    Of parameters that lanes gather late (`late_gather.py`), and with FSDP2, only this lane's shard
    is digested.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        """List the parameters once: walking the modules for every digest is slow."""
        self._is_sharded = any(late_gather.has_shards(chunk) for chunk in chunks)
        self._parameters = [tensor for chunk in chunks for _, tensor in late_gather.current(chunk)]
        self._held_by = [_held_by(parameter) for parameter in self._parameters]

    def compute(self) -> Digests:
        """Return the digests of the parameters' current values."""
        values = checksums(self._parameters)
        if self._is_sharded:
            return Digests(combined(values), None, None)
        each = list(zip(values, self._held_by, strict=True))
        replicated = combined([value for value, held_by in each if held_by is HeldBy.STAGE])
        lanes = None
        if HeldBy.RANK in self._held_by:
            lanes = combined([value for value, held_by in each if held_by is not HeldBy.RANK])
        return Digests(combined(values), replicated, lanes)


def _held_by(parameter: Any) -> HeldBy:
    if not getattr(parameter, "allreduce", True):
        return HeldBy.RANK
    return HeldBy.LANES if getattr(parameter, "tensor_model_parallel", False) else HeldBy.STAGE
