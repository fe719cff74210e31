"""A job of two nodes, all of whose processes listen at the address of their node, and at ports of the range."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from megatron_recover.cluster.meeting import Meeting
from tests import forks
from tests.cluster.jobs import ROOT, Spec, command
from tests.host.test_addresses import free_range
from tests.system.test_loopback import listeners, sockets_of

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("hosts", [("::1", "::1"), ("127.0.0.2", "127.0.0.3")], ids=" ".join)
def test_every_process_of_a_node_listens_at_its_address_and_at_ports_of_the_range(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    first, last = free_range(hosts[0], 12)
    (key := tmp_path / "key").write_text("a key that only this test knows of\n")
    key.chmod(0o600)
    nodes: list[forks.Program | subprocess.Popen[str]] = []
    seen: list[set[tuple[str, int]]] = [set(), set()]
    with contextlib.ExitStack() as stack:
        for node, host in enumerate(hosts):
            meeting = Meeting(
                least_nodes=2, most_nodes=2, node_rank=node, host=hosts[0], port=last, flag="--master-addr", join_s=60,
                local_addr=host, ports=(first, last - 1),
            )  # fmt: skip
            spec = Spec(
                run_dir=str(tmp_path / "run"), replicas=2, ranks=2, steps=200, microbatches=4, meeting=meeting, slots=2,
                key_file=str(key),
            )  # fmt: skip
            output = stack.enter_context(open(tmp_path / f"{node}.out", "wb"))
            nodes.append(forks.start(command(spec), cwd=ROOT, environment=os.environ, output=output.fileno()))
            stack.callback(nodes[-1].kill)
        while any(each.poll() is None for each in nodes):
            for each, found in zip(nodes, seen, strict=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(each.pid)
                    found.update(listeners(sockets_of([process, *process.children(recursive=True)])))
            time.sleep(0.02)
    texts = [(tmp_path / f"{node}.out").read_text() for node in range(2)]
    assert [each.poll() for each in nodes] == [0, 0], texts
    for host, found in zip(hosts, seen, strict=True):
        assert {place for place, _ in found} == {host} and {port for _, port in found} <= {*range(first, last + 1)}
        assert len(found) >= 3, "a leader and the data plane of two ranks"
