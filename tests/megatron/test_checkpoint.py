"""At every instant of a save, and whoever is killed there, some checkpoint can be loaded; the next writer makes up for it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import operator
import os
import re
import shutil
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from megatron_recover import trace
from megatron_recover.core import request
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.policy import untrained
from megatron_recover.core.request import MISCOUNTED, SAVED, UNSAVED, missing
from megatron_recover.deadlines import Deadlines
from megatron_recover.host import lock_file
from megatron_recover.host.process_stat import state_of
from megatron_recover.megatron.checkpoint import checkpoints as module
from megatron_recover.megatron.checkpoint import save_folder
from megatron_recover.megatron.checkpoint.checkpoints import Checkpoints
from megatron_recover.megatron.checkpoint.save_folder import TRACKER, SaveFolder, samples_of
from megatron_recover.megatron.checkpoint.tracker_file import TrackerFile
from megatron_recover.trainer.state_window import StateWindow
from tests.forks import CONTEXT


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
    process = CONTEXT.Process(target=save_and_die, args=(tracker, instant, ours))
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


class Killed(BaseException):
    """Nothing of the process runs after this."""


class Replica:
    """One replica of one rank and its share of saving; `save` and `write` are Megatron's."""

    def __init__(self, number: int, folder: Path, log: trace.EventLog, writer: Callable[[], int]) -> None:
        self.replica, self.rank, self.step, self.requests = number, 0, 0, frozenset()
        self.stays = False
        self.loaded = 0
        """The iteration that Megatron has loaded."""
        self.is_newcomer = False
        self.ckpt_step: int | None = None
        self._writer, self._folder, self._log = writer, folder, log
        self.error: BaseException | None = None
        """What happens behind the first file of a save."""
        self.refused, self.is_last, self.used = "", False, list[str]()
        """Why it must not name a checkpoint, and its attempts to do so."""
        self.num_saving, self.is_saving, self.asked = 0, False, []
        self.agreed: list[int] = []
        self.disagrees = False
        """Its state has drifted: no record carries its digest."""
        self.after_save: Callable[[], None] = lambda: None
        self.start()

    def start(self) -> None:
        """As the process does, before anything was saved."""
        originals = {
            "save_checkpoint": self.save,
            "write_checkpoint": self.write,
            "checkpoint_name": lambda path, iteration, **_: f"{path}/iter_{iteration:07d}",
        }
        save = str(self._folder)
        self.checkpoints = Checkpoints(
            self, originals, self.args, agree=self.agree, save=save, samples={"--seed": "1"},
            deadlines=replace(Deadlines.of(), save_s=0.0, lock_s=0.2), log=self._log, faults=None,
            is_newcomer=self.is_newcomer,
        )  # fmt: skip

    def args(self) -> Namespace:
        save = str(self._folder)
        return Namespace(
            save=save, load=save, ckpt_format="torch_dist", iteration=self.loaded, finetune=False, ckpt_step=self.ckpt_step
        )

    def is_writer(self) -> bool:
        return self._writer() == self.replica

    def is_last_generation(self) -> bool:
        return self.is_last

    def naming_refusal(self) -> str:
        return self.refused

    def begin_naming(self) -> str:
        if not self.refused:
            self.used.append("began")
        return self.refused

    def end_naming(self) -> int | None:
        self.used.append("ended")
        return self.used.count("began") or None

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        self.num_saving, self.is_saving = self.num_saving + 1, True
        yield
        self.is_saving = False

    def request(self, request: str) -> None:
        self.asked.append(request)

    def agree(self, iteration: int, *_: Any) -> None:
        """The step `save N` of all replicas; who is outvoted in it never returns from it."""
        assert not self.is_saving, "it writes already"
        if self.disagrees:
            raise Killed
        self.agreed.append(iteration)

    def save(self, iteration: int, *args: Any) -> None:
        self.checkpoints.write_checkpoint(iteration, *args)

    def write(self, iteration: int, *_: Any) -> None:
        target = Path(self.checkpoints.checkpoint_name(str(self._folder), iteration, return_base_dir=True))
        assert not any(target.iterdir()), "Megatron refuses a folder that is not empty"
        (target / "a").write_text(f"{self.replica}")
        if self.error is not None:
            raise self.error
        (target / "deeper").mkdir()
        (target / "deeper" / "b").write_text(f"{self.replica}")
        names = TrackerFile(Files(), self.checkpoints.before_naming, self.checkpoints.after_naming)
        with names.open(str(self._folder / TRACKER), "w") as file:
            file.write(str(iteration))
        self.after_save()


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
        self._event_log = trace.EventLog(self._log, 0.0)
        self.first, self.second = (Replica(number, self.folder, self._event_log, lambda: min(self.alive)) for number in (0, 1))
        self.others: list[Replica] = []

    def add(self, number: int) -> Replica:
        """One more replica."""
        self.alive.append(number)
        self.others.append(Replica(number, self.folder, self._event_log, lambda: min(self.alive)))
        return self.others[-1]

    def meet(self, number: int) -> None:
        """A common step at the end: its record carries what anybody alive has asked for."""
        living = [each for each in (self.first, self.second, *self.others) if each.replica in self.alive]
        for replica in living:
            replica.requests |= frozenset(request for each in living for request in each.asked)

    def make_up(self, *iterations: int) -> None:
        """Step boundaries of all live replicas, between which a record carries what they have asked for."""
        for iteration in iterations:
            for replica in (self.first, self.second, *self.others):
                if replica.replica in self.alive:
                    replica.checkpoints.make_up(iteration)
            self.meet(0)

    def saves(self) -> dict[str, str]:
        """Checkpoints by name: who wrote them, or `half`."""
        return {each.name: content(each) for each in sorted(self.folder.glob("iter_*"))}

    def named(self) -> str:
        return (self.folder / TRACKER).read_text()

    def partial(self) -> list[str]:
        """What is left below `.partial`, by its name in the folder of its save."""
        left = [(each, sorted(os.listdir(each))) for each in (self.folder / ".partial").iterdir()]
        return sorted(name for each, names in left for name in names or [each.name] if name != "begun")

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def phases(self) -> list[tuple[int, int, str]]:
        return [(event["replica"], event["iteration"], event["phase"]) for event in self.events()]

    def save(self, iteration: int) -> None:
        for replica in (self.second, self.first):
            replica.checkpoints.save_checkpoint_and_time(iteration)

    def kill_first_in_save(self, iteration: int) -> None:
        self.first.error = Killed()
        with pytest.raises(Killed):
            self.first.checkpoints.save_checkpoint_and_time(iteration)
        self.alive.remove(0)

    def older(self, *iterations: int, named: int) -> None:
        """Complete checkpoints that an older job left, which this one, just starting, finds."""
        for iteration in iterations:
            target = self.folder / f"iter_{iteration:07d}"
            (target / "deeper").mkdir(parents=True)
            for name in ("a", "deeper/b"):
                (target / name).write_text("older")
        (self.folder / TRACKER).write_text(str(named))
        self.first.start()
        self.second.start()


