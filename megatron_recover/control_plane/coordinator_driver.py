"""The driver of the coordinator machine (`core/coordinator.py`): its links, timers and addresses.

The machine decides which replicas are in the job. The driver reaches their leaders. It keeps what
the core does not know, such as the addresses of every replica's ranks, and since when something has
been wrong.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

from megatron_recover import trace
from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.control_plane import membership_events
from megatron_recover.control_plane.beats import LeaderWatch
from megatron_recover.control_plane.encoding import Peer
from megatron_recover.control_plane.leader_messages import Announcement, Beat, LeaderBeat, LeaderHello, Source, Sources
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.wire import Link, Message, encode
from megatron_recover.core import coordinator as machine
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.joining import MAX_SOURCES, older
from megatron_recover.core.membership_messages import (
    AddRequests,
    Diverged,
    Entered,
    Loss,
    LossKind,
    Miscounted,
    Named,
    NewcomerReady,
    NewcomersProven,
    NewGeneration,
    ReplicaBlocked,
    ReplicaFailing,
    ReplicaFinished,
    ReplicaLeaving,
    ReplicaSaving,
    TurnedAway,
)
from megatron_recover.core.rank_messages import Stop
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.addresses import host_name


def announcements(
    new: NewGeneration, peers: Mapping[int, Peer], announced: Collection[int], noticed_s: float
) -> Iterator[tuple[int, bytes]]:
    """Yield (replica, encoded message) for each leader of the roster. At most two are different.

    `announced` has the replicas of earlier rosters. Their leaders need the addresses of the new
    replicas only. The leader of a new replica needs the addresses of all.
    """
    fresh = tuple(peers[replica] for replica in new.roster if replica not in announced)
    to_old = encode(Announcement(new, fresh, noticed_s)) if announced else b""
    to_new = encode(Announcement(new, tuple(peers[replica] for replica in new.roster), noticed_s)) if fresh else b""
    for replica in new.roster:
        yield replica, to_old if replica in announced else to_new


class CoordinatorDriver:
    """Drives the one coordinator of a run. Everything runs in the loop's thread."""

    def __init__(
        self,
        policy: machine.MembershipSettings,
        *,
        loop: Loop,
        timers_s: Mapping[machine.Setting, float],
        record: Callable[[trace.Event], None],
        fence: Callable[[int], None],
        dismiss: Callable[[int], None],
        form: Callable[[int], None],
        on_end: Callable[[int, str], None],
        on_generation: Callable[[NewGeneration], None] = lambda new: None,
        on_turned_away: Callable[[int], None] = lambda newcomer: None,
        deadlines: Deadlines | None = None,
    ) -> None:
        """Wait for leaders; `accept` takes their links.

        - `timers_s` has the seconds of every `core.coordinator.Setting`.
        - `fence(replica)` begins to kill a replica.
        - `dismiss(replica)` notes that the replica leaves: its ranks end, which is no loss, or are
          killed.
        - `form(replica)` begins to start the ranks of a newcomer.
        - `on_end(exit_code, reason)` is called once, before the leaders are sent `Stop`. An
          agent could otherwise see a rank end by it, and count it as lost, before it knows.
        - `on_generation(new)` is called after the leaders were sent a new generation.
        - `on_turned_away(newcomer)` is called for one that was announced and is not admitted.
        """
        self._loop, self._timers_s, self._record, self._on_end = loop, timers_s, record, on_end
        self._fence, self._dismiss, self._form = fence, dismiss, form
        self._on_generation, self._on_turned_away = on_generation, on_turned_away
        self._state = machine.CoordinatorState(policy)
        self._peers: dict[int, Peer] = {}
        self._links: dict[int, Link] = {}
        self._state_addresses: dict[int, tuple[str, ...]] = {}
        """Replica -> where newcomers read the state of its ranks; empty if they cannot."""
        self._forms_for: tuple[tuple[int, ...], str] = ((), "")
        """For the trace: `in_place_of` and `reason` of the newest `ask_form`."""
        self._announced: set[int] = set()
        """Replicas that were in a roster; the leaders of that roster have their addresses."""
        self._noticed: float | None = None
        self._leaders = LeaderWatch(loop=loop, deadlines=deadlines or Deadlines.of(), beat=self._beat, record=record)
        self._asked: dict[int, int] = {}
        """Replica -> newest generation in which its leader made a request. The leader's answer to a
        beat repeats a request that may have been lost."""

    @property
    def generation(self) -> int:
        """Return the newest generation; 0 before the first."""
        return self._state.generation

    @property
    def num_expected(self) -> int:
        """Return how many leaders have not connected yet: at least one before the first generation.

        After that only those of newcomers are expected.
        """
        if self._state.generation:
            return len(set(self._state.forming) - self._links.keys())
        return max(1, self._state.policy.num_replicas - len(self._links))

    @property
    def progress(self) -> tuple[int, tuple[int, ...], int]:
        """Return the generation, its roster, and the number of committed steps."""
        return self._state.generation, self._state.roster, self._state.step

    @property
    def state(self) -> machine.CoordinatorState:
        """Return what the machine knows."""
        return self._state

    def lost(self, loss: Loss) -> None:
        """Feed the machine the loss of a replica. The same replica may be reported twice."""
        self._notice_loss(loss.replica)
        self._step(machine.ReplicaLost(loss))

    def node_lost(self, replicas: tuple[int, ...], detail: str) -> None:
        """Feed the machine the loss of a node, with all replicas that have a rank there, at once.

        `detail` names the node, and what shows that it is lost.
        """
        self._notice_loss(*replicas)
        self._step(machine.NodeLost(replicas, detail))

    def fence_confirmed(self, replica: int) -> None:
        """Feed the machine that the agents saw the end of every process of a fenced replica."""
        self._step(machine.FenceConfirmed(replica))

    def failing(self, failing: ReplicaFailing) -> None:
        """Feed the machine the microbatches that the agent found in work (a crash or a hang).

        Call it before `lost`: that loss is charged to them.
        """
        self._step(failing)

    def at_work(self, replicas: tuple[int, ...]) -> None:
        """Feed the machine the replicas that have work of their own, by their progress pages."""
        self._step(machine.AtWork(replicas))

    def end(self, exit_code: int, reason: str) -> None:
        """End the job for a reason that the machine does not know; later inputs have no effect."""
        self._state = msgspec.structs.replace(self._state, over=True)
        self._end(exit_code, reason)

    def ask_exit(self, reason: str) -> None:
        """Have all replicas end after a common step; before generation 1, end the run.

        The replicas save a checkpoint only if `--save` is set.
        """
        self._notice()
        self._step(machine.ExitAsked(reason))

    def ask_leave(self, replicas: tuple[int, ...], reason: str) -> dict[int, str]:
        """Have these replicas leave the job after a common step, while the others go on.

        Returns why each replica that will not leave does not; all others will, unless a loss makes
        them indispensable before.
        """
        effects = self._step(machine.LeaveAsked(replicas, reason))
        judged = next((effect for effect in effects if isinstance(effect, machine.LeaveJudged)), None)
        if judged is None:
            return dict.fromkeys(replicas, "the run has ended")
        return {refusal.replica: refusal.why for refusal in judged.refused}

    def ask_form(self, num_newcomers: int, in_place_of: tuple[int, ...] = (), reason: str = "") -> None:
        """Have newcomers formed, under ids that were never used; see `form`.

        For the trace: the replicas whose slots they get, and the reason, which may be empty.
        """
        self._forms_for = in_place_of, reason
        self._step(machine.FormAsked(num_newcomers))

    def know_room(self, has_room: bool) -> None:
        """Tell the machine whether newcomers can be formed where replicas are missing."""
        if has_room != self._state.has_room:
            self._step(machine.RoomKnown(has_room))

    def launched(self) -> None:
        """Note that the processes of all replicas were started."""
        self._step(machine.Launched())

    # --- From the leaders ------------------------------------------------------------------------

    def admits(self, peer: Party) -> bool:
        """Return whether `peer` is a leader of this job."""
        # The ids of newcomers follow those of the start.
        num_ids = self._state.policy.num_replicas + self._state.num_newcomers
        return peer.role is Role.LEADER and peer.replica < num_ids and peer.rank == 0

    def accept(self, link: Link, peer: Party) -> None:
        """Take the link of a leader that `admits` has admitted."""
        self._loop.watch(
            link, lambda link, message: self._introduced(peer.replica, link, message), lambda link, why: None
        )  # fmt: skip

    def _introduced(self, replica: int, link: Link, message: Message) -> None:
        """Handle a leader's first message, the `LeaderHello` of the replica that it has proven.

        Drop the link if the message is another, or if that replica has a link already.
        """
        if (
            not isinstance(message, LeaderHello)
            or not message.hello.replica == message.peer.replica == replica
            or replica in self._links
        ):
            self._loop.drop(link)
            return
        self._peers[replica], self._links[replica] = message.peer, link
        # A broken link proves nothing: the agent sees whether the process lives.
        self._loop.watch(link, lambda link, message: self._from_leader(replica, link, message), lambda link, why: None)
        self._leaders.watch(replica, link)
        self._state_addresses[replica] = message.state_addresses
        self._step(message.hello)
        self._tell_sources(replica)

    def _tell_sources(self, newcomer: int) -> None:
        """Tell a newcomer that is formed from which members it may read state."""
        state = self._state
        if newcomer not in state.forming or newcomer not in self._links:
            return
        members = [each for each in older(state.roster, state.joins) if self._state_addresses[each]]
        first = newcomer % max(1, len(members))  # newcomers begin at different members
        chosen = (*members[first:], *members[:first])[:MAX_SOURCES]
        sources = tuple(Source(each, self._peers[each].leader_address, self._state_addresses[each]) for each in chosen)
        self._loop.send(self._links[newcomer], Sources(state.generation, sources))

    def _from_leader(self, replica: int, link: Link, message: Message) -> None:
        match message:
            case ReplicaBlocked() | Diverged() | Miscounted() if message.replica == replica:
                self._request(message)
            case LeaderBeat() if message.replica == replica:
                self._leaders.answered(message)
                self._step(machine.Progressed(replica, message.step))
                if message.request is not None and message.request.replica == replica:
                    self._request(message.request)
            case ReplicaLeaving() if message.replica == replica:
                self._notice()
                self._step(message)
            case Entered() | ReplicaSaving() | ReplicaFailing() | ReplicaFinished() | Named() if message.replica == replica:
                self._step(message)
            case NewcomerReady() | TurnedAway() | NewcomersProven() if message.replica == replica:
                self._step(message)
            case _:
                self._loop.drop(link)
                kind = type(message).__name__
                self.lost(Loss(replica, LossKind.SUSPECTED, f"its leader sent a {kind} to the coordinator"))

    def _request(self, message: ReplicaBlocked | Diverged | Miscounted) -> None:
        """Feed the machine a request. The leader may repeat it, and the machine acts on it once."""
        if self._asked.get(message.replica, 0) < message.generation:
            self._asked[message.replica] = message.generation
            if message.generation == self._state.generation:  # an older one was answered meanwhile
                self._notice()
        self._step(message)

    def _beat(self) -> Beat:
        """Return the beat that all leaders are sent now."""
        state = self._state
        missing = state.roster if state.generation else range(state.policy.num_replicas)
        here = frozenset(state.entered if state.generation else (hello.replica for hello in state.hellos))
        return Beat(host_name(), os.getpid(), state.generation, state.step, tuple(each for each in missing if each not in here))

    # --- The machine -----------------------------------------------------------------------------

    def _notice(self) -> None:
        if self._noticed is None:
            self._noticed = time.monotonic()

    def _notice_loss(self, *replicas: int) -> None:
        """Notice the loss of a member. No generation follows that of others, or one told twice."""
        if not {*replicas}.isdisjoint(self._state.roster):
            self._notice()

    def _step(self, event: machine.Input) -> tuple[machine.Effect, ...]:
        before = self._state
        self._state, effects = machine.step(before, event)
        for judged in membership_events.judgements(before, self._state, event):
            self._record(judged)
        for lost in membership_events.lost_outside(before, self._state):
            self._record(lost)
        for effect in effects:
            match effect:
                case machine.Announce(new):
                    self._announce(new)
                case machine.Fence(replica):
                    self._leaders.forget(replica)
                    self._fence(replica)
                case machine.Form(replica):
                    in_place_of, reason = self._forms_for
                    self._record(trace.Forming(newcomer=replica, in_place_of=in_place_of, reason=reason))
                    self._form(replica)
                case machine.Refuse(refused, member):
                    if refused.generation:  # it was announced, and may miss what is announced meanwhile
                        self._announced.discard(refused.newcomer)
                        self._on_turned_away(refused.newcomer)
                    for recorded in membership_events.refusal(refused):
                        self._record(recorded)
                    self._loop.send(self._links[refused.newcomer], refused)
                    if member is not None:
                        self._loop.send(self._links[member], refused)
                    self._tell_sources(refused.newcomer)
                case machine.Ask(replica, requests):
                    self._loop.send(self._links[replica], AddRequests(requests))
                case machine.LeaveJudged(replicas, refused, reason):
                    self._record(
                        trace.LeaveAsked(
                            replicas=replicas,
                            reason=reason,
                            refused=tuple(trace.Refused(replica=each.replica, why=each.why) for each in refused),
                        )  # fmt: skip
                    )
                case machine.Dismiss(replica):
                    self._leaders.forget(replica)
                    self._dismiss(replica)
                    self._loop.send(self._links[replica], Stop(int(ExitCode.OK), "it leaves the job"))
                case machine.Arm(timer, setting):
                    self._arm(timer, self._timers_s[setting])
                case machine.Give(grant):
                    self._record(trace.Granted(number=grant.number, generation=grant.generation, writer=grant.writer))
                    self._loop.send(self._links[grant.writer], grant)
                case machine.Waits(replicas, reason, limit):
                    limit_s = self._timers_s[limit] if limit is not None else None
                    self._record(trace.Waiting(replicas=replicas, reason=reason, limit_s=limit_s))
                case machine.EndJob(exit_code, reason):
                    self._end(exit_code, reason)
        return effects

    def _announce(self, new: NewGeneration) -> None:
        noticed_s = time.monotonic() - self._noticed if self._noticed is not None else 0.0
        self._noticed = None
        self._record(membership_events.generation(new))
        for replica, body in announcements(new, self._peers, self._announced, noticed_s):
            self._loop.put(self._links[replica], body)
        self._announced |= set(new.roster)
        for newcomer in self._state.forming:
            self._tell_sources(newcomer)
        self._on_generation(new)

    def _arm(self, timer: str, seconds: float) -> None:
        def fire() -> None:
            self._step(machine.TimerFired(timer))

        self._loop.after(seconds, fire)

    def _end(self, exit_code: int, reason: str) -> None:
        if exit_code != ExitCode.OK:
            self._record(trace.Stopping(exit_code=exit_code, reason=reason))
        self._on_end(exit_code, reason)
        lost = {loss.replica for loss in self._state.losses}
        for replica, link in self._links.items():
            if replica not in lost:  # its node may be cut off, and would take this for the end of training there
                self._loop.send(link, Stop(exit_code, reason))
        self._leaders.stop()
