"""The store that rank 0 serves where a replica spans nodes: torch's operations, deadlines, the leader's death, strangers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_recover.authentication.handshake import Party, Role
from megatron_recover.control_plane import listening, store_server, store_table
from megatron_recover.control_plane.calling import OutgoingLink
from megatron_recover.control_plane.leader_messages import Heard
from megatron_recover.control_plane.rendezvous import join_store
from megatron_recover.control_plane.served_store import ServedStore
from megatron_recover.control_plane.store_messages import StoreCount, StoreSet, StoreWait
from megatron_recover.control_plane.store_server import StoreServer
from megatron_recover.control_plane.store_table import MAX_VALUE_BYTES
from megatron_recover.control_plane.wire import LinkClosed, listen
from megatron_recover.host.addresses import address_of
from megatron_recover.trace.node_clock import NodeClock
from tests.control_plane.partners import KEY, call
from tests.control_plane.store_ranks import context_of, namespace_host, run

pytestmark = pytest.mark.timeout(240)
REPLICA, NUM_RANKS = 3, 4
SHORT = timedelta(seconds=0.2)
LONG = timedelta(seconds=60)


class Served:
    """A store in this process, and what its server has reported."""

    def __init__(self) -> None:
        self.strangers: list[tuple[str, int]] = []
        listener = listen("127.0.0.1:0")
        self.address = address_of(listener)
        self.server = StoreServer(
            listener,
            KEY,
            replica=REPLICA,
            num_ranks=NUM_RANKS,
            clock=NodeClock(None),
            report=lambda *told: self.strangers.append(told),
        )

    def store(self, rank: int = 1, timeout: timedelta = LONG) -> ServedStore:
        return ServedStore(self.address, KEY, replica=REPLICA, rank=rank, clock=NodeClock(None), timeout=timeout)

    def link(self, me: Party, wanted: Party | None = None, key: bytes = KEY) -> OutgoingLink:
        return call(self.address, me, wanted or Party(Role.STORE, REPLICA), key, patience_s=0.0)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.server.close()


def shook_hands(link: OutgoingLink) -> bool:
    """Return whether the other end welcomes this one, or lets it go."""
    with contextlib.closing(link):
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                link.flush()
                list(link.receive())
            except LinkClosed:
                return False
            if link.proven:
                return True
            time.sleep(0.002)
    raise AssertionError("neither welcomed nor let go")


def soon(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


# --- What torch asks of a store -------------------------------------------------------------------

KEYS, NUMBERS = st.sampled_from("abc"), st.sampled_from("mn")
VALUES = st.binary(max_size=5)
OPERATIONS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("compare_set"), KEYS, st.binary(max_size=1), VALUES),
    st.tuples(st.just("add"), NUMBERS, st.integers(-(2**40), 2**40)),
    st.tuples(st.just("delete_key"), KEYS | NUMBERS),
    st.tuples(st.just("check"), st.lists(KEYS | NUMBERS, max_size=3)),
    st.tuples(st.just("num_keys")),
    st.tuples(st.just("multi_set"), st.lists(KEYS, max_size=3, unique=True), st.lists(VALUES, min_size=3, max_size=3)),
    st.tuples(st.just("multi_get"), st.lists(KEYS | NUMBERS, max_size=3)),
)


@settings(max_examples=60)
@given(st.lists(OPERATIONS, max_size=25))
def test_every_operation_does_what_torchs_own_store_does_called_from_python_and_from_torchs_code(
    asked: list[tuple[str, ...]],
) -> None:
    """A `PrefixStore` is torch's C++ code, and calls the store as process groups do."""
    served = Served()
    try:
        own, stores = dist.HashStore(), [served.store(rank) for rank in range(2)]  # kept: torch's code does not
        own.set_timeout(SHORT)
        pairs = [(stores[0], own), (dist.PrefixStore("in a group", stores[1]), dist.PrefixStore("in a group", own))]
        for index, (name, *arguments) in enumerate(asked):
            ours, torchs = pairs[index % 2]
            if name == "multi_set":
                arguments[1] = arguments[1][: len(arguments[0])]
            if name == "multi_get" and not torchs.check(arguments[0]):
                continue
            assert getattr(ours, name)(*arguments) == getattr(torchs, name)(*arguments), (name, arguments)
        for ours, torchs in pairs:
            present = [key for key in "abcmn" if torchs.check([key])]
            assert [ours.get(key) for key in present] == [torchs.get(key) for key in present]
            assert ours.num_keys() == torchs.num_keys()
    finally:
        served.server.close()


