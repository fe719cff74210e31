"""Whether ranks work, wait, hang or are stopped: every rule of `core/detector.py`, and that it accuses nobody falsely."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from megatron_recover.core import detector
from megatron_recover.core.detector_state import DetectorState, Limits
from megatron_recover.core.progress import COMPUTES, LEANS_ON_OTHERS, WAITS, Phase, Progress
from megatron_recover.core.verdict import Condemned, Effect, Look, Named, SeenAtWork, Sight, Verdict
from tests.core.hang_world import AFTER_WORK_S, DEADLINE_S, GAP_S, HUNG_S, STOPPED_S, Watched, drive, lognormal_steps

LOOK_S = 0.1
"""As the agent looks (`cluster/launcher.py`)."""

IN_A_PASS = COMPUTES | {Phase.DATA, Phase.COMPILING, Phase.PIPELINE, Phase.REDUCTION}
"""Phases in which a page names microbatches; on a device they may still be in work when their sum begins."""


def page(phase: Phase, begun: int, *, step: int = 20, label: str = "") -> Progress:
    return Progress(1, step, label or f"train {step + 1}", phase, (3,) if phase in IN_A_PASS else (), begun, begun - 1, 0)


def trained(
    step_s: float = 0.4, phase: Phase = Phase.FORWARD, replicas: int = 2, deadline_s: float = DEADLINE_S
) -> tuple[Watched, float]:
    """A job whose replicas have done 20 steps of `step_s` seconds, each one operation of `phase` and a wait."""
    watched, now_s, begun = Watched(deadline_s), 0.0, 0
    for step in range(20):
        for doing in (phase, Phase.REDUCTION):
            begun += 1
            for _ in range(max(1, round(step_s / 2 / LOOK_S))):
                now_s += LOOK_S
                watched.look(now_s, [Sight(each, 0, page(doing, begun, step=step), "R") for each in range(replicas)])
    assert watched.said == []
    return watched, now_s


def silent(
    watched: Watched,
    now_s: float,
    for_s: float,
    phases: dict[int, Phase],
    states: dict[int, str] | None = None,
    *,
    generation: int = 1,
    look_s: float = LOOK_S,
    torn: bool = False,
) -> float:
    """Nobody makes progress for so long; returns the time then."""
    states = states or {}
    for _ in range(math.ceil(for_s / look_s)):
        now_s += look_s
        sights = [
            Sight(replica, 0, None if torn else page(phase, 1000), states.get(replica, "R"))
            for replica, phase in phases.items()
        ]
        watched.look(now_s, sights, generation)
    return now_s


@pytest.mark.parametrize("step_s", [0.1, 0.4, 1.0, 4.0])
def test_an_endless_loop_is_found_within_the_goal_and_charged(step_s: float) -> None:
    watched, now_s = trained(step_s)
    silent(watched, now_s, max(5 * step_s, 3.0) - 0.4, {0: Phase.REDUCTION, 1: Phase.FORWARD})
    [condemned] = watched.condemned
    assert condemned.named.replica == 1 and condemned.named.verdict is Verdict.HUNG
    assert condemned.failing is not None and condemned.failing.witnessed
    assert (condemned.failing.replica, condemned.failing.label, condemned.failing.microbatches) == (1, "train 21", (3,))
    named = [effect.verdict for _, effect in watched.said if isinstance(effect, Named)]
    assert named == [Verdict.SLOW, Verdict.HUNG], "a hang is named before it is ended, once"


@pytest.mark.parametrize("step_s", [0.1, 0.4, 1.0, 4.0])
@pytest.mark.parametrize("phase", [Phase.REDUCTION, Phase.ORDERS, Phase.FORWARD, Phase.SAVE])
def test_a_stopped_process_is_found_within_the_goal_and_charged_with_nothing(step_s: float, phase: Phase) -> None:
    watched, now_s = trained(step_s)
    silent(watched, now_s, max(3 * step_s, 1.0) - 0.2, {0: Phase.REDUCTION, 1: phase}, {1: "T"})
    [condemned] = watched.condemned
    assert condemned.named.verdict is Verdict.STOPPED and condemned.failing is None


def test_a_process_that_is_stopped_at_every_look_and_runs_between_is_not_condemned() -> None:
    """As cpulimit has it, where its period happens to be that of the looks."""
    watched, now_s = trained(0.4)
    for begun in range(1000, 1200):
        now_s += LOOK_S
        watched.look(now_s, [Sight(0, 0, page(Phase.FORWARD, begun), "R"), Sight(1, 0, page(Phase.FORWARD, begun), "T")])
    assert watched.said == []


def test_steps_that_are_shorter_than_the_time_between_two_looks_teach_all_the_same() -> None:
    watched, now_s = Watched(), 0.0
    for step in (0, 4, 9, 12):
        now_s += LOOK_S
        watched.look(now_s, [Sight(replica, 0, page(Phase.ORDERS, 10 * step, step=step), "R") for replica in (0, 1)])
    silent(watched, now_s, 2.6, {0: Phase.ORDERS, 1: Phase.FORWARD})
    assert [each.named.replica for each in watched.condemned] == [1]


def test_a_step_that_a_hang_made_long_does_not_delay_the_discovery_of_the_next_hang() -> None:
    watched, now_s = Watched(), 0.0
    for step in range(20):  # forwards and backwards are too short to be seen; the sixth step waits for a replica that hangs
        for look in range(100 if step == 5 else 4):
            now_s += LOOK_S
            generation = 1 + ((step, look) > (5, 90))
            watched.look(now_s, [Sight(each, 0, page(Phase.REDUCTION, step, step=step), "R") for each in (0, 1)], generation)
    assert watched.condemned == []
    silent(watched, now_s, 2.6, {0: Phase.REDUCTION, 1: Phase.BACKWARD}, generation=2)
    assert [each.named.replica for each in watched.condemned] == [1]


def test_whoever_waits_hangs_never() -> None:
    watched, now_s = trained(replicas=3)
    silent(watched, now_s, 600.0, {0: Phase.REDUCTION, 1: Phase.ORDERS, 2: Phase.PIPELINE})
    assert watched.said == []


@pytest.mark.parametrize("states", [{}, {0: "T"}])
def test_with_one_replica_left_a_hang_is_named_and_ended_only_after_the_deadline(states: dict[int, str]) -> None:
    watched, now_s = trained()
    now_s = silent(watched, now_s, 3.0, {0: Phase.FORWARD}, states)
    assert watched.condemned == []
    assert [effect.verdict for _, effect in watched.said if isinstance(effect, Named)][-1] in (Verdict.HUNG, Verdict.STOPPED)
    now_s = silent(watched, now_s, DEADLINE_S - 10, {0: Phase.FORWARD}, states, look_s=GAP_S)
    assert watched.condemned == []
    silent(watched, now_s, 20.0, {0: Phase.FORWARD}, states, look_s=GAP_S)
    assert [each.named.replica for each in watched.condemned] == [0]


def waits(
    watched: Watched, now_s: float, for_s: float, first: Phase, second: Phase, state: str = "S", *, look_s: float = LOOK_S
) -> float:
    """The only replica has two ranks that are silent in these phases for so long; returns the time then."""
    for _ in range(math.ceil(for_s / look_s)):
        now_s += look_s
        watched.look(now_s, [Sight(0, 0, page(first, 1000), "S"), Sight(0, 1, page(second, 1000), state)])
    return now_s


def named_as_hung(watched: Watched) -> list[int]:
    """The ranks, in the order in which they were named."""
    return [effect.rank for _, effect in watched.said if isinstance(effect, Named) and effect.verdict is Verdict.HUNG]


@pytest.mark.parametrize("other", sorted(WAITS))
def test_a_device_of_the_last_replica_that_never_answers_is_named_and_ended_after_the_deadline(other: Phase) -> None:
    """Its kernels are launched, so that the pages show waits; nobody misses the replica in a sum."""
    watched, now_s = trained(phase=Phase.PIPELINE, replicas=1)
    now_s = waits(watched, now_s, HUNG_S + 0.3, Phase.REDUCTION, other)
    assert named_as_hung(watched) == ([0] if other is Phase.ORDERS else [0, 1]) and watched.condemned == []
    now_s = waits(watched, now_s, DEADLINE_S - 10, Phase.REDUCTION, other, look_s=GAP_S)
    assert watched.condemned == []
    waits(watched, now_s, 20.0, Phase.REDUCTION, other, look_s=GAP_S)
    [condemned] = watched.condemned
    assert condemned.failing is None, "no microbatch is known to have caused it"


def test_the_last_replica_waits_for_itself_from_when_the_last_of_its_ranks_waits() -> None:
    watched, now_s = trained(phase=Phase.PIPELINE, replicas=1)
    now_s = waits(watched, now_s, 60.0, Phase.REDUCTION, Phase.BETWEEN)
    assert 0 not in named_as_hung(watched), "a rank at work keeps the other waiting"
    now_s = waits(watched, now_s, HUNG_S - 0.3, Phase.REDUCTION, Phase.PIPELINE)
    assert 0 not in named_as_hung(watched), "the time of the rank at work was laid on the one that waited"
    now_s = waits(watched, now_s, 0.6, Phase.REDUCTION, Phase.PIPELINE)
    assert named_as_hung(watched)[-2:] == [0, 1]


def test_the_last_replica_is_not_judged_by_the_waits_of_a_job_with_more() -> None:
    """It computes what many have computed, and its steps are that much longer."""
    watched, now_s = trained(phase=Phase.PIPELINE, replicas=4)
    for _ in range(300):
        now_s += LOOK_S
        watched.look(now_s, [Sight(0, 0, page(Phase.REDUCTION, 1000), "S")], 2)
    assert watched.said == []


def test_the_silence_of_one_rank_of_the_last_replica_is_not_laid_on_the_other() -> None:
    watched, now_s = trained(phase=Phase.PIPELINE, replicas=1)
    now_s = waits(watched, now_s, HUNG_S - 0.3, Phase.OPTIMIZER, Phase.PIPELINE)
    waits(watched, now_s, HUNG_S - 0.3, Phase.REDUCTION, Phase.PIPELINE)
    assert named_as_hung(watched) == []


@pytest.mark.parametrize(
    ("other", "state"), [(Phase.ORDERS, "S"), (Phase.REDUCTION, "T"), (Phase.REDUCTION, "t"), (Phase.REDUCTION, "Z")]
)
def test_the_last_replica_that_waits_for_an_order_or_for_a_process_that_cannot_run_does_not_hang(
    other: Phase, state: str
) -> None:
    watched, now_s = trained(phase=Phase.PIPELINE, replicas=1)
    waits(watched, now_s, DEADLINE_S + 10, other, other, state, look_s=GAP_S)
    assert named_as_hung(watched) == []


def test_a_data_disk_that_stalls_for_all_is_named_and_ends_nobody() -> None:
    watched, now_s = trained(phase=Phase.DATA, replicas=3)
    now_s = silent(watched, now_s, 60.0, dict.fromkeys(range(3), Phase.DATA), dict.fromkeys(range(3), "D"))
    hung = [effect for _, effect in watched.said if isinstance(effect, Named) and effect.verdict is Verdict.HUNG]
    assert [each.replica for each in hung] == [0, 1, 2] and "state D" in str(hung[0])
    assert watched.condemned == []


@pytest.mark.parametrize("state", ["S", "D", "R"])
@pytest.mark.parametrize("phase", sorted(LEANS_ON_OTHERS))
def test_whoever_is_silent_where_all_share_a_disk_is_named_and_fenced_only_after_the_deadline(phase: Phase, state: str) -> None:
    """The stall of a data disk may strike one replica alone: the others had their samples in memory. A copy is state R."""
    watched, now_s = trained(phase=phase, deadline_s=60.0)
    now_s = silent(watched, now_s, 55.0, {0: Phase.REDUCTION, 1: phase}, {1: state}, look_s=GAP_S)
    assert watched.condemned == []
    assert any(isinstance(effect, Named) and effect.verdict is Verdict.HUNG for _, effect in watched.said)
    silent(watched, now_s, 10.0, {0: Phase.REDUCTION, 1: phase}, {1: state}, look_s=GAP_S)
    [condemned] = watched.condemned
    assert condemned.named.replica == 1 and condemned.failing is None


def test_a_save_that_takes_three_times_as_long_as_the_one_before_ends_nobody() -> None:
    """Only the writer saves. Copying into the page cache is state R, waiting for the disk state D."""
    watched, now_s = trained()
    for begun, save_s in ((1000, 1.5), (1001, 4.5)):
        for index in range(round(save_s / LOOK_S)):
            now_s += LOOK_S
            writer = Sight(1, 0, page(Phase.SAVE, begun), "R" if index % 10 == 9 else "D")
            watched.look(now_s, [Sight(0, 0, page(Phase.ORDERS, 1000), "S"), writer])
        now_s += LOOK_S
        watched.look(now_s, [Sight(each, 0, page(Phase.ORDERS, begun + 1), "S") for each in (0, 1)])
    assert watched.condemned == []


def test_four_seconds_of_work_between_two_steps_end_nobody() -> None:
    """Logs, a hook of the script, garbage collection, the digest of all state."""
    watched, now_s = trained(0.5, Phase.BETWEEN)
    silent(watched, now_s, 4.0, {0: Phase.ORDERS, 1: Phase.BETWEEN})
    assert watched.condemned == []


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.EVALUATION])
def test_an_endless_loop_is_fenced_in_every_phase_that_leans_on_nobody(phase: Phase) -> None:
    watched, now_s = trained(phase=phase)
    silent(watched, now_s, 3.0, {0: Phase.REDUCTION, 1: phase})
    [condemned] = watched.condemned
    assert condemned.named.replica == 1 and (condemned.failing is None) is (phase not in COMPUTES)


@pytest.mark.parametrize("phase", sorted(Phase))
def test_whoever_is_held_by_a_tracer_is_named_and_fenced_only_after_the_deadline(phase: Phase) -> None:
    """A debugger, gcore or strace; a rank can be held in whatever it does, a wait for others too."""
    watched, now_s = trained(phase=phase, deadline_s=60.0)
    now_s = silent(watched, now_s, 55.0, {0: Phase.REDUCTION, 1: phase}, {1: "t"}, look_s=GAP_S)
    assert watched.condemned == []
    [named] = [effect for _, effect in watched.said if isinstance(effect, Named)]
    assert named.verdict is Verdict.TRACED and named.seconds < 1.5
    assert "a tracer holds its process" in str(named)
    silent(watched, now_s, 10.0, {0: Phase.REDUCTION, 1: phase}, {1: "t"}, look_s=GAP_S)
    [condemned] = watched.condemned
    assert (condemned.named.replica, condemned.named.verdict, condemned.failing) == (1, Verdict.TRACED, None)


def test_the_time_under_a_tracer_is_no_silence_of_the_rank_or_its_siblings() -> None:
    """When the tracer lets go, nobody is condemned for its time. A loop that goes on is found all the same."""
    watched, now_s = trained()
    for index in range(400):
        now_s += LOOK_S
        sights = [Sight(1, rank, page(Phase.FORWARD, 1000), "t" if rank and index < 200 else "R") for rank in (0, 1)]
        watched.look(now_s, [Sight(0, 0, page(Phase.REDUCTION, 1000), "S"), *sights])
        is_due = index > 200 + 0.9 * HUNG_S / LOOK_S
        assert watched.condemned == [] or is_due, "the tracer's time was laid on the rank or on its sibling"
    [condemned] = watched.condemned
    assert condemned.named.replica == 1 and condemned.failing is not None
    assert condemned.named.seconds == pytest.approx(HUNG_S, abs=2 * LOOK_S)


def test_an_operation_under_a_tracer_raises_no_limit() -> None:
    watched, now_s = trained()
    limit_s = detector.hang_limit_s(watched.state, Phase.FORWARD)
    now_s = silent(watched, now_s, 30.0, {0: Phase.REDUCTION, 1: Phase.FORWARD}, {1: "t"})
    watched.look(now_s + LOOK_S, [Sight(each, 0, page(Phase.REDUCTION, 1001), "R") for each in (0, 1)])
    assert detector.hang_limit_s(watched.state, Phase.FORWARD) == limit_s


def test_nothing_is_known_of_a_phase_that_a_rank_has_only_begun_when_a_tracer_takes_it() -> None:
    watched, now_s = trained()
    for state, for_s in (("R", LOOK_S), ("t", 1.0), ("R", 20.0)):
        now_s = silent(watched, now_s, for_s, {0: Phase.REDUCTION, 1: Phase.DIGEST}, {1: state})
    assert watched.condemned == []


def test_whoever_is_traced_again_and_again_is_named_once() -> None:
    """The agent reports a rank as held until its tracer is gone; that tracer may come back."""
    watched, now_s = trained()
    for index in range(100):
        now_s += LOOK_S
        sights = [Sight(0, 0, page(Phase.REDUCTION, 1000), "S"), Sight(1, 0, page(Phase.FORWARD, 1000), "Rt"[index % 2])]
        watched.look(now_s, sights)
    named = [effect.verdict for _, effect in watched.said if isinstance(effect, Named)]
    assert len(named) == len(set(named)) and Verdict.TRACED in named


def test_a_phase_that_nobody_has_finished_is_judged_by_the_deadline_alone() -> None:
    watched, now_s = trained()
    silent(watched, now_s, DEADLINE_S - 1, {0: Phase.REDUCTION, 1: Phase.COMPILING}, look_s=GAP_S)
    assert watched.condemned == []


def test_nobody_is_judged_before_the_first_generation() -> None:
    watched = Watched(60.0)
    silent(watched, 0.0, 100.0, {0: Phase.LOADING, 1: Phase.LOADING}, generation=0, look_s=GAP_S)
    assert watched.said == []


def test_nobody_is_judged_before_steps_are_known() -> None:
    watched = Watched()
    silent(watched, 0.0, 100.0, {0: Phase.REDUCTION, 1: Phase.FORWARD})
    assert watched.condemned == []


def test_a_new_generation_begins_with_the_figures_before_it_twice() -> None:
    watched, now_s = trained()
    limit_s = detector.hang_limit_s(watched.state, Phase.FORWARD)
    now_s = silent(watched, now_s, LOOK_S, {0: Phase.REDUCTION, 1: Phase.FORWARD}, generation=2)
    assert limit_s is not None and detector.typical_step_s(watched.state) == pytest.approx(0.8, rel=0.1)
    silent(watched, now_s, 2 * limit_s + 0.5, {0: Phase.REDUCTION, 1: Phase.FORWARD}, generation=2)
    assert [each.named.replica for each in watched.condemned] == [1], "a microbatch that hangs one after the other is not found"


def test_generations_that_were_too_short_to_learn_from_do_not_forget_what_was_known() -> None:
    watched, now_s = trained()
    limit_s = detector.hang_limit_s(watched.state, Phase.FORWARD)
    for generation in (2, 3, 4):
        now_s = silent(watched, now_s, LOOK_S, {0: Phase.REDUCTION, 1: Phase.FORWARD}, generation=generation)
    assert limit_s is not None and detector.typical_step_s(watched.state) == pytest.approx(0.8, rel=0.1)
    silent(watched, now_s, 2 * limit_s + 0.5, {0: Phase.REDUCTION, 1: Phase.FORWARD}, generation=4)
    assert [each.named.replica for each in watched.condemned] == [1]


def test_how_long_evaluations_take_says_nothing_of_training_steps() -> None:
    """The step before an evaluation, those of the evaluation, and the first one after it."""
    watched, now_s = trained()
    step_s = detector.typical_step_s(watched.state)
    for step in range(20, 40):
        for _ in range(100):
            now_s += LOOK_S
            doing = page(Phase.EVALUATION, 1000 + step, step=step, label=f"evaluate 20/{step - 19}")
            watched.look(now_s, [Sight(replica, 0, doing, "R") for replica in (0, 1)])
    assert step_s is not None and detector.typical_step_s(watched.state) == step_s


def test_a_page_that_was_never_whole_names_nobody() -> None:
    watched = Watched()
    silent(watched, 0.0, 100.0, {0: Phase.FORWARD, 1: Phase.FORWARD}, {1: "T"}, torn=True)
    assert watched.said == []


def test_a_rank_that_is_stopped_in_the_middle_of_a_write_is_found_all_the_same() -> None:
    watched, now_s = trained()
    for _ in range(20):
        now_s += LOOK_S
        watched.look(now_s, [Sight(0, 0, page(Phase.REDUCTION, 1000), "S"), Sight(1, 0, None, "T")])
    assert [each.named.verdict for each in watched.condemned] == [Verdict.STOPPED]


def test_an_agent_that_was_held_up_itself_accuses_nobody() -> None:
    watched, now_s = trained()
    for begun in range(1000, 1020):  # a machine that is suspended in the middle of a forward, again and again
        sights = [Sight(0, 0, page(Phase.REDUCTION, begun), "R"), Sight(1, 0, page(Phase.FORWARD, begun), "R")]
        for pause_s in (LOOK_S, 100.0, LOOK_S):
            now_s += pause_s
            watched.look(now_s, sights)
    assert watched.said == []


def test_the_stopped_rank_of_a_replica_explains_its_siblings() -> None:
    watched, now_s = trained()
    for _ in range(200):
        now_s += LOOK_S
        watched.look(
            now_s,
            [
                Sight(0, 0, page(Phase.REDUCTION, 1000), "S"),
                Sight(1, 0, page(Phase.FORWARD, 1000), "S"),
                Sight(1, 1, page(Phase.FORWARD, 1000), "T"),
            ],
        )
    [condemned] = watched.condemned
    assert (condemned.named.rank, condemned.named.verdict, condemned.failing) == (1, Verdict.STOPPED, None)


def test_of_two_ranks_that_are_silent_the_one_that_is_stopped_is_named_as_the_cause() -> None:
    """Both are known for long when it is first safe to fence: another replica has gone on."""
    watched, now_s = trained()
    for look in range(200):
        now_s += LOOK_S
        sights = [Sight(1, rank, page(Phase.FORWARD, 1000), "ST"[rank and look > 100]) for rank in (0, 1)]
        watched.look(now_s, [Sight(0, 0, page(Phase.OPTIMIZER, 1000 + max(0, look - 190)), "R"), *sights])
    [condemned] = watched.condemned
    assert (condemned.named.rank, condemned.named.verdict, condemned.failing) == (1, Verdict.STOPPED, None)


@pytest.mark.parametrize("operations", [1, 2, 8])
def test_no_false_alarm_in_steps_of_varying_length_with_a_replica_three_times_slower(operations: int) -> None:
    """The benchmark `hangs` runs 10**6 steps."""
    watched = Watched()
    drive(watched, lognormal_steps(3000, operations, operations=operations), look_s=GAP_S, generation_every=100)
    assert watched.condemned == []


def test_the_simulated_job_shows_a_hang() -> None:
    watched = Watched()
    hang = (30, 1)
    drive(
        watched, lognormal_steps(31, 1), look_s=GAP_S, hang=lambda step, replica: (step, replica) == hang, stop_s=60.0
    )  # fmt: skip
    assert [each.named.replica for each in watched.condemned] == [1]


# --- Ranks of one replica that wait for each other ------------------------------------------------------------------------

LASTS = sorted({*LEANS_ON_OTHERS, Phase.COMPILING})
"""Phases that nothing seen bounds."""
AFTER_A_STEP = (Phase.SAVE, Phase.BETWEEN, Phase.DIGEST)


def siblings(
    watched: Watched, now_s: float, for_s: float, first: Progress | None, second: Progress | None, *, look_s: float = LOOK_S,
    states: tuple[str, str] = ("S", "S"),
) -> float:  # fmt: skip
    """Replica 1 has two ranks that show these pages for so long, and replica 0 waits for it; returns the time then."""
    for _ in range(math.ceil(for_s / look_s)):
        now_s += look_s
        sights = [Sight(1, rank, each, states[rank]) for rank, each in enumerate((first, second))]
        watched.look(now_s, [Sight(0, 0, page(Phase.REDUCTION, 1000), "S"), *sights])
    return now_s


def behind(phase: Phase) -> Progress:
    """The page of a rank in `phase`, of which a sibling that computes may have to wait for the end."""
    return page(phase, 1000, step=19 if phase in AFTER_A_STEP else 20)


@pytest.mark.parametrize("waits_in", [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.EVALUATION])
@pytest.mark.parametrize("phase", LASTS)
def test_who_waits_inside_its_replica_for_a_rank_at_work_is_not_named_learns_nothing_and_is_excused(
    phase: Phase, waits_in: Phase
) -> None:
    """Rank 0 reads samples or compiles; the ranks that share its tensors wait for it in Megatron's own collectives."""
    watched, now_s = trained(phase=waits_in)
    limit_s = detector.hang_limit_s(watched.state, waits_in)
    now_s = siblings(watched, now_s, 45.0, behind(phase), page(waits_in, 1000))
    assert watched.condemned == []
    assert {effect.rank for _, effect in watched.said if isinstance(effect, Named)} <= {0}, "who only waits is named"
    assert watched.at_work == (() if phase is Phase.SAVE else (1,)), "the others may give up on a replica that reads"
    now_s = siblings(watched, now_s, 0.9, page(waits_in, 1001), page(waits_in, 1000))
    siblings(watched, now_s, 1.0, page(Phase.REDUCTION, 1002), page(Phase.REDUCTION, 1001))
    assert watched.condemned == [], "when the data has come, its time is nobody's silence"
    assert detector.hang_limit_s(watched.state, waits_in) == limit_s


