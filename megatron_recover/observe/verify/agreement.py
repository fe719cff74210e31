"""INV-2: members commit the same steps with equal results and have equal state after each.

Agreement is compared between replicas. A commit must be backed by votes, and a vote by results.
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
from megatron_recover.observe.step import Held, Step
from megatron_recover.observe.verify.common import RANK_WORK, survivors, who
from megatron_recover.observe.verify.rule import Finding, Findings, Rule, of_run, of_step


def equal_results(history: History, step: Step) -> Findings:
    """Require that all members of a version hold the same result.

    Results that a replica was outvoted for are left out: they differ and count nowhere.
    """
    for (bucket, version), held in step.results.items():
        first: dict[int, trace.Reduced | trace.Transferred] = dict(held.usual)
        for line, event in sorted(held.odd, key=lambda one: isinstance(one[1], trace.Transferred)):
            if history.outvoted_for(event):
                continue
            other = first.setdefault(event.rank, event)
            if event.checksum != other.checksum:
                what = f"step {step.number}, bucket {bucket} version {version}"
                yield line, f"{what}: checksum {event.checksum} on {who(event)}, {other.checksum} on {who(other)}"


def equal_records(history: History, step: Step) -> Findings:
    """Require that all replicas commit the same record, made of the results that they hold."""
    if step.record is None:
        return
    record = step.record[1]
    unusual: dict[int, list[tuple[trace.Result, Held, dict[int, int]]]] = {}
    for line, event in step.committed:
        for field in ("label", "digest", "versions", "state_digest"):
            mine, theirs = getattr(event, field), getattr(record, field)
            if mine != theirs:
                what = f"{field} of step {step.number}: {mine} on replica {event.replica}"
                yield line, f"{what}, {theirs} on replica {record.replica}"
                break
        if id(event.versions) not in unusual:  # most commits share them (`Step.shared`)
            unusual[id(event.versions)] = list(_to_compare(history, step, event))
        for result, held, committed in unusual[id(event.versions)]:
            for at, rank, checksum in _held_by(held, event.replica):
                if checksum != committed.get(rank):
                    what = f"step {step.number} committed bucket {result.bucket} with checksum {committed.get(rank)}"
                    yield at, f"{what}, but replica {event.replica} rank {rank} holds {checksum}"


def _to_compare(history: History, step: Step, commit: trace.Committed) -> Iterator[tuple[trace.Result, Held, dict[int, int]]]:
    """Yield the committed results that may differ from what a replica holds.

    Each comes with its holders and the committed checksum of each rank.
    """
    for result in commit.versions:
        held = step.results.get((result.bucket, result.version))
        if held is None:
            continue
        committed = dict(zip(history.ranks_of(result.bucket), result.checksums, strict=False))
        if held.odd or any(usual.checksum != committed.get(rank) for rank, usual in held.usual.items()):
            yield result, held, committed


def _held_by(held: Held, replica: int) -> Iterator[tuple[Line, int, int]]:
    """Yield line, rank and checksum of each result that a replica held."""
    for rank, line in held.plain.get(replica, {}).items():
        yield line, rank, held.usual[rank].checksum
    for line, event in held.odd:
        if event.replica == replica:
            yield line, event.rank, event.checksum


def equal_paces(history: History, step: Step) -> Findings:
    """Require that members of the newest generation that committed the step learn the same.

    That is the paces and the requests of its voters. A member that was lost since may have
    committed by votes that no other member had.
    """
    if not step.commits:
        return
    members = history.roster(max(event.generation for _, event in step.commits.values()))
    commits = [commit for replica, commit in step.commits.items() if replica in members]
    for line, event in commits:
        for field in ("requests", "paces"):
            mine, theirs = getattr(event, field), getattr(commits[0][1], field)
            if mine != theirs:
                what = f"{field} of step {step.number}: {list(mine)} on replica {event.replica}"
                yield line, f"{what}, {list(theirs)} on replica {commits[0][1].replica}"
                break


def backed_votes(history: History, step: Step) -> Findings:
    """Require that all ranks hold all results of the record before their replica votes for it.

    Votes for other records than the committed one are not judged.
    """
    record = step.record[1] if step.record else None
    for line, vote in step.votes if record else ():
        for result in record.versions if record and record.digest == vote.digest else ():
            held = step.results.get((result.bucket, result.version))
            for rank in history.ranks_of(result.bucket):
                since = held.since(vote.replica, rank) if held else None
                if since is None or since > line:
                    what = f"replica {vote.replica} voted for step {vote.step}"
                    yield line, f"{what} before its rank {rank} held bucket {result.bucket} version {result.version}"


def applied_as_committed(history: History, step: Step) -> Findings:
    """Require that the leader of each rank that applied the step committed it, with the same label.

    `CommittedIsApplied` finds an apply that is missing.
    """
    for line, event in step.applied:
        commit = step.commits.get(event.replica)
        if commit is None:
            yield line, f"{who(event)} applied step {event.step}, which its leader never committed"
        elif event.label != commit[1].label:
            what = f"{who(event)} applied step {event.step} as {event.label!r}"
            yield line, f"{what}, its leader committed {commit[1].label!r}"


def equal_parameters(history: History, step: Step) -> Findings:
    """Require that all replicas have the same parameters after a step.

    Ranks of one replica that hold the same parameters must agree as well.
    """
    started = history.first(trace.RunStarted)
    layout = started.layout if started else trace.Layout(tp=1, pp=1)
    seen: dict[tuple[object, ...], tuple[str, trace.Applied]] = {}
    for line, event in step.applied:
        if history.outvoted_for(event):
            continue
        stage = event.rank // (layout.tp * layout.cp * layout.lanes)  # Megatron's rank order: tp, cp, dp, pp from fast to slow
        for key, digest in (
            (("rank", event.rank), event.parameter_digest),
            (
                ("lanes", stage, event.rank % layout.tp),
                event.parameter_digest if event.lane_digest is None else event.lane_digest,
            ),
            (("replicated", stage), event.replicated_digest),
        ):
            if not digest:
                continue
            first, other = seen.setdefault(key, (digest, event))
            if digest != first:
                what = f"parameters differ after step {event.step} ({event.label})"
                yield line, f"{what}: {digest} on {who(event)}, {first} on {who(other)}"
                break


def whole_records(history: History, step: Step) -> Findings:
    """Require that a record has all its buckets, with a checksum of every rank that holds them.

    - A training step commits all buckets.
    - An evaluation or an agreement commits the ledger.
    - A step that is given up commits none.
    """
    buckets = tuple(range(len(history.bucket_ranks)))
    whole: set[tuple[int, str]] = set()
    for line, event in step.committed:
        if (id(event.versions), event.label) in whole:  # most commits share them (`Step.shared`)
            continue
        expected = () if label_of(event.label).is_given_up else buckets if label_of(event.label).is_training else buckets[-1:]
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
    """A rule: every rank applies a committed step before it works on a later one.

    The step must also be applied by all ranks before the leader commits a later step. In a merged
    trace that is judged only by the next event of each rank, since no frame carries the order: a
    rank that holds nothing of the later step sends its leader no message in between.
    """

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._ranks = frozenset(rank for holders in history.bucket_ranks for rank in holders)
        self._owed: dict[int, tuple[int, Line, set[int]]] = {}
        """Replica -> its last committed step, the line of that commit, and the ranks that have not
        applied the step."""
        self._late: dict[tuple[int, int], tuple[int, Line]] = {}
        """(replica, rank) -> step and line of a commit that the rank had not applied when its
        leader committed the next one. Filled in merged traces only."""

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Committed: self._goes_on, **dict.fromkeys(RANK_WORK, self._goes_on)}

    def _goes_on(
        self, line: Line, event: trace.Committed | trace.Applied | trace.MicrobatchStarted, step: Step
    ) -> Iterable[Finding]:
        owed = self._owed.get(event.replica)
        found: Iterable[Finding] = ()
        is_commit = type(event) is trace.Committed
        if self._late and not is_commit:
            found = self._next_of_late(line, event)  # type: ignore[arg-type]
        if owed is not None and owed[2]:
            number, since, missing = owed
            if is_commit and event.step > number and self.history.is_merged:
                self._late |= {(event.replica, rank): (number, since) for rank in missing}
            elif event.step == number and isinstance(event, trace.Applied):
                missing.discard(event.rank)
            elif event.step > number and (is_commit or event.rank in missing):  # type: ignore[union-attr]
                late = set(missing) if is_commit else {event.rank}  # type: ignore[union-attr]
                missing -= late
                what = f"{who(event)} goes on with step {event.step}"
                found = ((line, f"{what}; ranks {sorted(late)} have not applied step {number}"),)
        if is_commit:
            self._owed[event.replica] = (event.step, line, set(self._ranks))
        return found

    def _next_of_late(self, line: Line, event: trace.Applied | trace.MicrobatchStarted) -> Iterable[Finding]:
        """Judge the next event of a rank that applied a step late."""
        late = self._late.get((event.replica, event.rank))
        if late is None or event.step < late[0] or (event.step == late[0] and not isinstance(event, trace.Applied)):
            return ()
        del self._late[event.replica, event.rank]
        if event.step == late[0]:
            return ()
        return ((line, f"{who(event)} goes on with step {event.step}; ranks {[event.rank]} have not applied step {late[0]}"),)

    def ended(self) -> Findings:
        living = set(survivors(self.history))
        for (replica, rank), (step, since) in self._late.items():
            if replica in living and step not in self.gaps.touched:
                yield since, f"replica {replica} committed step {step}, and its ranks {[rank]} never applied it"
        for replica in sorted(living):
            step, since, missing = self._owed.get(replica, (0, 0, set()))
            if missing and step not in self.gaps.touched:
                yield since, f"replica {replica} committed step {step}, and its ranks {sorted(missing)} never applied it"


def equal_members(history: History, gaps: Gaps) -> Findings:
    """Require that all replicas start alike."""
    members = {replica for generation in history.generations.values() for replica in generation.roster}
    joined = [(line, event) for line, event in history.of(trace.Joined) if event.replica in members]
    for line, event in joined:
        other = joined[0][1]
        if (event.fingerprint, event.bucket_ranks) != (other.fingerprint, other.bucket_ranks):
            yield line, f"replica {event.replica} is not made like replica {other.replica}, and yet became a member"


def equal_ranks(history: History, step: Step) -> Findings:
    """Require that all ranks record the same loss.

    A rank position must have parameter digests on all replicas or on none.
    """
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
    """A rule: a replica adopts a step only if a member has reported that it committed the step.

    It may have reported that with the status of a later step that was made void since.
    """

    def __init__(self, history: History, gaps: Gaps) -> None:
        super().__init__(history, gaps)
        self._told: set[tuple[int, int]] = set()
        """(generation, step) of each commit that a member has reported in its status."""

    def takes(self) -> Mapping[type, Taker]:
        return {trace.Status: self._tells, trace.Committed: self._adopts}

    def takes_void(self) -> Mapping[type, Taker]:
        return {trace.Status: self._tells}

    def _tells(self, line: Line, event: trace.Status, step: Step) -> Iterable[Finding]:
        if event.committed is not None:
            self._told.add((event.generation, event.committed))
        return ()

    def _adopts(self, line: Line, event: trace.Committed, step: Step) -> Iterable[Finding]:
        if not event.adopted or (event.generation, event.step) in self._told:
            return ()
        what = f"replica {event.replica} adopted step {event.step} in generation {event.generation}"
        return ((line, f"{what}, but no member had reported a commit of that step"),)


class CommitsInOrder(Rule):
    """A rule: a replica commits one step after the other."""

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
    """A rule: a commit has equal votes of all members, or adopts a record committed before."""

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


_COMMON = ("quotas", "transfers", "reduces", "decided")
"""Fields that are equal in the plans of all members; `computes` is a replica's own."""


