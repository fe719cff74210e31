"""What a trace says of plans: all members make the same one, it deals what is missing, and what is done is what was dealt.

Each rule yields like those of `rules`, which says to which invariant it belongs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from megatron_recover import trace
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import Finding, Findings, History, Line, who
from megatron_recover.observe.replay import Taker
from megatron_recover.observe.rule import Rule
from megatron_recover.observe.step import Ids, Step, not_each_once, not_once

_COMMON = ("quotas", "transfers", "reduces", "decided")
"""What the plans of all members have alike; `computes` are a replica's own."""


def equal_plans(history: History, step: Step) -> Findings:
    """All members plan the same; the quotas of a step that nobody has begun sum to M, and each computes its own."""
    plans = step.plans
    fresh = min((plan.generation for _, plan in plans), default=0)
    firsts = {plan.generation: plan for _, plan in reversed(plans)}
    for line, plan in plans:
        first = firsts[plan.generation]
        for field in _COMMON:
            mine, theirs = getattr(plan, field), getattr(first, field)
            if mine != theirs:
                what = f"step {step.number}, generation {plan.generation}: {field} {mine} on replica {plan.replica}"
                yield line, f"{what}, {theirs} on replica {first.replica}"
                break
        if plan.generation > fresh or plan.replica not in plan.roster:
            continue
        own = sum(len(one.microbatches) for one in plan.computes)
        if sum(plan.quotas) != plan.num_microbatches or own != plan.quotas[plan.roster.index(plan.replica)]:
            what = f"step {step.number}: replica {plan.replica} computes {own} of {plan.num_microbatches} microbatches"
            yield line, f"{what}, the quotas are {list(plan.quotas)}"


def deals_what_is_missing(history: History, step: Step) -> Findings:
    """What members hold by their statuses and what their plans deal them is each microbatch once, for every bucket to reduce.

    Asked only where all members of a generation have planned: one that is lost before it does takes what it was dealt along.
    """
    held = {(one.generation, one.replica): one.contributions for _, one in step.statuses}
    whole: dict[int, dict[int, tuple[Line, trace.Plan]]] = defaultdict(dict)
    for line, plan in step.plans:
        whole[plan.generation][plan.replica] = line, plan
    for generation, of_members in whole.items():
        if of_members.keys() != history.members.get(generation, frozenset()):
            continue
        parts: dict[int, list[Ids]] = defaultdict(list)
        known: dict[tuple[int, ...], Ids] = {}
        for replica, (_, plan) in of_members.items():
            for one in held.get((generation, replica), ()):
                if one.microbatches not in known:
                    known[one.microbatches] = Ids(one.microbatches)
                for bucket in one.buckets:
                    parts[bucket].append(known[one.microbatches])
            for compute in plan.computes:
                ids = Ids(compute.microbatches)
                for bucket in compute.into:
                    parts[bucket].append(ids)
        line, plan = max(of_members.values(), key=lambda one: one[0])
        judged: dict[tuple[int, ...], dict[int, int]] = {}  # most buckets have the same parts
        for bucket in plan.reduces:
            key = tuple(map(id, parts[bucket]))
            if key not in judged:
                judged[key] = not_each_once(parts[bucket], plan.num_microbatches)
            if wrong := judged[key]:
                what = f"generation {generation} reduces bucket {bucket} of step {step.number}"
                yield line, f"{what}, to which its members hold or are dealt microbatch: times {wrong}, not each once"
                break