def test_a_loop_is_found_as_soon_as_the_rank_that_read_has_gone_on() -> None:
    watched, now_s = trained()
    now_s = siblings(watched, now_s, 30.0, page(Phase.DATA, 1000), page(Phase.FORWARD, 1000))
    siblings(watched, now_s, HUNG_S + 1.0, page(Phase.FORWARD, 1001), page(Phase.FORWARD, 1000))
    [condemned] = watched.condemned
    assert condemned.named.rank == 1 and condemned.failing is not None and condemned.failing.microbatches == (3,)
    assert condemned.named.seconds == pytest.approx(HUNG_S, abs=2 * LOOK_S), "the time of the reader was laid on it"


@pytest.mark.parametrize("reads_on", [False, True])
def test_a_loop_beside_a_rank_that_reads_for_ever_is_named_and_ended_at_the_deadline_and_charged_to_nothing(
    reads_on: bool,
) -> None:
    """`reads_on`: the reader makes progress, so that it is never silent itself."""
    watched, now_s, begun = trained(deadline_s=60.0)[0], 8.0, 1000
    for _ in range(65):
        assert watched.condemned == [] or now_s > 67.0
        begun += reads_on
        now_s = siblings(watched, now_s, 1.0, page(Phase.DATA, begun), page(Phase.FORWARD, 1000))
    named = {(effect.rank, effect.verdict) for _, effect in watched.said if isinstance(effect, Named)}
    assert (1, Verdict.HUNG) in named
    [condemned] = watched.condemned
    assert condemned.named.rank == (1 if reads_on else 0) and condemned.failing is None
    assert ("another rank of its replica" in str(condemned.named)) is reads_on


