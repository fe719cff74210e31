"""A nemesis: toy jobs on nodes that die, freeze, are cut off and come back, as a seed decides, and a judge of what they leave.

    python -m tests.nodes.nemesis --runs 200 --seed 1 [--jobs 2] [--out docs/evidence/nemesis.md]

Run k has seed SEED + k, which decides its job, its faults and the weather; `--runs 1 --seed S` repeats one. A run passes if

- what its ranks applied is one history (`history.py`): at most one side goes on;
- at most one replica names checkpoints (`names.py`), the newest name never goes back, and there is one, of the last save if
  the job ends well;
- all that was applied is the sum of all microbatches, each once;
- all agents that live end before the deadline, with codes that its faults allow;
- `megatron-recover check` finds nothing wrong with its trace;
- nothing is left in any node.

Prints one line a run, and at the end `N passed, N failed`; exit code 1 if any failed.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.placement import place
from megatron_recover.deadlines import NODE_S
from tests.nodes import nodes
from tests.nodes.history import History
from tests.nodes.jobs import DEADLINES, NodesJob
from tests.nodes.names import LONG_PAUSES_S, Naming, Watch
from tests.nodes.nodes import ROOT, Cage, Network, Node
from tests.nodes.proxy import Weather
from tests.system.placing import hosted

DEADLINE_S = 60.0
"""A job ends so long after its last step, fault or loss, at the latest."""
WAITS = "and no rank of this node is left: it waits for the end of the job on "
"""What a node 0 without ranks and without a coordinator says (`cluster/coordinator_loss.py`)."""
NODE_TIMEOUT_S = 2.0
SHORT_S, LONG_S = (0.1, 1.0), (4.0, 6.0)
"""How long what ends again lasts: well below `NODE_TIMEOUT_S`, and well above."""
LEASES_S = (2.5, 6.0)
"""Leases of a writer: a long fault outlasts the one, and it may wake up within the other, so its coordinator must wait."""
LAPSE_S = 1.0
"""A coordinator counts so much longer than the lease."""
STEPS = 400
MAX_FAILED = 10
ENDINGS = frozenset({ExitCode.OK, ExitCode.NO_REPLICA_LEFT, ExitCode.INTERRUPTED})
"""Codes with which an agent may end, whatever struck: faults of machines are no defect, no bad input, no broken invariant."""
COLUMNS = (
    "| seed | job | weather | faults | ends | replicas | steps | names | longest pause (s) | seconds | verdict |\n"
    "|---|---|---|---|---|---|---:|---|---:|---:|---|"
)


@dataclass(frozen=True)
class Strike:
    """One fault."""

    kind: str
    node: int
    at_step: int
    """When a rank of replica 0, or of who is left, has applied so many steps."""
    seconds: float | None = None
    """After so long it is undone; None: never."""
    one_way: str | None = None
    others: tuple[int, ...] = ()
    """Cut off from these only; empty: from all."""

    def __str__(self) -> str:
        way = f" {self.one_way}" if self.one_way else ""
        whom = f" from {','.join(f'n{each}' for each in self.others)}" if self.others else ""
        lasts = f" for {self.seconds:.1f} s" if self.seconds is not None else ""
        return f"n{self.node} {self.kind}{way}{whom}{lasts} at {self.at_step}"

    @property
    def is_short(self) -> bool:
        """Whether nobody may be removed for it."""
        return self.seconds is not None and self.seconds <= SHORT_S[1] and self.kind != "power"


@dataclass(frozen=True)
class Plan:
    """What a seed decides."""

    seed: int
    num_nodes: int
    replicas: int
    ranks: int
    strikes: tuple[Strike, ...]
    weather: Weather | None
    clock_offsets_s: tuple[float, ...] = field(default=())
    lease_s: float = LEASES_S[0]
    long_s: float = 0.0
    """The writer pauses so long at the save point at which the first fault strikes."""
    empties_node_0: bool = False
    """All ranks on the node with the coordinator are killed first: then faults of other nodes befall the writer, and a living
    coordinator gives its grants to others."""

    @property
    def spares_node_0(self) -> bool:
        """Whether nothing that lasts befalls the node with the coordinator, nor do resets make it give up."""
        num_reset = len({strike.node for strike in self.strikes if strike.kind == "reset"})
        return 2 * num_reset <= self.num_nodes and all(
            strike.is_short or (strike.node != 0 and 0 not in strike.others) for strike in self.strikes
        )

    @property
    def cut_off(self) -> frozenset[str]:
        """The names of the nodes that are cut off for long from the one with the coordinator."""
        return frozenset(
            f"n{strike.node}"
            for strike in self.strikes
            if strike.kind == "cut off" and not strike.is_short and (not strike.others or 0 in strike.others)
        )

    @property
    def is_harmless(self) -> bool:
        """Whether no replica may be lost."""
        return all(strike.is_short for strike in self.strikes)

    @property
    def most_finish(self) -> int:
        """The number of replicas that no fault but the first ends."""
        return self.replicas - (len(self.hosted([0])) if self.empties_node_0 else 0)

    def hosted(self, nodes: Iterable[int]) -> frozenset[int]:
        """Return the replicas that have ranks on any of these nodes."""
        slots = [self.replicas * self.ranks // self.num_nodes] * self.num_nodes
        placed = place(slots, num_replicas=self.replicas, num_ranks=self.ranks)
        return frozenset().union(*(hosted(placed, node) for node in nodes))


def plan(seed: int) -> Plan:
    """Return what a seed decides."""
    chance = random.Random(seed)
    num_nodes = chance.choice((3, 4))
    ranks = chance.choice((1, 2))
    replicas = num_nodes if ranks == 2 else chance.choice((num_nodes, min(8, 2 * num_nodes)))
    is_calm = chance.random() < 0.7
    weather = None if is_calm else Weather(
        delay_s=chance.uniform(0.0, 0.003), jitter_s=chance.uniform(0.0, 0.003), loss=chance.choice((0.0, 0.005, 0.02)),
        stall_s=chance.choice((0.0, 0.2)), calm_s=1.0,
    )  # fmt: skip
    offsets = tuple(chance.uniform(-30.0, 30.0) for _ in range(num_nodes)) if chance.random() < 0.3 else ()
    strikes, at_step = [], 20
    for _ in range(chance.choice((1, 1, 2, 3))):
        at_step += chance.choice((0, 0, 20, 60))
        strikes.append(_strike(chance, num_nodes, at_step))
    later = random.Random(f"names {seed}")  # what was decided before stays as it was
    lease_s, long_s, empties_node_0 = later.choice(LEASES_S), later.choice(LONG_PAUSES_S), later.random() < 0.6
    return Plan(seed, num_nodes, replicas, ranks, tuple(strikes), weather, offsets, lease_s, long_s, empties_node_0)


def _strike(chance: random.Random, num_nodes: int, at_step: int) -> Strike:
    # The coordinator's node is struck more seldom: that ends most jobs.
    node = chance.choice((0, *(range(1, num_nodes)), *(range(1, num_nodes))))
    kind = chance.choice(("power", "frozen", "cut off", "cut off", "cut off", "reset", "agent killed"))
    seconds: float | None = chance.uniform(*chance.choice((SHORT_S, LONG_S)))
    one_way, others = None, ()
    if kind == "power":
        seconds = chance.choice((None, chance.uniform(1.0, 4.0)))
    elif kind == "cut off":
        one_way = chance.choice((None, None, "in", "out"))
        if chance.random() < 0.4:
            rest = [each for each in range(num_nodes) if each != node]
            others = tuple(sorted(chance.sample(rest, chance.randint(1, len(rest) - 1))))
        seconds = chance.choice((seconds, seconds, None))
    elif kind in ("reset", "agent killed"):
        seconds = None
    return Strike(kind, node, at_step, seconds, one_way, others)


class Run:
    """A job, and its nemesis."""

    def __init__(self, cage: Cage, folder: Path, plan: Plan, *, lapse_s: float = LAPSE_S, **mistakes: bool) -> None:
        """In tests of the judge, `mistakes` (`Naming`) or a shorter `lapse_s` are planted."""
        self.plan, self._lapse_s = plan, lapse_s
        self._naming = Naming(plan.seed, long_at=plan.strikes[0].at_step, long_s=plan.long_s, **mistakes)
        self.network = Network(cage, folder, plan.num_nodes, clock_offsets_s=plan.clock_offsets_s)
        self.job: NodesJob
        self._off: set[int] = set()
        """Nodes that have lost their power, or their agents: these have no exit code of their own, and could fence nobody."""
        self._struck: list[Strike] = []

    def play(self) -> str:
        """Run the job with its faults; return the verdict."""
        plan = self.plan
        scale = NODE_S / NODE_TIMEOUT_S  # of the waits that follow from `--node-timeout`
        leases = {"lease_s": scale * plan.lease_s, "lapse_s": scale * max(0.01, plan.lease_s + self._lapse_s)}
        self.job = NodesJob(
            self.network, num_nodes=plan.num_nodes, replicas=plan.replicas, ranks=plan.ranks, steps=STEPS, pace_s=0.002,
            node_silence_s=NODE_TIMEOUT_S, naming=self._naming, deadlines={**DEADLINES, **leases},
        )  # fmt: skip
        watch = Watch(self.job.sums)
        try:
            self.job.until_training()
            if plan.empties_node_0:
                self._empty_node_0()
            self._let_strike()
            return self._verdict(watch)
        finally:
            watch.close()

    def _empty_node_0(self) -> None:
        for process in self.network[0].find_process("replica-"):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.job.until_going_on(sorted({*range(self.plan.replicas)} - self.plan.hosted([0])), num_steps=1)

    def _let_strike(self) -> None:
        plan = self.plan
        if plan.weather is not None:
            self.network.set_weather(plan.weather, plan.seed)
        undone: list[tuple[float, Callable[[], None]]] = []
        waiting = list(plan.strikes)
        while waiting or undone:
            now = time.monotonic()
            step = max(self.job.steps().values())
            if waiting and (step >= waiting[0].at_step or self._is_standing_still()):
                strike = waiting.pop(0)
                undo = self._strike(strike)
                if strike.seconds is not None:
                    undone.append((now + strike.seconds, undo))
                continue
            for due in [each for each in undone if each[0] <= now]:
                undone.remove(due)
                due[1]()
            if all(agent.poll() is not None for agent in self.job.agents.values()) and not undone:
                break
            time.sleep(0.01)

    def _is_standing_still(self) -> bool:
        history = self.job.history()
        return time.monotonic() - history.applied[-1].at > 1.0

    def _strike(self, strike: Strike) -> Callable[[], None]:
        """Have a fault strike; return what undoes it."""
        node = self.network[strike.node]
        if node.pid is None:
            return lambda: None
        self._struck.append(strike)
        others = [self.network[each] for each in strike.others]
        match strike.kind:
            case "power":
                node.power_off()
                self._off.add(node.number)
                return lambda: node.power_on() if node.pid is None else None
            case "frozen":
                node.freeze()
                return node.thaw
            case "cut off":
                node.cut(*others, one_way=strike.one_way)
                return lambda: node.heal(*others)
            case "reset":
                node.reset()
            case "agent killed":
                self.job.agents[node.name].kill()
                self._off.add(node.number)
        return lambda: None

    def _verdict(self, watch: Watch) -> str:
        living = [node for node in self.job.nodes if node.number not in self._off]
        try:
            self._codes = self._end(living)
        except subprocess.TimeoutExpired as error:
            return f"FAILED: no end within {DEADLINE_S:g} s of {error.cmd}"
        watch.close()
        history = self.job.history()
        if faults := history.faults():
            return f"FAILED: {faults[0]}"
        if not history.named and ({0, ExitCode.INTERRUPTED} & {*self._codes.values()} or self._had_time_to_name()):
            return "FAILED: no checkpoint was named"
        if mistake := unnamed(self._codes, history):
            return f"FAILED: {mistake}"
        try:
            self.job.outcome().assert_exactly_once()
        except AssertionError as error:
            return f"FAILED: {str(error).splitlines()[0]}"
        if mistake := wrong_end(self.plan, self._codes, self.num_finished()):
            return f"FAILED: {mistake}"
        if mistakes := self.job.mistakes(self.plan.hosted(self._off)):
            return f"FAILED: check: {mistakes[0]}"
        try:
            self.network.assert_nothing_left()
        except AssertionError as error:
            return f"FAILED: {str(error)[:200]}"
        return "passed"

    def _end(self, living: Sequence[Node]) -> dict[str, int]:
        """Wait for the ends of agents, as long as steps are applied or replicas lost; return their codes.

        Node 0 without ranks and without a coordinator waits longer for a node that is silent, and says how to end that. Its
        code is then that of the wait, not of the job, and is left out.
        """
        while True:
            before = self._progress()
            try:
                return self.job.end(living, DEADLINE_S)
            except subprocess.TimeoutExpired:
                if self._progress() == before:
                    break
        others = [node for node in living if node.number]
        if not (self._off and self.plan.empties_node_0 and WAITS in self.job.agents["n0"].text()):
            raise subprocess.TimeoutExpired("an agent", DEADLINE_S)
        codes = self.job.end(others, 0.0)
        self.job.agents["n0"].send_signal(signal.SIGTERM)
        code = self.job.end([self.network[0]], DEADLINE_S)["n0"]
        return codes if code in {ExitCode.INTERRUPTED, ExitCode.NO_REPLICA_LEFT} else codes | {"n0": code}

    def _progress(self) -> tuple[object, int]:
        """Return what changes with every step and loss. A broken link between two nodes costs one replica after another."""
        return self.job.steps(), self.job.output().count(" lost: ")

    def _had_time_to_name(self) -> bool:
        """Return whether a save point came long before the first fault."""
        return min(self.plan.strikes[0].at_step, max(self.job.steps().values())) >= 2 * self._naming.every

    def num_finished(self) -> int:
        """Return the number of replicas that have applied all steps on all ranks."""
        steps = self.job.steps()
        return sum(
            all(steps.get((replica, rank), 0) == STEPS for rank in range(self.plan.ranks))
            for replica in range(self.plan.replicas)
        )

    def row(self, verdict: str, seconds: float) -> str:
        """Return a row of the table."""
        plan, history = self.plan, self.job.history()
        steps = max(self.job.steps().values(), default=0)
        finishers = [replica for (replica, _), num in self.job.steps().items() if num == steps]
        slow = f", {plan.long_s:g} s to name" if plan.long_s else ""
        emptied = ", none left on n0" if plan.empties_node_0 else ""
        by = collections.Counter(each.replica for each in history.named)
        names = "; ".join(f"{num} by {replica}" for replica, num in sorted(by.items())) or "none"
        off = f", clocks {', '.join(f'{each:+.0f}' for each in plan.clock_offsets_s)} s" if plan.clock_offsets_s else ""
        ends = collections.Counter(getattr(self, "_codes", {}).values())
        cells = (
            plan.seed, f"{plan.replicas} x {plan.ranks} on {plan.num_nodes}{emptied}{slow}{off}", _weather(plan.weather),
            "; ".join(map(str, self._struck)) or "none",
            ", ".join(f"{number} x {code}" for code, number in sorted(ends.items())) or "?",
            f"{plan.replicas} to {self.num_finished()}", steps, names, f"{history.pause_s(finishers):.2f}", f"{seconds:.0f}",
            verdict,
        )  # fmt: skip
        return f"| {' | '.join(map(str, cells))} |"


def wrong_end(plan: Plan, codes_of: Mapping[str, int], num_finished: int) -> str:
    """Return what is wrong with the exit codes and the number of replicas that applied all steps; empty: nothing."""
    codes = set(codes_of.values())
    if plan.is_harmless and plan.weather is None:
        return "" if codes == {0} and num_finished == plan.most_finish else f"a short fault cost something: {codes}"
    interrupted = {name for name, code in codes_of.items() if code == ExitCode.INTERRUPTED}
    has_lost_all = 0 not in codes and interrupted <= plan.cut_off  # the last replicas, which have no coordinator then
    if not codes <= (ENDINGS if not plan.spares_node_0 or has_lost_all else ENDINGS - {ExitCode.INTERRUPTED}):
        return f"exit codes {dict(codes_of)}"
    if 0 in codes and not num_finished:
        return "an agent says that all is well, and no replica has applied all steps"
    return ""


def unnamed(codes_of: Mapping[str, int], history: History) -> str:
    """Return what is wrong with the newest name at the end of a job; empty: nothing.

    The writer names its last checkpoint after the step before the last one, and in the last step the others wait for it
    (`toy.py`). A writer that was lost there names nothing. If n0 says that all is well, the coordinator lived, and gave the
    writer its grant in time. If the job was interrupted, the coordinator was lost: the writer has the right if it has ever had
    a grant (`core/grants.py`, Note [Last generation]). A job of which only other nodes say that all is well may have lost its
    coordinator in the last steps: the toy then promises nothing, while the product waits and says that it could not save.
    """
    applied = {(each.replica, each.step): each.generation for each in history.applied if each.rank == 0}
    last = max((step for _, step in applied), default=0)  # also the iteration of the step before: steps count from 0
    writer = min((replica for replica, step in applied if step == last - 1), default=None)
    has_stayed = writer is not None and applied.get((writer, last)) == applied[writer, last - 1]
    had_grant = any(each.replica == writer and each.iteration < last for each in history.naming)
    has_right = codes_of.get("n0") == 0 or (ExitCode.INTERRUPTED in codes_of.values() and had_grant)
    newest = max((each.iteration for each in history.latest), default=0)
    if has_stayed and has_right and newest < last:
        return f"the newest name is of iteration {newest}, and replica {writer} had the right to name that of iteration {last}"
    return ""


def _weather(weather: Weather | None) -> str:
    if weather is None:
        return "good"
    return f"{1000 * weather.delay_s:.0f} ms, {100 * weather.loss:g} % lost{', stalls' if weather.stall_s else ''}"


def attempt(cage: Cage, folder: Path, seed: int, keep: Path) -> tuple[bool, str]:
    """Run the job of a seed; return whether it passed, and its row."""
    since = time.monotonic()
    run = Run(cage, folder / f"run-{seed}", plan(seed))
    try:
        try:
            verdict = run.play()
        except (AssertionError, OSError) as error:
            verdict = f"FAILED: {str(error).splitlines()[0]}"
        row = run.row(verdict, time.monotonic() - since)
    finally:
        run.network.close()
    if passed := verdict == "passed":
        shutil.rmtree(run.network.folder)
    else:
        print(f"{run.job.output()}\nrun again with: python -m tests.nodes.nemesis --runs 1 --seed {seed}", flush=True)
        keep.mkdir(parents=True, exist_ok=True)
        shutil.move(run.network.folder, keep / f"nemesis-{seed}-{int(time.time())}")
    return passed, row


DOCUMENT = """\
# Nemesis

    {command}
    python -m tests.nodes.nemesis --runs 1 --seed {seed}        # one run of it