class ComputedAsDealt(Rule):
    """A rank computes what the plan of its replica deals, into those buckets, and a pass takes in all of it or nothing."""

    needs = "microbatches"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._dealt: dict[int, dict[tuple[int, int], dict[int, frozenset[int]]]] = {}
        """Step -> (replica, generation) -> microbatch -> the buckets that it goes into."""

    def takes(self) -> Mapping[type, Taker]:
        return {
            trace.Plan: self._planned, trace.MicrobatchStarted: self._started, trace.MicrobatchFinished: self._finished,
            trace.Extended: self._extended,
        }  # fmt: skip

    def closed(self, step: Step) -> Iterable[Finding]:
        self._dealt.pop(step.number, None)
        return ()

    def _planned(self, line: Line, event: trace.Plan, step: Step) -> Iterable[Finding]:
        dealt = self._dealt.setdefault(event.step, {}).setdefault((event.replica, event.generation), {})
        for compute in event.computes:
            into = step.shared(frozenset(compute.into))
            for microbatch in compute.microbatches:
                before = dealt.get(microbatch)
                dealt[microbatch] = into if before is None else step.shared(before | into)
        return ()

    def _of(self, event: trace.MicrobatchStarted | trace.MicrobatchFinished | trace.Extended) -> Mapping[int, frozenset[int]]:
        by_plan = self._dealt.get(event.step)
        return by_plan.get((event.replica, event.generation), {}) if by_plan else {}

    def _started(self, line: Line, event: trace.MicrobatchStarted, step: Step) -> Iterable[Finding]:
        return () if event.microbatch in self._of(event) else self._not_dealt(line, event)

    def _finished(self, line: Line, event: trace.MicrobatchFinished, step: Step) -> Iterable[Finding]:
        dealt = self._of(event).get(event.microbatch)
        if dealt is None:
            return self._not_dealt(line, event)
        if dealt.issuperset(event.into):
            return ()
        other = sorted(set(event.into) - dealt)
        what = f"{who(event)} computes microbatch {event.microbatch} of step {event.step} into buckets {other}"
        return ((line, f"{what}, which generation {event.generation} does not ask for"),)

    def _not_dealt(self, line: Line, event: trace.MicrobatchStarted | trace.MicrobatchFinished) -> Iterable[Finding]:
        what = f"{who(event)} computes microbatch {event.microbatch} of step {event.step}"
        return ((line, f"{what}, which no plan of generation {event.generation} had dealt to it"),)

    def _extended(self, line: Line, event: trace.Extended, step: Step) -> Iterable[Finding]:
        plan = self._of(event)
        if set(event.microbatches) == plan.keys():
            return ()
        what = f"{who(event)} takes microbatches {list(event.microbatches)} of step {event.step} into its pass"
        return ((line, f"{what}; generation {event.generation} dealt {sorted(plan)}"),)


def counted_as_told(history: History, step: Step) -> Findings:
    """What a plan counts as decided or has sent, a member has told that it holds complete."""
    complete = {(one.generation, one.replica): set(one.complete) for _, one in step.statuses}
    for line, event in step.plans:
        counted = {(one.bucket, one.version, one.source) for one in (*event.decided, *event.transfers)}
        for bucket, version, source in sorted(counted):
            if (bucket, version) not in complete.get((event.generation, source), ()):
                what = f"replica {event.replica} plans step {event.step} with bucket {bucket} version {version} complete on"
                yield line, f"{what} replica {source}, which has not told so in generation {event.generation}"


class HeldAsPlanned(Rule):
    """A rank holds only sums that its plan asks for, and what its plan has sent to it."""

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._planned: dict[int, dict[tuple[int, int], tuple[frozenset[int], tuple[trace.Transfer, ...]]]] = {}
        """Step -> (replica, generation) -> buckets to sum, and what is sent."""

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Plan: self._plan, trace.Reduced: self._result, trace.Transferred: self._result}

    def closed(self, step: Step) -> Iterable[Finding]:
        self._planned.pop(step.number, None)
        return ()

    def _plan(self, line: Line, event: trace.Plan, step: Step) -> Iterable[Finding]:
        found = self._planned.setdefault(event.step, {})
        found[event.replica, event.generation] = step.shared(frozenset(event.reduces)), step.shared(event.transfers)
        return ()

    def _result(self, line: Line, event: trace.Reduced | trace.Transferred, step: Step) -> Iterable[Finding]:
        reduces, transfers = self._planned.get(event.step, {}).get((event.replica, event.generation), (frozenset(), ()))
        if isinstance(event, trace.Reduced):
            if event.bucket in reduces:
                return ()
        elif _is_sent(event, transfers):
            return ()
        origin = f" from replica {event.source}" if isinstance(event, trace.Transferred) else ""
        what = f"{who(event)} holds bucket {event.bucket} version {event.version} of step {event.step}{origin}"
        return ((line, f"{what}, which no plan of generation {event.generation} asks for"),)


def _is_sent(event: trace.Transferred, transfers: Iterable[trace.Transfer]) -> bool:
    sent = (event.bucket, event.version, event.source)
    return any((one.bucket, one.version, one.source) == sent and event.replica in one.targets for one in transfers)


__all__ = ["ComputedAsDealt", "HeldAsPlanned", "counted_as_told", "deals_what_is_missing", "equal_plans", "not_once"]
