"""A rank without Megatron: coded gradients through the real member, transport, leader and coordinator.

Microbatch i adds 2**i to every element, so a committed sum of 2**M - 1 says that each of the M counts exactly once. Two ranks
a replica: bucket 0 is rank 0's, bucket 1 both's, bucket 2 (the ledger) rank 1's. One rank: all are its own.
Each rank appends what it applied to `sums-R-K.jsonl`; `tests.cluster.test_*` judge that, not this program.
"""

from __future__ import annotations

import json
import sys
import time
import zlib

import msgspec
import torch

from megatron_recover import trace
from megatron_recover.authentication.key import inherited_key
from megatron_recover.config import DRY_RUN_PASSED, RecoverConfig, rank_context
from megatron_recover.control_plane.rank_driver import RankDriver
from megatron_recover.core.progress import Phase
from megatron_recover.core.quota import share
from megatron_recover.core.rank_messages import Apply, Plan
from megatron_recover.core.values import Compute, Held, Shape, Work
from megatron_recover.data_plane.direct import DirectEndpoint
from megatron_recover.data_plane.transport import Revoked, Transport, TransportError
from megatron_recover.faults import FaultInjector, FaultPoint
from megatron_recover.progress_page import ProgressPage
from megatron_recover.trace import ring
from megatron_recover.trace.node_clock import NodeClock

ELEMENTS = 1000


