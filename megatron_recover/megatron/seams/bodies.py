"""Bodies: which functions of Megatron somebody has read before relying on them.

Names, parameters and attributes (`seams`, `anchors`) do not show what a function does. So for each
function that is replaced or called, `patches/bodies.toml` has digests of the bodies that were read.
A Megatron with another body is refused, unless its user accepts it. A digest covers all tokens of a
function, its signature and decorators included, without comments, docstrings and layout. So it
changes with the code alone.
"""

from __future__ import annotations

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
_LAYOUT = frozenset({
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
})  # fmt: skip


def load(folder: Traversable) -> Mapping[str, tuple[str, ...]]:
    """Return the digests of the bodies that were read, by ``module:qualified.name``."""
    return msgspec.toml.decode((folder / FILE).read_text(), type=dict[str, tuple[str, ...]])


def relied_on(seams: Sequence[Seam], anchors: Anchors) -> dict[str, Callable[..., Any]]:
    """Return the functions of Megatron that are replaced or called, by ``module:qualified.name``.

    These are the targets of seams, the functions among the anchored names, the methods among the
    anchored attributes, and the functions with anchored parameters. A name that is missing or no
    function is left out. Each function is named by the place that defines it. Imports the modules
    concerned.
    """
    found: dict[str, Callable[..., Any]] = {}
    for place in _places(seams, anchors):
        module, _, path = place.partition(":")
        target: Any = importlib.import_module(module)
        for name in path.split("."):
            target = inspect.getattr_static(target, name, None) if inspect.isclass(target) else getattr(target, name, None)
        target = inspect.unwrap(getattr(target, "__func__", target))
        if inspect.isfunction(target):
            found[f"{target.__module__}:{target.__qualname__}"] = target
    return dict(sorted(found.items()))


def digest(function: Callable[..., Any]) -> str:
    """Return a digest of a function's body (16 hex digits). Raises OSError if it has no source."""
    source = textwrap.dedent(inspect.getsource(function))
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    words = [
        each.string for number, each in enumerate(tokens) if each.type not in _LAYOUT and not _is_docstring(tokens, number)
    ]
    return hashlib.blake2b("\0".join(words).encode(), digest_size=8).hexdigest()


def unknown(known: Mapping[str, tuple[str, ...]], functions: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Return one line for each of `functions` whose body nobody has read: place, file, digests."""
    found = []
    for place, function in functions.items():
        try:
            body = digest(function)
        except OSError:
            body = "without source"
        if body not in known.get(place, ()):
            code = function.__code__
            read = ", ".join(known.get(place, ())) or "none"
            found.append(f"{place} ({code.co_filename}:{code.co_firstlineno}) has the body {body}; read were {read}")
    return found


def _places(seams: Sequence[Seam], anchors: Anchors) -> Iterator[str]:
    yield from (f"{seam.module}:{seam.target}" for seam in seams)
    yield from (f"{module}:{name}" for module, names in anchors.names.items() for name in names)
    yield from (f"{place}.{name}" for place, names in anchors.attributes.items() for name in names)
    yield from anchors.parameters


def _is_docstring(tokens: Sequence[tokenize.TokenInfo], number: int) -> bool:
    """Return whether the token is a string that is a statement of its own, and so has no effect."""
    if tokens[number].type != tokenize.STRING:
        return False
    before = next((each for each in reversed(tokens[:number]) if each.type not in (tokenize.COMMENT, tokenize.NL)), None)
    after = next((each for each in tokens[number + 1 :] if each.type not in (tokenize.COMMENT, tokenize.NL)), None)
    begins = before is not None and before.type in (tokenize.INDENT, tokenize.NEWLINE, tokenize.DEDENT)
    return begins and after is not None and after.type == tokenize.NEWLINE
