"""What ranks print is memory first: no rank waits for whoever copies it to its log, and what is lost is counted there."""

from __future__ import annotations

import itertools
import os
import re
import resource
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_recover import trace
from megatron_recover.cluster import logs, recording
from megatron_recover.cluster import output as outputs
from megatron_recover.cluster.agent import Agent
from megatron_recover.cluster.logs import Outputs, _Log
from megatron_recover.cluster.output import (
    CHUNK_BYTES,
    EMPTIED_NOTE,
    KEPT_BYTES,
    WAITING_BYTES,
    Output,
    OutputBookmark,
    Reader,
    Who,
    Why,
    create,
    create_output_bookmark,
)
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import Deadlines
from tests.cluster.waiting import until_readable
from tests.recording.runs import Run

pytestmark = pytest.mark.timeout(150)

PROGRAM = """
import logging, os, subprocess, sys, traceback
print("x" * 1_000_000)
print("to stderr", file=sys.stderr)
logging.getLogger().warning("a warning")
sys.stdout.write("é\\n")
os.write(2, b"past Python\\n")
subprocess.run(["echo", "of a child"])
try:
    raise ValueError("something")
except ValueError:
    traceback.print_exc()
print("last words")
"""
SAID = ("x" * 1_000_000, "to stderr", "a warning", "é", "past Python", "of a child", "ValueError: something", "last words")
NOTE = rb"\nmegatron-recover: (\d+) bytes of output are missing here: [a-z ,]+\n"


NATIVE = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None)
libc.printf(b"native code\\n")
print("Python")
"""
CLOSED = {
    "closed": "sys.stdout.close()",
    "both closed": "sys.stdout.close()\nsys.stderr.close()",
    "none": "sys.stdout = None",
    "something else": "sys.stdout = 3",
    "broken": "class Broken:\n    def flush(self): raise SystemExit(7)\nsys.stderr = Broken()",
}
ENDS = {
    "a SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "an abrupt end": "os._exit(3)",
    "an error": 'libc.printf(b"and the rest")\nraise SystemExit(3)',
}
NOISY = """
import ctypes
ctypes.CDLL(None).printf(b"native chatter\\nand more")
print("chatter of Python")
print("and the rest", end="")
"""


def start_agent(output: Output, folder: Path, *preload: str) -> Agent:
    """Start an agent whose fork server imports modules of `folder`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    paths = os.pathsep.join([str(folder), os.getcwd()])
    return Agent(preload=preload, environment=environment | {"PYTHONPATH": paths}, output=output)


def spawned(script: Path, output: Output, *, server: Output | None = None, preload: tuple[str, ...] = ()) -> int:
    """Run a script as a rank, and return how that ended. `server`: what the fork server prints into."""
    agent = start_agent(server or create(script.with_suffix(".server.log")), script.parent, *preload)
    try:
        until_readable(agent.fileno(), agent.is_ready, "the fork server")
        agent.spawn(0, 0, argv=(str(script),), environment={}, output=output)
        ends = []
        until_readable(agent.fileno(), lambda: ends.extend(agent.poll()) or ends, "the end of the rank")
        return ends[0].status
    finally:
        agent.close()


def reading(
    *,
    bookmark: OutputBookmark | None = None,
    limit_bytes: int = WAITING_BYTES,
    keep: Callable[[bytes], object] = lambda lines: None,
) -> Outputs:
    """Return what a recorder does with outputs, where every replica speaks for the job."""
    made = bookmark or OutputBookmark(create_output_bookmark())
    return Outputs(made, limit_bytes=limit_bytes, slow_disk_s=60.0, speaks=lambda replica: True, keep=keep)


def resident(output: Output) -> int:
    """Return how much memory an output takes."""
    return os.fstat(output.descriptor).st_blocks * 512