**{num_runs} runs: {totals}**, at commit {commit} on {date}.

The command above writes this file (`tests/nodes/nemesis.py`). Each seed decides a toy job on 3 or 4 nodes, its faults, the
weather between the nodes (`tests/nodes/proxy.py`), and how far their clocks are off. In some jobs all ranks on node 0 are
killed first, so that the writer is not beside the coordinator. Every run must meet these promises:

- what the ranks applied is one history: at most one side goes on
  (`tests/nodes/history.py`, from files of the ranks alone, on the one monotonic clock of the machine);
- at most one replica names checkpoints: after one has begun to, none begins that was writer before it. The newest name never
  goes back, as seen from outside. A job that ends well, or was not struck before its second save point, has named one.
  One that ends well has named its last, if the writer was not lost in that save and had the right
  (`tests/nodes/names.py`: the product's grants and tracker, on a folder without a lock, with pauses of a writer before it
  asks for the right and between that and the rename; the lease is {leases} s);
- what was applied is the sum of all microbatches, each once;
- all agents that live end within {deadline_s:.0f} s of the last step, fault or loss, with codes that the faults allow. Node 0
  without ranks and without a coordinator waits longer for a node that has lost its power or its agent (at most
  `--recover-deadline-s`). It is asked to end then, and must;
