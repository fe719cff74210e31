"""The machine of membership: what each loss, request and timer leads to."""

from __future__ import annotations

import signal
from itertools import permutations
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_recover.core import coordinator, policy, request
from megatron_recover.core.alike import combined, differences
from megatron_recover.core.blame import Evidence, Report
from megatron_recover.core.coordinator import (
    Announce,
    Arm,
    AtWork,
    CoordinatorState,
    Dismiss,
    EndJob,
    ExitAsked,
    Fence,
    FenceConfirmed,
    Give,
    Launched,
    LeaveAsked,
    MembershipSettings,
    Progressed,
    ReplicaLost,
    TimerFired,
    Waits,
)
from megatron_recover.core.excuses import AT_WORK
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.membership_messages import (
    Diverged,
    Entered,
    Grant,
    Hello,
    Loss,
    LossKind,
    Miscounted,
    Named,
    NewGeneration,
    ReplicaBlocked,
    ReplicaFailing,
    ReplicaFinished,
    ReplicaLeaving,
    ReplicaSaving,
    Void,
)


def feed(state: CoordinatorState, *messages: coordinator.Input) -> tuple[CoordinatorState, list[coordinator.Effect]]:
    effects: list[coordinator.Effect] = []
    for message in messages:
        state, more = coordinator.step(state, message)
        effects += more
    return state, effects


def started(num_replicas: int = 3, **settings: Any) -> CoordinatorState:
    state, _ = feed(
        CoordinatorState(MembershipSettings(num_replicas, **settings)), *(Hello(r, "same") for r in range(num_replicas))
    )
    assert state.generation == 1
    return state


def died(replica: int) -> ReplicaLost:
    return ReplicaLost(Loss(replica, LossKind.PROCESS_ENDED, "SIGKILL"))


def raised(replica: int) -> ReplicaLost:
    return ReplicaLost(Loss(replica, LossKind.EXCEPTION, "exit code 1"))


def announced(effects: list[coordinator.Effect]) -> NewGeneration:
    (announce,) = (effect for effect in effects if isinstance(effect, Announce))
    return announce.generation


def ended(effects: list[coordinator.Effect]) -> EndJob:
    (end,) = (effect for effect in effects if isinstance(effect, EndJob))
    return end


# --- Start ---------------------------------------------------------------------------------------------------------------


def test_generation_1_waits_for_all_replicas() -> None:
    state, effects = feed(CoordinatorState(MembershipSettings(2)), Hello(1, "same"), Hello(1, "same"))
    assert effects == [Arm("start", "start_s")]
    _, effects = feed(state, Hello(0, "same"))
    first = Give(Grant(1, 1, 0))
    assert effects == [Announce(NewGeneration(1, (0, 1), (), "start")), Arm("follow 1", "follow_s"), first]


def test_a_replica_that_dies_before_it_joined_is_not_waited_for() -> None:
    _, effects = feed(CoordinatorState(MembershipSettings(2)), died(0), Hello(1, "same"))
    assert announced(effects).roster == (1,)
    assert announced(effects).losses == (died(0).loss,)
    assert Fence(0) in effects


def test_a_replica_that_dies_after_its_hello_is_not_in_generation_1() -> None:
    _, effects = feed(CoordinatorState(MembershipSettings(2)), Hello(0, "same"), died(0), Hello(1, "same"))
    assert announced(effects).roster == (1,)


def test_replicas_that_do_not_start_are_fenced() -> None:
    _, effects = feed(CoordinatorState(MembershipSettings(3)), Hello(1, "same"), TimerFired("start"))
    assert [effect for effect in effects if isinstance(effect, Fence)] == [Fence(0), Fence(2)]
    assert announced(effects).roster == (1,)


def test_inv_8_a_job_none_of_whose_replicas_gets_ready_ends() -> None:
    state, effects = feed(CoordinatorState(MembershipSettings(2)), Launched())
    assert effects == [Arm("load", "deadline_s")]
    assert feed(state, Hello(1, "same"), TimerFired("load"))[1] == [Arm("start", "start_s")], "another timer runs"
    _, effects = feed(state, TimerFired("load"))
    assert [effect for effect in effects if isinstance(effect, Fence)] == [Fence(0), Fence(1)]
    assert ended(effects).exit_code == ExitCode.NO_REPLICA_LEFT and "did not start" in ended(effects).reason


def test_replicas_that_differ_do_not_start() -> None:
    _, effects = feed(CoordinatorState(MembershipSettings(2)), Hello(0, "same"), Hello(1, "other"))
    assert ended(effects).exit_code == ExitCode.FAILED
    assert "replicas 0 and 1 do not start alike" in ended(effects).reason


def test_what_differs_at_the_start_is_named_with_both_values() -> None:
    many = tuple((f"argument a{number}", "1") for number in range(7))
    mine = (("argument seed", "1"), ("the version of torch", "2.13"), *many)
    theirs = (("argument seed", "2"), *((name, "2") for name, _ in many))
    found = differences(mine, theirs)
    assert found[:2] == [("argument seed", "1", "2"), ("the version of torch", "2.13", "not there")] and len(found) == 9
    state, effects = feed(CoordinatorState(MembershipSettings(2)), Hello(0, "x", mine), Hello(1, "y", theirs))
    reason = ended(effects).reason
    assert "argument seed is 1 on replica 0 and 2 on replica 1; " in reason and "; 4 more differ; use the same" in reason
    assert differences(mine, mine) == []


def test_parts_of_ranks_are_told_apart_where_ranks_differ() -> None:
    of_ranks = [(("data", "d"), ("state", "a")), (("state", "b"),), (("data", "d"), ("state", "a"))]
    assert combined(of_ranks) == (
        ("data", "d"), ("state of rank 0", "a"), ("state of rank 1", "b"), ("state of rank 2", "a"),
    )  # fmt: skip


def test_too_few_replicas_do_not_start() -> None:
    _, effects = feed(CoordinatorState(MembershipSettings(2, min_replicas=2)), died(0), Hello(1, "same"))
    assert ended(effects).exit_code == ExitCode.TOO_FEW_REPLICAS


def test_a_job_whose_replicas_all_die_at_the_start_ends() -> None:
    _, effects = feed(CoordinatorState(MembershipSettings(2)), died(0), died(1))
    assert ended(effects).exit_code == ExitCode.NO_REPLICA_LEFT


# --- Losses --------------------------------------------------------------------------------------------------------------


def test_a_loss_is_fenced_and_leads_to_a_new_generation_at_once() -> None:
    state, effects = feed(started(), died(1))
    assert effects[0] == Fence(1)
    assert announced(effects) == NewGeneration(2, (0, 2), (died(1).loss,), "process ended")
    assert feed(state, died(1)) == (state, [])


def test_a_job_that_ends_after_a_check_failed_says_so() -> None:
    failed = ReplicaLost(Loss(0, LossKind.INVARIANT_VIOLATED, "exit code 14"))
    _, effects = feed(CoordinatorState(MembershipSettings(2)), Hello(0, "same"), Hello(1, "same"), failed, died(1))
    assert ended(effects).exit_code == ExitCode.INVARIANT_VIOLATED


def test_below_min_replicas_the_survivors_are_asked_to_end() -> None:
    state, effects = feed(started(min_replicas=2), died(1))
    assert announced(effects).requests == ()
    state, effects = feed(state, died(0))
    assert announced(effects).requests == (request.TOO_FEW,)
    _, effects = feed(state, ReplicaFinished(2, policy.exit_code(announced(effects).requests)))
    assert ended(effects).exit_code == ExitCode.TOO_FEW_REPLICAS


def test_the_last_loss_ends_the_job() -> None:
    _, effects = feed(started(), died(1), died(0), died(2))
    assert ended(effects).exit_code == ExitCode.NO_REPLICA_LEFT
    assert "replica 1: process ended SIGKILL" in ended(effects).reason


def test_an_exception_on_every_replica_is_a_failure_not_a_loss_of_machines() -> None:
    state = started(2)
    _, effects = feed(
        state, ReplicaFailing(0, "train 4", (), "KeyError"), raised(0), ReplicaFailing(1, "train 4", (), "KeyError"), raised(1)
    )
    assert ended(effects) == EndJob(1, "training raised on every replica, at last on replica 1 in train 4: KeyError")


