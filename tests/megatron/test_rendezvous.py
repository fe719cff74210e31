"""The store of a replica: on the socket that rank 0 inherited, for ranks that may be there before."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_recover.collectives.listening import STORE
from megatron_recover.collectives.wire import listen
from megatron_recover.config import describe_descriptors
from megatron_recover.megatron.rendezvous import join_store

pytestmark = pytest.mark.timeout(60)
TIMEOUT = timedelta(seconds=30)


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the launcher gives to rank 0."""
    with listen("127.0.0.1:0") as launchers:
        host, port = launchers.getsockname()
        handed_down = describe_descriptors({STORE: os.dup(launchers.fileno())})
    for name, value in (handed_down | {"MASTER_ADDR": host, "MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    yield


def test_the_store_serves_the_inherited_socket_and_who_came_before(rank_0: None) -> None:
    seen: list[bytes] = []
    follower = threading.Thread(target=lambda: seen.append(join_store(1, 2, TIMEOUT).get("said by rank 0")))
    follower.start()
    follower.join(0.5)
    store = join_store(0, 2, TIMEOUT)  # which lives as long as this does
    store.set("said by rank 0", "hello")
    follower.join(30)
    assert seen == [b"hello"]


def test_process_groups_meet_in_the_store_and_programs_that_a_rank_starts_are_not_told_of_it(rank_0: None) -> None:
    """With TORCHELASTIC_USE_AGENT_STORE no process that a rank starts could make a group of its own."""
    before = dict(os.environ)
    store = join_store(0, 1, TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=TIMEOUT)
    try:
        dist.barrier(dist.new_group([0]))
        assert store.num_keys() > 1
        assert dict(os.environ) == before and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    finally:
        dist.destroy_process_group()


def test_rank_0_without_an_inherited_socket_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(RuntimeError, match="megatron-recover run"):
        join_store(0, 2, TIMEOUT)
