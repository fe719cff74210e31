"""What a trace must contain: rules that find what is missing, or what contradicts the rest, behind a correct-looking commit.

`rules` judges what was written; a rule here asks for what should have been. Each yields like a rule, and `rules` says to
which invariant it belongs. A killed process owes nothing after its last line: something is missing only where its writer
went on, or where the run claims to have ended well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from megatron_recover import trace
from megatron_recover.core.values import ExitCode
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import (
    Finding,
    Findings,
    History,
    Line,
    is_evaluation,
    is_given_up,
    is_training,
    iteration_of,
    who,
)
from megatron_recover.observe.replay import Taker
from megatron_recover.observe.rule import Rule
from megatron_recover.observe.step import Step

RANK_WORK = (
    trace.MicrobatchStarted, trace.MicrobatchFinished, trace.BucketPassed, trace.Reduced, trace.Transferred, trace.Applied,
)  # fmt: skip
"""What a rank does for a step."""
NEVER_ALONE = (
    ExitCode.TOO_FEW_REPLICAS, ExitCode.POISONED_MICROBATCH, ExitCode.DIVERGED, ExitCode.NO_REPLICA_LEFT,
)  # fmt: skip
"""Exit codes that only the coordinator gives, which says so by `stopping`."""


# --- INV-1 ---------------------------------------------------------------------------------------------------------------


class AskedFor(Rule):
    """M is what the command line asked for; evaluations are only equal to each other."""

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        started = history.first(trace.RunStarted)
        self._asked = started.num_microbatches if started else None
        evaluations = (
            facts.num_microbatches for _, facts in sorted(history.steps.items())
            if facts.label is not None and is_evaluation(facts.label)
        )  # fmt: skip
        self._evaluated = next(evaluations, None)

    def closed(self, step: Step) -> Findings:
        if self._asked is None or not step.plans:
            return
        line, plan = step.plans[0]
        wanted = self._asked if is_training(plan.label) else self._evaluated if is_evaluation(plan.label) else 0
        if plan.num_microbatches != wanted:
            yield line, f"step {step.number} ({plan.label}) has {plan.num_microbatches} microbatches; {wanted} are asked for"


class StartedAndFinished(Rule):
    """What was finished was started."""

    needs = "microbatches"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._open: dict[int, dict[tuple[int, ...], int]] = {}
        """Step -> what is begun (above 0), or was finished more often than begun (below)."""

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
    """Training goes through the iterations one by one."""
    last: tuple[int, int] | None = None
    for step, record in history.records.items():
        planned = history.steps[step].label
        if planned is not None and planned != record.label and step not in gaps.touched:
            yield record.line, f"step {step} was committed as {record.label!r}, but planned as {planned!r}"
        if not is_training(record.label):
            continue
        iteration = iteration_of(record.label)
        is_next = last is None or iteration == last[1] + 1
        if last is not None and not is_next and not _may_lie_between(gaps, last, (step, iteration)):
            yield record.line, f"step {step} trained iteration {iteration} after step {last[0]} had trained {last[1]}"
        last = (step, iteration)


def _may_lie_between(gaps: Gaps, last: tuple[int, int], now: tuple[int, int]) -> bool:
    """Whether iterations that are missing between two steps can be those of steps that a gap took out whole."""
    return 1 < now[1] - last[1] <= now[0] - last[0] and any(one in gaps.touched for one in range(last[0] + 1, now[0]))


# --- INV-2 ---------------------------------------------------------------------------------------------------------------


def whole_records(history: History, step: Step) -> Findings:
    """A step commits all buckets, an evaluation the ledger, each with the checksum of every rank that holds it.

    One that is given up commits none.
    """
    buckets = tuple(range(len(history.bucket_ranks)))
    whole: set[tuple[int, str]] = set()
    for line, event in step.committed:
        if (id(event.versions), event.label) in whole:  # most commits share them (`Step.shared`)
            continue
        expected = () if is_given_up(event.label) else buckets if is_training(event.label) else buckets[-1:]
        committed = tuple(sorted(result.bucket for result in event.versions))
        if committed != expected:
            what = f"replica {event.replica} committed buckets {list(committed)} in step {event.step} ({event.label})"
            yield line, f"{what}, not {list(expected)}"
            continue
        is_whole = True
        for result in event.versions:
            if len(result.checksums) != len(history.ranks_of(result.bucket)):
                is_whole = False
                what = f"step {event.step} committed bucket {result.bucket} with {len(result.checksums)} checksums"
                yield line, f"{what}; ranks {list(history.ranks_of(result.bucket))} hold it"
        if is_whole:
            whole.add((id(event.versions), event.label))


class CommittedIsApplied(Rule):
    """Every rank of a replica applies what its leader has committed before it, or the leader, gets to a later step."""

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._ranks = frozenset(rank for holders in history.bucket_ranks for rank in holders)
        self._owed: dict[int, tuple[int, Line, set[int]]] = {}
        """Replica -> the step that it committed last, where, and the ranks that have not applied it."""

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Committed: self._goes_on, **dict.fromkeys(RANK_WORK, self._goes_on)}

    def _goes_on(
        self, line: Line, event: trace.Committed | trace.Applied | trace.MicrobatchStarted, step: Step
    ) -> Iterable[Finding]:
        owed = self._owed.get(event.replica)
        found: Iterable[Finding] = ()
        is_commit = type(event) is trace.Committed
        if owed is not None and owed[2]:
            number, _, missing = owed
            if event.step == number and isinstance(event, trace.Applied):
                missing.discard(event.rank)
            elif event.step > number and (is_commit or event.rank in missing):  # type: ignore[union-attr]
                late = set(missing) if is_commit else {event.rank}  # type: ignore[union-attr]
                missing -= late
                what = f"{who(event)} goes on with step {event.step}"
                found = ((line, f"{what}; ranks {sorted(late)} have not applied step {number}"),)
        if is_commit:
            self._owed[event.replica] = (event.step, line, set(self._ranks))
        return found

    def ended(self) -> Findings:
        for replica in _survivors(self.history):
            step, since, missing = self._owed.get(replica, (0, 0, set()))
            if missing and step not in self.gaps.touched:
                yield since, f"replica {replica} committed step {step}, and its ranks {sorted(missing)} never applied it"


def _survivors(history: History) -> Iterator[int]:
    """Replicas that lived to the end of a run that ended as planned; none for any other run."""
    ended, announced = history.first(trace.RunFinished), history.of(trace.Generation)
    if ended is None or ended.exit_code != ExitCode.OK or not announced:
        return
    # A loss after the others had finished makes no generation any more.
    broken = {event.replica for _, event in [*history.of(trace.Failure), *history.of(trace.Fenced)]}
    yield from (replica for replica in announced[-1][1].roster if replica not in broken | history.lost_at.keys())


def equal_members(history: History, gaps: Gaps) -> Findings:
    """All replicas start alike."""
    members = {replica for generation in history.generations.values() for replica in generation.roster}
    joined = [(line, event) for line, event in history.of(trace.Joined) if event.replica in members]
    for line, event in joined:
        other = joined[0][1]
        if (event.fingerprint, event.bucket_ranks) != (other.fingerprint, other.bucket_ranks):
            yield line, f"replica {event.replica} is not made like replica {other.replica}, and yet became a member"


def equal_ranks(history: History, step: Step) -> Findings:
    """A loss is the same wherever it is told; digests are made of a rank on all replicas or none."""
    told: trace.Applied | None = None
    digests: dict[int, trace.Applied] = {}
    for line, event in step.applied:
        if event.loss is not None:
            told = told or event
            if event.loss != told.loss:
                yield line, f"the loss of step {event.step} is {event.loss} on {who(event)} and {told.loss} on {who(told)}"
        first = digests.setdefault(event.rank, event)
        if (event.parameter_digest is None) != (first.parameter_digest is None):
            yield line, f"step {event.step}: only one of {who(event)} and {who(first)} has a digest of its parameters"


class AdoptedFromAMember(Rule):
    """What a replica adopts, a member has said that it has committed."""

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._told: set[tuple[int, int]] = set()
        """(generation, step)"""

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Status: self._tells, trace.Committed: self._adopts}

    def _tells(self, line: Line, event: trace.Status, step: Step) -> Iterable[Finding]:
        if event.committed is not None:
            self._told.add((event.generation, event.committed))
        return ()

    def _adopts(self, line: Line, event: trace.Committed, step: Step) -> Iterable[Finding]:
        if not event.adopted or (event.generation, event.step) in self._told:
            return ()
        what = f"replica {event.replica} adopted step {event.step} in generation {event.generation}"
        return ((line, f"{what}, of which no member had said that it committed that step"),)


# --- INV-5, INV-6, INV-8 -------------------------------------------------------------------------------------------------


class Promised(Rule):
    """Who acts in a generation has entered it and told its status."""

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._seen: dict[type, set[tuple[int, int]]] = {trace.Entered: set(), trace.Status: set()}
        self._ready: set[tuple[int, int]] = set()
        """(replica, generation) of those who have done both."""

    def takes(self) -> Mapping[type, Taker]:
        acts = (trace.Plan, trace.Voted, trace.Committed, *RANK_WORK)
        return {trace.Entered: self._promises, trace.Status: self._promises, **dict.fromkeys(acts, self._acts)}

    def _promises(self, line: Line, event: trace.Entered | trace.Status, step: Step | None) -> Iterable[Finding]:
        self._seen[type(event)].add((event.replica, event.generation))
        return ()

    def _acts(self, line: Line, event: trace.Voted, step: Step) -> Iterable[Finding]:
        key = (event.replica, event.generation)
        return () if key in self._ready else self._look(line, event, key)

    def _look(self, line: Line, event: trace.Voted, key: tuple[int, int]) -> Findings:
        for kind, had in self._seen.items():
            if key not in had:
                what = f"replica {event.replica} acts in generation {event.generation} without"
                yield line, f"{what} {'a status' if kind is trace.Status else 'having entered it'}"
            had.add(key)  # once is enough
        self._ready.add(key)


def what_was_lost_is_fenced(history: History, gaps: Gaps) -> Findings:
    """Every rank of a replica that left the roster by a loss is confirmed dead by the end of the run, or was set aside."""
    started = history.first(trace.RunStarted)
    if started is None or history.first(trace.RunFinished) is None or gaps.of_launcher:
        return
    dead = {(event.replica, rank) for _, event in history.of(trace.Fenced) for rank in event.ranks}
    dead |= {(event.replica, event.rank) for _, event in history.of(trace.SetAside)}
    for replica, (line, _) in history.lost_at.items():
        if alive := [rank for rank in range(started.layout.num_ranks) if (replica, rank) not in dead]:
            yield line, f"replica {replica} was lost, and its ranks {alive} were never fenced"


class MembersHaveJoined(Rule):
    """Only a replica that was ready becomes a member."""

    needs = "faults"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._joined: set[int] = set()

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Joined: self._joins, trace.Generation: self._announced}

    def _joins(self, line: Line, event: trace.Joined, step: None) -> Iterable[Finding]:
        self._joined.add(event.replica)
        return ()

    def _announced(self, line: Line, event: trace.Generation, step: None) -> Findings:
        strange = set(event.roster) - self._joined
        self._joined |= strange  # once is enough
        if strange := {one for one in strange if not self.gaps.explain(one, 0.0, event.t)}:
            yield line, f"generation {event.generation} has members {sorted(strange)} that never joined"


def honest_end(history: History, gaps: Gaps) -> Findings:
    """The exit code is that of `stopping`, and 12 has votes that differ; with 0 all survivors committed what was begun."""
    found = history.of(trace.RunFinished)
    if not found:
        return
    line, ended = found[-1]
    stops = [event.exit_code for _, event in history.of(trace.Stopping)]
    killed_on_request = ended.exit_code > 128
    if stops and ended.exit_code not in stops and not killed_on_request:
        yield line, f"the run ended with exit code {ended.exit_code}, but was stopping with {stops[-1]}"
    elif not stops and ended.exit_code in NEVER_ALONE and not gaps.of_launcher:
        yield line, f"the run ended with exit code {ended.exit_code}, but nothing says that it was stopping"
    elif ended.exit_code == ExitCode.DIVERGED and not history.of(trace.Disagreed) and not gaps:
        yield line, "the run ended because replicas disagreed, but none of them has written of a vote that differs from its own"
    if ended.exit_code != ExitCode.OK or history.last_step is None:
        return
    last = history.last_step
    begun = sorted(step for step, facts in history.steps.items() if step > last and facts.planned_at is not None)
    if begun := [step for step in begun if step not in gaps.touched]:
        yield line, f"the run ended with exit code 0, but steps {begun} were planned and never committed"
    if last in gaps.touched:
        return
    if behind := [replica for replica in _survivors(history) if replica not in history.final_commits]:
        yield line, f"the run ended with exit code 0, but replicas {behind} live and never committed step {last}"
