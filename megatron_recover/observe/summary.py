"""`summary.json`: what a run was, what happened to it and what that cost, from its trace alone.

Everything here can be rebuilt from `events.jsonl` at any time; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from megatron_recover import trace
from megatron_recover.observe.compare import Comparison, compare
from megatron_recover.observe.history import History, is_training
from megatron_recover.observe.work import Work

SUMMARY_FILE = "summary.json"
_Stamped = trace.Plan | trace.MicrobatchFinished | trace.Reduced | trace.Transferred | trace.Committed


class FaultSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that went wrong: injected (`point` is set) or from outside (`cause` only)."""

    t: float
    """Seconds since the start of the run."""
    replica: int
    rank: int
    kind: str
    """kill, stop or raise; "external" for what nobody injected."""
    point: str | None = None
    step: int | None = None
    label: str | None = None
    microbatch: int | None = None
    bucket: int | None = None
    cause: str | None = None


class RecoverySummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one new generation with losses cost. Seconds of a phase run from the end of the one before it on the slowest member.

    A phase is None where it did not happen (nothing to recompute) or was overtaken by a newer generation.
    """

    generation: int
    lost_replicas: tuple[int, ...]
    step: int | None
    label: str | None
    detect_s: float | None
    """From the injected fault (else from the agent's report of the failure) to the announcement of the generation."""
    agree_s: float | None
    """Until the last member's status."""
    redeal_s: float | None
    """Until the last member's plan."""
    recompute_s: float | None
    """Until the last backward of a microbatch that was dealt again."""
    reduce_s: float | None
    """Until the last sum or transfer of this generation."""
    commit_s: float | None
    """Until the last member committed the step."""
    overtaken: bool
    """A newer generation came before the step was committed."""


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
    microbatches_lost: int
    microbatches_redone: int
    microbatches_wasted: int
    replicas_bit_identical: bool | None
    """Whether the parameter digests agreed after every step; None where there was nothing to compare."""
    final_loss: float | None
    reference: str | None = None
    """Run directory that the fields below compare with."""
    loss_max_abs_diff: float | None = None
    param_max_rel_diff: float | None = None
    param_bit_identical: bool | None = None


def _label(history: History, step: int | None) -> str | None:
    plans = history.plans.get(step) if step is not None else None
    return plans[0][1].label if plans else None


def faults(history: History) -> tuple[FaultSummary, ...]:
    """Injected faults, and the first failure of every replica that had no injected one."""
    found = [
        FaultSummary(
            t=event.t, replica=event.replica, rank=event.rank, kind=event.kind, point=event.point, step=event.step,
            label=_label(history, event.step), microbatch=event.microbatch, bucket=event.bucket,
        )
        for _, event in history.of(trace.Fault)
    ]  # fmt: skip
    explained = {fault.replica for fault in found}
    for _, event in history.of(trace.Failure):
        if event.replica not in explained:
            explained.add(event.replica)
            found.append(FaultSummary(t=event.t, replica=event.replica, rank=event.rank, kind="external", cause=event.cause))
    return tuple(sorted(found, key=lambda fault: fault.t))


def _times(events: Sequence[tuple[int, _Stamped]], step: int | None, generation: int) -> list[float]:
    return [event.t for _, event in events if event.step == step and event.generation == generation]


def _recovery(history: History, announced: trace.Generation) -> RecoverySummary:
    generation = announced.generation
    lost = tuple(one.replica for one in announced.losses)
    causes = [event.t for _, event in history.of(trace.Fault) if event.replica in lost and event.t <= announced.t]
    causes = causes or [event.t for _, event in history.of(trace.Failure) if event.replica in lost and event.t <= announced.t]
    statuses = [event for _, event in history.of(trace.Status) if event.generation == generation]
    step = min((event.step for event in statuses), default=None)
    results: list[tuple[int, _Stamped]] = [*history.of(trace.Reduced), *history.of(trace.Transferred)]
    ends: dict[str, list[float]] = {
        "agree_s": [event.t for event in statuses],
        "redeal_s": _times(history.of(trace.Plan), step, generation),
        "recompute_s": _times(history.of(trace.MicrobatchFinished), step, generation),
        "reduce_s": _times(results, step, generation),
        "commit_s": _times(history.of(trace.Committed), step, generation),
    }
    seconds: dict[str, float | None] = {"detect_s": round(announced.t - max(causes), 6) if causes else None}
    reached = announced.t
    for phase, times in ends.items():
        seconds[phase] = round(max(0.0, max(times) - reached), 6) if times else None
        reached = max([reached, *times])
    return RecoverySummary(
        generation=generation, lost_replicas=lost, step=step, label=_label(history, step), overtaken=not ends["commit_s"],
        **seconds,
    )  # fmt: skip


def summarize(history: History, comparison: Comparison | None = None) -> Summary:
    """Everything that `summary.json` says about a history."""
    work = Work(history)
    records = [record for _, record in history.records.values()]
    training = [record for record in records if is_training(record.label)]
    started, ended = history.first(trace.RunStarted), history.first(trace.RunFinished)
    newest = history.generations[max(history.generations)] if history.generations else None
    curve = [loss for label, loss in history.losses().items() if is_training(label)]
    return Summary(
        steps=len(training),
        evaluation_steps=len(records) - len(training),
        microbatches_per_step=history.num_microbatches(training[-1].step) if training else None,
        replicas_start=started.replicas if started else 0,
        replicas_end=len(newest.roster) if newest else 0,
        generations=len(history.generations),
        determinism=started.determinism if started else None,
        exit_code=ended.exit_code if ended else None,
        seconds=history.events[-1][1].t if history.events else 0.0,
        faults=faults(history),
        recoveries=tuple(_recovery(history, one) for one in history.generations.values() if one.losses),
        microbatches_lost=len(work.lost),
        microbatches_redone=len(work.redone),
        microbatches_wasted=len(work.wasted),
        replicas_bit_identical=_bit_identical(history),
        final_loss=curve[-1] if curve else None,
        **(msgspec.structs.asdict(comparison) if comparison else {}),
    )


def _bit_identical(history: History) -> bool | None:
    digests: dict[tuple[int, int], dict[int, str]] = {}
    for _, event in history.of(trace.Applied):
        if event.parameter_digest is not None:
            digests.setdefault((event.step, event.rank), {})[event.replica] = event.parameter_digest
    compared = [set(by_replica.values()) for by_replica in digests.values() if len(by_replica) > 1]
    return all(len(values) == 1 for values in compared) if compared else None


def write(run_dir: str | Path, against: str | Path | None = None) -> Summary:
    """Rebuild `summary.json` of a run directory from its trace; returns its content."""
    history = History.read(run_dir)
    summary = summarize(history, compare(Path(run_dir), Path(against)) if against else None)
    text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    (Path(run_dir) / SUMMARY_FILE).write_bytes(text + b"\n")
    return summary
