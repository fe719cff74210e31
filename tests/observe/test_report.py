"""summary.json, the comparison with a reference run and the plot: numbers that a hand count of the trace confirms."""

from __future__ import annotations

import errno
import json
import math
import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import msgspec
import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_recover import trace
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.host.whole_file import replacing
from megatron_recover.observe import compare as compare_module
from megatron_recover.observe import summary
from megatron_recover.observe.compare import compare
from megatron_recover.observe.history import History
from megatron_recover.observe.report import plot
from megatron_recover.observe.report import writing as report
from megatron_recover.observe.verify.check import check, describe
from megatron_recover.observe.work import WorkAccount, redone_in
from tests.observe import traces

REQUIRED = {
    "steps", "microbatches_per_step", "replicas_start", "replicas_end", "generations", "faults", "recoveries",
    "microbatches_lost", "microbatches_redone", "microbatches_wasted", "replicas_bit_identical",
}  # fmt: skip
REQUIRED_AGAINST = {"loss_max_abs_diff", "param_max_rel_diff", "param_bit_identical"}


def _history(run: traces.Run) -> History:
    return History(enumerate(run.events, start=1))


def test_the_summary_counts_what_a_hand_count_confirms(tmp_path: Path) -> None:
    run_dir = traces.write(tmp_path / "run", traces.faulty_run().events)
    reference = traces.write(tmp_path / "reference", traces.quiet_run().events)
    report.write(run_dir, reference)
    content = json.loads((run_dir / summary.SUMMARY_FILE).read_text())
    assert content.keys() >= REQUIRED | REQUIRED_AGAINST
    assert (content["steps"], content["evaluation_steps"], content["microbatches_per_step"]) == (5, 0, 6)
    assert (content["replicas_start"], content["replicas_end"], content["generations"]) == (3, 1, 3)
    assert [(f["point"], f["replica"], f["rank"], f["label"]) for f in content["faults"]] == [
        ("backward", 2, 1, "train 2"), ("reduce", 0, 0, "train 4"),
    ]  # fmt: skip
    # 6 microbatches: 2 each with three replicas, 3 each with two. Each loss costs the dead replica's share and nothing else.
    assert (content["microbatches_lost"], content["microbatches_redone"], content["microbatches_wasted"]) == (5, 5, 0)
    assert content["replicas_bit_identical"] is True
    assert (content["loss_max_abs_diff"], content["param_max_rel_diff"], content["param_bit_identical"]) == (0.0, 0.0, True)


def test_a_recovery_says_who_was_computing_what() -> None:
    run = traces.Run()
    dealt = run.deal(range(run.num_microbatches))
    run.plan(dealt, traces.BUCKETS)
    run.compute(0, dealt[0][:1], traces.BUCKETS)
    for replica, microbatch in ((0, dealt[0][1]), (2, dealt[2][0])):
        run.add(trace.MicrobatchStarted, **run.where(replica), rank=0, microbatch=microbatch)
    run.lose(2, 1, "forward")
    run.recovered()
    run.compute(0, dealt[1][:1], traces.BUCKETS)  # after the announcement
    (recovery,) = summary.summarize(_history(run)).recoveries
    assert recovery.computing == {0: (dealt[0][1],), 2: (dealt[2][0],)}


def test_a_slow_rank_explains_no_death() -> None:
    run = traces.Run()
    run.quiet_step()
    run.add(trace.Fault, **run.where(1), rank=0, point="compute", kind="slow")
    run.add(trace.Failure, replica=1, rank=0, cause="SIGKILL")
    assert [fault.kind for fault in summary.faults(_history(run))] == ["slow", "external"]


def test_a_recovery_lists_every_phase_of_its_slowest_member(tmp_path: Path) -> None:
    run = traces.faulty_run()
    first, second = summary.summarize(_history(run)).recoveries
    faults = [event.t for event in run.events if isinstance(event, trace.Fault)]
    for one, fault in zip((first, second), faults, strict=True):
        told = [event.t for event in run.events if isinstance(event, trace.Recovery) and event.generation == one.generation]
        assert one.total_s == pytest.approx(max(told) - fault), "from the fault to the last member's commit"
    assert (first.lost_replicas, second.lost_replicas) == ((2,), (0,))
    # The traces' clocks give 0.01 s x phase x (replica + 1); replica 1 is the slowest survivor of both. An injected fault is
    # two events, one millisecond each, before the announcement.
    for one in (first, second):
        phases = (one.agree_s, one.redeal_s, one.recompute_s, one.reduce_s, one.commit_s)
        assert phases == pytest.approx((0.04, 0.06, 0.08, 0.1, 0.12))
        assert one.detect_s == pytest.approx(0.003)


