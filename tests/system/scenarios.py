"""What a run of the campaign is: a job of some shape and the faults that strike it, both decided by one seed.

`KINDS` says what can happen to a job and how often; `judging.EXPECTATIONS` says what is promised then. Every fault point, every
kind of fault and every shape of up to eight processes comes up. In the kinds of this module at least one replica is never hit,
and no job waits for newcomers; in those of `comebacks.py` what is lost comes back. The first fault of a scenario is sure to
strike; one in a recovery strikes if the recovery gets there.

Half of the jobs with the plain script have healing on, as users have it: `faults in steps`, `death at the start`, `fault in an
evaluation` and `death of a writer`. What is promised for these kinds holds whoever is in the roster: the result and the proof
of `check`. Newcomers form beside recoveries and ends of the job, and join if there is time. Healing stays off in the others:

- Scripts of their own (`fault in a transfer`, `death in a running pass`, `miscount`, drifts) count on the replicas of the start
  to bring a situation about.
- Of strikes on launcher, disk and nodes it is judged who was removed, and what the ranks of the start kept of their events. A
  newcomer may be removed for a stop or a stall of the others, and nobody has kept its events.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping

from megatron_recover.cluster.chaos import IN_A_STEP
from megatron_recover.core.placement import Placement
from megatron_recover.faults import Fault, FaultKind, FaultPoint
from tests.system import comebacks
from tests.system.placing import hosted
from tests.system.plans import (
    COMPARED,
    IN_A_PASS,
    MISCOUNTING,
    NARROW,
    PATIENT,
    PLAIN,
    SILENT,
    STEPS,
    STRUCK,
    UNEVEN,
    Draw,
    Drift,
    Miscount,
    Scenario,
)  # fmt: skip
from tests.system.strikes import NODE_TIMEOUT_S, SHORT_CUT_S, Strike, StrikeKind


def _in_steps(draw: Draw) -> Scenario:
    """Faults in any step, at once and in recoveries from each other."""
    step = draw.dice.randrange(2)
    while draw.victims and step < STEPS:
        # Faults in a recovery are what is hardest to get right, and what few of them reach.
        often = (draw.single, draw.together, draw.chain, draw.chain, draw.chain, draw.in_flight)
        happens: Callable[[int], None] = draw.dice.choice(often)
        happens(step)
        step += draw.dice.randint(1, 2)  # where a replica lags behind, the next one strikes inside the recovery from this one
    if draw.dice.random() < 0.15:
        draw.slow_down()
    return draw.scenario()


def _start_up(draw: Draw) -> Scenario:
    draw.faults.append(
        Fault(replica=draw.victims.pop(), rank=draw.dice.randrange(draw.num_ranks), point=FaultPoint.START_UP)
    )  # fmt: skip
    draw.later(IN_A_STEP[:4])
    return draw.scenario()


def _evaluate(draw: Draw) -> Scenario:
    draw.change(eval_interval=2)
    draw.strike(FaultPoint.EVALUATE, None, occurrence=draw.dice.randint(1, 2))
    draw.later(IN_A_STEP[:4])
    return draw.scenario()


def _checkpoint(draw: Draw) -> Scenario:
    draw.change(save_interval=2)
    if 0 not in draw.victims:
        draw.victims[0] = 0
    draw.victims.remove(0)
    point = draw.dice.choice((FaultPoint.CHECKPOINT, FaultPoint.CHECKPOINT_TRACKER))
    draw.faults.append(Fault(replica=0, rank=0, point=point, occurrence=2))
    if draw.dice.random() < 0.5:
        draw.change(extra=(*draw.job.extra, "--async-save"))
    draw.later(IN_A_STEP[:4])
    return draw.scenario(saves=True)


def _transfer(draw: Draw) -> Scenario:
    """In its step 1 replica 0 alone holds all: it is the source, the others are targets."""
    draw.strike(FaultPoint.TRANSFER, 1)
    draw.later(IN_A_STEP[:4])
    return draw.scenario(script=UNEVEN)


def _in_flight(draw: Draw) -> Scenario:
    """As `Draw.in_flight`, and for certain. The script waits for who is to die in a pass: nobody else may fail in one."""
    dice = draw.dice
    rank, point = dice.randrange(draw.num_ranks), dice.choice(IN_A_PASS)
    draw.faults.append(Fault(replica=draw.victims.pop(), rank=rank, point=point, step=1))
    if draw.victims:
        draw.strike(FaultPoint.RECOMPUTE, 1)
    draw.later(IN_A_STEP[2:4])
    return draw.scenario(script=PATIENT)


def _stopped_launcher(draw: Draw) -> Scenario:
    return draw.struck(StrikeKind.STOP, draw.dice.choice((0.2, 1.0, 2.0, 4.0)), is_killed=False)


def _stopped_launcher_and_death(draw: Draw) -> Scenario:
    """Longer than `follow_s`, too, and longer than `stall_s`."""
    return draw.struck(StrikeKind.STOP, draw.dice.choice((0.2, 1.0, 4.0, 8.0)), is_killed=True)


def _stalled_disk(draw: Draw) -> Scenario:
    return draw.struck(StrikeKind.STALL, draw.dice.choice((0.3, 2.0, 5.0, 8.0)), is_killed=draw.dice.random() < 0.5)


def _full_disk(draw: Draw) -> Scenario:
    """For ever, or until there is room again, perhaps after so long that rings with little room have lost events."""
    if draw.dice.random() < 0.6:
        draw.change(module=NARROW)
    return draw.struck(StrikeKind.FULL, draw.dice.choice((None, 0.3, 0.6, 1.0)), is_killed=draw.dice.random() < 0.5)


def _failing_disk(draw: Draw) -> Scenario:
    return draw.struck(StrikeKind.FAIL, None, is_killed=draw.dice.random() < 0.5)


def _drift(draw: Draw) -> Scenario:
    """After a save, so that there is something to go on from. Any replica may be the one, also the writer."""
    dice, interval = draw.dice, draw.dice.choice((1, 2, 16))
    draw.change(save_interval=2, extra=(*draw.job.extra, COMPARED[0], str(interval)))
    drift = Drift(
        replica=dice.randrange(draw.job.replicas), rank=dice.randrange(draw.num_ranks), step=dice.randint(3, STEPS),
        what=dice.choice(("exp_avg", "exp_avg_sq", "weight", "buffer")), interval=interval,
    )  # fmt: skip
    return draw.scenario(script=SILENT, saves=True, drift=drift)


def _miscount(draw: Draw) -> Scenario:
    """And perhaps a death some steps later."""
    step = draw.dice.randrange(3)
    miscount = Miscount(replica=draw.dice.randrange(draw.job.replicas), step=step)
    if draw.dice.random() < 0.5:
        draw.strike(draw.dice.choice(IN_A_STEP), step + 2, kind=FaultKind.KILL)
    return draw.scenario(script=MISCOUNTING, miscount=miscount)


def _lost_node(draw: Draw) -> Scenario:
    """A node without the coordinator, when any rank passes any point, and perhaps another death about then."""
    also_kills, saves = draw.job.replicas > 2 and draw.dice.random() < 0.5, draw.dice.random() < 0.4
    if saves:
        draw.saving()
    slots, node = draw.on_nodes(
        lambda placed, node: node > 0 and 0 < len(hosted(placed, node)) < len(placed.replicas) - also_kills
    )  # fmt: skip
    at = draw.anywhere(draw.dice.randrange(draw.job.replicas), saves=saves)
    if also_kills:
        at = draw.kill_besides(hosted(draw.placed(slots), node), at)
    return draw.scenario(script=STRUCK, saves=saves, slots=slots, strike=Strike(kind=StrikeKind.LOSS, node=node, at=at))


def _lost_writers_node(draw: Draw) -> Scenario:
    """The node of the writer's leader, in the middle of a save."""
    draw.saving()
    slots, node = draw.on_nodes(lambda placed, node: node > 0 and placed.replicas[0][0].node == node)
    return draw.scenario(
        script=STRUCK, saves=True, slots=slots, strike=Strike(kind=StrikeKind.LOSS, node=node, at=_in_a_save(draw))
    )  # fmt: skip


