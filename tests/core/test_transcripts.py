"""Histories of the protocol, each a text that a person has written the commands of.

Every file of `transcripts/` is one test: what each command prints is what the file says. After a
change that is meant, `pytest tests/core/test_transcripts.py --update` rewrites the files; read the
difference before you commit it. CONTRIBUTING.md says how to write one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recover.core import invariants
from megatron_recover.core.invariants import InvariantViolation
from tests.core.transcript import COMMANDS, list_commands, rewrite
from tests.core.transcript_job import Mistake

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transcript(path: Path, pytestconfig: pytest.Config) -> None:
    text = path.read_text()
    now = rewrite(text, f"tests/core/transcripts/{path.name}")
    if pytestconfig.getoption("--update"):
        if now != text:
            path.write_text(now)
        return
    assert now.splitlines() == text.splitlines(), f"{path.name} has changed; if it should, run this test with --update"


def test_transcripts_use_every_command() -> None:
    used = {line.split()[0] for path in FILES for line in path.read_text().splitlines() if line and line[0].isalpha()}
    assert set(COMMANDS) <= used


JOB = "job replicas=2 microbatches=2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("begn\n", "x.txt:1: begn: there is no command 'begn'"),
        ("begin\n", "x.txt:1: begin: a transcript begins with the command 'job'"),
        ("# A comment.\njob replicas=2\n", "x.txt:2: job replicas=2: the arguments of 'job' are wrong: missing a required"),
        (JOB + "deliver form=1\n", "x.txt:2: deliver form=1: the arguments of 'deliver' are wrong: got an unexpected"),
        (JOB + "----\nold output\n\nkill one\n", "x.txt:5: kill one: the arguments of 'kill' are wrong: invalid literal"),
        (JOB + "begin 0\n", "x.txt:2: begin 0: replica 0 cannot begin a step"),
        (JOB + "kill 2\n", "x.txt:2: kill 2: there is no replica 2"),
        (JOB + "kill 1\nkill 1\n", "x.txt:3: kill 1: replica 1 is dead"),
        (JOB + "begin work=rest\n", "x.txt:2: begin work=rest: the work of a step is 'train' or 'save', not 'rest'"),
        (JOB + "timer grace\n", "x.txt:2: timer grace: no timer 'grace' runs; these do: none"),
    ],
)
def test_a_mistake_is_shown_with_its_line_and_the_commands(text: str, message: str) -> None:
    with pytest.raises(Mistake) as found:
        rewrite(text, "x.txt")
    assert str(found.value).startswith(message)
    assert list_commands() in str(found.value)


def test_output_is_inserted_and_replaced_and_comments_stay() -> None:
    bare = f"# A job.\n\n{JOB}\n# Nobody lives.\nkill 0\nkill 1\n"
    once = rewrite(bare, "x.txt")
    assert once.startswith(f"# A job.\n\n{JOB}----\nShape num_ranks=1 bucket_ranks=(0)\n\n# Nobody lives.\nkill 0\n----\n")
    assert rewrite(once, "x.txt") == once


def test_what_a_machine_raises_is_shown_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def violate(*_: object) -> None:
        raise InvariantViolation(6, "planted")

    monkeypatch.setattr(invariants, "observe", violate)
    with pytest.raises(InvariantViolation) as found:
        rewrite(JOB + "start\n", "x.txt")
    assert found.value.__notes__ == ["x.txt:2: start"]
