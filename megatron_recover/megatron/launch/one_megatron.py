"""The Megatron that a job imports.

It is that of the first of these folders that has one:

1. that of the script; with `-m`, the working directory;
2. the working directory;
3. those of PYTHONPATH, in their order;
4. that of the installed package.

This is the order of `python SCRIPT`, and so of torchrun, except for the second row. The processes
of a job are started by `python -m`, so they look in the working directory before PYTHONPATH. A
Megatron there that would hide another one, of the script or of PYTHONPATH, is refused.

The choice is made once, before anything is imported: the launcher puts the chosen folder first for
all processes that it starts. `megatron` is a namespace package, of which Python takes each part
from the first folder that has it. So a folder with a part of a Megatron in front of a whole one
makes two Megatrons of one, which is refused.

Imports no Megatron.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

from megatron_recover.config import import_first, import_path

_PARTS = ("core", "training")


def import_folder(script: str, *, is_module: bool) -> str:
    """Return the folder in which a script, or a module that is run, looks first when it imports."""
    return os.getcwd() if is_module else os.path.dirname(os.path.realpath(script))


def choose(script: str, *, is_module: bool) -> None:
    """Have this process and those that it starts import the Megatron of the script's checkout.

    If the script is in none, one in the working directory comes first. Raises ValueError if that
    one hides another, or if parts of different Megatrons would be imported. Call it before Megatron
    is imported.
    """
    folder, here = import_folder(script, is_module=is_module), os.getcwd()
    has_own, has_here = _has_megatron(folder), _has_megatron(here)
    wanted, place = folder, "beside the script"
    if not has_own:
        wanted, place = next(filter(_has_megatron, import_path()), here), "of PYTHONPATH"
    if has_here and not os.path.samefile(wanted, here):
        raise ValueError(
            f"two Megatrons would be imported: that of the working directory {here} and that {place} in {wanted}; "
            f"start in {wanted}"
        )
    if has_own or has_here:
        import_first(folder if has_own else here)
    importlib.invalidate_caches()
    folders = {part: found for part in _PARTS if (found := _folder_of(part)) is not None}
    if len({*map(os.path.realpath, folders.values())}) > 1:
        parts = " and ".join(f"megatron.{part} of {found}" for part, found in folders.items())
        remedy = "put the folder of a whole one first in PYTHONPATH"
        if has_own or has_here:  # in front of PYTHONPATH
            place, start = (folder, "start a script of") if has_own else (here, "start in")
            remedy = f"complete that in {place}, or {start} a whole one"
        raise ValueError(f"two Megatrons would be imported: {parts}; {remedy}")


def _has_megatron(folder: str) -> bool:
    """Return whether a folder has a Megatron, or a part of one.

    A folder `megatron` alone may be a checkout of that name, in which Python finds no part.
    """
    return any(os.path.isdir(os.path.join(folder, "megatron", part)) for part in _PARTS)


def _folder_of(part: str) -> str | None:
    """Return the folder of the Megatron from which Python would import a part, if there is one."""
    try:
        spec = importlib.util.find_spec(f"megatron.{part}")
    except ModuleNotFoundError:  # no Megatron at all
        return None
    return None if spec is None or spec.origin is None else os.path.dirname(os.path.dirname(os.path.dirname(spec.origin)))
