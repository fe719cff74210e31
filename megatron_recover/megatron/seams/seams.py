"""The places where Megatron calls us: what they are, whether they fit the installed Megatron, and putting us there.

A seam is one name in one module of Megatron behind which something of ours stands. Each is a file in `patches/` that says
why it exists and what it relies on. Nothing is installed before all of them fit: a Megatron that has changed is refused
with everything that does not fit, not trained wrongly. Replacements are bound methods of objects made for this run, which
get the original function they stand in for; no state lives in this module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import msgspec

from megatron_recover.megatron.seams import anchors
from megatron_recover.megatron.seams.anchors import Anchors


class UnsupportedMegatron(ValueError):
    """The installed Megatron is not one that the seams fit; the message lists every misfit and the remedy."""


class Seam(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One file of `patches/`."""

    name: str
    """Also the file's name."""
    why: Literal["cannot be done without", "being upstreamed", "ours"]
    reason: str
    """What would go wrong without it, and why a subclass or an argument does not do."""
    module: str
    """The module in whose namespace the name is replaced: where it is looked up when it is called."""
    target: str
    """The name, dotted for a method (``Class.method``)."""
    rebinds: tuple[str, ...] = ()
    """Other modules that imported the same object under the same name and call it."""
    parameters: tuple[str, ...] | None = None
    """Names of the parameters that the target takes, in order; of a function."""
    attributes: tuple[str, ...] | None = None
    """What we use of the target; of an object that is no function."""
    replacement: str
    """``module:qualified.name`` of what stands there."""
    versions: tuple[str, ...]
    """``major.minor`` of the megatron-core versions that it was checked against."""


def load() -> tuple[Seam, ...]:
    """All seams, by name. Raises ValueError for a file that is not a seam."""
    seams = []
    for file in sorted(_folder().iterdir(), key=lambda entry: entry.name):
        if not file.name.endswith(".toml") or file.name == anchors.FILE:
            continue
        try:
            seam = msgspec.toml.decode(file.read_text(), type=Seam)
        except msgspec.DecodeError as error:
            raise ValueError(f"patches/{file.name}: {error}") from error
        if file.name != f"{seam.name}.toml" or (seam.parameters is None) == (seam.attributes is None):
            raise ValueError(f"patches/{file.name}: its name is {seam.name}, and it needs parameters or attributes, not both")
        seams.append(seam)
    return tuple(seams)


def load_anchors() -> Anchors:
    """What is relied on beside the seams."""
    return anchors.load(_folder())


def _folder() -> Traversable:
    checkout = Path(__file__).resolve().parents[3] / "patches"  # beside the package, in which they are when it is installed
    return checkout if (checkout / anchors.FILE).is_file() else importlib.resources.files("megatron_recover.patches")


def unsupported_version(seams: Sequence[Seam]) -> list[str]:
    """Seams that were not checked against the installed version, one line each; needs no import of Megatron."""
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return ["megatron-core is not installed"]
    return [
        f"{seam.name}: megatron-core is {installed}, checked were {', '.join(seam.versions)}"
        for seam in seams
        if not any(f"{installed}.".startswith(f"{version}.") for version in seam.versions)
    ]


def misfits(seams: Sequence[Seam]) -> list[str]:
    """What does not fit the installed Megatron, one line each; empty if everything does. Imports what it looks at."""
    return [*unsupported_version(seams), *(f"{seam.name}: {line}" for seam in seams for line in _misfits_of(seam))]


def refusal(seams: Sequence[Seam], found: Sequence[str]) -> str:
    """The message for a Megatron with these misfits."""
    checked = sorted({version for seam in seams for version in seam.versions})
    lines = "\n  ".join(found)
    remedy = f"install megatron-core {' or '.join(checked)} (pip install 'megatron-core=={checked[-1]}.*')"
    return f"the installed Megatron is not supported; {remedy}:\n  {lines}"


def _misfits_of(seam: Seam) -> list[str]:
    try:
        target = _look_up(seam.module, seam.target)
    except (ImportError, AttributeError) as error:
        return [f"{seam.module} has no {seam.target} ({error})"]
    found = []
    if seam.parameters is not None:
        parameters = tuple(inspect.signature(target).parameters)
        if parameters != seam.parameters:
            found.append(f"{seam.module}.{seam.target} takes ({', '.join(parameters)}), not ({', '.join(seam.parameters)})")
    for attribute in seam.attributes or ():
        if not hasattr(target, attribute):
            found.append(f"{seam.module}.{seam.target} has no {attribute}")
    for module in seam.rebinds:
        try:
            same = _look_up(module, seam.target) is target
        except (ImportError, AttributeError):
            same = False
        if not same:
            found.append(f"{module}.{seam.target} is not {seam.module}.{seam.target}")
    return found


def _look_up(module: str, target: str) -> Any:
    found: Any = importlib.import_module(module)
    for name in target.split("."):
        found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
    return found


class Installation:
    """The seams of this process: originals to build replacements from, and the replacements put in place."""

    def __init__(self, seams: Sequence[Seam], relied_on: Anchors | None = None) -> None:
        """Look everything up; raises `UnsupportedMegatron` unless all seams fit and nothing of `relied_on` is lacking."""
        self._anchors = relied_on or Anchors()
        found = [*misfits(seams), *anchors.lacking(self._anchors)]
        if found:
            raise UnsupportedMegatron(refusal(seams, found))
        self._seams = {seam.name: seam for seam in seams}
        self.originals: Mapping[str, Any] = {seam.name: _look_up(seam.module, seam.target) for seam in seams}
        """What Megatron has behind each seam."""
        self._installed: set[str] = set()

    def install(self, replacements: Mapping[str, Callable[..., Any] | object]) -> None:
        """Put each replacement behind the seam of its key, in all modules that the seam names.

        Raises RuntimeError for a replacement that is not the one that its seam declares.
        """
        for name, replacement in replacements.items():
            seam = self._seams[name]
            kind = replacement if hasattr(replacement, "__qualname__") else type(replacement)
            actual = f"{kind.__module__}:{kind.__qualname__}"
            if actual != seam.replacement:
                raise RuntimeError(f"patches/{name}.toml declares {seam.replacement}, but {actual} was to be installed")
            self._put(seam, replacement)
            self._installed.add(name)

    def check_arguments(self, args: Namespace) -> None:
        """Raise `UnsupportedMegatron` unless Megatron has parsed everything that is relied on."""
        found = anchors.lacking_arguments(self._anchors, args)
        if found:
            raise UnsupportedMegatron(refusal(list(self._seams.values()), found))

    def missing(self) -> list[str]:
        """Seams behind which Megatron still has its own."""
        return sorted(self._seams.keys() - self._installed)

    def remove(self) -> None:
        """Put Megatron's own back (tests)."""
        for name in self._installed:
            self._put(self._seams[name], self.originals[name])
        self._installed.clear()

    @staticmethod
    def _put(seam: Seam, value: Any) -> None:
        owner, _, name = seam.target.rpartition(".")
        for module in (seam.module, *seam.rebinds):
            setattr(_look_up(module, owner) if owner else importlib.import_module(module), name, value)
