"""What `check` says of a step that was computed anew: who had the microbatch by which plans, and whether it had a reason."""

from __future__ import annotations

from megatron_recover import trace
from megatron_recover.observe.gaps import Gaps
from megatron_recover.observe.history import History
from megatron_recover.observe.verify.check import violations
from megatron_recover.observe.verify.exactly_once import miscounts, void_for_a_reason


def generation(number: int, void: tuple[int, int] | None = None, *, gives_up: bool = False) -> trace.Generation:
    return trace.Generation(generation=number, roster=(0, 1), void=void, gives_up=gives_up, t=0.0)


def plan(replica: int, *microbatches: int, number: int = 1) -> trace.Plan:
    return trace.Plan(
        replica=replica, generation=number, step=4, label="train 5", num_microbatches=3, roster=(0, 1), quotas=(2, 1),
        transfers=(), computes=(trace.Compute(microbatches=microbatches, into=(0,)),), reduces=(0,), decided=(), t=0.0,
    )  # fmt: skip


def miscounted(replica: int, *own_counts: int, number: int = 1) -> trace.Miscounted:
    return trace.Miscounted(
        replica=replica, rank=0, generation=number, step=4, bucket=0, microbatches=(1,), own_counts=own_counts, t=0.0
    )  # fmt: skip


def history(*events: trace.AnyEvent) -> History:
    return History(enumerate(events, start=1))


def findings(*events: trace.AnyEvent) -> list[str]:
    found = history(*events)
    return [message for _, message in void_for_a_reason(found, Gaps(found))]


def test_who_had_a_miscounted_microbatch_is_told_with_the_plans() -> None:
    """Both were told to compute it: their plans disagree."""
    events = [generation(1), plan(0, 0, 1), plan(1, 1, 2), miscounted(0, 1, 1, 0)]
    (said,) = miscounts(history(*events, miscounted(1, 0, 1, 1), generation(2, (4, 2))))
    assert said == (
        "step 4, bucket 0, rank 0: microbatch 1 was miscounted in generation 1; replica 0 has it 1 times, planned in "
        "generation 1; replica 1 has it 1 times, planned in generation 1"
    )
    (said,) = miscounts(history(*events, generation(2, (4, 2))))
    assert said.endswith("; replica 1 did not report how often it has it, planned in generation 1")
    assert list(miscounts(history(generation(1), plan(0, 0, 1)))) == []


def test_a_step_that_is_void_without_a_report_or_twice_is_a_violation() -> None:
    told = [generation(1), miscounted(0, 1, 2, 0)]
    assert findings(*told, generation(2, (4, 2)), generation(3, (4, 2))) == []
    assert findings(generation(1), generation(2, (4, 2))) == [
        "generation 2 makes step 4 void, of which nobody has reported a miscount"
    ]
    assert findings(*told, generation(2, (4, 2)), generation(3, (4, 3))) == [
        "generation 3 makes step 4 void for the second time"
    ]


def committed(label: str) -> trace.Committed:
    return trace.Committed(
        replica=0, generation=3, step=4, label=label, versions=(), digest="", requests=(), adopted=False, t=0.0
    )  # fmt: skip


def test_a_step_is_given_up_only_where_it_was_miscounted_again_and_its_record_says_so() -> None:
    once = [generation(1), miscounted(0, 1, 2, 0), generation(2, (4, 2))]
    again, gives_up = miscounted(0, 1, 2, 0, number=2), generation(3, (4, 3), gives_up=True)
    assert findings(*once, again, gives_up, generation(4, (4, 3), gives_up=True), committed("give up train 5")) == []
    assert findings(*once, gives_up, committed("give up train 5")) == [
        "generation 3 makes step 4 void, of which nobody has reported a miscount"
    ]
    assert findings(generation(1), again, gives_up, committed("give up train 5")) == [
        "generation 3 gives step 4 up, which was not computed anew"
    ]
    assert findings(*once, again, gives_up, committed("train 5")) == ["step 4 was committed as 'train 5'; it was given up"]
    assert findings(*once, again, committed("give up train 5")) == [
        "step 4 was committed as 'give up train 5'; it was not given up"
    ]


def test_the_void_attempt_is_left_out_and_what_came_after_it_is_not() -> None:
    found = history(generation(1), plan(0, 0), miscounted(0, 1, 2, 0), generation(2, (4, 2)), plan(0, 0, number=2))
    assert [found.is_void(event) for event in (plan(0, 0), plan(0, 0, number=2), miscounted(0, 1, 2, 0))] == [
        True,
        False,
        False,
    ]


def status(replica: int, step: int, committed: int | None, number: int) -> trace.Status:
    return trace.Status(
        replica=replica, generation=number, step=step, work=False, contributions=(), complete=(), committed=committed, t=0.0
    )  # fmt: skip


def test_a_status_of_a_void_attempt_still_tells_of_the_step_before_and_lets_its_replica_act() -> None:
    """Replica 0 has committed step 3 and says so in step 4, which is made void later; replica 1 adopts step 3 meanwhile."""
    adopted = trace.Committed(
        replica=1, generation=1, step=3, label="train 4", versions=(), digest="d", requests=(), adopted=True, t=0.0
    )  # fmt: skip
    voted = trace.Voted(replica=0, generation=1, step=4, digest="e", t=0.0)
    entered = [trace.Entered(replica=replica, generation=1, seconds=0.0, t=0.0) for replica in (0, 1)]
    told = [*entered, status(0, 4, 3, 1), status(1, 3, 2, 1)]
    end = [adopted, voted, miscounted(1, 1, 2, 0), generation(2, (4, 2))]

    def found(*events: trace.AnyEvent) -> list[str]:
        messages = [one.message for one in violations(history(generation(1), *events))]
        return [message for message in messages if "no member had reported" in message or "without a status" in message]

    assert found(*told, *end) == []
    assert found(*entered, status(1, 3, 2, 1), *end) == [
        "replica 1 adopted step 3 in generation 1, but no member had reported a commit of that step",
        "replica 0 acts in generation 1 without a status",
    ]
