"""What torchrun's flags make of the output of ranks: a log for each stream, and lines on the console behind their rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_recover import trace
from megatron_recover.cluster.job import link_logs
from megatron_recover.cluster.output import Copied, Output, OutputBookmark, Reader, Who, Why, create, create_output_bookmark
from megatron_recover.cluster.output import lost_note as lost
from megatron_recover.cluster.streams import Stream, Streams, Tee
from megatron_recover.core.exit_code import ExitCode
from tests.recording.runs import Run
from tests.recording.test_output import reading, spawned

pytestmark = pytest.mark.timeout(150)
OUT, ERR = Stream.OUT, Stream.ERR


@pytest.mark.parametrize("tee", [0, 1, 2, 3, {0: 1, 1: 2}])
@pytest.mark.parametrize("redirects", [0, 1, 2, 3, {1: 3}])
@pytest.mark.parametrize("shown", [frozenset(), frozenset({1})])
def test_a_stream_goes_where_torchrun_sends_it(tee, redirects, shown, tmp_path: Path) -> None:  # noqa: ANN001
    """As torchrun's own `DefaultLogsSpecs` decides for two ranks; it gives a path for a file, "" for the console."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std

    def std(given: int | dict[int, int]) -> Std | dict[int, Std]:
        return Std(given) if isinstance(given, int) else {rank: Std(value) for rank, value in given.items()}

    theirs = DefaultLogsSpecs(str(tmp_path), std(redirects), std(tee), set(shown) or None).reify({0: {}, 1: {}})
    ours = Streams(redirects=redirects, tee=tee, shown=shown)
    for place in range(2):
        files = [files[place] for files in (theirs.stdouts, theirs.stderrs)]
        assert ours.are_split(place) == any(each not in ("", os.devnull) for each in files)
        for stream, file, teed in zip((OUT, ERR), files, (theirs.tee_stdouts, theirs.tee_stderrs), strict=True):
            assert (ours.tee_of(place, stream) is not None) == (place in teed), (place, stream)
            assert ours.is_on_console(place, stream) == (file == ""), (place, stream)


def test_the_text_in_front_of_a_line_is_torchruns() -> None:
    assert Streams(tee=3, role="trainer").tee_of(7, ERR) == Tee("[trainer7]:", is_error=True)
    template = Streams(tee={3: 1}, prefix="${rank}/${role_name} $x ", filters={OUT: ("a",)})
    assert template.tee_of(3, OUT) == Tee("3/default $x ", is_error=False, filters=("a",))
    assert template.tee_of(2, OUT) is None and template.tee_of(3, ERR) is None


def test_the_two_streams_of_a_rank_may_be_two_outputs(tmp_path: Path) -> None:
    out = create(tmp_path / "out.log")
    output = Output(create(tmp_path / "err.log").descriptor, tmp_path / "err.log", out)
    script = tmp_path / "script.py"
    script.write_text(
        "import ctypes, os, subprocess, sys\n"
        "print('to stdout')\nctypes.CDLL(None).printf(b'native\\n')\nprint('to stderr', file=sys.stderr)\n"
        "subprocess.run('echo child; echo childs error >&2', shell=True)\n"
        "from megatron_recover.config import inherited_descriptor\n"
        "assert inherited_descriptor('stdout') is None\n"
        "raise ValueError('at last')\n"
    )
    assert spawned(script, output) == 1
    assert out.end() == "to stdout\nnative\nchild\n"
    assert output.end().startswith(out.end() + "to stderr\nchilds error\nTraceback") and output.end().endswith("at last\n")


STREAMS = Streams(
    redirects={1: 3}, tee={0: 1, 2: 3}, shown=frozenset({0, 1, 2}), filters={OUT: ("loss", "no such text"), ERR: ("error",)}
)


