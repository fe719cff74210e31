"""Bodies: which functions of Megatron somebody has read before relying on them.

Names, parameters and attributes (`seams`, `anchors`) do not show what a function does. So for each
function that is replaced or called, `patches/bodies.toml` has digests of the bodies that were read.
A Megatron with another body is refused, unless its user accepts it. A digest covers all tokens of a
function, its signature and decorators included, by statement and depth of nesting, without
comments, docstrings and layout. So it changes with the code alone.

Beside each digest the file has a mark of 24 bits for each statement. By the marks a refusal names
the statements of the user's function that were not read, in the user's own words, and how many are
missing. The repository has no text of Megatron.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import importlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any

import msgspec

from megatron_recover.megatron.seams.anchors import Anchors
from megatron_recover.megatron.seams.seams import Seam

FILE = "bodies.toml"
Known = Mapping[str, Mapping[str, str]]
"""For each ``module:qualified.name`` the digests of the bodies that were read, each with the marks
of the body's statements, one behind the other."""
_MARK_CHARACTERS = 4
_SHOWN_DIFFERENCES = 6
_SHOWN_CHARACTERS = 100
_COMMENTS = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER})


class Body(msgspec.Struct, frozen=True):
    """A function's code, by statement; the first statements are its decorators and its header."""

    digest: str
    """16 hex digits."""
    marks: tuple[str, ...]
    """For each statement four characters, which follow from its tokens and its depth."""
    lines: tuple[tuple[int, str], ...]
    """For each statement its first line in the file, and its text in one line."""


def load(folder: Traversable) -> Known:
    """Return all bodies that were read."""
    return msgspec.toml.decode((folder / FILE).read_text(), type=dict[str, dict[str, str]])


def relied_on(seams: Sequence[Seam], anchors: Anchors) -> dict[str, Callable[..., Any]]:
    """Return the functions of Megatron that are replaced or called, by ``module:qualified.name``.

    These are the targets of seams, the functions among the anchored names, the methods among the
    anchored attributes, and the functions with anchored parameters. A name that is missing or no
    function is left out, and so is what Megatron has imported from elsewhere. Each function is
    named by the place that defines it. Imports the modules concerned.
    """
    found: dict[str, Callable[..., Any]] = {}
    for place in _places(seams, anchors):
        module, _, path = place.partition(":")
        target: Any = importlib.import_module(module)
        for name in path.split("."):
            target = inspect.getattr_static(target, name, None) if inspect.isclass(target) else getattr(target, name, None)
        target = inspect.unwrap(getattr(target, "__func__", target))
        if inspect.isfunction(target) and target.__module__.partition(".")[0] == "megatron":
            found[f"{target.__module__}:{target.__qualname__}"] = target
    return dict(sorted(found.items()))


def read(function: Callable[..., Any]) -> Body:
    """Return a function's body. Raises OSError if it has no source."""
    source, first = inspect.getsourcelines(function)
    text = textwrap.dedent("".join(source))
    words, lines = [], []
    for statement, depth in _statements(text):
        words.append("\0".join([str(depth), *(each.string for each in statement)]))
        begin, end = statement[0].start[0], statement[-1].end[0]
        lines.append((first + begin - 1, " ".join(" ".join(text.splitlines()[begin - 1 : end]).split())))
    return Body(_hash("\n".join(words), 8).hex(), tuple(map(_mark, words)), tuple(lines))


def unknown(known: Known, functions: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Return a text for each of `functions` whose body nobody has read.

    Its first line has place, file and digests. The further lines, indented, are those of
    `_difference`, if the function has a source.
    """
    found = []
    for place, function in functions.items():
        bodies, code = known.get(place, {}), function.__code__
        try:
            body = read(function)
        except OSError:
            body = Body("without source", (), ())
        if body.digest not in bodies:
            were = ", ".join(bodies) or "none"
            head = f"{place} ({code.co_filename}:{code.co_firstlineno}) has the body {body.digest}; read were {were}"
            found.append("\n".join([head, *(f"  {line}" for line in (_difference(bodies, body) if body.lines else ()))]))
    return found


def _difference(known: Mapping[str, str], body: Body) -> list[str]:
    """Return lines about the differences of `body` to the most similar known body, if any.

    At most `_SHOWN_DIFFERENCES` are shown; a last line counts the others.
    """
    others = [
        tuple(marks[at : at + _MARK_CHARACTERS] for at in range(0, len(marks), _MARK_CHARACTERS)) for marks in known.values()
    ]  # fmt: skip
    matchers = [difflib.SequenceMatcher(None, marks, body.marks, autojunk=False) for marks in others]
    if not matchers:
        return []
    found = []
    for kind, begin, end, here, until in max(matchers, key=lambda each: each.ratio()).get_opcodes():
        if kind == "equal":
            continue
        shown = [f"line {line} was not read: {_shortened(text)}" for line, text in body.lines[here:until]]
        if missing := end - begin:
            place = f"in place of line {body.lines[here][0]}" if shown else f"behind line {body.lines[max(here, 1) - 1][0]}"
            shown.append(f"{place} {_were(missing)} read that {'is' if missing == 1 else 'are'} missing here")
        found += shown
    more = len(found) - _SHOWN_DIFFERENCES
    return found if more <= 0 else [*found[:_SHOWN_DIFFERENCES], f"and {more} more differences"]


def _were(number: int) -> str:
    return "one statement was" if number == 1 else f"{number} statements were"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..."


def _statements(text: str) -> Iterator[tuple[list[tokenize.TokenInfo], int]]:
    """Yield the tokens of each statement, or header of a block, with its depth of nesting.

    Comments are left out, and so are statements that are nothing but strings.
    """
    depth, tokens = 0, list[tokenize.TokenInfo]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.INDENT:
            depth += 1
        elif token.type == tokenize.DEDENT:
            depth -= 1
        elif token.type == tokenize.NEWLINE:
            if any(each.type != tokenize.STRING for each in tokens):
                yield tokens, depth
            tokens = []
        elif token.type not in _COMMENTS:
            tokens.append(token)


def _mark(words: str) -> str:
    return base64.b64encode(_hash(words, 3)).decode()


def _hash(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def _places(seams: Sequence[Seam], anchors: Anchors) -> Iterator[str]:
    yield from (f"{seam.module}:{seam.target}" for seam in seams)
    yield from (f"{module}:{name}" for module, names in anchors.names.items() for name in names)
    yield from (f"{place}.{name}" for place, names in anchors.attributes.items() for name in names)
    yield from anchors.parameters
