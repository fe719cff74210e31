"""What the last stage knows of each microbatch, as one tensor that is reduced like a gradient bucket.

A row belongs to one id and is written by the replica that computed it; all other replicas leave it zero, so the sum over
replicas is the row. Rows say themselves what is in them: a replica that has computed nothing of a step can read them.

Row (float64): tokens, seconds, number of bytes of the description, description (6 bytes a number), values.
The description is the JSON of [[key, dtype, shape], ...] in the order of the loss dictionary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

NUM_COLUMNS = 64
"""Numbers a row; bounds what a loss function may report for a microbatch."""
_HEADER = 3
_BYTES_A_NUMBER = 6
"""A float64 holds integers below 2**53 exactly."""

_Description = tuple[tuple[str, str, tuple[int, ...]], ...]


class Ledger:
    """The rows of one step on one rank of the last stage."""

    def __init__(self, num_microbatches: int, device: torch.device | None = None) -> None:
        self.rows = torch.zeros(num_microbatches, NUM_COLUMNS, dtype=torch.float64, device=device)

    def write(self, microbatch: int, tokens: Tensor, losses: dict[str, Tensor]) -> None:
        """Fill the id's row. Raises ValueError for a report that does not fit."""
        described = tuple((key, str(value.dtype).removeprefix("torch."), tuple(value.shape)) for key, value in losses.items())
        head = _encode(described)
        values = torch.cat([value.detach().reshape(-1).double() for value in losses.values()]) if losses else self.rows[0, :0]
        stop = _HEADER - 1 + len(head) + values.numel()
        if stop > NUM_COLUMNS:
            raise ValueError(
                f"the loss function reports {sorted(losses)} for a microbatch: names and values of at most {NUM_COLUMNS} "
                "numbers can be carried; report fewer or shorter ones"
            )
        row = self.rows[microbatch]
        row[0] = tokens.detach()
        row[_HEADER - 1 : stop - values.numel()] = torch.tensor(head, dtype=torch.float64)
        row[stop - values.numel() : stop] = values

    def add_seconds(self, microbatch: int, seconds: float) -> None:
        """Count compute time of the id on this rank."""
        self.rows[microbatch, 1] += seconds


@functools.cache
def _encode(described: _Description) -> tuple[float, ...]:
    """A description's length in bytes and its bytes."""
    text = msgspec.json.encode(described)
    parts = [text[at : at + _BYTES_A_NUMBER] for at in range(0, len(text), _BYTES_A_NUMBER)]
    return (len(text), *(int.from_bytes(part, "little") for part in parts))


def read_losses(rows: Tensor) -> list[dict[str, Tensor]]:
    """The loss dictionaries of all ids in their order, as the loss function made them (dtype, shape and device of the row)."""
    return [_read_row(row, numbers) for row, numbers in zip(rows, rows.tolist(), strict=True)]


def _read_row(row: Tensor, numbers: Sequence[float]) -> dict[str, Tensor]:
    num_bytes = int(numbers[2])
    at = _HEADER + math.ceil(num_bytes / _BYTES_A_NUMBER)
    text = b"".join(int(number).to_bytes(_BYTES_A_NUMBER, "little") for number in numbers[_HEADER:at])[:num_bytes]
    losses = {}
    for key, dtype, shape in msgspec.json.decode(text, type=_Description):
        size = math.prod(shape)
        losses[key] = row[at : at + size].to(getattr(torch, dtype)).reshape(shape)
        at += size
    return losses


def count_tokens(rows: Tensor) -> Tensor:
    """Tokens of all ids, as upstream counts them (a scalar of its integer type)."""
    return rows[:, 0].sum().to(torch.int)
