"""A pure function that keeps its newest answer computes once for equal arguments, and again for others."""

from __future__ import annotations

from megatron_recover.core.memo import newest_kept


def test_the_newest_answer_is_kept_and_no_other() -> None:
    computed: list[tuple[tuple[int, ...], int]] = []

    @newest_kept
    def total(numbers: tuple[int, ...], factor: int = 1) -> int:
        computed.append((numbers, factor))
        return factor * sum(numbers)

    assert [total((1, 2)), total((1, 2)), total((1, 2), factor=2), total((1, 2), factor=2), total((1, 2))] == [3, 3, 6, 6, 3]
    assert computed == [((1, 2), 1), ((1, 2), 2), ((1, 2), 1)]
    total.forget()
    assert total((1, 2)) == 3 and len(computed) == 4


def test_an_answer_of_none_is_kept_too() -> None:
    calls = []

    @newest_kept
    def nothing(argument: int) -> None:
        calls.append(argument)

    nothing(1)
    nothing(1)
    assert calls == [1]
