"""The file through which nodes find their endpoint where no node is known before (Slurm arrays).

The first node to create `FILE.owner` owns the endpoint. It starts the coordinator, and writes the
address into FILE, which the others wait for. If it cannot, it writes the reason, and they end. Both
files are for one job, and stay: a node that comes after the end of the job must not begin another
one. A job that finds the owner's file of another job waits in vain, and names it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from megatron_recover.host.addresses import host_name, parse_address
from megatron_recover.host.whole_file import replacing

_LOOK_S = 0.2
_REFUSED = "refused: "
"""First word of the file where its owner could not start the coordinator; the reason follows."""


class NoAddress(ValueError):
    """The owner of the endpoint has written no address in time."""


class OwnerRefused(ValueError):
    """The owner of the endpoint cannot start the coordinator. It alone knows if that may pass."""


def owner_file(file: Path) -> Path:
    """Return the file that only the owner of the endpoint can create."""
    return file.with_name(f"{file.name}.owner")


def claim(file: Path) -> bool:
    """Return whether this node owns the endpoint from now on. Raises ValueError with the remedy."""
    owner = owner_file(file)
    is_mine = False
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        is_mine = True
        try:
            os.write(descriptor, host_name().encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.lexists(owner):
            return False
        if is_mine:  # a full disk: others would wait for this node
            with contextlib.suppress(OSError):
                owner.unlink()
        raise ValueError(
            f"--rdzv-endpoint file:{file}: {error.filename or owner} cannot be made on node {host_name()} ({error.strerror}); "
            "name a file in a folder that all nodes see and may write"
        ) from error
    return True


def publish(file: Path, address: str) -> None:
    """Write the address of the endpoint, for the other nodes. Raises OSError."""
    with replacing(file, durable=True) as opened:
        opened.write(f"{address}\n".encode())


def refuse(file: Path, reason: str) -> None:
    """Write why this node, which has claimed the endpoint, cannot own it. Raises OSError."""
    publish(file, f"{_REFUSED}{host_name()}: {reason}")


def await_address(file: Path, patience_s: float, is_ended: Callable[[], object]) -> tuple[str, int] | None:
    """Return host and port of the endpoint once its owner has written them.

    None if `is_ended()` is truthy before. Raises `NoAddress` with the remedy after `patience_s`
    seconds, and `OwnerRefused` at once if the owner has refused.
    """
    until = time.monotonic() + patience_s
    while not is_ended():
        text = ""
        try:
            text = file.read_text().strip()
            if not text.startswith(_REFUSED):
                return parse_address(text)
        except (OSError, ValueError):
            if time.monotonic() > until:
                raise _nobody_wrote(file, patience_s) from None
        if text.startswith(_REFUSED):
            raise OwnerRefused(f"--rdzv-endpoint file:{file}: no job begins here, as {text.removeprefix(_REFUSED)}")
        time.sleep(_LOOK_S)
    return None


def _nobody_wrote(file: Path, patience_s: float) -> NoAddress:
    try:
        owner = owner_file(file).read_text()
    except OSError:
        owner = "nobody"
    return NoAddress(
        f"--rdzv-endpoint file:{file} had no address after {patience_s:g} s; {owner} was to write it, as {owner_file(file)} "
        "says: see that node, or give each job a file of its own"
    )
