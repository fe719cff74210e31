"""The wheel: made from a commit, installed without a network and without pip's say on torch, and used far from any checkout.

Everything is built once, from a copy of this working tree that is a repository of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from megatron_recover import __version__, packages
from tests.observe import traces

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("msgspec", "rich", "jinja2", "psutil", "markupsafe", "markdown_it", "markdown_it_py", "mdurl", "pygments")
"""What the wheel asks for, and what that asks for."""
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 2 --eval-interval 9 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 257 "
    "--mock-data"
)
FAKE_BUILD = """\
#!/bin/sh
# Stands for `python -m build ... --outdir OUT SOURCE`: a file with the version that it was to build.
out=$5 source=$6
mkdir -p "$out" && sed -n 's/^__version__ = "\\(.*\\)"$/\\1/p' "$source/megatron_recover/__init__.py" >"$out/made.whl"
"""
ENVIRONMENT = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "GIT_"))}
    return subprocess.run(
        command, cwd=cwd, env=kept | ENVIRONMENT | environment, capture_output=True, text=True, timeout=240
    )  # fmt: skip


def _git(repository: Path, *words: str) -> str:
    done = _run("git", "-c", "user.name=a", "-c", "user.email=a@b", *words, cwd=repository)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _python(repository: Path, script: str) -> None:
    """Have the scripts of a repository use another interpreter."""
    python = repository / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(script)
    python.chmod(0o755)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This working tree as a commit, which is tagged as a release and has a section in the list of changes."""
    place = tmp_path_factory.mktemp("repository") / "clone"
    left_out = shutil.ignore_patterns(
        ".git", ".*_cache", ".venv", ".hypothesis", "__pycache__", "runs", "dist", "wheelhouse", "*.egg-info"
    )
    shutil.copytree(ROOT, place, ignore=left_out)
    changes = place / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("## Unreleased", f"## {__version__}"))
    _git(place, "init", "-q")
    _git(place, "add", "-A")
    _git(place, "commit", "-qm", "a release")
    _git(place, "tag", f"v{__version__}")
    return place


