"""What all system tests share: one data set, and one undisturbed reference run for each kind of job."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import pathlib
import shutil
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
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "references"  # for all workers of pytest-xdist
    folder.mkdir(exist_ok=True)

    def get(job: Job) -> pathlib.Path:
        alone = dataclasses.replace(job, replicas=1, run_flags=(), timeouts=(), module="megatron_recover")
        run_dir = folder / hashlib.sha256(repr(alone).encode()).hexdigest()[:16]
        ended = run_dir.with_suffix(".ended")
        with open(run_dir.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not ended.exists():
                shutil.rmtree(run_dir, ignore_errors=True)  # of a try that failed
                run_job(alone, run_dir, data).expect(0)
                ended.touch()
        return run_dir

    return get
