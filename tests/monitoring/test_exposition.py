"""The port of the metrics: a format that Prometheus reads, and clients that cost next to nothing, whatever they do."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_recover.cluster.exposition import MAX_CONNECTIONS, MAX_THREADS, MetricsServer, RunCollector
from megatron_recover.cluster.monitoring import BACKLOG
from megatron_recover.observe.follow.metrics import METRICS, PREFIX, RunMetrics
from tests.observe import traces

SCRAPE_S = 1.0


def faulty() -> RunMetrics:
    metrics = RunMetrics()
    for event in traces.faulty_run().events:
        metrics.take(event)  # type: ignore[arg-type]
    return metrics


def values(text: str) -> dict[str, float]:
    """Every sample of a text in Prometheus' format, by its name and its labels without `run`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "20261126-1", sample
            found[" ".join((sample.name.removeprefix(PREFIX), *map("=".join, sorted(labels.items()))))] = sample.value
    return found


@pytest.fixture
def collector() -> RunCollector:
    return RunCollector(faulty(), threading.Lock(), "20261126-1")


@pytest.fixture
def place(collector: RunCollector) -> Iterator[tuple[str, int]]:
    """Where these metrics are served."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    server = MetricsServer(listener, collector, scrape_s=SCRAPE_S)
    yield listener.getsockname()
    server.shutdown()
    server.server_close()


def scrape(place: tuple[str, int]) -> str:
    with urllib.request.urlopen(f"http://{place[0]}:{place[1]}/metrics", timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain"), "what an old Prometheus reads"
        text: str = answer.read().decode()
        return text


def test_every_metric_is_served_with_its_type_and_its_label(collector: RunCollector, place: tuple[str, int]) -> None:
    text = scrape(place)
    assert text == collector.text().decode(), "the file has the same"
    for metric in METRICS.values():
        assert f"# TYPE {PREFIX}{metric.name} {metric.kind}\n" in text
    found = values(text)
    assert (found["replicas_live"], found["recoveries_total cause=process_ended"], found["ended"]) == (1, 2, 1)
    assert found["step_seconds_count kind=train"] == found["step_seconds_bucket kind=train le=+Inf"] == 5
    assert not any("step=" in name or "iteration=" in name or "replica=" in name for name in found)


def test_prometheus_asks_for_openmetrics_and_gets_it(place: tuple[str, int]) -> None:
    asked = urllib.request.Request(f"http://{place[0]}:{place[1]}/metrics", headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(asked, timeout=5) as answer:
        assert answer.read().endswith(b"# EOF\n")


def test_a_request_that_the_package_cannot_answer_is_nobodys_business_on_the_console(
    place: tuple[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(place, timeout=SCRAPE_S) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\nAccept: text/plain;version=-\r\n\r\n")
        answer = client.recv(4096)
    assert b" 500 " in answer.splitlines()[0] and capfd.readouterr().err == ""
    assert values(scrape(place))["ended"] == 1


def test_clients_that_stall_send_garbage_or_come_by_the_hundred_cost_a_few_threads_and_others_are_served(
    place: tuple[str, int],
) -> None:
    before, most = threading.active_count(), 0
    clients: list[socket.socket] = []
    for number in range(300):
        with contextlib.suppress(OSError):
            client = socket.create_connection(place, timeout=5)
            if number % 3 == 1:
                client.sendall(b"\x00\xff garbage \r\n" * 50)
            elif number % 3 == 2:
                client.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")  # and no more
            clients.append(client)
        most = max(most, threading.active_count())
    trickle = time.monotonic() + 2 * SCRAPE_S
    while time.monotonic() < trickle:  # each byte is in time, and the request as a whole is not
        for client in clients[-30:]:
            with contextlib.suppress(OSError):
                client.sendall(b"x")
        most = max(most, threading.active_count())
        time.sleep(0.05)
    assert most <= before + MAX_THREADS, "a thread for each client that is answered, and a few that are about to end"
    assert values(scrape(place))["ended"] == 1
    for client in clients:  # also the last ones, which no newer one has ended
        with contextlib.suppress(ConnectionError):
            while client.recv(4096):
                pass
        client.close()


def test_clients_that_hold_all_places_give_way_to_one_that_asks(collector: RunCollector) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    server = MetricsServer(listener, collector, scrape_s=1000.0)
    clients = [socket.create_connection(listener.getsockname(), timeout=5) for _ in range(3 * MAX_CONNECTIONS)]
    assert values(scrape(listener.getsockname()))["ended"] == 1
    for client in clients[:MAX_CONNECTIONS]:
        assert client.recv(1) == b"", "the oldest were ended"
    server.shutdown()
    server.server_close()
    for client in clients:
        client.close()


def test_while_no_answer_can_be_made_threads_do_not_pile_up() -> None:
    """The lock stands for whatever holds an answer up; ending a connection does not help then."""
    lock = threading.Lock()
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    server = MetricsServer(listener, RunCollector(faulty(), lock, "20261126-1"), scrape_s=SCRAPE_S)
    before = threading.active_count()
    clients = []
    with lock:
        for _ in range(2 * MAX_THREADS):
            clients.append(socket.create_connection(listener.getsockname(), timeout=5))
            clients[-1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        for client in clients[MAX_THREADS + 1 :]:
            with contextlib.suppress(ConnectionError):
                assert client.recv(1) == b"", "those above the limit are closed"
        assert threading.active_count() <= before + MAX_THREADS
    end = time.monotonic() + 10.0
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert values(scrape(listener.getsockname()))["ended"] == 1
    server.shutdown()
    server.server_close()
    for client in clients:
        client.close()
