"""INV-1..9 over a history of facts (`core/facts.py`).

`observe(history, fact) -> history` raises `InvariantViolation` at the first fact that breaks an
invariant. `check(shape, facts)` observes a whole list.

The explorer, the fuzzer and the tests' transcripts feed what their simulated machines do. The
checker of traces has rules of its own (`observe/verify/rules.py`), so that one mistake cannot hide
in both. Facts come in an order in which they can have happened: cause before effect.

- INV-1 exactly once: a result that counts has each microbatch exactly once (`Held.counts`,
  `Applied.counts`).
- INV-2 agreement, in these respects:
  - A step has one record, and all members learn the same paces from the record.
  - All ranks of a replica hold what the record names. Its state digest combines the digests of the
    states with which these ranks began the step.
  - Checksums and digests are equal everywhere.
  - No result in which an outvoted replica took part is committed by votes.
  - A replica commits each step once, in order, and adopts only what a replica has committed. Its
    ranks apply only what it has committed.
- INV-3 no corruption: a local gradient that is read holds exactly what was planned into it
  (`Read`).
- INV-4 decided once: no plan reduces a bucket while a member holds it complete in an older version
  that is not withdrawn. No committed step is made void.
- INV-5 fencing: a replica plans, holds results, votes and commits only in the newest generation
  that it entered, and enters only newer ones.
- INV-6 single history: generations are consecutive, with one roster each, and no replica comes
  back. A roster grows only by newcomers. All members plan with the same working roster: the
  announced one, without newcomers that are turned away. A replica leaves only if a committed
  record asks for it, and at least `min_replicas` and one member stay. Only members enter a
  generation. A commit by votes in the newest generation has the equal votes of its working roster.
- INV-2 for a newcomer: the plan that admits it is of a step whose state it has read, and at least
  one older member has given its digest of that state. All that are given are true, and equal to
  that of what the newcomer has read. No member takes a result from an unproven newcomer, or adopts
  what only such newcomers have committed.
- INV-6 for a newcomer: no member is outvoted by a majority that needs its vote.
- INV-7 least work: no microbatch is dealt for a bucket if a member was dealt it for that bucket.
  None is dealt to a replica that a committed record asks to leave, while enough members stay. A
  replica leaves with nothing that was dealt to it in a step that nobody has committed.
- INV-3, INV-4 and INV-7 are not judged for a replica that is not in the newest roster, nor are the
  results and the state digest of its vote, nor the paces that it learned: the history has forgotten
  what that replica was dealt, holds and began with. The same holds for an unproven newcomer until
  it enters the newest generation.
- INV-3, INV-4 and INV-7 have one more exception: a step that is made void (`Void`) begins
  anew for each member that enters. It is given up only where it was void before, and then committed
  by all without a result.
- INV-8 bounded waits, INV-9 progress: these are about what does *not* happen. The only fact that
  breaks one is a generation that gives up a step which was not computed anew. The explorer raises
  INV-9, for example at a state in which nothing can happen any more. In production every wait has a
  deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from megatron_recover.core.digest import bare, combined
from megatron_recover.core.facts import (
    Applied,
    Committed,
    Digested,
    Fact,
    Formed,
    Held,
    History,
    Planned,
    Read,
    StateGiven,
    StateKnown,
    StepHistory,
    Voted,
    formed,
)
from megatron_recover.core.membership_messages import Entered
from megatron_recover.core.plan import results
from megatron_recover.core.request import RequestKind, details
from megatron_recover.core.values import Generation, ReplicaId, Shape, Version

__all__ = [
    "Applied", "Committed", "Digested", "Fact", "Formed", "Held", "History", "InvariantViolation", "Planned", "Read",
    "StateGiven", "StateKnown", "Voted", "check", "formed", "observe",
]  # fmt: skip


class InvariantViolation(Exception):
    """A broken invariant: `invariant` is its number in docs/design/guarantees.md."""

    def __init__(self, invariant: int, detail: str) -> None:
        super().__init__(f"INV-{invariant}: {detail}")
        self.invariant = invariant


def check(shape: Shape, facts: Iterable[Fact]) -> History:
    """Observe all facts in order and return their history.

    Raises InvariantViolation at the first fact that breaks an invariant. A note of the exception
    has the position of the fact, from 0, and the fact.
    """
    history = History(shape)
    for position, fact in enumerate(facts):
        try:
            history = observe(history, fact)
        except InvariantViolation as violation:
            violation.add_note(f"at fact {position}: {fact}")
            raise
    return history


def observe(history: History, fact: Fact) -> History:
    """Return the history after a fact. Raise InvariantViolation if the fact breaks an invariant."""
    return RULES[type(fact)](history, fact)


def _on_formed(history: History, fact: Formed) -> History:
    if fact.generation != len(history.rosters) + 1:
        raise InvariantViolation(6, f"generation {fact.generation} follows generation {len(history.rosters)}")
    _grow(history, fact)
    _outvote(history, fact)
    _leave(history, fact)
    members = set(fact.roster)
    steps = {
        number: replace(
            step,
            dealt=frozenset(item for item in step.dealt if item[0] in members),
            held=frozenset(item for item in step.held if item[0] in members),
            votes=frozenset(item for item in step.votes if item[0] in members),
            paces=frozenset(item for item in step.paces if item[0] in members),
            states=frozenset(item for item in step.states if item[0] in members),
            given=frozenset(),
        )
        for number, step in history.steps
    }
    outvoted = (*history.outvoted, *((replica, fact.generation) for replica in fact.outvoted))
    void = fact.void if fact.void is not None else history.void
    if void != history.void and void is not None and _step(history, void.step).record is not None:
        raise InvariantViolation(4, f"generation {fact.generation} makes step {void.step} void, which is committed")
    if void is not None and void.gives_up and (history.void is None or history.void.step != void.step):
        raise InvariantViolation(9, f"generation {fact.generation} gives step {void.step} up, which was not computed anew")
    history = replace(history, announced=(*history.announced, fact.newcomers))
    newcomers = fact.newcomers if len(fact.newcomers) < len(fact.roster) else ()
    return replace(
        history, rosters=(*history.rosters, fact.roster), newcomers=newcomers, outvoted=outvoted, steps=tuple(steps.items()),
        void=void,
    )  # fmt: skip


def _grow(history: History, fact: Formed) -> None:
    """Raise InvariantViolation if the roster has a replica that is neither old nor a newcomer.

    A newcomer that has planned and was then in no roster does not come back. One that never took up
    its admission, because a newer generation came first, may.
    """
    fresh = set(fact.roster) - set(history.rosters[-1] if history.rosters else fact.roster)
    if strangers := sorted(fresh - set(fact.newcomers)):
        raise InvariantViolation(6, f"roster {fact.roster} has replicas {strangers}, which {history.rosters[-1]} had not")
    used = {replica for replica, _ in history.committed}
    for roster, newcomers in zip(history.rosters, history.announced, strict=True):
        used |= set(roster) - set(newcomers)
    if back := sorted(fresh & used):
        raise InvariantViolation(6, f"replicas {back} come back in roster {fact.roster}")


def _outvote(history: History, fact: Formed) -> None:
    """Raise InvariantViolation if the members that outvote others are no majority of the proven."""
    proven = set(history.rosters[-1] if history.rosters else ()) - set(history.newcomers)
    if fact.outvoted and 2 * len(proven & set(fact.outvoted)) >= max(1, len(proven)):
        who = f"generation {fact.generation} outvotes replicas {fact.outvoted}"
        raise InvariantViolation(6, f"{who}, which are half or more of the members {sorted(proven)}")


def _leave(history: History, fact: Formed) -> None:
    """Raise InvariantViolation if a replica leaves unasked, is needed, or holds a microbatch."""
    for replica in fact.left:
        who = f"generation {fact.generation} lets replica {replica} leave"
        if replica not in dict(history.leaving):
            raise InvariantViolation(6, f"{who}, and no committed record asks for it")
        if len(fact.roster) < max(1, history.min_replicas):
            raise InvariantViolation(6, f"{who}, and only {len(fact.roster)} members stay")
        for number, step in history.steps:
            dealt = sorted({i for member, _, i in step.dealt if member == replica})
            if dealt and step.record is None:
                raise InvariantViolation(7, f"{who}, to which microbatches {dealt} of step {number} were dealt")


def _on_entered(history: History, fact: Entered) -> History:
    if fact.generation <= dict(history.entered).get(fact.replica, 0):
        raise InvariantViolation(5, f"replica {fact.replica} enters generation {fact.generation} after a newer one")
    if fact.replica not in _roster(history, fact.generation):
        raise InvariantViolation(6, f"replica {fact.replica} enters generation {fact.generation}, whose member it is not")
    before = dict(history.entered).get(fact.replica, 0)
    history = replace(history, entered=_with(history.entered, fact.replica, fact.generation))
    if fact.replica in _unproven(history, fact.generation):  # what it held counts for nothing
        steps = ((n, replace(step, held=frozenset(i for i in step.held if i[0] != fact.replica))) for n, step in history.steps)
        history = replace(history, steps=tuple(steps))
    void = history.void
    if void is None or not before < void.since <= fact.generation:
        return history
    step = _step(history, void.step)
    dealt = frozenset(item for item in step.dealt if item[0] != fact.replica)
    held = frozenset(item for item in step.held if item[0] != fact.replica)
    return _at(history, void.step, replace(step, dealt=dealt, held=held))


def _on_planned(history: History, fact: Planned) -> History:
    plan, replica = fact.plan, fact.replica
    _fence(history, replica, plan.generation, "plans")
    history = _admitted(history, fact)
    if replica not in history.rosters[-1]:
        return history  # the work of a lost replica is lost, and wastes nothing of the members
    step = _step(history, plan.step)
    for bucket in plan.reduces:
        ranks = set(history.shape.bucket_ranks[bucket])
        for member in set(plan.roster) - set(_unproven(history, plan.generation)):
            for version in {item[3] for item in step.held if item[0] == member and item[2] == bucket}:
                here = {rank for holder, rank, b, v in step.held if (holder, b, v) == (member, bucket, version)}
                withdrawn = _outvoted(history, plan.generation, version)
                if here >= ranks and version < plan.generation and not withdrawn:
                    detail = f"bucket {bucket} of step {plan.step}, which replica {member} holds in version {version}"
                    raise InvariantViolation(4, f"replica {replica} reduces {detail}")
    fresh = {(replica, bucket, i) for item in plan.computes for bucket in item.into for i in item.microbatches}
    out = {member for member, since in history.leaving if since < plan.step}
    stay = set(plan.roster) - out - set(_unproven(history, plan.generation))
    if fresh and replica in out and len(stay) >= max(1, history.min_replicas):
        raise InvariantViolation(7, f"replica {replica} computes in step {plan.step}, and was to leave after an earlier step")
    # In an older generation it may be proven, which the newest announcement does not know yet.
    if fresh and plan.generation == len(history.rosters) and replica in history.newcomers:
        raise InvariantViolation(7, f"replica {replica} computes in step {plan.step}, where it is new and older members live")
    holders = {(bucket, i): member for member, bucket, i in step.dealt if member in plan.roster}
    for _, bucket, i in sorted(fresh):
        if (bucket, i) in holders:
            detail = (
                f"microbatch {i} of step {plan.step} for bucket {bucket}, whose gradient replica {holders[bucket, i]} holds"
            )
            raise InvariantViolation(7, f"replica {replica} computes {detail}")
    # The ranks drop what the plan replaces, also where only some of them held the bucket.
    replaced = results(plan, replica)
    held = frozenset(item for item in step.held if item[0] != replica or item[2] not in replaced)
    return _at(history, plan.step, replace(step, dealt=step.dealt | fresh, held=held))


def _admitted(history: History, fact: Planned) -> History:
    """Return the history with the working roster of the plan, and a newcomer's first step.

    Raise InvariantViolation if members plan with unlike rosters, without an older member or with a
    replica that was not announced, or if a newcomer's state is not that of the members (INV-2).
    """
    plan, generation = fact.plan, fact.plan.generation
    who = f"replica {fact.replica} plans step {plan.step} of generation {generation} with {plan.roster}"
    roster, working = _roster(history, generation), dict(history.working)
    if fact.replica not in history.rosters[0] and fact.replica not in dict(history.committed):
        was_admitted = any(fact.replica in members for number, members in history.working if number <= generation)
        if fact.replica not in history.announced[generation - 1] and not was_admitted:
            raise InvariantViolation(6, f"{who}, and was never admitted")
        # It has read what the steps before this one have made.
        history = replace(history, committed=_with(history.committed, fact.replica, plan.step))
    expected = working.get(generation, plan.roster if history.announced[generation - 1] else roster)
    if expected != plan.roster:
        raise InvariantViolation(6, f"{who}, others with {expected}")
    if not history.announced[generation - 1]:
        return history
    history = replace(history, working=tuple(sorted((working | {generation: plan.roster}).items())))
    if generation < len(history.rosters):
        return history
    older = set(roster) - set(history.newcomers)
    if not older <= set(plan.roster) <= set(roster):
        raise InvariantViolation(6, f"{who}, where {roster} was announced with the newcomers {history.newcomers}")
    for item in plan.transfers:
        if item.source in history.newcomers:
            raise InvariantViolation(2, f"{who}: all take bucket {item.bucket} from newcomer {item.source}, which is unproven")
    step = _step(history, plan.step)
    given = sorted({digest for _, digest in step.given})
    for newcomer in set(history.newcomers) & set(plan.roster):
        mine = _digest_of(history, step.known, newcomer)
        if mine is None or given != [mine]:
            raise InvariantViolation(2, f"{who}: the digest of newcomer {newcomer} is {mine}, older members gave {given}")
    return history


def _on_read(history: History, fact: Read) -> History:
    step = _step(history, fact.step)
    if fact.replica not in history.rosters[-1]:
        return history
    dealt = {i for replica, bucket, i in step.dealt if (replica, bucket) == (fact.replica, fact.bucket)}
    if fact.counts != tuple(int(i in dealt) for i in range(len(fact.counts))):
        where = f"replica {fact.replica} rank {fact.rank}, bucket {fact.bucket} of step {fact.step}"
        raise InvariantViolation(3, f"{where}: microbatches {sorted(dealt)} were dealt, the local gradient has {fact.counts}")
    return history


def _on_held(history: History, fact: Held) -> History:
    _fence(history, fact.replica, fact.generation, f"takes a result of bucket {fact.bucket}")
    what = f"replica {fact.replica} rank {fact.rank}: bucket {fact.bucket} version {fact.version} of step {fact.step}"
    if fact.counts is not None and set(fact.counts) != {1}:
        raise InvariantViolation(1, f"{what} counts its microbatches {fact.counts} times")
    step = _step(history, fact.step)
    for bucket, version, rank, checksum in step.checksums:
        if (bucket, version, rank) == (fact.bucket, fact.version, fact.rank) and checksum != fact.checksum:
            raise InvariantViolation(2, f"{what} has checksum {fact.checksum}, elsewhere {checksum}")
    others = frozenset(item for item in step.held if item[:3] != (fact.replica, fact.rank, fact.bucket))
    fresh = _current(history, fact.replica, {(fact.replica, fact.rank, fact.bucket, fact.version)})
    checksums = step.checksums | {(fact.bucket, fact.version, fact.rank, fact.checksum)}
    return _at(history, fact.step, replace(step, held=others | fresh, checksums=checksums))


def _on_digested(history: History, fact: Digested) -> History:
    step = _step(history, fact.step)
    # What a newcomer has begun with stays true when it enters a newer generation.
    fresh = {(fact.replica, fact.rank, fact.digest)} if fact.replica in history.rosters[-1] else set()
    return _at(history, fact.step, replace(step, states=step.states | fresh))


def _on_state_known(history: History, fact: StateKnown) -> History:
    step = _step(history, fact.step)
    mine = (fact.replica, fact.rank)
    before = frozenset(item for item in step.known if item[:2] == mine)
    was_admitted = fact.replica in dict(history.committed) or any(fact.replica in first for first in history.rosters[:1])
    if before and (fact.replica in history.newcomers or not was_admitted):
        return history
    return _at(history, fact.step, replace(step, known=step.known - before | {(*mine, fact.digest)}))


def _on_state_given(history: History, fact: StateGiven) -> History:
    who = f"replica {fact.replica} gives {fact.digest} as the digest of its state in step {fact.step}"
    _fence(history, fact.replica, fact.generation, who)
    if fact.generation < len(history.rosters):
        return history
    step = _step(history, fact.step)
    true = {_digest_of(history, states, fact.replica) for states in (step.states, step.known)} - {None}
    if fact.digest not in true:
        raise InvariantViolation(2, f"{who}, where its ranks know {sorted(each for each in true if each is not None)}")
    return _at(history, fact.step, replace(step, given=step.given | {(fact.replica, fact.digest)}))


def _on_voted(history: History, fact: Voted) -> History:
    record = fact.record
    _fence(history, fact.replica, fact.generation, "votes")
    step = _step(history, record.step)
    for item in record.versions:
        for rank in history.shape.bucket_ranks[item.bucket]:
            held = (fact.replica, rank, item.bucket, item.version)
            if _counts(history, fact.replica) and held not in step.held:
                detail = f"replica {fact.replica} votes for bucket {item.bucket} version {item.version} of step {record.step}"
                raise InvariantViolation(2, f"{detail}, which its rank {rank} does not hold")
    states = sorted(item[1:] for item in step.states if item[0] == fact.replica)
    if states and _counts(history, fact.replica):
        ranks = [rank for rank, _ in states]
        if ranks != list(range(history.shape.num_ranks)) or record.state_digest != combined([each for _, each in states]):
            detail = f"replica {fact.replica} votes for step {record.step} with state digest {record.state_digest}"
            raise InvariantViolation(2, f"{detail}, where its ranks {ranks} began with {[each for _, each in states]}")
    fresh = _current(history, fact.replica, {(fact.replica, fact.generation, bare(record))})
    return _at(history, record.step, replace(step, votes=step.votes | fresh))


def _on_committed(history: History, fact: Committed) -> History:
    record, paces = bare(fact.record), fact.record.paces
    who = f"replica {fact.replica} commits step {record.step} in generation {fact.generation}"
    _fence(history, fact.replica, fact.generation, f"commits step {record.step}")
    done = dict(history.committed).get(fact.replica, 0)
    if record.step != done:
        raise InvariantViolation(2, f"{who} after {done} steps")
    step = _step(history, record.step)
    if step.record is not None and step.record != record:
        raise InvariantViolation(2, f"{who} as {record}, elsewhere it is {step.record}")
    void = history.void
    if record.gives_up != (void is not None and void.gives_up and void.step == record.step) or (
        record.gives_up and record.versions
    ):
        raise InvariantViolation(1, f"{who} as {record}, where what is void is {void}")
    for item in record.versions if not fact.adopted else ():
        if wrong := _outvoted(history, fact.generation, item.version):
            raise InvariantViolation(2, f"{who}: in bucket {item.bucket} version {item.version} is what replicas {wrong} did")
    if fact.adopted and step.record is None:
        raise InvariantViolation(2, f"{who} by adopting a record that nobody committed")
    if fact.adopted and fact.generation == len(history.rosters):
        others = {replica for replica, num in history.committed if num > record.step} - {fact.replica}
        if others <= set(history.newcomers):
            raise InvariantViolation(2, f"{who} by adopting what only newcomers have committed: {sorted(others)}")
    if not fact.adopted and fact.generation == len(history.rosters):
        voters = dict(history.working).get(fact.generation, history.rosters[-1])
        missing = [r for r in voters if (r, fact.generation, record) not in step.votes]
        if missing:
            raise InvariantViolation(6, f"{who} without the votes of replicas {missing}")
    if other := next((item for item in step.paces if item[1] != paces), None) if _counts(history, fact.replica) else None:
        raise InvariantViolation(2, f"{who} and learns the paces {paces}; replica {other[0]} learned {other[1]}")
    committed = _with(history.committed, fact.replica, done + 1)
    asked = {int(number): record.step for number in details(fact.record.requests, RequestKind.LEAVE)}
    history = replace(history, committed=committed, leaving=tuple(sorted((asked | dict(history.leaving)).items())))
    step = replace(step, record=record, paces=step.paces | _current(history, fact.replica, {(fact.replica, paces)}))
    members = dict(history.working).get(len(history.rosters), history.rosters[-1])
    if not fact.adopted and fact.generation == len(history.rosters):  # with the votes of all in `members`: they are proven
        history = replace(history, newcomers=tuple(each for each in history.newcomers if each not in members))
    if all(dict(committed).get(replica, 0) > record.step for replica in members):
        # From here on only a lost replica can still commit the step. Ranks of members may apply it.
        step = StepHistory(record=record, digests=step.digests)
    return _at(history, record.step, step)


def _on_applied(history: History, fact: Applied) -> History:
    who = f"replica {fact.replica} rank {fact.rank} applies step {fact.step}"
    if fact.step >= dict(history.committed).get(fact.replica, 0):
        raise InvariantViolation(2, f"{who}, which its replica has not committed")
    for bucket, counts in fact.counts or ():
        if set(counts) != {1}:
            raise InvariantViolation(1, f"{who}: bucket {bucket} counts its microbatches {counts} times")
    if fact.digest is None:
        return history
    step = _step(history, fact.step)
    for rank, digest in step.digests:
        if rank == fact.rank and digest != fact.digest:
            raise InvariantViolation(2, f"{who}: its parameters are {fact.digest}, elsewhere {digest}")
    return _at(history, fact.step, replace(step, digests=step.digests | {(fact.rank, fact.digest)}))


def _roster(history: History, generation: Generation) -> tuple[ReplicaId, ...]:
    if not 1 <= generation <= len(history.rosters):
        raise InvariantViolation(6, f"generation {generation} was never made")
    return history.rosters[generation - 1]


def _unproven(history: History, generation: Generation) -> tuple[ReplicaId, ...]:
    """Return the newcomers that are unproven in a generation with older members."""
    if generation == len(history.rosters):
        return history.newcomers
    newcomers = history.announced[generation - 1]
    return newcomers if len(newcomers) < len(history.rosters[generation - 1]) else ()


def _outvoted(history: History, generation: Generation, version: Version) -> list[ReplicaId]:
    """Return the members of a version's generation that were outvoted up to `generation`."""
    return [r for r, since in history.outvoted if since <= generation and r in _roster(history, version)]


