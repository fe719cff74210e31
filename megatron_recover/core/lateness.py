"""Decides which members are late, from what members report, from saves and work, and from timers.

These are handlers of the machine of membership (`core/coordinator.py`). `core/excuses.py` decides
which waits are evidence, and `core/blame.py` whom the evidence names.

Note [Waiting for a save]
    A replica that saves takes part in no step. So the waits of the others expire, and they request
    a new generation. The first request during a save gets one, which proves that all members
    answer: a stopped or dead process does not enter it. Later requests wait until the save is over,
    and then lead to one more generation. So a save costs at most two generations, and each loss
    during the save one more. None of them counts as fruitless, and nobody is suspected. A save that
    exceeds `save_s` is not excused any more.

Note [Waiting for one at work]
    A replica may read data, compile, digest its state or compute longer than the others wait in a
    sum. Only its progress page shows that the network is not at fault. So the agents report all
    replicas at work (`AtWork`; the rule is in `core/detector.py`). A step needs every member. While
    one is at work nobody can be called late for the step:

    - Generations are made as usual, which proves that all members answer.
    - Waits are no evidence against anybody, nor are earlier waits in the same step.
    - The coordinator also waits for a member at work that does not enter a generation: a thread
      that computes may hold the interpreter's lock.

    The timer `excuse` ends this. Each such member is reported once, with the longest excused time
    (`Waits`), until a step is committed or a replica is lost. `AtWork` lists all replicas at work,
    so the next one repairs a lost, late or repeated one. Without `AtWork` no work is excused. Work
    does not excuse another member's overdue save: meanwhile generations count as usual, and only
    the member that saves can be named for them.

Note [Timers]
    An expired timer shows that a member is late compared with others. Without a member that is in
    time nobody is late, so no timer removes the last members. What each timer does:

    - `follow` removes the members that have not entered the generation, if another has. It waits
      for members at work. If nobody has entered, the job waits and reports this (`Waits`); the
      first member that enters then gives the others the full time once more.
    - `finish` removes the members that have not finished. It counts only while the member that
      started it is in the roster, and is armed again during a save.
    - `grace` makes a generation with the same roster. After `trouble` ran out it removes, instead,
      the member that the evidence names, else one that works beyond `excuse`; never the only one.
      If neither of two members is named and `trouble` ran out twice, it removes the higher id. From
      the third fruitless generation on it takes `follow_s`.
    - `trouble` starts with the first generation that is requested without a save or work to excuse
      the request. Work is no excuse while an overdue save is evidence. `trouble` runs twice, and
      counts until the evidence is dropped: by a committed step, a loss, an excuse, or the end of an
      overdue save. It removes nobody by itself.
    - `excuse` starts with the first generation that is requested while a member is at work, or when
      `follow` runs out for members at work alone. It counts until a step is committed or a replica
      is lost. After it (the user's deadline) work excuses nobody, and `trouble` starts with the
      next request.
    - `gather` makes a generation with the newcomers that are ready (`core/joining.py`).
    - `undecided` starts with the first generation, after `trouble` ran out, for which the evidence
      names nobody. It counts as long as `trouble`. It ends the job after the user's deadline.
    - `save` makes an overdue save evidence against the member. If no other save is in progress, it
      then does what `grace` does for a request that waits.
    - `lease` starts when the holder of a grant is lost. It ends that grant, so that the next one is
      given (`core/grants.py`, Note [Lease]). It removes nobody.
    - `start` removes the replicas that sent no `Hello`, if another did and is not lost. Otherwise
      `load` is armed once more.
    - `load` ends the job if no replica is ready. There is no member yet and no training to lose.
      Of `start` and `load` only the one that was armed last counts.
"""

from __future__ import annotations

import functools

from msgspec.structs import replace

from megatron_recover.core import generations, grants, newcomers
from megatron_recover.core.blame import Report, culprit, on_its_nodes, own_deadlines, with_missed_deadline, with_report
from megatron_recover.core.coordinator_state import Arm, AtWork, CoordinatorState, OpenSave, Progressed, TimerFired, Waits
from megatron_recover.core.excuses import (
    after_progress,
    are_waits_excused,
    at_work_for_too_long,
    excuse,
    with_waits,
    without_evidence,
    working,
)  # fmt: skip
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.generations import Step
from megatron_recover.core.membership_messages import Entered, Loss, LossKind, ReplicaBlocked, ReplicaSaving


def on_entered(state: CoordinatorState, entered: Entered) -> Step:
    """Record a member's entry, its unexcused waits and its step. A newer step drops evidence."""
    if entered.generation != state.generation or entered.replica not in generations.members(state):
        return state, ()
    state = _reached(state, entered.step)
    if entered.waited_for and not state.excused:
        others = (each for each in state.waits if each.accuser != entered.replica)
        wait = Report(entered.replica, entered.generation - 1, entered.for_votes, entered.waited_for)
        state = replace(state, waits=tuple(sorted((*others, wait))))
    state = replace(state, entered=tuple(sorted({*state.entered, entered.replica})))
    if not state.all_late:
        return state, ()
    # The running timer may fire at once, which would leave the other members no time.
    state = replace(state, follow=f"{state.follow} again", all_late=False)
    return state, (Arm(state.follow, "follow_s"),)


