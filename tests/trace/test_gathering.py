"""The files of another node come to node 0 whole or not at all, and never land anywhere else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from megatron_recover.trace import gathering
from megatron_recover.trace.gathering import FilePart, Gatherer, Refused, packed

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The folder of node 1 on its own disk."""
    folder = tmp_path / "there" / "nodes" / "1"
    (folder / "logs").mkdir(parents=True)
    (folder / "events.jsonl").write_bytes(b"newest\n" * 400_000)
    (folder / "events.0001.jsonl.gz").write_bytes(os.urandom(1000))
    (folder / "launcher.log").write_bytes(b"")
    (folder / "logs" / "replica-1-rank-0.stdout.log").write_bytes(b"said")
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_files_arrive_in_parts_and_belong_to_their_owner_only(there: Path, run_dir: Path) -> None:
    expected = content(there)
    (there / "core.1234").write_bytes(b"large")
    (there / "logs" / "latest.log").symlink_to("/etc/passwd")
    assert gathering.is_missing(run_dir, 1)
    gatherer = Gatherer(run_dir, 1)
    parts = list(packed(there))
    assert max(len(part.data) for part in parts) <= gathering.PART_BYTES < 2_800_000
    assert parts[-1].name == "events.jsonl", "a trace that comes in part is seen to be cut"
    for part in parts:
        gatherer.take(part)
    gatherer.close()
    assert content(run_dir / "nodes" / "1") == expected and not gathering.is_missing(run_dir, 1)
    for path in (run_dir / "nodes").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    with pytest.raises(Refused, match="already"):
        Gatherer(run_dir, 1)


def test_a_file_that_is_not_whole_has_no_name(there: Path, run_dir: Path) -> None:
    gatherer = Gatherer(run_dir, 1)
    for part in list(packed(there))[:-1]:
        gatherer.take(part)
    assert "events.jsonl" not in content(run_dir / "nodes" / "1")
    gatherer.close()
    assert sorted(content(run_dir / "nodes" / "1")) == [
        "events.0001.jsonl.gz",
        "launcher.log",
        "logs/replica-1-rank-0.stdout.log",
    ]


@pytest.mark.parametrize(
    "name",
    ["../../x.log", "/etc/x.log", "logs/../../x.log", "logs/a/b.log", "run.json", "nodes/2/events.jsonl", "logs/.log", "",
     "events.jsonl\n", "logs/\0.log", "events.jsonl.gathering"],
)  # fmt: skip
def test_no_other_name_is_written(name: str, run_dir: Path) -> None:
    with pytest.raises(Refused, match="no file of a trace"):
        Gatherer(run_dir, 1).take(FilePart(name, 1, 0, b"x"))
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize("linked", ["nodes", "nodes/1", "nodes/1/logs", "nodes/1/logs/a.log", "nodes/1/logs/a.log.gathering"])
def test_no_link_is_followed(linked: str, run_dir: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    place = run_dir / linked
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(outside / "target" if place.suffix else outside)
    with pytest.raises((Refused, OSError)):
        Gatherer(run_dir, 1).take(FilePart("logs/a.log", 1, 0, b"x"))
    assert not any(path.is_file() for path in outside.rglob("*"))


@pytest.mark.parametrize(
    "second",
    [
        {"offset": 0}, {"offset": 7}, {"name": "logs/b.log"}, {"size": 9}, {"data": b"too long"}, {"data": b""},
    ],
    ids=str,
)  # fmt: skip
def test_parts_that_do_not_follow_are_refused(second: dict[str, object], run_dir: Path) -> None:
    gatherer = Gatherer(run_dir, 1)
    gatherer.take(FilePart("logs/a.log", 8, 0, b"1234"))
    with pytest.raises(Refused, match="node 1"):
        gatherer.take(replace(FilePart("logs/a.log", 8, 4, b"5678"), **second))
    gatherer.close()
    assert content(run_dir) == {}


def test_no_more_is_taken_than_node_0_allows(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gatherer = Gatherer(run_dir, 1, max_bytes=10)
    gatherer.take(FilePart("logs/a.log", 6, 0, b"123456"))
    with pytest.raises(Refused, match="more than node 0 takes"):
        gatherer.take(FilePart("logs/b.log", 6, 0, b"123456"))
    monkeypatch.setattr(gathering, "MAX_FILES", 1)
    with pytest.raises(Refused, match="more than node 0 takes"):
        gatherer.take(FilePart("logs/b.log", 1, 0, b"1"))


def test_no_file_is_written_over(run_dir: Path) -> None:
    gatherer = Gatherer(run_dir, 1)
    gatherer.take(FilePart("logs/a.log", 1, 0, b"1"))
    with pytest.raises(Refused, match="there already"):
        gatherer.take(FilePart("logs/a.log", 1, 0, b"2"))


def test_node_0_is_never_written_to(run_dir: Path) -> None:
    with pytest.raises(Refused):
        Gatherer(run_dir, 0)
