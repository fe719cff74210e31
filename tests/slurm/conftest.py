"""One real Slurm for all tests of this folder that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.machine import Machine, started, why_not

_WIDE = """\
NodeName=f[001-064] NodeAddr=127.0.1.[1-64] CPUs=64 RealMemory=1000 Gres=gpu:8 State=CLOUD
PartitionName=wide Nodes=f[001-064] MaxTime=INFINITE State=UP
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=INFINITE"""


@pytest.fixture(scope="package")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A Slurm of two real nodes, n1 and n2, and of 64 with 8 GPUs each that do not exist; skip where none can be started."""
    if reason := why_not():
        pytest.skip(reason)
    with started(tmp_path_factory.mktemp("slurm"), nodes="n[1-2]", num_nodes=2, slurmds=("n1", "n2"), extra=_WIDE) as running:
        yield running