@pytest.mark.parametrize("phase", [*LEANS_ON_OTHERS - {Phase.LOADING, Phase.BUILDING_DATA}, Phase.DIGEST])
def test_who_is_ahead_of_a_rank_in_a_loop_does_not_excuse_it(phase: Phase) -> None:
    """It has done all that the other could wait for, and may well wait for the other itself: Megatron logs with a barrier."""
    watched, now_s = trained(phase=Phase.OPTIMIZER)
    ahead = page(phase, 1000, step=20 if phase in AFTER_A_STEP else 21)
    siblings(watched, now_s, 3.0, ahead, page(Phase.OPTIMIZER, 1000))
    assert [each.named.rank for each in watched.condemned] == [1]


@pytest.mark.parametrize(("state", "torn"), [("Z", False), ("", False), ("S", True)])
def test_a_reader_that_is_gone_or_cannot_be_read_excuses_no_sibling(state: str, torn: bool) -> None:
    watched, now_s = trained()
    now_s = siblings(watched, now_s, LOOK_S, page(Phase.DATA, 1000), page(Phase.FORWARD, 1000))
    siblings(watched, now_s, 3.0, None if torn else page(Phase.DATA, 1000), page(Phase.FORWARD, 1000), states=(state, "S"))
    assert [each.named.rank for each in watched.condemned] == [1]


