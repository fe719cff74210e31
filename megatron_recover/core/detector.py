"""The machine that judges whether a rank works, waits, is slow, hangs or is stopped, from what its progress page shows.

`step(state, look) -> (state, effects)`. The machine knows no clock, file or process: the driver (`cluster/watch.py`) brings the
time, the pages and the process states, and carries the effects out. The machine never removes a replica by itself.

Note [How a hang is told from a slow operation]
    A rank is silent as long as its page shows no new operation. Only time that the driver looked at counts: a gap between two
    looks counts as `Limits.gap_s` at most, so an agent that was itself held up (a busy or suspended machine) accuses nobody.
    A rank hangs in a phase after the larger of three times: a floor, `HANG_STEPS` typical steps, and twice the longest
    operation that any rank has finished in that phase. The floor and the steps are what the goals allow (an endless loop is
    fenced within 5 step times or 3 s, the larger). All figures are learned anew in every generation. Until a generation has
    its own figures those of the generation before count twice, so that a microbatch that hangs one replica after the other is
    found the second time, too. A phase that nobody has finished yet (the first save, a first compilation) has no limit but the
    user's deadline.

Note [Who may be fenced for a hang]
    A replica is condemned only while another replica is neither silent nor stopped. If all of them are, or only one is left,
    the cause is probably outside (a data disk that stalls) and a fence would end the job: the hang is named, and ended only
    after the user's deadline. A phase that leans on what replicas share (`LEANS_ON_OTHERS`: disks, mostly) is never evidence
    before the deadline: a rank that is silent there is only named. Nor is a compilation: how long the last one took says
    nothing about this one. The state of its process proves nothing: copying a checkpoint into the page cache, reading samples
    and collecting garbage all run on a processor. The price is that an endless loop in such a phase costs the deadline.
    A rank that waits for others never hangs: whoever keeps it waiting does.

Note [Ranks that wait inside their replica]
    Megatron's own collectives join the ranks of a replica in the middle of a computation: one reads samples and sends them to
    the others, one compiles what the others have compiled already. The pages of those that wait show a forward. So a rank is
    kept waiting while another rank of its replica is at something of which nothing seen says how long it takes: a phase of
    `BOUNDED_BY_NOTHING_SEEN`, or one that nobody has finished yet. Until the deadline such a rank waits. Its time is no silence
    and teaches nothing, and the replica is at work by the other rank. After the deadline it is named, too, and its replica is
    ended and charged with nothing, since nobody knows which of the two keeps the other waiting. A rank that is ahead keeps
    nobody waiting, as it has done its part of all that the other is in. It may itself wait for the other: Megatron logs with a
    barrier, and who has come that far waits there for a rank that loops in its optimizer.

Note [At work]
    A rank is at work if its page shows a phase whose length the rank itself decides, its process can run, no other rank of its
    replica keeps it waiting, and it would not be condemned for its silence. Its peers, which wait for it in a sum, cannot know
    that; the coordinator is told which replicas have such a rank (`SeenAtWork`), and holds no wait for one against anybody
    (`core/coordinator.py`, Note [Waiting for one at work]). A page that is torn or absent shows no work, and a replica of which
    a rank is stopped or gone is not at work. Saves are left out: their leaders report them, and they have a time of their own.
    Between two computations no rank of a replica may be at work for an instant, and who has just arrived at a sum may find that
    the others have just given it up: so work counts for `Limits.after_work_s` after it was seen last.

Note [Ranks that a tracer holds]
    A debugger, gcore or strace holds the process of a rank in state `t`, most often because somebody looks into the rank. Such
    a rank is named, and condemned only after the deadline, whatever it does. While one rank of a replica is held, time does not
    count for any rank of that replica: its siblings wait for it inside their computations, and whoever is let go must not be
    condemned for the time before. Nothing is learned from that time either.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from statistics import median
from types import MappingProxyType

from msgspec.structs import replace

from megatron_recover.core.label import label_of
from megatron_recover.core.values import Failing, Generation, MicrobatchId, ReplicaId, Value


class Phase(enum.IntEnum):
    """What a rank's training thread does. The numbers are those of the progress page."""

    LOADING = 1
    """The script, Megatron's arguments, process groups, model, optimizer and checkpoint."""
    BUILDING_DATA = 2
    """Data sets and their index."""
    ORDERS = 3
    """Waiting for an order of the leader: a plan, the votes of all, the end of the job."""
    DATA = 4
    """Reading the samples of a microbatch."""
    FIRST_STEPS = 5
    """A forward or backward of the first steps, in which libraries compile, tune and allocate."""
    COMPILING = 6
    """Compiling inside a forward or backward."""
    FORWARD = 7
    BACKWARD = 8
    EVALUATION = 9
    """A forward of an evaluation step."""
    PIPELINE = 10
    """Between two computations of a pass: sending to, receiving from and waiting for other stages of the replica."""
    REDUCTION = 11
    """Summing buckets over lanes and replicas, and waiting for the others in it."""
    OPTIMIZER = 12
    """From the order to apply a step to the end of the optimizer."""
    SAVE = 13
    BETWEEN = 14
    """Between two steps: logs, hooks of the script."""
    DIGEST = 15
    """Computing the digest of all state, between two steps."""


