"""A replica whose data stalls is waited for, for however many sums: its page tells that from a fault. Real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_recover import trace
from megatron_recover.config import RecoverConfig
from megatron_recover.core.membership_messages import LossKind
from tests.cluster.jobs import ROOT, Spec, run, sums
from tests.cluster.reading_toy import FIFO, PID
from tests.cluster.running import Running

pytestmark = pytest.mark.timeout(240)

DEADLINES = {**sums(1.0), "stall_s": 1.4, "blame_s": 2.0, "finish_s": 10.0, "follow_s": 1.5}
NUM_SUMS = 6
"""So many run out before the data comes: more than twice what used to end the reader."""
Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Running] = []

    def begin(deadline_s: float = 1800.0, replicas: int = 3) -> Running:
        spec = Spec(
            run_dir=str(tmp_path / "run"), script=str(ROOT / "tests" / "cluster" / "reading_toy.py"), replicas=replicas,
            steps=8, deadlines=DEADLINES, config=RecoverConfig(deadline_s=deadline_s),
        )  # fmt: skip
        jobs.append(Running(spec))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def generations(job: Running) -> list[trace.Generation]:
    path = Path(job.spec.run_dir) / trace.EVENTS_FILE
    return [event for _, event in trace.read(path) if isinstance(event, trace.Generation)] if path.exists() else []


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_replica_whose_data_stalls_is_waited_for_and_the_run_ends_bit_identical(
    tmp_path: Path, start: Start, replicas: int
) -> None:
    job = start(replicas=replicas)
    members = tuple(range(replicas))
    job.until(lambda: len(generations(job)) > NUM_SUMS or generations(job)[-1:] and generations(job)[-1].roster != members,
              "sums that run out")  # fmt: skip
    if generations(job)[-1].roster == members:
        (Path(job.spec.run_dir) / FIFO).write_bytes(b"samples")
    outcome = job.end()
    outcome.assert_finished(members)
    assert [lost for event in outcome.of(trace.Generation) for lost in event.losses] == []
    told = [event for event in outcome.of(trace.Waiting) if 1 in event.replicas]
    assert [event.limit_s for event in told] == [1800.0], "it is told once, and not with each sum"
    quiet = run(Spec(run_dir=str(tmp_path / "quiet"), replicas=replicas, steps=8))
    assert [outcome.sums(0, rank) for rank in (0, 1)] == [quiet.sums(0, rank) for rank in (0, 1)]


def test_a_reader_that_is_killed_is_a_loss_at_once(start: Start) -> None:
    job = start()
    job.until(lambda: len(generations(job)) > 2, "sums that run out")
    os.kill(int((Path(job.spec.run_dir) / PID).read_text()), signal.SIGKILL)
    outcome = job.end()
    outcome.assert_finished([0, 2])
    [lost] = [lost for event in outcome.of(trace.Generation) for lost in event.losses]
    assert lost.kind is LossKind.PROCESS_ENDED


def test_a_reader_whose_data_never_comes_is_ended_after_the_deadline(start: Start) -> None:
    job = start(deadline_s=20.0)
    outcome = job.end(120.0)
    outcome.assert_finished([0, 2])
    [lost] = [lost for event in outcome.of(trace.Generation) for lost in event.losses]
    assert (lost.replica, lost.kind) == (1, LossKind.HUNG), "by the detector, and not by those that waited"
    silent = [event for event in outcome.of(trace.RankSilent) if event.verdict == "hung"]
    assert [(event.replica, event.rank, event.phase) for event in silent] == [(1, 0, "data")]
