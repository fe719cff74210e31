"""The name of a step: what the step does, and in which of Megatron's iterations.

A step has the same name on all replicas. On the wire, in the trace and in messages the name is text
(`str(label)`). Only this module writes and parses that text.
"""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

_GIVE_UP = "give up "
_MOST_DIGITS = 40
"""Most characters of the numbers: a damaged trace may have more than Python's `int` accepts."""


class StepKind(enum.StrEnum):
    """The purpose of a step."""

    TRAIN = "train"
    """Train on the microbatches of one iteration."""
    EVALUATE = "evaluate"
    """Compute losses; change no state."""
    SAVE = "save"
    """Compare the state of all replicas before a checkpoint is saved, without microbatches."""
    END = "end"
    """Compare the state of all replicas at the end of training, without microbatches."""


class Label(NamedTuple):
    """The name of one step."""

    kind: StepKind
    iteration: int
    """Megatron's iteration, from 1. `END`: number of tries before, from 0. Malformed text: -1."""
    number: int | None = None
    """Number of an `EVALUATE` step in its iteration, from 1; else None."""
    is_given_up: bool = False
    """True if the step was miscounted twice and ends without a change (`Void.gives_up`)."""

    def __str__(self) -> str:
        number = "" if self.number is None else f"/{self.number}"
        return f"{_GIVE_UP if self.is_given_up else ''}{self.kind} {self.iteration}{number}"

    @property
    def is_training(self) -> bool:
        """Return whether the step trains and is not given up."""
        return self.kind is StepKind.TRAIN and not self.is_given_up

    @property
    def is_evaluation(self) -> bool:
        """Return whether the step only computes losses."""
        return self.kind is StepKind.EVALUATE and not self.is_given_up

    @property
    def is_agreement(self) -> bool:
        """Return whether the step only compares the state of all replicas."""
        return self.kind in (StepKind.SAVE, StepKind.END) and not self.is_given_up


@functools.lru_cache(maxsize=4096)
def label_of(text: str) -> Label:
    """Return the label of a text.

    A text of another form becomes kind `EVALUATE`, iteration -1; `give up` is kept. Whether the
    kind has a number is not checked.
    """
    rest = text.removeprefix(_GIVE_UP)
    kind, _, name = rest.partition(" ")
    iteration, slash, number = name.partition("/")
    has_form = iteration.isdecimal() and number.isdecimal() == bool(slash) and len(name) <= _MOST_DIGITS
    if kind not in tuple(StepKind) or not has_form:
        return Label(StepKind.EVALUATE, -1, is_given_up=rest != text)
    return Label(StepKind(kind), int(iteration), int(number) if slash else None, is_given_up=rest != text)


def given_up(text: str) -> str:
    """Return the name that replaces the name of a step when it is given up."""
    return f"{_GIVE_UP}{text}"


def next_training(text: str) -> str:
    """Return the name of the training step that follows a training step."""
    return str(Label(StepKind.TRAIN, label_of(text).iteration + 1))
