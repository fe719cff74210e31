"""Make `summary.json`: the facts of a run, its faults, and their cost, from its trace.

A comparison with a reference run is added as the caller gives it. All else can be made again from
the trace at any time. Nothing is measured here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import get_args

import msgspec

from megatron_recover import trace
from megatron_recover.core.label import label_of
from megatron_recover.faults import STANDS_STILL
from megatron_recover.host.whole_file import replacing
from megatron_recover.observe.compare import Comparison
from megatron_recover.observe.facts import Line
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.goodput import Goodput
from megatron_recover.observe.history import History
from megatron_recover.observe.joins import JoinSummary, joins
from megatron_recover.observe.leaves import LeaveSummary, leaves
from megatron_recover.observe.replay import Taker, replay
from megatron_recover.observe.standstills import Standstill, standstills
from megatron_recover.observe.step import Step
from megatron_recover.observe.work import WorkAccount

SUMMARY_FILE = "summary.json"


class FaultSummary(msgspec.Struct, frozen=True, kw_only=True):
    """An injected fault (`point` is set), or an end or standstill of a rank without one."""

    t: float
    """Seconds since the start of the run."""
    replica: int
    rank: int
    kind: str
    """A kind of `faults.FaultKind`. If not injected: "external" for an end; hung, stopped or traced
    for a standstill."""
    point: str | None = None
    step: int | None = None
    label: str | None = None
    microbatch: int | None = None
    bucket: int | None = None
    cause: str | None = None
    until: float | None = None
    """Time at which the rank moved again, ended or was fenced, else the end of the trace; None if
    the fault caused no standstill."""

    @property
    def where(self) -> str:
        """Describe the point of an injected fault, or the cause of any other."""
        where = self.point.replace("_", " ") if self.point else self.cause or ""
        what = (("microbatch", self.microbatch), ("bucket", self.bucket))
        return where + "".join(f" of {name} {value}" for name, value in what if value is not None)

    @property
    def words(self) -> str:
        """Return a description of the fault."""
        words = {
            "kill": "killed", "stop": "stopped", "freeze": "frozen", "raise": "raised an exception", "slow": "slowed down",
            "loop": "caught in an endless loop", "external": "ended", "hung": "hung", "traced": "held by a tracer",
        }  # fmt: skip
        happened = words.get(self.kind, self.kind)
        return f"replica {self.replica} rank {self.rank} {happened} " + (
            f"at {self.where}" if self.point else f"({self.where})"
        )


class RecoverySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one new generation.

    Seconds of a phase are those of the slowest member (`trace.Recovery`). A phase is None if no
    member recorded it, as where a newer generation came first, or no replica had begun a step.
    """

    generation: int
    lost_replicas: tuple[int, ...]
    newcomers: tuple[int, ...] = ()
    """Newcomers of the roster, if the generation lets them join and answers to no fault."""
    reason: str
    step: int | None
    label: str | None
    computing: dict[int, tuple[int, ...]]
    """Replica -> the microbatches that it was computing when the generation was announced; lost
    replicas are included."""
    detect_s: float | None
    """Seconds up to the announcement of the generation, from the fault that the generation answers
    to (`struck_at`), else from the first sign of its cause."""
    agree_s: float | None
    """Seconds until the statuses of all members were there."""
    redeal_s: float | None
    """Seconds until the training thread took the new plan, inside the running pass or after it."""
    recompute_s: float | None
    """Seconds until the microbatches that were dealt again were computed."""
    reduce_s: float | None
    """Seconds until all results were held."""
    commit_s: float | None
    """Seconds until all members had voted."""
    total_s: float | None = None
    """Seconds from the fault (see `detect_s`) to the last member's commit; None if this generation
    came to no commit."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `summary.json`."""

    steps: int
    """Number of committed training steps."""
    evaluation_steps: int
    microbatches_per_step: int | None
    """M of the last training step."""
    replicas_start: int
    replicas_end: int
    generations: int
    determinism: str | None
    exit_code: int | None
    """Exit code of the run; None while the run lasts, or if the trace lacks its end, as after a
    killed launcher."""
    seconds: float
    faults: tuple[FaultSummary, ...]
    recoveries: tuple[RecoverySummary, ...]
    leaves: tuple[LeaveSummary, ...] = ()
    """Replicas that were asked to leave, and what became of each."""
    joins: tuple[JoinSummary, ...] = ()
    """Replicas that were formed while others trained, and what became of each."""
    standstills: tuple[Standstill, ...]
    """Periods in which a rank, a leader, the coordinator or the job showed no progress."""
    microbatches_lost: int
    microbatches_redone: int
    microbatches_redone_in_schedule: int
    """Redone microbatches that extended a running pass. The plans that dealt the others opened
    their passes."""
    microbatches_wasted: int
    replicas_bit_identical: bool | None
    """True if the parameter digests agreed after every step; None if there was nothing to compare.
    Digests for which a replica was outvoted are left out."""
    final_loss: float | None
    goodput: float | None = None
    """Share of the time of all steps that faults did not take (`observe.goodput`), 0..1; None if
    unknown."""
    lost_to_faults_s: float | None = None
    """Seconds by which steps with a fault took longer than steps without; None if unknown."""
    level: str = "microbatches"
    """Detail of the trace (`trace.RunStarted.level`). Below `microbatches` none are counted as
    redone or wasted."""
    events_missing: int = 0
    """Number of events that were lost, according to the gaps in the trace."""
    steps_not_vouched_for: tuple[tuple[int, int], ...] = ()
    """First and last step of each unbroken row of steps that lack events. Counts of microbatches
    may be wrong there."""
    reference: str | None = None
    """Run directory that the fields below compare the run with."""
    loss_max_abs_diff: float | None = None
    param_max_rel_diff: float | None = None
    param_bit_identical: bool | None = None


