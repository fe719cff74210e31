"""INV-5: nothing of an older generation changes any state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

from megatron_recover import trace
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.observe.facts import Line
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import History
from megatron_recover.observe.replay import Taker
from megatron_recover.observe.step import Step
from megatron_recover.observe.verify.common import RANK_WORK, who
from megatron_recover.observe.verify.rule import Finding, Findings, Rule, of_run, of_step


def honest_journals(history: History, step: Step) -> Findings:
    """Require that a status lists only microbatches as finished whose backward had ended."""
    for line, status, missing in step.unfinished:
        if missing:
            yield line, f"replica {status.replica} reports unfinished microbatches {missing} of step {status.step} as finished"


def backed_statuses(history: History, step: Step) -> Findings:
    """Require that all ranks of a replica held the results of its status when it was sent.

    The results must be of older generations than the status.
    """
    for line, status in step.statuses:
        for bucket, version in status.complete:
            held = step.results.get((bucket, version))
            for rank in history.ranks_of(bucket):
                since = held.since(status.replica, rank) if held else None
                if version >= status.generation or since is None or since > line:
                    what = f"replica {status.replica} counts bucket {bucket} version {version}"
                    what += f" in generation {status.generation}"
                    yield line, f"{what}, though its rank {rank} had not completed it when it entered"
                    break


class Promised(Rule):
    """A rule: a replica acts in a generation only after it has entered and reported its status.

    The status may be part of an attempt that was made void since.
    """

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._seen: dict[type, set[tuple[int, int]]] = {trace.Entered: set(), trace.Status: set()}
        self._ready: set[tuple[int, int]] = set()
        """(replica, generation) of replicas that have done both."""

    def takes(self) -> Mapping[type, Taker]:
        acts = (trace.Plan, trace.Voted, trace.Committed, *RANK_WORK)
        return {trace.Entered: self._promises, trace.Status: self._promises, **dict.fromkeys(acts, self._acts)}

    def takes_void(self) -> Mapping[type, Taker]:
        return {trace.Status: self._promises}

    def _promises(self, line: Line, event: trace.Entered | trace.Status, step: Step | None) -> Iterable[Finding]:
        self._seen[type(event)].add((event.replica, event.generation))
        if event.replica in self.history.newcomers(event.generation):  # its claim stands for its status
            self._seen[trace.Status].add((event.replica, event.generation))
        return ()

    def _acts(self, line: Line, event: trace.Voted, step: Step) -> Iterable[Finding]:
        key = (event.replica, event.generation)
        return () if key in self._ready else self._look(line, event, key)

    def _look(self, line: Line, event: trace.Voted, key: tuple[int, int]) -> Findings:
        for kind, had in self._seen.items():
            if key not in had:
                what = f"replica {event.replica} acts in generation {event.generation} without"
                yield line, f"{what} {'a status' if kind is trace.Status else 'having entered it'}"
            had.add(key)  # report it once
        self._ready.add(key)


def what_was_lost_is_fenced(history: History, gaps: Gaps) -> Findings:
    """Require that all ranks of a lost replica are confirmed dead or set aside at the end.

    A run that was killed on request is not judged: nobody records the deaths. Nor is the loss of a
    node with which the last replicas were lost: nobody was left to wait until it has ended.
    """
    started, finished = history.first(trace.RunStarted), history.first(trace.RunFinished)
    if started is None or finished is None or finished.exit_code > 128 or gaps.of_launcher or gaps.of_agents:
        return
    dead = {(event.replica, rank) for _, event in history.of(trace.Fenced) for rank in event.ranks}
    dead |= {(event.replica, event.rank) for _, event in history.of(trace.SetAside)}
    unseen = _lost_with_nodes_at_the_end(history) if finished.exit_code == ExitCode.NO_REPLICA_LEFT else frozenset()
    for replica, (line, _) in history.lost_at.items():
        if replica in unseen:
            continue
        if alive := [rank for rank in range(started.layout.num_ranks) if (replica, rank) not in dead]:
            yield line, f"replica {replica} was lost, and its ranks {alive} were never fenced"


def _lost_with_nodes_at_the_end(history: History) -> frozenset[int]:
    """Return the replicas that the last generation lost with their nodes."""
    with_nodes = {replica for _, event in history.of(trace.NodeLost) for replica in event.replicas}
    last = max((event.generation for _, event in history.of(trace.Generation)), default=0)
    return frozenset(replica for replica, (_, event) in history.lost_at.items() if event.generation == last) & with_nodes


_OF_OTHERS = (
    trace.Fenced, trace.SetAside, trace.Failure, trace.Fault, trace.Gap, trace.RankSilent, trace.RankMoved,
)  # fmt: skip
"""Types of events about a replica that others write, or that do not show its actions. `Thawed` is
judged as well: a fenced rank is never continued."""


class Fencing(Rule):
    """A rule: nothing of an older generation or of a replica outside the roster changes any state.

    - A rank writes nothing after it was fenced, and nothing in a generation that its replica is no
      member of.
    - A sum has the version of the generation that makes it.
    - A replica does not vote or commit in an older generation than it has entered.
    """

    needs = "faults"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._entered: dict[int, int] = {}
        self._fenced: dict[tuple[int, int], Line] = {}
        self._good: set[tuple[int, int, int]] = set()
        """(replica, rank, generation) that may act, until the next rank is fenced. Most events are
        judged by this set alone."""

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
        replica, rank, generation = event.replica, getattr(event, "rank", 0), getattr(event, "generation", -1)
        if (replica, rank, generation) in self._good:
            return []
        found, did = [], f"{who(event)} wrote {type(event).__name__}"
        dead_since = self._fenced.get((replica, rank))
        if dead_since is not None:
            found.append((line, f"{did} after it was fenced (line {dead_since})"))
        # A newcomer enters before it is turned away, which nobody tells it without the coordinator.
        is_of_announced = isinstance(event, trace.Entered | trace.CoordinatorLost | trace.CoordinatorSilent)
        members = self.history.members.get(generation)
        if members is not None and replica not in (self.history.announced(generation) if is_of_announced else members):
            found.append((line, f"{did} in generation {generation}, to which it does not belong"))
        if not found and not is_of_announced:
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


RULES: tuple[type[Rule], ...] = (
    Promised,
    of_run(what_was_lost_is_fenced),
    Fencing,
    of_step(honest_journals, "microbatches"),
    of_step(backed_statuses),
)
"""Rules of the invariant, in the order in which their findings are reported."""
