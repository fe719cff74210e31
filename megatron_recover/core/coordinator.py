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
* `Waits`: tell the user for whom the job waits and why. Nothing else depends on it.
* `EndJob`: send `Stop(exit_code, reason)` to all leaders, end the run with that code. Nothing follows it.

Note [Waiting for a save]
    A replica that saves takes part in no step, so the others' waits for it expire and they ask for a new generation. The first
    request of a save gets one, which shows that all members still answer: a process that is stopped or dead does not enter
    it. Later requests are kept until the save is over, and lead to one more generation then. So a save costs two generations
    at most, however long it takes, and the losses of replicas that end meanwhile one each; none counts as fruitless and
    nobody is suspected. A save that takes longer than its limit is excused no more.

Note [Timers]
    A timer says that somebody is late, and being late is relative: without one that is in time nobody is late. So a timer
    never removes the last members, however long all of them take; only their own ends do. Timer by timer:

    - `follow`: removes the members that have not entered the generation, if another has. If nobody has entered, the job
      waits, and says for whom (`Waits`). The first member that then enters gives the others the full time once more.
    - `finish`: removes the members that have not finished. It runs only while a member that has finished is in the roster,
      so this one stays.
    - `grace`: leads to the same roster again. After `max_fruitless` such generations it removes the member that the evidence
      names, never the only one. Where the evidence names none of two members, after twice as many the higher id is set aside.
      Otherwise it tries again, with a pause (`follow_timeout_s`), and the reason of each generation says so.
    - `undecided`: runs from the first generation for which the evidence names nobody, until a step is committed or a replica is
      lost. Then the job ends, without having removed anybody: it has waited for the user's one deadline.
    - `save`: removes nobody by itself. A save that is overdue is evidence against the member.
    - `start`: removes the replicas that have not said hello, if another has and still lives. Otherwise they get the time to
      load once more.
    - `load`: the only timer that ends a job. No replica has become ready in that time, so there is no member yet and no
      training that could be lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

from msgspec.structs import replace

from megatron_recover.core.alike import differences, told
from megatron_recover.core.blame import Evidence, culprit, heard, overdue
from megatron_recover.core.policy import EXIT, TOO_FEW, all_finished, nobody_left, poisoned
from megatron_recover.core.values import (
    Busy,
    Diverged,
    Entered,
    ExitCode,
    Failing,
    Finished,
    Generation,
    Hello,
    LeaderMessage,
    Loss,
    LossKind,
    Miscounted,
    NewGeneration,
    ReplicaId,
    Requested,
    Value,
    Void,
)
from megatron_recover.core.vote import unite


class Policy(Value, frozen=True):
    """Settings of membership."""

    num_replicas: int
    min_replicas: int = 1
    max_fruitless: int = 3
    """Generations in a row without a loss and without a committed step, after which the replica at fault is fenced."""


class Save(Value, frozen=True):
    """A replica that saves a checkpoint, and may take its time. See Note [Waiting for a save]."""

    replica: ReplicaId
    number: int
    """Of this save in the run, from 1: names its timer."""
    generation: Generation
    """In which it began."""


class CoordinatorState(Value, frozen=True):
    """What the coordinator knows. Start with `CoordinatorState(policy)`."""

    policy: Policy
    generation: Generation = 0
    roster: tuple[ReplicaId, ...] = ()
    hellos: tuple[Hello, ...] = ()
    losses: tuple[Loss, ...] = ()
    """All losses of the run."""
    entered: tuple[ReplicaId, ...] = ()
    """Members that entered the current generation."""
    follow: str = ""
    """The timer that counts for members that have not entered the current generation; others of its kind are stale."""
    all_late: bool = False
    """The timer ran out before any member had entered the current generation. See Note [Timers]."""
    reason: str = ""
    """Why a newer generation is due (a grace runs), or empty."""
    evidence: Evidence = Evidence()
    """Who could not reach whom since a step was committed or a replica was lost (`core/blame.py`)."""
    evidence_from: Generation = 0
    """Reports of older generations are about what is over, and no evidence."""
    waits: tuple[tuple[ReplicaId, tuple[ReplicaId, ...]], ...] = ()
    """Which members waited for whom when they left the previous generation, by member."""
    excused: bool = False
    """In the previous generation a save was under way, or a loss ended it, which explains all waits: they are no evidence."""
    undecided: str = ""
    """The timer of the time in which no step was committed and the evidence named nobody, or empty."""
    fruitless: int = 0
    """Generations in a row without a loss or a committed step."""
    step: int = 0
    """Highest uncommitted step reported."""
    requests: tuple[str, ...] = ()
    trusted_from: Generation = 0
    """The generation that was made because a replica was outvoted; of several the newest."""
    void: Void | None = None
    """The newest step that was made void because a sum did not count every microbatch once."""
    failing: tuple[Failing, ...] = ()
    """Computations that raised."""
    saves: tuple[Save, ...] = ()
    """Under way and within their time."""
    num_saves: int = 0
    """All that ever began."""
    finished: tuple[Finished, ...] = ()
    over: bool = False


