"""The machine of membership: it decides which replicas form the job, and alone makes generations.

`step(state, input) -> (state, effects)`. The machine knows no address, clock or process: the driver
maps replica ids to links, runs timers and kills. `core/policy.py` decides what a loss leads to.

Caller's contract
-----------------
* One coordinator and one state. Inputs come in any order. Carry out the effects of an input, in
  order, before the next input.
* A broken link to a leader is no input: the agent reports the end of the process as
  `ReplicaLost`, with the kind of `policy.loss_of`. A leader that sends an invalid message is
  `ReplicaLost(SUSPECTED)`. If the agent is gone, the run fails.
* `Announce`: send `NewGeneration`, with the addresses that a leader does not know yet, to all
  leaders of its roster.
* `Fence`: kill all ranks of the replica, for certain. Never wait for their end. Feed
  `FenceConfirmed` once the end of all of them was seen.
* `Give`: send the grant to the leader of its writer, behind all announcements before it.
* `Ask(replica, requests)`: send `AddRequests(requests)` to the leader of that replica.
* `LeaveJudged`: answer who asked for the leave; with an empty `replicas` also after a loss.
* `Dismiss`: send `Stop` with exit code 0 to the leader. Ends of the replica's ranks are no losses
  any more. Kill those that do not end. Feed `FenceConfirmed` as after `Fence`.
* `Arm(timer, setting)`: feed `TimerFired(timer)` once, after the seconds of the setting. Never
  disarm a timer: the machine ignores stale ones by name.
* `Waits`: report to the user for which replicas the job waits, why, and for how long at most.
* `EndJob`: send `Stop(exit_code, reason)` to all leaders, and end the run. No effect follows.

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
from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec.structs import replace

from megatron_recover.core import grants
from megatron_recover.core.alike import described, differences
from megatron_recover.core.blame import culprit, own_deadlines, with_missed_deadline, with_report
from megatron_recover.core.coordinator_state import (
    Announce,
    Arm,
    Ask,
    AtWork,
    CoordinatorState,
    Dismiss,
    Effect,
    EndJob,
    ExitAsked,
    Fence,
    FenceConfirmed,
    Give,
    Input,
    Launched,
    LeaveAsked,
    LeaveJudged,
    MembershipSettings,
    NodeLost,
    OpenSave,
    Progressed,
    ReplicaLost,
    Setting,
    TimerFired,
    Waits,
)
from megatron_recover.core.excuses import (
    after_progress,
    are_waits_excused,
    at_work_for_too_long,
    excuse,
    with_waits,
    without_evidence,
    working,
)  # fmt: skip
from megatron_recover.core.leaving import free_to_go, judged, kept
from megatron_recover.core.policy import all_finished, nobody_left, poisoned
from megatron_recover.core.request import MISCOUNTED, TOO_FEW, exit_for, leave_of
from megatron_recover.core.values import (
    Diverged,
    Entered,
    ExitCode,
    Hello,
    Loss,
    LossKind,
    Miscounted,
    Named,
    NewGeneration,
    ReplicaBlocked,
    ReplicaFailing,
    ReplicaFinished,
    ReplicaId,
    ReplicaLeaving,
    ReplicaSaving,
    Void,
)
from megatron_recover.core.vote import unite

__all__ = [
    "Announce", "Arm", "Ask", "AtWork", "CoordinatorState", "Dismiss", "Effect", "EndJob", "ExitAsked", "Fence",
    "FenceConfirmed", "Give", "Input", "Launched", "LeaveAsked", "LeaveJudged", "MembershipSettings", "NodeLost", "OpenSave",
    "Progressed", "ReplicaLost", "Setting", "TimerFired", "Waits", "step",
]  # fmt: skip

# --- The machine ----------------------------------------------------------------------------------

Step = tuple[CoordinatorState, tuple[Effect, ...]]


def step(state: CoordinatorState, message: Input) -> Step:
    """Return the next state and the effects of one input. Ignore all inputs after `EndJob`."""
    if state.over:
        return state, ()
    return TABLE[type(message)](state, message)


def _on_launched(state: CoordinatorState, _: Launched) -> Step:
    """Start the time in which the first replica must become ready."""
    return _armed(state, "load", "deadline_s")


def _armed(state: CoordinatorState, kind: str, setting: Setting) -> Step:
    """Arm `start` or `load`, in place of the one that was armed before."""
    # Between two of a kind a replica was lost: the first that was ready.
    name = f"{kind} {len(state.losses)}" if state.losses else kind
    return replace(state, start=name), (Arm(name, setting),)


def _on_hello(state: CoordinatorState, hello: Hello) -> Step:
    """Record a ready replica. Arm `start` at the first. At the last, start or end the job."""
    known = {item.replica for item in state.hellos} | {loss.replica for loss in state.losses}
    if hello.replica in known or not 0 <= hello.replica < state.policy.num_replicas or state.generation:
        return state, ()
    first = not state.hellos
    state = replace(state, hellos=tuple(sorted((*state.hellos, hello), key=lambda item: item.replica)))
    state, arm = _armed(state, "start", "start_s") if first else (state, ())
    state, effects = _start_when_complete(state)
    return state, arm + effects


def _start_when_complete(state: CoordinatorState) -> Step:
    """Make generation 1 once every replica is ready or lost; end the job if it cannot start."""
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
                f"{described(first.replica, other.replica, found)}; use the same script, flags, packages, data and checkpoint",
            )
    if len(state.hellos) < state.policy.min_replicas:
        detail = f"{len(state.hellos)} of {state.policy.num_replicas} replicas started, {state.policy.min_replicas} are needed"
        return _end(state, ExitCode.TOO_FEW_REPLICAS, detail)
    return _announce(replace(state, roster=tuple(item.replica for item in state.hellos)), state.losses, "start")


def _announce(state: CoordinatorState, losses: tuple[Loss, ...], reason: str, left: tuple[ReplicaId, ...] = ()) -> Step:
    """Make the next generation, or end the job if the roster is empty or has finished.

    With fewer members than `min_replicas`, the generation requests the exit.
    """
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
        leaving=(),
        follow=follow,
        all_late=False,
        reason="",
        reason_excused_by=(),
        excused=bool(losses or left or state.reason_excused_by) or are_waits_excused(state),
    )
    new = NewGeneration(generation, state.roster, losses, reason, state.requests, state.trusted_from, state.void, left)
    state, gift = _granted(state, state.grants)
    return state, (Announce(new), Arm(follow, "follow_s"), *gift)


def _granted(state: CoordinatorState, ledger: grants.Ledger) -> Step:
    """Give the writer the next grant if none is open in `ledger`, which the state stores."""
    after = grants.given(ledger, state.generation, state.roster)
    given = (Give(after.open),) if after.open is not None and after.num_given != ledger.num_given else ()
    return replace(state, grants=after), given


def _on_named(state: CoordinatorState, named: Named) -> Step:
    """End the grant under which the replica has named a checkpoint, and give the next one."""
    return _granted(state, grants.confirmed(state.grants, named.replica, named.number))


def _on_fence_confirmed(state: CoordinatorState, confirmed: FenceConfirmed) -> Step:
    """End the grant of a replica that is gone and can name nothing more; give the next one."""
    if confirmed.replica not in {loss.replica for loss in state.losses} | {*state.left}:
        return state, ()
    return _granted(state, grants.ended(state.grants, confirmed.replica))


def _lease_of(state: CoordinatorState, gone: Collection[ReplicaId]) -> tuple[Effect, ...]:
    """Return the timer for the lease of a grant whose holder is among the replicas that go."""
    if state.grants.open is None or state.grants.open.writer not in gone:
        return ()
    return (Arm(state.grants.lease, "lapse_s"),)


def _on_lost(state: CoordinatorState, lost: ReplicaLost) -> Step:
    """Fence a replica not yet lost. Once possible, make a generation without it, or end the job."""
    return _remove(state, (lost.loss,), lost.loss.kind.value)


def _on_node_lost(state: CoordinatorState, lost: NodeLost) -> Step:
    """Do the same for all replicas of a node, in one generation; no microbatch is at fault."""
    losses = tuple(Loss(replica, LossKind.NODE_LOST, lost.detail) for replica in sorted(set(lost.replicas)))
    return _remove(state, losses, f"{LossKind.NODE_LOST.value}: {lost.detail}")


def _remove(state: CoordinatorState, losses: tuple[Loss, ...], reason: str) -> Step:
    """Remove replicas for good, fence them, and make a generation without them or end the job.

    Ignore replicas that are lost already. Drop all evidence. Before generation 1, wait until every
    other replica is ready or lost.
    """
    gone = {loss.replica for loss in state.losses} | {*state.left}
    done = {item.replica for item in state.finished}
    losses = tuple(loss for loss in losses if loss.replica not in gone)
    if not losses:
        return state, ()
    fences: tuple[Effect, ...] = tuple(Fence(loss.replica) for loss in losses)
    fences += _lease_of(state, {loss.replica for loss in losses})
    state = replace(
        state,
        losses=(*state.losses, *losses),
        hellos=tuple(item for item in state.hellos if item.replica not in {loss.replica for loss in losses}),
        evidence_from=state.generation + 1,
    )
    state = after_progress(state)
    if not state.generation:
        state, effects = _start_when_complete(state)
        return state, fences + effects
    out = {loss.replica for loss in losses}
    before, state = state, _without(state, out)
    verdict = poisoned(state.failing, state.losses, state.policy.samples)
    if verdict:
        state, effects = _end(state, *verdict)
        return state, fences + effects
    if stays := kept(before, state):
        fences += (LeaveJudged((), stays, reason),)
    # A replica that has finished is not announced as a loss: its training is complete.
    state, effects = _announce(state, tuple(loss for loss in losses if loss.replica not in done), reason)
    return state, fences + effects


def _without(state: CoordinatorState, out: Collection[ReplicaId]) -> CoordinatorState:
    """Return the state with these replicas removed from the roster, and their saves forgotten."""
    return replace(
        state,
        roster=tuple(replica for replica in state.roster if replica not in out),
        saves=tuple(save for save in state.saves if save.replica not in out),
    )


def _on_blocked(state: CoordinatorState, request: ReplicaBlocked) -> Step:
    """Record unexcused evidence. The generation's first request waits for its grace or a save."""
    is_stale = request.generation != state.generation
    is_late = is_stale and request.stalled and state.evidence_from <= request.generation < state.generation
    if request.replica not in state.roster or (is_stale and not is_late):
        return state, ()
    if not are_waits_excused(state):
        state = replace(state, evidence=with_report(state.evidence, request.replica, request.suspects))
    if state.reason or is_stale:
        return state, ()
    reason = f"replica {request.replica}: {request.reason}"
    state = replace(state, reason=reason, reason_excused_by=working(state))
    if any(save.generation < state.generation for save in state.saves):
        return state, ()  # a generation was made during the save already: no need of another
    # Repeated failures are not retried without a pause.
    return state, (Arm(f"grace {state.generation}", "grace_s" if state.fruitless < 2 else "follow_s"),)


