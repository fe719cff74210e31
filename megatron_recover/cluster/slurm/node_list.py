"""Expand Slurm's host lists, such as `n[001-004,7],login1`, without a command of Slurm.

The result is that of `scontrol show hostnames`, duplicates included. Text behind the last bracket
(`n[1-2]-ib`), which Slurm refuses, is accepted.

Note [The order of dimensions]
    Slurm varies the last bracket of a name fastest. Of the others it varies the first one fastest:
    `a[1-2]b[1-2]c[1-2]` begins with a1b1c1, a1b1c2, a2b1c1. Slurm numbers the nodes of a job in
    this order.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

HOSTS_MAX = 100_000
"""Largest number of hosts in one list. A mistyped range would otherwise fill the memory."""
_SEPARATORS = re.compile(r"[\s,]+")
_NAME = re.compile(r"[^\s,\[\]]*(?:\[[^\[\]]*\][^\s,\[\]]*)*")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str) -> tuple[str, ...]:
    """Return the hosts that `text` names, in Slurm's order.

    Raises ValueError for text that is no host list, or that names more than `HOSTS_MAX` hosts.
    """
    hosts: list[str] = []
    position = 0
    while position < len(text):
        if (gap := _SEPARATORS.match(text, position)) is not None:
            position = gap.end()
            continue
        found = _NAME.match(text, position)
        if found is None or found.end() == position or not _ends(text, found.end()):
            raise ValueError(f"{text!r} is no host list: a bracket is missing at character {position + 1}")
        hosts.extend(itertools.islice(_hosts(found[0], text), HOSTS_MAX + 1))
        if len(hosts) > HOSTS_MAX:
            raise ValueError(f"{text!r} names more than {HOSTS_MAX} hosts")
        position = found.end()
    return tuple(hosts)


def _ends(text: str, position: int) -> bool:
    return position == len(text) or _SEPARATORS.match(text, position) is not None


def _hosts(name: str, text: str) -> Iterator[str]:
    """Yield the hosts of one name with brackets (Note [The order of dimensions])."""
    literals = _BRACKET.split(name)[::2]
    dimensions = [_numbers(each, text) for each in _BRACKET.findall(name)]
    if not dimensions:
        yield name
        return
    *others, last = dimensions
    for reversed_others in itertools.product(*reversed(others)):
        for number in last:
            numbers = (*reversed(reversed_others), number, "")
            yield "".join(itertools.chain.from_iterable(zip(literals, numbers, strict=True)))


def _numbers(bracket: str, text: str) -> list[str]:
    """Return the numbers of one bracket, each as wide as the lower end of its range."""
    found: list[str] = []
    for part in bracket.split(","):
        matched = _RANGE.fullmatch(part.strip())
        if matched is None:
            raise ValueError(f"{text!r} is no host list: {part!r} in brackets is neither a number nor a range such as 1-4")
        low, high = matched[1], matched[2] or matched[1]
        if int(high) < int(low):
            raise ValueError(f"{text!r} is no host list: the range {part} ends below its beginning")
        if int(high) - int(low) >= HOSTS_MAX:
            raise ValueError(f"{text!r} names more than {HOSTS_MAX} hosts")
        found.extend(f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1))
    return found