def on_progressed(state: CoordinatorState, progressed: Progressed) -> Step:
    """Drop all evidence if the member's beat shows that a step was committed since."""
    return (_reached(state, progressed.step) if progressed.replica in generations.members(state) else state), ()


def _reached(state: CoordinatorState, step: int) -> CoordinatorState:
    """Record that all steps before `step` are committed. If this is new, drop all evidence."""
    if step <= state.step:
        return state
    return replace(after_progress(state), step=step, evidence_from=state.generation)


def on_blocked(state: CoordinatorState, request: ReplicaBlocked) -> Step:
    """Record unexcused evidence. The generation's first request waits for its grace or a save."""
    is_stale = request.generation != state.generation
    is_late = is_stale and request.stalled and state.evidence_from <= request.generation < state.generation
    if request.replica not in state.roster or (is_stale and not is_late):
        return state, ()
    if not are_waits_excused(state):
        # A leader whose wait has expired names nobody yet: `Entered` does.
        waits = not request.suspects and not request.stalled
        told = with_report(state.evidence, request.replica, request.suspects, request.generation, for_votes=waits)
        state = replace(state, evidence=told)
    members, is_armed = generations.members(state), bool(state.reason)
    if is_stale or (is_armed and (state.reason_by in members or request.replica not in members)):
        return state, ()  # the reason of a newcomer would go with it, and is replaced by that of a member
    reason = f"replica {request.replica}: {request.reason}"
    state = replace(state, reason=reason, reason_by=request.replica, reason_excused_by=working(state))
    if is_armed:
        return state, ()
    if any(save.generation < state.generation for save in state.saves):
        return state, ()  # a generation was made during the save already: no need of another
    # Repeated failures are not retried without a pause.
    return state, (Arm(f"grace {state.generation}", "grace_s" if state.fruitless < 2 else "follow_s"),)


def on_at_work(state: CoordinatorState, news: AtWork) -> Step:
    """Record which replicas are at work, for the next request, generation or timer."""
    return replace(state, at_work=news.replicas), ()


def on_saving(state: CoordinatorState, busy: ReplicaSaving) -> Step:
    """Start a save's timer. An overdue save's end drops evidence; the last end answers requests."""
    if busy.replica not in state.roster:
        return state, ()
    others = tuple(save for save in state.saves if save.replica != busy.replica)
    if busy.over:
        if busy.replica in state.evidence.overdue:  # the save was overdue, and what it kept waiting goes on
            state = without_evidence(state)
        return _saved(replace(state, saves=others)) if others != state.saves else (state, ())
    number = state.num_saves + 1
    state = replace(state, saves=(*others, OpenSave(busy.replica, number, state.generation)), num_saves=number)
    return state, (Arm(f"save {number}", "save_s"),)


def _saved(state: CoordinatorState) -> Step:
    """Make the requested generation, if any, when the last save is over; excuse waits for it."""
    if not state.reason or state.saves:
        return state, ()
    state, effects = generations.announce(state, (), state.reason)
    # A request that is still on its way, or repeated, comes from a wait for that save, too.
    return replace(state, excused=True, evidence_from=state.generation), effects


def on_expired(state: CoordinatorState, expired: TimerFired) -> Step:
    """Act on a timer that is not stale, by Note [Timers]."""
    expired_saves = tuple(save for save in state.saves if expired.timer == f"save {save.number}")
    if expired_saves:
        left = tuple(save for save in state.saves if save not in expired_saves)
        evidence = functools.reduce(with_missed_deadline, (save.replica for save in expired_saves), state.evidence)
        state = replace(state, saves=left, evidence=evidence)
        return _same_roster(state) if state.reason and not left else (state, ())
    if expired.timer == state.grants.lease:
        return generations.give_next(state, grants.lapsed(state.grants, expired.timer))
    if expired.timer == state.follow and state.generation:
        return _followed_late(state)
    if expired.timer == state.trouble:
        again = () if state.patience else (Arm(f"{state.trouble} again", "blame_s"),)
        return replace(state, patience=state.patience + 1, trouble=f"{state.trouble} again"), again
    if expired.timer == state.excuse:
        return replace(state, is_excuse_over=True, reason_excused_by=()), ()
    if expired.timer == state.undecided:
        why = f"no step was committed in {state.fruitless} generations and --recover-deadline-s has passed"
        return generations.end(
            state, ExitCode.FAILED, f"{why}; the evidence names nobody at fault: read why each generation was made"
        )
    if expired.timer == f"gather {state.generation}" and state.ready:
        return newcomers.gathered(state)
    if expired.timer == f"grace {state.generation}" and state.reason:
        return _same_roster(state)
    if expired.timer == state.start and not state.generation:
        return _started_late(state, is_start=expired.timer.startswith("start"))
    done = {item.replica for item in state.finished}
    # If the finished member is gone, the others may not know that it finished: they are not late.
    if expired.timer in {f"finish {replica}" for replica in state.roster if replica in done}:
        if state.saves:
            return state, (Arm(expired.timer, "finish_s"),)
        late = tuple(replica for replica in state.roster if replica not in done)
        detail = f"did not finish after replica {expired.timer.removeprefix('finish ')} had"
        return generations.remove(state, tuple(Loss(replica, LossKind.SUSPECTED, detail) for replica in late), detail)
    return state, ()


