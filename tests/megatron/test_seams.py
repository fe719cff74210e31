"""Every seam fits the installed Megatron, and a Megatron that has changed is refused with all that does not fit."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from megatron_recover import packages
from megatron_recover.megatron.data.loaders import Loaders, MicrobatchCursor
from megatron_recover.megatron.seams import seams

SEAMS = seams.load()


@pytest.fixture
def data_loader() -> seams.Seam:
    return next(seam for seam in SEAMS if seam.name == "data_loader")


@pytest.fixture
def installation(data_loader: seams.Seam) -> Iterator[seams.Installation]:
    made = seams.Installation([data_loader])
    yield made
    made.remove()


def test_every_seam_fits() -> None:
    assert len(SEAMS) >= 11
    assert seams.misfits(SEAMS) == []


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_every_seam_says_why_and_names_what_exists(seam: seams.Seam) -> None:
    assert len(seam.reason.split()) > 15
    module, _, name = seam.replacement.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)


FUNCTIONS = [seam for seam in SEAMS if seam.parameters is not None and "." not in seam.target]


@pytest.mark.parametrize("seam", FUNCTIONS, ids=lambda seam: seam.name)
def test_no_other_module_of_the_training_loop_holds_the_original(seam: seams.Seam) -> None:
    """A module that imported the name and is not in `rebinds` would go on calling Megatron's own."""
    original = seams.Installation([seam]).originals[seam.name]
    callers = ("megatron.training.training", "megatron.training.checkpointing", "megatron.core.pipeline_parallel.schedules")
    holders = {name for name in callers if vars(importlib.import_module(name)).get(seam.target) is original}
    assert holders <= {seam.module, *seam.rebinds, original.__module__}


def test_misfits_are_all_listed_with_the_remedy(data_loader: seams.Seam) -> None:
    wrong = [
        msgspec.structs.replace(data_loader, parameters=("dataset", "samples")),
        msgspec.structs.replace(data_loader, target="build_the_loader"),
        msgspec.structs.replace(data_loader, versions=("0.15",)),
        msgspec.structs.replace(data_loader, rebinds=("megatron.training.checkpointing",)),
        msgspec.structs.replace(data_loader, parameters=None, attributes=("__name__", "nothing_like_this")),
    ]
    with pytest.raises(seams.UnsupportedMegatron) as refusal:
        seams.Installation(wrong)
    message = str(refusal.value)
    for text in (
        "takes (dataset, consumed_samples), not (dataset, samples)",
        "has no build_the_loader",
        "checked were 0.15",
        "megatron.training.checkpointing.build_pretraining_data_loader is not",
        "has no nothing_like_this",
        "pip install",
    ):
        assert text in message


def test_installs_what_the_seam_declares_and_nothing_else(installation: seams.Installation) -> None:
    training = importlib.import_module("megatron.training.training")
    original = training.build_pretraining_data_loader
    build = Loaders(MicrobatchCursor(), lambda: None).build
    with pytest.raises(RuntimeError, match="declares megatron_recover.megatron.data.loaders:Loaders.build"):
        installation.install({"data_loader": len})
    assert installation.missing() == ["data_loader"]
    installation.install({"data_loader": build})
    assert training.build_pretraining_data_loader == build
    assert installation.missing() == []
    installation.remove()
    assert training.build_pretraining_data_loader is original


def test_another_version_is_refused_before_any_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_recover.megatron.launch.preflight import preflight

    monkeypatch.setattr(packages, "version", lambda _: "0.16.1")
    with pytest.raises(ValueError, match="not supported; install megatron-core 0.19") as refusal:
        preflight([], num_replicas=2)
    assert "train_step: megatron-core is 0.16.1, checked were 0.19" in str(refusal.value)
