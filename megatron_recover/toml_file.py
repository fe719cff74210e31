"""Mistakes in a TOML file that a user wrote, each with its line.

This module decides nothing about what a file means; a `msgspec.Struct` does that. The standard
library's parser gives no line of a key. So the key is looked for in the text, which works for files
with one `key = value` a line.
"""

from __future__ import annotations

import enum
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import msgspec

from megatron_recover.flags import did_you_mean

Mistake = tuple[str, str]
"""(the key that is wrong, what is wrong with it)."""


def read(text: str) -> dict[str, Any]:
    """Return the content of a TOML file. Raise ValueError if `text` is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not a TOML file: {error}") from error


def mistakes(
    table: Mapping[str, object],
    kind: type[msgspec.Struct],
    limits: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    *,
    strict: bool = True,
) -> Iterator[Mistake]:
    """Yield a `Mistake` for each wrong or missing key of a table that is to become a `kind`.

    `limits` has the least and the greatest value of numbers, by key. Without `strict` numbers may
    be written as strings.
    """
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        if key not in fields:
            yield key, f"unknown key '{key}'; " + did_you_mean(key, fields, f"known are {', '.join(fields)}")
            continue
        try:
            number = msgspec.convert(value, fields[key].type, strict=strict)
        except msgspec.ValidationError as error:
            choices = _choices(fields[key].type)
            yield key, f"{key}: {error}" + (f"; known are {', '.join(choices)}" if choices else "")
            continue
        if key in limits:
            least, greatest = limits[key]
            if not least <= number <= greatest:
                yield key, f"{key} is {number}; it must be {least} " + (f"to {greatest}" if greatest < math.inf else "or more")
        elif isinstance(number, float) and not math.isfinite(number):
            yield key, f"{key} is {number}; it must be a finite number"
    for field in fields.values():
        if field.required and field.name not in table:
            yield field.name, f"{field.name} is missing"


def _choices(kind: Any) -> list[str]:
    """Return the values of a field that allows a few values only; else nothing."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [str(member.value) for member in kind]
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return next((choices for part in get_args(kind) if (choices := _choices(part))), [])


def line_of_table(text: str, name: str, index: int = 0) -> int:
    """Return the line number (from 1) of header number `index` (from 0), `[name]` or `[[name]]`.

    Return 0 if there are fewer such headers, as when the file writes the table in another way.
    """
    header = re.compile(rf"\s*\[+\s*{re.escape(name)}\s*\]")
    found = [number for number, line in enumerate(text.splitlines(), 1) if header.match(line)]
    return found[index] if index < len(found) else 0


def line_of_key(text: str, key: str, start: int) -> int:
    """Return the line number (from 1) of the first `key =` (or table `key`) after line `start`.

    Return `start` if there is none.
    """
    found = re.compile(rf'\s*(\[+\s*)?["\']?{re.escape(key)}["\']?\s*[=\].]')
    for number, line in enumerate(text.splitlines(), 1):
        if number > start and found.match(line):
            return number
    return start


def located(text: str, table: Mapping[str, object], start: int, found: Iterator[Mistake]) -> list[str]:
    """Return each mistake in a table with its line, for a missing key the header's line `start`."""
    return [f"line {line_of_key(text, key, start) if key in table else start}: {mistake}" for key, mistake in found]
