"""`check`, `report` and summary on large traces: the speed of `check`, and the memory of each.

The traces are valid and generated: each rank's events are those of a real rank, and in the middle
of the run a replica dies within a step. `long` has many small steps, `wide` few steps of 8192
microbatches on 128 ranks per replica. Each command reads each trace in a process of its own. The
kernel reports that process's largest resident memory.

    python -m benchmarks.run --only check
    python -m benchmarks.check long|wide GIGABYTES FOLDER

The last command writes one trace of that size into FOLDER, measures it and keeps it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from benchmarks.common import Row, row
from megatron_recover import trace
from megatron_recover.core.membership_messages import LossKind

GIGABYTES = 1.0
DEADLINE_S = 1800.0
STEP, TIME = 7_777_777, 77_777.5
"""Placeholders for the step's number and time, in the text of a step that is written many times."""


@dataclass(frozen=True)
class Shape:
    """The shape of a job."""

    replicas: int
    tp: int
    pp: int
    microbatches: int
    buckets: int
    """Buckets of each stage, the ledger not counted."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks of one replica. The ranks of a stage have adjacent numbers."""
        return self.tp * self.pp

    @property
    def bucket_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each bucket as in `trace.Joined`; the ledger is on the last stage."""
        stages = [tuple(range(stage * self.tp, (stage + 1) * self.tp)) for stage in range(self.pp)]
        return (*(stage for stage in stages for _ in range(self.buckets)), stages[-1])

    def buckets_of(self, rank: int) -> tuple[int, ...]:
        """Return the buckets that a rank holds."""
        return tuple(bucket for bucket, ranks in enumerate(self.bucket_ranks) if rank in ranks)


SHAPES = {
    "long": Shape(replicas=4, tp=2, pp=4, microbatches=32, buckets=8),
    "wide": Shape(replicas=2, tp=8, pp=16, microbatches=8192, buckets=25),
}


@dataclass
class Writer:
    """The writer of a run's events."""

    shape: Shape
    generation: int = 1

    def start(self) -> Iterator[trace.Event]:
        """Yield the events of the run up to its first step."""
        shape = self.shape
        roster = tuple(range(shape.replicas))
        yield trace.RunStarted(
            replicas=shape.replicas, layout=trace.Layout(tp=shape.tp, pp=shape.pp), determinism="exact", seed=1, argv=("run",),
            num_microbatches=shape.microbatches,
        )  # fmt: skip
        for replica in roster:
            yield trace.Joined(replica=replica, fingerprint="f", bucket_ranks=shape.bucket_ranks)
        yield trace.Generation(generation=1, roster=roster, reason="start")
        yield from self.statuses(roster, 0, {})

    def statuses(self, roster: Sequence[int], step: int, held: dict[int, tuple[int, ...]]) -> Iterator[trace.Event]:
        """Yield the events of all members entering the generation, with their statuses."""
        for replica in roster:
            yield trace.Entered(replica=replica, generation=self.generation, seconds=0.002)
        buckets = tuple(range(len(self.shape.bucket_ranks)))
        for replica in roster:
            ids = held.get(replica, ())
            yield trace.Status(
                replica=replica, generation=self.generation, step=step, work=bool(held), complete=(),
                contributions=(trace.Contribution(buckets=buckets, microbatches=ids),) if ids else (),
                committed=step - 1 if step else None,
            )  # fmt: skip

    def deal(self, ids: Sequence[int], roster: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return the microbatches dealt to each member."""
        return {replica: tuple(ids[i :: len(roster)]) for i, replica in enumerate(roster)}

    def compute(self, roster: Sequence[int], dealt: dict[int, tuple[int, ...]], step: int, t: float) -> Iterator[trace.Event]:
        """Yield plans, and forwards and backwards of the dealt microbatches, by replica."""
        shape, buckets = self.shape, tuple(range(len(self.shape.bucket_ranks)))
        quotas = tuple(len(dealt[one]) for one in roster)
        for replica in roster:
            computes = (trace.Compute(microbatches=dealt[replica], into=buckets),) if dealt[replica] else ()
            yield trace.Plan(
                t=t, replica=replica, generation=self.generation, step=step, label=f"train {STEP}",
                num_microbatches=shape.microbatches, roster=tuple(roster), quotas=quotas, computes=computes, reduces=buckets,
            )  # fmt: skip
        into = [shape.buckets_of(rank) for rank in range(shape.ranks)]
        for replica in roster:
            where = {"t": t, "replica": replica, "generation": self.generation, "step": step}
            for microbatch in dealt[replica]:
                for rank in range(shape.ranks):
                    yield trace.MicrobatchStarted(**where, rank=rank, microbatch=microbatch)
                for rank in reversed(range(shape.ranks)):
                    yield trace.MicrobatchFinished(
                        **where, rank=rank, microbatch=microbatch, seconds=0.012345, backward_s=0.008765, into=into[rank]
                    )

    def commit(self, roster: Sequence[int], step: int, t: float) -> Iterator[trace.Event]:
        """Yield the events of sums, votes, commits and optimizer steps."""
        where = {"t": t, "generation": self.generation, "step": step}
        label, digest = f"train {STEP}", "0123456789abcdef"
        for bucket, ranks in enumerate(self.shape.bucket_ranks):
            for replica in roster:
                for rank in ranks:
                    yield trace.Reduced(
                        **where, replica=replica, rank=rank, bucket=bucket, version=self.generation, checksum=10**15 + bucket,
                        provenance="ones", seconds=0.002345,
                    )  # fmt: skip
        versions = tuple(
            trace.Result(bucket=bucket, version=self.generation, checksums=(10**15 + bucket,) * len(ranks))
            for bucket, ranks in enumerate(self.shape.bucket_ranks)
        )
        for replica in roster:
            yield trace.Voted(**where, replica=replica, digest=digest)
        for replica in roster:
            yield trace.Committed(**where, replica=replica, label=label, digest=digest, adopted=False, versions=versions)
            for rank in range(self.shape.ranks):
                last = rank == self.shape.ranks - 1
                yield trace.Applied(
                    **where,
                    replica=replica,
                    rank=rank,
                    label=label,
                    parameter_digest=f"{rank:016x}",
                    loss=2.5 if last else None,
                )

    def quiet_step(self, roster: Sequence[int], step: int = STEP, t: float = TIME) -> Iterator[trace.Event]:
        """Yield the events of a step in which nothing fails."""
        yield from self.compute(roster, self.deal(range(self.shape.microbatches), roster), step, t)
        yield from self.commit(roster, step, t)

    def step_with_a_death(self, roster: Sequence[int], step: int, t: float) -> Iterator[trace.Event]:
        """Yield the events of a step with a death.

        The last replica dies when everything is computed; the others compute its share again.
        """
        *others, victim = roster
        dealt = self.deal(range(self.shape.microbatches), roster)
        yield from self.compute(roster, dealt, step, t)
        yield trace.Fault(t=t, replica=victim, rank=0, point="before_reduce", kind="kill", step=step)
        yield trace.Failure(t=t, replica=victim, rank=0, cause="SIGKILL")
        yield trace.Fenced(t=t, replica=victim, ranks=tuple(range(self.shape.ranks)))
        self.generation += 1
        lost = trace.Loss(replica=victim, kind=LossKind.PROCESS_ENDED, detail="SIGKILL")
        yield trace.Generation(t=t, generation=self.generation, roster=tuple(others), losses=(lost,), reason="SIGKILL")
        yield from (msgspec.structs.replace(one, t=t) for one in self.statuses(others, step, dealt))
        yield from self.compute(others, self.deal(dealt[victim], others), step, t)
        for replica in others:
            yield trace.Recovery(
                t=t, replica=replica, generation=self.generation, step=step, phase="commit", seconds=0.01
            )  # fmt: skip
        yield from self.commit(others, step, t)


def _text(events: Iterator[trace.Event]) -> bytes:
    encode = msgspec.json.Encoder().encode
    return b"".join(encode(event) + b"\n" for event in events)


def write(shape: Shape, num_bytes: float, place: Path) -> int:
    """Write a valid trace of about `num_bytes` bytes and at least three steps.

    Returns the number of steps.
    """
    writer, roster = Writer(shape), list(range(shape.replicas))

    def at(text: bytes, step: int) -> bytes:
        changes = {
            f"train {STEP}": f"train {step + 1}",
            f'"step":{STEP}': f'"step":{step}',
            f'"t":{TIME}': f'"t":{0.1 * step:.6f}',
        }
        for old, new in changes.items():
            text = text.replace(old.encode(), new.encode())
        return text

    with open(place, "wb") as file:
        file.write(_text(writer.start()))
        step = _text(writer.quiet_step(roster))
        count = max(1, round((num_bytes / len(step) - 1) / 2))
        for number in range(count):
            file.write(at(step, number))
        file.write(at(_text(writer.step_with_a_death(roster, STEP, TIME)), count))
        step = _text(writer.quiet_step(roster[:-1]))
        for number in range(count + 1, 2 * count + 1):
            file.write(at(step, number))
        file.write(_text(iter([trace.RunFinished(t=0.1 * (2 * count + 1), exit_code=0)])))
    return 2 * count + 1


COMMANDS = {
    "check": ("-m", "megatron_recover", "check", "--json"),
    "report": ("-m", "megatron_recover", "report"),
    "summary": ("-m", "megatron_recover.cli.finish"),
}


def read(run_dir: Path, what: str) -> tuple[float, float, dict[str, object]]:
    """Run the command `what` on a trace.

    Returns its seconds, its largest resident memory in bytes, and the verdict if it is `check`.
    """
    begin = time.monotonic()
    command = [sys.executable, *COMMANDS[what], str(run_dir)]
    largest = 0
    process = psutil.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        while process.poll() is None and time.monotonic() - begin < DEADLINE_S:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                break
            found = re.search(r"VmHWM:\s+(\d+) kB", status)
            largest = max(largest, 1024 * int(found.group(1)) if found else 0)
            time.sleep(0.1)
    finally:
        if process.poll() is None and time.monotonic() - begin >= DEADLINE_S:
            process.kill()
    output, _ = process.communicate(timeout=DEADLINE_S)
    if what != "check" and process.returncode:
        raise RuntimeError(f"{what} ended with exit code {process.returncode}")
    return time.monotonic() - begin, largest, json.loads(output) if what == "check" else {}


def measured(name: str, run_dir: Path, num_bytes: float) -> list[Row]:
    """Write a trace into `run_dir`, and measure all commands on it."""
    place = run_dir / trace.EVENTS_FILE
    write(SHAPES[name], num_bytes, place)
    size = place.stat().st_size
    with open(place, "rb") as file:
        events = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 24), b""))
    about = f"a trace of {size / 1e9:.2f} GB, {events / 1e6:.2f} million events"
    found = []
    for what in COMMANDS:
        seconds, memory, verdict = read(run_dir, what)
        if what == "check":
            if not (verdict["holds"] and verdict["finished"]):
                raise RuntimeError(f"the trace of {name} does not hold: {verdict['violations']}, {verdict['problems']}")
            found.append(row(f"check, {name}: events a second", [events / seconds], "1/s", baseline=about))
        found.append(row(f"{what}, {name}: resident memory", [memory / 1e6], "MB", baseline=about, goal="< 1000"))
    return found


def rows() -> Iterator[Row]:
    """Yield events per second and memory, for both shapes."""
    for name in SHAPES:
        with tempfile.TemporaryDirectory(prefix="megatron-recover-") as folder:
            yield from measured(name, Path(folder), GIGABYTES * 1e9)


if __name__ == "__main__":
    shape, gigabytes, place = sys.argv[1:]
    for one in measured(shape, Path(place), float(gigabytes) * 1e9):
        print(f"{one.name}: {one.value:.4g} {one.unit} ({one.baseline})")
