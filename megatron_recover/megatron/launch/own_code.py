"""Finds and parses the user's own code, without running it: a script and what it imports.

A module is the user's own if it is in a folder of `own_folders`, and not one of Megatron or of this
project. A file that cannot be read or parsed is left out, since Python will report it.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

MAX_FILES: Final = 500
"""Maximum of files that are read, nearest imports first."""
_NOT_OWN: Final = frozenset({"megatron", "megatron_recover"})
"""Packages that are not the user's, wherever they are."""


def own_folders() -> list[Path]:
    """Return the folders of `sys.path` without those of Python's library and of installed packages.

    These are the folder of the script (with `-m` the working directory), those of PYTHONPATH, and
    those that `.pth` files add.
    """
    libraries = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    folders = dict.fromkeys(Path(entry).resolve() for entry in sys.path)
    return [
        folder
        for folder in folders
        if os.path.isdir(folder)  # False where a folder cannot be reached
        and not {"site-packages", "dist-packages"} & {*folder.parts}
        and not libraries & {folder, *folder.parents}
    ]


def own_code(script: Path, folders: Sequence[Path]) -> Iterator[tuple[Path, ast.Module]]:
    """Yield path and code of a script, and of the modules of `folders` that it imports.

    Modules that these import follow, and imports inside functions count. Megatron's modules and
    those of this project are left out, wherever they are. At most `MAX_FILES` files are read.
    """
    todo = [script.resolve()]
    for number in range(MAX_FILES):
        if number >= len(todo):
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python shows them when it imports the file
                code = ast.parse(todo[number].read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        yield todo[number], code
        todo += [file for file in dict.fromkeys(_imported(todo[number], code, folders)) if file not in todo]


def _imported(importer: Path, code: ast.Module, folders: Sequence[Path]) -> Iterator[Path]:
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(alias.name.split("."), folders)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(importer.parents):
            parts = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _files([*parts, alias.name], [importer.parents[node.level - 1]] if node.level else folders)


def _files(parts: Sequence[str], folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the files that Python may read to import a dotted name, from the first folder with one.

    The last part may be a name inside a module.
    """
    if parts[0] in _NOT_OWN:
        return
    for folder in folders:
        paths = [folder.joinpath(*parts[:length]) for length in range(1, len(parts) + 1)]
        files = [file for path in paths for file in (path / "__init__.py", path.parent / f"{path.name}.py")]
        if there := [file.resolve() for file in files if os.path.isfile(file)]:
            yield from there
            return
