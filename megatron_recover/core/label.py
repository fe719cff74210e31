"""The name of a step: which of Megatron's iterations it is, and what it does. The only place where the text is made and read.

A step has the same name on all replicas. On the wire, in the trace and in messages the name is text (`str(label)`).
"""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

_GIVE_UP = "give up "
_MOST_DIGITS = 40
"""Python refuses to make a number of thousands of digits, and a damaged trace may have one."""


class StepKind(enum.StrEnum):
    """What a step does."""

    TRAIN = "train"
    """Trains on the microbatches of one iteration."""
    EVALUATE = "evaluate"
    """Computes losses, and changes nothing."""
    SAVE = "save"
    """Compares the state of all replicas before a checkpoint is saved. It has no microbatches."""
    END = "end"
    """Compares the state of all replicas at the end of training. It has no microbatches."""


class Label(NamedTuple):
    """The name of one step."""

    kind: StepKind
    iteration: int
    """Megatron's iteration, from 1; of `END` how often it was tried before, from 0. -1 where the text has none."""
    number: int | None = None
    """Of `EVALUATE`: which evaluation step of that iteration, from 1."""
    is_given_up: bool = False
    """The step was miscounted twice, and ends without having changed anything (`values.Void.gives_up`)."""

    def __str__(self) -> str:
        number = "" if self.number is None else f"/{self.number}"
        return f"{_GIVE_UP if self.is_given_up else ''}{self.kind} {self.iteration}{number}"

    @property
    def is_training(self) -> bool:
        """Whether the step changes parameters."""
        return self.kind is StepKind.TRAIN and not self.is_given_up

    @property
    def is_evaluation(self) -> bool:
        """Whether the step only computes losses."""
        return self.kind is StepKind.EVALUATE and not self.is_given_up

    @property
    def is_agreement(self) -> bool:
        """Whether the step only compares the state."""
        return self.kind in (StepKind.SAVE, StepKind.END) and not self.is_given_up


@functools.lru_cache(maxsize=4096)
def label_of(text: str) -> Label:
    """Return the label that a text names. A text of another form counts as an evaluation without an iteration."""
    rest = text.removeprefix(_GIVE_UP)
    kind, _, name = rest.partition(" ")
    iteration, slash, number = name.partition("/")
    has_form = iteration.isdecimal() and number.isdecimal() == bool(slash) and len(name) <= _MOST_DIGITS
    if kind not in tuple(StepKind) or not has_form:
        return Label(StepKind.EVALUATE, -1, is_given_up=rest != text)
    return Label(StepKind(kind), int(iteration), int(number) if slash else None, is_given_up=rest != text)


def given_up(text: str) -> str:
    """Return the name of what is left of a step that is given up."""
    return f"{_GIVE_UP}{text}"
