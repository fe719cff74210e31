"""The job's key: sealed, handed down by descriptor, never shown."""

from __future__ import annotations

import os

import msgspec
import pytest

from megatron_recover import config
from megatron_recover.authentication import key


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
