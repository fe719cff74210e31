"""Runs toy jobs (`toy.py`) through the real launcher, in a process of its own, and judges what they left behind.

``python -m tests.cluster.jobs '<json>'`` is that process.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_recover import trace
from megatron_recover.authentication.key import key_of_several
from megatron_recover.cluster.job import Job, RankStart, claim_folder, create_run_dir
from megatron_recover.cluster.joining import Place
from megatron_recover.cluster.launcher import Launcher
from megatron_recover.cluster.meeting import Meeting
from megatron_recover.cluster.membership import Joined
from megatron_recover.cluster.monitoring import Wanted
from megatron_recover.cluster.rank_process import TOLD_TO_ALL
from megatron_recover.cluster.signals import EndRequest
from megatron_recover.cluster.slot_check import Wanted as WantedOfSlots
from megatron_recover.config import RecoverConfig
from megatron_recover.control_plane.node_messages import DrainAsked, ReplicaGone
from megatron_recover.core.membership_messages import Loss, LossKind
from megatron_recover.core.placement import place
from megatron_recover.deadlines import Deadlines
from megatron_recover.faults import Fault
from megatron_recover.observe.files import LOGS
from megatron_recover.observe.follow.tail import Tail
from megatron_recover.observe.verify.check import check, describe
from tests import forks

ROOT = Path(__file__).resolve().parents[2]
TOY = Path(__file__).with_name("toy.py")


SUMS = ("connect_s", "slowest_s", "sum_s")
"""The waits inside a sum."""


def sums(seconds: float) -> dict[str, float]:
    """The same wait for each part of a sum."""
    return dict.fromkeys(SUMS, seconds)


class Spec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A toy job."""

    run_dir: str
    replicas: int = 3
    ranks: int = 2
    steps: int = 4
    microbatches: int = 7
    config: RecoverConfig = RecoverConfig()
    heals: bool = False
    """Lost replicas are replaced, as `config.heal` says. Most tests look at those who are left."""
    deadlines: dict[str, float] = msgspec.field(
        default_factory=lambda: {**sums(10.0), "stall_s": 10.0, "finish_s": 10.0, "follow_s": 5.0}
    )
    """Waits that differ from those of the config's deadline (fields of `Deadlines`); `deadline_s` for the ranks only."""
    faults: tuple[Fault, ...] = ()
    dropped: tuple[tuple[int, int, int, int], ...] = ()
    """(replica, rank, step, bucket) whose first reduction is made to fail there."""
    pace_s: float = 0.0
    """What a microbatch takes beside its arithmetic."""
    script: str = str(TOY)
    sums_dir: str = ""
    """Where ranks write what they have applied, if not in `run_dir`."""
    trace_level: trace.Level = "microbatches"
    trace_file_bytes: int = 0
    num_arguments: int = 0
    """So many more arguments of 1,000 characters each: a command line may be longer than one message."""
    rank_start: RankStart = "fork"
    signals: tuple[int, ...] = TOLD_TO_ALL
    shutdown_s: int | None = None
    on_event: tuple[str, ...] = ()
    """Words of the command that gets notices; empty: the job has no monitor."""
    drains: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(step, replicas that are asked to leave once that step is begun), in the order of the steps."""
    meeting: Meeting | None = None
    """How its nodes meet; None: it has one. `replicas x ranks` is the size of the whole job."""
    slots: int = 0
    """Number of ranks of this node, with a meeting."""
    key_file: str = ""
    """File with the key of the job, with a meeting."""
    num_spares: int = 0
    slot_check: str = ""
    """`refuse`: no slot is fit; `hang`: no check ever ends; empty: the usual check."""
    hasty: bool = False
    """Run it under a launcher that gives up on whoever is frozen, and fences it late (`_Hasty`)."""


class Outcome:
    """What a toy job left behind."""

    def __init__(self, spec: Spec, exit_code: int, output: str) -> None:
        self.spec, self.exit_code, self.output = spec, exit_code, output
        self.events = [event for _, event in trace.read(Path(spec.run_dir) / trace.EVENTS_FILE)]

    def of(self, kind: type) -> list:
        """All events of a type, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def roster(self) -> tuple[int, ...]:
        """Of the newest generation."""
        return self.of(trace.Generation)[-1].roster

    def sums(self, replica: int, rank: int) -> list[dict]:
        """What a rank applied, step by step."""
        path = Path(self.spec.sums_dir or self.spec.run_dir) / f"sums-{replica}-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def assert_exactly_once(self) -> None:
        """INV-1 from the data: whatever anybody applied is the sum of all microbatches, each once."""
        expected = 2.0**self.spec.microbatches - 1
        for replica in range(self.spec.replicas):
            for rank in range(self.spec.ranks):
                for line in self.sums(replica, rank):
                    for bucket, (low, high) in line["sums"].items():
                        assert low == high == expected, f"replica {replica} rank {rank} step {line['step']} bucket {bucket}"

    def assert_finished(self, survivors: Sequence[int]) -> None:
        """INV-2: the survivors, and no others, applied all steps, alike."""
        self.assert_exactly_once()
        assert self.exit_code == 0, self.output
        assert self.roster == tuple(survivors), self.output
        steps = list(range(self.spec.steps))
        for rank in range(self.spec.ranks):
            lines = {replica: self.sums(replica, rank) for replica in survivors}
            for replica in survivors:
                assert [line["step"] for line in lines[replica]] == steps, self.output
                assert lines[replica] == lines[survivors[0]]
        verdict = check(self.spec.run_dir)
        assert verdict.holds, describe(verdict)


