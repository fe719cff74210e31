"""Status and vote over a tree: who tells whom, that all come to know what they would know directly, and who is blamed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_recover.core import coordinator, replica, tree
from megatron_recover.core.membership_messages import Diverged, Hello, NewGeneration, ReplicaBlocked
from megatron_recover.core.rank_messages import Begun, Plan, Promise, Promised
from megatron_recover.core.replica import Committed, LinkLost, ReplicaPhase, ToCoordinator, ToPeers, ToRanks, Voted, WaitExpired
from megatron_recover.core.values import Contribution, Statuses, Votes, Work
from tests.core.build import SHAPE, ballot, complete, holds, lead, record, status, vote

rosters = st.lists(st.integers(0, 99), min_size=1, max_size=40, unique=True).map(sorted).map(tuple)


# --- Who tells whom ------------------------------------------------------------------------------------------------------


@given(rosters, st.integers(1, 50))
def test_every_member_is_below_the_first_and_neighbours_agree(roster: tuple[int, ...], above: int) -> None:
    for member in roster:
        beside = tree.neighbours(roster, member, above)
        assert all(member in tree.neighbours(roster, each, above) for each in beside)
        if len(roster) <= above:
            assert set(beside) == set(roster) - {member}
            continue
        assert len(beside) <= min(8, above) + 1 and member not in beside
        way = [member]
        while (up := tree.parent(roster, way[-1], above)) is not None:
            assert way[-1] in tree.children(roster, up, above)
            way.append(up)
        assert way[-1] == roster[0] and len(way) <= len(roster)


@given(rosters, st.integers(1, 9), st.data())
def test_a_member_waits_for_somebody_until_it_has_heard_from_all(
    roster: tuple[int, ...], above: int, data: st.DataObject
) -> None:
    me = data.draw(st.sampled_from(roster))
    heard = frozenset(data.draw(st.sets(st.sampled_from(roster)))) | {me}
    awaited = tree.awaited(roster, me, heard, above)
    assert (awaited == ()) == (heard == set(roster))
    assert set(awaited) <= set(tree.neighbours(roster, me, above))
    told = tree.forward_to(roster, me, heard, above)
    if len(roster) > above and heard != set(roster):
        # Who misses nobody below it has told its parent, for which it waits; who misses somebody has told nobody.
        assert told == (awaited if set(awaited) == {tree.parent(roster, me, above)} else ())


def test_a_hundred_members_with_eight_children_each() -> None:
    roster = tuple(range(100))
    assert tree.neighbours(roster, 0, 64) == tuple(range(1, 9))
    assert tree.neighbours(roster, 12, 64) == (1, 97, 98, 99)
    assert tree.neighbours(roster, 99, 64) == (12,)
    assert tree.neighbours(roster, 99, 100) == tuple(range(99))
    assert tree.forward_to(roster, 12, {12, 97, 98}, 64) == ()
    assert tree.forward_to(roster, 12, {12, 97, 98, 99}, 64) == (1,)
    assert tree.forward_to(roster, 12, set(roster), 64) == (97, 98, 99)
    assert tree.awaited(roster, 12, {12, 97, 99}, 64) == (98,)
    assert tree.awaited(roster, 1, {1, *range(9, 17), *range(73, 99)}, 64) == (12,), "the child below which somebody is missing"


# --- A whole job ---------------------------------------------------------------------------------------------------------


class Job:
    """Members of one rank each whose ranks hold at once what a plan asks for, but for those that are `stuck`."""

    def __init__(self, size: int, above: int, *, stuck: Collection[int] = (), drifted: Collection[int] = ()) -> None:
        self.states = {number: replica.ReplicaState(number, SHAPE, above) for number in range(size)}
        self.stuck, self.drifted = stuck, drifted
        self.requests: dict[int, tuple[str, ...]] = {}
        self.membership = coordinator.CoordinatorState(coordinator.MembershipSettings(size))
        self.queue: deque[Callable[[], None]] = deque()
        self.sent: Counter[tuple[int, str]] = Counter()
        self.committed: dict[int, list[Committed]] = {number: [] for number in range(size)}
        self.diverged: list[Diverged] = []
        for number in range(size):
            self.coordinate(Hello(number, "same"))
        self.run()

    def coordinate(self, *messages: coordinator.Input) -> None:
        for message in messages:
            self.membership, effects = coordinator.step(self.membership, message)
            for effect in effects:
                if isinstance(effect, coordinator.Announce):
                    for number in effect.generation.roster:
                        self.queue.append(lambda number=number, new=effect.generation: self.feed(number, new))

    def feed(self, number: int, message: replica.Input) -> None:
        state, effects = replica.step(self.states[number], message)
        self.states[number] = state
        for effect in effects:
            if isinstance(effect, ToPeers):
                self.sent[number, type(effect.message).__name__] += len(effect.peers)
                assert set(effect.peers) <= set(tree.neighbours(state.roster, number, state.tree_above))
                for peer in effect.peers:
                    self.queue.append(lambda peer=peer, message=effect.message: self.feed(peer, message))
            elif isinstance(effect, ToCoordinator) and isinstance(effect.message, Diverged):
                self.diverged.append(effect.message)
            elif isinstance(effect, ToCoordinator):
                self.queue.append(lambda message=effect.message: self.coordinate(message))
            elif isinstance(effect, Committed):
                self.committed[number].append(effect)
            elif isinstance(effect, ToRanks):
                self.obey(number, effect.order)

    def obey(self, number: int, order: object) -> None:
        if isinstance(order, Promise):
            self.queue.append(lambda: self.feed(number, Promised(0, order.generation)))
        elif isinstance(order, Plan) and number not in self.stuck:
            held = holds(order.generation, step=order.step, checksum=8 if number in self.drifted else 7)
            self.queue.append(lambda: self.feed(number, held))

    def begin(self) -> None:
        for number, state in self.states.items():
            work = Work(f"train {state.step}", 100, (0,))
            self.feed(number, Begun(0, state.step, work, self.requests.get(number, ())))
        self.run()

    def run(self) -> None:
        while self.queue:
            self.queue.popleft()()

    def stall(self, first: Sequence[int] = ()) -> None:
        """Waits expire, those of `first` before the grace is over; then the next generation, in which nothing changes."""
        for number in first:
            self.feed(number, WaitExpired(self.states[number].generation, self.states[number].step))
        self.run()
        self.coordinate(coordinator.TimerFired(f"grace {self.membership.generation}"))
        self.run()


@pytest.mark.parametrize("above", [100, 1, 2, 8, 64])
def test_all_commit_what_all_voted_for_with_few_messages_each(above: int) -> None:
    job = Job(100, above)
    job.requests = {97: ("exit: SIGTERM",), 3: ("exit: time",)}
    job.begin()
    committed = [job.committed[number] for number in range(100)]
    assert committed == [committed[0]] * 100
    assert committed[0][0].record == record(0, complete(), requests=("exit: SIGTERM", "exit: time"))
    tree_like = above < 100
    for kind in ("Status", "Vote"):
        assert sum(job.sent[number, kind] for number in range(100)) == (0 if tree_like else 9900)
    for kind in ("Statuses", "Votes"):
        # Up and down each link once.
        assert sum(job.sent[number, kind] for number in range(100)) == (2 * 99 if tree_like else 0)
        assert max(job.sent[number, kind] for number in range(100)) <= min(8, above) + 1


@pytest.mark.parametrize("drifted", [(0,), (1, 7), (20,), tuple(range(9))], ids=str)
def test_a_minority_is_found_wherever_it_is(drifted: tuple[int, ...]) -> None:
    job = Job(21, 2, drifted=drifted)
    job.begin()
    assert {report.replica for report in job.diverged} == set(range(21)), "all have heard, and say so"
    assert {report.minority for report in job.diverged} == {drifted}
    assert not any(job.committed.values())


def test_who_has_committed_gives_the_record_to_who_has_not() -> None:
    job = Job(10, 2)
    job.begin()
    roster = tuple(range(10))
    held_up = replace(job.states[7], step=0, committed=None, work=Work("train 0", 100, (0,)))
    job.states[7] = replace(held_up, held=((replace(holds().held[0]),),), contributions=(Contribution((0,), (1,)),))
    job.coordinate(coordinator.ExitAsked("enough"))
    job.run()
    assert job.states[7].roster == roster
    assert job.committed[7][-1].adopted and job.committed[7][-1].record == job.committed[0][0].record


# --- What a member does with what is handed on ---------------------------------------------------------------------------


def inner(*, phase: ReplicaPhase = ReplicaPhase.VOTED) -> replica.ReplicaState:
    """Replica 1 of 7 in generation 2, above 3 and 4 and below 0; its child 3 has voted, and so has it (unless `WORKING`)."""
    state = lead(replica.ReplicaState(1, SHAPE, 2), NewGeneration(2, tuple(range(7))), Promised(0, 2))[0]
    everybody = tuple(status(number, work=None) for number in range(7))
    state, _ = lead(state, Statuses(0, 2, everybody), Begun(0, 0, Work("train 0", 3, (0,))))
    assert state.phase is ReplicaPhase.WORKING
    state, _ = lead(state, ballots(3, 3))
    return state if phase is ReplicaPhase.WORKING else lead(state, holds(2))[0]


def ballots(sender: int, *voters: int, generation: int = 2, step: int = 0) -> Votes:
    return Votes(sender, generation, step, (ballot(record(0, complete(0, 2, 7)), *voters),))


def test_an_inner_member_says_what_its_subtree_says_once_it_has_all_of_it() -> None:
    state = inner()
    state, effects = lead(state, ballots(4, 4))
    assert effects == [ToPeers((0,), ballots(1, 1, 3, 4))]
    assert lead(state, ballots(4, 4)) == (state, []), "once"
    state, effects = lead(state, ballots(0, *range(7)))
    assert effects[0] == ToPeers((3, 4), ballots(1, *range(7)))
    assert isinstance(effects[1], Committed)


def test_its_own_vote_may_be_the_last_of_its_subtree() -> None:
    state, effects = lead(inner(phase=ReplicaPhase.WORKING), ballots(4, 4))
    assert effects == [] and replica.waiting_for(state) == ()
    _, effects = lead(state, holds(2))
    mine = record(0, complete(0, 2))
    assert effects == [Voted(mine, 2), ToPeers((), vote(1, generation=2, of=mine)), ToPeers((0,), ballots(1, 1, 3, 4))]


def test_an_incomplete_word_is_not_handed_on_and_its_sender_is_waited_for() -> None:
    state = inner()
    assert replica.waiting_for(state) == (4,)
    state = lead(replica.ReplicaState(0, SHAPE, 2), NewGeneration(2, tuple(range(7))), Promised(0, 2))[0]
    state, effects = lead(
        state, Statuses(1, 2, tuple(status(r, work=None) for r in (1, 3))), Statuses(2, 2, tuple(map(status, (2, 5, 6))))
    )
    assert effects == [] and replica.waiting_for(state) == (1,)


def test_what_comes_in_parts_is_handed_on_once_and_whole() -> None:
    state = lead(replica.ReplicaState(1, SHAPE, 2), NewGeneration(2, tuple(range(7))), Promised(0, 2))[0]
    everybody = tuple(status(number, work=None) for number in range(7))
    state, _ = lead(state, Statuses(3, 2, everybody[3:4]))
    state, effects = lead(state, Statuses(4, 2, everybody[4:5]))
    assert [effect.peers for effect in effects if isinstance(effect, ToPeers)] == [(0,)]
    state, effects = lead(state, Statuses(0, 2, everybody[:3]), Statuses(0, 2, everybody[3:6]))
    assert effects == [] and replica.waiting_for(state) == (0,)
    state, effects = lead(state, Statuses(0, 2, everybody[6:]))
    (effect,) = effects
    assert isinstance(effect, ToPeers) and effect.peers == (3, 4)
    assert isinstance(effect.message, Statuses) and len(effect.message.statuses) == 7


def test_inv_5_handed_on_votes_of_another_generation_or_step_count_for_nothing() -> None:
    state = inner()
    for stale in (ballots(4, 4, generation=1), ballots(4, 4, step=1), ballots(4, 4, generation=3), ballots(9, 4)):
        assert lead(state, stale) == (state, [])


def test_inv_5_a_status_of_another_generation_inside_counts_for_nothing() -> None:
    state = lead(replica.ReplicaState(1, SHAPE, 2), NewGeneration(3, tuple(range(4))), Promised(0, 3))[0]
    state, effects = lead(state, Statuses(3, 3, (status(3, generation=2),)))
    assert effects == [] and replica.waiting_for(state) == (3,)
    assert lead(state, Statuses(3, 2, (status(3, generation=2),))) == (state, [])


def test_a_word_that_comes_before_its_generation_is_kept() -> None:
    """A child may have heard of it first, and in the older one it was somebody else's child."""
    state = replica.ReplicaState(1, SHAPE, 2)
    state, _ = lead(state, NewGeneration(2, tuple(range(7))), Promised(0, 2))
    state, effects = lead(state, Statuses(5, 3, (status(5, generation=3),)), Statuses(6, 3, (status(6, generation=3),)))
    assert effects == []
    _, effects = lead(state, NewGeneration(3, (0, 1, 2, 5, 6)), Promised(0, 3))
    said = next(effect for effect in effects if isinstance(effect, ToPeers) and effect.peers)
    assert said.peers == (0,) and isinstance(said.message, Statuses)
    assert [each.replica for each in said.message.statuses] == [1, 5, 6]


