"""The member against a leader or coordinator that the test plays: what is held, revoked, acknowledged, given up, and when."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from megatron_recover import trace
from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.config import RankContext, RecoverConfig
from megatron_recover.control_plane.leader_messages import Announcement, Beat, Enter, Heard, LeaderBeat, LeaderHello, RankHello
from megatron_recover.control_plane.rank_driver import JobStopped, RankDriver
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import (
    Entered,
    Grant,
    Named,
    NewGeneration,
    ReplicaFailing,
    ReplicaFinished,
    ReplicaSaving,
)
from megatron_recover.core.rank_messages import (
    Apply,
    Begun,
    Holds,
    Plan,
    Promise,
    Promised,
    RankBlocked,
    RankFailing,
    RankFinished,
    Stop,
)
from megatron_recover.core.request import NO_COORDINATOR, coordinator_lost
from megatron_recover.core.values import BucketVersion, Compute, Held, Journal, Record, Shape, Work
from megatron_recover.data_plane.transport import CallPart, DeadlineExceeded, PeerLost, Revoked, TransportError
from megatron_recover.deadlines import Deadlines
from megatron_recover.trace.node_clock import NodeClock
from tests.control_plane.partners import KEY, FakeEndpoint, Partner

pytestmark = pytest.mark.timeout(150)

SHAPE = Shape(2, ((0,), (1,)))
WORK = Work("train 1", 4, (0, 1))
PLAN = Plan(0, 1, (0, 1), WORK, (2, 2), (), (Compute((2, 3), (0, 1)),), (0, 1))


class Follower:
    """Rank 1 of replica 1, with the test as its leader."""

    def __init__(self, leader: Partner, **deadlines: float) -> None:
        self.seen: list[str] = []
        self.ended: list[int] = []
        context = RankContext(
            replica=1, rank=1, num_ranks=2, num_replicas=2, coordinator="", leader=leader.address, run_dir="", started_at=0.0
        )  # fmt: skip
        self.member = RankDriver(
            context, RecoverConfig(), FakeEndpoint(self.seen), key=KEY, clock=NodeClock(None), record=lambda event: None,
            end_process=lambda code: self.ended.append(int(code)), deadlines=replace(Deadlines.of(), **deadlines),
        )  # fmt: skip
        self.leader = leader

    def joined(self) -> Follower:
        joining = threading.Thread(target=lambda: self.member.join(SHAPE, "print"))
        joining.start()
        self.leader.expect(RankHello(1, SHAPE, f"{SHAPE} print", "fake:1"))
        self.leader.send(Enter(Promise(1, (0, 1)), ((0, "a"), (1, "b"))))
        self.leader.expect(Promised(1, 1))
        joining.join(60)
        assert not joining.is_alive()
        return self

    def planned(self) -> Follower:
        assert self.member.begin(WORK) == 0
        self.leader.send(PLAN)
        assert self.member.next_order() == PLAN
        assert (self.member.generation, self.member.roster) == (1, (0, 1))
        return self

    def close(self) -> None:
        self.leader.send(Stop(0, "over"))
        with contextlib.suppress(JobStopped):  # what the test itself made of it
            self.member.close()


@pytest.mark.parametrize("address", ["127.0.0.2:0", "[::1]:0"])
def test_a_rank_finds_its_leader_at_an_address_of_either_family(address: str) -> None:
    leader = Partner(address)
    follower = Follower(leader).joined()
    assert leader.address.startswith(address[:-1]) and leader.greeted == [Party(Role.RANK, 1, 1)]
    follower.close()
    leader.close()


@pytest.fixture
def follower(partner: Partner) -> Iterator[Follower]:
    made = Follower(partner).joined().planned()
    yield made
    made.close()


def test_the_journal_and_the_pace_are_told_without_a_message_of_their_own(follower: Follower) -> None:
    """Of rank 0; a follower stands for it here. What is measured goes to the leader, which is in the same process."""
    follower.member.started(2)
    follower.member.finished(2)
    follower.member.started(3)
    follower.leader.send(Enter(Promise(2, (0, 1)), ((0, "a"), (1, "b"))))
    follower.leader.expect(Promised(1, 2, Journal((2, 3), (2,))))


def test_a_step_without_failures_is_one_report_and_one_order(follower: Follower) -> None:
    member = follower.member
    member.transport(1)
    member.transport(1)
    assert follower.seen == ["open 1 1 {0: 'a', 1: 'b'}"]
    assert member.hold(Held(1, 1, 99))
    follower.leader.expect(Holds(1, 0, (Held(1, 1, 99),)))
    record = Record(0, "train 1", (BucketVersion(0, 1, (5,)), BucketVersion(1, 1, (99,))))
    follower.leader.send(Apply(record, 1, (0, 1)))
    assert member.next_order() == Apply(record, 1, (0, 1))
    assert member.begin(Work("train 2", 4, (0, 1))) == 1


def test_a_promise_revokes_reports_what_is_held_and_then_acknowledges(partner: Partner) -> None:
    two_buckets = Shape(2, ((0, 1), (1,)))
    follower = Follower(partner)
    joining = threading.Thread(target=lambda: follower.member.join(two_buckets, ""))
    joining.start()
    partner.wait(lambda: partner.received)
    partner.received.clear()
    partner.send(Enter(Promise(1, (0, 1)), ((0, "a"), (1, "b"))))
    partner.expect(Promised(1, 1))
    joining.join(60)
    follower.planned()
    follower.member.transport(1)
    assert follower.member.hold(Held(0, 1, 7)), "one of the two results of the plan"
    partner.send(Enter(Promise(2, (1,)), ((1, "b"),)))
    partner.expect(Holds(1, 0, (Held(0, 1, 7),)), Promised(1, 2))
    assert follower.seen[-1] == "revoke 1", "it acknowledged before the old transport was retired"
    assert not follower.member.hold(Held(1, 1, 8)), "a result of an old generation was registered behind the promise"
    with pytest.raises(Revoked):
        follower.member.transport(1)
    assert partner.received == []
    follower.close()


def test_an_old_promise_changes_nothing(follower: Follower) -> None:
    follower.leader.send(Enter(Promise(3, (0, 1)), ((0, "new a"), (1, "b"))))
    follower.leader.expect(Promised(1, 3))
    follower.leader.send(Enter(Promise(2, (0, 1)), ((0, "old a"), (1, "b"))))
    follower.leader.send(Plan(0, 3, (0, 1), WORK, (2, 2), (), (), (0, 1)))
    follower.member.next_order()
    follower.member.transport(3)
    assert follower.seen[-1] == "open 3 1 {0: 'new a', 1: 'b'}"


def test_a_new_generation_gets_a_transport_of_its_own(follower: Follower) -> None:
    follower.member.transport(1)
    follower.leader.send(Enter(Promise(2, (0, 1)), ((0, "a"), (1, "b"))))
    follower.leader.expect(Promised(1, 2))
    follower.leader.send(Plan(0, 2, (0, 1), WORK, (2, 2), (), (), (0, 1)))
    follower.member.next_order()
    assert follower.member.transport(2).generation == 2
    assert follower.seen[-3:] == ["revoke 1", "open 2 1 {0: 'a', 1: 'b'}", "close 1"]


def test_who_was_waited_for_in_vain_or_is_gone_is_suspected(follower: Follower) -> None:
    for error in (DeadlineExceeded(CallPart.SLOWEST, [0], 5.0), PeerLost(0, "reset")):
        follower.member.blocked(1, error)
        follower.leader.expect(RankBlocked(1, 1, f"{type(error).__name__}: {error}", (0,), isinstance(error, DeadlineExceeded)))


def test_the_roster_is_that_of_the_order_being_obeyed(follower: Follower) -> None:
    assert not follower.member.is_writer()
    follower.leader.send(Enter(Promise(2, (1,)), ((1, "b"),)), Plan(0, 2, (1,), WORK, (4,), (), (), (0, 1)))
    follower.leader.expect(Promised(1, 2))
    assert (follower.member.generation, follower.member.roster) == (1, (0, 1))
    follower.member.next_order()
    assert (follower.member.generation, follower.member.roster) == (2, (1,))
    assert follower.member.is_writer()


def test_inv_2_an_order_to_apply_what_is_not_here_ends_the_process(partner: Partner) -> None:
    follower = Follower(partner, follow_s=0.05).joined().planned()
    assert follower.member.hold(Held(1, 1, 99))
    partner.expect(Holds(1, 0, (Held(1, 1, 99),)))
    partner.send(Apply(Record(0, "train 1", (BucketVersion(1, 2, (99,)),)), 1, (0, 1)))
    with pytest.raises(JobStopped, match="INV-2") as stopped:
        follower.member.next_order()
    assert stopped.value.exit_code == ExitCode.INVARIANT_VIOLATED
    partner.wait(lambda: follower.ended)
    assert follower.ended == [ExitCode.INVARIANT_VIOLATED]
    with pytest.raises(JobStopped):
        follower.member.close()


def test_a_failed_reduction_is_reported_once_and_not_when_it_was_revoked(follower: Follower) -> None:
    follower.member.blocked(1, TransportError("a broken link"))
    follower.leader.expect(RankBlocked(1, 1, "TransportError: a broken link"))
    follower.leader.send(Enter(Promise(2, (0, 1)), ((0, "a"), (1, "b"))))
    follower.leader.expect(Promised(1, 2))
    follower.member.blocked(1, TransportError("late"))
    assert follower.leader.received == []


def test_last_words_are_on_their_way_before_the_process_ends(follower: Follower) -> None:
    saying = threading.Thread(target=lambda: follower.member.failing((3,), ValueError("nan")))
    saying.start()
    follower.leader.expect(RankFailing(1, 0, "train 1", (3,), "ValueError: nan"))
    assert saying.is_alive(), "it did not wait until its leader had passed the report on"
    follower.leader.send(Heard())
    saying.join(60)
    assert not saying.is_alive()


def test_requests_ride_with_the_next_step(partner: Partner) -> None:
    follower = Follower(partner).joined()
    follower.member.request("exit: SIGTERM")
    follower.member.begin(WORK, ["checkpoint"])
    partner.expect(Begun(1, 0, WORK, ("checkpoint", "exit: SIGTERM")))
    follower.member.begin(WORK, ["another"])
    partner.expect(Begun(1, 0, WORK, ("another",)))
    follower.close()


def test_what_records_have_carried_stays_known(follower: Follower) -> None:
    """A replica that is fast takes the next record before it looks: what the one before asked for must still be there."""
    for step, requests in enumerate((("exit: SIGTERM",), ("checkpoint",))):
        record = Record(step, f"train {step + 1}", (BucketVersion(0, 1, (5,)), BucketVersion(1, 1, (99,))), requests)
        plan = Plan(step, 1, (0, 1), Work(f"train {step + 1}", 4, (0, 1)), (2, 2), (), (), (0, 1))
        if step:
            follower.member.begin(plan.work)
            follower.leader.send(plan)
            assert follower.member.next_order() == plan
        assert follower.member.hold(Held(1, 1, 99))
        follower.leader.send(Apply(record, 1, (0, 1)))
        assert isinstance(follower.member.next_order(), Apply)
    assert follower.member.requests == {"exit: SIGTERM", "checkpoint"}


def test_a_member_closes_however_late_its_last_call_to_the_control_thread_is(follower: Follower) -> None:
    """The control thread may be awake already, see the end by itself, and close its loop before it is called."""
    post, control = follower.member._loop.post, follower.member._control

    def late(call: Callable[[], None]) -> None:
        post(call)  # as any message does that comes now
        control.join(0.2)
        post(call)

    follower.leader.send(Stop(0, "over"))
    with pytest.raises(JobStopped):
        follower.member.next_order()
    follower.member._loop.post = late  # type: ignore[method-assign]
    follower.member.close()
    assert not control.is_alive()


def test_the_end_waits_for_the_job(partner: Partner) -> None:
    follower = Follower(partner).joined()
    closing = threading.Thread(target=follower.member.close)
    closing.start()
    partner.expect(RankFinished(1))
    partner.send(Enter(Promise(2, (0, 1)), ((0, "a"), (1, "b"))))
    partner.expect(Promised(1, 2))
    assert closing.is_alive(), "it left although another replica may need what it knows"
    partner.send(Stop(0, "training finished"))
    closing.join(60)
    assert not closing.is_alive()
    partner.wait(lambda: partner.closed)
    assert follower.seen[-1] == "endpoint closed"


def test_a_stop_is_raised_with_its_code_and_no_except_exception_holds_it_up(follower: Follower) -> None:
    follower.leader.send(Stop(12, "replicas disagree"))
    with pytest.raises(JobStopped, match="replicas disagree") as stopped:
        follower.member.next_order()
    assert (stopped.value.exit_code, stopped.value.code) == (12, 12)
    assert not isinstance(stopped.value, Exception)


def test_a_lost_leader_ends_the_rank_even_if_the_training_thread_is_stuck(partner: Partner) -> None:
    follower = Follower(partner, follow_s=0.05).joined().planned()
    follower.member.transport(1)
    assert partner.link is not None
    partner.loop.drop(partner.link)
    with pytest.raises(JobStopped, match="rank 0 of replica 1 is gone"):
        follower.member.next_order()
    partner.wait(lambda: follower.ended)  # nobody closed the member: its process is ended from the control thread
    assert follower.ended == [1] and follower.seen[-1] == "revoke 1"
    with pytest.raises(JobStopped):
        follower.member.close()


def test_a_forked_child_has_none_of_our_sockets(partner: Partner) -> None:
    before = {os.fstat(number).st_ino for number in sockets()}  # the test's own, and whatever other tests left behind
    follower = Follower(partner).joined().planned()
    ours = {os.fstat(number).st_ino for number in sockets()} - before
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        kept = ours & {os.fstat(number).st_ino for number in sockets()}
        os.write(writing, str(len(kept)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    kept = int(os.read(reading, 10))
    os.close(reading)
    os.close(writing)
    assert (len(ours), kept) == (4, 1), "the uplink and both ends of the waker; the test's end of the link is not ours to close"
    follower.member.blocked(1, TransportError("still alive"))
    follower.leader.expect(RankBlocked(1, 1, "TransportError: still alive"))
    follower.close()


def sockets() -> list[int]:
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}") and is_socket(number)]


def is_socket(number: int) -> bool:
    return stat.S_ISSOCK(os.fstat(number).st_mode)


# --- The leader, with the test as the coordinator --------------------------------------------------------------------------


class Alone:
    """The only rank of the only replica; the test is the coordinator."""

    def __init__(self, coordinator: Partner, free: str) -> None:
        self.events: list[trace.Event] = []
        self.ended: list[int] = []
        self.endpoint, self.deadlines = FakeEndpoint([]), replace(Deadlines.of(), follow_s=0.05)
        context = RankContext(
            replica=0, rank=0, num_ranks=1, num_replicas=1, coordinator=coordinator.address, leader=free, run_dir="",
            started_at=0.0,
        )  # fmt: skip
        self.member = RankDriver(
            context, RecoverConfig(), self.endpoint, key=KEY, clock=NodeClock(None), record=self.events.append,
            end_process=lambda code: self.ended.append(int(code)), deadlines=self.deadlines,
        )  # fmt: skip
        joining = threading.Thread(target=lambda: self.member.join(Shape(1, ((0,),)), "print"))
        joining.start()
        coordinator.wait(lambda: coordinator.received)
        [hello] = coordinator.received
        assert isinstance(hello, LeaderHello)
        coordinator.received.clear()
        coordinator.send(Announcement(NewGeneration(1, (0,)), (hello.peer,), 0.0))
        coordinator.expect(Entered(0, 1, 0))
        joining.join(60)
        self.peer = hello.peer

    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


def test_a_leader_alone_commits_by_its_own_vote(partner: Partner, free: str) -> None:
    alone = Alone(partner, free)
    member = alone.member
    assert member.begin(Work("train 1", 2, (0,))) == 0
    plan = member.next_order()
    assert isinstance(plan, Plan) and plan.computes == (Compute((0, 1), (0,)),)
    member.transport(1)
    assert member.hold(Held(0, 1, 9))
    apply = member.next_order()
    assert isinstance(apply, Apply) and apply.record.versions == (BucketVersion(0, 1, (9,)),)
    assert alone.names() == ["Joined", "Entered", "Status", "Plan", "Voted", "Committed"]
    closing = threading.Thread(target=member.close)
    closing.start()
    partner.expect(ReplicaFinished(0, 0))
    partner.send(Stop(0, "training finished"))
    closing.join(60)
    assert not closing.is_alive()


def test_a_failing_computation_reaches_the_coordinator_before_raised_returns(partner: Partner, free: str) -> None:
    alone = Alone(partner, free)
    alone.member.begin(Work("train 1", 2, (0,)))
    alone.member.next_order()
    alone.member.failing((1,), ValueError("nan"))
    partner.expect(ReplicaFailing(0, "train 1", (1,), "ValueError: nan"))
    partner.send(Stop(11, "poisoned"))
    with pytest.raises(JobStopped, match="poisoned"):
        alone.member.close()


def test_an_exception_that_prints_its_data_reaches_the_coordinator_and_is_charged(partner: Partner, free: str) -> None:
    """Its message was larger than the coordinator takes: the link was closed, and the microbatch was dealt again and again."""
    alone = Alone(partner, free)
    alone.member.begin(Work("train 1", 2, (0,)))
    alone.member.next_order()
    alone.member.failing((1,), ValueError("x" * 5_000_000))
    partner.expect(ReplicaFailing(0, "train 1", (1,), "ValueError: " + "x" * (trace.MAX_REASON - len("ValueError: "))))
    partner.send(Stop(11, "poisoned"))
    with pytest.raises(JobStopped, match="poisoned"):
        alone.member.close()


def test_a_save_is_announced_and_said_to_be_over(partner: Partner, free: str) -> None:
    alone = Alone(partner, free)
    with alone.member.saving():
        partner.expect(ReplicaSaving(0, False))
    partner.expect(ReplicaSaving(0, True))
    partner.send(Stop(0, "over"))
    alone.member.close()


def test_a_save_that_ends_by_an_exception_is_not_said_to_be_over(partner: Partner, free: str) -> None:
    """The replica is about to end, which the others are to hear of instead."""
    alone = Alone(partner, free)
    with pytest.raises(OSError, match="a defect"), alone.member.saving():
        raise OSError("a defect")
    alone.member.failing((), OSError("a defect"))
    partner.wait(lambda: isinstance(partner.received[-1], ReplicaFailing) if partner.received else False)
    assert partner.received[:-1] == [ReplicaSaving(0, False)]
    partner.send(Stop(1, "over"))
    with pytest.raises(JobStopped):
        alone.member.close()


def trained(member: RankDriver, iteration: int) -> None:
    """The only rank of the only replica trains a step."""
    stepped(member, Work(f"train {iteration}", 2, (0,)))


def stepped(member: RankDriver, work: Work, digest: int | None = None) -> None:
    """It makes a step of any kind."""
    number = member.begin(work, digest=digest)
    plan = member.next_order()
    assert member.hold(Held(0, plan.generation, number))
    assert isinstance(member.next_order(), Apply)


def test_without_its_coordinator_a_replica_trains_on_names_checkpoints_and_ends_by_itself(partner: Partner, free: str) -> None:
    alone = Alone(partner, free)
    member = alone.member
    assert partner.link is not None
    partner.send(Grant(1, 1, 0))
    partner.wait(lambda: member._naming._holding.newest)
    assert "has lapsed" in member.naming_refusal() and not member.is_last_generation(), "no beat has come"
    partner.loop.drop(partner.link)
    partner.wait(lambda: member._leader is not None and member._leader._state.is_alone)
    trained(member, 1)
    assert member.is_last_generation() and member.requests == {coordinator_lost(0)}
    for _ in range(2):  # under the grant that was given ahead, which lasts now
        assert member.begin_naming() == ""
        assert "next grant" in member.naming_refusal()
        assert member.end_naming() == 1
    member.request(NO_COORDINATOR)
    trained(member, 2)
    waits = {}
    for label in ("save 2", "evaluate 2/1", "evaluate 2/2", "end 0", "end 1"):
        digest = None if label.startswith("evaluate") else 1
        stepped(member, Work(label, 0, (0,), digests=digest is not None), digest=digest)
        waits[label] = alone.endpoint.deadlines
    short, long = alone.deadlines, replace(alone.deadlines, slowest_s=1440.0)  # 0.8 of the deadline
    assert waits == {"save 2": short, "evaluate 2/1": long, "evaluate 2/2": short, "end 0": long, "end 1": long}
    with pytest.raises(JobStopped, match="training is over, and there is no coordinator") as stopped:
        member.close()
    assert stopped.value.exit_code == ExitCode.INTERRUPTED and not alone.ended


def test_a_coordinator_that_is_lost_before_training_ends_the_replica(partner: Partner, free: str) -> None:
    context = RankContext(
        replica=0, rank=0, num_ranks=1, num_replicas=1, coordinator=partner.address, leader=free, run_dir="", started_at=0.0
    )  # fmt: skip
    member = RankDriver(
        context, RecoverConfig(), FakeEndpoint([]), key=KEY, clock=NodeClock(None), record=lambda event: None,
        end_process=lambda code: None,
    )  # fmt: skip

    def joins() -> None:
        with contextlib.suppress(JobStopped):
            member.join(Shape(1, ((0,),)), "")

    joining = threading.Thread(target=joins)
    joining.start()
    partner.wait(lambda: partner.received)
    assert partner.link is not None
    partner.loop.drop(partner.link)
    joining.join(60)
    with pytest.raises(JobStopped, match="the coordinator is gone .* before training began"):
        member.close()


def test_a_grant_is_used_once_confirmed_and_renewed_by_the_answers_to_beats(partner: Partner, free: str) -> None:
    alone = Alone(partner, free)
    member = alone.member
    partner.send(Grant(1, 1, 0), Beat("host", 1, 1, 0, ()))
    partner.wait(lambda: not member.naming_refusal() and any(isinstance(each, LeaderBeat) for each in partner.received))
    partner.received.clear()
    assert member.begin_naming() == ""
    assert "next grant" in member.begin_naming()
    member.end_naming()
    member.end_naming()
    partner.expect(Named(0, 1))
    partner.send(Grant(1, 1, 0), Grant(2, 1, 0))
    partner.wait(lambda: not member.naming_refusal())
    partner.send(Stop(0, "over"))
    member.close()


def test_strangers_at_the_leaders_door_are_shown_out(partner: Partner, free: str, tmp_path: Path) -> None:
    import socket

    alone = Alone(partner, free)
    host, _, port = free.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):  # where it is closed before its words are read
            assert stranger.recv(1) == b""
    assert alone.member.begin(Work("train 1", 2, (0,))) == 0
    assert isinstance(alone.member.next_order(), Plan)
    partner.send(Stop(0, "over"))
    alone.member.close()
