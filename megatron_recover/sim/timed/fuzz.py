"""Random jobs with faults at random instants: safety while faults last, then progress.

    python -m megatron_recover.sim.timed.fuzz --seeds 100000 --seed 1 [--jobs 2]

A seed determines a job: its shape, how long everything takes, and what fails when. While the job
runs, every fact is checked against the invariants that facts can break (`core/invariants.py`).
After the last fault the job must end, and with a permitted result (INV-8, INV-9). The explorer
tries everything that can happen to small jobs. The fuzzer tries some of what can happen to larger
ones, with real timeouts, in order of time. For a seed that fails it prints the command that runs
the seed again.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from megatron_recover.core import coordinator, invariants
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.invariants import InvariantViolation
from megatron_recover.core.joining import older
from megatron_recover.core.membership_messages import Hello, Loss, LossKind
from megatron_recover.core.rank_messages import Apply, Report
from megatron_recover.core.replica import Committed, LinkLost
from megatron_recover.core.tree import TREE_ABOVE
from megatron_recover.core.values import Generation, ReplicaId, Work
from megatron_recover.sim import channels
from megatron_recover.sim.timed import random_faults
from megatron_recover.sim.timed.actors import Actor, TimedCoordinator, TimedReplica
from megatron_recover.sim.timed.chance import FreezingClock, RandomTiming
from megatron_recover.sim.timed.job import TimedJob
from megatron_recover.sim.timed.memory import Counts
from megatron_recover.sim.timed.models import JobTable
from megatron_recover.sim.timed.rank import TimedRank
from megatron_recover.sim.workers import CTRL_C_CODE, ended_by_ctrl_c, of_seeds

COMMAND = "python -m megatron_recover.sim.timed.fuzz"
CALM_S = 2_000.0
"""Virtual seconds in which a job has to end, counted from its start; its steps take seconds."""
MAX_EVENTS = 100_000
"""Events in which a job has to end: far more than any needs, few enough to detect a loop soon."""
SHAPES = ((1, 1), (2, 1), (2, 2), (4, 2), (3, 3))
"""(ranks, stages) of a replica."""


_PHASES = ("is formed", "reads", "asks", "is announced", "is admitted", "is proven")
"""Points in the life of a newcomer, at which a fault that is aimed at it begins, or soon after."""


class SeedVerdict(msgspec.Struct, frozen=True):
    """Result of the job of a seed."""

    seed: int
    exit_code: int
    """Exit code of the job; -1: it did not end."""
    events: int
    faults: tuple[str, ...]
    """Descriptions of the faults, in order."""
    problem: str | None
    """Description of the broken invariant or the defect, or None."""
    newcomers: int = 0
    """Newcomers that were formed."""
    joined: int = 0
    """Newcomers that have committed a step with the others."""


class RandomJob(TimedJob):
    """A job of random timing, with faults, whose messages go over FIFO links that may break."""

    def __init__(self, seed: int, faults: Sequence[Callable[[RandomJob], None]] | None = None) -> None:
        """Draw the job of a seed.

        Its faults are drawn from `faults`: repeated ones are more likely. None: from all, and some
        jobs have replicas that read, that are asked to leave, or that join. These have random
        numbers of their own: a seed without such replicas draws the same job as one without the
        feature.
        """
        self.newcomer_dice = random.Random(f"newcomers {seed}")
        self.has_newcomers = faults is None and self.newcomer_dice.random() < 1 / 3
        self.dice = dice = random.Random(seed)
        ranks, stages = dice.choice(SHAPES)
        table = JobTable(
            replicas=dice.randint(1, 7), ranks=ranks, stages=stages, microbatches=dice.randint(1, 9),
            steps=dice.randint(1, 4), buckets=dice.randint(1, 2), seed=seed,
        )  # fmt: skip
        if self.has_newcomers:  # else many are formed after the end, and read for longer than a step lasts
            table = self._longer(table)
        timers_s = {
            "follow_s": 3.0, "finish_s": 20.0, "save_s": dice.choice((5.0, 60.0)), "grace_s": 0.25,
            "deadline_s": 600.0, "blame_s": 15.0, "start_s": math.inf, "lapse_s": 13.0, "gather_s": 0.02,
        }  # fmt: skip
        super().__init__(
            table, RandomTiming(dice, table), timers_s, detect_s=0.0, stall_s=dice.choice((2.0, 10.0)),
            min_replicas=min(table.replicas, dice.choice((1, 1, 1, 2))), tree_above=dice.choice((TREE_ABOVE, 1, 2, 3)),
            waits_for_newcomers=self.has_newcomers and self.newcomer_dice.random() < 0.5,
        )  # fmt: skip
        self.clock = self.freezer = FreezingClock()
        self.history = invariants.History(self.shape, min_replicas=self.coordinator.state.policy.min_replicas)
        self.counts = Counts(table.microbatches, self.observe)
        self.memory = self.counts
        self._draw_digests_and_saves(seed)
        self.faults: list[str] = []
        self.hit: set[ReplicaId] = set()
        """Replicas that a fault has hit."""
        self.saves: set[tuple[ReplicaId, int]] = set()
        self.num_raised = 0
        self.num_miscounts = 0
        self.num_deaths_in_saves = 0
        """Deaths of writers in saves that are still to come."""
        self.readings: dict[tuple[ReplicaId, int], float] = {}
        """Seconds for which a rank will read before its next step, by (replica, rank)."""
        self.reading: dict[TimedRank, float] = {}
        """Ranks that read, and the time at which each ends."""
        self.exit_asked = False
        self.is_network_only = True
        """True while all faults are bad channels or reads: only replicas that a fault hit may be
        lost."""
        self._last: dict[object, float] = {}
        """Time at which the last message of a FIFO link arrives."""
        self._broken: dict[tuple[ReplicaId, ReplicaId], int] = {}
        """Times that the link between two leaders broke, which loses the messages on it."""
        self.strikes: list[tuple[str, Callable[[RandomJob, TimedReplica], None]]] = []
        """Faults that are aimed at newcomers and still to come, with the phase of each."""
        self.num_to_heal = 0
        """Losses that may still be answered with a newcomer."""
        self.bad_cards: list[tuple[ReplicaId, channels.Ways]] = []
        self.joined: set[ReplicaId] = set()
        """Newcomers that have committed a step by votes."""
        self.voted_in: dict[ReplicaId, Generation] = {}
        """Newest generation in which a replica has committed a step by votes."""
        self.excused: set[ReplicaId] = set()
        """Newcomers that were lost before they were proven, which nobody has to explain."""
        self.had_too_few = False
        """True once there were fewer older members than `min_replicas`."""
        self._draw_faults(seed, faults)
        if self.has_newcomers:
            self._draw_newcomers()

    def _draw_digests_and_saves(self, seed: int) -> None:
        """Draw which steps have a state digest, which are saved, and how long a save takes."""
        self.other_dice = random.Random(f"digests {seed}")
        """Random numbers for features added later: the rest of a seed's job stays as it was."""
        self.digest_interval = self.other_dice.choice((1, 2, 3, 99))
        """Divisor of the steps whose record has the state digest."""
        newest_dice = random.Random(f"saves {seed}")
        self.save_interval = newest_dice.choice((0, 1, 2, 99))
        self.save_s = newest_dice.uniform(0.2, 3.0)  # shorter than the wait for a save

    def _draw_faults(self, seed: int, faults: Sequence[Callable[[RandomJob], None]] | None) -> None:
        """Draw which of `faults` (None: of all) strike when, and which replicas read or leave."""
        dice, table = self.dice, self.table
        for _ in range(dice.choice((0, 1, 1, 2, 2, 3, 5))):
            self.clock.at(dice.expovariate(1 / (0.3 * table.steps)), dice.choice(faults or random_faults.FAULTS), self)
        self.reader_dice = random.Random(f"readers {seed}")
        for _ in range(self.reader_dice.choice((0,) * 8 + (1, 2)) if faults is None else 0):
            self.clock.at(self.reader_dice.expovariate(1 / (0.3 * table.steps)), random_faults.read_data, self)
        self.leave_dice = random.Random(f"leaves {seed}")
        for _ in range(self.leave_dice.choice((0, 0, 0, 1, 2)) if faults is None else 0):
            self.clock.at(self.leave_dice.expovariate(1 / (0.3 * table.steps)), random_faults.ask_leave, self)

    def _longer(self, table: JobTable) -> JobTable:
        """Return the job with more steps, and with more microbatches in each."""
        dice = self.newcomer_dice
        microbatches = max(table.microbatches, dice.choice((1, 9, 18)))  # the checksum of a result has a digit for each
        return replace(table, steps=table.steps + dice.randint(1, 6), microbatches=microbatches)

    def _draw_newcomers(self) -> None:
        """Draw when newcomers are asked for, how long they take, and what strikes them when."""
        dice, timing = self.newcomer_dice, self.timing
        assert isinstance(timing, RandomTiming)
        timing.forming_mean_s = dice.choice((0.1, 0.5, 2.0))
        timing.state_mean_s = dice.choice((0.01, 0.05, 0.3))
        timing.microbatch_mean_s = dice.choice((0.1, 0.3))
        self.answer_s = dice.choice((1.0, 3.0, 10.0))
        for _ in range(dice.choice((1, 1, 2, 3))):
            self.clock.at(dice.expovariate(1 / (0.2 * self.table.steps)), random_faults.form, self, dice.choice((1, 1, 2)))
        self.num_to_heal = dice.choice((0, 0, 1, 3))
        num_strikes = dice.choice((0, 0, 1, 1, 2, 3))
        self.strikes = [(dice.choice(_PHASES), dice.choice(random_faults.STRIKES)) for _ in range(num_strikes)]

    def work(self, step: int, label: str) -> Work:
        work = super().work(step, label)
        return replace(work, digests=work.digests or step % self.digest_interval == 0)

    def may_write(self, rank: TimedRank, order: Apply) -> None:
        """Raise InvariantViolation if a drifted replica saves and a member has not drifted (INV-6).

        If the death of a writer is due, schedule it before the end of this save.
        """
        step, members = order.record.step, order.roster
        drifted = [number for number in members if self.counts.has_other_state(number, step)]
        if rank.replica.number in drifted and len(drifted) < len(members):
            raise InvariantViolation(6, f"replica {rank.replica.number} saves in step {step} what only {drifted} have")
        if self.num_deaths_in_saves and rank.position == 0:
            self.num_deaths_in_saves -= 1
            self.clock.after(self.dice.uniform(0, self.save_s), random_faults.kill_rank, self, rank)

    # --- newcomers ---

    def hello(self, number: ReplicaId) -> Hello:
        is_alike = number < self.table.replicas or self.newcomer_dice.random() > 0.03
        return super().hello(number) if is_alike else Hello(number, "other")

    def form(self, number: ReplicaId) -> None:
        super().form(number)
        for owner, ways in self.bad_cards:
            self.broken |= channels.card(owner, range(number + 1), ways)

    def sources(self, serving: Sequence[ReplicaId]) -> Sequence[ReplicaId]:
        return self.newcomer_dice.sample(serving, self.newcomer_dice.randint(1, len(serving)))

    def asked(self, sources: Sequence[ReplicaId]) -> ReplicaId:
        anybody = self.newcomer_dice.random() < 0.1
        return self.newcomer_dice.choice(self.coordinator.state.roster if anybody else sources)

    def is_stopped(self, rank: TimedRank) -> bool:
        return self.freezer.is_frozen(rank)

    def reached(self, one: TimedReplica, phase: str) -> None:
        for strike in [each for each in self.strikes if each[0] == phase]:
            self.strikes.remove(strike)
            self.clock.after(self.newcomer_dice.choice((0.0, 0.01, 0.1, 0.3, 1.0)), strike[1], self, one)

    def is_unproven(self, number: ReplicaId) -> bool:
        """Return whether the coordinator takes a replica for an unproven newcomer."""
        state = self.coordinator.state
        return number in state.forming or number in {claim.replica for claim in state.joins}

    def judge(
        self, before: coordinator.CoordinatorState, message: coordinator.Input, after: coordinator.CoordinatorState
    ) -> None:
        """Note which newcomers come and go; answer some losses with a newcomer."""
        self.had_too_few |= 0 < len(older(after.roster, after.joins)) < after.policy.min_replicas
        unproven = {*before.forming, *(claim.replica for claim in before.joins)}
        for loss in after.losses[len(before.losses) :]:
            self.excused |= {loss.replica} & unproven
            if self.num_to_heal:
                self.num_to_heal -= 1
                self.clock.after(self.newcomer_dice.expovariate(1 / 0.5), random_faults.form, self, 1)
        for claim in after.joins if after.generation > before.generation else ():
            self.reached(self.replicas[claim.replica], "is announced")

    # --- messages ---

    def _in_order(self, link: object, time: float) -> float:
        self._last[link] = arrives = max(time, self._last.get(link, 0.0))
        return arrives

    def send(self, source: Actor, destination: TimedReplica | TimedCoordinator, departs: float, message: Any) -> None:
        arrives = self._in_order((source, destination), self.clock.now + self.timing.latency_s())
        if isinstance(source, TimedReplica) and isinstance(destination, TimedReplica):
            link = (source.number, destination.number)
            self.clock.at(arrives, self._arrive, destination, link, self._broken.get(link, 0), message)
        else:
            self.clock.at(arrives, destination.receive, message)

    def _arrive(self, destination: TimedReplica, link: tuple[ReplicaId, ReplicaId], breaks: int, message: Any) -> None:
        if self._broken.get(link, 0) == breaks:
            destination.receive(message)

    def order(self, one: TimedReplica, order: Any) -> None:
        for each in one.ranks:
            delay_s = self.timing.local_latency_s() if each.position else 0.0
            self.clock.at(self._in_order((one, each), self.clock.now + delay_s), each.obey, order)

    def deliver_locally(self, one: TimedReplica, position: int, report: Report) -> None:
        arrives = self._in_order((one.ranks[position], one), self.clock.now + self.timing.local_latency_s())
        self.clock.at(arrives, one.feed, report)

    def break_link(self, a: ReplicaId, b: ReplicaId) -> None:
        """Break the link between two leaders in both directions. Messages on the way are lost."""
        for here, there in ((a, b), (b, a)):
            self._broken[here, there] = self._broken.get((here, there), 0) + 1
            one = self.replicas[here]
            self.clock.at(self._in_order((self.replicas[there], one), self.clock.now), one.receive, LinkLost(there))

    def saving_s(self, rank: TimedRank) -> float:
        if (rank.replica.number, rank.machine.step) not in self.saves or rank.saving:
            return super().saving_s(rank)
        return self.dice.expovariate(1 / 3.0)

    # --- replicas that read ---

    def reading_s(self, rank: TimedRank) -> float:
        if rank.course.next_label(self.num_steps, self.save_interval) is None:
            return 0.0  # nothing is left to read; `finish_s` limits the end
        seconds = self.readings.pop((rank.replica.number, rank.position), 0.0)
        if seconds:
            self.reading[rank] = self.clock.now + seconds
            self.look()
        return seconds

    @property
    def readers(self) -> Collection[ReplicaId]:
        return {one.replica.number for one in self.reading}

    def look(self) -> None:
        """Report to the coordinator which replicas read data, if its list differs.

        A replica counts if a rank that reads is alive and not stopped. Look again after 0.5 s while
        a rank reads or the lists differ. No member waits so briefly for another (`stall_s`).
        """
        self.reading = {one: until for one, until in self.reading.items() if one.alive and until > self.clock.now}
        at_work = tuple(sorted({one.replica.number for one in self.reading if not self.freezer.is_frozen(one)}))
        if at_work != self.coordinator.state.at_work:
            self.clock.after(0.0, self.coordinator.feed, coordinator.AtWork(at_work))
        if self.reading or at_work != self.coordinator.state.at_work:
            self.clock.after(0.5, self.look)

    def committed(self, one: TimedReplica, effect: Committed) -> None:
        super().committed(one, effect)
        beat = coordinator.Progressed(one.number, effect.record.step + 1)
        self.clock.after(0.5, self.coordinator.feed, beat)
        if not effect.adopted:
            self.voted_in[one.number] = effect.generation
        if one.is_newcomer and not effect.adopted and one.number not in self.joined:
            self.joined.add(one.number)
            self.reached(one, "is proven")

    # --- what the coordinator does takes time, too ---

    def fence(self, number: ReplicaId) -> None:
        self.clock.after(self.timing.latency_s(), super().fence, number)

    def lose(self, number: ReplicaId, kind: LossKind, after_s: float) -> None:
        """Report a loss to the coordinator."""
        self.clock.after(after_s, self.coordinator.feed, coordinator.ReplicaLost(Loss(number, kind)))

    # --- faults ---

    def note(self, fault: str, *replicas: ReplicaId, network: bool = False) -> None:
        """Note a fault. `network`: a channel of the data plane breaks, or a member reads."""
        self.faults.append(f"{self.clock.now:.4f} s: {fault}")
        self.is_network_only &= network
        self.hit.update(replicas)

    def some_rank(self) -> TimedRank | None:
        """Return a random living rank, or None."""
        living = [each for one in self.replicas for each in one.ranks if each.alive]
        return self.dice.choice(living) if living else None


