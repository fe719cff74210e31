"""The mutual challenge and response that opens every connection of a job.

The two ends are pure state machines without sockets. Both prove that they hold the job's key before
either decodes anything else. There are four messages of fixed size:

1. *Opening*, connector to acceptor: identity of the connector, wanted acceptor, port, generation,
   and the connector's nonce.
2. *Challenge*, acceptor to connector: the acceptor's nonce and proof.
3. *Response*, connector to acceptor: the connector's proof.
4. *Verdict*, acceptor to connector: welcome or refused, the acceptor's generation, and a proof of
   that verdict.

A proof is a keyed hash (BLAKE2b) over the whole opening and the acceptor's nonce. The two ends and
the verdict use different labels, so a proof made by one end is invalid at the other end. The
opening binds roles, replicas, ranks, port and generation. So a proof is invalid for another process
of the job, at another port, or for another generation. Nonces are fresh, so a recorded handshake
proves nothing.

The same values give both ends one session key for each direction (`SessionKeys`). With these keys
the control plane authenticates every frame (`control_plane/wire.py`), and so does the transfer of
state (`data_plane/ranges/frames.py`). Nothing is encrypted, and the sums of the data plane do not
use the keys (docs/design/security.md).
"""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

KEY_BYTES = 32
NONCE_BYTES = 32
MAGIC = b"mgrecov2"

_PROOF_BYTES = 32
_OPENING = struct.Struct("<8sBBHIIIIQ32s")
"""Magic; roles of connector and acceptor; port; replica and rank of the connector; those of the
acceptor; generation; nonce."""
_CHALLENGE = struct.Struct("<8s32s32s")
"""Magic, nonce, proof of the acceptor."""
_VERDICT = struct.Struct("<8sBQ32s")
"""Magic, verdict, generation of the acceptor, proof."""


OTHER_PROTOCOL = "the other end does not speak this protocol"
"""Reason of a `Refused` where something else listens or dials."""


class Refused(Exception):
    """The other end is not the wanted party, or speaks another protocol.

    The connection cannot be used.
    """


class Role(enum.IntEnum):
    """The part that a process has in the conversation on a connection."""

    COORDINATOR = 1
    LEADER = 2
    RANK = 3
    DATA = 4
    """A rank on the data plane."""
    WATCH = 5
    """A rank that waits for the end of another rank; nothing follows the handshake."""
    ECHO = 6
    """A rank that probes another rank, or the echo server that answers; nothing follows the
    handshake."""
    AGENT = 7
    """The agent of a node. Its replica and rank are 0."""
    STORE = 8
    """Rank 0 of a replica, as the server of the replica's store for `torch.distributed`."""
    DOCTOR = 9
    """A node that tries the connections to other nodes before the job starts, and one that answers
    (`cluster/doctor`)."""
    STATE = 10
    """A rank that serves its state to newcomers (`trainer/state_server.py`). Its replica is 0."""
    NEWCOMER = 11
    """A rank of a newcomer, which reads the state of others."""


class Reply(enum.IntEnum):
    """An acceptor's answer to a connector that has proven itself."""

    WELCOME = 1
    OLDER = 2
    """Refused: the acceptor is in a newer generation."""
    NO_ROOM = 3
    """Refused: the acceptor keeps too many connections, has one of the same peer already, or
    expects none from this peer."""


class Party(NamedTuple):
    """One end of a connection."""

    role: Role
    replica: int = 0
    rank: int = 0


class SessionKeys(NamedTuple):
    """The two keys of one connection, as one end uses them. The other end has them exchanged.

    A key is made from the job's key, the whole opening and both nonces. So no two connections
    share a key.
    """

    sending: bytes
    receiving: bytes

    @property
    def of_other_end(self) -> SessionKeys:
        """Return the keys as the other end uses them."""
        return SessionKeys(self.receiving, self.sending)


Admits = Callable[[Party, Party], bool]
"""`admits(connector, acceptor)` returns whether the claimed connector may connect to the wanted
acceptor."""


def _proof(label: bytes, key: bytes, *parts: bytes) -> bytes:
    return blake2b(b"".join(parts), key=key, digest_size=_PROOF_BYTES, person=label).digest()


def _check(label: bytes, key: bytes, proof: bytes, *parts: bytes) -> None:
    if not hmac.compare_digest(_proof(label, key, *parts), proof):
        raise Refused("the other end does not hold this job's key")


_OF_CONNECTOR, _OF_ACCEPTOR, _OF_VERDICT = b"mgr connector", b"mgr acceptor", b"mgr verdict"
_BY_CONNECTOR, _BY_ACCEPTOR = b"mgr by connector", b"mgr by acceptor"
"""Labels of the session keys, by the end that sends with the key."""


def _session_keys(key: bytes, opening: bytes, nonce: bytes) -> SessionKeys:
    """Return the connector's session keys. `nonce` is the acceptor's; the opening has the other."""
    return SessionKeys(_proof(_BY_CONNECTOR, key, opening, nonce), _proof(_BY_ACCEPTOR, key, opening, nonce))