def _on_at_work(state: CoordinatorState, news: AtWork) -> Step:
    """Record which replicas are at work, for the next request, generation or timer."""
    return replace(state, at_work=news.replicas), ()


def _on_saving(state: CoordinatorState, busy: ReplicaSaving) -> Step:
    """Start a save's timer. An overdue save's end drops evidence; the last end answers requests."""
    if busy.replica not in state.roster:
        return state, ()
    others = tuple(save for save in state.saves if save.replica != busy.replica)
    if busy.over:
        if (busy.replica, busy.replica) in state.evidence.pairs:  # the save was overdue, and what it kept waiting goes on
            state = without_evidence(state)
        return _saved(replace(state, saves=others)) if others != state.saves else (state, ())
    number = state.num_saves + 1
    state = replace(state, saves=(*others, OpenSave(busy.replica, number, state.generation)), num_saves=number)
    return state, (Arm(f"save {number}", "save_s"),)


def _saved(state: CoordinatorState) -> Step:
    """Make the requested generation, if any, when the last save is over; excuse waits for it."""
    if not state.reason or state.saves:
        return state, ()
    state, effects = _announce(state, (), state.reason)
    # A request that is still on its way, or repeated, comes from a wait for that save, too.
    return replace(state, excused=True, evidence_from=state.generation), effects


