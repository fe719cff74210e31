"""Numbers and lists in the sentences that users read."""

from __future__ import annotations

from collections.abc import Collection


def counted(number: int, noun: str, several: str = "") -> str:
    """Return a number with its noun, such as `1 replica` or `2 processes`.

    `several`: the plural of the noun; empty for the noun with an s.
    """
    return f"{number} {noun if number == 1 else several or f'{noun}s'}"


def named(numbers: Collection[int], *, between: str = " ") -> str:
    """Return replicas by their numbers: `replica 2`, `replicas 0 2`, or `no replica`."""
    if not numbers:
        return "no replica"
    return f"replica{'s' * (len(numbers) > 1)} {between.join(map(str, numbers))}"


def verb(number: int, one: str, several: str) -> str:
    """Return the form of a verb for a number of subjects."""
    return one if number == 1 else several
