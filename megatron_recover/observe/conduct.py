"""Rules that look at a run as it goes on: who may do what when, and what follows on what. `rules` says what each belongs to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from megatron_recover import trace
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import Finding, Findings, History, Line, who
from megatron_recover.observe.replay import Taker
from megatron_recover.observe.rule import LEVELS, Rule, provides
from megatron_recover.observe.step import Step

# --- INV-2 ---------------------------------------------------------------------------------------------------------------


class CommitsInOrder(Rule):
    """A replica commits one step after the other."""

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._last: dict[int, int] = {}

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Committed: self._commits}

    def _commits(self, line: Line, event: trace.Committed, step: Step) -> Iterable[Finding]:
        last = self._last.get(event.replica)
        self._last[event.replica] = event.step
        if last is None or event.step == last + 1 or (event.step > last and self.gaps.fill(last + 1, event.step - 1)):
            return ()
        return ((line, f"replica {event.replica} committed step {event.step} after step {last}"),)


class BackedCommits(Rule):
    """A commit has the equal votes of all members, or is adopted from who has committed."""

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._votes: dict[int, dict[tuple[int, str], set[int]]] = defaultdict(lambda: defaultdict(set))
        self._committed: dict[int, set[str]] = defaultdict(set)

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Voted: self._votes_for, trace.Committed: self._commits}

    def closed(self, step: Step) -> Iterable[Finding]:
        self._votes.pop(step.number, None)
        self._committed.pop(step.number, None)
        return ()

    def _votes_for(self, line: Line, event: trace.Voted, step: Step) -> Iterable[Finding]:
        self._votes[event.step][event.generation, event.digest].add(event.replica)
        return ()

    def _commits(self, line: Line, event: trace.Committed, step: Step) -> Findings:
        missing = (
            self.history.members.get(event.generation, frozenset()) - self._votes[event.step][event.generation, event.digest]
        )
        if event.adopted and event.digest not in self._committed[event.step]:
            yield line, f"replica {event.replica} adopted step {event.step}, which nobody had committed"
        if not event.adopted and missing:
            what = f"replica {event.replica} committed step {event.step} in generation {event.generation}"
            yield line, f"{what} without the vote of {sorted(missing)}"
        self._committed[event.step].add(event.digest)


# --- INV-3 ---------------------------------------------------------------------------------------------------------------


class SummedWhenPassed(Rule):
    """No bucket is summed before the backwards that it counts have passed it.

    With `--overlap-grad-reduce` it is summed before its last backward has ended, but not before that has passed it.
    """

    needs = "microbatches"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._told: dict[int, set[Line]] = defaultdict(set)
        """Step -> lines of the sums that were told."""

    def takes(self) -> Mapping[type, Taker]:
        return {trace.MicrobatchFinished: self._finished, trace.BucketPassed: self._passed}

    def closed(self, step: Step) -> Iterable[Finding]:
        self._told.pop(step.number, None)
        return ()

    def _finished(self, line: Line, event: trace.MicrobatchFinished, step: Step) -> Iterable[Finding]:
        work = step.ranks.get((event.replica, event.rank))
        return self._late(line, event, event.into, step) if work is not None and work.has_summed else ()

    def _passed(self, line: Line, event: trace.BucketPassed, step: Step) -> Iterable[Finding]:
        work = step.ranks.get((event.replica, event.rank))
        return self._late(line, event, (event.bucket,), step) if work is not None and work.has_summed else ()

    def _late(
        self, line: Line, event: trace.MicrobatchFinished | trace.BucketPassed, into: tuple[int, ...], step: Step
    ) -> Findings:
        work, put = step.rank(event.replica, event.rank), (event.generation, event.microbatch)
        for bucket in into:
            sums = [
                at for version in step.versions.get(bucket, ()) if event.generation <= version
                for at in _sums(step, bucket, version, event.replica, event.rank)
            ]  # fmt: skip
            if not sums or put in work.passed.get(bucket, ()):
                continue
            if any(key[0] == put[0] and bucket in key[2] and put[1] in ids for key, ids in work.groups.items()):
                continue
            for at in sums:
                if at not in self._told[step.number]:
                    self._told[step.number].add(at)
                    what = f"{who(event)} summed bucket {bucket} of step {step.number}"
                    yield at, f"{what} before microbatch {event.microbatch} was in it (line {line})"


def _sums(step: Step, bucket: int, version: int, replica: int, rank: int) -> Iterator[Line]:
    """Lines of the sums that a rank made of a version."""
    held = step.results[bucket, version]
    if replica in held.plain and rank in held.plain[replica]:
        yield held.plain[replica][rank]
    for line, event in held.odd:
        if isinstance(event, trace.Reduced) and (event.replica, event.rank) == (replica, rank):
            yield line


class ExactSums(Rule):
    """In `exact` runs every version of a bucket is the same sum, whoever computed what: else a gradient was changed."""

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        started = history.first(trace.RunStarted)
        self._is_exact = started is not None and started.determinism == "exact"
        self._ledger = len(history.bucket_ranks) - 1  # it holds measured seconds, which no two computations share
        self._newest = max(history.generations, default=0)
        self._first: dict[int, dict[tuple[int, int], tuple[int, int]]] = defaultdict(dict)
        """Step -> (bucket, rank) -> version and checksum of the first sum."""

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Reduced: self._sums} if self._is_exact else {}

    def closed(self, step: Step) -> Iterable[Finding]:
        self._first.pop(step.number, None)
        return ()

    def _sums(self, line: Line, event: trace.Reduced, step: Step) -> Iterable[Finding]:
        if self.history.withdrawn(event.step, event.version, self._newest):
            return ()
        mine = event.version, event.checksum
        version, checksum = self._first[event.step].setdefault((event.bucket, event.rank), mine)
        if event.bucket == self._ledger or event.version == version or event.checksum == checksum:
            return ()
        what = f"step {event.step}, bucket {event.bucket}, rank {event.rank}: versions {version} and {event.version}"
        return ((line, f"{what} differ ({checksum} and {event.checksum}), though sums are exact"),)


# --- INV-4 ---------------------------------------------------------------------------------------------------------------


class DecidedOnce(Rule):
    """A bucket that a member holds complete is neither computed into nor reduced again, and is what is committed.

    A result in which a replica took part that was outvoted since is withdrawn: it has to be made again.
    """

    def takes(self) -> Mapping[type, Taker]:
        return {
            trace.Plan: self._plans, trace.MicrobatchFinished: self._computes, trace.BucketPassed: self._makes_one,
            trace.Reduced: self._makes_one, trace.Committed: self._commits,
        }  # fmt: skip

    def _plans(self, line: Line, event: trace.Plan, step: Step) -> Iterable[Finding]:
        held = self.history.decided.get((event.generation, event.step))
        if not held:
            return ()
        return self._again(line, event, {*event.reduces, *(bucket for one in event.computes for bucket in one.into)}, held)

    def _computes(self, line: Line, event: trace.MicrobatchFinished, step: Step) -> Iterable[Finding]:
        held = self.history.decided.get((event.generation, event.step))
        return self._again(line, event, set(event.into), held) if held else ()

    def _makes_one(self, line: Line, event: trace.BucketPassed | trace.Reduced, step: Step) -> Iterable[Finding]:
        held = self.history.decided.get((event.generation, event.step))
        return self._again(line, event, {event.bucket}, held) if held else ()

    def _again(
        self,
        line: Line,
        event: trace.Plan | trace.MicrobatchFinished | trace.BucketPassed | trace.Reduced,
        made: set[int],
        held: Mapping[int, int],
    ) -> Findings:
        for bucket in sorted(made & held.keys()):
            what = f"{who(event)} makes bucket {bucket} of step {event.step} again in generation {event.generation}"
            yield line, f"{what}, though a member held version {held[bucket]} complete"

    def _commits(self, line: Line, event: trace.Committed, step: Step) -> Findings:
        decided = self.history.decided.get((event.generation, event.step), {})
        for result in () if event.adopted else event.versions:
            expected = decided.get(result.bucket, event.generation)
            if result.version != expected:
                what = f"replica {event.replica} committed version {result.version} of bucket {result.bucket}"
                yield line, f"{what} in step {event.step}; decided was {expected}"


# --- INV-5 ---------------------------------------------------------------------------------------------------------------

_OF_OTHERS = (
    trace.Fenced, trace.SetAside, trace.Failure, trace.Fault, trace.Gap, trace.RankSilent, trace.RankMoved,
)  # fmt: skip
"""Events about a replica that others write, or that say nothing of what it does."""


class Fencing(Rule):
    """Nothing stamped with an older generation, and nothing of a replica outside the roster, changes any state."""

    needs = "faults"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._entered: dict[int, int] = {}
        self._fenced: dict[tuple[int, int], Line] = {}
        self._good: set[tuple[int, int, int | None]] = set()
        """(replica, rank, generation) that may act, until the next one is fenced: to look at most events only once."""

    def takes(self) -> Mapping[type, Taker]:
        kinds: dict[type, Taker] = {
            kind: self._acts for kind in get_args(trace.AnyEvent)
            if kind not in _OF_OTHERS and "replica" in kind.__struct_fields__
        }  # fmt: skip
        special: dict[type, Taker] = {
            trace.Fenced: self._is_fenced, trace.Reduced: self._sums, trace.Entered: self._enters, trace.Voted: self._commits,
            trace.Committed: self._commits,
        }  # fmt: skip
        ranked = (trace.MicrobatchStarted, trace.MicrobatchFinished, trace.BucketPassed)
        return {**kinds, **special, **dict.fromkeys(ranked, self._computes)}

    def _is_fenced(self, line: Line, event: trace.Fenced, step: None) -> Iterable[Finding]:
        self._fenced.update({(event.replica, rank): line for rank in event.ranks})
        self._good.clear()
        return ()

    def _computes(self, line: Line, event: trace.MicrobatchStarted, step: Step) -> Iterable[Finding]:
        return () if (event.replica, event.rank, event.generation) in self._good else self._acts(line, event, step)

    def _acts(self, line: Line, event: trace.MicrobatchStarted, step: Step | None) -> list[Finding]:
        replica, rank, generation = event.replica, getattr(event, "rank", 0), getattr(event, "generation", None)
        if (replica, rank, generation) in self._good:
            return []
        found, did = [], f"{who(event)} wrote {type(event).__name__}"
        dead_since = self._fenced.get((replica, rank))
        if dead_since is not None:
            found.append((line, f"{did} after it was fenced (line {dead_since})"))
        if generation in self.history.members and replica not in self.history.members[generation]:
            found.append((line, f"{did} in generation {generation}, to which it does not belong"))
        if not found:
            self._good.add((replica, rank, generation))
        return found

    def _sums(self, line: Line, event: trace.Reduced, step: Step) -> list[Finding]:
        found = self._acts(line, event, step)  # type: ignore[arg-type]
        if event.version != event.generation:
            what = f"{who(event)} wrote Reduced of version {event.version}"
            found.append((line, f"{what}, which generation {event.generation} cannot make"))
        return found

    def _enters(self, line: Line, event: trace.Entered, step: None) -> list[Finding]:
        self._entered[event.replica] = max(event.generation, self._entered.get(event.replica, 0))
        return self._acts(line, event, step)  # type: ignore[arg-type]

    def _commits(self, line: Line, event: trace.Voted | trace.Committed, step: Step) -> list[Finding]:
        found = self._acts(line, event, step)  # type: ignore[arg-type]
        entered = self._entered.get(event.replica, 0)
        if event.generation < entered:
            did = f"{who(event)} wrote {type(event).__name__}"
            found.append((line, f"{did} of generation {event.generation} after it had entered {entered}"))
        return found


# --- INV-6 ---------------------------------------------------------------------------------------------------------------


class SingleHistory(Rule):
    """One roster a generation, generations and checkpoints only go forward, a lost replica never returns."""

    needs = "faults"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._newest: trace.Generation | None = None
        self._lost: set[int] = set()
        self._entered: dict[int, int] = {}
        self._saved = -1
        self._knows_who_finished = provides(history) != LEVELS[0] and not gaps.of_launcher

    def takes(self) -> Mapping[type, Taker]:
        return {
            trace.Generation: self._announced, trace.Entered: self._enters, trace.Plan: self._plans,
            trace.Checkpoint: self._saves,
        }  # fmt: skip

    def _announced(self, line: Line, event: trace.Generation, step: None) -> list[Finding]:
        finished = {replica for replica, committed in self.history.final_commits.items() if committed < line}
        found = [(line, message) for message in self._follows(event, finished)]
        self._newest = event
        self._lost |= {one.replica for one in event.losses}
        return found

    def _follows(self, event: trace.Generation, finished: set[int]) -> Iterator[str]:
        """`finished`: replicas that have committed the run's last step; one that ends then owes nothing and is no loss."""
        before, number, roster = self._newest, event.generation, list(event.roster)
        if before and number <= before.generation:
            yield f"generation {number} was announced after generation {before.generation}"
        if not roster or roster != sorted(set(roster)):
            yield f"generation {number} has the roster {roster}"
        if back := self._lost & set(roster):
            yield f"generation {number} contains replicas that were lost before: {sorted(back)}"
        gone = set(before.roster if before else ()) - set(roster)
        unexplained = gone - {one.replica for one in event.losses} - finished
        if unexplained and self._knows_who_finished:
            yield f"generation {number} leaves out {sorted(unexplained)} without naming a loss"

    def _enters(self, line: Line, event: trace.Entered, step: None) -> Findings:
        is_announced = self._newest is not None and event.generation <= self._newest.generation
        if not is_announced and not self.gaps.of_launcher:
            yield line, f"replica {event.replica} entered generation {event.generation} before it was announced"
        before = self._entered.get(event.replica, 0)
        if event.generation <= before:
            yield line, f"replica {event.replica} entered {event.generation} after {before}"
        self._entered[event.replica] = event.generation

    def _plans(self, line: Line, event: trace.Plan, step: Step) -> Findings:
        roster, first = self.history.roster(event.generation), step.plans[0][1] if step.plans else event
        if event.roster != roster:
            what = f"replica {event.replica} plans generation {event.generation} with roster {list(event.roster)}"
            yield line, f"{what}; announced was {list(roster)}"
        if (event.label, event.num_microbatches) != (first.label, first.num_microbatches):
            yield line, f"step {event.step} is {event.label!r} on {who(event)} and {first.label!r} on {who(first)}"

    def _saves(self, line: Line, event: trace.Checkpoint, step: None) -> Findings:
        if event.phase != "finished":
            return
        if event.iteration <= self._saved:
            yield line, f"the checkpoint of iteration {event.iteration} became the latest after that of {self._saved}"
        self._saved = event.iteration