def _on_expired(state: CoordinatorState, expired: TimerFired) -> Step:
    """Act on a timer that is not stale, by Note [Timers]."""
    expired_saves = tuple(save for save in state.saves if expired.timer == f"save {save.number}")
    if expired_saves:
        left = tuple(save for save in state.saves if save not in expired_saves)
        evidence = functools.reduce(with_missed_deadline, (save.replica for save in expired_saves), state.evidence)
        state = replace(state, saves=left, evidence=evidence)
        return _same_roster(state) if state.reason and not left else (state, ())
    if expired.timer == state.grants.lease:
        return _granted(state, grants.lapsed(state.grants, expired.timer))
    if expired.timer == state.follow and state.generation:
        return _followed_late(state)
    if expired.timer == state.trouble:
        again = () if state.patience else (Arm(f"{state.trouble} again", "blame_s"),)
        return replace(state, patience=state.patience + 1, trouble=f"{state.trouble} again"), again
    if expired.timer == state.excuse:
        return replace(state, is_excuse_over=True, reason_excused_by=()), ()
    if expired.timer == state.undecided:
        why = f"no step was committed in {state.fruitless} generations and --recover-deadline-s has passed"
        return _end(state, ExitCode.FAILED, f"{why}; the evidence names nobody at fault: read why each generation was made")
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
        return _remove(state, tuple(Loss(replica, LossKind.SUSPECTED, detail) for replica in late), detail)
    return state, ()


