"""Which faults a run gets: a file of exact ones, or a rate and a seed that are turned into such a file.

Decides before anything starts, so that every chaos run is reproduced by the file `chaos.toml` in its run directory.
"""

from __future__ import annotations

import difflib
import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from megatron_recover.faults import Fault, FaultPoint

CHAOS_FILE = "chaos.toml"
_KEYS = Fault.__struct_fields__


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The job that faults are meant for."""

    num_replicas: int
    num_ranks: int
    """Of one replica."""
    num_microbatches: int
    """Of one step."""
    num_steps: int | None
    """None: not known before the run."""
    min_replicas: int = 1


# --- Exact faults --------------------------------------------------------------------------------------------------------


def parse(text: str, target: Target) -> tuple[Fault, ...]:
    """The faults of a chaos file. Raises ValueError that names the line and the remedy."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not a TOML file: {error}") from error
    for key in content.keys() - {"fault"}:
        raise ValueError(f"line {_line_of_key(text, key, 0)}: unknown key '{key}'; a chaos file has [[fault]] tables only")
    tables = content.get("fault", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError("'fault' is no array of tables; write each fault as a [[fault]] table")
    return tuple(_fault(text, index, table, target) for index, table in enumerate(tables))


def _fault(text: str, index: int, table: Mapping[str, object], target: Target) -> Fault:
    start = _line_of_table(text, index)
    for key in table.keys() - set(_KEYS):
        close = difflib.get_close_matches(key, _KEYS, n=1)
        remedy = f"did you mean '{close[0]}'?" if close else f"known are {', '.join(_KEYS)}"
        raise ValueError(f"line {_line_of_key(text, key, start)}: unknown key '{key}'; {remedy}")
    try:
        fault = msgspec.convert(table, Fault)
        fault.check()
    except msgspec.ValidationError as error:
        field = re.search(r"\$\.(\w+)", str(error))
        line = _line_of_key(text, field[1], start) if field else start
        choices = f"; points are {', '.join(point.value for point in FaultPoint)}" if field and field[1] == "point" else ""
        raise ValueError(f"line {line}: {error}{choices}") from error
    except ValueError as error:
        raise ValueError(f"line {start}: {error}") from error
    for name, value, limit in (
        ("replica", fault.replica, target.num_replicas),
        ("rank", fault.rank, target.num_ranks),
        ("microbatch", fault.microbatch or 0, target.num_microbatches),
    ):
        if value >= limit:
            raise ValueError(f"line {_line_of_key(text, name, start)}: {name} is {value}; this job has 0 to {limit - 1}")
    return fault


def _line_of_table(text: str, index: int) -> int:
    """Line number (from 1) of the index-th [[fault]]; 0 where the file says it in another way."""
    headers = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*fault\s*\]\]", line)]
    return headers[index] if index < len(headers) else 0


def _line_of_key(text: str, key: str, start: int) -> int:
    """Line number (from 1) of the first `key =` (or table `key`) behind line `start`; `start` where it is not found."""
    found = re.compile(rf'\s*(\[+\s*)?["\']?{re.escape(key)}["\']?\s*[=\].]')
    for number, line in enumerate(text.splitlines(), 1):
        if number > start and found.match(line):
            return number
    return start


def render(faults: Sequence[Fault], comment: str) -> str:
    """A chaos file with these faults; `parse` reads it back."""
    lines = [f"# {comment}"]
    for fault in faults:
        lines += ["", "[[fault]]"]
        for key, value in msgspec.to_builtins(fault).items():
            lines.append(f"{key} = {value}" if isinstance(value, int) else f'{key} = "{value}"')
    return "\n".join(lines) + "\n"


# --- Faults at random ----------------------------------------------------------------------------------------------------

_IN_A_STEP = (
    FaultPoint.FORWARD,
    FaultPoint.BACKWARD,
    FaultPoint.BEFORE_REDUCE,
    FaultPoint.REDUCE,
    FaultPoint.BEFORE_VOTE,
    FaultPoint.IN_VOTE,
    FaultPoint.AFTER_VOTE,
    FaultPoint.OPTIMIZER,
)
_IN_A_RECOVERY = (FaultPoint.PROMISE, FaultPoint.STATUS, FaultPoint.RECOMPUTE, FaultPoint.SECOND_REDUCE)
_LEADER_ONLY = frozenset({FaultPoint.IN_VOTE, FaultPoint.STATUS})
_SECOND_DEATH = 0.3
"""How often a fault is followed by one inside the recovery from it, as long as replicas are left for it."""


class Rate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``rate=0.1,seed=7,steps=100``."""

    rate: float
    """Probability that a step has a fault."""
    seed: int
    steps: int | None = None
    """Length of the schedule; by default that of the run."""


def parse_rate(text: str) -> Rate:
    """A rate from the command line. Raises ValueError."""
    words = [word.partition("=") for word in text.split(",")]
    for key, equals, _ in words:
        if key not in Rate.__struct_fields__ or not equals:
            raise ValueError(f"'{key}' is unknown; give rate=NUMBER,seed=NUMBER and, if you like, steps=NUMBER")
    try:
        rate = msgspec.convert({key: value for key, _, value in words}, Rate, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}; give rate=NUMBER,seed=NUMBER and, if you like, steps=NUMBER") from error
    if not 0 <= rate.rate <= 1:
        raise ValueError(f"rate is {rate.rate}; it is a probability per step, from 0 to 1")
    return rate


def schedule(rate: Rate, target: Target) -> tuple[Fault, ...]:
    """Kills at random steps, ranks and instants: a pure function of rate, seed and job.

    No replica is hit twice, and as many as the job needs are never hit. Raises ValueError when the number of steps is unknown.
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
        faults.append(_strike(dice, living, step, dice.choice(_IN_A_STEP), target))
        if len(living) > target.min_replicas and dice.random() < _SECOND_DEATH:
            faults.append(_strike(dice, living, step, dice.choice(_IN_A_RECOVERY), target))
    return tuple(faults)


def _strike(dice: random.Random, living: list[int], step: int, point: FaultPoint, target: Target) -> Fault:
    replica = living.pop(dice.randrange(len(living)))
    rank = 0 if point in _LEADER_ONLY else dice.randrange(target.num_ranks)
    occurrence = 1
    if point in (FaultPoint.FORWARD, FaultPoint.BACKWARD):
        # Every member computes at least so many of a step, whoever else is left.
        occurrence = 1 + dice.randrange(max(1, target.num_microbatches // target.num_replicas))
    return Fault(replica=replica, rank=rank, point=point, step=step, occurrence=occurrence)


def faults_of(argument: str, target: Target) -> tuple[tuple[Fault, ...], str]:
    """The faults that `--chaos ARGUMENT` asks for, and the file that reproduces them. Raises ValueError.

    An argument that is no file and has a `=` is a rate.
    """
    path = Path(argument)
    if path.is_file():
        text = path.read_text()
        try:
            return parse(text, target), text
        except ValueError as error:
            raise ValueError(f"--chaos {argument}: {error}") from error
    if "=" not in argument:
        raise ValueError(f"--chaos {argument}: there is no such file; give one, or rate=NUMBER,seed=NUMBER")
    try:
        faults = schedule(parse_rate(argument), target)
    except ValueError as error:
        raise ValueError(f"--chaos {argument}: {error}") from error
    return faults, render(faults, f"--chaos {argument}; this file reproduces it")