# --- INV-7, INV-8 --------------------------------------------------------------------------------------------------------


class HeldIsNotComputedAgain(Rule):
    """No rank computes a microbatch into a bucket in which it has it."""

    needs = "microbatches"

    def takes(self) -> Mapping[type, Taker]:
        return {trace.MicrobatchFinished: self._computes}

    def _computes(self, line: Line, event: trace.MicrobatchFinished, step: Step) -> Iterable[Finding]:
        work = step.ranks.get((event.replica, event.rank))
        if work is None:
            return ()
        for (_, _, into), ids in work.groups.items():
            if event.microbatch in ids and not set(into).isdisjoint(event.into):
                what = f"{who(event)} computed microbatch {event.microbatch} of step {event.step} again"
                return ((line, f"{what}, though it holds it"),)
        return ()


class EntersTheLast(Rule):
    """INV-8, as far as a trace tells: every member of the last generation enters it, unless it had nothing left to do."""

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        announced = history.of(trace.Generation)
        self._newest = announced[-1] if announced else None
        self._entered: set[int] = set()

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Entered: self._enters}

    def _enters(self, line: Line, event: trace.Entered, step: None) -> Iterable[Finding]:
        if self._newest is not None and event.generation == self._newest[1].generation:
            self._entered.add(event.replica)
        return ()

    def ended(self) -> Findings:
        history = self.history
        has_failed = any(event.exit_code for _, event in history.of(trace.Stopping))
        if self._newest is None or history.first(trace.RunFinished) is None or has_failed:
            return
        line, newest = self._newest
        for replica in newest.roster:
            is_excused = replica in history.final_commits or self.gaps.explain(replica, newest.t, float("inf"))
            if replica not in self._entered and not is_excused:
                yield line, f"replica {replica} never entered generation {newest.generation}"