def test_a_replica_that_stood_still_and_went_on_was_detected_from_then_on() -> None:
    run = traces.Run()
    run.quiet_step()
    run.add(trace.Fault, replica=1, rank=0, point="forward", kind="freeze", step=1, microbatch=1, until="generation")
    frozen_at = run.t
    run.t = 5.0
    run.generation += 1
    run.add(trace.Generation, generation=2, roster=run.roster, reason="replica 0: no progress from replicas [1]")
    run.recovered()
    (recovery,) = summary.summarize(_history(run)).recoveries
    assert recovery.detect_s == pytest.approx(5.001 - frozen_at)
    run.t = 9.0
    run.generation += 1
    run.add(trace.Generation, generation=3, roster=run.roster, reason="replica 0: connection closed")
    run.recovered()
    assert summary.summarize(_history(run)).recoveries[1].detect_s == pytest.approx(0.03), "that has another cause"


def test_a_failure_that_nobody_injected_is_a_fault_from_outside() -> None:
    run = traces.faulty_run()
    events = [event for event in run.events if not isinstance(event, trace.Fault)]
    found = summary.faults(History(enumerate(events, start=1)))
    assert [(f.kind, f.replica, f.cause, f.label) for f in found] == [
        ("external", 2, "SIGKILL", "train 2"), ("external", 0, "SIGKILL", "train 4"),
    ]  # fmt: skip


def test_what_was_dealt_again_is_found_in_memory_that_does_not_grow_with_microbatches_times_buckets() -> None:
    plan = trace.Plan(
        replica=0, generation=1, step=0, label="train 1", num_microbatches=1000, roster=(0,), quotas=(1000,),
        computes=(trace.Compute(microbatches=tuple(range(1000)), into=tuple(range(400))),),
    )  # fmt: skip
    again = msgspec.structs.replace(plan, generation=2)
    step = SimpleNamespace(plans=[(1, plan), (2, again)], first_stage_lines={(0, 2): {}}, extended=[], ranks={})
    tracemalloc.start()
    try:
        assert redone_in(step) == []  # type: ignore[arg-type]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000, "a set of 400 buckets takes 33 kB: there is one a deal, not one a microbatch"


def test_what_a_decided_bucket_saved_was_not_lost() -> None:
    """A replica that ends after its share is in a complete result of every bucket has lost nothing."""
    work = WorkAccount(_history(traces.death_behind_all_sums()))
    assert (len(work.lost), len(work.redone), len(work.wasted)) == (0, 0, 0)


def test_replicas_that_drift_are_not_called_identical() -> None:
    run = traces.quiet_run()
    for index, event in enumerate(run.events):
        if isinstance(event, trace.Applied) and event.replica == 1 and event.step == 3:
            run.events[index] = msgspec.structs.replace(event, parameter_digest="other")
    assert summary.summarize(_history(run)).replicas_bit_identical is False
    alone = traces.Run(replicas=1)
    alone.quiet_step()
    assert summary.summarize(_history(alone)).replicas_bit_identical is None, "one replica proves no agreement"


@pytest.mark.parametrize("determinism", ["exact", "fast"])
def test_another_loss_is_measured_and_condemned_only_between_exact_runs(tmp_path: Path, determinism: str) -> None:
    run, reference = traces.faulty_run(determinism), traces.quiet_run(determinism=determinism)
    for index, event in enumerate(run.events):
        if isinstance(event, trace.Applied) and event.loss is not None and event.step == 4:
            run.events[index] = msgspec.structs.replace(event, loss=event.loss + 0.25)
    mine, theirs = traces.write(tmp_path / "run", run.events), traces.write(tmp_path / "reference", reference.events)
    verdict = check(mine, theirs)
    assert verdict.summary.loss_max_abs_diff == pytest.approx(0.25)
    assert verdict.holds == (determinism == "fast"), describe(verdict)


