"""The command line's face: instant help, verbs found, mistakes answered with the remedy and exit code 2."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_recover import cli, trace
from megatron_recover.cli.run_dirs import no_trace
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.observe.report import writing as report
from megatron_recover.trace import event_files
from tests.observe import traces
from tests.unprivileged import NOBODYS, run_verb


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "megatron_recover", *arguments], capture_output=True, text=True, timeout=60)


def test_help_is_instant_and_names_every_verb() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = _run("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{seconds:.2f} CPU-seconds")
    assert done.returncode == 0
    assert [verb for verb in cli.VERBS if verb not in done.stdout] == []
    assert "examples:" in done.stdout
    # The promise, which on an idle machine is one of time; what keeps it is the next test.
    assert seconds < 0.5


@pytest.mark.parametrize("verb", ["", *cli.VERBS])
def test_help_of_every_verb_imports_no_torch(verb: str) -> None:
    arguments = [verb, "--help"] if verb else ["--help"]
    code = (
        "import sys\nfrom megatron_recover.cli import main\n"
        f"try:\n    code = main({arguments!r})\nexcept SystemExit as end:\n    code = end.code\n"
        "heavy = [name for name in ('torch', 'megatron', 'matplotlib', 'numpy') if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: megatron-recover" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["chekc", "runs/a"], "did you mean check?"),
        (
            ["fly"],
            "verbs are run, doctor, plan, demo, check, report, top, status, drain, scale, simulate, explain, data, sbatch, "
            "verdict",
        ),
        (["check"], "RUN_DIR"),
        (["check", "/nowhere"], "give the --run-dir of a run"),
        (["report", "/nowhere"], "give the --run-dir of a run"),
        (["report", __file__], "give the --run-dir of a run"),
        (["check", f"{__file__}/x"], "give the --run-dir of a run"),
        (["demo", "--run-dir", __file__], "cannot be used (a file stands where a folder is meant); give another folder"),
        (["demo", "--run-dir", f"{__file__}/x"], "cannot be used (a file stands where a folder is meant); give another folder"),
        (["demo", "--run-dir", "/proc/x"], "cannot be used (No such file or directory); give another folder"),
        (["check", "x" * 300], "cannot be read (File name too long): give the --run-dir of a run"),
        (["report", "x" * 300], "cannot be read (File name too long): give the --run-dir of a run"),
        (["top", "x" * 300], "cannot be read (File name too long): give the --run-dir of a run"),
        ([], ""),
    ],
)
def test_mistakes_are_answered_with_the_remedy(arguments: list[str], remedy: str) -> None:
    done = _run(*arguments)
    assert done.returncode == ExitCode.BAD_INPUT
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_gone_and_an_interrupt_are_no_tracebacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = traces.write(tmp_path, traces.faulty_run().events)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "megatron_recover", "check", str(run_dir), "--json"]
    for environment in ({"PYTHONUNBUFFERED": "1"}, {"PYTHONUNBUFFERED": ""}):  # it is noticed at the print, and at the end
        done = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, env=os.environ | environment
        )
        assert done.stderr == ""
        assert done.returncode == (128 + signal.SIGPIPE if environment["PYTHONUNBUFFERED"] else 0)
    os.close(writer)

    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    for where in ("megatron_recover.cli.check.main", "importlib.import_module"):
        with monkeypatch.context() as patch:
            patch.setattr(where, interrupted)
            assert cli.main(["check", str(run_dir)]) == 128 + signal.SIGINT
        assert capsys.readouterr().err == "megatron-recover check: interrupted\n"


def test_version() -> None:
    assert _run("--version").stdout.startswith("megatron-recover ")


def test_check_passes_a_valid_run_and_names_what_breaks_another(tmp_path: Path) -> None:
    events = traces.faulty_run().events
    good = traces.write(tmp_path / "good", events)
    reference = traces.write(tmp_path / "reference", traces.quiet_run().events)
    done = _run("check", str(good), "--against", str(reference))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parameters bit-identical" in done.stdout

    vote = next(index for index, event in enumerate(events) if isinstance(event, trace.Voted))
    commit = next(index for index, event in enumerate(events) if isinstance(event, trace.Committed))
    bad = traces.write(tmp_path / "bad", events[:vote] + events[vote + 1 :])
    done = _run("check", str(bad))
    assert done.returncode == ExitCode.INVARIANT_VIOLATED
    assert "INV-2" in done.stdout and f"line {commit}: " in done.stdout and '"event":"committed"' in done.stdout
    verdict = json.loads(_run("check", str(bad), "--json").stdout)
    assert verdict["holds"] is False
    assert {one["invariant"] for one in verdict["violations"]} == {"INV-2"}


def test_check_of_a_run_without_an_end_is_no_success(tmp_path: Path) -> None:
    run_dir = traces.write(tmp_path / "run", traces.quiet_run().events[:-1])
    done = _run("check", str(run_dir))
    assert done.returncode == ExitCode.UNFINISHED
    assert "UNFINISHED: " in done.stdout
    verdict = json.loads(_run("check", str(run_dir), "--json").stdout)
    assert (verdict["holds"], verdict["finished"]) == (True, False)


@pytest.mark.parametrize("verb", ["check", "report"])
def test_the_folder_of_several_runs_is_answered_with_them(verb: str, tmp_path: Path) -> None:
    for name in ("faulty", "reference"):
        traces.write(tmp_path / name, traces.quiet_run().events)
    done = _run(verb, str(tmp_path))
    assert done.returncode == ExitCode.BAD_INPUT
    assert f"did you mean {tmp_path / 'faulty'} or {tmp_path / 'reference'}?" in done.stderr


def test_of_many_runs_a_few_are_named(tmp_path: Path) -> None:
    for number in range(4):
        traces.write(tmp_path / str(number), traces.quiet_run().events)
    assert no_trace(tmp_path).endswith(f"{tmp_path / '1'} or {tmp_path / '2'}? (1 more beside them)")


def test_a_command_that_is_printed_works_when_it_is_pasted(tmp_path: Path) -> None:
    run_dir = traces.write(tmp_path / "a run", traces.quiet_run().events)
    done = subprocess.run(cli.command_line("check", str(run_dir)), shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_help_and_document_give_every_reason_why_a_run_does_not_count_as_proven(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["check", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    written = Path(__file__).resolve().parents[2].joinpath("docs/reference/exit_codes.md").read_text()
    reasons = "two exact runs differ, the run ended without a step, the trace lacks its start, or a trace with its end cannot "
    reasons += "be compared with the reference. "
    assert f" 14: an invariant is broken, {reasons}2: " in said
    assert f"| of `check` and `demo`: an invariant is broken, {reasons}Of `run`: " in written


def test_check_of_a_damaged_log_names_line_and_field(tmp_path: Path) -> None:
    run_dir = traces.write(tmp_path, traces.faulty_run().events)
    log = run_dir / trace.EVENTS_FILE
    log.write_text(log.read_text().replace('"replicas":3', '"replicas":"three"', 1))
    done = _run("check", str(run_dir))
    assert done.returncode == ExitCode.BAD_INPUT
    assert "events.jsonl:1: " in done.stderr and "$.replicas" in done.stderr


def test_report_refuses_places_where_nothing_can_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = str(traces.write(tmp_path, traces.quiet_run().events))
    for flag, out, remedy in (
        ("--out", "/nowhere/page.html", "--out: there is no folder /nowhere; make it, or give another place"),
        ("--out", "/", "--out: / is a folder; give the page's file, for example /report.html"),
        ("--out", "/proc/page.html", "/proc/page.perfetto.json cannot be read or written (No such file or directory); "),
        ("--against", "/nowhere", "--against: no trace at /nowhere; give the --run-dir of a run"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["report", run_dir, flag, out])
        assert end.value.code == ExitCode.BAD_INPUT
        assert f"megatron-recover report: {remedy}" in capsys.readouterr().err


def test_report_says_that_the_trace_was_cut_and_writes_nothing_but_what_it_was_asked_for(tmp_path: Path) -> None:
    run_dir = traces.write(tmp_path / "run", traces.faulty_run().events)
    events = run_dir / "events.jsonl"
    events.write_bytes(events.read_bytes()[:-20])
    place = tmp_path / "page.html"
    (tmp_path / "summary.json").write_text("another run's")
    done = _run("report", str(run_dir), "--out", str(place))
    assert done.returncode == 0 and "of the trace was cut short" in done.stderr
    assert done.stdout == f"wrote {place} and {tmp_path / 'page.perfetto.json'}\n"
    assert (tmp_path / "summary.json").read_text() == "another run's"
    assert sorted(path.name for path in run_dir.iterdir()) == ["events.jsonl"]
    assert "page.perfetto.json" in place.read_text()


@pytest.mark.parametrize("verb", ["check", "report", "top"])
def test_the_trace_itself_is_as_good_as_its_folder(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = traces.write(tmp_path / "run", traces.quiet_run(1).events)
    said = []
    for place in (run_dir, run_dir / trace.EVENTS_FILE):
        assert cli.main([verb, str(place)]) == ExitCode.OK
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""
    with pytest.raises(SystemExit):
        cli.main([verb, str(tmp_path / "other" / trace.EVENTS_FILE)])
    assert f"no trace at {tmp_path / 'other' / trace.EVENTS_FILE};" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["check", "report", "top"])
@pytest.mark.parametrize("locked", [trace.EVENTS_FILE, ".", ".."])
def test_a_trace_that_only_its_owner_may_read_is_named(verb: str, locked: str, tmp_path: Path) -> None:
    run_dir = traces.write(tmp_path / "private" / "run", traces.quiet_run(1).events)
    place = run_dir / locked
    mode = place.stat().st_mode
    place.chmod(NOBODYS)
    try:
        done = run_verb(verb, str(run_dir))
    finally:
        place.chmod(mode)
    assert (done.returncode, done.stdout) == (ExitCode.BAD_INPUT, "")
    assert done.stderr.startswith(f"megatron-recover {verb}: cannot read the trace: {run_dir}")
    assert done.stderr.endswith(" cannot be read (Permission denied): only its owner may read it\n")


def _in_parts(folder: Path, *numbers: int, whole: bool) -> Path:
    """Write a trace in which only the parts of these numbers are there, and the newest one where it is `whole`."""
    run_dir = traces.write(folder, traces.quiet_run(1).events)
    lines = (run_dir / trace.EVENTS_FILE).read_bytes().splitlines(keepends=True)
    for number, line in zip(numbers, lines, strict=False):
        event_files.part(run_dir, number).write_bytes(line if whole else b"".join(lines))
    (run_dir / trace.EVENTS_FILE).write_bytes(b"".join(lines[len(numbers) :]))
    if not whole:
        (run_dir / trace.EVENTS_FILE).unlink()
    return run_dir


@pytest.mark.parametrize("verb", ["check", "report", "top"])
@pytest.mark.parametrize(("numbers", "whole"), [((2,), True), ((2,), False), ((1, 3), True)])
def test_a_trace_without_one_of_its_parts_names_it(
    verb: str, numbers: tuple[int, ...], whole: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = _in_parts(tmp_path / "run", *numbers, whole=whole)
    with pytest.raises(SystemExit) as end:
        cli.main([verb, str(run_dir)])
    assert end.value.code == ExitCode.BAD_INPUT
    number = 1 if 1 not in numbers else 2
    assert capsys.readouterr().err == (
        f"megatron-recover {verb}: cannot read the trace: part {number} is missing: there is no "
        f"{run_dir}/events.000{number}.jsonl.gz; put it back\n"
    )


@pytest.mark.parametrize("verb", ["check", "report", "top"])
def test_a_trace_is_one_without_its_newest_part(verb: str, tmp_path: Path) -> None:
    assert cli.main([verb, str(_in_parts(tmp_path / "run", 1, whole=False))]) == ExitCode.OK


@pytest.mark.parametrize("verb", ["check", "report", "top"])
def test_a_disk_that_fails_while_a_trace_is_read_is_named(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = traces.write(tmp_path / "run", traces.quiet_run(1).events)

    class Failing(io.RawIOBase):
        """A file whose disk answers no read: the error names no file."""

        def __init__(self, path: Path) -> None:
            super().__init__()
            self.file = open(path, "rb")  # noqa: SIM115

        def fileno(self) -> int:
            return self.file.fileno()

        def seekable(self) -> bool:
            return True

        def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
            return self.file.seek(offset, whence)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def close(self) -> None:
            self.file.close()
            super().close()

    monkeypatch.setattr(event_files, "open", lambda path, mode: io.BufferedReader(Failing(path)), raising=False)
    with pytest.raises(SystemExit) as end:
        cli.main([verb, str(run_dir)])
    assert end.value.code == ExitCode.BAD_INPUT
    assert capsys.readouterr().err == (
        f"megatron-recover {verb}: cannot read the trace: {run_dir / trace.EVENTS_FILE} cannot be read (Input/output error): "
        "see to its disk\n"
    )


def test_report_on_a_full_disk_says_so_and_leaves_what_was_there(tmp_path: Path) -> None:
    run_dir = traces.write(tmp_path / "run", traces.faulty_run().events)
    report.write(run_dir)
    (tmp_path / "elsewhere").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    for flags, first in (([], run_dir / "perfetto.json"), (["--out", "page.html"], "page.perfetto.json")):
        # A write past the limit fails as one on a full disk does: with an error that knows no file name.
        done = subprocess.run(
            [sys.executable, "-m", "megatron_recover", "report", str(run_dir), *flags], cwd=tmp_path / "elsewhere",
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)), capture_output=True, text=True,
            timeout=60, env={**os.environ, "PYTHONPATH": os.getcwd()},
        )  # fmt: skip
        remedy = "cannot be read or written (File too large); make room for it, or write elsewhere by --out"
        assert (done.returncode, done.stderr) == (ExitCode.BAD_INPUT, f"megatron-recover report: {first} {remedy}\n")
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


def test_report_writes_its_files_and_names_them(tmp_path: Path) -> None:
    run_dir = traces.write(tmp_path, traces.faulty_run().events)
    done = _run("report", str(run_dir))
    assert done.returncode == 0, done.stderr
    places = [str(run_dir / name) for name in ("report.html", "perfetto.json", "summary.json", "loss.svg")]
    assert done.stdout == f"wrote {', '.join(places[:-1])} and {places[-1]}\n"
    assert (run_dir / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 5
    assert (run_dir / "loss.svg").read_text().startswith("<?xml")
