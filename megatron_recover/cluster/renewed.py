"""Processes beside the launcher that are started again when they die: recorder and monitor.

`Recording` and `Monitoring` each own one. This module has what both do in the same way: the start,
and the pauses between starts.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence

import msgspec

from megatron_recover.config import inherited_environment, module_command

_SHORTEST_PAUSE = 1 / 32
"""Pause after the second death in a row, as a fraction of the longest pause."""


class Pauses:
    """The pauses before a process that has died is started again.

    The first restart is at once. Each further pause is twice as long as the one before, at most
    `longest_s` seconds. After a process that lived so long the sequence begins anew.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s, self._next_s = longest_s, 0.0

    def after(self, lived_s: float) -> float:
        """Return the seconds to wait after the death of a process that lived `lived_s` seconds."""
        pause_s = 0.0 if lived_s >= self._longest_s else self._next_s
        self._next_s = min(self._longest_s, max(_SHORTEST_PAUSE * self._longest_s, 2 * pause_s))
        return pause_s


def start(module: str, descriptors: Sequence[int], settings: msgspec.Struct) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start ``python -P -m MODULE CONTROL DESCRIPTOR... SETTINGS`` in a session of its own.

    Return the process and the launcher's end of CONTROL, a SOCK_SEQPACKET socket that does not
    block. The process inherits the descriptors; -1 stands for one that there is not. SETTINGS is
    JSON. Raises OSError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with theirs:
        numbers = [theirs.fileno(), *descriptors]
        command = [*module_command(module), *map(str, numbers), msgspec.json.encode(settings).decode()]
        inherited = [each for each in numbers if each >= 0]
        try:
            process = subprocess.Popen(
                command, env=inherited_environment(), stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=inherited
            )  # fmt: skip
        except OSError:
            ours.close()
            raise
    return process, ours