def test_a_phase_that_nobody_has_finished_yet_excuses_who_waits_for_it() -> None:
    """The first digest of one rank takes longer than that of the other, which is in the next forward."""
    watched, now_s = trained(deadline_s=300.0)
    siblings(watched, now_s, 100.0, behind(Phase.DIGEST), page(Phase.FORWARD, 1000))
    assert watched.condemned == [] and watched.at_work == (1,)


def test_a_page_that_is_torn_hides_no_wait() -> None:
    watched, now_s = trained()
    now_s = siblings(watched, now_s, LOOK_S, page(Phase.DATA, 1000), page(Phase.FORWARD, 1000))
    siblings(watched, now_s, 5.0, page(Phase.DATA, 1000), None)
    assert watched.condemned == []


def test_a_rank_that_only_waits_excuses_no_sibling() -> None:
    watched, now_s = trained()
    siblings(watched, now_s, 3.0, page(Phase.ORDERS, 1000, step=19), page(Phase.FORWARD, 1000))
    assert [each.named.rank for each in watched.condemned] == [1]


# --- At work -------------------------------------------------------------------------------------------------------------

OWN = [phase for phase in Phase if phase not in (*WAITS, Phase.SAVE)]


@pytest.mark.parametrize("phase", OWN)
def test_who_is_silent_in_a_phase_of_its_own_is_at_work_for_as_long_as_it_is_not_condemned(phase: Phase) -> None:
    watched, now_s = trained(deadline_s=60.0)
    now_s = silent(watched, now_s, AFTER_WORK_S + 2 * LOOK_S, {0: Phase.REDUCTION, 1: phase})
    while not watched.condemned:
        assert now_s < 90.0 and watched.at_work == (1,)
        now_s = silent(watched, now_s, LOOK_S, {0: Phase.REDUCTION, 1: phase})
    now_s = silent(watched, now_s, AFTER_WORK_S + LOOK_S, {0: Phase.REDUCTION, 1: phase})
    assert watched.at_work == (), "one that hangs by the rules of the detector is excused no more"