def test_inv_9_a_microbatch_that_ends_two_replicas_ends_the_job() -> None:
    state, effects = feed(
        started(), ReplicaFailing(0, "train 4", (2,), "NaN"), ReplicaFailing(0, "train 4", (2,), "NaN"), raised(0)
    )
    assert announced(effects).roster == (1, 2)
    for last in (
        (ReplicaFailing(1, "train 4", (2,), "NaN"), raised(1)),
        (raised(1), ReplicaFailing(1, "train 4", (2,), "NaN")),
    ):
        _, effects = feed(state, *last)
        assert ended(effects).exit_code == ExitCode.POISONED_MICROBATCH
        assert "microbatch 2 of train 4 ended replicas 0 and 1" in ended(effects).reason


@pytest.mark.parametrize(
    ("label", "which"),
    [("train 4", " (samples 76 to 77 in the order of training, from 0)"), ("evaluate 4/1", "")],
)
def test_inv_9_the_samples_of_a_microbatch_that_ends_two_replicas_are_named(label: str, which: str) -> None:
    state = started(samples=(24, 2))
    _, effects = feed(state, ReplicaFailing(0, label, (2,), "NaN"), raised(0), ReplicaFailing(1, label, (2,), "NaN"), raised(1))
    assert f"computing microbatch 2 of {label}{which} ended replicas 0 and 1" in ended(effects).reason


@pytest.mark.parametrize("code", [ExitCode.INTERRUPTED, ExitCode.TOO_FEW_REPLICAS])
def test_a_job_that_was_asked_to_end_says_by_what(code: ExitCode) -> None:
    asked = ExitAsked("SIGTERM") if code == ExitCode.INTERRUPTED else died(2)
    state, _ = feed(started(min_replicas=3), asked)
    left = [ReplicaFinished(replica, int(code)) for replica in state.roster]
    _, effects = feed(state, *left)
    assert ended(effects).exit_code == code
    assert ("(SIGTERM)" if code == ExitCode.INTERRUPTED else "(too few replicas)") in ended(effects).reason


def test_inv_9_a_microbatch_is_found_in_what_two_passes_that_raised_had_in_common() -> None:
    first = [ReplicaFailing(0, "train 4", (0, 1, 2), "NaN"), raised(0)]
    _, effects = feed(started(), *first, ReplicaFailing(1, "train 4", (2, 3, 4), "NaN"), raised(1))
    assert ended(effects).exit_code == ExitCode.POISONED_MICROBATCH
    assert "computing microbatch 2 of train 4 ended replicas 0 and 1, so" in ended(effects).reason
    _, effects = feed(started(), *first, ReplicaFailing(1, "train 4", (1, 2, 5), "NaN"), raised(1))
    assert "computing one of microbatches 1, 2 of train 4 ended replicas 0 and 1, so" in ended(effects).reason


def test_inv_9_of_two_passes_that_raised_the_one_that_says_more_is_believed() -> None:
    first = [ReplicaFailing(0, "train 4", (0, 1, 2), "NaN"), ReplicaFailing(0, "train 4", (2,), "NaN"), raised(0)]
    _, effects = feed(started(), *first, ReplicaFailing(1, "train 4", (1, 2, 5), "NaN"), raised(1))
    assert "computing microbatch 2 of train 4 ended replicas 0 and 1, so" in ended(effects).reason


def test_a_microbatch_is_not_blamed_for_a_kill() -> None:
    """The other ranks of a replica that a signal ended raise where they are: their sibling does not answer any more."""
    broken = [
        ReplicaFailing(0, "train 4", (2,), "reset by peer"),
        died(0),
        ReplicaFailing(1, "train 4", (2,), "reset by peer"),
        died(1),
    ]
    _, effects = feed(started(), *broken)
    assert not any(isinstance(effect, EndJob) for effect in effects)


def lost(replica: int, kind: LossKind) -> ReplicaLost:
    return ReplicaLost(Loss(replica, kind, "rank 1"))


def witnessed(replica: int, *microbatches: int) -> ReplicaFailing:
    """What the agent has read from the progress page of a rank."""
    return ReplicaFailing(replica, "train 4", microbatches, "SIGBUS", witnessed=True)


def told(replica: int, *microbatches: int) -> ReplicaFailing:
    """What a rank has reported that raised."""
    return ReplicaFailing(replica, "train 4", microbatches, "connection reset")


CRASHED, HUNG, KILLED, RAISED = LossKind.CRASHED, LossKind.HUNG, LossKind.PROCESS_ENDED, LossKind.EXCEPTION


@pytest.mark.parametrize(
    ("first", "second", "poisons"),
    [
        ((witnessed(0, 2), CRASHED), (witnessed(1, 2), CRASHED), True),
        ((witnessed(0, 2), HUNG), (witnessed(1, 2), CRASHED), True),
        ((told(0, 2), RAISED), (witnessed(1, 2), HUNG), True),
        # A device that runs behind: the common one counts.
        ((witnessed(0, 0, 1, 2), CRASHED), (witnessed(1, 2, 5), CRASHED), True),
        ((witnessed(0, 0, 1), CRASHED), (witnessed(1, 2, 5), CRASHED), False),
        # What other ranks raise when one of theirs crashed or hangs is a consequence.
        ((told(0, 2), CRASHED), (told(1, 2), CRASHED), False),
        ((told(0, 2), HUNG), (told(1, 2), HUNG), False),
        # Nothing is charged to a kill from outside, whatever was in work.
        ((witnessed(0, 2), KILLED), (witnessed(1, 2), KILLED), False),
        ((witnessed(0, 2), CRASHED), (witnessed(1, 2), KILLED), False),
        # A communication error inside a replica names no microbatch (A14).
        ((told(0), RAISED), (told(1), RAISED), False),
    ],
)
def test_inv_9_which_deaths_are_charged_to_a_microbatch(
    first: tuple[ReplicaFailing, LossKind], second: tuple[ReplicaFailing, LossKind], poisons: bool
) -> None:
    events = [event for failing, kind in (first, second) for event in (failing, lost(failing.replica, kind))]
    state, effects = feed(started(), *events)
    codes = [effect.exit_code for effect in effects if isinstance(effect, EndJob)]
    assert codes == ([ExitCode.POISONED_MICROBATCH] if poisons else [])
    assert poisons or state.roster == (2,)


def test_a_microbatch_is_not_blamed_for_a_check_that_failed() -> None:
    failed = [ReplicaLost(Loss(replica, LossKind.INVARIANT_VIOLATED, "exit code 14")) for replica in (0, 1)]
    said = [ReplicaFailing(replica, "train 4", (2,), "INV-1") for replica in (0, 1)]
    state, effects = feed(started(), said[0], failed[0], said[1], failed[1])
    assert not any(isinstance(effect, EndJob) for effect in effects) and state.roster == (2,)


@pytest.mark.parametrize(
    "second",
    [
        ReplicaFailing(1, "train 4", (1,), "NaN"),
        ReplicaFailing(1, "train 5", (2,), "NaN"),
        ReplicaFailing(1, "train 4", (), "x"),
    ],
)
def test_different_failures_do_not_poison(second: ReplicaFailing) -> None:
    _, effects = feed(started(), ReplicaFailing(0, "train 4", (2,), "NaN"), raised(0), second, raised(1))
    assert not any(isinstance(effect, EndJob) for effect in effects)


def test_the_minority_that_diverges_is_fenced() -> None:
    state, effects = feed(started(), Diverged(0, 1, 7, (2,), "checksums"), Diverged(1, 1, 7, (2,), "checksums"))
    assert [effect for effect in effects if isinstance(effect, Fence)] == [Fence(2)]
    assert announced(effects).losses == (Loss(2, LossKind.DIVERGED, "checksums"),)
    # What it took part in is withdrawn, which a member learns that hears of the next generation first, too.
    assert announced(effects).trusted_from == 2
    _, effects = feed(state, died(1))
    assert announced(effects).trusted_from == 2


@pytest.mark.parametrize(
    ("status", "started", "kind"),
    [
        (-9, False, LossKind.PROCESS_ENDED),
        (-9, True, LossKind.PROCESS_ENDED),
        (0, False, LossKind.ENDED_EARLY),
        (0, True, LossKind.PROCESS_ENDED),
        (1, False, LossKind.EXCEPTION),
        (1, True, LossKind.EXCEPTION),
        (ExitCode.BAD_INPUT, True, LossKind.EXCEPTION),
        (ExitCode.NO_REPLICA_LEFT, True, LossKind.PROCESS_ENDED),
        (ExitCode.INVARIANT_VIOLATED, False, LossKind.INVARIANT_VIOLATED),
        (ExitCode.INVARIANT_VIOLATED, True, LossKind.INVARIANT_VIOLATED),
    ],
)
def test_what_an_end_says_of_a_replica(status: int, started: bool, kind: LossKind) -> None:
    assert policy.loss_of(status, started=started) is kind


