"""Decides in which slots newcomers are formed, and which slots are set aside: pure functions.

A newcomer is a replica that is formed while others train (`core/joining.py`). This module decides
where; it never decides when a replica is lost. It knows no clock: the caller gives the time in
seconds, which only has to grow.

Note [Where newcomers are formed]
    1. *In place.* The slots of a lost replica are used again together, by the same ranks, once the
       end of every former process in them was seen and none of them is set aside.
    2. *Together.* Healthy slots of other lost replicas and spare slots form replicas as at the
       start (`core/placement.py`), on as few nodes as possible.

    A replica whose slots are all healthy, but of which a process has not ended yet, is waited for:
    spares do not replace it before `Settings.patience_s`.

    The slots of a replica that has left as requested are used only once more replicas are wanted.
    The slots of a node that was drained are never used again, whatever was in them.

Note [When a slot is set aside]
    The slots of a replica *break of their own* if it ends otherwise than by a signal from outside
    or with its node: a crash, an exception, a hang. From the second break in a row on, slots are
    set aside with every break, each time for twice as long, and after `Settings.budget` times for
    good. That is one slot, if its own rank has caused two breaks. Otherwise nobody knows what is
    wrong, and it is every slot of the replica that has seen two: a crash loop that ends another
    rank each time is no longer than one that always ends the same. A newcomer that has committed
    `Settings.proven_steps` steps ends the row: the next break is the first again.

Note [When a slot is put off]
    What is no break of a slot's own may pass, and is never the reason to give a slot up. It only
    must not loop: slots are put off, for as long as if they were set aside, and then tried again.

    - A slot that fails its check is put off at once.
    - The slots of a newcomer that was ended from outside before it was a member are put off from
      the second time in a row on. The first may be chance. A member that is ended from outside is
      always replaced at once.

    A job with too few members, which waits for newcomers, does not wait for slots that were put
    off, or set aside, more often than `Settings.budget` (`Plan.may_form_later`). It would never
    end. They are no room for more replicas either.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from megatron_recover.core.membership_messages import LossKind
from megatron_recover.core.placement import Slot, place
from megatron_recover.core.values import ReplicaId, Value
from megatron_recover.core.wording import counted

_STRIKES = 2
"""Number of breaks in a row from which on slots are set aside."""
_MOST_DOUBLINGS = 10
"""The time for which a slot is set aside doubles so often at most."""
OUTSIDE = frozenset({LossKind.PROCESS_ENDED, LossKind.NODE_LOST})
"""Kinds of losses that are not of the slot's own: a signal from outside, or the loss of a node."""


class Settings(Value, frozen=True):
    """The settings of healing, fixed for the run."""

    backoff_s: float
    """Time for which a slot is set aside for the first time."""
    budget: int
    """Number of times that a slot is set aside before it is never used again."""
    patience_s: float
    """Time for which a lost replica's processes may take to end before spares replace it."""
    num_ranks: int
    """Ranks of each replica."""
    proven_steps: int = 10
    """Committed steps after which a newcomer ends the row of breaks of its slots."""
    tp: int = 1
    """Ranks of a tensor-parallel group, as in `placement.place`."""


