"""INV-6: at most one side of a partition continues.

A checkpoint is named only for agreed state.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping

from megatron_recover import trace
from megatron_recover.core.grants import is_last_generation
from megatron_recover.core.label import StepKind, label_of
from megatron_recover.core.request import RequestKind
from megatron_recover.observe.facts import Line
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import History
from megatron_recover.observe.replay import Taker
from megatron_recover.observe.step import Step
from megatron_recover.observe.verify.common import who
from megatron_recover.observe.verify.rule import LEVELS, Finding, Findings, Rule, provides

_AGREED = 64
"""Agreements of a replica that are remembered: a save in the background may be named some saves
later."""


class MembersHaveJoined(Rule):
    """A rule: only a replica that was ready becomes a member."""

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
        self._joined |= strange  # report it once
        if strange := {one for one in strange if not self.gaps.explain(one, 0.0, event.t)}:
            yield line, f"generation {event.generation} has members {sorted(strange)} that never joined"


class SingleHistory(Rule):
    """A rule: memberships and checkpoints form one history.

    - A generation has one roster, and a step one label and one M.
    - Generations and checkpoints only advance. In a merged trace only the checkpoints of each
      replica must: no frame need carry the order in which two writers name checkpoints.
    - A replica that was lost or has left never returns. No replica leaves a roster without a loss,
      except one that has committed the last step, leaves as requested, or is a newcomer that was
      turned away.
    - A roster grows only by newcomers that the announcement names, and their ids are new: none was
      a member before. One that was turned away before it planned anything may come again.
    - Members plan with the working roster: the announced one without newcomers that are turned
      away. All older members are in it.
    """

    needs = "faults"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._newest: trace.Generation | None = None
        self._lost: set[int] = set()
        self._entered: dict[int, int] = {}
        self._known: set[int] = set()
        """Replicas that were members and no newcomers, or newcomers that have planned."""
        self._saved: dict[int, int] = {}
        """Writer -> iteration of its newest checkpoint; in a trace of one node 0 for all."""
        self._knows_who_finished = provides(history) != LEVELS[0] and not gaps.of_launcher

    def takes(self) -> Mapping[type, Taker]:
        return {
            trace.Generation: self._announced, trace.Entered: self._enters, trace.Plan: self._plans,
            trace.Checkpoint: self._saves,
        }  # fmt: skip

    def _announced(self, line: Line, event: trace.Generation, step: None) -> list[Finding]:
        finished = {replica for replica, committed in self.history.final_commits.items() if committed < line}
        found = [(line, message) for message in (*self._follows(event, finished), *self._grows(event))]
        self._newest = event
        self._lost |= {one.replica for one in event.losses} | {*event.left}
        self._known |= {*event.roster} - {*event.newcomers}
        return found

    def _follows(self, event: trace.Generation, finished: set[int]) -> Iterator[str]:
        """Yield what is wrong with an announcement after the one before it.

        `finished`: replicas that have committed the last step of the run. If such a replica ends,
        that is no loss.
        """
        before, number, roster = self._newest, event.generation, list(event.roster)
        if before and number <= before.generation:
            yield f"generation {number} was announced after generation {before.generation}"
        if not roster or roster != sorted(set(roster)):
            yield f"generation {number} has the roster {roster}"
        if back := self._lost & set(roster):
            yield f"generation {number} contains replicas that were lost or had left before: {sorted(back)}"
        gone = self._kept(before) - set(roster)
        unexplained = gone - {one.replica for one in event.losses} - {*event.left} - finished
        unexplained = {replica for replica in unexplained if not self.gaps.explain(replica, 0.0, float("inf"))}
        if unexplained and self._knows_who_finished:
            yield f"generation {number} leaves out {sorted(unexplained)} without naming a loss"

    def _kept(self, before: trace.Generation | None) -> set[int]:
        """Return the members of a generation whom the coordinator has not dropped since."""
        return {*before.roster} - self.history.turned_away.get(before.generation, frozenset()) if before else set()

    def _grows(self, event: trace.Generation) -> Iterator[str]:
        """Yield what is wrong with the members that are new in an announcement."""
        number, newcomers = event.generation, {*event.newcomers}
        if strange := newcomers - {*event.roster}:
            yield f"generation {number} has newcomers {sorted(strange)} outside its roster"
        if self._newest is None or self.gaps.of_launcher:  # announcements may be missing
            return
        fresh = {*event.roster} - self._kept(self._newest) - self._lost
        if strange := fresh - newcomers:
            yield f"generation {number} contains replicas {sorted(strange)} that were no members and do not join"
        started = self.history.first(trace.RunStarted)
        first = started.replicas if started else 0
        if used := {one for one in fresh & newcomers if one in self._known or one < first}:
            yield f"generation {number} has newcomers {sorted(used)} whose ids were used before"
        if again := newcomers - fresh - {*self._newest.newcomers} - self._lost:
            yield f"generation {number} takes members {sorted(again)} for newcomers"

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
            announced = self.history.announced(event.generation)
            out = f", {sorted({*announced} - {*roster})} are turned away" if announced != roster else ""
            yield line, f"{what}; announced was {list(announced)}{out}"
        self._known.add(event.replica)
        if (event.label, event.num_microbatches) != (first.label, first.num_microbatches):
            yield line, f"step {event.step} is {event.label!r} on {who(event)} and {first.label!r} on {who(first)}"

    def _saves(self, line: Line, event: trace.Checkpoint, step: None) -> Findings:
        if event.phase != "finished":
            return
        writer = event.replica if self.history.is_merged else 0
        before = self._saved.get(writer, -1)
        if event.iteration <= before:
            yield line, f"the checkpoint of iteration {event.iteration} became the latest after that of {before}"
        self._saved[writer] = event.iteration


class NamedUnderGrants(Rule):
    """A rule: each checkpoint is named under a grant of its own, by the replica that has it.

    - A grant's number is given once, and numbers only grow.
    - A grant is for the writer of the newest generation. So no two members hold one.
    - Only in the last generation may a grant serve for several checkpoints of its holder: records
      that the holder has committed must say for every member of the holder's generation that it has
      no coordinator (`core/grants.py`, Note [Last generation]).

    A trace without any grant is older than grants, and is not judged.
    """

    needs = "faults"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._generation = 0
        self._newest = 0
        """Number of the newest grant; 0 before the first."""
        self._unused: dict[int, int] = {}
        """Number of each grant under which no checkpoint was named -> its holder."""
        self._used: dict[int, int] = {}
        """Replica -> number of the newest grant under which it has named a checkpoint."""
        self._told: dict[int, tuple[int, frozenset[str]]] = {}
        """Replica -> generation of its newest commit, and all losses of the coordinator that its
        records told."""

    def takes(self) -> Mapping[type, Taker]:
        if self.gaps.of_launcher:  # grants may be missing
            return {}
        return {
            trace.Generation: self._announced, trace.Granted: self._granted, trace.Committed: self._commits,
            trace.Checkpoint: self._saves,
        }  # fmt: skip

    def _announced(self, line: Line, event: trace.Generation, step: None) -> Iterable[Finding]:
        self._generation = event.generation
        return ()

    def _granted(self, line: Line, event: trace.Granted, step: None) -> Findings:
        if event.number <= self._newest:
            yield line, f"grant {event.number} was given after grant {self._newest}"
        writer = min(self.history.roster(event.generation), default=None)
        if (event.generation, event.writer) != (self._generation, writer):
            what = f"grant {event.number} is for replica {event.writer} in generation {event.generation}"
            yield line, f"{what}; the writer was replica {writer}, in generation {self._generation}"
        self._newest = max(self._newest, event.number)
        self._unused[event.number] = event.writer

    def _commits(self, line: Line, event: trace.Committed, step: Step) -> Iterable[Finding]:
        _, told = self._told.get(event.replica, (0, frozenset()))
        if event.requests:
            told |= {request for request in event.requests if request.startswith(RequestKind.ALONE)}
        self._told[event.replica] = event.generation, told
        return ()

    def _lasts(self, replica: int, grant: int) -> bool:
        """Return whether a grant that `replica` has used is its newest, in the last generation."""
        generation, told = self._told.get(replica, (0, frozenset()))
        return self._used.get(replica) == grant and is_last_generation(told, self.history.roster(generation))

    def _saves(self, line: Line, event: trace.Checkpoint, step: None) -> Findings:
        if event.phase != "finished" or not self._newest:
            return
        what = f"replica {event.replica} named the checkpoint of iteration {event.iteration}"
        if event.grant is None:
            yield line, f"{what} without a grant"
        elif (holder := self._unused.pop(event.grant, None)) == event.replica:
            self._used[event.replica] = event.grant
        elif not self._lasts(event.replica, event.grant):
            why = "which it has not or has used" if holder is None else f"which replica {holder} has"
            yield line, f"{what} under grant {event.grant}, {why}"


class SavedWhatWasAgreed(Rule):
    """A rule: the writer's replica commits a record with a checkpoint's digest before it is named.

    That is the record of `save N`, or that of the end of training if the last state is saved.
    """

    needs = "steps"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._trained: dict[int, int] = {}
        self._agreed: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_AGREED))
        """Replica -> iterations on whose state its newest records agreed."""

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Committed: self._commits, trace.Checkpoint: self._saves}

    def _commits(self, line: Line, event: trace.Committed, step: Step) -> Iterable[Finding]:
        label = label_of(event.label)
        if label.is_training:
            self._trained[event.replica] = label.iteration
        elif label.is_agreement and event.state_digest is not None:
            iteration = label.iteration if label.kind is StepKind.SAVE else self._trained.get(event.replica)
            if iteration is not None:
                self._agreed[event.replica].append(iteration)
        return ()

    def _saves(self, line: Line, event: trace.Checkpoint, step: None) -> Iterable[Finding]:
        if event.phase != "finished" or self.gaps.touched:  # a touched step may have been the agreement
            return ()
        if event.iteration in self._agreed[event.replica]:
            return ()
        return ((line, f"the checkpoint of iteration {event.iteration} was named, and no record had carried its digest"),)


RULES: tuple[type[Rule], ...] = (
    MembersHaveJoined,
    SingleHistory,
    NamedUnderGrants,
    SavedWhatWasAgreed,
)
"""Rules of the invariant, in the order in which their findings are reported."""