def _followed_late(state: CoordinatorState) -> Step:
    """Remove the late members that are not at work, if another member has entered.

    If all late ones are at work, excuse them. If nobody has entered, report that. In both cases arm
    `follow` again. Do nothing if nobody is late.
    """
    late = tuple(replica for replica in generations.members(state) if replica not in state.entered)
    at_work = tuple(replica for replica in working(state) if replica in late) if state.entered else ()
    gone = tuple(replica for replica in late if replica not in at_work)
    if gone and state.entered:
        detail = f"did not enter generation {state.generation}"
        return generations.remove(state, tuple(Loss(replica, LossKind.SUSPECTED, detail) for replica in gone), detail)
    if not late:
        return state, ()
    again = Arm(state.follow, "follow_s")
    if at_work:
        state, effects = excuse(state, at_work)
        return state, (*effects, again)
    reason = f"no member has entered generation {state.generation} in time, so none is late: waiting for the first"
    return replace(state, all_late=True), (Waits(late, reason), again)


def _started_late(state: CoordinatorState, *, is_start: bool) -> Step:
    """Remove the replicas without `Hello`; after `start` with none ready, arm `load` instead."""
    here = {item.replica for item in state.hellos} | {loss.replica for loss in state.losses}
    late = tuple(replica for replica in range(state.policy.num_replicas) if replica not in here)
    if is_start and not state.hellos:
        state, armed = generations.arm_start(state, "load", "deadline_s")
        return state, (Waits(late, "the replicas that were ready have ended: waiting for the others"), *armed)
    return generations.remove(
        state, tuple(Loss(replica, LossKind.SUSPECTED, "did not start") for replica in late), "did not start"
    )


def _same_roster(state: CoordinatorState) -> Step:
    """Make a generation of the same roster, or `_blame` if `trouble` ran out unexcused (INV-9)."""
    if state.saves:
        return generations.announce(state, (), state.reason)
    at_work = tuple(sorted({*state.reason_excused_by, *working(state)}))
    if state.joins and not at_work and generations.members(state) != state.roster:
        return newcomers.without_unproven(state)
    state = replace(state, fruitless=state.fruitless + 1)
    if at_work and not own_deadlines(state.evidence).overdue:
        state, effects = generations.announce(state, (), state.reason)
        state, excuses = excuse(state, at_work)
        return state, effects + excuses
    state = with_waits(state)
    first = () if state.trouble else (Arm(f"trouble {state.generation}", "blame_s"),)
    state = replace(state, trouble=state.trouble or f"trouble {state.generation}")
    state, effects = _blame(state) if state.patience else generations.announce(state, (), state.reason)
    return state, first + effects


def _blame(state: CoordinatorState) -> Step:
    """Remove the member that the evidence names, with its node, else one beyond `excuse`.

    Never remove the only member. If neither of two is named, remove the higher id once `trouble`
    ran out twice. Otherwise make a generation of the same roster; the first one starts `undecided`.
    """
    how = f"in {state.fruitless} generations without a committed step; the last: {state.reason}"
    named = culprit(state.evidence, state.roster)
    mates = () if named is None else on_its_nodes(named, state.evidence, state.roster, state.policy.nodes)
    named = at_work_for_too_long(state) if named is None else named
    if named is not None and len(state.roster) > 1:
        detail = f"at fault by what members reported of each other {how}"
        losses = tuple(Loss(each, LossKind.SUSPECTED, detail) for each in sorted({named, *mates}))
        return generations.remove(state, losses, detail)
    if len(state.roster) == 2 and state.patience > 1:
        # Neither is known to be at fault. One alone needs no network; the lower id is the writer.
        stays, leaves = state.roster
        why = "the evidence does not show which of the two is at fault"
        detail = f"set aside so that replica {stays} can go on: {why} {how}"
        return generations.remove(state, (Loss(leaves, LossKind.SUSPECTED, detail),), detail)
    first = () if state.undecided else (Arm(f"undecided {state.generation}", "deadline_s"),)
    state = replace(state, undecided=state.undecided or f"undecided {state.generation}")
    state, effects = generations.announce(state, (), f"the evidence names nobody at fault {how}")
    return state, first + effects
