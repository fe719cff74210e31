"""A node without its coordinator: ranks go on to the next save point, and end there by themselves.

Nobody can make a generation any more. A coordinator of which only nothing is heard is reported. It
is given up once no rank of this node is left either. Node 0 then waits for the ends of the others
(`other_ends.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from megatron_recover.cluster.fences import Fences
from megatron_recover.cluster.job import Job
from megatron_recover.cluster.node import ProcessEnd
from megatron_recover.cluster.other_ends import OtherEnds
from megatron_recover.cluster.recording import Recording
from megatron_recover.control_plane.loop import Loop
from megatron_recover.core import policy
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import Deadlines

_SIGNS = 3
"""Number of lines in `deadline_s` by which a node without its coordinator shows that it lives
(`other_ends.py`, Note [Nodes that never end])."""


class CoordinatorLoss:
    """Decides what a node does without a coordinator. Everything runs in the launcher's thread."""

    def __init__(
        self, job: Job, recording: Recording, fences: Fences, *, loop: Loop, deadlines: Deadlines,
        end: Callable[[int, str], None], hosts: Callable[[], Mapping[int, str]], num_signals: Callable[[], int],
    ) -> None:  # fmt: skip
        """`end(exit_code, reason)` ends the run on this node.

        `hosts()` returns number and name of the nodes with ranks of replicas that live, as far as
        the coordinator has told node 0. `num_signals()` returns how many signals have come.
        """
        self._job, self._recording, self._fences = job, recording, fences
        self._loop, self._deadlines, self._end = loop, deadlines, end
        self._hosts, self._num_signals = hosts, num_signals
        self._others: OtherEnds | None = None
        """On node 0: the wait for the ends of other nodes, once it has begun."""
        self._num_signals_before = 0
        """Number of signals that came before that wait."""
        self.knows_end = True
        """False if this node has ended and does not know how the job does: silence is no end."""
        self._sign_at = 0.0
        """Time of the loop's clock at which the next line shows that this node lives."""
        self.why = ""
        """The loss of the coordinator in words; empty while the link to it lives."""
        self._ended_together: int | None = None
        """Exit code of ranks that ended by agreement after the coordinator was lost."""
        self.has_given_up = False
        """True once a coordinator that is silent for the whole deadline was awaited no longer."""
        self._is_cut_off = False
        """True once the coordinator was reported as silent, until it is heard again."""

    def begin(self, why: str, *, has_begun: bool) -> None:
        """Leave the ranks to themselves. Before training (not `has_begun`), end the run."""
        self.why = f"the coordinator is gone ({why})"
        if not has_begun:
            self._end(ExitCode.FAILED, f"{self.why} before training began")
            return
        self._say_it_goes_on()

    def _say_it_goes_on(self) -> None:
        self._recording.says(f"{self.why}: training goes on to the next save point, and ends there")
        self._sign_at = self._loop.time() + self._deadlines.deadline_s / _SIGNS

    def look(self, silent_s: float, *, is_gone: bool, has_begun: bool, own_pid: int | None = None) -> None:
        """Report a coordinator that is silent, and that it is heard again.

        `silent_s`: seconds since it was heard last. `is_gone`: the link to it has ended. On another
        node than its own, a coordinator that is silent for `--node-timeout` counts as gone until it
        is heard again. `has_begun`: training has begun, so ranks that live go on. `own_pid`: the
        process of a coordinator on this node. On any node, a coordinator that is silent for
        `deadline_s` is given up once no rank is left here: one that was heard would have ended the
        job.
        """
        if not is_gone and silent_s >= self._deadlines.deadline_s and self._fences.is_nobody_left:
            self.has_given_up = True
            self.why = f"nothing was heard of the coordinator for {silent_s:.0f} s"
            return
        if self.has_given_up and not is_gone:  # it is heard again, and decides again
            self.has_given_up, self.why = False, ""
            self._close_wait()
        if not self._job.nodes:
            return
        if has_begun and self.why and self._loop.time() >= self._sign_at and not self._fences.is_nobody_left:
            self._say_it_goes_on()
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
        if self._others is not None:
            return f"this node waits no longer; {self._others.names} may train on to the next save point"
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
        elif not self._waits_for_others(has_begun=has_begun):
            self._note_end(has_begun=has_begun)
            self._end(ExitCode.NO_REPLICA_LEFT, f"{self.why}, and no rank of this node is left")

    def _note_end(self, *, has_begun: bool) -> None:
        """Note whether the end of this node is that of the job.

        The others may train in a generation of which this node has not heard. Node 0 kills the
        coordinator, and ends what has not begun.
        """
        self.knows_end = has_begun or self._job.node == 0

    def _waits_for_others(self, *, has_begun: bool) -> bool:
        """Return whether node 0 has to wait for the ends of nodes that train on.

        The wait ends this run as they end, or by a signal.
        """
        if self._others is None:
            hosts = self._hosts() if has_begun and not self._job.node else {}
            others = {number: name for number, name in hosts.items() if number}
            if not others:
                return False
            self.knows_end = False
            self._num_signals_before = self._num_signals()
            self._others = OtherEnds(self._job, others, loop=self._loop, deadlines=self._deadlines)
            self._recording.says(
                f"{self.why}, and no rank of this node is left: it waits for the end of the job on {self._others.names}, and "
                f"no other job gets the folder of --save meanwhile; `kill {os.getpid()}` ends the wait"
            )
        was_signalled = self._num_signals() > self._num_signals_before
        found = self._others.interrupt() if was_signalled else self._others.look()
        if found is not None:
            self.knows_end = found.is_known
            self._end(found.exit_code, f"{self.why}, and no rank of this node is left; {found.reason}")
        return True

    def _close_wait(self) -> None:
        if self._others is not None:
            self._others.close()
            self._others, self.knows_end = None, True

    def ended(self, end: ProcessEnd, *, has_begun: bool) -> None:
        """Handle the end of a rank without a coordinator."""
        if end.status not in policy.ENDED_TOGETHER:
            self._note_end(has_begun=has_begun)
            self._end(
                ExitCode.NO_REPLICA_LEFT,
                f"{self.why}, and replica {end.replica} rank {end.rank} ended by {end.cause}: the others cannot go on "
                "without it",
            )
        else:  # the end of a process is known before its death is confirmed
            self._ended_together = end.status
