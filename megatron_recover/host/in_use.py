"""The error about a folder or a port that another process uses now."""

from __future__ import annotations


class InUse(ValueError):
    """Another process uses what is needed. It may be free at the next start, without any change."""
