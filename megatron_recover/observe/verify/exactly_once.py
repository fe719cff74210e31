"""INV-1: a committed bucket counts each microbatch of its step exactly once.

The count is taken from the computed microbatches, not from the provenance alone. This file also
judges steps that were made void and computed anew. All other rules leave the void attempts out
(`replay.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from megatron_recover import trace
from megatron_recover.core.label import label_of
from megatron_recover.observe.facts import Line
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import History
from megatron_recover.observe.replay import Taker
from megatron_recover.observe.step import Ids, Step, not_each_once
from megatron_recover.observe.verify.common import who
from megatron_recover.observe.verify.rule import Finding, Findings, Rule, of_run, of_step


def counted_once(history: History, step: Step) -> Findings:
    """Require that the provenance of a committed bucket counts each microbatch of its step once."""
    versions = [(result.bucket, result.version) for result in step.record[1].versions] if step.record else []
    for key in versions if step.miscounted else ():
        for at, held in step.miscounted:
            if (held.bucket, held.version) == key:
                what = f"step {step.number} committed bucket {held.bucket}, which counts microbatch: times"
                yield at, f"{what} {_wrong_counts(history, held)}"


def _wrong_counts(history: History, held: trace.Reduced) -> str:
    """Describe the counts of a sum that are wrong, with lanes over all lanes.

    With lanes the right count depends on the bucket. So the microbatches are those that the rank
    reports in `Miscounted`; without this report all whose count is not one.
    """
    assert not isinstance(held.provenance, str)
    place = (held.replica, held.rank, held.generation, held.step, held.bucket)
    reports = (
        one.microbatches for _, one in history.of(trace.Miscounted)
        if (one.replica, one.rank, one.generation, one.step, one.bucket) == place
    )  # fmt: skip
    reported = next(reports, None)
    started = history.first(trace.RunStarted)
    wrong = {
        microbatch: count for microbatch, count in enumerate(held.provenance)
        if (count != 1 if reported is None else microbatch in reported)
    }  # fmt: skip
    return f"{wrong} (over all lanes)" if started is not None and started.layout.lanes > 1 else f"{wrong}"


def computed_once(history: History, step: Step) -> Findings:
    """Require that members computed each microbatch into a committed bucket once.

    The members are those of the committed version. This must hold on each rank position, and no
    other microbatch may be in the bucket.
    """
    if step.record is None:
        return
    line, record = step.record
    num_microbatches = step.num_microbatches()
    by_version: dict[int, dict[int, list[tuple[frozenset[int], Ids]]]] = {}
    judged: dict[tuple[int, ...], dict[int, int]] = {}  # most buckets of a rank have the same parts
    for result in record.versions:
        if num_microbatches is None:
            yield line, f"step {step.number} was committed, but nobody planned it"
            continue
        by_rank = by_version.get(result.version)
        if by_rank is None:
            by_rank = by_version[result.version] = _computed(history, step, result.version)
        for rank in history.ranks_of(result.bucket):
            parts = [ids for into, ids in by_rank.get(rank, ()) if result.bucket in into]
            key = tuple(map(id, parts))
            if key not in judged:
                judged[key] = not_each_once(parts, num_microbatches)
            if wrong := judged[key]:
                members, ids = list(history.roster(result.version)), f"0..{num_microbatches - 1}"
                what = (
                    f"step {step.number} committed bucket {result.bucket} version {result.version}; rank {rank} of its members"
                )
                yield line, f"{what} {members} computed microbatch: times {wrong}, not each of {ids} once"


def _computed(history: History, step: Step, version: int) -> dict[int, list[tuple[frozenset[int], Ids]]]:
    """Return what the members of generation `version` computed of a step, in it or in older ones.

    The result maps a rank position to pairs (buckets that took the gradient, microbatches), one for
    each member, generation, chunk and set of buckets.
    """
    members = history.members.get(version, frozenset())
    found: dict[int, list[tuple[frozenset[int], Ids]]] = defaultdict(list)
    for (replica, rank), work in step.ranks.items():
        for (generation, _, into), ids in work.groups.items() if replica in members else ():
            if generation <= version:
                found[rank].append((step.shared(frozenset(into)), ids))
    return found


def applied_once(history: History, step: Step) -> Findings:
    """Require that no rank applies a step twice."""
    applied: set[tuple[int, int]] = set()
    for line, event in step.applied:
        if (event.replica, event.rank) in applied:
            yield line, f"{who(event)} applied step {event.step} twice"
        applied.add((event.replica, event.rank))


class AskedFor(Rule):
    """A rule: M is what the command line asks for.

    All evaluations have the same M, and agreements have none. If the command line asks for no fixed
    M, nothing is judged.
    """

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        started = history.first(trace.RunStarted)
        self._asked = started.num_microbatches if started else None
        evaluations = (
            facts.num_microbatches for _, facts in sorted(history.steps.items())
            if facts.label is not None and label_of(facts.label).is_evaluation
        )  # fmt: skip
        self._evaluated = next(evaluations, None)

    def closed(self, step: Step) -> Findings:
        if self._asked is None or not step.plans:
            return
        line, plan = step.plans[0]
        wanted = (
            self._asked if label_of(plan.label).is_training else self._evaluated if label_of(plan.label).is_evaluation else 0
        )
        if plan.num_microbatches != wanted:
            yield line, f"step {step.number} ({plan.label}) has {plan.num_microbatches} microbatches; {wanted} are asked for"


class StartedAndFinished(Rule):
    """A rule: a microbatch that was finished was started."""

    needs = "microbatches"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._open: dict[int, dict[tuple[int, ...], int]] = {}
        """Step -> (replica, rank, generation, microbatch, chunk) -> starts minus ends, without
        zeros."""

    def takes(self) -> Mapping[type, Taker]:
        return {trace.MicrobatchStarted: self._started, trace.MicrobatchFinished: self._finished}

    def closed(self, step: Step) -> Iterable[Finding]:
        self._open.pop(step.number, None)
        return ()

    def _started(self, line: Line, event: trace.MicrobatchStarted, step: Step) -> Iterable[Finding]:
        return self._count(line, event, 1)

    def _finished(self, line: Line, event: trace.MicrobatchFinished, step: Step) -> Iterable[Finding]:
        return self._count(line, event, -1)

    def _count(self, line: Line, event: trace.MicrobatchStarted | trace.MicrobatchFinished, by: int) -> Iterable[Finding]:
        begun = self._open.get(event.step)
        if begun is None:
            begun = self._open[event.step] = {}
        key = (event.replica, event.rank, event.generation, event.microbatch, event.chunk)
        count = begun.pop(key, 0) + by
        if count:
            begun[key] = count
        if count >= 0:
            return ()
        return ((line, f"{who(event)} finished microbatch {event.microbatch} of step {event.step}, which it never started"),)


def every_iteration(history: History, gaps: Gaps) -> Findings:
    """Require that training goes through the iterations one by one.

    Each step must be committed with the label that it was planned with.
    """
    last: tuple[int, int] | None = None
    for step, record in history.records.items():
        planned = history.steps[step].label
        if planned is not None and planned != record.label and step not in gaps.touched:
            yield record.line, f"step {step} was committed as {record.label!r}, but planned as {planned!r}"
        if not label_of(record.label).is_training:
            continue
        iteration = label_of(record.label).iteration
        is_next = last is None or iteration == last[1] + 1
        if last is not None and not is_next and not _may_lie_between(gaps, last, (step, iteration)):
            yield record.line, f"step {step} trained iteration {iteration} after step {last[0]} had trained {last[1]}"
        last = (step, iteration)


def _may_lie_between(gaps: Gaps, last: tuple[int, int], now: tuple[int, int]) -> bool:
    """Return whether a gap can hide the iterations that are missing between two steps.

    `last` and `now` are (step, iteration).
    """
    return 1 < now[1] - last[1] <= now[0] - last[0] and any(one in gaps.touched for one in range(last[0] + 1, now[0]))


def deals_what_is_missing(history: History, step: Step) -> Findings:
    """Require that statuses and plans cover each microbatch once, in every bucket to reduce.

    This is judged only if all members of a generation have planned. A member that is lost before
    its plan takes its deal along.
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
    """A rule: a rank computes what the plan of its replica deals, into the buckets of the plan.

    A pass that is extended takes all microbatches of a plan.
    """

    needs = "microbatches"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._dealt: dict[int, dict[tuple[int, int], dict[int, frozenset[int]]]] = {}
        """Step -> (replica, generation) -> microbatch -> buckets that it goes into."""

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


