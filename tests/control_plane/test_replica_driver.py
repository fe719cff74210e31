"""The leader between its coordinator and another leader, both played by the test: links that break, waits that are too long."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recover import trace
from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.config import RankContext, RecoverConfig
from megatron_recover.control_plane import protocol_events
from megatron_recover.control_plane import replica_driver as leader
from megatron_recover.control_plane.encoding import Peer
from megatron_recover.control_plane.leader_messages import Announcement, LeaderHello, PeerHello, RankHello
from megatron_recover.control_plane.rank_driver import JobStopped, RankDriver
from megatron_recover.control_plane.wire import Link, encode, listen
from megatron_recover.core.digest import combined, commitment, digest
from megatron_recover.core.membership_messages import (
    Diverged,
    Entered,
    JoinRefused,
    Miscounted,
    NewcomerReady,
    NewGeneration,
    ReplicaBlocked,
)
from megatron_recover.core.rank_messages import (
    Apply,
    Begun,
    Holds,
    Plan,
    Promised,
    RankBlocked,
    RankFailing,
    RankFinished,
    Report,
    Stop,
)
from megatron_recover.core.replica import HoldAsked, ReplicaPhase, ToCoordinator, waiting_for
from megatron_recover.core.values import Claim, Held, Record, Shape, Status, Statuses, Vote, Work
from megatron_recover.data_plane.transport import TransportError
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import address_of
from megatron_recover.trace.node_clock import NodeClock
from tests.control_plane.partners import KEY, FakeEndpoint, Partner, call

pytestmark = pytest.mark.timeout(150)
WORK = Work("train 1", 2, (0,))


class WrongCounts(TransportError):
    miscounted = True


class Leading:
    """The only rank of a replica, of two unless said; all others are at one address."""

    def __init__(
        self,
        coordinator: Partner,
        other: Partner,
        free: str,
        other_address: str = "",
        replica: int = 0,
        roster: tuple[int, ...] = (0, 1),
        stall_s: float | None = None,
        **config: Any,
    ) -> None:
        context = RankContext(
            replica=replica, rank=0, num_ranks=1, num_replicas=len(roster), coordinator=coordinator.address, leader=free,
            run_dir="", started_at=0.0,
        )  # fmt: skip
        self.replica = replica
        self.events: list[trace.Event] = []
        self.member = RankDriver(
            context,
            RecoverConfig(**config),
            FakeEndpoint([]),
            key=KEY,
            clock=NodeClock(None),
            record=self.events.append,
            end_process=lambda code: None,
            deadlines=replace(Deadlines.of(), stall_s=stall_s) if stall_s is not None else None,
        )
        self.coordinator, self.other, self.address = coordinator, other, free
        joining = threading.Thread(target=lambda: self.member.join(Shape(1, ((0,),)), ""))
        joining.start()
        coordinator.wait(lambda: coordinator.received)
        [hello] = coordinator.received
        assert isinstance(hello, LeaderHello)
        coordinator.received.clear()
        others = (Peer(number, other_address or other.address, ("b",)) for number in roster if number != replica)
        self.peers = (hello.peer, *others)
        self.announce(1, roster)
        joining.join(60)

    def announce(self, generation: int, roster: tuple[int, ...] = (0, 1)) -> None:
        self.coordinator.send(Announcement(NewGeneration(generation, roster), self.peers, 0.0))
        self.coordinator.wait(lambda: self.coordinator.received)
        # What it asks for may be there already. In the older generation nobody ever told it a status.
        entered = self.coordinator.received.pop(0)
        assert isinstance(entered, Entered) and (entered.replica, entered.generation) == (self.replica, generation)
        assert bool(entered.waited_for) == (generation > 1)

    def heard(self, *, num_peers: int = 1) -> Leading:
        """The other leader, which stands for `num_peers`, has been greeted and told this replica's status as each of them."""
        self.other.wait(lambda: len(self.other.received) == 2 * num_peers)
        greetings = [each for each in self.other.received if each == PeerHello(0)]
        statuses = [each for each in self.other.received if isinstance(each, Status) and each.replica == 0]
        assert len(greetings) == len(statuses) == num_peers and self.other.received[0] == greetings[0]
        self.other.received.clear()
        return self

    def handed_on(self) -> Statuses:
        """A member of the tree has been greeted, and no other; what it was told."""
        self.other.wait(lambda: len(self.other.received) == 2)
        greeting, said = self.other.received
        assert greeting == PeerHello(self.replica) and isinstance(said, Statuses)
        self.other.received.clear()
        return said

    def speak(self, *messages: Any, replica: int = 1) -> Link:
        """A link of the other leader, or of another one, to this one."""
        link = call(self.address, Party(Role.LEADER, replica), Party(Role.LEADER, self.replica))
        self.other.loop.watch(link, lambda link, message: None, self.other._lost)
        for message in (PeerHello(replica, self.other.address if replica > 1 else ""), *messages):
            self.other.loop.send(link, message)
        self.other.wait(lambda: link.proven and not link.wants_write)
        return link

    def requested(self) -> ReplicaBlocked:
        """What the coordinator is asked next."""
        self.coordinator.wait(lambda: self.coordinator.received)
        [message] = self.coordinator.received
        assert isinstance(message, ReplicaBlocked)
        self.coordinator.received.clear()
        return message

    def close(self) -> None:
        self.coordinator.send(Stop(0, "over"))
        with contextlib.suppress(JobStopped):
            self.member.close()


