"""The parts of a replica: what its ranks on one node do, on which its ranks elsewhere may wait.

`core/detector.py` has the reasons: Note [Ranks that wait inside their replica] and Note [A job on
several nodes].
"""

from __future__ import annotations

from msgspec.structs import replace

from megatron_recover.core.detector_state import DetectorState
from megatron_recover.core.progress import AFTER_A_STEP, BOUNDED_BY_NOTHING_SEEN, WAITS, Phase, Progress
from megatron_recover.core.values import ReplicaId
from megatron_recover.core.verdict import CANNOT_RUN, TRACED, Look, Others, Part

_KEPT_PLACES = 8
"""Places of a replica that are kept. While a rank is silent there are few: those of its own step,
and of the next one."""


def place_of(progress: Progress) -> tuple[int, bool]:
    """Return the rank's position, for comparison: of two ranks the larger value is ahead."""
    return progress.step, progress.phase in AFTER_A_STEP


def bounded(state: DetectorState) -> set[Phase]:
    """Return the phases of known length in which a rank decides itself how long it takes."""
    return {*state.figures.longest_s, *state.older.longest_s} - BOUNDED_BY_NOTHING_SEEN - WAITS


def furthest_back(state: DetectorState, look: Look) -> dict[ReplicaId, tuple[int, bool]]:
    """Return the place furthest back of the ranks of each replica in phases of unknown length."""
    judged = bounded(state) | WAITS
    found: dict[ReplicaId, tuple[int, bool]] = {}
    for sight in look.sights:
        progress = sight.progress
        if progress is not None and sight.state not in CANNOT_RUN and progress.phase not in judged:
            place = place_of(progress)
            found[sight.replica] = min(place, found.get(sight.replica, place))
    return found


def see_parts(state: DetectorState, shown: Look) -> DetectorState:
    """Note which replicas have a rank in a phase of unknown length, or one that a tracer holds.

    A torn page shows what the page before it showed.
    """
    sights = tuple(
        replace(sight, progress=state.ranks[key].progress)
        if sight.progress is None and (key := (sight.replica, sight.rank)) in state.ranks
        else sight
        for sight in shown.sights
    )
    here = {sight.replica for sight in sights}
    places = {replica: seen for replica, seen in state.places.items() if replica in here}
    for replica, place in furthest_back(state, replace(shown, sights=sights)).items():
        before = [each for each in places.get(replica, {}).items() if each[0] != place]
        places[replica] = dict([*before[1 - _KEPT_PLACES :], (place, shown.now_s)])
    traced = {replica: seen_s for replica, seen_s in state.traced_at_s.items() if replica in here}
    traced |= {sight.replica: shown.now_s for sight in sights if sight.state == TRACED}
    return replace(state, places=places, traced_at_s=traced)


def part(state: DetectorState, replica: ReplicaId, now_s: float) -> Part:
    """Return what was seen here of a replica's ranks."""
    places = tuple((place, now_s - seen_s) for place, seen_s in state.places.get(replica, {}).items())
    traced_s = state.traced_at_s.get(replica)
    return Part(places, None if traced_s is None else now_s - traced_s)


def with_what_others_see(state: DetectorState, others: Others) -> DetectorState:
    """Subtract from the silences here the time in which a rank of another node explains them."""
    elsewhere = {known.replica: known.parts for known in others.known}
    ranks = dict(state.ranks)
    for key, watched in state.ranks.items():
        for one in elsewhere.get(key[0], ()):
            if one.traced_ago_s is not None:
                watched = replace(watched, quiet_s=min(watched.quiet_s, one.traced_ago_s))
            for place, ago_s in one.places:
                if place <= place_of(watched.progress):
                    own_s = min(watched.quiet_s, ago_s)
                    watched = replace(watched, quiet_s=own_s, kept_s=watched.silent_s - own_s)
        ranks[key] = watched
    return replace(state, ranks=ranks)