COMPUTES = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.FIRST_STEPS, Phase.EVALUATION})
"""Phases that compute the microbatches in work."""
WAITS = frozenset({Phase.ORDERS, Phase.PIPELINE, Phase.REDUCTION})
"""Phases whose length others decide."""
LEANS_ON_OTHERS = frozenset({Phase.LOADING, Phase.BUILDING_DATA, Phase.DATA, Phase.SAVE, Phase.BETWEEN})
"""Phases whose length a shared disk or service may decide."""

BOUNDED_BY_NOTHING_SEEN = LEANS_ON_OTHERS | {Phase.COMPILING}
"""Phases in which a silence is no evidence before the deadline. How long one graph compiles says nothing about the next."""

AFTER_A_STEP = frozenset({Phase.BETWEEN, Phase.DIGEST, Phase.SAVE})
"""Phases that follow all else of the step that the page shows."""

EVERY_STEP = frozenset({Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.BETWEEN})
"""Phases that a training step goes through. When a step has ended, those that no look has met were shorter than a gap.

(The time of the step would be no bound to use: the first step of a generation contains the hang that led to it.)
"""

STOPPED, TRACED, UNINTERRUPTIBLE = "T", "t", "D"
"""States of a process, as in /proc/PID/stat."""
CANNOT_RUN = frozenset({STOPPED, "Z", "X", ""})
"""Stopped, or gone."""

HANG_STEPS = 4.0
STOP_STEPS = 2.0
"""After how long a stopped process is condemned: the larger of a floor (`Limits.stopped_s`) and so many typical steps."""
TIMES_LONGEST = 2.0
OLDER = 2.0
"""Factor on figures of the generation before."""
_KEPT_STEPS, _ENOUGH_STEPS = 16, 5
"""How many of the newest step times are kept; how many are needed to know the typical one."""


class Progress(Value, frozen=True):
    """The content of a progress page."""

    generation: Generation
    step: int
    """-1 before the first."""
    label: str
    """Of the step, such as ``train 17``."""
    phase: Phase
    microbatches: tuple[MicrobatchId, ...]
    """In work: being computed, or enqueued on a device and not known complete."""
    begun: int
    """Operations of the training thread that have begun since the process started."""
    ended: int
    since_ns: int
    """When the newest operation began, by CLOCK_MONOTONIC."""


class Sight(Value, frozen=True):
    """One rank as one look shows it."""

    replica: ReplicaId
    rank: int
    progress: Progress | None
    """None: the page is torn, or was never written."""
    state: str
    """One letter; empty if the process is gone."""


class Look(Value, frozen=True):
    """All ranks of the replicas that are in the job, at one instant."""

    now_s: float
    generation: Generation
    sights: tuple[Sight, ...]


class Verdict(enum.Enum):
    """What is said of a rank."""

    WORKING = "working"
    WAITING = "waiting"
    SLOW = "slow"
    """Silent for more than half the time after which it hangs."""
    HUNG = "hung"
    STOPPED = "stopped"
    """By SIGSTOP."""
    TRACED = "traced"
    """A debugger, gcore or strace holds the process (Note [Ranks that a tracer holds])."""