- `megatron-recover check` finds no violation;
- nothing is left in any node: no process, no port, no file in /dev/shm or /tmp.

"""


def document(rows: Sequence[tuple[bool, str]], seed: int, command: str) -> str:
    """Return the text of the record."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    head = DOCUMENT.format(
        command=command, seed=seed, num_runs=len(rows), totals=totals(rows), commit=commit, date=time.strftime("%Y-%m-%d"),
        deadline_s=DEADLINE_S, leases=" or ".join(f"{each:g}" for each in LEASES_S),
    )  # fmt: skip
    return "\n".join((head + COLUMNS, *(row for _, row in rows), ""))


def totals(rows: Sequence[tuple[bool, str]]) -> str:
    """Return the last line."""
    num_passed = sum(passed for passed, _ in rows)
    return f"{num_passed} passed, {len(rows) - num_passed} failed"


class Series:
    """Runs with one seed after another, several at a time, each in a network of its own."""

    def __init__(self, first: int, num_runs: int, folder: Path, keep: Path, done: Callable[[Series], None]) -> None:
        """`keep`: where the folders of failed runs go. `done` is called after every run."""
        self.first, self._folder, self._keep, self._done = first, folder, keep, done
        self._waiting = iter(range(first, first + num_runs))
        self._lock = threading.Lock()
        self._rows: dict[int, tuple[bool, str]] = {}
        self.is_over = False

    @property
    def rows(self) -> list[tuple[bool, str]]:
        """Return whether each run has passed, and its row, by seed."""
        return [row for _, row in sorted(self._rows.items())]

    def run(self, jobs: int) -> None:
        """Run all, until too many have failed or Ctrl-C."""
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            try:
                for each in [pool.submit(self._work) for _ in range(jobs)]:
                    each.result()
            finally:
                self.is_over = True

    def _work(self) -> None:
        with nodes.cage() as cage:
            while (seed := self._next()) is not None:
                row = attempt(cage, self._folder, seed, self._keep)
                with self._lock:
                    self._rows[seed] = row
                    self._done(self)
                    print(row[1], flush=True)

    def _next(self) -> int | None:
        with self._lock:
            num_failed = sum(not passed for passed, _ in self._rows.values())
            return None if self.is_over or num_failed >= MAX_FAILED else next(self._waiting, None)


