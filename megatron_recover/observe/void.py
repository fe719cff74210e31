"""Steps that were made void and computed anew: whether with reason, and what the members disagreed about.

The void attempts are left out of all other rules (`replay.py`), as if they had never been.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from megatron_recover import trace
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import Findings, History, Line, is_given_up


def void_for_a_reason(history: History, gaps: Gaps) -> Findings:
    """INV-1: a step is made void because a member reported a miscount of it, once, and before anybody has committed it.

    If that was miscounted, too, it is given up, and its record says so.
    """
    told: dict[int, list[tuple[int, Line]]] = defaultdict(list)
    for line, event in history.of(trace.Miscounted):
        told[event.step].append((event.generation, line))
    voided: dict[int, int] = {}
    given_up: set[int] = set()
    for line, event in history.of(trace.Generation):
        if event.void is None or event.void[0] in gaps.touched:
            continue
        step, since = event.void
        # Of the attempt that it ends: for a step that is given up that is the second one.
        first = voided.get(step, 0) if event.gives_up and step not in given_up else 0
        if not any(generation >= first and at < line for generation, at in told[step]):
            yield line, f"generation {event.generation} makes step {step} void, of which nobody has reported a miscount"
        if event.gives_up and step not in voided:
            yield line, f"generation {event.generation} gives step {step} up, which was not computed anew"
        if event.gives_up and step not in given_up:
            given_up.add(step)
            voided[step] = since
        if voided.setdefault(step, since) != since:
            yield line, f"generation {event.generation} makes step {step} void for the second time"
        record = history.records.get(step)
        if event.generation == since and record is not None and record.line < line:
            yield line, f"generation {event.generation} makes step {step} void, which is committed"
    for step, record in history.records.items():
        if is_given_up(record.label) != (step in given_up) and step not in gaps.touched:
            yield (
                record.line,
                f"step {step} was committed as {record.label!r}; it was {'' if step in given_up else 'not '}given up",
            )


def miscounts(history: History) -> Iterator[str]:
    """Yield for each microbatch that a sum did not count once who had it in its local gradient, and by which plans.

    Reads the trace once more where there is any.
    """
    told: dict[tuple[int, int, int, int], dict[int, trace.Miscounted]] = defaultdict(dict)
    for _, event in history.of(trace.Miscounted):
        told[event.step, event.generation, event.bucket, event.rank][event.replica] = event
    steps = {step for step, _, _, _ in told}
    plans = [event for _, event in history.events if isinstance(event, trace.Plan) and event.step in steps] if told else []
    for (step, generation, bucket, rank), by_replica in sorted(told.items()):
        for microbatch in sorted({wrong for event in by_replica.values() for wrong in event.microbatches}):
            planned: dict[int, list[int]] = defaultdict(list)
            for plan in plans:
                is_asked = any(microbatch in one.microbatches and bucket in one.into for one in plan.computes)
                if plan.step == step and plan.generation <= generation and is_asked:
                    planned[plan.replica].append(plan.generation)
            found = []
            for replica in sorted({*by_replica, *planned}):
                by = (
                    f"planned in generation {', '.join(map(str, planned[replica]))}"
                    if planned[replica]
                    else "planned by nobody"
                )
                event = by_replica.get(replica)  # None: a newer generation came before its sum was complete
                if event is None:
                    found.append(f"replica {replica} did not report how often it has it, {by}")
                elif planned[replica] or event.own_counts[microbatch]:
                    found.append(f"replica {replica} has it {event.own_counts[microbatch]} times, {by}")
            where = f"step {step}, bucket {bucket}, rank {rank}"
            what = f"{where}: microbatch {microbatch} was miscounted in generation {generation}"
            yield f"{what}; {'; '.join(found) or 'no replica that reported it has it'}"
