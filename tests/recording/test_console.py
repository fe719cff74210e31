"""The terminal of a run: it may be slow, stopped, closed, or the shell's."""

from __future__ import annotations

import io
import threading

from msgspec.structs import replace

from megatron_recover.cluster.console import Console
from megatron_recover.deadlines import Deadlines


def test_lines_are_shown_in_their_order_and_the_end_behind_them() -> None:
    printed = io.StringIO()
    console = Console(stream=printed)
    for number in range(5):
        console.show(f"line {number}")
    console.start()
    console.end(["the end", "what to do"])
    assert console.close()
    assert printed.getvalue().splitlines() == [*(f"line {number}" for number in range(5)), "the end", "what to do"]


def test_who_wants_it_quiet_is_shown_the_end_alone() -> None:
    printed = io.StringIO()
    console = Console(quiet=True, stream=printed)
    console.show("line")
    console.start()
    console.end(["the end"])
    assert console.close() and printed.getvalue() == "the end\n"


class Closed(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_terminal_that_was_closed_ends_nothing() -> None:
    console = Console(stream=Closed())
    console.show("something that nobody reads")
    console.start()
    console.end(["the end"])
    assert console.close()


def test_a_terminal_that_takes_nothing_is_noticed() -> None:
    goes_on = threading.Event()

    class Stopped(io.StringIO):
        def write(self, text: str) -> int:
            assert goes_on.wait(60)
            return len(text)

    console = Console(stream=Stopped(), deadlines=replace(Deadlines.of(), screen_s=0.5))
    console.start()
    console.end(["the end"])
    assert not console.close()
    goes_on.set()
    console._thread.join(40.0)
    assert not console._thread.is_alive()


def test_while_the_shell_has_the_terminal_nothing_is_written() -> None:
    printed, held = io.StringIO(), threading.Event()
    looked = threading.Semaphore(0)

    def is_held() -> bool:
        looked.release()
        return not held.is_set()

    console = Console(stream=printed, is_held=is_held)
    console.show("something")
    console.start()
    assert looked.acquire(timeout=40) and looked.acquire(timeout=40)
    assert printed.getvalue() == ""
    held.set()
    console.close()
    assert "something" in printed.getvalue()
