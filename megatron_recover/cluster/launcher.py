"""The life of a run in the launcher's process: dry run, start of all ranks, watch over them, exit code; nothing stays behind.

It joins the agent (processes), the membership (decisions) and the console. What a loss does to the job is decided by the core.
What is decided here is what there is no job for yet or any more: bad input (of the dry run, or of a rank before generation 1),
a fork server that is lost, a second signal, and how long a process that has been told to end may take.
"""

from __future__ import annotations

import functools
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from megatron_recover import config as settings
from megatron_recover import trace
from megatron_recover.cluster.agent import Agent, AgentLost, End
from megatron_recover.cluster.console import Console
from megatron_recover.cluster.forkserver import TOLD_TO_ALL
from megatron_recover.cluster.job import LOGS, Job, Ports, sharing_a_gpu, write_description
from megatron_recover.cluster.membership import Membership
from megatron_recover.cluster.thawing import Thawing
from megatron_recover.cluster.watch import Watch, explaining_first
from megatron_recover.collectives.loop import Loop
from megatron_recover.config import CONTEXT_VARIABLE, RankContext
from megatron_recover.core.coordinator import Policy
from megatron_recover.core.values import ExitCode
from megatron_recover.megatron.arguments import BAD_ARGUMENTS

_DRY_RUN = -1
"""What the agent calls the process that judges the arguments: it belongs to no replica."""
_POLL_S = 0.05
"""Between two looks at every rank's /proc entry: a death is known after half of it on average (Note [Seeing a death])."""
_GRACE_S = 0.2
"""How long a complaint of a leader waits for the agent to see a process end, which would explain it."""
_IMPORT_DEADLINE_S = 600.0
_DRY_RUN_DEADLINE_S = 300.0
_CALLS_PRETRAIN = "called megatron_recover.megatron.pretrain; does it call Megatron's own instead?"
_LOAD_DEADLINE_S = 3600.0
"""From the start of the processes to the first replica that is ready: a checkpoint is loaded, an index of the data built."""
_START_DEADLINE_S = 900.0
"""From the first replica that is ready to the last."""
_END_DEADLINE_S = 60.0
"""For the ranks to end by themselves after a job that ended well."""
_STOP_DEADLINE_S = 10.0
"""The same after one that did not."""


