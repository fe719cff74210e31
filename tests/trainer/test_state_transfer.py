"""A newcomer reads exactly the state of one window, from whoever still serves it, or is told that it has not."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from megatron_recover.data_plane.ranges import tcp_exporter
from megatron_recover.data_plane.ranges.contract import CHUNK_BYTES, Description, Range, SourceLost, Void
from megatron_recover.data_plane.ranges.frames import Frames
from megatron_recover.trainer import state_server
from megatron_recover.trainer.state_bytes import StateBytes
from megatron_recover.trainer.state_reader import StateReader, StateVoid
from megatron_recover.trainer.state_server import StateServer
from megatron_recover.trainer.state_window import OutsideReads, StateWindow
from tests.control_plane.partners import KEY
from tests.data_plane.range_memory import DEADLINES, eventually, rogue
from tests.trainer.states import Tensors, of_every_kind, of_size

pytestmark = pytest.mark.timeout(150)
SIZE = 6 * CHUNK_BYTES + 64
SHORT = replace(DEADLINES, connect_s=1.0, sum_s=1.0)


class Digests:
    """What servers have digested."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def __call__(self, label: str, digest: int) -> None:
        self.found.append((label, digest))


@contextlib.contextmanager
def serving(
    num: int = 1, digested: Callable[[str, int], None] = lambda label, digest: None, **more: Any
) -> Iterator[list[StateServer]]:
    servers = [
        StateServer(key=KEY, replica=replica, rank=0, deadlines=DEADLINES, digested=digested, **more) for replica in range(num)
    ]
    try:
        yield servers
    finally:
        for server in servers:
            server.end()


@contextlib.contextmanager
def reading(**more: Any) -> Iterator[StateReader]:
    reader = StateReader(**{"key": KEY, "replica": 9, "rank": 0, "deadlines": DEADLINES} | more)
    try:
        yield reader
    finally:
        reader.end()


def addresses(servers: Sequence[StateServer]) -> list[str]:
    return [server.address for server in servers]


def started(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a call in a thread, and keep its result or StateVoid."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except StateVoid as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


# --- what arrives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_sources", [1, 3])
def test_tensors_and_scalars_of_every_kind_arrive_with_an_equal_digest(num_sources: int) -> None:
    digests, mine = Digests(), of_every_kind(2)
    padding = mine.padding()
    with serving(num_sources, digests) as servers, reading() as reader:
        for server in servers:
            server.open("train 1", of_every_kind(1))
        offer = reader.next_window(servers[0].address, None)
        assert (offer.label, offer.layout) == ("train 1", mine.layout_digest())
        got = reader.read("train 1", addresses(servers), mine)
        assert got.num_bytes == offer.num_bytes == sum(got.bytes_by_source.values()) and got.seconds > 0 and not got.lost
        assert mine.bits() == of_every_kind(1).bits() and mine.padding() == padding
        assert list(got.scalars.items()) == list(of_every_kind(1).numbers.items())
        mine.numbers = dict(got.scalars)
        eventually(lambda: digests.found)
        assert set(digests.found) == {("train 1", mine.digest())}


def test_every_source_sends_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_out, begun, all_begun = StateBytes.copy_out, set[StateBytes](), threading.Barrier(3)

    def copy(self: StateBytes, start: int, stop: int, buffer: torch.Tensor) -> None:
        if self not in begun:
            begun.add(self)
            all_begun.wait(60)
        copy_out(self, start, stop, buffer)

    monkeypatch.setattr(StateBytes, "copy_out", copy)
    with serving(3) as servers, reading() as reader:
        for server in servers:
            server.open("train 1", of_size(12 * CHUNK_BYTES, 1.0))
        got = reader.read("train 1", addresses(servers), of_size(12 * CHUNK_BYTES, 0.0))
        assert sum(got.bytes_by_source.values()) == 12 * CHUNK_BYTES
        # Not all three where the machine is slow: the first range of one may then be asked of another.
        assert sum(got.bytes_by_source[each] >= CHUNK_BYTES for each in addresses(servers)) >= 2


def test_two_readers_read_at_once_and_again_in_the_next_window() -> None:
    digests = Digests()
    with serving(2, digests) as servers, reading() as one, reading(replica=8) as other:
        for number in (1, 2, 3):
            for server in servers:
                server.open(f"train {number}", of_size(SIZE, float(number)))
            mine, theirs = of_size(SIZE, 0.0), of_size(SIZE, 0.0)
            thread, outcome = started(lambda: other.read(f"train {number}", addresses(servers), theirs))  # noqa: B023
            one.read(f"train {number}", addresses(servers), mine)
            thread.join(60)
            assert outcome[0].scalars == {"value": number}
            eventually(lambda: f"train {number}" in dict(digests.found))  # noqa: B023
            assert all(each.eq(number).all() for state in (mine, theirs) for each in state.named.values())
        assert len(set(digests.found)) == 3 and len(digests.found) <= 6, "at most once for each label and server"


def test_a_state_without_bytes_is_read() -> None:
    with serving() as servers, reading() as reader:
        servers[0].open("train 1", Tensors({"empty": torch.empty(0)}, {"step": 3}))
        assert reader.read("train 1", addresses(servers), Tensors({"empty": torch.empty(0)}, {"step": 0})).scalars == {
            "step": 3
        }


def test_the_digest_is_the_same_in_whatever_groups_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_server, "_GROUP_BYTES", 50)
    digests = Digests()
    with serving(1, digests) as servers, reading() as reader:
        servers[0].open("train 1", of_every_kind(1))
        reader.read("train 1", addresses(servers), of_every_kind(2))
        eventually(lambda: digests.found)
        assert digests.found == [("train 1", of_every_kind(1).digest())]


