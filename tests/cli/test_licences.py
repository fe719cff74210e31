"""The list of licences names every dependency, and says of each what the installed package says of itself."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from scripts.study import licences

ROOT = Path(__file__).resolve().parents[2]


def test_every_dependency_has_a_licence_and_those_of_the_lock_are_all_listed() -> None:
    text = (ROOT / "docs" / "reference" / "licences.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    listed = {name: others for name, *others in rows[2:]}
    expected = licences.locked() | dict.fromkeys(licences.NOT_INSTALLED, "not locked")
    assert {name: row[0] for name, row in listed.items()} == expected
    by_extra = {name: ", ".join(extras) for name, extras in licences.asked_for().items()}
    assert {name: row[2] for name, row in listed.items() if row[2]} == by_extra
    assert [name for name in licences.asked_for() if listed[name][1] == "not stated"] == []
    for name, (version, licence, _) in listed.items():
        if name not in licences.NOT_INSTALLED and metadata.version(name) == version:
            assert licences.licence_of(metadata.metadata(name)) == licence, name
