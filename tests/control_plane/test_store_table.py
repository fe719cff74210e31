"""The table of a replica's store: who is answered when, what is refused, and that nothing is kept of askers that are gone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.control_plane import store_table
from megatron_recover.control_plane.store_messages import (
    StoreAdd,
    StoreAnswer,
    StoreAppend,
    StoreCheck,
    StoreCompareSet,
    StoreCount,
    StoreDelete,
    StoreGet,
    StoreRefusal,
    StoreSet,
    StoreWait,
)
from megatron_recover.control_plane.store_table import MAX_VALUE_BYTES, StoreTable


def test_a_request_for_several_keys_is_answered_by_the_last_of_them_in_whatever_order_they_come() -> None:
    table: StoreTable[str] = StoreTable()
    assert table.ask("a", StoreGet(("x", "y", "z"))) == table.ask("b", StoreWait(("z",))) == []
    assert table.ask("c", StoreSet(("y",), (b"2",))) == [("c", StoreAnswer())]
    assert table.ask("c", StoreAdd("z", 3)) == [("c", StoreAnswer(3)), ("b", StoreAnswer())]
    assert table.ask("c", StoreAppend("x", b"1")) == [("c", StoreAnswer()), ("a", StoreAnswer(values=(b"1", b"2", b"3")))]
    assert table.ask("a", StoreCheck(("x", "z"))) == [("a", StoreAnswer(1))]


def test_one_message_that_sets_all_keys_answers_each_waiting_request_once() -> None:
    table: StoreTable[str] = StoreTable()
    table.ask("a", StoreWait(("x", "y")))
    table.ask("b", StoreWait(("y", "x")))
    assert sorted(asker for asker, _ in table.ask("c", StoreSet(("x", "y"), (b"", b"")))) == ["a", "b", "c"]


def test_a_key_that_is_deleted_before_the_others_came_is_waited_for_again() -> None:
    table: StoreTable[str] = StoreTable()
    table.ask("a", StoreWait(("x", "y")))
    table.ask("b", StoreSet(("x",), (b"",)))
    assert table.ask("b", StoreDelete("x")) == [("b", StoreAnswer(1))]
    assert [asker for asker, _ in table.ask("b", StoreSet(("y",), (b"",)))] == ["b"]
    assert [asker for asker, _ in table.ask("b", StoreSet(("x",), (b"",)))] == ["b", "a"]


def test_an_asker_that_is_gone_is_answered_by_nobody_and_leaves_nothing_behind() -> None:
    table: StoreTable[str] = StoreTable()
    table.ask("a", StoreWait(("x", "y")))
    table.ask("b", StoreWait(("x",)))
    table.forget("a")
    table.forget("a")
    assert [asker for asker, _ in table.ask("c", StoreSet(("x", "y"), (b"", b"")))] == ["c", "b"]
    table.forget("c")
    assert not table._waiting and not table._waiting_for


def test_an_asker_has_one_request_at_a_time() -> None:
    table: StoreTable[str] = StoreTable()
    table.ask("a", StoreWait(("x",)))
    with pytest.raises(ValueError, match="StoreCount came before"):
        table.ask("a", StoreCount())


def test_compare_set_takes_an_absent_key_for_an_empty_value_and_says_what_is_there_then() -> None:
    table: StoreTable[str] = StoreTable()
    for expected, desired, then in ((b"1", b"2", b"1"), (b"", b"2", b"2"), (b"1", b"3", b"2"), (b"2", b"3", b"3")):
        assert table.ask("a", StoreCompareSet("x", expected, desired)) == [("a", StoreAnswer(values=(then,)))]
    assert table.ask("a", StoreGet(("x",))) == [("a", StoreAnswer(values=(b"3",)))]


def refusal(table: StoreTable[str], request: object) -> str:
    """Return why the request is refused, and check that nothing has changed by it."""
    before = dict(table._values), table._num_bytes
    [(_, answer)] = table.ask("a", request)  # type: ignore[arg-type]
    assert isinstance(answer, StoreRefusal) and (dict(table._values), table._num_bytes) == before
    return answer.reason


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    table: StoreTable[str] = StoreTable(max_bytes=1000)
    table.ask("a", StoreSet(("x", "word"), (bytes(300), b"two")))
    assert "full: 2 keys of 564 bytes" in refusal(table, StoreSet(("x", "z"), (b"", bytes(700))))
    assert "full" in refusal(table, StoreAppend("x", bytes(500)))
    assert "no number" in refusal(table, StoreAdd("word", 1))
    table.ask("a", StoreAdd("n", 2**63 - 1))
    assert "64 bits" in refusal(table, StoreAdd("n", 1))
    table.ask("a", StoreDelete("x"))
    assert table.ask("a", StoreSet(("z",), (bytes(400),))) == [("a", StoreAnswer())]


def test_a_value_has_a_limit_however_it_grows() -> None:
    table: StoreTable[str] = StoreTable()
    assert f"at most {MAX_VALUE_BYTES}" in refusal(table, StoreSet(("x",), (bytes(MAX_VALUE_BYTES + 1),)))
    table.ask("a", StoreSet(("x",), (bytes(MAX_VALUE_BYTES),)))
    assert "at most" in refusal(table, StoreAppend("x", b"1"))


def test_an_answer_has_as_many_values_as_fit_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_table, "MAX_ANSWER_BYTES", 10)
    table: StoreTable[str] = StoreTable()
    table.ask("a", StoreSet(("x", "y", "z"), (bytes(11), bytes(5), bytes(5))))
    assert table.ask("a", StoreGet(("x", "y"))) == [("a", StoreAnswer(values=(bytes(11),)))]
    assert table.ask("a", StoreGet(("y", "z", "x"))) == [("a", StoreAnswer(values=(bytes(5), bytes(5))))]


KEYS = st.sampled_from("uvwx")
REQUESTS = st.one_of(
    st.builds(lambda found: StoreSet(tuple(found), tuple(found.values())), st.dictionaries(KEYS, st.binary(max_size=9))),
    st.builds(StoreAppend, KEYS, st.binary(max_size=9)),
    st.builds(StoreAdd, KEYS, st.integers(-9, 9)),
    st.builds(StoreCompareSet, KEYS, st.binary(max_size=1), st.binary(max_size=9)),
    st.builds(StoreDelete, KEYS),
    st.builds(lambda keys: StoreWait(tuple(keys)), st.lists(KEYS, max_size=3)),
)


@given(st.lists(st.tuples(st.integers(0, 4), REQUESTS), max_size=60))
def test_every_asker_whose_keys_exist_has_been_answered_and_bytes_are_counted_as_they_are(
    asked: list[tuple[int, object]],
) -> None:
    table: StoreTable[int] = StoreTable(max_bytes=600)
    waiting: dict[int, StoreWait] = {}
    for asker, request in asked:
        if asker in waiting:
            table.forget(asker)
            del waiting[asker]
        answered = [each for each, _ in table.ask(asker, request)]  # type: ignore[arg-type]
        if isinstance(request, StoreWait):
            waiting[asker] = request
        assert len(answered) == len(set(answered))
        for each in answered:
            if each in waiting:
                assert set(waiting.pop(each).keys) <= table._values.keys()
        for left in waiting.values():
            assert not set(left.keys) <= table._values.keys()
        assert set(table._waiting) == set(waiting)
        assert table._num_bytes == sum(len(key) + len(value) + 128 for key, value in table._values.items()) <= 600