def command(spec: Spec) -> list[str]:
    """The command line that runs a toy job."""
    return [sys.executable, "-m", "tests.cluster.jobs", msgspec.json.encode(spec).decode()]


def run(spec: Spec, deadline_s: float = 120.0) -> Outcome:
    """Run a toy job to its end. On the deadline its launcher is killed, which ends all its processes, and the test fails."""
    print(f"cd {ROOT} && {shlex.join(command(spec))}")
    exit_code, output = forks.run(command(spec), cwd=ROOT, deadline_s=deadline_s)
    print(output)
    return Outcome(spec, exit_code, output)


class _Hasty(Launcher):
    """Gives up on a frozen rank's replica at once, but kills it only when another has applied `LATE` more steps after its thaw.

    Nothing in the protocol may rely on a fence that is quick: another node's agent may take as long as it likes.
    """

    LATE = 60
    """So many that it may do what it likes meanwhile. It has also recorded something since it was thawed."""

    def _make_parts(self) -> None:
        super()._make_parts()
        self._fence_now, self._fences.fence = self._fences.fence, self._fence_if_due  # type: ignore[method-assign]

    def _spawn_all(self) -> None:
        super()._spawn_all()
        self._news = Tail(self._job.run_dir / trace.EVENTS_FILE)
        self._overdue: dict[int, int | None] = {}
        """Replica -> the step of the others that its fence waits for, once it is thawed."""
        self._awake: set[int] = set()
        """Those that have recorded something since they were thawed."""
        self._step = 0
        self._look()

    def _look(self) -> None:
        for line in self._news.lines():
            event, _ = trace.parse(line)
            if (author := getattr(event, "replica", None)) is not None and self._overdue.get(author) is not None:
                self._awake.add(author)
            if isinstance(event, trace.Fault) and event.until is not None:
                self._overdue[event.replica] = None
                self._send(ReplicaGone(Loss(event.replica, LossKind.SUSPECTED, "it is frozen")))
            elif isinstance(event, trace.Thawed):  # the trace is late itself: what counts is what comes after this
                self._overdue[event.replica] = self._step + self.LATE
            elif isinstance(event, trace.Applied):
                self._step = max(self._step, event.step)
                late = [each for each, step in self._overdue.items() if step is not None and event.step >= step]
                for replica in self._awake.intersection(late):
                    del self._overdue[replica]
                    self._fence_now(replica)
        self._loop.after(0.01, self._look)

    def _fence_if_due(self, replica: int) -> None:
        if replica not in self._overdue:
            self._fence_now(replica)

    def _is_over(self) -> bool:
        for replica in self._overdue:  # the others were so fast that they have finished
            self._fence_now(replica)
        self._overdue.clear()
        return super()._is_over()