def _lost_coordinators_node(draw: Draw) -> Scenario:
    """The first node, with ranks or without any, after the first save."""
    draw.saving()
    has_ranks = draw.dice.random() < 0.5
    slots, node = draw.on_nodes(lambda placed, node: node == 0 and bool(hosted(placed, 0)) is has_ranks)
    at = Fault(replica=draw.job.replicas - 1, rank=0, point=FaultPoint.OPTIMIZER, occurrence=draw.dice.randint(4, 8))
    return draw.scenario(script=STRUCK, saves=True, slots=slots, strike=Strike(kind=StrikeKind.LOSS, node=node, at=at))


def _short_cut(draw: Draw) -> Scenario:
    """Of any node, also of the coordinator's."""
    return _cut(draw, draw.dice.uniform(*SHORT_CUT_S), lambda placed, node: True)


def _long_cut(draw: Draw) -> Scenario:
    """Of a node without the coordinator, which returns or not."""
    seconds = draw.dice.choice((NODE_TIMEOUT_S + draw.dice.uniform(2.0, 4.0), None))
    return _cut(draw, seconds, lambda placed, node: node > 0 and bool(hosted(placed, node)))


def _cut(draw: Draw, seconds: float | None, fits: Callable[[Placement, int], bool]) -> Scenario:
    """Perhaps of the writer's node in the middle of a save: the writer goes on behind the cut."""
    saves = draw.dice.random() < 0.5
    if saves:
        draw.saving()
    slots, node = draw.on_nodes(fits)
    is_writers = draw.placed(slots).replicas[0][0].node == node
    at = _in_a_save(draw) if saves and is_writers else draw.anywhere(draw.dice.randrange(draw.job.replicas), saves=saves)
    one_way = draw.dice.choice((None, None, "in", "out"))
    strike = Strike(kind=StrikeKind.CUT, node=node, at=at, seconds=seconds, one_way=one_way)
    return draw.scenario(script=STRUCK, saves=saves, slots=slots, strike=strike)


