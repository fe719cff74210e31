"""What docs say about the core is what the core says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

from megatron_recover.core import coordinator, rank, replica
from megatron_recover.sim.explore.scenario import CONFIGS
from scripts.draw.diagram import page

DOCS = Path(__file__).parents[2] / "docs" / "design"


def test_no_row_of_a_table_is_broken() -> None:
    broken = [
        f"{path.name}:{number}" for path in sorted(DOCS.parent.rglob("*.md"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.startswith("| ") and not line.rstrip().endswith("|")
    ]  # fmt: skip
    assert broken == []


def test_the_drawn_tables_are_current() -> None:
    expected = page()
    actual = (DOCS / "states.md").read_text()
    assert actual == expected, "run: python -m scripts.draw.diagram > docs/design/states.md"


def test_every_handler_says_what_it_does() -> None:
    rows = [row.handler for phase in replica.TABLE.values() for row in phase.values()]
    for handler in [*rows, *rank.TABLE.values(), *coordinator.TABLE.values()]:
        assert handler.__doc__, handler


def test_every_explored_scenario_is_in_the_documents() -> None:
    contract = (DOCS / "protocol.md").read_text()
    for config, scenarios in CONFIGS.items():
        for scenario in scenarios:
            assert scenario.name.removeprefix("4 replicas, ") in contract, f"{config}: {scenario.name}"


def test_every_timer_and_input_is_in_the_contract() -> None:
    contract = (DOCS / "protocol.md").read_text()
    for word in (*get_args(coordinator.Setting), "LinkLost", "WaitExpired", "TimerFired", "waiting_for", "may_run", "Retire"):
        assert word in contract


def test_the_layers_in_the_picture_are_those_that_import_linter_enforces() -> None:
    settings = tomllib.loads((DOCS.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers"]
    picture = (DOCS / "architecture.md").read_text().split("```")[1].strip().splitlines()
    drawn = [row.split("  ")[0].split(" | ") for row in picture]
    assert drawn == [[name.rpartition(".")[2] for name in layer.split(" | ")] for layer in layers]


def test_every_module_is_in_one_row_of_who_owns_what() -> None:
    rows = re.findall(r"^\| (`[\w/.]+\.py`.*?) \|", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    listed = []
    for row in rows:
        first, *others = re.findall(r"`(.+?)`", row)
        listed += [first, *(str(Path(first).with_name(name)) for name in others)]
    package = DOCS.parents[1] / "megatron_recover"
    modules = [str(path.relative_to(package)) for path in package.rglob("*.py") if not path.name.startswith("__")]
    assert sorted(listed) == sorted(modules)


def test_every_thread_is_in_the_page_of_threads() -> None:
    package = DOCS.parents[1] / "megatron_recover"
    threads = {
        (name, path.name) for path in package.rglob("*.py")
        for name in re.findall(r"Thread\(.*name=\"([\w-]+)\"", path.read_text())
    }  # fmt: skip
    page = (DOCS / "threads_and_buffers.md").read_text()
    assert len(threads) > 10 and [each for each in sorted(threads) if f"`{each[0]}`" not in page] == []
