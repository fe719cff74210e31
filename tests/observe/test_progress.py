"""One line about a run: what it says after each event, and the lines that come of a growing file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from megatron_recover import trace
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.observe.follow.progress import RunProgress
from megatron_recover.observe.follow.tail import Tail
from tests.observe import traces


def told(run: traces.Run) -> list[str]:
    progress = RunProgress()
    return [line for event in run.events if (line := progress.take(event)) is not None]  # type: ignore[arg-type]


def test_every_step_is_told_once_with_what_it_ended_as() -> None:
    lines = [line.split(" | ") for line in told(traces.faulty_run())]
    assert [line[0] for line in lines] == [f"train {number}" for number in range(1, 6)]
    assert [line[1] for line in lines] == ["loss 5.0000", "loss 4.9000", "loss 4.8000", "loss 4.7000", "loss 4.6000"]
    assert [line[3:] for line in lines] == [
        ["replicas 3/3", "gen 1", "quotas 2 2 2"],
        ["replicas 2/3", "recoveries 1", "gen 2", "quotas 1 1"],
        ["replicas 2/3", "recoveries 1", "gen 2", "quotas 3 3"],
        ["replicas 1/3", "recoveries 2", "gen 3", "quotas 3"],
        ["replicas 1/3", "recoveries 2", "gen 3", "quotas 6"],
    ]


def test_the_time_of_a_step_is_that_between_two_commits() -> None:
    run = traces.quiet_run(3)
    commits = [event.t for event in run.events if isinstance(event, trace.Committed) and event.replica == 0]
    first = next(event.t for event in run.events if isinstance(event, trace.Plan))
    expected = [commits[0] - first, commits[1] - commits[0], commits[2] - commits[1]]
    assert [line.split(" | ")[2] for line in told(run)] == [f"{1000 * seconds:.0f} ms" for seconds in expected]


def test_a_step_whose_loss_nobody_says_is_told_when_the_next_is_done() -> None:
    run = traces.Run()
    run.quiet_step()
    run.events = [event for event in run.events if not isinstance(event, trace.Applied)]
    run.quiet_step()
    lines = told(run.finish())
    assert [line.split(" | ")[0] for line in lines] == ["train 1", "train 2"]
    assert "loss" not in lines[0] and "loss" in lines[1]


def test_an_evaluation_is_told_and_the_agreement_to_end_is_not() -> None:
    run = traces.Run()
    run.quiet_step()
    run.step_outside_training("evaluate 1/0", 6)
    run.step_outside_training("end 0", 0)
    assert [line.split(" | ")[0] for line in told(run.finish())] == ["train 1", "evaluate 1/0"]


def test_the_number_of_iterations_comes_from_the_command_line() -> None:
    for argv in (("s.py", "--train-iters", "50"), ("s.py", "--train-iters", "7", "--train-iters=50")):
        progress = RunProgress()
        started = traces.quiet_run(1).events[0]
        progress.take(trace.RunStarted(replicas=3, layout=trace.Layout(tp=1, pp=1), determinism="fast", seed=1, argv=argv))
        for event in traces.quiet_run(1).events[1:]:
            progress.take(event)  # type: ignore[arg-type]
        assert isinstance(started, trace.RunStarted) and progress.line().startswith("train 1/50 |")


def test_all_but_long_quotas_fit_a_terminal_of_80_columns() -> None:
    progress = RunProgress()
    for event in traces.faulty_run().events:
        if isinstance(event, trace.RunStarted):
            event = msgspec.structs.replace(event, argv=("s.py", "--train-iters", "50000"))
        progress.take(event)  # type: ignore[arg-type]
    line, quotas = progress.line().replace("train 5/", "train 40000/").split(" | quotas ")
    assert len(line) <= 80 and (line[-5:], quotas) == ("gen 3", "6")


def test_silent_nodes_stand_in_the_line_until_they_are_heard_or_lost() -> None:
    progress = RunProgress(3)
    for node in (1, 2):
        progress.take(trace.NodeSilent(node=node, name=f"n{node}", phase="began", seconds=1.6))
    assert progress.line() == "starting | nothing heard of n1, n2"
    progress.take(trace.NodeSilent(node=1, name="n1", phase="over", seconds=5.0))
    assert progress.line() == "starting | nothing heard of n2"
    progress.take(trace.NodeLost(node=2, name="n2", replicas=(2,), detail="nothing was heard of it for 10.0 s"))
    assert progress.line() == "starting"


def test_a_recovery_stands_in_the_line_until_its_step_is_committed() -> None:
    run = traces.Run()
    run.quiet_step()
    run.step_with_kill_in_backward(2)
    progress = RunProgress()
    seen = []
    for event in run.events:
        progress.take(event)  # type: ignore[arg-type]
        seen.append("recovering from the loss of replica 2" in progress.line())
    begin = next(i for i, event in enumerate(run.events) if isinstance(event, trace.Generation) and event.losses)
    end = next(i for i, event in enumerate(run.events) if isinstance(event, trace.Committed) and event.step == 1)
    assert seen == [begin <= i < end for i in range(len(run.events))]


def test_a_request_to_end_is_no_recovery_and_many_quotas_are_a_range() -> None:
    progress = RunProgress()
    roster = tuple(range(20))
    lost = (trace.Loss(replica=20, kind=LossKind.PROCESS_ENDED),)
    progress.take(trace.Generation(generation=1, roster=(*roster, 20)))
    progress.take(trace.Generation(generation=2, roster=roster, losses=lost))
    progress.take(trace.Generation(generation=3, roster=roster, reason="exit: SIGTERM"))
    plan = {"replica": 0, "generation": 3, "step": 0, "label": "train 1", "num_microbatches": 50, "roster": roster}
    progress.take(trace.Plan(**plan, quotas=(3,) * 10 + (2,) * 10))  # type: ignore[arg-type]
    assert "recoveries 1 | gen 3 | quotas 2-3" in progress.line() and "ending (SIGTERM)" in progress.line()


def test_who_hangs_is_shown_until_it_is_lost_or_a_step_is_done() -> None:
    progress = RunProgress()
    progress.take(trace.Generation(generation=1, roster=(0, 1, 2)))
    for replica, verdict in ((1, "hung"), (2, "slow")):
        progress.take(
            trace.RankSilent(
                replica=replica, rank=0, verdict=verdict, phase="first_steps", seconds=2.3, step=4, label="train 5",
                microbatches=(3,), state="R",
            )  # type: ignore[arg-type]
        )  # fmt: skip
    assert "replica 1 rank 0 hung in first steps | replica 2 rank 0 slow in first steps" in progress.line()
    progress.take(trace.RankMoved(replica=2, rank=0, step=4))
    assert "slow" not in progress.line() and "replica 1 rank 0 hung" in progress.line()
    progress.take(
        trace.RankSilent(replica=2, rank=0, verdict="slow", phase="backward", seconds=2.3, step=4, label="train 5", state="R")
    )
    lost = (trace.Loss(replica=1, kind=LossKind.HUNG, detail="rank 0: hung"),)
    progress.take(trace.Generation(generation=2, roster=(0, 2), losses=lost))
    assert "hung" not in progress.line() and "replica 2 rank 0 slow" in progress.line()
    progress.take(
        trace.Committed(
            replica=0,
            generation=2,
            step=4,
            label="train 5",
            digest="x",
            adopted=False,
            versions=(),
        )  # fmt: skip
    )
    assert "slow" not in progress.line()


def test_a_tail_gives_every_line_once_and_only_whole(tmp_path: Path) -> None:
    place = tmp_path / "log"
    tail = Tail(place)
    assert list(tail.lines()) == []
    with open(place, "ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert list(tail.lines()) == [b"one\n"]
        assert list(tail.lines()) == []
        file.write(b"o\r\nthree\n\n")
        assert list(tail.lines()) == [b"two\r\n", b"three\n", b"\n"]
        assert list(tail.lines()) == []


def test_a_trace_without_steps_does_not_leave_a_recovery_on_the_line_for_ever() -> None:
    """With `--trace-level faults` no event says that the step of the loss is committed."""
    for level, is_shown in (("steps", True), ("faults", False)):
        progress = RunProgress()
        for event in traces.faulty_run().events:
            if isinstance(event, trace.RunStarted):
                progress.take(msgspec.structs.replace(event, level=level))
            elif isinstance(event, trace.Generation):
                progress.take(event)
        assert ("recovering from the loss of replica" in progress.line()) == is_shown
