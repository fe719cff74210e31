"""The claims of the demo about its two runs, each with the evidence of the traces.

This module computes no result itself: the checker's findings and the summaries have all.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from megatron_recover import trace
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.wording import counted, named
from megatron_recover.faults import FaultKind
from megatron_recover.observe.gaps import LAUNCHER
from megatron_recover.observe.goodput import Goodput
from megatron_recover.observe.history import History
from megatron_recover.observe.joins import JoinSummary, Meanwhile, meanwhile, sizes
from megatron_recover.observe.summary import FaultSummary, RecoverySummary, Summary
from megatron_recover.observe.verify.check import Verdict
from megatron_recover.observe.work import Redone, WorkAccount

LONGEST_STEPS, LONGEST_SHARE = 3, 0.25
"""An older member stopped for a newcomer if it finished neither a microbatch nor a step for longer
than so many usual steps, and than this share of the time that the newcomer took. New processes take
cores from the members of this machine, so all takes several times as long as usual then."""


@dataclass(frozen=True)
class Claim:
    """One claim of the demo, and whether the evidence shows it."""

    text: str
    holds: bool
    evidence: str
    """One or more lines."""


def _taken_in(history: History) -> Iterator[str]:
    """Yield a sentence for each step in which a running pass was extended by lost microbatches."""
    by_step: dict[int, list[Redone]] = {}
    for one in WorkAccount(history).redone:
        if one.in_schedule:
            by_step.setdefault(one.step, []).append(one)
    for step, taken in by_step.items():
        replicas = sorted({one.replica for one in taken})
        yield (
            f"{history.label(step)}: microbatches {', '.join(map(str, sorted(one.microbatch for one in taken)))} "
            f"taken into the running pass by {named(replicas, between=' and ')}"
        )


def claims(reference: Verdict, faulty: Verdict, *, parts: str, patience_s: float, least_steps: int) -> tuple[Claim, ...]:
    """Return the claims about the two runs; `faulty` was checked against `reference`.

    `parts`: the name of what the ranks of a replica are: pipeline stages or lanes.
    `patience_s`: seconds after the last death for which the demo waited for the lost replicas.
    `least_steps`: the least number of steps of a run.
    """
    summary, quiet = faulty.summary, reference.summary
    kills = [fault for fault in summary.faults if fault.kind == FaultKind.KILL.value]
    backward, reduction = ([fault for fault in kills if fault.point == point] for point in ("backward", "reduce"))
    ranks = {fault.rank for fault in (*backward, *reduction)}
    killed = {event.replica for _, event in faulty.history.of(trace.Failure) if event.cause == "SIGKILL"}
    fewest = min((size for _, size in sizes(faulty.history)), default=0)
    is_over = summary.exit_code in (ExitCode.OK, ExitCode.INTERRUPTED)  # the demo ends the run
    return (
        Claim(
            f"Real processes were killed: in a backward and inside a reduction, of different {parts}",
            bool(backward and reduction) and len(ranks) > 1 and killed >= {one.replica for one in (*backward, *reduction)},
            "; ".join(f"{one.label}: replica {one.replica} rank {one.rank} {_place(one)}" for one in kills) or "none",
        ),
        Claim(
            "Training went on at once without a restart, with the replicas that were left",
            is_over and fewest < summary.replicas_start and summary.steps == quiet.steps >= least_steps,
            f"{summary.steps} steps, never fewer than {counted(fewest, 'replica')}, {_exit(summary)}",
        ),
        *_claims_of_return(faulty, patience_s),
        *_claims_of_any_loss(reference, faulty),
        Claim(
            "No invariant is broken in either run",
            all(one.holds and one.is_whole for one in (reference, faulty)),
            _what_is_broken(reference, faulty),
        ),
    )


def _claims_of_return(faulty: Verdict, patience_s: float) -> tuple[Claim, ...]:
    """Return the claims about the replicas that came back."""
    history, summary = faulty.history, faulty.summary
    back = [one for one in summary.joins if one.generation is not None]
    others = [one for one in summary.joins if one.generation is None]
    is_whole = bool(back) and summary.replicas_end == summary.replicas_start
    told = [_return(one) for one in back] + [one.words for one in others]
    if not is_whole:
        told.append(f"{patience_s:.0f} s after the last death there were {summary.replicas_end} of {summary.replicas_start}")
    return (
        Claim(
            "Every lost replica came back: new processes in its slots, under a new id, with a state read from live replicas",
            is_whole,
            "\n".join(told),
        ),
        _claim_of_progress(history, back, is_whole=is_whole),
    )


def _claim_of_progress(history: History, back: Sequence[JoinSummary], *, is_whole: bool) -> Claim:
    """Return the claim that no older member stopped for the newcomers that came back."""
    usual_s = statistics.median([one.seconds for one in Goodput(history).steps if one.is_training] or [0.0])
    told, holds = [], is_whole
    for one in back:
        progress = meanwhile(history, one)
        longest_s = max(LONGEST_STEPS * usual_s, LONGEST_SHARE * (one.joined_s or 0.0))
        holds &= bool(progress) and all(
            each.num_microbatches > 0 and each.is_on_time and each.is_finished and each.longest_s <= longest_s
            for each in progress
        )
        told.append(
            f"until replica {one.replica} was announced, "
            + ", ".join(f"replica {each.replica} finished {_work(each)}" for each in progress)
            + f"; longest pause {max((each.longest_s for each in progress), default=0.0):.2f} s"
        )
        if late := [each.replica for each in progress if not each.is_finished]:
            told.append(f"without all steps of the run that followed: {named(late, between=', ')}")
    return Claim(
        "Nobody stopped for them: each older member went on with its steps meanwhile, and finished the run",
        holds,
        "\n".join([*told, f"usual time of a step {usual_s:.2f} s"] if told else ["nobody came back"]),
    )


def _work(one: Meanwhile) -> str:
    return f"{counted(one.num_microbatches, 'microbatch', 'microbatches')} in {counted(one.num_steps, 'step')}"


def _return(one: JoinSummary) -> str:
    """Return how a replica came back, with the seconds of each part."""
    parts = (
        ("processes ended", one.freed_s), ("forming", one.formed_s), ("waiting for a step and reading", one.reading_s),
        ("admission", one.admitted_s),
    )  # fmt: skip
    took = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts if seconds is not None)
    total = f", {one.back_s:.1f} s after the death" if one.back_s is not None else ""
    place = f" in the place of {named(one.in_place_of, between=', ')}" if one.in_place_of else ""
    return f"replica {one.replica}{place} joined at {one.label or f'generation {one.generation}'}{total} ({took})"


def node_claims(reference: Verdict, faulty: Verdict, killed: Sequence[int]) -> tuple[Claim, ...]:
    """Return the claims about a run in which the processes `killed`, a whole node, got SIGKILL.

    `faulty` was checked against `reference`.
    """
    summary, quiet = faulty.summary, reference.summary
    lost = [event for _, event in faulty.history.of(trace.NodeLost)]
    gone = {replica for event in lost for replica in event.replicas}
    recoveries = [one for one in summary.recoveries if one.lost_replicas]
    began = faulty.history.label(recoveries[0].step) if recoveries else None
    return (
        Claim(
            "A whole node was killed within a step: its launcher and all its ranks",
            bool(killed) and len(lost) == len(recoveries) == 1 and began is not None and gone == {*recoveries[0].lost_replicas},
            "; ".join(
                f"{began}: node {event.node} with {named(event.replicas, between=', ')}, "
                f"{counted(len(killed), 'process', 'processes')}"
                for event in lost
            )
            or "none was lost",
        ),
        Claim(
            "The others went on without a restart; nothing can come back here, as the slots are gone with the node",
            summary.exit_code == 0
            and summary.steps == quiet.steps > 0
            and 0 < summary.replicas_end == summary.replicas_start - len(gone),
            _how_far(summary, quiet),
        ),
        *_claims_of_any_loss(reference, faulty),
        Claim(
            "No invariant is broken in either run, as far as their traces tell: the lost node took its last events with it",
            reference.holds and reference.is_whole and faulty.holds and _lacks_only_what_nodes_took(faulty, lost),
            _what_is_broken(reference, faulty),
        ),
    )


def _lacks_only_what_nodes_took(verdict: Verdict, lost: Sequence[trace.NodeLost]) -> bool:
    """Return whether all missing events are of `lost` nodes.

    They may be of the agents of these nodes and of ranks of the replicas that were on them.
    """
    replicas = {replica for event in lost for replica in event.replicas}
    agents = {(LAUNCHER, -event.node) for event in lost}
    return not verdict.history.is_unordered and all(
        gap.replica in replicas or (gap.replica, gap.rank) in agents for _, gap in verdict.history.of(trace.Gap)
    )


def _how_far(summary: Summary, quiet: Summary) -> str:
    replicas = f"{summary.replicas_start} -> {counted(summary.replicas_end, 'replica')}"
    return f"{summary.steps} of {quiet.steps} steps, {replicas}, {_exit(summary)}"


def _exit(summary: Summary) -> str:
    asked = " (the demo asked for the end)" if summary.exit_code == ExitCode.INTERRUPTED else ""
    return f"exit code {summary.exit_code}{asked}"


def _claims_of_any_loss(reference: Verdict, faulty: Verdict) -> tuple[Claim, ...]:
    """Return the claims that do not depend on what was lost."""
    summary, quiet = faulty.summary, reference.summary
    return (
        Claim(
            "The others did not let their pass end first: the lost microbatches joined it while it ran",
            summary.microbatches_redone_in_schedule > 0,
            "; ".join(_taken_in(faulty.history)) or "all was computed in a second pass, after the running one",
        ),
        Claim(
            f"Every step was made from the same {summary.microbatches_per_step} microbatches, each counted exactly once",
            not [one for one in faulty.violations if one.invariant == "INV-1"]
            and summary.microbatches_per_step == quiet.microbatches_per_step,
            "counted from what was computed and from what was summed (INV-1)",
        ),
        Claim(
            "Only what the dead replicas held was computed again",
            0 < summary.microbatches_redone <= summary.microbatches_lost and summary.microbatches_wasted == 0,
            f"{summary.microbatches_lost} lost, {summary.microbatches_redone} computed again, "
            f"{summary.microbatches_wasted} wasted",
        ),
        Claim(
            "All replicas held bit-identical parameters after every step",
            summary.replicas_bit_identical is True,
            "parameter digests of every rank and step",
        ),
        Claim(
            "The result is bit for bit that of the undisturbed run",
            summary.param_bit_identical is True and summary.loss_max_abs_diff == 0.0,
            f"largest difference of a parameter {summary.param_max_rel_diff}, of a loss {summary.loss_max_abs_diff}",
        ),
    )


def _what_is_broken(reference: Verdict, faulty: Verdict) -> str:
    broken = sorted({violation.invariant for violation in (*reference.violations, *faulty.violations)})
    if broken:
        return f"broken: {', '.join(broken)}"
    return "; ".join([*faulty.problems, *faulty.not_judged, *reference.not_judged]) or "INV-1 to INV-8"


def _place(fault: FaultSummary) -> str:
    """Return where a fault struck, in words."""
    if fault.point == "reduce":
        return f"inside the reduction of bucket {fault.bucket}"
    if fault.point == "backward":
        return f"in the backward of microbatch {fault.microbatch}"
    return f"in {fault.point}" if fault.point else f"by {fault.cause}"


def story(summary: Summary) -> Iterator[str]:
    """Yield what happened at each fault and in the recovery from it, a line each."""
    told: set[int] = set()
    for fault in summary.faults:
        if fault.kind == FaultKind.SLOW.value:
            yield f"{fault.label}: replica {fault.replica} rank {fault.rank} was slowed down for a step"
            continue
        yield f"{fault.label}: replica {fault.replica} rank {fault.rank} was killed {_place(fault)}"
        for one in summary.recoveries:
            if fault.replica in one.lost_replicas:
                told.add(one.generation)
                yield _recovery(one)
    for one in summary.recoveries:
        if one.lost_replicas and one.generation not in told:
            yield f"{one.label}: without {named(one.lost_replicas, between=', ')} from then on ({one.reason})"
            yield _recovery(one)
    for join in summary.joins:
        yield join.words


def _recovery(one: RecoverySummary) -> str:
    took = [(phase, getattr(one, f"{phase}_s")) for phase in get_args(trace.Phase)]
    times = ", ".join(f"{phase} {1000 * seconds:.0f} ms" for phase, seconds in took if seconds is not None)
    return f"  the others finished that very step in generation {one.generation}: {times}"
