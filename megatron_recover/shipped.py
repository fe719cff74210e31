"""The folders of the repository that the wheel has, too: `patches` and `scripts`."""

from __future__ import annotations

from pathlib import Path


def shipped(folder: str) -> Path:
    """Return `patches` or `scripts`: inside the installed package, in a checkout beside it."""
    package = Path(__file__).resolve().parent
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder
