"""The machine that judges from progress pages if a rank works, waits, is slow, hangs or is stopped.

`step(state, look) -> (state, effects)`. The machine knows no clock, file or process. The driver
(`cluster/watch.py`) supplies time, pages and process states, and carries out the effects.

Note [How a hang is told from a slow operation]
    A rank is silent while its page shows no new operation. Each gap between two looks counts as at
    most `Limits.gap_s`, so that an agent which was held up itself accuses nobody. A rank hangs in a
    phase after the largest of three times: a floor (`Limits.hung_s`), `HANG_STEPS` typical steps,
    and twice the longest operation that any rank finished in that phase. The first two follow from
    a goal: an endless loop is fenced within 5 step times or 3 s, the larger. Every generation
    learns its own figures. Until then the older ones count twice, so that a microbatch that hangs
    one replica after the other is found each time. A phase that no rank has finished yet (the first
    save, a first compilation) is limited only by the user's deadline. So is every phase before five
    times of steps are known.

Note [Who may be fenced for a hang]
    A replica is condemned only while another one has no rank that hangs, is stopped or is traced.
    Otherwise the cause is probably outside (a data disk that stalls) and a fence would end the job:
    then the hang is named, and ended after the user's deadline. In a phase that depends on shared
    disks or services (`LEANS_ON_OTHERS`), or that compiles, silence is no evidence before the
    deadline. The process state proves nothing: a copy to the page cache, reading samples and
    garbage collection all use a processor. So an endless loop in such a phase costs the deadline. A
    rank that waits for others does not hang: the rank that keeps it waiting does.

Note [The last replica waits for itself]
    A kernel that hangs on a GPU is seen as a wait: the training thread has launched what comes
    after it, and waits in a sum or for another stage. While other replicas live, they miss the
    replica in their sums. The last replica is missed by nobody. So while all its ranks wait, none
    for a tracer or a stopped process, the waits in the replica's own sums and stages count as
    silence, from the moment at which the last of the ranks began to wait.

Note [Ranks that wait inside their replica]
    Megatron's own collectives join the ranks of a replica inside a computation: one reads samples
    for the others, or compiles what they have compiled. The pages of the waiting ranks show a
    forward. So a rank counts as kept waiting while another rank of its replica is in a phase of
    unknown length: one of `BOUNDED_BY_NOTHING_SEEN`, or one that no rank has finished yet. Until
    the deadline such a rank is not judged, its time teaches nothing, and its replica is at work.
    After the deadline the rank is named and its replica is fenced, but charged with no microbatch,
    since the cause may be either rank. A rank that is ahead keeps nobody waiting. It may itself
    wait for the other, for example in the barrier of Megatron's logging.

Note [At work]
    A rank is at work if its page shows a phase whose length it decides itself and its process can
    run. No rank of its replica may keep it waiting, nor may it be accused of a hang. Members that
    wait for it in a sum do not know this. So the coordinator receives all such replicas
    (`SeenAtWork`), and waits are then no evidence (`core/lateness.py`,
    Note [Waiting for one at work]). A torn or absent page shows no work. A replica with a stopped
    or dead rank is not seen at work. Saves do not count, because leaders report them. Work counts
    for `Limits.after_work_s` longer than it is seen. Between two computations a whole replica may
    be idle for an instant. Others may also have requested a generation just before a rank arrives
    at their sum.

Note [A job on several nodes]
    The detector then sees the ranks of one node (`Look.others`). It reports suspicions on a change
    (`Suspects`), and condemns only what the coordinator permits (`core/condemning.py`), or what is
    silent beyond the deadline. The answer counts for one look, and says what the ranks of the
    replica on other nodes do. A rank that may wait for one of those was kept waiting until that one
    was last seen in a phase of unknown length; only what came after is its own silence. Until that
    answer a hang of a replica that spans nodes is not named either. The last replica waits for
    itself only if all its ranks are on this node. Otherwise the timeout of its collectives ends it,
    which is the user's deadline.

Note [Newcomers]
    Replicas that form while others train are judged apart from these (`Look.are_newcomers`), by a
    state of their own: they say nothing of the members, and members nothing of them. No step of
    theirs is known, so they are limited only by the deadline, and by `Limits.stopped_s` if they are
    stopped. Nobody waits for them. So each may be condemned, whatever becomes of the others, and
    their work is no excuse.

Note [Ranks that read ahead]
    Another thread of a rank may read samples before they are due. While that thread waits for a
    disk it may hold the interpreter's lock, and then no other thread of the rank runs. So a gap
    between two looks that see the same reading is no silence of the training thread. For that gap
    the rank is judged as one that reads these samples. What was silent before and after counts: if
    the training thread hangs, only readings that are longer than a look delay that it is found. A
    hang that holds the interpreter's lock in the middle of a reading is excused until the deadline.

Note [Ranks that a tracer holds]
    A debugger, gcore or strace holds a process in state `t`, most often to look into the rank. Such
    a rank is named, and condemned only after the deadline. While one rank is held, no silence of
    the replica's other ranks counts, and none is learned from: they wait for it inside their
    computations, and may not be condemned for that time afterwards. A rank that is stopped (`T`)
    still is.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from statistics import median

from msgspec.structs import replace

from megatron_recover.core import parts
from megatron_recover.core.detector_state import DetectorState, Figures, Watched
from megatron_recover.core.label import label_of
from megatron_recover.core.membership_messages import ReplicaFailing
from megatron_recover.core.progress import BOUNDED_BY_NOTHING_SEEN, COMPUTES, EVERY_STEP, WAITS, Phase, Progress
from megatron_recover.core.values import ReplicaId
from megatron_recover.core.verdict import (
    CANNOT_RUN,
    STOPPED,
    TRACED,
    Condemned,
    Effect,
    Look,
    Named,
    PartSeen,
    SeenAtWork,
    Sight,
    Suspects,
    Verdict,
)

HANG_STEPS = 4.0
STOP_STEPS = 2.0
"""Typical steps after which a stopped process is named, but not before `Limits.stopped_s`."""
TIMES_LONGEST = 2.0
OLDER = 2.0
"""Factor on figures of an older generation."""
_KEPT_STEPS, _ENOUGH_STEPS = 16, 5
"""Step times that are kept, the newest; step times that are needed to know the typical one. Each
rank's time of a step is one."""


