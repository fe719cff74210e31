"""The hybrid logical clock: whatever the physical clocks show, an effect has a larger stamp than its cause."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.core import hybrid_clock
from megatron_recover.core.hybrid_clock import COUNTER_BITS, MAX_AHEAD_MS, is_too_far_ahead, milliseconds, stamp_at, tick

NOW_MS = 1_795_000_000_000
times = st.integers(0, 2**41)


@given(newest=st.integers(0, 2**62), now_ms=times)
def test_a_tick_is_larger_than_every_stamp_before_and_not_behind_the_physical_clock(newest: int, now_ms: int) -> None:
    found = tick(newest, now_ms)
    assert found > newest and milliseconds(found) >= now_ms
    assert milliseconds(found) in (now_ms, milliseconds(newest), milliseconds(newest) + 1), "no further ahead than it must be"


def test_a_counter_that_overflows_carries_into_the_milliseconds() -> None:
    last = stamp_at(NOW_MS) + 2**COUNTER_BITS - 1
    assert tick(last, NOW_MS - 5000) == stamp_at(NOW_MS + 1)


def test_stamps_of_this_century_fit_into_a_signed_word() -> None:
    assert tick(0, 4_100_000_000_000) < 2**63


@given(ahead_ms=st.integers(-(10**9), 10**9))
def test_a_stamp_more_than_a_minute_ahead_is_refused_and_no_other(ahead_ms: int) -> None:
    assert is_too_far_ahead(stamp_at(NOW_MS + ahead_ms) + 7, NOW_MS) == (ahead_ms > MAX_AHEAD_MS)


@given(
    offsets=st.lists(st.integers(-30_000, 30_000), min_size=2, max_size=4),
    acts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2000)), max_size=60),
)
def test_every_effect_has_a_larger_stamp_than_its_causes(offsets: list[int], acts: list[tuple[int, int, int]]) -> None:
    """Nodes with wrong clocks record events and send each other frames. Knowledge is compared with vector clocks."""
    count = len(offsets)
    newest, knows, now_ms = [0] * count, [[0] * count for _ in range(count)], NOW_MS
    events: list[tuple[int, tuple[int, ...]]] = []

    def event(node: int) -> None:
        newest[node] = tick(newest[node], now_ms + offsets[node])
        knows[node][node] += 1
        events.append((newest[node], tuple(knows[node])))

    for sender, receiver, pause_ms in acts:
        now_ms += pause_ms
        sender, receiver = sender % count, receiver % count
        event(sender)
        if sender != receiver and not is_too_far_ahead(newest[sender], now_ms + offsets[receiver]):
            newest[receiver] = max(newest[receiver], newest[sender])
            knows[receiver] = list(map(max, knows[receiver], knows[sender]))
            event(receiver)
    for stamp, known in events:
        for other, also in events:
            if known != also and all(map(int.__le__, known, also)):
                assert stamp < other
    assert hybrid_clock.milliseconds(max(newest)) <= now_ms + max(offsets) + 1, "no clock runs away from the physical ones"
