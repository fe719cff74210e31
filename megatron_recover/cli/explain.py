"""`megatron-recover explain timeouts`: prints every wait of a run and the order of the waits."""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing

from megatron_recover.core.values import ExitCode
from megatron_recover.deadlines import DEFAULT_S, ORDER, Deadlines, figure
from megatron_recover.flags import Parser

_WIDTH = 110
_EXPLAINED = ("timeouts",)


def meanings() -> dict[str, str]:
    """Return the docstring of each field of `Deadlines`, in the order of the fields."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(Deadlines))).body
    body = typing.cast(ast.ClassDef, definition).body
    return {
        typing.cast(ast.Name, field.target).id: " ".join(inspect.cleandoc(ast.literal_eval(text.value)).split())
        for field, text in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def timeouts(deadlines: Deadlines) -> str:
    """Return the text that explains all waits, the shortest first, and their order."""
    lines = [
        f"Every wait is fixed or follows from --recover-deadline-s {deadlines.deadline_s:g}. In seconds, the shortest first:",
        "",
    ]
    told = meanings()
    for name in sorted(told, key=lambda each: getattr(deadlines, each)):
        lines.append(f"{name:<14} {figure(getattr(deadlines, name)):>8}  ")
        first, *others = textwrap.wrap(told[name], _WIDTH - 25)
        lines[-1] += first
        lines += [f"{'':<25}{other}" for other in others]
    lines += [
        "",
        "Why one wait is shorter than another: where it were not, the outer one would end first and blame the wrong party.",
        "",
    ]
    for inner, outer, why in ORDER:
        lines.append(f"{inner} < {outer}: {why}")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """Print the wanted explanation."""
    parser = Parser(
        prog="megatron-recover explain",
        description="Print who waits for what in a run, how long, who ends the wait, and why in that order.",
    )
    if not argv:
        parser.error(f"explain what? There is: {', '.join(_EXPLAINED)}")
    parser.add_argument("what", choices=_EXPLAINED, help="what to explain")
    parser.add_argument(
        "--recover-deadline-s", type=float, default=DEFAULT_S, metavar="S", help=f"as for `run` (default: {DEFAULT_S:g})"
    )
    arguments = parser.parse_args(argv)
    try:
        deadlines = Deadlines.of(arguments.recover_deadline_s)
    except ValueError as error:
        parser.error(str(error))
    print(timeouts(deadlines), end="")
    return ExitCode.OK