def typical_step_s(state: DetectorState) -> float | None:
    """Return the median of this generation's newest step times in seconds.

    While they are too few, return `OLDER` times the median of the newest generation that had
    enough; None if none had.
    """
    if len(state.figures.steps_s) >= _ENOUGH_STEPS:
        return median(state.figures.steps_s)
    return OLDER * median(state.older.steps_s) if len(state.older.steps_s) >= _ENOUGH_STEPS else None


def hang_limit_s(state: DetectorState, phase: Phase) -> float | None:
    """Return the seconds of silence after which a rank hangs in `phase`; None: the deadline.

    A phase of `WAITS` has a limit only once five step times of this generation are known.
    """
    step_s = typical_step_s(state)
    longest_s = state.figures.longest_s.get(phase)
    if longest_s is None and phase in state.older.longest_s:
        longest_s = OLDER * state.older.longest_s[phase]
    if step_s is None or longest_s is None:
        return None
    if phase in WAITS and len(state.figures.steps_s) < _ENOUGH_STEPS:
        return None  # of waits and steps with more replicas nothing follows for the last one
    return max(state.limits.hung_s, HANG_STEPS * step_s, TIMES_LONGEST * longest_s)


def stop_limit_s(state: DetectorState) -> float:
    """Return the seconds after which a stopped or traced process is named.

    The replica of a stopped one may then be condemned (Note [Who may be fenced for a hang]).
    """
    return max(state.limits.stopped_s, STOP_STEPS * (typical_step_s(state) or 0.0))