def test_only_links_of_neighbours_matter() -> None:
    state = inner()
    for stranger in (2, 5, 6):
        assert lead(state, LinkLost(stranger)) == (state, [])
    for neighbour in (0, 3, 4):
        (effect,) = lead(state, LinkLost(neighbour))[1]
        assert isinstance(effect, ToCoordinator) and isinstance(effect.message, ReplicaBlocked)
        assert effect.message.suspects == (neighbour,)


# --- INV-9: who holds the others up is fenced, and nobody else -----------------------------------------------------------


@pytest.mark.parametrize("above", [2, 8, 40])
@pytest.mark.parametrize("stuck", [0, 1, 12, 39])
@pytest.mark.parametrize("asks", ["the first", "the last"])
def test_inv_9_a_member_that_holds_up_a_tree_is_fenced_and_nobody_else(stuck: int, above: int, asks: str) -> None:
    """It answers and never votes. Which waits expire before the others hardly says who it is: all wait in a row."""
    job = Job(40, above, stuck=(stuck,))
    job.begin()
    waiting = [number for number, state in job.states.items() if replica.waiting_for(state)]
    assert stuck not in waiting and not any(job.committed.values())
    first = waiting[:1] if asks == "the first" else waiting[-1:]
    for _ in range(5):
        job.stall(first)
        assert job.membership.roster == tuple(range(40)), "the time for trying again is not over"
    job.coordinate(coordinator.TimerFired(job.membership.trouble))
    job.stall(first)
    assert [loss.replica for loss in job.membership.losses] == [stuck]
    assert all(job.committed[number] for number in range(40) if number != stuck)


def test_an_inner_member_names_whom_it_waits_for_and_a_leaf_its_parent() -> None:
    job = Job(15, 2, stuck=(4,))
    job.begin()
    named = {number: replica.waiting_for(state) for number, state in job.states.items()}
    assert {number: named[number] for number in (0, 1, 4)} == {0: (1,), 1: (4,), 4: ()}
    assert all(named[number] == ((number - 1) // 2,) for number in range(15) if number not in (0, 1, 4))