def _followed_late(state: CoordinatorState) -> Step:
    """Remove the late members that are not at work, if another member has entered.

    If all late ones are at work, excuse them. If nobody has entered, report that. In both cases arm
    `follow` again. Do nothing if nobody is late.
    """
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


def _started_late(state: CoordinatorState, *, is_start: bool) -> Step:
    """Remove the replicas without `Hello`; after `start` with none ready, arm `load` instead."""
    here = {item.replica for item in state.hellos} | {loss.replica for loss in state.losses}
    late = tuple(replica for replica in range(state.policy.num_replicas) if replica not in here)
    if is_start and not state.hellos:
        state, armed = _armed(state, "load", "deadline_s")
        return state, (Waits(late, "the replicas that were ready have ended: waiting for the others"), *armed)
    return _remove(state, tuple(Loss(replica, LossKind.SUSPECTED, "did not start") for replica in late), "did not start")


def _same_roster(state: CoordinatorState) -> Step:
    """Make a generation of the same roster, or `_blame` if `trouble` ran out unexcused (INV-9)."""
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
    """Remove the member that the evidence names, else one that works beyond `excuse`.

    Never remove the only member. If neither of two is named, remove the higher id once `trouble`
    ran out twice. Otherwise make a generation of the same roster; the first one starts `undecided`.
    """
    how = f"in {state.fruitless} generations without a committed step; the last: {state.reason}"
    named = culprit(state.evidence, state.roster)
    named = at_work_for_too_long(state) if named is None else named
    if named is not None and len(state.roster) > 1:
        detail = f"at fault by what members reported of each other {how}"
        return _remove(state, (Loss(named, LossKind.SUSPECTED, detail),), detail)
    if len(state.roster) == 2 and state.patience > 1:
        # Neither is known to be at fault. One alone needs no network; the lower id is the writer.
        stays, leaves = state.roster
        why = "the evidence does not show which of the two is at fault"
        detail = f"set aside so that replica {stays} can go on: {why} {how}"
        return _remove(state, (Loss(leaves, LossKind.SUSPECTED, detail),), detail)
    first = () if state.undecided else (Arm(f"undecided {state.generation}", "deadline_s"),)
    state = replace(state, undecided=state.undecided or f"undecided {state.generation}")
    state, effects = _announce(state, (), f"the evidence names nobody at fault {how}")
    return state, first + effects


def _on_entered(state: CoordinatorState, entered: Entered) -> Step:
    """Record a member's entry, its unexcused waits and its step. A newer step drops evidence."""
    if entered.generation != state.generation or entered.replica not in state.roster:
        return state, ()
    state = _reached(state, entered.step)
    if entered.waited_for and not state.excused:
        state = replace(state, waits=tuple(sorted({**dict(state.waits), entered.replica: entered.waited_for}.items())))
    state = replace(state, entered=tuple(sorted({*state.entered, entered.replica})))
    if not state.all_late:
        return state, ()
    # The running timer may fire at once, which would leave the other members no time.
    state = replace(state, follow=f"{state.follow} again", all_late=False)
    return state, (Arm(state.follow, "follow_s"),)


def _on_progressed(state: CoordinatorState, progressed: Progressed) -> Step:
    """Drop all evidence if the member's beat shows that a step was committed since."""
    return (_reached(state, progressed.step) if progressed.replica in state.roster else state), ()


def _reached(state: CoordinatorState, step: int) -> CoordinatorState:
    """Record that all steps before `step` are committed. If this is new, drop all evidence."""
    if step <= state.step:
        return state
    return replace(after_progress(state), step=step, evidence_from=state.generation)


def _on_failing(state: CoordinatorState, failing: ReplicaFailing) -> Step:
    """Record the failure of a rank. End the job if one microbatch has ended two replicas."""
    state = replace(state, failing=(*state.failing, failing))
    verdict = poisoned(state.failing, state.losses, state.policy.samples)
    return _end(state, *verdict) if verdict else (state, ())


def _on_diverged(state: CoordinatorState, diverged: Diverged) -> Step:
    """Fence the minority and withdraw all older results. Without a minority, end the job."""
    if diverged.generation != state.generation or diverged.replica not in state.roster:
        return state, ()
    if not diverged.minority:
        return _end(state, ExitCode.DIVERGED, diverged.reason)
    losses = tuple(Loss(replica, LossKind.DIVERGED, diverged.reason) for replica in diverged.minority)
    # All later generations repeat `trusted_from`, because two may reach a member at once.
    state = replace(state, trusted_from=state.generation + 1)
    return _remove(state, losses, diverged.reason)