class Past(Value, frozen=True):
    """The knowledge of one slot and its users."""

    slot: Slot
    user: ReplicaId | None = None
    """The replica that sat here last; None: a spare that was never used."""
    rank: int = 0
    """The rank of `user` that sat here."""
    lost_at_s: float | None = None
    """Time at which `user` was lost; None: it lives."""
    is_gone: bool = True
    """True if the end of every process of `user` was seen."""
    num_breaks: int = 0
    """Breaks in a row of the replicas that sat here."""
    num_caused: int = 0
    """Those of them that the rank in this slot has caused."""
    num_set_aside: int = 0
    """Number of times that the slot was set aside in that row."""
    num_ended_early: int = 0
    """Newcomers in a row that were ended here from outside before they were members."""
    num_put_off: int = 0
    """Number of times that the slot was set aside, or put off for another reason, in that row."""
    for_s: float = 0.0
    """Time for which the slot was set aside or put off the last time."""
    until_s: float | None = None
    """Time until which the slot is set aside or put off; None: it never was in that row."""
    why: str = ""
    """Its last break, or the reason why it was put off, in words."""
    is_broken: bool = False
    """True if it was set aside the last time, and not put off for another reason."""
    is_lost: bool = False
    """True if its node is lost."""
    is_given_back: bool = False
    """True if its replica has left the job as requested: healing does not use the slot."""
    is_drained: bool = False
    """True if its node was given back: no newcomer is ever formed in the slot."""

    @property
    def is_taken(self) -> bool:
        """Return whether a replica that lives sits here."""
        return self.user is not None and self.lost_at_s is None


Pasts = tuple[Past, ...]
"""All slots of a job, in the order of their slots."""


class Newcomer(Value, frozen=True):
    """A replica to be formed."""

    slots: tuple[Slot, ...]
    """The slots of its ranks, by rank."""
    in_place_of: tuple[ReplicaId, ...]
    """The lost replicas whose slots it gets, except those of which a node is lost, too."""
    reason: str


class LeftOut(Value, frozen=True):
    """A slot without a rank that is not used now, and why."""

    slot: Slot
    reason: str
    again_at_s: float | None = None
    """Time at which it may be used; None: that depends on an event, or it is never used again."""
    is_usual: bool = False
    """True if nobody has to know: its processes have only begun to end."""
    is_worth_a_wait: bool = True
    """False if the slot was put off more often than the budget allows to set it aside."""