@pytest.fixture(scope="module")
def wheelhouse(repository: Path) -> Path:
    """The folder of `make wheelhouse EXTRAS=`, without the packages of others, for which it needs the network."""
    _python(repository, f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    folder = repository / "wheelhouse"
    done = _run(repository / "scripts" / "wheelhouse.sh", folder, "", cwd=repository, PIP_NO_DEPS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("1 wheels, ") and f"pip install --no-index --find-links {folder}" in done.stdout
    assert sorted(path.name for path in folder.iterdir()) == [
        f"megatron_recover-{__version__}-py3-none-any.whl", f"megatron_recover-{__version__}.tar.gz",
    ]  # fmt: skip
    return folder


def _installed() -> Iterator[Path]:
    """What is installed beside the package itself, each once."""
    seen = set()
    for folder in (Path(place) for place in sys.path if place.endswith("-packages")):
        for path in folder.iterdir():
            if path.name not in seen and "megatron_recover" not in path.name and path.suffix != ".pth":
                seen.add(path.name)
                yield path


def _environment(place: Path) -> Path:
    """An interpreter's environment with nothing in it; returns the folder of its packages."""
    venv.create(place, with_pip=False, symlinks=True)
    return next(place.glob("lib/*/site-packages"))


def _install(place: Path, house: Path, *flags: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install", "-q", "--no-index", "--no-compile"]
    done = _run(*pip, "--find-links", house, *flags, "megatron-recover", cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        (None, "no release but {version}+g"),
        ("v9.9.9", "has the tag v9.9.9, but megatron_recover/__init__.py has the version {version}; correct one"),
        ("v{version}", "CHANGELOG.md has no section {version}; rename Unreleased"),
    ],
)  # fmt: skip
def test_only_the_tag_of_its_version_makes_a_release(tag: str | None, says: str, tmp_path: Path) -> None:
    package = tmp_path / "megatron_recover"
    for folder in (package, tmp_path / "scripts"):
        folder.mkdir()
    shutil.copy(ROOT / "scripts" / "dist.sh", tmp_path / "scripts")
    (package / "__init__.py").write_text('__version__ = "1.2"\n')
    (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n")
    (tmp_path / ".gitignore").write_text(".venv\nout\n")
    _python(tmp_path, FAKE_BUILD)
    done = _run(tmp_path / "scripts" / "dist.sh", "out", cwd=tmp_path, GIT_CEILING_DIRECTORIES=str(tmp_path.parent))
    assert done.returncode == 2 and "is no git repository with one" in done.stderr
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "commit", "-qm", "a change")
    if tag:
        _git(tmp_path, "tag", tag.format(version="1.2"))
    (package / "__init__.py").write_text('__version__ = "not committed"\n')
    done = _run(tmp_path / "scripts" / "dist.sh", "out", cwd=tmp_path)
    assert says.format(version="1.2") in done.stderr
    assert done.returncode == (2 if tag else 0)
    if not tag:
        assert "changes that are not committed are not in it" in done.stderr
        made = Path(done.stdout.strip())
        assert made == tmp_path / "out" / "made.whl"
        assert made.read_text() == f"1.2+g{_git(tmp_path, 'rev-parse', '--short', 'HEAD')}\n"


def test_the_wheel_has_what_a_user_needs_and_asks_for_nothing_that_an_image_has(wheelhouse: Path) -> None:
    with ZipFile(next(wheelhouse.glob("*.whl"))) as wheel:
        files = set(wheel.namelist())
        described = wheel.read(f"megatron_recover-{__version__}.dist-info/METADATA").decode()
    expected = {f"megatron_recover/{name}" for name in ("scripts/pretrain_gpt.py", "scripts/paced_pretrain.py", "py.typed")}
    for folder, pattern in (("patches", "*.toml"), ("megatron_recover", "**/*.py"), ("megatron_recover", "**/templates/*")):
        paths = [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob(pattern)]
        expected |= {path if folder == "megatron_recover" else f"megatron_recover/{path}" for path in paths}
    ours = {name for name in files if ".dist-info/" not in name}
    assert (expected - ours, ours - expected) == (
        set(),
        {f"megatron_recover/{folder}/__init__.py" for folder in ("patches", "scripts")},
    )
    always = [each for each in re.findall(r"^Requires-Dist: (.+)$", described, re.MULTILINE) if "extra ==" not in each]
    assert tuple(always) == packages.REQUIRED


def test_without_torch_traces_are_judged_and_training_is_refused(wheelhouse: Path, tmp_path: Path) -> None:
    place = tmp_path / "small"
    folder = _environment(place)
    for path in _installed():
        if re.split(r"[-.]", path.name.lower())[0] in SMALL:
            (folder / path.name).symlink_to(path)
    _install(place, wheelhouse)
    run_dir = traces.write(tmp_path / "run", traces.faulty_run().events)
    scenario = ROOT / "scenarios" / "local-undisturbed.toml"

    def verb(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return _run(place / "bin" / "megatron-recover", *words, cwd=tmp_path)

    assert verb("--version").stdout == f"megatron-recover {__version__}\n"
    assert verb("check", run_dir).returncode == 0
    assert verb("top", run_dir).returncode == 0
    report = verb("report", run_dir)
    assert report.returncode == 0 and "loss.svg is left out: matplotlib is not installed; " in report.stderr
    assert "report.html" in report.stdout and "loss.svg" not in report.stdout
    simulated = verb("simulate", scenario, "--json")
    assert simulated.returncode == 0 and json.loads(simulated.stdout)
    refused = verb("run", "--replicas", "2", "-m", "megatron_recover.scripts.pretrain_gpt")
    assert refused.returncode == 2
    assert [line.partition(" is not")[0] for line in refused.stderr.splitlines()] == [
        f"megatron-recover run: {packages.name_of(each)}" for each in packages.EXTRAS["train"]
    ]
    assert f"{place / 'bin' / 'python'} -m pip install 'torch>=2.11'" in refused.stderr


def test_beside_an_images_torch_and_a_checkout_nothing_changes_and_jobs_start(wheelhouse: Path, tmp_path: Path) -> None:
    """The image's torch has a version that pip takes for too old, and its Megatron is no installed package."""
    place, checkout = tmp_path / "image", tmp_path / "checkout"
    folder = _environment(place)
    checkout.mkdir()
    for path in _installed():
        if path.name == "megatron":
            (checkout / path.name).symlink_to(path)
        elif re.fullmatch(r"torch-.*\.dist-info", path.name):
            described = re.sub(r"(?m)^Version: .*$", "Version: 2.11.0a0+nv25.9", (path / "METADATA").read_text())
            other = folder / "torch-2.11.0a0+nv25.9.dist-info"
            other.mkdir()
            (other / "METADATA").write_text(described)
        elif not path.name.startswith("megatron"):
            (folder / path.name).symlink_to(path)
    before = {path.name for path in folder.iterdir()}
    _install(place, wheelhouse, "--no-deps")
    added = {path.name for path in folder.iterdir()} - before
    assert added == {"megatron_recover", f"megatron_recover-{__version__}.dist-info"}
    assert before <= {path.name for path in folder.iterdir()}
    command, away = place / "bin" / "megatron-recover", tmp_path / "away"
    away.mkdir()
    explained = _run(command, "explain", "packages", cwd=away, PYTHONPATH=str(checkout))
    assert explained.returncode == 0, explained.stderr
    assert re.search(r"^torch +>=2.11 +2.11.0a0\+nv25.9 +run", explained.stdout, re.MULTILINE)
    refused = _run(
        command, "run", "--replicas", "2", "-m", "megatron_recover.scripts.pretrain_gpt",
        *shlex.split(MODEL), "--spec", "a", "b", cwd=away, PYTHONPATH=str(checkout),
    )  # fmt: skip
    assert refused.returncode == 2
    assert "--spec is not supported by this script; leave it out" in refused.stderr, refused.stderr


def test_the_container_has_the_documented_steps_and_the_locked_megatron() -> None:
    recipe = (ROOT / "containers" / "Dockerfile").read_text()
    steps = re.findall(r"^RUN (?:--mount=type=bind,target=/wheelhouse )?(.+)$", recipe, re.MULTILINE)
    page = (ROOT / "docs" / "how_to" / "install.md").read_text()
    shown = page.split("## In a container")[1].split("```sh\n")[2].split("```")[0]
    assert steps == shown.splitlines() and len(steps) == 4
    [locked] = re.findall(r"^megatron-core==(.+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert f"ARG MEGATRON=core_v{locked}\n" in recipe
    build = "docker build --build-arg IMAGE=nvcr.io/nvidia/pytorch:YY.MM-py3 -f containers/Dockerfile wheelhouse\n"
    assert build in recipe and build in page
