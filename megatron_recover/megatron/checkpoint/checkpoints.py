"""One replica saves, a save that is cut short costs nothing that was saved before, and another replica makes up for it.

Decides who writes a checkpoint and when, and what a save that fails leads to. What is in it is Megatron's: a plain checkpoint
of a job with the lanes as its data parallelism. When it exists is `save_folder`'s.

Note [Agreed]
    All replicas begin a save, at the same iteration, by a step without microbatches (`save N`) whose record carries the digest
    of all their state. Only when it is committed does the writer write, and what it writes is that state: a replica whose state
    has drifted is outvoted before it can make it durable. So whether a save is due must be known to all alike: it is a
    function of the iteration and of what committed records carry, never of what a replica sees for itself. At the end of
    training the record of the end serves, which carries such a digest, too. With one replica all this proves nothing.

Note [Owed]
    Replicas that do not write go on training while the writer saves. They remember that a checkpoint is owed. When one becomes
    the writer and the tracker does not name it, it asks for another save in its vote; the record that carries the request
    makes all replicas begin one at their next step boundary. At the end of training all replicas wait for each other, so
    that a writer that dies in the last save is found out while others can still save.

Note [A save that fails]
    A disk that is full or a folder that cannot be written or read ends no replica: any other would fail alike. The ranks of
    the writer give the save up together, it is reported with the folder and the remedy, training goes on, and the next save
    point tries again. At the end of training the last save is tried again and again for `Deadlines.save_s`, while somebody
    may make room; then the job ends with an exit code of its own. All ranks of a replica have to find out that one of them
    failed. In format `torch_dist` Megatron tells them (`CheckpointException`); in format `torch`, and where the checkpoint is
    given its name, the one that failed says so in the replica's store and keeps its place in Megatron's two last barriers.
    Only rank 0 looks what is in the folder; one that cannot be read has no checkpoint but what this replica has saved there.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from megatron_recover import trace
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.request import MISCOUNTED, SAVED, UNSAVED, missing, nothing_trained
from megatron_recover.deadlines import Deadlines, figure
from megatron_recover.faults import FaultInjector, FaultPoint
from megatron_recover.host.whole_file import replacing
from megatron_recover.megatron.checkpoint.save_folder import TRACKER, SaveFolder
from megatron_recover.trainer.driver import Driver

_RETRY_S = 10.0
"""Between two attempts at the last checkpoint of a run."""


class TrackerFile:
    """Stands in for `maybe_msc` in Megatron's checkpointing (seam `tracker`): the tracker is replaced, never overwritten."""

    def __init__(self, original: Any, before_naming: Callable[[], None]) -> None:
        """`before_naming()` is called when the new tracker is complete and not yet in its place."""
        self._original, self._before_naming = original, before_naming

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file as the original does, unless it is the tracker, to be written."""
        if mode != "w" or os.path.basename(file) != TRACKER or "://" in str(file):
            return self._original.open(file, mode, *args, **kwargs)
        return self._replacing(Path(file))

    @contextlib.contextmanager
    def _replacing(self, path: Path) -> Iterator[IO[str]]:
        partial = path.with_name(f"{path.name}.partial")
        with replacing(path, partial=partial, durable=True, before_naming=self._before_naming) as file:
            text = io.TextIOWrapper(file)
            yield text
            text.detach()  # writes what it holds


class Checkpoints:
    """This rank's part in saving. One per rank; all ranks of a replica call the same methods in the same order."""

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
    ) -> None:
        """`originals`: what Megatron has behind the seams `save_checkpoint`, `write_checkpoint` and `checkpoint_name`.
        `agree(iteration, model, optimizer, scheduler)` returns when a record has carried the digest of that state. `samples`
        (`alike.samples`) is kept in each checkpoint. Create it before the job can have saved anything to `save`.
        """
        self._saver, self._originals, self._get_args, self._agree_on = saver, originals, get_args, agree
        self._samples, self._deadlines, self._faults = samples, deadlines, faults
        self._record = trace.Recorder(log, replica=saver.replica, rank=saver.rank)
        self._folder = SaveFolder(save, deadlines.lock_s) if save is not None else None
        self._agreed: int | None = None
        """The newest iteration whose state all replicas have agreed on to save it, the same on all. See Note [Agreed]."""
        self._owed: int | None = None
        """The newest iteration that another replica is or was to save, or that could not be saved. See Note [Owed]."""
        self._failed: int | None = None
        """The newest iteration that could not be saved here."""
        self._written: int | None = None
        """The newest iteration that was saved here."""
        self._skipped: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        """What Megatron gave for the owed one."""
        self._writing: int | None = None
        self._num_writes = 0
        self._is_naming = False
        self._failure = ""
        """Why this rank's part of the save being written failed."""

    @property
    def folder(self) -> SaveFolder:
        """That of `--save`."""
        if self._folder is None:
            raise RuntimeError("Megatron saves a checkpoint without --save")
        return self._folder

    # --- Seams of Megatron -----------------------------------------------------------------------------------------------

    def tell_what_was_loaded(self) -> None:
        """Record where training begins. No seam: called once, when Megatron has loaded what there is to load."""
        args = self._get_args()
        if self._saver.rank == 0 and args.load is not None and not args.finetune:
            self._record(trace.Checkpoint, iteration=args.iteration, phase="loaded", detail=str(args.load))

    def save_checkpoint_and_time(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        """Stands in for Megatron's (seam `save_checkpoint`): compare the state of all replicas, then have one of them save."""
        if self._folder is None or not iteration:
            return  # a step was given up (`commit.OF_A_STEP_GIVEN_UP`), and there is no place or nothing to save
        if iteration != self._agreed and not self._is_what_was_loaded(iteration):
            self._save(iteration, *args, **kwargs)

    def _save(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        """Save if this replica is the writer, else remember what is owed; begun by all replicas at the same iteration."""
        self._agree_on(iteration, *args[:3])
        self._agreed = iteration
        if self._saver.is_writer():
            self._write(iteration, *args, **kwargs)
        else:
            self._owed, self._skipped = iteration, (args, kwargs)

    def write_checkpoint(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        """Stands in for Megatron's `save_checkpoint` (seam `write_checkpoint`). See Note [A save that fails]."""
        from torch.distributed.checkpoint.api import CheckpointException

        self._is_naming = False
        try:
            self._originals["write_checkpoint"](iteration, *args, **kwargs)
        except CheckpointException as error:
            # Every rank gets one; only rank 0 is told why.
            self._failure = "; ".join(f"{type(each).__name__}: {each}" for each, _ in error.failures.values())
        except (OSError, RuntimeError) as error:
            if not self._can_be_left(error):
                raise
            self._failure = f"{type(error).__name__}: {error}"
            self._leave()

    def checkpoint_name(self, checkpoints_path: Any, iteration: int, *args: Any, **kwargs: Any) -> str:
        """Stands in for `get_checkpoint_name` (seam): what is being written goes where partial checkpoints are."""
        if iteration == self._writing and Path(checkpoints_path) == self.folder.path:
            checkpoints_path = str(self.folder.partial)
        return self._originals["checkpoint_name"](checkpoints_path, iteration, *args, **kwargs)

    def before_naming(self) -> None:
        """A checkpoint's data is written by all ranks, and the tracker does not name it yet (rank 0; fault point)."""
        import torch

        self._is_naming = True
        store = torch.distributed.distributed_c10d._get_default_store()
        if self._writing != self._agreed:
            raise InvariantViolation(6, f"iteration {self._writing} is to be saved, and all have agreed on {self._agreed}")
        if store.check([self._failure_key]):
            raise OSError(store.get(self._failure_key).decode())
        self.folder.describe(self._samples)
        self.folder.publish()
        if self._faults is not None:
            self._faults.at(FaultPoint.CHECKPOINT_TRACKER, step=self._saver.step)

    # --- Owed checkpoints ------------------------------------------------------------------------------------------------

    def make_up(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        """At a step boundary: begin the save that a record asks for; ask for one if this replica has become the writer and the
        checkpoint that is owed is not there.
        """
        # Not one that has been answered: a later save is agreed on then.
        if self._agreed is not None and missing(self._agreed) in self._saver.requests:
            self._save(iteration, *args, **kwargs)
        elif (owed := self._owed) is not None and owed != self._failed and self._saver.is_writer():
            if self._agree(lambda: self._exists(owed)):
                self._owed = None
            else:
                self._saver.request(missing(owed))

    def settle(self, meet: Callable[[int], None], *, has_trained: bool = True) -> None:
        """Training is over: return when the last checkpoint exists, whoever has to write it, or when nobody can.

        `meet(round)` returns when all live replicas are in the same round. `has_trained`: whether any state has changed.
        """
        iteration = self._agreed
        if iteration is None:
            if MISCOUNTED in self._saver.requests and not has_trained:
                self._saver.request(nothing_trained(self._begun_with()))  # nothing is lost, and the end is to say so
                meet(0)
            return
        rounds, since = 0, time.monotonic()
        while True:
            if self._agree(lambda: self._exists(iteration)):
                # What each sees for itself would part them: a slow one may look when the next writer has saved already.
                self._saver.request(SAVED)
            meet(rounds)
            if {SAVED, UNSAVED} & self._saver.requests:
                return
            if self._saver.is_writer():
                if self._failed != iteration or self._may_try_again(since):
                    args, kwargs = self._skipped
                    self._write(iteration, *args, **kwargs)
                else:
                    self._saver.request(UNSAVED)  # rides in the next meeting's record, so all replicas give up together
            rounds += 1

    def _may_try_again(self, since: float) -> bool:
        """Wait a little for somebody to make room; False when that took too long."""
        if not self._agree(lambda: time.monotonic() - since <= self._deadlines.save_s):
            return False
        with self._saver.saving():
            time.sleep(min(_RETRY_S, self._deadlines.save_s))
        return True

    # --- The writer ------------------------------------------------------------------------------------------------------

    def _write(self, iteration: int, *args: Any, **kwargs: Any) -> None:
        """Save; all ranks of the replica find out alike whether it failed."""
        import torch

        first = torch.distributed.get_rank() == 0
        self._failure, self._num_writes = "", self._num_writes + 1
        with self._saver.saving(), contextlib.ExitStack() as held:
            if first:
                self._prepare(iteration, held)
            if not self._common_failure():
                if self._faults is not None:
                    self._faults.at(FaultPoint.CHECKPOINT, step=self._saver.step)
                self._writing = iteration
                try:
                    self._originals["save_checkpoint"](iteration, *args, **kwargs)
                finally:
                    self._writing = None
            failure = self._common_failure()
            if first:
                self._conclude(iteration, failure)
        if failure:
            self._failed = self._owed = iteration
            self._skipped = (args, kwargs)
        else:
            self._owed, self._failed, self._written = None, None, iteration

    def _prepare(self, iteration: int, held: contextlib.ExitStack) -> None:
        try:
            held.enter_context(self.folder.locked())
            for name in self.folder.clear():
                if name.startswith("iter_"):
                    self._record(trace.Checkpoint, iteration=int(name.removeprefix("iter_")), phase="removed_partial")
        except OSError as error:
            self._failure = f"{type(error).__name__}: {error}"
        self._record(trace.Checkpoint, iteration=iteration, phase="started")

    def _conclude(self, iteration: int, failure: str) -> None:
        """Free the space of what is not needed: a partial checkpoint, or an older one that was replaced."""
        with contextlib.suppress(OSError):
            self.folder.clear()
        if not failure:
            self._record(trace.Checkpoint, iteration=iteration, phase="finished")
            return
        save, free = self.folder.path, "unknown"
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(save).free / 1e9:.2f} GB"
        detail = (
            f"the checkpoint of iteration {iteration} could not be saved to --save {save} (free: {free}): {failure}; make room "
            "or make it writable. Training goes on; the next save point tries again, and the end of training for "
            f"{figure(self._deadlines.save_s)} s (--recover-deadline-s {self._deadlines.deadline_s:g})"
        )
        self._record(trace.Checkpoint, iteration=iteration, phase="failed", detail=detail)
        print(f"megatron-recover: {detail}", file=sys.stderr, flush=True)

    # --- Shared by the ranks of a replica --------------------------------------------------------------------------------

    @property
    def _failure_key(self) -> str:
        return f"megatron-recover/replica {self._saver.replica}/save {self._num_writes}"

    def _can_be_left(self, error: BaseException) -> bool:
        """Whether `error` is one of writing, at a place where the other ranks can be told."""
        import torch

        # torch's archive writer says what the disk refused as a RuntimeError.
        of_torch = any(word in str(error) for word in ("PytorchStreamWriter", "inline_container"))
        if not isinstance(error, OSError) and not of_torch:
            return False
        return self._is_naming or self._get_args().ckpt_format == "torch" or torch.distributed.get_world_size() == 1

    def _leave(self) -> None:
        """Meet the other ranks at the barriers that Megatron has behind the data and behind the tracker."""
        import torch

        if not self._is_naming:
            torch.distributed.distributed_c10d._get_default_store().set(self._failure_key, self._failure)
            torch.distributed.barrier()
        torch.distributed.barrier()

    def _common_failure(self) -> str:
        """Why any rank's part failed, or nothing."""
        import torch

        failures: list[str] = [""] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(failures, self._failure)
        return next(filter(None, failures), "")

    def _begun_with(self) -> str:
        """Return what training began with, in words."""
        args = self._get_args()
        if args.load is None or args.finetune or not args.iteration:
            return "the one that training begins with"
        return f"what was loaded from iteration {args.iteration} of --load {args.load}"

    def _is_what_was_loaded(self, iteration: int) -> bool:
        """Whether nothing was trained since `iteration` was loaded from here: saving again could only damage it."""
        args = self._get_args()
        from_here = args.load is not None and os.path.realpath(args.load) == os.path.realpath(args.save)
        return args.iteration == iteration and from_here and self._agree(lambda: self.folder.named() == iteration)

    def _exists(self, iteration: int) -> bool:
        """Whether this job has saved `iteration`. Who has saved it here knows, though the folder can no longer be read."""
        return self._written == iteration or self.folder.has(iteration)

    def _agree(self, look: Callable[[], bool]) -> bool:
        """Return what rank 0 of the replica finds: a shared file system may show its ranks different instants.

        `look` raises nothing: the other ranks wait for the answer.
        """
        import torch

        answer = [torch.distributed.get_rank() == 0 and look()]
        torch.distributed.broadcast_object_list(answer, src=0)
        return answer[0]
