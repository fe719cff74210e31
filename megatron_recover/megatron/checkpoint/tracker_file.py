"""Replaces the tracker, which names the newest checkpoint for Megatron, in one rename."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from megatron_recover.host.whole_file import replacing
from megatron_recover.megatron.checkpoint.save_folder import TRACKER


class TrackerFile:
    """Replaces `maybe_msc` in Megatron's checkpointing (seam `tracker`).

    A new local tracker is written beside the old one and renamed over it, never written in place.
    """

    def __init__(self, original: Any, before_naming: Callable[[], None]) -> None:
        """Store `before_naming()`, called between writing a new tracker and renaming it."""
        self._original, self._before_naming = original, before_naming

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open `file` as the original does, but a local tracker to write as a replacing file.

        The tracker gets its name when that file's context ends without an exception.
        """
        if mode != "w" or os.path.basename(file) != TRACKER or "://" in str(file):
            return self._original.open(file, mode, *args, **kwargs)
        return self._replacing(Path(file))

    @contextlib.contextmanager
    def _replacing(self, path: Path) -> Iterator[IO[str]]:
        """Yield a text file that then replaces the tracker `path`, after `before_naming()`."""
        partial = path.with_name(f"{path.name}.partial")
        with replacing(path, partial=partial, durable=True, before_naming=self._before_naming) as file:
            text = io.TextIOWrapper(file)
            yield text
            text.detach()  # flushes