@pytest.mark.parametrize("phase", [Phase.REDUCTION, Phase.ORDERS, Phase.PIPELINE, Phase.SAVE])
def test_who_waits_or_saves_is_not_at_work(phase: Phase) -> None:
    watched, now_s = trained()
    silent(watched, now_s, 10.0, {0: Phase.REDUCTION, 1: phase})
    assert watched.at_work == ()


@pytest.mark.parametrize(("state", "torn"), [("T", False), ("Z", False), ("", False), ("R", True)])
def test_a_page_that_is_torn_or_whose_process_cannot_run_excuses_nobody(state: str, torn: bool) -> None:
    watched, now_s = trained()
    now_s = silent(watched, now_s, 2.0, {0: Phase.REDUCTION, 1: Phase.DATA})
    assert watched.at_work == (1,)
    silent(watched, now_s, AFTER_WORK_S + 2 * LOOK_S, {0: Phase.REDUCTION, 1: Phase.DATA}, {1: state}, torn=torn)
    assert watched.at_work == ()


@pytest.mark.parametrize("state", ["R", "S", "D", "t"])
def test_who_reads_in_whatever_state_it_can_run_from_is_at_work(state: str) -> None:
    watched, now_s = trained()
    silent(watched, now_s, 20.0, {0: Phase.REDUCTION, 1: Phase.DATA}, {1: state})
    assert watched.at_work == (1,)