class Toy:
    """One rank's training loop."""

    def __init__(
        self,
        num_steps: int,
        num_microbatches: int,
        config: RecoverConfig,
        dropped: list[tuple[int, int, int, int]],
        pace_s: float,
        deadlines: dict[str, float],
        sums_dir: str = "",
    ) -> None:
        """`dropped`: (replica, rank, step, bucket) whose first result is treated as if the reduction had failed.

        `deadlines`: waits that differ from those of the config. `sums_dir`: empty means the run directory.
        """
        context = rank_context()
        assert context is not None
        if context.dry_run:
            sys.exit(DRY_RUN_PASSED)
        self.context = context
        self.sums_dir = sums_dir or context.run_dir
        self.pace_s = pace_s
        self.deadlines = msgspec.structs.replace(config.deadlines, **deadlines)
        self.dropped = {tuple(each) for each in dropped}
        self.num_steps, self.num_microbatches, self.config = num_steps, num_microbatches, config
        clock = NodeClock.inherited(context)
        self.log = ring.log_of_rank(context, clock)
        self.faults = FaultInjector.of(
            context.faults,
            replica=context.replica,
            rank=context.rank,
            record=lambda **fields: self.log.record(trace.Fault(**fields)),
        )
        self.page = ProgressPage.inherited()
        key = self.key = inherited_key()
        self.member = RankDriver(
            context, config,
            DirectEndpoint(
                context.address, key=key, rank=context.rank, deadlines=self.deadlines, report=self.report_strangers,
                ports=context.ports,
            ),
            key=key, clock=clock, record=self.log.record, faults=self.faults, page=self.page, deadlines=self.deadlines,
        )  # fmt: skip
        all_of_them = tuple(range(context.num_ranks))
        self.shape = Shape(context.num_ranks, ((0,), all_of_them, (context.num_ranks - 1,)))
        self.mine = [bucket for bucket, ranks in enumerate(self.shape.bucket_ranks) if context.rank in ranks]
        self.parameters = torch.zeros(ELEMENTS, dtype=torch.float64)

    def at(self, point: FaultPoint, **where: int) -> None:
        if self.faults is not None:
            self.faults.at(point, **where)

    def report_strangers(self, name: str, number: int) -> None:
        place = {"replica": self.context.replica, "rank": self.context.rank}
        self.log.record(trace.Strangers(**place, listener=name, num_connections=number))

    def run(self) -> None:
        self.member.join(self.shape, "toy")
        self.train(1)

    def train(self, first: int) -> None:
        sums = open(f"{self.sums_dir}/sums-{self.context.replica}-{self.context.rank}.jsonl", "a")  # noqa: SIM115
        for iteration in range(first, self.num_steps + 1):
            requests = self.step(iteration, sums)
            if any(request.startswith("exit: ") for request in requests):
                break
        self.member.close()

    def step(self, iteration: int, sums) -> tuple[str, ...]:  # noqa: ANN001
        work = Work(f"train {iteration}", self.num_microbatches, tuple(range(len(self.shape.bucket_ranks))))
        self.begins(work)
        step = self.member.begin(work)
        self.gradients = {bucket: torch.zeros(ELEMENTS, dtype=torch.float64) for bucket in self.mine}
        self.counts = {bucket: torch.zeros(self.num_microbatches, dtype=torch.int64) for bucket in self.mine}
        self.results: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        again = False
        while not isinstance(order := self.member.next_order(), Apply):
            again = again or order.transfers != () or order.computes != self.fresh(order)
            for compute in order.computes:
                self.compute(step, order.generation, compute, again=again)
            self.page.enter(Phase.REDUCTION)
            self.at(FaultPoint.BEFORE_REDUCE, step=step)
            try:
                self.reduce(step, order, self.member.transport(order.generation), again=again)
            except Revoked:
                pass
            except TransportError as error:
                self.member.blocked(order.generation, error)
            again = True
        self.page.enter(Phase.OPTIMIZER, ())
        self.at(FaultPoint.OPTIMIZER, step=step)
        self.applies(work)
        applied = {}
        for bucket in self.mine:
            result = self.results[bucket][0]
            applied[bucket] = [result.min().item(), result.max().item()]
            self.parameters += result
        digest = f"{zlib.crc32(self.parameters.numpy().tobytes()):x}"
        sums.write(json.dumps({"step": step, "sums": applied, "digest": digest}) + "\n")
        sums.flush()
        self.log.record(
            trace.Applied(
                replica=self.context.replica,
                rank=self.context.rank,
                generation=order.generation,
                step=step,
                label=work.label,
                parameter_digest=digest,
            )
        )
        return order.record.requests

    def begins(self, work: Work) -> None:
        """Called before a step begins; for a toy that does more."""

    def applies(self, work: Work) -> None:
        """Called before a step changes the parameters; for a toy that does more."""

    def fresh(self, plan: Plan) -> tuple[Compute, ...]:
        """What a step begins with that nobody has begun before."""
        return (Compute(share(plan.quotas, plan.roster, self.context.replica), plan.work.buckets),)

    def compute(self, step: int, generation: int, compute: Compute, *, again: bool) -> None:
        where = {"replica": self.context.replica, "rank": self.context.rank, "generation": generation, "step": step}
        into = tuple(bucket for bucket in self.mine if bucket in compute.into)
        for microbatch in compute.microbatches:
            self.page.enter(Phase.FORWARD, (microbatch,))
            try:
                self.at(FaultPoint.RECOMPUTE if again else FaultPoint.FORWARD, step=step, microbatch=microbatch)
                self.log.record(trace.MicrobatchStarted(microbatch=microbatch, **where))
                time.sleep(self.pace_s)
                self.page.enter(Phase.BACKWARD)
                self.at(FaultPoint.BACKWARD, step=step, microbatch=microbatch)
            except Exception as error:
                self.member.failing((microbatch,), error)
                raise
            for bucket in into:
                self.gradients[bucket] += 2.0**microbatch
                self.counts[bucket][microbatch] += 1
            self.log.record(trace.MicrobatchFinished(microbatch=microbatch, seconds=0.0, into=into, **where))
            self.page.enter(Phase.PIPELINE, ())

    def reduce(self, step: int, plan: Plan, transport: Transport, *, again: bool) -> None:
        where = {"replica": self.context.replica, "rank": self.context.rank, "generation": plan.generation, "step": step}
        for transfer in plan.transfers:
            if transfer.bucket not in self.mine:
                continue
            bucket = transfer.bucket
            self.at(FaultPoint.TRANSFER, step=step, bucket=bucket)
            into = self.results.setdefault(bucket, self.empty(bucket))
            transport.copy_into(into, source=transfer.source, targets=transfer.targets, tag=6 * step + bucket)
            if self.context.replica in transfer.targets:
                checksum = self.checksum(bucket)
                self.log.record(
                    trace.Transferred(
                        bucket=bucket, version=transfer.version, source=transfer.source, checksum=checksum, **where
                    )
                )
                if not self.member.hold(Held(bucket, transfer.version, checksum)):
                    raise Revoked("overtaken")
        for bucket in plan.reduces:
            if bucket not in self.mine:
                continue

            def probe(instant: str, bucket: int = bucket) -> None:
                if instant == "middle":
                    self.at(FaultPoint.SECOND_REDUCE if again else FaultPoint.REDUCE, step=step, bucket=bucket)

            into = self.empty(bucket)
            sources = (self.gradients[bucket], self.counts[bucket])
            transport.sum_into(sources, into, tag=6 * step + 3 + bucket, probe=probe)
            here = (self.context.replica, self.context.rank, step, bucket)
            if here in self.dropped:
                self.dropped.discard(here)
                raise TransportError("the test broke this reduction")
            self.results[bucket] = into
            checksum = self.checksum(bucket)
            counts = tuple(into[1].tolist())
            self.log.record(
                trace.Reduced(
                    bucket=bucket,
                    version=plan.generation,
                    checksum=checksum,
                    provenance="ones" if set(counts) == {1} else counts,
                    **where,
                )
            )
            if not self.member.hold(Held(bucket, plan.generation, checksum)):
                raise Revoked("overtaken")

    def empty(self, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(self.gradients[bucket], -1.0), torch.full_like(self.counts[bucket], -1)

    def checksum(self, bucket: int) -> int:
        return zlib.crc32(self.results[bucket][0].numpy().tobytes())


def main(kind: type[Toy] = Toy) -> None:
    """Run one rank as the command line says."""
    settings = json.loads(sys.argv[1])
    wanted = RecoverConfig(**settings["config"])
    kind(
        settings["steps"], settings["microbatches"], wanted, settings["dropped"], settings["pace_s"], settings["deadlines"],
        settings.get("sums_dir", ""),
    ).run()  # fmt: skip


if __name__ == "__main__":
    main()
