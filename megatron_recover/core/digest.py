"""How digests of parts become the digest of a whole: a replica's state digest is made of those of its ranks, in rank order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def combined(digests: Sequence[int]) -> int:
    """Return the digest, 0..2**63-1, of several digests or checksums of that range in this order."""
    parts = b"".join(value.to_bytes(8, "little") for value in digests)
    return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "little") >> 1
