"""Lists the licences of all packages that the set-up installs, as docs/reference/licences.md.

Names and versions are those of `requirements.lock`, licences those that the installed packages
state about themselves: `make licences`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_INSTALLED: Mapping[str, str] = {"transformer-engine": "Apache-2.0"}
"""Dependencies that need a GPU, so that the set-up does not install them, with their licences."""
_LONGEST = 60
"""Characters of a stated licence. A longer text is a licence's wording, not its name."""
_HEAD = """\
# Licences of dependencies

The project is under Apache-2.0 (`LICENSE`). Its wheel contains no other package. This page lists
the packages that `make setup` installs, in the versions of `requirements.lock`, with the licence
that each of them states about itself, and those that `make setup` leaves out because they need a
GPU (`not locked`). `make licences` writes the page anew.

*Asked for by*: the wheel itself (`always`), or extras of it; the others are dependencies of these.
Packages that only the extra `dev` asks for are needed to change the code, not to train.

| package | version | licence | asked for by |
|---|---|---|---|
"""


def canonical(name: str) -> str:
    """Return the one form of a package's name that is equal for all its spellings."""
    return re.sub(r"[-_.]+", "-", name).lower()


def asked_for() -> dict[str, list[str]]:
    """Return each dependency in pyproject.toml with the extras that name it, or `always`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, list[str]] = {}
    for extra, requirements in {"always": project["dependencies"], **project["optional-dependencies"]}.items():
        for requirement in requirements:
            found.setdefault(canonical(re.split(r"[\[<>=]", requirement)[0]), []).append(extra)
    return found


def locked() -> dict[str, str]:
    """Return the version of each package in `requirements.lock`."""
    lines = (ROOT / "requirements.lock").read_text().split()
    return {canonical(name): version for name, _, version in (line.partition("==") for line in lines)}


def licence_of(stated: metadata.PackageMetadata) -> str:
    """Return the licence that a package's metadata states, or `not stated`."""
    if expression := stated.get("License-Expression"):
        return expression
    text = stated.get("License") or ""
    if text and len(text) <= _LONGEST and "\n" not in text and text.upper() != "UNKNOWN":
        return text
    classes = [each.rpartition(" :: ")[2] for each in stated.get_all("Classifier") or () if each.startswith("License :: ")]
    return ", ".join(each for each in classes if each != "OSI Approved") or "not stated"


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield package, version, licence and who asks for it. Raises PackageNotFoundError."""
    extras = asked_for()
    for name, version in sorted(locked().items()):
        yield name, version, licence_of(metadata.metadata(name)), ", ".join(extras.get(name, ()))
    for name, licence in NOT_INSTALLED.items():
        yield name, "not locked", licence, ", ".join(extras[name])


def page() -> str:
    """Return the text of docs/reference/licences.md."""
    return _HEAD + "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows())


if __name__ == "__main__":
    (ROOT / "docs" / "reference" / "licences.md").write_text(page())
    print("wrote docs/reference/licences.md", file=sys.stderr)
