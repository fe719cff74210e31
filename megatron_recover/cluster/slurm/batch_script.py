"""Read a batch script as far as its judge needs: `#SBATCH` lines, and the commands with srun.

This is no shell. Loops are read once, variables are replaced only where the script assigns them a
plain value, and nothing is ever executed.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence

import msgspec

from megatron_recover.config import KEY_VARIABLE

_LONG = {
    "-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-k": "--no-kill", "-a": "--array", "-d": "--dependency",
    "-o": "--output", "-W": "--wait", "-K": "--kill-on-bad-exit", "-w": "--nodelist", "-p": "--partition", "-t": "--time",
    "-J": "--job-name", "-A": "--account", "-e": "--error", "-i": "--input", "-D": "--chdir", "-G": "--gpus",
    "-C": "--constraint", "-q": "--qos", "-m": "--distribution", "-r": "--relative", "-x": "--exclude",
}  # fmt: skip
"""Short options that matter, or that have a value, with their long names."""
_VALUELESS = frozenset({
    "--no-kill", "--overlap", "--exclusive", "--exact", "--whole", "--unbuffered", "--label", "--verbose", "--quiet", "--pty",
    "--multi-prog", "--preserve-env", "--disable-status", "--kill-on-bad-exit", "--oversubscribe", "--contiguous",
    "--spread-job", "--use-min-nodes", "--reboot", "--container-mount-home", "--no-container-mount-home",
    "--container-remap-root", "--no-container-remap-root", "--container-writable", "--container-readonly",
    "--container-entrypoint", "--no-container-entrypoint", "--requeue", "--no-requeue",
    "-u", "-l", "-v", "-Q", "-E", "-X", "-s",
})  # fmt: skip
"""Options whose value, if any, is joined to them by `=`."""
_KEYWORDS = frozenset({"do", "then", "else", "if", "elif", "while", "until", "!", "{", "time", "exec"})
_STARTERS = frozenset({"env", "nohup", "command", "timeout", "stdbuf", "nice", "ionice", "setsid"})
"""Programs that start the command behind their own words."""
_SEPARATORS = frozenset({";", "&", "&&", "||", "|", "|&", "(", ")", ";;", "&>", "<(", ">("})
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+(?:-\w+\s+)*|local\s+)?(\w+)=(?:\((.*)\)|(\S.*)?)", re.DOTALL)
_OPENS_ARRAY = re.compile(r"\s*\w+\+?=\([^)]*$")
_LOOP = re.compile(r"(?:^|[;&])\s*(?:while|until)\s")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})")


class Option(msgspec.Struct, frozen=True):
    """An option by its long name."""

    line: int
    name: str
    value: str = ""
    """Text behind `=` or in the next word; empty without a value."""


class Srun(msgspec.Struct, frozen=True):
    """A command that begins with srun."""

    line: int
    options: tuple[Option, ...]
    command: tuple[str, ...]
    """The command that the tasks run, with known variables replaced."""
    in_background: bool

    def value(self, name: str) -> str | None:
        """Return the last value of an option; None if it is not given."""
        return next((each.value for each in reversed(self.options) if each.name == name), None)


class BatchScript(msgspec.Struct, frozen=True):
    """The facts about a script that the judge needs."""

    directives: tuple[Option, ...]
    last_directive: int
    """Line of the last `#SBATCH`; 1 if there is none."""
    sruns: tuple[Srun, ...]
    trapped: frozenset[str]
    """Names of signals with a trap, without SIG."""
    variables: frozenset[str]
    """Names of all variables that the script assigns."""
    num_awaited: int
    """Number of sruns in front of the last `wait`, or of the last loop that may wait for them."""
    names_key: bool
    """True if a command names the variable that has the key of a job."""
    has_interpreter: bool
    """True if the first line names an interpreter, without which sbatch refuses a script."""

    def directive(self, name: str) -> Option | None:
        """Return the last `#SBATCH` line with this option; None if there is none."""
        return next((each for each in reversed(self.directives) if each.name == name), None)


def read(text: str) -> BatchScript:
    """Return what a script says. A shell that is not understood yields fewer commands, no error."""
    text = _submitted(text)
    directives: list[Option] = []
    last = 1
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#SBATCH"):
            directives.extend(_options(number, _words(line.removeprefix("#SBATCH").partition(" #")[0]))[0])
            last = number
        elif line.strip() and not line.startswith("#"):
            break  # Slurm reads no further either
    variables: dict[str, list[str]] = {}
    sruns: list[Srun] = []
    trapped: set[str] = set()
    num_awaited, names_key = 0, False
    for number, code in _commands(text):
        names_key = names_key or KEY_VARIABLE in code
        if _LOOP.search(code):  # before its sruns: a loop that starts agents does not wait for them
            num_awaited = len(sruns)
        if (assigned := _ASSIGNMENT.fullmatch(code.strip())) is not None:
            variables[assigned[1]] = _words(assigned[2] if assigned[2] is not None else assigned[3] or "")
        for words, separator in _segments(code):
            words = _started(words)
            if words[0] == "trap":
                trapped.update(word.removeprefix("SIG") for word in words[2:])
            elif words[0] == "wait":
                num_awaited = len(sruns)
            elif words[0] == "srun":
                options, command = _options(number, _replaced(words[1:], variables))
                sruns.append(Srun(number, tuple(options), tuple(command), separator == "&"))
    return BatchScript(
        tuple(directives), last, tuple(sruns), frozenset(trapped), frozenset(variables), num_awaited, names_key,
        text.lstrip("\n").startswith("#!"),
    )  # fmt: skip


def _submitted(text: str) -> str:
    """Return a script that `text` gives to sbatch in a here-document, on its lines; else `text`."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        opened = _HEREDOC.search(line) if "sbatch" in line and not line.startswith("#") else None
        if opened is not None:
            end = next((place for place in range(number + 1, len(lines)) if lines[place].strip() == opened[1]), len(lines))
            inside = [each.replace("\\$", "$") for each in lines[number + 1 : end]]
            return "\n".join([*[""] * (number + 1), *inside])
    return text


