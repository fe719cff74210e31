"""Count a run for Prometheus, from its events one by one.

Memory does not grow with steps: it holds the steps that are not committed yet, the members, and a
bounded number of step times. Nothing is measured here, and no text is made: `cluster.exposition`
does that. The same trace always gives the same metrics, so whoever has to begin anew reads it
again.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Literal, NamedTuple, get_args

from megatron_recover import trace
from megatron_recover.core.label import label_of
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.flags import value_of
from megatron_recover.observe.follow.held import HeldWork
from megatron_recover.observe.follow.members import Members
from megatron_recover.observe.goodput import StepTime

PREFIX = "megatron_recover_"
_KEPT_TIMES = 64
"""Newest undisturbed steps of one kind and number of replicas whose times give the estimate of a
step without its fault; and the largest number of disturbed steps that wait for a first estimate."""
_STEP_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_RECOVERY_BOUNDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

CAUSES = tuple(kind.value.replace(" ", "_") for kind in LossKind) + ("no_loss",)
"""Values of the label `cause`: why the first replica was lost, or `no_loss`, as after a broken
link."""
_Result = Literal["finished", "failed"]


class Metric(NamedTuple):
    """One metric: what Prometheus is told about it."""

    name: str
    """Name without `PREFIX`; that of a counter ends with `_total`."""
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    label: str = ""
    """The only label besides `run`, if there is one."""


METRICS = {
    each.name: each
    for each in (
        Metric("replicas_configured", "gauge", "Replicas at the start of the run."),
        Metric(
            "replicas_live",
            "gauge",
            "Members of the newest generation, without unproven newcomers; before the first one, the replicas that start.",
        ),
        Metric("replicas_forming", "gauge", "Newcomers that are formed or read a state: they are not in the roster."),
        Metric("replicas_min", "gauge", "Replicas below which the run ends (--recover-min-replicas)."),
        Metric("generation", "gauge", "Newest generation; 0 before the first one."),
        Metric("joins_total", "counter", "Newcomers that became members: a step was committed with their vote."),
        Metric("joins_refused_total", "counter", "Claims of newcomers that were refused, or turned away by the common plan."),
        Metric("recoveries_total", "counter", "Generations that a loss, a broken link or a miscounted step made.", "cause"),
        Metric("microbatches_lost_total", "counter", "Microbatches lost with the replicas that held them."),
        Metric("microbatches_recomputed_total", "counter", "Microbatches dealt again in recoveries."),
        Metric("step_seconds", "histogram", "Time from the commit of the step before to the commit of a step.", "kind"),
        Metric(
            "recovery_seconds",
            "histogram",
            "Time from the first sign of a fault to the last commit of the step that it struck, if one had begun.",
        ),
        Metric("lost_to_faults_seconds_total", "counter", "Time by which steps with a fault took longer than without."),
        Metric("goodput_ratio", "gauge", "Share of the time of all steps so far that faults did not take."),
        Metric("last_committed_iteration", "gauge", "Newest iteration that was trained and committed."),
        Metric("last_commit_timestamp_seconds", "gauge", "Unix time of the newest commit of a step; of the start before it."),
        Metric("last_durable_iteration", "gauge", "Iteration of the newest checkpoint that was saved or loaded; 0: none."),
        Metric("save_interval_iterations", "gauge", "Iterations between two checkpoints (--save-interval); 0: not set."),
        Metric("saves_total", "counter", "Tries to save a checkpoint.", "result"),
        Metric("trace_events_lost_total", "counter", "Events that did not fit into memory and are not counted anywhere."),
        Metric("ended", "gauge", "1 once the run has ended, else 0."),
        Metric("exit_code", "gauge", "Exit code of the run, once it has ended."),
    )
}
"""Every metric by its name. docs/how_to/monitor.md lists them; the board and the alerts use no
others."""


class Histogram:
    """Counts of values by upper bounds, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self._counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield each upper bound as text, and the number of values up to it; the last is +Inf."""
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            yield ("+Inf" if bound == float("inf") else f"{float(bound)}"), total


class Sample(NamedTuple):
    """The value of one metric, or of one value of its label."""

    metric: Metric
    label_value: str
    """Value of `metric.label`; empty without one."""
    value: float | Histogram


class RunMetrics:
    """The metrics of one run. Not for several threads at once."""

    WANTED = Members.WANTED | {"run_started", "plan", "committed", "recovery", "checkpoint", "gap", "run_finished"}
    """Names of the events that have an effect here."""

    def __init__(self, began_at: float = 0.0) -> None:
        """`began_at`: zero of the trace's clock, in seconds since the epoch."""
        self._began_at = began_at
        self._values: dict[str, float] = {
            "replicas_configured": 0, "replicas_live": 0, "replicas_min": 0, "generation": 0, "last_committed_iteration": 0,
            "last_durable_iteration": 0, "save_interval_iterations": 0, "trace_events_lost_total": 0, "ended": 0,
            "lost_to_faults_seconds_total": 0.0,
        }  # fmt: skip
        """Metrics without a label; those that are not known yet are left out."""
        self._recoveries = dict.fromkeys(CAUSES, 0)
        self._saves = dict.fromkeys(get_args(_Result), 0)
        self._step_seconds = {"train": Histogram(_STEP_BOUNDS), "evaluate": Histogram(_STEP_BOUNDS)}
        self._recovery_seconds = Histogram(_RECOVERY_BOUNDS)
        self._held = HeldWork()
        self._members = Members()
        self._step = -1
        """Newest committed step."""
        self._times = _StepTimes()
        self._recovery: _Recovery | None = None

    def take(self, event: trace.AnyEvent) -> None:
        """Take the next event of the run. An event that is not in `WANTED` changes nothing."""
        self._held.take(event)
        self._members.take(event)
        match event:
            case trace.RunStarted():
                self._started(event)
            case trace.Generation():
                self._generation(event)
            case trace.Plan():
                self._times.planned(event, len(self._members.roster))
            case trace.Committed() if event.step > self._step:
                self._committed(event)
            case trace.Recovery() if self._recovery is not None and self._recovery.take(event):
                self._recovered()
            case trace.Checkpoint(phase="finished"):
                self._saves["finished"] += 1
                self._values["last_durable_iteration"] = event.iteration
            case trace.Checkpoint(phase="failed"):
                self._saves["failed"] += 1
            case trace.Checkpoint(phase="loaded"):
                self._values["last_durable_iteration"] = event.iteration
            case trace.Gap():
                self._values["trace_events_lost_total"] += event.num_events
            case trace.RunFinished():
                self.ended(event.exit_code)

    def ended(self, exit_code: int | None) -> None:
        """Note that the run has ended. None: nobody knows how."""
        self._recovered()
        self._values["ended"] = 1
        if exit_code is not None:
            self._values["exit_code"] = exit_code

    def samples(self) -> Iterable[Sample]:
        """Yield all values, those of one metric together."""
        values = self._values | {
            "microbatches_lost_total": self._held.num_lost,
            "microbatches_recomputed_total": self._held.num_dealt_again,
            "replicas_forming": len(self._members.forming),
            "joins_total": self._members.num_joins,
            "joins_refused_total": self._members.num_refused,
        }
        if self._members.announced:
            values["replicas_live"] = len(self._members.roster)
        by_label: dict[str, dict[str, int] | dict[str, Histogram]] = {
            "recoveries_total": self._recoveries, "saves_total": self._saves, "step_seconds": self._step_seconds,
            "recovery_seconds": {"": self._recovery_seconds},
        }  # fmt: skip
        for name, metric in METRICS.items():
            if name in by_label:
                yield from (Sample(metric, label_value, value) for label_value, value in by_label[name].items())
            elif name in values:
                yield Sample(metric, "", values[name])

    # --- Events -----------------------------------------------------------------------------------

    def _started(self, event: trace.RunStarted) -> None:
        interval = value_of(event.argv, "--save-interval") or value_of(event.argv, "--persistent-save-interval") or ""
        self._values |= {
            "replicas_configured": event.replicas, "replicas_live": event.replicas, "replicas_min": event.min_replicas,
            "last_commit_timestamp_seconds": round(self._began_at + event.t, 3),
            "save_interval_iterations": int(interval) if interval.isdecimal() and value_of(event.argv, "--save") else 0,
        }  # fmt: skip

    def _generation(self, event: trace.Generation) -> None:
        self._recovered()
        self._values["generation"] = event.generation
        if event.is_recovery:
            cause = event.losses[0].kind.value.replace(" ", "_") if event.losses else "no_loss"
            self._recoveries[cause] += 1
            self._times.disturbed()
            self._recovery = _Recovery(event)

    def _committed(self, event: trace.Committed) -> None:
        if self._recovery is not None and event.step > self._recovery.step >= 0:
            self._recovered()
        self._step = event.step
        label = label_of(event.label)
        self._values["last_commit_timestamp_seconds"] = round(self._began_at + event.t, 3)
        if label.is_training:
            self._values["last_committed_iteration"] = label.iteration
        seconds = self._times.committed(event, len(self._members.announced))
        if seconds is not None and (label.is_training or label.is_evaluation):
            self._step_seconds[label.kind.value].add(seconds)
        self._values["lost_to_faults_seconds_total"] = self._times.lost_s
        if self._times.total_s:
            self._values["goodput_ratio"] = 1.0 - self._times.lost_s / self._times.total_s

    def _recovered(self) -> None:
        if self._recovery is not None and (seconds := self._recovery.seconds()) is not None:
            self._recovery_seconds.add(seconds)
        self._recovery = None


