"""A node without its coordinator: ranks go on to the next save point, and end there by themselves.

Nobody can make a generation any more. A coordinator of which only nothing is heard is reported. It
is given up once no rank of this node is left either.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_recover.cluster.fences import Fences
from megatron_recover.cluster.job import Job
from megatron_recover.cluster.node import ProcessEnd
from megatron_recover.cluster.recording import Recording
from megatron_recover.core import policy
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import Deadlines


class CoordinatorLoss:
    """Decides what a node does without a coordinator. Everything runs in the launcher's thread."""

    def __init__(
        self, job: Job, recording: Recording, fences: Fences, *, deadlines: Deadlines, end: Callable[[int, str], None]
    ) -> None:
        """`end(exit_code, reason)` ends the run on this node."""
        self._job, self._recording, self._fences = job, recording, fences
        self._deadlines, self._end = deadlines, end
        self.why = ""
        """The loss of the coordinator in words; empty while the link to it lives."""
        self._ended_together: int | None = None
        """Exit code of ranks that ended by agreement after the coordinator was lost."""
        self.has_given_up = False
        """True once a coordinator that is silent for the whole deadline was awaited no longer."""
        self._is_cut_off = False
        """True once the coordinator was reported as silent, until it is heard again."""

    def begin(self, why: str, *, has_begun: bool) -> None:
        """Leave the ranks to themselves. Before training (`has_begun`), end the run."""
        self.why = f"the coordinator is gone ({why})"
        if not has_begun:
            self._end(ExitCode.FAILED, f"{self.why} before training began")
            return
        self._recording.says(f"{self.why}: training goes on to the next save point, and ends there")

    def look(self, silent_s: float, *, is_gone: bool, own_pid: int | None = None) -> None:
        """Report a coordinator that is silent, and that it is heard again.

        `silent_s`: seconds since it was heard last. `is_gone`: the link to it has ended. On another
        node than its own, a coordinator that is silent for `--node-timeout` counts as gone until it
        is heard again. `own_pid`: the process of a coordinator on this node. On any node, a
        coordinator that is silent for `deadline_s` is given up once no rank is left here: one that
        was heard would have ended the job.
        """
        if not is_gone and silent_s >= self._deadlines.deadline_s and self._fences.is_nobody_left:
            self.has_given_up = True
            self.why = f"nothing was heard of the coordinator for {silent_s:.0f} s"
            return
        if not self._job.nodes:
            return
        if not is_gone and (silent_s >= self._deadlines.silence_s) != self._is_cut_off:
            self._is_cut_off = not self._is_cut_off
            if self._is_cut_off:
                stopped = f"if somebody has stopped it, continue it with `kill -CONT {own_pid}`"
                cause = "this node may be cut off" if own_pid is None else stopped
                self._recording.says(f"nothing was heard of the coordinator for {silent_s:.0f} s: {cause}")
            else:
                self._recording.says("the coordinator is heard again")
        if not is_gone and self._job.node:
            is_lost = silent_s >= self._deadlines.node_s
            self.why = f"nothing was heard of the coordinator for {silent_s:.0f} s" if is_lost else ""

    def promise(self) -> str:
        """Return what becomes of a request to end the job, for the user who made it in training."""
        if self.why:
            return f"{self.why}, and without it no common step can be chosen; training ends at the next save point"
        together = "all replicas end after the same step, with a checkpoint if --save is set"
        return f"once the coordinator is heard again, {together}" if self._is_cut_off else together

    def end_alone(self, *, has_begun: bool) -> None:
        """End without living ranks and without a coordinator that would send `JobEnds`."""
        if not (self.why and self._fences.is_nobody_left and (has_begun or self.has_given_up)):
            return
        if self._ended_together is not None:
            self._end(self._ended_together, f"{self.why}; the ranks of this node ended together")
        else:
            self._end(ExitCode.NO_REPLICA_LEFT, f"{self.why}, and no rank of this node is left")

    def ended(self, end: ProcessEnd) -> None:
        """Handle the end of a rank without a coordinator."""
        if end.status not in policy.ENDED_TOGETHER:
            self._end(
                ExitCode.NO_REPLICA_LEFT,
                f"{self.why}, and replica {end.replica} rank {end.rank} ended by {end.cause}: the others cannot go on "
                "without it",
            )
        else:  # the end of a process is known before its death is confirmed
            self._ended_together = end.status