def test_text_and_bytes_arrive_as_they_are(served: Served) -> None:
    store = served.store()
    store.set("text", "gr\u00fcn")
    store.set("bytes", bytes(range(256)))
    inside = dist.PrefixStore("p", dist.PrefixStore("q", store))
    inside.set("bytes", bytes(range(256)))
    assert (store.get("text"), store.get("bytes"), store.get("q/p/bytes")) == ("gr\u00fcn".encode(), *[bytes(range(256))] * 2)
    assert inside.clone().get("bytes") == bytes(range(256)) and inside.has_extended_api()


def test_more_than_a_message_holds_is_sent_in_parts(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_table, "MAX_ANSWER_BYTES", MAX_VALUE_BYTES + 10)
    values = [bytes([index]) * (MAX_VALUE_BYTES // 2 - 3) for index in range(5)] + [b"", bytes(MAX_VALUE_BYTES)]
    keys = [f"key {index}" for index in range(len(values))]
    store = served.store()
    inside = dist.PrefixStore("p", store)
    for each in (store, inside):
        each.multi_set(keys, values)
        assert each.multi_get(keys) == values


def test_what_a_message_cannot_hold_is_refused_and_the_store_serves_on(served: Served) -> None:
    store = served.store()
    with pytest.raises(dist.DistStoreError, match=r"refused a StoreSet of 'x'.*at most"):
        store.set("x", bytes(MAX_VALUE_BYTES + 1))
    with pytest.raises(dist.DistStoreError, match="a StoreSet of 'x' has .* bytes; the store takes at most"):
        store.set("x", bytes(30 * 2**20))
    store.set("x", "1")
    with pytest.raises(dist.DistStoreError, match="refused a StoreAdd of 'word'.*no number"):
        store.set("word", "two")
        store.add("word", 1)
    assert store.add("x", 1) == 2


def test_torch_makes_its_barrier_of_these_operations_and_refuses_queues(served: Served) -> None:
    done: list[int] = []
    threads = [
        threading.Thread(target=lambda rank=rank: (served.store(rank).barrier("b", 3, LONG), done.append(rank)))
        for rank in range(3)
    ]
    for thread in threads[:2]:
        thread.start()
    time.sleep(0.05)
    assert not done
    threads[2].start()
    for thread in threads:
        thread.join(30)
    assert sorted(done) == [0, 1, 2]
    with pytest.raises(NotImplementedError):
        served.store().queue_push("q", "v")


# --- Deadlines ------------------------------------------------------------------------------------


WAITS: dict[str, Callable[[dist.Store, dist.Store], object]] = {
    "get": lambda store, inside: store.get("k"),
    "wait": lambda store, inside: store.wait(["k", "l"]),
    "multi_get": lambda store, inside: store.multi_get(["k"]),
    "get of torch": lambda store, inside: inside.get("k"),
    "wait of torch": lambda store, inside: inside.wait(["k"]),
    "multi_get of torch": lambda store, inside: inside.multi_get(["k"]),
}
"""Calls that wait for a key, of the store itself and of torch's C++ code around it."""


@pytest.mark.parametrize("name", [*WAITS, "wait of torch with a time"])
def test_no_call_waits_longer_than_was_said_and_the_next_does_not_get_its_answer(served: Served, name: str) -> None:
    store = served.store(timeout=SHORT)
    inside = dist.PrefixStore("p", store)
    if name == "wait of torch with a time":
        store.set_timeout(LONG)
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=rf"timeout after 0.2 s.*replica {REPLICA}.*of '(p/)?k'"):
        WAITS[name](store, inside) if name in WAITS else inside.wait(["k"], SHORT)
    assert 0.2 <= time.monotonic() - began < 20
    soon(lambda: not served.server._table._waiting)  # the server has forgotten it
    served.store(2).multi_set(["k", "l", "p/k"], ["late"] * 3)
    assert store.add("n", 5) == 5 and store.get("k") == b"late"


def test_the_timeout_that_torch_sets_is_the_one_that_counts(served: Served) -> None:
    store = served.store()
    dist.PrefixStore("p", store).set_timeout(SHORT)
    with pytest.raises(RuntimeError, match="timeout after 0.2 s"):
        store.get("k")


def test_a_leader_that_is_stopped_or_cut_off_is_waited_for_no_longer_than_was_said() -> None:
    """Nobody accepts the connection, or answers on it: no end of a connection tells of that."""
    with listen("127.0.0.1:0") as silent:
        store = ServedStore(address_of(silent), KEY, replica=REPLICA, rank=1, clock=NodeClock(None), timeout=SHORT)
        for request in (lambda: store.set("k", "v"), lambda: store.add("n", 1), lambda: store.get("k"), store.num_keys):
            with pytest.raises(dist.DistStoreError, match="timeout after 0.2 s"):
                request()


# --- Threads --------------------------------------------------------------------------------------


def test_a_thread_that_waits_delays_no_other_and_connections_are_used_again(served: Served) -> None:
    """A call of torch's C++ holds the interpreter's lock until it waits: one connection for all would block here."""
    store = served.store()
    seen: list[bytes] = []
    waiting = [
        threading.Thread(target=lambda index=index: seen.append(dist.PrefixStore("p", store).get(f"k{index}")))
        for index in range(8)
    ]
    for thread in waiting:
        thread.start()
    soon(lambda: len(served.server._table._waiting) == 8)
    for _ in range(200):
        store.add("n", 1)
    assert len(served.server._links) == 9 and not seen
    store.multi_set([f"p/k{index}" for index in range(8)], ["v"] * 8)
    for thread in waiting:
        thread.join(30)
    assert seen == [b"v"] * 8
    for _ in range(50):
        store.num_keys()
    assert len(served.server._links) == 9


def test_a_rank_has_no_more_connections_than_threads_use(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "MAX_LINKS", 2)
    store = served.store()
    threads = [threading.Thread(target=lambda: store.wait(["end"])) for _ in range(2)]
    for thread in threads:
        thread.start()
    soon(lambda: len(served.server._links) == 2)
    with pytest.raises(dist.DistNetworkError):
        store.num_keys()
    served.store(2).set("end", "")
    for thread in threads:
        thread.join(30)
    assert store.num_keys() == 1


# --- The death of the leader ------------------------------------------------------------------------


def test_a_leader_that_dies_ends_every_wait_at_once_with_a_message_that_names_it() -> None:
    served = Served()
    store = served.store()
    ends: list[str] = []

    def waits(wait: Callable[[], object]) -> None:
        with pytest.raises(dist.DistNetworkError) as error:
            wait()
        ends.append(str(error.value))

    inside = dist.PrefixStore("p", store)
    threads = [threading.Thread(target=waits, args=(lambda wait=wait: wait(store, inside),)) for wait in WAITS.values()]
    for thread in threads:
        thread.start()
    soon(lambda: len(served.server._table._waiting) == len(WAITS))
    store.num_keys()  # leaves a connection that nobody uses
    began = time.monotonic()
    served.server.close()
    for thread in threads:
        thread.join(30)
    assert len(ends) == len(WAITS) and all(f"rank 0 of replica {REPLICA} is gone" in end for end in ends)
    for request in (lambda: store.set("k", "v"), lambda: store.get("k"), lambda: served.store(2).check(["k"])):
        waits(request)  # over a connection of before, and over a new one
    assert time.monotonic() - began < 20


def test_a_leader_that_dies_before_it_has_proven_itself_is_not_dialled_for_ever() -> None:
    with listen("127.0.0.1:0") as listener:
        address = address_of(listener)
    store = ServedStore(address, KEY, replica=REPLICA, rank=1, clock=NodeClock(None), timeout=LONG)
    began = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match=rf"rank 0 of replica {REPLICA} is gone.*{address}.*refused"):
        store.get("k")
    assert time.monotonic() - began < 20


