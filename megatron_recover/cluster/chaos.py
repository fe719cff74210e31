"""The faults of a run: a file of exact faults, or a rate and a seed that become such a file.

Everything is decided before the run starts, so the file `chaos.toml` in the run directory
reproduces the run's faults.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from megatron_recover import toml_file, trace
from megatron_recover.faults import LEADER_ONLY, NEWCOMER_ONLY, Fault, FaultKind, FaultPoint, never_passed
from megatron_recover.flags import did_you_mean

CHAOS_FILE = "chaos.toml"

_SLOWEST = 1000
"""Greatest factor of a slow rank. A slower rank counts as one that stands still, which is another
kind of fault."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The job that faults are meant for."""

    num_replicas: int
    num_ranks: int
    """Ranks of one replica."""
    num_microbatches: int
    """Microbatches of one step."""
    num_steps: int | None
    """Number of training steps of the run; None: not known before the run. Faults strike in
    the steps numbered below it, among which evaluation steps count too."""
    min_replicas: int = 1
    heals: bool = False
    """True if newcomers may be formed, under the ids from `num_replicas` on."""


# --- Exact faults ---------------------------------------------------------------------------------


def parse(text: str, target: Target) -> tuple[Fault, ...]:
    """Return the faults of a chaos file.

    Raises ValueError with one line per mistake: the line in the file, the mistake and the remedy.
    """
    content = toml_file.read(text)
    found = [
        f"line {toml_file.line_of_key(text, key, 0)}: unknown key '{key}'; a chaos file has [[fault]] tables only"
        for key in content
        if key != "fault"
    ]
    tables = content.get("fault", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError("\n".join([*found, "'fault' is no array of tables; write each fault as a [[fault]] table"]))
    for index, table in enumerate(tables):
        start = toml_file.line_of_table(text, "fault", index)
        found += toml_file.located(text, table, start, _mistakes(table, target))
    if found:
        raise ValueError("\n".join(found))
    return tuple(msgspec.convert(tables, list[Fault]))


def _mistakes(table: Mapping[str, object], target: Target) -> Iterator[toml_file.Mistake]:
    yield from toml_file.mistakes(table, Fault, _limits(target))
    yield from never_passed(table)
    yield from _slow_mistakes(table)
    yield from _newcomer_mistakes(table, target)
    until = table.get("until")
    freezes = table.get("kind") == FaultKind.FREEZE.value
    if freezes and until is None:
        yield "until", 'until is missing; name the event of the trace that ends the freeze, such as until = "generation"'
    elif isinstance(until, str) and not freezes:
        yield "until", 'until is for a freeze only; give kind = "freeze"'
    elif isinstance(until, str) and until not in trace.NAMES:
        remedy = did_you_mean(until, trace.NAMES, f"known are {', '.join(trace.NAMES)}")
        yield "until", f"until: there is no event '{until}'; {remedy}"


def _slow_mistakes(table: Mapping[str, object]) -> Iterator[toml_file.Mistake]:
    slow, compute = FaultKind.SLOW.value, FaultPoint.COMPUTE.value
    if table.get("kind") != slow:
        for key in ("factor", "steps"):
            if key in table:
                yield key, f'{key} is for a slow rank only; give kind = "{slow}"'
        if table.get("point") == compute:
            yield "point", f'point = "{compute}" is for a slow rank only; give kind = "{slow}"'
        return
    if "factor" not in table:
        yield "factor", "factor is missing; say how many times as long the rank takes, such as factor = 2.0"
    if table.get("point", compute) != compute:
        yield "point", f'a slow rank is slow in every forward and backward; give point = "{compute}"'
    for key in ("microbatch", "bucket", "occurrence"):
        if key in table:
            yield key, f"{key} does not fit a slow rank, which is so for whole steps; leave it out"


def _newcomer_mistakes(table: Mapping[str, object], target: Target) -> Iterator[toml_file.Mistake]:
    """Yield a mistake if the point is one that no replica of this id passes."""
    replica, point = table.get("replica"), table.get("point")
    if type(replica) is not int or point not in {each.value for each in NEWCOMER_ONLY}:
        return
    if not target.heals:
        yield "point", f"{point} is passed by newcomers only, and this job forms none; give --recover-heal in-place"
    elif replica < target.num_replicas:
        yield "replica", f"only newcomers pass {point}; give replica = {target.num_replicas}, the first of their ids, or more"


def _limits(target: Target) -> dict[str, tuple[float, float]]:
    """Return the least and the greatest value of each number in a fault."""
    return {
        "replica": (0, math.inf if target.heals else target.num_replicas - 1),
        "rank": (0, target.num_ranks - 1),
        "step": (0, math.inf),
        "microbatch": (0, target.num_microbatches - 1),
        "bucket": (0, math.inf),
        "occurrence": (1, math.inf),
        "factor": (1, _SLOWEST),
        "steps": (1, math.inf),
    }


def render(faults: Sequence[Fault], comment: str) -> str:
    """Return the text of a chaos file with these faults, which `parse` reads back."""
    lines = [f"# {comment}"]
    for fault in faults:
        lines += ["", "[[fault]]"]
        for key, value in msgspec.to_builtins(fault).items():
            lines.append(f"{key} = {value}" if isinstance(value, int | float) else f'{key} = "{value}"')
    return "\n".join(lines) + "\n"


# --- Faults at random -----------------------------------------------------------------------------

IN_A_STEP = (
    FaultPoint.FORWARD,
    FaultPoint.BACKWARD,
    FaultPoint.BEFORE_REDUCE,
    FaultPoint.REDUCE,
    FaultPoint.BEFORE_VOTE,
    FaultPoint.IN_VOTE,
    FaultPoint.AFTER_VOTE,
    FaultPoint.OPTIMIZER,
)
"""Points of an undisturbed training step. A replica with quota 0 passes no `forward`, no `backward`
(`core/quota.py`, Note [Quota 0])."""
IN_A_RECOVERY = (FaultPoint.PROMISE, FaultPoint.STATUS, FaultPoint.RECOMPUTE, FaultPoint.SECOND_REDUCE)
"""Points at which a death strikes while an earlier death is being repaired."""
_SECOND_DEATH = 0.3
"""Probability that a fault is followed by one inside its recovery, as long as replicas are left for
that."""


class Rate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rate of faults as the command line gives it: ``rate=0.1,seed=7,steps=100``."""

    rate: float
    """Probability that a step has a fault."""
    seed: int
    steps: int | None = None
    """Length of the schedule in steps; None: that of the run."""


def parse_rate(text: str) -> Rate:
    """Return a rate from the command line. Raises ValueError with one line per mistake."""
    words = [word.partition("=") for word in text.split(",")]
    given = {key.strip(): value.strip() for key, _, value in words}
    found = [what for _, what in toml_file.mistakes(given, Rate, {"rate": (0, 1), "steps": (1, math.inf)}, strict=False)]
    if len(given) < len(words):
        found.append("a key is given twice")
    if found:
        raise ValueError("\n".join(f"{what}; give rate=NUMBER,seed=NUMBER and, if you like, steps=NUMBER" for what in found))
    return msgspec.convert(given, Rate, strict=False)


def schedule(rate: Rate, target: Target) -> tuple[Fault, ...]:
    """Return kills at random steps, ranks and instants: a pure function of rate, seed and job.

    No replica is hit twice, and as many replicas as the job needs are never hit. Raises ValueError
    if neither `rate` nor `target` has the number of steps.
    """
    num_steps = rate.steps if rate.steps is not None else target.num_steps
    if num_steps is None:
        raise ValueError("the number of steps is not known; give it: rate=...,seed=...,steps=NUMBER")
    dice = random.Random(rate.seed)
    living = list(range(target.num_replicas))
    faults: list[Fault] = []
    for step in range(num_steps):
        if dice.random() >= rate.rate or len(living) <= target.min_replicas:
            continue
        faults.append(_strike(dice, living, step, dice.choice(IN_A_STEP), target))
        if len(living) > target.min_replicas and dice.random() < _SECOND_DEATH:
            faults.append(_strike(dice, living, step, dice.choice(IN_A_RECOVERY), target))
    return tuple(faults)


def _strike(dice: random.Random, living: list[int], step: int, point: FaultPoint, target: Target) -> Fault:
    replica = living.pop(dice.randrange(len(living)))
    rank = 0 if point in LEADER_ONLY else dice.randrange(target.num_ranks)
    occurrence = 1
    if point in (FaultPoint.FORWARD, FaultPoint.BACKWARD):
        # Equally fast members each compute at least this many microbatches of a step, whichever
        # replicas are left, if there are enough for all. In a slower member, or if there are not,
        # the fault may not strike.
        occurrence = 1 + dice.randrange(max(1, target.num_microbatches // target.num_replicas))
    return Fault(replica=replica, rank=rank, point=point, step=step, occurrence=occurrence)


def faults_of(argument: str, target: Target) -> tuple[tuple[Fault, ...], str]:
    """Return the faults of `--chaos ARGUMENT`, and the text of the file that reproduces them.

    An argument that is no existing path and has a `=` is a rate. Raises ValueError.
    """
    try:
        if Path(argument).exists() or "=" not in argument:
            text = Path(argument).read_text(encoding="utf-8")
            return parse(text, target), text
        faults = schedule(parse_rate(argument), target)
    except OSError as error:
        raise ValueError(
            f"--chaos {argument}: cannot be read ({error.strerror}); give a TOML file, or rate=NUMBER,seed=NUMBER"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--chaos {argument}: not a TOML file: {error}") from error
    except ValueError as error:
        raise ValueError("\n".join(f"--chaos {argument}: {line}" for line in str(error).splitlines())) from error
    return faults, render(faults, f"--chaos {argument}; this file reproduces it")


def unstruck(faults: Sequence[Fault], struck: Sequence[tuple[int, int, str | None]]) -> Iterator[tuple[int, Fault]]:
    """Yield the faults that never struck, numbered from 1 in `faults`.

    `struck`: replica, rank and point of each fault in the trace. Of several faults with these in
    common, the first ones count as those that struck.
    """
    left = Counter(struck)
    for number, fault in enumerate(faults, 1):
        where = (fault.replica, fault.rank, fault.point.value)
        if left[where]:
            left[where] -= 1
        else:
            yield number, fault