def _words(code: str) -> list[str]:
    try:
        return shlex.split(code)
    except ValueError:  # a quote is open: an apostrophe in a comment behind an option
        return code.split()


def _options(line: int, words: Sequence[str]) -> tuple[list[Option], list[str]]:
    """Return the options at the beginning of `words`, and the words behind them."""
    found: list[Option] = []
    position = 0
    while position < len(words):
        word = words[position]
        if _VARIABLE.fullmatch(word) and "[" in word:  # an array that is not known: mostly further options
            position += 1
            continue
        if not word.startswith("-") or word in ("-", "--"):
            break
        position += 1
        name, equals, value = word.partition("=")
        if not word.startswith("--") and len(word) > 2:  # -N4
            name, equals, value = word[:2], "=", word[2:].removeprefix("=")
        name = _LONG.get(name, name)
        if not equals and name not in _VALUELESS and position < len(words):
            value = words[position]
            position += 1
        found.append(Option(line, name, value))
    return found, [*words[position:]]


def _commands(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, code) of each command: continued lines, quotes and arrays are joined."""
    begun, code, quote, until = 0, "", "", None
    for number, line in enumerate(text.splitlines(), start=1):
        if until is not None:  # inside a here-document
            until = None if line.strip() == until else until
            continue
        part, quote = _without_comment(line, quote)
        begun = begun or number
        if quote or part.endswith("\\"):
            code += part.removesuffix("\\") if not quote else part + "\n"
            continue
        code += part
        if _OPENS_ARRAY.match(code):
            code += " "
            continue
        if code.strip():
            yield begun, code
        heredoc = _HEREDOC.search(code)
        until = heredoc[1] if heredoc is not None else None
        begun, code = 0, ""


def _without_comment(line: str, quote: str) -> tuple[str, str]:
    """Return a line without its comment, and the quote that is open at its end.

    `quote`: the one that is open at its beginning; empty without one.
    """
    escaped = False
    for position, character in enumerate(line):
        if escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (position == 0 or line[position - 1].isspace()):
            return line[:position], quote
    return line, quote


def _segments(code: str) -> Iterator[tuple[list[str], str]]:
    """Yield the simple commands of a line, each with the separator behind it."""
    lexer = shlex.shlex(code, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        for word in [*lexer, ";"]:
            if word not in _SEPARATORS:
                words.append(word)
                continue
            while words and (words[0] in _KEYWORDS or re.fullmatch(r"\w+=.*", words[0], re.DOTALL)):
                words = words[1:]
            if words:
                yield words, word
            words = []
    except ValueError:  # no shell that shlex understands
        return


def _started(words: list[str]) -> list[str]:
    """Return a command from `srun` on if that is what it starts, by its path or another program."""
    for position, word in enumerate(words):
        if os.path.basename(word) == "srun":
            return ["srun", *words[position + 1 :]]
        if os.path.basename(words[0]) not in _STARTERS:
            break
    return words


def _replaced(words: Sequence[str], variables: dict[str, list[str]]) -> list[str]:
    """Return words with each word that is a known variable replaced by its value."""
    found: list[str] = []
    for word in words:
        name = _VARIABLE.fullmatch(word)
        known = variables.get(name[1] or name[2]) if name is not None else None
        found.extend([word] if known is None else known)
    return found
