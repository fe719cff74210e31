"""Seams: the names in Megatron that this package replaces. Loads, checks and installs them.

A seam is one name in one module of Megatron, replaced by an object of this package. Each seam is a
file in `patches/` with its reason and with all that it relies on. Nothing is installed unless every
seam fits: a Megatron that has changed is refused with a list of all misfits. As a rule a
replacement is a bound method of an object made for this run; the object gets the original function.
This module has no state.
"""

from __future__ import annotations

import importlib
import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any, Literal

import msgspec

from megatron_recover import packages
from megatron_recover.megatron.seams import anchors
from megatron_recover.megatron.seams.anchors import Anchors
from megatron_recover.shipped import shipped


class UnsupportedMegatron(ValueError):
    """Seams or anchors do not fit the installed Megatron; the message lists misfits and remedy."""


class Seam(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of one file of `patches/`."""

    name: str
    """Name of the seam, equal to the file's name without `.toml`."""
    why: Literal["cannot be done without", "being upstreamed", "ours"]
    """Kind of the reason."""
    reason: str
    """Reason: the failure without this seam, and why a subclass or an argument does not suffice."""
    module: str
    """Module in whose namespace the name is replaced: the module that looks the name up when it
    calls."""
    target: str
    """Name that is replaced, dotted for a method (``Class.method``)."""
    rebinds: tuple[str, ...] = ()
    """Other modules that imported the same object under the same name and call it."""
    parameters: tuple[str, ...] | None = None
    """Names of the parameters of a target that is a function, in order; else None."""
    attributes: tuple[str, ...] | None = None
    """Attributes that are used of a target that is no function; else None."""
    replacement: str
    """``module:qualified.name`` of the replacement."""
    versions: tuple[str, ...]
    """``major.minor`` of the megatron-core versions against which the seam was checked."""


_BODIES = "bodies.toml"
"""File with digests (`bodies.FILE`), which is no seam."""


def load() -> tuple[Seam, ...]:
    """Return all seams, sorted by name. Raises ValueError for a seam's file with a mistake.

    Every `.toml` file of `patches/` is a seam's, except `anchors.toml` and `bodies.toml`.
    """
    seams = []
    for file in sorted(folder().iterdir(), key=lambda entry: entry.name):
        if not file.name.endswith(".toml") or file.name in (anchors.FILE, _BODIES):
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
    """Return the parts of Megatron that are used without being replaced."""
    return anchors.load(folder())


def folder() -> Traversable:
    """Return the folder of seams, anchors and bodies."""
    return shipped("patches")


def unsupported_version(seams: Sequence[Seam]) -> list[str]:
    """Return the seams that were not checked against the installed version, one line each.

    Returns a single line if no version is installed. Does not import Megatron.
    """
    installed = packages.version("megatron-core")
    if installed is None:
        return ["megatron-core is not installed"]
    return [
        f"{seam.name}: megatron-core is {installed or 'without a version'}, checked were {', '.join(seam.versions)}"
        for seam in seams
        if not any(f"{installed}.".startswith(f"{version}.") for version in seam.versions)
    ]


def misfits(seams: Sequence[Seam]) -> list[str]:
    """Return each misfit between `seams` and the installed Megatron, one line each.

    Imports the modules that the seams name.
    """
    return [*unsupported_version(seams), *(f"{seam.name}: {line}" for seam in seams for line in _misfits_of(seam))]


def refusal(seams: Sequence[Seam], found: Sequence[str]) -> str:
    """Return the message that refuses a Megatron with the misfits `found`."""
    checked = sorted({version for seam in seams for version in seam.versions})
    lines = "\n  ".join(found)
    remedy = f"install megatron-core {' or '.join(checked)} (pip install 'megatron-core=={checked[-1]}.*')"
    if (of_checkout := packages.checkout_remedy()) is not None:
        remedy = f"{of_checkout} (megatron-core {' or '.join(checked)})"
    folder = packages.megatron_folder()
    return f"the {'installed Megatron' if folder is None else f'Megatron in {folder}'} is not supported; {remedy}:\n  {lines}"


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
    """The seams of this process, with Megatron's originals and the installed replacements."""

    def __init__(self, seams: Sequence[Seam], relied_on: Anchors | None = None) -> None:
        """Check all seams and anchors, and look up the originals.

        Raises `UnsupportedMegatron` unless all seams fit and Megatron has all of `relied_on`.
        """
        self._anchors = relied_on or Anchors()
        found = [*misfits(seams), *anchors.lacking(self._anchors)]
        if found:
            raise UnsupportedMegatron(refusal(seams, found))
        self._seams = {seam.name: seam for seam in seams}
        self.originals: Mapping[str, Any] = {seam.name: _look_up(seam.module, seam.target) for seam in seams}
        """Megatron's own object behind each seam, by the seam's name."""
        self._installed: set[str] = set()

    def install(self, replacements: Mapping[str, Callable[..., Any] | object]) -> None:
        """Install each replacement behind the seam that its key names, in all modules of the seam.

        Raises RuntimeError for a replacement other than the one that the seam declares.
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
        """Raise `UnsupportedMegatron` if `args` lacks an argument that the anchors name."""
        found = anchors.lacking_arguments(self._anchors, args)
        if found:
            raise UnsupportedMegatron(refusal(list(self._seams.values()), found))

    def missing(self) -> list[str]:
        """Return the names of the seams without an installed replacement."""
        return sorted(self._seams.keys() - self._installed)

    def remove(self) -> None:
        """Restore Megatron's originals (for tests)."""
        for name in self._installed:
            self._put(self._seams[name], self.originals[name])
        self._installed.clear()

    @staticmethod
    def _put(seam: Seam, value: Any) -> None:
        owner, _, name = seam.target.rpartition(".")
        for module in (seam.module, *seam.rebinds):
            setattr(_look_up(module, owner) if owner else importlib.import_module(module), name, value)
