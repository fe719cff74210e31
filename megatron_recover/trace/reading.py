"""Reading of a log, line by line.

A process that was killed in mid-write may have left a fragment of a line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from megatron_recover.trace import event_files
from megatron_recover.trace.catalog import AnyEvent
from megatron_recover.trace.event import Event
from megatron_recover.trace.event_files import TraceError

_START_OF_EVENT = b'{"event":"'
_VERSION = re.compile(rb'{"event":"\w+","v":([0-9]+),')


_OURS = Event().v
_decode = msgspec.json.Decoder(AnyEvent).decode


def name_in(line: bytes) -> str:
    """Return the name of the event in a line of a log, without decoding the line.

    For a line that is no event it returns any text, mostly none of `NAMES`.
    """
    return line[len(_START_OF_EVENT) :].partition(b'"')[0].decode(errors="replace")


def parse(line: bytes) -> tuple[AnyEvent | None, str]:
    """Return the event of one line of a log, and the fragment before the event or in its place.

    The event is None, or the fragment is empty, if the line has none. `line` includes its newline;
    the last line of a log may lack it, and is then a fragment. A process that is killed while it
    writes can leave the beginning of a line. Such a fragment is at the end of the file, or the next
    process's event follows it directly. A fragment is neither an event nor an error. Any other line
    that is no event of this version raises ValueError.
    """
    whole = line.endswith(b"\n")
    if whole and line.startswith(_START_OF_EVENT):
        try:
            return _decode(line), ""
        except msgspec.DecodeError:  # a fragment before the event, or no event: decided below
            pass
    start = line.rfind(_START_OF_EVENT)
    fragment = line[: max(start, 0)] if whole else line
    if not fragment.startswith(_START_OF_EVENT[: len(fragment)]):
        raise ValueError(f"not an event: {line[:60]!r}")
    try:
        event = _decode(line[max(start, 0) :]) if whole else None
    except msgspec.DecodeError as error:  # ValidationError included; its message names the field
        version = _VERSION.match(line, max(start, 0))
        if version is not None and int(version[1]) != _OURS:
            raise ValueError(
                "written by another version of megatron-recover (run.json names it, if it is there); read it with that one"
            ) from error
        raise ValueError(str(error)) from error
    return event, fragment.decode(errors="replace")


def read(path: str | Path, on_cut: Callable[[int, str], None] | None = None) -> Iterator[tuple[int, AnyEvent]]:
    """Yield (line number from 1, event) of a log in its order; numbers continue from part to part.

    `path` is a run directory or its `events.jsonl`, for all parts (`event_files`), or one file,
    compressed or not. `on_cut(line, fragment)` is called for every fragment (see `parse`). Raises
    `TraceError` for a line that is no event or a file that cannot be read, and FileNotFoundError if
    there is no log.
    """
    for number, (place, line_of_file, line) in enumerate(event_files.lines(Path(path)), start=1):
        try:
            event, fragment = parse(line)
        except ValueError as error:
            raise TraceError(f"{place}:{line_of_file}: {error}") from error
        if fragment and on_cut is not None:
            on_cut(number, fragment)
        if event is not None:
            yield number, event