def step(state: DetectorState, look: Look) -> tuple[DetectorState, tuple[Effect, ...]]:
    """Return the next state and the effects of a look.

    `Named` comes once per silence and verdict, `Condemned` once per replica. `SeenAtWork` comes
    when the replicas at work change.
    """
    gap_s = 0.0 if state.now_s is None else min(max(0.0, look.now_s - state.now_s), state.limits.gap_s)
    if look.generation != state.generation:
        known = len(state.figures.steps_s) >= _ENOUGH_STEPS
        older = state.figures if known else state.older
        state = replace(state, generation=look.generation, figures=Figures(), older=older)
    longest_s, steps_s = dict(state.figures.longest_s), state.figures.steps_s
    held = {sight.replica for sight in look.sights if sight.state == TRACED}
    shown = _with_readings(state, look)
    kept = _kept(state, shown)
    ranks: dict[tuple[ReplicaId, int], Watched] = {}
    for sight in look.sights:
        key = sight.replica, sight.rank
        counted_s = 0.0 if sight.replica in held else gap_s
        before = state.ranks.get(key)
        watched = _watch(before, sight, gap_s, counted_s, is_kept=key in kept)
        if watched is None:
            continue
        if before is not None and _has_moved(before.progress, watched.progress):
            phase = before.progress.phase
            longest_s[phase] = max(longest_s.get(phase, 0.0), before.quiet_s + counted_s)
            done_s = _steps_done(before, watched.progress, counted_s)
            steps_s = (*steps_s, *done_s)[-_KEPT_STEPS:]
            for each in EVERY_STEP if done_s else ():
                longest_s.setdefault(each, state.limits.gap_s)
        ranks[key] = watched
    figures = Figures(steps_s, longest_s)
    state = replace(state, now_s=look.now_s, ranks=ranks, figures=figures)
    if look.others is not None:
        state = parts.with_what_others_see(parts.see_parts(state, shown), look.others)
    return _judge(state, look, shown)


def _with_readings(state: DetectorState, look: Look) -> Look:
    """Return the look with the page of each rank that goes on reading ahead as one that reads.

    See Note [Ranks that read ahead].
    """
    sights = []
    for sight in look.sights:
        before = state.ranks.get((sight.replica, sight.rank))
        if before is not None and sight.progress is not None and _is_same_reading(before.progress, sight.progress):
            sight = replace(sight, progress=_as_reading(sight.progress))
        sights.append(sight)
    return replace(look, sights=tuple(sights))


def _is_same_reading(before: Progress, now: Progress) -> bool:
    """Return whether the rank reads ahead the same as at the look before; False in phase `DATA`."""
    return now.ahead is not None and now.ahead == before.ahead and now.phase is not Phase.DATA


def _as_reading(progress: Progress) -> Progress:
    """Return the page as if the training thread read what is read ahead."""
    assert progress.ahead is not None
    return replace(progress, phase=Phase.DATA, microbatches=(progress.ahead,))


def _kept(state: DetectorState, look: Look) -> set[tuple[ReplicaId, int]]:
    """Return the ranks that are kept waiting (Note [Ranks that wait inside their replica])."""
    bounded = parts.bounded(state)
    furthest_back = parts.furthest_back(state, look)
    if not furthest_back:
        return set()
    known = {key: watched.progress for key, watched in state.ranks.items()}
    known |= {(sight.replica, sight.rank): sight.progress for sight in look.sights if sight.progress is not None}
    return {
        (replica, rank)
        for (replica, rank), progress in known.items()
        if progress.phase in bounded and replica in furthest_back and furthest_back[replica] <= parts.place_of(progress)
    }


def _watch(before: Watched | None, sight: Sight, gap_s: float, counted_s: float, *, is_kept: bool) -> Watched | None:
    """Return what is known about a rank after a look; None until its page was seen whole.

    `gap_s`: seconds since the look before, at most `Limits.gap_s`; 0 at the first look.
    `counted_s`: the same, or 0 if a tracer holds a rank of the replica. A page that shows something
    new ends the rank's silence and all that was counted in it.
    """
    progress = sight.progress
    if before is None:
        return None if progress is None else Watched(progress, is_kept=is_kept)
    if progress is None:  # torn: a page that is being written neither shows nor hides progress
        progress = before.progress
    stopped_s = before.stopped_s + gap_s if sight.state == STOPPED else 0.0
    step_s = 0.0 if progress.step != before.progress.step else before.step_s + counted_s
    if _has_moved(before.progress, progress):
        return Watched(progress, is_kept=is_kept, step_s=step_s)  # it has run since the last look, also if it is stopped now
    reads = _is_same_reading(before.progress, progress)
    return replace(
        before,
        progress=progress,
        quiet_s=before.quiet_s + (0.0 if is_kept or reads else counted_s),
        reading_s=before.reading_s + counted_s if reads else 0.0,
        kept_s=before.kept_s + (counted_s if is_kept else 0.0),
        is_kept=is_kept,
        stopped_s=stopped_s,
        traced_s=before.traced_s + (gap_s if sight.state == TRACED else 0.0),
        step_s=step_s,
    )