def test_a_step_that_was_miscounted_is_made_void_once_and_then_given_up_by_all_with_the_state_saved() -> None:
    """All members see the same sum and report it; the first report counts, and every later generation tells of it."""
    state, effects = feed(started(), *(Miscounted(replica, 1, 7, "bucket 3") for replica in (2, 0, 1)))
    assert announced(effects).roster == (0, 1, 2) and announced(effects).losses == ()
    assert (announced(effects).void, announced(effects).reason) == (Void(7, 2), "step 7 is computed anew: replica 2: bucket 3")
    state, effects = feed(state, died(1))
    assert announced(effects).void == Void(7, 2)
    assert feed(state, Miscounted(1, 3, 7, "bucket 3"), Miscounted(0, 2, 7, "bucket 3")) == (state, []), "gone, stale"
    assert announced(feed(state, Miscounted(0, 3, 8, "bucket 3"))[1]).void == Void(8, 4), "another step"
    state, effects = feed(state, Miscounted(0, 3, 7, "bucket 3"))
    assert announced(effects).void == Void(7, 4, gives_up=True) and announced(effects).requests == (request.MISCOUNTED,)
    code = policy.exit_code(announced(effects).requests)
    assert code == policy.exit_code((request.MISCOUNTED, request.TOO_FEW, request.UNSAVED)) == ExitCode.INVARIANT_VIOLATED
    what = "step 7 is given up: replica 0: bucket 3, and so it was when the step was computed for the first time"
    for is_saved, then in ((True, "is saved"), (False, "was not saved")):
        _, effects = feed(state, ReplicaFinished(0, code, is_saved), ReplicaFinished(2, code, is_saved))
        assert ended(effects) == EndJob(ExitCode.INVARIANT_VIOLATED, f"{what}; the state before that step {then}")
    state, effects = feed(state, died(2))
    assert announced(effects).void == Void(7, 4, gives_up=True), "whoever hears only of the newest generation gives up as well"


def given_up() -> CoordinatorState:
    """Three replicas that give step 7 up."""
    state, effects = feed(started(), Miscounted(2, 1, 7, "bucket 3"), Miscounted(2, 2, 7, "bucket 3"))
    assert announced([effects[-2]]).void == Void(7, 3, gives_up=True)
    return state


GIVEN_UP = "step 7 is given up: replica 2: bucket 3, and so it was when the step was computed for the first time"


def test_a_job_that_gave_a_step_up_ends_with_that_though_all_its_members_die() -> None:
    _, effects = feed(given_up(), died(0), died(2), died(1))
    deaths = "; ".join(f"replica {number}: process ended SIGKILL" for number in (0, 2, 1))
    unknown = "no replica is left to say whether the state before that step is saved"
    assert ended(effects) == EndJob(ExitCode.INVARIANT_VIOLATED, f"{GIVEN_UP}; {unknown} ({deaths})")
    for is_saved, then in ((True, "is saved"), (False, "was not saved")):
        said = ReplicaFinished(0, ExitCode.INVARIANT_VIOLATED, is_saved)
        _, effects = feed(given_up(), said, died(0), died(2), died(1))
        assert ended(effects) == EndJob(ExitCode.INVARIANT_VIOLATED, f"{GIVEN_UP}; the state before that step {then}")
    _, effects = feed(started(), Miscounted(2, 1, 7, "bucket 3"), died(0), died(2), died(1))
    assert ended(effects).exit_code == ExitCode.NO_REPLICA_LEFT, "it was to be computed anew, and nobody was left to"


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.INTERRUPTED, ExitCode.UNSAVED])
def test_what_a_member_has_said_of_the_end_holds_though_it_and_all_others_die(code: ExitCode) -> None:
    """It has finished, so all that there was is committed, and the last checkpoint is as it says."""
    for deaths in permutations((0, 1, 2)):
        _, effects = feed(started(), ReplicaFinished(0, code), *(died(number) for number in deaths))
        assert ended(effects).exit_code == code
    _, effects = feed(started(), *(event for number in (0, 1, 2) for event in (ReplicaFinished(number, code), died(number))))
    assert ended(effects).exit_code == code


def test_a_state_is_called_saved_only_if_all_say_so_and_as_begun_with_only_if_all_say_so_alike() -> None:
    def told(*finished: ReplicaFinished) -> str:
        code, reason = policy.all_finished(finished, "step 7 is given up")
        assert code == ExitCode.INVARIANT_VIOLATED
        return reason.removeprefix("step 7 is given up; the state before that step ")

    saved, unsaved = ReplicaFinished(0, 14, True), ReplicaFinished(1, 14)
    loaded, begun = (
        ReplicaFinished(0, 14, untrained="what was loaded from X"),
        ReplicaFinished(1, 14, untrained="the one that it begins with"),
    )
    assert told(saved, saved) == "is saved"
    assert told(loaded, loaded) == "is what was loaded from X: nothing was trained"
    for unlike in ((saved, unsaved), (unsaved, saved), (loaded, unsaved), (unsaved, loaded), (loaded, begun)):
        assert told(*unlike) == "was not saved"


def test_only_signals_of_the_computation_and_a_want_of_memory_are_crashes() -> None:
    of_computation = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
    for number in signal.valid_signals():
        expected = LossKind.CRASHED if number in of_computation else LossKind.PROCESS_ENDED
        assert policy.loss_of(-number, started=True) is expected, number
        by_kernel = LossKind.CRASHED if number in {*of_computation, signal.SIGKILL} else LossKind.PROCESS_ENDED
        assert policy.loss_of(-number, started=True, out_of_memory=True) is by_kernel, number


def test_a_tie_ends_the_job() -> None:
    _, effects = feed(started(2), Diverged(0, 1, 7, (), "checksums"))
    assert ended(effects) == EndJob(12, "checksums")


# --- Requests and timers -------------------------------------------------------------------------------------------------


def blocked(replica: int, generation: int, *suspects: int) -> ReplicaBlocked:
    return ReplicaBlocked(replica, generation, "stuck", suspects)


def test_a_blocked_member_waits_a_grace_for_news_of_a_death() -> None:
    state, effects = feed(started(), blocked(0, 1, 2), blocked(1, 1, 2))
    assert effects == [Arm("grace 1", "grace_s")]
    _, effects = feed(state, died(2), TimerFired("grace 1"))
    assert announced(effects).roster == (0, 1)


def test_without_a_death_the_roster_stays() -> None:
    _, effects = feed(started(), blocked(0, 1), TimerFired("grace 1"))
    assert announced(effects) == NewGeneration(2, (0, 1, 2), (), "replica 0: stuck")


def test_stale_requests_and_timers_do_nothing() -> None:
    state, _ = feed(started(), died(1))
    timers = [TimerFired(name) for name in ("grace 1", "grace 2", "follow 1", "start")]
    stale = [blocked(0, 1), *timers, blocked(1, 2)]
    stale += [Entered(0, 1, 0), Entered(1, 2, 0), Diverged(0, 1, 0, (2,), ""), Diverged(1, 2, 0, (2,), "")]
    assert feed(state, *stale, ReplicaFinished(1, 0), Hello(1, "same"), Hello(7, "same")) == (state, [])


def test_a_member_that_does_not_follow_is_fenced() -> None:
    state, _ = feed(started(), Entered(2, 1, 0), died(1), Entered(0, 2, 0))
    _, effects = feed(state, TimerFired("follow 2"))
    assert Fence(2) in effects and announced(effects).roster == (0,)
    state, _ = feed(state, Entered(2, 2, 0))
    assert feed(state, TimerFired("follow 2")) == (state, [])


def test_inv_9_where_no_member_follows_nobody_is_late() -> None:
    """Two replicas; one dies, and the other takes longer than the timer to promise: it is the last one."""
    state, _ = feed(started(2), died(1))
    state, effects = feed(state, TimerFired("follow 2"))
    waits = Waits((0,), "no member has entered generation 2 in time, so none is late: waiting for the first")
    assert effects == [waits, Arm("follow 2", "follow_s")]
    assert feed(state, TimerFired("follow 2"))[1] == effects, "as often as it runs out, and each time it says so"
    state, effects = feed(state, Entered(0, 2, 0), TimerFired("follow 2"), TimerFired("follow 2 again"))
    assert effects == [Arm("follow 2 again", "follow_s")]
    assert (state.roster, state.over) == ((0,), False)


