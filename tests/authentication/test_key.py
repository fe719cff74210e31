"""The job's key: sealed, handed down by descriptor, never shown."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from megatron_recover import config
from megatron_recover.authentication import key
from megatron_recover.cluster import renewed


@pytest.fixture
def inherited(monkeypatch: pytest.MonkeyPatch):  # noqa: ANN201
    def inherit(descriptor: int) -> None:
        monkeypatch.setenv(config._DESCRIPTORS_VARIABLE, msgspec.json.encode({key.DESCRIPTOR: descriptor}).decode())

    return inherit


def test_a_rank_reads_the_key_that_the_launcher_sealed(inherited) -> None:  # noqa: ANN001
    made = key.make_key()
    descriptor = key.sealed(made)
    inherited(descriptor)
    assert made != key.make_key()
    for write in (lambda: os.pwrite(descriptor, b"x", 0), lambda: os.ftruncate(descriptor, 0)):
        with pytest.raises(PermissionError):
            write()
    assert os.fstat(descriptor).st_mode & 0o077 == 0
    assert not os.get_inheritable(descriptor)
    assert key.inherited_key() == made
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    with pytest.raises(RuntimeError, match="megatron-recover run"):
        key.inherited_key()


def test_without_a_key_nothing_starts(inherited, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    monkeypatch.delenv(config._DESCRIPTORS_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="megatron-recover run"):
        key.inherited_key()
    short = key.sealed(b"short")
    inherited(short)
    with pytest.raises(RuntimeError, match="5 bytes"):
        key.inherited_key()
    os.close(short)
    unsealed = os.memfd_create("key")
    inherited(unsealed)
    with pytest.raises(RuntimeError):
        key.inherited_key()
    os.close(unsealed)


TEXT = base64.b64encode(bytes(range(32)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A key file as the command in the messages makes one."""
    path = tmp_path / "key"
    path.write_bytes(TEXT + b"\n")
    path.chmod(0o600)
    return path


def test_all_nodes_derive_the_same_key_from_a_file_and_from_the_variable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = key.key_of_several(file)
    assert len(made) == key.KEY_BYTES and made == hashlib.blake2b(TEXT, digest_size=32, person=b"recover job key").digest()
    monkeypatch.setenv(config.KEY_VARIABLE, f"  {TEXT.decode()}\n")
    assert key.key_of_several(None) == made
    monkeypatch.setenv(config.KEY_VARIABLE, "another key".ljust(40, "x"))
    assert key.key_of_several(None) != made and key.key_of_several(file) == made, "the flag comes before the variable"
    link = file.with_name("link")
    link.symlink_to(file)
    file.chmod(0o400)
    assert key.key_of_several(link) == made


def test_the_command_in_the_messages_makes_a_file_that_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.KEY_VARIABLE, raising=False)
    with pytest.raises(ValueError) as refusal:
        key.key_of_several(None)
    assert str(refusal.value) == (
        "a job of several nodes needs a key that all of them have; make one by `head -c 32 /dev/urandom | base64 > FILE; "
        "chmod 600 FILE`, and give --key-file FILE on every node"
    )
    command = str(refusal.value).split("`")[1].replace("FILE", str(tmp_path / "new"))
    subprocess.run(["sh", "-c", command], check=True, timeout=30)
    assert len(key.key_of_several(tmp_path / "new")) == key.KEY_BYTES


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666, 0o601])
def test_a_file_that_others_may_use_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ValueError) as refusal:
        key.key_of_several(file)
    assert str(refusal.value) == f"--key-file {file} has mode {mode:04o}, so others may know it; chmod 600 {file}"


def test_a_file_of_another_user_is_refused(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(file, 4242, -1)
    with pytest.raises(
        ValueError, match="belongs to user 4242, and not to user 0, who starts the job; give a file of your own"
    ):
        key.key_of_several(file)


def test_what_is_no_file_is_refused_and_blocks_nobody(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe", 0o600)
    for path in (pipe, tmp_path, Path("/dev/null")):
        with pytest.raises(ValueError, match="is no regular file; make one by"):
            key.key_of_several(path)
    with pytest.raises(
        ValueError, match=rf"absent cannot be read \(No such file.*\); make one by `head .* > {tmp_path}/absent; "
    ):
        key.key_of_several(tmp_path / "absent")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "has 0 characters, and a key needs at least 32; make one by `head"),
        (b"x" * 31 + b"\n" * 9, "has 31 characters, and a key needs at least 32"),
        (b"x" * 4097, "has more than 4096 bytes, so it is no key"),
    ],
)
def test_a_text_that_is_no_key_is_refused(file: Path, text: bytes, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(text)
    with pytest.raises(ValueError, match=f"--key-file {file} {expected}"):
        key.key_of_several(file)
    if len(text) < 4096:
        monkeypatch.setenv(config.KEY_VARIABLE, text.decode())
        with pytest.raises(ValueError, match=f"MEGATRON_RECOVER_KEY {expected}.*"):
            key.key_of_several(None)


def test_another_file_cannot_take_the_place_of_the_one_that_was_judged(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of the path would judge one file, and read another that a stranger has put there meanwhile."""
    made, theirs = key.key_of_several(file), file.with_name("theirs")
    theirs.write_bytes(b"known to a stranger".ljust(40))
    theirs.chmod(0o644)
    opened = os.open

    def swap(path: Path, flags: int) -> int:
        descriptor = opened(path, flags)
        shutil.move(theirs, file)
        return descriptor

    monkeypatch.setattr(key.os, "open", swap)
    assert key.key_of_several(file) == made


def test_no_process_that_runs_code_of_the_user_inherits_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks get the first environment, a script that is measured the second, and the command of --on-event the monitor's."""
    monkeypatch.setenv(config.KEY_VARIABLE, TEXT.decode())
    monkeypatch.setenv("KEPT", "1")
    started: list[dict[str, str]] = []

    class Started:
        def __init__(self, command: object, *, env: dict[str, str], **_: object) -> None:
            started.append(env)

    monkeypatch.setattr(renewed.subprocess, "Popen", Started)
    _, ours = renewed.start("some.module", [], Settings())
    ours.close()
    for environment in (config.inherited_environment(), config.alone_without_gpu(), *started):
        assert config.KEY_VARIABLE not in environment and environment["KEPT"] == "1"
    assert len(started) == 1


class Settings(msgspec.Struct):
    """Settings of a process that is never started."""
