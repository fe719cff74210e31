"""The progress page: what is written is read, across processes and deaths; what is torn or absent names nobody."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import torch

from megatron_recover.core.progress import Phase, Progress
from megatron_recover.progress_page import MAX_MICROBATCHES, PAGE_BYTES, PageReader, ProgressPage, parse
from megatron_recover.trainer.compiling import show_compilations
from megatron_recover.trainer.in_work import InWork


@pytest.fixture
def reader() -> Iterator[PageReader]:
    reader = PageReader("test")
    yield reader
    reader.close()


def writer(reader: PageReader) -> ProgressPage:
    return ProgressPage(os.dup(reader.descriptor))


def test_what_is_written_is_read(reader: PageReader) -> None:
    assert reader.read() is None, "a page that nobody has written names somebody"
    page = writer(reader)
    page.begin_step(7, "train 8")
    page.obey(3)
    page.enter(Phase.FORWARD, (5,))
    with page.within(Phase.DATA):
        inside = reader.read()
    after = reader.read()
    assert inside is not None and after is not None
    assert (inside.phase, inside.microbatches) == (Phase.DATA, (5,)), "reading samples belongs to the microbatch in work"
    assert (after.generation, after.step, after.label, after.phase) == (3, 7, "train 8", Phase.FORWARD)
    assert (after.begun, after.ended) == (inside.begun + 1, inside.ended + 1), "whoever comes back has made progress"
    assert after.since_ns >= inside.since_ns


def test_a_reading_that_outlives_its_step_is_not_of_the_next_one(reader: PageReader) -> None:
    """The same id is another microbatch there, which a death would be charged to."""
    page = writer(reader)
    for step in (1, 2):
        page.begin_step(step, f"train {step + 1}")
        if step == 1:
            page.show_reading(5)
        page.enter(Phase.FORWARD, (0,))
        progress = reader.read()
        assert progress is not None and progress.ahead == (5 if step == 1 else None)


def test_what_is_read_ahead_has_a_record_of_its_own(reader: PageReader) -> None:
    page = writer(reader)
    page.enter(Phase.FORWARD, (0, 1))
    for ahead in (0, 5, None):
        page.show_reading(ahead)
        progress = reader.read()
        assert progress is not None and (progress.ahead, progress.microbatches) == (ahead, (0, 1))
    page.show_reading(5)
    page.enter(Phase.BACKWARD, tuple(range(100)))
    progress = reader.read()
    assert progress is not None and (progress.ahead, progress.phase) == (5, Phase.BACKWARD)
    whole = os.pread(reader.descriptor, PAGE_BYTES, 0)
    used = len(whole.rstrip(b"\0"))
    for index in range(used):
        torn = bytearray(whole)
        torn[index] ^= 0x10
        found = parse(bytes(torn))
        assert found is None or found == msgspec.structs.replace(progress, ahead=None), f"byte {index} is not covered"


def test_more_microbatches_than_fit_keep_the_oldest(reader: PageReader) -> None:
    page = writer(reader)
    page.enter(Phase.FORWARD, tuple(range(100)))
    progress = reader.read()
    assert progress is not None and progress.microbatches == tuple(range(MAX_MICROBATCHES))


def test_a_page_outlives_its_rank(reader: PageReader) -> None:
    pid = os.fork()
    if pid == 0:
        page = writer(reader)
        page.begin_step(0, "train 1")
        page.enter(Phase.BACKWARD, (2,))
        faulthandler.disable()  # pytest's, which would print
        os.kill(os.getpid(), signal.SIGBUS)
    os.waitpid(pid, 0)
    progress = reader.read()
    assert progress is not None and (progress.label, progress.phase, progress.microbatches) == ("train 1", Phase.BACKWARD, (2,))


def test_every_flipped_byte_and_every_cut_makes_a_page_name_nobody(reader: PageReader) -> None:
    page = writer(reader)
    page.begin_step(7, "train 8")
    page.enter(Phase.FORWARD, (1, 2))
    whole = os.pread(reader.descriptor, PAGE_BYTES, 0)
    old = parse(whole)
    assert old is not None
    used = len(whole.rstrip(b"\0"))
    for index in range(used):
        torn = bytearray(whole)
        torn[index] ^= 0x10
        assert parse(bytes(torn)) is None, f"byte {index} is not covered"
    page.enter(Phase.BACKWARD, (3, 4))
    new = os.pread(reader.descriptor, PAGE_BYTES, 0)
    for cut in range(1, used):
        assert parse(new[:cut] + whole[cut:]) in (None, old, parse(new)), "half of each was taken for whole"


def test_a_reader_beside_a_writer_never_sees_a_mixture(reader: PageReader) -> None:
    pid = os.fork()
    if pid == 0:  # each record says the same three times
        page = writer(reader)
        step = 0
        while True:
            step += 1
            page.begin_step(step, f"train {step}")
            page.enter(Phase.FORWARD, (step,))
    seen: dict[int, Progress] = {}
    try:
        while len(seen) < 300:  # of each what was read last
            if (progress := reader.read()) is not None and progress.step > 0:
                seen[progress.step] = progress
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for each in seen.values():
        assert each.label == f"train {each.step}" and each.microbatches == (each.step,)


def test_a_page_cannot_be_shrunk_under_its_reader(reader: PageReader) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(reader.descriptor, 0)


WITHOUT_SYSTEM_CALLS = """
import ctypes, os, platform, struct, sys
from megatron_recover.core.progress import (Phase)
from megatron_recover.progress_page import ProgressPage
page = ProgressPage()
def write():
    for microbatch in range(100):
        page.begin_step(microbatch, "train 1")
        page.enter(Phase.FORWARD, (microbatch,))
        with page.within(Phase.DATA):
            pass
        page.show_reading(microbatch)
        page.show_reading(None)
