"""Describe for people how a run ended: each exit code, what to do next, and the closing lines.

`ENDINGS` is the source of the table in docs/reference/exit_codes.md and of the last lines of `run`.
Nothing here touches a disk.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from megatron_recover import trace
from megatron_recover.core.exit_code import GOES_ON_ELSEWHERE, ExitCode
from megatron_recover.flags import number_of, value_of
from megatron_recover.megatron.checkpoint.save_folder import TRACKER
from megatron_recover.observe import stop_mark

KILLED = -1
"""Key in `ENDINGS` for all exit codes above 128."""
_SCHEDULE = "OptimizerParamScheduler: "
"""Start of Megatron's assertion that the command line asks for another schedule than the checkpoint
has."""
_OTHER_SCHEDULE = (
    "--lr, --min-lr, --train-iters, --weight-decay or another flag of the schedule differs from the checkpoint's: give the "
    "same as before, or add --override-opt-param-scheduler for that of the command line"
)


class Ending(msgspec.Struct, frozen=True):
    """Explanation of one exit code."""

    meaning: str
    next: str
    """Advice for the user. `RUN_DIR` stands for the folder of the run."""
    can_go_on: bool = True
    """True if it helps to give the same command again."""


ENDINGS: Mapping[int, Ending] = {
    ExitCode.OK: Ending(
        "training ended as planned, with or without losses; also a finished job that was started again, whose log says that "
        "nothing was left to train",
        "nothing",
        can_go_on=False,
    ),
    ExitCode.FAILED: Ending(
        "a defect; an error in the training script on every replica, in its dry run, or under `plan`; imports or a dry run "
        "that outlast `--recover-deadline-s`; replicas that do not start alike; no step committed for "
        "`--recover-deadline-s`, and no evidence which replica is at fault; a fork server that has ended or starts no process; "
        "a `--run-dir` in which no file can be written at the start, such as on a full disk; "
        "a node that was lost before training began. Nothing is saved at the end",
        "follow the message; where it names an error, find the error in the logs of `RUN_DIR` and correct its cause; then "
        "resume",
    ),
    ExitCode.BAD_INPUT: Ending(
        "refused before training began: by `megatron-recover`, by Megatron's own parser in a dry run, by all ranks as they "
        "start, or because the script never calls Megatron's `pretrain`; nothing was trained, and the run "
        "directory is removed, or emptied if it was there before. Of `plan` also: no layout fits",
        "correct what each line names, and give the command again",
        can_go_on=False,
    ),
    ExitCode.UNFINISHED: Ending(
        "of `check` only: what was judged holds, but not all of the run was judged. The run still trains, or its launcher was "
        "killed, or its disk did not take the end of the trace; or events are missing or were left out by `--trace-level` "
        "(`NOT JUDGED` names steps and rules)",
        "check again when the run has ended; for rules that were not judged, run with more `--trace-level`",
        can_go_on=False,
    ),
    ExitCode.TOO_FEW_REPLICAS: Ending(
        "fewer than `--recover-min-replicas` are left, and a checkpoint was saved if any replica lived and `--save` is set; or "
        "fewer have started, or fewer nodes than `--nnodes` asks for have met, and nothing was trained. In a chain of arrays "
        "these nodes leave `STOP` if `join_timeout` has passed: each later array would hold its nodes idle as long",
        "resume, with as many replicas as there is hardware for",
    ),
    ExitCode.POISONED_MICROBATCH: Ending(
        "computing one microbatch has ended two replicas; the message names the microbatch, and its samples where the command "
        "line shows them. Nothing is saved at the end",
        "look at those samples and at the errors in the logs of `RUN_DIR`, and correct the data or the code first: a resumed "
        "run computes the same microbatch again",
    ),
    ExitCode.DIVERGED: Ending(
        "replicas disagree on results, and there is no majority",
        "resume: all replicas had agreed on what was saved; if they disagree again, look for bad hardware, or for code that is "
        "not deterministic (three replicas or more remove the one that differs)",
    ),
    ExitCode.NO_REPLICA_LEFT: Ending(
        "all replicas died before any of them had finished; or the coordinator was lost, with its node or otherwise, and a "
        "failure came before the next save point; or the coordinator heard fewer than half of the nodes: the newest checkpoint "
        "stands. On one node alone also: it was cut off, and its replicas were lost; the job may go on without it",
        "correct what ended the last replicas, which the message names; then resume. With several nodes look first at "
        "`megatron-recover status RUN_DIR`: the job may go on without this node",
    ),
    ExitCode.INVARIANT_VIOLATED: Ending(
        "of `check` and `demo`: an invariant is broken, two exact runs differ, the run ended without a step, the trace lacks "
        "its start, or a trace with its end cannot be compared with the reference. Of `run`: a check inside a rank failed. "
        "It ends the rank, and so its replica; the job ends with this code if no replica is left. Or "
        "[a step was miscounted twice](../design/guarantees.md#a-step-that-is-computed-anew), whatever is "
        "lost after that; the state "
        "before the step is saved if `--save` is set, and the message says whether it is",
        "keep `RUN_DIR`: `megatron-recover check RUN_DIR` names the events, and it is the evidence of a defect to report; then "
        "resume",
    ),
    ExitCode.INTERRUPTED: Ending(
        "a signal, a time limit or the loss of the coordinator ended all replicas at a common step, with a checkpoint if "
        "`--save` is set (after a loss that was noticed when all was trained the code is 0); before training has begun the "
        "run only ends, and the run directory is removed, or emptied if it was there before",
        "resume when there is time for more",
    ),
    ExitCode.UNSAVED: Ending(
        "training ended, but its last checkpoint could not be written for `save_s` (25 minutes by default), or could not get "
        "its name without the coordinator; the newest checkpoint is older",
        "make room in the folder of `--save`; then resume",
    ),
    KILLED: Ending(
        "a second Ctrl-C at a terminal, or the end of `--shutdown-timeout` after a signal: everything was killed at once, and "
        "nothing was saved for it; before training has begun the run directory is removed, or emptied if it was there before",
        "`megatron-recover report RUN_DIR` makes the summary and the plot, which were left out; to train on, resume",
    ),
}  # fmt: skip
"""Endings by exit code, in the order of the table."""


Word = Literal["finished", "requeue", "stop"]
"""The word for a batch system after a run: do nothing more, start the job again, or wait for a
person."""
STOPS = frozenset({ExitCode.BAD_INPUT, ExitCode.POISONED_MICROBATCH, ExitCode.DIVERGED, ExitCode.INVARIANT_VIOLATED})
"""Exit codes after which the next start would end alike, or would hide a defect."""


def word(exit_code: int) -> Word:
    """Return what a batch system is to do after a run that ended with `exit_code`."""
    if exit_code == ExitCode.OK:
        return "finished"
    return "stop" if exit_code in STOPS else "requeue"


def table() -> list[str]:
    """Return the rows of the table of docs/reference/exit_codes.md."""
    rows = ["| code | name | verdict | meaning | do next |", "|---:|---|---|---|---|"]
    for code, ending in ENDINGS.items():
        number, name = ("128 + signal", "") if code == KILLED else (str(int(code)), f"`{ExitCode(code).name}`")
        verdict = "" if code == ExitCode.UNFINISHED else word(code)
        rows.append(f"| {number} | {name} | {verdict} | {ending.meaning} | {ending.next} |")
    return rows


class Account(msgspec.Struct):
    """Facts that the closing lines of a run need, collected from its events."""

    replicas: int
    """Number of replicas at the start of the run."""
    run_dir: str
    save: str | None = None
    load: str | None = None
    """Folder that the run resumes from, if it holds a checkpoint. None with `--finetune`: then the
    folder of `--load` holds the model that training begins with."""
    finetunes: bool = False
    iterations: int | None = None
    """Number of iterations to train; None if the command line does not give it."""
    has_begun: bool = False
    lost: set[int] = msgspec.field(default_factory=set)
    left: set[int] = msgspec.field(default_factory=set)
    """Replicas that have left as requested."""
    joined: set[int] = msgspec.field(default_factory=set)
    """Newcomers that became members. The ids of newcomers are those from `replicas` on."""
    failed: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """Ranks (replica, rank) that have failed since the last recovery, the first of them first."""
    saved: int | None = None
    """Newest iteration that this run has saved."""
    loaded: int | None = None
    """Iteration that this run has loaded; 0 if `load` held no checkpoint; None if it is not known
    yet or nothing was to be loaded."""
    here: tuple[int, ...] | None = None
    """Replicas whose saves this account sees, of a job with several nodes; None: all."""
    is_complete: bool = True
    """False if events of ranks may be missing. A checkpoint newer than `saved` may then exist."""

    def take(self, event: trace.Event) -> None:
        """Take the next event of the run."""
        match event:
            case trace.RunStarted(argv=argv):
                self.finetunes, self.iterations = "--finetune" in argv, number_of(argv, "--train-iters")
                self.save, self.load = value_of(argv, "--save"), None if self.finetunes else value_of(argv, "--load")
            case trace.Generation(losses=losses, left=left, roster=roster, newcomers=newcomers):
                self.has_begun = True
                self.joined |= {replica for replica in roster if replica >= self.replicas} - {*newcomers}
                self.lost |= {one.replica for one in losses}
                self.left |= {*left}
                if self.here is not None and min(roster, default=-1) not in self.here:
                    self.saved, self.loaded, self.is_complete = None, None, False  # another node sees what the writer saves
            case trace.Proven(newcomers=newcomers):
                self.joined |= {*newcomers}
            case trace.Failure(replica=replica, rank=rank) if replica >= 0 and replica not in self.left:
                self.lost.add(replica)
                self.failed.append((replica, rank))
            case trace.Fenced(replica=replica) if replica >= 0 and replica not in self.left:
                self.lost.add(replica)
            case trace.Recovery(phase="commit"):
                self.failed.clear()
            case trace.Checkpoint(phase="finished", iteration=iteration):
                self.saved = iteration
            case trace.Checkpoint(phase="loaded", iteration=iteration):
                self.loaded = iteration

    @property
    def lost_members(self) -> set[int]:
        """Return the lost replicas without newcomers that were lost before they were members."""
        return {replica for replica in self.lost if replica < self.replicas or replica in self.joined}

    @property
    def newest(self) -> tuple[int, str] | None:
        """Return iteration and folder of the newest checkpoint that this run knows of, or None."""
        if self.saved is not None and self.save is not None:
            return self.saved, self.save
        return (self.loaded, self.load) if self.loaded and self.load is not None else None

    def lines(self, exit_code: int, reason: str) -> list[str]:
        """Return the lines that describe how the run ended.

        The last line names what to do next, unless the exit code is `OK`. There is only one line if
        the run was refused or interrupted before its first generation.
        """
        lines = [f"exit code {exit_code} ({ExitCode.words(exit_code)}): {reason}"]
        if not self.has_begun and (exit_code in (ExitCode.BAD_INPUT, ExitCode.INTERRUPTED) or exit_code not in ENDINGS):
            return lines  # nothing was trained, and the folder is as it was
        lost = self.lost_members
        left, num_lost = self.replicas + len(self.joined) - len(lost | self.left), len(lost)
        losses = f"{num_lost or 'no'} {'loss' if num_lost == 1 else 'losses'}"
        losses += f", {len(self.joined)} joined" if self.joined else ""
        losses += f", {len(self.left)} asked to leave" if self.left else ""
        number = f"{left} of {self.replicas} replicas left"
        if left > self.replicas:  # the job has grown
            number = f"{left} replicas at the end, {self.replicas} at the start"
        lines.append(f"{number}, {losses}; {self.checkpoint()}; trace and logs are in {self.run_dir}")
        ending = ENDINGS[exit_code if exit_code in ENDINGS else KILLED]
        if reason.endswith(GOES_ON_ELSEWHERE):
            lines.append("next: nothing; `megatron-recover status` with the job's run directory shows how it goes on")
        elif exit_code != ExitCode.OK:
            todo = _OTHER_SCHEDULE if _SCHEDULE in reason else ending.next
            todo = todo.replace("`RUN_DIR`", self.run_dir).replace("RUN_DIR", shlex.quote(self.run_dir))
            lines.append(f"next: {todo}" + (f". {self._resume(exit_code)}" if ending.can_go_on else ""))
        return lines

    @property
    def _unknown(self) -> str | None:
        """Return the folder that may hold a checkpoint where this run knows of none; else None."""
        if self.newest is not None or (self.is_complete and self.loaded is not None):
            return None
        return self.load if self.is_complete else self.save or self.load

    def checkpoint(self) -> str:
        """Return the clause about the newest checkpoint, for the closing lines and for `status`.

        If the run knows of none and a folder may hold one, name the tracker file of the folder.
        """
        if self.newest is not None:
            iteration, folder = self.newest
            return f"newest checkpoint: iteration {iteration} in {folder}"
        if (unknown := self._unknown) is not None:
            return f"{Path(unknown) / TRACKER} names the newest checkpoint, if there is any"
        if self.save is None:
            return "no checkpoint: --save was not set"
        return f"no checkpoint: nothing was saved to {self.save} yet"

    def _resume(self, exit_code: int) -> str:
        """Return what the same command would do now, behind the command that removes the mark."""
        is_marked = exit_code in STOPS and self.save is not None
        first = f"First remove the mark: {stop_mark.remedy(Path(self.save or ''))}. " if is_marked else ""
        again = f"{first}To resume, give the same command with a new --run-dir"
        if self.newest is None and self._unknown is None:
            return f"{first}Without a checkpoint the same command, with a new --run-dir, begins anew"
        folder = self.newest[1] if self.newest is not None else self._unknown
        if folder is not None and (self.load is None or Path(folder) != Path(self.load)):
            again += f" and --load {shlex.quote(folder)}"
        again += ", without --finetune" if self.finetunes else ""
        return f"{again}: it goes on after iteration {self.newest[0]}" if self.newest is not None else again