class Plan(Value, frozen=True):
    """The newcomers to form now, and the slots that stay empty although replicas are missing."""

    newcomers: tuple[Newcomer, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def again_at_s(self) -> float | None:
        """Return the time at which another plan may form more; None: no time by itself."""
        return min((each.again_at_s for each in self.left_out if each.again_at_s is not None), default=None)

    @property
    def may_form_later(self) -> bool:
        """Return whether a job with too few members may hope for a later plan."""
        return any(each.again_at_s is not None and each.is_worth_a_wait for each in self.left_out)


# --- What happens to slots ------------------------------------------------------------------------


def seated(seats: Mapping[ReplicaId, Sequence[Slot]], spares: Iterable[Slot] = ()) -> Pasts:
    """Return the slots of a job whose replicas sit in `seats`, by rank, and with spare slots."""
    used = (Past(slot, replica, rank, is_gone=False) for replica, of in seats.items() for rank, slot in enumerate(of))
    return _sorted([*used, *map(Past, spares)])


def taken(pasts: Pasts, replica: ReplicaId, slots: Sequence[Slot]) -> Pasts:
    """Return the slots after `replica` has taken `slots`, by rank.

    Raises ValueError if a process of a former user of one of them may live, or if its node is
    drained.
    """
    known = {each.slot: each for each in pasts}
    for rank, slot in enumerate(slots):
        past = known[slot]
        if past.is_drained:
            raise ValueError(f"node {slot.node} slot {slot.slot} is not free for replica {replica}: the node is drained")
        if past.is_taken or not past.is_gone:
            raise ValueError(f"node {slot.node} slot {slot.slot} is not free for replica {replica}: {_user(past)} is there")
        known[slot] = replace(past, user=replica, rank=rank, lost_at_s=None, is_gone=False)
    return _sorted(known.values())


def lost(
    pasts: Pasts, replica: ReplicaId, kind: LossKind, detail: str, settings: Settings, *, now_s: float,
    rank: int | None = None, is_early: bool = False,
) -> Pasts:  # fmt: skip
    """Return the slots after the loss of `replica`.

    - `rank`: the rank that caused it, if known.
    - `is_early`: the replica was a newcomer that never was a member.
    """
    if not any(each.user == replica and each.is_taken for each in pasts):
        return pasts
    pasts = _each(pasts, replica, lambda past: replace(past, lost_at_s=now_s))
    why = f"replica {replica}: {kind.value}{f' ({detail})' if detail else ''}"
    if kind in OUTSIDE:
        return _ended_early(pasts, replica, why, settings, now_s) if is_early and kind is not LossKind.NODE_LOST else pasts

    def broken(past: Past) -> Past:
        return replace(past, num_breaks=past.num_breaks + 1, num_caused=past.num_caused + (past.rank == rank), why=why)

    pasts = _each(pasts, replica, broken)
    mine = [each for each in pasts if each.user == replica]
    blamed = {each.slot for each in mine if each.rank == rank and each.num_caused >= _STRIKES}
    blamed = blamed or {each.slot for each in mine if each.num_breaks >= _STRIKES}
    return tuple(_set_aside(each, settings, now_s) if each.slot in blamed else each for each in pasts)


def _ended_early(pasts: Pasts, replica: ReplicaId, why: str, settings: Settings, now_s: float) -> Pasts:
    """Return the slots of a newcomer that was ended from outside before it was a member."""

    def ended(past: Past) -> Past:
        past = replace(past, num_ended_early=past.num_ended_early + 1)
        return _put_off(past, why, settings, now_s) if past.num_ended_early >= _STRIKES else past

    return _each(pasts, replica, ended)


def unfit(pasts: Pasts, slots: Collection[Slot], why: str, settings: Settings, *, now_s: float) -> Pasts:
    """Return the slots after the check of `slots` has failed for the reason `why`."""
    return tuple(_put_off(each, why, settings, now_s) if each.slot in slots else each for each in pasts)


def gone(pasts: Pasts, replica: ReplicaId) -> Pasts:
    """Return the slots after the end of every process of a lost replica was seen."""
    return _each(pasts, replica, lambda past: replace(past, is_gone=True))


def given_back(pasts: Pasts, replica: ReplicaId, *, now_s: float) -> Pasts:
    """Return the slots after `replica` has left the job as requested.

    They are not used again before `lent_again`, also not after the loss of another replica.
    """
    return _each(pasts, replica, lambda past: replace(past, lost_at_s=now_s, is_given_back=True))


def lent_again(pasts: Pasts, replicas: Collection[ReplicaId]) -> Pasts:
    """Return the slots after newcomers may be formed where `replicas` have left the job."""
    return tuple(replace(each, is_given_back=False) if each.user in replicas else each for each in pasts)


def node_joined(pasts: Pasts, node: int, num_slots: int) -> Pasts:
    """Return the slots after a node has come to the running job: all of its slots are spares.

    A node has a number of its own, also one that was lost and comes back: processes of its former
    replicas may live for a while. Raises ValueError if a node of the job has this number.
    """
    if any(each.slot.node == node for each in pasts):
        raise ValueError(f"node {node} is a node of the job already")
    return _sorted([*pasts, *(Past(Slot(node, slot)) for slot in range(num_slots))])


def node_lost(pasts: Pasts, node: int) -> Pasts:
    """Return the slots after the loss of a node."""
    return tuple(replace(each, is_lost=True) if each.slot.node == node else each for each in pasts)


def drained(pasts: Pasts, nodes: Collection[int]) -> Pasts:
    """Return the slots after these nodes were given back. Their slots are never used again.

    Replicas that sit there, and live, are not concerned: the caller has them leave.
    """
    return tuple(replace(each, is_drained=True) if each.slot.node in nodes else each for each in pasts)


def proven(pasts: Pasts, replica: ReplicaId) -> Pasts:
    """Return the slots after a newcomer has committed `Settings.proven_steps` steps in them."""
    return _each(
        pasts, replica,
        lambda past: replace(
            past, num_breaks=0, num_caused=0, num_set_aside=0, num_ended_early=0, num_put_off=0, until_s=None, why="",
            is_broken=False,
        ),
    )  # fmt: skip


def _each(pasts: Pasts, replica: ReplicaId, change: Callable[[Past], Past]) -> Pasts:
    return tuple(change(each) if each.user == replica else each for each in pasts)


def _set_aside(past: Past, settings: Settings, now_s: float) -> Past:
    past = _put_off(past, past.why, settings, now_s)
    return replace(past, num_set_aside=past.num_set_aside + 1, is_broken=True)


def _put_off(past: Past, why: str, settings: Settings, now_s: float) -> Past:
    for_s = settings.backoff_s * 2 ** min(past.num_put_off, _MOST_DOUBLINGS)
    return replace(past, num_put_off=past.num_put_off + 1, for_s=for_s, until_s=now_s + for_s, why=why, is_broken=False)


def _sorted(pasts: Iterable[Past]) -> Pasts:
    return tuple(sorted(pasts, key=lambda each: each.slot))


# --- The room -------------------------------------------------------------------------------------


class Room(Value, frozen=True):
    """The number of replicas for which there are slots, now or later."""

    own: int
    """In slots that healing uses: those of replicas that stay or were lost, and spares."""
    given_back: tuple[ReplicaId, ...]
    """The replicas that have left, or leave now, in each of whose places one more fits."""

    @property
    def num_replicas(self) -> int:
        """Return how many there are in all."""
        return self.own + len(self.given_back)


def room(pasts: Pasts, staying: Collection[ReplicaId], settings: Settings) -> Room:
    """Return for how many replicas there are slots. `staying`: those that live and do not leave.

    Slots of lost and of drained nodes, and slots that are never used again, are none, nor are those
    that were put off more often than the budget. A slot that is set aside for a time is one.
    """
    mine = {each.user for each in pasts if each.is_taken and each.user in staying}
    out = [each.is_lost or each.is_drained or each.num_put_off > settings.budget for each in pasts]
    usable = [each for each, is_out in zip(pasts, out, strict=True) if not is_out and each.user not in mine]
    back: dict[ReplicaId, int] = {}
    num_free = 0
    for each in usable:
        if each.user is not None and (each.is_given_back or each.is_taken):
            back[each.user] = back.get(each.user, 0) + 1
        else:
            num_free += 1
    whole = sorted((replica for replica, num in back.items() if num == settings.num_ranks), key=lambda one: _leaves(pasts, one))
    return Room(len(mine) + num_free // settings.num_ranks, tuple(whole))


def _leaves(pasts: Pasts, replica: ReplicaId) -> tuple[bool, ReplicaId]:
    """Return a key by which replicas that have left come before those that still live."""
    return any(each.user == replica and each.is_taken for each in pasts), replica


# --- The plan -------------------------------------------------------------------------------------


def plan(pasts: Pasts, *, wanted: int, settings: Settings, now_s: float) -> Plan:
    """Return the newcomers to form now, at most `wanted`, and the slots that are left out.

    See Note [Where newcomers are formed].
    """
    num_ranks = settings.num_ranks
    free = {each.slot: each for each in pasts if not each.is_taken and not each.is_given_back}
    hindered = {slot: found for slot, past in free.items() if (found := _hindrance(past, settings, now_s)) is not None}
    newcomers: list[Newcomer] = []
    num_awaited = 0
    for replica, seat in _seats(free.values()):
        if len(seat) != num_ranks:
            continue
        if not any(slot in hindered for slot in seat):
            if len(newcomers) < wanted:
                newcomers.append(Newcomer(seat, (replica,), f"in the slots of replica {replica} ({described(seat)})"))
        elif all(_is_only_ending(free[slot], settings, now_s) for slot in seat):
            num_awaited += 1
    used = {slot for each in newcomers for slot in each.slots}
    pool = [slot for slot in free if slot not in hindered and slot not in used]
    together = _together(pool, wanted - len(newcomers) - num_awaited, num_ranks, settings.tp)
    unseen = {each.user for each in pasts if each.is_lost}
    for seat in together:
        former = {user for slot in seat if (user := free[slot].user) is not None} - unseen
        newcomers.append(Newcomer(seat, tuple(sorted(former)), f"in healthy and spare slots ({described(seat)})"))
    used |= {slot for seat in together for slot in seat}
    rest = [slot for slot in pool if slot not in used]
    left_out = list(hindered.values())
    if len(newcomers) < wanted:
        few = f"free, but too few for a replica of {counted(num_ranks, 'rank')} ({counted(len(rest), 'such slot')})"
        waits = any(each.again_at_s is not None for each in left_out)
        left_out += (LeftOut(slot, few, is_usual=waits) for slot in rest)
    return Plan(tuple(newcomers), tuple(sorted(left_out, key=lambda each: each.slot)))


def described(slots: Iterable[Slot]) -> str:
    """Return slots in words, such as `node 0: slots 0 and 1`."""
    by_node = itertools.groupby(sorted(slots), lambda slot: slot.node)
    texts = []
    for node, group in by_node:
        *others, last = [str(each.slot) for each in group]
        texts.append(f"node {node}: {f'slots {", ".join(others)} and {last}' if others else f'slot {last}'}")
    return "; ".join(texts)


def _seats(pasts: Iterable[Past]) -> list[tuple[ReplicaId, tuple[Slot, ...]]]:
    """Return the slots of each lost replica, by rank, that nobody else has taken since."""
    found: dict[ReplicaId, list[Past]] = {}
    for each in pasts:
        if each.user is not None:
            found.setdefault(each.user, []).append(each)
    return [
        (replica, tuple(each.slot for each in sorted(of, key=lambda past: past.rank))) for replica, of in sorted(found.items())
    ]


def _together(pool: Sequence[Slot], most: int, num_ranks: int, tp: int) -> list[tuple[Slot, ...]]:
    """Return the slots of up to `most` replicas that fit into `pool`."""
    num_replicas = min(most, len(pool) // num_ranks)
    if num_replicas < 1:
        return []
    nodes = [tuple(group) for _, group in itertools.groupby(sorted(pool), lambda slot: slot.node)]
    placed = place([len(of) for of in nodes], num_replicas=num_replicas, num_ranks=num_ranks, tp=tp)
    return [tuple(nodes[slot.node][slot.slot] for slot in seat) for seat in placed.replicas]


def _hindrance(past: Past, settings: Settings, now_s: float) -> LeftOut | None:
    """Return why a slot without a living replica cannot be used now; None if it can."""
    if past.is_lost:
        return LeftOut(past.slot, f"node {past.slot.node} is lost")
    if past.is_drained:
        return LeftOut(past.slot, f"node {past.slot.node} is drained")
    if past.num_set_aside > settings.budget:
        times = f"it was set aside {counted(settings.budget, 'time')} before" if settings.budget else "no try is left"
        return LeftOut(past.slot, f"never used again, as {times}: {past.why}")
    if past.until_s is not None and now_s < past.until_s:
        which = f"set aside for {past.for_s:g} s ({past.num_set_aside} of {settings.budget})"
        how = which if past.is_broken else f"put off for {past.for_s:g} s"
        return LeftOut(past.slot, f"{how}: {past.why}", past.until_s, is_worth_a_wait=past.num_put_off <= settings.budget)
    if not past.is_gone:
        until_s = (past.lost_at_s or 0.0) + settings.patience_s
        is_early = now_s < until_s
        why = f"a process of {_user(past)} may live"
        return LeftOut(past.slot, why, until_s if is_early else None, is_usual=is_early)
    return None


def _is_only_ending(past: Past, settings: Settings, now_s: float) -> bool:
    """Return whether a slot can be used as soon as processes end that have not had much time."""
    found = _hindrance(replace(past, is_gone=True), settings, now_s)
    return found is None and now_s < (past.lost_at_s or 0.0) + settings.patience_s


def _user(past: Past) -> str:
    return f"replica {past.user}"