class Launcher:
    """One run. Everything happens in the thread that calls `run`."""

    def __init__(self, job: Job, console: Console) -> None:
        self._job, self._console = job, console
        self._loop = Loop()
        self._ports = Ports()
        self._started_at = time.monotonic()
        self._log = trace.EventLog(job.run_dir / trace.EVENTS_FILE, self._started_at)
        self._thawing = Thawing(job.faults, job.run_dir / trace.EVENTS_FILE)
        self._fencing: set[int] = set()
        self._gone: set[int] = set()
        """Replicas that have been fenced or are being."""
        self._ending: tuple[int, str] | None = None
        self._end_by = 0.0
        self._num_signals = 0
        self._agent: Agent
        self._ranks: Watch
        self._membership: Membership

    def run(self) -> int:
        """Run the job to its end; its exit code (core.values.ExitCode, or 128 + signal when it was killed on request)."""
        job = self._job
        write_description(job)
        self._log.record(
            trace.RunStarted(
                replicas=job.num_replicas,
                layout=job.layout,
                determinism=job.config.determinism,
                seed=job.seed,
                argv=job.argv,
                min_replicas=job.config.min_replicas,
                num_microbatches=job.num_microbatches,
            )  # fmt: skip
        )
        self._console.start()
        try:
            with self._signals():
                exit_code = self._run()
            self._log.record(trace.RunFinished(exit_code=exit_code))
            self._log.close()
            self._console.finished(exit_code, self._ending[1] if self._ending else "")
        finally:
            self._console.close()  # whatever is raised is told after what it shows, on a terminal that is whole again
        return exit_code

    @property
    def has_begun(self) -> bool:
        """Whether training has begun: the job has had a generation."""
        return self._membership.generation > 0

    def _run(self) -> int:
        job = self._job
        environment = settings.inherited_environment() | _worker_defaults(settings.inherited_environment())
        self._agent = Agent(preload=job.preload, environment=environment, log=job.run_dir / LOGS / "forkserver.log")
        self._ranks = Watch(self._agent, deadline_s=job.config.save_timeout_s, record=self._log.record, says=self._console.says)
        self._membership = Membership(
            Policy(num_replicas=job.num_replicas, min_replicas=job.config.min_replicas),
            loop=self._loop,
            timers_s={
                "follow_timeout_s": job.config.follow_timeout_s,
                "finish_timeout_s": job.config.stall_timeout_s,
                "save_timeout_s": job.config.save_timeout_s,
                "grace_s": _GRACE_S,
                "load_timeout_s": _LOAD_DEADLINE_S,
                "start_timeout_s": _START_DEADLINE_S,
            },
            record=self._log.record,
            fence=self._fence,
            on_end=self._end,
        )
        try:
            self._console.says(
                f"importing {', '.join(job.preload) or 'nothing'} once for {job.num_replicas * job.num_ranks} ranks"
            )
            if self._wait_for_imports() and self._dry_run():
                self._spawn_all()
                self._watch()
        except AgentLost as error:
            self._end(ExitCode.FAILED, str(error))
        finally:
            self._agent.close()
            self._ranks.close()
            self._membership.close()
            self._loop.close()
            self._ports.close()
        assert self._ending is not None
        return self._ending[0]

    # --- Start -------------------------------------------------------------------------------------------------------

    def _until[Answer](self, answer: Callable[[], Answer], deadline_s: float, late: str) -> Answer | None:
        """The first answer that is one; None if a signal or the deadline came first, which ends the run."""
        deadline = time.monotonic() + deadline_s
        while not self._num_signals:
            if found := answer():
                return found
            self._wake_server()
            if time.monotonic() > deadline:
                self._end(ExitCode.FAILED, late)
                return None
            self._loop.run_once(_POLL_S)
        self._end(ExitCode.INTERRUPTED, "interrupted before training began")
        return None

    def _wait_for_imports(self) -> bool:
        """False if a signal or the deadline ended the wait. Raises `AgentLost` where an import fails."""
        late = f"importing took more than {_IMPORT_DEADLINE_S:.0f} s"
        if not self._until(self._agent.is_ready, _IMPORT_DEADLINE_S, late):
            return False
        self._loop.watch_readable(self._agent.fileno(), lambda: None)
        return True

    def _dry_run(self) -> bool:
        """Whether the script, run once with its own parser and Megatron's, accepts its arguments; it ends before it trains."""
        script, log = self._job.argv[0], self._job.run_dir / LOGS / "dry-run.log"
        environment = self._environment(0, 0, leader="", master_port=0, dry_run=True)
        argv = self._job.argv if self._job.dry_run is None else (str(self._job.dry_run), *self._job.argv)
        self._agent.spawn(_DRY_RUN, 0, argv=argv, environment=environment, log=log)
        late = f"in {_DRY_RUN_DEADLINE_S:.0f} s {script} never {_CALLS_PRETRAIN}; see {log}"
        ends = self._until(self._agent.poll, _DRY_RUN_DEADLINE_S, late)
        if not ends:
            return False
        [end] = ends
        if end.status == ExitCode.BAD_INPUT:
            self._end(ExitCode.BAD_INPUT, _refusal(log))
        elif end.status == ExitCode.OK:
            self._end(ExitCode.BAD_INPUT, f"{script} never {_CALLS_PRETRAIN}")
        elif end.status != settings.DRY_RUN_PASSED:
            self._end(ExitCode.FAILED, f"{script} ended by {end.cause} before it trained; see {log}")
        return end.status == settings.DRY_RUN_PASSED

    def _spawn_all(self) -> None:
        job = self._job
        for replica in range(job.num_replicas):
            leader = f"127.0.0.1:{self._ports.take()}"
            master_port = self._ports.take()
            for rank in range(job.num_ranks):
                environment = self._environment(replica, rank, leader=leader, master_port=master_port)
                start = functools.partial(
                    self._agent.spawn, replica, rank, argv=job.argv, environment=environment, log=job.log_of(replica, rank)
                )
                self._ranks.spawn(replica, rank, lambda descriptors, start=start: start(descriptors=descriptors))
        self._membership.launched()

    def _environment(self, replica: int, rank: int, *, leader: str, master_port: int, dry_run: bool = False) -> dict[str, str]:
        """What a rank's process finds in its environment beside what all inherit."""
        job = self._job
        mine = tuple(
            msgspec.json.encode(fault).decode() for fault in job.faults if (fault.replica, fault.rank) == (replica, rank)
        )
        context = RankContext(
            replica=replica, rank=rank, num_ranks=job.num_ranks, num_replicas=job.num_replicas,
            coordinator=self._membership.address, leader=leader, run_dir=str(job.run_dir),
            started_at=self._started_at, faults=() if dry_run else mine, dry_run=dry_run,
        )  # fmt: skip
        # RANK and WORLD_SIZE are those of the replica's own world. LOCAL_RANK picks a device of this node, which
        # the replicas share.
        place, shared = replica * job.num_ranks + rank, job.config.ranks_per_gpu
        return (sharing_a_gpu(place) if shared > 1 else {}) | {
            CONTEXT_VARIABLE: msgspec.json.encode(context).decode(),
            "RANK": str(rank),
            "WORLD_SIZE": str(job.num_ranks),
            "LOCAL_RANK": str(place // shared),
            "LOCAL_WORLD_SIZE": str(job.num_replicas * job.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(master_port),
        }

    # --- Watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not (self._ending is not None and self._is_over()):
            self._loop.run_once(_POLL_S)
            self._wake_server()
            ends = self._agent.poll()
            if ends:
                # What a dying rank has said arrived before its end was seen: it comes first.
                self._loop.run_once(0.0)
            for end in explaining_first(ends):
                self._ended(end)
            self._look_for_hangs()
            for replica, rank in self._thawing.due():
                if self._agent.is_stopped(replica, rank):
                    self._thawing.done(replica, rank)
                    self._log.record(trace.Thawed(replica=replica, rank=rank))  # before the rank can write anything
                    self._agent.thaw(replica, rank)
            for replica in [each for each in self._fencing if self._agent.is_fenced(each)]:
                self._fencing.discard(replica)
                self._log.record(trace.Fenced(replica=replica, ranks=tuple(range(self._job.num_ranks))))

    def _look_for_hangs(self) -> None:
        if self._ending is not None:
            return
        judged = {
            replica
            for replica in range(self._job.num_replicas)
            if replica not in self._gone and not self._thawing.holds(replica)
        }
        for loss, failing in self._ranks.look(self._membership.generation, judged):
            if failing is not None:
                self._membership.failing(failing)
            self._membership.lost(loss)

    def _wake_server(self) -> None:
        if self._agent.wake_server():
            self._console.says("somebody stopped the fork server: continued it, since no rank can be fenced without it")

    def _is_over(self) -> bool:
        return self._agent.num_living() == 0 or time.monotonic() > self._end_by

    def _ended(self, end: End) -> None:
        if self._ending is not None or end.replica in self._fencing:
            return  # as it was told
        self._log.record(trace.Failure(replica=end.replica, rank=end.rank, cause=end.cause))
        if end.status == ExitCode.BAD_INPUT and not self._membership.generation:
            # What one rank refuses, all refuse: there is no point in waiting for the others.
            self._end(ExitCode.BAD_INPUT, _refusal(self._job.log_of(end.replica, end.rank)))
            return
        loss, failing = self._ranks.loss(end, started=self._membership.generation > 0)
        if failing is not None:
            self._membership.failing(failing)
        self._membership.lost(loss)

    def _fence(self, replica: int) -> None:
        self._fencing.add(replica)
        self._gone.add(replica)
        self._agent.fence(replica)

    def _end(self, exit_code: int, reason: str) -> None:
        self._ending = (exit_code, reason)
        began = self._membership.generation > 0
        self._end_by = time.monotonic() + (_END_DEADLINE_S if exit_code == ExitCode.OK else _STOP_DEADLINE_S * began)

    # --- Signals -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first signal asks all replicas to save and end at the same step, the second kills them.

        SIGUSR1 and SIGUSR2 are what Slurm's `--signal` is told to send ahead of a time limit. SIGHUP, of a terminal that is
        closed, counts too, unless whoever started us has it ignored (nohup).
        """

        def handle(number: int, frame: FrameType | None) -> None:
            self._loop.post(lambda: self._signalled(number))

        before: list[tuple[int, Callable[..., object] | int | None]] = [
            (number, signal.signal(number, handle))
            for number in TOLD_TO_ALL
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        ]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _signalled(self, number: int) -> None:
        self._num_signals += 1
        name = signal.Signals(number).name
        if self._num_signals == 1 and not self._membership.generation:
            self._console.says(f"{name}: ending before training has begun")
            self._membership.ask_exit(name)
        elif self._num_signals == 1:
            self._console.says(
                f"{name}: all replicas end after the same step, with a checkpoint if --save is set; once more kills everything "
                "at once, and nothing is saved"
            )
            self._membership.ask_exit(name)
        else:
            self._console.says(f"{name} again: killing everything")
            self._ending = (128 + number, f"killed on request ({name})")
            self._end_by = 0.0


def _refusal(log: Path) -> str:
    """Why a process did not accept its arguments: what it says so of, else its last line, which is argparse's complaint."""
    lines = log.read_text(errors="replace").strip().splitlines() or ["the training script refused its arguments"]
    said = [line.removeprefix(BAD_ARGUMENTS) for line in lines if line.startswith(BAD_ARGUMENTS)]
    return "\n".join(said) or re.sub(r"^\S+: error: (argument )?", "", lines[-1])


def _worker_defaults(environment: dict[str, str]) -> dict[str, str]:
    """Settings that many ranks on one machine need, unless the user has his own."""
    return {name: value for name, value in (("OMP_NUM_THREADS", "1"),) if name not in environment}