def _on_miscounted(state: CoordinatorState, miscounted: Miscounted) -> Step:
    """Make the step void: all members compute it anew. The second time, all give it up and exit."""
    if miscounted.generation != state.generation or miscounted.replica not in state.roster:
        return state, ()
    step, reason = miscounted.step, f"replica {miscounted.replica}: {miscounted.reason}"
    if state.void is None or state.void.step != step:
        return _announce(replace(state, void=Void(step, state.generation + 1)), (), f"step {step} is computed anew: {reason}")
    reason = f"step {step} is given up: {reason}, and so it was when the step was computed for the first time"
    void, requests = Void(step, state.generation + 1, gives_up=True), unite((state.requests, (MISCOUNTED,)))
    return _announce(replace(state, void=void, requests=requests, miscount=reason), (), reason)


def _on_finished(state: CoordinatorState, finished: ReplicaFinished) -> Step:
    """Record that a member finished. End the job with the last; else start `finish` (INV-8)."""
    if finished.replica in {item.replica for item in state.finished} or finished.replica not in state.roster:
        return state, ()
    state = replace(state, finished=tuple(sorted((*state.finished, finished), key=lambda item: item.replica)))
    if {item.replica for item in state.finished} >= set(state.roster):
        return _finish(state)
    return state, (Arm(f"finish {finished.replica}", "finish_s"),)


def _nobody_left(state: CoordinatorState) -> Step:
    """End the job without members. If one had finished before it was lost, all was committed."""
    if state.finished:
        return _finish(state)
    return _end(state, *nobody_left(state.failing, state.losses, state.miscount))


def _finish(state: CoordinatorState) -> Step:
    return _end(state, *all_finished(state.finished, state.miscount, state.requests))


def _on_exit_asked(state: CoordinatorState, asked: ExitAsked) -> Step:
    """Make a generation that requests the exit, once per reason; before any, end the job."""
    if not state.generation:
        return _end(state, ExitCode.INTERRUPTED, f"{asked.reason} before training began")
    request = exit_for(asked.reason)
    if request in state.requests:
        return state, ()
    return _announce(replace(state, requests=unite((state.requests, (request,)))), (), request)


def _on_leave_asked(state: CoordinatorState, asked: LeaveAsked) -> Step:
    """Report who will leave and who will not; give one leader the requests for the next record."""
    replicas, refused = judged(state, asked.replicas)
    answer = LeaveJudged(replicas, refused, asked.reason)
    if not replicas:
        return state, (answer,)
    requests = tuple(leave_of(replica) for replica in replicas)
    return replace(state, requests=unite((state.requests, requests))), (answer, Ask(replicas[0], requests))


def _on_leaving(state: CoordinatorState, leaving: ReplicaLeaving) -> Step:
    """Once all leavers have reported in this generation, make one without them and dismiss them."""
    if leaving.generation != state.generation or leaving.replica not in state.roster:
        return state, ()
    state = replace(state, leaving=tuple(sorted({*state.leaving, leaving.replica})))
    if not (left := tuple(sorted(free_to_go(state)))):
        return state, ()
    # As after a loss: that they are gone explains all waits.
    state = after_progress(replace(_without(state, left), left=(*state.left, *left), evidence_from=state.generation + 1))
    lease = _lease_of(state, left)
    state, effects = _announce(state, (), f"replicas {', '.join(map(str, left))} leave", left)
    # The end of the job dismisses everybody.
    return state, effects if state.over else (*effects, *(Dismiss(replica) for replica in left), *lease)


def _end(state: CoordinatorState, exit_code: int, reason: str) -> Step:
    return replace(state, over=True), (EndJob(int(exit_code), reason),)


TABLE: Mapping[type, Callable[[CoordinatorState, Any], Step]] = {
    Launched: _on_launched,
    Hello: _on_hello,
    Entered: _on_entered,
    ReplicaBlocked: _on_blocked,
    ReplicaSaving: _on_saving,
    ReplicaFailing: _on_failing,
    Diverged: _on_diverged,
    Miscounted: _on_miscounted,
    ReplicaFinished: _on_finished,
    ReplicaLost: _on_lost,
    NodeLost: _on_node_lost,
    TimerFired: _on_expired,
    ExitAsked: _on_exit_asked,
    LeaveAsked: _on_leave_asked,
    ReplicaLeaving: _on_leaving,
    Progressed: _on_progressed,
    AtWork: _on_at_work,
    Named: _on_named,
    FenceConfirmed: _on_fence_confirmed,
}
