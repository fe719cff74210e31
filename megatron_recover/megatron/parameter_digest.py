"""Digests of all parameters of a rank, which the ranks that hold the same parameters must agree on after every step (INV-2).

Megatron marks who holds a parameter: `allreduce` is False for an expert's, and `tensor_model_parallel` is True for one that the
tensor-parallel ranks share among them (`core/tensor_parallel/layers.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_recover.trainer.checksum import checksums, combined


class HeldBy(enum.Enum):
    """Which ranks of a replica must hold a parameter alike."""

    STAGE = "stage"
    """All of the stage."""
    LANES = "lanes"
    """Those of all lanes at the same tensor-parallel position."""
    RANK = "rank"
    """Perhaps no other: it is an expert's."""


class Digests(NamedTuple):
    """Digests of 63 bits each."""

    everything: int
    """Of all parameters: equal on the same rank of all replicas."""
    replicated: int
    """Of those that all ranks of a stage hold."""
    lanes: int | None
    """Of those that the lanes at one tensor-parallel position hold; None where that is `everything`."""

    def fields(self) -> dict[str, str]:
        """Return the digests as fields of `trace.Applied`."""
        found = {"parameter_digest": f"{self.everything:016x}", "replicated_digest": f"{self.replicated:016x}"}
        return found if self.lanes is None else found | {"lane_digest": f"{self.lanes:016x}"}


class ParameterDigest:
    """Computes the digests of the parameters of a rank's model chunks (upstream's DDP modules)."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        """Find the parameters once: walking the modules anew for every digest is slow."""
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._held_by = [_held_by(parameter) for parameter in self._parameters]

    def compute(self) -> Digests:
        """Return the digests of the parameters as they are now."""
        values = checksums(self._parameters)
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
