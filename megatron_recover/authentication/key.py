"""The key of a job, which every rank inherits by a descriptor.

The launcher of a job on one machine makes a random key. The nodes of a job of several derive the
same key from a text that its user gives to all of them.

The descriptor is an anonymous file in memory that is sealed against every change. The file has no
name. The kernel lets only processes that may trace the rank open it by /proc. So neither arguments
nor environment of a rank nor any file of the run contain the key.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import stat
from pathlib import Path

from megatron_recover.authentication.handshake import KEY_BYTES
from megatron_recover.config import KEY_VARIABLE, inherited_descriptor, key_text
from megatron_recover.host import memory_file

DESCRIPTOR = "key"
"""Name under which ranks inherit the descriptor."""
LEAST_CHARACTERS = 32
"""Length of the shortest text from which a key is derived. 32 random bytes in base64 have 44."""
_MOST_BYTES = 4096
_PURPOSE = b"recover job key"
"""Personalization of the hash: the same text used elsewhere gives another key."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def make_key() -> bytes:
    """Return a new random key."""
    return secrets.token_bytes(KEY_BYTES)


def key_of_several(file: Path | None) -> bytes:
    """Return the key of a job of several nodes, from `--key-file` or else from `KEY_VARIABLE`.

    Raises ValueError with the remedy if there is neither, if others than this user could have read
    or written the file, or if the text is too short.
    """
    text, source = (key_text(), KEY_VARIABLE) if file is None else (_read(file), f"--key-file {file}")
    if text is None:
        raise ValueError(
            "a job of several nodes needs a key that all of them have; make one by `"
            f"{_command('FILE')}`, and give --key-file FILE on every node"
        )
    text = text.strip()
    if len(text) < LEAST_CHARACTERS:
        raise ValueError(
            f"{source} has {len(text)} characters, and a key needs at least {LEAST_CHARACTERS}; make one by "
            f"`{_command(file or 'FILE')}`" + ("" if file else ", and give --key-file FILE on every node instead")
        )
    return hashlib.blake2b(text, digest_size=KEY_BYTES, person=_PURPOSE).digest()


def _read(file: Path) -> bytes:
    """Return the contents of `--key-file`.

    The file is judged by its open descriptor: no other file can take its place in between. Raises
    ValueError with the remedy.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe without a writer would block
    except OSError as error:
        raise ValueError(f"--key-file {file} cannot be read ({error.strerror}); make one by `{_command(file)}`") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"--key-file {file} is no regular file; make one by `{_command('FILE')}`")
        if found.st_uid != os.geteuid():
            raise ValueError(
                f"--key-file {file} belongs to user {found.st_uid}, and not to user {os.geteuid()}, who starts the job; give a "
                "file of your own"
            )
        if found.st_mode & 0o077:
            raise ValueError(
                f"--key-file {file} has mode {stat.S_IMODE(found.st_mode):04o}, so others may know it; chmod 600 {file}"
            )
        text = os.read(descriptor, _MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(text) > _MOST_BYTES:
        raise ValueError(
            f"--key-file {file} has more than {_MOST_BYTES} bytes, so it is no key; make one by `{_command('FILE')}`"
        )
    return text


def _command(file: Path | str) -> str:
    """Return the command that makes a file with a new key."""
    return f"head -c 32 /dev/urandom | base64 > {file}; chmod 600 {file}"


def sealed(key: bytes) -> int:
    """Return a descriptor of a sealed file in memory that contains `key`. The caller closes it.

    Raises OSError.
    """
    descriptor = memory_file.create("megatron-recover-key")
    os.fchmod(descriptor, 0o400)
    os.write(descriptor, key)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def inherited_key() -> bytes:
    """Return the key that this rank inherited, and close its descriptor.

    Called once in a process. Raises RuntimeError if this process inherited no key, or no sealed
    one of `KEY_BYTES` bytes.
    """
    descriptor = inherited_descriptor(DESCRIPTOR)
    if descriptor is None:
        raise RuntimeError("this process inherited no job key; start it by `megatron-recover run`")
    return read_sealed(descriptor)


def read_sealed(descriptor: int) -> bytes:
    """Return the key in a sealed file of `sealed`, and close the descriptor.

    Raises RuntimeError if the file is not sealed, or has no key of `KEY_BYTES` bytes.
    """
    try:
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # closed, or no such file
        is_sealed = False
    if not is_sealed:
        raise RuntimeError(f"descriptor {descriptor} is not the sealed job key; start this process by `megatron-recover run`")
    key = os.pread(descriptor, KEY_BYTES + 1, 0)
    if len(key) != KEY_BYTES:
        raise RuntimeError(f"the inherited job key has {len(key)} bytes instead of {KEY_BYTES}")
    os.close(descriptor)
    return key
