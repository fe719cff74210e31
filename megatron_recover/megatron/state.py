"""The state of Megatron's model chunks, optimizer and parameter scheduler.

Note [What is carried]
    Replicas compare parameters, optimizer, scheduler and counters (`TrainingState`). A newcomer
    needs a few numbers more (`Carried`). They follow from what the replicas have agreed on, so they
    are no part of the digest. A newcomer takes them from the replica that gives it the scalars.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megatron_recover.fsdp2 import shards
from megatron_recover.megatron import late_gather
from megatron_recover.trainer.state import (
    Scalar,
    State,
    StateTensor,
    assign_to_torch_optimizer,
    assigned,
    beside_parameters,
    flattened,
    of_torch_optimizer,
)

_COUNTERS = "counters"
"""Prefix of the names of the counters."""
CARRIED = "carried"
"""Prefix of the names of what is carried beside the state."""


class Carried(NamedTuple):
    """A number of a replica that is no part of its digest (Note [What is carried])."""

    get: Callable[[], Scalar]
    """Returns the value at the beginning of a training step."""
    put: Callable[[Any], None]
    """Sets the value that another replica had there."""


class TrainingState(State):
    """The state of one rank.

    Each call finds the tensors of the optimizer again, which creates them in its first step. The
    parameters stay those that were there when this object was made.
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
        self._parameters = [list(late_gather.current(chunk)) for chunk in chunks]

    @property
    def has_optimizer(self) -> bool:
        """Return whether the optimizer is known."""
        return self._optimizer is not None

    def values(self) -> Iterator[tuple[str, Tensor | Scalar]]:
        """Yield all state by name, in the order: chunks, optimizers, scheduler, counters.

        Of a tensor that FSDP2 has sharded this is the shard of this lane.
        """
        for name, value in self._values():
            yield name, shards.local(value) if isinstance(value, Tensor) else value

    def _values(self) -> Iterator[tuple[str, Tensor | Scalar]]:
        for number, (chunk, parameters) in enumerate(zip(self._chunks, self._parameters, strict=True)):
            for name, parameter in parameters:
                yield f"chunk{number}.{name}", parameter
            yield from beside_parameters(f"chunk{number}", chunk)
        for number, leaf in enumerate(_leaves(self._optimizer)):
            if leaf.optimizer is not None:  # None on a rank without parameters of this kind
                yield from of_torch_optimizer(f"optimizer{number}", leaf.optimizer)
            if getattr(leaf, "grad_scaler", None) is not None:
                yield from flattened(f"optimizer{number}.scaler", leaf.grad_scaler.state_dict())
        if self._scheduler is not None:
            yield from flattened("scheduler", self._scheduler.state_dict())
        yield from flattened(_COUNTERS, self._counters())

    def assign(self, scalars: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Set the scalars of optimizer and scheduler; return the counters, which the caller sets.

        `scalars` are those of `scalars()` on another replica.
        """
        for number, leaf in enumerate(_leaves(self._optimizer)):
            if leaf.optimizer is not None:
                assign_to_torch_optimizer(f"optimizer{number}", leaf.optimizer, scalars)
            if getattr(leaf, "grad_scaler", None) is not None:
                leaf.grad_scaler.load_state_dict(assigned(f"optimizer{number}.scaler", leaf.grad_scaler.state_dict(), scalars))
        if self._scheduler is not None:
            # Its own way to load checks, overrides and steps, as the arguments of the run say.
            vars(self._scheduler).update(assigned("scheduler", self._scheduler.state_dict(), scalars))
        found = {name.partition(".")[::2]: value for name, value in scalars.items()}
        return {name: value for (kind, name), value in found.items() if kind == _COUNTERS}


def counters(args: Namespace) -> dict[str, int]:
    """Return the scalars of the state that Megatron keeps among its arguments."""
    names = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
    return {name: getattr(args, name) for name in names}


class Published(State):
    """The state of a rank as newcomers read it: with scalars that replicas need not compare.

    Layout and digest are those of the state alone. So a digest that is computed of this one counts
    for the other.
    """

    def __init__(self, state: State, carried: Mapping[str, Carried]) -> None:
        """Offer `state` and what is carried. Take scalars at the beginning of a training step."""
        self._state, self._carried = state, carried

    def values(self) -> Iterator[tuple[str, Tensor | Scalar]]:
        """Yield all state, and then what is carried beside it."""
        yield from self._state.values()
        yield from ((f"{CARRIED}.{name}", each.get()) for name, each in self._carried.items())

    def tensors(self) -> list[StateTensor]:
        """Return all tensors of the state."""
        return self._state.tensors()

    def compared(self) -> dict[str, Scalar]:
        """Return the scalars of the state alone."""
        return self._state.compared()


def _leaves(optimizer: Any) -> Iterator[Any]:
    """Yield upstream's optimizers that each wrap one of torch's."""
    if optimizer is None:
        return
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
    for each in chained or ():
        yield from _leaves(each)
