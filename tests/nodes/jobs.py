"""Toy jobs on several nodes (`toy.py`), seen from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_recover.authentication import key as keys
from megatron_recover.cluster.meeting import Meeting
from megatron_recover.observe.verify.check import check
from tests.cluster.jobs import Outcome, Spec, command
from tests.cluster.waiting import until_files
from tests.nodes.history import History
from tests.nodes.merging import merge
from tests.nodes.names import Naming
from tests.nodes.nodes import Network, Node, Program

PORT = 29500
TOY = Path(__file__).with_name("toy.py")
DEADLINES = {**Spec(run_dir="").deadlines, "blame_s": 15.0}


class NodesJob:
    """A toy job that runs on the first nodes of a network."""

    def __init__(
        self,
        network: Network,
        *,
        num_nodes: int = 3,
        node_silence_s: float = 2.0,
        replicas: int = 3,
        ranks: int = 2,
        naming: Naming | None = None,
        **settings: Any,
    ) -> None:
        """Start it on all its nodes. `naming`: how it names checkpoints; None: it names none. `settings`: fields of `Spec`."""
        self.network, self.node_silence_s = network, node_silence_s
        self.sums = network.shared / "sums"
        self.sums.mkdir()
        if naming is not None:
            naming.write(self.sums)
        key_file = network.shared / "key"
        key_file.write_text(keys.make_key().hex())
        key_file.chmod(0o600)
        self.nodes = network.nodes[:num_nodes]
        settings = {"deadlines": DEADLINES, "script": str(TOY), **settings}
        self.spec = Spec(
            run_dir=str(network.shared / "run"), sums_dir=str(self.sums), key_file=str(key_file),
            slots=replicas * ranks // num_nodes, replicas=replicas, ranks=ranks, **settings,
        )  # fmt: skip
        self.agents: dict[str, Program] = {node.name: self._start(node) for node in self.nodes}

    def _start(self, node: Node) -> Program:
        meeting = Meeting(
            least_nodes=len(self.nodes), most_nodes=len(self.nodes), node_rank=node.number, host=self.nodes[0].name, port=PORT,
            flag="--master-addr", join_s=60, last_call_s=1, node_s=self.node_silence_s,
        )  # fmt: skip
        return node.start(command(msgspec.structs.replace(self.spec, meeting=meeting)))

    def start_late(self, node: Node) -> None:
        """Start an agent that comes after the start of the job, or comes back."""
        self.agents[node.name] = self._start(node)

    def history(self) -> History:
        """Return what its ranks have applied until now."""
        return History.read(self.sums)

    def steps(self) -> dict[tuple[int, int], int]:
        """Return how many steps each rank has applied."""
        return {rank: len(events) for rank, events in self.history().by_rank().items()}

    def until(self, condition: Callable[[], object], what: str, deadline_s: float = 60.0) -> None:
        """Return when `condition()` holds, which depends on what ranks apply."""
        try:
            until_files(condition, what, self.sums, deadline_s=deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from None

    def until_training(self, num_steps: int = 10) -> None:
        """Return when all ranks have applied so many steps."""
        num_ranks = self.spec.replicas * self.spec.ranks

        def are_there() -> bool:
            steps = self.steps()
            return len(steps) == num_ranks and min(steps.values()) >= num_steps

        self.until(are_there, f"{num_steps} steps of all ranks")

    def until_going_on(self, replicas: Sequence[int], num_steps: int = 10, deadline_s: float = 60.0) -> None:
        """Return when all ranks of these replicas have applied so many steps more."""
        before = self.steps()

        def have_gone_on() -> bool:
            now = self.steps()
            return all(now[rank] >= before[rank] + num_steps for rank in before if rank[0] in replicas)

        self.until(have_gone_on, f"{num_steps} steps more of replicas {list(replicas)}", deadline_s)

    def end(self, nodes: Sequence[Node] | None = None, deadline_s: float = 60.0) -> dict[str, int]:
        """Wait for the ends of the agents of these nodes (default: all); return their exit codes."""
        until = time.monotonic() + deadline_s
        names = [node.name for node in (self.nodes if nodes is None else nodes)]
        return {name: self.agents[name].wait(max(0.1, until - time.monotonic())) for name in names}

    def outcome(self) -> Outcome:
        """Return what it left, as a toy job on one machine would have."""
        return Outcome(self.spec, self.agents["n0"].poll() or 0, self.output())

    def mistakes(self, lost: Collection[int] = ()) -> list[str]:
        """Return what `check` finds wrong with the merged trace of all nodes.

        `lost`: replicas on nodes that lost their power. There is nobody who could fence them, and nothing to fence.
        """
        verdict = check(merge(Path(self.spec.run_dir), self.sums, self.network.shared / f"merged-{time.monotonic_ns()}"))
        ended = tuple(f"replica {replica} was lost, and its ranks " for replica in lost)
        found = [f"{each.invariant}: {each.message}" for each in verdict.violations if not each.message.startswith(ended)]
        return [*found, *verdict.problems]

    def output(self) -> str:
        """Return what all agents printed."""
        return "\n".join(f"--- {name} ({agent.poll()}):\n{agent.text()[-4000:]}" for name, agent in self.agents.items())