def test_the_first_of_late_members_gives_the_others_the_full_time() -> None:
    state, _ = feed(started(), TimerFired("follow 1"), Entered(1, 1, 0), TimerFired("follow 1"))
    assert state.roster == (0, 1, 2), "the timer that ran before may fire at once"
    state, effects = feed(state, Entered(2, 1, 0), TimerFired("follow 1 again"))
    assert Fence(0) in effects and announced(effects).roster == (1, 2)


def test_a_late_member_that_is_the_last_and_ends_ends_the_job() -> None:
    _, effects = feed(started(2), died(1), TimerFired("follow 2"), died(0))
    assert ended(effects).exit_code == ExitCode.NO_REPLICA_LEFT


def test_replicas_that_load_are_not_late_for_one_that_has_ended() -> None:
    state, effects = feed(CoordinatorState(MembershipSettings(3)), Launched(), Hello(1, "same"), died(1), TimerFired("start"))
    assert effects[-2:] == [
        Waits((0, 2), "the replicas that were ready have ended: waiting for the others"), Arm("load 1", "deadline_s")
    ]  # fmt: skip
    _, effects = feed(state, Hello(0, "same"), Hello(2, "same"))
    assert announced(effects).roster == (0, 2)


def test_a_timer_of_replicas_that_have_ended_ends_nothing() -> None:
    """The second wait is as long as the first, and the first one's timers still run."""
    begun, _ = feed(CoordinatorState(MembershipSettings(3)), Launched(), Hello(1, "same"), died(1), TimerFired("start"))
    assert feed(begun, TimerFired("load"))[1] == [], "that was the time for the first"
    assert ended(feed(begun, TimerFired("load 1"))[1]).exit_code == ExitCode.NO_REPLICA_LEFT
    again, effects = feed(
        CoordinatorState(MembershipSettings(3)), Launched(), Hello(1, "same"), died(1), Hello(0, "same"),
    )  # fmt: skip
    assert effects[-1] == Arm("start 1", "start_s")
    assert feed(again, TimerFired("start"))[1] == [], "replica 2 has as much time from here on as it would have had"
    assert announced(feed(again, TimerFired("start 1"))[1]).roster == (0,)


LASTS = TimerFired("trouble 1")
"""No step was committed for so long since generation 1 that somebody is at fault."""


def test_inv_9_however_many_generations_bear_no_fruit_nobody_is_fenced_before_the_time_for_that_is_over() -> None:
    state, armed = started(), list[coordinator.Effect]()
    for generation in range(1, 30):
        asked = (blocked(0, generation, 1), blocked(2, generation, 1), TimerFired(f"grace {generation}"))
        state, effects = feed(state, *asked)
        assert announced(effects).roster == (0, 1, 2)
        armed += [effect for effect in effects if isinstance(effect, Arm) and not effect.timer.startswith("follow")]
    assert armed[:3] == [Arm("grace 1", "grace_s"), Arm("trouble 1", "blame_s"), Arm("grace 2", "grace_s")]
    assert armed[3:] == [Arm(f"grace {number}", "follow_s") for number in range(3, 30)], "with a pause"
    state, effects = feed(state, LASTS)
    assert effects == [Arm("trouble 1 again", "blame_s")], "a timer by itself removes nobody"
    state, effects = feed(state, blocked(0, 30, 1), TimerFired("grace 30"))
    assert Fence(1) in effects and announced(effects).roster == (0, 2)
    assert feed(state, LASTS, TimerFired("trouble 1 again")) == (state, []), "a loss ends the trouble"


def test_inv_9_the_most_suspected_is_fenced_when_generations_bear_no_fruit() -> None:
    state = started()
    for generation in (1, 2):
        state, effects = feed(state, blocked(0, generation, 1), blocked(2, generation, 1), TimerFired(f"grace {generation}"))
        assert announced(effects).roster == (0, 1, 2)
    _, effects = feed(state, LASTS, blocked(0, 3, 1), blocked(1, 3, 0), TimerFired("grace 3"))
    assert Fence(1) in effects and announced(effects).roster == (0, 2)


def waited(replica: int, generation: int, *waited_for: int, step: int = 0) -> Entered:
    """What a member says that waited in the generation before."""
    return Entered(replica, generation, step, waited_for)


def waits(replica: int, generation: int, *waited_for: int) -> Report:
    """What the coordinator keeps of it: of the generation in which the member waited."""
    return Report(replica, generation, False, waited_for)


def test_inv_9_whom_all_waited_for_is_fenced_whoever_asked() -> None:
    state = started()
    state, _ = feed(state, blocked(0, 1), TimerFired("grace 1"), waited(0, 2, 1), waited(2, 2, 1), waited(1, 2))
    _, effects = feed(state, LASTS, blocked(2, 2), TimerFired("grace 2"))
    assert Fence(1) in effects and announced(effects).roster == (0, 2)


def test_who_waited_itself_passes_the_blame_on() -> None:
    """A row: 2 waits for 1, which waits for 0. The order in which they enter plays no part."""
    rows = [waited(2, 2, 1), waited(1, 2, 0), waited(0, 2)]
    for entered in permutations(rows):
        state, _ = feed(started(), blocked(2, 1), TimerFired("grace 1"), *entered)
        _, effects = feed(state, LASTS, blocked(1, 2), TimerFired("grace 2"))
        assert Fence(0) in effects


def test_where_everybody_waits_the_one_that_most_wait_for_is_fenced() -> None:
    state, _ = feed(started(), blocked(2, 1), TimerFired("grace 1"))
    state, _ = feed(state, waited(0, 2, 1), waited(1, 2, 0, 2), waited(2, 2, 0, 1))
    assert state.waits == (waits(0, 1, 1), waits(1, 1, 0, 2), waits(2, 1, 0, 1))
    _, effects = feed(state, LASTS, blocked(1, 2), TimerFired("grace 2"))
    assert Fence(1) in effects


def test_nobody_is_blamed_for_a_wait_that_ended_with_a_step_or_was_for_a_save() -> None:
    state, _ = feed(started(), blocked(2, 1), TimerFired("grace 1"), waited(0, 2, 1), waited(2, 2, step=8))
    assert (state.waits, state.evidence) == ((), Evidence())
    state, _ = feed(started(), ReplicaSaving(1, False), blocked(0, 1), TimerFired("grace 1"), waited(0, 2, 1), waited(2, 2, 1))
    state, _ = feed(
        state, blocked(0, 2), ReplicaSaving(1, True), waited(0, 3, 1), waited(2, 3, 1), blocked(0, 3), TimerFired("grace 3")
    )
    assert (state.generation, state.waits, state.evidence.pairs) == (4, (), ())
    state, _ = feed(state, waited(0, 4, 1))
    assert state.waits == (waits(0, 3, 1),), "the excuse is for one generation"


def test_nobody_waits_in_vain_for_who_is_lost() -> None:
    state, _ = feed(started(), died(2), waited(0, 2, 1, 2), waited(1, 2, 0, 2))
    assert (state.waits, state.evidence) == ((), Evidence()), "what they did when it died is no evidence against each other"
    state, _ = feed(started(), blocked(2, 1), TimerFired("grace 1"), waited(0, 2, 1), died(2))
    assert (state.waits, state.evidence) == ((), Evidence())


def test_a_committed_step_forgives() -> None:
    state = started()
    state, _ = feed(state, blocked(0, 1, 1), TimerFired("grace 1"), Entered(0, 2, 6), blocked(0, 2, 1))
    _, effects = feed(state, LASTS, TimerFired("grace 2"))
    assert announced(effects).roster == (0, 1, 2)


# --- Where the evidence says nothing -------------------------------------------------------------------------------------


def both_accuse(state: CoordinatorState) -> tuple[CoordinatorState, list[coordinator.Effect]]:
    """One more generation in which two members do not reach each other."""
    generation = state.generation
    return feed(state, blocked(0, generation, 1), blocked(1, generation, 0), TimerFired(f"grace {generation}"))


