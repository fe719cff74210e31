"""The invariants as rules over a trace: each yields what breaks it and where. INV-9 needs more than a trace and is not here.

A rule trusts the order of the lines (cause before effect, see `trace`) and nothing that a process says about its own
correctness: exactly-once is counted from the computed microbatches, not from the provenance alone; agreement is compared
between replicas; a commit has to be backed by votes, and a vote by results.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

from megatron_recover import trace
from megatron_recover.observe import omissions, plans
from megatron_recover.observe.history import Findings, History, Line, who
from megatron_recover.observe.work import Work

Rule = Callable[[History], Findings]


def exactly_once(history: History) -> Findings:
    """INV-1: a committed bucket counts each microbatch of its step once: by its provenance, by what was computed, by plans."""
    for step, (line, record) in history.records.items():
        computed = {version: _computed(history, step, version) for version in {each.version for each in record.versions}}
        for result in record.versions:
            for at, held in history.results[step, result.bucket, result.version]:
                if isinstance(held, trace.Reduced) and held.provenance != "ones":
                    wrong = {microbatch: count for microbatch, count in enumerate(held.provenance) if count != 1}
                    yield at, f"step {step} committed bucket {result.bucket}, which counts microbatch: times {wrong}"
            for message in _computed_once(history, step, result, computed[result.version]):
                yield line, message

    yield from _void_for_a_reason(history)
    yield from plans.deals_what_is_missing(history)
    yield from plans.computed_as_dealt(history)
    yield from omissions.every_microbatch(history)
    yield from omissions.every_iteration(history)
    applied: set[tuple[int, int, int]] = set()
    for line, event in history.of(trace.Applied):
        key = (event.replica, event.rank, event.step)
        if key in applied:
            yield line, f"{who(event)} applied step {event.step} twice"
        applied.add(key)


def _void_for_a_reason(history: History) -> Findings:
    """A step is made void because a member reported a miscount of it, once, and before anybody has committed it."""
    told: dict[int, Line] = {}
    voided: dict[int, int] = {}
    for line, event in history.events:
        if isinstance(event, trace.Miscounted):
            told.setdefault(event.step, line)
        elif isinstance(event, trace.Generation) and event.void is not None:
            step, since = event.void
            if step not in told:
                yield line, f"generation {event.generation} makes step {step} void, of which nobody has reported a miscount"
            if voided.setdefault(step, since) != since:
                yield line, f"generation {event.generation} makes step {step} void for the second time"
            if any(at < line for at, _ in history.commits.get(step, {}).values()) and event.generation == since:
                yield line, f"generation {event.generation} makes step {step} void, which is committed"


Computed = Mapping[tuple[int, tuple[int, ...]], Counter[int]]
"""By rank and the buckets that it went into (few different ones, of many buckets each): how often a microbatch was computed."""


def _computed(history: History, step: int, version: int) -> Computed:
    """What the members of a generation had computed of a step up to then."""
    members = frozenset(history.roster(version))
    found: dict[tuple[int, tuple[int, ...]], Counter[int]] = defaultdict(Counter)
    for _, event in history.finished[step]:
        if event.replica in members and event.generation <= version:
            found[event.rank, event.into][event.microbatch] += 1
    return found


def _computed_once(history: History, step: int, result: trace.Result, computed: Computed) -> Iterator[str]:
    """Count, on each rank position, the microbatches that the members of the bucket's version put into it."""
    num_microbatches = history.num_microbatches(step)
    if num_microbatches is None:
        yield f"step {step} was committed, but nobody planned it"
        return
    members, counts = history.roster(result.version), defaultdict[int, Counter[int]](Counter)
    for (rank, into), microbatches in computed.items():
        if result.bucket in into:
            counts[rank] += microbatches
    for rank in history.ranks_of(result.bucket):
        if wrong := plans.not_once(counts[rank], num_microbatches):
            yield (
                f"step {step} committed bucket {result.bucket} version {result.version}; rank {rank} of its members "
                f"{list(members)} computed microbatch: times {wrong}, not each of 0..{num_microbatches - 1} once"
            )


