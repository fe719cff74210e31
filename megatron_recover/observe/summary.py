"""`summary.json`: what a run was, what happened to it and what that cost, from its trace alone.

Everything here can be rebuilt from `events.jsonl` at any time; nothing is measured here.
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
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.goodput import Goodput
from megatron_recover.observe.history import History
from megatron_recover.observe.replay import Taker, replay
from megatron_recover.observe.standstills import Standstill, standstills
from megatron_recover.observe.step import Step
from megatron_recover.observe.work import Work

SUMMARY_FILE = "summary.json"


class FaultSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that went wrong: injected (`point` is set), or the end or standstill of a rank that nobody injected."""

    t: float
    """Seconds since the start of the run."""
    replica: int
    rank: int
    kind: str
    """As in `faults.FaultKind`; where nobody injected it "external" for an end, hung, stopped or traced for a standstill."""
    point: str | None = None
    step: int | None = None
    label: str | None = None
    microbatch: int | None = None
    bucket: int | None = None
    cause: str | None = None
    until: float | None = None
    """When the rank that stood still went on, was fenced, or the run ended."""

    @property
    def where(self) -> str:
        """What was going on, in words; for a fault from outside what ended the process."""
        where = self.point.replace("_", " ") if self.point else self.cause or ""
        what = (("microbatch", self.microbatch), ("bucket", self.bucket))
        return where + "".join(f" of {name} {value}" for name, value in what if value is not None)

    @property
    def words(self) -> str:
        """The fault in words."""
        words = {
            "kill": "killed", "stop": "stopped", "freeze": "frozen", "raise": "raised an exception", "slow": "slowed down",
            "loop": "caught in an endless loop", "external": "ended", "hung": "hung", "traced": "held by a tracer",
        }  # fmt: skip
        happened = words.get(self.kind, self.kind)
        return f"replica {self.replica} rank {self.rank} {happened} " + (
            f"at {self.where}" if self.point else f"({self.where})"
        )


class RecoverySummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one new generation cost.

    Seconds of a phase are those of the slowest member (`trace.Recovery`). A phase is None where it did not happen: a newer
    generation came first, or nobody had begun a step.
    """

    generation: int
    lost_replicas: tuple[int, ...]
    reason: str
    step: int | None
    label: str | None
    computing: dict[int, tuple[int, ...]]
    """Replica -> the microbatches that it was computing when the generation was announced: of the lost ones as well."""
    detect_s: float | None
    """To the announcement of the generation, from the injected fault if there was one, else from the first sign of a loss."""
    agree_s: float | None
    """Until every member's status is there."""
    redeal_s: float | None
    """Until the new plan is obeyed; a pass that was under way is finished first."""
    recompute_s: float | None
    """Until what was dealt again is computed."""
    reduce_s: float | None
    """Until all results are held."""
    commit_s: float | None
    """Until all members have voted."""
    total_s: float | None = None
    """From the fault, as `detect_s` has it, to the last member's commit; None where this generation came to no commit."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `summary.json`."""

    steps: int
    """Committed training steps."""
    evaluation_steps: int
    microbatches_per_step: int | None
    """M of the last training step."""
    replicas_start: int
    replicas_end: int
    generations: int
    determinism: str | None
    exit_code: int | None
    """None while the run goes on, or when its launcher was killed."""
    seconds: float
    faults: tuple[FaultSummary, ...]
    recoveries: tuple[RecoverySummary, ...]
    standstills: tuple[Standstill, ...]
    """Who was slow, silent, hung, stopped or traced, where, for how long, and what came of it."""
    microbatches_lost: int
    microbatches_redone: int
    microbatches_redone_in_schedule: int
    """Of those redone the ones that a running pass took in; the others had a pass of their own."""
    microbatches_wasted: int
    replicas_bit_identical: bool | None
    """Whether the parameter digests agreed after every step, leaving out those that a replica was outvoted for; None where
    there was nothing to compare."""
    final_loss: float | None
    goodput: float | None = None
    """Share of the time of all steps that faults did not take (`observe.goodput`), 0..1; None where it cannot be told."""
    lost_to_faults_s: float | None = None
    """Seconds by which the steps with a fault in them took longer than others."""
    level: str = "microbatches"
    """How much the trace records (`trace.RunStarted.level`); below `microbatches` none are counted as redone or wasted."""
    events_missing: int = 0
    """Events that gaps in the trace tell were lost."""
    steps_not_vouched_for: tuple[tuple[int, int], ...] = ()
    """First and last of each row of steps of which events are missing: counts of microbatches are least values there."""
    reference: str | None = None
    """Run directory that the fields below compare with."""
    loss_max_abs_diff: float | None = None
    param_max_rel_diff: float | None = None
    param_bit_identical: bool | None = None


