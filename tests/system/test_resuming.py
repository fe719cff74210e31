"""Real jobs resume from checkpoints: with the data that those were trained on, or with a flag that says otherwise."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil

import pytest

from megatron_recover.core.exit_code import ExitCode
from tests.system.jobs import Job, chaos_text, run_job

pytestmark = pytest.mark.timeout(300)


def test_other_data_is_refused_unless_it_was_changed_on_purpose(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    """Also where a writer was killed: what makes up for it says what the data was, too."""
    job, save = Job(steps=4, save_interval=2, train_iters=4), tmp_path / "checkpoints"
    killed = chaos_text("0 0 checkpoint_tracker occurrence=2")
    run_job(job, tmp_path / "run", data, save=save, chaos=killed).expect(0)
    told = [json.loads((save / f"iter_000000{iteration}" / "samples.json").read_text()) for iteration in (2, 4)]
    assert told[0] == told[1] and told[0]["--split"] == "90,5,5"

    other = copied(data, tmp_path / "other")
    with open(other.with_suffix(".bin"), "r+b") as file:
        file.write(bytes(64))
    longer = dataclasses.replace(job, steps=6, train_iters=6, extra=("--override-opt-param-scheduler",))
    refused = run_job(longer, tmp_path / "refused", other, save=save).expect(ExitCode.BAD_INPUT)
    before = told[0]["data set 1 of --data-path"]
    assert f"data set 1 of --data-path was {before} and is idx {before.split()[1]} bin " in refused.output
    assert "--recover-resume-data other" in refused.output and not (tmp_path / "refused").exists()

    on_purpose = dataclasses.replace(longer, extra=(*longer.extra, "--recover-resume-data", "other"))
    resumed = run_job(on_purpose, tmp_path / "on-purpose", other, save=save).expect(0)
    assert resumed.events("committed")[0]["label"] == "train 5" and "with other data from here on" in resumed.output
    now = json.loads((save / "iter_0000006" / "samples.json").read_text())
    assert now["data set 1 of --data-path"] != before

    # The same data elsewhere is the same data; a checkpoint that says nothing of it is taken.
    (save / "iter_0000006" / "samples.json").unlink()
    unknown = run_job(longer, tmp_path / "unknown", data, save=save).expect(0)
    assert "which does not say on which data it was trained" in unknown.output


def copied(prefix: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Copy an indexed data set; returns the prefix of the copy."""
    for ending in (".idx", ".bin"):
        shutil.copy(prefix.with_suffix(ending), target.with_suffix(ending))
    return target
