"""`megatron-recover explain WHAT`: prints what holds on this machine or in a run, and why.

`timeouts`: every wait of a run, and the order of the waits. `packages`: what is used, and found.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing

from megatron_recover import packages
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import DEFAULT_S, ORDER, Deadlines, figure
from megatron_recover.flags import Parser

_WIDTH = 110
_EXPLAINED = ("timeouts", "packages")
_USES = {
    "train": "run, plan, data, demo, simulate --processes",
    "plot": "the loss plot of run and report",
    "tensorboard": "Megatron's --tensorboard-dir",
    "metrics": "--metrics-port and --metrics-textfile of run",
}
"""Use of the packages of each extra; a test compares with `packages.EXTRAS`."""


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


def used_packages() -> str:
    """Return a table of the packages: the range, the version that is found, and its use."""
    rows = [("package", "range", "found", "for")]
    of_extras = [(requirements, _USES[extra]) for extra, requirements in packages.EXTRAS.items()]
    for requirements, use in [(packages.REQUIRED, "every verb"), *of_extras]:
        for requirement in requirements:
            name = packages.name_of(requirement)
            found = packages.version(name)
            fits = found is not None and packages.suffices(found, requirement)
            state = "none" if found is None else f"{found or 'no version'}{'' if fits else ', not in the range'}"
            rows.append((name, requirement.removeprefix(name), state, use))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)


def main(argv: list[str]) -> int:
    """Print the wanted explanation; `packages` exits with 2 if any are lacking for training."""
    parser = Parser(
        prog="megatron-recover explain",
        description="timeouts: print who waits for what in a run, how long, who ends the wait, and why in that order. "
        "packages: print which packages are used and which versions are found; exit code 2 if some are lacking for run.",
    )
    if not argv:
        parser.error(f"explain what? There is: {', '.join(_EXPLAINED)}")
    parser.add_argument("what", choices=_EXPLAINED, help="what to explain")
    parser.add_argument(
        "--recover-deadline-s", type=float, default=DEFAULT_S, metavar="S", help=f"as for `run` (default: {DEFAULT_S:g})"
    )
    arguments = parser.parse_args(argv)
    if arguments.what == "packages":
        print(used_packages(), end="", flush=True)
        if lacking := packages.mistakes(packages.TRAINING):
            parser.error("\n".join(lacking))
        return ExitCode.OK
    try:
        deadlines = Deadlines.of(arguments.recover_deadline_s)
    except ValueError as error:
        parser.error(str(error))
    print(timeouts(deadlines), end="")
    return ExitCode.OK