def agreement(history: History) -> Findings:
    """INV-2: equal results, equal records, equal parameters; a commit only by identical votes of all members; what is applied
    is what was committed.

    What a replica was outvoted for differs, and counts nowhere.
    """
    yield from _equal_results(history)
    yield from _equal_records(history)
    yield from _equal_paces(history)
    yield from plans.equal_plans(history)
    yield from _backed_commits(history)
    yield from _equal_parameters(history)
    yield from omissions.whole_records(history)
    yield from omissions.committed_is_applied(history)
    yield from omissions.equal_ranks(history)
    yield from omissions.adopted_from_a_member(history)


def _equal_results(history: History) -> Findings:
    for (step, bucket, version), events in history.results.items():
        first: dict[int, trace.Reduced | trace.Transferred] = {}
        for line, event in events:
            if history.outvoted_for(event):
                continue
            other = first.setdefault(event.rank, event)
            if event.checksum != other.checksum:
                what = f"step {step}, bucket {bucket} version {version}"
                yield line, f"{what}: checksum {event.checksum} on {who(event)}, {other.checksum} on {who(other)}"


def _equal_records(history: History) -> Findings:
    last: dict[int, int] = {}
    for line, event in history.of(trace.Committed):
        step = event.step
        if event.replica in last and step != last[event.replica] + 1:
            yield line, f"replica {event.replica} committed step {step} after step {last[event.replica]}"
        last[event.replica] = step
        record = history.records[step][1]
        for field in ("label", "digest", "versions", "requests"):
            mine, theirs = getattr(event, field), getattr(record, field)
            if mine != theirs:
                yield line, f"{field} of step {step}: {mine} on replica {event.replica}, {theirs} on replica {record.replica}"
                break
        for result in event.versions:
            committed = dict(zip(history.ranks_of(result.bucket), result.checksums, strict=False))
            for at, held in history.results[step, result.bucket, result.version]:
                expected = committed.get(held.rank)
                if held.replica == event.replica and held.checksum != expected:
                    what = f"step {step} committed bucket {result.bucket} with checksum {expected}"
                    yield at, f"{what}, but {who(held)} holds {held.checksum}"


def _equal_paces(history: History) -> Findings:
    """Members that go on learn the same paces. One that is lost may have committed by votes that nobody else had."""
    for step, by_replica in history.commits.items():
        members = history.roster(max(event.generation for _, event in by_replica.values()))
        commits = [commit for replica, commit in by_replica.items() if replica in members]
        for line, event in commits:
            if event.paces != commits[0][1].paces:
                what = f"paces of step {step}: {list(event.paces)} on replica {event.replica}"
                yield line, f"{what}, {list(commits[0][1].paces)} on replica {commits[0][1].replica}"


def _backed_commits(history: History) -> Findings:
    votes: dict[tuple[int, int, str], set[int]] = defaultdict(set)
    committed: set[tuple[int, str]] = set()
    for line, event in history.events:
        if isinstance(event, trace.Voted):
            votes[event.generation, event.step, event.digest].add(event.replica)
            yield from _backed_vote(history, line, event)
        elif isinstance(event, trace.Committed):
            missing = set(history.roster(event.generation)) - votes[event.generation, event.step, event.digest]
            if event.adopted and (event.step, event.digest) not in committed:
                yield line, f"replica {event.replica} adopted step {event.step}, which nobody had committed"
            if not event.adopted and missing:
                what = f"replica {event.replica} committed step {event.step} in generation {event.generation}"
                yield line, f"{what} without the vote of {sorted(missing)}"
            committed.add((event.step, event.digest))
        elif isinstance(event, trace.Applied):
            _, commit = history.commits.get(event.step, {}).get(event.replica, (line, None))
            if commit is None:
                yield line, f"{who(event)} applied step {event.step}, which its leader never committed"
            elif event.label != commit.label:
                yield line, f"{who(event)} applied step {event.step} as {event.label!r}, its leader committed {commit.label!r}"


def _backed_vote(history: History, line: Line, vote: trace.Voted) -> Findings:
    """A vote says that all ranks of the replica hold all results of the record."""
    record = history.records.get(vote.step)
    for result in record[1].versions if record and record[1].digest == vote.digest else ():
        for rank in history.ranks_of(result.bucket):
            since = history.held_since.get((vote.step, result.bucket, result.version, vote.replica, rank))
            if since is None or since > line:
                what = f"replica {vote.replica} voted for step {vote.step}"
                yield line, f"{what} before its rank {rank} held bucket {result.bucket} version {result.version}"


