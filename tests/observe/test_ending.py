"""The lines at the end of a run, and the table of exit codes in the documents, say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recover import trace
from megatron_recover.core.exit_code import GOES_ON_ELSEWHERE, ExitCode
from megatron_recover.observe import ending
from megatron_recover.observe.ending import ENDINGS, KILLED, Account

DOCS = Path(__file__).parents[2] / "docs"


def account(*events: trace.Event, argv: tuple[str, ...] = ("--save", "X", "--load", "X")) -> Account:
    started = trace.RunStarted(
        replicas=3, layout=trace.Layout(tp=1, pp=1), determinism="fast", seed=1, argv=("script.py", *argv)
    )
    made = Account(replicas=3, run_dir="runs/a b")
    for event in (started, saved(0, "loaded"), trace.Generation(generation=1, roster=tuple(range(3))), *events):
        made.take(event)
    return made


def saved(iteration: int, phase: str = "finished") -> trace.Checkpoint:
    return trace.Checkpoint(replica=0, rank=0, iteration=iteration, phase=phase)  # type: ignore[arg-type]


KILL = trace.Failure(replica=1, rank=0, cause="SIGKILL")


def test_the_table_in_the_documents_is_made_of_what_runs_say() -> None:
    text = (DOCS / "reference" / "exit_codes.md").read_text()
    expected = "\n".join(ending.table())
    assert f"\n{expected}\n\n" in text, f"replace the table of docs/reference/exit_codes.md by:\n{expected}"


def test_every_exit_code_is_in_the_table_and_says_what_to_do() -> None:
    assert set(ENDINGS) == {*ExitCode, KILLED}
    assert all(each.meaning and each.next for each in ENDINGS.values())


@pytest.mark.parametrize("code", [*(code for code in ExitCode if code is not ExitCode.OK), 130, 137])
def test_a_run_that_did_not_end_well_says_code_reason_state_and_what_to_do_next(code: int) -> None:
    first, second, last = account(KILL, saved(40)).lines(code, "because of that")
    assert first == f"exit code {code} ({ExitCode.words(code)}): because of that"
    assert second == "2 of 3 replicas left, 1 loss; newest checkpoint: iteration 40 in X; trace and logs are in runs/a b"
    assert (
        last.startswith("next: ")
        and ("give the same command with a new --run-dir" in last) == ENDINGS.get(code, ENDINGS[KILLED]).can_go_on
    )
    assert "RUN_DIR" not in last
    is_marked = code in ending.STOPS and ENDINGS[code].can_go_on
    assert ("First remove the mark: rm X/STOP. To resume, " in last) == is_marked


def test_a_node_that_does_not_see_what_the_writer_saves_names_the_tracker_and_no_iteration() -> None:
    argv = ("script.py", "--save", "X", "--load", "X")
    started = trace.RunStarted(replicas=2, layout=trace.Layout(tp=1, pp=1), determinism="fast", seed=1, argv=argv)
    first, second = Account(replicas=2, run_dir="r", here=(0,)), Account(replicas=2, run_dir="r/nodes/1", here=(1,))
    tracker = "X/latest_checkpointed_iteration.txt names the newest checkpoint, if there is any"
    for event in (started, trace.Generation(generation=1, roster=(0, 1))):
        first.take(event)
        second.take(event)
    first.take(saved(20))
    assert "newest checkpoint: iteration 20 in X" in first.lines(ExitCode.INTERRUPTED, "")[1]
    _, state, todo = second.lines(ExitCode.INTERRUPTED, "")
    assert tracker in state and "begins anew" not in todo
    for each in (first, second):
        each.take(trace.Generation(generation=2, roster=(1,), losses=(trace.Loss(replica=0, kind="process ended", detail=""),)))
    second.take(saved(40))
    assert "newest checkpoint: iteration 40 in X" in second.lines(ExitCode.INTERRUPTED, "")[1]
    assert tracker in first.lines(ExitCode.INTERRUPTED, "")[1], "the writer is on the other node now"


@pytest.mark.parametrize("code", [ExitCode.BAD_INPUT, ExitCode.INTERRUPTED, 130, 143])
def test_a_run_that_left_nothing_is_one_line(code: int) -> None:
    """Its run directory is removed, so there is nothing to read or to report."""
    lines = Account(replicas=3, run_dir="runs/a b").lines(code, "because of that")
    assert lines == [f"exit code {code} ({ExitCode.words(code)}): because of that"]


def test_a_node_that_leaves_a_job_is_not_told_to_resume_what_goes_on() -> None:
    *_, last = account().lines(ExitCode.INTERRUPTED, f"SIGTERM; {GOES_ON_ELSEWHERE}")
    assert last.startswith("next: nothing; `megatron-recover status`") and "resume" not in last


def test_a_run_that_ended_well_needs_nothing() -> None:
    assert account().lines(0, "training finished") == [
        "exit code 0 (ok): training finished",
        "3 of 3 replicas left, no losses; no checkpoint: nothing was saved to X yet; trace and logs are in runs/a b",
    ]


def test_losses_are_counted_once_however_they_are_told() -> None:
    lost = trace.Generation(generation=2, roster=(0, 2), losses=(trace.Loss(replica=1, kind="exception"),))  # type: ignore[arg-type]
    fenced = trace.Fenced(replica=1, ranks=(0, 1))
    of_others = [trace.Failure(replica=replica, rank=1, cause="SIGKILL") for replica in (0, 2)]
    _, second, _ = account(KILL, lost, fenced, *of_others).lines(ExitCode.NO_REPLICA_LEFT, "no replica is left")
    assert second.startswith("0 of 3 replicas left, 3 losses; ")


@pytest.mark.parametrize(
    ("argv", "events", "checkpoint", "remedy"),
    [
        ((), (), "no checkpoint: --save was not set", "begins anew"),
        (("--save", "X"), (), "no checkpoint: nothing was saved to X yet", "begins anew"),
        (("--save", "X"), (saved(9),), "iteration 9 in X", "--run-dir and --load X: it goes on after iteration 9"),
        (("--save", "X", "--load", "X/"), (saved(5), saved(9)), "iteration 9 in X", "--run-dir: it goes on after iteration 9"),
        (("--load", "X"), (saved(40, "loaded"),), "newest checkpoint: iteration 40 in X", "goes on after iteration 40"),
        (("--save", "Y", "--load", "X"), (saved(40, "loaded"),), "iteration 40 in X", "goes on after iteration 40"),
        (("--save", "X", "--load", "X"), (saved(0, "loaded"), saved(5, "failed")), "nothing was saved to X yet", "begins anew"),
    ],
)  # fmt: skip
def test_what_a_resume_finds_is_said(
    argv: tuple[str, ...], events: tuple[trace.Event, ...], checkpoint: str, remedy: str
) -> None:
    _, second, last = account(*events, argv=argv).lines(ExitCode.NO_REPLICA_LEFT, "no replica is left")
    assert checkpoint in second and remedy in last


def test_where_events_of_ranks_are_not_known_the_tracker_is_named() -> None:
    made = account()
    made.is_complete = False
    _, second, last = made.lines(ExitCode.FAILED, "a defect")
    assert "X/latest_checkpointed_iteration.txt names the newest checkpoint" in second and "begins anew" not in last


def test_of_a_run_that_ended_before_it_had_loaded_nothing_is_claimed() -> None:
    made = account()
    made.loaded = None
    _, second, last = made.lines(ExitCode.FAILED, "a defect")
    assert "X/latest_checkpointed_iteration.txt names the newest checkpoint, if there is any" in second
    assert "give the same command with a new --run-dir" in last and "begins anew" not in last


def test_a_run_that_fine_tunes_resumes_from_what_it_has_saved_alone() -> None:
    """As it was, the folder of the model was said to name the newest checkpoint, and the same command to resume."""
    argv, tracker = ("--save", "Y", "--load", "X", "--finetune"), "latest_checkpointed_iteration.txt"
    made = account(argv=argv)
    made.loaded = None  # no replica records it then
    _, second, last = made.lines(ExitCode.FAILED, "a defect")
    assert "no checkpoint: nothing was saved to Y yet" in second
    assert "the same command, with a new --run-dir, begins anew" in last
    made.is_complete = False
    _, second, last = made.lines(ExitCode.FAILED, "a defect")
    assert f"Y/{tracker} names the newest checkpoint" in second
    assert last.endswith("with a new --run-dir and --load Y, without --finetune")
    made.take(saved(9))
    _, second, last = made.lines(ExitCode.FAILED, "a defect")
    assert "newest checkpoint: iteration 9 in Y" in second
    assert last.endswith("with a new --run-dir and --load Y, without --finetune: it goes on after iteration 9")


def test_a_schedule_that_differs_from_the_checkpoints_is_told_its_flag() -> None:
    reason = "training raised: AssertionError: OptimizerParamScheduler: class input value 1 and checkpointvalue 2 for lr"
    assert "--override-opt-param-scheduler" in account().lines(ExitCode.FAILED, reason)[-1]
    assert "--override-opt-param-scheduler" not in account().lines(ExitCode.FAILED, "KeyError: 1")[-1]


def test_before_anything_was_trained_there_is_nothing_to_look_at() -> None:
    made = Account(replicas=3, run_dir="runs/a")
    for code in (ExitCode.BAD_INPUT, ExitCode.INTERRUPTED):
        assert made.lines(code, "SIGTERM before training began") == [
            f"exit code {code} ({ExitCode.words(code)}): SIGTERM before training began"
        ]
    for code in (ExitCode.FAILED, ExitCode.TOO_FEW_REPLICAS, ExitCode.NO_REPLICA_LEFT):
        assert made.lines(code, "a defect")[-1].startswith("next: "), "here the logs of the run are kept"