def test_a_connection_that_is_closed_unproven_is_made_anew(served: Served) -> None:
    """Strangers may crowd a rank out of the listener (`authentication/admission.py`)."""
    listener = listen("127.0.0.1:0")
    store = ServedStore(address_of(listener), KEY, replica=REPLICA, rank=1, clock=NodeClock(None), timeout=LONG)
    result: list[int] = []
    thread = threading.Thread(target=lambda: result.append(store.add("n", 7)))
    thread.start()
    listener.setblocking(True)
    for _ in range(3):
        listener.accept()[0].close()
    server = StoreServer(listener, KEY, replica=REPLICA, num_ranks=NUM_RANKS, clock=NodeClock(None), report=lambda *_: None)
    thread.join(30)
    server.close()
    assert result == [7]


def test_a_killed_leader_is_missed_though_a_process_that_it_forked_lives_on() -> None:
    listener = listen("127.0.0.1:0")
    reading, writing = os.pipe()
    if (leader := os.fork()) == 0:
        os.close(writing)
        StoreServer(listener, KEY, replica=REPLICA, num_ranks=NUM_RANKS, clock=NodeClock(None), report=lambda *_: None)
        os.read(reading, 1)  # a rank has connected
        if os.fork() == 0:  # a process of a data set
            os.read(reading, 1)  # until the test is over
            os._exit(0)
        time.sleep(60)
        os._exit(0)
    store = ServedStore(address_of(listener), KEY, replica=REPLICA, rank=1, clock=NodeClock(None), timeout=LONG)
    listener.close()
    try:
        store.set("k", "v")
        os.write(writing, b"1")
        children = Path(f"/proc/{leader}/task/{leader}/children")
        soon(children.read_text)
        time.sleep(0.05)  # the child closes its copies
        threading.Timer(0.05, lambda: os.kill(leader, signal.SIGKILL)).start()
        began = time.monotonic()
        for request in (lambda: store.get("nobody sets this"), store.num_keys):
            with pytest.raises(dist.DistNetworkError, match="is gone"):
                request()
        assert time.monotonic() - began < 20
    finally:
        os.close(writing)
        os.close(reading)
        os.kill(leader, signal.SIGKILL)
        os.waitpid(leader, 0)


