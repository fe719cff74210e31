"""`megatron-recover data`: refuses at once, names what is wrong, and never replaces what it was not told to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_recover.cli import data
from tests.unprivileged import NOBODYS, run_verb


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        data.main(words)
    assert end.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.py").write_text("a = 1\n")
    (tmp_path / "empty.txt").touch()
    return tmp_path


def test_every_mistake_is_named_with_its_remedy(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(text / "out" / "set")
    file = str(text / "text.py")
    for words, expected in (
        ((file, "/nowhere/x"), "data: PATH /nowhere/x does not exist; correct it"),
        ((file, "/nowhere/x", "/nowhere/y"), "data: PATH /nowhere/y does not exist; correct it"),
        ((str(text), "--suffix", "py"), "--suffix py does not begin with a dot; write it like .py"),
        ((str(text), "--suffix", ".md"), f"PATH {text} has no text with --suffix .md"),
        ((str(text / "empty.txt"),), "has no text; name files that are not empty"),
    ):  # fmt: skip
        assert expected in refusal(capsys, *words, "--output", out)
    for output, expected in (
        (f"{file}/set", f"--output {file}/set cannot be written (a file stands where a folder is meant)"),
        ("/proc/nowhere/set", "--output /proc/nowhere/set cannot be written (No such file or directory)"),
        ("/", "--output / is no PREFIX"),
        ("", "--output . is no PREFIX"),
        (f"{text}/new/", f"--output {text}/new/ is no PREFIX; give a path that .bin and .idx can be added to, such as "),
        (f"{text}/.", f"--output {text}/. is no PREFIX"),
    ):
        assert expected in refusal(capsys, file, "--output", output)
    assert {path.name for path in text.iterdir()} == {"text.py", "empty.txt"}, "something was left behind"


def test_a_file_that_cannot_be_read_is_blamed_and_not_the_output(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read_bytes = text / "text.py", Path.read_bytes

    def denied(self: Path) -> bytes:  # root may read everything
        if self == file:
            raise PermissionError(13, "Permission denied", str(self))
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", denied)
    said = refusal(capsys, str(file), "--output", str(text / "set"))
    assert said == f"megatron-recover data: PATH {file} cannot be read (Permission denied); leave it out or make it readable\n"
    assert {path.name for path in text.iterdir()} == {"text.py", "empty.txt"}


@pytest.mark.parametrize(("locked", "mode"), [(".", NOBODYS), ("b", NOBODYS), ("b", 0o400), ("a/text.py", NOBODYS)])
def test_what_is_in_a_folder_and_cannot_be_read_is_not_left_out(locked: str, mode: int, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        (tmp_path / "texts" / name / "text.py").write_text("a = 1\n")
    place = tmp_path / "texts" / locked
    before = place.stat().st_mode
    place.chmod(mode)
    try:
        done = run_verb("data", str(tmp_path / "texts"), "--output", str(tmp_path / "set"))
    finally:
        place.chmod(before)
    assert done.returncode == 2 and not (tmp_path / "set.bin").exists()
    assert done.stderr.startswith(f"megatron-recover data: PATH {place}")
    assert done.stderr.endswith(" cannot be read (Permission denied); leave it out or make it readable\n")


def test_a_data_set_is_replaced_only_on_request(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(text / "text.py"), "--output", str(text / "set"))
    assert data.main(words) == 0
    before = (text / "set.bin").read_bytes(), (text / "set.idx").read_bytes()
    (text / "text.py").write_text("b = 2\n")
    said = refusal(capsys, *words)
    assert f"{text}/set.bin and {text}/set.idx would be replaced; give another PREFIX, or --overwrite" in said
    assert before == ((text / "set.bin").read_bytes(), (text / "set.idx").read_bytes())
    assert data.main((*words, "--overwrite")) == 0
    assert (text / "set.bin").read_bytes() != before[0] and (text / "set.idx").read_bytes() == before[1]
    (text / "dir.bin").mkdir()
    said = refusal(capsys, str(text / "text.py"), "--output", str(text / "dir"), "--overwrite")
    assert "dir.bin is a directory" in said


@pytest.mark.parametrize(("words", "code"), [(("/nowhere",), 2), (("--suffix", ".py"), 0)])
def test_bad_input_imports_no_torch_and_good_input_prints_no_warning(words: tuple[str, ...], code: int, text: Path) -> None:
    program = (
        "import sys\nfrom megatron_recover.cli import main\n"
        f"try:\n    code = main(['data', *{words!r}, *sys.argv[1:]])\nexcept SystemExit as end:\n    code = end.code\n"
        "assert code == 0 or not {'torch', 'megatron.core', 'numpy'} & {*sys.modules}\nsys.exit(code)"
    )
    extra = [str(text)] if code == 0 else []
    done = subprocess.run(
        [sys.executable, "-c", program, *extra, "--output", str(text / "set")], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, "warn" in done.stderr.lower()) == (code, False), done.stderr
    assert done.stderr.count("\n") == (1 if code else 0)