def _equal_parameters(history: History) -> Findings:
    started = history.first(trace.RunStarted)
    layout = started.layout if started else trace.Layout(tp=1, pp=1)
    seen: dict[tuple[object, ...], tuple[str, trace.Applied]] = {}
    for line, event in history.of(trace.Applied):
        if history.outvoted_for(event):
            continue
        stage = event.rank // (layout.tp * layout.cp * layout.lanes)  # Megatron's rank order: tp, cp, dp, pp from fast to slow
        for key, digest in (
            (("rank", event.step, event.rank), event.parameter_digest),
            (("lanes", event.step, stage, event.rank % layout.tp), event.lane_digest or event.parameter_digest),
            (("replicated", event.step, stage), event.replicated_digest),
        ):
            if digest is None:
                continue
            first, other = seen.setdefault(key, (digest, event))
            if digest != first:
                what = f"parameters differ after step {event.step} ({event.label})"
                yield line, f"{what}: {digest} on {who(event)}, {first} on {who(other)}"
                break


def no_corruption(history: History) -> Findings:
    """INV-3: nothing but backward changes a local gradient before the commit.

    A trace shows it in three ways: no rank applies before its leader has committed; none sums a bucket before the backwards
    that it counts have passed it; and in `exact` runs every version of a bucket is the same sum whoever computed what, so two
    versions that differ were made from a changed gradient.
    """
    yield from _summed_when_passed(history)
    for line, event in history.of(trace.Applied):
        commit = history.commits.get(event.step, {}).get(event.replica)
        if commit and commit[0] > line:
            yield line, f"{who(event)} applied step {event.step} before its leader committed it (line {commit[0]})"
    started = history.first(trace.RunStarted)
    if not started or started.determinism != "exact":
        return
    ledger = len(history.bucket_ranks) - 1  # it holds measured seconds, which no two computations share
    first: dict[tuple[int, int, int], trace.Reduced] = {}
    newest = max(history.generations, default=0)
    for line, result in history.of(trace.Reduced):
        if history.withdrawn(result.step, result.version, newest):
            continue
        other = first.setdefault((result.step, result.bucket, result.rank), result)
        if result.bucket != ledger and result.version != other.version and result.checksum != other.checksum:
            what = (
                f"step {result.step}, bucket {result.bucket}, rank {result.rank}: versions {other.version} and {result.version}"
            )
            yield line, f"{what} differ ({other.checksum} and {result.checksum}), though sums are exact"


def _summed_when_passed(history: History) -> Findings:
    """With `--overlap-grad-reduce` a bucket is summed before its last backward has ended, but not before that has passed it."""
    put: dict[tuple[int, int, int, int], dict[tuple[int, int], Line]] = defaultdict(dict)
    for line, event in history.events:
        if isinstance(event, trace.MicrobatchFinished | trace.BucketPassed):
            for bucket in (event.bucket,) if isinstance(event, trace.BucketPassed) else event.into:
                put[event.replica, event.rank, event.step, bucket].setdefault((event.generation, event.microbatch), line)
    for line, result in history.of(trace.Reduced):
        for (generation, microbatch), since in put[result.replica, result.rank, result.step, result.bucket].items():
            if generation <= result.version and since > line:
                what = f"{who(result)} summed bucket {result.bucket} of step {result.step}"
                yield line, f"{what} before microbatch {microbatch} was in it (line {since})"
                break


