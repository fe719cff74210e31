"""Draws the pictures and tables of docs/design/schedule.md from the code of the schedules.

python -m scripts.draw.gantt docs/design/schedule.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_recover.core.values import Pipeline
from scripts.draw.timeline import Action, Timeline, disturbed, reopened, undisturbed

_CHARACTERS = 2
"""Width of a forward in a picture, in characters; a backward is twice as wide."""


def drawn(page: str) -> str:
    """Return `page` with every `<!-- drawn: NAME -->` block drawn anew.

    Raises KeyError for an unknown name.
    """

    def fill(block: re.Match[str]) -> str:
        return f"{block[1]}\n{DRAWINGS[block[2]]()}\n{block[3]}"

    return re.sub(r"(<!-- drawn: ([\w-]+) -->)\n.*?(<!-- end -->)", fill, page, flags=re.DOTALL)


def picture(timeline: Timeline, num_own: int, dealt: float | None = None) -> str:
    """Return a picture of a timeline, with one line per stage.

    The first `num_own` microbatches are digits. Microbatches that were dealt later, at time
    `dealt`, are letters.
    """
    pipe = timeline.pipe
    per_unit = _CHARACTERS * pipe.num_chunks
    width = round(timeline.end * per_unit)
    lines = []
    for stage in range(pipe.num_stages):
        line = "." * width
        for operation, start in timeline.starts.items():
            if operation.stage == stage:
                at, text = round(start * per_unit), _label(operation, pipe, num_own)
                line = line[:at] + text + line[at + len(text) :]
        lines.append(f"stage {stage} |{line}|")
    marks = [(timeline.asked, "the end is asked for")] + ([] if dealt is None else [(dealt, "another replica's are dealt")])
    lines += [f"         {' ' * round(time * per_unit)}^ {text}" for time, text in sorted(marks, reverse=True)]
    return "```text\n" + "\n".join(lines) + "\n```"


def _label(operation: Action, pipe: Pipeline, num_own: int) -> str:
    microbatch, late = operation.microbatch, operation.microbatch - num_own
    name = (str(microbatch) if late < 0 else chr(ord("A") + late)) + ("ab"[operation.chunk] if pipe.num_chunks > 1 else " ")
    return f"[{name}]" if operation.is_backward else name


def _late(pipe: Pipeline, num_own: int, num_late: int, arrival: float) -> str:
    return picture(disturbed(pipe, num_own, num_late, arrival), num_own, arrival)


def _remainders() -> str:
    """Return a table of the length of a pass by quota, in microbatches on one stage.

    Shows the cost of a quota that is no multiple of the number of stages, with and without virtual
    stages.
    """
    lines = ["| microbatches | " + " | ".join(map(str, range(1, 13))) + " |", "|---" * 13 + "|"]
    for pipe in (Pipeline(2), Pipeline(2, 2), Pipeline(4), Pipeline(4, 2)):
        name = f"PP {pipe.num_stages}" + (f", {pipe.num_chunks} chunks" if pipe.num_chunks > 1 else "")
        ends = [undisturbed(pipe, num).end / 3 for num in range(1, 13)]
        lines.append(f"| {name} | " + " | ".join(f"{end:.3g}" for end in ends) + " |")
    return "\n".join(lines)


def _late_losses() -> str:
    """Return a table of the delay of a pass by late microbatches, by the time of their arrival.

    The delay is in microbatches, the time in per cent of the pass.
    """
    fractions = [0.25, 0.5, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95]
    always = [(twentieth + 0.5) / 20 for twentieth in range(20)]
    lines = ["| dealt at | " + " | ".join(f"{fraction:.0%}" for fraction in fractions) + " | mean |", "|---" * 11 + "|"]
    for pipe, own, late in ((Pipeline(4), 8, 2), (Pipeline(4), 32, 2)):
        end = undisturbed(pipe, own).end
        models: tuple[tuple[str, Callable[[Pipeline, int, int, float], Timeline]], ...] = (
            ("as it is", disturbed), ("re-opened, at best", reopened),
        )  # fmt: skip
        for name, model in models:
            longer = {
                fraction: (model(pipe, own, late, end * fraction).end - end) / 3 for fraction in {*fractions, *always}
            }  # fmt: skip
            mean = sum(longer[fraction] for fraction in always) / len(always)
            cells = " | ".join(f"{longer[fraction]:.2g}" for fraction in fractions)
            lines.append(f"| {own} + {late}, {name} | {cells} | {mean:.3g} |")
    return "\n".join(lines)


DRAWINGS: Mapping[str, Callable[[], str]] = {
    "fault-free": lambda: picture(undisturbed(Pipeline(4), 6), 6),
    "in-schedule": lambda: _late(Pipeline(4), 6, 2, 11.0),
    "second-pass": lambda: _late(Pipeline(4), 6, 2, 21.0),
    "virtual": lambda: picture(undisturbed(Pipeline(2, 2), 4), 4),
    "virtual-in-schedule": lambda: _late(Pipeline(2, 2), 4, 1, 5.0),
    "remainders": _remainders,
    "late-losses": _late_losses,
}
"""Functions that draw the blocks of docs/design/schedule.md, by the name in the block's marker."""


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(drawn(path.read_text()))
