"""What makes `revoke` final: a transport writes in short sections, and once it is shut none runs and none begins."""

from __future__ import annotations

import threading

from megatron_recover.data_plane.transport import Revoked


class WriteGate:
    """Guards all memory that one transport writes and that outlives a call: results, and scratch that is used again.

    The thread that writes enters one section per piece of bounded size (a megabyte or so), so `shut` waits for about a
    millisecond. No section waits for a peer, takes a lock that its revoker may hold, or calls code of others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_shut = False

    def __enter__(self) -> None:
        """Enter a section. Raises `Revoked` once the gate is shut."""
        self._lock.acquire()
        if self._is_shut:
            self._lock.release()
            raise Revoked("the transport was revoked")

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def shut(self) -> None:
        """Let nobody in any more, and return when nobody is inside. Any thread but the one inside."""
        self._is_shut = True
        with self._lock:
            return
