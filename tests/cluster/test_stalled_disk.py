"""A disk that stands still for real (`tests/disk.py`): below the run directory it costs nothing but what it was to keep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_recover import trace
from megatron_recover.config import RecoverConfig
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.observe.verify.check import check, describe
from tests.cluster.jobs import Spec
from tests.cluster.running import FOR_EVER, Running, Start
from tests.disk import Disk, mounted

pytestmark = pytest.mark.timeout(240)

PATIENT = RecoverConfig(deadline_s=4500.0)
"""Nothing but the detector ends a rank."""
CHATTY = Path(__file__).with_name("chatty_toy.py")
_ROOM_BYTES = 256 * 2**20
"""Ten seconds of trace and prints at a hundred steps a second are 15 MB: the disk stands still here, but never runs full."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with mounted(tmp_path / "loop", num_bytes=_ROOM_BYTES) as made:
        yield made


def chatty(disk: Disk, tmp_path: Path, **deadlines: float) -> Spec:
    """A job whose ranks print a kilobyte a step into logs on that disk."""
    sums = tmp_path / "sums"
    sums.mkdir()
    return Spec(
        run_dir=str(disk.place / "run"), sums_dir=str(sums), steps=FOR_EVER, script=str(CHATTY), config=PATIENT,
        deadlines=deadlines, pace_s=0.002,
    )  # fmt: skip


def log_of(job: Running, replica: int, rank: int) -> str:
    return (Path(job.spec.run_dir) / "logs" / f"replica-{replica}-rank-{rank}.log").read_text()


def test_a_run_directory_that_stands_still_holds_up_no_rank_and_gets_all_that_was_printed(
    start: Start, disk: Disk, tmp_path: Path
) -> None:
    job = start(chatty(disk, tmp_path))
    disk.stall(on=True)
    began, reached = time.monotonic(), job.num_applied()
    while time.monotonic() - began < 3.5:  # longer than the detector waits for a rank that prints
        job.until(lambda reached=reached: job.num_applied() > reached + 20, "training to go on beside the disk")
        reached = job.num_applied()
    disk.stall(on=False)
    job.launcher.terminate()
    outcome = job.end()
    assert outcome.exit_code == ExitCode.INTERRUPTED, outcome.output
    outcome.assert_exactly_once()
    assert [event for event in outcome.of(trace.RankSilent) if event.verdict != "slow"] == []
    assert len(outcome.of(trace.Generation)) == 2, "the start and the request to end"
    for replica in range(3):
        for rank in range(2):
            printed = [line for line in log_of(job, replica, rank).splitlines() if line.startswith("step ")]
            assert [int(line.split()[1]) for line in printed] == list(range(1, len(outcome.sums(replica, rank)) + 1))
    verdict = check(job.spec.run_dir)
    assert verdict.holds, describe(verdict)
    job.assert_nothing_left()


def test_a_run_directory_that_never_answers_again_costs_trace_and_logs_only(start: Start, disk: Disk, tmp_path: Path) -> None:
    # The disk has 3 s at the end of the run. A launcher that waited once more for the recorder would wait for minutes.
    job = start(chatty(disk, tmp_path, trace_s=3.0, terminal_s=300.0))
    disk.stall(on=True)
    reached = job.num_applied()
    job.until(lambda: job.num_applied() > reached + 100, "training to go on beside the disk")
    job.launcher.terminate()
    code = job.launcher.wait(90.0)
    output = job.output.read_text()
    assert code == ExitCode.INTERRUPTED, output
    assert "the end of the trace is missing" in output and "the disk does not answer" in output
    assert "bytes that ranks have printed are missing in" in output
    lengths = {(Path(job.spec.sums_dir) / f"sums-{replica}-{rank}.jsonl").read_text().count("\n")
               for replica in range(3) for rank in range(2)}  # fmt: skip
    assert len(lengths) == 1, "the ranks ended at different steps"
