"""The MACs of the frames of one direction of a proven connection.

Note [Frames]. The MAC of a frame is a keyed hash (BLAKE2b) over the frame's number, its header and
its body. The key is the session key of the connection and the direction (`handshake.SessionKeys`).
The number counts the frames of that direction from 0. It is not sent, since both ends count, and it
is never used twice with one key. So the MAC of a frame that was forged, changed, repeated, left
out, moved, or taken from another connection is invalid.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

MAC_BYTES = 16
_NUMBER = struct.Struct("!Q")


class FrameMacs:
    """One direction of a connection: its session key, and the number of its next frame."""

    def __init__(self, key: bytes) -> None:
        """Begin with frame 0. `key` is the session key of this direction."""
        self._keyed = blake2b(key=key, digest_size=MAC_BYTES, person=b"mgr frame")
        self._number = 0

    def mac(self, header: bytes | memoryview, body: bytes | memoryview) -> bytes:
        """Return the MAC of the next frame, and count the frame (Note [Frames])."""
        keyed = self._keyed.copy()
        keyed.update(_NUMBER.pack(self._number) + header)
        keyed.update(body)
        self._number += 1
        return keyed.digest()
