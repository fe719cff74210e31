"""One replica saves, a save that is cut short costs nothing that was saved before, and another replica makes up for it.

Decides who writes a checkpoint and when its name becomes official. What is in it is Megatron's: a plain checkpoint of a job
with the lanes as its data parallelism.

Note [When a checkpoint exists]
    Megatron opens the tracker file for writing, which empties it, then writes the iteration; killed in between, no
    checkpoint can be found any more. Here the tracker is written beside its name, synced and renamed. Until the rename
    the previous checkpoint is the latest, after it the new one is, at every instant and whoever dies.

Note [Owed]
    Replicas that do not write go on training while the writer saves. They remember that a checkpoint is owed; when they
    become the writer and the tracker does not name it (or a later one), they remove what the dead writer left of it and save
    at the step boundary they are at. At the end of training all replicas wait for each other, so that a writer that dies in
    the last save is found out while others can still save.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from megatron_recover import trace
from megatron_recover.faults import FaultInjector, FaultPoint

TRACKER = "latest_checkpointed_iteration.txt"
_LOCK = ".writer.lock"
_LOCK_DEADLINE_S = 60.0
"""For a writer that was declared dead to be dead: it holds the lock to its end."""
_LOCK_POLL_S = 0.05


class Saver(Protocol):
    """What of the member decides about saving."""

    replica: int
    rank: int
    step: int
    """The newest step that it has begun."""

    def is_writer(self) -> bool: ...

    def saving(self) -> contextlib.AbstractContextManager[None]: ...


class TrackerFile:
    """Stands in for `maybe_msc` in Megatron's checkpointing (seam `tracker`): the tracker is replaced, never overwritten."""

    def __init__(self, original: Any, before_naming: Callable[[], None]) -> None:
        """`before_naming()` is called when the new tracker is complete and not yet in its place."""
        self._original, self._before_naming = original, before_naming

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file as the original does, unless it is the tracker, to be written. See Note [When a checkpoint exists]."""
        if mode != "w" or os.path.basename(file) != TRACKER or "://" in str(file):
            return self._original.open(file, mode, *args, **kwargs)
        return self._replacing(Path(file))

    @contextlib.contextmanager
    def _replacing(self, path: Path) -> Iterator[IO[str]]:
        partial = path.with_name(f"{path.name}.partial")
        with open(partial, "w") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        self._before_naming()
        os.replace(partial, path)
        _sync_folder(path.parent)


class Checkpoints:
    """This rank's part in saving. One per rank; all ranks of a replica call the same methods in the same order."""

    def __init__(
        self,
        saver: Saver,
        save_and_time: Callable[..., None],
        get_args: Callable[[], Any],
        *,
        log: trace.EventLog,
        faults: FaultInjector | None,
    ) -> None:
        """`save_and_time` is Megatron's `save_checkpoint_and_time`."""
        self._saver, self._original, self._get_args = saver, save_and_time, get_args
        self._faults = faults
        self._record = trace.Recorder(log, replica=saver.replica, rank=saver.rank)
        self._owed: int | None = None
        """The newest iteration that another replica is or was to save. See Note [Owed]."""
        self._saved: int | None = None
        self._skipped: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        """What Megatron gave for the owed one."""

    def before_naming(self) -> None:
        """A checkpoint's data is written, and the tracker does not name it yet (fault point)."""
        if self._faults is not None:
            self._faults.at(FaultPoint.CHECKPOINT_TRACKER, step=self._saver.step)

    def save_checkpoint_and_time(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        """Stands in for Megatron's (seam `save_checkpoint`): save if this replica is the writer, else remember what is owed."""
        if iteration == self._saved or self._is_what_was_loaded(iteration):
            return
        if self._saver.is_writer():
            self._write(iteration, *args, **kwargs)
        else:
            self._owed, self._skipped = iteration, (args, kwargs)

    def make_up(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        """At a step boundary: save now if this replica has become the writer and the checkpoint that is owed is not there."""
        if self._owed is not None and self._saver.is_writer():
            # Not "less than": the tracker of an older branch in the same folder may be ahead of what is owed.
            if self._agree(self._named() != self._owed):
                self._write(iteration, *args, **kwargs)
            self._owed = None

    def settle(self, meet: Callable[[int], None]) -> None:
        """Training is over: return when the last checkpoint exists, whoever has to write it.

        `meet(round)` returns when all live replicas are in the same round.
        """
        iteration = self._owed if self._owed is not None else self._saved
        if iteration is None:
            return
        rounds = 0
        while True:
            meet(rounds)
            if self._agree(self._named() >= iteration):
                return
            if self._saver.is_writer():
                args, kwargs = self._skipped
                self._write(iteration, *args, **kwargs)
            rounds += 1

    # --- The writer ------------------------------------------------------------------------------------------------------

    def _write(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        import torch

        first = torch.distributed.get_rank() == 0
        with self._saver.saving(), self._lock() if first else contextlib.nullcontext():
            if first:
                for partial in sorted({iteration, self._owed if self._owed is not None else iteration}):
                    self._remove_partial(partial)
                self._record(trace.Checkpoint, iteration=iteration, phase="started")
            torch.distributed.barrier()  # nobody writes into a folder that is being removed
            if self._faults is not None:
                self._faults.at(FaultPoint.CHECKPOINT, step=self._saver.step)
            self._original(iteration, *args, **kwargs)
            if first:
                self._record(trace.Checkpoint, iteration=iteration, phase="finished")
        self._saved, self._owed = iteration, None

    def _remove_partial(self, iteration: int) -> None:
        from megatron.training.checkpointing import get_checkpoint_name

        folder = get_checkpoint_name(self._get_args().save, iteration, return_base_dir=True)
        if os.path.isdir(folder) and self._named() != iteration:
            shutil.rmtree(folder)
            self._record(trace.Checkpoint, iteration=iteration, phase="removed_partial")

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the folder for one writer. A dead writer's kernel gives it back; one that only seems dead is waited for."""
        save = Path(self._get_args().save)
        save.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _LOCK_DEADLINE_S
        with open(save / _LOCK, "w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{file.name} is held by another writer; does another job save to {save}?") from None
                    time.sleep(_LOCK_POLL_S)
            yield

    # --- Shared by the ranks of a replica --------------------------------------------------------------------------------

    def _is_what_was_loaded(self, iteration: int) -> bool:
        """Whether nothing was trained since `iteration` was loaded from here: saving again could only damage it."""
        args = self._get_args()
        from_here = args.load is not None and os.path.realpath(args.load) == os.path.realpath(args.save)
        return self._saver.step < 0 and from_here and self._agree(self._named() == iteration)

    def _named(self) -> int:
        """The iteration that the tracker names; -1 if there is none."""
        try:
            text = (Path(self._get_args().save) / TRACKER).read_text().strip()
        except FileNotFoundError:
            return -1
        return int(text) if text.isdigit() else -1

    def _agree(self, mine: bool) -> bool:
        """What rank 0 of the replica found: a shared file system may show its ranks different instants."""
        import torch

        answer = [mine]
        torch.distributed.broadcast_object_list(answer, src=0)
        return answer[0]


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
