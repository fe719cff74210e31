"""A script that takes RANK for the number of a process of the job: warned before the job, and stopped on another's device."""

from __future__ import annotations

import pathlib

from megatron_recover.core.exit_code import ExitCode
from tests.system.jobs import ROOT, Job, run_job

SCRIPT = f"""\
import os
import runpy

import torch

import helper
from megatron_recover.megatron.commit import CommitLoop

if int(os.environ["RANK"]) == 0:
    helper.note()

parts = CommitLoop._parts


def parts_then_on_a_gpu(self, reduction):
    found = parts(self, reduction)  # the last work of a rank before it joins the job
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: int(os.environ["RANK"])
    return found


CommitLoop._parts = parts_then_on_a_gpu
runpy.run_path({str(ROOT / "scripts" / "pretrain_gpt.py")!r}, run_name="__main__")
"""
HELPER = """\
import os


def note():
    with open(f"{os.path.dirname(__file__)}/{os.environ['RANK']}.txt", "a") as file:
        file.write("noted")
"""


def test_places_are_named_before_the_job_and_no_rank_trains_on_the_device_of_another(
    tmp_path: pathlib.Path, data: pathlib.Path
) -> None:
    """The second replica's only rank has RANK 0, and the device 0 that it chooses by RANK is that of the first replica."""
    (tmp_path / "helper.py").write_text(HELPER)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    outcome = run_job(Job(), tmp_path / "run", data, script=script).expect(ExitCode.BAD_INPUT)
    assert [outcome.output.count(text) for text in (
        f"{script}:9: `helper.note` is for one rank here, and every replica has that rank; ask is_writer() of",
        f"{tmp_path / 'helper.py'}:5: `open` gets RANK, and every replica has that RANK; use MEGATRON_RECOVER_GLOBAL_RANK",
        "RANK and WORLD_SIZE are those of one replica: docs/how_to/what_rank_means.md",
        "megatron-recover run: this rank would train on cuda:0, and its own device is cuda:1: the script or --local-rank",
        "generation 1",
    )] == [1, 1, 1, 1, 0], outcome.output  # fmt: skip
