"""The invariants as rules over a trace: each yields what breaks it and where. INV-9 needs more than a trace and is not here.

A rule trusts the order of the lines (cause before effect, see `trace`) and nothing that a process says about its own
correctness: exactly-once is counted from the computed microbatches, not from the provenance alone; agreement is compared
between replicas; a commit has to be backed by votes, and a vote by results.

Here are the rules of single steps, and the list of all; those that look at the run as it goes on are in `conduct`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from megatron_recover import trace
from megatron_recover.observe import conduct, durable, omissions, plans
from megatron_recover.observe.history import Findings, History, Line, who
from megatron_recover.observe.rule import Rule, of_run, of_step
from megatron_recover.observe.step import Held, Ids, Step, not_each_once
from megatron_recover.observe.void import void_for_a_reason
from megatron_recover.observe.work import redone_in, wasted_in

# --- INV-1 ---------------------------------------------------------------------------------------------------------------


def counted_once(history: History, step: Step) -> Findings:
    """A committed bucket counts each microbatch of its step once, by its provenance."""
    versions = [(result.bucket, result.version) for result in step.record[1].versions] if step.record else []
    for key in versions if step.miscounted else ():
        for at, held in step.miscounted:
            if (held.bucket, held.version) == key:
                wrong = {microbatch: count for microbatch, count in enumerate(held.provenance) if count != 1}
                yield at, f"step {step.number} committed bucket {held.bucket}, which counts microbatch: times {wrong}"


def computed_once(history: History, step: Step) -> Findings:
    """On each rank position the members of a committed version put each microbatch into the bucket once, and no other."""
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
    """Rank -> what the members of a generation had computed of a step up to then, and the buckets that it went into."""
    members = history.members.get(version, frozenset())
    found: dict[int, list[tuple[frozenset[int], Ids]]] = defaultdict(list)
    for (replica, rank), work in step.ranks.items():
        for (generation, _, into), ids in work.groups.items() if replica in members else ():
            if generation <= version:
                found[rank].append((step.shared(frozenset(into)), ids))
    return found


# --- INV-2 ---------------------------------------------------------------------------------------------------------------


def equal_results(history: History, step: Step) -> Findings:
    """The members of a version hold the same result. What a replica was outvoted for differs, and counts nowhere."""
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
    """All replicas commit the same record, of the results that they hold."""
    if step.record is None:
        return
    record = step.record[1]
    unusual: dict[int, list[tuple[trace.Result, Held, dict[int, int]]]] = {}
    for line, event in step.committed:
        for field in ("label", "digest", "versions", "requests", "state_digest"):
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
    """The committed results of which somebody may hold something else, with the committed checksum of each rank."""
    for result in commit.versions:
        held = step.results.get((result.bucket, result.version))
        if held is None:
            continue
        committed = dict(zip(history.ranks_of(result.bucket), result.checksums, strict=False))
        if held.odd or any(usual.checksum != committed.get(rank) for rank, usual in held.usual.items()):
            yield result, held, committed


def _held_by(held: Held, replica: int) -> Iterator[tuple[Line, int, int]]:
    """Line, rank and checksum of each result that a replica came to hold."""
    for rank, line in held.plain.get(replica, {}).items():
        yield line, rank, held.usual[rank].checksum
    for line, event in held.odd:
        if event.replica == replica:
            yield line, event.rank, event.checksum


def equal_paces(history: History, step: Step) -> Findings:
    """Members that go on learn the same paces. One that is lost may have committed by votes that nobody else had."""
    if not step.commits:
        return
    members = history.roster(max(event.generation for _, event in step.commits.values()))
    commits = [commit for replica, commit in step.commits.items() if replica in members]
    for line, event in commits:
        if event.paces != commits[0][1].paces:
            what = f"paces of step {step.number}: {list(event.paces)} on replica {event.replica}"
            yield line, f"{what}, {list(commits[0][1].paces)} on replica {commits[0][1].replica}"


def backed_votes(history: History, step: Step) -> Findings:
    """A vote says that all ranks of the replica hold all results of the record."""
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
    """A rank applies what its leader has committed, under the same name."""
    for line, event in step.applied:
        commit = step.commits.get(event.replica)
        if commit is None:
            yield line, f"{who(event)} applied step {event.step}, which its leader never committed"
        elif event.label != commit[1].label:
            what = f"{who(event)} applied step {event.step} as {event.label!r}"
            yield line, f"{what}, its leader committed {commit[1].label!r}"


def equal_parameters(history: History, step: Step) -> Findings:
    """All replicas have the same parameters after a step, and the ranks of each that hold the same ones, too."""
    started = history.first(trace.RunStarted)
    layout = started.layout if started else trace.Layout(tp=1, pp=1)
    seen: dict[tuple[object, ...], tuple[str, trace.Applied]] = {}
    for line, event in step.applied:
        if history.outvoted_for(event):
            continue
        stage = event.rank // (layout.tp * layout.cp * layout.lanes)  # Megatron's rank order: tp, cp, dp, pp from fast to slow
        for key, digest in (
            (("rank", event.rank), event.parameter_digest),
            (("lanes", stage, event.rank % layout.tp), event.lane_digest or event.parameter_digest),
            (("replicated", stage), event.replicated_digest),
        ):
            if digest is None:
                continue
            first, other = seen.setdefault(key, (digest, event))
            if digest != first:
                what = f"parameters differ after step {event.step} ({event.label})"
                yield line, f"{what}: {digest} on {who(event)}, {first} on {who(other)}"
                break


# --- INV-3, INV-5 --------------------------------------------------------------------------------------------------------


def applied_when_committed(history: History, step: Step) -> Findings:
    """No rank applies before its leader has committed."""
    for line, event in step.applied:
        commit = step.commits.get(event.replica)
        if commit and commit[0] > line:
            yield line, f"{who(event)} applied step {event.step} before its leader committed it (line {commit[0]})"


def applied_once(history: History, step: Step) -> Findings:
    """No rank applies a step twice."""
    applied: set[tuple[int, int]] = set()
    for line, event in step.applied:
        if (event.replica, event.rank) in applied:
            yield line, f"{who(event)} applied step {event.step} twice"
        applied.add((event.replica, event.rank))


def honest_journals(history: History, step: Step) -> Findings:
    """A status tells as finished only microbatches whose backward had ended."""
    for line, status, missing in step.unfinished:
        if missing:
            yield line, f"replica {status.replica} says that it has finished microbatches {missing} of step {status.step}"


def backed_statuses(history: History, step: Step) -> Findings:
    """A status counts only results that all ranks of the replica held before they promised."""
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


# --- INV-7 ---------------------------------------------------------------------------------------------------------------


def least_work(history: History, step: Step) -> Findings:
    """Only microbatches that no survivor holds are computed again; no survivor's work is thrown away."""
    for again in redone_in(step):
        for holder in set(again.dealt_before_to) & set(history.roster(again.generation)):
            what = f"replica {again.replica} computed microbatch {again.microbatch} of step {again.step} again"
            yield again.line, f"{what} in generation {again.generation}, though replica {holder} holds it"
    for line, replica, number, microbatch in wasted_in(history, step):
        yield line, f"replica {replica} computed microbatch {microbatch} of step {number}, which entered no committed bucket"