def test_the_logs_and_the_console_of_a_run_with_all_flags(
    record: Callable[..., Run], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Four replicas of one rank; the writer is replica 0, then 1. The recorder dies in between."""
    links = tmp_path / "links"
    run = record(num_replicas=4, streams=STREAMS, log_links=links)
    link_logs(run.job)
    outputs = [run.output(replica) for replica in range(4)]

    def prints(replica: int, out: str, err: str) -> None:
        """Print to both streams of a rank."""
        output = outputs[replica]
        os.write((output.stdout or output).descriptor, out.encode())
        os.write(output.descriptor, err.encode())

    run.until_it_records()
    for replica in range(4):
        prints(replica, f" iteration 1/ 2 loss {replica}\nchat {replica}\n", f"validation loss {replica}\nerror {replica}\n")
    shown = ["", ""]

    def on_console() -> list[str]:
        for number, text in enumerate(capfd.readouterr()):
            shown[number] += text
        return shown

    run.until(lambda: "chat 2" in on_console()[0] and "error 2" in shown[1], "the teed lines to be shown")
    os.kill(run.pid, signal.SIGKILL)
    run.recording.record(trace.Generation(generation=2, roster=(1, 2, 3), reason="a loss"))
    for replica in range(1, 4):
        prints(replica, f" iteration 2/ 2 loss {replica}\n", "")
    prints(2, "no end of line", "")
    run.finish()
    out, err = on_console()
    lines = [line for line in out.splitlines() if "megatron-recover:" not in line]
    assert sorted(lines) == [
        "[default0]: iteration 1/ 2 loss 0", "[default0]:chat 0", "[default2]: iteration 1/ 2 loss 2",
        "[default2]: iteration 2/ 2 loss 2", "[default2]:chat 2", "[default2]:no end of line",
        "validation loss 0",  # of the writer, and worth it; that of rank 0 is neither teed nor redirected
    ]  # fmt: skip
    assert [line for line in err.splitlines() if line.startswith("[")] == ["[default2]:validation loss 2", "[default2]:error 2"]
    logs = run.run_dir / "logs"
    assert (logs / "replica-0-rank-0.stdout.log").read_text() == " iteration 1/ 2 loss 0\nchat 0\n"
    assert (logs / "replica-0-rank-0.log").read_text() == "validation loss 0\nerror 0\n"
    assert (logs / "replica-3-rank-0.log").read_text() == (
        " iteration 1/ 2 loss 3\nchat 3\nvalidation loss 3\nerror 3\n iteration 2/ 2 loss 3\n"
    )
    assert not (logs / "replica-3-rank-0.stdout.log").exists()
    attempt = links / "attempt_0"
    assert (attempt / "1" / "stdout.log").read_text() == " iteration 1/ 2 loss 1\nchat 1\n iteration 2/ 2 loss 1\n"
    assert (attempt / "1" / "stderr.log").read_text() == "validation loss 1\nerror 1\n"
    assert (attempt / "3" / "stdout.log").samefile(attempt / "3" / "stderr.log")
    assert (attempt / "filtered_stdout.log").read_text().splitlines() == [
        "[default0]: iteration 1/ 2 loss 0", "[default2]: iteration 1/ 2 loss 2", "[default2]: iteration 2/ 2 loss 2",
    ]  # fmt: skip
    assert (attempt / "filtered_stderr.log").read_text() == "[default2]:error 2\n"
    train = (run.run_dir / "train.log").read_text().splitlines()
    assert sorted(train[:4]) == [" iteration 1/ 2 loss 0", "chat 0", "error 0", "validation loss 0"]
    assert train[-1] == " iteration 2/ 2 loss 1", "the writer's lines are there, redirected or not"


def test_what_a_teed_rank_printed_is_kept_until_the_console_has_had_it(tmp_path: Path) -> None:
    """And what had no room is noted where it is missing, once."""
    made, descriptor = create(tmp_path / "log"), create_output_bookmark()
    ours = reading(bookmark=OutputBookmark(descriptor))
    tee = Tee("[default5]:", is_error=False)
    try:
        os.write(made.descriptor, b"x" * 10_000 + b"\nlast\n")
        ours.add(0, made, shown_of=None, tee=tee)
        OutputBookmark(descriptor).drop({0: made}, 1000, Who.LAUNCHER, why=Why.RECORDER, read={Reader.TEED: {0}})
        [*notes, (_, rest), last] = list(ours.teed())
        assert last == (tee, "last") and not rest.strip("x")
        assert [line for _, line in notes] == lost(10_001 - len(rest) - 1, Why.RECORDER).decode().splitlines()
        assert list(ours.teed()) == [] and list(ours.teed(at_end=True)) == [] and ours.num_unshown == 0
    finally:
        ours.writer.close(20.0)


def test_the_rank_that_failed_first_has_the_first_word_at_the_end(
    record: Callable[..., Run], capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank whose loss was survived comes after those whose loss ended the job, whatever its number is.

    After a crash in native code the beginning of its stack is told.
    """
    run = record(num_replicas=4)
    outputs = [run.output(replica) for replica in range(4)]
    ring = run.rank(3)
    run.until_it_records()
    stack = "".join(f'  File "a.py", line {number}\n' for number in range(20))
    crash = f"chat\nmore chat\ndouble free\nFatal Python error: Aborted\n\n{stack}"
    for replica, said in enumerate((crash, "Error: a consequence", "killed in silence", "chat")):
        os.write(outputs[replica].descriptor, f"{said}\n".encode())
    run.recording.record(trace.Failure(replica=0, rank=0, cause="exit code 1"))
    ring.record(trace.Recovery(replica=3, generation=2, step=1, phase="commit", seconds=0.1))
    run.recording.record(trace.Failure(replica=2, rank=0, cause="SIGKILL"))
    run.recording.record(trace.Failure(replica=1, rank=0, cause="exit code 1"))
    run.recording.finish(ExitCode.FAILED, "all have failed")
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("---", "    "))]
    name = str(run.run_dir / "logs" / "replica-{}-rank-0.log")
    assert told == [
        f"--- end of {name.format(2)}", "    killed in silence",
        f"--- end of {name.format(1)}", "    Error: a consequence",
        f"--- end of {name.format(0)}", "    more chat", "    double free", "    Fatal Python error: Aborted", "    ",
        *(f'      File "a.py", line {number}' for number in range(8)),
    ]  # fmt: skip


@pytest.mark.parametrize("reader", Reader)
def test_what_waits_for_the_console_alone_counts_as_waiting(reader: Reader, tmp_path: Path) -> None:
    made, bookmark = create(tmp_path / "log"), OutputBookmark(create_output_bookmark())
    os.write(made.descriptor, b"x" * 10_000)
    end = bookmark.end(0, made)
    bookmark.commit(0, Copied(end, 10_000))
    bookmark.drop({0: made}, 1000, Who.RECORDER)
    assert bookmark.lost(0) == 0, "nobody waits for it"
    bookmark.drop({0: made}, 1000, Who.RECORDER, read={reader: {0}})
    assert end - 1000 <= bookmark.lost(0) < end


def test_a_rank_that_a_filter_names_is_shown_in_whatever_replica_it_is() -> None:
    """Of two replicas of two ranks the last rank prints the iterations: of the first replica, and then of its successor."""
    filtered = Streams(shown=frozenset({3}))
    shown = [filtered.is_on_console(place, Stream.OUT, alike=(place % 2, place % 2 + 2)) for place in range(4)]
    assert shown == [False, True, False, True]
