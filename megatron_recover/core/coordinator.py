"""The machine of membership: who is in the job. The only place where generations are made.

`step(state, input) -> (state, effects)`. It knows no address, clock or process: the driver maps replica ids to links, arms
timers and kills. What a loss leads to is `core/policy.py`.

Caller's contract
-----------------
* One coordinator, one state, inputs in any order; effects carried out in order before the next input.
* A link to a leader that breaks is no input by itself: the agent reports the end of the process as `Lost`, of the kind that
  `policy.loss_of` gives it. A leader that sends what no leader sends is `Lost(SUSPECTED)`. If the agent is gone the run fails.
* `Announce`: send `NewGeneration` to all leaders of its roster (with the addresses of all, which core does not know).
* `Fence`: kill all ranks of the replica, for certain; never wait for it.
* `Arm(timer, setting)`: feed `TimerFired(timer)` once after the seconds of that setting; timers are never disarmed (stale ones
  are dropped by name).
* `Waits`: tell the user for whom the job waits, why, and for how long at most that is excused. Nothing else depends on it.
* `EndJob`: send `Stop(exit_code, reason)` to all leaders, end the run with that code. Nothing follows it.

Note [Waiting for a save]
    A replica that saves takes part in no step, so the others' waits for it expire and they ask for a new generation. The first
    request of a save gets one, which shows that all members still answer: a process that is stopped or dead does not enter
    it. Later requests are kept until the save is over, and lead to one more generation then. So a save costs two generations
    at most, however long it takes, and the losses of replicas that end meanwhile one each; none counts as fruitless and
    nobody is suspected. A save that takes longer than its limit is excused no more.

Note [Waiting for one at work]
    A replica may read data, compile, digest its state or compute for longer than the others wait for it in a sum. Only its own
    progress page tells that from a fault of the network, so the agents say who is at work (`AtWork`: core/detector.py has the
    rule). A step needs every member, so while one is at work nobody can be told late: generations are made as ever, which
    shows that all members answer, but what is waited for meanwhile is no evidence against anybody, nor is what was waited for
    before in this step. Who is at work and does not enter a generation (a thread that computes may hold the interpreter's
    lock) is waited for as well. `excuse` ends that, and judging takes its time after it. Of each such member the job says once
    that it is waited for, and for how long at most it is excused (`Waits`); anew only when a step was committed or a replica
    lost.
    An `AtWork` has all who are, so one that is lost, late or repeated is mended by the next. Without news nobody is excused.
    The work of one excuses no save of another that is overdue: as long as that goes on, generations count as ever, and nobody
    but who saves can be named for them.

Note [Timers]
    A timer says that somebody is late, and being late is relative: without one that is in time nobody is late. So a timer
    never removes the last members, however long all of them take; only their own ends do. Timer by timer:

    - `follow`: removes the members that have not entered the generation, if another has. If nobody has entered, the job
      waits, and says for whom (`Waits`). The first member that then enters gives the others the full time once more. It also
      waits for members that are at work.
    - `finish`: removes the members that have not finished. It runs only while a member that has finished is in the roster,
      so this one stays.
    - `grace`: leads to the same roster again. When `trouble` has run out it removes the member that the evidence names, never
      the only one. Where the evidence names none of two members, and it has run out twice, the higher id is set aside.
      Otherwise it tries again, from the third time on with a pause (`follow_s`), and says so in each reason.
    - `trouble`: runs twice, one after the other, from the first of the generations that are made without a loss, until a step
      is committed or a replica is lost. It does nothing by itself: what lasts for so long is no passing disturbance.
    - `excuse`: runs from the first generation in which members waited for one that was at work, until a step is committed or a
      replica is lost. Then nobody is excused by work any more: it is the user's one deadline. What
      members wait for from then on is judged as ever, by `trouble`.
    - `undecided`: runs from the first generation for which the evidence names nobody, until a step is committed or a replica is
      lost. Then the job ends, without having removed anybody: it has waited for the user's one deadline.
    - `save`: removes nobody by itself. A save that is overdue is evidence against the member.
    - `start`: removes the replicas that have not said hello, if another has and still lives. Otherwise they get the time to
      load once more.
    - `load`: ends the job, as besides only `undecided` does. No replica has become ready in that time, so there is no member
      yet and no training that could be lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from megatron_recover.core.alike import differences, told
from megatron_recover.core.blame import culprit, heard, overdue, own_deadlines
from megatron_recover.core.coordinator_state import (
    Announce,
    Arm,
    AtWork,
    CoordinatorState,
    Effect,
    EndJob,
    ExitAsked,
    Fence,
    Input,
    Launched,
    Lost,
    Policy,
    Progressed,
    Save,
    Setting,
    TimerFired,
    Waits,
)
from megatron_recover.core.excuses import (
    are_waits_excused,
    at_work_for_too_long,
    excuse,
    fruitful,
    with_waits,
    without_evidence,
    working,
)  # fmt: skip
from megatron_recover.core.policy import all_finished, nobody_left, poisoned
from megatron_recover.core.request import MISCOUNTED, TOO_FEW, exit_for
from megatron_recover.core.values import (
    Busy,
    Diverged,
    Entered,
    ExitCode,
    Failing,
    Finished,
    Hello,
    Loss,
    LossKind,
    Miscounted,
    NewGeneration,
    Requested,
    Void,
)
from megatron_recover.core.vote import unite

__all__ = [
    "Announce", "Arm", "AtWork", "CoordinatorState", "Effect", "EndJob", "ExitAsked", "Fence", "Input", "Launched", "Lost",
    "Policy", "Progressed", "Save", "Setting", "TimerFired", "Waits", "step",
]  # fmt: skip

# --- The machine ---------------------------------------------------------------------------------------------------------

Step = tuple[CoordinatorState, tuple[Effect, ...]]


def step(state: CoordinatorState, message: Input) -> Step:
    """Take one input. Once the job is over nothing has an effect any more."""
    if state.over:
        return state, ()
    return TABLE[type(message)](state, message)


def _on_launched(state: CoordinatorState, _: Launched) -> Step:
    """Give the first replica its time to load."""
    return state, (Arm("load", "deadline_s"),)


def _on_hello(state: CoordinatorState, hello: Hello) -> Step:
    """Note the hello of a replica of this job; with the last one that was missing, make generation 1."""
    known = {item.replica for item in state.hellos} | {loss.replica for loss in state.losses}
    if hello.replica in known or not 0 <= hello.replica < state.policy.num_replicas or state.generation:
        return state, ()
    first = not state.hellos
    state = replace(state, hellos=tuple(sorted((*state.hellos, hello), key=lambda item: item.replica)))
    arm = (Arm("start", "start_s"),) if first else ()
    state, effects = _start_when_complete(state)
    return state, arm + effects


def _start_when_complete(state: CoordinatorState) -> Step:
    """Generation 1, when every replica has said hello or is gone."""
    if len(state.hellos) + len(state.losses) < state.policy.num_replicas:
        return state, ()
    if not state.hellos:
        return _nobody_left(state)
    first = state.hellos[0]
    for other in state.hellos[1:]:
        if other.fingerprint != first.fingerprint:
            found = differences(first.parts, other.parts) or [("the fingerprint", first.fingerprint, other.fingerprint)]
            return _end(
                state,
                ExitCode.FAILED,
                f"replicas {first.replica} and {other.replica} do not start alike: "
                f"{told(first.replica, other.replica, found)}; use the same script, flags, packages, data and checkpoint",
            )
    if len(state.hellos) < state.policy.min_replicas:
        detail = f"{len(state.hellos)} of {state.policy.num_replicas} replicas started, {state.policy.min_replicas} are needed"
        return _end(state, ExitCode.TOO_FEW_REPLICAS, detail)
    return _announce(replace(state, roster=tuple(item.replica for item in state.hellos)), state.losses, "start")


def _announce(state: CoordinatorState, losses: tuple[Loss, ...], reason: str) -> Step:
    """Make the next generation, or end the job if nobody is left to be in it."""
    if not state.roster:
        return _nobody_left(state)
    if {item.replica for item in state.finished} >= set(state.roster):
        return _finish(state)
    if len(state.roster) < state.policy.min_replicas:
        state = replace(state, requests=unite((state.requests, (TOO_FEW,))))
    generation, follow = state.generation + 1, f"follow {state.generation + 1}"
    state = replace(
        with_waits(state),
        generation=generation,
        entered=(),
        follow=follow,
        all_late=False,
        reason="",
        reason_excused_by=(),
        excused=bool(losses or state.reason_excused_by) or are_waits_excused(state),
    )
    new = NewGeneration(generation, state.roster, losses, reason, state.requests, state.trusted_from, state.void)
    return state, (Announce(new), Arm(follow, "follow_s"))


def _on_lost(state: CoordinatorState, lost: Lost) -> Step:
    """Fence the replica and announce a generation without it, or end the job."""
    return _remove(state, (lost.loss,), lost.loss.kind.value)


def _remove(state: CoordinatorState, losses: tuple[Loss, ...], reason: str) -> Step:
    """Take replicas out of the job for good, and fence what is left of them."""
    gone = {loss.replica for loss in state.losses}
    done = {item.replica for item in state.finished}
    losses = tuple(loss for loss in losses if loss.replica not in gone)
    if not losses:
        return state, ()
    fences: tuple[Effect, ...] = tuple(Fence(loss.replica) for loss in losses)
    state = replace(
        state,
        losses=(*state.losses, *losses),
        hellos=tuple(item for item in state.hellos if item.replica not in {loss.replica for loss in losses}),
        evidence_from=state.generation + 1,
    )
    state = fruitful(state)
    if not state.generation:
        state, effects = _start_when_complete(state)
        return state, fences + effects
    out = {loss.replica for loss in losses}
    state = replace(
        state,
        roster=tuple(replica for replica in state.roster if replica not in out),
        saves=tuple(save for save in state.saves if save.replica not in out),
    )
    verdict = poisoned(state.failing, state.losses, state.policy.samples)
    if verdict:
        state, effects = _end(state, *verdict)
        return state, fences + effects
    # A replica that had finished is no loss: it owes nothing. It only has to leave the roster.
    state, effects = _announce(state, tuple(loss for loss in losses if loss.replica not in done), reason)
    return state, fences + effects


def _on_requested(state: CoordinatorState, request: Requested) -> Step:
    """Wait a short grace for news of a death, which explains most requests, or for the end of a save, which explains others."""
    is_stale = request.generation != state.generation
    is_late = is_stale and request.stalled and state.evidence_from <= request.generation < state.generation
    if request.replica not in state.roster or (is_stale and not is_late):
        return state, ()
    if not are_waits_excused(state):
        state = replace(state, evidence=heard(state.evidence, request.replica, request.suspects))
    if state.reason or is_stale:
        return state, ()
    reason = f"replica {request.replica}: {request.reason}"
    state = replace(state, reason=reason, reason_excused_by=working(state))
    if any(save.generation < state.generation for save in state.saves):
        return state, ()  # everybody has entered a generation since: there is nothing to find out
    # What fails at once is not tried again and again without a pause.
    return state, (Arm(f"grace {state.generation}", "grace_s" if state.fruitless < 2 else "follow_s"),)


def _on_at_work(state: CoordinatorState, news: AtWork) -> Step:
    """Note who is at work: nothing follows from it before somebody waits in vain."""
    return replace(state, at_work=news.replicas), ()


def _on_busy(state: CoordinatorState, busy: Busy) -> Step:
    """A save begins: give it its time. It is over: go on with what was asked for meanwhile."""
    if busy.replica not in state.roster:
        return state, ()
    others = tuple(save for save in state.saves if save.replica != busy.replica)
    if busy.over:
        if (busy.replica, busy.replica) in state.evidence.pairs:  # late, but it takes part again: what was waited for is over
            state = without_evidence(state)
        return _saved(replace(state, saves=others)) if others != state.saves else (state, ())
    number = state.num_saves + 1
    state = replace(state, saves=(*others, Save(busy.replica, number, state.generation)), num_saves=number)
    return state, (Arm(f"save {number}", "save_s"),)


def _saved(state: CoordinatorState) -> Step:
    """Nobody is blamed for having waited for a save that ended in time."""
    if not state.reason or state.saves:
        return state, ()
    state, effects = _announce(state, (), state.reason)
    # A request that is on its way, or is repeated, is of a wait for that save as well.
    return replace(state, excused=True, evidence_from=state.generation), effects


def _on_expired(state: CoordinatorState, expired: TimerFired) -> Step:
    """Act on a timer that is not stale. Note [Timers] says what each one may do."""
    expired_saves = tuple(save for save in state.saves if expired.timer == f"save {save.number}")
    if expired_saves:
        left = tuple(save for save in state.saves if save not in expired_saves)
        evidence = functools.reduce(overdue, (save.replica for save in expired_saves), state.evidence)
        state = replace(state, saves=left, evidence=evidence)
        return _same_roster(state) if state.reason and not left else (state, ())
    if expired.timer == state.follow and state.generation:
        return _followed_late(state)
    if expired.timer == state.trouble:
        again = () if state.patience else (Arm(f"{state.trouble} again", "blame_s"),)
        return replace(state, patience=state.patience + 1, trouble=f"{state.trouble} again"), again
    if expired.timer == state.excuse:
        return replace(state, is_excuse_over=True, reason_excused_by=()), ()
    if expired.timer == state.undecided:
        why = f"nothing says who is at fault that no step was committed in {state.fruitless} generations"
        return _end(state, ExitCode.FAILED, f"{why}, and the time for that is over")
    if expired.timer == f"grace {state.generation}" and state.reason:
        return _same_roster(state)
    if (expired.timer == "start" or (expired.timer == "load" and not state.hellos)) and not state.generation:
        return _started_late(state, expired.timer)
    done = {item.replica for item in state.finished}
    # Of a member that is gone again the others may have heard nothing: they train on, and are not late.
    if expired.timer in {f"finish {replica}" for replica in state.roster if replica in done}:
        if state.saves:
            return state, (Arm(expired.timer, "finish_s"),)
        late = tuple(replica for replica in state.roster if replica not in done)
        detail = f"did not finish after replica {expired.timer.removeprefix('finish ')} had"
        return _remove(state, tuple(Loss(replica, LossKind.SUSPECTED, detail) for replica in late), detail)
    return state, ()


def _followed_late(state: CoordinatorState) -> Step:
    """Remove the members that have not entered the generation, or wait where none is late: the timer is then armed again."""
    late = tuple(replica for replica in state.roster if replica not in state.entered)
    at_work = tuple(replica for replica in working(state) if replica in late) if state.entered else ()
    gone = tuple(replica for replica in late if replica not in at_work)
    if gone and state.entered:
        detail = f"did not enter generation {state.generation}"
        return _remove(state, tuple(Loss(replica, LossKind.SUSPECTED, detail) for replica in gone), detail)
    if not late:
        return state, ()
    again = Arm(state.follow, "follow_s")
    if at_work:
        state, effects = excuse(state, at_work)
        return state, (*effects, again)
    reason = f"no member has entered generation {state.generation} in time, so none is late: waiting for the first"
    return replace(state, all_late=True), (Waits(late, reason), again)


def _started_late(state: CoordinatorState, timer: str) -> Step:
    """Remove the replicas that have not said hello before generation 1; if the others are gone again, let them load."""
    here = {item.replica for item in state.hellos} | {loss.replica for loss in state.losses}
    late = tuple(replica for replica in range(state.policy.num_replicas) if replica not in here)
    if timer == "start" and not state.hellos:
        return state, (
            Waits(late, "the replicas that were ready have ended: waiting for the others"),
            Arm("load", "deadline_s"),
        )
    return _remove(state, tuple(Loss(replica, LossKind.SUSPECTED, "did not start") for replica in late), "did not start")


def _same_roster(state: CoordinatorState) -> Step:
    """Nobody died, and yet a member cannot go on: try again, but not for ever with a member that is at fault (INV-9)."""
    if state.saves:
        return _announce(state, (), state.reason)
    state = replace(state, fruitless=state.fruitless + 1)
    at_work = tuple(sorted({*state.reason_excused_by, *working(state)}))
    if at_work and not own_deadlines(state.evidence).pairs:
        state, effects = _announce(state, (), state.reason)
        state, excuses = excuse(state, at_work)
        return state, effects + excuses
    state = with_waits(state)
    first = () if state.trouble else (Arm(f"trouble {state.generation}", "blame_s"),)
    state = replace(state, trouble=state.trouble or f"trouble {state.generation}")
    state, effects = _blame(state) if state.patience else _announce(state, (), state.reason)
    return state, first + effects


def _blame(state: CoordinatorState) -> Step:
    """The trouble lasts: remove the member that the evidence names, or try on for as long as the user's deadline allows."""
    how = f"in {state.fruitless} generations without a committed step; the last: {state.reason}"
    named = culprit(state.evidence, state.roster)
    named = at_work_for_too_long(state) if named is None else named
    if named is not None and len(state.roster) > 1:
        detail = f"at fault by what members reported of each other {how}"
        return _remove(state, (Loss(named, LossKind.SUSPECTED, detail),), detail)
    if len(state.roster) == 2 and state.patience > 1:
        # Neither is at fault as far as anybody knows. One of them needs no network to train on; the lower is the writer.
        stays, leaves = state.roster
        why = "nothing says whose fault it is that they do not reach each other"
        detail = f"set aside so that replica {stays} can go on: {why} {how}"
        return _remove(state, (Loss(leaves, LossKind.SUSPECTED, detail),), detail)
    first = () if state.undecided else (Arm(f"undecided {state.generation}", "deadline_s"),)
    state = replace(state, undecided=state.undecided or f"undecided {state.generation}")
    state, effects = _announce(state, (), f"nothing says who is at fault {how}")
    return state, first + effects


