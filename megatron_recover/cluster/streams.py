"""The way of what ranks print, as torchrun's flags choose it: files by stream, and the console.

Without these flags each rank has one log with both streams, and the console shows lines of the
job's writer (`narrator.py`). Nothing here touches a file or a process.

A rank is numbered here among all ranks of all replicas, from 0: its *place*. All ranks are on one
node, so these are the numbers that torchrun calls local ranks. (The variable LOCAL_RANK names the
rank's GPU, which several ranks can share.)
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Iterable, Mapping
from string import Template

import msgspec

PREFIX = "[${role_name}${local_rank}]:"
"""Template of the text in front of a teed line, as for torchrun."""


class Stream(enum.IntFlag):
    """Streams of a process, by torchrun's numbers."""

    OUT = 1
    ERR = 2


class Tee(msgspec.Struct, frozen=True):
    """The way of one output's lines to the console."""

    prefix: str
    """Text in front of each line."""
    is_error: bool
    """True: the lines go to the launcher's stderr."""
    filters: tuple[str, ...] = ()
    """Texts; a line with one of them is also in a log of such lines."""


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """The user's choices for all ranks. A mapping is from places to streams."""

    redirects: int | Mapping[int, int] = 0
    """Streams that have a log by themselves, and are not shown on the console."""
    tee: int | Mapping[int, int] = 0
    """Streams that have a log by themselves, and whose every line is shown on the console."""
    shown: frozenset[int] = frozenset()
    """Places of which anything is shown on the console; empty: all."""
    prefix: str = PREFIX
    role: str = "default"
    filters: Mapping[Stream, tuple[str, ...]] = {}
    """Stream -> texts (`Tee.filters`)."""

    @property
    def named(self) -> dict[str, set[int]]:
        """Return the places that each flag names."""
        by_flag = {"--redirects": self.redirects, "--tee": self.tee, "--local-ranks-filter": self.shown}
        return {flag: set() if isinstance(each, int) else {*each} for flag, each in by_flag.items()}

    def are_split(self, place: int) -> bool:
        """Return whether stdout and stderr of a rank have a log each."""
        return bool(_at(self.redirects, place) | _at(self.tee, place))

    def tee_of(self, place: int, stream: Stream) -> Tee | None:
        """Return how a stream of a rank is teed; None if it is not."""
        if not _at(self.tee, place) & stream or not self._is_shown(place):
            return None
        names = {"role_name": self.role, "local_rank": place, "rank": place, "hostname": socket.gethostname()}
        prefix = Template(self.prefix).safe_substitute(names)
        return Tee(prefix, is_error=stream is Stream.ERR, filters=self.filters.get(stream, ()))

    def is_on_console(self, place: int, stream: Stream, alike: Iterable[int] = ()) -> bool:
        """Return whether the console may show a stream of a rank that is not teed.

        `alike`: the places of this rank in all replicas. Only the writer's lines are shown, and any
        replica may become the writer, so a filter that names one of these ranks means all.
        """
        is_shown = any(map(self._is_shown, (place, *alike)))
        return not (_at(self.redirects, place) | _at(self.tee, place)) & stream and is_shown

    def _is_shown(self, place: int) -> bool:
        return not self.shown or place in self.shown


def _at(streams: int | Mapping[int, int], place: int) -> int:
    return streams if isinstance(streams, int) else streams.get(place, 0)
