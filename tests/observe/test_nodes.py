"""The traces of several nodes with wrong clocks: the verdict is that of one trace, and what is missing is said by name."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from megatron_recover import trace
from megatron_recover.observe.follow.tails import Tails
from megatron_recover.observe.history import History
from megatron_recover.observe.summary import summarize
from megatron_recover.observe.verify.check import Verdict, check, describe, violations
from megatron_recover.trace import merging
from tests.observe import node_traces, traces
from tests.observe.node_traces import by_rank, by_replica, split, write
from tests.observe.test_check import BREAKAGES, Events

pytestmark = pytest.mark.timeout(60)
OFFSETS = [(0, 30_000, -30_000), (-30_000, 0, 30_000), (30_000, -30_000, 0)]
UNKNOWN_ORDER = {"a_replica_votes_before_it_holds_everything", "a_rank_votes_before_it_has_digested_its_state"}
"""Breakages in which a leader does not wait for a rank on another node. The leader would have had its report, which carries
the order; without it nothing shows which of the two was first."""
PLACES = pytest.mark.parametrize("place", [by_replica, by_rank], ids=lambda place: place.__name__)


def texts(history: History) -> list[tuple[str, str]]:
    """The violations, without the numbers of lines."""
    return sorted((one.invariant, re.sub(r" \(line \d+\)", "", one.message)) for one in violations(history))


def kinds(history: History) -> set[str]:
    """The invariants that are broken."""
    return {one.invariant for one in violations(history)}


def of(run_dir: Path, events: Sequence[trace.Event], **how: object) -> History:
    return History.read(write(run_dir, split(events, **how)))


@PLACES
@pytest.mark.parametrize("offsets_ms", OFFSETS, ids=str)
@pytest.mark.parametrize("run", [traces.quiet_run, traces.faulty_run, traces.drifting_run, traces.saving_run,
                                 traces.joining_run, traces.granting_run, traces.run_without_a_coordinator,
                                 traces.death_behind_all_sums])  # fmt: skip
def test_valid_traces_of_nodes_whose_clocks_differ_by_a_minute_hold(
    run: Callable[[], traces.Run], offsets_ms: tuple[int, ...], place: node_traces.ByRank, tmp_path: Path
) -> None:
    events = run().events
    history = of(tmp_path, events, place=place, offsets_ms=offsets_ms)
    assert texts(history) == [] and history.node_troubles == []
    whole = History(enumerate(events, start=1))
    mine, theirs = summarize(history), summarize(whole)
    for field in ("steps", "microbatches_lost", "microbatches_redone", "microbatches_wasted", "generations", "replicas_end"):
        assert getattr(mine, field) == getattr(theirs, field)
    assert history.losses() == whole.losses()
    times = {(e.step, e.replica): e.t for _, e in whole.events if isinstance(e, trace.Committed)}
    shown = {(e.step, e.replica): e.t for _, e in history.events if isinstance(e, trace.Committed)}
    assert all(abs(shown[key] - times[key]) < 0.05 for key in times), "one time for all"


@pytest.mark.parametrize("run", [traces.faulty_run, traces.saving_run])
def test_wall_clocks_would_not_do(run: Callable[[], traces.Run], tmp_path: Path) -> None:
    """What the stamps are for: the same traces merged by the hosts' clocks break rules, though nothing was wrong."""
    assert texts(of(tmp_path, run().events, offsets_ms=(0, 30_000, -30_000), hears=False))


@PLACES
@pytest.mark.parametrize(("invariant", "breakage"), BREAKAGES, ids=lambda value: getattr(value, "__name__", value))
def test_each_breakage_is_found_as_in_one_trace(
    invariant: str, breakage: Callable[[Events], int], place: node_traces.ByRank, tmp_path: Path
) -> None:
    """Of two replicas that differ, either may be named as the first, so the texts may differ."""
    events = list(traces.faulty_run().events)
    breakage(events)
    expected = kinds(History(enumerate(events, start=1)))
    offsets_ms = OFFSETS[len(breakage.__name__) % 3]
    found = kinds(of(tmp_path, events, place=place, offsets_ms=offsets_ms))
    if place is by_replica:
        assert invariant in found and found == expected
    elif breakage.__name__ not in UNKNOWN_ORDER:
        assert invariant in found and found >= expected


