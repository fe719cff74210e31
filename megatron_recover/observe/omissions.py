"""What a trace must contain: rules that find what is missing, or what contradicts the rest, behind a correct-looking commit.

`rules` judges what was written; a rule here asks for what should have been. Each yields like a rule, and `rules` says to
which invariant it belongs. A killed process owes nothing after its last line: something is missing only where its writer
went on, or where the run claims to have ended well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megatron_recover import trace
from megatron_recover.core.values import ExitCode
from megatron_recover.observe.history import Findings, History, Line, is_end, is_training, iteration_of, who

RankWork = (
    trace.MicrobatchStarted | trace.MicrobatchFinished | trace.BucketPassed | trace.Reduced | trace.Transferred | trace.Applied
)
"""What a rank does for a step."""
NEVER_ALONE = (
    ExitCode.TOO_FEW_REPLICAS, ExitCode.POISONED_MICROBATCH, ExitCode.DIVERGED, ExitCode.NO_REPLICA_LEFT,
)  # fmt: skip
"""Exit codes that only the coordinator gives, which says so by `stopping`."""


# --- INV-1 ---------------------------------------------------------------------------------------------------------------


def every_microbatch(history: History) -> Findings:
    """M is what the command line asked for, and what was finished was started."""
    started = history.first(trace.RunStarted)
    asked = started.num_microbatches if started else None
    expected = {True: asked}
    for step, plans in sorted(history.plans.items()) if asked is not None else ():
        line, plan = plans[0]
        if is_end(plan.label):
            continue
        wanted = expected.setdefault(is_training(plan.label), plan.num_microbatches)  # evaluations are only equal to each other
        if plan.num_microbatches != wanted:
            yield line, f"step {step} ({plan.label}) has {plan.num_microbatches} microbatches; {wanted} are asked for"

    begun: Counter[tuple[int, ...]] = Counter()
    for line, event in history.events:
        if isinstance(event, trace.MicrobatchStarted | trace.MicrobatchFinished):
            key = (event.replica, event.rank, event.generation, event.step, event.microbatch, event.chunk)
            begun[key] += 1 if isinstance(event, trace.MicrobatchStarted) else -1
            if begun[key] < 0:
                yield line, f"{who(event)} finished microbatch {event.microbatch} of step {event.step}, which it never started"


def every_iteration(history: History) -> Findings:
    """Training goes through the iterations one by one."""
    last: tuple[int, int] | None = None
    for step, (line, record) in history.records.items():
        plans = history.plans.get(step)
        if plans and plans[0][1].label != record.label:
            yield line, f"step {step} was committed as {record.label!r}, but planned as {plans[0][1].label!r}"
        if not is_training(record.label):
            continue
        iteration = iteration_of(record.label)
        if last is not None and iteration != last[1] + 1:
            yield line, f"step {step} trained iteration {iteration} after step {last[0]} had trained {last[1]}"
        last = (step, iteration)


# --- INV-2 ---------------------------------------------------------------------------------------------------------------


def whole_records(history: History) -> Findings:
    """A step commits all buckets, an evaluation the ledger, each with the checksum of every rank that holds it."""
    buckets = tuple(range(len(history.bucket_ranks)))
    for line, event in history.of(trace.Committed):
        expected = buckets if is_training(event.label) else buckets[-1:]
        committed = tuple(sorted(result.bucket for result in event.versions))
        if committed != expected:
            what = f"replica {event.replica} committed buckets {list(committed)} in step {event.step} ({event.label})"
            yield line, f"{what}, not {list(expected)}"
            continue
        for result in event.versions:
            if len(result.checksums) != len(history.ranks_of(result.bucket)):
                what = f"step {event.step} committed bucket {result.bucket} with {len(result.checksums)} checksums"
                yield line, f"{what}; ranks {list(history.ranks_of(result.bucket))} hold it"


def committed_is_applied(history: History) -> Findings:
    """Every rank of a replica applies what its leader has committed before it, or the leader, gets to a later step."""
    ranks = {rank for holders in history.bucket_ranks for rank in holders}
    owed: dict[int, tuple[int, Line, set[int]]] = {}
    for line, event in history.events:
        if not isinstance(event, trace.Committed | RankWork):
            continue
        step, since, missing = owed.get(event.replica, (event.step, line, set()))
        if isinstance(event, trace.Applied) and event.step == step:
            missing.discard(event.rank)
        elif event.step > step and (late := missing if isinstance(event, trace.Committed) else missing & {event.rank}):
            yield line, f"{who(event)} goes on with step {event.step}; ranks {sorted(late)} have not applied step {step}"
            missing -= late
        if isinstance(event, trace.Committed):
            owed[event.replica] = (event.step, line, set(ranks))
    for replica in _survivors(history):
        step, since, missing = owed.get(replica, (0, 0, set()))
        if missing:
            yield since, f"replica {replica} committed step {step}, and its ranks {sorted(missing)} never applied it"


def _survivors(history: History) -> Iterator[int]:
    """Replicas that lived to the end of a run that ended as planned; none for any other run."""
    ended, announced = history.first(trace.RunFinished), history.of(trace.Generation)
    if ended is None or ended.exit_code != ExitCode.OK or not announced:
        return
    # A loss after the others had finished makes no generation any more.
    broken = {event.replica for _, event in [*history.of(trace.Failure), *history.of(trace.Fenced)]}
    yield from (replica for replica in announced[-1][1].roster if replica not in broken | history.lost_at.keys())


def equal_ranks(history: History) -> Findings:
    """All replicas start alike; a loss is the same wherever it is told; digests are made of a rank on all replicas or none."""
    members = {replica for generation in history.generations.values() for replica in generation.roster}
    joined = [(line, event) for line, event in history.of(trace.Joined) if event.replica in members]
    for line, event in joined:
        other = joined[0][1]
        if (event.fingerprint, event.bucket_ranks) != (other.fingerprint, other.bucket_ranks):
            yield line, f"replica {event.replica} is not made like replica {other.replica}, and yet became a member"

    losses: dict[int, trace.Applied] = {}
    digests: dict[tuple[int, int], trace.Applied] = {}
    for line, event in history.of(trace.Applied):
        if event.loss is not None:
            first = losses.setdefault(event.step, event)
            if event.loss != first.loss:
                yield line, f"the loss of step {event.step} is {event.loss} on {who(event)} and {first.loss} on {who(first)}"
        first = digests.setdefault((event.step, event.rank), event)
        if (event.parameter_digest is None) != (first.parameter_digest is None):
            yield line, f"step {event.step}: only one of {who(event)} and {who(first)} has a digest of its parameters"


def adopted_from_a_member(history: History) -> Findings:
    """What a replica adopts, a member has said that it has committed."""
    told: set[tuple[int, int]] = set()
    for line, event in history.events:
        if isinstance(event, trace.Status) and event.committed is not None:
            told.add((event.generation, event.committed))
        elif isinstance(event, trace.Committed) and event.adopted and (event.generation, event.step) not in told:
            what = f"replica {event.replica} adopted step {event.step} in generation {event.generation}"
            yield line, f"{what}, of which no member had said that it committed that step"


# --- INV-5, INV-6, INV-8 -------------------------------------------------------------------------------------------------


def promised(history: History) -> Findings:
    """Who acts in a generation has entered it and told its status."""
    seen: dict[type[trace.Event], set[tuple[int, int]]] = {trace.Entered: set(), trace.Status: set()}
    for line, event in history.events:
        if isinstance(event, trace.Entered | trace.Status):
            seen[type(event)].add((event.replica, event.generation))
        elif isinstance(event, trace.Plan | trace.Voted | trace.Committed | RankWork):
            key = (event.replica, event.generation)
            for kind, had in seen.items():
                if key not in had:
                    what = f"replica {event.replica} acts in generation {event.generation} without"
                    yield line, f"{what} {'a status' if kind is trace.Status else 'having entered it'}"
                    had.add(key)  # once is enough


def what_was_lost_is_fenced(history: History) -> Findings:
    """Every rank of a replica that left the roster by a loss is confirmed dead by the end of the run, or was set aside."""
    started = history.first(trace.RunStarted)
    if started is None or history.first(trace.RunFinished) is None:
        return
    dead = {(event.replica, rank) for _, event in history.of(trace.Fenced) for rank in event.ranks}
    dead |= {(event.replica, event.rank) for _, event in history.of(trace.SetAside)}
    for replica, (line, _) in history.lost_at.items():
        if alive := [rank for rank in range(started.layout.num_ranks) if (replica, rank) not in dead]:
            yield line, f"replica {replica} was lost, and its ranks {alive} were never fenced"


def members_have_joined(history: History) -> Findings:
    """Only a replica that was ready becomes a member."""
    joined: set[int] = set()
    for line, event in history.events:
        if isinstance(event, trace.Joined):
            joined.add(event.replica)
        elif isinstance(event, trace.Generation) and (strange := sorted(set(event.roster) - joined)):
            yield line, f"generation {event.generation} has members {strange} that never joined"
            joined.update(strange)  # once is enough


def honest_end(history: History) -> Findings:
    """The exit code is that of `stopping`; 0 means that what was begun was committed by all survivors."""
    found = history.of(trace.RunFinished)
    if not found:
        return
    line, ended = found[-1]
    stops = [event.exit_code for _, event in history.of(trace.Stopping)]
    killed_on_request = ended.exit_code > 128
    if stops and ended.exit_code not in stops and not killed_on_request:
        yield line, f"the run ended with exit code {ended.exit_code}, but was stopping with {stops[-1]}"
    elif not stops and ended.exit_code in NEVER_ALONE:
        yield line, f"the run ended with exit code {ended.exit_code}, but nothing says that it was stopping"
    if ended.exit_code != ExitCode.OK or not history.commits:
        return
    last = max(history.commits)
    if begun := [step for step in history.plans if step > last]:
        yield line, f"the run ended with exit code 0, but steps {sorted(begun)} were planned and never committed"
    if behind := [replica for replica in _survivors(history) if replica not in history.commits[last]]:
        yield line, f"the run ended with exit code 0, but replicas {behind} live and never committed step {last}"
