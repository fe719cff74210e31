"""Moves from a state of a small job: every order of messages, every step of a node, every fault.

Moves that are left out
-----------------------
Each one is another order of independent steps, or another outcome covers it. The first and the two
last items are always left out. `reduced=False` tries those of the others, and a test compares the
two.

* Inside a node: `sim/explore/node.py`.
* Generations come in layers: after an announcement, members of older generations only enter the new
  one. Their steps before entering read no message of the new generation, so these steps can as well
  have happened before the announcement. With `links` this does not hold: there, messages of a
  generation may arrive before its announcement. Nor does it hold once the coordinator is dead: what
  a member votes then differs. Nor does it hold with newcomers and `alarms`: a newcomer goes because
  of a request that came before it was proven, and its members may commit steps since.
* A vote or status that the receiver only stores, because it still lacks those of two or more
  members, is delivered at once. Such a message has no effect before the last one arrives, and the
  last one may still be lost. A new generation discards it, delivered or not. In a tree the delivery
  may also make the node forward what it has: one more message, which nobody has to receive. With
  `links` such a message waits for its turn on its link.
* A hold expires only once it keeps the end of a pass back. Before that, a hold that stands and one
  that has expired differ in nothing that another replica sees.
* A node that no new generation can reach takes its steps at once. Such a node is not in the newest
  roster, or it has entered the newest generation and nothing is left that could lead to another
  one: no fault, save, drift, miscount, member that is to leave or stopped coordinator, and no
  operation that takes time to fail. Its steps only add messages, none disables another, and nobody
  has to receive what they send.
* A request to leave reaches the leader at once, or only with the next generation. Between the two
  it would have the effect of one that was made later. With `links` it waits on its link.
* The coordinator sees a crash at once, unless it is stopped. Until it does, the dead replica merely
  does nothing, as any replica may at any time. For the same reason a fenced replica is never
  killed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from megatron_recover.core import coordinator, replica
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.leaving import asked
from megatron_recover.core.membership_messages import Loss, LossKind, ReplicaSaving
from megatron_recover.core.tree import neighbours
from megatron_recover.core.values import ReplicaId
from megatron_recover.sim import channels
from megatron_recover.sim.explore import network
from megatron_recover.sim.explore.judging import LASTS
from megatron_recover.sim.explore.network import JobState
from megatron_recover.sim.explore.node import (
    EXIT_REASON,
    CarryOut,
    Complete,
    Drift,
    DriftState,
    Fail,
    Miscount,
    ReadState,
    Serve,
    Stall,
    Stimulus,
    pending,
)
from megatron_recover.sim.explore.space import Attempt, Space

_PATIENCE = 2
"""Most times that the coordinator's timer `trouble` can run out (`CoordinatorState.patience`)."""