def void_for_a_reason(history: History, gaps: Gaps) -> Findings:
    """Require a reported miscount for each step that is made void.

    A step is made void once, and not after a replica has committed it. If its second attempt is
    miscounted, too, the step is given up, and its record shows that.
    """
    told: dict[int, list[tuple[int, Line]]] = defaultdict(list)
    for line, miscount in history.of(trace.Miscounted):
        told[miscount.step].append((miscount.generation, line))
    voided: dict[int, int] = {}
    given_up: set[int] = set()
    for line, event in history.of(trace.Generation):
        if event.void is None or event.void[0] in gaps.touched:
            continue
        step, since = event.void
        # The miscount must be in the attempt that is ended. For a step that is given up that is the
        # second one.
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
        if label_of(record.label).is_given_up != (step in given_up) and step not in gaps.touched:
            yield (
                record.line,
                f"step {step} was committed as {record.label!r}; it was {'' if step in given_up else 'not '}given up",
            )


def miscounts(history: History) -> Iterator[str]:
    """Yield a sentence on each miscounted microbatch: which replicas have it, and by which plans.

    If there is any miscount, the trace is read once more.
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
                told_by = by_replica.get(replica)  # None: a newer generation came before its sum was complete
                if told_by is None:
                    found.append(f"replica {replica} did not report how often it has it, {by}")
                elif planned[replica] or told_by.own_counts[microbatch]:
                    found.append(f"replica {replica} has it {told_by.own_counts[microbatch]} times, {by}")
            where = f"step {step}, bucket {bucket}, rank {rank}"
            what = f"{where}: microbatch {microbatch} was miscounted in generation {generation}"
            yield f"{what}; {'; '.join(found) or 'no replica that reported it has it'}"


RULES: tuple[type[Rule], ...] = (
    of_step(counted_once),
    of_step(computed_once, "microbatches"),
    of_step(deals_what_is_missing),
    ComputedAsDealt,
    AskedFor,
    StartedAndFinished,
    of_run(every_iteration, "steps"),
    of_step(applied_once),
    of_run(void_for_a_reason),
)
"""Rules of the invariant, in the order in which their findings are reported."""