def test_nothing_walks_over_the_state_before_somebody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread opens a window in each step. All that is sent and digested comes of one walk per window."""
    walks: list[str] = []
    values = Tensors.values

    def counted(self: Tensors) -> Any:
        walks.append(threading.current_thread().name)
        return values(self)

    digests, state = Digests(), of_size(64, 1.0)
    with serving(1, digests) as servers, reading() as reader:
        monkeypatch.setattr(Tensors, "values", counted)
        servers[0].open("train 1", state)
        assert not walks
        monkeypatch.undo()
        assert reader.read("train 1", addresses(servers), of_size(64, 0.0)).scalars == {"value": 1.0}
        eventually(lambda: digests.found)
        assert digests.found == [("train 1", state.digest())]


# --- the window -----------------------------------------------------------------------------------


def cross(server: StateServer, monkeypatch: pytest.MonkeyPatch, state: Tensors, at: int) -> None:
    """Have the window close, and a step change the state, in the middle of copy number `at`."""
    copy_out, num = StateBytes.copy_out, [0]

    def copy(self: StateBytes, start: int, stop: int, buffer: torch.Tensor) -> None:
        num[0] += 1
        if num[0] != at:
            return copy_out(self, start, stop, buffer)
        middle = (start + stop) // 2
        copy_out(self, start, middle, buffer)
        server.close()
        for tensor in state.named.values():
            tensor.add_(1)
        return copy_out(self, middle, stop, buffer[middle - start :])

    monkeypatch.setattr(StateBytes, "copy_out", copy)


@pytest.mark.parametrize("at", [1, 3])
def test_a_copy_that_overlaps_the_close_is_void_and_told(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    with serving() as servers, reading() as reader:
        state = of_size(SIZE, 1.0)
        servers[0].open("train 1", state)
        cross(servers[0], monkeypatch, state, at)
        with pytest.raises(StateVoid, match="the window of train 1 has closed") as void:
            reader.read("train 1", addresses(servers), of_size(SIZE, 0.0))
        assert void.value.num_bytes <= (at - 1) * CHUNK_BYTES and void.value.of_bytes == SIZE and void.value.seconds > 0


def test_without_the_look_at_the_window_after_a_copy_a_torn_state_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug, to show that the test above would see it: and the digest sees it as well."""
    monkeypatch.setattr(OutsideReads, "is_open", property(lambda self: True))
    mine, digests = of_size(SIZE, 0.0), Digests()
    with serving(1, digests) as servers, reading() as reader:
        state = of_size(SIZE, 1.0)
        servers[0].open("train 1", state)
        offered = reader.next_window(servers[0].address, None)
        assert offered.label == "train 1"
        expected = state.digest()
        cross(servers[0], monkeypatch, state, 3)
        monkeypatch.setattr(state_server._Opened, "close", lambda self: None)
        monkeypatch.setattr(tcp_exporter.TcpExporter, "withdraw", lambda self: None)
        mine.numbers = dict(reader.read("train 1", addresses(servers), mine).scalars)
        assert len({value for tensor in mine.named.values() for value in tensor.unique().tolist()}) == 2
        assert mine.digest() != expected


