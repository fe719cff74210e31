"""The number of descriptors that a process may open."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> None:
    """Raise the limit of open descriptors, for this process and its children, to the maximum."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
