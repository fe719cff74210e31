"""Answers to mistyped command lines: the word that was meant, and all unknown flags at once.

This module uses the standard library only, so that `--help` stays instant. A rank reports unknown
flags of Megatron's command line with the same texts (`megatron/launch/parsing.py`).
"""

from __future__ import annotations

import difflib
import itertools
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from typing import NoReturn

_REPLACED = dict.fromkeys(
    ("--recover-stall-timeout-s", "--recover-follow-timeout-s", "--recover-save-timeout-s"),
    "--recover-deadline-s, from which all waits follow; see `megatron-recover explain timeouts`",
)
"""Replacements of flags that older versions had."""


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return the remedy for an unknown word: replacement, similar known word, or `otherwise`."""
    if word in _REPLACED:
        return f"it was replaced by {_REPLACED[word]}"
    named = {_telling(each): each for each in known}
    close = difflib.get_close_matches(_telling(word), named, n=1)
    return f"did you mean {named[close[0]]}?" if close else otherwise


def _telling(word: str) -> str:
    """Return the part of a flag that distinguishes it: no leading dashes, no prefix `recover-`."""
    return word.lstrip("-").removeprefix("recover-")


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """Return the value that a command line gives for a flag, or None if it does not give any.

    Both `--flag VALUE` and `--flag=VALUE` count. The last one wins, as for argparse.
    """
    found = None
    for word, after in zip(argv, [*argv, None][1:], strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else after
    return found


def number_of(argv: Sequence[str], flag: str) -> int | None:
    """Return the value of a flag if it is a whole number without a sign, or None."""
    text = value_of(argv, flag) or ""
    return int(text) if text.isdecimal() else None


def unreadable(error: OSError) -> str:
    """Return the message about a file that the command line names and that cannot be read.

    An error that names no file, such as of a socket or a process, is returned as it is.
    """
    if error.filename is None:
        return str(error)
    return f"{error.filename} cannot be read ({error.strerror}); make it readable, or name another"


def unknown(argv: Sequence[str], parser: ArgumentParser, elsewhere: str = "") -> list[str]:
    """Return one line for each word that begins with `--` and is no flag of the parser, once each.

    Words after a bare `--` are ignored. `elsewhere` extends the remedy for a flag that is like no
    known one: the place where such a flag may belong.
    """
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    before = argv[: argv.index("--")] if "--" in argv else argv
    found = dict.fromkeys(word.partition("=")[0] for word in before if word.startswith("--"))
    return [
        f"{flag} is unknown; {did_you_mean(flag, known, f'{parser.prog} --help lists all{elsewhere}')}"
        for flag in found
        if flag not in known
    ]


def split(argv: Sequence[str], parser: ArgumentParser) -> tuple[list[str], list[str]]:
    """Return the parser's words, and the script with all that is behind it.

    The script is the first word that is neither a flag of the parser nor the value of one. A `--`
    in front of the script belongs to neither list, unless an unknown flag comes before the `--`.
    Whether an unknown flag has a value cannot be known. So an unknown flag is the last of the
    parser's words. If a `--` follows, the parser's words end before the `--` instead, and the
    second list begins with the `--`.
    """
    has_value = {option: action.nargs != 0 for action in parser._actions for option in action.option_strings}
    positions = iter(range(len(argv)))
    for position in positions:
        word = argv[position]
        if word == "--":
            return [*argv[:position]], [*argv[position + 1 :]]
        if not word.startswith("-"):
            return [*argv[:position]], [*argv[position:]]
        if not word.startswith("--") and len(word) > 2 and has_value.get(word[:2], False):
            continue  # a short flag and its value in one word, such as -t3
        if word.partition("=")[0] not in has_value:
            end = [*argv, "--"].index("--", position) if "--" in argv else position + 1
            return [*argv[:end]], [*argv[end:]]
        if has_value.get(word, False):
            next(positions, None)
    return [*argv], []


def taken_for_values(words: Sequence[str], parser: ArgumentParser) -> list[str]:
    """Return a line for each Python file that is the value of one of the parser's flags.

    It may be the script, behind a flag whose value was forgotten.
    """
    has_value = {option for action in parser._actions if action.nargs != 0 for option in action.option_strings}
    return [
        f"{value} is taken for the value of {flag}; if it is the script, write the value of {flag} in front of it"
        for flag, value in itertools.pairwise(words)
        if flag in has_value and value.endswith(".py")
    ]


def misplaced(words: Iterable[str], theirs: Iterable[str]) -> list[str]:
    """Return one line for each of the trainer's flags, `theirs`, in front of the script."""
    flags = {*theirs}
    return [
        f"{flag} is the trainer's; write it behind the script's name"
        for flag in dict.fromkeys(word.partition("=")[0] for word in words)
        if flag in flags
    ]


class Parser(ArgumentParser):
    """An argparse parser with one line per mistake, no usage text and no abbreviations.

    Abbreviations would hide a mistype.
    """

    elsewhere = ""
    """The argument `elsewhere` of `unknown`."""

    def __init__(self, *, prog: str, description: str, usage: str | None = None, epilog: str | None = None) -> None:
        super().__init__(prog=prog, description=description, usage=usage, epilog=epilog, allow_abbrev=False)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Namespace | None = None) -> Namespace:  # type: ignore[override]
        """Return the arguments; end the process with exit code 2 if they are wrong."""
        argv = sys.argv[1:] if args is None else list(args)
        found = unknown(argv, self, self.elsewhere)
        if found:  # before argparse, which would complain about what is missing for the mistype
            self.error("\n".join(found))
        return super().parse_args(argv, namespace)

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2, and print each line of `message`."""
        self.exit(2, "".join(f"{self.prog}: {line}\n" for line in message.removeprefix("argument ").splitlines()))