class Named(Value, frozen=True):
    """Effect: tell people, and have the rank write its stacks."""

    replica: ReplicaId
    rank: int
    verdict: Verdict
    phase: Phase
    seconds: float
    limit_s: float
    state: str
    step: int
    label: str
    microbatches: tuple[MicrobatchId, ...]
    is_kept: bool = False
    """Another rank of its replica is at work, for which it may wait."""

    def __str__(self) -> str:
        """Return what is known in one line, without the replica."""
        what = self.phase.name.lower().replace("_", " ")
        if self.microbatches:
            noun = "microbatch" if len(self.microbatches) == 1 else "microbatches"
            what += f" ({noun} {', '.join(map(str, self.microbatches))})"
        where = f"{what} of {self.label}" if self.label else what
        text = f"rank {self.rank}: {self.verdict.value} for {self.seconds:.1f} s in {where}"
        if self.state == UNINTERRUPTIBLE:
            text += "; its process is in state D (it waits for a disk or driver, and SIGKILL waits as well)"
        if self.verdict is Verdict.TRACED:
            text += "; a tracer holds its process (a debugger, gcore or strace)"
        if self.is_kept:
            text += "; another rank of its replica is at work, and it may wait for that one"
        return text


class Condemned(Value, frozen=True):
    """Effect: fence the replica, when the ranks that hang have had a moment to write their stacks."""

    named: Named
    """The rank that has been silent for the longest time."""
    failing: Failing | None
    """Which microbatches the hang is charged to; None: none."""


class SeenAtWork(Value, frozen=True):
    """Effect: tell the coordinator. Comes when it changes, with all replicas that are at work now (Note [At work])."""

    replicas: tuple[ReplicaId, ...]
    """Sorted."""


Effect = Named | Condemned | SeenAtWork


class Figures(Value, frozen=True):
    """How long things take: what limits derive from."""

    steps_s: tuple[float, ...] = ()
    """The newest step times."""
    longest_s: Mapping[Phase, float] = MappingProxyType({})
    """Of every phase the longest operation that a rank has finished."""


class Watched(Value, frozen=True):
    """What is known of a rank."""

    progress: Progress
    quiet_s: float = 0.0
    """Of `silent_s`, what is the rank's own."""
    kept_s: float = 0.0
    """The rest of it: another rank of the replica has kept it waiting."""
    is_kept: bool = False
    """Whether one does so now (Note [Ranks that wait inside their replica])."""
    stopped_s: float = 0.0
    traced_s: float = 0.0
    """How long a tracer has held the rank since the page showed something new."""
    step_s: float = 0.0
    """Since the step began, without the time in which a tracer held a rank of the replica."""
    told: frozenset[Verdict] = frozenset()
    """What was said of the rank since it showed progress."""

    @property
    def silent_s(self) -> float:
        """Since the page showed something new, without the time in which a tracer held a rank of the replica."""
        return self.quiet_s + self.kept_s


class Limits(Value, frozen=True):
    """The waits of a run that the detector keeps, in seconds. `Deadlines` says why each is as long as it is."""

    deadline_s: float
    """The user's one deadline."""
    gap_s: float
    """The longest time between two looks that counts."""
    stopped_s: float
    """The floor below which no stopped process is condemned."""
    hung_s: float
    """The floor below which no rank hangs."""
    after_work_s: float
    """How long a replica counts as at work after it was seen at work."""


class DetectorState(Value, frozen=True):
    """What the detector knows. Start with `DetectorState(limits)`."""

    limits: Limits
    now_s: float | None = None
    generation: Generation = 0
    ranks: Mapping[tuple[ReplicaId, int], Watched] = MappingProxyType({})
    figures: Figures = Figures()
    """Of this generation."""
    older: Figures = Figures()
    """Of the newest generation before it that had some."""
    condemned: frozenset[ReplicaId] = frozenset()
    worked_s: Mapping[ReplicaId, float] = MappingProxyType({})
    """When each replica was seen at work last."""
    at_work: tuple[ReplicaId, ...] = ()
    """As of the newest `SeenAtWork`."""


def typical_step_s(state: DetectorState) -> float | None:
    """Return the median of the newest step times in seconds, or None if too few are known."""
    if len(state.figures.steps_s) >= _ENOUGH_STEPS:
        return median(state.figures.steps_s)
    return OLDER * median(state.older.steps_s) if len(state.older.steps_s) >= _ENOUGH_STEPS else None