# --- A rank ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorder", ["runs", "is stopped", "is gone"])
def test_a_rank_prints_as_much_as_it_likes_whatever_the_recorder_does(
    recorder: str, record: Callable[..., Run], tmp_path: Path
) -> None:
    """It is killed in the end: what it said last is there all the same."""
    run = record()
    run.until_it_records()
    if recorder != "runs":
        os.kill(run.pid, signal.SIGSTOP if recorder == "is stopped" else signal.SIGKILL)
    script = tmp_path / "script.py"
    script.write_text(PROGRAM + "import signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    output = run.output()
    assert spawned(script, output) == -signal.SIGKILL
    assert output.end().endswith("last words\n"), "in memory at once"
    run.finish()
    written = output.log.read_text()
    for text in SAID:
        assert text in written
    assert written.endswith("last words\n") and oct(output.log.stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("end", ENDS)
def test_what_native_code_prints_is_there_whatever_ends_the_rank(end: str, tmp_path: Path) -> None:
    """C's stdout is a buffer of its own, of whole blocks where it is no terminal: the reason of NCCL was lost with it."""
    script, output = tmp_path / "script.py", create(tmp_path / "rank.log")
    script.write_text(NATIVE + ENDS[end])
    assert spawned(script, output) == (-signal.SIGKILL if end == "a SIGKILL" else 3)
    assert output.end() == "native code\nPython\n" + ("and the rest" if end == "an error" else "")


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("how", CLOSED)
def test_a_script_may_do_to_its_streams_what_it_likes(how: str, status: int, tmp_path: Path) -> None:
    """Its exit code is its own, and it ends: a rank whose end raises would go on as a second fork server."""
    script, output = tmp_path / "script.py", create(tmp_path / "rank.log")
    native = "import ctypes\nctypes.CDLL(None).printf(b'native')"
    script.write_text(f"import sys\nprint('before', flush=True)\n{native}\n{CLOSED[how]}\nraise SystemExit({status})")
    assert spawned(script, output) == status
    assert output.end() == "before\nnative", "what is left of lines is printed"


def test_what_imports_print_is_in_the_log_of_the_fork_server_and_in_no_other(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    script, server, output = tmp_path / "script.py", create(tmp_path / "server.log"), create(tmp_path / "rank.log")
    script.write_text("print('of the rank')")
    assert spawned(script, output, server=server, preload=("noisy",)) == 0
    assert output.end() == "of the rank\n"
    assert [server.end().count(text) for text in ("native chatter\n", "and more", "of Python\n", "and the rest")] == [1] * 4


def test_what_imports_print_is_there_while_they_last(tmp_path: Path) -> None:
    """Who looks why a start takes so long finds what was said until then."""
    (tmp_path / "stuck.py").write_text(NOISY + "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n")
    server = create(tmp_path / "server.log")
    agent = start_agent(server, tmp_path, "stuck")
    try:
        os.waitid(os.P_PID, agent._server.pid, os.WSTOPPED | os.WNOWAIT)
        assert server.end() == "native chatter\nchatter of Python\n"
    finally:
        agent.close()


# --- The disk ----------------------------------------------------------------------------------------------------------------


def test_what_a_full_disk_does_not_take_waits_for_room_and_the_trace_does_not_wait_for_it(
    record: Callable[..., Run],
    capfd,  # noqa: ANN001
) -> None:
    run = record()
    run.until_it_records()
    soft = resource.prlimit(run.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (20_000, soft[1]))
    output, other = run.output(0), run.output(1)
    text = b"".join(b"line %d\n" % number for number in range(10_000))
    os.write(output.descriptor, text)
    os.write(other.descriptor, b"short\n")
    shown: list[str] = []

    def console() -> str:
        shown.append(capfd.readouterr().out)
        return "".join(shown)

    run.until(lambda: "WARNING: what ranks print cannot be written" in console(), "a warning")
    run.until(lambda: other.log.exists() and other.log.read_bytes() == b"short\n", "the other log")
    run.until(lambda: output.log.read_bytes() == b"", "what was taken of a chunk to be cut off")  # it is tried again and again
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, soft)
    run.until(lambda: "what ranks print is written again" in console(), "word that it is over")
    run.finish()
    assert output.log.read_bytes() == text and console().count("WARNING: what ranks print") == 1


def test_a_log_that_cannot_be_written_costs_that_log_and_is_told_at_the_end(record: Callable[..., Run], capfd) -> None:  # noqa: ANN001
    run = record()
    output = run.recording.output(run.run_dir / "gone" / "rank.log")
    os.write(output.descriptor, b"1234")
    run.recording.record(trace.RunFinished(exit_code=0))
    assert run.recording.finish(ExitCode.OK, "training finished"), "the trace is whole"
    out, err = capfd.readouterr()
    assert "4 bytes that ranks have printed are missing in" in err and "No such file" in err
    assert "exit code 0 (ok): training finished" in out and "the end of the trace is missing" not in err


@pytest.mark.parametrize("who", Who)
def test_memory_is_bounded_while_nobody_copies_and_what_is_lost_is_counted_in_the_log(
    who: Who, record: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher drops what a stopped recorder leaves; the recorder, what its own thread leaves that waits for a disk."""
    limit = 2**21
    monkeypatch.setattr(outputs, "WAITING_BYTES", limit)
    run = record(deadlines=replace(Deadlines.of(), slow_disk_s=0.1))
    output = run.output(1)
    if who is Who.RECORDER:
        os.mkfifo(output.log)  # opening it blocks
    run.until_it_records()
    if who is Who.LAUNCHER:
        run.stop()
    else:
        run.until(lambda: run.recording._copied.cause(time.monotonic_ns(), 60.0) is Why.DISK, "the disk to be slow")
        monkeypatch.setattr(run.recording, "_drop_output", lambda: None)
    lines = [b"%07d%s\n" % (number, b"x" * 1016) for number in range(4096)]
    for number, line in enumerate(lines):
        os.write(output.descriptor, line)
        if number % 512 == 511:
            run.until(lambda: resident(output) <= limit + 4096, "the oldest to be dropped")
    assert output.end().endswith(lines[-1].decode())
    if who is Who.LAUNCHER:
        time.sleep(Deadlines.of().still_s)  # so long the recorder has not looked, and this is the last that is dropped
        os.write(output.descriptor, bytes(limit).replace(b"\0", b"y"))
        lines.append(bytes(limit).replace(b"\0", b"y"))
        run.recording.poll()
        os.kill(run.pid, signal.SIGCONT)
    else:
        reader = subprocess.Popen(["cat", str(output.log)], stdout=os.open(tmp_path / "read", os.O_WRONLY | os.O_CREAT))
    run.finish()
    written = output.log.read_bytes() if who is Who.LAUNCHER else (reader.wait(40.0), (tmp_path / "read").read_bytes())[1]
    [lost] = re.findall(NOTE, written)
    before, after = re.split(NOTE, written)[0], re.split(NOTE, written)[2]
    everything = b"".join(lines)
    assert everything.startswith(before) and everything.endswith(after) and len(after) > limit / 2
    assert len(before) + int(lost) + len(after) == len(everything), "what is lost is all counted"
    why = Why.DISK if who is Who.RECORDER else Why.RECORDER
    assert f"are missing here: {why}\n".encode() in written
    assert (
        f"WARNING: {int(lost)} bytes that ranks have printed are lost so far, as no more than 2 MiB" in capfd.readouterr().out
    )


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20), st.integers(0, 10**6))
def test_all_share_the_room_and_those_lose_that_have_the_most(sizes: list[int], room: int) -> None:
    most = outputs._most(sizes, room)
    left = [min(size, most) for size in sizes]
    if sum(sizes) <= room:
        assert left == sizes
    else:
        assert room - len(sizes) < sum(left) <= room, "it fits, and no more is lost than must be"


def test_one_of_many_ranks_may_print_at_once_what_all_may_leave_in_memory(tmp_path: Path) -> None:
    bookmark, made = (
        OutputBookmark(create_output_bookmark()),
        {number: create(tmp_path / f"{number}.log") for number in range(64)},
    )
    os.write(made[7].descriptor, b"x" * 12_000_000)
    for who in Who:
        bookmark.drop(made, 12_000_000, who)
    assert max(map(bookmark.lost, made)) == 0
    os.write(made[8].descriptor, b"x" * 1_000_000)
    bookmark.drop(made, 12_000_000, Who.RECORDER)
    assert bookmark.lost(7) > 2_000_000 and bookmark.lost(8) == 0, "who has printed most loses its oldest"
    assert sum(map(resident, made.values())) <= 12_000_000


def test_a_disk_that_answers_is_not_blamed_for_what_is_printed_too_fast(tmp_path: Path) -> None:
    bookmark, made = OutputBookmark(create_output_bookmark()), create(tmp_path / "log")
    ours = reading(limit_bytes=100_000, bookmark=bookmark)
    ours.writer.close(20.0)
    ours.add(0, made, shown_of=None)
    os.write(made.descriptor, b"x" * 300_000)
    ours.make_room()
    assert bookmark.cause(time.monotonic_ns(), 60.0) is Why.FASTER
    _Log(0, made, bookmark).copy()
    assert made.log.read_bytes().startswith(
        b"\nmegatron-recover: 212500 bytes of output are missing here: ranks printed faster"
    )
    assert ours.num_lost == 212_500


def test_a_burst_that_a_disk_can_take_is_not_dropped_while_the_thread_that_writes_rests(
    record: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "WAITING_BYTES", 2**24)
    run = record()
    output = run.output(1)
    run.until(output.log.exists, "the log")
    os.write(output.descriptor, b"x" * 12_000_000)
    run.finish()
    assert output.log.stat().st_size == 12_000_000


def test_the_launcher_makes_room_whenever_it_looks(record: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "WAITING_BYTES", 2**21)
    run = record()
    output = run.output(1)
    run.until_it_records()
    run.stop()
    for _ in range(3):
        os.write(output.descriptor, b"x" * 2**23)
        run.recording.poll()
        assert resident(output) <= 2**21 + 4096
    os.kill(run.pid, signal.SIGCONT)


def test_the_launcher_makes_room_also_if_one_output_was_emptied_while_another_one_grew(
    record: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "WAITING_BYTES", 2**21)
    run = record()
    emptied, growing = run.output(0), run.output(1)
    os.write(emptied.descriptor, b"x\n" * 2**19)
    copied = run.recording._copied
    run.until(lambda: min(copied.copied(2).position, copied.shown(2)) == 2**20 + 1, "the first to be copied and shown")
    run.stop()
    run.recording.poll()
    os.ftruncate(emptied.descriptor, 0)
    os.write(growing.descriptor, b"x" * (2**19 + 2**21))
    run.recording.poll()
    assert resident(growing) <= 2**21 + 4096
    os.kill(run.pid, signal.SIGCONT)


def test_the_recorder_makes_room_between_the_lines_that_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank prints on while its lines are shown, faster than they are."""
    monkeypatch.setattr(logs, "_DROP_S", 0.0)  # else what is in memory grows by what is printed in that time
    limit, most, made = 2 * CHUNK_BYTES, 0, create(tmp_path / "log")

    def keep(*_: object) -> None:
        nonlocal most
        os.write(made.descriptor, b"x" * (2 * CHUNK_BYTES - 1) + b"\n")
        most = max(most, resident(made))

    ours = reading(limit_bytes=limit, keep=keep)
    ours.writer.close(20.0)
    ours.add(0, made, shown_of=0)
    keep()
    list(ours.look())
    assert limit < most <= 2 * limit + KEPT_BYTES


def test_the_recorder_looks_more_often_while_the_memory_would_be_full_in_a_second(tmp_path: Path) -> None:
    made = create(tmp_path / "log")
    ours = reading(limit_bytes=2**20)
    ours.add(0, made, shown_of=None)
    ours.make_room()
    assert not ours.is_filling
    os.write(made.descriptor, b"x" * 2**22)
    ours.make_room()
    assert ours.is_filling
    list(ours.look())
    assert ours.is_filling, "lines that are shown say nothing of how fast the memory fills"
    ours.make_room()
    assert not ours.is_filling
    ours.writer.close(20.0)


@pytest.mark.parametrize("end", ["of the run", "of the launcher"])
def test_a_program_that_outlives_the_run_can_no_longer_fill_memory(end: str, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        run = Run(tmp_path / "run")
        output = run.output(1)
        os.write(output.descriptor, b"x" * 2**20)
        run.until_it_records()
        socket.send_fds(theirs, [str(run.pid).encode()], [output.descriptor])
        if end == "of the run":
            run.finish()
        os.kill(os.getpid(), signal.SIGKILL)
    answer, [descriptor], _, _ = socket.recv_fds(ours, 100, 1)
    recorder = os.pidfd_open(int(answer))
    os.waitpid(pid, 0)
    assert select.select([recorder], [], [], 60.0)[0], "the recorder is still there"
    for write in (lambda: os.write(descriptor, b"more"), lambda: os.pwrite(descriptor, b"more", 0)):
        with pytest.raises(PermissionError):
            write()
    assert os.fstat(descriptor).st_blocks == 0
    assert (tmp_path / "run" / "logs" / "replica-1-rank-0.log").stat().st_size == 2**20
    for each in (descriptor, recorder):
        os.close(each)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
        ((2**40, 2**40), None),
        ((10**9, resource.RLIM_INFINITY), "give `ulimit -f unlimited` in this shell first$"),
        ((10**9, 10**9), "LimitFSIZE= of the service$"),
    ],
)
def test_a_limit_that_would_end_a_rank_in_the_middle_of_a_run_is_named(
    limits: tuple[int, int], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    mistake = outputs.file_limit_mistake()
    assert mistake is None if said is None else mistake is not None and re.search(said, mistake)


def test_memory_of_what_is_in_the_log_is_given_back(record: Callable[..., Run]) -> None:
    run = record()
    output = run.output()
    for _ in range(12):
        os.write(output.descriptor, b"x" * 999_999 + b"\n")
        run.until(lambda: resident(output) <= KEPT_BYTES + 2**16, "memory to be given back")
    assert len(output.end()) == KEPT_BYTES
    run.finish()
    assert output.log.stat().st_size == 12_000_000


@pytest.mark.parametrize("reader", Reader)
def test_memory_is_kept_until_the_console_has_had_it_too(reader: Reader, tmp_path: Path) -> None:
    made, bookmark = create(tmp_path / "log"), OutputBookmark(create_output_bookmark())
    os.write(made.descriptor, b"x" * 5 * KEPT_BYTES)
    log = _Log(0, made, bookmark, [reader])
    while log.copy():
        pass
    assert resident(made) == 5 * KEPT_BYTES + 4096 and made.log.stat().st_size == 5 * KEPT_BYTES
    bookmark.show(0, bookmark.end(0, made), reader)
    assert not log.copy() and resident(made) == KEPT_BYTES + 4096


# --- A recorder that dies ----------------------------------------------------------------------------------------------------


def test_recorders_that_are_killed_again_and_again_lose_nothing_and_write_nothing_twice(
    record: Callable[..., Run], capfd: pytest.CaptureFixture[str]
) -> None:
    run = record()
    output, number, shown = run.output(), 0, ""
    for _ in range(3):
        size = output.log.stat().st_size if output.log.exists() else 0
        while not output.log.exists() or output.log.stat().st_size < size + 1000:
            os.write(output.descriptor, b" iteration %d/ 9 |\n" % number)
            number += 1
            run.recording.poll()
        former = run.pid
        os.kill(former, signal.SIGKILL)
        run.until(lambda former=former: run.recording._process is not None and run.pid != former, "another recorder")
    run.finish()
    wanted = [f" iteration {each}/ 9 |" for each in range(number)]
    assert output.log.read_text().splitlines() == wanted
    shown = capfd.readouterr().out
    assert len(re.findall(r"^iteration \d+/", shown, re.M)) <= number, "the console shows a line twice"
    # The last lines that a recorder kept before it died may be there twice.
    assert list(dict.fromkeys((run.run_dir / "train.log").read_text().splitlines())) == wanted


def test_a_part_of_a_chunk_that_a_dead_recorder_left_is_cut_off(tmp_path: Path) -> None:
    made, descriptor = create(tmp_path / "log"), create_output_bookmark()
    os.write(made.descriptor, b"one\n")
    log = _Log(0, made, OutputBookmark(descriptor))
    log.copy()
    log.close()
    with open(made.log, "ab") as file:
        file.write(b"tw")  # it died before it could enter this
    os.write(made.descriptor, b"two\n")
    _Log(0, made, OutputBookmark(descriptor)).copy()
    assert made.log.read_bytes() == b"one\ntwo\n"


def test_a_log_that_somebody_has_cut_goes_on_behind_that(tmp_path: Path) -> None:
    made, descriptor = create(tmp_path / "log"), create_output_bookmark()
    os.write(made.descriptor, b"one\n")
    log = _Log(0, made, OutputBookmark(descriptor))
    log.copy()
    log.close()
    os.truncate(made.log, 0)
    os.write(made.descriptor, b"two\n")
    _Log(0, made, OutputBookmark(descriptor)).copy()
    assert made.log.read_bytes() == b"two\n"


@given(st.lists(st.sampled_from(["print", "copy", "drop by recorder", "drop by launcher", "another recorder"]), max_size=40))
def test_whoever_drops_when_the_log_has_all_or_says_how_much_is_missing_where(
    tmp_path_factory: pytest.TempPathFactory, actions: list[str]
) -> None:
    made, descriptor = create(tmp_path_factory.mktemp("log") / "log"), create_output_bookmark()
    everything = b""
    try:
        bookmark = OutputBookmark(descriptor)
        log = _Log(0, made, bookmark)
        for action in [*actions, "copy"]:
            match action:
                case "print":
                    text = b"".join(b"%08d\n" % (len(everything) + 9 * each) for each in range(1000))
                    os.write(made.descriptor, text)
                    everything += text
                case "copy":
                    while log.copy():
                        pass
                case "another recorder":
                    log.close()
                    bookmark = OutputBookmark(descriptor)
                    log = _Log(0, made, bookmark)
                case _:
                    bookmark.drop({0: made}, 12_345, Who.LAUNCHER if action.endswith("launcher") else Who.RECORDER)
        parts = re.split(NOTE, made.log.read_bytes())
        position = 0
        for index, part in enumerate(parts):
            if index % 2:
                position += int(part)
            else:
                assert everything[position : position + len(part)] == part, "zeros, or something twice"
                position += len(part)
        assert position == len(everything)
        assert bookmark.copied(0).num_lost == sum(int(part) for part in parts[1::2])
    finally:
        log.close()
        made.close()
        os.close(descriptor)


def test_output_that_is_dropped_while_it_is_read_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher frees it between the read of the recorder and its look into the bookmark, or just before that read."""
    made, bookmark = create(tmp_path / "log"), OutputBookmark(create_output_bookmark())
    os.write(made.descriptor, b"x" * 100_000)
    read, reads = os.pread, []

    def pread(descriptor: int, length: int, offset: int) -> bytes:
        if length > 1 and not reads:
            bookmark.drop({0: made}, 50_000, Who.LAUNCHER)
        if length > 1:
            reads.append(offset)
        return read(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    log = _Log(0, made, bookmark)
    while log.copy():
        pass
    assert len(reads) == 2 and b"\0" not in made.log.read_bytes()
    assert int(re.findall(NOTE, made.log.read_bytes())[0]) == reads[1] - 1


# --- The console -------------------------------------------------------------------------------------------------------------


def test_lines_of_the_writer_are_shown_and_make_train_log_whoever_that_is(
    record: Callable[..., Run], capfd: pytest.CaptureFixture[str]
) -> None:
    run = record()
    outs = [run.output(replica) for replica in range(2)]
    run.recording.record(trace.Generation(generation=1, roster=(0, 1), reason="start"))
    shown: list[str] = []

    def console() -> str:
        shown.append(capfd.readouterr().out)
        return "".join(shown)

    for step, replicas in enumerate(((0, 1), (1,))):
        run.until(lambda step=step: f"generation {step + 1}" in console(), "the generation")
        for replica in range(2):
            os.write(outs[replica].descriptor, b" iteration %d/ of %d\nnoise of %d\n" % (step, replica, replica))
        run.until(lambda step=step, who=replicas[0]: f"iteration {step}/ of {who}" in console(), "the line")
        run.recording.record(trace.Generation(generation=2, roster=(1,), reason="a loss"))
    os.write(outs[1].descriptor, b" iteration 3/ without an end")
    run.finish()
    wanted = ["iteration 0/ of 0", "noise of 0", "iteration 1/ of 1", "noise of 1", "iteration 3/ without an end"]
    train_log = run.run_dir / "train.log"
    assert [line.strip() for line in train_log.read_text().splitlines()] == wanted
    assert oct(train_log.stat().st_mode & 0o777) == "0o600", "it has what the logs of ranks have"
    assert re.findall(r"(?:iteration|noise).*", console()) == [wanted[0], wanted[2], wanted[4]]


def test_a_take_over_between_two_turns_costs_no_line_of_either_writer(record: Callable[..., Run]) -> None:
    run = record()
    outs = [run.output(replica) for replica in range(2)]
    run.recording.record(trace.Generation(generation=1, roster=(0, 1), reason="start"))
    run.until_it_records()
    run.stop()  # the next turn finds all of this at once
    os.write(outs[0].descriptor, b" iteration 1/ of 0\n")
    run.recording.record(trace.Generation(generation=2, roster=(1,), reason="a loss"))
    os.write(outs[1].descriptor, b" iteration 2/ of 1\n")
    os.kill(run.pid, signal.SIGCONT)
    run.finish()
    assert (run.run_dir / "train.log").read_text().split() == ["iteration", "1/", "of", "0", "iteration", "2/", "of", "1"]


def test_the_last_look_takes_all_that_was_printed_and_what_is_no_whole_line(tmp_path: Path) -> None:
    kept: list[bytes] = []
    ours = reading(keep=kept.append)
    printed = (b"x" * 99 + b"\n") * 60_000 + b"iteration 9/ 9\n"  # more than one look takes, and the others have their turn
    rest = b"terminate called"
    for number in range(2):
        made = create(tmp_path / f"{number}.log")
        os.write(made.descriptor, printed + rest)
        ours.add(number, made, shown_of=number)
    try:
        assert len(list(ours.look())) < 2 * 60_000 and not kept[-1].endswith(b"iteration 9/ 9\n")
        assert ours.has_more, "the next look can come at once"
        assert list(ours.look(at_end=True))[-2:] == ["iteration 9/ 9", "terminate called"]
        assert list(ours.look(at_end=True)) == []
        assert sorted(b"".join(kept).splitlines()) == sorted(2 * (printed + rest).splitlines())
    finally:
        ours.writer.close(20.0)


def test_the_last_look_ends_though_somebody_prints_on(tmp_path: Path) -> None:
    made = create(tmp_path / "log")
    ours = reading(keep=lambda lines: os.write(made.descriptor, b"on\n"))
    os.write(made.descriptor, b"first\n")
    ours.add(0, made, shown_of=0)
    try:
        assert list(itertools.islice(ours.look(at_end=True), 5)) == ["first"]
    finally:
        ours.writer.close(20.0)


def test_the_ends_of_logs_are_shown_though_the_disk_has_taken_none(
    record: Callable[..., Run], capfd: pytest.CaptureFixture[str]
) -> None:
    run = record(deadlines=replace(Deadlines.of(), trace_s=1.0))
    output = run.output(1)
    os.mkfifo(output.log)
    os.write(output.descriptor, b"x" * 3_000_000 + b"\nValueError: at last\n")
    run.recording.finish(ExitCode.FAILED, "a rank has failed")
    out, err = capfd.readouterr()
    assert "(failed): a rank has failed" in out and "ValueError: at last" in out and len(out) < 3 * KEPT_BYTES
    assert "bytes that ranks have printed are missing in" in err


def test_train_log_says_once_what_was_dropped_before_it_had_that(tmp_path: Path) -> None:
    made, descriptor, kept = create(tmp_path / "log"), create_output_bookmark(), []
    os.write(made.descriptor, b"x" * 10_000 + b"\n iteration 2/ 3\n")
    OutputBookmark(descriptor).drop({0: made}, 1000, Who.LAUNCHER, why=Why.RECORDER)
    for is_next in (False, True):  # a recorder, and the one that follows it
        ours = reading(bookmark=OutputBookmark(descriptor), keep=kept.append)
        ours.add(0, made, shown_of=3)
        assert list(ours.look())[1:] == ([] if is_next else [" iteration 2/ 3"])
        ours.writer.close(20.0)
    [note, lines] = kept
    assert note == outputs.lost_note(10_017 - len(lines), Why.RECORDER)


def test_the_console_says_how_much_it_has_not_had(
    record: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outputs, "WAITING_BYTES", 2**20)
    run = record()
    output = run.output(0)
    run.until_it_records()
    run.stop()
    os.write(output.descriptor, b"x" * 2**21 + b"\n")
    run.recording.poll()
    os.kill(run.pid, signal.SIGCONT)
    run.finish()
    told = re.findall(r"WARNING: \d+ bytes that ranks have printed are missing in train.log and here", capfd.readouterr().out)
    assert told and re.findall(NOTE, (run.run_dir / "train.log").read_bytes())


# --- An output that somebody empties -----------------------------------------------------------------------------------------


def test_a_shell_that_opens_its_stderr_by_name_empties_what_waits_and_that_is_told(
    record: Callable[..., Run], capfd: pytest.CaptureFixture[str]
) -> None:
    """As with a log that is a file: `echo > /dev/stderr` cuts it."""
    run = record()
    output = run.output()
    run.until(output.log.exists, "the log")
    wanted = b""
    for number in range(3):
        os.write(output.descriptor, b"before %d\n" % number)
        wanted += b"before %d\n" % number
        run.until(lambda wanted=wanted: output.log.read_bytes() == wanted, "the line before")
        subprocess.run(["bash", "-c", "echo cut > /dev/stderr"], stderr=output.descriptor, check=True)
        wanted += EMPTIED_NOTE + b"cut\n"
        run.until(lambda wanted=wanted: output.log.read_bytes() == wanted, "the line of the shell")
    os.write(output.descriptor, b"a longer line, after that\n")
    run.finish()
    assert output.log.read_bytes() == wanted + b"a longer line, after that\n"
    assert (run.run_dir / "train.log").read_bytes().count(EMPTIED_NOTE) == 3
    assert "WARNING: 3 times so far a program of a rank opened /dev/stdout or /dev/stderr" in capfd.readouterr().out


@pytest.mark.parametrize("size", [10, 300_000, 1_000_000])
def test_an_output_that_was_emptied_and_is_longer_than_before_when_that_is_seen_is_read_from_its_beginning(
    size: int, record: Callable[..., Run]
) -> None:
    run = record()
    output = run.output()
    os.write(output.descriptor, b"x" * (size - 1) + b"\n")
    run.until(lambda: output.log.exists() and output.log.stat().st_size == size, "the log")
    run.until(lambda: resident(output) <= KEPT_BYTES + 2**13, "memory to be given back")
    run.stop()
    rest = b"".join(b"line %d\n" % number for number in range(size // 5))
    with open(f"/proc/self/fd/{output.descriptor}", "wb"):
        os.write(output.descriptor, rest)
    run.recording.poll()
    os.kill(run.pid, signal.SIGCONT)
    run.finish()
    assert output.log.read_bytes() == b"x" * (size - 1) + b"\n" + EMPTIED_NOTE + rest


def test_what_is_printed_over_the_beginning_of_an_output_does_not_have_it_copied_again(record: Callable[..., Run]) -> None:
    run = record()
    output = run.output()
    os.write(output.descriptor, b"x" * 10**6 + b"\n")
    run.until(lambda: output.log.exists() and output.log.stat().st_size == 10**6 + 1, "the log")
    run.until(lambda: resident(output) <= KEPT_BYTES + 2**13, "memory to be given back")
    with open(f"/proc/self/fd/{output.descriptor}", "r+b") as file:
        file.write(b"over it")
    run.until(lambda: os.pread(output.descriptor, 1, 0) == b"\0", "the recorder to see it")
    run.finish()
    assert output.log.read_bytes() == b"x" * 10**6 + b"\n"


def test_a_recorder_that_dies_when_it_has_noticed_an_emptying_leaves_it_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, descriptor = create(tmp_path / "log"), create_output_bookmark()
    os.write(made.descriptor, b"before\n")
    log = _Log(0, made, OutputBookmark(descriptor))
    log.copy()
    log.close()
    subprocess.run(["bash", "-c", "echo after > /dev/stderr"], stderr=made.descriptor, check=True)

    def dies(*_: object) -> None:
        raise RuntimeError

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr("megatron_recover.host.memory_file.zero", dies)
        OutputBookmark(descriptor).notice_emptied(0, made)
    bookmark = OutputBookmark(descriptor)
    log = _Log(0, made, bookmark)
    assert not log.copy() and bookmark.notice_emptied(0, made) and not bookmark.notice_emptied(0, made)
    assert not log.copy()
    assert made.log.read_bytes() == b"before\n" + EMPTIED_NOTE + b"after\n"


def test_what_is_printed_right_behind_an_emptying_is_whole_though_the_log_is_copied_before_that_is_noticed(
    tmp_path: Path,
) -> None:
    made, bookmark = create(tmp_path / "log"), OutputBookmark(create_output_bookmark())
    log, before = _Log(0, made, bookmark), b"x" * (2 * KEPT_BYTES + 10)
    os.write(made.descriptor, before)
    while log.copy():
        pass  # memory is given back by the next copy
    os.truncate(f"/proc/self/fd/{made.descriptor}", 0)
    after = b"y" * 5 * 4096
    os.write(made.descriptor, after)
    assert not log.copy() and bookmark.notice_emptied(0, made)
    log.copy()
    assert made.log.read_bytes() == before + EMPTIED_NOTE + after


def test_one_output_may_be_emptied_more_often_than_any_run_lasts(tmp_path: Path) -> None:
    """Positions begin further behind from emptying to emptying, and a word of the bookmark has 63 bits."""
    made, bookmark = create(tmp_path / "log"), OutputBookmark(create_output_bookmark())
    log, wanted = _Log(0, made, bookmark), b""
    for number in range(3):
        os.write(made.descriptor, b"%d\n" % number)
        begin = bookmark.end(0, made)
        log.copy()
        os.truncate(f"/proc/self/fd/{made.descriptor}", 0)
        os.write(made.descriptor, b"x")
        assert bookmark.notice_emptied(0, made)
        log.copy()
        wanted += b"%d\n" % number + EMPTIED_NOTE + b"x"
        assert 2 * CHUNK_BYTES < bookmark.end(0, made) - begin < 2**63 // 10**9, "a stale position is before, and 10^9 follow"
    assert made.log.read_bytes() == wanted


def test_an_output_that_is_emptied_twice_before_anything_is_copied_begins_anew_twice(tmp_path: Path) -> None:
    """A copy that began before the second time must see it."""
    made, bookmark = create(tmp_path / "log"), OutputBookmark(create_output_bookmark())
    firsts = [bookmark.first(0)]
    for _ in range(2):
        os.truncate(f"/proc/self/fd/{made.descriptor}", 0)
        os.write(made.descriptor, b"x")
        assert bookmark.notice_emptied(0, made)
        firsts.append(bookmark.first(0))
    assert firsts == sorted(set(firsts))


def test_what_is_printed_over_the_beginning_of_a_short_output_has_all_of_it_copied_again(tmp_path: Path) -> None:
    """That looks like an output that was emptied, and has as much again: text that is there twice is better than lost text."""
    made, bookmark = create(tmp_path / "log"), OutputBookmark(create_output_bookmark())
    log = _Log(0, made, bookmark)
    os.write(made.descriptor, b"one\ntwo\n")
    log.copy()
    with open(f"/proc/self/fd/{made.descriptor}", "r+b") as file:
        file.write(b"over\n")
    os.write(made.descriptor, b"three\n")
    assert not log.copy() and bookmark.notice_emptied(0, made)
    log.copy()
    assert made.log.read_bytes() == b"one\ntwo\n" + EMPTIED_NOTE + b"over\ntwo\nthree\n"


@pytest.mark.parametrize("is_killed", [False, True], ids=["", "a recorder dies"])
def test_ranks_that_have_ended_long_ago_keep_no_descriptor(
    is_killed: bool, record: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that heals a thousand times has as many descriptors as before, and the words of the newest are kept."""
    monkeypatch.setattr(recording, "_KEPT_RANKS", 8)
    run = record(ring_bytes=2**16)
    run.until_it_records()

    def count(pid: int) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    before, of_recorder = count(os.getpid()), count(run.pid)
    kept = run.recording._num_kept
    for replica in range(2, 2 + 3 * kept):
        run.rank(replica)
        os.write(run.output(replica).descriptor, f"I am {replica}".encode())
        run.recording.ended(replica, 0)
        if is_killed and replica == 2 + 2 * kept:
            os.kill(run.pid, signal.SIGKILL)
        run.recording.poll()
    run.until(lambda: count(os.getpid()) <= before + kept, "the launcher has closed what nobody needs")
    run.until(lambda: count(run.pid) <= of_recorder + 2 * kept + 2, "so has the recorder, which has logs, and two of its own")
    assert len(run.recording._outputs) >= kept and not run.recording._let_go
    run.finish()
    assert [run.job.log_of(replica, 0).read_text() for replica in range(2, 2 + 3 * kept)] == [
        f"I am {replica}" for replica in range(2, 2 + 3 * kept)
    ]


def test_a_line_without_an_end_of_a_writer_that_has_ended_long_ago_is_shown(tmp_path: Path) -> None:
    bookmark = OutputBookmark(create_output_bookmark())
    kept: list[bytes] = []
    outputs = Outputs(bookmark, limit_bytes=2**20, slow_disk_s=5.0, speaks=lambda replica: True, keep=kept.append)
    made = create(tmp_path / "log")
    outputs.add(0, Output(os.dup(made.descriptor), made.log), shown_of=0)
    os.write(made.descriptor, b"whole\nhalf")
    outputs.make_room()
    assert [*outputs.look()] == ["whole"] and outputs.released() == []
    outputs.ended(0)
    assert [*outputs.look()] == ["half"] and kept == [b"whole\n", b"half\n"]
    end = time.monotonic() + 60
    while not (released := outputs.released()) and time.monotonic() < end:
        time.sleep(0.01)
    assert released == [0] and [*outputs.look()] == [] and outputs.ends() == []
    assert made.log.read_text() == "whole\nhalf"
    outputs.writer.close(60)
