"""One Megatron is imported: the script's own checkout, else that of PYTHONPATH, else the wheel. A mixture is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "the wheel"
CHOOSE = """
import subprocess, sys
from megatron_recover.megatron.launch import one_megatron
sys.path.remove("")
one_megatron.choose(sys.argv[1], is_module=sys.argv[1] == "module")
ask = "from importlib.util import find_spec; print(*(find_spec(f'megatron.{part}').origin for part in ('core', 'training')))"
exec(ask)
print(subprocess.check_output([sys.executable, "-c", ask], text=True), end="")
"""


def megatron(folder: Path, *parts: str) -> Path:
    """Make a folder with some parts of a Megatron."""
    for part in parts:
        (folder / "megatron" / part).mkdir(parents=True)
        (folder / "megatron" / part / "__init__.py").touch()
    folder.mkdir(exist_ok=True)
    return folder


def chosen(script: Path | str, cwd: Path, *paths: Path) -> tuple[str, str]:
    """Return the folder of the Megatron that a launcher and the processes that it starts import; else the refusal."""
    done = subprocess.run(
        [sys.executable, "-c", CHOOSE, str(script)], cwd=cwd, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *paths]))},
    )  # fmt: skip
    if done.returncode:
        return "", done.stderr.splitlines()[-1]
    [in_launcher, in_child] = done.stdout.splitlines()
    assert in_launcher == in_child
    [folder] = {origin.partition("/megatron/")[0] for origin in in_launcher.split()}
    return (WHEEL if "site-packages" in folder else folder), ""


WHOLE = "core", "training"


def test_the_scripts_own_checkout_comes_first_then_pythonpath_then_the_wheel(tmp_path: Path) -> None:
    """The processes of a run are started by `python -m`, so the working directory may have no other."""
    checkout, other = megatron(tmp_path / "checkout", *WHOLE), megatron(tmp_path / "other", *WHOLE)
    (empty := tmp_path / "empty").mkdir()
    (link := empty / "linked.py").symlink_to(checkout / "script.py")
    assert chosen(checkout / "script.py", empty, other) == (str(checkout), "")
    assert chosen(checkout / "script.py", checkout, other) == (str(checkout), "")
    assert chosen(link, empty) == (str(checkout), ""), "as Python does, from the folder of the file and not of the link"
    assert chosen("module", checkout, other) == (str(checkout), "")
    assert chosen(empty / "script.py", empty, other) == (str(other), "")
    assert chosen(empty / "script.py", checkout, other) == (str(checkout), "")
    assert chosen(empty / "script.py", empty) == (WHEEL, "")
    assert chosen(checkout / "script.py", other)[1] == (
        f"ValueError: two Megatrons would be imported: that of the working directory {other} and that beside the script in "
        f"{checkout}; start in {checkout}"
    )


@pytest.mark.parametrize("part", WHOLE)
def test_parts_of_two_megatrons_are_refused(part: str, tmp_path: Path) -> None:
    partial, whole = megatron(tmp_path / "partial", part), megatron(tmp_path / "whole", *WHOLE)
    for found in (chosen("script.py", tmp_path, partial, whole), chosen(partial / "script.py", tmp_path, whole)):
        assert found[1].startswith("ValueError: two Megatrons would be imported: megatron.core of ")
        assert f"megatron.{part} of {partial}" in found[1] and str(whole) in found[1]
        assert found[1].endswith("; put the folder of a whole one first in PYTHONPATH")
    assert chosen("script.py", tmp_path, whole, partial) == (str(whole), "")
