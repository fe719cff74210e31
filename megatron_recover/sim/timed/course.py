"""Order of the steps of a simulated job: training, an agreement before each save, and the end.

The next step is a function of the committed records alone, so it is the same at all members, as in
`megatron/checkpoint/checkpoints.py`, Note [Agreed]. If a writer dies before its save is complete,
the save is repeated at the end only. In production it is also repeated at the next step boundary.
"""

from __future__ import annotations

from msgspec.structs import replace

from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.label import Label, StepKind, label_of
from megatron_recover.core.policy import exit_code
from megatron_recover.core.request import SAVED
from megatron_recover.core.values import Record, ReplicaId, Value


class Course(Value, frozen=True):
    """The position of a rank's training loop."""

    trained: int = 0
    """Training steps whose gradient the loop has applied."""
    agreed: int = 0
    """Newest value of `trained` at which all agreed on the state to save; 0: none."""
    rounds: int = 0
    """Rounds of the end so far. In them all wait for the last checkpoint."""
    leaves: bool = False
    """True once a record requests the end."""
    is_saved: bool = False
    """True once a record of the end confirms that the last checkpoint is there."""
    writes: int | None = None
    """Value of `trained` whose state this rank's replica has to save now; None: nothing to save."""

    def after(self, record: Record, *, is_writer: bool) -> Course:
        """Return the course after a record is applied.

        `is_writer`: this rank's replica is the writer of the record's roster.
        """
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
        """Return the label of the next step, or None when no step is left.

        `save_interval` is in training steps; 0: no saves.
        """
        is_over = self.trained >= num_steps or self.leaves
        is_due = save_interval and self.trained and (is_over or self.trained % save_interval == 0)
        if is_due and self.agreed != self.trained:
            return str(Label(StepKind.SAVE, self.trained))
        if not is_over:
            return str(Label(StepKind.TRAIN, self.trained))
        return str(Label(StepKind.END, self.rounds)) if self.agreed and not self.is_saved else None


def is_writer(replica: ReplicaId, roster: tuple[ReplicaId, ...]) -> bool:
    """Return whether this replica saves: the lowest of the roster does."""
    return replica == min(roster)
