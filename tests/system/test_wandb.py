"""With `--wandb-project` a job is one run of the real package (offline), whoever dies, and also once it is resumed."""

from __future__ import annotations

import json
import pathlib
import struct
from collections.abc import Iterator

import pytest

from tests.system.jobs import Job, chaos_text, check, run_job

pytestmark = pytest.mark.timeout(300)


def records(log: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: blocks of 32 KiB with chunks, each with checksum, length and type, behind 7 bytes."""
    position, parts = 7, b""
    while position + 7 <= len(log):
        if (left := 32768 - position % 32768) < 7:  # a header never crosses blocks
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", log, position)
        parts += log[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def logged(folder: pathlib.Path) -> tuple[set[str], dict[int, float], set[str]]:
    """Run ids, the loss of each iteration, and the names of artifacts, in all files of offline runs."""
    from wandb.proto import wandb_internal_pb2

    ids: set[str] = set()
    losses: dict[int, float] = {}
    artifacts: set[str] = set()
    for file in sorted(folder.rglob("*.wandb")):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            elif record.WhichOneof("record_type") == "artifact":
                artifacts.update(record.artifact.aliases)
            for item in record.history.item:
                if "lm loss" in (item.key, *item.nested_key):
                    losses.setdefault(record.history.step.num, json.loads(item.value_json))
    return ids, losses, artifacts


def test_a_job_is_one_run_whoever_dies_and_also_once_it_is_resumed(
    tmp_path: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    save = tmp_path / "save"
    job = Job(
        pp=2, steps=5, save_interval=5,
        extra=(
            *("--wandb-project", "p", "--wandb-entity", "e", "--wandb-exp-name", "n", "--async-save"),
            *("--tensorboard-dir", str(tmp_path / "board")),
        ),
    )  # fmt: skip
    outcome = run_job(job, tmp_path / "run", data, chaos=chaos_text("0 1 optimizer step=2"), save=save).expect()
    verdict, report = check(outcome.run_dir)
    assert verdict == 0, report
    ids, losses, artifacts = logged(save / "wandb")
    assert sorted(losses) == [1, 2, 3, 4, 5] and len(ids) == 1, (ids, losses)
    assert artifacts >= {"iter_0000005"}, "the last checkpoint gets its name when training is over"
    assert "of wandb failed" not in "".join(file.read_text() for file in outcome.run_dir.rglob("*.log"))
    longer = Job(pp=2, steps=7, extra=(*job.extra, "--override-opt-param-scheduler"))
    run_job(longer, tmp_path / "again", data, save=save).expect()
    resumed, losses, _ = logged(save / "wandb")
    assert resumed == ids and sorted(losses) == [1, 2, 3, 4, 5, 6, 7], (resumed, losses)


def test_a_package_that_fails_costs_no_rank(
    tmp_path: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "neither")
    outcome = run_job(Job(steps=2, extra=("--wandb-project", "p")), tmp_path / "run", data, save=tmp_path / "save").expect()
    assert (
        "wandb could not begin the run, so nothing is logged there"
        in (outcome.run_dir / "logs" / "replica-0-rank-0.log").read_text()
    )


def test_a_project_without_a_folder_is_refused(tmp_path: pathlib.Path, data: pathlib.Path) -> None:
    outcome = run_job(Job(steps=2, extra=("--wandb-project", "p")), tmp_path / "run", data).expect(2)
    assert "--wandb-project needs a folder for its files; give --wandb-save-dir or --save" in outcome.output
