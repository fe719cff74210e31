"""The store of a replica: on the socket that rank 0 inherited, for clients that may be there before."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from megatron_recover.collectives.listening import STORE
from megatron_recover.collectives.wire import listen
from megatron_recover.config import describe_descriptors
from megatron_recover.megatron.rendezvous import host_store

pytestmark = pytest.mark.timeout(60)


def test_the_store_serves_the_inherited_socket_and_who_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1:0") as launchers:
        host, port = launchers.getsockname()
        for name, value in describe_descriptors({STORE: os.dup(launchers.fileno())}).items():
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    seen: list[bytes] = []

    def follow() -> None:
        client = TCPStore(host, port, 2, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
        seen.append(client.get("said by rank 0"))

    follower = threading.Thread(target=follow)
    follower.start()
    follower.join(0.5)
    store = host_store(0, 2)
    assert store is not None
    store.set("said by rank 0", "hello")
    follower.join(30)
    assert seen == [b"hello"]


def test_rank_0_without_an_inherited_socket_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(RuntimeError, match="megatron-recover run"):
        host_store(0, 2)