def _on_entered(state: CoordinatorState, entered: Entered) -> Step:
    """Note it, and whom the member had waited for; a step further than before means that the last generations bore fruit."""
    if entered.generation != state.generation or entered.replica not in state.roster:
        return state, ()
    state = _reached(state, entered.step)
    if entered.waited_for and not state.excused:
        state = replace(state, waits=tuple(sorted({**dict(state.waits), entered.replica: entered.waited_for}.items())))
    state = replace(state, entered=tuple(sorted({*state.entered, entered.replica})))
    if not state.all_late:
        return state, ()
    # The timer that runs may be about to fire: the others would have no time.
    state = replace(state, follow=f"{state.follow} again", all_late=False)
    return state, (Arm(state.follow, "follow_s"),)


def _on_progressed(state: CoordinatorState, progressed: Progressed) -> Step:
    """Forget what was held against members while no step was committed, if one was committed since."""
    return (_reached(state, progressed.step) if progressed.replica in state.roster else state), ()


def _reached(state: CoordinatorState, step: int) -> CoordinatorState:
    """Note that all steps before `step` are committed: the last generations bore fruit if that is news."""
    if step <= state.step:
        return state
    return replace(fruitful(state), step=step, evidence_from=state.generation)


def _on_failing(state: CoordinatorState, failing: Failing) -> Step:
    """Note it; end the job if one microbatch has ended two replicas."""
    state = replace(state, failing=(*state.failing, failing))
    verdict = poisoned(state.failing, state.losses, state.policy.samples)
    return _end(state, *verdict) if verdict else (state, ())