def test_one_page_that_is_torn_in_between_changes_nothing() -> None:
    watched, now_s = trained()
    now_s = silent(watched, now_s, 2.0, {0: Phase.REDUCTION, 1: Phase.DATA})
    for _ in range(50):
        now_s = silent(watched, now_s, 0.5, {0: Phase.REDUCTION, 1: Phase.DATA})
        now_s = silent(watched, now_s, LOOK_S, {0: Phase.REDUCTION, 1: Phase.DATA}, torn=True)
        assert watched.at_work == (1,)


def test_a_replica_is_at_work_by_any_of_its_ranks_and_by_none_if_one_is_stopped() -> None:
    watched = Watched()
    for look in range(40):
        sights = [Sight(1, 0, page(Phase.PIPELINE, 5), "S"), Sight(1, 1, page(Phase.DATA, 5), "S")]
        watched.look(look * LOOK_S, sights)
    assert watched.at_work == (1,)
    for look in range(40, 80):
        watched.look(look * LOOK_S, [Sight(1, 0, page(Phase.PIPELINE, 5), "T"), Sight(1, 1, page(Phase.DATA, 5), "S")])
    assert watched.at_work == ()


def test_an_agent_that_stood_still_excuses_nobody_for_what_it_saw_before() -> None:
    watched, now_s = trained()
    now_s = silent(watched, now_s, 5.0, {0: Phase.REDUCTION, 1: Phase.DATA})
    assert watched.at_work == (1,)
    watched.look(now_s + 600.0, [Sight(replica, 0, page(Phase.REDUCTION, 2000), "S") for replica in (0, 1)])
    assert watched.at_work == ()


