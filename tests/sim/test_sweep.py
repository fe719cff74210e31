"""The sweep: every point is simulated and written, and a higher rate costs more."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.study import sweep
from scripts.study.sweep import CSV_FILE, HEAD, PLOT_FILE, RATES

SCENARIO = """\
policies = ["recover", "checkpoint-restart"]

[job]
replicas = 8
ranks = 4
stages = 2
microbatches = 64
steps = 1

[compute]
microbatch_s = 60.0

[network]
bytes_per_s = 1e9
gradient_bytes = 1e8

[failures]
until_replicas = 2

[checkpoint]
save_s = 5
restart_s = 600
"""


def test_rates_are_swept_into_a_table_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "small.toml"
    scenario.write_text(SCENARIO)
    assert sweep.main([str(scenario), "--out", str(tmp_path), "--only", "rates", "--losses", "2"]) == 0
    with (tmp_path / CSV_FILE).open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == HEAD
    assert [row["rate"] for row in rows if row["policy"] == "recover"] == [name for name, _ in RATES]
    assert all(float(row["goodput_of_ideal"]) > 0.97 for row in rows if row["policy"] == "recover")
    restarted = [float(row["goodput_of_ideal"]) for row in rows if row["policy"] == "checkpoint-restart"]
    assert restarted[0] > restarted[-1], "losses cost a restart more the oftener they come"
    assert "<svg" in (tmp_path / PLOT_FILE).read_text()
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == len(RATES) and "32 GPUs at the rate of Llama 3: " in said.err
    head, *told, wrote = said.out.splitlines()
    assert head.split(maxsplit=1)[1] == " | ".join(HEAD) and len(told) == len(rows) and wrote.startswith("wrote ")


def test_ctrl_c_leaves_a_table_and_a_plot_of_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "small.toml"
    scenario.write_text(SCENARIO)
    some = list(sweep.points(sweep.scenario_file.load(scenario), "sizes", 1, (32,)))
    for found in ([], some):

        def points(*arguments: object, found: list[sweep.Point] = found) -> Iterator[sweep.Point]:
            yield from found
            raise KeyboardInterrupt

        monkeypatch.setattr(sweep, "points", points)
        assert sweep.main([str(scenario), "--out", str(tmp_path)]) == 130
        assert [(tmp_path / name).exists() for name in (CSV_FILE, PLOT_FILE)] == [bool(found)] * 2
    _, first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "interrupted before the first point"
    assert last == f"interrupted after 2 lines; wrote {tmp_path / CSV_FILE} and {tmp_path / PLOT_FILE}"
    assert len((tmp_path / CSV_FILE).read_text().splitlines()) == 3


def test_sizes_keep_the_share_of_a_replica(tmp_path: Path) -> None:
    scenario = tmp_path / "small.toml"
    scenario.write_text(SCENARIO)
    found = list(sweep.points(sweep.scenario_file.load(scenario), "sizes", 1, (32, 320)))
    assert [(row[3], row[4]) for row in found] == [(n, p) for n in (32, 320) for p in ("recover", "checkpoint-restart")]


def test_a_scenario_that_is_too_slow_for_its_timeouts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "small.toml"
    scenario.write_text(SCENARIO.replace("[failures]", "message_s = 0.1\n\n[failures]"))
    with pytest.raises(SystemExit) as ended:
        sweep.main([str(scenario), "--out", str(tmp_path), "--only", "sizes", "--losses", "1", "--max-gpus", "2048"])
    assert ended.value.code == 2 and f"{scenario}: " in capsys.readouterr().err, "with 512 replicas, not 8"


def test_a_wrong_argument_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sweep.main([str(tmp_path / "nothing.toml"), "--out", str(tmp_path)])
    assert ended.value.code == 2 and "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--max-gpus 0", "--max-gpus is 0; the smallest size is 2048"),
        ("--max-gpus 2047", "--max-gpus is 2047; the smallest size is 2048"),
        ("--max-gpus 2048 --only rates", "--max-gpus is for the sweep of sizes"),
        ("--losses 0", "--losses is 0; it must be above 0"),
        ("--losses inf", "--losses is inf; it must be above 0 and at most 1000"),
    ],
)
def test_a_sweep_of_nothing_is_refused(flags: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "small.toml"
    scenario.write_text(SCENARIO)
    with pytest.raises(SystemExit) as ended:
        sweep.main([str(scenario), "--out", str(tmp_path / "out"), *flags.split()])
    assert ended.value.code == 2 and said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_replicas_larger_than_a_size_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "large.toml"
    scenario.write_text(SCENARIO.replace("ranks = 4", "ranks = 4096"))
    with pytest.raises(SystemExit) as ended:
        sweep.main([str(scenario), "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert (
        ended.value.code == 2 and "a replica of [job] has 4096 GPUs, and the smallest size has 2048; take --only rates" in said
    )
