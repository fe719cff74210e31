"""Every byte is asked for, comes once, and comes from whoever still sends, however fast or faulty each source is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.data_plane.ranges.contract import Range
from megatron_recover.data_plane.ranges.division import Division

CHUNK = 7


def all_of(division: Division, source: int) -> list[Range]:
    """What one source gets if no other one moves."""
    found = []
    while (wanted := division.take(source, 0.0, is_idle=True)) is not None:
        found.append(wanted)
        division.arrived(source, wanted, 0.0)
    return found


@given(st.integers(0, 200), st.integers(1, 8), st.data())
def test_the_ranges_are_the_memory_whoever_reads_them(num_bytes: int, num_sources: int, data: st.DataObject) -> None:
    division = Division(num_bytes, num_sources, CHUNK)
    found = all_of(division, data.draw(st.integers(0, num_sources - 1)))
    assert division.is_complete
    covered = [byte for each in sorted(found) for byte in range(*each)]
    assert covered == list(range(num_bytes)) and all(0 < stop - start <= CHUNK for start, stop in found)


@given(st.integers(0, 300), st.integers(1, 8), st.data())
def test_every_byte_counts_once_whichever_sources_fail(num_bytes: int, num_sources: int, data: st.DataObject) -> None:
    """Sources ask, deliver, damage and die in any order, also late; what is left is read from the last one."""
    division, now = Division(num_bytes, num_sources, CHUNK), 0.0
    asked: dict[int, list[Range]] = {source: [] for source in range(num_sources)}
    counted: list[Range] = []
    for _ in range(data.draw(st.integers(0, 60))):
        source = data.draw(st.sampled_from(sorted(asked)))
        now += data.draw(st.floats(0.0, 2.0))
        match data.draw(st.sampled_from(["take", "arrive", "damage", "die"])):
            case "take":
                wanted = division.take(source, now, is_idle=not asked[source])
                if wanted is not None:
                    assert wanted not in asked[source] and wanted not in counted
                    asked[source].append(wanted)
            case "arrive" if asked[source]:
                got = asked[source].pop(0)
                if division.arrived(source, got, now):
                    counted.append(got)
            case "damage" if asked[source]:
                division.failed(source, asked[source].pop(0))
            case "die" if len(asked) > 1:
                division.gone(source)
                del asked[source]
    survivor = min(asked)
    for source in [each for each in asked if each != survivor]:
        division.gone(source)
    for got in asked[survivor]:
        counted += [got] if division.arrived(survivor, got, now) else []
    counted += all_of(division, survivor)
    assert division.is_complete
    assert sorted(byte for each in counted for byte in range(*each)) == list(range(num_bytes))


@given(st.integers(1, 8), st.integers(0, 40))
def test_sources_begin_with_parts_of_about_equal_size(num_sources: int, num_ranges: int) -> None:
    division = Division(num_ranges * CHUNK, num_sources, CHUNK)
    sizes = [len(part) for part in division._parts]
    assert sum(sizes) == num_ranges and max(sizes) - min(sizes) <= 1


def test_a_source_that_is_done_takes_from_the_end_of_the_largest_part() -> None:
    division = Division(6 * CHUNK, 2, CHUNK)
    assert [division.take(0, 0.0, is_idle=False) for _ in range(4)] == [
        Range(0, 7), Range(7, 14), Range(14, 21), Range(35, 42),
    ]  # fmt: skip
    assert division.take(1, 0.0, is_idle=False) == Range(21, 28)


def test_only_an_idle_source_asks_once_more_for_what_another_keeps_waiting_and_only_after_its_own_time() -> None:
    division = Division(2 * CHUNK, 2, CHUNK)
    slow, fast = division.take(0, 10.0, is_idle=True), division.take(1, 10.0, is_idle=True)
    assert slow is not None and fast is not None
    division.arrived(1, fast, 13.0)  # it took 3 s, so the other one gets 6
    assert division.take(1, 15.9, is_idle=True) is None
    assert division.steals_at(1) == pytest.approx(16.0)
    assert division.take(1, 16.0, is_idle=False) is None
    assert division.take(1, 16.0, is_idle=True) == slow
    assert division.take(1, 100.0, is_idle=True) is None, "it is asked already"
    assert division.arrived(1, slow, 17.0) and division.is_complete
    assert not division.arrived(0, slow, 18.0), "a range that comes twice is taken once"


def test_a_range_that_two_were_asked_for_is_lost_only_when_both_have_failed() -> None:
    division = Division(CHUNK, 2, CHUNK)
    wanted = division.take(0, 0.0, is_idle=True)
    assert wanted is not None and division.take(1, 0.0, is_idle=True) == wanted
    division.gone(0)
    assert division.take(0, 9.0, is_idle=False) is None
    division.failed(1, wanted)
    assert division.take(1, 9.0, is_idle=False) == wanted