class Moves(Space):
    """States of a scenario with the moves from each, without those that need not be tried."""

    # --- what can happen ---

    def steps(self, world: JobState) -> Iterator[tuple[Attempt, JobState]]:
        """Yield every step of a live node and of the coordinator, with the state after it.

        While the coordinator is stopped, no timer runs out, and no save or local work ends.
        """
        is_stuck = True
        for number, name in enumerate(world.nodes):
            if name:
                waits = self.stalls(world, number) if world.reading else []
                for stimulus in [*self.stimuli(world, number), *waits]:
                    after = self.take(world, number, stimulus)
                    if after is not None:
                        is_stuck = False
                        yield self.attempt, after
        for report in world.leaving:
            yield f"the coordinator hears {self.inputs[report]}", self.reported(world, report)
        if world.is_dead:
            yield from self.without_coordinator(world, is_stuck=is_stuck)
            return
        if world.stopped:
            yield "the coordinator continues", self.continued(world)
            return
        yield from self.times(world)
        yield from self.joining(world)
        state = self.coordinators[world.coordinator]
        for save in state.saves:
            yield f"the save of replica {save.replica} is over", self.coordinate(world, ReplicaSaving(save.replica, True))
            if self.scenario.late_saves:
                overdue = world._replace(late_saves=(*world.late_saves, (save.replica, state.generation)))
                yield f"the save of replica {save.replica} is overdue", self.fired(overdue, f"save {save.number}")
        for number, since in world.late_saves:
            left = tuple(late for late in world.late_saves if late != (number, since))
            over = self.coordinate(world._replace(late_saves=left), ReplicaSaving(number, True))
            yield f"the overdue save of replica {number} is over", over

    def joining(self, world: JobState) -> Iterator[tuple[Attempt, JobState]]:
        """Yield the steps of newcomers: they read from a member, and ask a member to vouch."""
        state = self.coordinators[world.coordinator]
        if state.ready:
            yield "all newcomers are gathered", self.fired(world, f"gather {state.generation}")
        for newcomer in state.forming:
            node = self.nodes[world.nodes[newcomer]] if world.nodes[newcomer] else None
            if node is None or not node.may_read():
                continue
            for member in state.roster:
                source = self.nodes[world.nodes[member]] if world.nodes[member] else None
                if source is None or source.is_newcomer and not source.trains():
                    continue
                if world.faults.asks and source.trains():
                    less = world._replace(faults=world.faults._replace(asks=world.faults.asks - 1))
                    for ahead in range(source.leader.step, min(source.leader.step + 2, self.scenario.steps, len(source.work))):
                        order = replica.AskHold(member, source.work[ahead].label)
                        yield f"newcomer {newcomer} asks {member} to hold step {ahead}", self.stimulate(less, newcomer, order)
                if node.has_read():
                    after = self.stimulate(world, newcomer, replica.SendClaim(member))
                    yield f"newcomer {newcomer} asks for a member to vouch", after
                    break  # any member may get the message
                step = source.serves()
                if step is not None and step > node.read and self.may_join(step):
                    served = self.stimulate(world, member, Serve())
                    read = ReadState(step, source.drifted, source.state_drifted)
                    yield f"newcomer {newcomer} reads step {step} of {member}", self.stimulate(served, newcomer, read)

    def may_join(self, step: int) -> bool:
        """Return whether a step trains, so that a newcomer may join in it."""
        return step < self.scenario.steps and step not in self.scenario.of_last_bucket

    def without_coordinator(self, world: JobState, *, is_stuck: bool) -> Iterator[tuple[Attempt, JobState]]:
        """Yield the steps of replicas that learn of the coordinator's death, or give up.

        `is_stuck`: no other step is possible. Raise InvariantViolation for a replica that gives up
        although nothing else has failed.
        """
        living = [number for number, name in enumerate(world.nodes) if name]
        unaware = [number for number in living if not self.nodes[world.nodes[number]].leader.is_alone]
        for number in unaware:
            yield (
                f"replica {number} learns that the coordinator is dead",
                self.stimulate(world, number, replica.CoordinatorLost()),
            )
        scenario, left = self.scenario, world.faults
        if not is_stuck or unaware:
            return
        outside = [number for number in living if not self.nodes[world.nodes[number]].trains()]  # newcomers
        # A coordinator that is lost while a newcomer joins leaves members in two generations.
        if (left.crashes, left.suspicions, left.alarms, left.newcomers) == (
            scenario.crashes, scenario.suspicions, scenario.alarms, scenario.newcomers
        ):  # fmt: skip
            raise InvariantViolation(9, "a replica gives up, and only the coordinator is lost")
        for number in outside or living:
            nodes = (*world.nodes[:number], 0, *world.nodes[number + 1 :])
            yield f"replica {number} gives up", world._replace(nodes=nodes)

    def times(self, world: JobState) -> Iterator[tuple[Attempt, JobState]]:
        """Yield timers where operations take time to fail, ends and reports of local work, beats.

        Local work is reading data, compiling or computing, for which other members wait.
        """
        state = self.coordinators[world.coordinator]
        if world.grace and not any(world.nodes[number] and self.stalls(world, number) for number in state.roster):
            # A real grace is over before all stuck members notice. Here it is over after that.
            waits = world.faults.waits - bool(world.reading and world.faults.waits)
            over = world._replace(grace="", faults=world.faults._replace(waits=waits))
            # `trouble` runs out after at most LASTS generations, and again after as many more,
            # which bounds the search. Generations with excused waits do not count. There is no
            # bound once `trouble` has run out twice, if nobody reads and no channel is broken.
            tries = state.generation - int(state.trouble.split()[1]) if state.trouble else 0
            is_excused = world.reading and not state.is_excuse_over and not world.late_saves
            is_clear = not world.reading and not self.scenario.broken and state.patience == _PATIENCE
            if is_excused or is_clear or tries < LASTS * (state.patience + 1):
                yield "the grace is over", self.fired(over, world.grace)
        if self.takes_time and state.trouble and state.patience < _PATIENCE:
            yield "the trouble lasts", self.fired(world, state.trouble)
        if (self.scenario.hangs or self.scenario.outlasts) and state.excuse and not state.is_excuse_over:
            yield "the deadline passes", self.fired(world._replace(overdue=world.reading), state.excuse)
        if not self.scenario.hangs:
            for number in world.reading:
                left = tuple(each for each in world.reading if each != number)
                yield f"replica {number} has read", world._replace(reading=left)
        if set(state.at_work) - set(world.reading):
            yield "the agent sees who is at work", self.coordinate(world, coordinator.AtWork(world.reading))
        if (beat := self.beat(world)) is not None:
            yield f"a beat of replica {beat.replica} tells of step {beat.step}", self.coordinate(world, beat)

    def fired(self, world: JobState, timer: str) -> JobState:
        """Return the world after a timer of the coordinator has run out."""
        # For the report, if the reaction of the coordinator is a violation.
        self.attempt = f"the timer {timer} runs out"
        return self.coordinate(world, coordinator.TimerFired(timer))

    def beat(self, world: JobState) -> coordinator.Progressed | None:
        """Return the beat that reports steps whose commit the coordinator does not know, or None.

        Such a beat matters to those that wait for readers. Without readers the result is None.
        """
        state = self.coordinators[world.coordinator]
        if world.stopped or not self.scenario.readers:
            return None
        steps = [(self.nodes[world.nodes[each]].leader.step, each) for each in state.roster if world.nodes[each]]
        step, number = max(steps, default=(0, 0))
        return coordinator.Progressed(number, step) if step > state.step else None

    def continued(self, world: JobState) -> JobState:
        """Return the world after the coordinator has received what arrived during its stop."""
        inbox, world = world.inbox, world._replace(stopped=False, inbox=())
        for number in inbox:
            world = self.coordinate(world, self.inputs[number])
        return world

    def faults(self, world: JobState) -> Iterator[tuple[Attempt, JobState]]:
        """Yield every fault that may still happen, with the world after it."""
        state, left = self.coordinators[world.coordinator], world.faults
        if left.newcomers and not (self.scenario.newcomer_crashes and left.newcomers < self.scenario.newcomers):
            yield "a newcomer is formed", self.formed_one(world)
        if left.newcomer_crashes:
            for number in [claim.replica for claim in state.joins if world.nodes[claim.replica]]:
                dead = self.died(world._replace(faults=left._replace(newcomer_crashes=left.newcomer_crashes - 1)), number)
                yield f"newcomer {number} dies, and another one is formed", self.formed_one(dead)
        if left.exits:
            less = world._replace(faults=left._replace(exits=left.exits - 1))
            yield "the job is asked to end", self.coordinate(less, coordinator.ExitAsked(EXIT_REASON))
        for number in (*state.roster, *state.forming):
            lost = coordinator.ReplicaLost(Loss(number, LossKind.PROCESS_ENDED))
            if left.crashes:
                less = world._replace(faults=left._replace(crashes=left.crashes - 1))
                yield f"replica {number} dies", self.died(less, number)
            if left.suspicions:
                fenced = self.coordinate(world._replace(faults=left._replace(suspicions=left.suspicions - 1)), lost)
                yield f"replica {number} is fenced, but lives", fenced
            if number not in state.roster:
                continue
            if left.leaves:
                less = world._replace(faults=left._replace(leaves=left.leaves - 1))
                after = self.coordinate(less, coordinator.LeaveAsked((number,), "drain"))
                if world.stopped or after.coordinator != world.coordinator:  # else it is refused
                    yield f"replica {number} is asked to leave", after
                if after.nodes != world.nodes:
                    late = after._replace(nodes=world.nodes)
                    yield f"replica {number} is asked to leave, which only the next generation tells", late
            if left.saves:
                saving = self.coordinate(
                    world._replace(faults=left._replace(saves=left.saves - 1)), ReplicaSaving(number, False)
                )
                yield f"replica {number} begins to save", saving
            if left.readers and world.nodes[number] and not world.stopped and self.may_read(world, number):
                reading = tuple(sorted({*world.reading, number}))
                overdue = None if world.overdue is None else tuple(sorted({*world.overdue, number}))
                # The agent looks at a progress page more often than any wait is long.
                after = world._replace(reading=reading, overdue=overdue, faults=left._replace(readers=left.readers - 1))
                yield f"replica {number} reads", self.coordinate(after, coordinator.AtWork(reading))
            if left.miscounts and world.nodes[number] and self.nodes[world.nodes[number]].may_miscount():
                after = self.stimulate(world._replace(faults=left._replace(miscounts=left.miscounts - 1)), number, Miscount())
                yield f"replica {number} miscounts", after
            if left.drifts and world.nodes[number] and self.nodes[world.nodes[number]].between_steps():
                after = self.stimulate(world._replace(faults=left._replace(drifts=left.drifts - 1)), number, Drift())
                yield f"the parameters of replica {number} drift", after
            if left.state_drifts and world.nodes[number] and self.nodes[world.nodes[number]].between_steps():
                less = world._replace(faults=left._replace(state_drifts=left.state_drifts - 1))
                yield f"other state of replica {number} drifts", self.stimulate(less, number, DriftState())
        if left.late and not world.stopped and set(state.roster) - set(state.entered):
            late = self.fired(world._replace(faults=left._replace(late=left.late - 1)), state.follow)
            yield f"the timer {state.follow} runs out", late
        if self.scenario.coordinator_dies and not world.is_dead:
            yield "the coordinator dies", world._replace(is_dead=True, stopped=True, inbox=())
        if left.stops and not world.stopped:
            yield "the coordinator is stopped", world._replace(stopped=True, faults=left._replace(stops=left.stops - 1))
        if left.alarms:
            yield from self.alarm(world._replace(faults=left._replace(alarms=left.alarms - 1)), state)

    def died(self, world: JobState, number: ReplicaId) -> JobState:
        """Return the world after a replica has died, and the coordinator has seen that."""
        dead = world._replace(
            nodes=(*world.nodes[:number], 0, *world.nodes[number + 1 :]),
            links=tuple(link for link in world.links if link[1] != number),
            reading=tuple(each for each in world.reading if each != number),
        )  # fmt: skip
        return self.coordinate(dead, coordinator.ReplicaLost(Loss(number, LossKind.PROCESS_ENDED)))

    def formed_one(self, world: JobState) -> JobState:
        """Return the world after one more newcomer is formed, if there is one."""
        if not world.faults.newcomers:
            return world
        less = world._replace(faults=world.faults._replace(newcomers=world.faults.newcomers - 1))
        return self.coordinate(less, coordinator.FormAsked(1))

    def may_fail(self, world: JobState) -> bool:
        """Return whether a fault may still happen."""
        return any(world.faults)

    def stimuli(self, world: JobState, number: ReplicaId) -> list[Stimulus | int]:
        """Return what can reach a live node: messages by number, own steps, ends of operations.

        While a member reads, no `Stall` is among them. `steps` then adds those of `stalls`, which
        calls this function itself.
        """
        name = world.nodes[number]
        own = self.own_steps(name)
        state = self.coordinators[world.coordinator]
        is_layered = self.layered and not world.is_dead
        if is_layered and own.generation < state.generation and number in state.roster:
            made = self.newest[state.generation, state.roster, state.trusted_from, state.void]
            return [number for number in made if world.messages >> number & 1]
        found: list[Stimulus | int] = [queue[0] for _, destination, queue in world.links if destination == number]
        found += network.numbers(self.deliverable(world.messages, name))
        if number in world.reading:  # its control thread continues
            return found + [stimulus for stimulus in own.stimuli if isinstance(stimulus, CarryOut)]
        found += own.stimuli
        for position, operation in own.pending:
            counts = self.delivered(world, position, operation)
            if counts is not None and channels.completes(operation, number, self.scenario.broken):
                found.append(Complete(position, counts))
        return found + (self.stalls(world, number) if not world.reading else [])

    def stalls(self, world: JobState, number: ReplicaId) -> list[Stimulus | int]:
        """Return a `Stall` for each operation of a node that waits in vain.

        While nobody reads: the operations whose data is all sent and that broken channels stop.
        Else: those that wait for a reader, once `is_quiet` and a member may give up
        (`waits_for_readers`). A node that reads has none.
        """
        if number in world.reading:
            return []
        if world.reading:
            return self.waits_for_readers(world, number) if self.is_quiet(world) else []
        return [
            Stall(position, channels.accused(operation, number, self.scenario.broken))
            for position, operation in self.own_steps(world.nodes[number]).pending
            if not channels.completes(operation, number, self.scenario.broken)
            and self.delivered(world, position, operation) is not None
        ]

    def may_read(self, world: JobState, number: ReplicaId) -> bool:
        """Return whether this member may begin to read, so that the sum of a step waits for it.

        It may while it has a step to do and no live member holds a result. A member that has not
        committed the step before may still hold results of that step: then it may not either.
        """
        if self.nodes[world.nodes[number]].leader.step >= self.scenario.steps:
            return False
        members = [world.nodes[number] for number in self.coordinators[world.coordinator].roster]
        return not any(items for name in members if name for items in self.nodes[name].leader.held)

    def is_quiet(self, world: JobState) -> bool:
        """Return whether no member can take a step, apart from a `Stall`, and no beat is due.

        Messages come first: none takes as long as a wait for a member does.
        """
        return self.beat(world) is None and not any(
            self.take(world, number, stimulus) is not None
            for number in self.coordinators[world.coordinator].roster
            if world.nodes[number]
            for stimulus in self.stimuli(world, number)
        )

    def waits_for_readers(self, world: JobState, number: ReplicaId) -> list[Stimulus | int]:
        """Return a `Stall` for each operation of a node that may give up waiting for a reader."""
        state = self.coordinators[world.coordinator]
        if not world.faults.waits and not state.is_excuse_over and not (self.scenario.hangs and not state.excuse):
            return []
        found: list[Stimulus | int] = []
        for position, operation in self.own_steps(world.nodes[number]).pending:
            members = operation.members if operation.source is None else (operation.source,)
            if accused := tuple(member for member in members if member in world.reading):
                found.append(Stall(position, accused))
        return found

    def alarm(self, world: JobState, state: coordinator.CoordinatorState) -> Iterator[tuple[Attempt, JobState]]:
        """Yield the requests for a new generation although nobody died.

        Without `links` there are none while the coordinator is stopped.
        """
        if self.scenario.links:
            for a, b in itertools.combinations(state.roster, 2):
                links = tuple(link for link in world.links if {link[0], link[1]} != {a, b})
                after = world if links == world.links else world._replace(links=links)
                after = self.stimulate(self.stimulate(after, a, replica.LinkLost(b)), b, replica.LinkLost(a))
                if after != world:
                    yield f"the link between {a} and {b} breaks", after
            return
        for number in state.roster:
            for position, _ in pending(self.nodes[world.nodes[number]]):
                after = self.stimulate(world, number, Fail(position))
                if after.coordinator != world.coordinator:
                    yield f"an operation of replica {number} rank {position} fails", after
        for number in state.roster:
            # One requesting member is enough. Which one it is changes only who requests nothing
            # more in this generation.
            leader = self.nodes[world.nodes[number]].leader
            peers = neighbours(leader.roster, number, leader.tree_above) if leader.roster else ()
            after = self.stimulate(world, number, replica.LinkLost(peers[0])) if peers else world
            if after.coordinator != world.coordinator:
                yield f"replica {number} asks for a new generation", after
                return

    # --- what need not be tried, what need not be kept ---

    def settle(self, world: JobState, trail: list[Attempt] | None = None) -> JobState:
        """Take the steps whose order does not matter, if `reduced`, and drop useless messages.

        The module's docstring lists these steps. Each attempt is appended to `trail`.
        """
        while True:
            after = self.harmless(world) if self.reduced else None
            if after is None:
                return self.tidy(world)
            world = after
            if trail is not None:
                trail.append(self.attempt)

    def harmless(self, world: JobState) -> JobState | None:
        """Return the world after one step whose order does not matter, or None if there is none."""
        state = self.coordinators[world.coordinator]
        if state.over:
            return None
        calm = not (
            self.may_fail(world) or state.saves or world.stopped or self.takes_time or self.differs(world)
            or asked(state.requests, state.roster) or state.forming or state.joins or state.ready
        )  # fmt: skip
        for number, name in enumerate(world.nodes):
            if not name:
                continue
            own = self.own_steps(name)
            stimuli: Sequence[Stimulus | int]
            if number not in state.roster or (calm and own.generation == state.generation and not own.busy):
                stimuli = self.stimuli(world, number)
            elif self.scenario.links:
                continue
            else:
                bits = self.deliverable(world.messages, name)
                stimuli = network.numbers(bits & self.only_stored(name, bits))
            for stimulus in stimuli:
                after = self.take(world, number, stimulus)
                if after is not None:
                    return after
        return None

    def only_stored(self, name: int, bits: int) -> int:
        """Return the messages that a node would only store, complete for those in `bits`."""
        judged, stored = self.stored.get(name, (0, 0))
        if bits & ~judged:
            for number in network.numbers(bits & ~judged):
                stored |= network.only_stored(self.nodes[name].leader, self.messages[number]) << number
            self.stored[name] = judged | bits, stored
        return stored

    def tidy(self, world: JobState) -> JobState:
        """Drop the messages that can no longer affect any node."""
        roster = self.coordinators[world.coordinator].roster
        needed = 0
        for number, name in enumerate(world.nodes):
            if name:
                needed |= self.needed(world.messages, name, number in roster)
        kept = world.messages & needed
        return world if kept == world.messages else world._replace(messages=kept)

    def needed(self, bits: int, name: int, member: bool) -> int:
        """Return the messages that can still affect a node, complete for those in `bits`."""
        key = (name, member)
        judged, needed = self.needs.get(key, (0, 0))
        if bits & ~judged:
            for number in network.numbers(bits & ~judged):
                needed |= network.needed(self.messages[number], self.nodes[name], member) << number
            self.needs[key] = judged | bits, needed
        return needed
