"""Every state of a small job and what can happen in it: the core's own machines, every order of messages, every fault.

The network keeps every message that can still matter and delivers any of them to anyone at any time, again and again or
never: lost, late, repeated and reordered messages are all in it, more than TCP allows. Scenarios with `links` have FIFO links
instead, each message once, that break and lose what is on them: there a message that the machine drops is really gone.
What is handed on in a tree comes to nobody but those to whom it goes.

What is not tried twice (each is another order of independent steps, or covered by another outcome; `reduced=False` tries it
all, and a test compares the two)
----------------------------------------------------------------------------------------------------------------------------
* Inside a node: `sim/explore/node.py`.
* Generations come in layers: once one is announced, members of older ones only enter it. What they did before entering
  reads no message of the new generation, so it can as well have happened before the announcement. (Not with `links`: there
  messages of a generation may arrive before its announcement.)
* A vote or status that is only stored, because those of two or more other members are missing, is delivered at once. It has
  no effect before the last one comes, a new generation discards it delivered or not, and the last one may still be lost.
  In a tree it may also make a node hand on what it has: a message more, which nobody has to receive.
* A node that no new generation can reach (it is not in the newest roster; or it has entered the newest and no fault is left to
  come) takes its steps at once: they only add messages, none disables another, and nobody has to receive what they send.
* A crash is seen by the coordinator at once: until then the dead replica just does nothing, as any replica may at any time.
  A fenced replica is never killed: being killed is doing nothing from then on.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from megatron_recover.core import coordinator, invariants, replica
from megatron_recover.core.plan import Operation
from megatron_recover.core.tree import neighbours
from megatron_recover.core.values import (
    Busy,
    Entered,
    ExitCode,
    Generation,
    Hello,
    LeaderMessage,
    Loss,
    LossKind,
    ReplicaId,
    Shape,
    Void,
    Work,
)
from megatron_recover.sim import channels
from megatron_recover.sim.explore import network
from megatron_recover.sim.explore.network import Faults, Table, World
from megatron_recover.sim.explore.node import (
    Arrive,
    Begin,
    CarryOut,
    Complete,
    Copy,
    Drift,
    DriftState,
    EndPass,
    Fail,
    Message,
    Miscount,
    Node,
    Part,
    Stall,
    Stimulus,
    TakeUp,
    Threads,
    new_node,
    pending,
)
from megatron_recover.sim.explore.scenario import Scenario
from megatron_recover.sim.multiset import Multiset, add

Links = tuple[tuple[int, int, tuple[int, ...]], ...]
"""As in `World`."""


class Own(NamedTuple):
    """What a node can do by itself."""

    generation: Generation
    busy: bool
    """Orders are on their way to a rank."""
    stimuli: tuple[Stimulus, ...]
    pending: tuple[tuple[int, Operation], ...]
    """As of `world.pending`."""


class Effect(NamedTuple):
    """An `Outcome` in numbers."""

    node: int
    messages: tuple[tuple[int, tuple[ReplicaId, ...]], ...]
    reports: tuple[LeaderMessage, ...]
    facts: tuple[invariants.Fact, ...]


_LASTS = 2
"""Generations without a committed step after which `trouble` has run out at the latest."""
Attempt = str | tuple[ReplicaId, Stimulus | int]
"""A fault in words, or what reached which replica."""


class Space:
    """The states of one scenario. All its tables only remember pure functions of their keys."""

    def __init__(self, scenario: Scenario, threads: Threads | None = None, *, reduced: bool = True) -> None:
        """`reduced`: leave out what the module's docstring says need not be tried."""
        self.scenario = scenario
        self.threads = threads or Threads(
            slow=scenario.slow, passes_last=scenario.passes_last, paces=scenario.paces, miscounts=scenario.miscounts > 0
        )  # fmt: skip
        self.shape = Shape(scenario.num_ranks, scenario.bucket_ranks)
        self.nodes: Table[Node] = Table()
        self.messages: Table[Message] = Table()
        self.coordinators: Table[coordinator.CoordinatorState] = Table()
        self.inputs: Table[coordinator.Input] = Table()
        """What waits for a coordinator that is stopped."""
        self.histories: Table[invariants.History] = Table()
        self.effects: dict[tuple[int, Stimulus | int], Effect] = {}
        self.needs: dict[tuple[int, bool], tuple[int, int]] = {}
        """Per node, and whether it is a member: messages that were judged, those that can still have an effect."""
        self.observed: dict[tuple[int, tuple[invariants.Fact, ...]], int] = {}
        self.data: dict[tuple[object, ...], list[int]] = {}
        """Numbers of the `Part`s and `Copy`s by everything but their content."""
        self.transitions = 0
        self.stored: dict[int, tuple[int, int]] = {}
        """Per node the messages that were judged, and those that it would only store."""
        self.decisions: dict[tuple[int, coordinator.Input], tuple[int, tuple[coordinator.Effect, ...]]] = {}
        """What the coordinator does."""
        self.own: dict[int, Own] = {}
        self.data_bits = 0
        """All `Part`s and `Copy`s."""
        self.void: dict[int, int] = {}
        """Per node the messages that are known to change nothing there."""
        self.newest: dict[tuple[Generation, tuple[ReplicaId, ...], Generation, Void | None], int] = {}
        """Numbers of announcements by all that a replica reads in them (and nobody asks for an exit here)."""
        self.reduced = reduced
        self.layered = reduced and not scenario.links
        self.attempt: Attempt = "the job starts"
        """What is being tried, for the report of a violation."""

    # --- one step ---

    def initial(self) -> World:
        """Generation 1 is announced, nobody has entered it."""
        scenario = self.scenario
        buckets = tuple(range(len(scenario.bucket_ranks)))
        work = [
            Work(
                f"train {step}", scenario.microbatches, buckets[-1:] if step in scenario.of_last_bucket else buckets,
                step in scenario.digested,
            )
            for step in range(scenario.steps)
        ]  # fmt: skip
        nodes = tuple(self.nodes.number(new_node(r, self.shape, work, scenario.tree_above)) for r in range(scenario.replicas))
        state = coordinator.CoordinatorState(coordinator.Policy(scenario.replicas))
        world = World(
            self.coordinators.number(state),
            nodes,
            0,
            self.histories.number(invariants.History(self.shape)),
            Faults(
                scenario.crashes,
                scenario.suspicions,
                scenario.alarms,
                scenario.drifts,
                scenario.state_drifts,
                scenario.saves,
                scenario.late,
                scenario.stops,
                scenario.miscounts,
                scenario.readers,
                scenario.waits,
            ),
        )
        for number in range(scenario.replicas):
            world = self.coordinate(world, Hello(number, "same"))
        return world

    def coordinate(self, world: World, message: coordinator.Input) -> World:
        """Feed the coordinator, or its inbox while it is stopped. A grace ends at once; `faults` fires the follow timers."""
        if world.stopped:
            return world._replace(inbox=(*world.inbox, self.inputs.number(message)))
        key = (world.coordinator, message)
        decision = self.decisions.get(key)
        if decision is None:
            state, effects = coordinator.step(self.coordinators[world.coordinator], message)
            decision = self.decisions[key] = self.coordinators.number(state), effects
        if decision[0] != world.coordinator:
            world = world._replace(coordinator=decision[0])
        for effect in decision[1]:
            if isinstance(effect, coordinator.Announce):
                new = effect.generation
                self.newest[new.generation, new.roster, new.trusted_from, new.void] = self.messages.number(new)
                formed = (invariants.formed(new),)
                messages, links = self.post(world, -1, ((self.messages.number(new), new.roster),))
                world = world._replace(history=self.observe(world.history, formed), messages=messages, links=links)
            elif isinstance(effect, coordinator.Arm) and effect.timer.startswith("grace"):
                if self.takes_time:
                    world = world._replace(grace=effect.timer)
                    continue
                world = self.coordinate(world, coordinator.TimerFired(effect.timer))
        return world

    def observe(self, before: int, facts: tuple[invariants.Fact, ...]) -> int:
        """The history after `facts`."""
        if not facts:
            return before
        key = (before, facts)
        number = self.observed.get(key)
        if number is None:
            history = self.histories[before]
            for fact in facts:
                history = invariants.observe(history, fact)
            number = self.observed[key] = self.histories.number(history)
        return number

    def post(self, world: World, source: int, messages: tuple[tuple[int, tuple[ReplicaId, ...]], ...]) -> tuple[int, Links]:
        """The network with more messages."""
        bits = world.messages
        if not self.scenario.links:
            for number, _ in messages:
                bits |= 1 << number
            return bits, world.links
        links = {(a, b): queue for a, b, queue in world.links}
        for number, to in messages:
            if isinstance(self.messages[number], Part | Copy):
                bits |= 1 << number
            else:
                for destination in to:
                    links[source, destination] = (*links.get((source, destination), ()), number)
        return bits, tuple((a, b, queue) for (a, b), queue in sorted(links.items()) if queue)

    def stimulate(self, world: World, number: ReplicaId, stimulus: Stimulus | int) -> World:
        """The world after a stimulus (or the message of that number) has reached a node."""
        key = (world.nodes[number], stimulus)
        effect = self.effects.get(key)
        if effect is None:
            what = self.messages[stimulus] if isinstance(stimulus, int) else stimulus
            outcome = self.threads.stimulate(self.nodes[world.nodes[number]], what)  # type: ignore[arg-type]
            effect = self.effects[key] = Effect(
                self.nodes.number(outcome.node),
                tuple((self.message(message), to) for message, to in outcome.messages),
                outcome.reports,
                outcome.facts,
            )
        messages, links = self.post(world, number, effect.messages) if effect.messages else (world.messages, world.links)
        same = effect.node == world.nodes[number] and (messages, links) == (world.messages, world.links)
        if same and not effect.reports:
            return world
        self.transitions += 1
        nodes = (*world.nodes[:number], effect.node, *world.nodes[number + 1 :])
        history = self.observe(world.history, effect.facts)
        world = world._replace(nodes=nodes, messages=messages, history=history, links=links)
        for report in effect.reports:
            world = self.coordinate(world, self.blameless(report))
        return world

    def blameless(self, report: LeaderMessage) -> LeaderMessage:
        """Who waited for whom decides nothing where the time for that never passes."""
        return replace(report, waited_for=()) if isinstance(report, Entered) and not self.takes_time else report

    @property
    def takes_time(self) -> bool:
        """Whether operations take time to fail, so that members accuse each other."""
        return bool(self.scenario.broken or self.scenario.readers)

    # --- what can happen ---

    def steps(self, world: World) -> Iterator[tuple[Attempt, World]]:
        """Every step of a live node: what happens, and the state after it."""
        for number, name in enumerate(world.nodes):
            if name:
                waits = self.stalls(world, number) if world.reading else []
                for stimulus in [*self.stimuli(world, number), *waits]:
                    after = self.take(world, number, stimulus)
                    if after is not None:
                        yield self.attempt, after
        if world.stopped:
            yield "the coordinator continues", self.continued(world)
            return
        yield from self.times(world)
        for save in self.coordinators[world.coordinator].saves:
            yield f"the save of replica {save.replica} is over", self.coordinate(world, Busy(save.replica, True))

    def times(self, world: World) -> Iterator[tuple[Attempt, World]]:
        """The times that pass where operations take time to fail, and what comes of work that others wait for."""
        state = self.coordinators[world.coordinator]
        if world.grace and not any(world.nodes[number] and self.stalls(world, number) for number in range(len(world.nodes))):
            # A grace is shorter than the time in which all members that are stuck find that out: here it ends after that.
            waits = world.faults.waits - bool(world.reading and world.faults.waits)
            over = world._replace(grace="", faults=world.faults._replace(waits=waits))
            # What lasts is told from what passes after three such generations at the latest, and after three more.
            if (
                (world.reading and not state.is_excuse_over)
                or not state.trouble
                or state.fruitless < _LASTS * (state.patience + 1)
            ):
                yield "the grace is over", self.coordinate(over, coordinator.TimerFired(world.grace))
        if self.takes_time and state.trouble and state.patience < 2:
            yield "the trouble lasts", self.coordinate(world, coordinator.TimerFired(state.trouble))
        if self.scenario.hangs and state.excuse and not state.is_excuse_over:
            yield "the deadline passes", self.coordinate(world, coordinator.TimerFired(state.excuse))
        if not self.scenario.hangs:
            for number in world.reading:
                left = tuple(each for each in world.reading if each != number)
                yield f"replica {number} has read", world._replace(reading=left)
        if set(state.at_work) - set(world.reading):
            yield "the agent sees who is at work", self.coordinate(world, coordinator.AtWork(world.reading))

    def continued(self, world: World) -> World:
        """The world after the coordinator has taken all that reached it while it was stopped."""
        inbox, world = world.inbox, world._replace(stopped=False, inbox=())
        for number in inbox:
            world = self.coordinate(world, self.inputs[number])
        return world

    def faults(self, world: World) -> Iterator[tuple[Attempt, World]]:
        """Every fault that may still come."""
        state, left = self.coordinators[world.coordinator], world.faults
        for number in state.roster:
            lost = coordinator.Lost(Loss(number, LossKind.PROCESS_ENDED))
            if left.crashes:
                nodes = (*world.nodes[:number], 0, *world.nodes[number + 1 :])
                links = tuple(link for link in world.links if link[1] != number)
                dead = world._replace(
                    nodes=nodes, faults=left._replace(crashes=left.crashes - 1), links=links,
                    reading=tuple(each for each in world.reading if each != number),
                )  # fmt: skip
                yield f"replica {number} dies", self.coordinate(dead, lost)
            if left.suspicions:
                fenced = self.coordinate(world._replace(faults=left._replace(suspicions=left.suspicions - 1)), lost)
                yield f"replica {number} is fenced, but lives", fenced
            if left.saves:
                saving = self.coordinate(world._replace(faults=left._replace(saves=left.saves - 1)), Busy(number, False))
                yield f"replica {number} begins to save", saving
            if left.readers and world.nodes[number] and not world.stopped and self.may_read(world, number):
                reading = tuple(sorted({*world.reading, number}))
                # A look at a page is quicker than any wait is long.
                after = world._replace(reading=reading, faults=left._replace(readers=left.readers - 1))
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
            late = self.coordinate(
                world._replace(faults=left._replace(late=left.late - 1)), coordinator.TimerFired(state.follow)
            )
            yield f"the timer {state.follow} runs out", late
        if left.stops and not world.stopped:
            yield "the coordinator is stopped", world._replace(stopped=True, faults=left._replace(stops=left.stops - 1))
        if left.alarms:
            yield from self.alarm(world._replace(faults=left._replace(alarms=left.alarms - 1)), state)

    def may_fail(self, world: World) -> bool:
        """Whether a fault may still come."""
        return any(world.faults)

    def stimuli(self, world: World, number: ReplicaId) -> list[Stimulus | int]:
        """What can reach a node: numbers of messages, and the node's own steps."""
        name = world.nodes[number]
        own = self.own_steps(name)
        state = self.coordinators[world.coordinator]
        if self.layered and own.generation < state.generation and number in state.roster:
            return [self.newest[state.generation, state.roster, state.trusted_from, state.void]]
        found: list[Stimulus | int] = [queue[0] for _, destination, queue in world.links if destination == number]
        found += network.numbers(self.deliverable(world.messages, name))
        if number in world.reading:  # its control thread goes on
            return found + [stimulus for stimulus in own.stimuli if isinstance(stimulus, CarryOut)]
        found += own.stimuli
        for position, operation in own.pending:
            counts = self.delivered(world, position, operation)
            if counts is not None and channels.completes(operation, number, self.scenario.broken):
                found.append(Complete(position, counts))
        return found + (self.stalls(world, number) if not world.reading else [])

    def stalls(self, world: World, number: ReplicaId) -> list[Stimulus | int]:
        """The operations of a node that all members have reached and that broken channels stop."""
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

    def may_read(self, world: World, number: ReplicaId) -> bool:
        """Whether a member can still be what the sum of a step waits for: the step is there, and nobody has its result."""
        if self.nodes[world.nodes[number]].leader.step >= self.scenario.steps:
            return False
        members = [world.nodes[number] for number in self.coordinators[world.coordinator].roster]
        return not any(items for name in members if name for items in self.nodes[name].leader.held)

    def is_quiet(self, world: World) -> bool:
        """Whether nothing is left to happen but what a reader keeps: no message takes as long as a wait for a member does."""
        return not any(
            self.take(world, number, stimulus) is not None
            for number in self.coordinators[world.coordinator].roster
            if world.nodes[number]
            for stimulus in self.stimuli(world, number)
        )

    def waits_for_readers(self, world: World, number: ReplicaId) -> list[Stimulus | int]:
        """The operations of a node whose members wait for one that reads, and may give that up."""
        state = self.coordinators[world.coordinator]
        if not world.faults.waits and not state.is_excuse_over and not (self.scenario.hangs and not state.excuse):
            return []
        found: list[Stimulus | int] = []
        for position, operation in self.own_steps(world.nodes[number]).pending:
            members = operation.members if operation.source is None else (operation.source,)
            if accused := tuple(member for member in members if member in world.reading):
                found.append(Stall(position, accused))
        return found

    def deliverable(self, bits: int, name: int) -> int:
        """The messages that may do something to a node."""
        bits &= ~self.data_bits & ~self.void.get(name, 0)
        if len(self.nodes[name].leader.roster) > self.scenario.tree_above:
            for number in network.numbers(bits):
                if not network.reaches(self.messages[number], self.nodes[name].leader):
                    self.void[name] = self.void.get(name, 0) | 1 << number
                    bits &= ~(1 << number)
        return bits

    def own_steps(self, name: int) -> Own:
        own = self.own.get(name)
        if own is None:
            node = self.nodes[name]
            leader, stimuli = node.leader, list[Stimulus]()
            if leader.phase is not replica.Phase.JOINING and leader.work is None and not leader.ended:
                stimuli.append(Begin())
            stimuli += [Arrive(position) for position in node.to_arrive()]
            stimuli += [CarryOut(position) for position, one in enumerate(node.ranks) if one.orders]
            if node.ranks[0].may_end():
                stimuli.append(EndPass())
            if self.threads.slow:
                stimuli += [TakeUp(position) for position, one in enumerate(node.ranks) if one.can_take()]
            busy = any(one.orders for one in node.ranks)
            own = self.own[name] = Own(leader.generation, busy, tuple(stimuli), tuple(pending(node)))
        return own

    def take(self, world: World, number: ReplicaId, stimulus: Stimulus | int) -> World | None:
        """The world after a stimulus, or None where it changes nothing."""
        self.attempt = number, stimulus
        if self.scenario.links and isinstance(stimulus, int):
            return self.stimulate(network.received(world, number, stimulus), number, stimulus)
        after = self.stimulate(world, number, stimulus)
        if after is not world:
            return after
        if isinstance(stimulus, int):
            name = world.nodes[number]
            self.void[name] = self.void.get(name, 0) | 1 << stimulus
        return None

    def alarm(self, world: World, state: coordinator.CoordinatorState) -> Iterator[tuple[Attempt, World]]:
        """A new generation is asked for although nobody died."""
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
            # One of the members will do: who asks changes nothing but that it asks no more in this generation.
            leader = self.nodes[world.nodes[number]].leader
            peers = neighbours(leader.roster, number, leader.tree_above) if leader.roster else ()
            after = self.stimulate(world, number, replica.LinkLost(peers[0])) if peers else world
            if after.coordinator != world.coordinator:
                yield f"replica {number} asks for a new generation", after
                return

    def message(self, message: Message) -> int:
        number = self.messages.number(message)
        if isinstance(message, Part | Copy):
            self.data_bits |= 1 << number
            numbers = self.data.setdefault(network.address(message), [])
            if number not in numbers:
                numbers.append(number)
        return number

    def delivered(self, world: World, position: int, operation: Operation) -> Multiset | None:
        """What an operation would deliver, or None while somebody has not contributed."""
        version = operation.version if operation.source is not None else 0
        parts = []
        for member in operation.members if operation.source is None else (operation.source,):
            if member in world.reading:
                return None
            address = (member, position, operation.generation, operation.step, operation.bucket, version)
            numbers = self.data.get(address, ())
            here = [number for number in numbers if world.messages >> number & 1]
            if not here:
                return None
            part = self.messages[here[0]]
            parts.append(part.counts if isinstance(part, Part | Copy) else ())
        return add(parts)

    # --- what need not be tried, what need not be kept ---

    def settle(self, world: World, trail: list[Attempt] | None = None) -> World:
        """Take the steps whose order is of no consequence (the module's docstring says which), and drop useless messages."""
        while True:
            after = self.harmless(world) if self.reduced else None
            if after is None:
                return self.tidy(world)
            world = after
            if trail is not None:
                trail.append(self.attempt)

    def harmless(self, world: World) -> World | None:
        """The world after one step whose order is of no consequence, if there is one."""
        state = self.coordinators[world.coordinator]
        if state.over:
            return None
        calm = not (self.may_fail(world) or state.saves or world.stopped or self.takes_time or self.differs(world))
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
        """The messages that a node would only store; of those among `bits` it is known."""
        judged, stored = self.stored.get(name, (0, 0))
        if bits & ~judged:
            for number in network.numbers(bits & ~judged):
                stored |= network.only_stored(self.nodes[name].leader, self.messages[number]) << number
            self.stored[name] = judged | bits, stored
        return stored

    def tidy(self, world: World) -> World:
        """Drop the messages that can have no effect any more on anyone."""
        roster = self.coordinators[world.coordinator].roster
        needed = 0
        for number, name in enumerate(world.nodes):
            if name:
                needed |= self.needed(world.messages, name, number in roster)
        kept = world.messages & needed
        return world if kept == world.messages else world._replace(messages=kept)

    def needed(self, bits: int, name: int, member: bool) -> int:
        """The messages that can still have an effect on a node; of those among `bits` it is known."""
        key = (name, member)
        judged, needed = self.needs.get(key, (0, 0))
        if bits & ~judged:
            for number in network.numbers(bits & ~judged):
                needed |= network.needed(self.messages[number], self.nodes[name], member) << number
            self.needs[key] = judged | bits, needed
        return needed

    # --- how it ends ---

    def over(self, world: World) -> bool:
        """Whether the job has ended as it should: all members finished, none is left, or no majority says which is right."""
        state = self.coordinators[world.coordinator]
        if self.scenario.hangs and set(state.roster) <= set(world.reading):
            return True  # the last member hangs: only the detector ends it
        if not state.over:
            return False
        fenced = [loss.replica for loss in state.losses if loss.kind is LossKind.SUSPECTED]
        if self.scenario.broken and channels.innocent(fenced, state.roster, self.scenario.broken):
            raise invariants.InvariantViolation(9, f"of {fenced}, which were fenced, one was not at fault")
        if self.scenario.readers and not (set(fenced) <= set(world.reading) and self.scenario.hangs or not fenced):
            raise invariants.InvariantViolation(9, f"of {fenced}, which were fenced, one was only at work")
        if not state.roster and state.losses[-1].kind is LossKind.SUSPECTED:
            raise invariants.InvariantViolation(9, f"a timeout removed the last members: {state.losses[-1].detail}")
        given_up = state.void is not None and state.void.gives_up
        if {item.exit_code == ExitCode.INVARIANT_VIOLATED for item in state.finished} - {given_up}:
            raise invariants.InvariantViolation(9, f"step {state.void} is void, and the job ends with {state.finished}")
        if not self.tied(world) and not set(state.roster) <= {item.replica for item in state.finished}:
            raise invariants.InvariantViolation(9, "the job was stopped although members could go on")
        return True

    def tied(self, world: World) -> bool:
        """Whether some have drifted and no strict majority is alike, so that nobody can say whose state is right."""
        alike = Counter((node.drifted, node.drifted or node.state_drifted) for _, node in self.living(world))
        return bool(self.drifted(world)) and 2 * max(alike.values()) <= len(self.coordinators[world.coordinator].roster)

    def differs(self, world: World) -> bool:
        """Whether a member has drifted, or one is flawed: then a new generation may still come."""
        flawed = self.scenario.miscounts and any(name and self.nodes[name].flawed for name in world.nodes)
        return bool(flawed or self.drifted(world))

    def drifted(self, world: World) -> list[ReplicaId]:
        """Members whose state is not what it should be."""
        if not self.scenario.drifts and not self.scenario.state_drifts:
            return []
        return [number for number, node in self.living(world) if node.drifted or node.state_drifted]

    def living(self, world: World) -> list[tuple[ReplicaId, Node]]:
        """The members that have not died, each with its node."""
        roster = self.coordinators[world.coordinator].roster
        return [(number, self.nodes[world.nodes[number]]) for number in roster if world.nodes[number]]
