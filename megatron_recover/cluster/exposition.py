"""Serves the metrics of a run in Prometheus' format: on a port, and as text for a file.

The package `prometheus_client` makes the text and answers requests. This module bounds what a
client can cost: at most `MAX_CONNECTIONS` at once, each closed after `scrape_s` seconds however
slowly it reads or writes. A further connection ends the oldest one, which is more likely to stall
than to be answered: an answer takes milliseconds. The monitor imports this module only if metrics
are wanted.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector

from megatron_recover.observe.follow.metrics import PREFIX, Histogram, Metric, RunMetrics

MAX_CONNECTIONS = 8
"""Maximum of connections that are answered at the same time."""
MAX_THREADS = 4 * MAX_CONNECTIONS
"""Threads that answer, or are about to end as their connection was ended. With so many a new
connection is closed unanswered."""

_Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily
_FAMILIES: dict[str, type[_Family]] = {
    "gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily,
}  # fmt: skip


class RunCollector(Collector):
    """The metrics of one run as prometheus_client wants them. Any thread may collect."""

    def __init__(self, metrics: RunMetrics, lock: threading.Lock, run: str) -> None:
        """`lock` is held by whoever changes `metrics`. `run`: value of the label on all of them."""
        self._metrics, self._lock, self._run = metrics, lock, run
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def collect(self) -> Iterable[_Family]:
        """Return all metrics."""
        found: dict[str, _Family] = {}
        with self._lock:
            for metric, label_value, value in self._metrics.samples():
                family = found.get(metric.name) or found.setdefault(metric.name, _family(metric))
                labels = [self._run, label_value] if metric.label else [self._run]
                if isinstance(value, Histogram):
                    family.add_metric(labels, [*value.cumulative()], value.sum)  # type: ignore[arg-type]
                else:
                    family.add_metric(labels, value)  # type: ignore[call-arg, arg-type]
        return found.values()

    def text(self) -> bytes:
        """Return the metrics as text, as node_exporter reads it from a file."""
        return generate_latest(self.registry)


def _family(metric: Metric) -> _Family:
    labels = ["run", metric.label] if metric.label else ["run"]
    return _FAMILIES[metric.kind](PREFIX + metric.name, metric.text, labels=labels)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: who asks for metrics is nobody's business on the console."""

    def get_stderr(self) -> Any:
        """Return a file that nobody reads: a request can make `prometheus_client` raise."""
        return io.StringIO()


class MetricsServer(WSGIServer):
    """The port of the metrics, served by threads of its own."""

    def __init__(self, listener: socket.socket, collector: RunCollector, *, scrape_s: float) -> None:
        """Serve on `listener`, which listens already."""
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        # `server_bind` would ask a name server for the name of this machine.
        self.server_name, self.server_port = listener.getsockname()[:2]
        self.setup_environ()
        self.set_app(make_wsgi_app(collector.registry))
        self._scrape_s = scrape_s
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        """Connections that are answered, the oldest first, and the time of `time.monotonic()` at
        which they end."""
        self._num_threads = 0
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own; end the oldest if there are too many.

        If `MAX_THREADS` run already, close the new connection instead.
        """
        with self._lock:
            is_full = self._num_threads >= MAX_THREADS
            if not is_full:
                self._num_threads += 1
                if len(self._open) >= MAX_CONNECTIONS:
                    self._end(next(iter(self._open)))
                self._open[request] = time.monotonic() + self._scrape_s
        if is_full:
            self.shutdown_request(request)
            return
        try:
            threading.Thread(target=self._answer, args=(request, client_address), name="scrape", daemon=True).start()
        except RuntimeError:  # no room for a thread
            self._close(request)

    def service_actions(self) -> None:
        """End connections whose time is over; `serve_forever` calls this all the time."""
        now = time.monotonic()
        with self._lock:
            for request in [each for each, end in self._open.items() if end < now]:
                self._end(request)

    def _end(self, request: socket.socket) -> None:
        """End a connection; its thread then closes it. The caller holds the lock."""
        del self._open[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a client that hung up or sent garbage."""

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:
            self.handle_error(request, client_address)
        finally:
            self._close(request)

    def _close(self, request: socket.socket) -> None:
        with self._lock:
            self._open.pop(request, None)
            self._num_threads -= 1
        self.shutdown_request(request)
