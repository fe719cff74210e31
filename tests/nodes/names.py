"""How a toy job on several nodes names checkpoints (`Namer`), and who sees from outside what the newest name is (`Watch`)."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from megatron_recover.control_plane.rank_driver import RankDriver
from megatron_recover.megatron.checkpoint.save_folder import TRACKER, SaveFolder, named_in
from megatron_recover.megatron.checkpoint.tracker_file import replacing_tracker

PAUSES_S = (0.0, 0.0, 0.05, 0.4)
"""Pauses of a writer are drawn from these: before it asks for the right, and between that and the rename."""
LONG_PAUSES_S = (0.0, 0.0, 3.0, 7.0)
"""A long pause is drawn from these for each job: a writer that is cut off then asks when others may have gone on."""
PATIENCE_S = 2.0
"""A writer waits so long for a grant at a save point."""
_SETTINGS = "naming.json"
_FOLDER = "checkpoints"
_POLL_S = 0.002


class Naming(msgspec.Struct, frozen=True):
    """How a job names checkpoints, and what is wrong with it, in tests of the judge."""

    seed: int
    every: int = 20
    """Number of steps between two save points."""
    long_at: int = 0
    long_s: float = 0.0
    """At the save point `long_at` the writer pauses so long at one of the two places."""
    ignores_refusal: bool = False
    """A planted mistake: the writer names without a grant, and whatever its lease."""
    ignores_others: bool = False
    """A planted mistake: no writer looks for later names, or excludes another one."""
    forgets_last: bool = False
    """A planted mistake: the writer does not name the last checkpoint of the job."""

    def write(self, sums: Path) -> None:
        """Have all ranks of the job name checkpoints so."""
        (sums / _SETTINGS).write_bytes(msgspec.json.encode(self))


class _Refused(Exception):
    """No name without a grant and a lease."""


class _Slow(type(Path())):
    """A path whose folder takes a while to list: that is between the last check of a writer and its rename."""

    pause_s = 0.0

    def glob(self, pattern: str) -> Iterator[Path]:  # type: ignore[override]
        """Yield what is found, and pause."""
        yield from super().glob(pattern)
        time.sleep(_Slow.pause_s)


class Namer:
    """Names a checkpoint at every save point, on rank 0 of the writer, as the product does.

    It has the product's right to name, and the product's way to replace the tracker. Only the lock of the folder is missing, as
    on a shared file system that does not lock between hosts: the lock would hide a mistake in the other two.
    """

    def __init__(self, member: RankDriver, sums: Path, lapse_s: float) -> None:
        self._member, self._sums, self._lapse_s = member, sums, lapse_s
        self._how = msgspec.json.decode((sums / _SETTINGS).read_bytes(), type=Naming)
        (sums / _FOLDER).mkdir(exist_ok=True)
        self._folder = SaveFolder(sums / _FOLDER, lock_s=0.0)
        self._chance = random.Random(f"{self._how.seed} {member.replica}")
        self._has_forgotten = False

    @staticmethod
    def of(member: RankDriver, sums: Path, lapse_s: float) -> Namer | None:
        """Return the namer of a rank; None if the job names nothing."""
        return Namer(member, sums, lapse_s) if (sums / _SETTINGS).exists() else None

    def before_first_step(self) -> None:
        """Wait for the first grant and the first beat: else the first save points pass before anybody may name."""
        if self._is_writer():
            with self._member.saving():
                self._has_right(PATIENCE_S)

    def after_step(self, iteration: int, *, is_last: bool) -> None:
        """Name the checkpoint of this iteration, if it is a save point."""
        if not (is_last or self.is_save_point(iteration)) or not self._is_writer():
            return
        self._has_forgotten = self._has_forgotten or (is_last and self._how.forgets_last)
        if self._has_forgotten:
            return
        with self._member.saving():
            before, *within = self._pauses(iteration)
            time.sleep(before)
            # The end of a run waits until the lease of a lost writer has lapsed, as the product does.
            if self._has_right(PATIENCE_S + (self._lapse_s if is_last else 0.0)):
                self._name(iteration, within)

    def is_save_point(self, iteration: int) -> bool:
        """Return whether a checkpoint is named after this iteration."""
        return iteration % self._how.every == 0

    def _is_writer(self) -> bool:
        return self._member.rank == 0 and self._member.is_writer()

    def _has_right(self, patience_s: float) -> bool:
        until = time.monotonic() + patience_s
        while self._member.naming_refusal() and not self._how.ignores_refusal:
            if time.monotonic() > until or self._member.is_last_generation():  # then no grant comes any more
                return False
            time.sleep(0.01)
        return True

    def _pauses(self, iteration: int) -> list[float]:
        """Return how long to pause before the right is asked for, before others are excluded, and before the rename."""
        pauses = [self._chance.choice(PAUSES_S), self._chance.choice(PAUSES_S), 0.0]
        if iteration == self._how.long_at:
            pauses = [self._how.long_s, 0.0, 0.0] if self._chance.random() < 0.6 else [0.0, self._how.long_s, 0.0]
        if self._chance.random() < 0.5:
            pauses[1:] = reversed(pauses[1:])
        return pauses

    def _name(self, iteration: int, pauses: list[float]) -> None:
        _Slow.pause_s = pauses[1]

        def begin() -> None:
            since = time.monotonic()
            if self._member.begin_naming() and not self._how.ignores_refusal:
                raise _Refused
            self._note("naming", iteration, since=since)
            if self._folder.is_ahead(iteration) and not self._how.ignores_others:
                raise FileExistsError
            time.sleep(pauses[0])

        tracker = _Slow(self._folder.path / TRACKER)
        if self._how.ignores_others:
            with contextlib.suppress(_Refused):
                begin()
                time.sleep(pauses[1])
                beside = tracker.with_name(f"{self._member.replica}")
                beside.write_text(str(iteration))
                beside.rename(tracker)
                self._note("named", iteration)
            self._member.end_naming()
            return
        # FileNotFoundError: another writer has excluded this one.
        with contextlib.suppress(_Refused, FileExistsError, FileNotFoundError):
            with replacing_tracker(tracker, begin, self._member.end_naming) as file:
                file.write(str(iteration))
            self._note("named", iteration)

    def _note(self, what: str, iteration: int, **more: float) -> None:
        line = {**more, "at": time.monotonic(), "replica": self._member.replica, "iteration": iteration}
        with open(self._sums / f"{what}-{self._member.replica}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


class Watch:
    """Looks from outside at the newest name of a job, all the time, and writes each change to `latest.jsonl`.

    A rank that writes down when it has named a checkpoint may stop between the rename and that; nobody stops this.
    """

    def __init__(self, sums: Path) -> None:
        self._sums = sums
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; look once more before."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        latest = -1
        with open(self._sums / "latest.jsonl", "a", buffering=1) as file:
            while True:
                is_over = self._over.wait(_POLL_S)
                if (iteration := named_in(self._sums / _FOLDER)) != latest:
                    file.write(json.dumps({"at": time.monotonic(), "iteration": iteration}) + "\n")
                    latest = iteration
                if is_over:
                    return