_SLACK_S = 1.0
"""Seconds. A fault explains a standstill if it struck at most this long before the standstill
began, or between then and the first verdict."""


def faults(history: History) -> tuple[FaultSummary, ...]:
    """Return the faults of a run in order of time.

    - all injected faults;
    - standstills of ranks, except slow ones, that no injected fault explains;
    - the first failure of each replica that no injected fault explains, nor a standstill that ended
      the replica. Slowness explains no failure, nor does a freeze that has ended (`_may_end`).
    """
    still = [one for one in standstills(history) if one.rank is not None and one.verdict != "slow"]
    until: dict[int, float | None] = {}
    found: list[FaultSummary] = []
    explained: set[int] = set()
    for one in still:
        strike = next((event for event in reversed(history.strikes) if _explains(event, one)), None)
        if strike is not None:
            until.setdefault(id(strike), _end(history, one))
            continue
        found.append(_of_standstill(history, one))
        explained |= {one.replica} if one.lost_in is not None and one.replica is not None else set()
    found += [
        FaultSummary(
            t=event.t, replica=event.replica, rank=event.rank, kind=event.kind, point=event.point, step=event.step,
            label=history.label(event.step), microbatch=event.microbatch, bucket=event.bucket, until=until.get(id(event)),
        )
        for _, event in history.of(trace.Fault)
    ]  # fmt: skip
    for line, event in history.of(trace.Failure):
        if event.replica not in explained and not any(_may_end(history, strike, line, event) for strike in history.strikes):
            explained.add(event.replica)
            step = history.planned_at_failure.get(line)
            found.append(
                FaultSummary(
                    t=event.t, replica=event.replica, rank=event.rank, kind="external", cause=event.cause, step=step,
                    label=history.label(step),
                )
            )  # fmt: skip
    return tuple(sorted(found, key=lambda fault: fault.t))


def _explains(strike: trace.Fault, one: Standstill) -> bool:
    return strike.replica == one.replica and one.begin - _SLACK_S <= strike.t <= one.told_at


