"""What of Megatron is relied on without being replaced: names, attributes of its objects, parameters, arguments.

Declared in one place, `patches/anchors.toml`, and looked for before anything is installed, so that a Megatron that has lost
one is refused with the list instead of failing in the middle of a step.
"""

from __future__ import annotations

import dis
import importlib
import inspect
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any

import msgspec

FILE = "anchors.toml"


class Anchors(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of the file."""

    names: Mapping[str, tuple[str, ...]] = {}
    """Module -> what is looked up in it."""
    attributes: Mapping[str, tuple[str, ...]] = {}
    """``module:Class`` -> what is used of its objects."""
    parameters: Mapping[str, tuple[str, ...]] = {}
    """``module:function`` -> parameters that it must take."""
    arguments: tuple[str, ...] = ()
    """Of the parsed arguments."""


def load(folder: Traversable) -> Anchors:
    """The anchors declared in `folder`."""
    return msgspec.toml.decode((folder / FILE).read_text(), type=Anchors)


def lacking(anchors: Anchors) -> list[str]:
    """What the installed Megatron does not have, one line each. Imports what it looks at."""
    found = []
    for module, names in anchors.names.items():
        found += [problem for name in names if (problem := _look_up(f"{module}:{name}")[1])]
    for place, attributes in anchors.attributes.items():
        target, problem = _look_up(place)
        found += [problem] if problem else [f"objects of {place} have no {name}" for name in _missing(target, attributes)]
    for place, parameters in anchors.parameters.items():
        target, problem = _look_up(place)
        takes = () if problem else inspect.signature(target).parameters
        found += [problem] if problem else [f"{place} does not take {name}" for name in parameters if name not in takes]
    return found


def lacking_arguments(anchors: Anchors, args: Namespace) -> list[str]:
    """Arguments that Megatron's parser did not make, one line each."""
    return [f"Megatron's arguments have no {name}" for name in anchors.arguments if not hasattr(args, name)]


def _look_up(place: str) -> tuple[Any, str]:
    """What is at ``module:name``, and the line that says why nothing is."""
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name), ""
    except (ImportError, AttributeError) as error:
        return None, f"{module} has no {name} ({error})"


def _missing(cls: type, attributes: Sequence[str]) -> list[str]:
    """Which of `attributes` neither the class has, nor its methods set on any object.

    Read from the code, because an object exists only when the model has been built.
    """
    left = set(attributes)
    for base in cls.__mro__:
        left -= vars(base).keys() | inspect.get_annotations(base).keys()
    functions = (inspect.unwrap(each) for base in cls.__mro__ for each in vars(base).values() if inspect.isfunction(each))
    for function in functions if left else ():
        left -= {each.argval for each in dis.get_instructions(function) if each.opname == "STORE_ATTR"}
    return [name for name in attributes if name in left]
