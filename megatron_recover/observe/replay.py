"""Read a trace for the second time, event by event, with the steps that are open.

The first reading has recorded the last line of each step (`History.steps`). So a step is handed
over when its last event has been read: it is whole however late one of its writers was, also if the
step was never committed.

Memory holds only the steps that have begun and not ended in the trace: two while nothing fails, and
one more for each step whose last event comes late.

Attempts at a step that were made void are left out (`History.is_void`), except for watchers that
ask for their events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from megatron_recover import trace
from megatron_recover.observe.facts import Line
from megatron_recover.observe.history import History
from megatron_recover.observe.step import TAKE, Step

Taker = Callable[[Line, Any, Any], Iterable[Any]]
"""Function of (line, event, step) that returns its findings. `step` is the `Step` of the event as
it was before the event, or None if the event names no step."""


class Watcher(Protocol):
    """An observer of a trace that is replayed."""

    def takes(self) -> Mapping[type, Taker]:
        """Return the function that takes each type of event."""

    def takes_void(self) -> Mapping[type, Taker]:
        """Return the function that takes each type of event of attempts that were made void."""

    def closed(self, step: Step) -> Iterable[Any]:
        """Look at a step that is whole; return what was found."""


def replay[W: Watcher](history: History, watchers: Sequence[W]) -> Iterator[tuple[W, Step | None, Any]]:
    """Read the events once more and yield each finding of a watcher.

    A finding comes with its watcher, and with its step or None.
    """
    takers: dict[type, list[tuple[W, Taker]]] = defaultdict(list)
    of_void: dict[type, list[tuple[W, Taker]]] = defaultdict(list)
    for watcher in watchers:
        for kind, take in watcher.takes().items():
            takers[kind].append((watcher, take))
        for kind, take in watcher.takes_void().items():
            of_void[kind].append((watcher, take))
    recovered_in = {generation: facts.step for generation, facts in history.recoveries.items()}
    steps, open_steps = history.steps, dict[int, Step]()
    number: int | None = None
    facts_last, step = -1, None
    for line, event in history.events:
        kind = type(event)
        now = getattr(event, "step", None)
        if now != number or step is None:
            number, step = now, None
            if number is not None:
                step = open_steps.get(number)
                if step is None:
                    step = open_steps[number] = Step(history, number)
                facts_last = steps[number].last_line
        is_void = history.is_void(event)
        for watcher, take in (of_void if is_void else takers).get(kind, ()):
            if findings := take(line, event, step):  # `()` for nearly all events
                for found in findings:
                    yield watcher, step, found
        if step is None:
            if isinstance(event, trace.Generation):
                recovered = open_steps.get(recovered_in.pop(event.generation, -1))
                if recovered is not None:
                    recovered.announced(line, event.generation)
            continue
        add = TAKE.get(kind) if not is_void else None
        if add is not None:
            add(step, line, event)
        if line >= facts_last:
            del open_steps[step.number]
            yield from _close(step, watchers)
            number, step = None, None
    for step in open_steps.values():  # the trace has become shorter since the first reading
        yield from _close(step, watchers)


def _close[W: Watcher](step: Step, watchers: Sequence[W]) -> Iterator[tuple[W, Step, Any]]:
    step.close()
    for watcher in watchers:
        for found in watcher.closed(step):
            yield watcher, step, found


def each_step(history: History) -> Iterator[Step]:
    """Yield every step of a trace, whole, in the order in which the steps end in the trace."""

    class Closing:
        def takes(self) -> Mapping[type, Taker]:
            return {}

        def takes_void(self) -> Mapping[type, Taker]:
            return {}

        def closed(self, step: Step) -> Iterable[Step]:
            return (step,)

    for _, _, step in replay(history, [Closing()]):
        yield step
