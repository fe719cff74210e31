"""What all system tests share: one data set, and one undisturbed reference run for each kind of job."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

import pytest

from tests.system.jobs import Job, run_job, text_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Prefix of a small byte-level data set."""
    return text_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, data: pathlib.Path) -> Callable[[Job], pathlib.Path]:
    """The run directory of a job's failure-free run with one replica, made once.

    One replica computes all microbatches itself: that `exact` runs of any number of replicas equal it bit for bit is the claim.
    """
    made: dict[Job, pathlib.Path] = {}
    folder = tmp_path_factory.mktemp("reference")

    def get(job: Job) -> pathlib.Path:
        alone = dataclasses.replace(job, replicas=1, run_flags=(), timeouts=(), module="megatron_recover")
        if alone not in made:
            run_dir = folder / f"run{len(made)}"
            run_job(alone, run_dir, data).expect(0)
            made[alone] = run_dir
        return made[alone]

    return get