# --- Inputs: LeaderMessage messages of leaders, and: -------------------------------------------------------------------


class Launched(Value, frozen=True):
    """The processes of all replicas were started."""


class Lost(Value, frozen=True):
    """A replica is gone or must be treated as gone."""

    loss: Loss


class TimerFired(Value, frozen=True):
    """A timer armed with `Arm` ran out."""

    timer: str


class ExitAsked(Value, frozen=True):
    """The whole job is asked to end at a common step with a checkpoint (signal to the launcher, time limit)."""

    reason: str


class Progressed(Value, frozen=True):
    """A member says in a beat which step it has not committed yet: all before that are committed."""

    replica: ReplicaId
    step: int


Input = LeaderMessage | Launched | Lost | TimerFired | ExitAsked | Progressed


# --- Effects -------------------------------------------------------------------------------------------------------------


class Announce(Value, frozen=True):
    """Tell every member of the roster."""

    generation: NewGeneration


class Fence(Value, frozen=True):
    """Kill what is left of a replica."""

    replica: ReplicaId


Setting = Literal[
    "load_timeout_s", "start_timeout_s", "follow_timeout_s", "finish_timeout_s", "save_timeout_s", "undecided_timeout_s",
    "grace_s",
]  # fmt: skip
"""How long a timer runs, by name: the driver knows the seconds."""


class Arm(Value, frozen=True):
    """Start a timer."""

    timer: str
    setting: Setting


class Waits(Value, frozen=True):
    """The job waits for these replicas, and cannot go on before one of them answers or ends."""

    replicas: tuple[ReplicaId, ...]
    reason: str


class EndJob(Value, frozen=True):
    """The run is over."""

    exit_code: int
    reason: str


Effect = Announce | Fence | Arm | Waits | EndJob


# --- The machine ---------------------------------------------------------------------------------------------------------

Step = tuple[CoordinatorState, tuple[Effect, ...]]


def step(state: CoordinatorState, message: Input) -> Step:
    """Take one input. Once the job is over nothing has an effect any more."""
    if state.over:
        return state, ()
    return TABLE[type(message)](state, message)


def _on_launched(state: CoordinatorState, _: Launched) -> Step:
    """Give the first replica its time to load."""
    return state, (Arm("load", "load_timeout_s"),)


def _on_hello(state: CoordinatorState, hello: Hello) -> Step:
    """Note the hello of a replica of this job; with the last one that was missing, make generation 1."""
    known = {item.replica for item in state.hellos} | {loss.replica for loss in state.losses}
    if hello.replica in known or not 0 <= hello.replica < state.policy.num_replicas or state.generation:
        return state, ()
    first = not state.hellos
    state = replace(state, hellos=tuple(sorted((*state.hellos, hello), key=lambda item: item.replica)))
    arm = (Arm("start", "start_timeout_s"),) if first else ()
    state, effects = _start_when_complete(state)
    return state, arm + effects


