"""The gate that makes `revoke` final: after `shut` no section writes and none begins."""

from __future__ import annotations

import threading

from megatron_recover.data_plane.transport import Revoked


class WriteGate:
    """The gate to all memory that a host thread of a transport writes and that outlives a call.

    Such memory is results and reused scratch. The writing thread enters one section for each piece:
    at most 1 MiB of a sum or what the kernel has received of a copy (`direct`), at most 2**20
    elements (`gloo`), or a whole tensor (`nccl`, which enqueues its copy; a received tensor is
    copied from host memory). `shut` waits for the section that runs. No section waits for a peer,
    takes a lock that the revoking thread may hold, or calls code from outside the transport.
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
        """Refuse new sections and return when none runs. No thread calls it inside a section."""
        self._is_shut = True
        with self._lock:
            return