write()  # what is made only once is made here
# A filter in the kernel (seccomp(2)): every system call but write and exit_group ends the process with SIGSYS.
allowed = {"x86_64": (1, 231), "aarch64": (64, 94)}[platform.machine()]
LOAD_NUMBER, IF_EQUAL, RETURN, ALLOW, KILL = 0x20, 0x15, 0x06, 0x7FFF0000, 0x80000000
program = b"".join(struct.pack("<HBBI", *line) for line in (
    (LOAD_NUMBER, 0, 0, 0), (IF_EQUAL, 2, 0, allowed[0]), (IF_EQUAL, 1, 0, allowed[1]), (RETURN, 0, 0, KILL),
    (RETURN, 0, 0, ALLOW),
))
buffer = ctypes.create_string_buffer(program)
header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
PR_SET_SECCOMP, MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
assert libc.prctl(PR_SET_SECCOMP, MODE_FILTER, header, 0, 0) == 0, ctypes.get_errno()
write()
os.write(1, b"written")
if sys.argv[1:]:
    os.getppid()  # shows that the filter is there
os._exit(0)
"""


def test_writing_makes_no_system_call() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-c", WITHOUT_SYSTEM_CALLS, *words]
        return subprocess.run(command, capture_output=True, timeout=60, check=False)

    done, caught = run(), run("call")
    assert (done.returncode, done.stdout) == (0, b"written"), f"a system call was made: {done.stderr.decode()}"
    assert (caught.returncode, caught.stdout) == (-signal.SIGSYS, b"written"), "the filter catches nothing"


class Passes:
    """An event of a device that the test lets pass."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def test_a_device_that_runs_behind_has_several_microbatches_in_work() -> None:
    marks: list[Passes] = []

    def mark() -> Passes:
        marks.append(Passes())
        return marks[-1]

    work = InWork(mark)
    assert work.begins(0) == (0,)
    assert work.ended(0) == (0,), "its kernels may still run"
    assert work.begins(1) == (0, 1)
    work.ended(1)
    assert work.begins(0) == (0, 1), "the backward of one whose forward is enqueued names it once"
    marks[0].passed = True
    assert work.ended(0) == (1, 0)
    for each in marks:
        each.passed = True
    assert work.begins(2) == (2,)
    on_cpu = InWork.on(torch.device("cpu"))
    assert on_cpu.begins(3) == (3,) and on_cpu.ended(3) == ()


def test_a_microbatch_is_finished_in_the_journal_once_the_device_has_done_it() -> None:
    marks: list[Passes] = []

    def mark() -> Passes:
        marks.append(Passes())
        return marks[-1]

    finished: list[int] = []
    work = InWork(mark)
    work.ended(0, lambda: finished.append(0))
    work.ended(1, lambda: finished.append(1))
    assert work.note_finished() == (0, 1) and finished == []
    marks[0].passed = True
    assert work.begins(2) == (1, 2) and finished == [0]
    marks[1].passed = True
    assert work.note_finished() == () and work.note_finished() == () and finished == [0, 1]
    work.ended(2, lambda: finished.append(2))
    work.forget()
    assert work.note_finished() == (2,), "the device still works on it"
    marks[2].passed = True
    assert work.note_finished() == () and finished == [0, 1], "the journal of the next step has it"
    InWork.on(torch.device("cpu")).ended(2, lambda: finished.append(2))
    assert finished == [0, 1, 2]


def test_compiling_is_a_phase_of_its_own(reader: PageReader, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.callback import callback_handler

    monkeypatch.setattr(callback_handler, "start_callbacks", [])
    monkeypatch.setattr(callback_handler, "end_callbacks", [])
    page = writer(reader)
    page.enter(Phase.FORWARD, (1,))
    show_compilations(page)
    seen: list[Phase] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        progress = reader.read()
        assert progress is not None
        seen.append(progress.phase)
        return graph

    with torch.compiler.set_stance("default"):  # another test of the process may have called `megatron.cpu.enable_cpu`
        assert torch.compile(lambda value: value + 1, backend=backend)(torch.ones(2)).tolist() == [2.0, 2.0]
    progress = reader.read()
    assert seen == [Phase.COMPILING] and progress is not None and progress.phase is Phase.FORWARD
