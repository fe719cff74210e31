"""The driver of the replica machine (`core/replica.py`), which rank 0 runs as the leader.

The driver holds the leader's links and stall timer. It makes no decision of the protocol and
touches no tensor. All of it runs in rank 0's control thread.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import batched

import msgspec

from megatron_recover import trace
from megatron_recover.authentication.admission import recording_strangers
from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.config import RankContext, RecoverConfig
from megatron_recover.control_plane.beats import CoordinatorWatch
from megatron_recover.control_plane.calling import OutgoingLink
from megatron_recover.control_plane.claims import Claims
from megatron_recover.control_plane.encoding import Peer
from megatron_recover.control_plane.gate import Gate
from megatron_recover.control_plane.leader_messages import (
    Announcement,
    Beat,
    Enter,
    Heard,
    LeaderBeat,
    LeaderHello,
    PeerHello,
    RankHello,
    ReadFrom,
    Source,
    Sources,
)
from megatron_recover.control_plane.listening import LEADER, inherited_listener
from megatron_recover.control_plane.loop import Loop
from megatron_recover.control_plane.naming import NamingRight
from megatron_recover.control_plane.peer_links import PeerLinks
from megatron_recover.control_plane.protocol_events import ProtocolEvents
from megatron_recover.control_plane.timing import RecoveryClock
from megatron_recover.control_plane.wire import STATUSES_A_FRAME, Link, Message, encode, listen
from megatron_recover.core import replica as machine
from megatron_recover.core.alike import combined
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import (
    AddRequests,
    Diverged,
    Entered,
    Grant,
    Hello,
    JoinRefused,
    Miscounted,
    Named,
    ReplicaBlocked,
)
from megatron_recover.core.rank_messages import (
    Begun,
    Holds,
    Order,
    Plan,
    Promise,
    Promised,
    RankBlocked,
    RankFailing,
    RankFinished,
    Report,
    StateDigested,
    Stop,
)
from megatron_recover.core.replica_state import Admission, HoldAsked
from megatron_recover.core.values import Claim, Status, Statuses, Vote, Votes
from megatron_recover.deadlines import Deadlines
from megatron_recover.faults import FaultInjector, FaultPoint
from megatron_recover.trace.node_clock import NodeClock


def _parts(message: machine.PeerMessage) -> Iterator[machine.PeerMessage]:
    """Yield the message; `Statuses` come in parts of at most `STATUSES_A_FRAME` statuses."""
    if not isinstance(message, Statuses):
        yield message
        return
    for statuses in batched(message.statuses, STATUSES_A_FRAME):
        yield msgspec.structs.replace(message, statuses=statuses)


Deliver = Callable[[Message], None]
"""Delivers a message of the leader to the leader's own rank."""

_AGREED = (machine.ReplicaPhase.IDLE, machine.ReplicaPhase.WORKING, machine.ReplicaPhase.VOTED)


