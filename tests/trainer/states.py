"""States of a rank without Megatron, for tests of what reads and serves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron_recover.trainer.state import Scalar, State


class Tensors(State):
    """A state of these tensors and scalars."""

    def __init__(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Scalar] | None = None) -> None:
        self.named, self.numbers = dict(tensors), dict(scalars or {})

    def values(self) -> Iterator[tuple[str, Tensor | Scalar]]:
        yield from self.named.items()
        yield from self.numbers.items()

    def bits(self) -> list[list[int]]:
        """The bytes of each tensor."""
        return [bits_of(tensor) for tensor in self.named.values()]

    def padding(self) -> list[int]:
        """The bytes beside the named ones in the storages of `of_every_kind`."""
        return bits_of(self.named["view"]._base[:5]) if self.named["view"]._base is not None else []


def bits_of(tensor: Tensor) -> list[int]:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


def of_every_kind(seed: int) -> Tensors:
    """Tensors of all kinds that a state may have, and scalars of every type."""
    random = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    buffer, gaps, tied = numbers(40), numbers(6, 6), numbers(3, 5)
    return Tensors(
        {
            "view": buffer[5:35],
            "tied": tied,
            "tied again": tied.view(-1)[2:9],
            "transposed": numbers(4, 3).t(),
            "gaps": gaps[:, ::2],
            "gaps again": gaps[:, ::2],
            "scalar": torch.tensor(float(seed)),
            "step": torch.tensor(seed, dtype=torch.int64),
            "empty": torch.empty(0, 3),
            "flags": numbers(13) > 0,
            "half": numbers(7).bfloat16(),
            "bytes": torch.randint(0, 255, (9,), generator=random, dtype=torch.uint8),
            "expanded": numbers(1).expand(4),
            "parameter": torch.nn.Parameter(numbers(8)),
            "not finite": torch.tensor([float("nan"), float("inf"), -0.0, float(seed)]),
        },
        {
            "iteration": seed,
            "rate": 0.1 * seed,
            "name": f"s{seed}",
            "none": None,
            "flag": seed == 1,
            "operations": 10**25 * seed,
        },
    )


def of_size(num_bytes: int, value: float) -> Tensors:
    """Some tensors of equal elements, `num_bytes` bytes in all."""
    quarter = num_bytes // 16
    return Tensors({str(number): torch.full((quarter,), value) for number in range(4)}, {"value": value})
