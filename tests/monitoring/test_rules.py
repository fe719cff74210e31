"""The board and the alerts use metrics that exist, and Prometheus takes the alerts and finds that they do what they say."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import get_args

import msgspec
import yaml

from megatron_recover.observe.follow.metrics import CAUSES, METRICS, PREFIX
from megatron_recover.observe.follow.notices import AnyNotice
from tests.monitoring.programs import program

FOLDER = Path(__file__).resolve().parents[2] / "monitoring"
RULES, CASES, BOARD = FOLDER / "alerts.yml", FOLDER / "alerts_test.yml", FOLDER / "grafana.json"
GUIDE = FOLDER.parent / "docs" / "how_to" / "monitor.md"


def served() -> set[str]:
    """The names of all time series."""
    found = set()
    for metric in METRICS.values():
        parts = ("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",)
        found |= {f"{PREFIX}{metric.name}{part}" for part in parts}
    return found


def unknown(text: str) -> set[str]:
    """The names in a text that no metric has."""
    return {name for name in re.findall(rf"\b{PREFIX}\w+", text) if name not in served()}


def alerts() -> dict[str, dict[str, object]]:
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def board_expressions() -> list[str]:
    """Every query of the board, its variables replaced."""
    board = json.loads(BOARD.read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    found += [each["expr"] for each in board["annotations"]["list"]]
    return [each.replace("$__rate_interval", "1m").replace("$run", ".*") for each in found]


def test_every_metric_that_board_alerts_and_their_tests_name_exists() -> None:
    for path in (RULES, CASES, BOARD):
        assert PREFIX in path.read_text() and unknown(path.read_text()) == set(), path.name
    assert unknown(f"{PREFIX}step_seconds_mean") and unknown(f"x {PREFIX}step_seconds"), "this shows nothing"


def test_the_board_shows_every_metric_and_can_be_imported() -> None:
    board = json.loads(BOARD.read_text())
    hidden = {"save_interval_iterations", "trace_events_lost_total", "exit_code"}
    text = " ".join(board_expressions())
    assert {name for name in METRICS if f"{PREFIX}{name}" not in text} == hidden, "each is shown, or is for alerts only"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "run"}
    assert set(re.findall(r"\$\{?(\w+)", BOARD.read_text())) == {"datasource", "run", "__rate_interval", "__all"}
    right = [panel["gridPos"]["x"] + panel["gridPos"]["w"] for panel in board["panels"]]
    assert max(right) == 24, "Grafana's columns"


def test_every_alert_has_a_severity_and_says_what_to_do() -> None:
    assert len(alerts()) >= 5
    for name, rule in alerts().items():
        assert name.startswith("MegatronRecover") and rule["labels"]["severity"] in ("info", "warning", "critical")  # type: ignore[index]
        assert set(rule["annotations"]) == {"summary", "description"}  # type: ignore[call-overload]


def test_every_alert_is_tested_both_quiet_and_firing() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    told = [case for each in cases for case in each["alert_rule_test"]]
    for name in alerts():
        assert {bool(case.get("exp_alerts")) for case in told if case["alertname"] == name} == {True, False}, name


def test_promtool_accepts_the_alerts_and_their_tests_pass() -> None:
    promtool = program("promtool")
    for verb in (("check", "rules", str(RULES)), ("test", "rules", str(CASES))):
        done = subprocess.run([promtool, *verb], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_guide_lists_every_metric_with_its_type_and_every_alert_with_its_severity() -> None:
    text = GUIDE.read_text()
    rows = re.findall(r"^\| `(\w+)` \| (gauge|counter|histogram) \|[^|]*\| (.+) \|$", text, re.MULTILINE)
    assert {name: kind for name, kind, _ in rows} == {name: metric.kind for name, metric in METRICS.items()}
    for name, _, meaning in rows:
        label = METRICS[name].label
        assert (f"abel `{label}`" in meaning) == bool(label), name
    causes = next(meaning for name, _, meaning in rows if name == "recoveries_total")
    assert {*re.findall(r"`(\w+)`", causes)} - {"cause"} == {*CAUSES}
    listed = dict(re.findall(r"^\| `(MegatronRecover\w+)` \| (\w+) \|", text, re.MULTILINE))
    assert listed == {name: rule["labels"]["severity"] for name, rule in alerts().items()}  # type: ignore[index]


def test_the_events_that_the_guide_shows_are_those_that_a_command_gets() -> None:
    shown = [json.loads(line) for line in re.findall(r'^\{"event".+$', GUIDE.read_text(), re.MULTILINE)]
    kinds = {each.__struct_config__.tag: each for each in get_args(AnyNotice)}
    assert [each["event"] for each in shown] == list(kinds)
    for each in shown:
        notice = msgspec.convert(each, kinds[each["event"]])
        assert msgspec.to_builtins(notice) == each, "every field, in its order, and no other"
        assert list(msgspec.to_builtins(notice)) == list(each)
    listed = re.findall(r"^\| `(\w+)` \| (?!gauge|counter|histogram)", GUIDE.read_text(), re.MULTILINE)
    assert [each for each in listed if not each.startswith("Megatron")] == list(kinds)