class _Recovery:
    """The recovery in the newest generation."""

    def __init__(self, announced: trace.Generation) -> None:
        self._announced = announced
        self.step = -1
        """The step that is recovered; -1: not known yet."""
        self._detect_s = 0.0
        self._committed_at: float | None = None
        self._num_commits = 0

    def take(self, event: trace.Recovery) -> bool:
        """Take the end of a phase. Return whether all members have committed."""
        if event.generation != self._announced.generation:
            return False
        self.step = max(self.step, event.step)
        if event.phase == "detect":
            self._detect_s = max(self._detect_s, event.seconds)
        elif event.phase == "commit":
            self._committed_at = max(self._committed_at or 0.0, event.t)
            self._num_commits += 1
        return self._num_commits == len(self._announced.roster)

    def seconds(self) -> float | None:
        """Return the seconds from the first sign to the last commit so far; None without one."""
        return None if self._committed_at is None else self._committed_at - self._announced.t + self._detect_s


class _StepTimes:
    """The time of steps, and how much of it faults took: `observe.goodput`, step by step.

    The estimate of a step without its fault comes from the newest steps so far, where
    `observe.goodput` knows all later steps as well. Without an estimate a step waits for one.
    """

    def __init__(self) -> None:
        self.total_s = self.lost_s = 0.0
        self._begin: float | None = None
        self._replicas = 0
        """Number of members when the present step began."""
        self._is_disturbed = False
        self._microbatches: dict[int, int] = {}
        """M of each step that was planned and is not committed."""
        self._paces: dict[tuple[bool, int], deque[float]] = {}
        """(is training, number of replicas) -> seconds per microbatch of the largest quota."""
        self._waiting: deque[StepTime] = deque(maxlen=_KEPT_TIMES)
        """Disturbed steps for which there is no estimate yet."""

    def planned(self, event: trace.Plan, num_replicas: int) -> None:
        """Take a plan. The first step begins with its first one."""
        self._microbatches.setdefault(event.step, event.num_microbatches)
        if self._begin is None and event.num_microbatches:
            self._begin, self._replicas, self._is_disturbed = event.t, num_replicas, False

    def disturbed(self) -> None:
        """Note that a new generation was announced, other than one that asks for the end."""
        self._is_disturbed = True

    def committed(self, event: trace.Committed, num_replicas: int) -> float | None:
        """Take the first commit of a step, and return its seconds.

        None if the step has no microbatch, or no plan in the trace.
        """
        num_microbatches = self._microbatches.get(event.step, 0)
        self._microbatches = {step: number for step, number in self._microbatches.items() if step > event.step}
        if not num_microbatches or self._begin is None:
            return None
        one = StepTime(
            event.step, event.label, self._begin, event.t, self._replicas, num_microbatches, is_disturbed=self._is_disturbed
        )
        self._begin, self._replicas, self._is_disturbed = event.t, num_replicas, False
        self.total_s += one.seconds
        if one.is_disturbed:
            self._waiting.append(one)
        elif one.largest_quota:
            kept = self._paces.setdefault((one.is_training, one.replicas), deque(maxlen=_KEPT_TIMES))
            kept.append(one.seconds / one.largest_quota)
        if self._waiting:
            self._account()
        return one.seconds

    def _account(self) -> None:
        """Add what faults took in the disturbed steps for which there is an estimate."""
        for one in [*self._waiting]:
            sizes = [replicas for training, replicas in self._paces if training == one.is_training]
            if sizes:
                nearest = min(sizes, key=lambda size: abs(size - one.replicas))
                estimate = median(self._paces[one.is_training, nearest]) * one.largest_quota
                self.lost_s += max(0.0, one.seconds - estimate)
                self._waiting.remove(one)