def test_inv_9_of_two_members_that_do_not_reach_each_other_nobody_is_named_and_one_goes_on() -> None:
    state = started(2)
    for number in range(5):
        state, _ = feed(state, *((LASTS,) if number == 3 else ()))
        state, effects = both_accuse(state)
        assert announced(effects).roster == (0, 1)
    assert "the evidence names nobody at fault in 5 generations without a committed step" in announced(effects).reason
    state, _ = feed(state, TimerFired("trouble 1 again"))
    state, effects = both_accuse(state)
    assert Fence(1) in effects and announced(effects).roster == (0,)
    assert "set aside so that replica 0 can go on: the evidence does not show which" in announced(effects).losses[0].detail


def test_inv_9_of_two_members_the_one_that_waits_for_nobody_is_named() -> None:
    state = started(2)
    for generation in (1, 2):
        state, effects = feed(state, blocked(0, generation), TimerFired(f"grace {generation}"), waited(0, generation + 1, 1))
    state, effects = feed(state, LASTS, blocked(0, 3), TimerFired("grace 3"))
    assert Fence(1) in effects and announced(effects).roster == (0,)


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_inv_8_a_job_in_which_nothing_says_who_is_at_fault_ends_with_a_message(num_replicas: int) -> None:
    state = started(num_replicas)
    armed = []
    for generation in range(1, 20):
        state, _ = feed(state, *((LASTS,) if generation == 3 else ()))
        state, effects = feed(state, blocked(0, generation), TimerFired(f"grace {generation}"))
        assert announced(effects).roster == tuple(range(num_replicas))
        armed += [effect for effect in effects if isinstance(effect, Arm) and effect.timer.startswith("undecided")]
    assert armed == [Arm("undecided 3", "deadline_s")]
    _, effects = feed(state, TimerFired("undecided 3"))
    assert ended(effects) == EndJob(
        ExitCode.FAILED,
        "no step was committed in 19 generations and --recover-deadline-s has passed; "
        "the evidence names nobody at fault: read why each generation was made",
    )
    state, _ = feed(state, Entered(0, 20, 5))
    assert feed(state, TimerFired("undecided 3")) == (state, []), "a step was committed"


def test_inv_9_a_job_that_commits_steps_again_is_not_ended_by_what_was_before() -> None:
    """The coordinator hears of steps in a generation that lasts from beats alone, since nobody enters another one."""
    state = started(2)
    for generation in range(1, 4):
        state, _ = feed(state, *((LASTS,) if generation == 3 else ()))
        state, _ = feed(state, blocked(0, generation), TimerFired(f"grace {generation}"))
    assert ended(feed(state, TimerFired("undecided 3"))[1]).exit_code == ExitCode.FAILED, "no step was committed"
    state, effects = feed(state, Progressed(1, 7))
    assert effects == [] and feed(state, TimerFired("undecided 3")) == (state, [])
    assert feed(state, Progressed(5, 99)) == (state, []), "it is no member"


def test_what_was_held_against_a_member_is_forgotten_when_steps_are_committed_again() -> None:
    state = started(3)
    for generation in (1, 2):
        state, _ = feed(state, ReplicaBlocked(0, generation, "slow", (1,)), TimerFired(f"grace {generation}"))
    state, _ = feed(state, Progressed(0, 10_000), ReplicaBlocked(2, 3, "a hiccup", (1,)))
    _, effects = feed(state, LASTS, TimerFired("grace 3"))
    assert announced(effects).roster == (0, 1, 2) and not [each for each in effects if isinstance(each, Fence)]


def test_what_was_waited_for_in_a_generation_that_is_over_is_evidence_and_a_break_is_not() -> None:
    state, _ = feed(started(), blocked(0, 1), TimerFired("grace 1"))
    assert feed(state, blocked(1, 1, 2)) == (state, []), "a connection breaks when its generation is over"
    state, effects = feed(state, ReplicaBlocked(1, 1, "no progress", (2,), True))
    assert effects == [] and (state.evidence.pairs, state.evidence.stuck) == (((1, 2),), (0, 1))
    after, _ = feed(state, died(2), ReplicaBlocked(1, 2, "no progress", (0,), True))
    assert after.evidence == Evidence(), "that is about what the death has ended"
    after, _ = feed(state, Progressed(0, 1), ReplicaBlocked(1, 1, "no progress", (0,), True))
    assert after.evidence == Evidence(), "that is about what the committed step has ended"


# --- Saves ---------------------------------------------------------------------------------------------------------------


def test_a_save_costs_two_generations_at_most_and_nobody_is_suspected() -> None:
    state, effects = feed(started(), ReplicaSaving(0, False))
    assert effects == [Arm("save 1", "save_s")]
    state, effects = feed(state, blocked(1, 1, 0), blocked(2, 1, 0))
    assert effects == [Arm("grace 1", "grace_s")], "nothing would end the wait of who asked first"
    state, effects = feed(state, TimerFired("grace 1"))
    assert announced(effects).roster == (0, 1, 2), "the first request shows who still answers"
    state, effects = feed(state, blocked(1, 2, 0), blocked(2, 2, 0))
    assert effects == [], "the second waits for the end of the save"
    state, effects = feed(state, ReplicaSaving(0, True))
    assert announced(effects) == NewGeneration(3, (0, 1, 2), (), "replica 1: stuck")
    assert (state.fruitless, state.evidence, state.saves) == (0, Evidence(), ())
    assert feed(state, TimerFired("save 1"), ReplicaSaving(0, True)) == (state, [])


def test_a_save_that_nobody_waited_for_costs_nothing() -> None:
    state, effects = feed(started(), ReplicaSaving(0, False), ReplicaSaving(0, True))
    assert effects == [Arm("save 1", "save_s")] and state.saves == ()


def test_who_did_not_save_ends_no_wait_by_saying_that_its_save_is_over() -> None:
    state, _ = feed(started(), blocked(0, 1, 2))
    assert feed(state, ReplicaSaving(1, True)) == (state, []), "the grace was cut short: a death would be news too late"


def test_a_replica_that_dies_during_a_save_is_a_loss_at_once() -> None:
    waiting = [ReplicaSaving(0, False), blocked(1, 1, 0), TimerFired("grace 1"), blocked(1, 2, 0)]
    state, effects = feed(started(), *waiting, died(2))
    assert effects[-2:] == [
        Announce(NewGeneration(3, (0, 1), (died(2).loss,), "process ended")),
        Arm("follow 3", "follow_s"),
    ]
    state, effects = feed(state, blocked(1, 3, 0))
    assert effects == [], "the save is still under way"
    _, effects = feed(state, died(0))
    assert announced(effects).roster == (1,)
    _, effects = feed(state, died(0), blocked(1, 4, 1))
    assert effects[-1] == Arm("grace 4", "grace_s"), "a dead replica saves nothing"


def test_who_stops_in_a_save_does_not_follow_the_first_request() -> None:
    state, _ = feed(
        started(), ReplicaSaving(0, False), blocked(1, 1, 0), TimerFired("grace 1"), Entered(1, 2, 0), Entered(2, 2, 0)
    )
    _, effects = feed(state, TimerFired("follow 2"))
    assert Fence(0) in effects and announced(effects).roster == (1, 2)


def test_a_request_waits_for_all_saves_that_are_within_their_time() -> None:
    state, _ = feed(
        started(), ReplicaSaving(0, False), ReplicaSaving(1, False), blocked(2, 1, 0), TimerFired("grace 1"), blocked(2, 2, 0)
    )
    state, effects = feed(state, TimerFired("save 1"))
    assert effects == []
    _, effects = feed(state, ReplicaSaving(1, True))
    assert announced(effects).roster == (0, 1, 2)


def test_a_request_waits_for_the_last_of_two_saves_to_be_over() -> None:
    state, _ = feed(
        started(), ReplicaSaving(0, False), ReplicaSaving(1, False), blocked(2, 1, 0), TimerFired("grace 1"), blocked(2, 2, 0)
    )
    state, effects = feed(state, ReplicaSaving(0, True))
    assert effects == [], "the other would make it wait, and ask, once more"
    _, effects = feed(state, ReplicaSaving(1, True))
    assert announced(effects) == NewGeneration(3, (0, 1, 2), (), "replica 2: stuck")


def test_inv_9_an_overdue_save_speaks_against_who_saves() -> None:
    """It is the member's own deadline, so it counts more than what another member reports."""
    state, _ = feed(started(), ReplicaSaving(2, False), blocked(1, 1, 2), TimerFired("grace 1"), blocked(1, 2, 2))
    state, _ = feed(state, TimerFired("save 1"))
    assert state.evidence.pairs == ((2, 2),)
    _, effects = feed(state, TimerFired("trouble 2"), blocked(1, 3, 0), TimerFired("grace 3"))
    assert Fence(2) in effects and announced(effects).roster == (0, 1)


