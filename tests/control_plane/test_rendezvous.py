"""The store of a replica: a file in memory that its ranks inherit, which nobody else can open."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_recover.config import describe_descriptors
from megatron_recover.control_plane.rendezvous import DESCRIPTOR, create_store, join_store
from megatron_recover.trace.node_clock import NodeClock
from tests.control_plane.store_ranks import context_of

pytestmark = pytest.mark.timeout(240)
TIMEOUT = timedelta(seconds=120)
"""Another process imports torch meanwhile."""
NOBODY = 65534
"""A user that owns no process of a job."""
OTHER_RANK = """
import datetime, sys
from megatron_recover.trace.node_clock import NodeClock
from megatron_recover.control_plane.rendezvous import join_store
from tests.control_plane.store_ranks import context_of
store = join_store(context_of(1, 2, ""), b"", datetime.timedelta(seconds=120), print, NodeClock(None))
assert store.get("said by rank 0") == b"hello"
store.set("said by rank 1", "welcome")
"""


def joined(timeout: timedelta = TIMEOUT) -> dist.Store:
    """The store of this process, as rank 0 of a replica on one node."""
    return join_store(context_of(0, 2, ""), b"", timeout, lambda event: None, NodeClock(None))


@pytest.fixture
def inherited(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The descriptor that the launcher hands down to each rank of a replica."""
    descriptor = create_store()
    for name, value in describe_descriptors({DESCRIPTOR: descriptor}).items():
        monkeypatch.setenv(name, value)
    yield descriptor
    os.close(descriptor)


def test_ranks_find_what_others_have_set_whoever_comes_first(inherited: int) -> None:
    seen: list[bytes] = []
    early = threading.Thread(target=lambda: seen.append(joined().get("said by rank 1")))
    early.start()
    rank_1 = subprocess.Popen([sys.executable, "-c", OTHER_RANK], pass_fds=[inherited])
    joined().set("said by rank 0", "hello")
    early.join(150)
    assert seen == [b"welcome"] and rank_1.wait(60) == 0


def test_a_key_that_nobody_sets_is_waited_for_no_longer_than_was_said(inherited: int) -> None:
    with pytest.raises(RuntimeError, match="[Tt]imeout"):
        joined(timedelta(seconds=0.2)).get("what nobody sets")


def test_process_groups_meet_in_the_store_and_programs_that_a_rank_starts_are_not_told_of_it(inherited: int) -> None:
    """With TORCHELASTIC_USE_AGENT_STORE no process that a rank starts could make a group of its own."""
    before = dict(os.environ)
    store = joined()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=TIMEOUT)
    try:
        dist.barrier(dist.new_group([0]))
        assert store.num_keys() > 1
        assert dict(os.environ) == before and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_the_store(inherited: int) -> None:
    """A TCPStore let any user of the machine in: he set a key first, and a rank unpickled what he had sent for another's."""
    joined().set("said by rank 0", "hello")
    path = f"/proc/{os.getpid()}/fd/{inherited}"
    assert b"hello" in pathlib.Path(path).read_bytes()
    read = f"import os; os.setgid({NOBODY}); os.setuid({NOBODY}); open({path!r}, 'rb')"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, timeout=90)
    assert done.returncode != 0 and "PermissionError" in done.stderr


def test_a_process_without_an_inherited_store_is_refused() -> None:
    with pytest.raises(RuntimeError, match="megatron-recover run"):
        joined()
