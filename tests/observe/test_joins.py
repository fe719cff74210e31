"""Newcomers in a trace: a run in which one joins holds, and each way to take one up wrongly is found, with number and line."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.core.digest import combined
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.observe.follow.metrics import RunMetrics
from megatron_recover.observe.follow.notices import Joined, Notices
from megatron_recover.observe.follow.progress import RunProgress
from megatron_recover.observe.goodput import Goodput
from megatron_recover.observe.history import History
from megatron_recover.observe.joins import doings, meanwhile, sizes
from megatron_recover.observe.report import perfetto
from megatron_recover.observe.report.lanes import newcomers_picture
from megatron_recover.observe.report.page import render
from megatron_recover.observe.report.timeline import Timeline
from megatron_recover.observe.summary import summarize
from megatron_recover.observe.verify.check import check, describe, violations
from tests.observe import traces

Events = list[trace.Event]

# In `traces.joining_run`, newcomer 3 is turned away in step 2 (generation 3), and joins in step 4 (generation 4).


def _all(events: Events, kind: type[trace.Event], **fields: object) -> list[int]:
    """Indices of the events of a type with these fields."""
    return [
        i for i, event in enumerate(events)
        if type(event) is kind and all(getattr(event, name) == value for name, value in fields.items())
    ]  # fmt: skip


def _edit(events: Events, kind: type[trace.Event], to: dict[str, object], **fields: object) -> list[int]:
    """Change fields of all events of a type with these fields; returns their indices."""
    found = _all(events, kind, **fields)
    for index in found:
        events[index] = msgspec.structs.replace(events[index], **to)
    return found


def _drop(events: Events, kind: type[trace.Event], **fields: object) -> None:
    for index in reversed(_all(events, kind, **fields)):
        del events[index]


def _broken(events: Events) -> dict[str, list[int]]:
    """Invariant -> lines of its violations."""
    found: dict[str, list[int]] = {}
    for violation in violations(History(enumerate(events, start=1))):
        found.setdefault(violation.invariant, []).append(violation.line)
    return found


def _first_plan(events: Events, generation: int) -> int:
    return _all(events, trace.Plan, generation=generation)[0]


def no_member_gives_its_digest(events: Events) -> int:
    _edit(events, trace.Status, {"state_digest": None}, generation=4)
    return _first_plan(events, 4)


def a_member_gives_another_digest(events: Events) -> int:
    _edit(events, trace.Status, {"state_digest": f"{7:016x}"}, generation=4, replica=1)
    return _first_plan(events, 4)


def all_members_have_another_state(events: Events) -> int:
    _edit(events, trace.Status, {"state_digest": f"{7:016x}"}, generation=4)
    return _first_plan(events, 4)


def a_newcomer_is_admitted_with_the_state_of_another_step(events: Events) -> int:
    _drop(events, trace.Claimed, label="train 5")
    return _first_plan(events, 4)


def a_newcomer_adopts_the_digest(events: Events) -> int:
    """It claims what the members have, and one of its ranks has read something else."""
    _edit(events, trace.StateRead, {"digest": f"{7:016x}"}, label="train 5", rank=1)
    return _all(events, trace.Claimed, label="train 5")[0]


def a_rank_of_an_admitted_newcomer_has_another_state(events: Events) -> int:
    a_newcomer_adopts_the_digest(events)
    return _first_plan(events, 4)


def a_newcomer_claims_what_a_rank_has_not_read(events: Events) -> int:
    _drop(events, trace.StateRead, label="train 5", rank=0)
    return _all(events, trace.Claimed, label="train 5")[0]


def a_step_is_committed_without_the_newcomers_vote(events: Events) -> int:
    _drop(events, trace.Voted, step=4, replica=3)
    return _all(events, trace.Committed, step=4)[0]


def a_newcomer_votes_for_another_record(events: Events) -> int:
    _edit(events, trace.Voted, {"digest": "other"}, step=4, replica=3)
    return _all(events, trace.Committed, step=4)[0]


def a_newcomer_has_other_parameters_after_its_first_step(events: Events) -> int:
    return _edit(events, trace.Applied, {"parameter_digest": "other"}, step=4, replica=3, rank=0)[0]


def a_newcomer_is_made_otherwise(events: Events) -> int:
    return _edit(events, trace.Joined, {"fingerprint": "g"}, replica=3)[0]


def a_newcomer_joins_where_a_member_holds_a_result(events: Events) -> int:
    _edit(events, trace.Status, {"complete": ((0, 3),)}, generation=4, replica=1)
    return _first_plan(events, 4)


def a_newcomer_tells_what_it_holds(events: Events) -> int:
    index = _all(events, trace.Status, generation=4)[-1]
    events.insert(index + 1, msgspec.structs.replace(events[index], replica=3, contributions=()))
    return index + 1


def one_that_was_turned_away_votes(events: Events) -> int:
    index = _all(events, trace.Voted, step=2)[0]
    events.insert(index, msgspec.structs.replace(events[index], replica=3))
    return index


def one_that_was_turned_away_plans(events: Events) -> int:
    index = _all(events, trace.Plan, generation=3)[-1]
    events.insert(index + 1, msgspec.structs.replace(events[index], replica=3))
    return index + 1


def one_that_has_planned_and_was_turned_away_comes_back(events: Events) -> int:
    one_that_was_turned_away_plans(events)
    return _all(events, trace.Generation, generation=4)[0]


def a_slot_is_used_while_its_process_lives(events: Events) -> int:
    [fenced] = _all(events, trace.Fenced, replica=2)
    events[fenced] = msgspec.structs.replace(events[fenced], ranks=(0,))
    return _all(events, trace.Forming)[0]


def a_slot_of_a_member_is_used(events: Events) -> int:
    return _edit(events, trace.Forming, {"in_place_of": (1,)})[0]


def a_slot_of_a_newcomer_that_forms_is_used(events: Events) -> int:
    after = _all(events, trace.Joined, replica=3)[0] + 1
    events.insert(after, trace.Forming(t=events[after].t, newcomer=4, in_place_of=(3,)))
    return after


def a_replica_has_more_successors_than_slots(events: Events) -> int:
    """Two newcomers of 2 ranks may share the slots of a replica of 2 ranks; a third one sits where one of them lives."""
    after = _all(events, trace.Forming)[0] + 1
    events[after:after] = [trace.Forming(t=events[after].t, newcomer=newcomer, in_place_of=(2,)) for newcomer in (4, 5)]
    return after + 1


def a_process_of_a_former_replica_is_set_aside_after_its_slot_was_used(events: Events) -> int:
    after = _all(events, trace.Joined, replica=3)[0] + 1
    events.insert(after, trace.SetAside(t=events[after].t, replica=2, rank=1, pid=9, state="D", wchan=""))
    return after


def a_roster_grows_by_one_that_does_not_join(events: Events) -> int:
    return _edit(events, trace.Generation, {"newcomers": ()}, generation=4)[0]


def an_id_of_the_start_is_used_for_a_newcomer(events: Events) -> int:
    """A job of 4 replicas one of which never started: its id is not free."""
    _edit(events, trace.RunStarted, {"replicas": 4})
    return _all(events, trace.Generation, generation=3)[0]


def an_id_is_used_again(events: Events) -> int:
    """Newcomer 3 was proven and has left without a word; its id is given to another one."""
    after = _all(events, trace.Proven)[0] + 1
    for index in _all(events, trace.Generation, generation=4):
        again = msgspec.structs.replace(events[index], generation=6)
        gone = msgspec.structs.replace(events[index], generation=5, roster=(0, 1), newcomers=(), left=(3,))
        events[after:after] = [gone, again]
    return after + 1


def a_member_is_taken_for_a_newcomer(events: Events) -> int:
    return _edit(events, trace.Generation, {"newcomers": (1, 3)}, generation=4)[0]


def a_newcomer_is_in_no_roster(events: Events) -> int:
    return _edit(events, trace.Generation, {"newcomers": (3, 4)}, generation=4)[0]


def a_member_plans_with_one_that_is_turned_away(events: Events) -> int:
    index = _all(events, trace.Plan, generation=3, replica=1)[0]
    events[index] = msgspec.structs.replace(events[index], roster=(0, 1, 3), quotas=(0, 0, 0))
    return index


def a_member_plans_without_the_newcomer(events: Events) -> int:
    return _edit(events, trace.Plan, {"roster": (0, 1)}, generation=4, replica=1)[0]


def a_plan_leaves_an_older_member_out(events: Events) -> int:
    _drop(events, trace.TurnedAway)
    return _edit(events, trace.Plan, {"roster": (0,), "quotas": (0,)}, generation=3)[0]


def a_newcomer_disappears_without_a_loss(events: Events) -> int:
    after = _all(events, trace.Proven)[0] + 1
    events.insert(after, trace.Generation(t=events[after].t, generation=5, roster=(0, 1)))
    return after


def a_newcomer_never_greeted(events: Events) -> int:
    _drop(events, trace.Joined, replica=3)
    return _all(events, trace.Generation, generation=3)[0]


def a_newcomer_is_proven_that_was_turned_away(events: Events) -> int:
    index = _all(events, trace.TurnedAway)[0]
    events.insert(index + 1, trace.Proven(t=events[index].t, generation=3, newcomers=(3,)))
    return index + 1


def a_newcomer_is_turned_away_after_it_was_proven(events: Events) -> int:
    index = _all(events, trace.Proven)[0]
    events.insert(index + 1, trace.TurnedAway(t=events[index].t, generation=4, newcomers=(3,), reason="late"))
    return index + 1


def a_member_is_turned_away(events: Events) -> int:
    return _edit(events, trace.TurnedAway, {"newcomers": (1, 3)})[0]


def a_newcomer_is_proven_before_its_first_commit(events: Events) -> int:
    [index] = _all(events, trace.Proven)
    to = _all(events, trace.Committed, step=4)[0]
    events.insert(to, events.pop(index))
    return to


def a_newcomer_counts_as_a_member_before_it_is_proven(events: Events) -> int:
    [index] = _all(events, trace.Proven)
    events[index] = trace.Generation(t=events[index].t, generation=5, roster=(0, 1, 3), reason="trouble")
    return index


def a_member_is_outvoted_with_the_vote_of_a_newcomer(events: Events) -> int:
    index = _all(events, trace.Committed, step=4)[0]
    loss = trace.Loss(replica=0, kind=LossKind.DIVERGED)
    told = trace.Generation(t=events[index].t, generation=5, roster=(1, 3), newcomers=(3,), losses=(loss,))
    events.insert(index, told)
    return index


def a_newcomer_has_a_quota_in_its_first_step(events: Events) -> int:
    return _edit(events, trace.Plan, {"quotas": (0, 0, 1)}, generation=4, step=4)[0]


def a_newcomer_computes_in_its_first_step(events: Events) -> int:
    computes = (trace.Compute(microbatches=(5,), into=traces.BUCKETS),)
    return _edit(events, trace.Plan, {"computes": computes}, generation=4, step=4, replica=3)[0]


BREAKAGES: list[tuple[str, Callable[[Events], int]]] = [
    ("INV-2", no_member_gives_its_digest),
    ("INV-2", a_member_gives_another_digest),
    ("INV-2", all_members_have_another_state),
    ("INV-2", a_newcomer_is_admitted_with_the_state_of_another_step),
    ("INV-2", a_newcomer_adopts_the_digest),
    ("INV-2", a_rank_of_an_admitted_newcomer_has_another_state),
    ("INV-2", a_newcomer_claims_what_a_rank_has_not_read),
    ("INV-2", a_step_is_committed_without_the_newcomers_vote),
    ("INV-2", a_newcomer_votes_for_another_record),
    ("INV-2", a_newcomer_has_other_parameters_after_its_first_step),
    ("INV-2", a_newcomer_is_made_otherwise),
    ("INV-4", a_newcomer_joins_where_a_member_holds_a_result),
    ("INV-5", a_newcomer_tells_what_it_holds),
    ("INV-5", one_that_was_turned_away_votes),
    ("INV-5", one_that_was_turned_away_plans),
    ("INV-5", a_slot_is_used_while_its_process_lives),
    ("INV-5", a_slot_of_a_member_is_used),
    ("INV-5", a_slot_of_a_newcomer_that_forms_is_used),
    ("INV-5", a_replica_has_more_successors_than_slots),
    ("INV-5", a_process_of_a_former_replica_is_set_aside_after_its_slot_was_used),
    ("INV-6", one_that_has_planned_and_was_turned_away_comes_back),
    ("INV-6", a_roster_grows_by_one_that_does_not_join),
    ("INV-6", an_id_of_the_start_is_used_for_a_newcomer),
    ("INV-6", an_id_is_used_again),
    ("INV-6", a_member_is_taken_for_a_newcomer),
    ("INV-6", a_newcomer_is_in_no_roster),
    ("INV-6", a_member_plans_with_one_that_is_turned_away),
    ("INV-6", a_member_plans_without_the_newcomer),
    ("INV-6", a_plan_leaves_an_older_member_out),
    ("INV-6", a_newcomer_disappears_without_a_loss),
    ("INV-6", a_newcomer_never_greeted),
    ("INV-6", a_newcomer_is_proven_that_was_turned_away),
    ("INV-6", a_newcomer_is_turned_away_after_it_was_proven),
    ("INV-6", a_member_is_turned_away),
    ("INV-6", a_newcomer_is_proven_before_its_first_commit),
    ("INV-6", a_newcomer_counts_as_a_member_before_it_is_proven),
    ("INV-6", a_member_is_outvoted_with_the_vote_of_a_newcomer),
    ("INV-7", a_newcomer_has_a_quota_in_its_first_step),
    ("INV-7", a_newcomer_computes_in_its_first_step),
]


@pytest.mark.parametrize(("invariant", "breakage"), BREAKAGES, ids=lambda value: getattr(value, "__name__", value))
def test_each_breakage_is_found_and_named(invariant: str, breakage: Callable[[Events], int]) -> None:
    events = list(traces.joining_run().events)
    line = breakage(events) + 1
    broken = _broken(events)
    assert line in broken.get(invariant, []), f"expected {invariant} at line {line}, found {broken}"


# --- The slots of newcomers that were lost before they joined, and of replicas that have left -----------------------------


def _slots_used_again(*ends: trace.Event, is_ready: bool = False, has_left: bool = False) -> tuple[Events, int]:
    """Events of a run in which newcomer 4 gets the slots of newcomer 3, or of a replica that left, and the line of that.

    `ends`: what is known of the end of these by then. `is_ready`: newcomer 3 was ready to read.
    """
    if has_left:
        run, former = traces.Run(), 2
        run.quiet_step()
        run.ask_to_leave(2)
        run.step_with_leave(2)
    else:
        run, former = traces.Run(), 3
        run.quiet_step()
        run.step_with_kill_in_backward(2)
        run.form(3, in_place_of=(2,))
        if not is_ready:
            run.events.pop()
    for event in ends:
        run.events.append(msgspec.structs.replace(event, t=run.events[-1].t))
    line = len(run.events) + 1
    run.add(trace.Forming, newcomer=4, in_place_of=(former,))
    run.quiet_step()
    return list(run.finish().events), line


def _lost(replica: int = 3) -> trace.Event:
    return trace.NewcomerLost(t=0.0, newcomer=replica, kind=LossKind.SUSPECTED, detail="it could not be started")


def _dead(*ranks: int, replica: int = 3) -> trace.Event:
    return trace.Fenced(t=0.0, replica=replica, ranks=ranks)


def _killed(rank: int, replica: int = 3) -> trace.Event:
    return trace.Failure(t=0.0, replica=replica, rank=rank, cause="SIGKILL")


@pytest.mark.parametrize(
    ("ends", "is_ready", "why"),
    [
        ((), True, "neither lost nor has left"),
        ((_dead(0, 1),), True, "neither lost nor has left"),
        ((_lost(),), False, "whose end no node has confirmed"),
        ((_lost(), _dead()), True, "whose ranks [0, 1] are not confirmed dead"),
        ((_killed(1), _lost(), _dead(0)), False, "whose ranks [1] are not confirmed dead"),
        ((_killed(0), _lost(), _dead(0)), True, "whose ranks [1] are not confirmed dead"),
    ],
)
def test_slots_of_a_newcomer_that_may_live_are_not_used(ends: tuple[trace.Event, ...], is_ready: bool, why: str) -> None:
    events, line = _slots_used_again(*ends, is_ready=is_ready)
    found = [
        each for each in violations(History(enumerate(events, start=1))) if each.invariant == "INV-5" and each.line == line
    ]
    assert len(found) == 1 and why in found[0].message, found


@pytest.mark.parametrize(
    ("ends", "is_ready"),
    [
        ((_lost(), _dead(0, 1)), False),
        ((_killed(0), _lost(), _dead(0, 1)), True),
        ((_dead(), _lost()), False),  # its node had not begun to form it
        ((_lost(), _dead(1), _dead()), False),  # of two nodes one had not begun
        ((_killed(1), _lost(), _dead(0), _dead(1)), True),  # two nodes
    ],
)
def test_slots_of_a_newcomer_that_has_ended_are_used_again(ends: tuple[trace.Event, ...], is_ready: bool) -> None:
    events, _ = _slots_used_again(*ends, is_ready=is_ready)
    assert _broken(events) == {}


def test_slots_of_a_replica_that_has_left_are_used_again() -> None:
    """It ends by itself, which no event says. One that did not end in time was killed before."""
    assert _broken(_slots_used_again(has_left=True)[0]) == {}
    assert _broken(_slots_used_again(_dead(0, replica=2), has_left=True)[0]) == {}


@pytest.mark.parametrize("late", [_dead(0, replica=2), _killed(0, replica=2)])
def test_a_replica_that_has_left_and_lives_after_its_slots_were_used_is_found(late: trace.Event) -> None:
    events, line = _slots_used_again(has_left=True)
    events.insert(line, msgspec.structs.replace(late, t=events[line].t))
    assert _broken(events) == {"INV-5": [line + 1]}


def test_a_newcomer_that_is_ready_after_its_slots_were_used_is_found() -> None:
    events, line = _slots_used_again(_lost(), _dead())
    joined = trace.Joined(t=events[line].t, replica=3, fingerprint="f", bucket_ranks=traces.BUCKET_RANKS)
    events.insert(line, joined)
    assert line + 1 in _broken(events)["INV-5"]


def test_a_run_in_which_a_newcomer_is_turned_away_and_joins_later_holds() -> None:
    assert _broken(traces.joining_run().events) == {}


def test_a_coordinator_may_make_the_next_generation_before_it_hears_who_is_turned_away() -> None:
    """Then the plans alone show the working roster."""
    events = list(traces.joining_run().events)
    _drop(events, trace.TurnedAway)
    assert _broken(events) == {}
    assert History(enumerate(events, start=1)).roster(3) == (0, 1)


def test_the_loss_of_an_unproven_newcomer_makes_a_generation_that_names_it() -> None:
    run = traces.Run()
    run.quiet_step()
    run.form(3)
    dealt = run.deal(range(6))
    run.plan(dealt, traces.BUCKETS)
    for replica, ids in dealt.items():
        run.compute(replica, ids, traces.BUCKETS)
    run.claim(3)
    run.roster, run.generation = (0, 1, 2, 3), 2
    run.add(trace.Generation, generation=2, roster=run.roster, newcomers=(3,), reason="replicas 3 join")
    run.statuses(dealt, lambda replica: (), newcomers=(3,))
    run.lose(3, 0, "reduce", bucket=0)
    run.statuses(dealt, lambda replica: ())
    run.plan({}, traces.BUCKETS)
    run.reduce(traces.BUCKETS)
    run.commit(dict.fromkeys(traces.BUCKETS, 3))
    run.quiet_step()
    assert _broken(run.finish().events) == {}


def test_newcomers_without_older_members_go_on_as_members() -> None:
    """All older members die in the step in which a newcomer was admitted: it has a status then, and computes what is lost."""
    run = traces.Run(replicas=1)
    run.quiet_step()
    run.form(1)
    dealt = run.deal(range(6))
    run.plan(dealt, traces.BUCKETS)
    run.compute(0, dealt[0][:3], traces.BUCKETS)
    run.claim(1)
    run.roster, run.generation = (0, 1), 2
    run.add(trace.Generation, generation=2, roster=run.roster, newcomers=(1,), reason="replicas 1 join")
    run.statuses(dealt, lambda replica: (), newcomers=(1,))
    run.plan({}, traces.BUCKETS)
    run.add(trace.Failure, replica=0, rank=0, cause="SIGKILL")
    run.add(trace.Fenced, replica=0, ranks=(0, 1))
    run.roster, run.generation = (1,), 3
    loss = trace.Loss(replica=0, kind=LossKind.PROCESS_ENDED)
    run.add(trace.Generation, generation=3, roster=(1,), newcomers=(1,), losses=(loss,))
    run.statuses({}, lambda replica: ())
    again = {1: tuple(range(6))}
    run.plan(again, traces.BUCKETS)
    run.compute(1, again[1], traces.BUCKETS)
    run.reduce(traces.BUCKETS)
    run.commit(dict.fromkeys(traces.BUCKETS, 3))
    run.add(trace.Proven, generation=3, newcomers=(1,))
    run.quiet_step()
    events = run.finish().events
    assert _broken(events) == {}
    _drop(events, trace.Status, generation=3)
    assert "INV-5" in _broken(events), "as a member it has to say what it has"


def test_what_members_have_is_the_digest_over_all_ranks() -> None:
    """The hand-made digests are combined as the program combines them."""
    events = traces.joining_run().events
    [claimed] = [events[index] for index in _all(events, trace.Claimed, label="train 5")]
    assert isinstance(claimed, trace.Claimed) and claimed.digest == f"{combined([400, 401]):016x}"


def test_a_trace_from_before_newcomers_is_read() -> None:
    line = b'{"event":"generation","v":2,"t":0.5,"generation":1,"roster":[0,1],"losses":[],"left":[],"reason":"start"}\n'
    event, fragment = trace.parse(line)
    assert isinstance(event, trace.Generation) and event.newcomers == () and not fragment
    old = b'{"event":"status","v":2,"t":0.5,"replica":0,"generation":1,"step":0,"work":false,"contributions":[],"complete":[],'
    event, _ = trace.parse(old + b'"committed":null}\n')
    assert isinstance(event, trace.Status) and event.state_digest is None


# --- What people see -----------------------------------------------------------------------------------------------------


def _history() -> History:
    return History(enumerate(traces.joining_run().events, start=1))


def test_the_summary_tells_what_became_of_a_newcomer() -> None:
    summary = summarize(_history())
    assert (summary.replicas_start, summary.replicas_end, summary.generations) == (3, 3, 4)
    [joined] = summary.joins
    assert (joined.replica, joined.in_place_of, joined.generation, joined.label) == (3, (2,), 4, "train 5")
    assert joined.states_read == 3 and joined.bytes_read == 2000 and joined.formed_s == pytest.approx(0.001)
    assert joined.refusals == ("its state digest differs", "a save is in progress") and joined.failed == ""
    parts = (joined.freed_s, joined.formed_s, joined.reading_s, joined.admitted_s)
    assert None not in parts and joined.back_s == pytest.approx(sum(filter(None, parts)))
    [strike] = [event.t for event in traces.joining_run().events if isinstance(event, trace.Fault)]
    [proven] = [event.t for event in traces.joining_run().events if isinstance(event, trace.Proven)]
    assert joined.back_s == pytest.approx(proven - strike), "from the death to the first commit"
    progress = meanwhile(_history(), joined)
    assert [(one.replica, one.num_steps, one.is_finished) for one in progress] == [(0, 2, True), (1, 2, True)], (
        "without the step of the death"
    )
    assert joined.words.startswith("replica 3, in the place of replica 2, joined at train 5 0.")
    assert joined.words.endswith("refused 2 times")


def test_a_newcomer_that_dies_while_it_forms_is_told_and_costs_nobody_anything() -> None:
    run = traces.Run()
    run.quiet_step()
    run.form(3)
    run.add(trace.Failure, replica=3, rank=1, cause="SIGKILL")
    run.add(trace.Fenced, replica=3, ranks=(0, 1))
    run.quiet_step()
    history = History(enumerate(run.finish().events, start=1))
    assert _broken(run.events) == {}
    summary = summarize(history)
    assert summary.joins[0].words == "replica 3 was formed and did not join: it ended (SIGKILL)"
    assert (summary.recoveries, summary.goodput) == ((), 1.0)


@pytest.mark.parametrize(("is_late", "why"), [(True, "the run ended before"), (False, "it was lost")])
def test_a_newcomer_that_is_killed_at_the_end_was_not_lost(is_late: bool, why: str) -> None:
    run = traces.Run()
    run.quiet_step()
    run.form(3)
    if not is_late:
        run.add(trace.Fenced, replica=3, ranks=(0, 1))
    run.quiet_step()
    if is_late:
        run.add(trace.Fenced, replica=3, ranks=(0, 1))
    [joined] = summarize(History(enumerate(run.finish().events, start=1))).joins
    assert joined.failed == why


def test_a_step_in_which_a_newcomer_joins_is_not_lost_to_faults() -> None:
    summary = summarize(_history())
    assert [(one.generation, one.newcomers) for one in summary.recoveries] == [(2, ()), (3, (3,)), (4, (3,))]
    disturbed = [one.label for one in Goodput(_history()).steps if one.is_disturbed]
    assert disturbed == ["train 2"]
    assert [one.replicas for one in Goodput(_history()).steps] == [3, 3, 2, 2, 2, 3]


def test_members_rise_again_with_the_first_step_of_a_newcomer() -> None:
    assert [size for _, size in sizes(_history())] == [3, 2, 2, 2, 3]


def test_what_a_newcomer_does_has_a_lane_of_its_own() -> None:
    [(replica, mine)] = doings(_history()).items()
    assert replica == 3
    kinds = [one.kind for one in mine]
    assert kinds.count("reading") == 3 and kinds.count("asking") == 3 and kinds.count("joining") == 2 and kinds[0] == "forming"
    assert all(one.begin < one.end for one in mine)
    history = _history()
    found = newcomers_picture(history)
    assert found is not None and [group.name for group in found.groups] == ["replica 3"]
    assert [mark.name for mark in found.marks] == ["generation 2", "generation 3", "generation 4"]
    timeline = Timeline(history)
    [episode] = timeline.episodes
    assert episode.lost == (2,), "a join is no recovery"
    drawn = [event for event in perfetto.events(history, timeline) if event.get("cat") == "join"]
    assert {event["name"] for event in drawn} == {"forming", "reading", "asking", "joining"}
    assert {event["pid"] for event in drawn} == {4}, "the process of replica 3"


def test_the_page_has_a_part_about_replicas(tmp_path: Path) -> None:
    verdict = check(traces.write(tmp_path / "run", traces.joining_run().events))
    page = render(verdict, Timeline(verdict.history))
    assert '<section id="replicas">' in page and "joined at train 5" in page and "Replicas" in page
    assert "replica 3, in the place of replica 2, joined at train 5" in describe(verdict)


def test_the_metrics_count_joins_and_refusals() -> None:
    metrics = RunMetrics()
    live = []
    for event in traces.joining_run().events:
        metrics.take(event)  # type: ignore[arg-type]
        live.append({one.metric.name: one.value for one in metrics.samples() if not one.label_value})
    assert [size for size, _ in itertools.groupby(one["replicas_live"] for one in live)] == [3, 2, 3]
    assert [size for size, _ in itertools.groupby(one["replicas_forming"] for one in live)] == [0, 1, 0, 1, 0]
    assert (live[-1]["joins_total"], live[-1]["joins_refused_total"]) == (1, 2)


def test_operators_are_told_of_a_join() -> None:
    notices = Notices(run_dir="/runs/x", host="node-1", began_at=0.0)
    told = [one for event in traces.joining_run().events for one in notices.take(event)]  # type: ignore[arg-type]
    assert [type(one).__name__ for one in told] == ["Lost", "Degraded", "Joined", "Ended"]
    joined = told[2]
    assert isinstance(joined, Joined) and (joined.newcomers, joined.replicas_live, joined.replicas_configured) == ([3], 3, 3)


def test_the_live_line_names_who_forms_and_counts_members() -> None:
    progress, lines = RunProgress(), []
    for event in traces.joining_run().events:
        progress.take(event)  # type: ignore[arg-type]
        parts = progress.line().split(" | ")
        lines.append(" | ".join(part for part in parts if part.startswith(("replicas", "forming"))))
    shown = [line for line, _ in itertools.groupby(lines)][1:]
    assert shown == [
        "replicas 3/3", "replicas 2/3", "replicas 2/3 | forming replica 3", "replicas 2/3",
        "replicas 2/3 | forming replica 3", "replicas 2/3", "replicas 3/3",
    ]  # fmt: skip