def test_inv_8_a_save_that_takes_too_long_is_suspected_as_ever() -> None:
    state, _ = feed(started(), ReplicaSaving(0, False), blocked(1, 1, 0), TimerFired("grace 1"), blocked(1, 2, 0))
    state, effects = feed(state, TimerFired("save 1"))
    assert announced(effects).roster == (0, 1, 2) and state.fruitless == 1
    _, effects = feed(state, TimerFired("trouble 2"), blocked(1, 3, 0), TimerFired("grace 3"))
    assert Fence(0) in effects and announced(effects).roster == (1, 2)


def test_inv_9_the_work_of_another_does_not_excuse_a_save_that_is_overdue() -> None:
    """As it was: what spoke against the saver was forgotten with every wait for the reader, up to the user's deadline."""
    state, _ = feed(started(), ReplicaSaving(0, False), AtWork((1,)), blocked(2, 1, 0), TimerFired("grace 1"), blocked(2, 2, 0))
    state, effects = feed(state, TimerFired("save 1"))
    assert announced(effects).roster == (0, 1, 2) and Arm("trouble 2", "blame_s") in effects
    state, _ = feed(state, Entered(2, 3, 0), Entered(0, 3, 0), TimerFired("follow 3"))
    assert state.evidence == Evidence(overdue=(0,)), "the reader does not enter, either: that it is waited for changes nothing"
    state, _ = feed(state, blocked(2, 3, 1), TimerFired("grace 3"))
    assert state.roster == (0, 1, 2), "the trouble has not lasted"
    _, effects = feed(state, TimerFired("trouble 2"), blocked(2, 4, 1), TimerFired("grace 4"))
    assert Fence(0) in effects and announced(effects).roster == (1, 2)


def test_who_ends_an_overdue_save_while_another_works_is_not_removed_for_it() -> None:
    state, _ = feed(
        started(), ReplicaSaving(0, False), AtWork((1,)), blocked(2, 1, 0), TimerFired("grace 1"), TimerFired("save 1")
    )
    state, _ = feed(state, ReplicaSaving(0, True), TimerFired("trouble 2"), TimerFired("trouble 2 again"))
    assert (state.evidence, state.patience) == (Evidence(), 0)
    for _ in range(5):
        state, effects = one_more_sum(state, 1)
        assert announced(effects).roster == (0, 1, 2)


def test_a_timer_of_an_older_save_does_not_end_the_excuse_of_the_next() -> None:
    state, effects = feed(started(), ReplicaSaving(0, False), ReplicaSaving(0, True), ReplicaSaving(0, False))
    assert effects[-1] == Arm("save 2", "save_s")
    assert feed(state, TimerFired("save 1")) == (state, [])


# --- Replicas at work of their own --------------------------------------------------------------------------------------


def one_more_sum(state: CoordinatorState, *suspects: int) -> tuple[CoordinatorState, list[coordinator.Effect]]:
    """Everybody but the `suspects` waits for these in a sum until its time is over, and all enter the next generation."""
    generation, accusers = state.generation, [each for each in state.roster if each not in suspects]
    said = [ReplicaBlocked(each, generation, "no progress", suspects, True) for each in accusers]
    state, effects = feed(state, *said, TimerFired(f"grace {generation}"))
    entered = [waited(each, state.generation, *(suspects if each in accusers else ())) for each in state.roster]
    return feed(state, *entered)[0], effects


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_inv_9_who_is_at_work_is_waited_for_however_many_sums_run_out(num_replicas: int) -> None:
    """It reads data, compiles, digests its state: its page says so, and its peers cannot know."""
    state, _ = feed(started(num_replicas), AtWork((0, 1)))
    for _ in range(20):
        state, effects = one_more_sum(state, 1)
        assert announced(effects).roster == tuple(range(num_replicas))
        state, effects = feed(state, LASTS, TimerFired("trouble 1 again"))
        assert effects == [], "nothing counts the tries or the time"
    assert (state.evidence, state.waits, state.undecided) == (Evidence(), (), "")
    state, _ = feed(state, AtWork(()), Progressed(0, 1))
    assert feed(state, TimerFired("excuse 2")) == (state, []), "a step was committed"


def test_inv_9_who_is_at_work_for_longer_than_the_deadline_is_removed() -> None:
    state, _ = feed(started(), AtWork((1,)))
    state, effects = one_more_sum(state, 1)
    assert Arm("excuse 2", "deadline_s") in effects
    state, effects = one_more_sum(state, 1)
    assert not [each for each in effects if isinstance(each, Arm) and each.timer.startswith("excuse")], "one time for all"
    state, _ = feed(state, AtWork(()), AtWork((1,)), TimerFired("excuse 2"))
    state, effects = one_more_sum(state, 1)
    assert announced(effects).roster == (0, 1, 2), "one sum is no more evidence now than it ever is"
    state, effects = one_more_sum(feed(state, TimerFired(state.trouble))[0], 1)
    assert Fence(1) in effects and announced(effects).roster == (0, 2)


def test_inv_9_of_two_that_are_at_work_for_longer_than_the_deadline_one_is_removed_after_the_other() -> None:
    """Found by the explorer: who accuses several that are silent is not named, and neither were they."""
    state, _ = feed(started(), AtWork((1, 2)))
    state, _ = one_more_sum(state, 1, 2)
    state, _ = one_more_sum(feed(state, TimerFired("excuse 2"))[0], 1, 2)
    state, effects = one_more_sum(feed(state, TimerFired(state.trouble))[0], 1, 2)
    assert Fence(2) in effects and announced(effects).roster == (0, 1)
    state, effects = one_more_sum(state, 1)
    assert Arm("excuse 5", "deadline_s") in effects, "the other has its time anew"


def test_inv_9_when_work_is_excused_no_more_one_broken_link_still_removes_nobody() -> None:
    """The others may have a disturbance of their own just then; what was held against anybody before is forgotten."""
    for size in (2, 4):
        state, _ = one_more_sum(feed(started(size), AtWork((size - 1,)))[0], size - 1)
        state, _ = feed(state, TimerFired("excuse 2"), blocked(0, 2, 1), blocked(1, 2, 0))
        state, effects = feed(state, TimerFired("grace 2"))
        assert announced(effects).roster == tuple(range(size))


def test_inv_9_two_of_whom_neither_is_known_to_be_at_fault_have_the_same_time_after_an_excuse() -> None:
    state, _ = one_more_sum(feed(started(2), AtWork((1,)))[0], 1)
    state, _ = feed(state, AtWork(()), TimerFired("excuse 2"))
    fired = 0
    for _ in range(20):
        number = state.generation
        state, effects = feed(state, blocked(0, number, 1), blocked(1, number, 0), TimerFired(f"grace {number}"))
        if Fence(1) in effects:
            break
        if state.trouble:
            state, _ = feed(state, TimerFired(state.trouble))
            fired += 1
    assert Fence(1) in effects and fired == 2


def test_inv_9_an_excuse_that_ends_does_not_set_back_how_long_two_have_been_apart() -> None:
    state, _ = one_more_sum(feed(started(2), AtWork((1,)))[0], 1)
    state, _ = feed(state, AtWork(()))
    for number in (2, 3):
        state, _ = feed(state, blocked(0, number, 1), blocked(1, number, 0), TimerFired(f"grace {number}"))
        state, _ = feed(state, TimerFired(state.trouble))
    assert state.roster == (0, 1)
    state, effects = feed(state, TimerFired("excuse 2"), blocked(0, 4, 1), blocked(1, 4, 0), TimerFired("grace 4"))
    assert Fence(1) in effects


def test_inv_9_a_request_that_was_made_before_the_deadline_does_not_excuse_beyond_it() -> None:
    """Found by the explorer: the time for work ends in the grace of a request that was excused when it came."""
    state, _ = one_more_sum(feed(started(2), AtWork((1,)))[0], 1)
    state, _ = feed(state, ReplicaBlocked(0, 2, "no progress", (1,), True), TimerFired("excuse 2"), TimerFired("grace 2"))
    assert feed(state, waited(0, 3, 1))[0].waits == (waits(0, 2, 1),), "its generation is judged"
    state, effects = one_more_sum(feed(state, TimerFired(state.trouble))[0], 1)
    assert Fence(1) in effects and announced(effects).roster == (0,)


