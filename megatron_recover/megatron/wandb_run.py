"""Logs the job to Weights & Biases (`--wandb-project`): one run, logged by the writer.

Upstream logs from the last rank of its world, thus from one rank of every replica. Here each of
these ranks has a stand-in for the module `wandb` (`Wandb`), and only that of the writer calls the
package.

Note [One run]
    All replicas know the same run id: that of `WANDB_RUN_ID`, else that of the checkpoint with
    which the job continues (`_loaded_id`), else a hash of what only this start of a job has (in
    containers, unrelated jobs have run directories of the same path). Each checkpoint contains the
    id. A replica that becomes the writer resumes the run of that id, and first logs what the dead
    writer may not have logged (`MissedCalls`). If a step is logged twice, the server keeps the
    first value.

Note [Not in the way]
    `wandb.init` waits for a server. So a thread calls the package, in the order of the calls. A
    rank waits for that thread in `end` alone, with a deadline. By then the job has ended, so no
    other rank waits. An error of the package is printed. It costs values at Weights & Biases, and
    ends no rank.
"""

from __future__ import annotations

import hashlib
import os
import queue
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from megatron_recover import packages
from megatron_recover.megatron.checkpoint.save_folder import final, named_in, run_id_of
from megatron_recover.megatron.reporting import Late, MissedCalls
from megatron_recover.trainer.driver import Driver

_Call = Callable[[Any], object]
"""A function of the module `wandb`."""
_MOST_CALLS = 100_000
"""Calls that may wait for the package: some ten MB, of hours without an answer."""


class WandbFactory:
    """Replaces `_set_wandb_writer` of Megatron's `global_vars` (seam `wandb`)."""

    def __init__(self, driver: Callable[[], Driver], given_id: str, start: str) -> None:
        """Store `driver()`, which is called at each use and not before.

        - `given_id`: the run id that the user has given (`WANDB_RUN_ID`), or "".
        - `start`: a text that only this start of a job has, the same on all ranks. A run id is made
          of it if there is no other.
        """
        self._driver, self._given_id, self._start = driver, given_id, start
        self._wandb: Wandb | None = None
        self.finish_s = 0.0
        """Seconds that `end` waits for the package. Set them before training begins."""
        self.run_id = ""
        """Run id; empty without `--wandb-project`. `set_writer` sets it, on all ranks."""

    def flush(self) -> None:
        """Call `Wandb.flush`, if this rank has a stand-in."""
        if self._wandb is not None:
            self._wandb.flush()

    def end(self) -> bool:
        """Call `Wandb.end` and return what that returns; True if this rank has no stand-in."""
        return self._wandb is None or self._wandb.end()

    def set_writer(self, args: Namespace) -> None:
        """Set the run id, and on the last rank Megatron's wandb writer, with `--wandb-project`.

        Raises ValueError if the package is missing or no folder for its files is given, and OSError
        if that folder cannot be made or the checkpoint to load cannot be read.
        """
        from megatron.training import global_vars

        if not getattr(args, "wandb_project", None):
            return
        if packages.version("wandb") is None:
            raise ValueError(
                "--wandb-project needs the package wandb, which is not installed: pip install wandb, or leave it out"
            )
        if not (args.wandb_save_dir or args.save):
            raise ValueError("--wandb-project needs a folder for its files; give --wandb-save-dir or --save")
        folder = Path(args.wandb_save_dir or os.path.join(args.save, "wandb"))
        folder.mkdir(parents=True, exist_ok=True)
        self.run_id = self._given_id or _loaded_id(args) or hashlib.blake2b(self._start.encode(), digest_size=6).hexdigest()
        if args.rank != args.world_size - 1:
            return
        settings = {
            "dir": str(folder), "name": args.wandb_exp_name, "project": args.wandb_project, "entity": args.wandb_entity or None,
            "config": dict(vars(args)), "id": self.run_id, "resume": "allow",
        }  # fmt: skip
        self._wandb = Wandb(Late(self._driver), settings, lambda: self.finish_s)
        global_vars._GLOBAL_WANDB_WRITER = self._wandb


