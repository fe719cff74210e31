"""A run of which there is only the recording: the test stands for the launcher, and for ranks that record or print."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

from megatron_recover import trace
from megatron_recover.cluster.job import Job, create_run_dir
from megatron_recover.cluster.output import Output
from megatron_recover.cluster.recording import Recording
from megatron_recover.config import RecoverConfig
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.trace import ring
from megatron_recover.trace.node_clock import NodeClock

DEADLINE_S = 60.0


def num_waits() -> int:
    """How often this thread has gone to sleep by itself. A thread that a busy machine puts off has not."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class Run:
    """A recording with a real recorder process."""

    def __init__(self, run_dir: Path, **fields: object) -> None:
        """`run_dir` must not exist. `fields` are those of the job; `fifos`: files of it that are FIFOs which nobody reads.

        `deadlines`: other waits than those of the job's config. `has_stamps`: the trace is that of one of several nodes.
        `coordinator`: descriptor of a ring in which a coordinator records already.
        """
        self.run_dir = create_run_dir(run_dir)
        for name in fields.pop("fifos", ()):  # type: ignore[attr-defined]
            os.mkfifo(self.run_dir / name)
        deadlines, has_stamps = fields.pop("deadlines", None), bool(fields.pop("has_stamps", False))
        coordinator: int | None = fields.pop("coordinator", None)  # type: ignore[assignment]
        self.job = Job(
            argv=("script.py",), layout=trace.Layout(tp=1, pp=1), config=RecoverConfig(), run_dir=self.run_dir,
            **{"num_replicas": 2, **fields},
        )  # fmt: skip
        self.clock = NodeClock(None)
        self.recording = Recording(
            self.job, time.monotonic(), self.clock, has_stamps=has_stamps, coordinator=coordinator, deadlines=deadlines
        )

    def rank(self, replica: int) -> ring.RingLog:
        """Return the ring of a rank that records."""
        return ring.RingLog(self.recording.descriptors(replica, 0)[ring.DESCRIPTOR], self.clock)

    def output(self, replica: int = 0) -> Output:
        """Return the output of a rank that prints."""
        return self.recording.output_of_rank(replica, 0, self.job.place_of(replica, 0))

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Return when `condition()` holds, while the launcher watches as it does."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {what}"
            self.recording.poll()
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        """Of the recorder."""
        assert self.recording._process is not None
        return self.recording._process.pid

    def stop(self) -> None:
        """Stop the recorder. It does nothing more when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def until_it_records(self) -> None:
        """Return when the recorder has written something."""
        self.recording.record(trace.Thawed(replica=0, rank=0))
        self.until(lambda: list(trace.read(self.run_dir)), "the first event")

    def finish(self) -> list[trace.AnyEvent]:
        """End the run well, and return its trace."""
        self.recording.record(trace.RunFinished(exit_code=0))
        self.recording.finish(ExitCode.OK, "training finished")
        self.recording.close()
        return [each for _, each in trace.read(self.run_dir)]
