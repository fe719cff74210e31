"""What a trace says of plans: all members make the same one, it deals what is missing, and what is done is what was dealt.

Each rule yields like those of `rules`, which says to which invariant it belongs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from megatron_recover import trace
from megatron_recover.observe.history import Findings, History, Line, who

_COMMON = ("quotas", "transfers", "reduces", "decided")
"""What the plans of all members have alike; `computes` are a replica's own."""


def not_once(counts: Mapping[int, int], num_microbatches: int) -> dict[int, int]:
    """How often a microbatch is counted, for each of 0..M-1 that is not counted once and each other that is."""
    ids = sorted({*range(num_microbatches), *counts})
    return {i: counts.get(i, 0) for i in ids if counts.get(i, 0) != (i < num_microbatches)}


def equal_plans(history: History) -> Findings:
    """All members plan the same; the quotas of a step that nobody has begun sum to M, and each computes its own."""
    for step, plans in history.plans.items():
        fresh = min(plan.generation for _, plan in plans)
        firsts = {plan.generation: plan for _, plan in reversed(plans)}
        for line, plan in plans:
            first = firsts[plan.generation]
            for field in _COMMON:
                mine, theirs = getattr(plan, field), getattr(first, field)
                if mine != theirs:
                    what = f"step {step}, generation {plan.generation}: {field} {mine} on replica {plan.replica}"
                    yield line, f"{what}, {theirs} on replica {first.replica}"
                    break
            if plan.generation > fresh or plan.replica not in plan.roster:
                continue
            own = sum(len(one.microbatches) for one in plan.computes)
            if sum(plan.quotas) != plan.num_microbatches or own != plan.quotas[plan.roster.index(plan.replica)]:
                what = f"step {step}: replica {plan.replica} computes {own} of {plan.num_microbatches} microbatches"
                yield line, f"{what}, the quotas are {list(plan.quotas)}"


def deals_what_is_missing(history: History) -> Findings:
    """What members hold by their statuses and what their plans deal them is each microbatch once, for every bucket to reduce.

    Asked only where all members of a generation have planned: one that is lost before it does takes what it was dealt along.
    """
    held = {(one.generation, one.step, one.replica): one.contributions for _, one in history.of(trace.Status)}
    for step, plans in history.plans.items():
        whole: dict[int, dict[int, tuple[Line, trace.Plan]]] = defaultdict(dict)
        for line, plan in plans:
            whole[plan.generation][plan.replica] = line, plan
        for generation, of_members in whole.items():
            if of_members.keys() != set(history.roster(generation)):
                continue
            counts: dict[int, Counter[int]] = defaultdict(Counter)
            for replica, (_, plan) in of_members.items():
                for bucket, microbatches in enumerate(held.get((generation, step, replica), ())):
                    counts[bucket].update(microbatches)
                for bucket, microbatches in _dealt(plan):
                    counts[bucket].update(microbatches)
            line, plan = max(of_members.values(), key=lambda one: one[0])
            for bucket in plan.reduces:
                if wrong := not_once(counts[bucket], plan.num_microbatches):
                    what = f"generation {generation} reduces bucket {bucket} of step {step}"
                    yield line, f"{what}, to which its members hold or are dealt microbatch: times {wrong}, not each once"
                    break


def _dealt(plan: trace.Plan) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each bucket, and microbatches that the plan's replica has to put into it."""
    for compute in plan.computes:
        for bucket in compute.into:
            yield bucket, compute.microbatches