def test_a_read_across_the_end_of_a_window_is_void_also_from_a_source_where_it_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy_out = StateBytes.copy_out

    def slowly(self: StateBytes, start: int, stop: int, buffer: torch.Tensor) -> None:
        time.sleep(0.1)
        copy_out(self, start, stop, buffer)

    monkeypatch.setattr(StateBytes, "copy_out", slowly)
    with serving(2) as servers, reading() as reader:
        for server in servers:
            server.open("train 1", of_size(SIZE, 1.0))
        reader.read("train 1", addresses(servers), of_size(SIZE, 0.0))
        servers[1].close()
        with pytest.raises(StateVoid, match=f"{servers[1].address}: the window of train 1 has closed"):
            reader.read("train 1", addresses(servers), of_size(SIZE, 0.0))
        servers[1].open("train 2", of_size(SIZE, 2.0))
        with pytest.raises(StateVoid, match="the window of train 1 has closed"):
            reader.read("train 1", addresses(servers), of_size(SIZE, 0.0))


class Trainer:
    """Steps that each change the whole state, element after element, with a window in between."""

    def __init__(self, servers: Sequence[StateServer], size: int) -> None:
        self.servers, self.states = servers, [of_size(size, 0.0) for _ in servers]
        self.is_over, self.num_steps = threading.Event(), 0
        self._thread = threading.Thread(target=self._train, daemon=True)

    def __enter__(self) -> Trainer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _train(self) -> None:
        while not self.is_over.is_set():
            for server, state in zip(self.servers, self.states, strict=True):
                server.open(f"train {self.num_steps}", state)
            rounds, in_round = divmod(self.num_steps, 7)
            time.sleep(0.001 * in_round**2 * 2 ** min(rounds, 4))  # longer ones later, in which a slow machine can read
            for server, state in zip(self.servers, self.states, strict=True):
                server.close()
                for tensor in state.named.values():
                    for part in tensor.split(1 << 16):
                        part.add_(1)
                state.numbers["value"] = self.num_steps + 1.0
            self.num_steps += 1


def try_to_read(reader: StateReader, servers: Sequence[StateServer], size: int, seconds: float) -> tuple[int, int, int]:
    """Number of reads, of reads that were accepted, and of accepted ones with another state than that of their label."""
    until, counts, after = time.monotonic() + seconds, [0, 0, 0], None
    while time.monotonic() < until and counts[1] < 12:
        after = reader.next_window(servers[0].address, after).label
        mine = of_size(size, -1.0)
        counts[0] += 1
        with contextlib.suppress(StateVoid):
            got = reader.read(after, addresses(servers), mine)
            counts[1] += 1
            values = {value for tensor in mine.named.values() for value in tensor.unique().tolist()}
            counts[2] += values != {float(after.split()[1])} or values != {got.scalars["value"]}
    return counts[0], counts[1], counts[2]


