"""A job on a virtual clock in which only leases matter: beats, a cut, a frozen writer (INV-6).

The coordinator sends beats as `control_plane/beats.py` does, and its machine decides. The holder's
side is that of `core/grants.py`. Messages are late at random, and the writer stands still at
random. The clocks of the two hosts run at different rates. The coordinator removes the writer at a
random time, and can never confirm its death.
"""

from __future__ import annotations

import random
from typing import Any

from megatron_recover.core import coordinator, grants
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.membership_messages import Grant, Hello, Loss, LossKind
from megatron_recover.deadlines import Deadlines
from megatron_recover.sim.timed.clock import Clock

_RATES = (0.96, 1.0, 1.04)
"""Seconds that the clock of the writer's host counts in a second of the coordinator's."""
_END_S = 120.0
_LOOK_S = 0.1
"""Seconds between two tries of the writer to name a checkpoint."""


class LeaseJob:
    """Two replicas, of which the writer, replica 0, is cut off."""

    def __init__(self, dice: random.Random) -> None:
        """Draw what happens."""
        self.dice, self.clock, self.deadlines = dice, Clock(), Deadlines.of()
        self.rate = dice.choice(_RATES)
        self.state = coordinator.CoordinatorState(coordinator.MembershipSettings(2))
        self.holding = grants.Holding(0.0)
        self.frozen_until = 0.0
        self.next_given_at: float | None = None
        """Time at which the coordinator gave the grant of the next writer."""
        self._is_removed = self._awaits_answer = False
        self._newest = {"down": 0.0, "up": 0.0}
        """Arrival of the last message in each direction: links are FIFO."""
        for number in (0, 1):
            self.feed(Hello(number, "same"))
        self.clock.after(0.0, self.beat)
        self.clock.after(0.0, self.look)
        self.clock.at(dice.uniform(0.0, 40.0), self.remove)
        for _ in range(dice.choice((0, 1, 2))):
            self.clock.at(dice.uniform(0.0, 50.0), self.freeze, dice.choice((3.0, 11.0, 30.0)))

    def run(self) -> None:
        """Run the job. Raise InvariantViolation if the old writer may name after the next grant."""
        while self.clock.now < _END_S and self.clock.step():
            pass
        assert self.next_given_at is not None, "the next writer never got its grant"

    def feed(self, message: coordinator.Input) -> None:
        """Feed one input to the coordinator, and carry out its effects."""
        self.state, effects = coordinator.step(self.state, message)
        for effect in effects:
            if isinstance(effect, coordinator.Arm) and effect.setting == "lapse_s":
                self.clock.after(self.deadlines.lapse_s, self.feed, coordinator.TimerFired(effect.timer))
            elif isinstance(effect, coordinator.Give) and effect.grant.writer == 0:
                self.send("down", self.receive, effect.grant)
            elif isinstance(effect, coordinator.Give):
                self.next_given_at = self.clock.now

    def send(self, way: str, receive: Any, message: object) -> None:
        """Deliver a message over the link, late at random, and in order."""
        delay_s = self.dice.choice((0.001, 0.1, 2.0, 20.0))
        self._newest[way] = max(self._newest[way], self.clock.now + delay_s)
        self.clock.at(self._newest[way], receive, message)

    def beat(self) -> None:
        """Send a beat to the writer if the one before was answered, while it is a member."""
        if self._is_removed:
            return
        if not self._awaits_answer:
            self._awaits_answer = True
            self.send("down", self.receive, None)
        self.clock.after(self.deadlines.beat_s, self.beat)

    def answered(self, _: object) -> None:
        """Receive the answer to a beat."""
        self._awaits_answer = False

    def remove(self) -> None:
        """Remove the writer, as for a silent node. Its processes live."""
        self._is_removed = True
        self.feed(coordinator.ReplicaLost(Loss(0, LossKind.PROCESS_ENDED)))

    # --- the writer ---

    def freeze(self, seconds: float) -> None:
        """Let the writer stand still."""
        self.frozen_until = max(self.frozen_until, self.clock.now + seconds)

    def receive(self, message: Grant | None) -> None:
        """Read a grant or a beat, once the writer runs."""
        if self.clock.now < self.frozen_until:
            self.clock.at(self.frozen_until, self.receive, message)
        elif message is not None:
            self.holding = grants.received(self.holding, message, message.generation)
        else:
            self.holding = grants.heard(self.holding, self.clock.now * self.rate)
            self.send("up", self.answered, None)

    def look(self) -> None:
        """Judge whether the writer may name a checkpoint now, if it runs."""
        self.clock.after(_LOOK_S, self.look)
        if self.clock.now < self.frozen_until:
            return
        refused = grants.refusal(self.holding, self.clock.now * self.rate, self.deadlines.lease_s)
        if not refused and self.next_given_at is not None:
            detail = f"at {self.clock.now:.1f} s, and replica 1 since {self.next_given_at:.1f} s"
            raise InvariantViolation(6, f"replica 0 may name a checkpoint {detail}")
