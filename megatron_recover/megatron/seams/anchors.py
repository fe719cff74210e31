"""Anchors: the parts of Megatron that are used without being replaced.

Anchors are names, attributes of objects, parameters of functions, and arguments.
`patches/anchors.toml` declares them. Arguments are checked when Megatron has parsed them, all
others before any seam is installed. A Megatron that lacks an anchor is refused with a list of all
that is missing, instead of failing in the middle of a step.
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
    """The content of `patches/anchors.toml`."""

    names: Mapping[str, tuple[str, ...]] = {}
    """Module -> names that are looked up in the module."""
    attributes: Mapping[str, tuple[str, ...]] = {}
    """``module:Class`` -> attributes that are used on the objects of the class."""
    parameters: Mapping[str, tuple[str, ...]] = {}
    """``module:function`` -> parameters that the function must accept."""
    arguments: tuple[str, ...] = ()
    """Names of Megatron's parsed arguments."""


def load(folder: Traversable) -> Anchors:
    """Return the anchors declared in `folder`."""
    return msgspec.toml.decode((folder / FILE).read_text(), type=Anchors)


def lacking(anchors: Anchors) -> list[str]:
    """Return the anchors that the installed Megatron lacks, one line each.

    Imports the modules concerned.
    """
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
    """Return the anchored arguments that `args`, parsed by Megatron, lacks, one line each."""
    return [f"Megatron's arguments have no {name}" for name in anchors.arguments if not hasattr(args, name)]


def _look_up(place: str) -> tuple[Any, str]:
    """Return the object at ``module:name`` and an empty text, or None and the reason."""
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name), ""
    except (ImportError, AttributeError) as error:
        return None, f"{module} has no {name} ({error})"


def _missing(cls: type, attributes: Sequence[str]) -> list[str]:
    """Return those of `attributes` that the class lacks and that none of its methods sets.

    Reads the bytecode of the methods, because no object exists before the model is built.
    """
    left = set(attributes)
    for base in cls.__mro__:
        left -= vars(base).keys() | inspect.get_annotations(base).keys()
    functions = (inspect.unwrap(each) for base in cls.__mro__ for each in vars(base).values() if inspect.isfunction(each))
    for function in functions:
        if left.intersection(function.__code__.co_names):  # reading all bytecode takes 0.1 s in every rank
            left -= {each.argval for each in dis.get_instructions(function) if each.opname == "STORE_ATTR"}
    return [name for name in attributes if name in left]
