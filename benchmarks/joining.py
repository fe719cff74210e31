"""A real job with paced forwards that is watched while it trains, and whose ranks get SIGKILL.

The job is that of `megatron-recover run`, started through `benchmarks.stamped`, which tells the
launcher's clock. It trains until it is ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import psutil

from benchmarks import join_times
from benchmarks.common import end
from benchmarks.stamped import LAUNCH, MARK, REQUEST
from megatron_recover.config import inherited_environment
from megatron_recover.observe.follow.tail import Tail
from tests.system.jobs import ROOT, Job, command_of

LOOK_S = 0.05
PATIENCE_S = 120.0
"""The longest wait for anything that a job does."""
ENDLESS = 1_000_000
"""Steps of a job that is ended from outside."""
HIDDEN, LAYERS, TOKENS = 256, 4, 64
"""Model of 3.3 M parameters, 40 MB of state with Adam, where its size counts. A forward and a
backward take about 30 ms of a processor."""


class Pace(NamedTuple):
    """Least wall time of a forward and of a backward, in seconds."""

    forward_s: float
    backward_s: float

    @property
    def flags(self) -> list[str]:
        """Return the flags of `scripts/paced_pretrain.py`."""
        return ["--paced-forward-s", str(self.forward_s), "--paced-backward-s", str(self.backward_s)]


def shaped(job: Job, hidden: int = HIDDEN, layers: int = LAYERS, tokens: int = TOKENS, samples: int = 1) -> Job:
    """Return an endless job with a model of this size, and `samples` sequences a microbatch."""
    size = (
        "--hidden-size", str(hidden), "--num-layers", str(layers), "--num-attention-heads", "8", "--seq-length", str(tokens),
        "--max-position-embeddings", str(tokens), "--micro-batch-size", str(samples),
        "--global-batch-size", str(samples * job.microbatches), "--num-workers", "0",
    )  # fmt: skip
    return dataclasses.replace(
        job, steps=ENDLESS, determinism="fast", bucket_elements=40_000_000, eval_interval=ENDLESS, extra=(*size, *job.extra),
        module="benchmarks.stamped",
    )  # fmt: skip


class Watched:
    """A job that trains within this context."""

    def __init__(self, job: Job, folder: pathlib.Path, data: pathlib.Path, pace: Pace, *, chaos: str = "") -> None:
        """Prepare to run `job` (see `shaped`) in the new `folder`; `chaos`: content of its file."""
        folder.mkdir()
        script = ROOT / "scripts" / "paced_pretrain.py"
        self._command = [*command_of(job, folder / "run", data, chaos=chaos, script=script), *pace.flags]
        self._output = folder / "output.log"
        self._tail = Tail(folder / "run" / "events.jsonl")
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Watched:
        environment = {"OMP_NUM_THREADS": "1"} | inherited_environment()
        with open(self._output, "wb") as stream:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        end(self._process)
        self.events += map(json.loads, self._tail.lines())

    def look(self) -> None:
        """Read new events. Raises RuntimeError with what was printed if the job has ended."""
        is_over = self._process.poll() is not None
        self.events += map(json.loads, self._tail.lines())
        if is_over:
            printed = self._output.read_text(errors="replace")
            raise RuntimeError(f"the job has ended ({self._process.returncode}): {self._command!r}\n{printed[-4000:]}")

    def until[Found](self, find: Callable[[], Found | None], what: str, patience_s: float = PATIENCE_S) -> Found:
        """Wait until `find` finds something in the events. Raises TimeoutError."""
        last = time.monotonic() + patience_s
        while time.monotonic() < last:
            self.look()
            if (found := find()) is not None:
                return found
            time.sleep(LOOK_S)
        raise TimeoutError(f"no {what} after {patience_s:g} s: {self._command!r}\n{self._output.read_text()[-4000:]}")

    def wait(self, seconds: float) -> None:
        """Let the job train on."""
        last = time.monotonic() + seconds
        while (left := last - time.monotonic()) > 0:
            self.look()
            time.sleep(min(left, LOOK_S))

    def until_steps(self, number: int) -> None:
        """Wait for so many more committed steps."""
        goal = len(join_times.steps(self.events)) + number
        self.until(lambda: len(join_times.steps(self.events)) >= goal or None, f"{number} steps")

    def members(self) -> tuple[int, ...]:
        """Return the proven members that live, as far as the trace tells by now."""
        self.look()
        return join_times.members(self.events)

    def requested(self, replica: int) -> float:
        """Return when the first rank of a replica was requested, in the trace's time."""
        return min(s - self._launched() for stage, of, _, s in self._stamps() if (stage, of) == (REQUEST, replica))

    def kill(self, replica: int) -> float:
        """Send SIGKILL to rank 0 of a replica; return when, in the trace's time."""
        name = f"replica-{replica}.0"
        ranks = [each for each in psutil.Process(self._process.pid).children(recursive=True) if each.name() == name]
        [rank] = [each for each in ranks if each.status() != psutil.STATUS_ZOMBIE]
        since = self._launched()
        now = time.monotonic()
        os.kill(rank.pid, signal.SIGKILL)
        print(f"SIGKILL to {name} at {now - since:.2f} s", file=sys.stderr, flush=True)
        return now - since

    def _launched(self) -> float:
        return next(float(seconds) for stage, _, _, seconds in self._stamps() if stage == LAUNCH)

    def _stamps(self) -> list[tuple[str, int, int, float]]:
        lines = self._output.read_text(errors="replace").splitlines()
        return [tuple(json.loads(line.removeprefix(MARK))) for line in lines if line.startswith(MARK)]


def strike(job: Watched, victim: int) -> join_times.Return:
    """Kill a replica, and wait until the one in its place is a member."""
    at = job.kill(victim)
    return job.until(lambda: join_times.returned(job.events, victim, at), f"return of replica {victim}")


def without_newcomer(job: Job, folder: pathlib.Path, data: pathlib.Path, pace: Pace, number: int) -> join_times.Usual:
    """Return what the members take for a step that are left of `job` when its last one is lost.

    Nobody is formed in its place. `number`: steps that are measured.
    """
    with Watched(dataclasses.replace(job, heal="off"), folder, data, pace) as watched:
        watched.until_steps(2)
        at = watched.kill(job.replicas - 1)
        lost = watched.until(
            lambda: next((event["t"] for event in join_times.of(watched.events, "generation") if event["t"] > at), None), "plan"
        )

        def after() -> list[join_times.Step] | None:
            found = [step for step in join_times.steps(watched.events) if step.begin > lost][1:]
            return found if len(found) >= number else None

        return join_times.usual(watched.events, watched.until(after, f"{number} steps"))
