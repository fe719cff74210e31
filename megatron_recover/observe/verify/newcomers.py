"""Rules about newcomers, of several invariants (`core/joining.py`, Note [Joining]).

A newcomer is unproven in the first step that is planned in a generation which announces it as a
newcomer, if the roster has older members, too. Without older members newcomers are members, and no
rule here judges them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from megatron_recover import trace
from megatron_recover.core.digest import combined
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.observe.facts import Line
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import History
from megatron_recover.observe.replay import Taker
from megatron_recover.observe.step import Step
from megatron_recover.observe.verify.rule import Finding, Findings, Rule, of_step


def _first_plans(history: History, step: Step) -> Iterator[tuple[Line, trace.Plan, frozenset[int]]]:
    """Yield the plans of a step in which newcomers are unproven, with these newcomers."""
    for line, plan in step.plans:
        newcomers = history.newcomers(plan.generation)
        if newcomers and history.first_step(plan.generation) == step.number:
            yield line, plan, newcomers


def _admitting(history: History, step: Step) -> Iterator[tuple[Line, trace.Plan, int]]:
    """Yield the first plan of each generation that admits a newcomer, with that newcomer."""
    seen: set[tuple[int, int]] = set()
    for line, plan, newcomers in _first_plans(history, step):
        for newcomer in sorted(newcomers & {*plan.roster}):
            if (plan.generation, newcomer) not in seen:
                seen.add((plan.generation, newcomer))
                yield line, plan, newcomer


def admitted_with_equal_state(history: History, step: Step) -> Findings:
    """Require that a newcomer is admitted only with the state with which the members began.

    - It has claimed the state of this step.
    - At least one older member gives its digest in its status, and all that are given are equal to
      the digest of the claim.
    - The digest of each of its ranks is that of the same rank of each of these members.
    """
    for line, plan, newcomer in _admitting(history, step):
        what = f"generation {plan.generation} admits newcomer {newcomer} in step {step.number} ({plan.label})"
        claims = [
            one.digest for at, one in history.of(trace.Claimed)
            if (one.replica, one.label) == (newcomer, plan.label) and at < line
        ]  # fmt: skip
        if not claims:
            yield line, f"{what}, whose state it has not claimed"
            continue
        given = {
            status.replica: status.state_digest for _, status in step.statuses
            if status.generation == plan.generation and status.state_digest is not None
        }  # fmt: skip
        if {*given.values()} != {claims[-1]}:
            yield line, f"{what} with the state digest {claims[-1]}; members gave {given}"
        read = {
            one.rank: one.digest for at, one in history.of(trace.StateRead)
            if (one.replica, one.label) == (newcomer, plan.label) and at < line
        }  # fmt: skip
        for member in sorted(given):
            for rank, (_, digest) in sorted(step.digests.get(member, {}).items()):
                if read.get(rank, digest) != digest:
                    yield line, f"{what}, whose rank {rank} has read {read[rank]}; that of replica {member} began with {digest}"


class ClaimedAsRead(Rule):
    """A rule: a newcomer claims the digest of what all of its ranks have read."""

    needs = "faults"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        started = history.first(trace.RunStarted)
        self._num_ranks = started.layout.num_ranks if started is not None else 0
        self._read: dict[tuple[int, str], dict[int, str]] = defaultdict(dict)
        """(newcomer, label) -> rank -> digest of what it has read."""

    def takes(self) -> Mapping[type, Taker]:
        return {trace.StateRead: self._reads, trace.Claimed: self._claims} if self._num_ranks else {}

    def _reads(self, line: Line, event: trace.StateRead, step: None) -> Iterable[Finding]:
        self._read[event.replica, event.label][event.rank] = event.digest
        return ()

    def _claims(self, line: Line, event: trace.Claimed, step: None) -> Findings:
        if any(gap.replica == event.replica for gap in self.gaps.events):
            return
        read = self._read[event.replica, event.label]
        what = f"newcomer {event.replica} claims the state of {event.label}"
        if missing := sorted({*range(self._num_ranks)} - read.keys()):
            yield line, f"{what}, which its ranks {missing} have not read"
        elif event.digest != (expected := f"{combined([int(read[rank], 16) for rank in sorted(read)]):016x}"):
            yield line, f"{what} with the digest {event.digest}; that of what its ranks have read is {expected}"


def unproven_tell_nothing(history: History, step: Step) -> Findings:
    """Require that no unproven newcomer sends a status: a plan could rely on what it holds."""
    for line, status in step.statuses:
        if status.replica in history.newcomers(status.generation):
            yield line, f"replica {status.replica} sends a status in generation {status.generation}, in which it is unproven"


def admitted_before_results(history: History, step: Step) -> Findings:
    """Require that nobody held a result of the step in which a newcomer is admitted."""
    for line, plan, newcomer in _admitting(history, step):
        holders = sorted(
            status.replica for _, status in step.statuses if status.generation == plan.generation and status.complete
        )  # fmt: skip
        if holders:
            what = f"generation {plan.generation} admits newcomer {newcomer} in step {step.number}"
            yield line, f"{what}, of which replicas {holders} hold results"


def unproven_compute_nothing(history: History, step: Step) -> Findings:
    """Require that a newcomer has no quota and no microbatch in its first step."""
    for line, plan, newcomers in _first_plans(history, step):
        what = f"replica {plan.replica} plans step {step.number} of generation {plan.generation}"
        quotas = dict(zip(plan.roster, plan.quotas, strict=False))
        if wrong := {newcomer: quotas[newcomer] for newcomer in sorted(newcomers) if quotas.get(newcomer)}:
            yield line, f"{what} with the quotas {wrong} for newcomers, in their first step"
        if plan.replica in newcomers and (dealt := sorted({i for one in plan.computes for i in one.microbatches})):
            yield line, f"{what}, in which it is new, and computes microbatches {dealt}"


class FormedInFreeSlots(Rule):
    """A rule: a newcomer gets only slots that are free, which no living process uses.

    A trace has no slots. It has the former users of a newcomer's slots (`Forming.in_place_of`),
    except spares, and users that had a rank on a node that was lost. By the events before `Forming`
    the slots of a former user are free under all these conditions:

    - It was lost or has left: an announcement says so, or `NewcomerLost` of a newcomer outside the
      roster. Until then it lives.
    - If it was lost, the ranks that were started are confirmed dead (`Fenced`). These are all ranks
      of a replica of the start and of a newcomer that was ready (`Joined`). Of another newcomer
      they are those that an agent has seen fail or hang. Agents may fence that newcomer before they
      begin to form it, so `Fenced` may lack its other ranks. At least one agent has to confirm its
      end. How many agents there are is in no event.
    - If it has left, it ended by itself, which no event shows.
    - Not more newcomers have got its slots than it had ranks: each is the last user of one of them.

    After `Forming` no event shows that one of these processes still lived.
    """

    needs = "faults"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        started = history.first(trace.RunStarted)
        self._ranks = frozenset(range(started.layout.num_ranks if started is not None else 0))
        self._num_at_start = started.replicas if started is not None else 0
        self._started: dict[int, set[int]] = defaultdict(set)
        """Replica -> its ranks that an event shows to have been started."""
        self._dead: dict[int, set[int]] = {}
        """Replica whose end an agent has confirmed -> its ranks that are confirmed dead."""
        self._lost: set[int] = set()
        self._left: set[int] = set()
        self._followed: dict[int, list[int]] = defaultdict(list)
        """Former user -> the newcomers that have got its slots."""
        self._reused: dict[int, Line] = {}
        """Former user that seemed gone -> the first line by which its slots were used again."""

    def takes(self) -> Mapping[type, Taker]:
        if self.gaps.of_launcher or self.gaps.of_agents or not self._ranks:  # fences may be missing
            return {}
        return {
            trace.Fenced: self._fenced, trace.Generation: self._announced, trace.NewcomerLost: self._is_lost,
            trace.Forming: self._forms, trace.Joined: self._is_ready,
            **dict.fromkeys((trace.Failure, trace.SetAside, trace.RankSilent), self._is_seen),
        }  # fmt: skip

    def _is_ready(self, line: Line, event: trace.Joined, step: None) -> Findings:
        self._started[event.replica] |= self._ranks
        return self._lived(line, event.replica, "was ready")

    def _is_seen(self, line: Line, event: trace.Failure | trace.SetAside | trace.RankSilent, step: None) -> Findings:
        self._started[event.replica].add(event.rank)
        return self._lived(line, event.replica, f"had a process of rank {event.rank}")

    def _fenced(self, line: Line, event: trace.Fenced, step: None) -> Iterable[Finding]:
        dead = self._dead.setdefault(event.replica, set())
        late = sorted({*event.ranks} - dead)
        dead |= {*event.ranks}
        return self._lived(line, event.replica, f"had processes of ranks {late}") if late else ()

    def _lived(self, line: Line, replica: int, what: str) -> Findings:
        """Yield a finding if the slots of a replica that lived were used again before."""
        if (reused := self._reused.get(replica)) is not None:
            newcomer = self._followed[replica][0]
            yield line, f"replica {replica} {what} after replica {newcomer} was formed in its place (line {reused})"

    def _announced(self, line: Line, event: trace.Generation, step: None) -> Iterable[Finding]:
        self._lost |= {loss.replica for loss in event.losses}
        self._left |= {*event.left}
        return ()

    def _is_lost(self, line: Line, event: trace.NewcomerLost, step: None) -> Iterable[Finding]:
        self._lost.add(event.newcomer)
        return ()

    def _forms(self, line: Line, event: trace.Forming, step: None) -> Findings:
        for replica in event.in_place_of:
            self._followed[replica].append(event.newcomer)
            if why := self._why_not_free(replica):
                yield line, f"replica {event.newcomer} forms in the place of replica {replica}, {why}"
            else:
                self._reused.setdefault(replica, line)

    def _why_not_free(self, replica: int) -> str:
        """Return why the slots of a former user are not free; empty if they are."""
        if replica not in self._lost | self._left:
            return "which is neither lost nor has left"
        if len(self._followed[replica]) > len(self._ranks):
            return f"whose slots replicas {self._followed[replica][:-1]} have got"
        started = self._ranks if replica < self._num_at_start else self._started[replica]
        living = sorted(started - self._dead.get(replica, set())) if replica in self._lost else []
        if living:
            return f"whose ranks {living} are not confirmed dead"
        return "whose end no node has confirmed" if replica in self._lost and replica not in self._dead else ""


class NewcomersAreJudged(Rule):
    """A rule: the coordinator judges each newcomer of a generation once, and counts it for nobody.

    - Only an unproven newcomer of the newest generation is turned away or becomes proven. No later
      announcement takes one for an older member that is not proven.
    - Members are outvoted only by a majority of the proven ones.
    """

    needs = "faults"

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._roster: set[int] = set()
        """Members of the newest generation that were not turned away."""
        self._generation = 0
        self._open: set[int] = set()
        """Its newcomers that are neither proven nor turned away."""

    def takes(self) -> Mapping[type, Taker]:
        if self.gaps.of_launcher:  # announcements may be missing
            return {}
        return {trace.Generation: self._announced, trace.TurnedAway: self._judges, trace.Proven: self._judges}

    def _announced(self, line: Line, event: trace.Generation, step: None) -> Findings:
        number, proven = event.generation, self._roster - self._open
        outvoted = {loss.replica for loss in event.losses if loss.kind is LossKind.DIVERGED}
        if outvoted and 2 * len(outvoted & proven) >= max(1, len(proven)):
            yield line, f"generation {number} outvotes {sorted(outvoted)}, half or more of the members {sorted(proven)}"
        if taken := (self._open & {*event.roster}) - {*event.newcomers}:
            yield line, f"generation {number} takes newcomers {sorted(taken)} for members, and they are not proven"
        self._generation, self._roster, self._open = number, {*event.roster}, {*event.newcomers}

    def _judges(self, line: Line, event: trace.TurnedAway | trace.Proven, step: None) -> Findings:
        is_turned_away = isinstance(event, trace.TurnedAway)
        if event.generation != self._generation or not self._open.issuperset(event.newcomers):
            what = "turns away" if is_turned_away else "takes for proven"
            who = f"replicas {sorted(event.newcomers)} of generation {event.generation}"
            newest = f"generation {self._generation} has the unproven newcomers {sorted(self._open)}"
            yield line, f"the coordinator {what} {who}; {newest}"
        self._open -= {*event.newcomers}
        if is_turned_away:
            self._roster -= {*event.newcomers}


class ProvenByVotes(Rule):
    """A rule: a newcomer is proven only if a step was committed by votes, its own included."""

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._committed: set[int] = set()
        """Generations with newcomers in which a step was committed by votes."""

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Committed: self._commits, trace.Proven: self._proves}

    def _commits(self, line: Line, event: trace.Committed, step: Step) -> Iterable[Finding]:
        if not event.adopted:
            self._committed.add(event.generation)
        return ()

    def _proves(self, line: Line, event: trace.Proven, step: None) -> Findings:
        if event.generation not in self._committed and not self.gaps:
            yield line, f"replicas {list(event.newcomers)} are proven, and generation {event.generation} has committed nothing"
        if strange := {*event.newcomers} - {*self.history.roster(event.generation)}:
            yield line, f"replicas {sorted(strange)} are proven, and no plan of generation {event.generation} admits them"


AGREEMENT: tuple[type[Rule], ...] = (of_step(admitted_with_equal_state), ClaimedAsRead)
DECIDED_ONCE: tuple[type[Rule], ...] = (of_step(admitted_before_results),)
FENCING: tuple[type[Rule], ...] = (of_step(unproven_tell_nothing, "faults"), FormedInFreeSlots)
SINGLE_HISTORY: tuple[type[Rule], ...] = (NewcomersAreJudged, ProvenByVotes)
LEAST_WORK: tuple[type[Rule], ...] = (of_step(unproven_compute_nothing),)
"""Rules of each invariant, in the order in which their findings are reported."""
