"""The handshake as a pure protocol: who holds the key gets in as whom it is, and nothing that was recorded or relayed does."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.authentication import handshake
from megatron_recover.authentication.handshake import KEY_BYTES, NONCE_BYTES, Acceptor, Connector, Party, Refused, Reply, Role

KEY, OTHER_KEY = b"k" * KEY_BYTES, b"o" * KEY_BYTES
PARTIES = st.builds(Party, st.sampled_from(Role), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
ME, PEER = Party(Role.LEADER, 1), Party(Role.LEADER, 2)
counter = itertools.count()


def fresh() -> bytes:
    return next(counter).to_bytes(NONCE_BYTES, "big")


def connector(key: bytes = KEY, me: Party = ME, peer: Party = PEER, port: int = 7, generation: int = 0) -> Connector:
    return Connector(key, me, peer, port=port, nonce=fresh(), generation=generation)


def acceptor(key: bytes = KEY, me: Party = PEER, port: int = 7) -> Acceptor:
    return Acceptor(key, lambda peer, wanted: wanted == me, port=port, nonce=fresh())


def shake(out: Connector, into: Acceptor) -> None:
    into.feed(out.feed(into.feed(out.opening)))


@given(me=PARTIES, peer=PARTIES, port=st.integers(0, 65535), generation=st.integers(0, 2**64 - 1),
       verdict=st.sampled_from(Reply), cuts=st.lists(st.integers(1, 40), min_size=1))  # fmt: skip
def test_both_ends_learn_who_the_other_is_however_the_stream_is_cut(
    me: Party, peer: Party, port: int, generation: int, verdict: Reply, cuts: list[int]
) -> None:
    if me == peer:
        return
    out, into = connector(me=me, peer=peer, port=port, generation=generation), acceptor(me=peer, port=port)
    pieces = itertools.cycle(cuts)

    def carry(side: Connector | Acceptor, message: bytes) -> bytes:
        answer = b""
        while message:
            assert not answer and side.wanted, "it answers when the message is complete, and not before"
            size = min(next(pieces), side.wanted)
            answer, message = side.feed(message[:size]), message[size:]
        return answer

    response = carry(out, carry(into, out.opening))
    assert into.peer is None and out.verdict is None
    assert carry(into, response) == b""
    assert (into.peer, into.generation, into.wanted) == (me, generation, 0)
    assert carry(out, into.decide(verdict, 9)) == b""
    assert (out.verdict, out.generation, out.wanted) == (verdict, 9, 0)


def test_both_ends_have_the_keys_of_their_connection_and_nobody_else_has() -> None:
    seen = set()
    for key, me, port in ((KEY, ME, 7), (KEY, ME, 7), (KEY, Party(Role.LEADER, 3), 7), (KEY, ME, 8), (OTHER_KEY, ME, 7)):
        out, into = connector(key, me, port=port), acceptor(key, port=port)
        shake(out, into)
        assert out.session_keys == into.session_keys.of_other_end
        seen |= {out.session_keys.sending, out.session_keys.receiving}
    assert len(seen) == 10, "every direction of every connection has a key of its own"


@pytest.mark.parametrize("end", ["connector", "acceptor"])
def test_each_nonce_makes_other_keys(end: str) -> None:
    """An end whose nonce repeats, since its machine was copied, has other keys as long as the other end's is fresh."""
    nonces = [fresh() for _ in range(3)]
    found = []
    for mine, theirs in ((nonces[0], nonces[1]), (nonces[0], nonces[2])):
        pair = (mine, theirs) if end == "connector" else (theirs, mine)
        out = Connector(KEY, ME, PEER, port=7, nonce=pair[0])
        into = Acceptor(KEY, lambda peer, wanted: True, port=7, nonce=pair[1])
        shake(out, into)
        found.append(out.session_keys)
    assert set(found[0]).isdisjoint(found[1])


def test_neither_end_believes_one_without_the_key() -> None:
    out, into = connector(), acceptor(OTHER_KEY)
    with pytest.raises(Refused, match="key"):
        out.feed(into.feed(out.opening))
    challenge = (into := acceptor()).feed((out := connector(OTHER_KEY)).opening)
    with pytest.raises(Refused, match="key"):
        out.feed(challenge)
    with pytest.raises(Refused, match="key"):
        into.feed(bytes(into.wanted))
    assert into.peer is None