def _loaded_id(args: Namespace) -> str:
    """Return the run id in the checkpoint that is to be loaded, or "" if it has none.

    Return "" also with `--finetune`, and for a job that saves to another folder than it loads from:
    these begin another run. Raises OSError if the checkpoint cannot be read.
    """
    if args.load is None or args.finetune or (args.save and os.path.realpath(args.save) != os.path.realpath(args.load)):
        return ""
    iteration = args.ckpt_step or named_in(Path(args.load))
    return run_id_of(Path(args.load), iteration) if iteration >= 0 else ""


class Wandb:
    """Stands for the module `wandb`, as far as upstream uses the module after `wandb.init`.

    The training thread calls all public methods. A thread `wandb` calls the package.
    """

    KEEP_S = 120.0
    """Least seconds to keep what the writer logs on other replicas: `wandb.init` may take 90."""

    def __init__(self, driver: Driver, settings: Mapping[str, Any], finish_s: Callable[[], float]) -> None:
        """Store `settings`, the arguments of `wandb.init`.

        `wandb.init` is called when this replica first logs as the writer, or in `end` if it is the
        writer by then. A replica that is never the writer does not call `wandb.init`.
        `finish_s()` returns the seconds that `end` waits for the package to write or send what is
        left.
        """
        self._driver, self._settings, self._finish_s = driver, settings, finish_s
        self._missed: MissedCalls[_Call] = MissedCalls(self.KEEP_S)
        self._first: list[_Call] = []
        """Calls to make first after `wandb.init`, such as for the configuration of the job."""
        self._saved: list[_Call] = []
        """Calls that log checkpoints as artifacts, to make at the next `log` or at `end`."""
        self._thread: threading.Thread | None = None
        self._has_begun, self._is_given_up = False, False
        """`_has_begun`: the package has begun the run. `_is_given_up`: the package could not begin
        the run, or too many calls wait for it. Then no further call is kept."""
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is this object or the module `wandb`.

        Upstream's timers compare what they write to with the module.
        """
        return self is other or (isinstance(other, ModuleType) and other.__name__ == "wandb")

    def __hash__(self) -> int:
        return id(self)

    # --- What upstream calls ----------------------------------------------------------------------

    @property
    def config(self) -> Wandb:
        """Return an object with the method `update`."""
        return self

    @property
    def run(self) -> Wandb:
        """Return an object with the methods of a run."""
        return self

    @property
    def entity(self) -> str:
        """Return the entity that the user has given, or ""."""
        return self._settings["entity"] or ""

    @property
    def project(self) -> str:
        """Return the name of the project."""
        return str(self._settings["project"])

    def update(self, values: Mapping[str, Any]) -> None:
        """Add `values` to the configuration of the run. Call it before the first `log`."""
        self._first.append(lambda wandb: wandb.config.update(values, allow_val_change=True))

    def use_artifact(self, name: str) -> None:
        """Note that the run has begun with this artifact. Call it before the first `log`."""
        self._first.append(lambda wandb: wandb.run.use_artifact(name))

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log `values` as the writer; otherwise keep them, in case this replica becomes the writer.

        The throughput per GPU is divided by the number of live replicas: upstream divides that of
        the whole batch by the ranks of one replica.
        """
        shares = {"throughput": len(self._driver.roster)}
        plain = {name: _plain(value, shares.get(name, 1)) for name, value in values.items()}

        def call(wandb: Any) -> None:
            wandb.log(plain, step)

        if self._driver.is_writer():
            self._do([*self._missed.take(), *self._saved, call])
            self._saved = []
        else:
            self._missed.add(call)

    def Artifact(self, *args: Any, **kwargs: Any) -> _Artifact:
        """Return a description of an artifact for `log_artifact`."""
        return _Artifact(args, kwargs)

    def log_artifact(self, artifact: _Artifact, aliases: Sequence[str]) -> None:
        """Log a checkpoint as an artifact, at the next call of `log` or `end` as the writer.

        Not now: upstream calls this while rank 0 still gives the checkpoint its name.
        """
        self._saved.append(lambda wandb: wandb.run.log_artifact(artifact.made(wandb), aliases=aliases))

    def flush(self) -> None:
        """Drop kept values that the writer has logged (`MissedCalls.flush`).

        Call this when a log line is printed or would be.
        """
        self._missed.flush()

    def finish(self) -> None:
        """Do nothing: the last checkpoint may not have its name yet, and the writer may still die.

        Upstream calls this when training is over; `end` follows.
        """

    # --- The end ----------------------------------------------------------------------------------

    def end(self) -> bool:
        """End the run as the writer, and wait at most `finish_s` seconds; otherwise do nothing.

        Call this when the job has ended. Nothing can be logged after that. Returns False if the
        package has not finished. Then its exit handler would wait without a limit.
        """
        if not self._driver.is_writer():
            return True
        self._do([*self._missed.take(), *self._saved])
        self._saved = []
        self._calls.put(None)
        assert self._thread is not None
        self._thread.join(self._finish_s())
        if self._thread.is_alive():
            left = "`wandb sync` sends what is left in" if self._has_begun else "it has not begun the run, and has nothing in"
            _tell(f"wandb has not sent everything yet; {left} {self._settings['dir']}")
        return not self._thread.is_alive()

    # --- The thread that calls the package --------------------------------------------------------

    def _do(self, calls: Sequence[_Call]) -> None:
        """Queue calls for the thread `wandb`. The first call of this method starts that thread.

        Drop the calls once this stand-in has given up. Give up, and print that, if more than
        `_MOST_CALLS` calls wait.
        """
        if self._is_given_up:
            return
        if self._calls.qsize() > _MOST_CALLS:
            self._is_given_up = True
            _tell(f"wandb answers no call any more; nothing is logged there after {_MOST_CALLS} calls that wait for it")
            return
        if self._thread is None:
            calls = [*self._first, *calls]
            self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
            self._thread.start()
        for call in calls:
            self._calls.put(call)

    def _work(self) -> None:
        """Begin the run and make all calls, also those after a call that fails; end the run."""
        try:
            import wandb

            self._begin(wandb)
        except Exception as error:  # whatever the package raises, training continues
            self._is_given_up = True
            _tell(f"wandb could not begin the run, so nothing is logged there: {type(error).__name__}: {error}")
            return
        self._has_begun = True
        told: set[str] = set()
        while (call := self._calls.get()) is not None:
            self._make(call, told)
        self._make(lambda module: module.finish(), told)

    def _make(self, call: _Call, told: set[str]) -> None:
        """Make a call. Print its error and add it to `told`, unless `told` has it."""
        import wandb

        try:
            call(wandb)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if text not in told:
                told.add(text)
                _tell(f"a call of wandb failed, and training goes on: {text}")

    def _begin(self, wandb: Any) -> None:
        folder = Path(self._settings["dir"])
        if (replica := self._driver.replica) > 0:
            # The package names its files by the second, and a former writer may have begun in this
            # one. So no two replicas share a folder.
            folder = folder / f"replica-{replica}"
            folder.mkdir(exist_ok=True)
        wandb.init(**{**self._settings, "dir": str(folder)})


