"""Programs that may read no more than the modes of files say, also where the tests are root's, who may read everything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

NOBODYS = 0o000
"""A mode with which only `root` opens a file, or reaches what is in a folder."""


def run_verb(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a verb of the command line as a user whom modes of files bind."""
    command = [sys.executable, "-m", "megatron_recover", *arguments]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may read everything, and there is no setpriv to forgo that")
        command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