def _may_end(history: History, strike: trace.Fault, line: Line, failure: trace.Failure) -> bool:
    """Return whether an injected fault may have led to a failure of its replica.

    A freeze that ended before the failure has not, unless the replica was already removed.
    """
    if strike.replica != failure.replica:
        return False
    has_ended = any(
        (thawed.replica, thawed.rank) == (strike.replica, strike.rank) and at < line and strike.t <= thawed.t
        for at, thawed in history.of(trace.Thawed)
    )
    removed = history.lost_at.get(strike.replica)
    return not has_ended or (removed is not None and removed[0] < line)


def _end(history: History, one: Standstill) -> float:
    return history.seconds if one.end is None else one.end


def _of_standstill(history: History, one: Standstill) -> FaultSummary:
    """Return the standstill of a rank as a fault that was not injected."""
    first = one.microbatches[0] if len(one.microbatches) == 1 else None
    return FaultSummary(
        t=one.begin, replica=one.replica or 0, rank=one.rank or 0, kind=one.verdict, cause=f"in {one.phase.replace('_', ' ')}",
        step=one.step, label=history.label(one.step) or one.label or None, microbatch=first, until=_end(history, one),
    )  # fmt: skip


def struck_at(history: History) -> dict[int, float]:
    """Return for each generation the time of the first fault that it answers to.

    A generation answers to the newest injected fault of each replica that it lost, slowness aside.
    It also answers to faults since the generation before that leave a rank alive and silent
    (`STANDS_STILL`): such a replica may be suspected and yet move again. A standstill that was not
    injected struck at its `begin`. Generations without any of these are left out.
    """
    found = {}
    before = 0.0
    still = [one for one in standstills(history) if one.lost_in is not None and one.rank is not None]
    for one in history.generations.values():
        lost = {loss.replica for loss in one.losses}
        newest: dict[int, float] = {}
        for fault in history.strikes:
            stood_still = fault.kind in STANDS_STILL and fault.t > before
            if fault.t <= one.t and (fault.replica in lost or stood_still):
                newest[fault.replica] = fault.t
        for each in still:
            if each.lost_in == one.generation and each.replica is not None:
                newest.setdefault(each.replica, each.begin)
        if newest:
            found[one.generation] = min(newest.values())
        before = one.t
    return found


def _recovery(
    history: History, announced: trace.Generation, struck: float | None, computing: dict[int, tuple[int, ...]]
) -> RecoverySummary:
    told = history.recoveries.get(announced.generation)
    seconds: dict[str, float] = dict(told.seconds) if told else {}
    if struck is not None and told:
        seconds["detect"] = round(announced.t - struck, 6)
    step = told.step if told else None
    total = None
    if told is not None and told.committed_at is not None and "detect" in seconds:  # a trace may have gaps
        total = round(told.committed_at - announced.t + seconds["detect"], 6)
    return RecoverySummary(
        generation=announced.generation,
        lost_replicas=tuple(one.replica for one in announced.losses),
        newcomers=announced.newcomers if announced.is_join else (),
        reason=announced.reason,
        step=step,
        label=history.label(step),
        computing=computing,
        **{f"{phase}_s": seconds.get(phase) for phase in get_args(trace.Phase)},
        total_s=total,
    )