def test_no_torn_state_is_ever_accepted_while_steps_change_it() -> None:
    with serving(2) as servers, reading() as reader, Trainer(servers, SIZE):
        num, num_accepted, num_wrong = try_to_read(reader, servers, SIZE, 30.0)
    assert num_accepted and not num_wrong, f"{num} reads, {num_accepted} accepted, {num_wrong} wrong"


def test_such_reads_are_torn_where_nobody_looks_at_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: chunks are copied whatever happens to the window, and no request is told that it has closed."""
    monkeypatch.setattr(OutsideReads, "is_open", property(lambda self: True))
    monkeypatch.setattr(state_server._Opened, "close", lambda self: None)
    with serving(2) as servers, reading() as reader, Trainer(servers, SIZE):
        num, num_accepted, num_wrong = try_to_read(reader, servers, SIZE, 30.0)
    assert num_wrong, f"{num} reads, {num_accepted} accepted, {num_wrong} wrong"


def test_chunks_of_two_steps_are_mixed_where_a_range_is_served_from_whatever_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: no fence by label. The digest that a newcomer compares is another one."""
    original = tcp_exporter._Reader._get

    def get(self: Any, request: Any) -> None:
        memory = self._exporter._memory
        self._begun = memory, self._begun[1]  # the newest one, with the description of the one that was begun
        original(self, request)

    monkeypatch.setattr(tcp_exporter._Reader, "_get", get)
    mine = of_size(SIZE, 0.0)
    with serving() as servers, reading() as reader:
        servers[0].open("train 1", of_size(SIZE, 1.0))
        expected = of_size(SIZE, 1.0).digest()
        copy = state_server._Opened.copy

        def copied(self: Any, wanted: Range, buffer: torch.Tensor) -> bool:
            if wanted.start >= 3 * CHUNK_BYTES and self.label == "train 1":
                servers[0].open("train 2", of_size(SIZE, 2.0))
                self = servers[0]._opened
                self._find()
            return copy(self, wanted, buffer)

        monkeypatch.setattr(state_server._Opened, "copy", copied)
        mine.numbers = dict(reader.read("train 1", addresses(servers), mine).scalars)
        assert {value for tensor in mine.named.values() for value in tensor.unique().tolist()} == {1.0, 2.0}
        assert mine.digest() != expected


def test_one_window_ends_copies_and_reads() -> None:
    window = StateWindow()
    with serving(window=window) as servers, reading() as reader:
        servers[0].open("train 1", of_size(SIZE, 1.0))
        reads = servers[0]._opened.reads if servers[0]._opened else None
        assert reads is not None and reads.is_open
        window.close()
        assert not reads.is_open
        with pytest.raises(StateVoid, match="has closed|not read"):
            reader.read("train 1", addresses(servers), of_size(SIZE, 0.0))
        with pytest.raises(RuntimeError, match="while a step changes it"):
            servers[0].open("train 2", of_size(SIZE, 1.0))
        window.open()
        servers[0].open("train 2", of_size(SIZE, 2.0))
        assert reader.read("train 2", addresses(servers), of_size(SIZE, 0.0)).scalars == {"value": 2.0}
        assert len([each for each in window._reading if isinstance(each, OutsideReads)]) == 1


def test_opening_again_what_is_open_changes_nothing_and_what_was_closed_stays_closed() -> None:
    with serving() as servers, reading() as reader:
        state = of_size(SIZE, 1.0)
        servers[0].open("train 1", state)
        opened = servers[0]._opened
        servers[0].open("train 1", state)
        assert servers[0]._opened is opened
        servers[0].close()
        servers[0].open("train 1", state)
        with pytest.raises(StateVoid, match="has closed"):
            reader.read("train 1", addresses(servers), of_size(SIZE, 0.0))


