"""Kinds of scenarios in which what is lost comes back: `--recover-heal in-place`, with `joining_pretrain.py`.

While replicas are missing steps are slow, so that newcomers have time to join, and with all of them fast: so the end of the job
follows the last join. Newcomers get the ids from the number of replicas on, in their order: faults name them so. What is to
happen after a join is done by the newcomer, as it passes a point, to another replica (`joining_pretrain.Act`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron_recover.cluster.chaos import IN_A_STEP
from megatron_recover.faults import LEADER_ONLY, Fault, FaultKind, FaultPoint
from tests.system.joining_pretrain import Act
from tests.system.kills import Kills
from tests.system.plans import IN_A_PASS, JOINING, TIMEOUTS, Draw, Scenario

STEPS = 48
"""Of each of these jobs: one length, so that they share their references; `STEPS` x `Scenario.step_s` is the time for joins."""
STEP_S = 0.75
NEVER_AGAIN = ("--recover-heal-backoff-s", "600")
SOON = ("--recover-heal-backoff-s", "2")
"""The slots of newcomers that die one after the other are put off for so long: within the job they are tried again."""
OUTSIDE = (FaultPoint.START_UP, FaultPoint.FORM, FaultPoint.STATE_READ, FaultPoint.CLAIM)
"""Where a newcomer is not in the roster yet."""
INSIDE = (
    FaultPoint.ADMITTED, *IN_A_PASS, FaultPoint.BEFORE_REDUCE, FaultPoint.REDUCE, FaultPoint.BEFORE_VOTE, FaultPoint.IN_VOTE,
    FaultPoint.AFTER_VOTE, FaultPoint.OPTIMIZER, FaultPoint.PROMISE, FaultPoint.STATUS,
)  # fmt: skip
"""Around its first step."""


class _Draw(Draw):
    """The dice of a scenario in which replicas come back."""

    def __init__(self, drawn: Draw) -> None:
        self.__dict__.update(drawn.__dict__)
        self.change(heal="in-place", steps=STEPS, microbatches=6, timeouts=(*TIMEOUTS, *SOON))
        self.acts: list[Act] = []

    def several(self, least: int) -> None:
        """Have at least so many replicas at the start."""
        if self.num_ranks > 2:
            self.change(tp=1, pp=2, lanes=1)
            self.num_ranks = 2
        if self.job.replicas < least:
            self.change(replicas=least)
        self.victims = self.dice.sample(range(self.job.replicas), self.job.replicas - 1)

    def rank(self, point: FaultPoint) -> int:
        """A rank that passes a point."""
        return 0 if point in LEADER_ONLY else self.dice.randrange(self.num_ranks)

    def loss(self, step: int | None = None) -> None:
        """The next victim dies by a signal from outside."""
        point = self.dice.choice(IN_A_STEP)
        at = self.dice.randint(1, 3) if step is None else step
        self.strike(point, at, kind=FaultKind.KILL, **({"occurrence": self.occurrence()} if point in IN_A_PASS else {}))

    def newcomer(self, number: int, points: Sequence[FaultPoint]) -> None:
        """The newcomer with this number, from 0, dies or stands still at one of these points."""
        point = self.dice.choice(points)
        kind = self.dice.choices((FaultKind.KILL, FaultKind.STOP), (5, 1))[0]
        # What a rank of these small models has may be one range: then it passes the point once.
        occurrence = 2 if point is FaultPoint.STATE_READ and self.dice.random() < 0.2 else 1
        self.faults.append(
            Fault(replica=self.job.replicas + number, rank=self.rank(point), point=point, kind=kind, occurrence=occurrence)
        )  # fmt: skip

    def act(self, number: int, point: FaultPoint, *do: str, occurrence: int = 1) -> None:
        """The newcomer with this number does these things, one after the other, as it passes the point."""
        at = Fault(replica=self.job.replicas + number, rank=self.rank(point), point=point, occurrence=occurrence)
        self.acts += [Act(at, each) for each in do]

    def kill(self, replica: int) -> str:
        """The act that kills a rank."""
        return f"kill {replica} {self.dice.randrange(self.num_ranks)}"

    def comeback(self, *, step_s: float = STEP_S, **fields: object) -> Scenario:
        """What was drawn. Stages sleep one after the other: `step_s` is for a step as a whole."""
        passes = self.job.microbatches / max(1, self.job.replicas - 1)
        step_s *= passes / (passes + self.job.pp - 1)
        return self.scenario(script=JOINING, acts=tuple(self.acts), step_s=step_s, **fields)


def _coming_back(draw: _Draw) -> Scenario:
    """One or more members fail, in any way, in steps of their own."""
    step = draw.dice.randint(1, 3)
    for _ in range(draw.dice.randint(1, len(draw.victims))):
        draw.single(step)
        step += draw.dice.randint(1, 6)
    return draw.comeback()


def _together(draw: _Draw) -> Scenario:
    """Two members fail at once, and perhaps one of those who come for them."""
    draw.several(3)
    draw.together(draw.dice.randint(1, 3))
    if draw.dice.random() < 0.5:
        draw.newcomer(draw.dice.randrange(2), (*OUTSIDE, *INSIDE))
    return draw.comeback()


def _outside(draw: _Draw) -> Scenario:
    """One newcomer after the other dies before it is admitted."""
    draw.loss()
    for number in range(draw.dice.randint(1, 3)):
        draw.newcomer(number, OUTSIDE)
    return draw.comeback()


def _inside(draw: _Draw) -> Scenario:
    """A newcomer dies around its first step, and perhaps the next one, too."""
    draw.loss()
    for number in range(draw.dice.randint(1, 2)):
        draw.newcomer(number, INSIDE)
    return draw.comeback()


def _beside(draw: _Draw) -> Scenario:
    """Another member dies while a newcomer is on its way, from the start of its process to its first steps."""
    draw.several(3)
    draw.loss()
    inside = (FaultPoint.ADMITTED, FaultPoint.FORWARD, FaultPoint.BEFORE_VOTE, FaultPoint.AFTER_VOTE)
    draw.act(0, draw.dice.choice((*OUTSIDE[1:], *inside)), draw.kill(draw.victims.pop()))
    return draw.comeback()


def _after_admission(draw: _Draw) -> Scenario:
    """A newcomer dies when it has just become a member, perhaps soon after another one."""
    draw.loss()
    point = draw.dice.choice((FaultPoint.AFTER_VOTE, FaultPoint.BEFORE_VOTE, FaultPoint.OPTIMIZER))
    occurrence = draw.dice.randint(2, 3)
    draw.faults.append(
        Fault(replica=draw.job.replicas, rank=draw.rank(point), point=point, occurrence=occurrence)
    )  # fmt: skip
    if draw.victims and draw.dice.random() < 0.5:
        draw.act(0, FaultPoint.AFTER_VOTE, draw.kill(draw.victims.pop()), occurrence=occurrence - 1)
    return draw.comeback(full_step_s=0.1)


def _all_replaced(draw: _Draw) -> Scenario:
    """All that there were at the start, one after the other."""
    draw.several(2)
    draw.change(replicas=min(draw.job.replicas, 3))
    order = draw.dice.sample(range(draw.job.replicas), draw.job.replicas)
    draw.victims = order[:1]
    draw.loss(1)
    for number, replica in enumerate(order[1:]):  # with its second vote a newcomer is a member
        draw.act(number, FaultPoint.AFTER_VOTE, draw.kill(replica), occurrence=draw.dice.randint(2, 4))
    return draw.comeback(full_step_s=0.1)


def _spares(draw: _Draw) -> Scenario:
    """The slots of the lost one break, and then perhaps the spare one, too: with that nobody is formed any more."""
    are_used_up = draw.dice.random() < 0.6
    pp = draw.dice.choice((1, 2))
    draw.change(
        replicas=2, tp=1, pp=pp, lanes=1, run_flags=("--spares", "1"), timeouts=(*TIMEOUTS, *NEVER_AGAIN),
        extra=() if pp == 1 else tuple(flag for flag in draw.job.extra if flag.startswith("--bf")),
    )  # fmt: skip
    draw.num_ranks, draw.victims = pp, draw.dice.sample(range(2), 1)
    draw.loss(1)
    # What breaks twice of its own is set aside: the slot of rank 0, then the one in which rank 0 is then.
    for number in range((4 if pp == 1 else 3) if are_used_up else 2):
        draw.faults.append(Fault(replica=2 + number, rank=0, point=FaultPoint.FORM, kind=FaultKind.RAISE))
    return draw.comeback(missing=int(are_used_up), step_s=0.5)


def _drain(draw: _Draw) -> Scenario:
    """A member is drained while a newcomer forms: that one comes, and nobody in place of the drained one."""
    draw.several(3)
    draw.loss()
    draw.act(0, FaultPoint.FORM, f"drain {draw.victims.pop()}", f"sleep {draw.dice.choice((1, 4))}")
    return draw.comeback(missing=1, full=draw.job.replicas - 1, full_step_s=0.3)


def _evaluations_and_saves(draw: _Draw) -> Scenario:
    """The writer is lost, too, and then perhaps the newcomer that writes."""
    draw.change(eval_interval=3, save_interval=4)
    if draw.dice.random() < 0.3:
        draw.change(extra=(*draw.job.extra, "--async-save"))
    if 0 not in draw.victims:
        draw.victims[0] = 0
    draw.victims.remove(0)
    draw.victims.append(0)  # the first that is hit
    point, occurrence = draw.dice.choice(
        ((FaultPoint.EVALUATE, 1), (FaultPoint.CHECKPOINT, 2), (FaultPoint.CHECKPOINT_TRACKER, 2), (FaultPoint.OPTIMIZER, 3))
    )
    rank = 0 if point in (FaultPoint.CHECKPOINT, FaultPoint.CHECKPOINT_TRACKER) else draw.rank(point)
    draw.faults.append(Fault(replica=draw.victims.pop(), rank=rank, point=point, occurrence=occurrence))
    if draw.victims and draw.dice.random() < 0.5:
        draw.strike(FaultPoint.OPTIMIZER, None, kind=FaultKind.KILL, occurrence=draw.dice.randint(4, 9))
    if draw.dice.random() < 0.6:
        draw.newcomer(0, (*OUTSIDE, FaultPoint.ADMITTED, FaultPoint.EVALUATE, FaultPoint.BEFORE_REDUCE, FaultPoint.AFTER_VOTE))
    return draw.comeback(saves=True)


def _stopped(draw: _Draw) -> Scenario:
    """The launcher gets SIGTERM while a newcomer is on its way."""
    draw.loss()
    point = draw.dice.choice((*OUTSIDE[1:], FaultPoint.ADMITTED))
    sleeps = (f"sleep {draw.dice.choice((1, 60))}",) if point is FaultPoint.FORM else ()
    draw.act(0, point, "term", *sleeps)
    return draw.comeback(saves=True)


def _at_any_time(draw: _Draw) -> Scenario:
    """Ranks of members and newcomers are killed from outside at any time; one replica is spared."""
    after_s = draw.dice.choice(((0.2, 2.0), (1.0, 4.0), (3.0, 7.0)))
    kills = Kills(number=draw.dice.randint(3, 6), after_s=after_s, seed=draw.dice.randrange(2**32))
    return draw.comeback(kills=kills, full_step_s=0.3)


def _scale(draw: _Draw) -> Scenario:
    """The job grows and shrinks, in either order, while members and newcomers die. Who asks is never hit, and never leaves.

    The second request may replace the first one before that is carried out.
    """
    draw.several(2)
    start = min(draw.job.replicas, 3)
    draw.change(replicas=start, run_flags=("--spares", str(draw.num_ranks)))
    # With the lowest id: the highest leave.
    draw.victims = draw.dice.sample(range(1, start), start - 1)
    grows = draw.dice.random() < 0.6
    numbers = (start + 1, draw.dice.choice((start - 1, start))) if grows else (start - 1, draw.dice.choice((start, start + 1)))
    for number, steps in zip(numbers, (range(1, 4), range(6, 19)), strict=True):
        at = Fault(replica=0, rank=draw.rank(FaultPoint.OPTIMIZER), point=FaultPoint.OPTIMIZER, step=draw.dice.choice(steps))
        draw.acts.append(Act(at, f"scale {number}"))
    draw.loss(draw.dice.randint(1, 8))
    if draw.dice.random() < 0.5:
        draw.newcomer(draw.dice.randrange(2), (*OUTSIDE, *INSIDE))
    if draw.victims and draw.dice.random() < 0.5:
        draw.act(0, draw.dice.choice((*OUTSIDE[1:], *INSIDE)), draw.kill(draw.victims.pop()))
    return draw.comeback(full=max(start, *numbers), full_step_s=0.3)


def _healing(drawn: Callable[[_Draw], Scenario]) -> Callable[[Draw], Scenario]:
    return lambda draw: drawn(_Draw(draw))


KINDS: Mapping[str, tuple[int, Callable[[Draw], Scenario]]] = {
    "comeback": (8, _healing(_coming_back)),
    "comeback of two at once": (6, _healing(_together)),
    "death before admission": (8, _healing(_outside)),
    "death in a first step": (8, _healing(_inside)),
    "death beside a newcomer": (8, _healing(_beside)),
    "death after admission": (6, _healing(_after_admission)),
    "all replaced": (5, _healing(_all_replaced)),
    "spare slots": (4, _healing(_spares)),
    "drain beside a newcomer": (4, _healing(_drain)),
    "scale": (9, _healing(_scale)),
    "comeback between saves": (6, _healing(_evaluations_and_saves)),
    "end beside a newcomer": (4, _healing(_stopped)),
    "kills at any time": (8, _healing(_at_any_time)),
}
"""As `scenarios.KINDS`."""
