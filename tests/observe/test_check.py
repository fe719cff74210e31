"""The checker: valid traces pass, and each way to break an invariant is found, with its number and its line.

Each breakage changes one thing in a valid trace by hand, as a defect of the program would have written it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.core.request import coordinator_lost
from megatron_recover.observe.history import History
from megatron_recover.observe.step import not_once
from megatron_recover.observe.summary import summarize
from megatron_recover.observe.verify.check import check, describe, violations
from tests.observe import traces

Events = list[trace.Event]


def _find(events: Events, kind: type[trace.Event], nth: int = 0, **fields: object) -> int:
    """Index of the n-th event of a type with these fields."""
    matching = [
        i for i, event in enumerate(events)
        if type(event) is kind and all(getattr(event, name) == value for name, value in fields.items())
    ]  # fmt: skip
    return matching[nth]


def _edit(events: Events, kind: type[trace.Event], nth: int = 0, /, *, to: dict[str, object], **fields: object) -> int:
    """Change fields of one event; returns its index."""
    index = _find(events, kind, nth, **fields)
    events[index] = msgspec.structs.replace(events[index], **to)
    return index


def _move(events: Events, start: int, to: int) -> int:
    events.insert(to, events.pop(start))
    return to


def _broken(events: Events) -> dict[str, list[int]]:
    """Invariant -> lines of its violations."""
    found: dict[str, list[int]] = {}
    for violation in violations(History(enumerate(events, start=1))):
        found.setdefault(violation.invariant, []).append(violation.line)
    return found


def test_with_lanes_only_wrong_counts_are_named() -> None:
    """Two lanes count each microbatch twice; the rank reports which counts are wrong."""
    events = traces.faulty_run().events
    _edit(events, trace.RunStarted, to={"layout": trace.Layout(tp=1, pp=1, lanes=2)})
    index = _edit(events, trace.Reduced, to={"provenance": (2, 2, 4, 2, 2, 1)}, step=2, bucket=1, replica=1)
    where = {"replica": 1, "rank": events[index].rank, "generation": events[index].generation, "step": 2, "bucket": 1}
    told = trace.Miscounted(t=events[index].t, **where, microbatches=(2, 5), own_counts=(2, 2, 4, 2, 2, 1))
    events.insert(index + 1, told)
    [found] = [one for one in violations(History(enumerate(events, start=1))) if one.line == index + 1]
    assert found.message.endswith("which counts microbatch: times {2: 4, 5: 1} (over all lanes)")


# Each breakage of the faulty run (steps 0..4; generation 2 in step 1 lost replica 2, generation 3 in step 3 lost replica 0)
# returns the index of the event that the verdict must name.


def provenance_counts_a_microbatch_twice(events: Events) -> int:
    return _edit(events, trace.Reduced, to={"provenance": (1, 1, 2, 1, 1, 0)}, step=2, bucket=1, replica=1)


def a_dealt_microbatch_is_forgotten(events: Events) -> int:
    del events[_find(events, trace.MicrobatchFinished, step=1, generation=2, rank=1)]
    return _find(events, trace.Committed, step=1)


def two_replicas_compute_the_same_microbatch(events: Events) -> int:
    _edit(events, trace.MicrobatchFinished, to={"microbatch": 0}, step=0, microbatch=1, rank=0)
    return _find(events, trace.Committed, step=0)


def a_survivor_keeps_only_what_it_computed_last(events: Events) -> int:
    """In-place reduction would do this: the local gradient of the first pass is gone."""
    for _ in range(2):
        _edit(events, trace.MicrobatchFinished, to={"into": ()}, step=1, generation=1, replica=0, rank=0, into=(0,))
    return _find(events, trace.Committed, step=1)


def a_rank_applies_a_step_twice(events: Events) -> int:
    index = _find(events, trace.Applied, step=2, replica=1, rank=0)
    events.insert(index + 1, events[index])
    return index + 1


def a_result_differs_between_replicas(events: Events) -> int:
    return _edit(events, trace.Reduced, to={"checksum": 77}, step=2, bucket=0, replica=1)


def a_transfer_arrives_damaged(events: Events) -> int:
    run = traces.Run()
    run.step_with_kill_in_reduction(0)
    events[:] = run.finish().events
    return _edit(events, trace.Transferred, to={"checksum": 77})


def two_replicas_commit_different_records(events: Events) -> int:
    return _edit(events, trace.Committed, to={"requests": ("exit",)}, step=2, replica=1)


def a_commit_lacks_a_vote(events: Events) -> int:
    del events[_find(events, trace.Voted, step=2, replica=1)]
    return _find(events, trace.Committed, step=2, replica=0)


def a_step_is_adopted_that_nobody_committed(events: Events) -> int:
    return _edit(events, trace.Committed, to={"adopted": True}, step=2, replica=0)


def a_replica_votes_before_it_holds_everything(events: Events) -> int:
    vote = _find(events, trace.Voted, step=2, replica=0)
    return _move(events, vote, _find(events, trace.Reduced, step=2, bucket=2, replica=0))


def half_a_replica_applies_an_uncommitted_step(events: Events) -> int:
    return _edit(events, trace.Applied, to={"step": 5}, step=4, replica=1, rank=1)


def a_replica_skips_a_step(events: Events) -> int:
    del events[_find(events, trace.Committed, step=2, replica=1)]
    return _find(events, trace.Committed, step=3, replica=1)


def parameters_drift_apart(events: Events) -> int:
    return _edit(events, trace.Applied, to={"parameter_digest": "drift"}, step=2, replica=1, rank=0)


def tensor_parallel_copies_drift_apart(events: Events) -> int:
    layout = trace.Layout(tp=2, pp=1)
    _edit(events, trace.RunStarted, to={"layout": layout})
    for index, event in enumerate(events):
        if isinstance(event, trace.Applied):
            whole = event.step < 4 or event.rank == 0
            events[index] = msgspec.structs.replace(event, replicated_digest="norm" if whole else "torn")
    return _find(events, trace.Applied, step=4, rank=1)


def a_bucket_is_summed_before_backward_has_passed_it(events: Events) -> int:
    index = _find(events, trace.Reduced, step=2, bucket=0, replica=1)
    return _move(events, index, _find(events, trace.Plan, step=2, replica=1))


def a_generation_makes_another_ones_version(events: Events) -> int:
    return _edit(events, trace.Reduced, to={"generation": 1}, step=2, bucket=0, replica=1)


def a_journal_has_what_was_never_finished(events: Events) -> int:
    return _edit(events, trace.Status, to={"finished": (4,)}, step=3, generation=3, replica=1)


def lanes_drift_apart(events: Events) -> int:
    """Experts are spread over the two lanes, so their parameters differ; what both hold must not."""
    _edit(events, trace.RunStarted, to={"layout": trace.Layout(tp=1, pp=1, lanes=2)})
    for index, event in enumerate(events):
        if isinstance(event, trace.Applied):
            whole = event.step < 4 or event.rank == 0
            events[index] = msgspec.structs.replace(event, lane_digest="router" if whole else "torn")
    return _find(events, trace.Applied, step=4, rank=1)


def an_exact_sum_changes_between_versions(events: Events) -> int:
    """The second reduction of a bucket sees a local gradient that the first has changed."""
    first = _find(events, trace.Reduced, step=1, bucket=0, version=2, replica=0)
    spoilt = trace.Reduced(
        t=0.0, replica=2, rank=0, generation=1, step=1, bucket=0, version=1, checksum=5, provenance="ones"
    )  # fmt: skip
    events.insert(_find(events, trace.Fault, step=1), spoilt)
    return first + 1


def a_rank_applies_before_the_commit(events: Events) -> int:
    return _move(events, _find(events, trace.Applied, step=2, replica=0, rank=0), _find(events, trace.Voted, step=2))


def a_decided_bucket_is_reduced_again(events: Events) -> int:
    index = _find(events, trace.Reduced, step=3, bucket=1, version=3)
    again = msgspec.structs.replace(events[index], bucket=0, rank=0, checksum=3000)
    events.insert(index, again)
    return index


def a_decided_bucket_is_computed_into_again(events: Events) -> int:
    return _edit(events, trace.MicrobatchFinished, to={"into": (0,)}, step=3, generation=3, rank=0)


def a_plan_reduces_a_decided_bucket(events: Events) -> int:
    return _edit(events, trace.Plan, to={"reduces": (0, 1, 2)}, step=3, generation=3)


def another_version_than_the_decided_one_is_committed(events: Events) -> int:
    index = _find(events, trace.Committed, step=3)
    results = events[index].versions  # type: ignore[attr-defined]
    moved = (msgspec.structs.replace(results[0], version=3), *results[1:])
    return _edit(events, trace.Committed, to={"versions": moved}, step=3)


def a_fenced_replica_goes_on(events: Events) -> int:
    index = _find(events, trace.Voted, step=1)
    events.insert(index, trace.Voted(replica=2, generation=1, step=1, digest="digest 1"))
    return index


def a_replica_outside_the_roster_commits(events: Events) -> int:
    return _edit(events, trace.Committed, to={"replica": 2}, step=2, replica=1)


def a_vote_of_an_older_generation_follows_the_promise(events: Events) -> int:
    index = _find(events, trace.Status, generation=2)
    events.insert(index, trace.Voted(replica=0, generation=1, step=1, digest="digest 1"))
    return index


def a_step_is_committed_in_an_older_generation(events: Events) -> int:
    return _edit(events, trace.Committed, to={"generation": 1}, step=2, replica=1)


def a_status_counts_a_result_that_came_after_the_promise(events: Events) -> int:
    status = _find(events, trace.Status, generation=3)
    result = _find(events, trace.Reduced, step=3, bucket=0)
    _move(events, result, status)
    return status - 1


def one_generation_has_two_rosters(events: Events) -> int:
    return _edit(events, trace.Plan, to={"roster": (0, 2)}, generation=2, replica=1)


def a_generation_number_is_used_twice(events: Events) -> int:
    return _edit(events, trace.Generation, to={"generation": 2}, generation=3)


def a_lost_replica_returns(events: Events) -> int:
    return _edit(events, trace.Generation, to={"roster": (1, 2)}, generation=3)


def a_member_disappears_without_a_loss(events: Events) -> int:
    return _edit(events, trace.Generation, to={"losses": ()}, generation=3)


def a_partition_forms_its_own_generation(events: Events) -> int:
    index = _find(events, trace.Voted, step=2)
    events.insert(index, trace.Entered(replica=1, generation=9, seconds=0.1))
    return index


def _saving(events: Events) -> None:
    events[:] = traces.saving_run().events


def a_checkpoint_is_named_that_nobody_agreed_on(events: Events) -> int:
    _saving(events)
    for index in reversed([i for i, event in enumerate(events) if getattr(event, "label", "") == "save 1"]):
        del events[index]
    return _find(events, trace.Checkpoint, iteration=1, phase="finished")


def a_checkpoint_is_named_before_the_record(events: Events) -> int:
    _saving(events)
    return _move(events, _find(events, trace.Checkpoint, iteration=1, phase="finished"), _find(events, trace.Committed, step=1))


def a_save_is_agreed_on_without_a_digest(events: Events) -> int:
    _saving(events)
    for replica in range(3):
        _edit(events, trace.Committed, to={"state_digest": None}, label="save 1", replica=replica)
    return _find(events, trace.Committed, label="save 1")


def a_replica_begins_a_save_with_other_state(events: Events) -> int:
    _saving(events)
    return _edit(events, trace.StateDigested, to={"digest": "drifted"}, label="save 1", replica=1, rank=1)


def replicas_commit_different_state(events: Events) -> int:
    _saving(events)
    return _edit(events, trace.Committed, to={"state_digest": "drifted"}, label="end 0", replica=2)


def a_rank_votes_before_it_has_digested_its_state(events: Events) -> int:
    _saving(events)
    vote = _find(events, trace.Voted, step=1, replica=0)
    _move(events, _find(events, trace.StateDigested, label="save 1", replica=0, rank=1), vote + 1)
    return _find(events, trace.Committed, label="save 1", replica=0)


def the_latest_checkpoint_goes_back(events: Events) -> int:
    for iteration in (4, 3):
        events.insert(-1, trace.Checkpoint(replica=1, rank=0, iteration=iteration, phase="finished"))
    return len(events) - 2


def _granting(events: Events) -> None:
    events[:] = traces.granting_run().events


def a_grant_is_given_twice(events: Events) -> int:
    _granting(events)
    return _edit(events, trace.Granted, to={"number": 1}, number=2)


def two_replicas_hold_a_grant(events: Events) -> int:
    _granting(events)
    return _edit(events, trace.Granted, to={"writer": 1}, number=2)


def a_grant_is_given_to_the_writer_of_an_older_generation(events: Events) -> int:
    _granting(events)
    return _edit(events, trace.Granted, to={"writer": 0, "generation": 1}, number=3)


def two_checkpoints_are_named_under_one_grant(events: Events) -> int:
    _granting(events)
    return _edit(events, trace.Checkpoint, to={"grant": 3}, iteration=3, phase="finished")


def a_writer_names_under_the_grant_of_a_lost_one(events: Events) -> int:
    _granting(events)
    return _edit(events, trace.Checkpoint, to={"grant": 2}, iteration=2, phase="finished")


def a_checkpoint_is_named_without_a_grant(events: Events) -> int:
    _granting(events)
    return _edit(events, trace.Checkpoint, to={"grant": None}, iteration=2, phase="finished")


def a_used_grant_lasts_by_the_word_of_one_member(events: Events) -> int:
    events[:] = traces.run_without_a_coordinator().events
    for replica in (1, 2):
        _edit(events, trace.Committed, to={"requests": (coordinator_lost(1),)}, label="save 5", replica=replica)
    return _find(events, trace.Checkpoint, iteration=5, phase="finished")


def a_used_grant_lasts_by_what_only_another_has_committed(events: Events) -> int:
    """The writer names before it has committed the record that says so."""
    events[:] = traces.run_without_a_coordinator().events
    record = _find(events, trace.Committed, label="save 5", replica=1)
    named = _find(events, trace.Checkpoint, iteration=5, phase="finished")
    _move(events, record, named)
    return named - 1


def a_used_grant_that_is_not_the_newest_lasts(events: Events) -> int:
    events[:] = traces.run_without_a_coordinator().events
    return _edit(events, trace.Checkpoint, to={"grant": 4}, iteration=6, phase="finished")


def a_used_grant_lasts_for_another_replica(events: Events) -> int:
    events[:] = traces.run_without_a_coordinator().events
    return _edit(events, trace.Checkpoint, to={"replica": 2}, iteration=6, phase="finished")


def a_checkpoint_is_named_before_its_grant(events: Events) -> int:
    _granting(events)
    grant = _find(events, trace.Granted, number=3)
    named = _find(events, trace.Checkpoint, iteration=2, phase="finished")
    _move(events, grant, named)
    return named - 1


def a_microbatch_of_a_survivor_is_computed_again(events: Events) -> int:
    index = _find(events, trace.MicrobatchFinished, step=1, generation=2, rank=0)
    for rank, into in ((0, (0,)), (1, (1, 2))):
        events.insert(index + 1, msgspec.structs.replace(events[index], microbatch=0, rank=rank, into=into))
    return index + 2


def a_rank_computes_what_it_holds_again(events: Events) -> int:
    index = _find(events, trace.MicrobatchFinished, step=2)
    events.insert(index + 1, events[index])
    return index + 1


def a_survivors_work_goes_nowhere(events: Events) -> int:
    index = _find(events, trace.MicrobatchFinished, step=4, rank=0)
    events.insert(index + 1, msgspec.structs.replace(events[index], microbatch=5, generation=2, replica=1, into=()))
    return index + 1


def a_member_never_enters_the_last_generation(events: Events) -> int:
    run = traces.Run()
    run.quiet_step()
    run.plan(run.deal(range(6)), traces.BUCKETS)
    run.lose(2, 1, "backward")
    events[:] = run.finish(1).events
    del events[_find(events, trace.Committed, step=0, replica=1)]
    return _find(events, trace.Generation, generation=2)


# What is missing, or was changed everywhere alike.


def _without(events: Events, kind: type[trace.Event], **fields: object) -> None:
    """Remove all events of a type with these fields."""
    events[:] = [
        event for event in events
        if type(event) is not kind or any(getattr(event, name) != value for name, value in fields.items())
    ]  # fmt: skip


def _everywhere(events: Events, kind: type[trace.Event], to: dict[str, object], **fields: object) -> None:
    """Change fields of all events of a type with these fields; the order of the others stays."""
    for index, event in enumerate(events):
        if type(event) is kind and all(getattr(event, name) == value for name, value in fields.items()):
            events[index] = msgspec.structs.replace(event, **to)


def a_bucket_is_committed_by_nobody(events: Events) -> int:
    record = events[_find(events, trace.Committed, step=2)]
    for replica in (0, 1):
        _edit(events, trace.Committed, to={"versions": record.versions[1:]}, step=2, replica=replica)  # type: ignore[attr-defined]
    return _find(events, trace.Committed, step=2)


def a_checksum_of_a_rank_is_missing(events: Events) -> int:
    record = events[_find(events, trace.Committed, step=2)]
    first, *others = record.versions  # type: ignore[attr-defined]
    return _edit(events, trace.Committed, to={"versions": (msgspec.structs.replace(first, checksums=()), *others)}, step=2)


def nobody_applies_a_step(events: Events) -> int:
    _without(events, trace.Applied, step=2)
    return _find(events, trace.MicrobatchStarted, step=3, replica=1, rank=0)


def a_rank_never_applies_the_last_step(events: Events) -> int:
    _without(events, trace.Applied, step=4, replica=1, rank=0)
    return _find(events, trace.Committed, step=4, replica=1)


def a_microbatch_is_dropped_everywhere(events: Events) -> int:
    _everywhere(events, trace.Plan, {"num_microbatches": 5}, step=4)
    _without(events, trace.MicrobatchStarted, step=4, microbatch=5)
    _without(events, trace.MicrobatchFinished, step=4, microbatch=5)
    return _find(events, trace.Plan, step=4)


def an_iteration_is_trained_twice_and_the_next_never(events: Events) -> int:
    for kind in (trace.Plan, trace.Committed, trace.Applied):
        _everywhere(events, kind, {"label": "train 4"}, step=4)
    return _find(events, trace.Committed, step=4)


def a_step_is_committed_by_another_name_than_planned(events: Events) -> int:
    _everywhere(events, trace.Plan, {"label": "train 5 of something else"}, step=4)
    return _find(events, trace.Committed, step=4)


def finished_microbatches_were_never_started(events: Events) -> int:
    _without(events, trace.MicrobatchStarted, step=2)
    return _find(events, trace.MicrobatchFinished, step=2)


def a_digest_of_the_parameters_is_missing(events: Events) -> int:
    return _edit(events, trace.Applied, to={"parameter_digest": None}, step=2, replica=1, rank=1)


def the_loss_differs_between_replicas(events: Events) -> int:
    return _edit(events, trace.Applied, to={"loss": 99.0}, step=2, replica=1, rank=1)


def a_replica_made_otherwise_becomes_a_member(events: Events) -> int:
    return _edit(events, trace.Joined, to={"fingerprint": "another"}, replica=1)


def a_commit_says_that_it_was_adopted(events: Events) -> int:
    return _edit(events, trace.Committed, to={"adopted": True}, step=2, replica=1)


def a_member_acts_without_having_entered(events: Events) -> int:
    _without(events, trace.Entered, generation=2, replica=1)
    return _find(events, trace.Plan, generation=2, replica=1)


def a_member_acts_without_a_status(events: Events) -> int:
    _without(events, trace.Status, generation=2, replica=1)
    return _find(events, trace.Plan, generation=2, replica=1)


def a_run_ends_well_before_its_last_step_is_committed(events: Events) -> int:
    for kind in (trace.Voted, trace.Committed, trace.Applied):
        _without(events, kind, step=4)
    return len(events) - 1


def a_run_ends_well_although_a_survivor_lacks_the_last_step(events: Events) -> int:
    run = traces.Run()
    run.quiet_step()
    events[:] = run.finish().events
    for kind in (trace.Committed, trace.Applied):
        _without(events, kind, replica=1)
    return len(events) - 1


def a_run_ends_well_though_it_was_stopping(events: Events) -> int:
    events.insert(-1, trace.Stopping(exit_code=12, reason="replicas disagree"))
    return len(events) - 1


def replicas_plan_different_quotas(events: Events) -> int:
    return _edit(events, trace.Plan, to={"quotas": (1, 3, 2)}, step=0, replica=1)


def quotas_leave_a_microbatch_out(events: Events) -> int:
    for replica in range(2):
        _edit(events, trace.Plan, to={"quotas": (2, 2, 1)}, step=0, replica=replica)
    return _edit(events, trace.Plan, to={"quotas": (2, 2, 1)}, step=0, replica=2)


def a_replica_computes_more_than_its_quota(events: Events) -> int:
    for replica in range(2):
        _edit(events, trace.Plan, to={"quotas": (1, 3, 2)}, step=0, replica=replica)
    _edit(events, trace.Plan, to={"quotas": (1, 3, 2)}, step=0, replica=2)
    return _find(events, trace.Plan, step=0, replica=0)


def replicas_plan_different_reductions(events: Events) -> int:
    return _edit(events, trace.Plan, to={"reduces": (1,)}, step=1, generation=2, replica=1)


def replicas_plan_different_quotas_again(events: Events) -> int:
    """Of a step that was begun before: quotas need not sum to M, and only a comparison shows it."""
    return _edit(events, trace.Plan, to={"quotas": (4, 3)}, step=1, generation=2, replica=1)


def _with_two_survivors_of_a_reduction(events: Events) -> None:
    run = traces.Run()
    run.step_with_kill_in_reduction(0)
    events[:] = run.finish().events


def _edit_transfers(events: Events, **to: object) -> None:
    """All plans of generation 2 say something else of what they have sent."""
    for replica in (1, 2):
        index = _find(events, trace.Plan, generation=2, replica=replica)
        (sent,) = events[index].transfers
        events[index] = msgspec.structs.replace(events[index], transfers=(msgspec.structs.replace(sent, **to),))


def replicas_plan_different_transfers(events: Events) -> int:
    _with_two_survivors_of_a_reduction(events)
    return _edit(events, trace.Plan, to={"transfers": ()}, generation=2, replica=2)


def replicas_plan_different_decisions(events: Events) -> int:
    _with_two_survivors_of_a_reduction(events)
    return _edit(events, trace.Plan, to={"decided": ()}, generation=2, replica=2)


def a_microbatch_has_no_share_and_no_plan(events: Events) -> int:
    """Each computes its quota; the quotas do not sum to M."""
    index = _find(events, trace.Plan, step=0, replica=2)
    (compute,) = events[index].computes
    less = (msgspec.structs.replace(compute, microbatches=compute.microbatches[:1]),)
    for replica in range(3):
        _edit(events, trace.Plan, to={"quotas": (2, 2, 1)}, step=0, replica=replica)
    return _edit(events, trace.Plan, to={"computes": less}, step=0, replica=2)


def a_pass_takes_in_a_part(events: Events) -> int:
    run = traces.Run(microbatches=12)
    run.step_with_kill_in_backward(2, in_schedule=True)
    events[:] = run.finish().events
    index = _find(events, trace.Extended)
    return _edit(events, trace.Extended, to={"microbatches": events[index].microbatches[:1]})


def a_bucket_comes_from_who_was_not_asked(events: Events) -> int:
    _with_two_survivors_of_a_reduction(events)
    return _edit(events, trace.Transferred, to={"source": 2})


def a_bucket_comes_from_who_does_not_hold_it(events: Events) -> int:
    _with_two_survivors_of_a_reduction(events)
    _edit_transfers(events, source=0)
    _edit(events, trace.Transferred, to={"source": 0})
    return _find(events, trace.Plan, generation=2, replica=1)


def a_bucket_comes_in_a_version_that_nobody_holds(events: Events) -> int:
    _with_two_survivors_of_a_reduction(events)
    _edit_transfers(events, version=0)
    return _find(events, trace.Plan, generation=2, replica=1)


def a_bucket_comes_in_a_version_that_was_not_asked_for(events: Events) -> int:
    _with_two_survivors_of_a_reduction(events)
    return _edit(events, trace.Transferred, to={"version": 2})


def a_bucket_is_reduced_by_the_plan_of_an_older_generation(events: Events) -> int:
    del events[_find(events, trace.Plan, step=1, generation=2, replica=1)]
    return _find(events, trace.Reduced, step=1, generation=2, replica=1, bucket=0)


def a_bucket_comes_to_who_did_not_need_it(events: Events) -> int:
    _with_two_survivors_of_a_reduction(events)
    _edit_transfers(events, targets=(1,))
    return _find(events, trace.Transferred)


def a_bucket_counts_as_decided_that_nobody_holds(events: Events) -> int:
    for replica in range(2):
        decided = (trace.Decided(bucket=0, version=1, source=1),)
        _edit(events, trace.Plan, to={"decided": decided}, step=1, generation=2, replica=replica)
    return _find(events, trace.Plan, step=1, generation=2, replica=0)


def a_bucket_is_reduced_that_no_plan_asks_for(events: Events) -> int:
    for replica in range(3):
        _edit(events, trace.Plan, to={"reduces": (1, 2)}, step=0, replica=replica)
    return _find(events, trace.Reduced, step=0, bucket=0)


def a_rank_applies_a_step_under_another_name(events: Events) -> int:
    return _edit(events, trace.Applied, to={"label": "train 4"}, step=2, replica=1, rank=0)


def a_plan_deals_what_a_survivor_holds(events: Events) -> int:
    """Nobody may have computed it yet: the plan alone is wrong."""
    index = _find(events, trace.Plan, step=1, generation=2, replica=0)
    (compute,) = events[index].computes
    own = msgspec.structs.replace(compute, microbatches=(*compute.microbatches, 0))
    events[index] = msgspec.structs.replace(events[index], computes=(own,))
    return _find(events, trace.Plan, step=1, generation=2, replica=1)


def a_recovery_deals_less_than_is_missing(events: Events) -> int:
    _edit(events, trace.Plan, to={"computes": ()}, step=1, generation=2, replica=0)
    return _find(events, trace.Plan, step=1, generation=2, replica=1)


def a_status_hides_a_contribution(events: Events) -> int:
    _edit(events, trace.Status, to={"contributions": ()}, step=1, generation=2, replica=0)
    return _find(events, trace.Plan, step=1, generation=2, replica=1)


def a_rank_computes_what_was_dealt_to_another(events: Events) -> int:
    return _edit(events, trace.MicrobatchStarted, to={"microbatch": 1}, step=2, replica=0, rank=1)


def a_rank_computes_into_a_bucket_that_no_plan_asks_for(events: Events) -> int:
    index = _find(events, trace.Plan, step=1, generation=2, replica=0)
    (compute,) = events[index].computes
    events[index] = msgspec.structs.replace(events[index], computes=(msgspec.structs.replace(compute, into=(0, 2)),))
    return _find(events, trace.MicrobatchFinished, step=1, generation=2, replica=0, rank=1)


def a_pass_takes_in_what_was_not_dealt(events: Events) -> int:
    run = traces.Run()
    run.step_with_kill_in_backward(2, in_schedule=True)
    events[:] = run.finish().events
    return _edit(events, trace.Extended, to={"microbatches": (0,)})


def a_lost_replica_is_never_fenced(events: Events) -> int:
    _without(events, trace.Fenced, replica=2)
    return _find(events, trace.Generation, generation=2)


def a_rank_of_a_lost_replica_is_never_fenced(events: Events) -> int:
    _edit(events, trace.Fenced, to={"ranks": (0,)}, replica=0)
    return _find(events, trace.Generation, generation=3)


def a_member_has_never_joined(events: Events) -> int:
    _without(events, trace.Joined, replica=1)
    return _find(events, trace.Generation, generation=1)


def a_generation_computes_without_a_plan(events: Events) -> int:
    _without(events, trace.Plan, generation=2, step=1)
    return _find(events, trace.MicrobatchStarted, generation=2, step=1)


def survivors_learn_different_paces(events: Events) -> int:
    return _edit(events, trace.Committed, to={"paces": ((0, 7), (1, 7))}, step=1, replica=1)


def a_run_ends_as_diverged_though_no_votes_differ(events: Events) -> int:
    events.insert(-1, trace.Stopping(exit_code=12, reason="replicas disagree on what step 5 is"))
    return _edit(events, trace.RunFinished, to={"exit_code": 12})


def a_run_ends_as_diverged_and_nothing_says_why(events: Events) -> int:
    return _edit(events, trace.RunFinished, to={"exit_code": 12})


BREAKAGES: list[tuple[str, Callable[[Events], int]]] = [
    ("INV-1", provenance_counts_a_microbatch_twice),
    ("INV-1", a_dealt_microbatch_is_forgotten),
    ("INV-1", two_replicas_compute_the_same_microbatch),
    ("INV-1", a_survivor_keeps_only_what_it_computed_last),
    ("INV-1", a_rank_applies_a_step_twice),
    ("INV-2", a_result_differs_between_replicas),
    ("INV-2", a_transfer_arrives_damaged),
    ("INV-2", two_replicas_commit_different_records),
    ("INV-2", a_commit_lacks_a_vote),
    ("INV-2", a_step_is_adopted_that_nobody_committed),
    ("INV-2", a_replica_votes_before_it_holds_everything),
    ("INV-2", half_a_replica_applies_an_uncommitted_step),
    ("INV-2", a_replica_skips_a_step),
    ("INV-2", parameters_drift_apart),
    ("INV-2", tensor_parallel_copies_drift_apart),
    ("INV-2", lanes_drift_apart),
    ("INV-3", a_bucket_is_summed_before_backward_has_passed_it),
    ("INV-5", a_generation_makes_another_ones_version),
    ("INV-5", a_journal_has_what_was_never_finished),
    ("INV-3", an_exact_sum_changes_between_versions),
    ("INV-3", a_rank_applies_before_the_commit),
    ("INV-4", a_decided_bucket_is_reduced_again),
    ("INV-4", a_decided_bucket_is_computed_into_again),
    ("INV-4", a_plan_reduces_a_decided_bucket),
    ("INV-4", another_version_than_the_decided_one_is_committed),
    ("INV-5", a_fenced_replica_goes_on),
    ("INV-5", a_replica_outside_the_roster_commits),
    ("INV-5", a_vote_of_an_older_generation_follows_the_promise),
    ("INV-5", a_step_is_committed_in_an_older_generation),
    ("INV-5", a_status_counts_a_result_that_came_after_the_promise),
    ("INV-6", one_generation_has_two_rosters),
    ("INV-6", a_generation_number_is_used_twice),
    ("INV-6", a_lost_replica_returns),
    ("INV-6", a_member_disappears_without_a_loss),
    ("INV-6", a_partition_forms_its_own_generation),
    ("INV-6", the_latest_checkpoint_goes_back),
    ("INV-6", a_grant_is_given_twice),
    ("INV-6", two_replicas_hold_a_grant),
    ("INV-6", a_grant_is_given_to_the_writer_of_an_older_generation),
    ("INV-6", two_checkpoints_are_named_under_one_grant),
    ("INV-6", a_used_grant_lasts_by_the_word_of_one_member),
    ("INV-6", a_used_grant_lasts_by_what_only_another_has_committed),
    ("INV-6", a_used_grant_that_is_not_the_newest_lasts),
    ("INV-6", a_used_grant_lasts_for_another_replica),
    ("INV-6", a_writer_names_under_the_grant_of_a_lost_one),
    ("INV-6", a_checkpoint_is_named_without_a_grant),
    ("INV-6", a_checkpoint_is_named_before_its_grant),
    ("INV-6", a_checkpoint_is_named_that_nobody_agreed_on),
    ("INV-6", a_checkpoint_is_named_before_the_record),
    ("INV-2", a_save_is_agreed_on_without_a_digest),
    ("INV-2", a_replica_begins_a_save_with_other_state),
    ("INV-2", replicas_commit_different_state),
    ("INV-2", a_rank_votes_before_it_has_digested_its_state),
    ("INV-7", a_microbatch_of_a_survivor_is_computed_again),
    ("INV-7", a_rank_computes_what_it_holds_again),
    ("INV-7", a_survivors_work_goes_nowhere),
    ("INV-8", a_member_never_enters_the_last_generation),
    ("INV-2", a_bucket_is_committed_by_nobody),
    ("INV-2", a_checksum_of_a_rank_is_missing),
    ("INV-2", nobody_applies_a_step),
    ("INV-2", a_rank_never_applies_the_last_step),
    ("INV-1", a_microbatch_is_dropped_everywhere),
    ("INV-1", an_iteration_is_trained_twice_and_the_next_never),
    ("INV-1", a_step_is_committed_by_another_name_than_planned),
    ("INV-1", finished_microbatches_were_never_started),
    ("INV-2", a_digest_of_the_parameters_is_missing),
    ("INV-2", the_loss_differs_between_replicas),
    ("INV-2", a_replica_made_otherwise_becomes_a_member),
    ("INV-2", a_commit_says_that_it_was_adopted),
    ("INV-5", a_member_acts_without_having_entered),
    ("INV-5", a_member_acts_without_a_status),
    ("INV-8", a_run_ends_well_before_its_last_step_is_committed),
    ("INV-8", a_run_ends_well_although_a_survivor_lacks_the_last_step),
    ("INV-8", a_run_ends_well_though_it_was_stopping),
    ("INV-8", a_run_ends_as_diverged_and_nothing_says_why),
    ("INV-8", a_run_ends_as_diverged_though_no_votes_differ),
    ("INV-2", replicas_plan_different_quotas),
    ("INV-2", quotas_leave_a_microbatch_out),
    ("INV-2", a_replica_computes_more_than_its_quota),
    ("INV-2", survivors_learn_different_paces),
    ("INV-5", a_lost_replica_is_never_fenced),
    ("INV-5", a_rank_of_a_lost_replica_is_never_fenced),
    ("INV-6", a_member_has_never_joined),
    ("INV-1", a_generation_computes_without_a_plan),
    ("INV-2", replicas_plan_different_reductions),
    ("INV-1", a_plan_deals_what_a_survivor_holds),
    ("INV-1", a_recovery_deals_less_than_is_missing),
    ("INV-1", a_status_hides_a_contribution),
    ("INV-1", a_rank_computes_what_was_dealt_to_another),
    ("INV-1", a_rank_computes_into_a_bucket_that_no_plan_asks_for),
    ("INV-1", a_pass_takes_in_what_was_not_dealt),
    ("INV-1", a_pass_takes_in_a_part),
    ("INV-2", replicas_plan_different_quotas_again),
    ("INV-2", replicas_plan_different_transfers),
    ("INV-2", replicas_plan_different_decisions),
    ("INV-2", a_microbatch_has_no_share_and_no_plan),
    ("INV-2", a_rank_applies_a_step_under_another_name),
    ("INV-4", a_bucket_comes_from_who_was_not_asked),
    ("INV-4", a_bucket_comes_from_who_does_not_hold_it),
    ("INV-4", a_bucket_comes_in_a_version_that_nobody_holds),
    ("INV-4", a_bucket_comes_in_a_version_that_was_not_asked_for),
    ("INV-4", a_bucket_is_reduced_by_the_plan_of_an_older_generation),
    ("INV-4", a_bucket_comes_to_who_did_not_need_it),
    ("INV-4", a_bucket_counts_as_decided_that_nobody_holds),
    ("INV-4", a_bucket_is_reduced_that_no_plan_asks_for),
]


@pytest.mark.parametrize("determinism", ["exact", "fast"])
def test_valid_traces_hold(determinism: str) -> None:
    for run in (traces.quiet_run(determinism=determinism), traces.faulty_run(determinism), traces.drifting_run(determinism)):
        assert _broken(run.events) == {}
    for saving in (traces.saving_run(), traces.granting_run(), traces.run_without_a_coordinator()):
        assert _broken(saving.events) == {}


@pytest.mark.parametrize(("invariant", "breakage"), BREAKAGES, ids=lambda value: getattr(value, "__name__", value))
def test_each_breakage_is_found_and_named(invariant: str, breakage: Callable[[Events], int], tmp_path: Path) -> None:
    events = list(traces.faulty_run().events)
    line = breakage(events) + 1
    broken = _broken(events)
    assert line in broken.get(invariant, []), f"expected {invariant} at line {line}, found {broken}"

    verdict = check(traces.write(tmp_path / "run", events))
    text = describe(verdict)
    print(text)
    assert not verdict.holds
    assert f"{invariant} " in text and "BROKEN" in text and f"line {line}: " in text
    assert msgspec.json.encode(events[line - 1]).decode() in text, "the event itself is shown"


def test_every_invariant_that_a_trace_can_show_is_broken_at_least_once() -> None:
    assert {invariant for invariant, _ in BREAKAGES} == {f"INV-{number}" for number in range(1, 9)}


def test_a_second_death_during_the_recovery_is_no_violation() -> None:
    """Generation 2 is overtaken after its plan; replica 1 dies with what it was dealt, replica 0 computes all."""
    run = traces.Run()
    dealt = run.deal(range(6))
    run.plan(dealt, traces.BUCKETS)
    for replica, ids in dealt.items():
        run.compute(replica, ids, traces.BUCKETS)
    run.lose(2, 1, "before_reduce")
    run.statuses(dealt, lambda replica: ())
    again = run.deal(dealt[2])
    run.plan(again, traces.BUCKETS)
    run.compute(0, again[0], traces.BUCKETS)
    run.lose(1, 0, "recompute", microbatch=again[1][0])
    run.statuses({0: dealt[0] + again[0]}, lambda replica: ())
    run.plan({0: dealt[1] + again[1]}, traces.BUCKETS)
    run.compute(0, dealt[1] + again[1], traces.BUCKETS)
    run.reduce(traces.BUCKETS)
    run.commit(dict.fromkeys(traces.BUCKETS, 3))
    assert _broken(run.finish().events) == {}
    # Nor if it dies before it has planned: what it was dealt is missing from the plans of generation 2, and from nothing else.
    del run.events[_find(run.events, trace.Plan, generation=2, replica=1)]
    assert _broken(run.events) == {}


def test_steps_outside_training_are_no_violation() -> None:
    run = traces.Run()
    run.quiet_step()
    run.step_outside_training("evaluate 1/0", 6)
    run.step_outside_training("end 0", 0)
    assert _broken(run.finish().events) == {}
    assert summarize(History(enumerate(run.events, start=1))).evaluation_steps == 1


def test_adopting_what_a_member_committed_before_a_death_is_no_violation() -> None:
    """Replica 0 dies in the commit, of which replica 2 has heard nothing and replica 1 everything."""
    run = traces.Run()
    run.quiet_step()
    mine = [event for event in run.events if isinstance(event, trace.Committed | trace.Applied) and event.replica == 2]
    run.events[:] = [event for event in run.events if event not in mine]
    died = _find(run.events, trace.Applied, replica=0)
    del run.events[died : died + 2]
    run.step = 0
    run.lose(0, 0, "optimizer")
    run.statuses({2: (2, 5)}, lambda replica: ())
    _edit(run.events, trace.Status, to={"step": 1, "committed": 0}, replica=1, generation=2)
    for event in mine:
        took = {"adopted": True} if isinstance(event, trace.Committed) else {}
        run.events.append(msgspec.structs.replace(event, generation=2, **took))
    run.step = run.trained = 1
    run.quiet_step()
    assert _broken(run.finish().events) == {}

    _edit(run.events, trace.Status, to={"step": 0, "committed": None}, replica=1, generation=2)
    assert _broken(run.events) == {"INV-2": [_find(run.events, trace.Committed, adopted=True) + 1]}


def test_a_replica_is_lost_although_its_process_lives() -> None:
    run = traces.Run()
    run.quiet_step()
    run.roster, run.generation = (0, 1), 2
    lost = trace.Loss(replica=2, kind=LossKind.SUSPECTED, detail="no answer for 10 s")
    run.add(trace.Generation, generation=2, roster=(0, 1), losses=(lost,))
    run.add(trace.Voted, replica=2, generation=1, step=1, digest="late, and without effect")
    run.add(trace.Fenced, replica=2, ranks=(0, 1))
    run.statuses({0: (), 1: ()}, lambda replica: ())
    run.quiet_step()
    assert _broken(run.finish().events) == {}


@pytest.mark.parametrize(
    ("exit_code", "nodes", "goes_on", "is_found"),
    [(13, True, False, False), (0, True, False, True), (13, False, False, True), (13, True, True, True)],
)
def test_the_end_of_a_node_is_not_asked_for_when_the_last_replicas_are_lost_with_it(
    exit_code: int, nodes: bool, goes_on: bool, is_found: bool
) -> None:
    """A coordinator that had stood still found all nodes gone: their ranks had ended together (nemesis, seed 22)."""
    run = traces.Run()
    run.quiet_step()
    run.roster, run.generation = (0, 1), 2
    if nodes:
        run.add(trace.NodeLost, node=2, name="n2", replicas=(2,), detail="its agent is gone")
    run.add(trace.Generation, generation=2, roster=(0, 1), losses=(trace.Loss(replica=2, kind=LossKind.NODE_LOST),))
    run.statuses({0: (), 1: ()}, lambda replica: ())
    if goes_on:
        run.roster, run.generation = (0,), 3
        run.add(trace.Generation, generation=3, roster=(0,), losses=(trace.Loss(replica=1, kind=LossKind.NODE_LOST),))
        run.add(trace.Fenced, replica=1, ranks=(0, 1))
        run.statuses({0: ()}, lambda replica: ())
    run.add(trace.RunFinished, exit_code=exit_code)
    broken = _broken(run.events)
    assert ("INV-5" in broken) == is_found, broken


def results_of_an_outvoted_replica_are_committed(events: Events) -> int:
    """Nothing was withdrawn: the survivors held the old results, voted once more, and alike."""
    older = {"reduces": (), "computes": ()}
    for replica in (1, 2):
        _edit(events, trace.Plan, to=older, generation=2, step=1, replica=replica)
    made = (trace.Reduced, trace.MicrobatchStarted, trace.MicrobatchFinished)
    events[:] = [event for event in events if not (isinstance(event, made) and (event.generation, event.step) == (2, 1))]
    for replica in (1, 2):
        index = _find(events, trace.Committed, step=1, replica=replica)
        versions = tuple(trace.Result(bucket=b, version=1, checksums=(1000 + b + 5,)) for b in traces.BUCKETS)
        events[index] = msgspec.structs.replace(events[index], versions=versions)
    return _find(events, trace.Committed, step=1, replica=1)


def a_survivor_drifted_too(events: Events) -> int:
    return _edit(events, trace.Applied, to={"parameter_digest": "drifted"}, step=0, replica=2, rank=0)


def a_survivor_holds_another_result(events: Events) -> int:
    return _edit(events, trace.Reduced, to={"checksum": 99}, step=1, generation=1, replica=2, bucket=1)


def a_remade_result_differs(events: Events) -> int:
    return _edit(events, trace.Reduced, to={"checksum": 99}, step=1, generation=2, replica=2, bucket=1)


@pytest.mark.parametrize(
    ("invariant", "breakage"),
    [
        ("INV-4", results_of_an_outvoted_replica_are_committed),
        ("INV-2", a_survivor_drifted_too),
        ("INV-2", a_survivor_holds_another_result),
        ("INV-2", a_remade_result_differs),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_outvoted_replica_excuses_nobody_else(invariant: str, breakage: Callable[[Events], int]) -> None:
    events = list(traces.drifting_run().events)
    line = breakage(events) + 1
    assert line in _broken(events).get(invariant, []), _broken(events)


def test_a_replica_is_outvoted_only_for_the_step_before() -> None:
    """What drifted earlier and was noticed late is in the parameters of all: that is no repaired run."""
    run = traces.Run()
    run.quiet_step()
    run.quiet_step()
    run.step_with_drift(0)
    assert _broken(run.finish().events) == {}
    _edit(run.events, trace.Applied, to={"parameter_digest": "drifted"}, step=0, replica=0, rank=0)
    assert _broken(run.events) == {"INV-2": [_find(run.events, trace.Applied, step=0, replica=r, rank=0) + 1 for r in (1, 2)]}


def _without_majority() -> traces.Run:
    """Two of three replicas have drifted after step 1, each in its own way; the votes of step 2 end the run."""
    run = traces.Run()
    run.quiet_step()
    run.quiet_step()
    for victim in (1, 2):
        _edit(run.events, trace.Applied, to={"parameter_digest": f"drifted {victim}"}, step=1, replica=victim, rank=0)
    dealt = run.deal(range(run.num_microbatches))
    run.plan(dealt, traces.BUCKETS)
    for replica, ids in dealt.items():
        run.compute(replica, ids, traces.BUCKETS)
    run.reduce(traces.BUCKETS)
    for replica in run.roster:
        run.add(trace.Voted, **run.where(replica), digest=f"of {replica}")
    for replica in run.roster:
        where = {**run.where(replica), "label": "train 2"}
        run.add(trace.Disagreed, **where, digest=f"of {replica}", versions=(), reason="all three differ")
    run.add(trace.Stopping, exit_code=12, reason="replicas disagree, and no majority says who is right")
    return run.finish(exit_code=12)


def test_replicas_that_have_drifted_without_a_majority_break_nothing_that_was_agreed() -> None:
    """The run has ended over it, with code 12: what differs is what they disagreed about, and nothing says who was right."""
    run = _without_majority()
    assert _broken(run.events) == {}
    _edit(run.events, trace.Applied, to={"parameter_digest": "drifted before"}, step=0, replica=1, rank=0)
    assert list(_broken(run.events)) == ["INV-2"], "a drift that an agreed step has taken in"


def test_a_run_that_disagreed_and_did_not_end_over_it_excuses_nothing() -> None:
    run = _without_majority()
    del run.events[-2:]
    assert "INV-2" in _broken(run.finish(exit_code=0).events)


def test_a_member_that_is_lost_may_have_committed_with_fewer_requests_than_the_others() -> None:
    """It had the votes of all. The others lose it before they have, and vote again, with what was requested since."""
    run = traces.Run()
    run.quiet_step()
    begin = len(run.events)
    run.quiet_step()
    run.lose(2, 0, "optimizer")
    first = [one for one in run.events[begin:] if isinstance(one, trace.Committed)]
    kept = [one for one in run.events[begin:] if not isinstance(one, trace.Committed | trace.Applied)]
    run.events[begin:] = [*kept[:-4], first[2], *kept[-4:]]
    run.step, run.trained = 1, 1
    run.statuses({0: (0, 3), 1: (1, 4)}, lambda replica: tuple((bucket, 1) for bucket in traces.BUCKETS))
    run.plan({}, ())
    begin = len(run.events)
    run.commit(dict.fromkeys(traces.BUCKETS, 1))
    for index, event in enumerate(run.events[begin:], begin):
        if isinstance(event, trace.Committed):
            run.events[index] = msgspec.structs.replace(event, requests=("exit: SIGTERM",))
    events = run.finish(15).events
    assert _broken(events) == {}
    _edit(events, trace.Committed, to={"requests": ()}, step=1, replica=1, generation=2)
    assert "INV-2" in _broken(events), "members of one generation have to agree on that, too"


def test_a_finished_replica_may_leave_without_a_loss() -> None:
    run = traces.Run()
    run.quiet_step()
    run.quiet_step()
    # Replica 1 has finished and dies while it waits for the others, who have still to apply the last step: it owes nothing.
    run.add(trace.Failure, replica=1, rank=0, cause="SIGKILL")
    run.add(trace.Fenced, replica=1, ranks=(0, 1))
    run.roster, run.generation = (0, 2), 2
    run.add(trace.Generation, generation=2, roster=run.roster, reason="process ended")
    run.statuses({}, lambda replica: ())
    assert _broken(run.events) == {}
    assert _broken(run.finish().events) == {}
    # If the others went on to another step, it had not finished.
    run.events.pop()
    run.quiet_step()
    assert _broken(run.finish().events).keys() == {"INV-6"}


def test_a_log_without_a_committed_step_proves_nothing(tmp_path: Path) -> None:
    verdict = check(traces.write(tmp_path, traces.Run().finish(1).events))
    assert not verdict.holds
    assert "nothing to prove" in describe(verdict)


def test_a_running_or_orphaned_run_is_said_to_be_one(tmp_path: Path) -> None:
    verdict = check(traces.write(tmp_path, traces.faulty_run().events[:-1]))
    assert verdict.holds and not verdict.is_finished
    last = describe(verdict).splitlines()[-1]
    assert last.startswith("UNFINISHED: the trace has no run_finished") and "its disk did not take the end of the trace" in last


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_run_that_still_loads_is_unfinished_and_no_more(is_empty: bool, tmp_path: Path) -> None:
    run_dir = traces.write(tmp_path / "run", [] if is_empty else traces.Run().events)
    reference = traces.write(tmp_path / "reference", traces.quiet_run().events)
    for against in (None, reference):
        verdict = check(run_dir, against)
        assert verdict.holds and not verdict.is_finished and verdict.is_whole is (against is None)
        assert describe(verdict).splitlines()[-1].startswith("UNFINISHED: ")


@pytest.mark.parametrize(("exit_code", "reason"), [(0, ""), (13, "no replica is left"), (130, "")])
def test_how_the_run_ended_is_said_beside_what_holds(exit_code: int, reason: str, tmp_path: Path) -> None:
    """All invariants may hold in a run that failed."""
    run = traces.Run()
    run.quiet_step()
    if reason:
        run.add(trace.Stopping, exit_code=exit_code, reason=reason)
    verdict = check(traces.write(tmp_path, run.finish(exit_code).events))
    line = f"the run ended with exit code {exit_code} ({ExitCode.words(exit_code)})"
    assert verdict.holds and describe(verdict).splitlines()[-1] == (f"{line}: {reason}" if reason else line)


_SILENCE = trace.CoordinatorSilent(
    replica=1, generation=2, phase="began", seconds=2.0, waits="", waiting_for=(), pid=9, state="T"
)


@pytest.mark.parametrize("code", [ExitCode.NO_REPLICA_LEFT, ExitCode.TOO_FEW_REPLICAS])
@pytest.mark.parametrize(
    ("signs", "is_lost"),
    [
        ([trace.CoordinatorLeft(reason="too few nodes are heard")], True),
        ([trace.CoordinatorLost(replica=1, generation=2, step=1, reason="the link to it broke")], True),
        ([_SILENCE], True),
        ([_SILENCE, msgspec.structs.replace(_SILENCE, phase="over")], False),
    ],
    ids=["left", "lost", "silent", "heard again"],
)
def test_without_a_coordinator_a_job_ends_alone_as_without_replicas_and_no_other_way(
    code: int, signs: list[trace.Event], is_lost: bool
) -> None:
    events = traces.faulty_run().events
    events[-1] = msgspec.structs.replace(events[-1], exit_code=code)
    assert "INV-8" in _broken(events)
    events[-1:-1] = signs
    assert ("INV-8" not in _broken(events)) == (is_lost and code == ExitCode.NO_REPLICA_LEFT)


def test_a_run_that_ends_before_its_first_generation_is_judged() -> None:
    events = [event for event in traces.quiet_run(1).events if isinstance(event, trace.RunStarted)]
    events += [trace.Stopping(exit_code=13, reason="all died"), trace.RunFinished(exit_code=13)]
    assert _broken(events) == {}


def test_what_is_not_fenced_yet_is_no_violation_before_the_end() -> None:
    events = traces.faulty_run().events[:-1]
    events = events[: _find(events, trace.Failure, replica=0) + 1]
    lost = trace.Loss(replica=0, kind=LossKind.PROCESS_ENDED)
    events.append(trace.Generation(generation=3, roster=(1,), losses=(lost,)))
    assert _broken(events) == {}


def test_a_trace_without_its_first_line_proves_nothing(tmp_path: Path) -> None:
    events = [event for event in traces.faulty_run().events if not isinstance(event, trace.RunStarted)]
    verdict = check(traces.write(tmp_path, events))
    assert not verdict.holds and "there is no run_started" in describe(verdict)


def test_a_microbatch_beyond_the_batch_is_counted_too_often() -> None:
    assert not_once({0: 1, 1: 2, 3: 1}, 3) == {1: 2, 2: 0, 3: 1}
    assert not_once({0: 1, 1: 1, 2: 1}, 3) == {}
    assert not_once({-1: 1, 0: 1, 1: 1, 2: 1}, 3) == {-1: 1}


def test_a_cut_line_is_told(tmp_path: Path) -> None:
    run_dir = traces.write(tmp_path, traces.faulty_run().events)
    with open(run_dir / trace.EVENTS_FILE, "ab") as file:
        file.write(b'{"event":"vot')
    verdict = check(run_dir)
    assert verdict.holds
    assert "was cut short" in describe(verdict)


def test_a_rank_that_dies_in_the_backward_whose_first_bucket_is_reduced_has_contributed() -> None:
    """With `--overlap-grad-reduce` a bucket can be committed without the end of its last backward being in the trace."""
    events = traces.faulty_run().events
    committed = events[_find(events, trace.Committed, step=3)]
    assert isinstance(committed, trace.Committed)
    decided = next(result.bucket for result in committed.versions if result.version == 2)
    holder = traces.BUCKET_RANKS[decided][0]
    ended = _find(events, trace.MicrobatchFinished, -1, step=3, replica=0, rank=holder)
    last = events[ended]
    assert isinstance(last, trace.MicrobatchFinished)
    place = {"replica": 0, "rank": holder, "generation": last.generation, "step": 3, "microbatch": last.microbatch}
    events[ended] = trace.BucketPassed(**place, bucket=decided, t=last.t)
    assert not _broken(events)
    del events[ended]
    assert "INV-1" in _broken(events)


def test_a_reason_that_only_the_launcher_knows_is_said_too(tmp_path: Path) -> None:
    run = traces.Run()
    run.quiet_step()
    run.add(trace.RunFinished, exit_code=130, reason="killed on request (SIGINT)")
    last = describe(check(traces.write(tmp_path, run.events))).splitlines()[-1]
    assert last == "the run ended with exit code 130 (killed): killed on request (SIGINT)"