class Accounts:
    """Facts that a summary needs of every step: a watcher for `replay`."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.work = WorkAccount(history, is_fed=True)
        self.computing: dict[int, dict[int, tuple[int, ...]]] = {}
        """Generation -> replica -> microbatches that it was computing at the announcement."""
        self.is_bit_identical: bool | None = None
        """True if the parameter digests agreed after every step; None if there was nothing to
        compare."""

    def takes(self) -> Mapping[type, Taker]:
        return {}

    def takes_void(self) -> Mapping[type, Taker]:
        return {}

    def closed(self, step: Step) -> Iterable[None]:
        self.work.add(step)
        label = step.plans[0][1].label if step.plans else ""
        for generation in step.at_announcement:
            self.computing[generation] = _computing(step, generation, label_of(label).is_training)
        digests: dict[int, dict[int, str]] = defaultdict(dict)
        for _, event in step.applied:
            if event.parameter_digest is not None and not self._history.outvoted_for(event):
                digests[event.rank][event.replica] = event.parameter_digest
        compared = [set(by_replica.values()) for by_replica in digests.values() if len(by_replica) > 1]
        if compared:
            self.is_bit_identical = self.is_bit_identical is not False and all(len(values) == 1 for values in compared)
        return ()


def _computing(step: Step, generation: int, is_trained: bool) -> dict[int, tuple[int, ...]]:
    """Return the microbatches that each replica's first stage had begun and not finished.

    A lost replica keeps those that it had when it was lost.
    """
    _, begun, ended = step.at_announcement[generation]
    chunks = (key[1] for work in step.ranks.values() for key in work.groups)
    last = 0 if is_trained else max(chunks, default=0)
    found = {}
    for replica, ids in sorted(begun.items()):
        for microbatch, chunk in ended.get(replica, ()):
            if chunk == last and microbatch in ids:
                ids.remove(microbatch)
        if ids:
            found[replica] = tuple(ids)
    return found


def summarize(
    history: History, comparison: Comparison | None = None, accounts: Accounts | None = None, gaps: Gaps | None = None
) -> Summary:
    """Return the summary of a history.

    `accounts` have already observed a replay of the trace; without them the trace is read once
    more.
    """
    if accounts is None:
        accounts = Accounts(history)
        for _ in replay(history, [accounts]):
            pass
    work, goodput, gaps = accounts.work, Goodput(history), gaps or Gaps(history)
    records = list(history.records.values())
    training = [step for step, record in history.records.items() if label_of(record.label).is_training]
    strikes = struck_at(history)
    started, ended = history.first(trace.RunStarted), history.first(trace.RunFinished)
    newest = history.generations[max(history.generations)] if history.generations else None
    curve = [loss for label, loss in history.losses().items() if label_of(label).is_training]
    return Summary(
        steps=len(training),
        evaluation_steps=sum(label_of(record.label).is_evaluation for record in records),
        microbatches_per_step=history.num_microbatches(training[-1]) if training else None,
        replicas_start=started.replicas if started else 0,
        replicas_end=_num_members(history, newest) if newest else 0,
        generations=len(history.generations),
        determinism=started.determinism if started else None,
        exit_code=ended.exit_code if ended else None,
        seconds=history.seconds,
        faults=faults(history),
        standstills=standstills(history),
        recoveries=tuple(
            _recovery(history, one, strikes.get(one.generation), accounts.computing.get(one.generation, {}))
            for one in list(history.generations.values())[1:]
        ),
        leaves=leaves(history, work.lost),
        joins=joins(history),
        microbatches_lost=len(work.lost),
        microbatches_redone=len(work.redone),
        microbatches_redone_in_schedule=sum(each.in_schedule for each in work.redone),
        microbatches_wasted=len(work.wasted),
        replicas_bit_identical=accounts.is_bit_identical,
        final_loss=curve[-1] if curve else None,
        goodput=None if goodput.share is None else round(goodput.share, 6),
        lost_to_faults_s=None if goodput.lost_s is None else round(goodput.lost_s, 6),
        level=started.level if started else "microbatches",
        events_missing=sum(gap.num_events for gap in gaps.events),
        steps_not_vouched_for=gaps.ranges(),
        **(msgspec.structs.asdict(comparison) if comparison else {}),
    )


def _num_members(history: History, newest: trace.Generation) -> int:
    """Return the size of the newest generation without newcomers that never became members."""
    proven = {replica for _, event in history.of(trace.Proven) for replica in event.newcomers}
    unproven = history.newcomers(newest.generation) - proven
    return len({*history.roster(newest.generation)} - unproven)


def save(folder: Path, summary: Summary) -> Path:
    """Write `summary.json` and return its path."""
    place = folder / SUMMARY_FILE
    with replacing(place) as file:
        file.write(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return place


def load(folder: Path) -> Summary:
    """Read `summary.json`.

    Raise OSError if there is none, ValueError if the content is no summary.
    """
    return msgspec.json.decode((folder / SUMMARY_FILE).read_bytes(), type=Summary)
