"""The Megatron that a job imports.

It is that of the first of these folders that has one:

1. that of the script; with `-m`, the working directory;
2. those of PYTHONPATH, in their order;
3. that of the installed package.

This is the order of `python SCRIPT`, and so of torchrun.

The choice is made once, before Megatron is imported: if the first of these folders has one, the
launcher puts that folder first for all processes that it starts. `megatron` is a namespace package,
of which Python takes each part from the first folder that has it. So a folder with a part of a
Megatron in front of a whole one makes two Megatrons of one, which is refused.

Imports no Megatron.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

import megatron_recover
from megatron_recover.config import import_first, import_path

_PARTS = ("core", "training")


def import_folder(script: str, *, is_module: bool) -> str:
    """Return the folder in which a script, or a module that is run, looks first when it imports."""
    return os.getcwd() if is_module else os.path.dirname(os.path.realpath(script))


def choose(script: str, *, is_module: bool) -> None:
    """Have this process and those that it starts import the same Megatron as the script.

    From now on this process, as those, does not import from the working directory only because
    Python has put that first. Raises ValueError if parts of different Megatrons would be imported.
    Call it before Megatron is imported.
    """
    _leave_working_directory()
    folder = import_folder(script, is_module=is_module)
    if has_own := _has_megatron(folder):
        import_first(folder)
    importlib.invalidate_caches()
    folders = {part: found for part in _PARTS if (found := _folder_of(part)) is not None}
    if len({*map(os.path.realpath, folders.values())}) > 1:
        parts = " and ".join(f"megatron.{part} of {found}" for part, found in folders.items())
        remedy = "put the folder of a whole one first in PYTHONPATH"
        if has_own:  # in front of PYTHONPATH
            remedy = f"complete that in {folder}, or start a script of a whole one"
        raise ValueError(f"two Megatrons would be imported: {parts}; {remedy}")


def _leave_working_directory() -> None:
    """Remove the working directory from `sys.path` if `python -m` or `-c` has put it there.

    If this package can be imported from there only, put it first instead, also for the processes
    that this one starts.
    """
    here, paths = os.getcwd(), [os.path.abspath(folder) for folder in sys.path]
    if paths[0] == here and paths.count(here) > (here in import_path()):
        del sys.path[0]
        if os.path.dirname(megatron_recover.__path__[0]) == here and here not in sys.path:  # a clone that is not installed
            import_first(here)


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