def test_inv_9_who_is_at_work_no_more_is_judged_as_ever() -> None:
    """Whose page is torn or absent, whose process is stopped, or who waits itself, is not in the news."""
    state, _ = feed(started(), AtWork((1,)))
    state, _ = one_more_sum(state, 1)
    state, _ = feed(state, AtWork(()))
    state, effects = one_more_sum(state, 1)
    assert Arm("trouble 2", "blame_s") in effects and announced(effects).roster == (0, 1, 2)
    state, effects = one_more_sum(feed(state, TimerFired("trouble 2"))[0], 1)
    assert Fence(1) in effects


def test_a_replica_at_work_that_dies_is_a_loss_at_once() -> None:
    state, _ = feed(started(), AtWork((1,)))
    state, _ = one_more_sum(state, 1)
    state, effects = feed(state, died(1))
    assert Fence(1) in effects and announced(effects).roster == (0, 2)
    state, effects = one_more_sum(state, 2)
    assert Arm("trouble 3", "blame_s") in effects, "the news of a replica that is gone excuse nobody"


def test_nobody_is_blamed_for_waiting_for_one_that_waits_for_one_at_work() -> None:
    """A row of waits: dropping only what is said of the one at work would name the one before it."""
    state, _ = feed(started(), AtWork((2,)))
    for _ in range(5):
        generation = state.generation
        said = (
            ReplicaBlocked(0, generation, "no vote", (1, 2), True),
            ReplicaBlocked(1, generation, "no progress", (2,), True),
        )
        state, effects = feed(state, *said, TimerFired(f"grace {generation}"), LASTS, waited(0, generation + 1, 1, 2))
        assert announced(effects).roster == (0, 1, 2)
    assert (state.evidence, state.waits) == (Evidence(), ())


def test_what_is_reported_late_of_a_wait_for_one_at_work_is_no_evidence() -> None:
    state, _ = feed(started(), AtWork((1,)), blocked(0, 1, 1), TimerFired("grace 1"), AtWork(()))
    state, _ = feed(state, ReplicaBlocked(2, 1, "no progress", (1,), True))
    assert state.evidence == Evidence()


def test_who_is_at_work_and_cannot_enter_is_waited_for_until_the_deadline() -> None:
    """A thread that reads a memory map may hold the interpreter's lock, so that the control thread answers nothing."""
    state, _ = feed(started(), AtWork((1,)), died(2), Entered(0, 2, 0))
    for number in range(20):
        state, effects = feed(state, TimerFired("follow 2"))
        excuse = [Waits((1,), AT_WORK, "deadline_s"), Arm("excuse 2", "deadline_s")] if not number else []
        assert effects == [*excuse, Arm("follow 2", "follow_s")], "it is told once, and not with each timer"
    state, effects = feed(state, TimerFired("excuse 2"), TimerFired("follow 2"))
    assert Fence(1) in effects and announced(effects).roster == (0,)


def waits_of(effects: list[coordinator.Effect]) -> list[tuple[int, ...]]:
    """For whom people are told that the job waits."""
    assert all(effect.limit == "deadline_s" for effect in effects if isinstance(effect, Waits))
    return [effect.replicas for effect in effects if isinstance(effect, Waits)]


def test_of_each_that_is_at_work_is_said_once_that_the_job_waits_for_it() -> None:
    state, told = feed(started(), AtWork((1,)))[0], []
    for number in range(9):
        state, effects = one_more_sum(feed(state, AtWork((1,) if number < 5 else (0, 1)))[0], 1)
        told.append(waits_of(effects))
    assert told == [[(1,)], [], [], [], [], [(0,)], [], [], []]
    state, effects = one_more_sum(feed(state, Progressed(0, 1))[0], 1)
    assert waits_of(effects) == [(0, 1)], "that is another wait"
    state, effects = one_more_sum(feed(state, died(2))[0], 1)
    assert waits_of(effects) == [(0, 1)]


def test_who_was_at_work_when_somebody_asked_is_named_though_its_work_is_over_when_the_grace_is() -> None:
    state, _ = feed(started(), AtWork((1,)), blocked(0, 1, 1), AtWork(()))
    assert waits_of(feed(state, TimerFired("grace 1"))[1]) == [(1,)]


def test_nobody_is_excused_by_work_where_no_member_has_entered_the_generation() -> None:
    """Nobody is late then: the first that enters gives the others the full time, and its timer finds who is at work."""
    state, _ = feed(started(4), AtWork((1,)), died(3))
    state, effects = feed(state, TimerFired("follow 2"))
    reason = "no member has entered generation 2 in time, so none is late: waiting for the first"
    assert effects == [Waits((0, 1, 2), reason), Arm("follow 2", "follow_s")]
    assert state.all_late and not state.excuse
    state, effects = feed(state, Entered(0, 2, 0), TimerFired("follow 2"))
    assert effects == [Arm("follow 2 again", "follow_s")] and state.roster == (0, 1, 2)


def test_who_is_at_work_does_not_keep_one_that_is_not_and_does_not_enter() -> None:
    state, _ = feed(started(4), AtWork((1,)), died(2), Entered(0, 2, 0))
    _, effects = feed(state, TimerFired("follow 2"))
    assert [each for each in effects if isinstance(each, Fence)] == [Fence(3)] and announced(effects).roster == (0, 1)


# --- The end -------------------------------------------------------------------------------------------------------------


def test_the_job_ends_when_all_members_finished() -> None:
    state, effects = feed(started(), ReplicaFinished(0, 0), died(1), ReplicaFinished(2, 0))
    assert ended(effects) == EndJob(0, "training finished")
    assert feed(state, died(0), Hello(0, "same")) == (state, [])


def test_a_finished_replica_is_no_loss() -> None:
    state, effects = feed(started(min_replicas=1), ReplicaFinished(0, 0), died(0))
    assert announced(effects).losses == () and announced(effects).roster == (1, 2)
    _, effects = feed(state, ReplicaFinished(1, 0), ReplicaFinished(2, 0))
    assert ended(effects).exit_code == ExitCode.OK


def test_inv_8_who_does_not_finish_after_another_is_fenced() -> None:
    state, effects = feed(started(), ReplicaFinished(0, 0))
    assert effects == [Arm("finish 0", "finish_s")]
    assert feed(state, TimerFired("finish 1")) == (state, [])
    state, effects = feed(state, ReplicaFinished(2, 0), TimerFired("finish 0"))
    assert effects == [Arm("finish 2", "finish_s"), Fence(1), EndJob(0, "training finished")]
    assert [(loss.replica, loss.kind) for loss in state.losses] == [(1, LossKind.SUSPECTED)]


def test_who_saves_is_not_hurried_by_those_who_have_finished() -> None:
    state, _ = feed(started(), ReplicaFinished(0, 0), ReplicaSaving(1, False))
    assert feed(state, TimerFired("finish 0")) == (state, [Arm("finish 0", "finish_s")])
    _, effects = feed(state, ReplicaSaving(1, True), TimerFired("finish 0"))
    assert Fence(1) in effects


def test_who_finished_and_is_gone_hurries_nobody() -> None:
    state, _ = feed(started(), ReplicaFinished(0, 0), died(0))
    assert feed(state, TimerFired("finish 0")) == (state, [])
    state, _ = feed(started(), ReplicaFinished(0, 0), ReplicaFinished(1, 0), died(0))
    _, effects = feed(state, TimerFired("finish 0"), TimerFired("finish 1"))
    assert effects == [Fence(2), EndJob(0, "training finished")]


def test_an_asked_exit_reaches_all_members_and_gives_its_own_code() -> None:
    state, effects = feed(started(), ExitAsked("SIGTERM"), ExitAsked("SIGTERM"))
    assert announced(effects).requests == ("exit: SIGTERM",)
    code = policy.exit_code(announced(effects).requests)
    _, effects = feed(state, *(ReplicaFinished(replica, code) for replica in range(3)))
    assert ended(effects).exit_code == ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("requests", "code"),
    [
        ((), ExitCode.OK),
        (("checkpoint", request.SAVED), ExitCode.OK),
        (("exit: SIGTERM", request.SAVED), ExitCode.INTERRUPTED),
        (("exit: SIGTERM", request.TOO_FEW), ExitCode.TOO_FEW_REPLICAS),
        ((request.UNSAVED,), ExitCode.UNSAVED),
        (("exit: SIGTERM", request.TOO_FEW, request.UNSAVED), ExitCode.UNSAVED),
    ],
    ids=["nothing", "no exit", "exit", "too few", "unsaved", "all"],
)
def test_of_several_requests_the_one_that_costs_most_gives_the_exit_code(requests: tuple[str, ...], code: ExitCode) -> None:
    for order in (requests, requests[::-1]):
        assert policy.exit_code(order) == code


