"""At every instant of a save, and whoever is killed there, some checkpoint can be loaded; the next writer makes up for it."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_recover import trace
from megatron_recover.megatron.checkpoint import TRACKER, Checkpoints, TrackerFile

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.megatron.preload"])


class Files:
    """What Megatron's `maybe_msc` is where there is no object store."""

    open, os = staticmethod(open), os


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(tracker: Path, instant: str, ours: bool) -> None:
    """Megatron's way of naming a checkpoint, killed at an instant of it."""
    files = TrackerFile(Files(), die if instant == "written" else lambda: None) if ours else Files()
    with files.open(str(tracker), "w") as file:
        if instant == "opened":
            die()
        file.write("20")


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("instant", "ours", "named"),
    [("opened", True, "10"), ("written", True, "10"), ("never", True, "20"), ("opened", False, "")],
    ids=["opened", "written", "not killed", "upstream alone loses all"],
)
def test_tracker_names_the_old_or_the_new_checkpoint_at_every_instant(
    instant: str, ours: bool, named: str, tmp_path: Path
) -> None:
    tracker = tmp_path / TRACKER
    tracker.write_text("10")
    process = PROCESSES.Process(target=save_and_die, args=(tracker, instant, ours))
    process.start()
    process.join(60)
    assert process.exitcode == (0 if instant == "never" else -signal.SIGKILL)
    assert tracker.read_text() == named


def test_other_files_are_opened_as_ever(tmp_path: Path) -> None:
    files = TrackerFile(Files(), die)
    with files.open(str(tmp_path / "progress.txt"), "w") as file:
        file.write("text")
    (tmp_path / TRACKER).write_text("10")
    with files.open(str(tmp_path / TRACKER), "r") as file:
        assert file.read() == "10"
    assert files.os.path.isfile(tmp_path / "progress.txt")


# --- Who saves -----------------------------------------------------------------------------------------------------------


class Replica:
    """One replica of one rank and its share of saving; `save` is Megatron's."""

    def __init__(self, number: int, folder: Path, log: trace.EventLog, writer: Callable[[], int]) -> None:
        self.replica, self.rank, self.step = number, 0, 0
        self._writer, self._folder = writer, folder
        self.fail = False
        self.get_args = lambda: Namespace(save=str(folder), load=str(folder))
        self.checkpoints = Checkpoints(self, self.save, self.get_args, log=log, faults=None)

    def is_writer(self) -> bool:
        return self._writer() == self.replica

    def save(self, iteration: int, *_: Any) -> None:
        target = self._folder / f"iter_{iteration:07d}"
        target.mkdir()
        (target / f"by_{self.replica}").touch()
        if self.fail:
            raise RuntimeError("killed here")
        with TrackerFile(Files(), lambda: None).open(str(self._folder / TRACKER), "w") as file:
            file.write(str(iteration))


@pytest.fixture
def world() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Job:
    """Two replicas that share a folder; the lowest live one writes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.alive = folder / "ck", [0, 1]
        self._log = folder / "events.jsonl"
        self.log = trace.EventLog(self._log, 0.0)
        self.first, self.second = (Replica(number, self.folder, self.log, lambda: min(self.alive)) for number in (0, 1))

    def saves(self) -> dict[str, list[str]]:
        return {each.name: sorted(os.listdir(each)) for each in sorted(self.folder.glob("iter_*"))}

    def named(self) -> str:
        return (self.folder / TRACKER).read_text()

    def phases(self) -> list[tuple[int, int, str]]:
        events = map(json.loads, self._log.read_text().splitlines())
        return [(event["replica"], event["iteration"], event["phase"]) for event in events]

    def kill_first_in_save(self, iteration: int) -> None:
        self.first.fail = True
        with pytest.raises(RuntimeError):
            self.first.checkpoints.save_checkpoint_and_time(iteration)
        self.alive.remove(0)


@pytest.fixture
def job(world: None, tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_one_replica_saves(job: Job) -> None:
    for replica in (job.second, job.first):
        replica.checkpoints.save_checkpoint_and_time(10)
    assert (job.saves(), job.named()) == ({"iter_0000010": ["by_0"]}, "10")
    job.alive.remove(0)
    job.second.checkpoints.make_up(11)
    assert job.saves() == {"iter_0000010": ["by_0"]}, "nothing was owed"


def test_what_was_loaded_is_not_saved_again_before_anything_was_trained(job: Job) -> None:
    job.first.checkpoints.save_checkpoint_and_time(10)
    for replica in (job.first, job.second):  # the same job, started again
        replica.step = -1
        replica.checkpoints = Checkpoints(replica, replica.save, replica.get_args, log=job.log, faults=None)
        replica.checkpoints.save_checkpoint_and_time(10)
        replica.checkpoints.settle(lambda number: pytest.fail("nothing is owed"))
    assert job.phases() == [(0, 10, "started"), (0, 10, "finished")]
    job.first.step = 0
    with pytest.raises(FileExistsError):
        job.first.checkpoints.save_checkpoint_and_time(10)


def test_next_writer_removes_the_partial_one_and_saves_at_once(job: Job) -> None:
    for iteration in (10, 20):
        job.second.checkpoints.save_checkpoint_and_time(iteration)
    job.first.checkpoints.save_checkpoint_and_time(10)
    job.second.checkpoints.make_up(20)
    job.kill_first_in_save(20)
    assert job.named() == "10"
    job.second.checkpoints.make_up(21)
    assert (job.saves(), job.named()) == ({"iter_0000010": ["by_0"], "iter_0000021": ["by_1"]}, "21")
    job.second.checkpoints.save_checkpoint_and_time(21)  # due at the same iteration: there already
    assert job.phases()[-3:] == [(1, 20, "removed_partial"), (1, 21, "started"), (1, 21, "finished")]


def test_writer_that_dies_in_the_last_save_is_made_up_for(job: Job) -> None:
    job.second.checkpoints.save_checkpoint_and_time(30)
    rounds: list[int] = []

    def meet(number: int) -> None:
        rounds.append(number)
        if number == 0:
            job.kill_first_in_save(30)

    job.second.checkpoints.settle(meet)
    assert rounds == [0, 1]
    assert (job.saves(), job.named()) == ({"iter_0000030": ["by_1"]}, "30")


def test_restart_does_not_mix_with_what_a_dead_job_left(job: Job) -> None:
    (job.folder / "iter_0000010").mkdir(parents=True)
    (job.folder / "iter_0000010" / "half").touch()
    (job.folder / "iter_0000040").mkdir()
    job.first.checkpoints.save_checkpoint_and_time(10)
    assert job.saves() == {"iter_0000010": ["by_0"], "iter_0000040": []}, "only what is in the way is removed"


def test_two_writers_exclude_each_other(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only seemed dead holds the folder until it is killed."""
    monkeypatch.setattr("megatron_recover.megatron.checkpoint._LOCK_DEADLINE_S", 0.2)
    job.folder.mkdir()
    with open(job.folder / ".writer.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="does another job save"):
            job.first.checkpoints.save_checkpoint_and_time(10)
    job.first.checkpoints.save_checkpoint_and_time(10)
    assert job.named() == "10"