def hang_limit_s(state: DetectorState, phase: Phase) -> float | None:
    """Return the silence in seconds after which a rank hangs in `phase`; None: nothing but the deadline limits it."""
    step_s = typical_step_s(state)
    longest_s = state.figures.longest_s.get(phase)
    if longest_s is None and phase in state.older.longest_s:
        longest_s = OLDER * state.older.longest_s[phase]
    if phase in WAITS or step_s is None or longest_s is None:
        return None
    return max(state.limits.hung_s, HANG_STEPS * step_s, TIMES_LONGEST * longest_s)


def stop_limit_s(state: DetectorState) -> float:
    """Return after how many seconds a stopped process is condemned, and one that a tracer holds is named."""
    return max(state.limits.stopped_s, STOP_STEPS * (typical_step_s(state) or 0.0))


def step(state: DetectorState, look: Look) -> tuple[DetectorState, tuple[Effect, ...]]:
    """Take one look. Effects are in no particular order; each rank is named once per silence, each replica condemned once."""
    gap_s = 0.0 if state.now_s is None else min(max(0.0, look.now_s - state.now_s), state.limits.gap_s)
    if look.generation != state.generation:
        known = len(state.figures.steps_s) >= _ENOUGH_STEPS
        older = state.figures if known else state.older
        state = replace(state, generation=look.generation, figures=Figures(), older=older)
    longest_s, steps_s = dict(state.figures.longest_s), state.figures.steps_s
    held = {sight.replica for sight in look.sights if sight.state == TRACED}
    kept = _kept(state, look)
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
    return _judge(state, look)


def _kept(state: DetectorState, look: Look) -> set[tuple[ReplicaId, int]]:
    """Return the ranks that another rank of their replica keeps waiting (Note [Ranks that wait inside their replica])."""
    bounded = {*state.figures.longest_s, *state.older.longest_s} - BOUNDED_BY_NOTHING_SEEN - WAITS
    furthest_back: dict[ReplicaId, tuple[int, bool]] = {}
    for sight in look.sights:
        progress = sight.progress
        if progress is not None and sight.state not in CANNOT_RUN and progress.phase not in bounded | WAITS:
            place = _place(progress)
            furthest_back[sight.replica] = min(place, furthest_back.get(sight.replica, place))
    if not furthest_back:
        return set()
    known = {key: watched.progress for key, watched in state.ranks.items()}
    known |= {(sight.replica, sight.rank): sight.progress for sight in look.sights if sight.progress is not None}
    return {
        (replica, rank)
        for (replica, rank), progress in known.items()
        if progress.phase in bounded and replica in furthest_back and furthest_back[replica] <= _place(progress)
    }


def _place(progress: Progress) -> tuple[int, bool]:
    """Return how far a rank has come: of two ranks the one with the larger value is ahead."""
    return progress.step, progress.phase in AFTER_A_STEP


def _watch(before: Watched | None, sight: Sight, gap_s: float, counted_s: float, *, is_kept: bool) -> Watched | None:
    """Return what is known of a rank after a look; None for one whose page was never seen whole.

    `gap_s`: time since the look before. `counted_s`: how much of it no tracer has taken from the rank.
    """
    progress = sight.progress
    if before is None:
        return None if progress is None else Watched(progress, is_kept=is_kept)
    if progress is None:  # torn: that it is being written shows nothing, and hides nothing
        progress = before.progress
    stopped_s = before.stopped_s + gap_s if sight.state == STOPPED else 0.0
    step_s = 0.0 if progress.step != before.progress.step else before.step_s + counted_s
    if _has_moved(before.progress, progress):
        return Watched(progress, is_kept=is_kept, step_s=step_s)  # it has run since the last look, also if it is stopped now
    return replace(
        before,
        progress=progress,
        quiet_s=before.quiet_s + (0.0 if is_kept else counted_s),
        kept_s=before.kept_s + (counted_s if is_kept else 0.0),
        is_kept=is_kept,
        stopped_s=stopped_s,
        traced_s=before.traced_s + (gap_s if sight.state == TRACED else 0.0),
        step_s=step_s,
    )


def _has_moved(before: Progress, now: Progress) -> bool:
    """Return whether the page shows something new."""
    return (now.begun, now.ended, now.phase) != (before.begun, before.ended, before.phase)


def _steps_done(before: Watched, now: Progress, gap_s: float) -> tuple[float, ...]:
    """Return how long each step took that a rank has done since the look before; evaluation tells nothing about training."""
    known = before.progress
    if known.step < 0 or now.step <= known.step or not (label_of(known.label).is_training and label_of(now.label).is_training):
        return ()
    num = now.step - known.step
    return ((before.step_s + gap_s) / num,) * min(num, _KEPT_STEPS)


