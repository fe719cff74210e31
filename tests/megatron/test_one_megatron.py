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
one_megatron.choose(sys.argv[1], is_module=sys.argv[1] == "module")
ask = "from importlib.util import find_spec; print(*(find_spec(f'megatron.{part}').origin for part in ('core', 'training')))"
exec(ask)
print(subprocess.check_output([sys.executable, "-P", "-c", ask], text=True), end="")
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
    """As under torchrun. A clone named `megatron` is no Megatron of its parent."""
    checkout, other = megatron(tmp_path / "checkout", *WHOLE), megatron(tmp_path / "other", *WHOLE)
    (empty := tmp_path / "empty").mkdir()
    (link := empty / "linked.py").symlink_to(checkout / "script.py")
    assert chosen(checkout / "script.py", empty, other) == (str(checkout), "")
    assert chosen(checkout / "script.py", checkout, other) == (str(checkout), "")
    assert chosen(checkout / "script.py", other, other) == (str(checkout), "")
    assert chosen(link, empty) == (str(checkout), ""), "as Python does, from the folder of the file and not of the link"
    assert chosen("module", checkout, other) == (str(checkout), "")
    assert chosen(empty / "script.py", empty, other) == (str(other), "")
    assert chosen(empty / "script.py", checkout, checkout, other) == (str(checkout), "")
    assert chosen(empty / "script.py", empty) == (WHEEL, "")
    clone = megatron(tmp_path / "megatron", *WHOLE)
    assert chosen(clone / "script.py", tmp_path) == (str(clone), "")
    assert chosen(empty / "script.py", tmp_path, other) == (str(other), "")


def test_the_working_directory_counts_with_a_module_only(tmp_path: Path) -> None:
    """Programs started by `python -m` look there first; those of a run must not."""
    here, other = megatron(tmp_path / "here", *WHOLE), megatron(tmp_path / "other", *WHOLE)
    (empty := tmp_path / "empty").mkdir()
    assert chosen(empty / "script.py", here) == (WHEEL, "")
    assert chosen(empty / "script.py", here, other) == (str(other), "")
    assert chosen(other / "script.py", here) == (str(other), "")
    assert chosen("module", here, other) == (str(here), "")


def test_a_clone_that_is_not_installed_is_found_by_all_processes(tmp_path: Path) -> None:
    """`python -m megatron_recover` in it finds it in the working directory, where its processes do not look."""
    (tmp_path / "megatron_recover").symlink_to(ROOT / "megatron_recover")
    program = CHOOSE.replace("exec(ask)", "ask = 'import megatron_recover as ours; print(*ours.__path__)'\nexec(ask)")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert done.stdout.split() == 2 * [str(tmp_path / "megatron_recover")], done.stderr


@pytest.mark.parametrize("part", WHOLE)
def test_parts_of_two_megatrons_are_refused(part: str, tmp_path: Path) -> None:
    partial, whole = megatron(tmp_path / "partial", part), megatron(tmp_path / "whole", *WHOLE)
    for found, remedy in (
        (chosen("script.py", tmp_path, partial, whole), "put the folder of a whole one first in PYTHONPATH"),
        (chosen(partial / "script.py", tmp_path, whole), f"complete that in {partial}, or start a script of a whole one"),
        (chosen("module", partial, whole), f"complete that in {partial}, or start a script of a whole one"),
    ):
        assert found[1].startswith("ValueError: two Megatrons would be imported: megatron.core of ")
        assert f"megatron.{part} of {partial}" in found[1] and found[1].endswith(f"; {remedy}")
        assert str(whole) in found[1] or "site-packages" in found[1]
    assert chosen("script.py", tmp_path, whole, partial) == (str(whole), "")


def test_a_working_directory_that_pythonpath_names_stays(tmp_path: Path) -> None:
    program = "import os; before = os.environ['PYTHONPATH']" + CHOOSE + "assert os.environ['PYTHONPATH'] == before, os.environ"
    for options in (["-P"], []):
        done = subprocess.run(
            [sys.executable, *options, "-c", program, str(tmp_path / "script.py")], cwd=ROOT, capture_output=True, text=True,
            timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