def content(checkpoint: Path) -> str:
    """Who wrote it, if it is whole and by one writer."""
    files = {str(each.relative_to(checkpoint)): each.read_text() for each in checkpoint.rglob("*") if each.is_file()}
    tells = files.pop("samples.json", "") == '{"--seed": "1"}'
    is_whole = files.keys() == {"a", "deeper/b"} and len(set(files.values())) == 1 and tells == (files["a"] != "older")
    return files["a"] if is_whole else "half"


@pytest.fixture
def job(world: None, tmp_path: Path) -> Job:
    return Job(tmp_path)


# --- Grants --------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_without_a_grant_is_written_and_gets_its_name_when_the_grant_comes(job: Job) -> None:
    job.save(10)
    job.first.refused = "no grant"
    job.save(20)
    assert (job.saves(), job.named(), job.partial()) == ({"iter_0000010": "0"}, "10", ["iter_0000020"])
    job.make_up(21)
    assert job.named() == "10" and job.first.asked == [], "it is asked for no second save"
    job.first.refused = ""
    job.make_up(22)
    assert (job.saves(), job.named(), job.partial()) == ({"iter_0000010": "0", "iter_0000020": "0"}, "20", [])
    assert job.first.num_saving == 3, "nothing was written a second time"
    assert [phase for _, _, phase in job.phases()] == ["started", "finished", "started", "unnamed", "finished"]
    assert job.first.used == ["began", "ended", "ended", "began", "ended"], "one grant a name, and each attempt is confirmed"
    job.make_up(23)
    assert job.first.asked == []


def test_the_next_save_point_replaces_a_checkpoint_without_a_name(job: Job) -> None:
    job.first.refused = "no grant"
    job.save(20)
    job.make_up(21)
    job.save(30)
    assert job.partial() == ["iter_0000030"] and job.first.agreed == [20, 30]
    job.first.refused = ""
    job.make_up(31)
    assert (job.saves(), job.named(), job.partial()) == ({"iter_0000030": "0"}, "30", [])


def test_a_writer_without_a_grant_that_dies_is_made_up_for(job: Job) -> None:
    job.first.refused = "no grant"
    job.save(20)
    job.first.checkpoints._lock.close()  # as the kernel does at its death
    job.alive.remove(0)
    job.make_up(21, 22)
    assert (job.saves(), job.named(), job.partial()) == ({"iter_0000022": "1"}, "22", [])


