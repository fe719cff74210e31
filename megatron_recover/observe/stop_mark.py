"""The mark in the folder of `--save` that ends a chain of jobs: whoever starts there next stops.

A job of a batch system is started again by itself. Some ends repeat themselves until a person has
looked (`ending.Ending.then`). After such an end the first node leaves the mark, and `run` and batch
scripts refuse to start until somebody has removed it. Nothing here ever removes it.
"""

from __future__ import annotations

import shlex
from pathlib import Path

STOP_MARK = "STOP"


def leave(save: Path, exit_code: int, reason: str, run_dir: Path | None) -> None:
    """Leave the mark in the folder `save`, which is made if it is missing. Raises OSError.

    A mark that is there stays as it is: its reason is older. `run_dir` is named in the mark; None:
    the run has left no folder.
    """
    save.mkdir(parents=True, exist_ok=True)
    trace = f"trace and logs: {run_dir}\n" if run_dir is not None else ""
    text = f"exit code {exit_code}: {reason}\n{trace}when its cause is corrected: {remedy(save)}\n"
    try:
        with open(save / STOP_MARK, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        pass


def found(save: Path) -> str | None:
    """Return the text of the mark in the folder `save`, or None if there is no mark.

    A mark that cannot be read counts as one. A user may leave one, too, with any content.
    """
    place = save / STOP_MARK
    try:
        return place.read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"{place} cannot be read ({error.strerror})"


def remedy(save: Path) -> str:
    """Return the command that removes the mark."""
    return shlex.join(["rm", str(save / STOP_MARK)])