def _on_diverged(state: CoordinatorState, diverged: Diverged) -> Step:
    """Fence the minority and withdraw the results that it took part in, or end the job if there is none."""
    if diverged.generation != state.generation or diverged.replica not in state.roster:
        return state, ()
    if not diverged.minority:
        return _end(state, ExitCode.DIVERGED, diverged.reason)
    losses = tuple(Loss(replica, LossKind.DIVERGED, diverged.reason) for replica in diverged.minority)
    # Told by every later generation, too: a member may hear of two at once.
    state = replace(state, trusted_from=state.generation + 1)
    return _remove(state, losses, diverged.reason)


def _on_miscounted(state: CoordinatorState, miscounted: Miscounted) -> Step:
    """Make the step void, so that all members compute it anew; if that has been done before, so that all give it up and end."""
    if miscounted.generation != state.generation or miscounted.replica not in state.roster:
        return state, ()
    step, reason = miscounted.step, f"replica {miscounted.replica}: {miscounted.reason}"
    if state.void is None or state.void.step != step:
        return _announce(replace(state, void=Void(step, state.generation + 1)), (), f"step {step} is computed anew: {reason}")
    reason = f"step {step} is given up: {reason}, and so it was when the step was computed for the first time"
    void, requests = Void(step, state.generation + 1, gives_up=True), unite((state.requests, (MISCOUNTED,)))
    return _announce(replace(state, void=void, requests=requests, miscount=reason), (), reason)