def decided_once(history: History) -> Findings:
    """INV-4: a bucket that a member holds complete is neither computed into nor reduced again, and is what is committed.

    A result in which a replica took part that was outvoted since is withdrawn: it has to be made again. And only what is
    planned as undecided is summed, only what is decided is sent, by who holds it (`plans.held_as_planned`).
    """
    yield from plans.held_as_planned(history)
    decided: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for _, status in history.of(trace.Status):
        buckets = decided[status.generation, status.step]
        for bucket, version in status.complete if status.replica in history.roster(status.generation) else ():
            if not history.withdrawn(status.step, version, status.generation):
                buckets[bucket] = max(version, buckets.get(bucket, 0))
    for line, event in history.events:
        if isinstance(event, trace.Plan):
            made = {*event.reduces, *(bucket for one in event.computes for bucket in one.into)}
        elif isinstance(event, trace.MicrobatchFinished):
            made = set(event.into)
        elif isinstance(event, trace.BucketPassed | trace.Reduced):
            made = {event.bucket}
        elif isinstance(event, trace.Committed) and not event.adopted:
            yield from _commits_decided(line, event, decided.get((event.generation, event.step), {}))
            continue
        else:
            continue
        held = decided.get((event.generation, event.step), {})
        for bucket in sorted(made & held.keys()):
            what = f"{who(event)} makes bucket {bucket} of step {event.step} again in generation {event.generation}"
            yield line, f"{what}, though a member held version {held[bucket]} complete"


def _commits_decided(line: Line, commit: trace.Committed, decided: dict[int, int]) -> Findings:
    for result in commit.versions:
        expected = decided.get(result.bucket, commit.generation)
        if result.version != expected:
            what = (
                f"replica {commit.replica} committed version {result.version} of bucket {result.bucket} in step {commit.step}"
            )
            yield line, f"{what}; decided was {expected}"


def fencing(history: History) -> Findings:
    """INV-5: nothing stamped with an older generation, and nothing of a replica outside the roster, changes any state."""
    yield from omissions.promised(history)
    yield from omissions.what_was_lost_is_fenced(history)
    entered: dict[int, int] = {}
    fenced: dict[tuple[int, int], Line] = {}
    for line, event in history.events:
        if isinstance(event, trace.Fenced):
            fenced.update({(event.replica, rank): line for rank in event.ranks})
        replica = getattr(event, "replica", None)
        if replica is None or isinstance(event, trace.Fenced | trace.Failure | trace.Fault):
            continue
        generation = getattr(event, "generation", None)
        did = f"{who(event)} wrote {type(event).__name__}"
        dead_since = fenced.get((replica, getattr(event, "rank", 0)))
        if dead_since is not None:
            yield line, f"{did} after it was fenced (line {dead_since})"
        if generation in history.generations and replica not in history.roster(generation):
            yield line, f"{did} in generation {generation}, to which it does not belong"
        if isinstance(event, trace.Reduced) and event.version != event.generation:
            yield line, f"{did} of version {event.version}, which generation {event.generation} cannot make"
        if isinstance(event, trace.Entered):
            entered[replica] = max(event.generation, entered.get(replica, 0))
        elif isinstance(event, trace.Voted | trace.Committed) and event.generation < entered.get(replica, 0):
            yield line, f"{did} of generation {event.generation} after it had entered {entered[replica]}"
        elif isinstance(event, trace.Status):
            yield from _backed_status(history, line, event)


def _backed_status(history: History, line: Line, status: trace.Status) -> Findings:
    """A status counts only results that all ranks of the replica held before they promised, and finished microbatches."""
    done = {
        event.microbatch for at, event in history.finished[status.step]
        if (event.replica, event.rank) == (status.replica, 0) and at < line
    }  # fmt: skip
    if unfinished := [microbatch for microbatch in status.finished if microbatch not in done]:
        yield line, f"replica {status.replica} says that it has finished microbatches {unfinished} of step {status.step}"
    for bucket, version in status.complete:
        for rank in history.ranks_of(bucket):
            since = history.held_since.get((status.step, bucket, version, status.replica, rank))
            if version >= status.generation or since is None or since > line:
                what = f"replica {status.replica} counts bucket {bucket} version {version} in generation {status.generation}"
                yield line, f"{what}, though its rank {rank} had not completed it when it entered"
                break


