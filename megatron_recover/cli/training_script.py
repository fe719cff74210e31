"""Judges the word of a command line that names the training script, before torch is imported."""

from __future__ import annotations

import importlib.util
import os
import re
from importlib.machinery import PathFinder
from pathlib import Path

_LAUNCHERS = re.compile(r"torchrun|python[\d.]*")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "megatron_recover", "megatron_recover.run")


def judge(script: str, verb: str, *, is_module: bool) -> None:
    """Raise ValueError with the remedy where a script cannot be one that trains.

    `script` is its path, or with `is_module` the name of a module. Raises OSError if the file
    cannot be read.
    """
    if (why := launcher(script, verb, is_module=is_module)) is not None:
        raise ValueError(why)
    if is_module:
        _refuse_missing_module(script)
    elif not Path(script).is_file():
        raise ValueError(f"there is no training script {script}; write its path behind the flags of {verb}")
    else:
        refuse_shell(script)


def launcher(script: str, verb: str, *, is_module: bool) -> str | None:
    """Return why a word that starts another launcher is refused; None if the word is another."""
    if is_module:
        if script in _LAUNCHER_MODULES:
            return f"-m {script} is no training script; leave out both words: megatron-recover {verb} takes their place"
        return None
    name = os.path.basename(script)
    if name == "srun":
        return f"srun is no training script; write srun and its options in front of megatron-recover {verb}"
    if _LAUNCHERS.fullmatch(name):
        return f"{script} is no training script; leave out the word: megatron-recover {verb} takes its place"
    return None


def refuse_shell(script: str) -> None:
    """Raise ValueError if a file is a shell script. Raises OSError if it cannot be read."""
    with open(script, "rb") as file:
        first = file.readline(200)
    if script.endswith((".sh", ".bash")) or re.match(rb"#!.*\b(ba|z|k|da)?sh\b", first) is not None:
        raise ValueError(f"{script} is a shell script; write the Python script, not the shell script, and its flags")


def _refuse_missing_module(name: str) -> None:
    """Raise ValueError if the package of a module, or the module itself, is nowhere.

    Ranks look for it in the working directory first, from which this process need not import.
    """
    top = name.partition(".")[0]
    if not top or PathFinder.find_spec(top, [os.getcwd()]) is None and importlib.util.find_spec(top) is None:
        raise ValueError(
            f"there is no module {name}: {top or 'its package'} is neither in the working directory, nor in PYTHONPATH, nor "
            "installed; correct the name, or leave out --module and write the path of a script"
        )