_SLACK_S = 1.0
"""A fault that struck no longer than this before the last progress that was seen of a rank explains its standstill."""


def faults(history: History) -> tuple[FaultSummary, ...]:
    """Injected faults, standstills that none of them explains, and the first failure of every replica that had neither."""
    still = [one for one in standstills(history) if one.rank is not None and one.verdict != "slow"]
    until: dict[int, float | None] = {}
    found: list[FaultSummary] = []
    explained = {event.replica for event in history.strikes}
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
        if event.replica not in explained:
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


def _end(history: History, one: Standstill) -> float:
    return history.seconds if one.end is None else one.end


def _of_standstill(history: History, one: Standstill) -> FaultSummary:
    """The standstill of a rank as a fault that nobody injected."""
    first = one.microbatches[0] if len(one.microbatches) == 1 else None
    return FaultSummary(
        t=one.begin, replica=one.replica or 0, rank=one.rank or 0, kind=one.verdict, cause=f"in {one.phase.replace('_', ' ')}",
        step=one.step, label=history.label(one.step) or one.label or None, microbatch=first, until=_end(history, one),
    )  # fmt: skip


def struck_at(history: History) -> dict[int, float]:
    """Generation -> when the first fault struck that it answers to; generations without one are left out.

    It answers to the newest fault of each replica that it lost, and to processes that were stopped since the generation
    before: a replica that stood still may be suspected and yet go on. A standstill that nobody injected struck with the last
    progress before it.
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
    if told is not None and told.committed_at is not None:
        total = round(told.committed_at - announced.t + seconds["detect"], 6)
    return RecoverySummary(
        generation=announced.generation,
        lost_replicas=tuple(one.replica for one in announced.losses),
        reason=announced.reason,
        step=step,
        label=history.label(step),
        computing=computing,
        **{f"{phase}_s": seconds.get(phase) for phase in get_args(trace.Phase)},
        total_s=total,
    )


class Accounts:
    """What a summary needs of every step: it watches a trace pass by (`replay`)."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.work = Work(history, is_fed=True)
        self.computing: dict[int, dict[int, tuple[int, ...]]] = {}
        """Generation -> replica -> what it was computing when that was announced."""
        self.is_bit_identical: bool | None = None
        """Whether the parameter digests agreed after every step; None where there was nothing to compare."""

    def takes(self) -> Mapping[type, Taker]:
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
    """By what first stages had begun and not finished; a lost replica stays where it was."""
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
    """Everything that `summary.json` says about a history.

    `accounts` have watched its trace pass by already; else it is read once more.
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
        replicas_end=len(newest.roster) if newest else 0,
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


def save(folder: Path, summary: Summary) -> Path:
    """Write `summary.json`; returns its path."""
    place = folder / SUMMARY_FILE
    with replacing(place) as file:
        file.write(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return place


def load(folder: Path) -> Summary:
    """Read `summary.json` again. Raises OSError where there is none, ValueError for one that is none."""
    return msgspec.json.decode((folder / SUMMARY_FILE).read_bytes(), type=Summary)