class _Side:
    """Common part of both ends: it collects messages of known size, and never more bytes."""

    def __init__(self, key: bytes, wanted: int) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the job's key has {len(key)} bytes instead of {KEY_BYTES}")
        self._key = key
        self._size = wanted
        self._got = b""

    @property
    def wanted(self) -> int:
        """Return how many bytes to read next at most; 0 when nothing more is expected."""
        return self._size - len(self._got)

    def _collect(self, data: bytes) -> bytes:
        """Return the message once it is complete, and empty bytes before.

        Raises ValueError for more bytes than were wanted.
        """
        if len(data) > self.wanted:
            raise ValueError(f"{len(data)} bytes were read where {self.wanted} were wanted")
        self._got += data
        if self.wanted:
            return b""
        message, self._got = self._got, b""
        return message


class Connector(_Side):
    """The end that dialled.

    Send `opening`, then whatever `feed` returns, until `verdict` is set.
    """

    def __init__(self, key: bytes, me: Party, peer: Party, *, port: int, nonce: bytes, generation: int = 0) -> None:
        """Begin a handshake over a dialled connection.

        `port` is the port that was dialled. `nonce` is fresh and random, of `NONCE_BYTES` bytes.
        `generation` is the one that the connection is for; 0 if it is for none.
        """
        super().__init__(key, _CHALLENGE.size)
        self.opening = _OPENING.pack(
            MAGIC, me.role, peer.role, port, me.replica, me.rank, peer.replica, peer.rank, generation, nonce
        )  # fmt: skip
        self.verdict: Reply | None = None
        """The acceptor's verdict, once its proof was checked."""
        self.generation = 0
        """Generation of the acceptor, from its verdict."""
        self._nonce = b""

    @property
    def session_keys(self) -> SessionKeys:
        """Return the keys of this connection. They are valid once `verdict` is set."""
        return _session_keys(self._key, self.opening, self._nonce)

    def feed(self, data: bytes) -> bytes:
        """Process at most `wanted` bytes, and return the bytes to send next. Raises `Refused`."""
        message = self._collect(data)
        if not message:
            return b""
        if not self._nonce:
            magic, self._nonce, proof = _CHALLENGE.unpack(message)
            if magic != MAGIC:
                raise Refused(OTHER_PROTOCOL)
            _check(_OF_ACCEPTOR, self._key, proof, self.opening, self._nonce)
            self._size = _VERDICT.size
            return _proof(_OF_CONNECTOR, self._key, self.opening, self._nonce)
        magic, verdict, generation, proof = _VERDICT.unpack(message)
        _check(_OF_VERDICT, self._key, proof, self.opening, self._nonce, message[:-_PROOF_BYTES])
        if magic != MAGIC or verdict not in tuple(Reply):
            raise Refused(f"the other end gave verdict {verdict}, which this version does not know")
        self._size = 0
        self.verdict, self.generation = Reply(verdict), generation
        return b""


class Acceptor(_Side):
    """The end that listened.

    Send whatever `feed` returns; once `peer` is set, send what `decide` returns.
    """

    def __init__(self, key: bytes, admits: Admits, *, port: int, nonce: bytes) -> None:
        """Begin a handshake over an accepted connection.

        `port` is the port that this end listens on. `nonce` is fresh and random, of `NONCE_BYTES`
        bytes.
        """
        super().__init__(key, _OPENING.size)
        self.peer: Party | None = None
        """Identity of the connector, once it is proven."""
        self.generation = 0
        """Generation that the connector wants, once `peer` is set."""
        self._admits, self._port, self._nonce = admits, port, nonce
        self._opening = b""

    @property
    def session_keys(self) -> SessionKeys:
        """Return the keys of this connection. They are valid once `peer` is set."""
        return _session_keys(self._key, self._opening, self._nonce).of_other_end

    def feed(self, data: bytes) -> bytes:
        """Process at most `wanted` bytes, and return the bytes to send next. Raises `Refused`."""
        message = self._collect(data)
        if not message:
            if not self._opening and not MAGIC.startswith(self._got[: len(MAGIC)]):  # a stranger may wait for an answer
                raise Refused(OTHER_PROTOCOL)
            return b""
        if not self._opening:
            self._judge(message)
            self._opening, self._size = message, _PROOF_BYTES
            return _CHALLENGE.pack(MAGIC, self._nonce, _proof(_OF_ACCEPTOR, self._key, message, self._nonce))
        _check(_OF_CONNECTOR, self._key, message, self._opening, self._nonce)
        self._size = 0
        self.peer, _, self.generation = self._judge(self._opening)
        return b""

    def decide(self, verdict: Reply, generation: int = 0) -> bytes:
        """Return the message with the verdict and this end's generation, for a proven connector."""
        said = _VERDICT.pack(MAGIC, verdict, generation, b"")[:-_PROOF_BYTES]
        return said + _proof(_OF_VERDICT, self._key, self._opening, self._nonce, said)

    def _judge(self, opening: bytes) -> tuple[Party, Party, int]:
        magic, role, wanted, port, replica, rank, my_replica, my_rank, generation, _ = _OPENING.unpack(opening)
        if magic != MAGIC or role not in tuple(Role) or wanted not in tuple(Role):
            raise Refused(OTHER_PROTOCOL)
        peer, me = Party(Role(role), replica, rank), Party(Role(wanted), my_replica, my_rank)
        if port != self._port or peer == me or not self._admits(peer, me):
            raise Refused(f"{peer} wants {me} at port {port}, which is not served here")
        return peer, me, generation
