"""`scripts/setup.sh` beside a made-up .venv: which Python it takes, what it says while it works, and when it cannot."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("setup.py", "pyproject.toml", "requirements.lock")
PYTHON = f"""#!/bin/sh
case "$*" in
    --version) echo "Python ${{VERSION:-{platform.python_version()}}}" ;;
    *"pip install"*)
        echo "$PIP_CONSTRAINT $PIP_BUILD_CONSTRAINT" >.venv/constraints
        echo "  Downloading torch-2.13.0-cp312-x86_64.whl (426.1 MB)"
        echo "  Downloading msgspec-0.19.whl (3 kB)"
        [ -z "$PIP_SAYS" ] || {{ echo "$PIP_SAYS" >&2; exit 1; }} ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout as far as the script needs it; `VERSION` and `PIP_SAYS` make its interpreter another."""
    (tmp_path / "scripts").mkdir()
    for name in (*FILES, "scripts/setup.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def set_up(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run([folder / "scripts" / "setup.sh"], env=environment, capture_output=True, text=True, timeout=30)


def test_another_python_than_that_of_the_venv_is_refused(folder: Path) -> None:
    stamp = hashlib.sha256(b"".join((folder / name).read_bytes() for name in FILES)).hexdigest()
    (folder / ".venv" / ".installed").write_text(stamp)
    assert set_up(folder).returncode == set_up(folder, PYTHON="").returncode == 0
    done = set_up(folder, VERSION="3.99.1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"PYTHON={sys.executable} is Python {platform.python_version()}, but .venv has Python 3.99.1."
    )


def test_what_takes_long_is_said_and_everything_is_locked(folder: Path) -> None:
    done = set_up(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == ["  Downloading torch-2.13.0-cp312-x86_64.whl (426.1 MB)", "  done"]
    lock = str(folder / "requirements.lock")
    assert (folder / ".venv" / "constraints").read_text().split() == [lock, lock]
    assert (folder / ".venv" / ".installed").exists()


@pytest.mark.parametrize(
    ("says", "hint"),
    [("Failed to establish a new connection", True), ("[Errno 28] No space left on device", False)],
)
def test_a_mirror_is_named_only_where_the_network_failed(says: str, hint: bool, folder: Path) -> None:
    done = set_up(folder, PIP_SAYS=says)
    assert done.returncode == 2 and says in done.stderr and "of disk are free here" in done.stderr
    assert ("mirror" in done.stderr) is hint
    assert not (folder / ".venv" / ".installed").exists()