def _has_moved(before: Progress, now: Progress) -> bool:
    """Return whether the page shows a new phase, or that an operation began or ended."""
    return (now.begun, now.ended, now.phase) != (before.begun, before.ended, before.phase)


def _steps_done(before: Watched, now: Progress, gap_s: float) -> tuple[float, ...]:
    """Return the mean seconds of the steps that ended since the look before, once for each.

    Return at most 16; () if no step ended, or one of the two pages shows no training step.
    """
    known = before.progress
    if known.step < 0 or now.step <= known.step or not (label_of(known.label).is_training and label_of(now.label).is_training):
        return ()
    num = now.step - known.step
    return ((before.step_s + gap_s) / num,) * min(num, _KEPT_STEPS)


def _judge(state: DetectorState, look: Look, shown: Look) -> tuple[DetectorState, tuple[Effect, ...]]:
    """Name ranks, condemn replicas by Note [Who may be fenced for a hang], report who is at work.

    A rank that is slow, hangs, is stopped or is traced is named once per silence and verdict.
    `shown`: the look as `_with_readings` returns it.
    """
    effects: list[Effect] = []
    accused: dict[ReplicaId, Named] = {}
    silent: set[ReplicaId] = set()
    slow: set[ReplicaId] = set()
    ranks = dict(state.ranks)
    idle_s = _idle_s(state, look)
    for sight in look.sights:
        key = sight.replica, sight.rank
        watched = ranks.get(key)
        if watched is None:
            continue
        told = watched.told
        if watched.progress.phase in WAITS:
            watched = replace(watched, quiet_s=0.0 if watched.progress.phase is Phase.ORDERS else idle_s)
        verdict, limit_s = _verdict(state, watched, sight.state)
        if watched.reading_s and verdict in (Verdict.WORKING, Verdict.WAITING, Verdict.SLOW):
            watched = replace(watched, progress=_as_reading(watched.progress), quiet_s=watched.reading_s, is_kept=False)
            verdict, limit_s = _verdict(state, watched, sight.state)
        if watched.silent_s < state.limits.stopped_s and not watched.stopped_s and sight.state != TRACED:
            continue
        if verdict in (Verdict.WORKING, Verdict.WAITING):
            continue
        own_s = watched.silent_s if watched.is_kept else watched.quiet_s
        seconds = {Verdict.STOPPED: watched.stopped_s, Verdict.TRACED: watched.traced_s}.get(verdict, own_s)
        named = Named(
            sight.replica, sight.rank, verdict, watched.progress.phase, seconds,
            limit_s, sight.state, watched.progress.step, watched.progress.label, watched.progress.microbatches, watched.is_kept,
        )  # fmt: skip
        if verdict not in told and not _is_unexplained(look, named, state.limits.deadline_s):
            ranks[key] = replace(ranks[key], told=told | {verdict})
            effects.append(named)
        if verdict is Verdict.SLOW:
            slow.add(sight.replica)
            continue
        silent.add(sight.replica)
        if _is_evidence(named) or named.seconds >= state.limits.deadline_s:
            known = accused.get(sight.replica)
            if known is None or (named.verdict is Verdict.STOPPED, named.seconds) > (
                known.verdict is Verdict.STOPPED,
                known.seconds,
            ):
                accused[sight.replica] = named
    if look.others is None:
        others_live = any(sight.replica not in silent for sight in look.sights)
        permitted = {*accused} if others_live or look.are_newcomers else set[ReplicaId]()
    else:
        permitted = {known.replica for known in look.others.known if known.may_condemn}
    condemned = tuple(
        Condemned(named, _charge(named))
        for replica, named in accused.items()
        if replica not in state.condemned and (replica in permitted or named.seconds >= state.limits.deadline_s)
    )
    gone = state.condemned | {each.named.replica for each in condemned}
    state = replace(state, ranks=ranks, condemned=gone)
    work: tuple[SeenAtWork, ...] = ()
    if not look.are_newcomers:
        state, work = _see_work(state, shown, accused)
    state, reports = _tell_others(state, look, Suspects(frozenset(silent | slow), frozenset(accused)))
    return state, (*effects, *condemned, *work, *reports)


def _is_unexplained(look: Look, named: Named, deadline_s: float) -> bool:
    """Return whether ranks of other nodes, which are not known, may explain a hang."""
    others = look.others
    if others is None or named.verdict is not Verdict.HUNG or named.seconds >= deadline_s:
        return False
    return named.replica in others.spanning and all(known.replica != named.replica for known in others.known)


