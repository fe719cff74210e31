"""What the campaign does from outside is real: a disk that stalls, is full or fails, and a launcher that is stopped."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_recover.faults import Fault, FaultPoint
from tests.disk import Disk, mounted
from tests.nodes.nodes import Node
from tests.system import strikes
from tests.system.jobs import ROOT
from tests.system.strikes import DONE, NOW, OVER, Nemesis, Strike, StrikeKind

pytestmark = pytest.mark.timeout(60)
DEADLINE_S = 20.0
STOP = Strike(kind=StrikeKind.STOP, at=Fault(replica=0, rank=0, point=FaultPoint.OPTIMIZER), seconds=0.3)


def ask(folder: Path, launcher: int) -> None:
    """Ask for the strike, as a rank does: the file is whole when it has its name."""
    begun = folder / "begun"
    begun.write_text(str(launcher))
    begun.rename(folder / NOW)


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.005)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with mounted(tmp_path / "own") as made:
        yield made


@pytest.fixture
def file(disk: Disk) -> Iterator[int]:
    (disk.place / "run").mkdir()
    file = os.open(disk.place / "run" / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b"before\n")
    yield file


def test_a_write_to_a_disk_that_stalls_returns_when_it_goes_on(disk: Disk, file: int, tmp_path: Path) -> None:
    disk.stall(on=True)
    writer = threading.Thread(target=os.write, args=(file, b"after\n"))
    writer.start()
    writer.join(0.2)
    assert writer.is_alive(), "it was not held up"
    disk.stall(on=False)
    writer.join(DEADLINE_S)
    os.close(file)
    disk.rescue(disk.place / "run", tmp_path / "run")
    assert (tmp_path / "run" / "events").read_text() == "before\nafter\n" and not disk.place.is_mount()


def test_a_full_disk_takes_nothing_until_there_is_room(disk: Disk, file: int) -> None:
    disk.fill()
    with pytest.raises(OSError, match="No space left") as refused:
        for _ in range(100):
            os.write(file, bytes(1000))
    assert refused.value.errno == errno.ENOSPC
    disk.make_room()
    os.write(file, bytes(100_000))
    os.close(file)


def test_a_disk_that_fails_keeps_what_it_had(disk: Disk, file: int, tmp_path: Path) -> None:
    disk.fail()
    for fails in (lambda: os.write(file, b"after\n"), lambda: (disk.place / "run" / "events").read_text()):
        with pytest.raises(OSError) as refused:
            fails()
        assert refused.value.errno == errno.EIO
    os.close(file)
    disk.rescue(disk.place / "run", tmp_path / "run")
    assert (tmp_path / "run" / "events").read_text() == "before\n"


def test_a_process_is_stopped_when_a_rank_asks_and_goes_on_after_its_time(tmp_path: Path) -> None:
    launcher = psutil.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with Nemesis(STOP, tmp_path, None) as nemesis:
            assert not nemesis.has_struck
            ask(tmp_path, launcher.pid)
            until((tmp_path / DONE).exists, "the strike")
            assert nemesis.has_struck
            # Returns when it goes on, also where that was before somebody looked; one that was not stopped does not go on.
            went_on = os.waitid(os.P_PID, launcher.pid, os.WCONTINUED)
            assert went_on is not None and went_on.si_code == os.CLD_CONTINUED
    finally:
        launcher.kill()
        launcher.wait()


class Returning(Node):
    """A node on which a rank of replica 1 is left for ever, or for a while."""

    def __init__(self, num_looks: int) -> None:
        self.num_looks, self.ways = num_looks, list[str]()

    def cut(self, *others: Node, one_way: str | None = None) -> None:
        self.ways.append(f"cut {one_way}")

    def heal(self, *others: Node) -> None:
        self.ways.append("healed")

    def find_process(self, *words: str) -> list[psutil.Process]:
        self.num_looks -= 1
        return [psutil.Process()] if self.num_looks >= 0 else []


@pytest.mark.parametrize(("num_looks", "is_fenced"), [(2, True), (10**6, False)])
def test_a_node_that_returns_has_to_end_its_ranks(
    num_looks: int, is_fenced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strikes, "SHORT_CUT_S", (0.0, 0.0))
    monkeypatch.setattr(strikes, "FENCED_S", 0.5)
    node = Returning(num_looks)
    strike = Strike(kind=StrikeKind.CUT, at=STOP.at, seconds=0.1, one_way="in")
    with Nemesis(strike, tmp_path, node) as nemesis:
        ask(tmp_path, 1)
        until((tmp_path / OVER).exists, "the end of the cut")
    assert node.ways == ["cut in", "healed"]
    assert nemesis.unfenced == ("" if is_fenced else psutil.Process().name())


def test_who_is_never_asked_strikes_nobody(tmp_path: Path) -> None:
    with Nemesis(STOP, tmp_path, None) as nemesis:
        pass
    assert not nemesis.has_struck and not (tmp_path / DONE).exists()


def test_a_read_of_what_is_not_in_memory_returns_when_the_disk_goes_on(disk: Disk, file: int) -> None:
    os.close(file)
    (disk.place / "data").write_bytes(b"x" * 2**20)
    disk.forget()
    disk.stall_reads(on=True)
    reader = threading.Thread(target=lambda: (disk.place / "data").read_bytes())
    reader.start()
    reader.join(0.3)
    assert reader.is_alive(), "it was not held up"
    disk.stall_reads(on=False)
    reader.join(DEADLINE_S)
    assert not reader.is_alive()


def test_a_disk_lets_everybody_go_when_the_process_that_made_it_is_killed(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; from tests.disk import Disk; Disk(pathlib.Path(sys.argv[1])).stall(on=True);"
        "print('stalls', flush=True); input()"
    )
    made = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "own")], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert made.stdout is not None
    if not made.stdout.readline():
        pytest.skip("this machine lets nobody mount an image")
    place = tmp_path / "own" / "disk"
    assert place.is_mount()
    made.kill()
    made.wait()
    until(lambda: not place.is_mount(), "the disk to be gone")
