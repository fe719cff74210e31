"""Saves checkpoints: one replica, the writer, saves; if it dies meanwhile, the next writer saves.

Decides which replica writes a checkpoint and when, and what follows a failed save. The content is
Megatron's: a plain checkpoint of a job whose data parallelism is the lanes. `save_folder` decides
when a checkpoint exists.

Note [Agreed]
    All replicas begin a save at the same iteration, by a step without microbatches (`save N`). Its
    record carries the digest of all their state. The writer writes only after the record is
    committed, and writes that state. So a replica whose state has drifted cannot save its state:
    the others vote for another digest. It follows that all replicas must agree on whether a save is
    due. This depends on the iteration, on flags and on committed records alone. A save that
    `settle` repeats at the end of training relies on the record of the end, which carries such a
    digest too. With one replica there is no other state to compare with.

Note [Owed]
    Replicas that do not write continue to train while the writer saves. They remember the
    checkpoint as owed. When one of them becomes the writer and this job has saved neither the owed
    checkpoint nor a later one, it requests another save in its vote. The record that carries the
    request makes all replicas begin a save after the iteration. At the end of training all replicas
    wait for each other. So if the writer dies in the last save, others can still save.

Note [A save that fails]
    A full disk, or a folder that cannot be written or read, ends no replica (exception below): any
    other replica would fail alike. The ranks of the writer give up the save together, and rank 0
    reports the folder and the remedy. Training continues, and the next save point tries again. At
    the end of training the last save is repeated for `Deadlines.save_s` seconds, while somebody may
    make room. Then the job ends with an exit code of its own.

    When the write of a rank fails, all ranks of its replica have to learn of it
    (`shared_failure.py`). After the start only rank 0 reads the folder. A folder that cannot be
    read then counts as empty, except for the checkpoint that this replica has saved there.

Note [Grants]
    A checkpoint gets its name only under a grant of the coordinator (`core/grants.py`), and only if
    this job has named no later one. Nobody waits for a grant: a checkpoint without one stays
    complete under `.partial`, and its writer keeps the lock of the folder. Between two iterations
    the writer looks whether the grant has come, and then names the checkpoint. The next save point
    replaces a checkpoint that has no name by then. The end of training waits for a grant as long as
    for a full disk, and meets the other replicas between two waits. There all learn if nobody has a
    coordinator. The newest grant then lasts (Note [Last generation] there), and the checkpoint gets
    its name.

Note [In the background]
    With `--async-save` the writer trains on while a thread of each of its ranks writes
    (`background.py`). The lock is held until the checkpoint has its name. Between two iterations
    the ranks look whether all threads have ended, and then complete the checkpoint together. A
    second save, and the end of training, wait for the first. Until the checkpoint has its name, the
    others owe it as any other: if the writer dies, the next one removes what is partial and repeats
    the save.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_recover import trace
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.request import MISCOUNTED, SAVED, UNSAVED, missing, nothing_trained
from megatron_recover.deadlines import Deadlines, figure
from megatron_recover.faults import FaultInjector, FaultPoint
from megatron_recover.megatron.checkpoint import resuming
from megatron_recover.megatron.checkpoint.background import BackgroundSave, Planning, write_results
from megatron_recover.megatron.checkpoint.save_folder import TRACKER, SaveFolder
from megatron_recover.megatron.checkpoint.shared_failure import NoGrant, SharedFailure, agreed, gathered, of_first
from megatron_recover.megatron.checkpoint.tracker_file import TrackerFile, replacing_tracker
from megatron_recover.megatron.state import Carried
from megatron_recover.trainer.driver import Driver
from megatron_recover.trainer.state_window import StateWindow

_RETRY_S = 10.0
"""Most seconds to wait between two attempts to save the last checkpoint of a run."""
_POLL_S = 0.02
"""Seconds between two looks for a grant at the end of a run."""


class Checkpoints:
    """Saves checkpoints, one object per rank.

    All ranks of a replica call `save_checkpoint_and_time`, `make_up` and `settle` in equal order.
    """

    def __init__(
        self,
        saver: Driver,
        originals: Mapping[str, Callable[..., Any]],
        get_args: Callable[[], Any],
        *,
        agree: Callable[..., None],
        save: str | None,
        samples: Mapping[str, str],
        deadlines: Deadlines,
        log: trace.Log,
        faults: FaultInjector | None,
        window: StateWindow | None = None,
        run_id: str = "",
        is_newcomer: bool = False,
    ) -> None:
        """Look at the tracker in `save`; create this object before the job can save anything there.

        Raises OSError if the tracker cannot be looked at.

        - `originals`: Megatron's functions behind the seams `save_checkpoint`, `write_checkpoint`,
          `checkpoint_name`, `tracker` and `async_plan`.
        - `agree(iteration, model, optimizer, scheduler)` returns when a record with the digest of
          this state is committed.
        - `save`: the folder of `--save`, or None.
        - `samples` (`alike.samples`) is stored in each checkpoint.
        - `window`: the state window, to save in the background (Note [In the background]); None:
          the writer waits while it saves.
        - `run_id` (`wandb_run.py`) is stored in each checkpoint, unless it is empty.
        - `is_newcomer`: this replica begins with the state of others, and has loaded nothing.
        """
        self._saver, self._originals, self._get_args, self._agree_on = saver, originals, get_args, agree
        self._samples, self._deadlines, self._faults, self._window = samples, deadlines, faults, window
        self._run_id, self._is_newcomer = run_id, is_newcomer
        self._record = trace.RankTrace(log, replica=saver.replica, rank=saver.rank)
        self._folder = SaveFolder(save, deadlines.lock_s) if save is not None else None
        self._agreed: int | None = None
        """Newest iteration whose state all replicas have agreed to save; equal on all replicas. See
        Note [Agreed]."""
        self._owed: int | None = None
        """Newest iteration that another replica had to save or that could not be saved; None if
        none is owed. See Note [Owed]."""
        self._failed: int | None = None
        """Newest iteration that this replica could not save; None after a save here."""
        self._written: int | None = None
        """Newest iteration that this replica saved."""
        self._skipped: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """Megatron's arguments (positional, keywords) for the newest save; None before the first,
        which may be owed by a newcomer."""
        self._writing: int | None = None
        """Iteration that this replica is saving; None if it saves none."""
        self._background: BackgroundSave | None = None
        self._lock = contextlib.ExitStack()
        """Holds the lock of the folder on rank 0, from the beginning of a save to its end."""
        self._is_there = False
        """True if rank 0 has found under the lock that this job has saved the iteration, or a later
        one."""
        self._failure = SharedFailure(saver.replica, get_args)
        self._grant: int | None = None
        """Number of the grant that the newest attempt to name a checkpoint has used up."""
        self._unnamed: int | None = None
        """Iteration of a complete checkpoint that waits for a grant; equal on all ranks of the
        replica. See Note [Grants]."""

    @property
    def folder(self) -> SaveFolder:
        """Return the folder of `--save`. Raises RuntimeError if there is none."""
        if self._folder is None:
            raise RuntimeError("Megatron saves a checkpoint without --save")
        return self._folder

    def carried(self) -> dict[str, Carried]:
        """Return what a newcomer needs of this object: the newest save that all have agreed on."""

        def put(iteration: int | None) -> None:
            self._agreed = self._owed = iteration  # its writer may be lost before it has named it

        return {"agreed_save": Carried(lambda: self._agreed, put)}

    # --- Seams of Megatron ------------------------------------------------------------------------

    def replacements(self) -> dict[str, Any]:
        """Return the replacement for each seam of a save, by the seam's name."""
        return {
            "save_checkpoint": self.save_checkpoint_and_time,
            "write_checkpoint": self.write_checkpoint,
            "checkpoint_name": self.checkpoint_name,
            "schedule_save": self.schedule_save,
            "tracker": TrackerFile(self._originals["tracker"], self.before_naming, self.after_naming),
            "async_plan": Planning(self._originals["async_plan"]).plan,
            "write_results": write_results,
        }

    def tell_what_was_loaded(self) -> None:
        """Record at rank 0 the iteration that was loaded with `--load`; 0 if none was there.

        Records nothing without `--load`, with `--finetune`, and in a newcomer. Not a seam: called
        once, before this rank joins the job.
        """
        args = self._get_args()
        if self._saver.rank == 0 and args.load is not None and not args.finetune and not self._is_newcomer:
            self._record(trace.Checkpoint, iteration=args.iteration, phase="loaded", detail=str(args.load))

    def save_checkpoint_and_time(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        """Compare the state of all replicas, then save if this replica is the writer.

        Does nothing without `--save`, at iteration 0, for an iteration that is agreed already, and
        for the one that was loaded from `--save` (`resuming.is_loaded`). A failed save is reported
        and not raised, as far as `write_checkpoint` allows. Replaces Megatron's
        `save_checkpoint_and_time` (seam `save_checkpoint`).
        """
        if self._folder is None or not iteration:
            # A step was given up (`commit.OF_A_STEP_GIVEN_UP`), and there is no folder or nothing
            # to save.
            return
        if iteration != self._agreed and (self._is_newcomer or not resuming.is_loaded(self._get_args(), iteration)):
            self._save(iteration, *args, **kwargs)

    def _save(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        """Agree on the state; then save if this replica is the writer, else remember what is owed.

        All replicas call this at the same iteration.
        """
        self._complete(waits=True)  # before the agreement: what is named is what was agreed on last
        self._give_up_unnamed()
        self._agree_on(iteration, *args[:3])
        self._agreed = iteration
        if self._saver.is_writer():
            self._write(iteration, *args, **kwargs)
        else:
            self._owed, self._skipped = iteration, (args, kwargs)

    def write_checkpoint(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        """Call Megatron's `save_checkpoint`; store the error of a failed write, raise any other.

        A failed write is raised too if the other ranks cannot learn of it (`shared_failure.py`).
        Replaces `save_checkpoint` (seam `write_checkpoint`). See Note [A save that fails].
        """
        self._failure.is_naming = False
        if self._failure.attempt(lambda: self._originals["write_checkpoint"](iteration, *args, **kwargs)):
            self._failure.leave()

    def schedule_save(self, request: Any) -> None:
        """Write the checkpoint of upstream's `request` in the background.

        Replaces `schedule_async_save` (seam `schedule_save`). See Note [In the background].
        """
        assert self._window is not None, "upstream saves in the background only if it is told to"
        self._background = BackgroundSave(request, self._window)
        self._saver.stays = True  # until `_conclude`: a writer that leaves names its checkpoint first

    def checkpoint_name(self, checkpoints_path: Any, iteration: int, *args: Any, **kwargs: Any) -> str:
        """Return Megatron's name of a checkpoint, below the folder of the save while it is written.

        Replaces `get_checkpoint_name` (seam `checkpoint_name`).
        """
        if iteration == self._writing and Path(checkpoints_path) == self.folder.path:
            checkpoints_path = str(self.folder.own)
        return self._originals["checkpoint_name"](checkpoints_path, iteration, *args, **kwargs)

    def before_naming(self) -> None:
        """Publish the checkpoint after all ranks have written their data.

        Called on rank 0 only, before the tracker names the checkpoint; a fault point. When this
        returns, the grant is used up. Raises `NoGrant` if there is none. Raises OSError with the
        failure of another rank or of publishing, and if this job has named a later checkpoint.
        Raises InvariantViolation if the replicas have not agreed on the iteration.
        """
        self._failure.is_naming = True
        if self._writing != self._agreed:
            raise InvariantViolation(6, f"iteration {self._writing} is to be saved, and all have agreed on {self._agreed}")
        self._failure.raise_of_others()
        self._check_right(self._saver.naming_refusal())
        if not self.folder.is_published:  # an attempt that ended at the last check below has published it
            self.folder.describe(self._samples, self._run_id)
            self.folder.publish()
        if self._faults is not None:
            self._faults.at(FaultPoint.CHECKPOINT_TRACKER, step=self._saver.step)
        self._check_right(self._saver.begin_naming())  # last, since publishing takes time

    def _check_right(self, refusal: str) -> None:
        """Raise `NoGrant` with a refusal that is not empty, and OSError if this job is ahead."""
        if refusal:
            raise NoGrant(refusal)
        assert self._writing is not None
        if self.folder.is_ahead(self._writing):
            raise OSError(f"another writer of this job has named iteration {self.folder.named()} meanwhile, which is later")

    def after_naming(self) -> None:
        """Give the grant back, if it was used; called on rank 0 after each attempt to name."""
        self._grant = self._saver.end_naming()

    # --- Owed checkpoints -------------------------------------------------------------------------

    def make_up(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        """Begin the save that a record requests, or request a save, if one is owed.

        Called between two iterations. Requests a save only if this replica is the writer, has not
        failed to save the owed checkpoint itself, is not saving, and finds that it does not exist.
        First completes a save in the background that all ranks of the replica have written.
        """
        self._complete(waits=False)
        # A request that was followed names an older iteration: the save has changed `_agreed`.
        if self._agreed is not None and missing(self._agreed) in self._saver.requests:
            self._save(iteration, *args, **kwargs)
        elif (owed := self._owed) is not None and owed != self._failed and self._is_idle and self._saver.is_writer():
            if agreed(lambda: self._exists(owed)):
                self._owed = None
            else:
                self._saver.request(missing(owed))

    def settle(self, meet: Callable[[int], None], *, has_trained: bool = True) -> None:
        """Return when a record says that the last checkpoint exists or cannot be written.

        Called after training. `meet(round)` returns when all live replicas are in this round. After
        a round whose record does not say so, the writer saves the checkpoint. If its save fails, it
        tries again for `Deadlines.save_s`, and then gives up.

        If no save was agreed, returns without a checkpoint. If then a step was miscounted twice and
        no state has changed (`has_trained`), first requests the report of that, in one round.
        """
        self._complete(waits=True)
        iteration = self._agreed
        if iteration is None:
            if MISCOUNTED in self._saver.requests and not has_trained:
                # No state was lost. The message at the end of the job describes the state.
                self._saver.request(nothing_trained(resuming.begun_with(self._get_args())))
                meet(0)
            return
        rounds, since = 0, time.monotonic()
        while True:
            if agreed(lambda: self._exists(iteration)):
                # Replicas return by a committed request and not by what each sees: a slow replica
                # may look only after the next writer has saved, and would return in another round.
                self._saver.request(SAVED)
            meet(rounds)
            if {SAVED, UNSAVED} & self._saver.requests:
                return
            if self._saver.is_writer():
                if self._skipped is None:  # a newcomer that Megatron has not asked to save anything
                    self._saver.request(UNSAVED)
                elif (self._failed != iteration and self._unnamed is None) or self._may_try_again(since):
                    if self._unnamed is None:
                        args, kwargs = self._skipped
                        self._write(iteration, *args, **kwargs)
                    self._complete(waits=True)
                else:
                    # The record of the next round carries the request, so all replicas give up
                    # together.
                    self._saver.request(UNSAVED)
            rounds += 1

    def _may_try_again(self, since: float) -> bool:
        """Wait at most `_RETRY_S`, then return True; return False after `Deadlines.save_s`.

        Meanwhile somebody may make room, or the grant may come, which ends the wait. Where it
        cannot come any more, return False at once. `since` is the monotonic time in seconds at
        which training ended.

        The other replicas wait in a sum meanwhile. The wait is shorter than they tolerate, since
        the coordinator may be lost, and then nobody excuses this one. In the next round all learn
        whether it is, and may agree on the last generation (`core/grants.py`).
        """
        if not agreed(lambda: time.monotonic() - since <= self._deadlines.save_s and not self._is_hopeless()):
            return False
        with self._saver.saving():
            return agreed(self._waited)

    def _is_hopeless(self) -> bool:
        """Return whether a grant is missing that nobody can give any more (rank 0)."""
        return self._unnamed is not None and self._saver.is_last_generation() and bool(self._saver.naming_refusal())

    def _waited(self) -> bool:
        """Wait, as `_may_try_again` says, and return True (rank 0)."""
        until = time.monotonic() + min(_RETRY_S, self._deadlines.slowest_s / 2, self._deadlines.save_s)
        if self._unnamed is None:
            time.sleep(until - time.monotonic())
        while self._unnamed is not None and self._saver.naming_refusal() and time.monotonic() < until:
            time.sleep(_POLL_S)
        return True

    # --- The writer -------------------------------------------------------------------------------

    def _write(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        """Save as the writer. All ranks of the replica learn alike whether the save failed.

        Does nothing if another replica, such as a writer that left, has saved it or a later one.
        After a failure that all can learn of, this replica owes the checkpoint, and nothing is
        raised. A save in the background has only begun when this returns.
        """
        self._failure.begin_write()
        self._skipped = (args, kwargs)
        try:
            with self._saver.saving():
                self._prepare(iteration)
                is_there, self.folder.own = of_first((self._is_there, self.folder.own))
                if is_there:
                    self._owed = None
                    self._lock.close()
                    return
                if not self._failure.common():
                    if self._faults is not None:
                        self._faults.at(FaultPoint.CHECKPOINT, step=self._saver.step)
                    self._writing = iteration
                    with self._as_upstream_expects():
                        self._originals["save_checkpoint"](iteration, *args, **kwargs)
                if self._failure.common() or self._background is None:
                    self._conclude(iteration)
        except BaseException:
            self._writing = None
            self._lock.close()
            raise

    @contextlib.contextmanager
    def _as_upstream_expects(self) -> Iterator[None]:
        """Set upstream's arguments of a save in the background, if this is one, for the body alone.

        Elsewhere upstream would start its own processes, and look after them in each iteration.
        """
        if self._window is None:
            yield
            return
        args = self._get_args()
        args.async_save = True
        try:
            yield
        finally:
            args.async_save = False

    def _complete(self, *, waits: bool) -> None:
        """Complete the save in the background, if there is one and all ranks have written.

        If instead a checkpoint waits for its grant, name it if the grant has come. `waits`: wait
        until all ranks have written. Called by all ranks of the replica alike. A failed save is
        reported and not raised, as far as `write_checkpoint` allows.
        """
        background = self._background
        if self._unnamed is not None and agreed(lambda: not self._saver.naming_refusal()):
            self._name_late(self._unnamed)
        if background is None or not (waits or all(gathered(background.is_written))):
            return
        assert self._writing is not None
        with self._saver.saving():
            background.wait()
            self._failure.begin_attempt(background.failure)
            if not self._failure.common():
                self._failure.is_naming = False
                self._failure.attempt(background.complete)
            self._conclude(self._writing)

    @property
    def _is_idle(self) -> bool:
        """Return whether this replica neither writes a checkpoint nor has one without a name."""
        return self._background is None and self._unnamed is None

    def _name_late(self, iteration: int) -> None:
        """Name the complete checkpoint of `iteration`, whose grant has come. Collective."""
        self._failure.begin_attempt("")
        self._writing, self._failure.is_naming = iteration, True
        with self._saver.saving():
            if torch.distributed.get_rank() == 0:
                self._failure.attempt(lambda: self._name(iteration))
            self._conclude(iteration)

    def _name(self, iteration: int) -> None:
        """Have the tracker name `iteration`, as upstream does at the end of a save (rank 0)."""
        with replacing_tracker(self.folder.path / TRACKER, self.before_naming, self.after_naming) as file:
            file.write(str(iteration))

    def _give_up_unnamed(self) -> None:
        """Give up a checkpoint that has no name yet: another one is to be saved."""
        if self._unnamed is not None:
            self._unnamed = None
            self._lock.close()

    def _prepare(self, iteration: int) -> None:
        """Take the lock and begin an empty partial checkpoint, on rank 0; store an OSError.

        Begin none if this job has saved the iteration, or a later one, meanwhile (`_is_there`).
        """
        self._is_there = False
        if torch.distributed.get_rank() != 0:
            return
        try:
            self._lock.enter_context(self.folder.locked())
            if self.folder.has(iteration):  # only under the lock this lasts
                self._is_there = True
                return
            for removed in self.folder.clear():
                self._record(trace.Checkpoint, iteration=removed, phase="removed_partial")
            self.folder.begin(iteration)
        except OSError as error:
            self._failure.store(error)
        self._record(trace.Checkpoint, iteration=iteration, phase="started")

    def _conclude(self, iteration: int) -> None:
        """End a save, failed or not: remove what is partial, give back the lock, report the end.

        Of a checkpoint that only lacks its grant, remove nothing, and keep the lock.
        """
        failure, no_grant = self._failure.common(), self._failure.common_no_grant()
        if self._background is not None:
            self._background.wait()
        self._writing = self._background = None
        self._saver.stays = False
        if no_grant and not failure:
            if torch.distributed.get_rank() == 0 and self._unnamed is None:
                self._record(trace.Checkpoint, iteration=iteration, phase="unnamed", detail=no_grant)
            self._owed = self._unnamed = iteration
            return
        self._unnamed = None
        if torch.distributed.get_rank() == 0:
            with contextlib.suppress(OSError):
                self.folder.discard()  # a partial checkpoint, or one that was replaced
            self._report(iteration, failure)
        self._lock.close()
        if failure:
            self._failed = self._owed = iteration
        else:
            self._owed, self._failed, self._written = None, None, iteration

    def _report(self, iteration: int, failure: str) -> None:
        """Report how the save ended (rank 0)."""
        if not failure:
            self._record(trace.Checkpoint, iteration=iteration, phase="finished", grant=self._grant)
            return
        save, free = self.folder.path, "unknown"
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(save).free / 1e9:.2f} GB"
        detail = (
            f"the checkpoint of iteration {iteration} could not be saved to --save {save} (free: {free}): {failure}; make room "
            "or make it writable. While training goes on, each save point tries again; the end of training tries for "
            f"{figure(self._deadlines.save_s)} s (--recover-deadline-s {self._deadlines.deadline_s:g})"
        )
        self._record(trace.Checkpoint, iteration=iteration, phase="failed", detail=detail)
        print(f"megatron-recover: {detail}", file=sys.stderr, flush=True)

    def _exists(self, iteration: int) -> bool:
        """Return whether this job has saved `iteration` or a later one.

        A replica that has saved it knows so even if the folder can no longer be read.
        """
        return self._written == iteration or self.folder.has(iteration)
