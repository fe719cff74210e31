"""Megatron's compiled index builder of data sets (`core/datasets/helpers.cpp`)."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path

from megatron_recover.host import lock_file


class IndexBuilder:
    """Stands for upstream's `compile_helpers`."""

    def __init__(self, original: Callable[[], None], patience_s: float) -> None:
        """`original` runs `make` in the folder of the file that it is defined in.

        A process that has waited for `patience_s` seconds, because another one is stopped or slow,
        compiles too.
        """
        self._original, self._patience_s = original, patience_s
        self._makefile = Path(inspect.getfile(original)).with_name("Makefile")

    def compile(self) -> None:
        """Compile the index builder unless it is up to date; one process at a time does so.

        Several may at once after the patience, or on a file system without locks. Without a
        Makefile there is nothing to do: the wheel brings the builder compiled. Upstream ends the
        process with exit code 1 if `make` fails.
        """
        if not self._makefile.is_file():
            return
        with open(self._makefile) as file:
            with contextlib.suppress(OSError):  # a file system without locks
                lock_file.acquired(file, self._patience_s)
            self._original()