def test_a_forked_child_does_not_use_its_parents_connections(served: Served) -> None:
    store = served.store()
    store.set("k", "v")
    assert (pid := os.fork()) >= 0
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            status = 0 if not store._links and store.get("k") == b"v" else 1
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.get("k") == b"v"


# --- Strangers ------------------------------------------------------------------------------------


def test_only_ranks_of_the_replica_that_hold_the_key_are_let_in(served: Served) -> None:
    mine = Party(Role.STORE, REPLICA)
    assert shook_hands(served.link(Party(Role.RANK, REPLICA, 0)))
    assert shook_hands(served.link(Party(Role.RANK, REPLICA, NUM_RANKS - 1)))
    assert not shook_hands(served.link(Party(Role.RANK, REPLICA, 1), key=bytes(32)))
    assert not shook_hands(served.link(Party(Role.RANK, REPLICA, NUM_RANKS)))
    assert not shook_hands(served.link(Party(Role.RANK, REPLICA + 1, 1)))
    assert not shook_hands(served.link(Party(Role.RANK, REPLICA, 1), Party(Role.STORE, REPLICA + 1)))
    assert not shook_hands(served.link(Party(Role.RANK, REPLICA, 1), Party(Role.LEADER, REPLICA)))
    for role in (Role.LEADER, Role.COORDINATOR, Role.DATA, Role.STORE, Role.ECHO):
        assert not shook_hands(served.link(Party(role, REPLICA, 1), mine))
    assert served.store().num_keys() == 0


@pytest.mark.parametrize("messages", [(Heard(),), (StoreSet(("k",), ()),), (StoreWait(("k",)), StoreCount())])
def test_a_rank_that_does_not_keep_to_the_protocol_is_disconnected_and_nobody_else(served: Served, messages: tuple) -> None:
    other = served.store(2)
    other.set("x", "1")
    link = served.link(Party(Role.RANK, REPLICA, 1))
    with contextlib.closing(link), pytest.raises(LinkClosed):
        for message in messages:
            link.send(message)
        while True:
            link.flush()
            list(link.receive())
            time.sleep(0.002)
    assert other.get("x") == b"1" and not served.server._table._waiting


