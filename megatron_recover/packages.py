"""The packages that this one uses, and whether a version that suffices is installed.

`REQUIRED` comes with the wheel. `EXTRAS` are up to the user: an image has its own torch, and a
checkout of Megatron is as good as its wheel. So pip must not bring them by itself, and the verbs
that need one ask here before they start anything. pyproject.toml repeats both; a test compares.

Uses the standard library only, and imports no package that it judges.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

REQUIRED = ("msgspec>=0.19", "rich>=13", "jinja2>=3.1", "psutil>=5.9")
"""Requirements of every verb."""
TORCH = "torch>=2.11"
TRAINING = (TORCH, "megatron-core>=0.19,<0.20", "numpy>=1.26")
PLOT = ("matplotlib>=3.8",)
TENSORBOARD = ("tensorboard>=2.16",)
METRICS = ("prometheus-client>=0.20",)
OPTIMIZERS = ("emerging-optimizers>=0.2",)
"""Requirements of Megatron for other optimizers than `BUILT_IN`; no extra of this package."""
BUILT_IN = ("adam", "sgd")
"""Optimizers that Megatron has without a further package."""
EXTRAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"train": TRAINING, "plot": PLOT, "tensorboard": TENSORBOARD, "metrics": METRICS}
)
"""Requirements of what not everybody does, by the name of the extra."""

_MEGATRON = "megatron-core"
_MODULES: Mapping[str, str] = MappingProxyType({_MEGATRON: "megatron.core"})
"""Modules whose names do not follow from their package's."""
_REQUIREMENT = re.compile(r"([\w-]+)>=([\d.]+)(?:,<([\d.]+))?")
_RELEASE = re.compile(r"\s*v?(?:\d+!)?(\d+(?:\.\d+)*)")
"""The beginning of a version up to its release, without the suffixes of previews and builds."""


class Lacking(ValueError):
    """Packages are missing or do not suffice; the message has a line for each, with the remedy."""


def version(name: str) -> str | None:
    """Return the version of the package that Python would import by that name.

    None if there is no such package, "" if its version is unknown. That of Megatron is read from
    its files, since a checkout is no installed package.
    """
    origin = _origin(name)
    if origin is None:
        return None
    if name == _MEGATRON:
        return _megatron(origin.parent)
    from importlib import metadata  # here, since it takes as long as all of `--help`

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def suffices(found: str, requirement: str) -> bool:
    """Return whether a version is in the range of a requirement such as ``torch>=2.11,<3``.

    Only its release counts, so `2.11.0a0+nv25.9`, which an image has, is in `>=2.11`. pip does not
    think so.
    """
    _, least, below = _parts(requirement)
    release = _RELEASE.match(found)
    if release is None:
        return False
    return _numbers(least) <= _numbers(release[1]) and (below is None or _numbers(release[1]) < _numbers(below))


def mistakes(requirements: Iterable[str]) -> list[str]:
    """Return one line for each package that is missing or does not suffice, with the remedy."""
    found = []
    for requirement in requirements:
        name, least, below = _parts(requirement)
        there = version(name)
        if there is None:
            found.append(f"{name} is not installed; {_remedy(requirement)}")
        elif not suffices(there, requirement):
            wanted = f"{least} or newer is needed" + (f", and older than {below}" if below else "")
            place = f" in {folder}" if name == _MEGATRON and (folder := megatron_folder()) is not None else ""
            found.append(f"{name} is {there or 'without a version'}{place}, but {wanted}; {_remedy(requirement)}")
    return found


def megatron_folder() -> Path | None:
    """Return the folder of the Megatron that Python would import, if there is one."""
    origin = _origin(_MEGATRON)
    return None if origin is None else origin.parents[2]


def checkout_remedy() -> str | None:
    """Return how to replace the Megatron that Python would import, if pip did not put it there.

    A checkout beside a script is in front of all that pip installs, and of PYTHONPATH.
    """
    folder = megatron_folder()
    if folder is None or any(folder.glob("megatron_core-*.dist-info")):
        return None
    return "check out a release that fits there, or start a script of another checkout"


def require(requirements: Iterable[str]) -> None:
    """Raise `Lacking` if there are `mistakes`."""
    if found := mistakes(requirements):
        raise Lacking("\n".join(found))


def name_of(requirement: str) -> str:
    """Return the name of the package of a requirement."""
    return _parts(requirement)[0]


def _parts(requirement: str) -> tuple[str, str, str | None]:
    """Return name, least version and the first that is too new, if any."""
    found = _REQUIREMENT.fullmatch(requirement)
    assert found is not None, requirement
    return found[1], found[2], found[3]


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _remedy(requirement: str) -> str:
    """Return how to get a package: with pip, for the Python that runs, if no checkout hides it."""
    if name_of(requirement) == _MEGATRON and (remedy := checkout_remedy()) is not None:
        return remedy
    pip = shlex.join([sys.executable, "-m", "pip", "install"])
    if name_of(requirement) == _MEGATRON:
        return f"put the folder of a checkout of it in PYTHONPATH, or: {pip} --no-deps '{requirement}'"
    return f"{pip} '{requirement}'"


def _origin(name: str) -> Path | None:
    """Return the file that Python would import for a package, if there is one."""
    try:
        spec = importlib.util.find_spec(_MODULES.get(name, name.replace("-", "_")))
    except ModuleNotFoundError:  # the package that it is in
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _megatron(core: Path) -> str:
    """Return the version of the Megatron whose `megatron.core` is in a folder, or ""."""
    try:
        text = (core / "package_info.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = dict(re.findall(r"""^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['"]?(\w*)['"]?\s*$""", text, re.MULTILINE))
    numbers = [found.get(part) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(map(str, numbers)) + found.get("PRE_RELEASE", "") if all(numbers) else ""
