"""Explore who may name a checkpoint: every order of what can happen to a few writers (INV-6).

The coordinator's machine and both sides of `core/grants.py` are the production code. The replicas
around them are reduced to what matters for a name:

- A replica is in a generation, and knows the newest iteration that its members agreed to save. A
  save is agreed only while all members of the generation are alive in that generation.
- The writer of its generation checks its right (`check`), and later renames the tracker (`rename`).
  Between both it may be frozen for any time, and so may every message.
- A lease lapses at the holder at any time after the coordinator has ceased to send beats to it. The
  coordinator's timer runs out only after that (Note [Lease] in `core/grants.py`).
- A replica may lose the coordinator, also if the coordinator lives. From its next vote on it enters
  no newer generation. The writer of the last generation may name again under its newest grant.

`NamingScenario.locks` says whether the folder's lock works between the writers. If it does not, a
writer that begins to name removes the unfinished trackers of all others (`tracker_file.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from megatron_recover.core import coordinator, grants
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.membership_messages import Grant, Hello, Loss, LossKind, Named, NewGeneration
from megatron_recover.core.request import coordinator_lost
from megatron_recover.core.values import ReplicaId, Value

LEASE_S = 1.0


class NamingScenario(Value, frozen=True):
    """The size of a job, and what may happen to it."""

    replicas: int = 3
    saves: int = 2
    """Saves that may be agreed."""
    deaths: int = 0
    """Replicas that die."""
    cuts: int = 0
    """Replicas that are removed although they live, and cannot be killed."""
    blind: int = 0
    """Replicas that lose the coordinator, which may live or not."""
    coordinator_dies: bool = False
    locks: bool = True
    """True if the lock of the folder works between all writers."""


class Writer(NamedTuple):
    """A replica, as far as names depend on it."""

    alive: bool = True
    generation: int = 0
    roster: tuple[ReplicaId, ...] = ()
    agreed: int = 0
    """The newest save that its members have agreed on; 0: none."""
    holding: grants.Holding = grants.Holding(0.0, 0.0)
    lapsed: bool = False
    """True after its lease has lapsed, for good."""
    blind: bool = False
    """True if it has no coordinator."""
    bound: bool = False
    """True once it has voted without a coordinator: it enters no newer generation."""
    requests: tuple[str, ...] = ()
    """Requests of all records that it has committed."""
    naming: int = 0
    """The save that it has checked its right for and not renamed yet; 0: none."""


class World(NamedTuple):
    """A state of the whole job."""

    coordinator: coordinator.CoordinatorState
    writers: tuple[Writer, ...]
    mail: tuple[tuple[NewGeneration | Grant, ...], ...]
    """Messages of the coordinator on their way to each replica, oldest first."""
    named: tuple[Named, ...]
    """Confirmations on their way to the coordinator."""
    latest: int
    """The save that the tracker names; 0: none."""
    agreed: int
    """Saves that were agreed."""
    deaths: int
    cuts: int
    blind: int
    is_over: bool
    """True if the coordinator is dead."""


class Naming:
    """The reachable states of a scenario. Tests override methods to plant bugs."""

    def __init__(self, scenario: NamingScenario) -> None:
        self.scenario = scenario

    def run(self, limit: int = 2_000_000) -> int:
        """Explore every state and return their number.

        Raise InvariantViolation at the first violation, and MemoryError beyond `limit` states.
        """
        first = self.initial()
        seen = {first}
        waiting = deque([first])
        while waiting:
            for after in self.steps(waiting.popleft()):
                if after not in seen:
                    self.judge(after)
                    seen.add(after)
                    waiting.append(after)
            if len(seen) > limit:
                raise MemoryError(f"more than {limit} states")
        return len(seen)

    def initial(self) -> World:
        """Return the state in which generation 1 is announced."""
        scenario = self.scenario
        count = scenario.replicas
        world = World(
            coordinator.CoordinatorState(coordinator.MembershipSettings(count)), (Writer(),) * count, ((),) * count, (),
            0, 0, scenario.deaths, scenario.cuts, scenario.blind, False,
        )  # fmt: skip
        for number in range(count):
            world = self.feed(world, Hello(number, "same"))
        return world

    def feed(self, world: World, message: coordinator.Input) -> World:
        """Return the world after an input of the coordinator; unchanged if it is dead."""
        if world.is_over:
            return world
        state, effects = coordinator.step(world.coordinator, message)
        mail = list(world.mail)
        for effect in effects:
            if isinstance(effect, coordinator.Announce):
                for number in effect.generation.roster:
                    mail[number] = (*mail[number], effect.generation)
            elif isinstance(effect, coordinator.Give):
                mail[effect.grant.writer] = (*mail[effect.grant.writer], effect.grant)
        return world._replace(coordinator=state, mail=tuple(mail))

    def may_name(self, writer: Writer) -> bool:
        """Return whether a replica may begin to name a checkpoint now."""
        is_last = grants.is_last_generation(writer.requests, writer.roster)
        now = 2 * LEASE_S if writer.lapsed else 0.0
        return not grants.refusal(writer.holding, now, LEASE_S, is_last=is_last)

    def judge(self, world: World) -> None:
        """Raise InvariantViolation if two replicas may name a checkpoint at the same time."""
        able = [number for number, one in enumerate(world.writers) if one.alive and self.may_name(one)]
        if len(able) > 1:
            raise InvariantViolation(6, f"replicas {able} may name a checkpoint at the same time")

    # --- what can happen ---

    def steps(self, world: World) -> Iterator[World]:
        """Yield every state that can follow."""
        for number, writer in enumerate(world.writers):
            if writer.alive:
                yield from self.of_replica(world, number, writer)
        yield from self.of_coordinator(world)
        yield from self.agreements(world)
        yield from self.faults(world)

    def put(self, world: World, number: ReplicaId, writer: Writer) -> World:
        """Return the world with another state of a replica."""
        return world._replace(writers=(*world.writers[:number], writer, *world.writers[number + 1 :]))

    def of_replica(self, world: World, number: ReplicaId, writer: Writer) -> Iterator[World]:
        """Yield what a living replica can do: read a message, check, rename."""
        if world.mail[number]:
            message, *rest = world.mail[number]
            read = world._replace(mail=(*world.mail[:number], tuple(rest), *world.mail[number + 1 :]))
            yield self.put(read, number, self.received(writer, number, message))
        if writer.naming:
            yield self.renamed(world, number, writer)
            return
        is_writer = writer.roster and grants.writer_of(writer.roster) == number
        is_newer = world.latest < writer.agreed
        if is_writer and writer.agreed and self.may_name(writer) and is_newer and not self.is_locked(world):
            began = writer._replace(holding=self.begun(writer.holding), naming=writer.agreed)
            if not self.scenario.locks:
                world = self.excluded(world)
            yield self.put(world, number, began)

    def received(self, writer: Writer, number: ReplicaId, message: NewGeneration | Grant) -> Writer:
        """Return a replica after it has read a message of the coordinator."""
        if isinstance(message, Grant):
            return writer._replace(holding=grants.received(writer.holding, message, writer.generation))
        if self.is_bound(writer):
            return writer
        return writer._replace(generation=message.generation, roster=message.roster)

    def is_bound(self, writer: Writer) -> bool:
        """Return whether a replica enters no newer generation."""
        return writer.bound

    def begun(self, holding: grants.Holding) -> grants.Holding:
        """Return the holding after an attempt has begun."""
        return grants.begun(holding)

    def is_locked(self, world: World) -> bool:
        """Return whether another writer holds the lock of the folder."""
        return self.scenario.locks and any(one.alive and one.naming for one in world.writers)

    def excluded(self, world: World) -> World:
        """Return the world without the unfinished trackers of all writers; their renames fail."""
        gone = (one._replace(naming=-1) if one.naming > 0 else one for one in world.writers)
        return world._replace(writers=tuple(gone))

    def renamed(self, world: World, number: ReplicaId, writer: Writer) -> World:
        """Return the world after the rename of a replica, which then confirms its attempt.

        Raise InvariantViolation if the tracker moves back.
        """
        attempt = writer.holding.attempt
        assert attempt is not None
        if 0 < writer.naming < world.latest:
            raise InvariantViolation(6, f"replica {number} moves latest from save {world.latest} back to {writer.naming}")
        world = world._replace(latest=writer.naming if writer.naming > 0 else world.latest)
        if not world.is_over:  # one without a coordinator also confirms: the link may work in one direction
            world = world._replace(named=(*world.named, Named(number, attempt.number)))
        return self.put(world, number, writer._replace(naming=0, holding=grants.attempted(writer.holding)))

    def of_coordinator(self, world: World) -> Iterator[World]:
        """Yield what can reach the coordinator."""
        if world.is_over:
            return
        state = world.coordinator
        for index, named in enumerate(world.named):
            yield self.feed(world._replace(named=(*world.named[:index], *world.named[index + 1 :])), named)
        lost = {loss.replica for loss in state.losses}
        grant = state.grants.open
        for number in lost:
            writer = world.writers[number]
            if not writer.alive:  # it need not hold the grant
                yield self.feed(world, coordinator.FenceConfirmed(number))
            if writer.alive and not writer.lapsed:
                yield self.put(world, number, writer._replace(lapsed=True))
        if grant is not None and grant.writer in lost and self.is_lapsed(world.writers[grant.writer]):
            yield self.feed(world, coordinator.TimerFired(state.grants.lease))
        for older in range(1, state.grants.num_given):  # a grant may end before its timer does
            yield self.feed(world, coordinator.TimerFired(f"lease {older}"))

    def is_lapsed(self, writer: Writer) -> bool:
        """Return whether the coordinator's timer of a lease may have run out."""
        return not writer.alive or writer.lapsed

    def agreements(self, world: World) -> Iterator[World]:
        """Yield the save on which the members of a generation agree, for each generation."""
        if world.agreed == self.scenario.saves:
            return
        for generation in {one.generation for one in world.writers if one.alive} - {0}:
            roster = next(one.roster for one in world.writers if one.alive and one.generation == generation)
            members = [world.writers[number] for number in roster]
            if not all(one.alive and one.generation == generation for one in members):
                continue
            said = {coordinator_lost(number) for number in roster if world.writers[number].blind}
            requests = tuple(sorted(said.union(*(one.requests for one in members))))
            after = world._replace(agreed=world.agreed + 1)
            for number in roster:
                one = after.writers[number]
                bound = one.bound or one.blind
                after = self.put(after, number, one._replace(agreed=after.agreed, requests=requests, bound=bound))
            yield after

    def faults(self, world: World) -> Iterator[World]:
        """Yield every fault that may still happen."""
        state = world.coordinator
        for number in state.roster:
            lost = coordinator.ReplicaLost(Loss(number, LossKind.PROCESS_ENDED))
            writer = world.writers[number]
            if world.deaths and writer.alive:
                dead = self.put(world, number, writer._replace(alive=False, naming=0))
                yield self.feed(dead._replace(deaths=world.deaths - 1), lost)
            if world.cuts and not world.is_over:
                yield self.feed(world._replace(cuts=world.cuts - 1), lost)
            if (world.blind or world.is_over) and writer.alive and writer.generation and not writer.blind:
                left = world.blind if world.is_over else world.blind - 1
                yield self.put(world._replace(blind=left), number, writer._replace(blind=True))
        if self.scenario.coordinator_dies and not world.is_over:
            yield world._replace(is_over=True, named=())


NAMING: tuple[NamingScenario, ...] = (
    NamingScenario(deaths=2),
    NamingScenario(cuts=1, deaths=1),
    NamingScenario(cuts=2),
    NamingScenario(cuts=1, locks=False),
    NamingScenario(replicas=2, cuts=1, deaths=1, locks=False),
    NamingScenario(replicas=2, cuts=1, blind=2),
    NamingScenario(replicas=2, cuts=1, blind=2, locks=False),
    NamingScenario(replicas=2, saves=4, cuts=1, blind=2),
    NamingScenario(cuts=1, blind=3),
    NamingScenario(saves=3, cuts=1, blind=2, locks=False),
    NamingScenario(replicas=2, saves=3, deaths=1, blind=2),
    NamingScenario(replicas=2, deaths=1, coordinator_dies=True),
    NamingScenario(replicas=2, saves=5, coordinator_dies=True),
    NamingScenario(cuts=1, coordinator_dies=True, locks=False),
)
"""The scenarios that the tests explore."""
