"""Valid traces made by hand: a small, orderly run of the protocol whose events tests then break one at a time.

Two ranks a replica (TP1 x PP2), three buckets: 0 on rank 0; 1 and the ledger (2) on rank 1. Every event is placed where the
real writers place it: before its effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from megatron_recover import trace
from megatron_recover.core.digest import combined
from megatron_recover.core.membership_messages import LossKind
from megatron_recover.core.request import coordinator_lost

BUCKET_RANKS = ((0,), (1,), (1,))
BUCKETS = (0, 1, 2)


class Run:
    """Writes the events of a run step by step; `self.events` is the trace so far."""

    def __init__(self, replicas: int = 3, microbatches: int = 6, determinism: str = "exact") -> None:
        self.events: list[trace.Event] = []
        self.roster = tuple(range(replicas))
        self.generation = 1
        self.step = 0
        self.trained = 0
        self.num_microbatches = microbatches
        self.t = 0.0
        self.add(
            trace.RunStarted, replicas=replicas, layout=trace.Layout(tp=1, pp=2), determinism=determinism, seed=1,
            argv=("run",), num_microbatches=microbatches,
        )  # fmt: skip
        for replica in self.roster:
            self.add(trace.Joined, replica=replica, fingerprint="f", bucket_ranks=BUCKET_RANKS)
        self.add(trace.Generation, generation=1, roster=self.roster, reason="start")
        self.statuses({}, lambda replica: ())

    def add(self, event: type[trace.Event], /, **fields: object) -> None:
        """Append one event; each takes a millisecond."""
        self.t = round(self.t + 0.001, 6)
        self.events.append(event(t=self.t, **fields))  # type: ignore[call-arg]

    def deal(self, ids: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Spread ids over the roster, round robin."""
        size = len(self.roster)
        return {replica: tuple(ids[i::size]) for i, replica in enumerate(self.roster)}

    def plan(
        self, dealt: dict[int, tuple[int, ...]], into: tuple[int, ...], transfers: tuple[trace.Transfer, ...] = (),
        decided: tuple[trace.Decided, ...] = (),
    ) -> None:  # fmt: skip
        """Plans of all members of the roster."""
        for replica in self.roster:
            ids = dealt.get(replica, ())
            self.add(
                trace.Plan, **self.where(replica), label=self.label, num_microbatches=self.num_microbatches, roster=self.roster,
                quotas=tuple(len(dealt.get(one, ())) for one in self.roster), transfers=transfers,
                computes=(trace.Compute(microbatches=ids, into=into),) if ids else (), reduces=into, decided=decided,
            )  # fmt: skip

    @property
    def label(self) -> str:
        return f"train {self.trained + 1}"

    def where(self, replica: int) -> dict[str, int]:
        """The fields that most events share."""
        return {"replica": replica, "generation": self.generation, "step": self.step}

    def compute(self, replica: int, ids: Sequence[int], into: tuple[int, ...]) -> None:
        """Forward and backward of some microbatches on both stages of a replica."""
        for microbatch in ids:
            for rank in (0, 1):
                self.add(trace.MicrobatchStarted, **self.where(replica), rank=rank, microbatch=microbatch)
            for rank in (1, 0):
                mine = tuple(bucket for bucket in into if rank in BUCKET_RANKS[bucket])
                self.add(
                    trace.MicrobatchFinished,
                    **self.where(replica),
                    rank=rank,
                    microbatch=microbatch,
                    seconds=0.002,
                    backward_s=0.001,
                    into=mine,
                )

    def checksum(self, bucket: int) -> int:
        """Exact sums: the same whoever computed what."""
        return 1000 * self.step + bucket

    def reduce(self, buckets: Sequence[int]) -> None:
        """All members hold the sums of these buckets."""
        for bucket in buckets:
            for replica in self.roster:
                self.add(
                    trace.Reduced, **self.where(replica), rank=BUCKET_RANKS[bucket][0], bucket=bucket, version=self.generation,
                    checksum=self.checksum(bucket), provenance="ones", seconds=0.0005,
                )  # fmt: skip

    def commit(self, versions: dict[int, int], loss: float | None = None) -> None:
        """Votes, commits and applies of all members."""
        digest = f"digest {self.step}"
        results = tuple(
            trace.Result(bucket=bucket, version=versions[bucket], checksums=(self.checksum(bucket),)) for bucket in BUCKETS
        )
        for replica in self.roster:
            self.add(trace.Voted, **self.where(replica), digest=digest)
        for replica in self.roster:
            self.add(trace.Committed, **self.where(replica), label=self.label, digest=digest, adopted=False, versions=results)
            for rank in (0, 1):
                writer = replica == self.roster[0] and rank == 1
                self.add(
                    trace.Applied, **self.where(replica), rank=rank, label=self.label, parameter_digest=f"p{self.step}.{rank}",
                    loss=(5.0 - 0.1 * self.trained if loss is None else loss) if writer else None,
                )  # fmt: skip
        self.step += 1
        self.trained += 1

    def quiet_step(self) -> None:
        """A step in which nothing fails."""
        dealt = self.deal(range(self.num_microbatches))
        self.plan(dealt, BUCKETS)
        for replica, ids in dealt.items():
            self.compute(replica, ids, BUCKETS)
        self.reduce(BUCKETS)
        self.commit(dict.fromkeys(BUCKETS, self.generation))

    def step_outside_training(self, label: str, num_microbatches: int) -> None:
        """An evaluation, or (without microbatches) the agreement on a save or the end: only the ledger is reduced."""
        dealt = self.deal(range(num_microbatches))
        state = {} if num_microbatches else {"state_digest": f"state {self.trained}"}
        for replica in self.roster if state else ():
            for rank in (0, 1):
                told = {"replica": replica, "rank": rank, "step": self.step, "label": label}
                self.add(trace.StateDigested, **told, digest=f"s{self.trained}.{rank}")
        for replica, ids in dealt.items():
            self.add(
                trace.Plan, **self.where(replica), label=label, num_microbatches=num_microbatches, roster=self.roster,
                quotas=tuple(map(len, dealt.values())), reduces=BUCKETS[-1:],
                computes=(trace.Compute(microbatches=ids, into=BUCKETS[-1:]),) if ids else (),
            )  # fmt: skip
        for replica, ids in dealt.items():
            self.compute(replica, ids, BUCKETS[-1:])
        self.reduce(BUCKETS[-1:])
        result = trace.Result(bucket=BUCKETS[-1], version=self.generation, checksums=(self.checksum(BUCKETS[-1]),))
        for replica in self.roster:
            self.add(trace.Voted, **self.where(replica), digest=label)
        for replica in self.roster:
            where = {**self.where(replica), "label": label}
            self.add(trace.Committed, **where, digest=label, adopted=False, versions=(result,), **state)
            for rank in (0, 1):
                self.add(trace.Applied, **where, rank=rank)
        self.step += 1

    def grant(self, number: int) -> None:
        """The coordinator gives the lowest replica a grant."""
        self.add(trace.Granted, number=number, generation=self.generation, writer=self.roster[0])

    def save(self, iteration: int, grant: int | None = None) -> None:
        """The replicas agree on their state, then the lowest writes it."""
        self.step_outside_training(f"save {iteration}", 0)
        for phase, number in (("started", None), ("finished", grant)):
            self.add(trace.Checkpoint, replica=self.roster[0], rank=0, iteration=iteration, phase=phase, grant=number)

    def lose(self, victim: int, rank: int, point: str, **fault: int) -> None:
        """A rank is killed, the rest of its replica fenced, the next generation announced."""
        self.add(trace.Fault, **self.where(victim), rank=rank, point=point, kind="kill", **fault)
        self.add(trace.Failure, replica=victim, rank=rank, cause="SIGKILL")
        self.add(trace.Fenced, replica=victim, ranks=(0, 1))
        self.roster = tuple(one for one in self.roster if one != victim)
        self.generation += 1
        lost = trace.Loss(replica=victim, kind=LossKind.PROCESS_ENDED, detail="SIGKILL")
        self.add(trace.Generation, generation=self.generation, roster=self.roster, losses=(lost,), reason="loss")

    def statuses(
        self, held: dict[int, tuple[int, ...]], complete: Callable[[int], tuple[tuple[int, int], ...]],
        newcomers: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """All members enter the generation, and all but newcomers say what they have: `complete(replica)`."""
        digest = f"{combined([self.state_of(rank) for rank in (0, 1)]):016x}" if newcomers else None
        for replica in self.roster:
            self.add(trace.Entered, replica=replica, generation=self.generation, seconds=0.002)
        for replica in (one for one in self.roster if one not in newcomers):
            ids = held.get(replica, ())
            self.add(
                trace.Status, **self.where(replica), work=bool(held),
                contributions=(trace.Contribution(buckets=BUCKETS, microbatches=ids),) if ids else (),
                complete=complete(replica), committed=self.step - 1 if self.step else None, state_digest=digest,
            )  # fmt: skip

    def step_with_drift(self, victim: int) -> None:
        """The parameters of `victim` have changed: its votes differ, and the step is made again without it."""
        for rank in (0, 1):
            index = max(
                i for i, event in enumerate(self.events)
                if isinstance(event, trace.Applied) and (event.replica, event.rank) == (victim, rank)
            )  # fmt: skip
            self.events[index] = msgspec.structs.replace(self.events[index], parameter_digest="drifted")
        older, dealt = self.generation, self.deal(range(self.num_microbatches))
        self.plan(dealt, BUCKETS)
        for replica, ids in dealt.items():
            self.compute(replica, ids, BUCKETS)
        start = len(self.events)
        self.reduce(BUCKETS)
        for index, event in enumerate(self.events[start:], start):
            assert isinstance(event, trace.Reduced)  # the sum has what the victim did; its checksum covers the parameters, too
            off = 7 if event.replica == victim else 5
            self.events[index] = msgspec.structs.replace(event, checksum=event.checksum + off)
        for replica in self.roster:
            self.add(trace.Voted, **self.where(replica), digest="drifted" if replica == victim else "with what drifted")
        self.roster = tuple(one for one in self.roster if one != victim)
        self.generation += 1
        lost = trace.Loss(replica=victim, kind=LossKind.DIVERGED, detail="replicas disagree")
        self.add(trace.Generation, generation=self.generation, roster=self.roster, losses=(lost,), reason="replicas disagree")
        self.add(trace.Fenced, replica=victim, ranks=(0, 1))
        self.statuses(dealt, lambda replica: tuple((bucket, older) for bucket in BUCKETS))
        again = self.deal(dealt[victim])
        self.plan(again, BUCKETS)
        for replica, ids in again.items():
            self.compute(replica, ids, BUCKETS)
        self.reduce(BUCKETS)
        self.commit(dict.fromkeys(BUCKETS, self.generation))

    def recovered(self) -> None:
        """What each leader's clock says about the phases of the newest generation: replica r takes r+1 times as long."""
        for replica in self.roster:
            for order, phase in enumerate(get_args(trace.Phase), start=1):
                self.add(trace.Recovery, **self.where(replica), phase=phase, seconds=0.01 * order * (replica + 1))

    def step_with_kill_in_backward(self, victim: int, in_schedule: bool = False) -> None:
        """`victim` ends when it has finished all but one of its microbatches; the others compute them again.

        `in_schedule`: in the pass that they are in, else in a second one.
        """
        dealt = self.deal(range(self.num_microbatches))
        self.plan(dealt, BUCKETS)
        for replica, ids in dealt.items():
            self.compute(replica, ids[:-1] if replica == victim else ids, BUCKETS)
        self.lose(victim, 1, "backward", microbatch=dealt[victim][-1])
        self.statuses(dealt, lambda replica: ())
        again = self.deal(dealt[victim])
        self.plan(again, BUCKETS)
        for replica, ids in again.items():
            if in_schedule:
                self.add(trace.Extended, **self.where(replica), rank=0, microbatches=ids)
            self.compute(replica, ids, BUCKETS)
        self.reduce(BUCKETS)
        self.recovered()
        self.commit(dict.fromkeys(BUCKETS, self.generation))

    def step_with_kill_in_reduction(self, victim: int) -> None:
        """Bucket 0 is complete on the first survivor only, bucket 1 and the ledger nowhere: one is sent, two are made again."""
        dealt = self.deal(range(self.num_microbatches))
        self.plan(dealt, BUCKETS)
        for replica, ids in dealt.items():
            self.compute(replica, ids, BUCKETS)
        older, (holder, *_) = self.generation, (one for one in self.roster if one != victim)
        checksum = self.checksum(0)
        self.add(trace.Reduced, **self.where(holder), rank=0, bucket=0, version=older, checksum=checksum, provenance="ones")
        self.lose(victim, 0, "reduce", bucket=1)
        for replica in self.roster:
            failed = {"replica": replica, "rank": 1, "generation": older, "step": self.step, "bucket": 1}
            self.add(trace.ReductionFailed, **failed, reason="peer lost")
        self.statuses(dealt, lambda replica: ((0, older),) if replica == holder else ())
        targets = tuple(one for one in self.roster if one != holder)
        sent = (trace.Transfer(bucket=0, version=older, source=holder, targets=targets),) if targets else ()
        again = self.deal(dealt[victim])
        self.plan(again, (1, 2), sent, (trace.Decided(bucket=0, version=older, source=holder),))
        for replica, ids in again.items():
            self.compute(replica, ids, (1, 2))
        for replica in targets:
            result = {"rank": 0, "bucket": 0, "version": older, "source": holder, "checksum": checksum}
            self.add(trace.Transferred, **self.where(replica), **result)
        self.reduce((1, 2))
        self.recovered()
        self.commit({0: older, 1: self.generation, 2: self.generation})

    def form(self, newcomer: int, in_place_of: tuple[int, ...] = ()) -> None:
        """A newcomer is formed and greets the coordinator."""
        self.add(trace.Forming, newcomer=newcomer, in_place_of=in_place_of)
        self.add(trace.Joined, replica=newcomer, fingerprint="f", bucket_ranks=BUCKET_RANKS)

    def claim(self, newcomer: int, off: int = 0) -> None:
        """The members digest the state of this step, and a newcomer has read it and claims it; with `off` another one."""
        for replica in self.roster:
            for rank in (0, 1):
                digest = f"{self.state_of(rank):016x}"
                self.add(trace.StateDigested, replica=replica, rank=rank, step=self.step, label=self.label, digest=digest)
        for rank in (0, 1):
            digest = f"{self.state_of(rank) + off:016x}"
            told = {"label": self.label, "digest": digest, "num_bytes": 1000, "seconds": 0.001, "num_sources": 2}
            self.add(trace.StateRead, replica=newcomer, rank=rank, **told)
        digest = f"{combined([self.state_of(rank) + off for rank in (0, 1)]):016x}"
        self.add(trace.Claimed, replica=newcomer, member=self.roster[0], label=self.label, digest=digest)

    def state_of(self, rank: int) -> int:
        """The digest of the state with which a rank begins the step."""
        return 100 * self.step + rank

    def step_with_join(self, newcomer: int, off: int = 0) -> None:
        """A newcomer claims the state of this step and is announced. With `off` it is turned away, as its state differs."""
        dealt, older = self.deal(range(self.num_microbatches)), self.roster
        self.plan(dealt, BUCKETS)
        for replica, ids in dealt.items():
            self.compute(replica, ids, BUCKETS)
        self.claim(newcomer, off)
        self.roster = tuple(sorted((*older, newcomer)))
        self.generation += 1
        what = {"newcomers": (newcomer,), "reason": f"replica {newcomer} is to join"}
        self.add(trace.Generation, generation=self.generation, roster=self.roster, **what)
        self.statuses(dealt, lambda replica: (), newcomers=(newcomer,))
        if off:
            self.roster = older
            self.add(
                trace.TurnedAway,
                generation=self.generation,
                newcomers=(newcomer,),
                reason="its state digest differs",
            )
        self.plan({}, BUCKETS)
        self.reduce(BUCKETS)
        self.commit(dict.fromkeys(BUCKETS, self.generation))
        if not off:
            self.add(trace.Proven, generation=self.generation, newcomers=(newcomer,))

    def ask_to_leave(self, replica: int) -> None:
        """A step whose record asks a replica to leave."""
        self.add(trace.LeaveAsked, replicas=(replica,), reason="drain")
        begin = len(self.events)
        self.quiet_step()
        for index, event in enumerate(self.events[begin:], begin):
            if isinstance(event, trace.Committed):
                self.events[index] = msgspec.structs.replace(event, requests=(f"leave: {replica}",))

    def step_with_leave(self, leaver: int) -> None:
        """The others compute all; then the leaver is let go, and they make the sums among themselves."""
        stay = tuple(one for one in self.roster if one != leaver)
        dealt = {one: tuple(range(self.num_microbatches))[i :: len(stay)] for i, one in enumerate(stay)}
        self.plan(dealt, BUCKETS)
        for replica, ids in dealt.items():
            self.compute(replica, ids, BUCKETS)
        self.roster = stay
        self.generation += 1
        self.add(trace.Generation, generation=self.generation, roster=stay, left=(leaver,), reason=f"replica {leaver} leaves")
        self.statuses(dealt, lambda replica: ())
        self.plan({}, BUCKETS)
        self.reduce(BUCKETS)
        self.commit(dict.fromkeys(BUCKETS, self.generation))

    def finish(self, exit_code: int = 0) -> Run:
        """The launcher's last word."""
        self.add(trace.RunFinished, exit_code=exit_code)
        return self


def death_behind_all_sums() -> Run:
    """Replica 2 dies when all members hold all sums, and the step is committed without another computation."""
    run = Run()
    dealt = run.deal(range(6))
    run.plan(dealt, BUCKETS)
    for replica, ids in dealt.items():
        run.compute(replica, ids, BUCKETS)
    run.reduce(BUCKETS)
    run.lose(2, 0, "before_vote")
    run.statuses(dealt, lambda replica: tuple((bucket, 1) for bucket in BUCKETS))
    run.plan({}, ())
    run.commit(dict.fromkeys(BUCKETS, 1))
    run.quiet_step()
    return run.finish()


def faulty_run(determinism: str = "exact") -> Run:
    """3 -> 2 -> 1 replicas: one killed in a backward, one in a reduction, with quiet steps between."""
    run = Run(determinism=determinism)
    run.quiet_step()
    run.step_with_kill_in_backward(2)
    run.quiet_step()
    run.step_with_kill_in_reduction(0)
    run.quiet_step()
    return run.finish()


def drifting_run(determinism: str = "exact") -> Run:
    """3 -> 2 replicas: one whose parameters have drifted after a step is outvoted in the next."""
    run = Run(determinism=determinism)
    run.quiet_step()
    run.step_with_drift(0)
    run.quiet_step()
    return run.finish()


def saving_run() -> Run:
    """Checkpoints in the middle and at the end; that of the end is written by another replica, after the last agreement."""
    run = Run()
    run.quiet_step()
    run.save(1)
    run.quiet_step()
    run.step_outside_training("save 2", 0)
    run.step_outside_training("end 0", 0)
    run.add(trace.Checkpoint, replica=1, rank=0, iteration=2, phase="finished")
    run.step_outside_training("end 1", 0)
    return run.finish()


def granting_run() -> Run:
    """Replica 0 names one checkpoint and is lost with its next grant; replica 1 names the others."""
    run = Run()
    run.grant(1)
    run.quiet_step()
    run.save(1, grant=1)
    run.grant(2)
    run.step_with_kill_in_reduction(0)
    run.grant(3)
    run.save(2, grant=3)
    run.grant(4)
    run.quiet_step()
    run.save(3, grant=4)
    run.grant(5)
    return run.finish()


def run_without_a_coordinator() -> Run:
    """All members of generation 2 lose the coordinator; its writer names two checkpoints under its newest grant."""
    run = granting_run()
    run.events.pop()  # it goes on
    for iteration in (4, 5, 6):
        run.quiet_step()
        run.save(iteration, grant=5)
        told = tuple(coordinator_lost(replica) for replica in run.roster[: iteration - 3])
        for index, event in enumerate(run.events):
            if isinstance(event, trace.Committed) and event.step == run.step - 1:
                run.events[index] = msgspec.structs.replace(event, requests=told)
    return run.finish()


def leaving_run() -> Run:
    """3 -> 2 replicas: replica 2 leaves as requested."""
    run = Run()
    run.quiet_step()
    run.ask_to_leave(2)
    run.step_with_leave(2)
    run.quiet_step()
    return run.finish()


def joining_run() -> Run:
    """3 -> 2 -> 3 replicas: replica 3 forms in the place of replica 2, is turned away once, and joins two steps later."""
    run = Run()
    run.quiet_step()
    run.step_with_kill_in_backward(2)
    run.form(3, in_place_of=(2,))
    run.step_with_join(3, off=1)
    run.claim(3)
    run.add(trace.ClaimRefused, newcomer=3, label=run.label, reason="a save is in progress")
    run.quiet_step()
    run.step_with_join(3)
    run.quiet_step()
    return run.finish()


def quiet_run(steps: int = 5, determinism: str = "exact") -> Run:
    """The same steps with nothing failing."""
    run = Run(determinism=determinism)
    for _ in range(steps):
        run.quiet_step()
    return run.finish()


def write(run_dir: Path, events: Sequence[trace.Event]) -> Path:
    """Write a trace as a run directory holds it; times stay as they are."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lines = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
    (run_dir / trace.EVENTS_FILE).write_bytes(lines)
    return run_dir