RULES: tuple[tuple[str, str, tuple[type[Rule], ...]], ...] = (
    (
        "INV-1", "exactly once",
        (
            of_step(counted_once), of_step(computed_once, "microbatches"), of_step(plans.deals_what_is_missing),
            plans.ComputedAsDealt, omissions.AskedFor, omissions.StartedAndFinished, of_run(omissions.every_iteration, "steps"),
            of_step(applied_once), of_run(void_for_a_reason),
        ),
    ),
    (
        "INV-2", "agreement",
        (
            of_step(equal_results), conduct.CommitsInOrder, of_step(equal_records), of_step(equal_paces),
            of_step(plans.equal_plans), conduct.BackedCommits, of_step(backed_votes),
            of_step(applied_as_committed), of_step(equal_parameters), of_step(omissions.whole_records),
            omissions.CommittedIsApplied, of_run(omissions.equal_members), of_step(omissions.equal_ranks),
            omissions.AdoptedFromAMember, of_step(durable.equal_states),
        ),
    ),
    (
        "INV-3", "no corruption",
        (conduct.SummedWhenPassed, of_step(applied_when_committed), conduct.ExactSums),
    ),
    (
        "INV-4", "decided once",
        (of_step(plans.counted_as_told), plans.HeldAsPlanned, conduct.DecidedOnce),
    ),
    (
        "INV-5", "fencing",
        (
            omissions.Promised, of_run(omissions.what_was_lost_is_fenced), conduct.Fencing,
            of_step(honest_journals, "microbatches"), of_step(backed_statuses),
        ),
    ),
    (
        "INV-6", "single history",
        (omissions.MembersHaveJoined, conduct.SingleHistory, of_run(durable.saved_what_was_agreed, "steps")),
    ),
    ("INV-7", "least work", (of_step(least_work, "microbatches"), conduct.HeldIsNotComputedAgain)),
    ("INV-8", "bounded waits", (of_run(omissions.honest_end), conduct.EntersTheLast)),
)  # fmt: skip
"""Number, name and rules of every invariant that a trace can show."""