def test_news_of_work_come_when_they_change_and_at_no_other_time() -> None:
    watched, now_s = trained()
    told = []
    for phase in (Phase.DATA, Phase.REDUCTION, Phase.DATA):
        for _ in range(100):
            now_s += LOOK_S
            effects = watched.look(now_s, [Sight(0, 0, page(Phase.REDUCTION, 9), "S"), Sight(1, 0, page(phase, 9), "S")])
            told += [effect.replicas for effect in effects if isinstance(effect, SeenAtWork)]
    assert told[-3:] == [(1,), (), (1,)] and len(told) <= 4


def test_a_replica_that_is_condemned_is_not_at_work_whatever_it_does_until_it_is_fenced() -> None:
    """Its ranks are given a moment to write their stacks."""
    watched, now_s = trained()
    now_s = silent(watched, now_s, 3.0, {0: Phase.REDUCTION, 1: Phase.FORWARD})
    assert [each.named.replica for each in watched.condemned] == [1]
    for begun in range(2000, 2060):
        now_s += LOOK_S
        watched.look(now_s, [Sight(0, 0, page(Phase.REDUCTION, 1000), "S"), Sight(1, 0, page(Phase.FORWARD, begun), "R")])
    assert watched.at_work == ()


def test_a_compilation_is_not_judged_by_how_long_another_took() -> None:
    """The first graphs compile in half a second, the next one takes two minutes; an endless one costs the deadline."""
    watched, now_s = trained(phase=Phase.COMPILING, deadline_s=300.0)
    now_s = silent(watched, now_s, 120.0, {0: Phase.REDUCTION, 1: Phase.COMPILING})
    assert watched.condemned == [] and watched.at_work == (1,)
    silent(watched, now_s, 200.0, {0: Phase.REDUCTION, 1: Phase.COMPILING})
    assert [each.named.replica for each in watched.condemned] == [1]


# --- The state digest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest_s", [30.0, 200.0])
def test_a_digest_that_takes_far_longer_than_a_step_is_no_hang_and_one_that_never_ends_is(digest_s: float) -> None:
    """R=2: the other replica waits for it in the sums of the step that follows."""
    watched, now_s = trained(deadline_s=1800.0)
    for begun in (2000, 3000):
        for _ in range(math.ceil(digest_s / LOOK_S)):
            now_s += LOOK_S
            watched.look(now_s, [Sight(0, 0, page(Phase.REDUCTION, begun), "S"), Sight(1, 0, page(Phase.DIGEST, begun), "R")])
        assert watched.said == [] and watched.at_work == (1,), "nobody is told of a hang"
        for _ in range(10):
            now_s += LOOK_S
            watched.look(now_s, [Sight(each, 0, page(Phase.REDUCTION, begun + 1), "S") for each in (0, 1)])
    silent(watched, now_s, 2.0 * digest_s + 5.0, {0: Phase.REDUCTION, 1: Phase.DIGEST})
    assert [each.named.replica for each in watched.condemned] == [1]