def main() -> int:
    """Run all; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.nodes.nemesis", description="Toy jobs on nodes with random faults.")
    parser.add_argument("--runs", type=int, default=200, help="so many (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run; the others follow")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time (default: 1)")
    parser.add_argument("--out", type=Path, help="write the record to this file, after every run")
    parser.add_argument("--keep", type=Path, help="keep the folders of failed runs here (default: a temporary folder)")
    arguments = parser.parse_args()
    if arguments.out is not None and not arguments.out.parent.is_dir():
        parser.error(f"--out: there is no folder {arguments.out.parent}; make it, or give another place")
    if reason := nodes.why_not():
        parser.error(reason)
    keep = arguments.keep or Path(tempfile.gettempdir()) / "megatron-recover-failed"
    jobs = f" --jobs {arguments.jobs}" if arguments.jobs > 1 else ""
    what = f"--runs {arguments.runs} --seed {arguments.seed}{jobs}"
    command = f"python -m tests.nodes.nemesis {what} --out docs/evidence/nemesis.md"

    def done(series: Series) -> None:
        if arguments.out:
            arguments.out.write_text(document(series.rows, arguments.seed, command))

    print(COLUMNS, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        series = Series(arguments.seed, arguments.runs, Path(folder), keep, done)
        with contextlib.suppress(KeyboardInterrupt):
            series.run(arguments.jobs)
    print(totals(series.rows))
    return int(len(series.rows) < arguments.runs or not all(passed for passed, _ in series.rows))


if __name__ == "__main__":
    sys.exit(main())