# --- Judging --------------------------------------------------------------------------------------


def run(job: RandomJob, seed: int) -> SeedVerdict:
    """Run a job to its end and judge it. `seed` is the seed of the job, for the verdict.

    Raises nothing: the verdict contains a broken invariant, a job without an end, and any defect.
    """
    problem = None
    try:
        job.run(max_events=MAX_EVENTS, until_s=CALM_S)
        problem = _ill_ended(job)
    except InvariantViolation as violation:
        problem = str(violation)
    except RuntimeError as stuck:
        problem = f"INV-8, INV-9: {stuck}"
    except Exception as defect:  # any defect: the seed that shows it must be reported
        problem = f"{type(defect).__name__}: {defect}"
    exit_code = -1 if job.account.exit_code is None else job.account.exit_code
    num_newcomers = len(job.replicas) - job.table.replicas
    return SeedVerdict(seed, exit_code, job.clock.num_events, tuple(job.faults), problem, num_newcomers, len(job.joined))


def _ill_ended(job: RandomJob) -> str | None:
    """Return why a job should not have ended as it did, or None."""
    code, members, losses = job.account.exit_code, job.coordinator.state.roster, job.coordinator.state.losses
    assert job.history is not None
    if not members and losses and losses[-1].detail.startswith("did not enter"):
        return "INV-9: a timeout removed the last members"
    lost = {loss.replica for loss in losses} - job.excused
    if lost & {*job.coordinator.state.left}:
        return f"INV-9: of replicas {job.coordinator.state.left}, which left, one is lost as well"
    if job.is_network_only and (len(members) > 1 or not job.hit) and lost - job.hit:
        return f"INV-9: replicas {sorted(lost - job.hit)} were lost, and nothing was wrong with them"
    committed = dict(job.history.committed)
    trained = max((job.replicas[number].ranks[0].course.trained for number in members), default=0)
    saves_at_end = (ExitCode.OK, ExitCode.INTERRUPTED, ExitCode.TOO_FEW_REPLICAS, ExitCode.INVARIANT_VIOLATED)
    if code in saves_at_end and job.save_interval and trained and trained not in job.durable:
        return f"INV-9: the job ended with exit code {code} after {trained} steps, and saved {sorted(job.durable)}"
    if code == ExitCode.OK:
        behind = [number for number in members if committed.get(number, 0) < job.table.steps]
        if behind:
            return f"INV-9: the job is over, and replicas {behind} have not committed all steps"
        state = job.coordinator.state
        new = [claim.replica for claim in state.joins if job.voted_in.get(claim.replica) == state.generation]
        return f"INV-9: the job is over, and its members {new} still count as newcomers" if new else None
    members_ever = ({*range(job.table.replicas)} | job.joined) - job.excused
    drifted = job.counts.drifted.keys() | job.counts.state_drifted.keys()
    allowed = {
        ExitCode.INTERRUPTED: job.exit_asked,
        ExitCode.TOO_FEW_REPLICAS: job.had_too_few,  # a newcomer that came since does not stop the end
        ExitCode.NO_REPLICA_LEFT: members_ever <= job.hit | {*job.coordinator.state.left} | _set_aside(job),
        ExitCode.DIVERGED: bool(drifted & members_ever),
        ExitCode.POISONED_MICROBATCH: job.num_raised > 1,
        ExitCode.FAILED: job.num_raised > 0,
        ExitCode.INVARIANT_VIOLATED: job.num_miscounts > 1,
    }
    if not allowed.get(ExitCode(code or 0), False):
        return f"INV-9: the job ended with exit code {code}: {job.account.reason}"
    ends = {committed.get(number, 0) for number in members if job.replicas[number].leader_alive}
    if code in (ExitCode.INTERRUPTED, ExitCode.TOO_FEW_REPLICAS) and len(ends) > 1:
        return f"INV-2: the members end after different steps: {sorted(ends)}"
    return None