def _in_a_save(draw: Draw) -> Fault:
    """Before the writer has written anything of its second checkpoint, or before it names that."""
    point = draw.dice.choice((FaultPoint.CHECKPOINT, FaultPoint.CHECKPOINT_TRACKER))
    return Fault(replica=0, rank=0, point=point, occurrence=2)


KINDS: Mapping[str, tuple[int, Callable[[Draw], Scenario]]] = {
    "faults in steps": (50, _in_steps),
    "death at the start": (5, _start_up),
    "fault in an evaluation": (5, _evaluate),
    "death of a writer": (5, _checkpoint),
    "fault in a transfer": (5, _transfer),
    "death in a running pass": (5, _in_flight),
    "stopped launcher": (3, _stopped_launcher),
    "stopped launcher and a death": (5, _stopped_launcher_and_death),
    "stalled disk": (4, _stalled_disk),
    "full disk": (5, _full_disk),
    "failing disk": (2, _failing_disk),
    "drift": (6, _drift),
    "miscount": (3, _miscount),
    "lost node": (8, _lost_node),
    "lost node of the writer": (4, _lost_writers_node),
    "lost node of the coordinator": (3, _lost_coordinators_node),
    "short cut": (4, _short_cut),
    "long cut": (5, _long_cut),
    **comebacks.KINDS,
}
"""How often each comes up, in parts of all, and what draws it."""
HEALING = 0.5
"""Share of the jobs with the plain script that heal."""


def scenario(seed: int, *, fsdp2: bool = False) -> Scenario:
    """The scenario of a seed; with `fsdp2` its replicas are sharded."""
    draw = Draw(seed, fsdp2=fsdp2)
    [(draw.kind, (_, drawn))] = draw.dice.choices(list(KINDS.items()), [weight for weight, _ in KINDS.values()])
    plan = drawn(draw)
    if plan.script == PLAIN and random.Random(f"heals {seed}").random() < HEALING:
        plan = dataclasses.replace(plan, job=dataclasses.replace(plan.job, heal="in-place"))
    return plan.sharded() if fsdp2 else plan
