"""The disk with the data set stands still for real (`tests/disk.py`): who reads is named, nobody is ended, the run goes on."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests import forks
from tests.cluster.waiting import until_files
from tests.disk import Disk, mounted
from tests.system.jobs import ROOT, Job, check

pytestmark = pytest.mark.timeout(240)

NUM_DOCUMENTS, DOCUMENT_BYTES = 40, 200_000
"""So many that nearly every sample is on a page of its own, which nobody has read before."""
STEPS = 80


@pytest.fixture
def cold_data(tmp_path: pathlib.Path) -> Iterator[tuple[Disk, pathlib.Path]]:
    """A disk, and the prefix of a data set on it of which nothing is in memory."""
    with mounted(tmp_path / "loop", num_bytes=64 * 2**20) as disk:
        text, prefix = tmp_path / "text", disk.place / "text"
        text.mkdir()
        for number in range(NUM_DOCUMENTS):
            (text / f"{number}").write_bytes(random.Random(number).randbytes(DOCUMENT_BYTES))
        command = [sys.executable, "-m", "megatron_recover", "data", "--output", str(prefix), str(text)]
        code, said = forks.run(command, cwd=ROOT, deadline_s=120.0)
        assert code == 0, said
        disk.forget()
        yield disk, prefix


def events(run_dir: pathlib.Path, kind: str) -> list[dict]:
    """What the trace says so far."""
    path = run_dir / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [event for event in (json.loads(line) for line in lines if line.endswith("\n")) if event["event"] == kind]


@pytest.mark.parametrize(("replicas", "tp"), [(2, 1), (1, 1), (2, 2)])
def test_a_data_disk_that_stands_still_under_all_replicas_ends_none_of_them(
    replicas: int, tp: int, cold_data: tuple[Disk, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    """With tensor parallelism one rank reads; the other waits for the samples in Megatron's broadcast, in its forward."""
    disk, data = cold_data
    run_dir, output = tmp_path / "run", tmp_path / "output"
    job = Job(replicas=replicas, tp=tp, steps=STEPS, extra=("--data-cache-path", str(tmp_path / "cache")))
    command = [
        sys.executable, "-m", "megatron_recover", "run", "--replicas", str(replicas), "--run-dir", str(run_dir), "--",
        str(ROOT / "scripts" / "pretrain_gpt.py"), *job.megatron_flags(data, None),
    ]  # fmt: skip
    with open(output, "wb") as file:
        launcher = forks.start(command, cwd=ROOT, environment=os.environ, output=file.fileno())
    try:
        until_files(
            lambda: launcher.poll() is not None or len(events(run_dir, "applied")) >= 12 * replicas * tp,
            "training", run_dir, tmp_path, deadline_s=100.0,
        )  # fmt: skip
        assert launcher.poll() is None, output.read_text()
        disk.stall_reads(on=True)
        # With two replicas one may have what it needs in memory: it waits for the other, which is no hang.
        until_files(
            lambda: [each for each in events(run_dir, "rank_silent") if each["verdict"] == "hung"], "a hang", run_dir
        )  # fmt: skip
        ranks = [each for each in psutil.Process(launcher.pid).children(recursive=True) if each.name().startswith("replica-")]
        threads = [thread.id for rank in ranks for thread in rank.threads()]
        states = [pathlib.Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[0] for each in threads]
        assert "D" in states, f"nobody waits for the disk: {states}"
        # Longer than others that hang are given: they would be fenced after 0.4 s.
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(2.5)
        assert not events(run_dir, "fenced") and len(events(run_dir, "generation")) == 1
        disk.stall_reads(on=False)
        assert launcher.wait(120.0) == 0, output.read_text()
    finally:
        disk.stall_reads(on=False)
        launcher.kill()
        launcher.wait()
    silent = [each for each in events(run_dir, "rank_silent") if each["verdict"] == "hung"]
    assert {each["phase"] for each in silent} == {"data"}, silent
    # The state is that of the training thread. While the reading thread waits for the disk with the interpreter's lock, the
    # training thread wakes every 5 ms to ask for the lock.
    assert {each["state"] for each in silent} <= {"D", "S", "R"}, silent
    assert {each["rank"] for each in silent} == {0}
    siblings = {(each["replica"], 1) for each in silent if tp > 1}
    waiting = {(each["replica"], each["rank"]) for event in silent for each in event["waiting"] if each["phase"] == "forward"}
    assert waiting == siblings, "who waits for the samples is not known to wait"
    moved = {(each["replica"], each["rank"]) for each in events(run_dir, "rank_moved")}
    assert {(each["replica"], each["rank"]) for each in silent} <= moved
    assert "hung for" in output.read_text() and "in data" in output.read_text()
    assert len(events(run_dir, "generation")) == 1 and not events(run_dir, "fenced")
    assert json.loads((run_dir / "summary.json").read_text())["replicas_end"] == replicas
    verdict, report = check(run_dir)
    assert verdict == 0, report