def single_history(history: History) -> Findings:
    """INV-6: one roster a generation, generations and checkpoints only go forward, a lost replica never returns."""
    yield from omissions.members_have_joined(history)
    newest: trace.Generation | None = None
    lost: set[int] = set()
    entered: dict[int, int] = {}
    saved = -1
    at_the_end = history.commits.get(max(history.commits, default=-1), {})
    for line, event in history.events:
        if isinstance(event, trace.Generation):
            finished = {replica for replica, (committed, _) in at_the_end.items() if committed < line}
            for message in _follows(newest, event, lost, finished):
                yield line, message
            newest = event
            lost |= {one.replica for one in event.losses}
        elif isinstance(event, trace.Entered):
            if newest is None or event.generation > newest.generation:
                yield line, f"replica {event.replica} entered generation {event.generation} before it was announced"
            if event.generation <= entered.get(event.replica, 0):
                yield line, f"replica {event.replica} entered {event.generation} after {entered[event.replica]}"
            entered[event.replica] = event.generation
        elif isinstance(event, trace.Plan):
            roster, first = history.roster(event.generation), history.plans[event.step][0][1]
            if event.roster != roster:
                what = f"replica {event.replica} plans generation {event.generation} with roster {list(event.roster)}"
                yield line, f"{what}; announced was {list(roster)}"
            if (event.label, event.num_microbatches) != (first.label, first.num_microbatches):
                yield line, f"step {event.step} is {event.label!r} on {who(event)} and {first.label!r} on {who(first)}"
        elif isinstance(event, trace.Checkpoint) and event.phase == "finished":
            if event.iteration <= saved:
                yield line, f"the checkpoint of iteration {event.iteration} became the latest after that of {saved}"
            saved = event.iteration


def _follows(before: trace.Generation | None, event: trace.Generation, lost: set[int], finished: set[int]) -> Iterator[str]:
    """`finished`: replicas that have committed the run's last step; one that ends then owes nothing and is no loss."""
    number, roster = event.generation, list(event.roster)
    if before and number <= before.generation:
        yield f"generation {number} was announced after generation {before.generation}"
    if not roster or roster != sorted(set(roster)):
        yield f"generation {number} has the roster {roster}"
    if back := lost & set(roster):
        yield f"generation {number} contains replicas that were lost before: {sorted(back)}"
    gone = set(before.roster if before else ()) - set(roster)
    if unexplained := gone - {one.replica for one in event.losses} - finished:
        yield f"generation {number} leaves out {sorted(unexplained)} without naming a loss"


def least_work(history: History) -> Findings:
    """INV-7: only microbatches that no survivor holds are computed again; no survivor's work is thrown away."""
    work = Work(history)
    for again in work.redone:
        for holder in set(again.dealt_before_to) & set(history.roster(again.generation)):
            what = f"replica {again.replica} computed microbatch {again.microbatch} of step {again.step} again"
            yield again.line, f"{what} in generation {again.generation}, though replica {holder} holds it"
    had: set[tuple[int, ...]] = set()
    for line, event in history.of(trace.MicrobatchFinished):
        puts = {(event.replica, event.rank, event.step, event.microbatch, bucket) for bucket in event.into}
        if puts & had:
            yield line, f"{who(event)} computed microbatch {event.microbatch} of step {event.step} again, though it holds it"
        had |= puts
    for line, replica, step, microbatch in work.wasted:
        yield line, f"replica {replica} computed microbatch {microbatch} of step {step}, which entered no committed bucket"


def bounded_waits(history: History) -> Findings:
    """INV-8, as far as a trace tells: every member of the last generation enters it, unless it had nothing left to do.

    And a run that says it has ended well has.
    """
    yield from omissions.honest_end(history)
    announced, ended = history.of(trace.Generation), history.first(trace.RunFinished)
    if not announced or ended is None or any(event.exit_code for _, event in history.of(trace.Stopping)):
        return
    line, newest = announced[-1]
    entered = {event.replica for _, event in history.of(trace.Entered) if event.generation == newest.generation}
    finished = history.commits.get(max(history.commits, default=-1), {})
    for replica in newest.roster:
        if replica not in entered and replica not in finished:
            yield line, f"replica {replica} never entered generation {newest.generation}"


RULES: tuple[tuple[str, str, Rule], ...] = (
    ("INV-1", "exactly once", exactly_once),
    ("INV-2", "agreement", agreement),
    ("INV-3", "no corruption", no_corruption),
    ("INV-4", "decided once", decided_once),
    ("INV-5", "fencing", fencing),
    ("INV-6", "single history", single_history),
    ("INV-7", "least work", least_work),
    ("INV-8", "bounded waits", bounded_waits),
)
"""Number, name and rule of every invariant that a trace can show."""
