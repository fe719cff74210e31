"""Toy jobs that go on until they are told to end, seen from outside; also at a terminal of their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from tests import forks
from tests.cluster.jobs import ROOT, Outcome, Spec, command
from tests.cluster.waiting import until_ended, until_files

FOR_EVER = 10_000_000
PACE_S = 0.02
"""What a microbatch takes in a job that goes on for ever, if its test does not say: it leaves the processors to others."""


def paced(spec: Spec) -> Spec:
    """Return the job with a pace, if it goes on for ever."""
    return msgspec.structs.replace(spec, pace_s=spec.pace_s or PACE_S) if spec.steps >= FOR_EVER else spec


class Running:
    """A toy job that goes on until it is told to end, seen from outside."""

    def __init__(self, spec: Spec, *, hangup: signal.Handlers = signal.SIG_DFL, is_fresh: bool = False) -> None:
        """`hangup`: what its launcher finds SIGHUP set to. `is_fresh`: it is no fork (`tests/forks.py`)."""
        self.spec = spec = paced(spec)
        self.output = Path(spec.sums_dir or spec.run_dir).with_suffix(".out")
        with open(self.output, "wb") as output:
            self.launcher = forks.start(
                command(spec), cwd=ROOT, environment=os.environ, output=output.fileno(), hangup=hangup, is_fresh=is_fresh
            )

    def until_training(self) -> None:
        self.until(lambda: self.num_applied() > 20, "training")
        self.processes = psutil.Process(self.launcher.pid).children(recursive=True)
        children = {each.name(): each for each in psutil.Process(self.launcher.pid).children()}
        self.recorder, self.monitor = children.pop("recorder"), children.pop("monitor", None)
        self.coordinator = children.pop("coordinator")
        [self.server] = children.values()

    @property
    def ranks(self) -> list[psutil.Process]:
        others = (self.server, self.recorder, self.monitor, self.coordinator)
        return [each for each in self.processes if each not in others]

    def until(self, condition: Callable[[], object], what: str) -> None:
        until_files(condition, what, Path(self.spec.sums_dir or self.spec.run_dir), self.output.parent)

    def num_applied(self) -> int:
        path = Path(self.spec.sums_dir or self.spec.run_dir) / "sums-0-0.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def end(self, deadline_s: float = 90.0) -> Outcome:
        try:
            code = self.launcher.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
            raise
        return Outcome(self.spec, code, self.output.read_text())

    def assert_nothing_left(self) -> None:
        assert len(self.processes) == 3 + bool(self.monitor) + self.spec.replicas * self.spec.ranks
        until_ended(self.processes)

    def close(self) -> None:
        """Kill the launcher, and with it everything."""
        self.launcher.kill()
        self.launcher.wait()


class AtTerminal(Running):
    """A toy job that somebody has started in an interactive shell: what is typed reaches it through a real terminal driver."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec = paced(spec)
        self.output = Path(spec.run_dir).with_suffix(".out")
        self._keyboard, theirs = os.openpty()

        def own_the_terminal() -> None:
            os.setsid()
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

        self.shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
            preexec_fn=own_the_terminal, env={**os.environ, "PS1": "", "HISTFILE": ""},
        )  # fmt: skip
        os.close(theirs)
        self._screen = threading.Thread(target=self._follow_screen, daemon=True)
        self._screen.start()
        self.type(shlex.join(command(spec)) + "\n")

    def _follow_screen(self) -> None:
        with open(self.output, "ab", buffering=0) as output, contextlib.suppress(OSError):  # EIO: the last process is gone
            while shown := os.read(self._keyboard, 2**16):
                output.write(shown)

    def type(self, keys: str) -> None:
        """Press keys; `\\x03` is Ctrl-C, `\\x1a` is Ctrl-Z."""
        os.write(self._keyboard, keys.encode())

    def until_training(self) -> None:
        self.until(lambda: self.num_applied() > 20, "training")
        [launcher] = psutil.Process(self.shell.pid).children()
        self.launcher = launcher
        super().until_training()

    def end(self, deadline_s: float = 90.0) -> Outcome:
        until_ended([self.launcher], deadline_s)
        self.type("echo the exit code was $?.\n")
        self.until(lambda: "\nthe exit code was" in self.output.read_text(), "the shell's word about the exit code")
        text = self.output.read_text()
        return Outcome(self.spec, int(text.rpartition("\nthe exit code was ")[2].partition(".")[0]), text)

    def close(self) -> None:
        """Kill shell and launcher, whatever they are at."""
        for process in (*psutil.Process(self.shell.pid).children(), self.shell):
            process.kill()
        self.shell.wait()
        self._screen.join(10)
        os.close(self._keyboard)


Start = Callable[..., Running]
