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
    folder.mkdir(exist_ok=True)
    for part in parts:
        (folder / "megatron" / part).mkdir(parents=True)
        (folder / "megatron" / part / "__init__.py").touch()
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
    [folder] = {origin.rpartition("/megatron/")[0] for origin in in_launcher.split()}
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
    assert chosen(empty / "script.py", checkout) == (str(checkout), "")
    assert chosen(empty / "script.py", checkout, checkout, other) == (str(checkout), "")
    assert chosen(empty / "script.py", empty) == (WHEEL, "")


def test_a_megatron_of_the_working_directory_that_hides_another_is_refused(tmp_path: Path) -> None:
    """Of the script's or of PYTHONPATH's, which torchrun would take. A clone named `megatron` is no Megatron of its parent."""
    checkout, other = megatron(tmp_path / "checkout", *WHOLE), megatron(tmp_path / "other", *WHOLE)
    (empty := tmp_path / "empty").mkdir()
    begin = f"ValueError: two Megatrons would be imported: that of the working directory {other} and that"
    end = f" in {checkout}; start in {checkout}"
    assert chosen(checkout / "script.py", other) == ("", f"{begin} beside the script{end}")
    assert chosen(checkout / "script.py", other, other) == ("", f"{begin} beside the script{end}")
    assert chosen(empty / "script.py", other, empty, checkout, other) == ("", f"{begin} of PYTHONPATH{end}")
    clone = megatron(tmp_path / "megatron", *WHOLE)
    assert chosen(clone / "script.py", tmp_path) == (str(clone), "")
    assert chosen(empty / "script.py", tmp_path, other) == (str(other), "")


@pytest.mark.parametrize("part", WHOLE)
def test_parts_of_two_megatrons_are_refused(part: str, tmp_path: Path) -> None:
    partial, whole = megatron(tmp_path / "partial", part), megatron(tmp_path / "whole", *WHOLE)
    for found, remedy in (
        (chosen("script.py", tmp_path, partial, whole), "put the folder of a whole one first in PYTHONPATH"),
        (chosen(partial / "script.py", tmp_path, whole), f"complete that in {partial}, or start a script of a whole one"),
        (chosen(tmp_path / "script.py", partial), f"complete that in {partial}, or start in a whole one"),
    ):
        assert found[1].startswith("ValueError: two Megatrons would be imported: megatron.core of ")
        assert f"megatron.{part} of {partial}" in found[1] and found[1].endswith(f"; {remedy}")
        assert str(whole) in found[1] or "site-packages" in found[1]
    assert chosen("script.py", tmp_path, whole, partial) == (str(whole), "")
