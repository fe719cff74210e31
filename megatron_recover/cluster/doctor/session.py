"""The part of one node in the examination of a job, in the first two of its three rounds.

1. Every node opens a `Session`, which checks the node itself and listens, and sends its `Opened` to
   the coordinator. Every node gets those of the nodes that it tries (`peers_of`), node 0 among
   them.
2. Every node tries its connections and looks for node 0's marks (`Session.report`), and sends its
   `Report`. Node 0 gets all of them, and judges them (`between.judged`). Then every node closes its
   session.
3. Node 0 sends what it has found to all nodes.

How the messages travel is the caller's concern (`cluster/examination.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from megatron_recover.cluster.doctor import sharing
from megatron_recover.cluster.doctor.between import Report
from megatron_recover.cluster.doctor.findings import Check, Need, fail
from megatron_recover.cluster.doctor.node import examine
from megatron_recover.cluster.doctor.probing import Peer, peers_of, probe
from megatron_recover.cluster.doctor.service import Service


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a node that the other nodes need for the second round."""

    node: int
    host: str = ""
    ports: tuple[int, ...] = ()
    """Ports on which the node listens; empty if it cannot."""
    marks: tuple[sharing.Mark, ...] = ()
    """Files that node 0 has left; empty on other nodes."""


class Session:
    """One node's part. One thread uses it."""

    def __init__(
        self, node: int, name: str, need: Need, key: bytes, *, ports: Sequence[int] = (0,),
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:  # fmt: skip
        """Check this node and begin to listen; takes as long as `node.examine`.

        `need.address` is the numeric address at which it listens, on `ports` (0: a free one).
        `now_ns`: the clock. Raises OSError if no process can be started.
        """
        assert need.address is not None
        self._key, self._need, self._now_ns = key, need, now_ns
        self._service: Service | None = None
        findings = examine(need)
        bound, taken = tuple[int, ...](), tuple[int, ...]()
        try:
            self._service = Service(need.address, key, node, ports, now_ns=now_ns)
            bound, taken = self._service.ports, self._service.taken
        except OSError as error:
            value = f"nothing can listen at {need.address} ({error.strerror})"
            findings.append(fail(Check.PORTS, value, "give another --port-range or --local-addr"))
        self._report = Report(
            node=node, name=name, findings=tuple(findings), taken=taken, has_later_ranks=need.has_later_ranks
        )  # fmt: skip
        self.opened = Opened(
            node=node, host=need.address, ports=bound, marks=tuple(sharing.leave(need.folders)) if node == 0 else ()
        )  # fmt: skip

    def report(self, opened: Mapping[int, Opened], num_nodes: int) -> Report:
        """Try the connections to other nodes, and look for node 0's marks; return the report.

        `opened` has the nodes that this one of `num_nodes` tries (`peers_of`), by their numbers.
        """
        node = self._report.node
        chosen = [(opened[each], is_crowded) for each, is_crowded in peers_of(node, num_nodes).items()]
        peers = [Peer(each.node, each.host, each.ports, is_crowded) for each, is_crowded in chosen if each.ports]
        sights = {} if node == 0 else sharing.look(opened[0].marks)
        answers = probe(node, peers, self._key, now_ns=self._now_ns)
        return msgspec.structs.replace(self._report, sights=sights, answers=answers)

    def close(self) -> None:
        """Stop listening, and remove the marks of node 0. Call it when all nodes have reported."""
        if self._service is not None:
            self._service.close()
        sharing.remove(self.opened.marks)
