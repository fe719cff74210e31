"""The messages between an agent, its fork server, and that server's warm processes.

A warm process is a fresh interpreter that a request turns into a rank (`cluster/forkserver.py`).

All travel over SOCK_SEQPACKET sockets. A message of the server to the agent is one packet of JSON;
`Started` has a descriptor attached. A request is the packet `REQUEST`, with descriptors (`Spawn`);
the server forwards it to a warm process. A warm process sends the packet `WARM` once it has
imported everything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from megatron_recover.host import memory_file

MAX_PACKET_BYTES = 4096
REQUEST, WARM = b"request", b"warm"
STDOUT = "stdout"
MAX_DESCRIPTORS = 16
"""Maximum of descriptors with one packet."""


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """A request to the server to start a rank, in a file (`write_request`).

    The packet has these descriptors, in order: that file's; that of the output into which stdout
    and stderr of the rank go; one for each name in `descriptors`. With a descriptor `STDOUT`, that
    one is for stdout, and the other output for stderr alone.
    """

    replica: int
    rank: int
    argv: tuple[str, ...]
    """The script and its arguments."""
    environment: dict[str, str]
    """Variables added to the server's own environment."""
    descriptors: tuple[str, ...] = ()
    """Names of the descriptors after the first two, for `config.inherited_descriptor` in the
    rank."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A message from the server: the modules are imported."""


class Importing(msgspec.Struct, frozen=True, tag=True):
    """A message from the server before `Ready`: how far the warm processes are.

    The server sends it when something in it has changed, at most once a second.
    """

    num_done: int
    num_processes: int
    pid: int
    """The process that was started first of those that still import."""
    state: str
    """Its state letter in /proc/PID/stat."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """A message from the server, with the pidfd of a rank that has started.

    The pidfd was opened before the pid could be used again.
    """

    replica: int
    rank: int
    pid: int


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """A message from the server instead of `Started`: the system refused what a rank needs."""

    errno: int
    """The number of the system's error."""


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A message from the server: a rank is dead and reaped, and its process group was killed."""

    replica: int
    rank: int
    status: int
    """Exit code, or minus the signal."""


Reply = Ready | Importing | Started | NotStarted | Exited


def write_request(spawn: Spawn) -> int:
    """Return the descriptor of a new file in memory that has `spawn` as JSON.

    The caller closes it. Raises OSError.
    """
    descriptor = memory_file.create("megatron-recover-request")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(msgspec.json.encode(spawn))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_request(descriptors: Sequence[int]) -> Spawn | None:
    """Return the request that came with these descriptors.

    None if descriptors are missing: the kernel drops those that exceed this process's limit.
    """
    if not descriptors:
        return None
    request = descriptors[0]
    spawn = msgspec.json.decode(os.pread(request, os.fstat(request).st_size, 0), type=Spawn)
    return spawn if len(descriptors) == 2 + len(spawn.descriptors) else None