def _tell_others(state: DetectorState, look: Look, suspects: Suspects) -> tuple[DetectorState, tuple[Effect, ...]]:
    """Report suspicions that have changed, and the parts that were asked for, on several nodes."""
    if look.others is None:
        return state, ()
    seen = tuple(PartSeen(replica, parts.part(state, replica, look.now_s)) for replica in look.others.asked)
    news = () if suspects == state.suspects else (suspects,)
    return replace(state, suspects=suspects), (*news, *seen)


def _idle_s(state: DetectorState, look: Look) -> float:
    """Return the seconds for which all ranks of the only replica have waited, otherwise 0.

    See Note [The last replica waits for itself].
    """
    here = {sight.replica for sight in look.sights}
    if len(here) != 1 or (look.others is not None and (look.others.num_members != 1 or here & look.others.spanning)):
        return 0.0
    idle_s = math.inf
    for sight in look.sights:
        watched = state.ranks.get((sight.replica, sight.rank))
        if watched is None or watched.progress.phase not in WAITS or sight.state in CANNOT_RUN | {TRACED}:
            return 0.0
        idle_s = min(idle_s, watched.quiet_s)
    return idle_s


def _see_work(state: DetectorState, look: Look, accused: Collection[ReplicaId]) -> tuple[DetectorState, tuple[SeenAtWork, ...]]:
    """Record which replicas are at work, or were within `Limits.after_work_s`; report a change.

    An accused or condemned replica is not seen at work.
    """
    still = {sight.replica for sight in look.sights if sight.state in CANNOT_RUN}
    kept = {key for key, watched in state.ranks.items() if watched.is_kept}
    seen = {
        sight.replica
        for sight in look.sights
        if sight.progress is not None
        and sight.progress.phase not in WAITS | {Phase.SAVE}
        and (sight.replica, sight.rank) not in kept
    }
    seen -= {*still, *accused, *state.condemned}
    looked_at = {sight.replica for sight in look.sights}
    worked_s = {
        replica: seen_s
        for replica, seen_s in {**state.worked_s, **dict.fromkeys(seen, look.now_s)}.items()
        if replica in looked_at and look.now_s - seen_s <= state.limits.after_work_s
    }
    at_work = tuple(sorted(worked_s))
    news = () if at_work == state.at_work else (SeenAtWork(at_work),)
    return replace(state, worked_s=worked_s, at_work=at_work), news


def _verdict(state: DetectorState, watched: Watched, process: str) -> tuple[Verdict, float]:
    """Return the verdict on a rank, and its limit in seconds.

    Before generation 1, a rank is judged only if it is stopped or traced.
    """
    if process == STOPPED:
        limit_s = stop_limit_s(state)
        return (Verdict.STOPPED if watched.stopped_s > limit_s else Verdict.WORKING), limit_s
    if process == TRACED:
        limit_s = stop_limit_s(state)
        return (Verdict.TRACED if watched.traced_s > limit_s else Verdict.WORKING), limit_s
    phase = watched.progress.phase
    limit_s = min(hang_limit_s(state, phase) or state.limits.deadline_s, state.limits.deadline_s)
    if not state.generation:
        return Verdict.WORKING, limit_s  # the coordinator gives replicas their time to start
    if watched.is_kept:
        return (Verdict.HUNG if watched.silent_s > state.limits.deadline_s else Verdict.WAITING), state.limits.deadline_s
    if watched.quiet_s > limit_s:
        return Verdict.HUNG, limit_s
    return (Verdict.SLOW if watched.quiet_s > limit_s / 2 else Verdict.WORKING), limit_s


def _is_evidence(named: Named) -> bool:
    """Return whether the silence counts against the rank before the deadline."""
    if named.verdict is Verdict.TRACED:
        return False
    return named.verdict is Verdict.STOPPED or named.phase not in BOUNDED_BY_NOTHING_SEEN


def _charge(named: Named) -> ReplicaFailing | None:
    """Return the failure to charge to the microbatches of a hang (INV-9), or None.

    It is None unless the rank hangs in a computation and no other rank keeps it waiting.
    """
    if named.verdict is not Verdict.HUNG or named.is_kept or named.phase not in COMPUTES or not named.microbatches:
        return None
    return ReplicaFailing(named.replica, named.label, named.microbatches, str(named), witnessed=True)
