"""The metrics of a run are those of its summary, which is made in another way; their memory does not grow with steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.core.request import exit_for
from megatron_recover.observe.follow.metrics import CAUSES, METRICS, Histogram, RunMetrics
from megatron_recover.observe.history import History
from megatron_recover.observe.summary import summarize
from megatron_recover.observe.work import WorkAccount
from tests.observe import traces
from tests.observe.test_goodput import timed


def of(events: Iterable[trace.Event]) -> dict[str, float | Histogram]:
    """Every value by name and label, after these events."""
    metrics = RunMetrics(began_at=1000.0)
    for event in events:
        metrics.take(event)  # type: ignore[arg-type]
    return {" ".join(filter(None, (one.metric.name, one.label_value))): one.value for one in metrics.samples()}


def count(values: dict[str, float | Histogram], name: str) -> int:
    """The number of values in a histogram."""
    histogram = values[name]
    assert isinstance(histogram, Histogram)
    return [*histogram.cumulative()][-1][1]


RUNS = {
    "quiet": lambda: traces.quiet_run(3), "faulty": traces.faulty_run,
    "deaths in backward": lambda: _deaths(2, 1), "one death of four": lambda: _deaths(3, replicas=4),
}  # fmt: skip


def _deaths(*victims: int, replicas: int = 3) -> traces.Run:
    run = traces.Run(replicas=replicas, microbatches=12)
    run.quiet_step()
    for victim in victims:
        run.step_with_kill_in_backward(victim)
        run.quiet_step()
    return run.finish()


@pytest.mark.parametrize("name", RUNS)
def test_they_are_those_of_the_summary(name: str) -> None:
    """`summary` reads the whole trace twice; the metrics take each event once."""
    run = RUNS[name]()
    summary, values = summarize(History(enumerate(run.events, start=1))), of(run.events)
    assert values["microbatches_lost_total"] == summary.microbatches_lost
    assert values["microbatches_recomputed_total"] == summary.microbatches_redone
    assert sum(values[f"recoveries_total {cause}"] for cause in CAUSES) == summary.generations - 1  # type: ignore[misc]
    assert (values["replicas_configured"], values["replicas_live"]) == (summary.replicas_start, summary.replicas_end)
    assert count(values, "step_seconds train") == summary.steps
    assert (values["generation"], values["last_committed_iteration"]) == (summary.generations, summary.steps)
    totals = [one.total_s for one in summary.recoveries if one.total_s is not None]
    assert count(values, "recovery_seconds") == len(totals)
    assert (values["ended"], values["exit_code"]) == (1, 0)
    if name != "quiet":
        assert summary.microbatches_lost > 0 and summary.microbatches_redone > 0, "this shows nothing"


def test_what_others_hold_complete_is_not_lost_with_a_replica() -> None:
    run = traces.death_behind_all_sums()
    values, work = of(run.events), WorkAccount(History(enumerate(run.events, start=1)))
    assert (values["microbatches_lost_total"], len(work.lost)) == (0, 0)
    assert values["recoveries_total process_ended"] == 1


def test_what_was_never_committed_is_lost_when_the_run_ends() -> None:
    run = traces.Run()
    run.quiet_step()
    dealt = run.deal(range(6))
    run.plan(dealt, traces.BUCKETS)
    for victim in (2, 1):
        run.lose(victim, 0, "forward")
    values, work = of(run.finish(13).events), WorkAccount(History(enumerate(run.events, start=1)))
    assert (values["microbatches_lost_total"], len(work.lost), values["exit_code"]) == (4, 4, 13)


def test_goodput_is_that_of_the_summary_where_undisturbed_steps_come_first() -> None:
    run = traces.Run()
    for _ in range(3):
        run.quiet_step()
    run.step_with_kill_in_backward(2)
    run.quiet_step()
    history = timed(run.finish(), [1.0, 1.2, 1.1, 1.6, 1.5])
    values = of(event for _, event in history.events)
    assert values["lost_to_faults_seconds_total"] == pytest.approx(0.5)
    assert values["goodput_ratio"] == pytest.approx(summarize(history).goodput)
    assert values["step_seconds train"].sum == pytest.approx(6.4)  # type: ignore[union-attr]


def test_a_disturbed_step_waits_for_an_estimate() -> None:
    run = traces.Run()
    run.step_with_kill_in_backward(2)
    run.quiet_step()
    values = of(event for _, event in timed(run.finish(), [2.0, 2.4]).events)
    assert values["lost_to_faults_seconds_total"] == pytest.approx(0.4)


def test_the_bounds_of_a_histogram_are_upper_ones() -> None:
    histogram = Histogram((1.0, 2.5))
    for value in (0.5, 1.0, 1.1, 2.5, 9.0):
        histogram.add(value)
    assert ([*histogram.cumulative()], histogram.sum) == ([("1.0", 2), ("2.5", 4), ("+Inf", 5)], pytest.approx(14.1))


def test_a_recovery_lasts_from_the_first_sign_to_the_last_members_commit() -> None:
    announced = trace.Generation(t=10.0, generation=2, roster=(0, 1), losses=(_loss(2, LossKind.HUNG),))
    phases = [
        trace.Recovery(t=t, replica=replica, generation=2, step=5, phase=phase, seconds=seconds)  # type: ignore[arg-type]
        for t, replica, phase, seconds in [
            (10.1, 0, "detect", 0.5), (10.1, 1, "detect", 0.7), (11.0, 0, "commit", 0.1), (11.4, 1, "commit", 0.1),
        ]
    ]  # fmt: skip
    start = [trace.RunStarted(replicas=3, layout=trace.Layout(tp=1, pp=1), determinism="fast", seed=1, argv=("run",))]
    values = of([*start, announced, *phases])
    assert (count(values, "recovery_seconds"), values["recovery_seconds"].sum) == (1, pytest.approx(1.4 + 0.7))  # type: ignore[union-attr]
    assert values["recoveries_total hung"] == 1
    newer = trace.Generation(t=11.1, generation=3, roster=(0, 1), reason="a broken link")
    interrupted = of([*start, announced, *phases[:3], newer, phases[3]])
    assert (count(interrupted, "recovery_seconds"), interrupted["recoveries_total no_loss"]) == (1, 1)
    asked = trace.Generation(t=11.1, generation=3, roster=(0, 1), reason=exit_for("SIGTERM"))
    assert asked.request is not None and of([*start, announced, asked])["recoveries_total no_loss"] == 0, "no recovery"


def test_saves_count_and_the_durable_iteration_is_the_one_that_was_saved_or_loaded() -> None:
    def saved(phase: str, iteration: int) -> trace.Checkpoint:
        return trace.Checkpoint(replica=0, rank=0, iteration=iteration, phase=phase)  # type: ignore[arg-type]

    start = trace.RunStarted(
        replicas=2, layout=trace.Layout(tp=1, pp=1), determinism="fast", seed=1, min_replicas=2,
        argv=("x", "--save", "c", "--save-interval", "20"),
    )  # fmt: skip
    first = of([start, saved("loaded", 40)])
    assert (first["last_durable_iteration"], first["save_interval_iterations"], first["replicas_min"]) == (40, 20, 2)
    assert (first["ended"], "exit_code" in first, first["last_commit_timestamp_seconds"]) == (0, False, 1000.0)
    phases = [("loaded", 40), ("started", 60), ("failed", 60), ("finished", 80), ("started", 100)]
    then = of([start, *(saved(phase, iteration) for phase, iteration in phases)])
    assert (then["last_durable_iteration"], then["saves_total finished"], then["saves_total failed"]) == (80, 1, 1)
    gap = trace.Gap(replica=0, rank=0, num_events=7, since=0.0)
    assert of([start, gap, gap])["trace_events_lost_total"] == 14
    unsaved = msgspec.structs.replace(start, argv=("x", "--save-interval", "20"))
    assert of([unsaved])["save_interval_iterations"] == 0, "without --save nothing is saved"
    other = msgspec.structs.replace(start, argv=("x", "--save", "c", "--persistent-save-interval", "30"))
    assert of([other])["save_interval_iterations"] == 30


def test_memory_does_not_grow_with_steps_or_generations() -> None:
    """Every container that the metrics reach has as many elements after 400 steps as after 80."""
    run = traces.Run()
    for _ in range(400):
        run.quiet_step()
    metrics, sizes = RunMetrics(), dict[int, int]()
    for event in run.events:
        metrics.take(event)  # type: ignore[arg-type]
        if isinstance(event, trace.Committed) and event.replica == 2:
            sizes[event.step] = sum(1 for _ in reachable(metrics))
    assert sizes[399] == sizes[80] > 50
    for generation in range(2, 400):
        metrics.take(trace.Generation(t=1e3 + generation, generation=generation, roster=(0, 1, 2), reason="a broken link"))
        if generation % 4 == 0:  # a member enters it and commits a step
            step = 400 + generation
            plan = trace.Plan(
                replica=0, generation=generation, step=step, label=f"train {step}", num_microbatches=2, roster=(0, 1, 2),
                quotas=(1, 1, 0), computes=(trace.Compute(microbatches=(0, 1), into=(0,)),),
            )  # fmt: skip
            result = trace.Result(bucket=0, version=generation, checksums=(1,))
            metrics.take(plan)
            metrics.take(
                trace.Committed(
                    replica=0, generation=generation, step=step, label=plan.label, digest="d", adopted=False, versions=(result,)
                )
            )
    assert sum(1 for _ in reachable(metrics)) < sizes[399] + 150


def reachable(thing: object) -> Iterator[object]:
    """Everything that is inside an object of the metrics, however deep."""
    yield thing
    inside: list[object] = [*vars(thing).values()] if hasattr(thing, "__dict__") else []
    if isinstance(thing, dict):
        inside += [each for pair in thing.items() for each in pair]
    elif isinstance(thing, Iterable) and not isinstance(thing, str | bytes):
        inside += [*thing]
    for each in inside:
        yield from reachable(each)


def _loss(replica: int, kind: LossKind) -> trace.Loss:
    return trace.Loss(replica=replica, kind=kind)


def test_names_are_those_that_prometheus_recommends() -> None:
    """https://prometheus.io/docs/practices/naming/: counters end with _total, base units, and no step is a label."""
    for name, metric in METRICS.items():
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert (metric.kind == "histogram") <= name.endswith("_seconds"), name
        assert not any(unit in name for unit in ("_ms", "milli", "minutes", "percent")), name
        assert metric.text.endswith(".") and metric.label in ("", "cause", "result", "kind")


def test_a_fault_between_two_steps_is_counted_but_has_no_seconds() -> None:
    """A leader that has begun no step measures the phases before, and there is nothing to recover."""
    phases = [trace.Recovery(replica=0, generation=2, step=1, phase=phase, seconds=0.1) for phase in ("detect", "agree")]
    lost = trace.Generation(generation=2, roster=(0,), losses=(_loss(1, LossKind.PROCESS_ENDED),))
    values = of([trace.Generation(generation=1, roster=(0, 1)), lost, *phases])
    assert (values["recoveries_total process_ended"], count(values, "recovery_seconds")) == (1, 0)
