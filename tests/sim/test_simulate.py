"""`megatron-recover simulate` as a user meets it."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import sys
from pathlib import Path

import pytest

from megatron_recover import trace
from megatron_recover.cli import data, main, run, simulate
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.sim.timed import result

SCENARIO = """\
policies = ["recover", "drop-step", "checkpoint-restart", "checkpoint-restart-equal"]
tokens_per_microbatch = 100
equal_gpu_hours = 0.2

[job]
replicas = 4
ranks = 2
stages = 2
microbatches = 64
steps = 12

[compute]
microbatch_s = 1.0

[network]
bytes_per_s = 1e9
gradient_bytes = 1e8

[failures]
every_steps = 5
until_replicas = 2

[checkpoint]
save_s = 2
restart_s = 100

[drop]
regroup_s = 1
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Small enough for real processes."""
    path = tmp_path / "small.toml"
    path.write_text(
        "[job]\nreplicas = 2\nranks = 1\nmicrobatches = 4\nsteps = 3\n[compute]\nmicrobatch_s = 1.0\n"
        "[network]\nbytes_per_s = 1e9\ngradient_bytes = 1e5\n"
    )
    return path


def test_json_tells_goodput_and_speedup(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(scenario), "--json", "--out", str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0.9 < found["goodput_of_ideal"] <= 1 < found["speedup_over_checkpoint_restart"]
    assert found["speedup_over_checkpoint_restart"] <= found["speedup_over_checkpoint_restart_equal"]
    assert found["speedup_over_checkpoint_restart_by_hindsight"] <= found["speedup_over_checkpoint_restart"]
    assert found["more_microbatches_at_equal_gpu_hours"] > 0
    ours = found["policies"]["recover"]
    assert ours["microbatches"] == 12 * 64 and ours["tokens_per_gpu_hour"] == 100 * ours["microbatches_per_gpu_hour"]
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == found
    with (tmp_path / "out" / "throughput.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["policy"] for row in rows} == set(found["policies"])
    assert int([row for row in rows if row["policy"] == "recover"][-1]["microbatches"]) == 12 * 64


def test_a_person_gets_a_table(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(scenario)]) == 0
    said = capsys.readouterr().out
    assert "checkpoint-restart-equal" in said and "goodput of ideal: " in said


def test_the_same_scenario_gives_the_same_numbers(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        main(["simulate", str(scenario), "--json"])
    said = capsys.readouterr().out
    assert said[: len(said) // 2] == said[len(said) // 2 :]


def test_a_wrong_scenario_ends_with_code_2_and_the_line(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario.write_text(SCENARIO.replace("save_s = 2", "save_s = -2"))
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(scenario)])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert f"megatron-recover simulate: {scenario}: line 24: save_s: Expected `float` >= 0.0" in said.err


@pytest.mark.parametrize("flags", [(), ("--processes", "RUN_DIR")])
def test_a_fault_that_never_strikes_ends_with_code_2_and_its_name(
    flags: tuple[str, ...], scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, rest = SCENARIO.split("[job]")
    faults = "".join(
        f'[[fault]]\nreplica = {replica}\nrank = 0\npoint = "forward"\noccurrence = {occurrence}\n'
        for replica, occurrence in ((0, 3), (1, 1000))
    )
    rest = rest.replace("every_steps = 5\nuntil_replicas = 2\n", "")
    scenario.write_text(f'policies = ["recover"]\n{head.split(chr(10), 1)[1]}[job]{rest}{faults}')
    run_dir = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(scenario), *(str(run_dir) if flag == "RUN_DIR" else flag for flag in flags)])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and not run_dir.exists()
    line = scenario.read_text()[: scenario.read_text().rindex("[[fault]]")].count("\n") + 1
    assert f"{scenario}: line {line}: [[fault]] 2 (replica 1, rank 0, forward, occurrence 1000) never struck" in said.err
    assert "[[fault]] 1 " not in said.err


@pytest.mark.parametrize("flags", [(), ("--processes", "RUN_DIR")])
def test_faults_that_take_every_replica_end_with_code_2_and_the_last_ones_line(
    flags: tuple[str, ...], scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, rest = SCENARIO.split("[job]")
    faults = "".join(f'[[fault]]\nreplica = {replica}\nrank = 0\npoint = "forward"\n' for replica in range(4))
    rest = rest.replace("every_steps = 5\nuntil_replicas = 2\n", "")
    scenario.write_text(f'policies = ["recover"]\n{head.split(chr(10), 1)[1]}[job]{rest}{faults}')
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(scenario), *(str(tmp_path / "run") if flag == "RUN_DIR" else flag for flag in flags)])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert re.search(r": line \d+: \[\[fault\]\] \d \(.*\) ends the job: no replica is left", said.err)


@pytest.mark.parametrize(
    ("name", "why"), [("file", "a file stands where a folder is meant"), (".", "is not empty (it has file)")]
)
def test_a_used_folder_is_refused_before_the_work(
    name: str, why: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(simulate, "run_recover")
    place = tmp_path / "used"
    place.mkdir()
    (place / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(small), "--processes", str(place / name)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f"--processes {place / name} " in said and why in said


def test_a_result_inside_the_run_is_refused_before_the_work(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(simulate, "run_recover")
    place = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(small), "--processes", str(place), "--out", str(place / "result")])
    assert ended.value.code == 2 and "lies in the folder of --processes" in capsys.readouterr().err and not place.exists()


@pytest.mark.parametrize("flags", [(), ("--processes", "RUN_DIR")])
def test_a_folder_that_cannot_be_made_is_refused_before_the_work(
    flags: tuple[str, ...], small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("simulate", "run_recover"):
        monkeypatch.delattr(simulate, name)
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "simulate",
                str(small),
                "--out",
                str(small),
                *(str(tmp_path / "run") if flag == "RUN_DIR" else flag for flag in flags),
            ]
        )
    assert ended.value.code == 2
    assert f"--out {small}: cannot be made (File exists); give another folder" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_printed(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out" / result.RESULT_FILE).mkdir(parents=True)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(scenario), "--out", str(tmp_path / "out")])
    said = capsys.readouterr()
    assert ended.value.code == 2 and "goodput of ideal: " in said.out and "cannot be written" in said.err


def test_a_terminal_sees_how_far_it_is(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    main(["simulate", str(small)])
    plain = capsys.readouterr()
    assert plain.err == ""
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert main(["simulate", str(small)]) == 0
    shown = b""
    with contextlib.suppress(OSError):  # EIO: nobody writes any more. What is written gets here piece by piece
        while part := os.read(reader, 65536):
            shown += part
    os.close(reader)
    assert b"recover: step 3 of 3" in shown
    assert capsys.readouterr().out == plain.out


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_run_that_came_to_nothing_is_not_pointed_at(
    has_begun: bool, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"

    def interrupted(argv: list[str], *, goes_on: bool) -> int:
        assert goes_on
        if has_begun:
            run_dir.mkdir()
            (run_dir / trace.EVENTS_FILE).touch()
        return ExitCode.INTERRUPTED

    monkeypatch.setattr(run, "main", interrupted)
    monkeypatch.setattr(data, "write_dataset", lambda *_: None)
    assert main(["simulate", str(small), "--processes", str(run_dir)]) == ExitCode.INTERRUPTED
    simulated, ended = capsys.readouterr().err.splitlines()
    assert simulated == "megatron-recover simulate: simulated; now on real processes"
    assert ended.endswith("exit code 15" + f"; see {run_dir}" * has_begun)


def test_the_comparison_says_which_step_it_leaves_out() -> None:
    lines = list(result.comparison_lines(result.comparison([1.0, 1.0, 2.0], [9.0, 1.0, 2.0])))
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    assert lines[-1] == "step 0 is left out: in it real processes warm up"
