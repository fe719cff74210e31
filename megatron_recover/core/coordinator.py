"""The machine of membership: it decides which replicas form the job, and alone makes generations.

`step(state, input) -> (state, effects)`. The machine knows no address, clock or process: the driver
maps replica ids to links, runs timers and kills. `core/generations.py` has the moves that its
handlers share, and `core/lateness.py` the handlers of waits and timers. `core/policy.py` decides
what a loss leads to.

Caller's contract
-----------------
* One coordinator and one state. Inputs come in any order. Carry out the effects of an input, in
  order, before the next input.
* A broken link to a leader is no input: the agent reports the end of the process as
  `ReplicaLost`, with the kind of `policy.loss_of`. A leader that sends an invalid message is
  `ReplicaLost(SUSPECTED)`.
* If a node is gone or out of reach, feed one `NodeLost` with all replicas that have a rank there.
* `Announce`: send `NewGeneration`, with the addresses that a leader does not know yet, to all
  leaders of its roster.
* `Fence`: kill all ranks of the replica, for certain. Never wait for their end. Feed
  `FenceConfirmed` once the end of all of them was seen.
* `Form`: start the ranks of a newcomer, and link to its leader. Its end is a `ReplicaLost`.
* `Refuse`: send its `JoinRefused` to the leader of the newcomer, and to that of `member`, if any.
* `Give`: send the grant to the leader of its writer, behind all announcements before it.
* `Ask(replica, requests)`: send `AddRequests(requests)` to the leader of that replica.
* `LeaveJudged`: answer who asked for the leave; with an empty `replicas` also after a loss.
* `Dismiss`: send `Stop` with exit code 0 to the leader. Ends of the replica's ranks are no losses
  any more. Kill those that do not end. Feed `FenceConfirmed` as after `Fence`.
* `Arm(timer, setting)`: feed `TimerFired(timer)` once, after the seconds of the setting. Never
  disarm a timer: the machine ignores stale ones by name.
* `Waits`: report to the user for which replicas the job waits, why, and for how long at most.
* `EndJob`: send `Stop(exit_code, reason)` to all leaders, and end the run. No effect follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from megatron_recover.core import generations, grants, lateness, newcomers
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
    Form,
    FormAsked,
    Give,
    Input,
    Launched,
    LeaveAsked,
    LeaveJudged,
    MembershipSettings,
    NodeLost,
    OpenSave,
    Progressed,
    Refuse,
    ReplicaLost,
    RoomKnown,
    Setting,
    TimerFired,
    Waits,
)
from megatron_recover.core.excuses import after_progress
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.generations import Step
from megatron_recover.core.leaving import free_to_go, judged
from megatron_recover.core.membership_messages import (
    Diverged,
    Entered,
    Hello,
    Loss,
    LossKind,
    Miscounted,
    Named,
    NewcomerReady,
    NewcomersProven,
    ReplicaBlocked,
    ReplicaFailing,
    ReplicaFinished,
    ReplicaLeaving,
    ReplicaSaving,
    TurnedAway,
    Void,
)
from megatron_recover.core.policy import poisoned
from megatron_recover.core.request import MISCOUNTED, exit_for, leave_of
from megatron_recover.core.vote import unite
from megatron_recover.core.wording import named, verb

__all__ = [
    "Announce", "Arm", "Ask", "AtWork", "CoordinatorState", "Dismiss", "Effect", "EndJob", "ExitAsked", "Fence",
    "FenceConfirmed", "Form", "FormAsked", "Give", "Input", "Launched", "LeaveAsked", "LeaveJudged", "MembershipSettings",
    "NodeLost", "OpenSave", "Progressed", "Refuse", "ReplicaLost", "RoomKnown", "Setting", "TimerFired", "Waits", "step",
]  # fmt: skip

# --- The machine ----------------------------------------------------------------------------------


def step(state: CoordinatorState, message: Input) -> Step:
    """Return the next state and the effects of one input. Ignore all inputs after `EndJob`."""
    if state.over:
        return state, ()
    return TABLE[type(message)](state, message)


def _on_launched(state: CoordinatorState, _: Launched) -> Step:
    """Start the time in which the first replica must become ready."""
    return generations.arm_start(state, "load", "deadline_s")


def _on_hello(state: CoordinatorState, hello: Hello) -> Step:
    """Record a ready replica. Arm `start` at the first. At the last, start or end the job."""
    if state.generation:
        return newcomers.on_hello(state, hello)
    known = {item.replica for item in state.hellos} | {loss.replica for loss in state.losses}
    if hello.replica in known or not 0 <= hello.replica < state.policy.num_replicas:
        return state, ()
    first = not state.hellos
    state = replace(state, hellos=tuple(sorted((*state.hellos, hello), key=lambda item: item.replica)))
    state, arm = generations.arm_start(state, "start", "start_s") if first else (state, ())
    state, effects = generations.start_when_complete(state)
    return state, arm + effects


def _on_named(state: CoordinatorState, named: Named) -> Step:
    """End the grant under which the replica has named a checkpoint, and give the next one."""
    return generations.give_next(state, grants.confirmed(state.grants, named.replica, named.number))


def _on_fence_confirmed(state: CoordinatorState, confirmed: FenceConfirmed) -> Step:
    """End the grant of a replica that is gone and can name nothing more; give the next one."""
    if confirmed.replica not in {loss.replica for loss in state.losses} | {*state.left}:
        return state, ()
    return generations.give_next(state, grants.ended(state.grants, confirmed.replica))


def _on_lost(state: CoordinatorState, lost: ReplicaLost) -> Step:
    """Fence a replica not yet lost. Once possible, make a generation without it, or end the job."""
    return generations.remove(state, (lost.loss,), lost.loss.kind.value)


def _on_node_lost(state: CoordinatorState, lost: NodeLost) -> Step:
    """Do the same for all replicas of a node, in one generation; no microbatch is at fault."""
    losses = tuple(Loss(replica, LossKind.NODE_LOST, lost.detail) for replica in sorted(set(lost.replicas)))
    return generations.remove(state, losses, f"{LossKind.NODE_LOST.value}: {lost.detail}")


def _on_failing(state: CoordinatorState, failing: ReplicaFailing) -> Step:
    """Record the failure of a rank. End the job if one microbatch has ended two replicas."""
    state = replace(state, failing=(*state.failing, failing))
    verdict = poisoned(state.failing, state.losses, state.policy.samples)
    return generations.end(state, *verdict) if verdict else (state, ())


def _on_diverged(state: CoordinatorState, diverged: Diverged) -> Step:
    """Fence the minority and withdraw all older results. Without a minority, end the job."""
    if diverged.generation != state.generation or diverged.replica not in state.roster:
        return state, ()
    if not diverged.minority:
        return generations.end(state, ExitCode.DIVERGED, diverged.reason)
    losses = tuple(Loss(replica, LossKind.DIVERGED, diverged.reason) for replica in diverged.minority)
    # All later generations repeat `trusted_from`, because two may reach a member at once.
    state = replace(state, trusted_from=state.generation + 1)
    return generations.remove(state, losses, diverged.reason)


def _on_miscounted(state: CoordinatorState, miscounted: Miscounted) -> Step:
    """Make the step void: all members compute it anew. The second time, all give it up and exit."""
    if miscounted.generation != state.generation or miscounted.replica not in state.roster:
        return state, ()
    step, reason = miscounted.step, f"replica {miscounted.replica}: {miscounted.reason}"
    if state.void is None or state.void.step != step:
        return generations.announce(
            replace(state, void=Void(step, state.generation + 1)), (), f"step {step} is computed anew: {reason}"
        )
    reason = f"step {step} is given up: {reason}, and so it was when the step was computed for the first time"
    void, requests = Void(step, state.generation + 1, gives_up=True), unite((state.requests, (MISCOUNTED,)))
    return generations.announce(replace(state, void=void, requests=requests, miscount=reason), (), reason)


def _on_finished(state: CoordinatorState, finished: ReplicaFinished) -> Step:
    """Record that a member finished. End the job with the last; else start `finish` (INV-8)."""
    if finished.replica in {item.replica for item in state.finished} or finished.replica not in state.roster:
        return state, ()
    state = replace(state, finished=tuple(sorted((*state.finished, finished), key=lambda item: item.replica)))
    if {item.replica for item in state.finished} >= set(state.roster):
        return generations.finish(state)
    return state, (Arm(f"finish {finished.replica}", "finish_s"),)


def _on_exit_asked(state: CoordinatorState, asked: ExitAsked) -> Step:
    """Make a generation that requests the exit, once per reason; before any, end the job."""
    if not state.generation:
        return generations.end(state, ExitCode.INTERRUPTED, f"{asked.reason} before training began")
    request = exit_for(asked.reason)
    if request in state.requests:
        return state, ()
    return generations.announce(replace(state, requests=unite((state.requests, (request,)))), (), request)


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
    state = after_progress(
        replace(generations.without(state, left), left=(*state.left, *left), evidence_from=state.generation + 1)
    )
    lease = generations.lease_of(state, left)
    state, effects = generations.announce(state, (), f"{named(left)} {verb(len(left), 'leaves', 'leave')}", left)
    # The end of the job dismisses everybody.
    return state, effects if state.over else (*effects, *(Dismiss(replica) for replica in left), *lease)


TABLE: Mapping[type, Callable[[CoordinatorState, Any], Step]] = {
    Launched: _on_launched,
    Hello: _on_hello,
    Entered: lateness.on_entered,
    ReplicaBlocked: lateness.on_blocked,
    ReplicaSaving: lateness.on_saving,
    ReplicaFailing: _on_failing,
    Diverged: _on_diverged,
    Miscounted: _on_miscounted,
    ReplicaFinished: _on_finished,
    ReplicaLost: _on_lost,
    NodeLost: _on_node_lost,
    TimerFired: lateness.on_expired,
    ExitAsked: _on_exit_asked,
    LeaveAsked: _on_leave_asked,
    ReplicaLeaving: _on_leaving,
    Progressed: lateness.on_progressed,
    AtWork: lateness.on_at_work,
    FormAsked: newcomers.on_form_asked,
    RoomKnown: newcomers.on_room_known,
    NewcomerReady: newcomers.on_ready,
    TurnedAway: newcomers.on_turned_away,
    NewcomersProven: newcomers.on_proven,
    Named: _on_named,
    FenceConfirmed: _on_fence_confirmed,
}