class _Draining(Launcher):
    """Asks replicas to leave at given steps, or later: when those that were asked before have left."""

    drains: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def _spawn_all(self) -> None:
        super()._spawn_all()
        self._news = Tail(self._job.run_dir / trace.EVENTS_FILE)
        self._is_asking, self._leaving = False, set[int]()
        self._look()

    def _look(self) -> None:
        for line in self._news.lines():
            event, _ = trace.parse(line)
            match event:
                case trace.LeaveAsked(replicas=replicas, refused=refused):
                    self._is_asking = False
                    self._leaving |= {*replicas} - {each.replica for each in refused}
                case trace.Generation(left=left):
                    self._leaving -= {*left}
                case trace.Plan(step=step) if self.drains and step >= self.drains[0][0]:
                    if not self._is_asking and not self._leaving:  # else all would leave together, on a busy machine
                        (_, replicas), *self.drains = self.drains
                        self._is_asking = True
                        self._send(DrainAsked(replicas, "drain"))
        self._loop.after(0.01, self._look)


def _hang(wanted: WantedOfSlots) -> str:
    time.sleep(3600)
    return ""


_CHECKS = {"refuse": lambda wanted: "a test says so", "hang": _hang}


def main() -> int:
    """Run the job in this process."""
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    if not spec.heals:
        spec = msgspec.structs.replace(spec, config=msgspec.structs.replace(spec.config, heal="off"))
    settings = {
        "steps": spec.steps,
        "microbatches": spec.microbatches,
        "config": msgspec.to_builtins(spec.config),
        "deadlines": spec.deadlines,
        "dropped": spec.dropped,
        "pace_s": spec.pace_s,
        "sums_dir": spec.sums_dir,
    }
    os.chdir(ROOT)
    while (code := _run(spec, settings)) is None:  # as `cli/run.py` does it
        pass
    return code


def _run(spec: Spec, settings: dict[str, Any]) -> int | None:
    """Run the job; None if this node is to meet the others anew."""
    others = {name: seconds for name, seconds in spec.deadlines.items() if name != "deadline_s"}  # its imports take their time
    deadlines = msgspec.structs.replace(spec.config.deadlines, **others)
    joined, in_job = _joined(spec, deadlines)
    job = Job(
        argv=(spec.script, json.dumps(settings), *("x" * 1000,) * spec.num_arguments),
        num_replicas=spec.replicas, layout=trace.Layout(tp=1, pp=spec.ranks),
        config=spec.config, faults=spec.faults, num_spares=spec.num_spares, **in_job,
        num_microbatches=spec.microbatches, microbatch_samples=1, least_microbatches=spec.microbatches,
        trace_level=spec.trace_level, trace_file_bytes=spec.trace_file_bytes,
        rank_start=spec.rank_start, signals=spec.signals, shutdown_s=spec.shutdown_s,
        preload=("torch", "megatron_recover.data_plane.direct", "megatron_recover.control_plane.rank_driver"),
    )  # fmt: skip
    wanted = Wanted(on_event=spec.on_event) if spec.on_event else None
    given = {"slot_check": _CHECKS[spec.slot_check]} if spec.slot_check else {}
    launcher = (_Hasty if spec.hasty else _Draining if spec.drains else Launcher)(
        job, deadlines=deadlines, wanted=wanted, joined=joined, **given
    )
    if isinstance(launcher, _Draining):
        launcher.drains = spec.drains
    code = launcher.run()
    if not launcher.starts_anew:
        return code
    launcher.release_signals()
    return None


def _joined(spec: Spec, deadlines: Deadlines) -> tuple[Joined | None, dict[str, Any]]:
    """Meet the other nodes, if there are any; return the place of this one, and what follows for its job."""
    if spec.meeting is None:
        return None, {"run_dir": create_run_dir(Path(spec.run_dir))}
    request = EndRequest(spec.signals)
    request.keep()
    here = Place(spec.meeting, deadlines, request)
    joined = here.join(
        key=key_of_several(Path(spec.key_file)), level=spec.trace_level, slots=spec.slots,
        run_dir=lambda: create_run_dir(Path(spec.run_dir)), run_id="toy", alike=(),
    )  # fmt: skip
    met = joined.met
    assert met is not None
    folder = Path(met.run_dir)
    if met.you:
        folder = claim_folder(folder / "nodes" / str(met.you), LOGS)
    slots = [node.slots for node in met.at_start]
    placement = place(slots, num_replicas=spec.replicas, num_ranks=spec.ranks)
    return joined, {
        "run_dir": folder, "node": met.you, "nodes": met.nodes, "is_late": met.is_late, "placement": placement,
        "address": here.address, "ports": spec.meeting.ports, "node_s": spec.meeting.node_s,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
