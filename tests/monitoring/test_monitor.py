"""The monitor as a process of its own: its death changes no count and repeats no event, and it ends with its run."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import psutil
import pytest

from megatron_recover import trace
from megatron_recover.cluster.monitor import keep_textfile
from megatron_recover.cluster.monitoring import BACKLOG, Monitoring, Wanted
from megatron_recover.deadlines import Deadlines
from tests.monitoring.test_exposition import values
from tests.observe import traces

RUN = "20261126-1"
DEADLINE_S = 40.0


class Watched:
    """A trace that this test writes, and its monitor. The test stands for the launcher."""

    def __init__(self, folder: Path, command: str = "", **deadlines: float) -> None:
        self.run_dir, self.textfile, self.events_file = folder / RUN, folder / "run.prom", folder / "events"
        self.run_dir.mkdir()
        self.said: list[str] = []
        listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.port = listener.getsockname()[1]
        on_event = ("sh", "-c", command or f"cat >> {self.events_file}")
        self.monitoring = Monitoring(
            Wanted(listener=listener, textfile=self.textfile, on_event=on_event), self.run_dir, time.monotonic(),
            msgspec.structs.replace(Deadlines.of(20.0), command_s=1.0, last_events_s=1.0, **deadlines),
            signals=(signal.SIGQUIT,), says=self.said.append,
        )  # fmt: skip

    def write(self, events: Iterable[trace.Event]) -> None:
        with open(self.run_dir / trace.EVENTS_FILE, "ab") as file:
            file.writelines(msgspec.json.encode(each) + b"\n" for each in events)

    @property
    def process(self) -> psutil.Process:
        assert self.monitoring._process is not None
        return psutil.Process(self.monitoring._process.pid)

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            return values(answer.read().decode())

    def events(self) -> list[tuple[int, str]]:
        lines = self.events_file.read_text().splitlines() if self.events_file.exists() else []
        return [(event["number"], event["event"]) for event in map(json.loads, lines)]

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"{what}; {self.said}"
            self.monitoring.poll()
            time.sleep(0.02)


def test_a_killed_monitor_is_started_again_with_the_same_counts_and_repeats_no_event(tmp_path: Path) -> None:
    events = traces.faulty_run().events
    watched = Watched(tmp_path)
    watched.write(events[:-1])
    watched.until(lambda: len(watched.events()) == 4, "both losses are told")
    first, old = watched.metrics(), watched.process
    assert (first["replicas_live"], first["microbatches_lost_total"] > 0, first["ended"]) == (1, True, 0)
    for number in (signal.SIGTERM, signal.SIGQUIT):  # as Slurm sends them; one is a request by default, one here
        old.send_signal(number)
    time.sleep(0.2)
    assert old.status() != psutil.STATUS_ZOMBIE, "it outlives what the launcher handles"
    old.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    watched.monitoring.poll()
    assert time.monotonic() - began < 0.5, "nobody waits for a monitor that is stopped"
    old.kill()
    watched.until(lambda: watched.monitoring._process is not None and watched.process != old, "another one")
    assert watched.metrics() == first, "it is asked before it has read anything, and no count goes back"
    assert any("the monitor ended by SIGKILL: a new one" in line for line in watched.said)
    watched.write([events[-1]])
    process = watched.process
    watched.monitoring.finish(0, "training finished", lambda: False)
    assert watched.events() == [(1, "lost"), (2, "degraded"), (3, "lost"), (4, "degraded"), (5, "ended")]
    assert not process.is_running()
    last = values(watched.textfile.read_text())
    assert (last["ended"], last["exit_code"], last["replicas_live"]) == (1, 0, 1)


def test_the_end_is_told_where_the_trace_lacks_it_and_a_stopped_monitor_goes_on_for_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    watched = Watched(tmp_path)
    watched.write([*traces.quiet_run(2).events[:-1]])
    with open(watched.run_dir / trace.EVENTS_FILE, "ab") as file:
        file.write(b'{"event":"committed","v":2,"t":garbage\n{"event":"generat')  # a line that is none, and a fragment
    watched.until(lambda: watched.metrics()["last_committed_iteration"] == 2, "two steps")
    watched.process.suspend()

    def is_hurried() -> bool:
        """Called between two looks at the monitor, which thus ends between them."""
        assert watched.monitoring._process is not None
        return watched.monitoring._process.wait(DEADLINE_S) != 0

    watched.monitoring.finish(1, "a defect", is_hurried)
    assert capfd.readouterr().err == "", "one that has ended well is not started again"
    assert watched.events() == [(1, "ended")]
    event = json.loads(watched.events_file.read_text())
    assert (event["exit_code"], event["reason"], event["last_committed_iteration"]) == (1, "a defect", 2)


def kill_monitors_at_the_end(watched: Watched, num_monitors: int) -> None:
    """Kill so many monitors, one after the other, while `finish` waits for them."""

    def run() -> None:
        killed: set[int] = set()
        while watched.monitoring._memory >= 0 and len(killed) < num_monitors:  # not closed
            process = watched.monitoring._process
            if watched.monitoring._ends is not None and process is not None and process.pid not in killed:
                killed.add(process.pid)
                process.kill()
            time.sleep(0.005)

    threading.Thread(target=run, daemon=True).start()


def test_the_end_is_told_once_although_the_monitor_is_killed_while_the_launcher_waits_for_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    watched = Watched(tmp_path)
    watched.write(traces.quiet_run(2).events[:-1])
    watched.until(lambda: watched.metrics()["last_committed_iteration"] == 2, "two steps")
    kill_monitors_at_the_end(watched, 2)  # each waits a second for the end in the trace
    watched.monitoring.finish(1, "a defect", lambda: False)
    assert watched.events() == [(1, "ended")]
    assert json.loads(watched.events_file.read_text())["reason"] == "a defect"
    assert capfd.readouterr().err.count("megatron-recover run: the monitor ended by SIGKILL: ") == 2


def test_monitors_that_die_again_and_again_hold_the_end_up_for_no_longer_than_its_deadline(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    watched = Watched(tmp_path, monitor_s=1.0)
    kill_monitors_at_the_end(watched, 1000)
    began = time.monotonic()
    watched.monitoring.finish(0, "", lambda: False)
    assert time.monotonic() - began < 1.0 + watched.monitoring._deadlines.notice_s + 1.0
    assert watched.events() == []
    err = capfd.readouterr().err
    assert err.count("; the end of the run may not have been told") == 1, err
    assert "the monitor ended by SIGKILL: in " in err, "pauses come between them"


def test_a_launcher_that_can_start_no_monitor_at_the_end_reports_that(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, monitor_s=0.5)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("subprocess.Popen", refuse)
    kill_monitors_at_the_end(watched, 1)
    watched.monitoring.finish(0, "", lambda: False)
    err = capfd.readouterr().err
    assert "no monitor can be started (Resource temporarily unavailable)" in err
    assert "megatron-recover run: no monitor runs; the end of the run may not have been told" in err


def test_a_text_file_that_cannot_be_written_any_more_is_one_warning_and_is_tried_again(tmp_path: Path) -> None:
    path, said, over, num_texts = tmp_path / "folder" / "x.prom", list[str](), threading.Event(), 0
    path.parent.mkdir()

    def text() -> bytes:
        nonlocal num_texts
        num_texts += 1
        return f"{num_texts}\n".encode()

    def until(condition: Callable[[], object]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, said
            time.sleep(0.005)

    writing = threading.Thread(target=keep_textfile, args=(path, text, over, said.append, 0.01), daemon=True)
    writing.start()
    until(path.exists)
    aside = path.parent.rename(tmp_path / "aside")
    until(lambda: said)
    time.sleep(0.1)
    assert said == [
        f"WARNING: --metrics-textfile {path} cannot be written (No such file or directory); the run goes on without it"
    ]
    aside.rename(path.parent)
    until(lambda: len(said) > 1)
    over.set()
    writing.join()
    assert said[1:] == [f"--metrics-textfile {path} is written again"]
    assert path.read_text() == f"{num_texts}\n" and [*path.parent.iterdir()] == [path], (
        "the last one is there, and nothing else"
    )


LAUNCHER = """
import os, sys, time
from pathlib import Path
from megatron_recover.cluster.monitor import keep_textfile
from megatron_recover.cluster.monitoring import Monitoring, Wanted
from megatron_recover.deadlines import Deadlines
folder = Path(sys.argv[1])
wanted = Wanted(on_event=("sh", "-c", f"cat >> {folder}/events"))
monitoring = Monitoring(wanted, folder, time.monotonic(), Deadlines.of(20.0), signals=(), says=print)
print(monitoring._process.pid, flush=True)
time.sleep(1000)
"""


def test_the_end_of_a_killed_launcher_is_told_and_its_monitor_ends(tmp_path: Path) -> None:
    """Nobody else reports this: the trace of such a run has no end."""
    events = traces.quiet_run(2).events[:-1]
    (tmp_path / trace.EVENTS_FILE).write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in events))
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        monitor = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
    assert psutil.wait_procs([monitor], timeout=DEADLINE_S)[1] == []
    [event] = map(json.loads, (tmp_path / "events").read_text().splitlines())
    assert (event["event"], event["exit_code"], event["name"]) == ("ended", None, "killed")
    assert event["last_committed_iteration"] == 2


def test_a_command_that_never_ends_holds_the_end_up_for_no_longer_than_its_time(tmp_path: Path) -> None:
    watched = Watched(tmp_path, f"cat >> {tmp_path}/events; sleep 1000")
    watched.write(traces.faulty_run().events)
    watched.until(lambda: watched.events(), "the first one")
    began = time.monotonic()
    watched.monitoring.finish(0, "", lambda: False)
    assert time.monotonic() - began < watched.monitoring._deadlines.monitor_s
    assert watched.events()[-1] == (5, "ended"), "the end is given, whatever else is not"


def test_who_asks_again_for_the_end_waits_for_no_command(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "sleep 1000")
    watched.write(traces.faulty_run().events)
    watched.until(lambda: watched.process.children(), "the command runs")
    process = watched.process
    began = time.monotonic()
    watched.monitoring.finish(0, "", lambda: True)
    assert time.monotonic() - began < 1.5
    assert psutil.wait_procs([process], timeout=DEADLINE_S)[1] == [], "it ends by itself"
