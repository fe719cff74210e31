"""Which step of a simulated job comes next: training steps, the agreement before each save, and the end.

A function of the committed records alone, so all members come to the same step, as in
`megatron/checkpoint/checkpoints.py`, Note [Agreed].
A save that its writer did not live to finish is made up for at the end only; in production also at the next step boundary.
"""

from __future__ import annotations

from msgspec.structs import replace

from megatron_recover.core.label import Label, StepKind, label_of
from megatron_recover.core.policy import exit_code
from megatron_recover.core.request import SAVED
from megatron_recover.core.values import ExitCode, Record, ReplicaId, Value


class Course(Value, frozen=True):
    """Where a rank's training loop is."""

    trained: int = 0
    """Steps whose gradient it has applied."""
    agreed: int = 0
    """The newest of them after which all agreed on the state to save it; 0: none."""
    rounds: int = 0
    """Of the end, in which all wait for the last checkpoint."""
    leaves: bool = False
    """A record asks for the end."""
    is_saved: bool = False
    """A record of the end says that the last checkpoint is there."""
    writes: int | None = None
    """What this rank's replica has to save now."""

    def after(self, record: Record, *, is_writer: bool) -> Course:
        """Return where the loop is when a record is applied by a replica that saves, or not."""
        kind = label_of(record.label).kind
        course = replace(self, leaves=self.leaves or exit_code(record.requests) != ExitCode.OK)
        if record.gives_up:
            return course
        if kind is StepKind.TRAIN:
            return replace(course, trained=self.trained + 1)
        if kind is StepKind.SAVE:
            return replace(course, agreed=self.trained, writes=self.trained if is_writer else None)
        if kind is StepKind.END:
            is_saved = SAVED in record.requests
            return replace(
                course, rounds=self.rounds + 1, is_saved=is_saved, writes=self.agreed if is_writer and not is_saved else None
            )
        return course

    def next_label(self, num_steps: int, save_interval: int) -> str | None:
        """Return the name of the next step, None when training is over. `save_interval` is in training steps; 0: no saves."""
        is_over = self.trained >= num_steps or self.leaves
        is_due = save_interval and self.trained and (is_over or self.trained % save_interval == 0)
        if is_due and self.agreed != self.trained:
            return str(Label(StepKind.SAVE, self.trained))
        if not is_over:
            return str(Label(StepKind.TRAIN, self.trained))
        return str(Label(StepKind.END, self.rounds)) if self.agreed and not self.is_saved else None


def is_writer(replica: ReplicaId, roster: tuple[ReplicaId, ...]) -> bool:
    """True if this replica saves: the lowest of the roster."""
    return replica == min(roster)