def _set_aside(job: RandomJob) -> set[ReplicaId]:
    """Return the replica that had to go because of two only one could stay, and none was known.

    That is no fault of the program only if the network between the two was bad.
    """
    return {loss.replica for loss in job.coordinator.state.losses if job.broken and loss.detail.startswith("set aside")}


def fuzz(seed: int) -> SeedVerdict:
    """Run the job of a seed."""
    return run(RandomJob(seed), seed)


def verdicts(seeds: Iterable[int], jobs: int = 1) -> Iterator[SeedVerdict]:
    """Yield the verdicts on the jobs of all seeds, which run in `jobs` processes."""
    yield from of_seeds(fuzz, seeds, jobs)


def replay_line(seed: int, seeds: int = 1, jobs: int = 1) -> str:
    """Return the command that runs `seed` again, or `seeds` of them from it on."""
    return f"{COMMAND} --seed {seed} --seeds {seeds}" + (f" --jobs {jobs}" if jobs > 1 else "")


@ended_by_ctrl_c()
def main(arguments: list[str] | None = None) -> int:
    """Run seeds and return the exit code: 130 after Ctrl-C, else 1 if one fails, else 0."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=1, help="the first (default: 1)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    began = time.monotonic()
    codes: Counter[int] = Counter()
    failed = events = newcomers = joined = 0
    is_interrupted = False
    try:
        for verdict in verdicts(range(options.seed, options.seed + options.seeds), options.jobs):
            if verdict.problem is not None:
                print(
                    "\n".join(["", *verdict.faults, f"seed {verdict.seed}: {verdict.problem}", replay_line(verdict.seed)]),
                    flush=True,
                )
            elif options.seeds == 1:
                print("\n".join([*verdict.faults, f"seed {verdict.seed}: exit code {verdict.exit_code}"]))
            codes[verdict.exit_code] += 1
            events += verdict.events
            newcomers += verdict.newcomers
            joined += verdict.joined
            failed += verdict.problem is not None
    except KeyboardInterrupt:
        is_interrupted = True
    done = codes.total()
    if is_interrupted:
        print(f"interrupted; to go on: {replay_line(options.seed + done, options.seeds - done, options.jobs)}")
    ends = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
    print(
        f"{done} seeds, {events} events, {time.monotonic() - began:.0f} s; exit codes {ends or 'none'}; "
        f"{joined} of {newcomers} newcomers joined"
    )
    print(f"{done - failed} passed, {failed} failed")
    return CTRL_C_CODE if is_interrupted else 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
