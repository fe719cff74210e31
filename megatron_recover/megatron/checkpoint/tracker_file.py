"""Replaces the tracker, which names the newest checkpoint for Megatron, in one rename.

Note [Two writers]
    A writer that was frozen or cut off may wake up between its last check and the rename, after
    another writer has named a later checkpoint. The lock of the folder excludes this where it works
    between the hosts. Where it does not, the rename itself does. Each new tracker is a file with a
    name of its own, made before its writer checks its right for the last time. Whoever has the
    right later first removes the files of all others. So the late rename finds no file, and fails.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from megatron_recover.host.whole_file import replacing
from megatron_recover.megatron.checkpoint.save_folder import TRACKER


class TrackerFile:
    """Replaces `maybe_msc` in Megatron's checkpointing (seam `tracker`).

    A new local tracker is written beside the old one and renamed over it, never written in place.
    """

    def __init__(
        self, original: Any, before_naming: Callable[[], None], after_naming: Callable[[], None] = lambda: None
    ) -> None:
        """Store the functions of `replacing_tracker`."""
        self._original, self._before_naming, self._after_naming = original, before_naming, after_naming

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open `file` as the original does, but a local tracker to write as a replacing file.

        The tracker gets its name when that file's context ends without an exception.
        """
        if mode != "w" or os.path.basename(file) != TRACKER or "://" in str(file):
            return self._original.open(file, mode, *args, **kwargs)
        return replacing_tracker(Path(file), self._before_naming, self._after_naming)


@contextlib.contextmanager
def replacing_tracker(path: Path, before_naming: Callable[[], None], after_naming: Callable[[], None]) -> Iterator[IO[str]]:
    """Yield a text file that then replaces the tracker `path`, in one rename.

    - `before_naming()` is called when the new file is complete. What it raises is raised, and the
      tracker stays. When it returns, this process has the right to rename (Note [Two writers]).
    - `after_naming()` is called at the end, whatever happened.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")

    def exclude_others() -> None:
        before_naming()
        os.stat(partial)  # who was excluded meanwhile must not exclude others
        for other in path.parent.glob(f"{path.name}.*partial"):
            if other.name != partial.name:
                other.unlink(missing_ok=True)

    try:
        with replacing(path, partial=partial, durable=True, before_naming=exclude_others) as file:
            text = io.TextIOWrapper(file)
            yield text
            text.detach()  # flushes
    finally:
        after_naming()
