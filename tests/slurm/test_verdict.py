"""What a batch system is told of a run's end, and the mark that ends a chain: left, refused, removed."""

from __future__ import annotations

import gzip
import json
import shlex
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_recover import cli, trace
from megatron_recover.cli import describing, node_checks, run, run_dirs
from megatron_recover.cluster.doctor.findings import Check, fail
from megatron_recover.cluster.job import Job, create_run_dir
from megatron_recover.cluster.joining import NotMet
from megatron_recover.cluster.membership import Joined
from megatron_recover.cluster.save_lock import SaveLock
from megatron_recover.config import RecoverConfig
from megatron_recover.control_plane.node_messages import NodeFailed
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.host.reachable import NoAnswer, Unknown
from megatron_recover.observe import ending, margin, stop_mark
from megatron_recover.observe.history import History
from megatron_recover.trace import event_files
from tests.observe import traces

STOPS = {ExitCode.BAD_INPUT, ExitCode.POISONED_MICROBATCH, ExitCode.DIVERGED, ExitCode.INVARIANT_VIOLATED}


def _ended(folder: Path, code: int | None, reason: str = "because of that") -> Path:
    events = traces.quiet_run(1).events[:-1]
    if code is not None:
        events = [*events, trace.RunFinished(t=9.0, exit_code=code, reason=reason)]
    return traces.write(folder, events)


