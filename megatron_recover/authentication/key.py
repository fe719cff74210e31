"""The key of a job, which the launcher makes and every rank inherits by a descriptor.

The descriptor is an anonymous file in memory that is sealed against every change. The file has no
name. The kernel lets only processes that may trace the rank open it by /proc. So neither arguments
nor environment nor any file of the run contain the key.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from hashlib import blake2b
from pathlib import Path

from megatron_recover.authentication.handshake import KEY_BYTES
from megatron_recover.config import inherited_descriptor
from megatron_recover.host import memory_file

DESCRIPTOR = "key"
"""Name under which ranks inherit the descriptor."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def make_key() -> bytes:
    """Return a new random key."""
    return secrets.token_bytes(KEY_BYTES)


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


def key_of_several(key_file: Path | None) -> bytes:
    """Return the key of a job of several nodes."""
    assert key_file is not None
    return blake2b(key_file.read_bytes().strip(), digest_size=KEY_BYTES).digest()