def _fence(history: History, replica: ReplicaId, generation: Generation, deed: str) -> None:
    entered = dict(history.entered).get(replica, 0)
    if generation != entered:
        raise InvariantViolation(5, f"replica {replica} {deed} in generation {generation}, but has entered {entered}")


def _current[T](history: History, replica: ReplicaId, items: Iterable[T]) -> frozenset[T]:
    """Return the items if what the replica does counts, else nothing.

    `_on_formed` removes such facts of others, so none may be added afterwards.
    """
    return frozenset(items) if _counts(history, replica) else frozenset()


def _counts(history: History, replica: ReplicaId) -> bool:
    """Return whether the replica is in the newest roster; a newcomer has to have entered it."""
    is_late = replica in history.newcomers and dict(history.entered).get(replica, 0) < len(history.rosters)
    return replica in history.rosters[-1] and not is_late


def _step(history: History, number: int) -> StepHistory:
    return dict(history.steps).get(number, StepHistory())


def _with[T](pairs: tuple[tuple[int, T], ...], key: int, value: T) -> tuple[tuple[int, T], ...]:
    return tuple(sorted(({**dict(pairs), key: value}).items(), key=lambda pair: pair[0]))


def _at(history: History, number: int, step: StepHistory) -> History:
    return replace(history, steps=_with(history.steps, number, step))


def _digest_of(history: History, states: Iterable[tuple[ReplicaId, int, int]], replica: ReplicaId) -> int | None:
    """Return the state digest of a replica by the digests of ranks; None if one is missing."""
    of_ranks = [digest for _, digest in sorted(item[1:] for item in states if item[0] == replica)]
    return combined(of_ranks) if len(of_ranks) == history.shape.num_ranks else None


RULES: Mapping[type, Callable[[History, Any], History]] = {
    Formed: _on_formed,
    Entered: _on_entered,
    Planned: _on_planned,
    Read: _on_read,
    Held: _on_held,
    Digested: _on_digested,
    StateKnown: _on_state_known,
    StateGiven: _on_state_given,
    Voted: _on_voted,
    Committed: _on_committed,
    Applied: _on_applied,
}
