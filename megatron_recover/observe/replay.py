"""The second reading of a trace: event by event, with the steps that are open, each handed over when its last event has passed.

What members did of a step before that was made void is left out (`History.is_void`).

The first reading has told on which line that is (`History.steps`), so a step is whole when it is judged, however late one of
its writers was, and one that was never committed is judged, too. What is in memory are the steps that have begun and not ended
in the trace: two while nothing fails, and one more for each event that comes later than that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from megatron_recover import trace
from megatron_recover.observe.history import History, Line
from megatron_recover.observe.step import TAKE, Step

Taker = Callable[[Line, Any, Any], Iterable[Any]]
"""Takes an event in, with the `Step` that it is of as that was before (None: of none); returns what it has found."""


class Watcher(Protocol):
    """Who wants to see a trace pass by."""

    def takes(self) -> Mapping[type, Taker]:
        """What takes in which type of event."""

    def closed(self, step: Step) -> Iterable[Any]:
        """Look at a step that is whole; returns what was found."""


def replay[W: Watcher](history: History, watchers: Sequence[W]) -> Iterator[tuple[W, Step | None, Any]]:
    """Read the events once more; yield whatever a watcher finds, with the step that it is about, if it is about one."""
    takers: dict[type, list[tuple[W, Taker]]] = defaultdict(list)
    for watcher in watchers:
        for kind, take in watcher.takes().items():
            takers[kind].append((watcher, take))
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
        for watcher, take in takers.get(kind, ()) if not is_void else ():
            if findings := take(line, event, step):  # `()` of nearly all
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
    """Every step of a trace, whole, in the order in which they ended."""

    class Closing:
        def takes(self) -> Mapping[type, Taker]:
            return {}

        def closed(self, step: Step) -> Iterable[Step]:
            return (step,)

    for _, _, step in replay(history, [Closing()]):
        yield step
