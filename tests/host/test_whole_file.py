"""A file is whole or not there, and an error says which file it is about."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron_recover.host import whole_file
from megatron_recover.host.whole_file import replacing


def test_what_fails_in_the_middle_leaves_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("before")
    with pytest.raises(OSError, match="No space") as found, replacing(place) as file:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert found.value.filename == str(place) and place.read_text() == "before" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "error", [OSError("rank 1: No space left on device"), OSError(errno.EIO, "Input/output error", "another file")], ids=str
)
def test_an_error_that_says_what_it_is_about_keeps_its_words(error: OSError, tmp_path: Path) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(OSError) as found, replacing(tmp_path / "file", before_naming=fails) as file:
        file.write(b"whole")
    assert found.value is error and os.listdir(tmp_path) == []
    with pytest.raises(OSError) as found, replacing(tmp_path / "file"):
        raise error
    assert found.value is error


def test_a_link_stays_a_link_unless_the_place_of_the_partial_file_is_given(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    place, target = tmp_path / "link", tmp_path / "elsewhere" / "file"
    place.symlink_to(target)
    with replacing(place) as file:
        file.write(b"first")
    assert place.is_symlink() and target.read_text() == "first"
    with replacing(place, partial=tmp_path / "link.partial", durable=True) as file:
        file.write(b"second")
    assert not place.is_symlink() and place.read_text() == "second" and target.read_text() == "first"


def test_a_folder_that_is_not_there_is_named_by_the_file(tmp_path: Path) -> None:
    place = tmp_path / "none" / "file"
    with pytest.raises(FileNotFoundError) as found, replacing(place):
        pass
    assert found.value.filename == str(place)


def test_a_link_with_the_name_of_the_file_that_is_written_leads_nowhere(tmp_path: Path) -> None:
    """In a folder where others may write, that name can be guessed."""
    (victim := tmp_path / "victim").write_text("mine")
    place, partial = tmp_path / "x", tmp_path / f".x.{os.getpid()}"
    partial.symlink_to(victim)
    with replacing(place, partial=partial) as file:
        file.write(b"text")
    assert (victim.read_text(), place.read_text(), place.is_symlink()) == ("mine", "text", False)


def test_processes_of_two_hosts_with_one_number_do_not_share_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers all process ids are small. One host would give the other's half of a file its name."""
    place = tmp_path / "index.npy"
    monkeypatch.setattr(whole_file, "host_name", lambda: "a")
    with replacing(place) as first:
        first.write(b"whole ")
        first.flush()
        monkeypatch.setattr(whole_file, "host_name", lambda: "b")
        with replacing(place) as second:
            second.write(b"whole file")
        assert place.read_bytes() == b"whole file"
        first.write(b"file")
    assert place.read_bytes() == b"whole file"
    assert [each.name for each in tmp_path.iterdir()] == ["index.npy"]