def _verdict(run_dir: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert cli.main(["verdict", str(run_dir), *flags]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("code", [*(code for code in ExitCode if code is not ExitCode.UNFINISHED), 130, 137])
def test_each_exit_code_has_its_word(code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    word = "finished" if code == 0 else "stop" if code in STOPS else "requeue"
    run_dir = _ended(tmp_path, code)
    assert _verdict(run_dir, capsys) == f"{word} {code:d}\n"
    assert json.loads(_verdict(run_dir, capsys, "--json")) == {
        "verdict": word, "exit_code": code, "reason": "because of that"
    }  # fmt: skip


def test_a_run_without_an_end_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for run_dir, reason in (
        (_ended(tmp_path / "killed", None), "the trace has no end: the run still goes on, or was killed"),
        (tmp_path / "empty", f"there is no trace in {tmp_path / 'empty'}: nothing was trained"),
        (tmp_path / "none", f"there is no folder {tmp_path / 'none'}: nothing was trained"),
    ):
        assert _verdict(run_dir, capsys) == "unknown\n"
        assert json.loads(_verdict(run_dir, capsys, "--json")) == {"verdict": "unknown", "exit_code": None, "reason": reason}


def test_the_end_is_found_in_a_part_that_was_just_put_aside_and_before_late_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = _ended(tmp_path, 15)
    newest = run_dir / trace.EVENTS_FILE
    with open(newest, "ab") as file:
        file.write(b'{"event":"applied","v"')  # cut by the end of its writer
    assert _verdict(run_dir, capsys) == "requeue 15\n"
    with gzip.open(event_files.compressed(event_files.part(run_dir, 1)), "wb") as file:
        file.write(newest.read_bytes())
    for rest in ("empty", "none"):
        newest.write_bytes(b"") if rest == "empty" else newest.unlink()
        assert _verdict(run_dir, capsys) == "requeue 15\n", rest


def test_a_damaged_end_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = _ended(tmp_path, 15)
    newest = run_dir / trace.EVENTS_FILE
    newest.write_text(newest.read_text().replace('"exit_code":15', '"exit_code":"x"'))
    with pytest.raises(SystemExit) as end:
        cli.main(["verdict", str(run_dir)])
    assert end.value.code == 2 and f"cannot read the trace: {newest}" in capsys.readouterr().err


@pytest.mark.parametrize("code", [*ExitCode, 137])
def test_an_end_that_repeats_itself_leaves_a_mark_and_no_other(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run` with a launcher that only ends: code 2 leaves the mark with --chained only."""
    save = tmp_path / "a b"

    def job(arguments: object, command: object) -> tuple[Job, str, None]:
        made = Job(
            argv=("script.py",), num_replicas=2, layout=trace.Layout(tp=1, pp=1), config=RecoverConfig(),
            run_dir=create_run_dir(tmp_path / "run"),
        )  # fmt: skip
        return made, "", None

    launcher = SimpleNamespace(
        run=lambda: code, release_signals=lambda: None, has_begun=True, untraced=[], reason="of that", is_recorded=False,
        is_hurried=lambda: False, knows_end=True, starts_anew=False,
    )  # fmt: skip
    monkeypatch.setattr(describing, "job_of", job)
    monkeypatch.setattr(run, "Launcher", lambda *arguments, **named: launcher)
    for chained in ([], ["--chained"]):
        assert cli.main(["run", *chained, "--nproc-per-node", "2", "script.py", "--save", str(save)]) == code
        is_left = code in STOPS and (code != ExitCode.BAD_INPUT or bool(chained))
        assert (save / "STOP").exists() == is_left
        assert (code in ending.STOPS) == (code in STOPS)
        if is_left:
            text = (save / "STOP").read_text()
            assert text.startswith(f"exit code {code:d}: of that\n") and f"rm '{save}/STOP'" in text
            assert (f"trace and logs: {tmp_path / 'run'}\n" in text) == (code != ExitCode.BAD_INPUT)
        for path in (tmp_path / "run").rglob("*") if (tmp_path / "run").exists() else ():
            path.rmdir() if path.is_dir() else path.unlink()
    capsys.readouterr()


def test_a_command_line_that_is_refused_leaves_the_mark_in_a_chain_only(tmp_path: Path) -> None:
    words = ["--bogus", "--nproc-per-node", "2", "script.py", "--save", str(tmp_path)]
    for flags, is_left in (([], False), (["--chained"], True)):
        with pytest.raises(SystemExit):
            cli.main(["run", *flags, "--nproc-per-node", "2", "no_such_script.py", *words[3:]])
        assert (tmp_path / "STOP").exists() == is_left
    assert "there is no training script no_such_script.py" in (tmp_path / "STOP").read_text()


def test_a_refusal_that_may_pass_by_itself_ends_no_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second submission by mistake finds the folder in use, and the mark would end the first job's chain."""
    save = tmp_path / "save"
    command = _chained(tmp_path, monkeypatch, save=save)
    first = SaveLock(save, tmp_path / "first")
    with pytest.raises(SystemExit) as end:
        cli.main(command)
    assert end.value.code == 2 and f"--save {save} is in use by another job" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as end:
        cli.main(["run", "--metrics-port", str(taken.getsockname()[1]), *command[1:]])
    assert end.value.code == 2 and "is in use on 127.0.0.1" in capsys.readouterr().err
    assert not (save / "STOP").exists()
    first.release(60.0)


def test_a_name_server_that_did_not_answer_ends_no_chain_and_an_unknown_name_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (NoAnswer("head does not resolve"), Unknown("head does not resolve")):

        def job(arguments: object, command: object, error: ValueError = error) -> None:
            raise error

        monkeypatch.setattr(describing, "job_of", job)
        with pytest.raises(SystemExit) as end:
            cli.main(["run", "--chained", "--nproc-per-node", "2", "script.py", "--save", str(tmp_path)])
        assert end.value.code == 2 and (tmp_path / "STOP").exists() == isinstance(error, Unknown)


def _chained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int = 0, save: Path | None = None) -> list[str]:
    """Return a command line of a chain, whose job is made up: this node's number in it, and the folder that it locks."""

    def job(arguments: object, command: object) -> tuple[Job, str, None]:
        made = Job(
            argv=("script.py",), num_replicas=2, layout=trace.Layout(tp=1, pp=1), config=RecoverConfig(),
            run_dir=create_run_dir(tmp_path / "run"), node=node, save=save,
        )  # fmt: skip
        return made, "", None

    monkeypatch.setattr(describing, "job_of", job)
    return ["run", "--chained", "--nproc-per-node", "2", "script.py", "--save", str(tmp_path / "save")]


def test_what_the_examination_refuses_ends_a_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = _chained(tmp_path, monkeypatch, 0)
    monkeypatch.setattr(node_checks, "examine", lambda need: [fail(Check.OPEN_FILES, "256", "raise it")])
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2 and "error" not in capsys.readouterr().err, "the lines of the examination are enough"
    text = (tmp_path / "save" / "STOP").read_text()
    assert text.startswith("exit code 2: the examination of the nodes found:\n") and "raise it" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("node", "code", "is_left"), [(0, 2, True), (1, 2, False), (0, 15, False)])
def test_what_another_node_has_found_ends_a_chain_on_the_first_node(
    node: int, code: int, is_left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node cannot know whether the first one refused the job for what may pass by itself."""
    words = _chained(tmp_path, monkeypatch, node)

    def refusals(*_: object) -> list[str]:
        raise NotMet(code, "node-7: of that")

    monkeypatch.setattr(node_checks, "refusals", refusals)
    monkeypatch.setattr(run_dirs, "remove_part", lambda *_, **__: None)
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == code and (tmp_path / "save" / "STOP").exists() == is_left


@pytest.mark.parametrize(
    ("error", "code"),
    [(NotMet(ExitCode.FAILED, "nothing was heard"), ExitCode.FAILED), (ValueError("of that"), ExitCode.BAD_INPUT)],
    ids=["silence", "mistake"],
)
def test_a_node_that_gives_up_for_silence_reports_no_mistake_for_which_the_first_node_would_end_the_chain(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that was only stopped goes on, and takes the message for the end of the job."""
    words, sent = _chained(tmp_path, monkeypatch, 1), list[object]()
    job = describing.job_of(None, ())[0]  # type: ignore[arg-type]
    membership = SimpleNamespace(send=sent.append, close=lambda: None, has_given_up=True)
    joined = Joined(membership, SimpleNamespace(close=lambda: None), b"", None, 0)  # type: ignore[arg-type]
    monkeypatch.setattr(describing, "job_of", lambda arguments, command: (job, "", joined))

    def refusals(*_: object) -> list[str]:
        raise error

    monkeypatch.setattr(node_checks, "refusals", refusals)
    monkeypatch.setattr(run_dirs, "remove_part", lambda *_, **__: None)
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == code and sent == [NodeFailed(code, str(error))]


def test_a_marked_folder_is_refused_until_the_line_that_is_told_has_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "a b"
    stop_mark.leave(save, 11, "computing microbatch 3 ended two replicas", tmp_path)
    stop_mark.leave(save, 14, "a later reason", None)
    words = ["run", "--nproc-per-node", "2", __file__, "--save", str(save)]
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    said = capsys.readouterr().err
    assert end.value.code == 2 and f"--save {save} has the mark STOP" in said
    assert "exit code 11: computing microbatch 3 ended two replicas" in said and "a later reason" not in said
    remedy = said.rstrip().rpartition("then: ")[2]
    assert subprocess.run(shlex.split(remedy), check=False).returncode == 0
    with pytest.raises(SystemExit):
        cli.main(words)
    assert "STOP" not in capsys.readouterr().err


def test_a_chain_that_saves_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--chained", "--nproc-per-node", "2", __file__])
    assert "--chained needs --save" in capsys.readouterr().err


def test_the_margin_is_the_longest_step_with_all_between_the_longest_save_and_a_reserve(tmp_path: Path) -> None:
    events = traces.quiet_run(3).events
    seconds = {}
    for event in events:
        if isinstance(event, trace.Committed):
            seconds[event.step] = min(seconds.get(event.step, event.t), event.t)
    at = sorted(seconds.values())
    longest = max(after - before for before, after in zip(at, at[1:], strict=False))
    saves = [
        trace.Checkpoint(t=20.0, replica=0, rank=0, iteration=1, phase="started"),
        trace.Checkpoint(t=27.5, replica=0, rank=0, iteration=1, phase="finished"),
        trace.Checkpoint(t=30.0, replica=0, rank=0, iteration=2, phase="started"),
        trace.Checkpoint(t=99.0, replica=0, rank=0, iteration=2, phase="failed"),
    ]
    found = margin.margin(History.read(traces.write(tmp_path / "run", [*events, *saves])))
    assert found is not None and (found.step_s, found.save_s) == (pytest.approx(longest), 7.5)
    assert found.seconds == 8 + 60
    assert margin.margin(History.read(traces.write(tmp_path / "short", traces.quiet_run(1).events))) is None