def test_a_run_that_ends_before_its_reference_is_not_proven(tmp_path: Path) -> None:
    mine = traces.write(tmp_path / "run", traces.quiet_run(steps=3).events)
    theirs = traces.write(tmp_path / "reference", traces.quiet_run(steps=5).events)
    verdict = check(mine, theirs)
    assert not verdict.holds
    assert "last steps differ" in describe(verdict)


def test_a_resumed_run_is_compared_where_it_has_steps(tmp_path: Path) -> None:
    run = traces.Run()
    run.step = run.trained = 3
    run.quiet_step()
    run.quiet_step()
    mine = traces.write(tmp_path / "run", run.finish().events)
    theirs = traces.write(tmp_path / "reference", traces.quiet_run(steps=5).events)
    verdict = check(mine, theirs)
    assert verdict.holds, describe(verdict)
    assert (verdict.summary.loss_max_abs_diff, verdict.summary.param_bit_identical) == (0.0, True)
    other = traces.write(tmp_path / "other", traces.quiet_run(steps=2).events)
    assert "no step in common" in describe(check(mine, other))


def _with_checkpoint(run: traces.Run, place: Path, weights: torch.Tensor, name: str = "decoder.weight") -> list[trace.Event]:
    """A run whose last parameters are in a checkpoint as Megatron writes them, optimizer state included."""
    save(
        {name: weights, "optimizer.state": torch.rand(3)},
        storage_writer=FileSystemWriter(place / "iter_0000005"),
        no_dist=True,
    )
    finished = trace.Checkpoint(replica=0, rank=0, iteration=5, phase="finished")
    events: list[trace.Event] = [*run.events[:-1], finished, run.events[-1]]
    started = events[0]
    assert isinstance(started, trace.RunStarted)
    return [msgspec.structs.replace(started, argv=("--save", str(place), "--lr", "1")), *events[1:]]


def test_parameters_that_differ_are_measured_from_the_checkpoints(tmp_path: Path) -> None:
    weights = torch.tensor([4.0, -8.0, 2.0])
    moved = weights + torch.tensor([0.0, 0.0, 0.5])
    reference = traces.quiet_run(determinism="fast")
    theirs = traces.write(tmp_path / "reference", _with_checkpoint(reference, tmp_path / "a", weights))
    run = traces.faulty_run("fast")
    for index, event in enumerate(run.events):
        if isinstance(event, trace.Applied):
            run.events[index] = msgspec.structs.replace(event, parameter_digest=f"other {event.step} {event.rank}")
    mine = traces.write(tmp_path / "run", _with_checkpoint(run, tmp_path / "b", moved))
    comparison = compare(History.read(mine), History.read(theirs), "theirs")
    assert comparison.param_bit_identical is False
    assert comparison.param_max_rel_diff == pytest.approx(0.5 / 8.0)


@pytest.mark.parametrize("victim", [0, 2])
def test_parameters_that_drifted_after_the_last_step_are_not_those_of_the_run(victim: int) -> None:
    """Who has drifted is outvoted when the job agrees on its end, whether it applied the last step first or last."""
    run = traces.quiet_run()
    for index, event in enumerate(run.events):
        if isinstance(event, trace.Applied) and (event.replica, event.step) == (victim, 4):
            run.events[index] = msgspec.structs.replace(event, parameter_digest="drifted")
    lost = trace.Loss(replica=victim, kind=LossKind.DIVERGED, detail="replicas disagree")
    left = tuple(one for one in run.roster if one != victim)
    run.events.insert(-1, trace.Generation(generation=2, roster=left, losses=(lost,), reason="replicas disagree"))
    assert compare(_history(run), _history(traces.quiet_run()), "theirs").param_bit_identical is True


def _without_digests(events: list[trace.Event]) -> list[trace.Event]:
    return [
        msgspec.structs.replace(event, parameter_digest=None) if isinstance(event, trace.Applied) else event for event in events
    ]


@pytest.mark.parametrize("argv", [("--save=PLACE",), ("--save", "elsewhere", "--save", "PLACE")])
def test_the_checkpoint_is_found_as_megatron_reads_the_flag(tmp_path: Path, argv: tuple[str, ...]) -> None:
    run = traces.quiet_run(determinism="fast")
    first, *rest = _without_digests(_with_checkpoint(run, tmp_path / "a", torch.ones(3)))
    given = tuple(word.replace("PLACE", str(tmp_path / "a")) for word in argv)
    history = History(enumerate([msgspec.structs.replace(first, argv=given), *rest], start=1))
    found = compare(history, history, "itself")
    assert (found.param_bit_identical, found.param_max_rel_diff) == (None, 0.0)


