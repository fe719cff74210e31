"""Interpreter of transcripts: text files of commands to a small job, and of what each printed.

Each command is a line; below it are `----`, the output, and a blank line. Lines between commands
that begin with `#` are comments. The methods `do_...` of `tests/core/transcript_job.py` are the
commands. CONTRIBUTING.md says how to write a transcript.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tests.core.transcript_job import COORDINATOR, Ids, Job, Mistake

COMMANDS: Mapping[str, Callable[..., None]] = {
    name.removeprefix("do_").replace("_", "-"): method for name, method in vars(Job).items() if name.startswith("do_")
}


def _parse_ids(text: str) -> Ids:
    return tuple(COORDINATOR if item == "coordinator" else int(item) for item in text.split(","))


PARSERS: Mapping[str, Callable[[str], Any]] = {"int": int, "ReplicaId": int, "Ids": _parse_ids, "str": str}
"""How an argument is read, by the annotation of its parameter."""


def list_commands() -> str:
    """Return a line for each command: its arguments, and what it does."""
    lines = []
    for name, method in COMMANDS.items():
        words = [name]
        for parameter in list(inspect.signature(method).parameters.values())[1:]:
            key = parameter.name.rstrip("_").replace("_", "-")
            word = f"{key}=..." if parameter.kind is parameter.KEYWORD_ONLY else key.upper()
            words.append(word if parameter.default is parameter.empty else f"[{word}]")
        lines.append(f"  {' '.join(words)}\n      {(method.__doc__ or '').splitlines()[0]}")
    return "\n".join(lines)


def carry_out(job: Job, line: str) -> list[str]:
    """Carry out a command and return its output. Raise Mistake if it is mistyped or impossible."""
    name, *words = line.split()
    method = COMMANDS.get(name)
    if method is None:
        raise Mistake(f"there is no command {name!r}")
    signature = inspect.signature(method)
    pairs = [word.split("=", 1) for word in words if "=" in word]
    named = {key.replace("-", "_") + "_" * (key in ("from", "for")): value for key, value in pairs}
    try:
        bound = signature.bind(job, *(word for word in words if "=" not in word), **named)
        given = {key: text for key, text in bound.arguments.items() if key != "self"}
        arguments = {key: PARSERS[signature.parameters[key].annotation](text) for key, text in given.items()}
    except (TypeError, ValueError) as error:
        raise Mistake(f"the arguments of {name!r} are wrong: {error}") from error
    if not job.num_replicas and name != "job":
        raise Mistake("a transcript begins with the command 'job'")
    job.lines, before = [], len(job.sent)
    bound.arguments.update(arguments)
    method(*bound.args, **bound.kwargs)
    return job.lines or [f"(messages sent: {len(job.sent) - before})"]


def rewrite(text: str, name: str) -> str:
    """Return a transcript with the output that its commands have now.

    `name`: the file, for messages. Raise Mistake with the line. Note the line in any other error.
    """
    job, after, old = Job(), list[str](), text.splitlines()
    number = 0
    while number < len(old):
        line = old[number].rstrip()
        number += 1
        after.append(line)
        if not line or line.startswith("#"):
            continue
        try:
            after += ["----", *carry_out(job, line), ""]
        except Mistake as mistake:
            raise Mistake(f"{name}:{number}: {line}: {mistake}; the commands are:\n{list_commands()}") from mistake
        except Exception as error:  # of a machine, or a violation: say where
            error.add_note(f"{name}:{number}: {line}")
            raise
        if old[number : number + 1] == ["----"]:
            while number < len(old) and old[number].strip():
                number += 1
        if number < len(old) and not old[number].strip():
            number += 1  # `after` has a blank line already
    return "\n".join(after).rstrip() + "\n"
