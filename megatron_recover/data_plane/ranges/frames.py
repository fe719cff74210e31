"""The frames between a `TcpSource` and a `TcpExporter`, over a blocking socket.

A frame is a header, a MAC, a body (msgpack: a message of the union `Message`) and a payload (bytes
of a registered memory; empty in all frames but those of `Piece`). Nothing is unpickled.

Note [Payloads]. The MAC covers header and body (`authentication/frame_macs.py`, Note [Frames]), and
the header holds length and CRC-32 of the payload. So nobody without the job's key can begin, end,
repeat or move a frame. Each payload is bound to the range, label and layout that its body names.
The payload itself is protected against damage only: somebody who can change packets between two
nodes can choose other bytes with the same CRC-32, as he can change gradients. A MAC over the
payload would cost both ends five times as much CPU time as the CRC-32 (1.4 and 7.1 GB/s of one
core), of cores that train.
The digest of the whole state, which a newcomer computes and members compare, is the second check.
"""

from __future__ import annotations

import hmac
import socket
import struct
import zlib

import msgspec

from megatron_recover.authentication.frame_macs import MAC_BYTES, FrameMacs
from megatron_recover.authentication.handshake import SessionKeys

_MAGIC, _VERSION = b"ms", 1
_HEADER = struct.Struct("<2sHIII")
"""Magic, format version, bytes of the body, bytes of the payload, CRC-32 of the payload."""
MAX_BODY_BYTES = 2**24
"""Largest body in bytes; the scalars of a state, and the names of its tensors, are far smaller."""


class Part(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message."""


class LookFor(Part, frozen=True):
    """A reader asks for the description of the next memory whose label is not `after`."""

    after: str | None


class Found(Part, frozen=True):
    """The answer: a memory."""

    label: str
    layout: int
    num_bytes: int


class Begin(Part, frozen=True):
    """A reader begins to read the memory of this label, which it expects to have this layout."""

    label: str
    layout: int
    num_bytes: int


class Begun(Part, frozen=True):
    """The answer: `about` of the memory, whose layout is as expected."""

    label: str
    layout: int
    num_bytes: int
    about: bytes


class Differs(Part, frozen=True):
    """The answer: the layout is another one, with these parts."""

    parts: list[str]


class Get(Part, frozen=True):
    """A reader asks for the bytes `start` to `stop` of the memory that it has begun to read."""

    label: str
    layout: int
    start: int
    stop: int


class Piece(Part, frozen=True):
    """The answer: the payload is that range."""

    label: str
    layout: int
    start: int
    stop: int


class Withdrawn(Part, frozen=True):
    """The answer to `Begin` or `Get`: the memory of this label is not readable any more."""

    label: str


class Still(Part, frozen=True):
    """The exporter waits for its next memory."""


Message = LookFor | Found | Begin | Begun | Differs | Get | Piece | Withdrawn | Still


class Broken(Exception):
    """The connection has ended, or its bytes are no valid frames. It cannot be used any more."""


class Frames:
    """A proven connection. One thread at a time sends, and one receives."""

    def __init__(self, sock: socket.socket, keys: SessionKeys) -> None:
        """Use a connected socket, with its own timeout for each call, and its session keys."""
        self.sock = sock
        self._sending, self._receiving = FrameMacs(keys.sending), FrameMacs(keys.receiving)
        self._decoder = msgspec.msgpack.Decoder(Message)

    def send(self, message: Message, payload: memoryview | None = None) -> None:
        """Send a frame. Raises `Broken` if the socket has failed or its timeout is over."""
        payload = memoryview(b"") if payload is None else payload
        body = msgspec.msgpack.encode(message)
        if len(body) > MAX_BODY_BYTES:
            raise Broken(f"a {type(message).__name__} of {len(body)} bytes exceeds {MAX_BODY_BYTES}")
        header = _HEADER.pack(_MAGIC, _VERSION, len(body), len(payload), zlib.crc32(payload))
        try:
            self.sock.sendall(header + self._sending.mac(header, body) + body)
            if payload:
                self.sock.sendall(payload)
        except OSError as error:
            raise Broken(_reason(error)) from error

    def receive(self, payload: memoryview | None = None) -> tuple[Message, int, bool]:
        """Receive a frame; its payload goes to the begin of `payload`.

        Return the message, the bytes of the payload, and whether its checksum is right. Raises
        `Broken` at the end of the stream, if the socket's timeout is over, and for bytes that are
        no valid frame or whose payload has no room. No byte of a payload is read before the MAC of
        its frame was found valid.
        """
        header = self._read(_HEADER.size + MAC_BYTES)
        magic, version, body_bytes, payload_bytes, checksum = _HEADER.unpack_from(header)
        if magic != _MAGIC or version != _VERSION or body_bytes > MAX_BODY_BYTES:
            raise Broken("the other end sent what is no frame")
        body = self._read(body_bytes)
        if not hmac.compare_digest(self._receiving.mac(header[: _HEADER.size], body), header[_HEADER.size :]):
            raise Broken("a frame was forged, damaged or repeated on its way")
        try:
            message = self._decoder.decode(body)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise Broken(f"the other end sent what is no message: {error}") from error
        if payload_bytes > (len(payload) if payload is not None else 0):
            raise Broken(f"a {type(message).__name__} came with {payload_bytes} bytes for which there is no room")
        if payload is None or not payload_bytes:
            return message, 0, True
        self._fill(payload[:payload_bytes])
        return message, payload_bytes, zlib.crc32(payload[:payload_bytes]) == checksum

    def _read(self, num_bytes: int) -> memoryview:
        view = memoryview(bytearray(num_bytes))
        self._fill(view)
        return view

    def _fill(self, view: memoryview) -> None:
        try:
            while view:
                received = self.sock.recv_into(view)
                if not received:
                    raise Broken("the other end has closed the connection")
                view = view[received:]
        except OSError as error:
            raise Broken(_reason(error)) from error


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "the other end has moved no byte for too long"
    return error.strerror or str(error)
