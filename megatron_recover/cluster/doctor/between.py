"""The findings that follow from the reports of all nodes: pure functions, which node 0 calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from megatron_recover.cluster.doctor.findings import Check, Finding, fail, ok, warn
from megatron_recover.cluster.doctor.folders import DEEDS
from megatron_recover.cluster.doctor.probing import Answer
from megatron_recover.cluster.doctor.sharing import Sight

_WARN_S, _FAIL_S = 1.0, 60.0
"""Seconds between two clocks. The trace's hybrid clock refuses to follow a larger jump."""
_NAMED = 3
"""Nodes that a line names at most."""
_SHARED_NEEDED = (Check.SAVE, Check.LOAD)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All findings of one node."""

    node: int
    name: str
    findings: tuple[Finding, ...] = ()
    """Findings of the node about itself (`node.examine`)."""
    taken: tuple[int, ...] = ()
    """Ports of --port-range that other programs have (`Service.taken`)."""
    sights: Mapping[str, Sight] = {}
    """The node's view of node 0's marks, by flag (`sharing.look`). Empty on node 0."""
    answers: tuple[Answer, ...] = ()
    """The findings of the node about its connections (`probing.probe`)."""
    has_later_ranks: bool = False
    """`Need.has_later_ranks` of the node."""


def judged(reports: Sequence[Report]) -> list[tuple[int, Finding]]:
    """Return all findings, each with the number of its node; those between nodes come last.

    `reports` are those of all nodes, in the order of their numbers.
    """
    names = [each.name for each in reports]
    found = [(each.node, finding) for each in reports for finding in each.findings]
    for judge in (_ports, _packets, _clocks, _folders):
        found += judge(reports, names)
    return found


def lines(found: Iterable[tuple[int, Finding]], names: Sequence[str]) -> list[str]:
    """Return the findings as lines, equal ones of several nodes as one. `names` are the nodes'."""
    nodes: dict[Finding, list[int]] = defaultdict(list)
    for node, finding in found:
        nodes[finding].append(node)
    return [finding.line(_named(names[each] for each in those)) for finding, those in nodes.items()]


def _named(names: Iterable[str]) -> str:
    """Return a few names, and how many more there are."""
    listed = [*names]
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ",".join(listed[:_NAMED]) + more


Found = Iterator[tuple[int, Finding]]


def _ports(reports: Sequence[Report], names: Sequence[str]) -> Found:
    """Report each port at the node that listens there, with those that do not reach it."""
    lost: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    tried: dict[int, int] = defaultdict(int)
    for each in reports:
        for answer in each.answers:
            tried[answer.node] += 1
            for port, why in answer.unreached:
                lost[answer.node, port, why].append(each.node)
    alike: dict[tuple[int, str, tuple[int, ...]], list[int]] = defaultdict(list)
    for (node, port, why), by in lost.items():
        alike[node, why, tuple(by)].append(port)
    for (node, why, those), ports in alike.items():
        who = _named(names[each] for each in those)
        if len(those) == tried[node] > 1:
            who = f"any of {len(those)} nodes"
        which = f"port {ports[0]} is" if len(ports) == 1 else f"{len(ports)} ports, such as {ports[0]}, are"
        remedy = "open it in the firewall, or give --interface or --port-range"
        yield node, fail(Check.PORTS, f"{which} not reached from {who} ({why})", remedy)
    for each in reports:
        if each.taken:
            value = f"{len(each.taken)} ports of --port-range are in use, such as {each.taken[0]}"
            yield each.node, warn(Check.PORTS, value, "give another --port-range, or end the program: ss -tlnp")
    if not lost and len(tried) == len(reports) > 1:
        yield reports[0].node, ok(Check.PORTS, f"each node is reached from {min(tried.values())} others")


def _packets(reports: Sequence[Report], names: Sequence[str]) -> Found:
    all_sizes = set()
    for each in reports:
        for answer in each.answers:
            lost = f"packets of {answer.packet_bytes} bytes to {names[answer.node]} are lost, and {answer.passed_bytes} arrive"
            remedy = "give all interfaces and switches on the way the same MTU"
            if answer.has_echo is False:
                what = lost if answer.passed_bytes < answer.packet_bytes else f"nothing large arrives at {names[answer.node]}"
                yield each.node, fail(Check.PACKETS, f"{what}: a message of 256 KiB does not come back by TCP", remedy)
            elif answer.passed_bytes < answer.packet_bytes:
                yield each.node, warn(Check.PACKETS, f"{lost}: TCP has to find that out for each connection", remedy)
            elif answer.packet_bytes:
                all_sizes.add(answer.packet_bytes)
            elif answer.has_echo:
                all_sizes.add(0)
    if all_sizes:
        sizes = " or ".join(f"{size} bytes" if size else "unknown size (UDP is closed)" for size in sorted(all_sizes))
        yield reports[0].node, ok(Check.PACKETS, f"packets of {sizes}, and messages of 256 KiB")


def _clocks(reports: Sequence[Report], names: Sequence[str]) -> Found:
    """Compare each clock with that of node 0, where a node knows it; the error does not count."""
    largest = None
    for each in reports:
        for answer in each.answers:
            if answer.node != reports[0].node or answer.ahead_s is None:
                continue
            behind_s, surely_s = answer.ahead_s, abs(answer.ahead_s) - answer.within_s
            value = f"{abs(behind_s):.1f} s {'behind' if behind_s > 0 else 'ahead of'} {names[0]}"
            remedy = "set it: start chrony or systemd-timesyncd on all nodes"
            if surely_s > _FAIL_S:
                yield each.node, fail(Check.CLOCK, f"{value}: traces could not be put in order", remedy)
            elif surely_s > _WARN_S:
                yield each.node, warn(Check.CLOCK, value, remedy)
            else:
                largest = max(largest or 0.0, abs(behind_s))
    if largest is not None:
        yield reports[0].node, ok(Check.CLOCK, f"at most {largest:.3f} s between it and others")


def _folders(reports: Sequence[Report], names: Sequence[str]) -> Found:
    for check in DEEDS:
        sights = {each.node: each.sights[check.value] for each in reports[1:] if check.value in each.sights}
        absent = [each for each in reports if sights.get(each.node) == "absent"]
        if absent:
            for each in absent:
                yield each.node, _local(check, names[0], has_later_ranks=each.has_later_ranks)
        elif "unknown" in sights.values():
            if check in _SHARED_NEEDED:
                who = _named(names[node] for node, sight in sights.items() if sight == "unknown")
                yield reports[0].node, warn(check, f"whether {who} sees the same folder is not known", "make it writable")
        elif sights:
            yield reports[0].node, ok(check, f"shared by {len(sights) + 1} nodes")


def _local(check: Check, first: str, *, has_later_ranks: bool) -> Finding:
    """Return what it means that a node has a folder of its own under the path."""
    match check:
        case Check.SAVE | Check.LOAD:
            value = f"not the folder that {first} has under this path: checkpoints have to be on a shared file system"
            return fail(check, value, "give a folder that all nodes share")
        case Check.TENSORBOARD:
            value = f"not the folder of {first}: the writer logs where it is, and another node may become the writer"
            return warn(check, value, "give a folder that all nodes share")
        case Check.CACHE if has_later_ranks:
            value = "local: rank 0 of a replica builds on another node, and the ranks here find nothing unless it is built"
            return warn(check, value, "give a folder that all nodes share")
        case Check.CACHE:
            return ok(check, "local: this node builds its own")
    return ok(check, "local: this node's part of the trace is gathered at the end")
