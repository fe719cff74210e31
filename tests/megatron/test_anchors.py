"""What is relied on beside the seams is declared, is there, and is refused with the list where it is not."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron_recover.megatron import cpu
from megatron_recover.megatron.seams import anchors, seams
from megatron_recover.megatron.seams.anchors import Anchors

PACKAGE = Path(anchors.__file__).parents[2]
DECLARED = seams.load_anchors()


def uses() -> Iterator[tuple[str, str]]:
    """Every (module, name) of Megatron that the package looks up, the ones that it wraps on a CPU included."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        modules = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
                for alias in node.names:
                    dotted = f"{node.module}.{alias.name}"
                    if importlib.util.find_spec(node.module) and isinstance(_found(node.module, alias.name), ModuleType):
                        modules[alias.asname or alias.name] = dotted
                    else:
                        yield node.module, alias.name
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                yield modules[node.value.id], node.attr
    for place in cpu.MEGATRON:
        module, _, name = place.partition(":")
        if "." not in name:  # else a class's, which are declared as attributes
            yield module, name


def _found(module: str, name: str) -> object:
    try:
        return importlib.import_module(f"{module}.{name}")
    except ImportError:
        return getattr(importlib.import_module(module), name)


def test_the_installed_megatron_has_all_of_it() -> None:
    assert anchors.lacking(DECLARED) == []


def test_every_name_that_is_used_is_declared() -> None:
    assert {(module, name) for module, names in DECLARED.names.items() for name in names} == set(uses())


def test_every_argument_that_a_rank_reads_is_declared() -> None:
    files = [
        *(
            PACKAGE / "megatron" / "checkpoint" / f"{name}.py"
            for name in ("boundary", "checkpoints", "resuming", "shared_failure")
        ),
        *(
            PACKAGE / "megatron" / f"{name}.py"
            for name in ("data/index_cache", "data/loaders", "newcomer", "reporting", "training")
        ),
    ]
    used = {name for path in files for name in re.findall(r"(?:\bargs|get_args\(\))\.(\w+)", path.read_text())}
    assert set(DECLARED.arguments) == used - {
        "iteration",
        "curr_iteration",
        "num_floating_point_operations_so_far",
    }  # not parsed


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with a class that has all the ways to an attribute, and a function."""

    class Model:
        annotated: int

        def __init__(self) -> None:
            self.assigned = 1

        def method(self) -> None: ...

    module = ModuleType("fake_megatron")
    module.Model, module.train = Model, lambda model, steps: None
    monkeypatch.setitem(sys.modules, "fake_megatron", module)
    return module


RELIED_ON = Anchors(
    names={"fake_megatron": ("train",)},
    attributes={"fake_megatron:Model": ("annotated", "assigned", "method")},
    parameters={"fake_megatron:train": ("steps",)},
    arguments=("seed",),
)


def test_what_is_there_is_found(fake: ModuleType) -> None:
    assert anchors.lacking(RELIED_ON) == []
    seams.Installation((), RELIED_ON).check_arguments(Namespace(seed=1, other=2))


def test_what_is_lacking_is_refused_with_the_list(fake: ModuleType) -> None:
    fake.Model.__init__ = lambda self: None
    del fake.Model.method
    fake.train = lambda model: None
    with pytest.raises(seams.UnsupportedMegatron) as refusal:
        seams.Installation(seams.load(), RELIED_ON)
    for line in ("have no assigned", "have no method", "does not take steps", "install megatron-core 0.19"):
        assert line in str(refusal.value)
    del fake.train, fake.Model
    lines = anchors.lacking(RELIED_ON)
    assert len(lines) == 3 and all(" has no " in line for line in lines)


def test_an_argument_that_is_lacking_is_refused(fake: ModuleType) -> None:
    installation = seams.Installation(seams.load(), RELIED_ON)
    with pytest.raises(seams.UnsupportedMegatron, match="arguments have no seed"):
        installation.check_arguments(Namespace())
