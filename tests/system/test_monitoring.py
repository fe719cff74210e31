"""A real job with a kill, as its operators see it: by Prometheus, a text file and a command, beside clients that misbehave."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_recover.observe.follow.metrics import METRICS, PREFIX
from tests.monitoring.test_exposition import values
from tests.monitoring.test_rules import RULES, board_expressions
from tests.system.jobs import Job, chaos_text, check, run_job

DEADLINE_S = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        text: str = answer.read().decode()
        return text


class Prometheus:
    """A real Prometheus that scrapes one port and evaluates the alerts."""

    def __init__(self, program: str, folder: Path, target: int) -> None:
        self.port = free_port()
        config = folder / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 1s}\n"
            f"rule_files: ['{RULES}']\n"
            f"scrape_configs: [{{job_name: training, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}]\n"
        )
        self._process = subprocess.Popen(
            [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}",
             f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=error"],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        end = time.monotonic() + DEADLINE_S
        while True:  # on a busy machine it starts for longer than the job trains
            with contextlib.suppress(OSError):
                get(f"http://127.0.0.1:{self.port}/-/ready")
                return
            assert time.monotonic() < end, "Prometheus did not get ready"
            time.sleep(0.1)

    def ask(self, path: str, **query: str) -> dict[str, object]:
        answer = json.loads(get(f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"))
        assert answer["status"] == "success", answer
        found: dict[str, object] = answer["data"]
        return found

    def value(self, expression: str) -> dict[str, float]:
        """The value of a query, by the label `run`."""
        result = self.ask("query", query=expression)["result"]
        return {one["metric"].get("run", ""): float(one["value"][1]) for one in result}  # type: ignore[attr-defined]

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=DEADLINE_S)


@contextlib.contextmanager
def scraping(port: int) -> Iterator[list[dict[str, float]]]:
    """Scrape a port all the time, beside clients that connect and send nothing or garbage; yield what was scraped."""
    found: list[dict[str, float]] = []
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(0.25):
            with contextlib.suppress(OSError):
                found.append(_by_name(get(f"http://127.0.0.1:{port}/metrics")))

    def disturb() -> None:
        clients = []
        while not over.wait(0.2):
            with contextlib.suppress(OSError):
                clients.append(socket.create_connection(("127.0.0.1", port), timeout=2))
                clients[-1].sendall(b"\xff\x00 garbage" if len(clients) % 2 else b"")
        for each in clients:
            each.close()

    threads = [threading.Thread(target=target, daemon=True) for target in (scrape, disturb)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        over.set()
        for thread in threads:
            thread.join(DEADLINE_S)


def _by_name(text: str) -> dict[str, float]:
    return values(re.sub(r'run="\w+"', 'run="20261126-1"', text))


def test_a_job_with_a_kill_is_seen_as_it_was(tmp_path: Path, data: Path) -> None:
    """What is served, written, told and stored is what `summary.json` says, and the run is the one without a monitor."""
    port, textfile, told = free_port(), tmp_path / "run.prom", tmp_path / "events"
    command = shlex.join(["sh", "-c", f"cat >> {told}; echo no route to host >&2; exit 7"])
    job = Job(
        replicas=2, steps=24, save_interval=12,  # long enough for it to be scraped after the kill
        run_flags=("--metrics-port", str(port), "--metrics-textfile", str(textfile), "--on-event", command),
    )  # fmt: skip
    program = shutil.which("prometheus")
    prometheus = Prometheus(program, tmp_path, port) if program is not None else None
    try:
        with scraping(port) as scraped:
            outcome = run_job(
                job,
                tmp_path / "run",
                data,
                chaos=chaos_text("1 0 reduce step=3"),  # then both have begun the step
                save=tmp_path / "save",
                environment={"PYTHONHASHSEED": "0"},  # no forks: as a user starts it
            ).expect()
        summary = outcome.summary
        assert check(outcome.run_dir)[0] == 0
        assert summary["microbatches_lost"] == 3

        last = _by_name(textfile.read_text())
        expected = {
            "replicas_configured": 2, "replicas_live": 1, "replicas_min": 1, "generation": 2, "ended": 1, "exit_code": 0,
            "recoveries_total cause=process_ended": 1, "microbatches_lost_total": summary["microbatches_lost"],
            "microbatches_recomputed_total": summary["microbatches_redone"], "recovery_seconds_count": 1,
            "step_seconds_count kind=train": 24, "last_committed_iteration": 24, "last_durable_iteration": 24,
            "saves_total result=finished": 2, "saves_total result=failed": 0, "save_interval_iterations": 12,
        }  # fmt: skip
        assert {name: last[name] for name in expected} == expected
        assert abs(last["recovery_seconds_sum"] - summary["recoveries"][0]["total_s"]) < 0.5, "detected a little later"  # type: ignore[index]
        assert 0 < last["goodput_ratio"] <= 1 and abs(last["last_commit_timestamp_seconds"] - time.time()) < DEADLINE_S

        assert len(scraped) > 3, "the job was over before it was looked at: this shows nothing"
        assert scraped[-1]["microbatches_lost_total"] == 3, "it was served, too"
        for name in last:
            counts = [each[name] for each in scraped if name in each] if name.split()[0].endswith(("_total", "_count")) else []
            assert counts == sorted(counts), f"{name} went back"

        events = [json.loads(line) for line in told.read_text().splitlines()]
        assert [each["event"] for each in events] == ["lost", "degraded", "ended"]
        assert events[0]["losses"] == [{"replica": 1, "kind": "process ended", "detail": events[0]["losses"][0]["detail"]}]
        assert (events[1]["replicas_live"], events[1]["last_committed_iteration"]) == (1, 4), "step 3 is iteration 4"
        assert (events[2]["exit_code"], events[2]["last_durable_iteration"]) == (0, 24)
        assert outcome.output.count("no route to host (event") == 3, "a line for each failure"
        assert f"metrics are at http://127.0.0.1:{port}/metrics" in outcome.output
        if prometheus is None:
            pytest.skip("no prometheus: what it scrapes was not looked at, and all else holds: apt-get install prometheus")
        _compare(prometheus, last)
    finally:
        if prometheus is not None:
            prometheus.close()


def _compare(prometheus: Prometheus, last: dict[str, float]) -> None:
    """Prometheus has stored these metrics, and understands every query of board and alerts."""
    for name in ("generation", "microbatches_lost_total", "microbatches_recomputed_total", "replicas_configured"):
        assert prometheus.value(f"max_over_time({PREFIX}{name}[1h])") == {"run": last[name]}, name
    stored = set(prometheus.ask("label/__name__/values"))
    names = {PREFIX + metric.name + ("_sum" if metric.kind == "histogram" else "") for metric in METRICS.values()}
    assert names - stored <= {f"{PREFIX}exit_code"}, "the run is over when there is an exit code"
    labels = {each for metric in prometheus.ask("series", **{"match[]": f'{{__name__=~"{PREFIX}.*"}}'}) for each in metric}  # type: ignore[union-attr]
    assert labels == {"__name__", "instance", "job", "run", "cause", "result", "kind", "le"}
    for expression in board_expressions():
        prometheus.ask("query", query=expression)
    [group] = prometheus.ask("rules")["groups"]  # type: ignore[misc]
    assert [rule["health"] for rule in group["rules"]] == ["ok"] * len(group["rules"])
    end = time.monotonic() + DEADLINE_S
    while prometheus.value('ALERTS{alertname="MegatronRecoverEnded",alertstate="firing"}') != {"run": 1}:
        assert time.monotonic() < end, "the end of the run is an alert"
        time.sleep(0.2)