def _on_finished(state: CoordinatorState, finished: Finished) -> Step:
    """Note it; end the job when all members have finished, for which the others have only so long (INV-8)."""
    if finished.replica in {item.replica for item in state.finished} or finished.replica not in state.roster:
        return state, ()
    state = replace(state, finished=tuple(sorted((*state.finished, finished), key=lambda item: item.replica)))
    if {item.replica for item in state.finished} >= set(state.roster):
        return _finish(state)
    return state, (Arm(f"finish {finished.replica}", "finish_s"),)


def _nobody_left(state: CoordinatorState) -> Step:
    """End as those said that had finished: though they are gone, too, they had committed all that there was."""
    if state.finished:
        return _finish(state)
    return _end(state, *nobody_left(state.failing, state.losses, state.miscount))


def _finish(state: CoordinatorState) -> Step:
    return _end(state, *all_finished(state.finished, state.miscount, state.requests))


def _on_exit_asked(state: CoordinatorState, asked: ExitAsked) -> Step:
    """Announce a generation whose members all ask for the exit in their votes."""
    if not state.generation:
        return _end(state, ExitCode.INTERRUPTED, f"{asked.reason} before training began")
    request = exit_for(asked.reason)
    if request in state.requests:
        return state, ()
    return _announce(replace(state, requests=unite((state.requests, (request,)))), (), request)


def _end(state: CoordinatorState, exit_code: int, reason: str) -> Step:
    return replace(state, over=True), (EndJob(int(exit_code), reason),)


TABLE: Mapping[type, Callable[[CoordinatorState, Any], Step]] = {
    Launched: _on_launched,
    Hello: _on_hello,
    Entered: _on_entered,
    Requested: _on_requested,
    Busy: _on_busy,
    Failing: _on_failing,
    Diverged: _on_diverged,
    Miscounted: _on_miscounted,
    Finished: _on_finished,
    Lost: _on_lost,
    TimerFired: _on_expired,
    ExitAsked: _on_exit_asked,
    Progressed: _on_progressed,
    AtWork: _on_at_work,
}