class ReplicaDriver:
    """Drives the machine of one replica."""

    def __init__(
        self,
        context: RankContext,
        config: RecoverConfig,
        own: RankHello,
        *,
        key: bytes,
        clock: NodeClock,
        loop: Loop,
        deliver: Deliver,
        fail: Callable[..., None],
        record: Callable[[trace.Event], None],
        faults: FaultInjector | None,
        deadlines: Deadlines,
        naming: NamingRight,
        refused: Callable[[JoinRefused], None] = lambda refused: None,
    ) -> None:
        """Listen at the replica's address (the inherited socket, if any); link to the coordinator.

        - `own`: the hello of rank 0; the other ranks send theirs as messages.
        - `key` is the job's; `clock` is that of this node.
        - `deliver(message)` delivers a message of the leader to rank 0.
        - `fail(reason)` or `fail(reason, exit_code)` ends rank 0, and so the replica.
        - `naming` is this replica's right to name checkpoints.
        - `refused(answer)`: the claim of this newcomer is refused.
        """
        self._context, self._deadlines, self._naming = context, deadlines, naming
        self._loop, self._deliver, self._fail, self._record, self._faults = loop, deliver, fail, record, faults
        self._claims = Claims(
            context.num_ranks, loop=loop, stall_s=deadlines.stall_s, state=lambda: self._state, feed=self._feed, refused=refused
        )
        self._state = machine.ReplicaState(context.replica, own.shape, config.tree_above, config.min_replicas)
        self._hellos: dict[int, RankHello] = {own.rank: own}
        self._ranks: dict[int, Link] = {}
        self._introduced_peers: set[int] = set()
        """Replicas whose addresses this replica's ranks have."""
        self._events = ProtocolEvents(context.replica, record)
        self.clock = RecoveryClock(context.replica, record)
        self._waiting: tuple[object, ...] = ()
        self._kept_since: float | None = None
        """Time since which the end of a pass is kept back; None: none is."""
        self._me = Party(Role.LEADER, context.replica)
        self._links = PeerLinks(
            context, tree_above=config.tree_above, key=key, clock=clock, loop=loop, deadlines=deadlines,
            received=self._from_peer, lost=self._link_lost,
        )  # fmt: skip
        listener = inherited_listener(LEADER, context.leader) or listen(context.leader)
        self._gate = Gate(
            loop, listener, key, Role.LEADER, self._admits, self._accept, clock=clock, expects=self._expects,
            report=recording_strangers(record, replica=context.replica, rank=own.rank),
        )  # fmt: skip
        self._coordinator = OutgoingLink(
            context.coordinator, key, self._me, Party(Role.COORDINATOR), clock=clock, patience_s=self._deadlines.leader_s
        )  # fmt: skip
        self._request: ReplicaBlocked | Diverged | Miscounted | None = None
        """The last request to the coordinator."""
        loop.watch(self._coordinator, self._from_coordinator, self._coordinator_lost)
        self._coordinator_watch = CoordinatorWatch(
            context.replica, loop=loop, deadlines=deadlines, answer=self._where, waits=self._needs_coordinator,
            lost=lambda is_lost: self._feed(machine.CoordinatorLost(is_over=not is_lost)),
            is_bound=lambda: self._state.is_last, record=record,
            give_up=lambda reason: fail(reason, ExitCode.NO_REPLICA_LEFT),
        )  # fmt: skip
        self._join_when_complete()

    def report(self, report: Report) -> None:
        """Feed the machine a report of one of this replica's ranks."""
        self._feed(report)

    def named(self, number: int) -> None:
        """Confirm to the coordinator that an attempt to name a checkpoint has ended."""
        self._loop.send(self._coordinator, Named(self._context.replica, number))

    def ask(self, member: int) -> None:
        """Have `member` vouch for this newcomer, once all its ranks have digested what they read.

        `refused` is called if it does not, or if the coordinator does not let the newcomer join.
        """
        self._claims.ask(member)

    def ask_hold(self, member: int, label: str) -> None:
        """Ask `member` to hold the step `label`, whose state is about to be read."""
        self._feed(machine.AskHold(member, label))

    def see_ranks_off(self) -> None:
        """Let the ranks read `Stop` and close their links, so that no link is reset before.

        Run the loop until all have, for at most `words_s`.
        """
        until = time.monotonic() + self._deadlines.words_s
        while self._ranks and (left := until - time.monotonic()) > 0:
            self._loop.run_once(left)

    def close(self) -> None:
        """Stop listening. The links belong to the loop."""
        self._gate.close()

    # --- Joining ---------------------------------------------------------------------------------

    def _admits(self, peer: Party, wanted: Party) -> bool:
        """Return whether `peer`, a rank of this replica or another leader, wants this leader."""
        if peer.role is Role.RANK:
            known = peer.replica == self._context.replica and 0 < peer.rank < self._context.num_ranks
        else:
            known = peer.role is Role.LEADER and peer.replica != self._context.replica and peer.rank == 0
        return known and wanted == self._me

    def _expects(self) -> bool:
        """Return whether a rank of this replica or a neighbour has not connected yet."""
        return len(self._hellos) < self._context.num_ranks or not self._links.are_complete()

    def _accept(self, link: Link, peer: Party) -> None:
        self._loop.watch(link, lambda link, message: self._introduced(peer, link, message), lambda link, why: None)

    def _introduced(self, proven: Party, link: Link, message: Message) -> None:
        """Handle a connection's first message, which must match the proven identity."""
        match message:
            case RankHello(rank=rank) if proven.role is Role.RANK and proven.rank == rank and rank not in self._hellos:
                self._hellos[rank] = message
                self._ranks[rank] = link
                self._loop.watch(
                    link,
                    lambda link, message: self._from_rank(rank, link, message),
                    lambda link, why: self._rank_lost(rank, why),
                )
                self._join_when_complete()
            case PeerHello(replica=peer, address=address) if proven.role is Role.LEADER and proven.replica == peer:
                if address:
                    self._links.listens_at(peer, address)
                self._links.accept(link, peer)
            case _:
                self._loop.drop(link)

    def _join_when_complete(self) -> None:
        if len(self._hellos) < self._context.num_ranks:
            return
        hellos = [self._hellos[rank] for rank in range(self._context.num_ranks)]
        if any(hello.shape != hellos[0].shape for hello in hellos):
            self._fail("the ranks of this replica do not agree on their buckets")
            return
        # Ranks differ (stages, shards), replicas do not: the fingerprint covers all ranks in order.
        fingerprint = hashlib.blake2b("\n".join(hello.fingerprint for hello in hellos).encode(), digest_size=16).hexdigest()
        replica = self._context.replica
        self._record(trace.Joined(replica=replica, fingerprint=fingerprint, bucket_ranks=hellos[0].shape.bucket_ranks))
        peer = Peer(replica, self._context.leader, tuple(hello.data_address for hello in hellos))
        parts, beginning = (
            combined(of_ranks) for of_ranks in zip(*((each.parts, each.beginning) for each in hellos), strict=True)
        )
        state_addresses = tuple(hello.state_address for hello in hellos)
        self._naming.greets()
        self._loop.send(
            self._coordinator,
            LeaderHello(Hello(replica, fingerprint, parts, beginning), peer, state_addresses if all(state_addresses) else ()),
        )

    # --- What arrives ----------------------------------------------------------------------------

    def _from_rank(self, rank: int, link: Link, message: Message) -> None:
        match message:
            case Begun() | Promised() | Holds() | RankBlocked() | RankFinished() | StateDigested() if message.rank == rank:
                self.report(message)
            case RankFailing() if message.rank == rank:
                self.report(message)
                self._loop.send(link, Heard())
            case _:
                other = f" of rank {named}" if (named := getattr(message, "rank", rank)) != rank else ""
                self._fail(f"rank {rank} of this replica sent a {type(message).__name__}{other}")

    def _rank_lost(self, rank: int, why: str) -> None:
        """End this rank after `follow_s`, unless the agent kills the replica before."""
        self._ranks.pop(rank, None)
        reason = f"rank {rank} of this replica is gone ({why})"
        if self._state.phase is not machine.ReplicaPhase.STOPPED:
            self._loop.after(self._deadlines.follow_s, lambda: self._fail(reason))

    def _from_coordinator(self, link: Link, message: Message) -> None:
        self._coordinator_watch.heard(message if isinstance(message, Beat) else None)
        match message:
            case Beat():
                self._naming.heard()
                self._loop.send(link, self._where())
            case Grant():
                self._naming.received(message, self._state.generation)
            case Announcement(new=new):
                self._links.announced(message.peers)
                self._links.keep_neighbours(new.roster, new.joins, self._state.roster)
                self.clock.announced(new.generation, message.noticed_s)
                self._feed(new)
            case AddRequests() | JoinRefused():
                self._feed(message)
            case Sources(sources=sources):
                for each in sources:
                    self._links.listens_at(each.replica, each.leader_address)
                self._order_to_read(sources)
            case Stop():
                self._coordinator_watch.stop()
                self._feed(message)
            case _:
                self._fail(f"the coordinator sent a {type(message).__name__}")

    def _coordinator_lost(self, link: Link, why: str) -> None:
        """Go on without the coordinator; before the first generation, end this replica."""
        if self._state.generation:
            self._coordinator_watch.link_lost(why)
        elif self._state.phase is not machine.ReplicaPhase.STOPPED:
            self._fail(f"the coordinator is gone ({why}) before training began")

    def _where(self) -> LeaderBeat:
        """Return this replica's generation, step, waits and unanswered request."""
        state, request = self._state, self._request
        is_open = state.blocked and request is not None and request.generation == state.generation
        return LeaderBeat(state.replica, state.generation, state.step, machine.waiting_for(state), request if is_open else None)

    def _needs_coordinator(self) -> str:
        """Return what this replica needs the coordinator for, or an empty string."""
        state = self._state
        if state.phase is machine.ReplicaPhase.STOPPED or len(self._hellos) < self._context.num_ranks:
            return ""
        if state.generation == 0:
            return "the first generation"
        if state.blocked and self._request is not None:
            return f"a new generation ({self._request.reason})"
        return "the end of the job" if len(state.ended) == state.shape.num_ranks else ""

    def _from_peer(self, peer: int, message: Message) -> bool:
        """Handle a message of another leader; return False if this one must not send it."""
        match message:
            case Status() | Statuses() | Vote() | Votes() | Admission() | HoldAsked() if message.replica == peer:
                self._feed(message)
            case Claim() if message.replica == peer:
                self._claims.received(message)
            case JoinRefused():
                self._events.refused(message, peer)
                self._feed(message)
            case _:
                return False
        return True

    def _link_lost(self, peer: int, why: str) -> None:
        """Feed the machine that a link to a leader broke. A claim on it counts as refused."""
        self._claims.forget(peer)
        self._feed(machine.LinkLost(peer, why))
        self._claims.link_lost(peer, why)

    # --- The machine -----------------------------------------------------------------------------

    def _feed(self, event: machine.Input) -> None:
        before = self._state
        self._state, effects = machine.step(self._state, event)
        if self._state.phase in _AGREED:  # before the ranks are told: they record what comes next
            self.clock.agreed(self._state.step, begun=self._state.phase is not machine.ReplicaPhase.IDLE)
        for effect in effects:
            self._carry_out(effect)
        if len(self._state.roster) < len(before.roster) and self._state.generation == before.generation:
            # Newcomers are turned away.
            self._links.keep_neighbours(self._state.roster, self._state.joins, before.roster)
        self._claims.fed(event, before)
        self._watch_for_a_stall()
        self._watch_the_hold(before)
        self._claims.answer()

    def _carry_out(self, effect: machine.Effect) -> None:
        match effect:
            case machine.ToRanks(order):
                self._order(order)
            case machine.ToPeers(peers, message):
                if isinstance(message, Status):
                    self._events.status(message)
                elif isinstance(message, Vote):
                    self._record_vote(message)
                if peers or len(self._state.roster) == 1:
                    self._send_to_peers(peers, message)
            case machine.ToCoordinator(message):
                if isinstance(message, Entered):
                    self._record(
                        trace.Entered(
                            replica=message.replica, generation=message.generation, seconds=self.clock.since_announced_s()
                        )  # fmt: skip
                    )
                elif isinstance(message, Diverged):
                    self._events.disagreement(message, self._state.work)
                if (
                    isinstance(message, ReplicaBlocked | Diverged | Miscounted)
                    and message.generation == self._state.generation  # late evidence belongs to an older one
                ):
                    self._request = message
                assert not isinstance(message, Hello), "it goes with the greeting"
                self._loop.send(self._coordinator, message)
            case machine.Decided():
                self._events.decided(effect)
            case machine.Voted():
                self._events.voted(effect)
            case machine.Committed(record, generation, adopted):
                self._events.committed(record, generation, adopted)
                self.clock.committed(generation, record.step)

    def _order(self, order: Order) -> None:
        if isinstance(order, Plan):
            self._events.plan(order)
        if isinstance(order, Promise):
            self._order_to_enter(order)
            return
        body = encode(order) if self._ranks else b""
        for rank in range(self._context.num_ranks):
            if rank == self._context.rank:
                self._deliver(order)
            elif rank in self._ranks:
                self._loop.put(self._ranks[rank], body)

    def _order_to_enter(self, order: Promise) -> None:
        """Send each rank the order to promise, with the addresses of new members."""
        fresh = [peer for peer in order.roster if peer not in self._introduced_peers]
        self._introduced_peers.update(fresh)
        self._tell_each_rank(lambda rank: Enter(order, tuple((peer, self._links.data_addresses(peer)[rank]) for peer in fresh)))

    def _tell_each_rank(self, message_to: Callable[[int], Message]) -> None:
        """Send each rank of this replica a message of its own."""
        for rank in range(self._context.num_ranks):
            if rank == self._context.rank:
                self._deliver(message_to(rank))
            elif rank in self._ranks:
                self._loop.send(self._ranks[rank], message_to(rank))

    def _order_to_read(self, sources: Sequence[Source]) -> None:
        """Tell each rank of this newcomer where to read state."""
        self._tell_each_rank(lambda rank: ReadFrom(tuple((each.replica, each.state_addresses[rank]) for each in sources)))

    def _record_vote(self, vote: Vote) -> None:
        if self._faults is not None:
            self._faults.at(FaultPoint.BEFORE_VOTE, step=vote.step)
        self._events.vote(vote)
        self.clock.voted(vote.generation)

    def _send_to_peers(self, peers: tuple[int, ...], message: machine.PeerMessage) -> None:
        """Send to all `peers`, with a fault point after the first: some have the message then."""
        if isinstance(message, Claim | JoinRefused | Admission | HoldAsked):
            for other in peers:
                if isinstance(message, Claim):
                    self._events.claim(other, message)
                self._links.send(other, [encode(message)])
            return
        match message:
            case Status() | Statuses():
                said = message.statuses if isinstance(message, Statuses) else (message,)
                [step] = [status.step for status in said if status.replica == self._context.replica]
                point, last = FaultPoint.STATUS, None
            case Vote(step=step) | Votes(step=step):
                point, last = FaultPoint.IN_VOTE, FaultPoint.AFTER_VOTE
        bodies = [encode(part) for part in _parts(message)] if peers else []
        for index, peer in enumerate(peers or (None,)):
            if peer is not None:
                self._links.send(peer, bodies)
            if index == 0 and self._faults is not None:
                self._faults.at(point, step=step)
        if last is not None and self._faults is not None:
            self._faults.at(last, step=step)

    # --- Waits (INV-8) ---------------------------------------------------------------------------

    def _watch_for_a_stall(self) -> None:
        """Request a new generation when a wait for other members has lasted for `stall_s`.

        Note [One wait]. A wait for statuses, or for votes, has one deadline, counted from its
        start. Messages do not extend it: a wait for many members could last many times as long
        (INV-8). On entering the next generation each member names the members that it waited for.
        In a row of waits only the last is at fault (`core/blame.py`, Note [Rule]). Blame has no
        consequence before `blame_s` without a committed step; a commit clears it.
        """
        state = self._state
        now = (state.phase, state.generation, state.step) if machine.waiting_for(state) else ()
        if now == self._waiting:
            return
        self._waiting = now
        if now:
            self._loop.after(self._deadlines.stall_s, lambda: self._stalled(now))

    def _stalled(self, waiting: tuple[object, ...]) -> None:
        # Compared by identity: the same wait may have ended and begun again since.
        if self._waiting is waiting:
            self._waiting = ()
            self._feed(machine.WaitExpired(self._state.generation, self._state.step))

    def _watch_the_hold(self, before: machine.ReplicaState) -> None:
        """End a hold that has kept `Close` back for `hold_s`. Record a hold that is over.

        `before` is the state before the newest input. A step is held once, so its label is enough
        to tell an old timer.
        """
        old, new = machine.held_label(before), machine.held_label(self._state)
        if self._state.close_waits and not before.close_waits:  # until now the hold has cost nothing
            self._kept_since = time.monotonic()
            self._loop.after(self._deadlines.hold_s, lambda: self._feed(machine.HoldExpired(new)))
        if old and not new and before.hold is not None:
            kept_s = time.monotonic() - self._kept_since if self._kept_since is not None else 0.0
            self._kept_since = None
            self._events.held(before.hold, kept_s)