Lead = Callable[..., Leading]


@pytest.fixture
def lead(partner: Partner, other_leader: Partner, free: str) -> Iterator[Lead]:
    made: list[Leading] = []

    def start(**config: Any) -> Leading:
        made.append(Leading(partner, other_leader, **({"free": free} | config)))
        return made[0]

    yield start
    for each in made:
        each.close()


def status(generation: int = 1, replica: int = 1) -> Status:
    return Status(replica, generation, 0, None, (), (), None)


def test_a_leader_serves_the_socket_that_its_rank_inherited(
    lead: Lead, hand_down: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It binds nothing: as long as no socket listens, another user could be bound to the port, and listen first."""
    with listen("127.0.0.1:0") as launchers:
        address = address_of(launchers)
        hand_down(leader=os.dup(launchers.fileno()))
    monkeypatch.setattr(leader, "listen", lambda address: pytest.fail(f"{address} is bound anew"))
    leading = lead(free=address).heard()
    leading.speak(status())
    leading.coordinator.wait(lambda: leading.replica not in waiting_for(leading.member._leader._state))


def test_a_leader_expects_those_of_its_roster_until_they_have_linked(lead: Lead) -> None:
    """As long as it expects someone, strangers before that one are let go without a rest (Note [Whom a listener expects])."""
    leading = lead().heard()
    expects = leading.member._leader._gate._expects
    assert expects()
    link = leading.speak(status())
    leading.coordinator.wait(lambda: not expects())
    leading.other.loop.drop(link)
    leading.coordinator.wait(expects)
    leading.requested()


def test_a_link_to_another_leader_that_breaks_asks_for_a_generation(lead: Lead) -> None:
    leading = lead().heard()
    assert leading.other.link is not None
    leading.other.loop.drop(leading.other.link)
    request = leading.requested()
    assert (request.replica, request.generation, request.suspects) == (0, 1, (1,))
    # Its messages in the next generation go over a new link.
    leading.announce(2)
    leading.heard()


def test_a_link_from_another_leader_that_breaks_asks_for_a_generation(lead: Lead) -> None:
    leading = lead().heard()
    leading.other.loop.drop(leading.speak())
    request = leading.requested()
    assert (request.generation, request.suspects) == (1, (1,))


def test_a_leader_that_is_not_there_is_told_to_the_coordinator(lead: Lead) -> None:
    assert lead(other_address="127.0.0.1:1").requested().suspects == (1,)


@pytest.mark.parametrize("forged", [status(replica=0), PeerHello(1)], ids=["another replica's", "no leader's"])
def test_a_message_that_is_not_the_speakers_own_counts_for_nothing(lead: Lead, forged: Any) -> None:
    leading = lead().heard()
    leading.speak(forged)
    assert leading.requested().suspects == (1,)
    leading.other.wait(lambda: leading.other.closed)


@pytest.mark.parametrize(
    ("proven", "said"),
    [
        (Party(Role.LEADER, 1), PeerHello(2)),
        (Party(Role.LEADER, 1), RankHello(0, Shape(1, ((0,),)), "", "")),
        (Party(Role.LEADER, 1), Stop(0, "")),
    ],
    ids=["another leader", "a rank", "the coordinator"],
)  # fmt: skip
def test_a_peer_speaks_for_the_replica_that_it_proved_and_for_no_other(lead: Lead, proven: Party, said: Any) -> None:
    """A9: any local user could connect, say `PeerHello(k)` and vote as k. Here not even another replica can."""
    leading = lead(roster=(0, 1, 2)).heard(num_peers=2)
    link = call(leading.address, proven, Party(Role.LEADER, 0))
    closed: list[str] = []
    leading.other.loop.watch(link, lambda link, message: None, lambda link, why: closed.append(why))
    for message in (said, status(1, 2)):
        leading.other.loop.send(link, message)
    leading.other.wait(lambda: closed)
    leading.coordinator.loop.run_once(0.05)
    assert not [each for each in leading.coordinator.received if isinstance(each, ReplicaBlocked)]
    assert leading.member._leader is not None
    assert [each for each in leading.member._leader._state.statuses if each.replica == 2] == []


@pytest.mark.parametrize(
    "claimed",
    [Party(Role.LEADER, 0), Party(Role.LEADER, 1, 1), Party(Role.RANK, 1, 1), Party(Role.RANK, 0, 1), Party(Role.DATA, 1)],
)
def test_who_has_no_business_with_a_leader_is_not_let_in(lead: Lead, claimed: Party) -> None:
    leading = lead().heard()
    link = call(leading.address, claimed, Party(Role.LEADER, 0), patience_s=0.05)
    closed: list[str] = []
    leading.other.loop.watch(link, lambda link, message: None, lambda link, why: closed.append(why))
    leading.other.wait(lambda: closed)
    assert not link.proven


@pytest.mark.parametrize(
    "forged",
    [
        Begun(1, 0, WORK), Promised(1, 1), Holds(1, 0, (Held(1, 1, 7),)), RankBlocked(1, 1, "it broke"),
        RankFailing(1, 0, "train 1", (), "it broke"), RankFinished(1),
    ],
    ids=lambda forged: type(forged).__name__,
)  # fmt: skip
def test_inv_5_a_rank_reports_for_the_rank_that_it_proved_and_for_no_other(
    partner: Partner, other_leader: Partner, free: str, monkeypatch: pytest.MonkeyPatch, forged: Report
) -> None:
    """As it was, `Promised(rank=1)` of rank 2 counted as the promise of rank 1: the generation was entered too early."""
    reports: list[Report] = []
    feed = leader.ReplicaDriver.report
    monkeypatch.setattr(leader.ReplicaDriver, "report", lambda self, report: (reports.append(report), feed(self, report)))
    context = RankContext(
        replica=0, rank=0, num_ranks=3, num_replicas=1, coordinator=partner.address, leader=free, run_dir="", started_at=0.0
    )  # fmt: skip
    member = RankDriver(
        context, RecoverConfig(), FakeEndpoint([]), key=KEY, clock=NodeClock(None), record=lambda event: None,
        end_process=lambda code: None,
    )  # fmt: skip
    shape = Shape(3, ((0,), (1,), (2,)))
    joining = threading.Thread(target=lambda: member.join(shape, ""))
    joining.start()
    partner.wait(lambda: member._leader)
    links = [call(free, Party(Role.RANK, 0, rank), Party(Role.LEADER, 0)) for rank in (1, 2)]
    for rank, link in enumerate(links, 1):
        partner.loop.watch(link, lambda link, message: None, lambda link, why: None)
        partner.loop.send(link, RankHello(rank, shape, f"{shape} ", ""))
    partner.wait(lambda: partner.received)
    [hello] = partner.received
    assert isinstance(hello, LeaderHello)
    partner.send(Announcement(NewGeneration(1, (0,)), (hello.peer,), 0.0))
    joining.join(60)
    partner.loop.send(links[1], forged)
    partner.wait(lambda: member._failure is not None or forged in reports)
    assert reports == [Promised(0, 1)]
    for link in links:
        partner.loop.drop(link)
    with pytest.raises(JobStopped, match=f"rank 2 of this replica sent a {type(forged).__name__} of rank 1"):
        member.close()


def test_inv_8_a_status_that_does_not_come_is_waited_for_until_the_stall_timeout(lead: Lead) -> None:
    leading = lead(stall_s=0.05).heard()
    assert leading.requested() == ReplicaBlocked(0, 1, "no status came from replica 1")
    # Each wait is watched, the one in the next generation too.
    leading.announce(2)
    assert leading.requested().generation == 2


def test_inv_8_a_wait_has_one_deadline_from_its_start(lead: Lead, monkeypatch: pytest.MonkeyPatch) -> None:
    """A17: each message that arrived made it begin anew, so many members could hold one up for many times as long."""
    leading = lead(roster=(0, 1, 2), stall_s=60.0)
    member, timers = leading.member, list[Callable[[], None]]()
    leading.other.wait(lambda: len(leading.other.received) == 4)  # two greetings and two statuses
    settled = threading.Event()
    member._loop.post(settled.set)  # behind what the leader does after it has said its status: its first timer is set
    assert settled.wait(60)
    monkeypatch.setattr(member._loop, "after", lambda seconds, then: timers.append(then) if seconds == 60.0 else None)
    leading.announce(2, (0, 1, 2))
    leading.other.wait(lambda: len(leading.other.received) == 6)
    assert member._leader is not None
    leading.speak(status(2, 1))
    heard = member._leader
    leading.other.wait(lambda: waiting_for(heard._state) == (2,))
    [deadline] = timers
    member._loop.post(deadline)
    assert leading.requested() == ReplicaBlocked(0, 2, "no status came from replica 2")


def test_inv_8_the_timer_of_a_wait_that_is_over_does_not_end_one_like_it(lead: Lead, monkeypatch: pytest.MonkeyPatch) -> None:
    """First for a status, then for a vote: of the same members, in the same generation and step."""
    leading = lead(stall_s=60.0).heard()
    member, timers = leading.member, list[Callable[[], None]]()
    settled = threading.Event()
    member._loop.post(settled.set)  # behind what the leader does after it has said its status: its first timer is set
    assert settled.wait(60)
    monkeypatch.setattr(member._loop, "after", lambda seconds, then: timers.append(then) if seconds == 60.0 else None)
    leading.announce(2)
    leading.other.wait(lambda: leading.other.received)
    leading.other.received.clear()
    leading.speak(status(2))
    member.begin(WORK)
    member.next_order()
    assert member.hold(Held(0, 2, 7))
    leading.other.wait(lambda: leading.other.received)
    assert isinstance(leading.other.received[0], Vote)
    leading.other.wait(lambda: len(timers) == 2)
    over, running = timers
    fired = threading.Event()
    member._loop.post(over)
    member._loop.post(fired.set)
    assert fired.wait(60) and timers == [over, running], "nothing has expired"
    member._loop.post(running)
    assert leading.requested() == ReplicaBlocked(0, 2, "no vote came from replica 1")


def test_inv_8_a_miscount_is_a_request_that_beats_repeat_and_late_evidence_is_none(lead: Lead) -> None:
    """A5: with a stopped launcher nobody else says for what this replica waits, and the wait had no end."""
    leading = lead().heard()
    leading.speak(status(1))
    leading.member.begin(WORK)
    leading.member.next_order()
    leading.member.blocked(1, WrongCounts("counts"))
    leading.coordinator.wait(lambda: leading.coordinator.received)
    [miscounted] = leading.coordinator.received
    assert isinstance(miscounted, Miscounted)
    heard = leading.member._leader
    assert heard is not None and heard._where().request == miscounted and "counts" in heard._needs_coordinator()
    heard._carry_out(ToCoordinator(ReplicaBlocked(0, 0, "of an older generation", (1,), stalled=True)))
    assert heard._where().request == miscounted


def test_members_that_vote_differently_leave_their_own_records_in_the_trace(lead: Lead) -> None:
    leading = lead().heard()
    leading.speak(status(), Vote(1, 1, 0, b"another", b""))
    leading.member.begin(WORK)
    leading.member.next_order()
    assert leading.member.hold(Held(0, 1, 7))
    leading.coordinator.wait(lambda: leading.coordinator.received)
    [report] = leading.coordinator.received
    assert isinstance(report, Diverged) and "[0] against [1]; they differ in the number of buckets" in report.reason
    [found] = [event for event in leading.events if isinstance(event, trace.Disagreed)]
    [voted] = [event for event in leading.events if isinstance(event, trace.Voted)]
    assert found == trace.Disagreed(
        replica=0, generation=1, step=0, label="train 1", digest=voted.digest, reason=report.reason,
        versions=(trace.Result(bucket=0, version=1, checksums=(7,)),),
    )  # fmt: skip


def test_members_that_would_do_different_steps_say_so_in_the_trace_without_a_vote(lead: Lead) -> None:
    """`check` accuses a run that ends with code 12 and has no `disagreed`."""
    leading = lead().heard()
    leading.speak(replace(status(), work=replace(WORK, num_microbatches=WORK.num_microbatches + 1)))
    leading.member.begin(WORK)
    leading.coordinator.wait(lambda: leading.coordinator.received)
    [report] = leading.coordinator.received
    assert isinstance(report, Diverged)
    [found] = [event for event in leading.events if isinstance(event, trace.Disagreed)]
    assert (found.replica, found.step, found.label, found.digest, found.versions) == (0, 0, "train 1", "", ())
    assert found.reason == report.reason


def test_a_committed_record_is_digested_for_the_vote_and_not_again(lead: Lead, monkeypatch: pytest.MonkeyPatch) -> None:
    leading = lead().heard()
    leading.speak(status())
    leading.member.begin(WORK)
    leading.member.next_order()
    computed: list[object] = []
    monkeypatch.setattr(protocol_events, "digest", lambda record: (computed.append(record), digest(record))[1])
    assert leading.member.hold(Held(0, 1, 7))
    leading.other.wait(lambda: any(isinstance(each, Vote) for each in leading.other.received))
    [vote] = [each for each in leading.other.received if isinstance(each, Vote)]
    leading.speak(Vote(1, 1, 0, vote.digest, vote.outline))
    while not isinstance(order := leading.member.next_order(), Apply):
        pass
    [committed] = [event for event in leading.events if isinstance(event, trace.Committed)]
    assert committed.digest == vote.digest.hex() == digest(order.record).hex() and not computed
    heard = leading.member._leader
    assert heard is not None
    other = replace(order.record, label="another")
    assert heard._events._digest_of(other) == digest(other), "what was not voted for has a digest of its own"


def test_in_a_tree_a_leader_has_links_to_its_neighbours_of_the_generation_only(lead: Lead) -> None:
    leading = lead(replica=5, roster=tuple(range(6)), tree_above=2)
    # A leaf below replica 2; when 3 is gone it moves up, below replica 1.
    assert leading.handed_on() == Statuses(5, 1, (Status(5, 1, 0, None, (), (), None),))
    leading.announce(2, (0, 1, 2, 4, 5))
    assert leading.handed_on() == Statuses(5, 2, (Status(5, 2, 0, None, (), (), None),))
    leading.other.wait(lambda: leading.other.closed)


def test_many_statuses_are_handed_on_in_several_frames(lead: Lead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "STATUSES_A_FRAME", 2)
    leading = lead(roster=(0, 1, 2), tree_above=1)
    leading.speak(Statuses(1, 1, (status(1, 1),)), Statuses(1, 1, (status(1, 2),)))
    leading.other.wait(lambda: len(leading.other.received) == 3)
    _, *frames = leading.other.received
    assert [[each.replica for each in frame.statuses] for frame in frames if isinstance(frame, Statuses)] == [[0, 1], [2]]


def test_what_many_members_say_does_not_grow_with_their_square() -> None:
    """Each frame has the record that they have all committed, with the pace of each of them."""

    def num_bytes(members: int) -> int:
        record = commitment(Record(0, "train 1", (), paces=tuple((number, 10**9) for number in range(members))))
        statuses = Statuses(0, 2, tuple(Status(number, 2, 1, None, (), (), record) for number in range(members)))
        return sum(len(encode(part)) for part in leader._parts(statuses))

    assert num_bytes(4000) < 2 * 4 * num_bytes(1000)


def test_in_a_tree_the_root_says_nothing_before_it_has_heard_from_all(lead: Lead) -> None:
    leading = lead(roster=(0, 1, 2), tree_above=1)
    everybody = tuple(status(1, number) for number in range(3))
    leading.speak(Statuses(1, 1, everybody[1:]))
    said = leading.handed_on()
    assert (said.replica, [each.replica for each in said.statuses]) == (0, [0, 1, 2])
    leading.coordinator.loop.run_once(0.0)
    assert leading.coordinator.received == []


# --- Holds ----------------------------------------------------------------------------------------


def held(leading: Leading, *said: Any) -> Link:
    """The pass of the step is held for newcomer 2, which says this, and its end is kept back."""
    link = leading.speak(*said, replica=2)
    if not isinstance(said[-1], Claim):
        leading.other.wait(lambda: leading.member._leader._state.hold is not None)  # type: ignore[union-attr]
    else:
        leading.coordinator.wait(lambda: leading.coordinator.received)
        assert leading.coordinator.received.pop() == NewcomerReady(0, 1, 0, said[-1])
    return link


def begun(leading: Leading) -> None:
    leading.speak(status())
    leading.member.begin(WORK)
    assert isinstance(leading.member.next_order(), Plan)


def is_closed(leading: Leading) -> bool:
    leading.other.loop.run_once(0.05)
    return leading.member.has_order()


def recorded(leading: Leading) -> trace.PassHeld:
    """The only hold in the trace, once it is there."""
    leading.other.wait(lambda: any(isinstance(event, trace.PassHeld) for event in leading.events))
    [event] = [event for event in leading.events if isinstance(event, trace.PassHeld)]
    assert (event.replica, event.label, event.newcomers) == (0, "train 1", (2,))
    return event


def test_a_hold_that_was_asked_for_ends_by_itself(lead: Lead) -> None:
    leading = lead(stall_s=2.0).heard()
    leading.speak(status())
    leading.other.wait(lambda: leading.member._leader._state.phase is ReplicaPhase.IDLE)  # type: ignore[union-attr]
    held(leading, HoldAsked(2, "train 1"))
    leading.member.begin(WORK)
    assert isinstance(leading.member.next_order(), Plan)
    leading.member.ask_close()
    assert not is_closed(leading)
    leading.other.wait(lambda: leading.member.has_order())
    assert leading.member.more_work() is None
    event = recorded(leading)
    assert event.is_asked and 0 < event.seconds < Deadlines.of().hold_s + 30


@pytest.mark.parametrize("end", ["refusal", "link", "generation"])
def test_a_hold_that_came_with_a_claim_ends_with_the_reason_for_it(lead: Lead, end: str) -> None:
    leading = lead().heard()
    hold_for_long(leading)
    begun(leading)
    leading.member.digested("train 1", 5)
    leading.other.wait(lambda: leading.member._leader._state.served)  # type: ignore[union-attr]
    link = held(leading, Claim(2, "train 1", combined([5])))
    leading.member.ask_close()
    assert not is_closed(leading)
    if end == "refusal":
        leading.coordinator.send(JoinRefused(2, "train 1", "a save is in progress"))
    elif end == "link":
        leading.other.loop.drop(link)
    else:
        leading.coordinator.send(Announcement(NewGeneration(2, (0, 1)), leading.peers, 0.0))
    leading.other.wait(lambda: leading.member.has_order())
    assert leading.member.more_work() is None
    event = recorded(leading)
    assert not event.is_asked and event.seconds > 0


@pytest.mark.parametrize("digest", [5, 6])
def test_a_claim_waits_until_this_member_knows_its_own_digest(lead: Lead, digest: int) -> None:
    leading = lead().heard()
    begun(leading)

    def refused() -> list[int]:
        return [each.newcomer for each in leading.other.received if isinstance(each, JoinRefused)]

    for claim in (Claim(2, "train 1", combined([5])), Claim(3, "train 7", 5)):
        link = call(leading.address, Party(Role.LEADER, claim.replica), Party(Role.LEADER, 0))
        leading.other.loop.watch(link, lambda link, message: None, leading.other._lost)
        leading.other.loop.send(link, PeerHello(claim.replica, leading.other.address))
        leading.other.loop.send(link, claim)
    leading.other.wait(refused)
    assert refused() == [3] and not leading.coordinator.received
    leading.member.digested("train 1", digest)
    if digest == 5:
        leading.coordinator.wait(lambda: leading.coordinator.received)
        [told] = leading.coordinator.received
        assert isinstance(told, NewcomerReady) and told.claim.replica == 2
    else:
        leading.other.wait(lambda: refused() == [3, 2])
    leading.coordinator.received.clear()


def test_an_announcement_keeps_the_link_to_a_newcomer_and_those_of_both_rosters(lead: Lead) -> None:
    leading = lead(tree_above=2, roster=(0, 1)).heard()
    one = leading.member._leader
    assert one is not None
    begun(leading)
    link = call(leading.address, Party(Role.LEADER, 7), Party(Role.LEADER, 0))
    leading.other.loop.watch(link, lambda link, message: None, leading.other._lost)
    leading.other.loop.send(link, PeerHello(7, leading.other.address))
    leading.other.loop.send(link, Claim(7, "train 9", 5))
    leading.other.wait(lambda: any(isinstance(each, JoinRefused) for each in leading.other.received))
    assert set(one._links._outgoing) == {1, 7}
    one._links.keep_neighbours((0, 1, 9), (Claim(9, "train 1", 5),), (0, 1))
    assert set(one._links._outgoing) == {1, 7}, "neither one that forms nor a neighbour among the older members"
    one._links.keep_neighbours((0, 9), (), (0, 1))
    assert set(one._links._outgoing) == {7}


def test_a_claim_that_nobody_answers_is_given_up(lead: Lead) -> None:
    leading = lead(stall_s=0.2).heard()
    one, refused = leading.member._leader, []
    assert one is not None
    one._claims._refused = refused.append
    one._state = replace(one._state, phase=ReplicaPhase.JOINING, claim=Claim(0, "train 1", 5))
    claim = one._state.claim
    one._loop.post(lambda: one._claims._unanswered(replace(claim)))
    one._loop.post(lambda: one._claims._unanswered(claim))
    leading.other.wait(lambda: refused)
    [answer] = refused
    assert "no answer came within" in answer.reason and not answer.is_fault and one._state.claim is None


def test_who_claims_and_does_not_say_where_it_listens_gets_no_answer_and_costs_nothing(lead: Lead) -> None:
    leading = lead().heard()
    begun(leading)
    leading.speak(Claim(2, "train 7", 5), replica=2)
    for _ in range(20):
        leading.other.loop.run_once(0.01)
    assert leading.member._failure is None


def hold_for_long(leading: Leading) -> None:
    """No hold ends by itself."""
    one = leading.member._leader
    assert one is not None
    one._deadlines = replace(one._deadlines, hold_s=1000.0)