# --- Orders that no frame implies ------------------------------------------------------------------------------------------


def test_a_rank_that_holds_nothing_of_an_evaluation_may_apply_the_step_before_it_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader, on another node, commits the evaluation without a frame of it. An apply that is missing is found."""
    monkeypatch.setattr(traces, "BUCKET_RANKS", ((0,), (1,), (0,)))
    run = traces.Run()
    run.quiet_step()
    run.step_outside_training("evaluate 1/1", 6)
    events = run.finish().events
    assert kinds(History(enumerate(events, start=1))) == set()
    apart = {"place": lambda replica, rank: 3 if rank else replica, "offsets_ms": (-30_000, -30_000, -30_000, 30_000)}
    assert texts(of(tmp_path, events, **apart)) == []
    late = [e for e in events if not (isinstance(e, trace.Applied) and (e.step, e.replica, e.rank) == (0, 1, 1))]
    assert kinds(of(tmp_path, late, **apart)) == {"INV-2"}


def test_checkpoints_of_two_writers_have_no_order_and_those_of_one_have(tmp_path: Path) -> None:
    """The first one is written in the background and named when its replica has sent its last vote."""
    run = traces.Run()
    for iteration in (1, 2):
        run.quiet_step()
        run.step_outside_training(f"save {iteration}", 0)
    run.add(trace.Checkpoint, replica=0, rank=0, iteration=1, phase="finished")
    run.add(trace.Checkpoint, replica=1, rank=0, iteration=2, phase="finished")
    ahead = (30_000, -30_000, 0)
    assert texts(of(tmp_path, run.finish().events, offsets_ms=ahead)) == []
    run.events.insert(-1, trace.Checkpoint(t=run.t, replica=1, rank=0, iteration=1, phase="finished"))
    assert kinds(of(tmp_path, run.events, offsets_ms=ahead)) == {"INV-6"}


# --- Traces that are not whole ----------------------------------------------------------------------------------------------


def long_run() -> Events:
    """Replica 2 is lost in step 1; four quiet steps follow. A step takes about ten seconds."""
    run = traces.Run()
    run.quiet_step()
    run.step_with_kill_in_backward(2)
    for _ in range(4):
        run.quiet_step()
    return [msgspec.structs.replace(event, t=200 * event.t) for event in run.finish().events]


def verdict_of(run_dir: Path, files: list[list[trace.Event]]) -> Verdict:
    verdict = check(write(run_dir, files))
    assert verdict.holds, describe(verdict)
    assert verdict.is_finished and not verdict.is_whole
    return verdict


def test_whole_traces_of_all_nodes_are_vouched_for(tmp_path: Path) -> None:
    verdict = check(write(tmp_path, split(long_run())))
    assert verdict.holds and verdict.is_whole and verdict.is_finished


def test_a_node_whose_trace_is_absent_is_named_and_only_its_steps_are_not_judged(tmp_path: Path) -> None:
    files = split(long_run())
    del files[2]
    write(tmp_path, [*files, []])
    (tmp_path / "nodes" / "2" / trace.EVENTS_FILE).unlink()
    verdict = check(tmp_path)
    assert verdict.holds and not verdict.is_whole
    named, steps, fences = verdict.not_judged
    assert "node 2 (host-2) is absent" in named and str(tmp_path / "nodes" / "2") in named
    assert "not judged are steps 0 to 2" in steps, "its replica was lost in step 1; one step more may have begun there"
    assert "fenced" in fences


def test_a_node_that_died_is_cut_short_and_later_steps_are_judged(tmp_path: Path) -> None:
    """Its last lines were in memory that died with it: the vote of its replica, and what it had computed."""
    files = split(long_run())
    files[2] = [event for event in files[2] if not isinstance(event, trace.RunFinished | trace.Failure | trace.Fenced)][:-2]
    verdict = verdict_of(tmp_path, files)
    named, steps, _ = verdict.not_judged
    assert "node 2 (host-2) is cut short: it ends after" in named
    assert "not judged are steps 1 to 2" in steps


def test_a_node_whose_ranks_had_written_nothing_yet_is_judged_as_one_without_a_trace(tmp_path: Path) -> None:
    """All its processes died at once, soon after its ranks had joined: its agent had written more than they."""
    files = split(long_run())
    files[2] = [event for event in files[2] if getattr(event, "replica", -1) < 0 and not isinstance(event, trace.RunFinished)]
    late = [event for event in files[0] if event.h is not msgspec.UNSET][-1]
    files[2].append(msgspec.structs.replace(files[2][-1], t=late.t, h=late.h))
    verdict = verdict_of(tmp_path, files)
    assert verdict.holds, verdict.violations


@pytest.mark.parametrize("is_left", [True, False], ids=["cut short", "absent"])
@pytest.mark.parametrize("lost", [(), (7,)], ids=["without ranks", "with ranks"])
def test_of_a_late_node_that_was_lost_nothing_is_missing_unless_it_had_a_rank(
    lost: tuple[int, ...], is_left: bool, tmp_path: Path
) -> None:
    """Its folder is there: it had begun to prepare itself, or node 0 made the folder for a trace that never came."""
    files = split(long_run())
    last = files[0][-2]
    gone = trace.NodeLost(t=last.t, h=last.h, node=3, name="host-3", replicas=lost, detail="it hangs")
    files[0].insert(-1, gone)
    files.append([each for each in files[1] if isinstance(each, trace.NodeStarted)])
    files[3] = [msgspec.structs.replace(each, node=3, name="host-3") for each in files[3]] if is_left else []
    verdict = check(write(tmp_path, files))
    assert verdict.holds and verdict.is_whole is not bool(lost), describe(verdict)
    assert len(History.read(tmp_path).node_troubles) == len(lost)


@pytest.mark.parametrize("kept", [0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_a_trace_that_is_cut_anywhere_breaks_no_rule(kept: float, tmp_path: Path) -> None:
    """The lines of a living node were lost with its disk, say. Nothing that is missing there is held against anybody."""
    for node in (1, 2):
        files = split(long_run(), by_rank)
        files[node] = files[node][: max(1, int(len(files[node]) * kept))]
        verdict_of(tmp_path / str(node), files)


def test_a_damaged_trace_of_a_node_is_named_and_read_up_to_there(tmp_path: Path) -> None:
    run_dir = write(tmp_path, split(long_run()))
    log = run_dir / "nodes" / "1" / trace.EVENTS_FILE
    lines = log.read_bytes().splitlines(keepends=True)
    lines[len(lines) // 2] = b"no event\n"
    log.write_bytes(b"".join(lines))
    verdict = check(run_dir)
    assert verdict.holds and "node 1 (host-1) is damaged after" in verdict.not_judged[0]
    assert f"{log}:{len(lines) // 2 + 1}: " in verdict.not_judged[0]


def test_a_trace_without_the_name_of_its_node_cannot_be_placed_in_time(tmp_path: Path) -> None:
    files = split(long_run())
    files[1] = [event for event in files[1] if not isinstance(event, trace.NodeStarted)]
    assert "node 1 (host-1) lacks its beginning" in verdict_of(tmp_path, files).not_judged[0]


def test_the_trace_of_another_node_in_a_nodes_folder_is_named_and_counts_for_neither(tmp_path: Path) -> None:
    """People copy a trace that is missing by hand (docs/how_to/several_nodes.md)."""
    run_dir = write(tmp_path, split(long_run()))
    wrong = (run_dir / "nodes" / "2" / trace.EVENTS_FILE).read_bytes()
    (run_dir / "nodes" / "1" / trace.EVENTS_FILE).write_bytes(wrong)
    verdict = check(run_dir)
    assert verdict.holds and not verdict.is_whole, describe(verdict)
    assert f"node 1 (host-1) is absent: the trace in {run_dir}/nodes/1 is that of node 2 (host-2)" in verdict.not_judged[0]


def test_a_clock_that_was_refused_leaves_the_order_unknown(tmp_path: Path) -> None:
    files = split(long_run(), offsets_ms=(0, 90_000, 0), hears=False)
    files[0].insert(2, trace.ClockRefused(t=0.5, h=files[0][1].h, replica=-1, rank=0, ahead_s=90.0))
    verdict = verdict_of(tmp_path, files)
    assert "set the clocks" in verdict.not_judged[0]


def test_a_violation_is_found_beside_a_trace_that_is_cut(tmp_path: Path) -> None:
    events = long_run()
    number = next(
        i for i, each in enumerate(events) if isinstance(each, trace.Applied) and each.step == 4 and each.replica == 1
    )
    events[number] = msgspec.structs.replace(events[number], parameter_digest="drifted")
    files = split(events)
    files[2] = files[2][:-3]
    assert {one.invariant for one in check(write(tmp_path, files)).violations} == {"INV-2"}


# --- The merge --------------------------------------------------------------------------------------------------------------


def test_parts_of_traces_are_merged_as_one_stream_each(tmp_path: Path) -> None:
    run_dir = write(tmp_path, split(long_run()))
    expected = [event for _, event in History.read(run_dir).events]
    folder = run_dir / "nodes" / "1"
    lines = (folder / trace.EVENTS_FILE).read_bytes().splitlines(keepends=True)
    (folder / "events.0001.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:20])))
    (folder / trace.EVENTS_FILE).write_bytes(b"".join(lines[20:]))
    assert [event for _, event in History.read(run_dir).events] == expected


def test_every_reading_yields_the_same_events_while_the_traces_grow(tmp_path: Path) -> None:
    files = split(long_run())
    run_dir = write(tmp_path, [events[:-10] for events in files])
    history = History.read(run_dir)
    first = list(history.events)
    write(run_dir, files)
    assert list(history.events) == first


def test_equal_stamps_are_ordered_by_node_and_lines_keep_the_order_of_their_file(tmp_path: Path) -> None:
    def thawed(node: int, rank: int, stamp: int) -> trace.Event:
        return trace.Thawed(replica=node, rank=rank, h=stamp)

    started = [trace.NodeStarted(node=node, name="x", clock=1000, h=0) for node in range(2)]
    files = [[started[0], thawed(0, 0, 7), thawed(0, 1, 3)], [started[1], thawed(1, 0, 7), thawed(1, 1, 9)]]
    merged = merging.MergedTrace(merging.folders(write(tmp_path, files)))
    found = [(e.replica, e.rank) for _, e in merged.first_pass(lambda line, text: None) if isinstance(e, trace.Thawed)]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert merged.places([3, 4]) == {3: (0, 2), 4: (0, 3)}


def test_a_run_of_one_node_is_read_as_ever(tmp_path: Path) -> None:
    run_dir = traces.write(tmp_path, long_run())
    (run_dir / "run.json").write_bytes(b'{"nodes":[{"number":0,"name":"a"}]}')
    history = History.read(run_dir)
    assert not history.is_merged and check(run_dir).is_whole


def test_a_live_reader_follows_all_nodes_with_one_time(tmp_path: Path) -> None:
    files = split(long_run(), offsets_ms=(-30_000, 30_000, 0))
    tails, found = Tails(tmp_path / trace.EVENTS_FILE), []
    for share in (0.0, 0.3, 0.6, 1.0):
        write(tmp_path, [events[: int(len(events) * share)] for events in files])
        found += [trace.parse(line)[0] for line in tails.lines()]
    commits = [(each.step, each.replica) for each in found if isinstance(each, trace.Committed)]
    assert sorted(commits) == sorted((e.step, e.replica) for e in long_run() if isinstance(e, trace.Committed))
    assert {type(each) for each in found} >= {trace.NodeStarted, trace.RunFinished}
    meant = {(e.step, e.replica): e.t for e in long_run() if isinstance(e, trace.Committed)}
    assert all(abs(each.t - meant[each.step, each.replica]) < 1.0 for each in found if isinstance(each, trace.Committed))


def test_a_live_reader_goes_on_without_a_node_that_cannot_be_read(tmp_path: Path) -> None:
    run_dir = write(tmp_path, split(long_run()))
    (run_dir / "nodes" / "1" / "events.0001.jsonl.gz").write_bytes(b"damaged")
    found = [trace.parse(line)[0] for line in Tails(run_dir / trace.EVENTS_FILE).lines()]
    assert isinstance(found[-1], trace.RunFinished)