def _start_when_complete(state: CoordinatorState) -> Step:
    """Generation 1, when every replica has said hello or is gone."""
    if len(state.hellos) + len(state.losses) < state.policy.num_replicas:
        return state, ()
    if not state.hellos:
        return _end(state, *nobody_left(state.failing, state.losses))
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
        return _end(state, *nobody_left(state.failing, state.losses))
    if {item.replica for item in state.finished} >= set(state.roster):
        return _finish(state)
    if len(state.roster) < state.policy.min_replicas:
        state = replace(state, requests=unite((state.requests, (TOO_FEW,))))
    generation, follow = state.generation + 1, f"follow {state.generation + 1}"
    state = replace(
        _with_waits(state),
        generation=generation,
        entered=(),
        follow=follow,
        all_late=False,
        reason="",
        excused=bool(state.saves or losses),
    )
    new = NewGeneration(generation, state.roster, losses, reason, state.requests, state.trusted_from, state.void)
    return state, (Announce(new), Arm(follow, "follow_timeout_s"))


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
        evidence=Evidence(),
        evidence_from=state.generation + 1,
        waits=(),
        undecided="",
        fruitless=0,
    )
    if not state.generation:
        state, effects = _start_when_complete(state)
        return state, fences + effects
    out = {loss.replica for loss in losses}
    state = replace(
        state,
        roster=tuple(replica for replica in state.roster if replica not in out),
        saves=tuple(save for save in state.saves if save.replica not in out),
    )
    verdict = poisoned(state.failing, state.losses)
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
    if not state.saves:
        state = replace(state, evidence=heard(state.evidence, request.replica, request.suspects))
    if state.reason or is_stale:
        return state, ()
    state = replace(state, reason=f"replica {request.replica}: {request.reason}")
    if any(save.generation < state.generation for save in state.saves):
        return state, ()  # everybody has entered a generation since: there is nothing to find out
    # What cannot be decided is not tried again and again without a pause.
    return state, (Arm(f"grace {state.generation}", "follow_timeout_s" if state.undecided else "grace_s"),)


def _on_busy(state: CoordinatorState, busy: Busy) -> Step:
    """A save begins: give it its time. It is over: go on with what was asked for meanwhile."""
    if busy.replica not in state.roster:
        return state, ()
    others = tuple(save for save in state.saves if save.replica != busy.replica)
    if busy.over:
        return _saved(replace(state, saves=others)) if others != state.saves else (state, ())
    number = state.num_saves + 1
    state = replace(state, saves=(*others, Save(busy.replica, number, state.generation)), num_saves=number)
    return state, (Arm(f"save {number}", "save_timeout_s"),)


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
    if expired.timer == state.undecided:
        why = f"nothing says who is at fault that no step was committed in {state.fruitless} generations"
        return _end(state, ExitCode.FAILED, f"{why}, and the time for that is over; resume from the last checkpoint")
    if expired.timer == f"grace {state.generation}" and state.reason:
        return _same_roster(state)
    if (expired.timer == "start" or (expired.timer == "load" and not state.hellos)) and not state.generation:
        return _started_late(state, expired.timer)
    done = {item.replica for item in state.finished}
    # Of a member that is gone again the others may have heard nothing: they train on, and are not late.
    if expired.timer in {f"finish {replica}" for replica in state.roster if replica in done}:
        if state.saves:
            return state, (Arm(expired.timer, "finish_timeout_s"),)
        late = tuple(replica for replica in state.roster if replica not in done)
        detail = f"did not finish after replica {expired.timer.removeprefix('finish ')} had"
        return _remove(state, tuple(Loss(replica, LossKind.SUSPECTED, detail) for replica in late), detail)
    return state, ()


def _followed_late(state: CoordinatorState) -> Step:
    """Remove the members that have not entered the generation, or wait if none has: the timer is then armed again."""
    late = tuple(replica for replica in state.roster if replica not in state.entered)
    if late != state.roster:
        detail = f"did not enter generation {state.generation}"
        return _remove(state, tuple(Loss(replica, LossKind.SUSPECTED, detail) for replica in late), detail)
    reason = f"no member has entered generation {state.generation} in time, so none is late: waiting for the first"
    return replace(state, all_late=True), (Waits(late, reason), Arm(state.follow, "follow_timeout_s"))


def _started_late(state: CoordinatorState, timer: str) -> Step:
    """Remove the replicas that have not said hello before generation 1; if the others are gone again, let them load."""
    here = {item.replica for item in state.hellos} | {loss.replica for loss in state.losses}
    late = tuple(replica for replica in range(state.policy.num_replicas) if replica not in here)
    if timer == "start" and not state.hellos:
        return state, (
            Waits(late, "the replicas that were ready have ended: waiting for the others"),
            Arm("load", "load_timeout_s"),
        )
    return _remove(state, tuple(Loss(replica, LossKind.SUSPECTED, "did not start") for replica in late), "did not start")


