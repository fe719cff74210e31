"""Scenario files of `megatron-recover simulate`, judged before anything is simulated.

`sim/timed/models.py` has the tables and the meaning of each key. This module has the contradictions
between them.
"""

from __future__ import annotations

import contextlib
import math
import typing
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import msgspec

from megatron_recover import toml_file
from megatron_recover.faults import Fault, FaultKind, FaultPoint, never_passed
from megatron_recover.flags import did_you_mean
from megatron_recover.sim.timed.models import HEALING, FailuresTable, JobTable, Scenario, Table, Timing

SIMULATED = (
    FaultPoint.FORWARD, FaultPoint.BACKWARD, FaultPoint.RECOMPUTE, FaultPoint.BEFORE_REDUCE, FaultPoint.REDUCE,
    FaultPoint.SECOND_REDUCE, FaultPoint.OPTIMIZER,
)  # fmt: skip
"""Fault points that the simulator has."""

Place = tuple[str, str]
"""Table and key of a mistake; the table is empty for a key before all tables."""


def parse(text: str) -> Scenario:
    """Return the scenario of a file's text.

    Raise ValueError with one line a mistake: its place in the file, the mistake, and the remedy.
    """
    content = toml_file.read(text)
    found = [*_top(text, content)]
    if not found:
        scenario = msgspec.convert(content, Scenario)
        for (table, key), mistake in _contradictions(scenario):
            start = toml_file.line_of_table(text, table) if table else 0
            found.append(f"line {toml_file.line_of_key(text, key, start)}: {mistake}")
    if found:
        raise ValueError("\n".join(found))
    return scenario