def test_the_end_of_training_waits_for_a_grant_and_gives_up_as_for_a_full_disk(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.first.refused = "no grant"
    job.first.checkpoints._deadlines = replace(job.first.checkpoints._deadlines, save_s=30.0)
    job.save(20)
    monkeypatch.setattr("time.sleep", lambda _: setattr(job.first, "refused", ""))
    job.first.checkpoints.settle(job.meet)
    assert job.named() == "20" and SAVED in job.first.requests
    monkeypatch.undo()
    job.first.checkpoints._deadlines = replace(job.first.checkpoints._deadlines, save_s=0.0)
    job.first.refused, job.first.requests, job.first.asked = "no grant", frozenset(), []
    job.save(30)
    job.first.checkpoints.settle(job.meet)
    assert job.named() == "20" and UNSAVED in job.first.requests


def test_without_a_coordinator_nobody_waits_for_a_grant_that_cannot_come(job: Job) -> None:
    job.first.refused, job.first.is_last = "no grant", True
    job.first.checkpoints._deadlines = replace(job.first.checkpoints._deadlines, save_s=1000.0)
    job.save(20)
    job.first.checkpoints.settle(job.meet)
    assert UNSAVED in job.first.requests


def test_a_writer_without_a_grant_keeps_the_other_replicas_waiting_for_less_than_they_tolerate(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a round the members may learn that nobody has a coordinator, and then the writer may name."""
    checkpoints = job.first.checkpoints
    checkpoints._deadlines = replace(checkpoints._deadlines, save_s=1000.0, slowest_s=4.8)
    now, met = [0.0], [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def meet(number: int) -> None:
        met.append(now[0])
        if number == 3:  # their votes have said so
            job.first.refused, job.first.is_last = "", True
        job.meet(number)

    job.first.refused = "no grant"
    job.save(20)
    checkpoints.settle(meet)
    assert max(after - before for before, after in itertools.pairwise(met)) <= 0.75 * 4.8
    assert job.named() == "20" and SAVED in job.first.requests and len(met) == 6


def _lapse_while_publishing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first writer's lease lapse while the disk syncs what it publishes."""
    publish = SaveFolder.publish

    def slowly(folder: SaveFolder) -> None:
        publish(folder)
        job.first.refused = "its lease has lapsed"

    monkeypatch.setattr(SaveFolder, "publish", slowly)


def test_a_writer_that_lost_its_right_while_it_published_moves_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.save(10)
    _lapse_while_publishing(job, monkeypatch)
    job.save(20)
    assert job.named() == "10" and job.phases()[-1] == (0, 20, "unnamed")


@pytest.mark.parametrize("latest", [20, 30])
def test_a_late_grant_names_what_was_published_and_not_the_older_branch(
    job: Job, monkeypatch: pytest.MonkeyPatch, latest: int
) -> None:
    """Published and then refused, it has changed places with the older one; a second publishing would change them back."""
    job.older(10, 20, 30, named=latest)
    _lapse_while_publishing(job, monkeypatch)
    job.save(20)
    assert job.named() == str(latest) and job.phases()[-1] == (0, 20, "unnamed")
    job.first.refused = ""
    job.make_up(21)
    assert (job.saves()["iter_0000020"], job.named(), job.partial()) == ("0", "20", [])


def test_a_writer_that_wakes_under_a_grant_does_not_name_what_is_older_than_the_newest(job: Job) -> None:
    job.save(10)
    job.first.refused = "no grant"
    job.save(20)
    (job.folder / TRACKER).unlink()
    (job.folder / TRACKER).write_text("30")  # another writer's, on a host with locks of its own
    job.first.refused = ""
    job.make_up(21)
    assert job.named() == "30" and job.phases()[-1] == (0, 20, "failed")


def name_and_stop(tracker: Path, text: str, stops: bool) -> None:
    """Name a checkpoint with every right, but stand still behind the last check, just before the rename."""
    files = TrackerFile(Files(), (lambda: os.kill(os.getpid(), signal.SIGSTOP)) if stops else lambda: None)
    with files.open(str(tracker), "w") as file:
        file.write(text)


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[BaseProcess]:
    """Yield a process that names iteration 20 in the place of 10, stopped behind its last check.

    No lock excludes others, as on two hosts of a file system whose locks do not work.
    """
    tracker = tmp_path / TRACKER
    tracker.write_text("10")
    process = CONTEXT.Process(target=name_and_stop, args=(tracker, "20", True))
    process.start()
    assert process.pid is not None
    while state_of(process.pid) != "T":
        assert process.is_alive()
        time.sleep(0.02)
    yield process
    process.kill()


@pytest.mark.timeout(90)
def test_a_writer_that_stood_still_between_check_and_rename_moves_nothing_back(tmp_path: Path, frozen: BaseProcess) -> None:
    tracker = tmp_path / TRACKER
    [unfinished] = tmp_path.glob("*.partial")
    assert unfinished.read_text() == "20"
    other = CONTEXT.Process(target=name_and_stop, args=(tracker, "30", False))
    other.start()
    other.join(60)
    assert (other.exitcode, tracker.read_text()) == (0, "30")
    go_on(frozen)
    assert tracker.read_text() == "30" and not list(tmp_path.glob("*.partial"))


@pytest.mark.timeout(90)
def test_a_writer_that_was_excluded_while_it_stood_still_excludes_nobody(tmp_path: Path, frozen: BaseProcess) -> None:
    tracker, files = tmp_path / TRACKER, TrackerFile(Files(), lambda: None)
    for text in ("30", "40"):
        with files.open(str(tracker), "w") as file:
            file.write(text)
            if text == "40":
                go_on(frozen)
        assert tracker.read_text() == text
    assert not list(tmp_path.glob("*.partial"))


def go_on(frozen: BaseProcess) -> None:
    """Continue a writer that another one has excluded meanwhile; its rename finds no file."""
    assert frozen.pid is not None
    os.kill(frozen.pid, signal.SIGCONT)
    frozen.join(60)
    assert frozen.exitcode == 1


def test_one_replica_saves_and_says_so(job: Job) -> None:
    job.save(10)
    assert (job.saves(), job.named(), job.partial()) == ({"iter_0000010": "0"}, "10", [])
    assert (job.first.num_saving, job.second.num_saving) == (1, 0)
    job.alive.remove(0)
    job.make_up(11, 12)
    assert job.saves() == {"iter_0000010": "0"}, "nothing was owed"


@pytest.mark.parametrize("loaded", [0, 10])
def test_where_a_replica_begins_is_recorded(job: Job, loaded: int) -> None:
    job.first.loaded = loaded
    job.first.checkpoints.tell_what_was_loaded()
    assert job.phases() == [(0, loaded, "loaded")]
    job.first.checkpoints._get_args = lambda: Namespace(load="X", iteration=0, finetune=True)
    job.first.checkpoints.tell_what_was_loaded()
    assert job.phases() == [(0, loaded, "loaded")], "of a model that is fine-tuned, X has what it begins with"


def test_a_newcomer_has_loaded_nothing_and_knows_what_the_others_have_agreed_on(job: Job) -> None:
    """It begins with an iteration that the others have trained, so that this one is saved if it is asked for."""
    job.first.checkpoints.save_checkpoint_and_time(8)
    agreed = {name: each.get() for name, each in job.first.checkpoints.carried().items()}
    assert agreed == {"agreed_save": 8}
    newcomer = job.second
    newcomer.loaded, newcomer.is_newcomer = 10, True
    newcomer.start()
    newcomer.checkpoints.tell_what_was_loaded()
    assert not [phase for phase in job.phases() if phase[2] == "loaded"]
    for name, each in newcomer.checkpoints.carried().items():
        each.put(agreed[name])
    newcomer.agreed.clear()
    for iteration in (8, 10):
        newcomer.checkpoints.save_checkpoint_and_time(iteration)
    assert newcomer.agreed == [10]


def test_what_was_loaded_is_not_saved_again_before_anything_was_trained(job: Job) -> None:
    job.first.checkpoints.save_checkpoint_and_time(10)
    for replica in (job.first, job.second):  # the same job, started again
        replica.loaded = 10
        replica.start()
        replica.checkpoints.save_checkpoint_and_time(10)
        replica.checkpoints.settle(lambda number: pytest.fail("nothing is owed"))
        replica.step = 1  # one that was given up, perhaps, or an evaluation: nothing was trained
        replica.checkpoints.save_checkpoint_and_time(10)
    assert job.phases() == [(0, 10, "started"), (0, 10, "finished")]
    job.save(11)
    assert job.phases()[2:] == [(0, 11, "started"), (0, 11, "finished")]


@pytest.mark.parametrize("loaded", [0, 10])
@pytest.mark.parametrize("has_folder", [True, False])
def test_where_a_job_gives_up_before_it_has_trained_the_end_says_that_nothing_is_lost(
    job: Job, loaded: int, has_folder: bool
) -> None:
    """As it was, the end of the job said of the state that was loaded that it was not saved."""
    met: list[int] = []
    job.first.loaded, job.first.requests = loaded, frozenset({MISCOUNTED})
    if not has_folder:
        job.first.checkpoints._folder = None
    job.first.checkpoints.settle(met.append, has_trained=False)
    what = f"what was loaded from iteration 10 of --load {job.folder}" if loaded else "the one that training begins with"
    assert (job.first.asked, met) == ([request.nothing_trained(what)], [0]), "it rides in the record of the end"
    assert untrained(job.first.asked) == what
    job.first.checkpoints.settle(lambda number: pytest.fail("what was trained is lost"), has_trained=True)
    job.first.requests = frozenset()
    job.first.checkpoints.settle(lambda number: pytest.fail("nothing went wrong"), has_trained=False)


def test_a_step_that_is_given_up_saves_nothing_where_nothing_was_trained_or_there_is_no_place(job: Job) -> None:
    """Megatron asks for a save then whether or not it has a --save, and also of iteration 0, which it cannot load."""
    job.save(0)
    job.first.checkpoints._folder = None
    job.first.checkpoints.save_checkpoint_and_time(10)
    assert (job.saves(), job.first.agreed, job.second.agreed) == ({}, [], [])


def test_what_was_loaded_from_elsewhere_is_saved_here(job: Job) -> None:
    """A folder that another job left names the same iteration: what it has is not what was loaded."""
    job.older(10, named=10)
    save, load = str(job.folder), str(job.folder.with_name("other"))
    job.first.checkpoints._get_args = lambda: Namespace(
        save=save, load=load, ckpt_format="torch_dist", iteration=10, ckpt_step=None
    )
    job.first.checkpoints.save_checkpoint_and_time(10)
    assert job.saves() == {"iter_0000010": "0"}


def test_only_what_is_being_written_is_looked_for_among_the_partial(job: Job) -> None:
    def name(folder: Path) -> str:
        return job.first.checkpoints.checkpoint_name(str(folder), 10)

    def write(iteration: int, *_: Any) -> None:
        during.extend((name(job.folder), name(elsewhere)))
        Replica.write(job.first, iteration)

    during: list[str] = []
    elsewhere = job.folder.with_name("other")
    job.first.write = write
    job.first.start()
    job.first.checkpoints.save_checkpoint_and_time(10)
    assert [re.sub("[0-9a-f]{16}", "own", path) for path in during] == [
        f"{job.folder}/.partial/own/iter_0000010", f"{elsewhere}/iter_0000010"
    ]  # fmt: skip
    assert save_folder.final(f"file://{during[0]}") == f"file://{job.folder}/iter_0000010"
    assert name(job.folder) == f"{job.folder}/iter_0000010", "it is complete now"
    job.first.error = Killed()
    with pytest.raises(Killed):
        job.first.checkpoints.save_checkpoint_and_time(11)
    assert job.first.checkpoints.checkpoint_name(str(job.folder), 11) == f"{job.folder}/iter_0000011", "it is not being written"


def test_next_writer_removes_the_partial_one_and_saves_at_once(job: Job) -> None:
    for iteration in (10, 20):
        job.second.checkpoints.save_checkpoint_and_time(iteration)
    job.first.checkpoints.save_checkpoint_and_time(10)
    job.kill_first_in_save(20)
    assert (job.named(), job.partial()) == ("10", ["iter_0000020"])
    job.make_up(21)
    assert job.named() == "10", "it saved what nobody had agreed on"
    job.make_up(22)
    assert (job.saves(), job.named()) == ({"iter_0000010": "0", "iter_0000022": "1"}, "22")
    job.second.checkpoints.save_checkpoint_and_time(22)  # due at the same iteration: there already
    assert job.phases()[-3:] == [(1, 20, "removed_partial"), (1, 22, "started"), (1, 22, "finished")]


def test_what_was_made_up_for_is_owed_no_more(job: Job) -> None:
    job.second.checkpoints.save_checkpoint_and_time(20)
    job.kill_first_in_save(20)
    job.make_up(21, 22, 23, 24)
    assert job.saves() == {"iter_0000022": "1"} and job.second.agreed == [20, 22]


def test_what_another_replica_made_up_for_is_owed_no_more(job: Job) -> None:
    job.second.checkpoints.save_checkpoint_and_time(20)
    job.first.requests = job.second.requests = frozenset({missing(20)})
    job.first.checkpoints._agreed = 20  # as of a writer that found 20 missing
    job.make_up(21)
    job.alive.remove(0)
    job.make_up(22, 23)
    assert job.saves() == {"iter_0000021": "0"} and job.second.agreed == [20, 21]


def test_all_replicas_begin_the_save_that_a_record_asks_for_and_only_the_writer_writes(job: Job) -> None:
    third = job.add(2)
    for replica in (job.second, third):
        replica.checkpoints.save_checkpoint_and_time(20)
    job.kill_first_in_save(20)
    job.make_up(21, 22)
    assert job.second.agreed == third.agreed == [20, 22] and job.saves() == {"iter_0000022": "1"}
    job.alive.remove(1)  # the next to become the writer asks for nothing that is there
    job.make_up(23, 24)
    assert not third.asked and third.agreed == [20, 22]


def test_a_second_death_in_a_save_is_made_up_for_as_well(job: Job) -> None:
    third = job.add(2)
    for replica in (job.second, third):
        replica.checkpoints.save_checkpoint_and_time(20)
    job.kill_first_in_save(20)
    job.make_up(21)
    job.second.error = Killed()
    third.checkpoints.make_up(22)
    with pytest.raises(Killed):
        job.second.checkpoints.make_up(22)
    job.alive.remove(1)
    job.make_up(23, 24)
    assert third.agreed == [20, 22, 24] and job.saves() == {"iter_0000024": "2"}


def test_what_was_not_agreed_on_is_neither_written_nor_named(job: Job) -> None:
    job.save(10)
    job.first.disagrees = True
    with pytest.raises(Killed):
        job.first.checkpoints.save_checkpoint_and_time(20)
    assert (job.saves(), job.named(), job.partial()) == ({"iter_0000010": "0"}, "10", [])
    assert job.phases()[-1] == (0, 10, "finished"), "it began to write"


def test_naming_what_was_not_agreed_on_is_a_broken_invariant(job: Job) -> None:
    job.save(10)
    with pytest.raises(InvariantViolation, match="INV-6: iteration 20"):
        job.first.checkpoints._write(20)
    assert job.named() == "10"


@pytest.mark.parametrize("older", [None, 30, 40], ids=["empty folder", "older branch ended there", "older branch went on"])
def test_writer_that_dies_in_the_last_save_is_made_up_for(job: Job, older: int | None) -> None:
    if older is not None:
        job.older(30, older, named=older) if older != 30 else job.older(30, named=30)
    job.second.checkpoints.save_checkpoint_and_time(30)
    rounds: list[int] = []

    def meet(number: int) -> None:
        rounds.append(number)
        if number == 0:
            job.kill_first_in_save(30)
        job.meet(number)

    job.second.checkpoints.settle(meet)
    assert rounds == [0, 1]
    assert (job.saves()["iter_0000030"], job.named()) == ("1", "30")
    assert samples_of(job.folder, 30) == {"--seed": "1"}, "who resumes cannot tell whether the data is the same"


def test_all_replicas_wait_for_the_end_of_the_last_save(job: Job) -> None:
    job.save(30)
    rounds: list[int] = []

    def meet(number: int) -> None:
        rounds.append(number)
        job.meet(number)

    for replica in (job.first, job.second):
        replica.checkpoints.settle(meet)
    assert rounds == [0, 0]


def test_all_replicas_leave_on_the_same_record_however_late_they_look(job: Job) -> None:
    """The first died in the last save; the second makes up for it before the third has looked at the folder again."""
    third = job.add(2)
    for replica in (job.second, third):
        replica.checkpoints.save_checkpoint_and_time(30)
    job.kill_first_in_save(30)
    together = threading.Barrier(2, timeout=20)
    has_saved = threading.Event()

    def meet(number: int) -> None:
        together.wait()
        job.meet(number)
        together.wait()
        if number == 0 and threading.current_thread() is slow:
            assert has_saved.wait(20)

    slow = threading.Thread(target=third.checkpoints.settle, args=(meet,))
    job.second.after_save = has_saved.set
    slow.start()
    job.second.checkpoints.settle(meet)  # raises BrokenBarrierError where it meets alone
    slow.join(20)
    assert not slow.is_alive() and job.named() == "30"


def test_owed_checkpoint_is_not_taken_for_that_of_an_older_branch(job: Job) -> None:
    job.older(10, 20, named=20)
    job.second.checkpoints.save_checkpoint_and_time(20)
    job.kill_first_in_save(20)
    job.make_up(21, 22)
    assert (job.saves(), job.named()) == ({"iter_0000010": "older", "iter_0000020": "older", "iter_0000022": "1"}, "22")


def test_restart_removes_what_is_partial_and_nothing_else(job: Job) -> None:
    job.older(10, 40, named=40)
    half = job.folder / ".partial" / "iter_0000020"
    half.mkdir(parents=True)
    (half / "a").touch()
    job.first.checkpoints.save_checkpoint_and_time(11)
    assert job.saves() == {"iter_0000010": "older", "iter_0000011": "0", "iter_0000040": "older"}
    assert job.partial() == [] and job.phases()[0] == (0, 20, "removed_partial")


def test_checkpoint_of_an_older_branch_is_replaced_when_the_new_one_is_complete(job: Job) -> None:
    job.older(10, 20, 30, named=30)
    job.kill_first_in_save(20)
    assert (job.saves(), job.named()) == (dict.fromkeys(("iter_0000010", "iter_0000020", "iter_0000030"), "older"), "30")
    job.second.checkpoints.save_checkpoint_and_time(20)
    assert (job.saves()["iter_0000020"], job.named(), job.partial()) == ("1", "20", [])


def test_link_that_points_nowhere_is_in_nobodys_way(job: Job, tmp_path: Path) -> None:
    job.older(10, named=10)
    (job.folder / "iter_0000020").symlink_to(tmp_path / "gone")
    job.first.checkpoints.save_checkpoint_and_time(20)
    assert (job.saves()["iter_0000020"], job.named(), job.partial()) == ("0", "20", [])


def test_link_in_the_place_of_a_checkpoint_is_replaced_and_what_it_points_to_is_kept(job: Job, tmp_path: Path) -> None:
    job.older(20, named=20)
    (job.folder / "iter_0000020").rename(tmp_path / "elsewhere")
    (job.folder / "iter_0000020").symlink_to(tmp_path / "elsewhere")
    job.first.checkpoints.save_checkpoint_and_time(20)
    assert (job.saves(), content(tmp_path / "elsewhere")) == ({"iter_0000020": "0"}, "older")


# --- Every instant -------------------------------------------------------------------------------------------------------


class Instants:
    """Everything that `save_folder` and the tracker do to the disk, in order; `fatal`: die before that one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fatal: int | None = None) -> None:
        self.done: list[tuple[str, str]] = []
        self._fatal = fatal
        for owner, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree"), (save_folder, "_exchange")):
            monkeypatch.setattr(owner, name, self._dying(name, getattr(owner, name)))

    def _dying(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(what: Any, *args: Any, **kwargs: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
            if len(self.done) == self._fatal:
                if name == "rmtree":  # in the middle of it
                    os.unlink(next(each for each in Path(path).rglob("*") if each.is_file()))
                raise Killed
            self.done.append((name, path))
            return original(what, *args, **kwargs)

        return call


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "no exchange"])
@pytest.mark.parametrize(
    ("older", "named"), [((10,), 10), ((10, 20, 30), 30), ((10, 20), 20)], ids=["new", "older branch", "older latest"]
)
def test_at_every_instant_the_tracker_names_a_complete_checkpoint(
    older: tuple[int, ...], named: int, exchanges: bool, world: None, tmp_path: Path
) -> None:
    if not exchanges and named == 20:
        pytest.skip("two renames: docs/design/guarantees.md says so")
    for fatal in itertools.count():
        (tmp_path / str(fatal)).mkdir()
        job = Job(tmp_path / str(fatal))
        job.older(*older, named=named)
        with pytest.MonkeyPatch.context() as monkeypatch:
            if not exchanges:
                monkeypatch.setattr(save_folder, "exchange", lambda *_: False)
            instants = Instants(monkeypatch, fatal)
            killed = False
            try:
                job.first.checkpoints.save_checkpoint_and_time(20)
            except Killed:
                killed = True
        latest = f"iter_{int(job.named()):07d}"
        assert job.saves()[latest] in ("older", "0"), f"killed before {fatal}, after {instants.done}"
        assert "half" not in job.saves().values(), f"killed before {fatal}, after {instants.done}"
        if not killed:
            break
        job.alive.remove(0)
        job.second.checkpoints.save_checkpoint_and_time(21)
        assert (job.saves()["iter_0000021"], job.named(), job.partial()) == ("1", "21", [])
        assert "half" not in job.saves().values()
    assert fatal > 5


def test_what_a_dead_writer_has_moved_aside_is_in_nobodys_way(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where entries cannot be exchanged, it has a name of its own for a moment, and a writer can die in that moment."""
    monkeypatch.setattr(save_folder, "exchange", lambda *_: False)
    job.older(20, named=20)
    aside = job.folder / "iter_0000020.replaced"
    shutil.copytree(job.folder / "iter_0000020", aside)
    job.first.checkpoints.save_checkpoint_and_time(20)
    (job.folder / ".partial" / aside.name).mkdir()  # a writer died before it removed what it had moved
    job.first.checkpoints.save_checkpoint_and_time(30)
    assert job.saves()["iter_0000020"] == "0" and not aside.exists() and job.partial() == []


def test_order_on_the_disk_survives_a_power_failure(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files before their folder, all of the checkpoint before its name, its name before the tracker, the tracker before its."""
    job.older(10, named=10)
    instants = Instants(monkeypatch)
    job.first.checkpoints.save_checkpoint_and_time(20)
    relative = [
        (name, re.sub(r"[./][0-9a-f]{16}\b", "", path.removeprefix(f"{job.folder}").lstrip("/")))
        for name, path in instants.done
    ]
    partial = ".partial/iter_0000020"
    assert relative == [
        ("fsync", f"{TRACKER}.partial"),
        ("fsync", f"{partial}/deeper/b"),
        ("fsync", f"{partial}/deeper"),
        ("fsync", f"{partial}/a"),
        ("fsync", f"{partial}/samples.json"),
        ("fsync", partial),
        ("rename", partial),
        ("fsync", ""),
        ("replace", f"{TRACKER}.partial"),
        ("fsync", ""),
        ("rmtree", ".partial"),
    ]


# --- What fails ----------------------------------------------------------------------------------------------------------


def test_two_writers_exclude_each_other(job: Job) -> None:
    """One that only seemed dead holds the folder until it is killed."""
    job.folder.mkdir()
    with open(job.folder / ".writer.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        job.first.checkpoints.save_checkpoint_and_time(10)
    assert job.phases() == [(0, 10, "started"), (0, 10, "failed")]
    assert "does another job save there" in job.events()[-1]["detail"]
    job.first.checkpoints.save_checkpoint_and_time(11)
    assert job.named() == "11"


@pytest.mark.parametrize("newest", [10, 12])
def test_a_writer_that_left_and_wakes_up_late_moves_nothing_back(job: Job, newest: int) -> None:
    """The first has left the job, and not yet heard of it: it still takes itself for the writer of 10."""
    job.alive.remove(0)
    for iteration in {10, newest}:
        job.second.checkpoints.save_checkpoint_and_time(iteration)
    job.alive.insert(0, 0)
    before, phases = job.saves(), job.phases()
    job.first.checkpoints.save_checkpoint_and_time(10)
    assert (job.saves(), job.named(), job.phases()) == (before, str(newest), phases)
    job.first.checkpoints.save_checkpoint_and_time(13)
    assert job.named() == "13", "it has given the lock back"


def test_a_writer_that_saves_in_the_background_stays_until_the_checkpoint_has_its_name(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Background:
        is_written, failure = False, ""

        def __init__(self, request: Any, window: Any) -> None: ...

        def wait(self) -> None: ...

        def complete(self) -> None:
            Replica.write(job.first, 10)

    monkeypatch.setattr(module, "BackgroundSave", Background)
    arguments: Any = Namespace(async_save=False, iteration=0, load=None, ckpt_format="torch_dist")
    job.first.args = lambda: arguments  # type: ignore[method-assign]
    job.first.save = lambda iteration, *_: job.first.checkpoints.schedule_save(None)  # type: ignore[method-assign]
    job.first.start()
    job.first.checkpoints._window = StateWindow.__new__(StateWindow)
    job.first.checkpoints.save_checkpoint_and_time(10)
    assert job.first.stays
    job.first.checkpoints.make_up(11)
    assert job.first.stays and not (job.folder / TRACKER).exists()
    Background.is_written = True
    job.first.checkpoints.make_up(12)
    assert not job.first.stays and job.named() == "10"


def test_writer_without_the_lock_removes_nothing(job: Job) -> None:
    """As it was, it removed the files that the holder of the lock was writing, who then published what was left."""
    partial = job.folder / ".partial" / "iter_0000010"
    partial.mkdir(parents=True)
    (partial / "a").write_text("other")
    with open(job.folder / ".writer.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        job.first.checkpoints.save_checkpoint_and_time(10)
    assert job.phases()[-1] == (0, 10, "failed") and (partial / "a").read_text() == "other"


def test_a_writer_that_wakes_up_publishes_its_own_folder_and_not_what_another_one_writes(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The locks do not work between two hosts. The first stands still between its first check and the publishing."""

    def stands_still() -> str:
        if job.first.checkpoints._writing == 20:
            with pytest.raises(Killed):  # in the middle of writing, like a writer that writes on
                job.second.checkpoints.save_checkpoint_and_time(21)
        return ""

    job.save(10)
    monkeypatch.setattr(lock_file, "acquired", lambda *_: True)
    job.first.naming_refusal = stands_still  # type: ignore[method-assign]
    job.second.error = Killed()
    job.second._writer = lambda: 1
    job.first.checkpoints.save_checkpoint_and_time(20)
    assert (job.saves(), job.named(), job.partial()) == ({"iter_0000010": "0"}, "10", ["iter_0000021"])
    assert (1, 20, "removed_partial") in job.phases() and job.phases()[-1] == (0, 20, "failed")
    assert "another writer has removed it" in job.events()[-1]["detail"]
    job.first.checkpoints.save_checkpoint_and_time(30)
    assert (job.saves(), job.named(), job.partial()) == ({"iter_0000010": "0", "iter_0000030": "0"}, "30", [])


def test_what_a_slow_rank_writes_into_a_removed_folder_is_not_published(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream makes the folder again where it is missing. A part of the checkpoint is gone then."""

    def write(iteration: int, *_: Any) -> None:
        other = SaveFolder(job.folder, 0.0)
        assert other.clear() == [10]
        Path(job.first.checkpoints.checkpoint_name(str(job.folder), iteration)).mkdir(parents=True)
        Replica.write(job.first, iteration)

    monkeypatch.setattr(lock_file, "acquired", lambda *_: True)
    job.first.write = write
    job.first.start()
    job.first.checkpoints.save_checkpoint_and_time(10)
    assert job.saves() == {} and job.phases()[-1] == (0, 10, "failed")


def test_where_an_exchange_fails_in_the_middle_the_older_checkpoint_has_its_name(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_folder, "exchange", lambda *_: False)
    job.older(20, named=20)
    with pytest.raises(FileNotFoundError):
        save_folder._exchange(job.folder / ".partial" / "removed" / "iter_0000020", job.folder / "iter_0000020")
    assert job.saves() == {"iter_0000020": "older"} and not list(job.folder.glob("*.replaced"))


def test_lock_is_held_while_files_are_written(job: Job) -> None:
    def write(iteration: int, *_: Any) -> None:
        with open(job.folder / ".writer.lock") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Replica.write(job.first, iteration)

    job.first.write = write
    job.first.start()
    job.first.checkpoints.save_checkpoint_and_time(10)
    assert job.named() == "10"


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "error", [FULL, RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")], ids=["file", "torch"]
)
def test_save_that_fails_costs_nothing_and_the_next_save_point_tries_again(
    job: Job, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    job.save(10)
    job.first.error = error
    job.save(20)
    assert (job.saves(), job.named(), job.partial()) == ({"iter_0000010": "0"}, "10", []), "its space was not freed"
    said = capsys.readouterr().err
    for part in ("iteration 20", f"--save {job.folder}", "GB", str(error), "make room"):
        assert part in said
    job.make_up(21, 22)
    assert job.phases()[-1] == (0, 20, "failed"), "tried again before the next save point"
    job.first.error = None
    job.save(30)
    assert job.named() == "30"
    job.first.checkpoints.settle(job.meet)


def test_full_disk_without_room_for_a_folder_ends_no_replica(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was, Megatron created it, and its error ended one writer after the other."""

    def full(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name == "iter_0000020":
            raise FULL
        create(path, *args, **kwargs)

    create = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", full)
    job.save(20)
    assert job.phases() == [(0, 20, "started"), (0, 20, "failed")]
    monkeypatch.undo()
    job.save(30)
    assert job.named() == "30"


def test_error_that_is_not_of_the_disk_is_not_hidden(job: Job) -> None:
    job.first.error = RuntimeError("CUDA error")
    with pytest.raises(RuntimeError, match="CUDA"):
        job.save(10)


def test_writer_that_dies_after_a_failed_save_is_made_up_for(job: Job) -> None:
    job.first.error = FULL
    job.save(20)
    job.alive.remove(0)
    job.make_up(21, 22)
    assert job.named() == "22"


def test_last_checkpoint_is_tried_again_while_somebody_may_make_room(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []
    monkeypatch.setattr("time.sleep", lambda _: waits.append(job.first.is_saving))
    job.first.error = FULL
    job.save(30)

    def meet(number: int) -> None:
        if number == 1:
            job.first.error = None
        job.meet(number)

    job.first.checkpoints._deadlines = replace(Deadlines.of(), save_s=60.0)
    job.first.checkpoints.settle(meet)
    assert job.named() == "30" and job.first.asked == [SAVED]
    assert waits and all(waits), "the others would take a writer that waits for one that is stuck"


@pytest.mark.timeout(30)
def test_last_checkpoint_that_cannot_be_written_ends_all_replicas_alike(job: Job) -> None:
    job.first.error = FULL
    job.save(30)
    rounds: list[int] = []

    def meet(number: int) -> None:
        assert number < 5, "it goes on for ever"
        rounds.append(number)
        job.meet(number)

    job.first.checkpoints.settle(meet)
    assert job.first.asked == [UNSAVED]
    job.second.checkpoints.settle(meet)
    assert rounds[-1] == 0, "the other replica did not hear of it"


def test_folder_that_cannot_be_created_is_reported(world: None, tmp_path: Path) -> None:
    (tmp_path / "ck").write_text("a file")
    job = Job(tmp_path)
    job.save(10)
    assert job.phases()[-1] == (0, 10, "failed")


@contextlib.contextmanager
def unreadable(folder: Path) -> Iterator[None]:
    """Have the kernel refuse every look into the folder (ELOOP), as NFS does with ESTALE, EACCES or EIO."""
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.symlink_to(folder)
    with pytest.raises(OSError, match="symbolic links"):
        os.stat(folder)
    yield
    folder.unlink()
    aside.rename(folder)


def test_folder_that_cannot_be_read_at_the_end_ends_no_replica_that_hears_that_all_is_saved(job: Job) -> None:
    job.save(30)
    with unreadable(job.folder):
        job.first.checkpoints.settle(job.meet)
        job.second.checkpoints.settle(job.meet)
    assert (job.first.asked, job.second.asked, job.named()) == ([SAVED], [], "30")


@pytest.mark.timeout(30)
def test_last_checkpoint_in_a_folder_that_cannot_be_read_is_given_up_by_all_alike(job: Job) -> None:
    job.second.checkpoints.save_checkpoint_and_time(30)
    job.kill_first_in_save(30)
    with unreadable(job.folder):
        job.second.checkpoints.settle(job.meet)
    assert job.second.asked == [UNSAVED] and job.phases()[-1] == (1, 30, "failed")


def test_last_checkpoint_is_there_when_its_folder_can_be_read_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.first.error = FULL
    job.save(30)
    job.first.checkpoints._deadlines = replace(Deadlines.of(), save_s=60.0)
    monkeypatch.setattr("time.sleep", lambda _: None)
    with contextlib.ExitStack() as held:
        held.enter_context(unreadable(job.folder))

        def meet(number: int) -> None:
            if number == 2:
                job.first.error = None
                held.close()
            job.meet(number)

        job.first.checkpoints.settle(meet)
    assert job.named() == "30" and job.first.asked == [SAVED]


def test_checkpoint_that_is_owed_in_a_folder_that_cannot_be_read_is_asked_for(job: Job) -> None:
    job.second.checkpoints.save_checkpoint_and_time(20)
    job.kill_first_in_save(20)
    with unreadable(job.folder):
        job.make_up(21)
    assert job.second.asked == [missing(20)]
    job.make_up(22)
    assert job.named() == "22"


def test_replicas_agree_on_what_was_loaded_though_one_cannot_read_the_folder(job: Job) -> None:
    """As it was, the replica that read no tracker began a step `save 20` that the others did not begin."""
    job.older(20, named=20)
    job.first.loaded = job.second.loaded = 20
    with unreadable(job.folder):
        job.first.checkpoints.save_checkpoint_and_time(20)
    job.second.checkpoints.save_checkpoint_and_time(20)
    assert (job.first.agreed, job.second.agreed, job.named()) == ([], [], "20")


def test_older_checkpoint_that_was_loaded_is_saved_and_named(job: Job) -> None:
    """The tracker names a later one, of a branch that was left."""
    job.older(10, 20, named=20)
    for replica in (job.first, job.second):
        replica.loaded = replica.ckpt_step = 10
    job.save(10)
    assert (job.saves()["iter_0000010"], job.named(), job.partial()) == ("0", "10", [])


def test_only_the_first_rank_of_a_replica_looks_into_the_folder(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have its answer."""
    job.save(30)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.broadcast_object_list", lambda answer, src: operator.setitem(answer, 0, True))
    monkeypatch.setattr(SaveFolder, "has", lambda *_: pytest.fail("it looked"))
    job.second.checkpoints.settle(job.meet)
    assert job.second.asked == [SAVED]


# --- Several ranks of a replica ------------------------------------------------------------------------------------------


def save_with_a_failing_rank(rank: int, store: str, folder: Path, failing: int, at_naming: bool, results: Any) -> None:
    """One rank of two, with Megatron's barriers behind the data and behind the tracker."""
    file_store = torch.distributed.FileStore(store, 2)
    torch.distributed.init_process_group("gloo", store=file_store, rank=rank, world_size=2)
    log = trace.EventLog(folder / "events.jsonl", 0.0)
    replica = Replica(0, folder / "ck", log, lambda: 0)
    replica.rank = rank

    def write(iteration: int, *_: Any) -> None:
        target = Path(replica.checkpoints.checkpoint_name(str(folder / "ck"), iteration, return_base_dir=True))
        target.mkdir(exist_ok=True)
        if rank == failing and not at_naming and iteration == 10:
            raise FULL
        (target / f"rank{rank}").touch()
        torch.distributed.barrier()
        if rank == 0:
            with TrackerFile(Files(), replica.checkpoints.before_naming).open(str(folder / "ck" / TRACKER), "w") as file:
                file.write(str(iteration))
        torch.distributed.barrier()

    replica.write = write
    replica.args = lambda: Namespace(save=str(folder / "ck"), load=None, ckpt_format="torch", iteration=0)  # type: ignore[method-assign]
    replica.start()
    if at_naming and rank == 0:
        publish = SaveFolder.publish

        def fail_once(saved: SaveFolder) -> None:
            SaveFolder.publish = publish
            raise FULL

        SaveFolder.publish = fail_once
    for iteration in (10, 20):
        replica.checkpoints.save_checkpoint_and_time(iteration)
        results.put((rank, iteration, SaveFolder(folder / "ck", 0.0).named()))
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("failing", "at_naming"), [(0, False), (1, False), (0, True)], ids=["rank 0", "rank 1", "naming"])
def test_ranks_of_a_replica_give_a_save_up_together(failing: int, at_naming: bool, tmp_path: Path) -> None:
    results = CONTEXT.Queue()
    ranks = [
        CONTEXT.Process(
            target=save_with_a_failing_rank, args=(rank, str(tmp_path / "store"), tmp_path, failing, at_naming, results)
        )
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    found = sorted(results.get(timeout=90) for _ in range(4))
    for rank in ranks:
        rank.join(60)
    assert found == [(0, 10, -1), (0, 20, 20), (1, 10, -1), (1, 20, 20)]