def _judge(state: DetectorState, look: Look) -> tuple[DetectorState, tuple[Effect, ...]]:
    """Say what is new about each rank, and condemn replicas where Note [Who may be fenced for a hang] allows it."""
    effects: list[Effect] = []
    accused: dict[ReplicaId, Named] = {}
    silent: set[ReplicaId] = set()
    ranks = dict(state.ranks)
    for sight in look.sights:
        watched = ranks.get((sight.replica, sight.rank))
        if watched is None or (watched.silent_s < state.limits.stopped_s and not watched.stopped_s and sight.state != TRACED):
            continue
        verdict, limit_s = _verdict(state, watched, sight.state)
        if verdict in (Verdict.WORKING, Verdict.WAITING):
            continue
        own_s = watched.silent_s if watched.is_kept else watched.quiet_s
        seconds = {Verdict.STOPPED: watched.stopped_s, Verdict.TRACED: watched.traced_s}.get(verdict, own_s)
        named = Named(
            sight.replica, sight.rank, verdict, watched.progress.phase, seconds,
            limit_s, sight.state, watched.progress.step, watched.progress.label, watched.progress.microbatches, watched.is_kept,
        )  # fmt: skip
        if verdict not in watched.told:
            ranks[sight.replica, sight.rank] = replace(watched, told=watched.told | {verdict})
            effects.append(named)
        if verdict is Verdict.SLOW:
            continue
        silent.add(sight.replica)
        if _is_evidence(named) or named.seconds >= state.limits.deadline_s:
            known = accused.get(sight.replica)
            if known is None or (named.verdict is Verdict.STOPPED, named.seconds) > (
                known.verdict is Verdict.STOPPED,
                known.seconds,
            ):
                accused[sight.replica] = named
    others_live = any(sight.replica not in silent for sight in look.sights)
    condemned = tuple(
        Condemned(named, _charge(named))
        for replica, named in accused.items()
        if replica not in state.condemned and (others_live or named.seconds >= state.limits.deadline_s)
    )
    gone = state.condemned | {each.named.replica for each in condemned}
    state, work = _see_work(replace(state, ranks=ranks, condemned=gone), look, accused)
    return state, (*effects, *condemned, *work)


def _see_work(state: DetectorState, look: Look, accused: Collection[ReplicaId]) -> tuple[DetectorState, tuple[SeenAtWork, ...]]:
    """Note which replicas are at work, those that are `accused` of hanging left out, and say so if it is news."""
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
    """Return the verdict on a rank, and the limit in seconds by which it was judged."""
    if process == STOPPED:
        limit_s = stop_limit_s(state)
        return (Verdict.STOPPED if watched.stopped_s > limit_s else Verdict.WORKING), limit_s
    if process == TRACED:
        limit_s = stop_limit_s(state)
        return (Verdict.TRACED if watched.traced_s > limit_s else Verdict.WORKING), limit_s
    phase = watched.progress.phase
    if phase in WAITS:
        return Verdict.WAITING, state.limits.deadline_s
    limit_s = min(hang_limit_s(state, phase) or state.limits.deadline_s, state.limits.deadline_s)
    if not state.generation:
        return Verdict.WORKING, limit_s  # the coordinator gives replicas their time to start
    if watched.is_kept:
        return (Verdict.HUNG if watched.silent_s > state.limits.deadline_s else Verdict.WAITING), state.limits.deadline_s
    if watched.quiet_s > limit_s:
        return Verdict.HUNG, limit_s
    return (Verdict.SLOW if watched.quiet_s > limit_s / 2 else Verdict.WORKING), limit_s


def _is_evidence(named: Named) -> bool:
    """Return whether the silence is the rank's own, as far as can be seen."""
    if named.verdict is Verdict.TRACED:
        return False
    return named.verdict is Verdict.STOPPED or named.phase not in BOUNDED_BY_NOTHING_SEEN


def _charge(named: Named) -> Failing | None:
    """Return what the hang is charged to: microbatches, only if the rank hangs inside their computation (INV-9)."""
    if named.verdict is not Verdict.HUNG or named.is_kept or named.phase not in COMPUTES or not named.microbatches:
        return None
    return Failing(named.replica, named.label, named.microbatches, str(named), witnessed=True)