def test_an_exit_before_the_start_is_immediate() -> None:
    _, effects = feed(CoordinatorState(MembershipSettings(2)), ExitAsked("SIGTERM"))
    assert ended(effects) == EndJob(15, "SIGTERM before training began")


replicas = st.integers(0, 3)
generations = st.integers(0, 6)
inputs = st.one_of(
    st.builds(Hello, replicas, st.just("same")),
    st.builds(lambda replica: ReplicaLost(Loss(replica, LossKind.PROCESS_ENDED)), replicas),
    st.builds(Entered, replicas, generations, st.integers(0, 3)),
    st.builds(ReplicaBlocked, replicas, generations, st.just("stuck"), st.lists(replicas, max_size=2).map(tuple)),
    st.builds(
        lambda name, number: TimerFired(f"{name} {number}"),
        st.sampled_from(["grace", "follow", "finish", "save", "trouble", "excuse"]),
        generations,
    ),
    st.builds(AtWork, st.sets(replicas).map(lambda some: tuple(sorted(some)))),
    st.builds(ReplicaSaving, replicas, st.booleans()),
    st.builds(Diverged, replicas, generations, st.just(0), st.lists(replicas, max_size=1).map(tuple), st.just("")),
    st.builds(Miscounted, replicas, generations, st.integers(0, 2), st.just("")),
    st.builds(ReplicaFailing, replicas, st.just("train 0"), st.sampled_from([(), (0,), (0, 1)]), st.just("NaN")),
    st.builds(ReplicaFinished, replicas, st.just(0)),
    st.just(ExitAsked("SIGTERM")),
)


@given(st.lists(inputs, max_size=40), st.integers(1, 3))
def test_inv_6_there_is_one_history_of_rosters_whatever_comes(messages: list[coordinator.Input], min_replicas: int) -> None:
    state, first = feed(CoordinatorState(MembershipSettings(4, min_replicas)), *(Hello(r, "same") for r in range(4)))
    roster, generation = announced(first).roster, 1
    armed: set[str] = set()
    for message in messages:
        over = state.over
        state, effects = coordinator.step(state, message)
        armed |= {effect.timer for effect in effects if isinstance(effect, Arm)}
        assert not (over and effects), "something follows the end"
        for effect in effects:
            if isinstance(effect, Announce):
                new = effect.generation
                assert new.generation == generation + 1
                assert new.roster and set(new.roster) <= set(roster)
                assert Arm(f"follow {new.generation}", "follow_s") in effects, "a wait without an end (INV-8)"
                assert len(new.roster) >= min_replicas or request.TOO_FEW in new.requests
                gone = set(roster) - set(new.roster)
                assert {Fence(replica) for replica in gone} <= set(effects), "lost but not fenced"
                roster, generation = new.roster, new.generation
            if isinstance(effect, Arm) and effect.timer.startswith("save "):
                assert state.saves[-1].number == int(effect.timer.removeprefix("save "))
        if state.reason and f"grace {generation}" not in armed:
            assert state.saves, "a request that waits for nothing (INV-8)"
        assert state.roster == roster or state.over


@given(st.lists(inputs, max_size=40))
def test_how_a_job_ends_is_not_forgotten_when_the_last_replica_dies(messages: list[coordinator.Input]) -> None:
    """Whatever has happened: then all die, in this order."""
    before, _ = feed(started(4), *messages)
    assume(not before.over)
    _, effects = feed(before, *(died(number) for number in range(4)))
    code = ended(effects).exit_code
    assume(code != ExitCode.POISONED_MICROBATCH)
    assert not before.miscount or code == ExitCode.INVARIANT_VIOLATED
    assert before.miscount or not before.finished or code == ExitCode.OK
    assert before.miscount or before.finished or code == ExitCode.NO_REPLICA_LEFT


def test_a_replica_that_the_job_does_not_have_does_not_count_toward_the_start() -> None:
    """A9: a stray `Hello(99)` made generation 1 with replicas 0, 1 and 99, and the real replica 2 was never admitted."""
    state = CoordinatorState(MembershipSettings(num_replicas=3))
    for replica in (0, 99, 1):
        state, _ = coordinator.step(state, Hello(replica, "f"))
    assert state.generation == 0
    state, effects = coordinator.step(state, Hello(2, "f"))
    assert state.roster == (0, 1, 2) and any(isinstance(effect, coordinator.Announce) for effect in effects)


@given(st.lists(inputs, max_size=40), st.integers(1, 3), st.data())
def test_inv_9_timers_alone_never_remove_the_last_members(
    messages: list[coordinator.Input], num_replicas: int, data: st.DataObject
) -> None:
    """Whatever has happened: from then on nothing comes but timers, those that are armed and any other."""
    state, effects = feed(
        CoordinatorState(MembershipSettings(num_replicas, 1)), *(Hello(r, "same") for r in range(num_replicas)), *messages
    )
    armed = [effect.timer for effect in effects if isinstance(effect, Arm)]
    assume(not state.over)
    for _ in range(data.draw(st.integers(1, 12))):
        newest = f"follow {state.generation}"
        timer = data.draw(st.sampled_from([*armed, newest, f"{newest} again", f"grace {state.generation}"]))
        before = state
        state, effects = coordinator.step(state, TimerFired(timer))
        armed += [effect.timer for effect in effects if isinstance(effect, Arm)]
        assert state.roster, f"{timer} removed {before.roster}"
        finished = {item.replica for item in state.finished}
        is_deadline = timer.startswith("undecided")
        assert not state.over or finished >= set(state.roster) or is_deadline, f"{timer} ended the job of {before.roster}"
        if state.over:
            return


# --- Grants --------------------------------------------------------------------------------------------------------------


def gifts(effects: list[coordinator.Effect]) -> list[Grant]:
    return [effect.grant for effect in effects if isinstance(effect, Give)]


def test_the_writer_has_one_grant_ahead_and_gets_the_next_when_it_has_confirmed() -> None:
    state = started()
    state, effects = feed(state, Named(1, 1), Named(0, 2), Named(0, 0))
    assert gifts(effects) == [], "another replica, and grants that it does not hold"
    state, effects = feed(state, Named(0, 1), Named(0, 1))
    assert gifts(effects) == [Grant(2, 1, 0)], "a repeated confirmation counts once"
    state, effects = feed(state, died(2))
    assert gifts(effects) == [], "the writer and its grant stay"


@pytest.mark.parametrize("end", [FenceConfirmed(0), Named(0, 1), TimerFired("lease 1")], ids=lambda end: type(end).__name__)
def test_after_the_loss_of_the_writer_the_next_grant_waits_for_its_end(end: coordinator.Input) -> None:
    state, effects = feed(started(), FenceConfirmed(0))
    assert gifts(effects) == [], "it lives"
    state, effects = feed(state, died(0))
    assert gifts(effects) == [] and Arm("lease 1", "lapse_s") in effects
    state, effects = feed(state, FenceConfirmed(1), TimerFired("lease 2"))
    assert gifts(effects) == [], "of another replica, and stale"
    state, effects = feed(state, end)
    assert gifts(effects) == [Grant(2, 2, 1)]
    state, effects = feed(state, Named(0, 1), FenceConfirmed(0), TimerFired("lease 1"))
    assert gifts(effects) == [], "what comes later ends nothing of the next writer"


def test_after_the_writer_has_left_the_next_grant_waits_for_its_lease() -> None:
    state, _ = feed(started(), LeaveAsked((0,), "a"))
    state, effects = feed(state, ReplicaLeaving(0, 1))
    assert gifts(effects) == [] and effects[-2:] == [Dismiss(0), Arm("lease 1", "lapse_s")]
    _, effects = feed(state, TimerFired("lease 1"))
    assert gifts(effects) == [Grant(2, 2, 1)]


def test_the_loss_of_a_writer_that_holds_nothing_arms_no_lease() -> None:
    state, _ = feed(started(), died(0))  # its grant stays open, for replica 1 nothing was given
    state, effects = feed(state, died(1))
    assert [effect for effect in effects if isinstance(effect, Arm) and effect.setting == "lapse_s"] == []
    _, effects = feed(state, FenceConfirmed(0))
    assert gifts(effects) == [Grant(2, 3, 2)]
