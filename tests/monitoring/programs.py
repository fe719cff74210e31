"""Prometheus' own programs, for the tests that need one. Debian's package `prometheus` has both."""

from __future__ import annotations

import shutil

import pytest


def program(name: str) -> str:
    """Return the path of `promtool` or `prometheus`, or skip the test."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here; `apt-get install prometheus` brings it, and `.ci/run` fetches it")
    return found
