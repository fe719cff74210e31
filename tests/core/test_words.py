"""No docstring of the package begins with a fragment: it says what the thing is, or what a function does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_recover

PACKAGE = Path(megatron_recover.__file__).parent
FRAGMENT = re.compile(r"(Of|What|How|Who|Whom|Whose|Where|Why|When|Whether|Which|From|By|With|To|So|As)\b")


def fragments(source: str) -> Iterator[int]:
    """Yield the line of each docstring, of attributes too, that begins with a fragment."""
    for node in ast.walk(ast.parse(source)):
        for each in getattr(node, "body", None) or () if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            match each:
                case ast.Expr(value=ast.Constant(value=str(text))) if FRAGMENT.match(text.lstrip()):
                    yield each.lineno


@pytest.mark.parametrize(
    "source", ['"""How it is done."""', 'class A:\n    x: int\n    """Of all."""', 'def f():\n    """Whether."""\n    return 1']
)
def test_a_fragment_is_found(source: str) -> None:
    assert len(list(fragments(source))) == 1


def test_no_docstring_begins_with_a_fragment() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}" for path in sorted(PACKAGE.rglob("*.py")) for line in fragments(path.read_text())
    ]
    assert found == []