def _same_roster(state: CoordinatorState) -> Step:
    """Nobody died, and yet a member cannot go on: try again, but not for ever with a member that is at fault (INV-9)."""
    if state.saves:
        return _announce(state, (), state.reason)
    state = replace(_with_waits(state), fruitless=state.fruitless + 1)
    if state.fruitless < state.policy.max_fruitless:
        return _announce(state, (), state.reason)
    how = f"in {state.fruitless} generations without a committed step; the last: {state.reason}"
    named = culprit(state.evidence, state.roster)
    if named is not None and len(state.roster) > 1:
        detail = f"at fault by what members reported of each other {how}"
        return _remove(state, (Loss(named, LossKind.SUSPECTED, detail),), detail)
    if len(state.roster) == 2 and state.fruitless >= 2 * state.policy.max_fruitless:
        # Neither is at fault as far as anybody knows. One of them needs no network to train on; the lower is the writer.
        stays, leaves = state.roster
        why = "nothing says whose fault it is that they do not reach each other"
        detail = f"set aside so that replica {stays} can go on: {why} {how}"
        return _remove(state, (Loss(leaves, LossKind.SUSPECTED, detail),), detail)
    first = () if state.undecided else (Arm(f"undecided {state.generation}", "undecided_timeout_s"),)
    state = replace(state, undecided=state.undecided or f"undecided {state.generation}")
    state, effects = _announce(state, (), f"nothing says who is at fault {how}")
    return state, first + effects


def _with_waits(state: CoordinatorState) -> CoordinatorState:
    """Add whom members waited for to the evidence."""
    evidence = state.evidence
    for replica, awaited in state.waits:
        evidence = heard(evidence, replica, awaited)
    return replace(state, evidence=evidence, waits=())


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
    return state, (Arm(state.follow, "follow_timeout_s"),)


def _on_progressed(state: CoordinatorState, progressed: Progressed) -> Step:
    """Forget what was held against members while no step was committed, if one was committed since."""
    return (_reached(state, progressed.step) if progressed.replica in state.roster else state), ()


def _reached(state: CoordinatorState, step: int) -> CoordinatorState:
    """Note that all steps before `step` are committed: the last generations bore fruit if that is news."""
    if step <= state.step:
        return state
    return replace(state, step=step, fruitless=0, undecided="", evidence=Evidence(), waits=(), evidence_from=state.generation)


def _on_failing(state: CoordinatorState, failing: Failing) -> Step:
    """Note it; end the job if one microbatch has ended two replicas."""
    state = replace(state, failing=(*state.failing, failing))
    verdict = poisoned(state.failing, state.losses)
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
    """Make the step void, so that all members compute it anew; end the job if that has been done before in this step."""
    if miscounted.generation != state.generation or miscounted.replica not in state.roster:
        return state, ()
    reason = f"replica {miscounted.replica}: {miscounted.reason}"
    if state.void is not None and state.void.step == miscounted.step:
        detail = f"{reason}, and so it was when the step was computed for the first time; resume from the last checkpoint"
        return _end(state, ExitCode.INVARIANT_VIOLATED, detail)
    state = replace(state, void=Void(miscounted.step, state.generation + 1))
    return _announce(state, (), f"step {miscounted.step} is computed anew: {reason}")


def _on_finished(state: CoordinatorState, finished: Finished) -> Step:
    """Note it; end the job when all members have finished, for which the others have only so long (INV-8)."""
    if finished.replica in {item.replica for item in state.finished} or finished.replica not in state.roster:
        return state, ()
    state = replace(state, finished=tuple(sorted((*state.finished, finished), key=lambda item: item.replica)))
    if {item.replica for item in state.finished} >= set(state.roster):
        return _finish(state)
    return state, (Arm(f"finish {finished.replica}", "finish_timeout_s"),)


def _finish(state: CoordinatorState) -> Step:
    return _end(state, *all_finished(state.finished))


def _on_exit_asked(state: CoordinatorState, asked: ExitAsked) -> Step:
    """Announce a generation whose members all ask for the exit in their votes."""
    if not state.generation:
        return _end(state, ExitCode.INTERRUPTED, f"{asked.reason} before training began")
    request = EXIT + asked.reason
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
}
