"""The Megatron that a job imports: that of the script's own checkout, of PYTHONPATH, or the wheel.

This is the order in which `python SCRIPT` looks. It is decided once, before anything is imported:
the launcher puts the script's checkout first for all processes that it starts. These are started by
`python -m`, so they look in the working directory before all others. `megatron` is a namespace
package, of which Python takes each part from the first folder that has it. So a folder with a part
of a Megatron in front of a whole one makes two Megatrons of one, which is refused.

Imports no Megatron.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

from megatron_recover.config import import_first

_PARTS = ("core", "training")


def import_folder(script: str, *, is_module: bool) -> str:
    """Return the folder in which a script, or a module that is run, looks first when it imports."""
    return os.getcwd() if is_module else os.path.dirname(os.path.realpath(script))


def choose(script: str, *, is_module: bool) -> None:
    """Have this process and those that it starts import the Megatron of the script's checkout.

    If the script is in none, one in the working directory comes first. Raises ValueError if parts
    of different Megatrons would be imported. Call it before Megatron is imported.
    """
    folder, here = import_folder(script, is_module=is_module), os.getcwd()
    has_own, has_here = (os.path.isdir(os.path.join(each, "megatron")) for each in (folder, here))
    if has_own and has_here and not os.path.samefile(folder, here):
        raise ValueError(
            f"two Megatrons would be imported: that of the working directory {here} and that beside the script in {folder}; "
            f"start in {folder}"
        )
    if has_own or has_here:
        import_first(folder if has_own else here)
    importlib.invalidate_caches()
    folders = {part: found for part in _PARTS if (found := _folder_of(part)) is not None}
    if len({*map(os.path.realpath, folders.values())}) > 1:
        parts = " and ".join(f"megatron.{part} of {found}" for part, found in folders.items())
        raise ValueError(f"two Megatrons would be imported: {parts}; put the folder of a whole one first in PYTHONPATH")


def _folder_of(part: str) -> str | None:
    """Return the folder of the Megatron from which Python would import a part, if there is one."""
    try:
        spec = importlib.util.find_spec(f"megatron.{part}")
    except ModuleNotFoundError:  # no Megatron at all
        return None
    return None if spec is None or spec.origin is None else os.path.dirname(os.path.dirname(os.path.dirname(spec.origin)))
