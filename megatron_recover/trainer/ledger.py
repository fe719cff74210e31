"""The ledger: one tensor of what the last stage knows of each microbatch, reduced like a bucket.

A row belongs to one microbatch and is written by the replica that computed it. All other replicas
leave the row zero, so the sum over replicas is the row. Each row describes its own contents, so a
replica that computed nothing of a step can read it.

Row (float64): tokens, seconds, number of bytes of the description, description (6 bytes a number),
values. The description is the JSON of [[key, dtype, shape], ...] in the order of the loss
dictionary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from megatron_recover.trainer.host_copy import to_device

NUM_COLUMNS = 64
"""Numbers in a row; bounds what a loss function may report for a microbatch."""
_HEADER = 3
_BYTES_A_NUMBER = 6
"""Bytes of the description in one float64, which holds integers below 2**53 exactly."""

_Description = tuple[tuple[str, str, tuple[int, ...]], ...]


class Ledger:
    """The rows of one step on one rank of the last stage."""

    def __init__(self, num_microbatches: int, device: torch.device | None = None) -> None:
        self._rows = torch.zeros(num_microbatches, NUM_COLUMNS, dtype=torch.float64, device=device)
        self._seconds = [0.0] * num_microbatches
        self._are_finite = torch.ones(num_microbatches, dtype=torch.bool, device=device)

    def write(self, microbatch: int, tokens: Tensor, losses: dict[str, Tensor]) -> None:
        """Fill the microbatch's row, but for its seconds.

        The first of `losses` is the one that is trained (`first_losses`). Raises ValueError if
        names and values do not fit into a row.
        """
        described = tuple((key, str(value.dtype).removeprefix("torch."), tuple(value.shape)) for key, value in losses.items())
        head = _encode(described, self._rows.device)
        values = [value.detach().reshape(-1).double() for value in losses.values()]
        content = torch.cat([head, *values])
        if _HEADER - 1 + content.numel() > NUM_COLUMNS:
            raise ValueError(
                f"the loss function reports {sorted(losses)} for a microbatch: names and values of at most {NUM_COLUMNS} "
                "numbers can be carried; report fewer or shorter ones"
            )
        row = self._rows[microbatch]
        row[0] = tokens.detach()
        row[_HEADER - 1 : _HEADER - 1 + content.numel()] = content
        if values:
            self._are_finite[microbatch] = values[0].isfinite().all()

    def is_finite(self) -> Tensor:
        """Return whether the first loss of every row written here is finite, as a scalar tensor."""
        return self._are_finite.all()

    def not_finite(self) -> tuple[int, ...]:
        """Return the microbatches here whose first loss is not finite. Waits for the device."""
        return tuple(microbatch for microbatch, is_finite in enumerate(self._are_finite.tolist()) if not is_finite)

    def add_seconds(self, microbatch: int, seconds: float) -> None:
        """Add time that the host spent on the microbatch on this rank."""
        self._seconds[microbatch] += seconds

    def rows(self) -> Tensor:
        """Return all rows as they are now, after writing the seconds of all microbatches."""
        self._rows[:, 1] = to_device(torch.tensor(self._seconds, dtype=torch.float64), self._rows.device)
        return self._rows


@functools.cache
def _encode(described: _Description, device: torch.device) -> Tensor:
    """Encode a description as its length in bytes and its bytes."""
    text = msgspec.json.encode(described)
    parts = [text[at : at + _BYTES_A_NUMBER] for at in range(0, len(text), _BYTES_A_NUMBER)]
    return torch.tensor([len(text), *(int.from_bytes(part, "little") for part in parts)], dtype=torch.float64, device=device)


def read_losses(rows: Tensor, on_host: Tensor) -> list[dict[str, Tensor]]:
    """Return the loss dictionaries of all microbatches, in the order of ids.

    Keys, dtypes and shapes are as the loss function reported them. The tensors are on the device of
    `rows`. `on_host` are the same rows in host memory, so that reading them waits for no device.
    """
    losses: list[dict[str, Tensor]] = [{} for _ in range(len(rows))]
    for indices in _alike(on_host):
        whole = len(indices) == len(rows)
        chosen, of = (rows, losses) if whole else (rows[indices], [losses[index] for index in indices])
        numbers = on_host[indices[0]].tolist()
        for key, values, shape in _columns(chosen, tuple(numbers[_HEADER - 1 : _start(numbers)])):
            for loss, value in zip(of, values.reshape(len(of), *shape).unbind(), strict=True):
                loss[key] = value
    return losses


def first_losses(on_host: Tensor) -> Tensor:
    """Return the first loss that the first row reports, of all microbatches.

    `on_host` are rows in host memory. Shape (M, numbers of that loss), float64. Without a loss
    in the first row the shape is (M, 0). Raises KeyError if another row does not report that loss.
    """
    key, found = "", on_host.new_empty(len(on_host), 0)
    for indices in _alike(on_host):
        numbers = on_host[indices[0]].tolist()
        columns = _columns(on_host[list(indices)], tuple(numbers[_HEADER - 1 : _start(numbers)]))
        values = {each: column.double() for each, column, _ in columns}
        if not key:
            if not values:
                return found
            key = columns[0][0]
            found = on_host.new_empty(len(on_host), values[key].shape[1])
        found[list(indices)] = values[key]
    return found


def _alike(rows: Tensor) -> list[Sequence[int]]:
    """Return the indices of rows in host memory, grouped by equal descriptions.

    Usually there is one group, since all microbatches report alike.
    """
    if not len(rows):
        return []
    first = rows[0].tolist()
    head = slice(_HEADER - 1, _start(first))
    if bool((rows[:, head] == rows[0, head]).all()):
        return [range(len(rows))]
    groups: dict[tuple[float, ...], list[int]] = {}
    for index, numbers in enumerate(rows.tolist()):
        groups.setdefault(tuple(numbers[_HEADER - 1 : _start(numbers)]), []).append(index)
    return list(groups.values())


def _columns(rows: Tensor, head: Sequence[float]) -> list[tuple[str, Tensor, tuple[int, ...]]]:
    """Return what rows with the description `head` report: key, values in every row, shape.

    `head` is the description as in a row: its length in bytes, then its bytes.
    """
    text = b"".join(int(number).to_bytes(_BYTES_A_NUMBER, "little") for number in head[1:])[: int(head[0])]
    at = _HEADER - 1 + len(head)
    columns = []
    for key, dtype, shape in msgspec.json.decode(text, type=_Description):
        size = math.prod(shape)
        columns.append((key, rows[:, at : at + size].to(getattr(torch, dtype)), shape))
        at += size
    return columns


def _start(numbers: Sequence[float]) -> int:
    """Return the first column of a row's values."""
    return _HEADER + math.ceil(int(numbers[_HEADER - 1]) / _BYTES_A_NUMBER)


def count_tokens(rows: Tensor) -> Tensor:
    """Return the tokens of all microbatches in the committed `rows` of this lane.

    The result is a scalar of `torch.int`, as upstream's finalize expects. Upstream sums it over the
    lanes.
    """
    return rows[:, 0].sum().to(torch.int)