def equal_plans(history: History, step: Step) -> Findings:
    """Require that all members make the same plan of a step.

    In the first generation that plans the step, the quotas must sum to M, and each replica must
    compute its quota.
    """
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


def equal_states(history: History, step: Step) -> Findings:
    """Require that all replicas began a step with the same state, rank by rank.

    This holds for steps whose record carries the state digest, as that of an agreement must. The
    ranks must record their digests before their replica votes. A replica that was outvoted commits
    nothing, so its digests may differ.
    """
    ranks = {rank for holders in history.bucket_ranks for rank in holders}
    voted: dict[int, int] = {}
    for line, vote in step.votes:
        voted.setdefault(vote.replica, line)
    first: dict[int, tuple[int, str]] = {}
    for replica, (line, record) in sorted(step.commits.items()):
        if record.state_digest is None:
            if label_of(record.label).is_agreement:
                yield line, f"replica {replica} committed step {step.number} ({record.label}) without a digest of the state"
            continue
        mine = step.digests.get(replica, {})
        late = {rank for rank, (at, _) in mine.items() if at > voted.get(replica, line)}
        if missing := sorted((ranks - mine.keys()) | late):
            yield line, f"replica {replica} voted for step {step.number} before its ranks {missing} had digested their state"
        for rank, (at, digest) in sorted(mine.items()):
            other, theirs = first.setdefault(rank, (replica, digest))
            if digest != theirs:
                what = f"rank {rank} began step {step.number} ({record.label}) with the state {digest} on replica {replica}"
                yield at, f"{what}, {theirs} on replica {other}"


RULES: tuple[type[Rule], ...] = (
    of_step(equal_results),
    CommitsInOrder,
    of_step(equal_records),
    of_step(equal_paces),
    of_step(equal_plans),
    BackedCommits,
    of_step(backed_votes),
    of_step(applied_as_committed),
    of_step(equal_parameters),
    of_step(whole_records),
    CommittedIsApplied,
    of_run(equal_members),
    of_step(equal_ranks),
    AdoptedFromAMember,
    of_step(equal_states),
)
"""Rules of the invariant, in the order in which their findings are reported."""
