"""The state of Megatron's model chunks, optimizer and parameter scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_recover.megatron import late_gather
from megatron_recover.trainer.state import Scalar, State, beside_parameters, flattened, of_torch_optimizer


class TrainingState(State):
    """The state of one rank.

    Each call finds the tensors again: an optimizer creates its own in its first step.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any = None,
        scheduler: Any = None,
        counters: Callable[[], Mapping[str, Scalar]] = dict,
    ) -> None:
        """Use upstream's model chunks (DDP modules), optimizer and parameter scheduler.

        The optimizer may be chained. `counters()` returns the scalars that belong to none of these,
        such as the number of consumed samples.
        """
        self._chunks, self._optimizer, self._scheduler, self._counters = chunks, optimizer, scheduler, counters

    @property
    def has_optimizer(self) -> bool:
        """Return whether the optimizer is known."""
        return self._optimizer is not None

    def values(self) -> Iterator[tuple[str, Tensor | Scalar]]:
        """Yield all state by name, in the order: chunks, optimizers, scheduler, counters."""
        for number, chunk in enumerate(self._chunks):
            for name, parameter in late_gather.current(chunk):
                yield f"chunk{number}.{name}", parameter
            yield from beside_parameters(f"chunk{number}", chunk)
        for number, leaf in enumerate(_leaves(self._optimizer)):
            if leaf.optimizer is not None:  # None on a rank without parameters of this kind
                yield from of_torch_optimizer(f"optimizer{number}", leaf.optimizer)
            if getattr(leaf, "grad_scaler", None) is not None:
                yield from flattened(f"optimizer{number}.scaler", leaf.grad_scaler.state_dict())
        if self._scheduler is not None:
            yield from flattened("scheduler", self._scheduler.state_dict())
        yield from flattened("counters", self._counters())


def _leaves(optimizer: Any) -> Iterator[Any]:
    """Yield upstream's optimizers that each wrap one of torch's."""
    if optimizer is None:
        return
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
    for each in chained or ():
        yield from _leaves(each)