def load(path: Path) -> Scenario:
    """Return the scenario in a file. Raise ValueError with the file's name in each line."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give a TOML file, e.g. one of scenarios/") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from error
    except ValueError as error:
        raise ValueError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error


def _tables() -> dict[str, type[Table]]:
    """Return the tables that a scenario has at most once, by name."""
    found = {}
    for field in msgspec.structs.fields(Scenario):
        for kind in (field.type, *typing.get_args(field.type)):
            if isinstance(kind, type) and issubclass(kind, Table):
                found[field.name] = kind
    return found


def _top(text: str, content: dict[str, object]) -> Iterator[str]:
    """Yield the mistakes that a key or table has by itself, unknown and missing ones included.

    Numbers of a fault that `[job]` does not have are among them.
    """
    tables = _tables()
    fields = {field.name: field for field in msgspec.structs.fields(Scenario)}
    plain = {}
    for key, value in content.items():
        line = toml_file.line_of_key(text, key, 0)
        if key in tables:
            if isinstance(value, dict):
                yield from toml_file.located(text, value, line, toml_file.mistakes(value, tables[key]))
            else:
                yield f"line {line}: '{key}' is a table; write [{key}] and its keys below"
        elif key == "fault":
            yield from _faults(text, value, _limits(content.get("job")))
        elif key not in fields:
            yield f"line {line}: unknown key '{key}'; {did_you_mean(key, fields, f'known are {", ".join(fields)}')}"
        else:
            plain[key] = value
    for key, mistake in toml_file.mistakes(plain, Scenario):
        if key in plain:
            yield f"line {toml_file.line_of_key(text, key, 0)}: {mistake}"
        elif key not in content:
            yield f"line 1: [{key}] is missing" if key in tables else f"line 1: {mistake}"


def _faults(text: str, tables: object, limits: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        yield f"line {toml_file.line_of_key(text, 'fault', 0)}: write each fault as a [[fault]] table"
        return
    for index, table in enumerate(tables):
        start = toml_file.line_of_table(text, "fault", index)
        yield from toml_file.located(text, table, start, _wrong_fault(table, limits))


def _limits(table: object) -> dict[str, tuple[float, float]]:
    """Return the limits of each number of a fault (least, greatest), as far as `[job]` is right."""
    limits: dict[str, tuple[float, float]] = {"occurrence": (1, math.inf)}
    with contextlib.suppress(msgspec.ValidationError):
        job = msgspec.convert(table, JobTable)
        limits |= {
            "replica": (0, job.replicas - 1), "rank": (0, job.ranks - 1), "step": (0, job.steps - 1),
            "bucket": (0, job.held_stages * job.buckets),
        }  # fmt: skip
    return limits


def _wrong_fault(table: Mapping[str, object], limits: Mapping[str, tuple[float, float]]) -> Iterator[toml_file.Mistake]:
    names = [point.value for point in SIMULATED]
    unknown = {}
    if table.get("point", names[0]) not in names:
        unknown["point"] = f"{table['point']} is not simulated; points are {', '.join(names)}"
    if table.get("kind", FaultKind.KILL.value) != FaultKind.KILL.value:
        unknown["kind"] = f"kind {table['kind']} is not simulated; it can be left out"
    if "microbatch" in table:
        unknown["microbatch"] = "microbatch is not simulated; give the occurrence"
    for key in ("until", "factor", "steps"):
        if key in table:
            unknown[key] = f"{key} is of a kind that is not simulated; leave it out"
    yield from unknown.items()
    for key, mistake in chain(toml_file.mistakes(table, Fault, limits), () if "point" in unknown else never_passed(table)):
        if key not in unknown:
            yield key, mistake


def _contradictions(scenario: Scenario) -> Iterator[tuple[Place, str]]:
    """Yield the contradictions between keys that are right by themselves."""
    job, failures = scenario.job, scenario.failures
    if job.ranks % job.stages and job.ranks > 1:
        yield ("job", "stages"), f"stages is {job.stages}; it must divide ranks, which is {job.ranks}"
    if job.microbatches < job.replicas:
        yield (
            ("job", "microbatches"),
            f"microbatches is {job.microbatches}; it must be at least replicas, which is {job.replicas}",
        )
    if scenario.repair is not None and job.gpus % scenario.repair.node_gpus:
        yield (
            ("repair", "node_gpus"),
            f"node_gpus is {scenario.repair.node_gpus}; it must divide ranks x gpus_a_rank of [job], which is {job.gpus}",
        )
    if failures.until_replicas > job.replicas:
        yield (
            ("failures", "until_replicas"),
            f"until_replicas is {failures.until_replicas}; it must be at most replicas, which is {job.replicas}",
        )
    if failures.every_steps is not None and failures.per_gpu_hour is not None:
        yield ("failures", "per_gpu_hour"), "every_steps and per_gpu_hour are both given; leave one out"
    rate = "every_steps" if failures.every_steps is not None else "per_gpu_hour" if failures.per_gpu_hour is not None else ""
    if rate and scenario.fault:
        yield ("failures", rate), f"{rate} and [[fault]] are both given; leave one out"
    parts = Timing.of(scenario).entering_s(job.replicas)
    entering_s = sum(parts.values())
    if "recover" in scenario.policies and entering_s >= failures.follow_s:
        slowest = max(parts, key=lambda key: parts[key])
        shortened = failures.follow_s < FailuresTable().follow_s
        yield (
            ("failures", "follow_s") if shortened else ("network", slowest),
            f"{slowest} is {getattr(scenario.network, slowest):g}: with {job.replicas} replicas it takes {entering_s:.3g} s to "
            f"begin at all, and follow_s of [failures] is {failures.follow_s:g}; look at the units of both",
        )
    needed = {
        "checkpoint-restart": "checkpoint",
        "checkpoint-restart-equal": "checkpoint",
        "shrink": "drop",
        "drop-step": "drop",
    } | dict.fromkeys(HEALING, "repair")
    for policy in scenario.policies:
        if policy in needed and getattr(scenario, needed[policy]) is None:
            yield ("", "policies"), f"policies has {policy}, which needs a table [{needed[policy]}]"
    if len(set(scenario.policies)) < len(scenario.policies):
        yield ("", "policies"), "policies has one twice"
    if scenario.fault and not {*scenario.policies} <= {"recover", *HEALING}:
        yield (
            ("", "policies"),
            'with [[fault]] only the policy "recover" and its variants can be simulated; the others take a rate',
        )