@pytest.mark.parametrize(("looks_of_a_reading", "most"), [(0, 0.0), (1, 2 * LOOK_S), (3, 16 * 3 * LOOK_S)])
def test_only_readings_longer_than_a_look_delay_that_a_hang_is_found(looks_of_a_reading: int, most: float) -> None:
    """A training thread in an endless loop leaves the lock to the reading thread, which reads 16 batches in a row."""
    found = []
    for reads in (False, True):
        watched, begun_s = trained()
        now_s, number = begun_s, 0
        while not watched.condemned and now_s < begun_s + 60:
            now_s, number = now_s + LOOK_S, number + 1
            reading = number // max(1, looks_of_a_reading) if reads and looks_of_a_reading else None
            computing = replace(page(Phase.BACKWARD, 1000), ahead=reading if reading is not None and reading < 16 else None)
            watched.look(now_s, [Sight(0, 0, page(Phase.REDUCTION, 1000), "S"), Sight(1, 0, computing, "R")])
        found.append(now_s - begun_s)
        assert [each.named.phase for each in watched.condemned] == [Phase.BACKWARD]
    assert found[0] <= found[1] <= found[0] + most + LOOK_S


@pytest.mark.parametrize("reading", [0, 7])
@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.PIPELINE])
def test_a_rank_whose_reading_thread_stalls_is_named_as_reading_and_not_condemned(phase: Phase, reading: int) -> None:
    """The reading thread may hold the interpreter's lock while it waits for a disk: then nothing of the rank moves.

    A sibling waits for the rank inside a forward.
    """
    watched, now_s = trained()

    def stuck(at_s: float, until_s: float, ahead: int | None, doing: Phase) -> float:
        while at_s < until_s:
            at_s += LOOK_S
            computing = replace(page(doing, 1000), ahead=ahead)
            sights = [Sight(1, 0, computing, "D"), Sight(1, 1, page(Phase.FORWARD, 1000), "S")]
            watched.look(at_s, [Sight(0, 0, page(Phase.REDUCTION, 1000), "S"), *sights])
        return at_s

    now_s = stuck(now_s, now_s + 60.0, reading, phase)
    named = [effect for _, effect in watched.said if isinstance(effect, Named)]
    assert {(each.replica, each.rank, each.phase, each.microbatches) for each in named} == {(1, 0, Phase.DATA, (reading,))}
    assert named[-1].verdict is Verdict.HUNG and watched.condemned == []
    assert watched.at_work == (1,), "others wait for it in a sum"
    if phase is Phase.PIPELINE:
        return
    stuck(now_s, now_s + 3.0, None, phase)  # its reading is over, and it still does nothing
    [condemned] = watched.condemned
    assert condemned.named.replica == 1 and condemned.named.phase is Phase.BACKWARD
    assert condemned.failing is not None and condemned.failing.microbatches == (3,)


def test_a_reading_that_one_look_sees_is_no_work() -> None:
    """It may have ended right after the look; others that wait for the replica would be told to wait on."""
    watched, now_s = trained()
    now_s = silent(watched, now_s, AFTER_WORK_S + 1.0, dict.fromkeys(range(2), Phase.PIPELINE))
    assert watched.at_work == ()
    for number in range(20):
        now_s += LOOK_S
        sights = [Sight(each, 0, replace(page(Phase.PIPELINE, 1000), ahead=number), "S") for each in (0, 1)]
        watched.look(now_s, sights)
        assert watched.at_work == ()


def test_of_two_readings_of_a_rank_the_one_that_is_due_is_named() -> None:
    """Its training thread reads microbatch 3, and another thread reads microbatch 7 ahead."""
    watched, now_s = trained()
    for _ in range(100):
        now_s += LOOK_S
        reading = replace(page(Phase.DATA, 1000), ahead=7)
        watched.look(now_s, [Sight(0, 0, page(Phase.REDUCTION, 1000), "S"), Sight(1, 0, reading, "D")])
    assert {effect.microbatches for _, effect in watched.said if isinstance(effect, Named)} <= {(3,)}


def newcomers(for_s: float, phases: dict[int, Phase], states: dict[int, str]) -> tuple[tuple[float, Effect], ...]:
    """What is said of newcomers, outside the roster, that make no progress for so long, and when."""
    state, said, now_s = DetectorState(Limits(DEADLINE_S, GAP_S, STOPPED_S, HUNG_S, AFTER_WORK_S)), [], 0.0
    while now_s < for_s:
        now_s += LOOK_S
        sights = tuple(Sight(replica, 0, page(phase, 1000), states.get(replica, "R")) for replica, phase in phases.items())
        state, effects = detector.step(state, Look(now_s, 1, sights, are_newcomers=True))
        said += [(now_s, effect) for effect in effects]
    return tuple(said)


def test_a_newcomer_that_is_stopped_is_condemned_at_once_although_nobody_else_lives() -> None:
    said = newcomers(5.0, {7: Phase.LOADING}, {7: "T"})
    [condemned] = [(now_s, effect) for now_s, effect in said if isinstance(effect, Condemned)]
    assert condemned[0] < STOPPED_S + 3 * LOOK_S and condemned[1].named.verdict is Verdict.STOPPED
    assert not any(isinstance(effect, SeenAtWork) for _, effect in said)


def test_a_newcomer_that_works_for_long_has_until_the_deadline_and_is_no_excuse() -> None:
    assert newcomers(DEADLINE_S / 3, {7: Phase.LOADING, 8: Phase.FORWARD}, {}) == ()
    said = newcomers(1.1 * DEADLINE_S, {7: Phase.LOADING, 8: Phase.FORWARD}, {})
    assert [effect.named.replica for _, effect in said if isinstance(effect, Condemned)] == [7, 8]
    assert not any(isinstance(effect, SeenAtWork) for _, effect in said)
