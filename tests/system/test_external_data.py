"""An external loader is refused, unless the script's provider declares that samples follow from an index."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests.system.jobs import Job, chaos_text, check, run_job
from tests.system.test_endings import losses

pytestmark = pytest.mark.timeout(300)
SCRIPT = pathlib.Path(__file__).with_name("external_pretrain.py")
EXTERNAL = ("--dataloader-type", "external")


def test_declared_data_is_read_as_by_a_single_loader(
    tmp_path: pathlib.Path, data: pathlib.Path, reference: Callable[[Job], pathlib.Path]
) -> None:
    chaos, environment = chaos_text("1 0 backward step=2"), {"DECLARED": "1"}
    found = run_job(Job(extra=EXTERNAL), tmp_path / "run", data, script=SCRIPT, chaos=chaos, environment=environment).expect()
    assert len(found.events("fault")) == 1
    assert losses(found.run_dir) == losses(reference(Job()))
    verdict, report = check(found.run_dir)
    assert verdict == 0, report


def test_what_is_not_declared_is_refused_before_any_rank_starts(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    refused = run_job(Job(extra=EXTERNAL), tmp_path / "run", data, script=SCRIPT).expect(2)
    assert "--dataloader-type external is not supported with a loader that hands out samples in an order of" in refused.output
    assert "set samples_by_id = True on the provider" in refused.output
    assert not (tmp_path / "run").exists()
