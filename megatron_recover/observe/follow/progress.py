"""Describe the progress of a run in one line, for `top` and the live line of `run`.

The line is made of the events that were taken so far, and of the silence that the caller reports.
"""

from __future__ import annotations

from megatron_recover import trace
from megatron_recover.core.label import label_of
from megatron_recover.flags import number_of
from megatron_recover.observe.follow.members import Members

SHOWN_FORMING = 4
"""Largest number of newcomers that are named while they form; of more the rest is counted."""
SHOWN_QUOTAS = 16
"""Largest number of members whose quotas are listed; more are shown as a range."""


class RunProgress:
    """The progress of a run, updated by its events one by one."""

    def __init__(self, num_replicas: int = 0, num_iterations: int | None = None) -> None:
        """Start before the first event.

        `num_replicas`: number of replicas at the start, and `num_iterations`: number of iterations
        to train, if they are known before the trace shows them.
        """
        self._num_replicas = num_replicas
        self.num_iterations = num_iterations
        """Number of iterations to train; None if the command line does not give it."""
        self.iteration: int | None = None
        """Newest iteration that was trained; None before the first commit of one that was seen."""
        self.num_steps = 0
        """Number of committed steps, evaluation and saves included."""
        self._label = ""
        self._loss: float | None = None
        self._seconds: float | None = None
        """Seconds that the newest committed step took."""
        self._generation = 0
        self.members = Members()
        """The members, and the newcomers that form."""
        self._quotas: tuple[int, ...] = ()
        self._recoveries = 0
        self._repairing: tuple[int, str] | None = None
        """Newest generation that lost a replica, and the lost replicas; None once a training or
        evaluation step is committed in this generation or a later one."""
        self._has_steps = True
        """False if the trace leaves steps out: no commit would then reset `_repairing`."""
        self._asked = ""
        """Reason why all replicas have been requested to end."""
        self._silent: dict[tuple[int, int], trace.RankSilent] = {}
        """Ranks that are slow, hang, or are stopped or traced, until they show progress, a training
        or evaluation step is committed, or they are lost."""
        self._silent_nodes: dict[int, str] = {}
        """Names of the nodes of which nothing is heard, until they are heard again or lost."""
        self._step = -1
        self._since: float | None = None
        self._untold = False
        """True if the line of the newest committed step has not been returned yet."""

    def take(self, event: trace.AnyEvent) -> str | None:
        """Take the next event of the trace and return the line of a committed step, or None.

        The line of each training or evaluation step is returned once: when the loss is known, else
        at the commit of the next such step or at the end of the run.
        """
        told = None
        self.members.take(event)
        if isinstance(event, trace.Committed):
            self._commits(event)
        match event:
            case trace.RunStarted():
                self._num_replicas, self.num_iterations = event.replicas, number_of(event.argv, "--train-iters")
                self._has_steps = event.level != "faults"
            case trace.Generation():
                self._generation_begins(event)
            case trace.Plan():
                self._since = event.t if self._since is None else self._since
                if event.replica == min(event.roster) and label_of(event.label).is_training:
                    self._quotas = event.quotas
            case trace.Committed() if event.step > self._step and (
                label_of(event.label).is_training or label_of(event.label).is_evaluation
            ):
                told = self._rest()
                self._seconds = None if self._since is None else event.t - self._since
                self._step, self._label, self._since, self._loss = event.step, event.label, event.t, None
                self._untold = True
                self._silent.clear()
                if self._repairing and event.generation >= self._repairing[0]:
                    self._repairing = None
            case trace.Applied(loss=float()) if event.step == self._step:
                self._loss = event.loss
                told = self._rest()
            case trace.RankSilent():
                self._silent[event.replica, event.rank] = event
            case trace.RankMoved():
                self._silent.pop((event.replica, event.rank), None)
            case trace.NodeSilent(phase="began"):
                self._silent_nodes[event.node] = event.name
            case trace.NodeSilent() | trace.NodeLost():
                self._silent_nodes.pop(event.node, None)
            case trace.RunFinished():
                told = self._rest()
        return told

    def _commits(self, event: trace.Committed) -> None:
        self.num_steps = max(self.num_steps, event.step + 1)
        if (label := label_of(event.label)).is_training:
            self.iteration = max(self.iteration or 0, label.iteration)

    def _rest(self) -> str | None:
        line = self.line() if self._untold else None
        self._untold = False
        return line

    def _generation_begins(self, event: trace.Generation) -> None:
        self._generation = event.generation
        self._silent = {key: silent for key, silent in self._silent.items() if key[0] in event.roster}
        if event.request is not None:
            self._asked = event.request
            return
        self._recoveries += event.is_recovery
        if event.losses and self._has_steps:
            self._repairing = event.generation, ", ".join(f"replica {lost.replica}" for lost in event.losses)

    def line(self, silent_s: float = 0.0, why: str = "") -> str:
        """Return the line, with the most important parts first.

        A narrow terminal cuts the end off. `silent_s`: seconds since the last new event; 0 leaves
        that out. `why`: what may be the reason of the silence.
        """
        parts = [self._label or "starting"]
        if self._label and self.num_iterations is not None and label_of(self._label).is_training:
            parts[0] += f"/{self.num_iterations}"
        if silent_s:
            parts += [f"nothing new for {silent_s:.0f} s", why] if why else [f"nothing new for {silent_s:.0f} s"]
        if self._silent_nodes:
            parts.append(f"nothing heard of {', '.join(self._silent_nodes.values())}")
        for (replica, rank), silent in self._silent.items():
            parts.append(f"replica {replica} rank {rank} {silent.verdict} in {silent.phase.replace('_', ' ')}")
        if self._repairing:
            parts.append(f"recovering from the loss of {self._repairing[1]}")
        if self._asked:
            parts.append(f"ending ({self._asked})")
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4f}")
        if self._seconds is not None:
            parts.append(f"{1000 * self._seconds:.0f} ms" if self._seconds < 10 else f"{self._seconds:.1f} s")
        if self._generation:
            parts.append(f"replicas {len(self.members.roster)}/{self._num_replicas}")
        if self.members.forming:
            parts.append(f"forming {', '.join(f'replica {one}' for one in self.members.forming[:SHOWN_FORMING])}")
        if len(self.members.forming) > SHOWN_FORMING:
            parts[-1] += f" and {len(self.members.forming) - SHOWN_FORMING} more"
        if self._recoveries:
            parts.append(f"recoveries {self._recoveries}")
        if self._generation:
            parts.append(f"gen {self._generation}")
        if self._quotas:
            parts.append(f"quotas {_short(self._quotas)}")
        return " | ".join(parts)


def _short(quotas: tuple[int, ...]) -> str:
    if len(quotas) <= SHOWN_QUOTAS:
        return " ".join(map(str, quotas))
    return f"{min(quotas)}" if min(quotas) == max(quotas) else f"{min(quotas)}-{max(quotas)}"