def test_who_trains_waits_for_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening and closing take no longer while a copy, the search for tensors and a digest are stuck."""
    stuck, go_on = threading.Event(), threading.Event()
    copy_out = StateBytes.copy_out

    def copy(self: StateBytes, start: int, stop: int, buffer: torch.Tensor) -> None:
        stuck.set()
        go_on.wait(30)
        copy_out(self, start, stop, buffer)

    monkeypatch.setattr(StateBytes, "copy_out", copy)
    monkeypatch.setattr(state_server, "checksums", lambda tensors: [go_on.wait(30)] * len(tensors))
    digests = Digests()
    with serving(1, digests) as servers, reading() as reader:
        servers[0].open("train 1", of_size(SIZE, 1.0))
        thread, outcome = started(lambda: reader.read("train 1", addresses(servers), of_size(SIZE, 0.0)))
        assert stuck.wait(30)
        since = time.monotonic()
        servers[0].close()
        servers[0].open("train 2", of_size(SIZE, 2.0))
        assert time.monotonic() - since < 5
        go_on.set()
        thread.join(60)
        assert isinstance(outcome[0], StateVoid)
        assert digests.found == [], "a digest that was complete after the close is worth nothing"


# --- sources that fail ----------------------------------------------------------------------------


def misbehave(monkeypatch: pytest.MonkeyPatch, server: StateServer, behave: Callable[[Frames], None], after: int = 1) -> None:
    """Have one server do something else in place of its piece number `after`, and of later ones."""
    original, num = tcp_exporter._Reader._get, [0]

    def get(self: Any, request: Any) -> None:
        if self._exporter.address == server.address:
            num[0] += 1
            if num[0] > after:
                return behave(self._frames)
        return original(self, request)

    monkeypatch.setattr(tcp_exporter._Reader, "_get", get)


def end(frames: Frames) -> None:
    frames.sock.close()


def damaged(frames: Frames) -> None:
    frames.sock.sendall(b"garbage" * 100)


@pytest.mark.parametrize("behave", [end, None, damaged], ids=["end", "stall", "garbage"])
def test_what_a_failing_source_does_not_send_is_read_from_another(
    monkeypatch: pytest.MonkeyPatch, behave: Callable[[Frames], None] | None
) -> None:
    go_on = threading.Event()

    def stall(frames: Frames) -> None:
        go_on.wait(60)
        frames.sock.close()

    with serving(3) as servers, reading() as reader:
        for server in servers:
            server.open("train 1", of_size(4 * SIZE, 1.0))
        misbehave(monkeypatch, servers[1], behave or stall)
        mine, since = of_size(4 * SIZE, 0.0), time.monotonic()
        got = reader.read("train 1", addresses(servers), mine)
        assert all(each.eq(1).all() for each in mine.named.values())
        assert time.monotonic() - since < DEADLINES.sum_s, "nobody waits for one that stalls"
        assert set(got.lost) <= {servers[1].address}
        assert got.bytes_by_source[servers[1].address] <= CHUNK_BYTES
        go_on.set()
        monkeypatch.undo()
        assert not reader.read("train 1", addresses(servers), mine).lost, "it is asked again the next time"


def test_all_sources_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(1) as servers, reading() as reader:
        servers[0].open("train 1", of_size(SIZE, 1.0))
        misbehave(monkeypatch, servers[0], end)
        with pytest.raises(StateVoid, match=f"{servers[0].address}: "):
            reader.read("train 1", addresses(servers), of_size(SIZE, 0.0))
        with pytest.raises(StateVoid, match="nobody listens"):
            reader.read("train 1", ["127.0.0.1:1"], of_size(SIZE, 0.0))
        with pytest.raises(StateVoid, match="nobody listens"):
            reader.next_window("127.0.0.1:1", None)


def test_all_sources_are_too_slow_or_never_open_that_window() -> None:
    def silent(frames: Frames) -> None:
        frames.receive()
        time.sleep(20)

    void = pytest.raises(StateVoid, match="no byte for too long")
    with rogue(silent) as address, reading(deadlines=SHORT) as reader, void:
        reader.read("train 1", [address], of_size(SIZE, 0.0))
    with serving() as servers, reading(deadlines=SHORT) as reader:
        servers[0].open("train 0", of_size(SIZE, 0.0))
        with pytest.raises(StateVoid, match=r"no source has sent any of it for 2 s \(connect_s and sum_s\)"):
            reader.read("train 1", addresses(servers), of_size(SIZE, 0.0))


def test_a_source_with_another_layout_is_left_out_with_the_first_difference() -> None:
    with serving(2) as servers, reading() as reader:
        servers[0].open("train 1", of_size(SIZE, 1.0))
        servers[1].open("train 1", Tensors({"0": torch.ones(3)}, {"value": 1.0}))
        mine, quarter = of_size(SIZE, 0.0), SIZE // 16
        said = f"it has 0 torch.float32 (3,) 3 where this rank has 0 torch.float32 ({quarter},) {quarter}"
        with pytest.raises(StateVoid, match=re.escape(f"{servers[1].address}: its layout differs: {said}")):
            reader.read("train 1", addresses(servers)[1:], mine)
        got = reader.read("train 1", addresses(servers), mine)
        assert all(each.eq(1).all() for each in mine.named.values())
        assert not got.bytes_by_source[servers[1].address]
        for other in (Tensors({"0": torch.ones(3)}), Tensors({"0": torch.ones(3).double()}, {"value": 1.0})):
            with pytest.raises(StateVoid, match="its layout differs"):
                reader.read("train 1", [servers[1].address], other)


class Scripted:
    """A source in this process that sends what it wants."""

    def __init__(self, address: str, *, value: float = 1.0, about: bytes = b"\x80", damages: int = 0) -> None:
        self.address, self._value, self._about, self._damages = address, value, about, damages
        self.may_read, self.has_damaged = threading.Event(), threading.Event()
        self.may_read.set()

    def next_memory(self, after: str | None, still: Callable[[], None] = lambda: None) -> Description:
        raise SourceLost("none")

    def begin(self, expected: Description) -> bytes:
        return self._about

    def read(self, next_range: Callable[[bool], Range | None], buffer: Any, arrived: Callable[[Range, bool], None]) -> None:
        assert self.may_read.wait(60)
        while (wanted := next_range(True)) is not None:
            self._damages -= 1
            is_intact = self._damages < 0
            buffer.view(torch.float32).fill_(self._value if is_intact else -1.0)
            try:
                arrived(wanted, is_intact)
            except SourceLost:
                self.has_damaged.set()
                raise
            if self._damages == 0:
                self.has_damaged.set()

    def shut_down(self) -> None:
        pass


@pytest.mark.parametrize("num_damages", [2, 3, 1000])
def test_damaged_ranges_are_read_again_and_a_source_that_sends_several_is_given_up(num_damages: int) -> None:
    bad, good = Scripted("bad", damages=num_damages), Scripted("good")
    sources, good.may_read = {"bad": bad, "good": good}, bad.has_damaged
    mine = Tensors({"x": torch.zeros(SIZE // 4)})
    with reading(connect=sources.__getitem__) as reader:
        got = reader.read("train 1", ["bad", "good"], mine)
        assert mine.named["x"].eq(1).all()
        assert got.lost == ({} if num_damages == 2 else {"bad": "3 ranges had a wrong checksum"})
    with reading(connect=sources.__getitem__) as reader:
        bad._damages = num_damages
        if num_damages == 2:
            reader.read("train 1", ["bad"], mine)
        else:
            with pytest.raises(StateVoid, match="bad: 3 ranges had a wrong checksum"):
                reader.read("train 1", ["bad"], mine)


def test_sources_with_different_scalars_or_unreadable_ones_are_void() -> None:
    mine = Tensors({"x": torch.zeros(SIZE // 4)})
    sources = {
        "one": Scripted("one"),
        "other": Scripted("other", about=b"\x81\xa1a\x01"),
        "bad": Scripted("bad", about=b"\xc1"),
    }
    with reading(connect=sources.__getitem__) as reader:
        begun = threading.Barrier(2)  # both have sent their scalars when either reads
        for each in sources.values():
            each.may_read.wait = lambda seconds: begun.wait(seconds) >= 0  # type: ignore[method-assign, assignment, misc]
        with pytest.raises(StateVoid, match="different scalars"):
            reader.read("train 1", ["one", "other"], mine)
    void = pytest.raises(StateVoid, match="scalars of train 1 cannot be read")
    with reading(connect={"bad": Scripted("bad", about=b"\xc1")}.__getitem__) as reader, void:
        reader.read("train 1", ["bad"], mine)


def test_a_failure_to_store_is_void_and_never_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(StateBytes, "copy_in", fail)
    with serving() as servers, reading() as reader:
        servers[0].open("train 1", of_size(SIZE, 1.0))
        with pytest.raises(StateVoid, match="this rank cannot store it: no memory"):
            reader.read("train 1", addresses(servers), of_size(SIZE, 0.0))


def test_a_source_that_a_void_is_heard_from_ends_the_read_at_once() -> None:
    class Closing(Scripted):
        def read(self, *_: Any) -> None:
            raise Void("the window of train 1 has closed")

    def silent(frames: Frames) -> None:
        frames.receive()
        time.sleep(20)

    with rogue(silent) as address:
        made = StateReader(key=KEY, replica=9, rank=0, deadlines=DEADLINES)._connect
        with reading(connect=lambda at: Closing("closing") if at == "closing" else made(at)) as reader:
            since = time.monotonic()
            with pytest.raises(StateVoid, match="closing: the window of train 1 has closed"):
                reader.read("train 1", ["closing", address], of_size(SIZE, 0.0))
            assert time.monotonic() - since < DEADLINES.sum_s


@pytest.mark.parametrize("sources", [[], ["a", "a"], [str(number) for number in range(9)]])
def test_no_source_one_twice_and_too_many_are_refused(sources: list[str]) -> None:
    with reading() as reader, pytest.raises(ValueError, match="1 to 8 can be read"):
        reader.read("train 1", sources, of_size(SIZE, 0.0))


def test_who_has_not_the_key_or_is_another_rank_reads_nothing() -> None:
    with serving() as servers:
        servers[0].open("train 1", of_size(SIZE, 1.0))
        for wrong in ({"key": b"another key".ljust(32)}, {"rank": 1}):
            with reading(deadlines=SHORT, **wrong) as reader, pytest.raises(StateVoid, match="no connection"):
                reader.read("train 1", addresses(servers), of_size(SIZE, 0.0))


def test_end_ends_a_wait_and_every_later_call() -> None:
    with serving() as servers, reading() as reader:
        thread, outcome = started(lambda: reader.next_window(servers[0].address, None))
        time.sleep(0.2)
        reader.end()
        thread.join(30)
        assert isinstance(outcome[0], StateVoid)
        with pytest.raises(StateVoid):
            reader.next_window(servers[0].address, None)


def test_a_server_that_ends_ends_the_wait_for_its_next_window() -> None:
    with serving() as servers, reading() as reader:
        servers[0].open("train 1", of_size(SIZE, 1.0))
        thread, outcome = started(lambda: reader.next_window(servers[0].address, "train 1"))
        time.sleep(0.2)
        servers[0].end()
        thread.join(30)
        assert isinstance(outcome[0], StateVoid)


def test_a_state_that_cannot_be_walked_is_told_and_no_window() -> None:
    class Changing(Tensors):
        def tensors(self) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    with serving() as servers, reading(deadlines=SHORT) as reader:
        servers[0].open("train 1", Changing({"x": torch.ones(3)}))
        with pytest.raises(StateVoid):
            reader.read("train 1", addresses(servers), Tensors({"x": torch.ones(3)}))
