"""The demo on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.finding("G1", "G10")]


def test_the_demo_holds_on_cuda() -> None:
    command = [sys.executable, "-m", "megatron_recover", "demo"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
