"""Command lines that say what they want: a mistyped word is answered with the one that was meant, all of them at once.

Standard library only: `--help` stays instant, and a rank judges Megatron's parser by the same words.
"""

from __future__ import annotations

import difflib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from typing import NoReturn

_REPLACED = dict.fromkeys(
    ("--recover-stall-timeout-s", "--recover-follow-timeout-s", "--recover-save-timeout-s"),
    "--recover-deadline-s, from which all waits follow; see `megatron-recover explain timeouts`",
)
"""Flags of older versions."""


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """The remedy for a word that is none of `known`: what has replaced it, the one that is like it, or else `otherwise`."""
    if word in _REPLACED:
        return f"it was replaced by {_REPLACED[word]}"
    named = {_telling(each): each for each in known}
    close = difflib.get_close_matches(_telling(word), named, n=1)
    return f"did you mean {named[close[0]]}?" if close else otherwise


def _telling(word: str) -> str:
    """Return what tells a flag from others: dashes and a prefix that many have make no two of them alike."""
    return word.lstrip("-").removeprefix("recover-")


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """What a command line gives for a flag, as `--flag VALUE` or `--flag=VALUE`: the last one counts, as for argparse."""
    found = None
    for word, after in zip(argv, [*argv[1:], None], strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else after
    return found


def unknown(argv: Sequence[str], parser: ArgumentParser, elsewhere: str = "") -> list[str]:
    """One line for each word up to a bare `--` that looks like a flag and is none of the parser's.

    `elsewhere`: where such a flag may belong that is like none of them.
    """
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    before = argv[: argv.index("--")] if "--" in argv else argv
    found = dict.fromkeys(word.partition("=")[0] for word in before if word.startswith("--"))
    return [
        f"{flag} is unknown; {did_you_mean(flag, known, f'{parser.prog} --help lists all{elsewhere}')}"
        for flag in found
        if flag not in known
    ]


class Parser(ArgumentParser):
    """As argparse's, but with one line a mistake and no usage, and without abbreviations: they would hide a mistype."""

    elsewhere = ""
    """See `unknown`."""

    def __init__(self, *, prog: str, description: str, usage: str | None = None, epilog: str | None = None) -> None:
        super().__init__(prog=prog, description=description, usage=usage, epilog=epilog, allow_abbrev=False)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Namespace | None = None) -> Namespace:  # type: ignore[override]
        """The arguments; ends the process with exit code 2 where they are wrong."""
        argv = sys.argv[1:] if args is None else list(args)
        found = unknown(argv, self, self.elsewhere)
        if found:  # before argparse, which would complain about what is missing for the mistype
            self.error("\n".join(found))
        return super().parse_args(argv, namespace)

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2 and one line for each line of `message`."""
        self.exit(2, "".join(f"{self.prog}: {line}\n" for line in message.removeprefix("argument ").splitlines()))