class _Artifact:
    """A description of an artifact, from which the thread `wandb` makes the artifact."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self._parts: list[Callable[[Any], object]] = []

    def add_reference(self, uri: str, **kwargs: Any) -> None:
        # Upstream gives the folder in which the checkpoint was written. When the artifact is
        # logged, the checkpoint has been renamed.
        named = final(uri)
        self._parts.append(lambda artifact: artifact.add_reference(named, **kwargs))

    def add_file(self, path: Any) -> None:
        self._parts.append(lambda artifact: artifact.add_file(path))

    def made(self, wandb: Any) -> Any:
        artifact = wandb.Artifact(*self._args, **self._kwargs)
        for add in self._parts:
            add(artifact)
        return artifact


def end_process(code: int) -> NoReturn:
    """End this process although a run of W&B has not ended: no exit handler runs.

    The package's handler would wait for its server. Threads that are no daemons are waited for: one
    of upstream's may delete a checkpoint (`cluster/rank_process.py`, Note [Waiting for threads]).
    """
    threading._shutdown()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _plain(value: Any, share: int) -> Any:
    """Return `value` divided by `share`, and as a number if it is a tensor of one element."""
    value = value.item() if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1 else value
    return value / share if share != 1 else value


def _tell(text: str) -> None:
    print(f"megatron-recover: {text}", file=sys.stderr, flush=True)