def test_strangers_are_closed_counted_and_delay_nobody(served: Served) -> None:
    host, port = served.address.split(":")
    with contextlib.ExitStack() as strangers:
        for text in [b"GET / HTTP/1.0\r\n\r\n", b"", b"mgrecov2"] * 40:
            strangers.enter_context(socket.create_connection((host, int(port)))).sendall(text)
        began = time.monotonic()
        store = served.store()
        assert store.add("n", 1) == 1 and time.monotonic() - began < 10
        soon(lambda: served.strangers)
    assert served.strangers[0][0] == "store" and served.strangers[0][1] >= 16


# --- Process groups ---------------------------------------------------------------------------------


def make_groups(store: dist.Store, rank: int) -> list[float]:
    """Make a world of four, its pairs and a group of one; return what sums in them give."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60))
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    alone = [dist.new_group([each]) for each in range(4)]
    sums = []
    for group in (dist.group.WORLD, pairs[rank // 2], alone[rank]):
        tensor = torch.tensor([2.0**rank])
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.item())
    objects: list[object] = [None] * 4
    dist.all_gather_object(objects, f"rank {rank}")
    assert objects == [f"rank {each}" for each in range(4)]
    dist.destroy_process_group()
    return sums


SUMS = [str([15.0, 3.0 if rank < 2 else 12.0, 2.0**rank]) for rank in range(4)]


@pytest.mark.parametrize("is_served", [True, False], ids=["served", "inherited"])
def test_four_processes_make_their_process_groups_over_either_store(is_served: bool) -> None:
    assert run(4, make_groups, is_served=is_served) == SUMS


def make_groups_over(interface: str, store: dist.Store, rank: int) -> list[float]:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    return make_groups(store, rank)


class OverInterface:
    """`make_groups`, with gloo over an interface; a class, so that another process can unpickle it."""

    def __init__(self, interface: str) -> None:
        self.interface = interface

    def __call__(self, store: dist.Store, rank: int) -> list[float]:
        return make_groups_over(self.interface, store, rank)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Four network namespaces joined by a bridge in a fifth, each with an interface `net0`: paths of their files."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root can make network namespaces, by the program `ip`")
    mark = f"mr{os.getpid()}"
    names = [f"{mark}-{rank}" for rank in range(4)]
    switch = f"{mark}-switch"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        try:
            ip("netns", "add", switch)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for rank, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "add", "net0", "type", "veth", "peer", "name", f"port{rank}", "netns", switch)
            ip("-n", switch, "link", "set", f"port{rank}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{namespace_host(rank)}/24", "dev", "net0")
            ip("-n", name, "link", "set", "net0", "up")
            ip("-n", name, "link", "set", "lo", "up")  # by which rank 0 reaches its own address
        yield [f"/run/netns/{name}" for name in names]
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_ranks_in_four_network_namespaces_make_their_process_groups(namespaces: list[str]) -> None:
    assert run(4, OverInterface("net0"), enter=namespaces) == SUMS


# --- Joining ----------------------------------------------------------------------------------------


def test_rank_0_serves_at_the_socket_that_it_inherits_and_needs_one(hand_down: Callable[..., None]) -> None:
    listener = listen("127.0.0.1:0")
    address = address_of(listener)
    hand_down(**{listening.STORE: listener.detach()})
    events: list[object] = []
    store = join_store(context_of(0, 2, address, REPLICA), KEY, LONG, events.append, NodeClock(None))
    other = join_store(context_of(1, 2, address, REPLICA), KEY, LONG, events.append, NodeClock(None))
    store.set("k", "v")
    assert isinstance(store, ServedStore) and other.get("k") == b"v"
    hand_down(other=0)
    with pytest.raises(
        RuntimeError, match=f"no socket to serve the store of replica {REPLICA} at {address}.*megatron-recover run"
    ):
        join_store(context_of(0, 2, address, REPLICA), KEY, LONG, events.append, NodeClock(None))
