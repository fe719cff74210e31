"""The coordinator's driver with leaders that the test plays: a leader speaks for the replica that it proved, for no other."""

from __future__ import annotations

import socket
import time
import typing
from collections.abc import Iterator

import pytest

from megatron_recover import trace
from megatron_recover.authentication import admission
from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.control_plane.calling import OutgoingLink
from megatron_recover.control_plane.coordinator_driver import CoordinatorDriver
from megatron_recover.control_plane.encoding import Peer
from megatron_recover.control_plane.leader_messages import Announcement, LeaderHello
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.wire import Message
from megatron_recover.core.coordinator import MembershipSettings
from megatron_recover.core.coordinator_state import Setting
from megatron_recover.core.membership_messages import Hello, Loss, LossKind, ReplicaBlocked
from megatron_recover.core.rank_messages import Stop
from tests.control_plane.partners import PATIENCE_S, call, gate_of

pytestmark = pytest.mark.timeout(240)
COORDINATOR = Party(Role.COORDINATOR)


class Town:
    """A coordinator of three replicas, and callers, in one loop."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.events: list[trace.Event] = []
        self.membership = CoordinatorDriver(
            MembershipSettings(num_replicas=3), loop=self.loop, timers_s=dict.fromkeys(SETTINGS, 60.0),
            record=self.events.append, fence=lambda replica: None, dismiss=lambda replica: None, form=lambda replica: None,
            on_end=self.ended,
        )  # fmt: skip
        self.gate, self.address = gate_of(self.membership, self.loop)
        self.closed: list[Party] = []
        self.heard: list[tuple[Party, Message]] = []
        self.heard_at_the_end: list[tuple[Party, Message]] | None = None

    def ended(self, code: int, reason: str) -> None:
        """What the leaders have heard when the nodes are told."""
        for _ in range(20):
            self.loop.run_once(0.01)
        self.heard_at_the_end = [*self.heard]

    def call(self, me: Party, said: Hello, peer: int | None = None) -> OutgoingLink:
        link = call(self.address, me, COORDINATOR, patience_s=0.05)
        self.loop.watch(link, lambda link, message: self.heard.append((me, message)), lambda link, why: self.closed.append(me))
        self.loop.send(link, LeaderHello(said, Peer(said.replica if peer is None else peer, "a:1", ("b",))))
        return link

    def announced(self) -> list[tuple[int, ...]]:
        """The roster that each leader was told."""
        return [message.new.roster for _, message in self.heard if isinstance(message, Announcement)]

    def turn(self, condition) -> None:  # noqa: ANN001
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"in vain: {self.heard} {self.closed}"
            self.loop.run_once(0.01)


SETTINGS = typing.get_args(Setting)


@pytest.fixture
def town() -> Iterator[Town]:
    made = Town()
    yield made
    made.gate.close()
    made.loop.close()


@pytest.mark.parametrize(
    ("me", "said", "peer"),
    [
        (Party(Role.LEADER, 99), Hello(99, "f"), None), (Party(Role.LEADER, 1), Hello(2, "f"), None),
        (Party(Role.LEADER, 1), Hello(1, "f"), 2), (Party(Role.LEADER, 1, 1), Hello(1, "f"), None),
        (Party(Role.RANK, 1), Hello(1, "f"), None),
    ],
    ids=["no replica of this job", "another's name", "another's address", "not its leader", "not a leader"],
)  # fmt: skip
def test_a_greeting_for_another_is_refused_and_the_right_ones_start_the_job(
    town: Town, me: Party, said: Hello, peer: int | None
) -> None:
    town.call(me, said, peer)
    town.turn(lambda: town.closed)
    links = [town.call(Party(Role.LEADER, replica), Hello(replica, "f")) for replica in range(3)]
    town.turn(lambda: len(town.announced()) == 3)
    assert set(town.announced()) == {(0, 1, 2)}
    assert all(link.proven for link in links) and town.closed == [me]


def test_a_request_of_a_generation_that_is_over_does_not_start_the_clock_of_the_next_recovery(town: Town) -> None:
    for replica in range(3):
        town.call(Party(Role.LEADER, replica), Hello(replica, "f"))
    town.turn(lambda: len(town.announced()) == 3)
    town.membership.lost(Loss(2, LossKind.PROCESS_ENDED))
    town.turn(lambda: len(town.announced()) == 5)
    town.membership._request(ReplicaBlocked(1, 1, "late"))
    time.sleep(0.3)
    town.membership.lost(Loss(1, LossKind.PROCESS_ENDED))
    town.turn(lambda: len(town.announced()) == 6)
    *_, (_, last) = town.heard
    assert isinstance(last, Announcement) and last.noticed_s < 0.2


def test_a_loss_that_makes_no_generation_does_not_start_the_clock_of_the_next_recovery(town: Town) -> None:
    """Such as that of a newcomer that is still formed, or one that is told twice."""
    for replica in range(3):
        town.call(Party(Role.LEADER, replica), Hello(replica, "f"))
    town.turn(lambda: len(town.announced()) == 3)
    town.membership.lost(Loss(2, LossKind.PROCESS_ENDED))
    town.turn(lambda: len(town.announced()) == 5)
    town.membership.lost(Loss(2, LossKind.PROCESS_ENDED))
    town.membership.node_lost((2,), "it is cut off")
    time.sleep(0.3)
    town.membership.lost(Loss(1, LossKind.PROCESS_ENDED))
    town.turn(lambda: len(town.announced()) == 6)
    *_, (_, last) = town.heard
    assert isinstance(last, Announcement) and last.noticed_s < 0.2


def test_a_lost_replica_is_not_told_that_training_has_ended(town: Town) -> None:
    """Its node may have been cut off: what comes through after the cut would end its ranks as if all steps were made."""
    for replica in range(3):
        town.call(Party(Role.LEADER, replica), Hello(replica, "f"))
    town.turn(lambda: len(town.announced()) == 3)
    town.membership.lost(Loss(2, LossKind.NODE_LOST))
    town.membership.end(0, "training finished")
    town.turn(lambda: sum(isinstance(message, Stop) for _, message in town.heard) == 2)
    for _ in range(20):
        town.loop.run_once(0.01)
    assert {party.replica for party, message in town.heard if isinstance(message, Stop)} == {0, 1}


def test_the_nodes_are_told_of_the_end_before_any_rank_can_end_by_it(town: Town) -> None:
    """A rank that ends before its agent knows that the job is over is counted as lost."""
    for replica in range(3):
        town.call(Party(Role.LEADER, replica), Hello(replica, "f"))
    town.turn(lambda: len(town.announced()) == 3)
    town.membership.end(11, "one microbatch has ended two replicas")
    town.turn(lambda: sum(isinstance(message, Stop) for _, message in town.heard) == 3)
    assert town.heard_at_the_end is not None
    assert not any(isinstance(message, Stop) for _, message in town.heard_at_the_end)


def test_a_coordinator_rests_from_strangers_once_the_job_has_started(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that it expects leaders, and accepts without a rest."""
    monkeypatch.setattr(admission, "REST_S", 1000.0)
    host, _, port = town.address.rpartition(":")

    def strangers_come() -> int:
        for _ in range(40):
            strangers.append(socket.create_connection((host, int(port))))
        before = len(town.gate.admission.unproven)
        for _ in range(20):
            town.loop.run_once(0.0)
        return len(town.gate.admission.unproven) - before

    strangers: list[socket.socket] = []
    assert strangers_come() == 40
    for replica in range(3):
        town.call(Party(Role.LEADER, replica), Hello(replica, "f"))
    town.turn(lambda: len(town.announced()) == 3)
    assert strangers_come() == admission.UNEXPECTED_AT_ONCE
    for each in strangers:
        each.close()
