"""The benchmark table: rows say whether a goal is met, one broken benchmark does not hide the others' numbers."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from benchmarks import common, run


def test_a_row_quotes_the_median_and_judges_it_by_its_goal() -> None:
    row = common.row("overhead", [3.0, 1.0, 2.0], "%", baseline="torchrun", goal="<= 2")
    assert (row.value, row.min, row.median, row.max, row.runs, row.met) == (2.0, 1.0, 2.0, 3.0, 3, True)
    assert common.row("overhead", [3.0], "%", goal="<= 2").met is False
    assert common.row("worst", [1.0, 9.0], "ms", value=9.0, goal="< 9").met is False
    assert common.row("memory", [1.0], "MB").met is None


@pytest.mark.parametrize(("values", "goal"), [([], "<= 2"), ([1.0], "about 2"), ([1.0], "<= two")])
def test_a_row_without_values_or_with_a_goal_that_cannot_be_judged_is_refused(values: list[float], goal: str) -> None:
    with pytest.raises(ValueError):
        common.row("x", values, "s", goal=goal)


def test_rows_of_all_benchmarks_are_joined_and_a_broken_one_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> list[common.Row]:
        raise RuntimeError("no such device")

    fakes = {
        "benchmarks.good": types.SimpleNamespace(rows=lambda: [common.row("a", [1.0], "s", goal="<= 2")]),
        "benchmarks.bad": types.SimpleNamespace(rows=broken),
        "benchmarks.late": types.SimpleNamespace(rows=lambda: [common.row("b", [5.0], "s", goal="<= 2")]),
    }
    monkeypatch.setattr(run, "modules", lambda: ["good", "bad", "late"])
    monkeypatch.setattr(run.importlib, "import_module", fakes.__getitem__)
    out = tmp_path / "bench.json"
    assert run.main(["--out", str(out)]) == 1
    rows = json.loads(out.read_text())
    assert [(row["name"], row["met"]) for row in rows] == [("a", True), ("b", False)]
    assert rows[0].keys() == {"name", "value", "unit", "baseline", "runs", "min", "median", "max", "goal", "met"}
    assert "failed: bad" in capsys.readouterr().err


def test_a_paced_run_without_its_pace_is_refused() -> None:
    script = Path(common.__file__).parents[1] / "scripts" / "paced_pretrain.py"
    done = subprocess.run([sys.executable, script, "--lr", "1"], capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stderr.splitlines()[-1].split(": ")[-1]) == (2, "--paced-forward-s")


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run.main(["--only", "nothing"])
    assert end.value.code == 2
    assert "there are" in capsys.readouterr().err