def computed_as_dealt(history: History) -> Findings:
    """A rank computes what the plan of its replica deals, into those buckets, and a pass takes in all of it or nothing."""
    dealt: dict[tuple[int, int, int], dict[int, set[int]]] = {}
    for line, event in history.events:
        if isinstance(event, trace.Plan):
            buckets = dealt.setdefault((event.replica, event.generation, event.step), defaultdict(set))
            for compute in event.computes:
                for microbatch in compute.microbatches:
                    buckets[microbatch].update(compute.into)
            continue
        if not isinstance(event, trace.MicrobatchStarted | trace.MicrobatchFinished | trace.Extended):
            continue
        plan = dealt.get((event.replica, event.generation, event.step), {})
        if isinstance(event, trace.Extended):
            if set(event.microbatches) != plan.keys():
                what = f"{who(event)} takes microbatches {list(event.microbatches)} of step {event.step} into its pass"
                yield line, f"{what}; generation {event.generation} dealt {sorted(plan)}"
        elif event.microbatch not in plan:
            what = f"{who(event)} computes microbatch {event.microbatch} of step {event.step}"
            yield line, f"{what}, which no plan of generation {event.generation} had dealt to it"
        elif isinstance(event, trace.MicrobatchFinished) and (other := set(event.into) - plan[event.microbatch]):
            what = f"{who(event)} computes microbatch {event.microbatch} of step {event.step} into buckets {sorted(other)}"
            yield line, f"{what}, which generation {event.generation} does not ask for"


def held_as_planned(history: History) -> Findings:
    """A rank holds only sums that its plan asks for, and what its plan has sent to it by a member that told it was complete."""
    complete = {(one.generation, one.step, one.replica): one.complete for _, one in history.of(trace.Status)}
    planned: dict[tuple[int, int, int], trace.Plan] = {}
    for line, event in history.events:
        if isinstance(event, trace.Plan):
            planned[event.replica, event.generation, event.step] = event
            counted = {(one.bucket, one.version, one.source) for one in (*event.decided, *event.transfers)}
            for bucket, version, source in sorted(counted):
                if (bucket, version) not in complete.get((event.generation, event.step, source), ()):
                    what = f"replica {event.replica} plans step {event.step} with bucket {bucket} version {version} complete on"
                    yield line, f"{what} replica {source}, which has not told so in generation {event.generation}"
        elif isinstance(event, trace.Reduced | trace.Transferred):
            plan = planned.get((event.replica, event.generation, event.step))
            if plan is None or not _asks_for(plan, event):
                origin = f" from replica {event.source}" if isinstance(event, trace.Transferred) else ""
                what = f"{who(event)} holds bucket {event.bucket} version {event.version} of step {event.step}{origin}"
                yield line, f"{what}, which no plan of generation {event.generation} asks for"


def _asks_for(plan: trace.Plan, result: trace.Reduced | trace.Transferred) -> bool:
    if isinstance(result, trace.Reduced):
        return result.bucket in plan.reduces
    sent = (result.bucket, result.version, result.source)
    return any((one.bucket, one.version, one.source) == sent and result.replica in one.targets for one in plan.transfers)


def miscounts(history: History) -> Iterator[str]:
    """Yield for each microbatch that a sum did not count once who had it in its local gradient, and by which plans."""
    told: dict[tuple[int, int, int, int], dict[int, trace.Miscounted]] = defaultdict(dict)
    for _, event in history.of(trace.Miscounted):
        told[event.step, event.generation, event.bucket, event.rank][event.replica] = event
    plans = [event for _, event in (*history.void_attempts, *history.of(trace.Plan)) if isinstance(event, trace.Plan)]
    for (step, generation, bucket, rank), by_replica in sorted(told.items()):
        for microbatch in sorted({wrong for event in by_replica.values() for wrong in event.microbatches}):
            found = []
            for replica, event in sorted(by_replica.items()):
                planned = sorted(
                    plan.generation
                    for plan in plans
                    if (plan.replica, plan.step) == (replica, step) and plan.generation <= generation
                    and any(microbatch in one.microbatches and bucket in one.into for one in plan.computes)
                )  # fmt: skip
                if planned or event.own_counts[microbatch]:
                    by = f"planned in generation {', '.join(map(str, planned))}" if planned else "planned by nobody"
                    found.append(f"replica {replica} has it {event.own_counts[microbatch]} times, {by}")
            what = (
                f"step {step}, bucket {bucket}, rank {rank}: microbatch {microbatch} was miscounted in generation {generation}"
            )
            yield f"{what}; {'; '.join(found) or 'no replica that reported it has it'}"