@pytest.mark.parametrize(("name", "size"), [("decoder.weight", 4), ("decoder.bias", 3)])
def test_checkpoints_of_two_models_cannot_be_compared(tmp_path: Path, name: str, size: int) -> None:
    run = traces.quiet_run(determinism="fast")
    mine = traces.write(tmp_path / "mine", _without_digests(_with_checkpoint(run, tmp_path / "a", torch.ones(3))))
    theirs = traces.write(tmp_path / "theirs", _without_digests(_with_checkpoint(run, tmp_path / "b", torch.ones(size), name)))
    assert "parameters cannot be compared" in describe(check(mine, theirs))


def test_the_plot_shows_both_curves_and_every_fault(tmp_path: Path) -> None:
    run_dir = traces.write(tmp_path / "run", traces.faulty_run().events)
    reference = traces.write(tmp_path / "reference", traces.quiet_run().events)
    report.write(run_dir, reference)
    svg = (run_dir / plot.PLOT_FILE).read_text()
    ElementTree.fromstring(svg)
    texts = [
        "undisturbed reference", "this run", "kill: replica 2 rank 1", "backward of microbatch 5", "reduce of bucket 1",
        "3 replicas of TP1 x PP2",
    ]  # fmt: skip
    assert [text for text in texts if text not in svg] == []
    again = plot.draw(tmp_path, History.read(run_dir), History.read(reference)).read_text()
    assert again == svg, "the same trace gives the same file"


def test_the_plot_shows_where_replicas_join(tmp_path: Path) -> None:
    svg = plot.draw(tmp_path, History(enumerate(traces.joining_run().events, start=1))).read_text()
    ElementTree.fromstring(svg)
    assert "replica 3 joins" in svg and "in the place of replica 2" in svg
    without = plot.draw(tmp_path, History(enumerate(traces.faulty_run().events, start=1))).read_text()
    assert "joins" not in without


def test_a_file_that_is_made_again_takes_the_place_of_the_old_one_when_it_is_whole(tmp_path: Path) -> None:
    run_dir = traces.write(tmp_path / "run", traces.faulty_run().events)
    old, (files, _) = tmp_path / "old", report.write(run_dir)
    old.mkdir()
    for path in files:
        os.link(path, old / path.name)
    assert report.write(run_dir) == (files, ())
    assert [path.name for path in files if path.samefile(old / path.name)] == [], "written over"
    assert sorted(path.name for path in run_dir.iterdir()) == sorted([trace.EVENTS_FILE, *(path.name for path in files)])
    with pytest.raises(OSError, match="No space left on device: '.*summary.json'"), replacing(files[2]) as file:
        file.write(b"the half of it")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert files[2].read_bytes() == (old / files[2].name).read_bytes() and len(list(run_dir.iterdir())) == 5


def test_a_file_that_is_made_again_through_a_link_leaves_the_link(tmp_path: Path) -> None:
    there, link = tmp_path / "there", tmp_path / "link"
    there.write_text("old")
    link.symlink_to(there)
    with replacing(link) as file:
        file.write(b"new")
    assert link.is_symlink() and there.read_text() == "new"


def test_the_plot_of_a_run_without_any_step_is_empty_but_there(tmp_path: Path) -> None:
    report.write(traces.write(tmp_path, traces.Run().finish(1).events))
    assert (tmp_path / plot.PLOT_FILE).exists()


def test_a_recovery_whose_detection_no_event_tells_has_no_total() -> None:
    run = traces.faulty_run()
    untold = [each for each in run.events if not isinstance(each, trace.Fault) and getattr(each, "phase", "") != "detect"]
    for one in summary.summarize(History(enumerate(untold, start=1))).recoveries:
        assert (one.total_s, one.detect_s) == (None, None) and one.commit_s is not None


def test_a_loss_that_is_no_number_is_the_largest_difference() -> None:
    difference = compare_module._loss_difference({"train 1": float("nan"), "train 2": 3.0}, {"train 1": 1.0, "train 2": 1.0})
    assert difference is not None and math.isnan(difference)
    assert compare_module._loss_difference({"train 2": 3.0}, {"train 2": 1.0}) == 2.0