def test_a_recorded_handshake_proves_nothing() -> None:
    out, into = connector(), acceptor()
    challenge = into.feed(out.opening)
    response = out.feed(challenge)
    into.feed(response)
    verdict = into.decide(Reply.WELCOME)
    again = acceptor()
    again.feed(out.opening)
    with pytest.raises(Refused):
        again.feed(response)
    with pytest.raises(Refused):
        connector().feed(challenge)
    other, there = connector(), acceptor()
    shake(other, there)
    with pytest.raises(Refused):
        other.feed(verdict)


def test_reflection_fails() -> None:
    """A stranger hands to one end what that same end, or another one of the same role, has made."""
    out = connector()
    reflected = acceptor(me=ME)  # the same process as an acceptor
    with pytest.raises(Refused):
        reflected.feed(out.opening)  # it wants somebody else
    into = acceptor()
    challenge = into.feed(out.opening)
    with pytest.raises(Refused):
        into.feed(challenge[-into.wanted :])  # the acceptor's own proof as the response
    with pytest.raises(Refused):
        acceptor(me=ME).feed(connector(me=ME, peer=ME).opening)


@pytest.mark.parametrize(
    "relayed",
    [
        {"me": Party(Role.RANK, 1)}, {"me": Party(Role.LEADER, 3)}, {"me": Party(Role.LEADER, 1, 1)},
        {"generation": 4}, {"peer": Party(Role.LEADER, 2)},
    ],
)  # fmt: skip
def test_a_proof_made_for_one_conversation_is_worth_nothing_in_another(relayed: dict) -> None:
    """The stranger relays between an honest connector and an acceptor to which it says something else."""
    honest, into = connector(me=Party(Role.DATA, 1), generation=3), acceptor()
    forged = connector(OTHER_KEY, **relayed).opening
    with pytest.raises(Refused):
        honest.feed(into.feed(forged))
    # Even if the honest one were to answer that challenge, its response would not be of this opening.
    response = handshake._proof(b"mgr connector", KEY, honest.opening, into._nonce)
    with pytest.raises(Refused):
        into.feed(response)


def test_a_relay_at_another_port_fails() -> None:
    with pytest.raises(Refused, match="port 8"):
        acceptor(port=7).feed(connector(port=8).opening)


def test_what_does_not_begin_like_an_opening_is_refused_at_once() -> None:
    with pytest.raises(Refused):
        acceptor().feed(b"GET / HTTP/1.1\r\n\r\n")
    assert acceptor().feed(handshake.MAGIC[:3]) == b""


def test_who_is_not_served_is_refused_before_anything_is_made_for_it() -> None:
    into = Acceptor(KEY, lambda peer, wanted: peer.replica < 2, port=7, nonce=fresh())
    with pytest.raises(Refused, match="not served"):
        into.feed(connector(me=Party(Role.LEADER, 99)).opening)


def test_a_verdict_cannot_be_turned_around() -> None:
    out, into = connector(), acceptor()
    shake(out, into)
    refusal = into.decide(Reply.NO_ROOM, 3)
    welcome = refusal.replace(bytes([Reply.NO_ROOM]), bytes([Reply.WELCOME]), 1)
    assert welcome != refusal
    with pytest.raises(Refused, match="key"):
        out.feed(welcome)


@given(text=st.binary(max_size=300), as_acceptor=st.booleans(), honest=st.integers(0, 2))
def test_arbitrary_bytes_are_refused_or_awaited(text: bytes, as_acceptor: bool, honest: int) -> None:
    """After `honest` messages of a real handshake; never another exception, never a proven stranger."""
    out, into = connector(), acceptor()
    side: Connector | Acceptor = into if as_acceptor else out
    if as_acceptor and honest:
        into.feed(out.opening)
    elif not as_acceptor and honest:
        into.feed(out.feed(into.feed(out.opening)))
    try:
        while text and side.wanted:
            size = side.wanted
            assert size <= 80
            side.feed(text[:size])
            text = text[size:]
    except Refused:
        return
    assert into.peer is None if as_acceptor else out.verdict is None


@given(position=st.integers(0, 400), bit=st.integers(0, 7))
def test_no_bit_of_a_handshake_can_be_changed_unnoticed(position: int, bit: int) -> None:
    out, into = connector(), acceptor()
    sent = 0

    def across(message: bytes) -> bytes:
        nonlocal sent
        start, sent = sent, sent + len(message)
        if not start <= position < sent:
            return message
        changed = bytearray(message)
        changed[position - start] ^= 1 << bit
        return bytes(changed)

    try:
        into.feed(across(out.feed(across(into.feed(across(out.opening))))))
        out.feed(across(into.decide(Reply.WELCOME, 1)))
    except Refused:
        assert position < sent
        return
    assert position >= sent
